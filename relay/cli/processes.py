"""``relay spawn``, ``release`` and ``ps``: processes of agents, started by the relay."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from relay.base.home import LEDGER
from relay.cli.common import (
    ago,
    echo_json,
    home_option,
    json_option,
    open_home,
    print_table,
    root_of,
    sanitize,
    when,
)
from relay.cli.request import control_options, print_answer, request, require_relay

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
@click.option("--cwd", metavar="DIR", help="Working directory [the current one].")
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
    recorded anywhere.
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
    for number, one in enumerate(given, 1):
        key, equals, value = one.partition("=")
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
@click.argument("name")
@click.option("--reason", default="", help="Reason, shown to the agent that started it.")
@control_options
def release(ctx: click.Context, /, name: str, reason: str, **caller: Any) -> None:
    """Stop an agent's process: SIGTERM, then SIGKILL after spawn.grace_s.

    When this returns, the process and its children have ended. Its mailbox stays.
    """
    root = root_of(ctx, caller.pop("home"))
    require_relay(root)
    headers = {"NAME": name} | ({"REASON": reason} if reason else {})
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
    from relay.base.names import ORCHESTRATOR

    with Agent(agent, root) as me:
        answer = request(me, ORCHESTRATOR, body, timeout_s, kind=kind, headers=headers)
    print_answer(answer, as_json)


@click.command(epilog="\b\nExamples:\n  relay ps\n  relay ps --all --json")
@home_option
@click.option("--all", "everything", is_flag=True, help="Include processes that have ended.")
@json_option
@click.pass_context
def ps(ctx: click.Context, home: str | None, everything: bool, as_json: bool) -> None:
    """List the processes started by the relay and their state.

    starting: no sign of activity yet. stuck: a read or an answer is overdue.
    """
    from relay.ledger import open_readonly
    from relay.ledger.processes import ENDS

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        rows = [dict(row) for row in db.execute("SELECT * FROM processes ORDER BY name")]
        db.close()
    if not everything:
        rows = [row for row in rows if row["state"] not in ENDS]
    if as_json:
        for row in rows:
            echo_json(_facts(row))
        return
    if not rows:
        click.echo("no processes; `relay spawn NAME --cli …` starts one", err=True)
        return
    now = time.time_ns()
    header = ("NAME", "STATE", "PID", "CLI", "STARTED", "CPU%", "RSS", "IDLE", "RESTARTS", "LAST")
    print_table(header, [_cells(row, now) for row in rows])


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    plain = ("name", "state", "pid", "cli", "cwd", "restart", "requested_by", "request_id")
    more = ("restarts", "exit_code", "cpu_percent", "rss_bytes", "idle_s", "last_error")
    times = {name: when(row[name]) for name in ("started_at", "changed_at", "ended_at")}
    return {name: row[name] for name in (*plain, *more)} | times


def _cells(row: dict[str, Any], now: int) -> tuple[object, ...]:
    rss = row["rss_bytes"]
    return (
        row["name"],
        row["state"],
        row["pid"],
        sanitize(row["cli"], 20),
        ago(row["started_at"], now),
        row["cpu_percent"],
        None if rss is None else f"{rss >> 20} MiB",
        None if row["idle_s"] is None else f"{row['idle_s']} s",
        row["restarts"],
        sanitize(row["last_error"], 60),
    )
