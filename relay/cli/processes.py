"""``relay spawn``, ``release``, ``ps`` and ``logs``: processes of agents, started by the relay."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click
from click.core import ParameterSource

from relay.base.errors import ConfigError, NotFound
from relay.base.home import LEDGER, LOG, Home, lock_holder
from relay.base.names import ORCHESTRATOR, check_agent_name
from relay.cli.common import (
    ago,
    command,
    complete_agents,
    not_empty,
    not_running_text,
    open_home,
    print_rows,
    root_of,
    sanitize,
    with_iso_times,
)
from relay.cli.request import control_options, print_answer, request, require_relay
from relay.cli.tables import wide_option
from relay.views.agents import process_facts
from relay.views.names import agent_not_found

POLL_S = 0.2
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
RESTARTS = ("never", "on-failure", "always")


@click.command(
    epilog="""\b
Examples:
  relay spawn reviewer --cli claude --prompt "Review what alice sends you."
  relay spawn builder --cli sh --prompt "make -C . watch" --cwd ~/project --restart on-failure
  relay spawn bot --cli python --prompt - --env TOKEN=secret < bot.py""",
)
@click.argument("name")
@click.option("--cli", "program", required=True, help="One of spawn.clis in config.json.")
@click.option("--prompt", default="", help="Initial prompt; - reads standard input.")
@click.option(
    "--cwd", metavar="DIR", callback=not_empty, help="Working directory [the current one]."
)
@click.option(
    "--env", multiple=True, metavar="KEY=VALUE", help="Set an environment variable; repeatable."
)
@click.option("--restart", type=click.Choice(RESTARTS), help="When to restart it [spawn.restart].")
@control_options
def spawn(
    ctx: click.Context,
    /,
    name: str,
    program: str,
    prompt: str,
    cwd: str | None,
    env: tuple[str, ...],
    restart: str | None,
    **caller: Any,
) -> None:
    """Start an agent's process and print its pid.

    The relay supervises it: `relay ps` shows its state, and its exit and restarts are reported to
    you as messages. Its output goes to logs/NAME.log in the home. The values of --env are not
    recorded anywhere. Claude, Codex and Gemini get the page of `relay guide` before the prompt.
    """
    from agent_sdk.requests import spawn_headers

    root = root_of(ctx, caller.pop("home"))
    require_relay(root)
    text = sys.stdin.read() if prompt == "-" else prompt
    directory = str(Path(cwd).expanduser().absolute()) if cwd else str(Path.cwd())
    headers = spawn_headers(name, program, directory, _env(env), restart)
    _ask(root, "spawn", headers, text, **caller)


def _env(given: tuple[str, ...]) -> dict[str, str]:
    """Parse --env. Errors: BadParameter, without the text, which may be secret."""
    found: dict[str, str] = {}
    for number, pair in enumerate(given, 1):
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"number {number}: expected KEY=VALUE", param_hint="--env")
        found[key] = value
    return found


@click.command(
    epilog="""\b
Examples:
  relay release reviewer
  relay release builder --reason "the release is out" --timeout 60""",
)
@click.argument("name", shell_complete=complete_agents)
@click.option("--reason", default="", help="Reason, shown to the agent that started it.")
@control_options
def release(ctx: click.Context, /, name: str, reason: str, **caller: Any) -> None:
    """Stop an agent's process: SIGTERM, then SIGKILL after spawn.grace_s.

    When this returns, the process and its children have ended. Its mailbox stays. Without
    --timeout it waits spawn.grace_s longer than the default.
    """
    from agent_sdk.requests import release_headers
    from relay.base.config import load

    root = root_of(ctx, caller.pop("home"))
    require_relay(root)
    if ctx.get_parameter_source("timeout_s") is ParameterSource.DEFAULT:
        # A config.json that cannot be used keeps nobody from ending a process.
        with contextlib.suppress(ConfigError), Home(root) as opened:
            caller["timeout_s"] += load(opened).spawn.grace_s
    headers = release_headers(name, reason)
    _ask(root, "release", headers, "", **caller)


def _ask(
    root: str,
    kind: str,
    headers: dict[str, str],
    body: str,
    *,
    agent: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Send a request about a process and print the answer."""
    from agent_sdk import Agent

    with Agent(agent, root) as me:
        answer = request(me, ORCHESTRATOR, body, timeout_s, kind=kind, headers=headers)
    print_answer(answer, as_json)


@command(epilog="\b\nExamples:\n  relay ps\n  relay ps --all --json")
@click.option("--all", "everything", is_flag=True, help="Include processes that have ended.")
@wide_option
def ps(ctx: click.Context, home: str | None, everything: bool, wide: bool, as_json: bool) -> None:
    """List the processes started by the relay and their state.

    starting: no sign of activity yet. stuck: a read or an answer is overdue.
    """
    from relay.ledger.agents import ENDS
    from relay.ledger.file import open_current

    with open_home(ctx, home) as opened:
        db = open_current(opened.path(LEDGER))
        rows = [dict(row) for row in db.execute("SELECT * FROM processes ORDER BY name")]
        db.close()
        runs = [row for row in rows if row["state"] not in ENDS]
        # Nobody looks: what has ended since is listed as it was.
        unseen = not_running_text(opened) if runs and lock_holder(opened) is None else ""
    rows = rows if everything else runs
    now = time.time_ns()
    print_rows(
        [with_iso_times(process_facts(row)) for row in rows] if as_json else rows,
        ("NAME", "STATE", "PID", "CLI", "STARTED", "CPU%", "RSS", "IDLE", "RESTARTS", "LAST"),
        lambda row: _cells(row, now),
        as_json=as_json,
        nothing="no processes; `relay spawn NAME --cli …` starts one",
        wide=wide,
    )
    if unseen:
        click.echo(f"relay: the states are those last seen: {unseen}", err=True)


@command(
    json=False,
    epilog="""\b
Examples:
  relay logs worker -n 20
  relay logs worker --follow
  relay logs""",
)
@click.argument("name", required=False, shell_complete=complete_agents)
@click.option("-n", "--lines", "most", type=click.IntRange(0), default=100, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Keep printing what is written, until ^C.")
def logs(ctx: click.Context, home: str | None, name: str | None, most: int, follow: bool) -> None:
    """Show the output of an agent's process, or without NAME the relay's own log.

    A terminal gets it without control sequences, and the relay's log as sentences; a pipe or a
    file gets it as it was written.
    """
    with open_home(ctx, home) as opened:
        own = os.path.basename(LOG)
        file = LogFile(opened.root, own if name is None else f"{check_agent_name(name)}.log")
        lines = file.last(most)
        if not lines and not file.is_there:
            raise _no_output(opened, name)
        show = _show_raw if not sys.stdout.isatty() else _show_text if name else _show_record
        for line in lines:
            show(line)
        if file.rest and not follow:
            show(file.rest)
        while follow:
            sys.stdout.flush()
            for line in file.read():
                show(line)
            time.sleep(POLL_S)


def _no_output(home: Home, name: str | None) -> NotFound:
    if name is None:
        return NotFound(f"{LOG} does not exist yet", hint="start the relay with `relay up`")
    if name not in home.agent_names():
        return agent_not_found(home, name)
    return NotFound(
        f"the relay has no output of {name}",
        hint="it has that of processes started by `relay spawn`, and not removed by retention",
    )


def _show_raw(line: bytes) -> None:
    click.echo(line, nl=False)


def _show_text(line: bytes) -> None:
    text = COLOURS.sub("", line.decode(errors="replace")).rstrip("\r\n")
    click.echo(sanitize(text, lines=True))


def _show_record(line: bytes) -> None:
    import json

    from relay.base.logs import line_for_people

    try:
        text = line_for_people(json.loads(line))
    except (ValueError, KeyError, TypeError):  # cut short, on a full disk
        text = sanitize(line.decode(errors="replace").rstrip()) or ""
    click.echo(text)


class LogFile:
    """A file in ``logs/`` and the reading position in it.

    It may be rotated meanwhile: it is renamed or copied to the same name with ``.1`` and begins
    again.
    """

    def __init__(self, root: str, name: str) -> None:
        """``root``: of the home, which may be restored meanwhile; ``name``: of the file."""
        self.is_there = False  # at the last look
        self.rest = b""  # the beginning of the last line
        self._root = root
        self._name = name
        self._inode = 0
        self._at = 0

    def last(self, most: int) -> list[bytes]:
        """Return the last lines, and read on after them."""
        lines = list(deque(self.read(), maxlen=most))
        if len(lines) < most:
            with self._open(f"{self._name}.1") as before:
                lines = [*deque(before, maxlen=most - len(lines)), *lines]
        return lines

    def read(self) -> Iterator[bytes]:
        """Yield the lines since the last call."""
        with self._open(self._name) as file:
            self.is_there = not isinstance(file, io.BytesIO)
            if not self.is_there:
                return
            status = os.fstat(file.fileno())
            if self._at and (status.st_ino != self._inode or status.st_size < self._at):
                with self._open(f"{self._name}.1") as before:
                    yield from self._lines(before)
                self._at = 0
            self._inode = status.st_ino
            yield from self._lines(file)

    def _lines(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield complete lines from the position on, and move it."""
        file.seek(self._at)
        for line in file:
            self._at += len(line)
            self.rest += line
            if line.endswith(b"\n"):
                yield self.rest
                self.rest = b""

    def _open(self, name: str) -> IO[bytes]:
        """Open a file of the folder; one that is missing is empty."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with Home(self._root) as home, home.dirs() as dirs, contextlib.suppress(FileNotFoundError):
            folder = dirs.get(os.path.dirname(LOG))
            return os.fdopen(os.open(name, flags, dir_fd=folder), "rb")
        return io.BytesIO()


def _cells(row: dict[str, Any], now: int) -> tuple[object, ...]:
    rss, idle = row["rss_bytes"], row["idle_s"]
    return (
        *(row["name"], row["state"], row["pid"], sanitize(row["cli"], 20)),
        *(ago(row["started_at"], now), row["cpu_percent"]),
        None if rss is None else f"{rss >> 20} MiB",
        None if idle is None else f"{idle} s",
        *(row["restarts"], row["last_error"]),
    )
