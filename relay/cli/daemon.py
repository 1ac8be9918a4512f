"""``relay init``, ``up``, ``down``, ``status`` and ``sh``: a home and its relay."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from typing import Any

import click

from relay.base import fsio
from relay.base.clock import NS_PER_S, local_time
from relay.base.discovery import FOLDER, IGNORED
from relay.base.disk import refuses_files
from relay.base.errors import EXIT_STATE, NotRunning, RelayError
from relay.base.home import LEDGER, LOCK, LOG, Home, lock_holder, running_trouble, unclean_stop
from relay.base.process_info import is_stopped, pid_text
from relay.base.status_client import SOCKET, StatusReply, ask, silence
from relay.base.text import format_size, visible
from relay.cli.common import (
    DURATION,
    ago,
    command,
    echo_json,
    given_home,
    name_home,
    not_running_text,
    open_home,
    root_of,
    sanitize,
    say,
    with_iso_times,
)
from relay.cli.tables import print_table
from relay.views.agents import find_alerts, unread
from relay.views.ids import short_ids
from relay.views.messages import count_failed
from relay.views.trace import count_waiting

START_TIMEOUT_S = 60
POLL_S = 0.02
MAX_NAMED = 5
AT_ONCE_NS = 5 * NS_PER_S  # from the start of the process to that of its session
CRASH_LOG = "logs/relay.err"
MAX_CRASH_LOG_BYTES = 1 << 20  # a few hundred tracebacks
STATUS_FIELDS = (
    *("healthy", "ready", "reasons", "paused", "config_error", "snapshot_age_s", "disk"),
    *("wal_bytes", "wal_state", "tiers_waiting", "admin_trouble", "ledger_damage"),
)


class StartFailed(RelayError):
    """The relay did not start."""

    hint = "see logs/relay.log in the home"


# Two conditions look redundant: they repeat those of the partial indexes; without them SQLite
# would read the whole table.
OPEN = "status IN ('pending', 'processing', 'completed')"
WAITING = "state IN ('held', 'staged')"


@command(
    epilog="\b\nExamples:\n  relay init\n  relay init --here    # for this project alone\n"
    "  relay init --home /srv/team-relay"
)
@click.option("--here", is_flag=True, help="In .agent-relay of the working directory.")
def init(ctx: click.Context, home: str | None, here: bool, as_json: bool) -> None:
    """Create a relay home, or complete one.

    Existing files stay: config.json, messages, the ledger. Modes are set to 700 and 600. With
    --here, commands and agents in this directory and below it use the home from then on; git
    ignores it.
    """
    from relay.ledger.ledger import Ledger

    if here and given_home(ctx, home) is not None:
        raise click.UsageError("--here cannot be used with --home", ctx)
    root = os.path.abspath(FOLDER) if here else root_of(ctx, home)
    existed = os.path.exists(os.path.join(root, LEDGER))
    with Home.create(root) as made:
        Ledger.open(made.path(LEDGER)).close()
        if here and not fsio.exists(made.path(IGNORED)):
            fsio.write_atomic(made.path(IGNORED), b"*\n")
    if as_json:
        echo_json({"home": root, "created": not existed})
        return
    click.echo(f"{'completed' if existed else 'created'} {root}")
    root_of(ctx, root if here else home)  # so that the hint names it where that is necessary
    with Home(root) as made:
        pid = lock_holder(made)
    start = "start the relay with `relay up`"
    click.echo(name_home(start if pid is None else f"its relay is running, {pid_text(pid)}"))


@command(
    epilog="""\b
Examples:
  relay up
  relay up --foreground    # logs to stderr, ends with ^C""",
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to stderr.")
def up(ctx: click.Context, home: str | None, foreground: bool, as_json: bool) -> None:
    """Start the relay and return when it is ready.

    If one is already running for this home, this fails and prints its pid.
    """
    root = root_of(ctx, home)
    Home(root).close()  # report a missing home here, not in a log
    if foreground:
        from relay.daemon.process import run_daemon

        run_daemon(root, log_path=None, ready=lambda: click.echo(f"ready: {root}", err=True))
        return
    pid = _start(root)
    say(f"the relay is running, pid {pid}, home {root}", {"home": root, "pid": pid}, as_json)


def _start(root: str) -> int:
    """Start the daemon in its own session and wait until it reports that it is ready."""
    crash_log = _crash_log(root)
    written_before = os.fstat(crash_log).st_size
    read_fd, write_fd = os.pipe()
    try:
        words = ["--home", root, "--ready-fd", str(write_fd)]
        process = subprocess.Popen(
            # -P: a module of the current directory, such as queue.py, is not the relay's
            [sys.executable, "-P", "-m", "relay.daemon", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=crash_log,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        try:
            has_answer = bool(select.select([answer], [], [], START_TIMEOUT_S)[0])
        except KeyboardInterrupt as exc:
            text = f"the relay, pid {process.pid}, goes on starting; `relay down` ends it"
            exc.add_note(text)
            raise
        if not has_answer:
            raise StartFailed(f"pid {process.pid} has not become ready within {START_TIMEOUT_S} s")
        reply = answer.read().decode()
    if reply.strip() == "ready":
        process.returncode = 0  # it goes on: no warning that nobody has waited for it
        return process.pid
    code, _, rest = reply.partition("\n")
    message, _, hint = rest.partition("\n")
    if not message:
        message, hint = "the relay exited before it was ready", f"see {LOG} in the home"
        if said := _last_line(crash_log, written_before):
            message, hint = f"{message}: {said}", f"see {CRASH_LOG} in the home"
    error = StartFailed(message, hint=hint.strip())
    error.exit_code = int(code) if code.isdigit() else error.exit_code
    raise error


def _last_line(fd: int, begin: int) -> str:
    """The last line of a file, from this offset on: of a traceback the one that says what it is."""
    end = os.fstat(fd).st_size
    start = max(begin, end - 4096)
    lines = os.pread(fd, end - start, start).decode(errors="replace").split("\n")
    return next((visible(line) for line in reversed(lines) if line.strip()), "")


def _crash_log(root: str) -> int:
    """Open the file for unexpected tracebacks; one older file is kept."""
    path = os.path.join(root, CRASH_LOG)
    from relay.base.logs import rotate

    fsio.ensure_dir(os.path.dirname(path))
    if os.path.exists(path) and os.stat(path).st_size > MAX_CRASH_LOG_BYTES:
        rotate(path, 1)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


@command(epilog="\b\nExample:\n  relay down && relay up")
@click.option(
    "--timeout",
    "timeout_s",
    type=DURATION,
    default="30s",
    show_default=True,
    help="Longest wait.",
)
def down(ctx: click.Context, home: str | None, timeout_s: float, as_json: bool) -> None:
    """Stop the relay after it has finished its current batch."""
    with open_home(ctx, home) as opened:
        pid = lock_holder(opened)
        if pid is None:
            raise NotRunning(f"no relay is running for {opened.root}")
        if not pid:
            text = f"the relay, {pid_text(pid)}, gets no signal from here"
            raise RelayError(text, hint="run `relay down` where it was started")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while lock_holder(opened) == pid:
            if is_stopped(pid):
                hint = f"`kill -CONT {pid}` lets it continue, and end"
                raise RelayError(f"the relay, pid {pid}, is suspended by a signal", hint=hint)
            if time.monotonic() > deadline:
                text = f"the relay, pid {pid}, has not stopped within {timeout_s:g} s"
                hint = f"it may still be writing its store; `kill -9 {pid}` loses no messages"
                raise RelayError(text, hint=hint)
            time.sleep(POLL_S)
    say(f"the relay, pid {pid}, has stopped", {"home": opened.root, "pid": pid}, as_json)


@command(epilog="\b\nExamples:\n  relay status\n  relay status --json")
def status(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Show whether the relay is running and what it is working on.

    Exit code 5 when it is not running, does not answer, or takes no messages in.
    """
    with open_home(ctx, home) as opened:
        facts = _facts(opened)
        none = not_running_text(opened)
    if as_json:
        echo_json(with_iso_times(facts))
    else:
        _show(facts, none)
    is_there = facts["running"] and facts["answers"] is not False
    is_serving = is_there and not facts["trouble"] and facts["ready"] is not False
    return 0 if is_serving else EXIT_STATE


def _facts(home: Home) -> dict[str, Any]:
    """Collect the status from the ledger, the process and the relay itself."""
    from relay.ledger.file import open_current

    pid = lock_holder(home) if os.path.exists(home.path(LOCK)) else None
    stopped = unclean_stop(home)
    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        counts, last_errors = _counts(db), _last_errors(db)
        state = dict(db.execute("SELECT key, value FROM orchestrator_state").fetchall())
        alerts = find_alerts(home, db, time.time_ns())
    return {
        "home": home.root,
        "running": pid is not None,
        "pid": pid,
        "trouble": running_trouble(home) if pid is not None else "",
        **_process_facts(pid),
        "session_at": int(state["started_at"]) if "started_at" in state else None,
        "starts": int(state.get("epoch", 0)),
        **counts,
        "unread": sum(unread(home).values()),
        "in_outboxes": count_waiting(home) if pid is None else None,  # else `pending` counts
        **_daemon_status(home, pid),
        "socket": home.path(SOCKET),
        "left": stopped and {"pid": stopped.pid, "last_sign_at": stopped.last_sign_ns},
        "ended": {name: alert.ended_pid for name, alert in alerts.items() if alert.ended_pid},
        "last_errors": last_errors,
    }


def _counts(db: sqlite3.Connection) -> dict[str, int]:
    """Count open messages and the totals."""

    def count(what: str) -> int:
        return int(db.execute(f"SELECT count(*) FROM {what}").fetchone()[0])

    by_status = f"SELECT status, count(*) FROM messages WHERE {OPEN} GROUP BY 1"
    in_hand = dict(db.execute(by_status).fetchall())
    return {
        "pending": in_hand.get("pending", 0),
        "processing": in_hand.get("processing", 0) + in_hand.get("completed", 0),
        "failed": count_failed(db),
        "held": count(f"deliveries WHERE {WAITING} AND state = 'held'"),
        "messages": count("messages"),
        "agents": count("agents WHERE status = 'active'"),
        "agents_known": count("agents"),
    }


def _last_errors(db: sqlite3.Connection) -> list[dict[str, str]]:
    """List why pending messages are being retried, newest first."""
    rows = db.execute(
        "SELECT message_id, status, last_error AS error FROM messages "
        f"WHERE {OPEN} AND status = 'pending' AND last_error IS NOT NULL ORDER BY id DESC LIMIT 5"
    )
    return [dict(row) for row in rows]


def _daemon_status(home: Home, pid: int | None) -> dict[str, Any]:
    """Ask the running relay; all values are None without an answer. ``answers`` is False for a
    relay that does not answer, None where there is nothing to ask."""
    answer = ask(home) if pid is not None else StatusReply(None)
    status = dict(answer.status or {})
    if pid is not None and not status.get("config_error"):
        status["config_error"] = _config_error(home)
    answers = True if answer.status is not None else False if answer.is_silent else None
    return {name: status.get(name) for name in STATUS_FIELDS} | {"answers": answers}


def _config_error(home: Home) -> str:
    """The error in config.json now; the relay looks at it when it is told to, or starts."""
    from relay.base.config import load

    try:
        load(home)
    except (RelayError, OSError) as exc:
        return " ".join(str(exc).split())
    return ""


def _process_facts(pid: int | None) -> dict[str, int | None]:
    """Return the daemon's resident memory in bytes, and when it was started, if known."""
    import psutil

    try:
        process = psutil.Process(pid) if pid is not None else None
        rss = int(process.memory_info().rss) if process else None
        started = int(process.create_time() * NS_PER_S) if process else None
    except psutil.Error:
        rss = started = None
    return {"rss_bytes": rss, "started_at": started}


def _show(facts: dict[str, Any], none: str) -> None:
    if facts["answers"] is False:
        what, remedy = silence(facts["pid"])
        click.echo(name_home(f"the relay, {pid_text(facts['pid'])}, {what}; {remedy}"))
    elif facts["running"]:
        started, rss = facts["started_at"], facts["rss_bytes"]
        since = f", since {local_time(started)} ({ago(started, time.time_ns())})" if started else ""
        session_at = facts["session_at"]  # anew after a fault, and with other settings
        if started and session_at and session_at - started > AT_ONCE_NS:
            since += f", serving since {local_time(session_at)}"
        memory = f", {format_size(rss)}" if rss else ""
        click.echo(f"the relay is running, {pid_text(facts['pid'])}{since}{memory}")
        if facts["trouble"]:
            click.echo(sanitize(f"not serving; retrying: {facts['trouble']}"))
        _show_health(facts)
    else:
        click.echo(none)
    click.echo(f"home {facts['home']}")
    header = ("messages", "pending", "processing", "failed", "held", "unread", "agents")
    agents = f"{facts['agents']} active of {facts['agents_known']}"
    print_table(header, [[*(facts[name] for name in header[:-1]), agents]])
    if facts["failed"]:
        click.echo(name_home("`relay failed` lists what failed, and why"))
    if facts["in_outboxes"]:
        click.echo(f"messages waiting in outboxes: {facts['in_outboxes']}")
    if facts["ended"]:
        click.echo(name_home(f"process exited: {_named(facts['ended'])}; see `relay agents`"))
    short = short_ids(error["message_id"] for error in facts["last_errors"])
    for error in facts["last_errors"]:
        click.echo(sanitize(f"pending: {short[error['message_id']]}: {error['error']}"))


def _named(ended: dict[str, int]) -> str:
    """List the first with their pids, and count the others."""
    shown = [f"{name} (pid {pid})" for name, pid in list(ended.items())[:MAX_NAMED]]
    more = f" and {len(ended) - MAX_NAMED} more" if len(ended) > MAX_NAMED else ""
    return ", ".join(shown) + more


def _show_health(facts: dict[str, Any]) -> None:
    """Print problems, and the state of the disk."""
    if facts["healthy"] is None:
        click.echo("no health endpoint (see logs/relay.log); deliveries continue")
    for reason in facts["reasons"] or ():
        if not facts["trouble"] or facts["trouble"] not in reason:
            click.echo(sanitize(reason))
    if facts["config_error"]:
        text = f"config.json is invalid, still using the previous one: {facts['config_error']}"
        click.echo(sanitize(text))
    for line in facts["tiers_waiting"] or ():
        click.echo(sanitize(f"the journal's tiers: {line}"))
    for line in filter(None, (facts["admin_trouble"], facts["ledger_damage"])):
        click.echo(sanitize(line))
    if facts["wal_state"] == "alert":  # a full one is among the reasons
        text = f"ledger.db-wal has grown to {facts['wal_bytes'] >> 20} MiB: a process keeps a read"
        click.echo(name_home(f"{text} transaction open; `relay doctor` names it"))
    disk, age_s = facts["disk"], facts["snapshot_age_s"]
    if disk:
        free, used = format_size(disk["free_bytes"]), disk["used_percent"]
        health = "ready" if facts["ready"] else "not ready"
        seen = f", seen {age_s:.0f} s ago" if age_s is not None else ""
        why = refuses_files(facts["home"])
        state = f"takes no file ({why})" if why else disk["state"]
        click.echo(f"{health}{seen}; disk {state}, {used} % used, {free} free")


@click.command(
    epilog='\b\nExample:\n  . "$(relay sh)" && relay_send bob "hello"',
)
def sh() -> None:
    """Print the path of relay.sh, to be sourced by a shell."""
    import agent_sdk

    click.echo(os.path.join(os.path.dirname(agent_sdk.__file__), "relay.sh"))
