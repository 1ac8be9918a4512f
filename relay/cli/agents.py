"""``relay agents``, ``register`` and ``key``: agents, their status, warnings, signing keys."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import NS_PER_S
from relay.base.home import LEDGER, META
from relay.base.names import OPERATOR, ORCHESTRATOR, check_agent_name
from relay.cli.common import (
    ago,
    echo_json,
    home_option,
    json_option,
    open_home,
    parse_meta,
    print_table,
    read_agent_meta,
    root_of,
    sanitize,
    unread,
    when,
)
from relay.cli.request import control_options, send_command

if TYPE_CHECKING:
    from relay.base.home import Home
import os

from relay.base import process_info
from relay.base.errors import NotFound
from relay.base.home import KEY, Home

SILENT_S = 60  # shorter pauses are normal
PRESENT = ("active", "inactive")  # for the others, the reason of the status says it
WAITING = """SELECT recipient, min(written_at) FROM deliveries WHERE state = 'written' GROUP BY 1
UNION ALL
SELECT recipient, min(written_at) FROM deliveries WHERE obligation = 'open' GROUP BY 1"""


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  relay agents
  relay agents --json
  relay agents retire bob --reason "its work is done"
  relay agents revive bob""",
)
@home_option
@json_option
@click.pass_context
def agents(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """List the agents and their status.

    SINCE: when the current status began (- for active agents). SEEN: when it last wrote or
    read a message. UNREAD: messages in its inbox. DEAD: dead letters addressed to it. NOTE: its
    registered process has exited; how long it has been silent with messages waiting; its own
    status text.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {"home": root_of(ctx, home)}
        return
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        listed = _listed(opened, now)
    if as_json:
        for one in listed:
            echo_json(_facts(*one, now))
        return
    header = ("NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE")
    print_table(header, [_cells(*one, now) for one in listed])


class _Listed(NamedTuple):
    """An agent's facts from ledger, meta.json and inbox."""

    row: sqlite3.Row  # of the ledger
    role: str | None  # in its meta.json
    unread: int | None  # in its inbox
    alert: AgentAlert


def _listed(home: Home, now_ns: int) -> list[_Listed]:
    """List all agents by name."""
    from relay.ledger import open_readonly

    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT name, status, reason, changed_at, pid, registered_at, last_seen_at, note, "
            "(SELECT count(*) FROM deliveries WHERE recipient = name AND state = 'dead') AS dead "
            "FROM agents ORDER BY name"
        ).fetchall()
        alerts = find_alerts(home, db, now_ns)
    in_inboxes = unread(home)
    return [
        _Listed(
            row,
            _role_in(home, row["name"]),
            in_inboxes.get(row["name"]),
            alerts.get(row["name"], AgentAlert()),
        )
        for row in rows
    ]


def _role_in(home: Home, name: str) -> str | None:
    """Return the role in an agent's meta.json; None if it cannot be read."""
    try:
        return _role(home.read_meta(name))
    except OSError:
        return None


def _facts(
    row: sqlite3.Row, role: str | None, unread: int | None, alert: AgentAlert, now_ns: int
) -> dict[str, object]:
    return {
        "name": row["name"],
        "status": row["status"],
        "role": role,
        "pid": row["pid"],
        "registered_at": when(row["registered_at"]),
        "last_seen_at": when(row["last_seen_at"]),
        "unread": unread,
        "dead": row["dead"],
        "note": row["note"],
        "reason": row["reason"],
        "status_since": when(row["changed_at"]),
        "process_ended": alert.ended_pid,
        "silent_s": alert.silent_since and (now_ns - alert.silent_since) // NS_PER_S,
    }


def _cells(
    row: sqlite3.Row, role: str | None, unread: int | None, alert: AgentAlert, now_ns: int
) -> tuple[object, ...]:
    is_active = row["status"] == "active"
    return (
        row["name"],
        row["status"],
        None if is_active else ago(row["changed_at"], now_ns),
        role,
        ago(row["last_seen_at"], now_ns),
        unread,
        row["dead"],
        sanitize(alert.text(now_ns, row["note"] if is_active else row["reason"]), 60),
    )


@agents.command(epilog='\b\nExample:\n  relay agents retire bob --reason "its work is done"')
@control_options
@click.argument("name")
@click.option("--reason", metavar="TEXT", help="Reason, told to agents that write to it.")
def retire(ctx: click.Context, /, name: str, reason: str | None, **caller: Any) -> None:
    """Take an agent out of service: mail to it bounces, with the reason.

    Its inbox stays. It becomes active again by `revive`, by writing a message, or when a new
    process registers as it.
    """
    send_command(ctx, "agent.retire", {"NAME": name, "REASON": reason}, **caller)


@agents.command(epilog="\b\nExample:\n  relay agents revive bob")
@control_options
@click.argument("name")
def revive(ctx: click.Context, /, name: str, **caller: Any) -> None:
    """Make a retired or terminated agent active again, with inbox and history."""
    send_command(ctx, "agent.revive", {"NAME": name}, **caller)


@click.command(
    epilog="\b\nExamples:\n  relay register bob\n  relay register alice --role lead",
)
@home_option
@click.argument("name")
@click.option("--role", type=click.Choice(["lead", "member"]), help="`TO: Lead` means the lead.")
@json_option
@click.pass_context
def register(
    ctx: click.Context, home: str | None, name: str, role: str | None, as_json: bool
) -> None:
    """Create an agent's mailbox, or change its role.

    Only needed to set a role: a directory made with `mkdir -p` is an agent, too. A terminated or
    retired agent becomes active again, by a message to the relay.
    """
    from relay.base import fsio

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        opened.make_agent(name)
        if role is not None:
            meta = read_agent_meta(opened, name)
            path = opened.path("agents", name, META)
            fsio.write_atomic(path, json.dumps(meta | {"role": role}).encode())
        meta_role = _role(opened.read_meta(name))
        _revive(opened, name)
    if as_json:
        echo_json({"name": name, "role": meta_role})
    else:
        click.echo(f"registered {name}; mailbox: {opened.path('agents', name)}")


def _revive(home: Home, name: str) -> None:
    """Ask the relay, running now or later, to make a terminated or retired agent active."""
    from relay.base.errors import LedgerError
    from relay.ledger import open_readonly

    try:
        db = open_readonly(home.path(LEDGER))
    except LedgerError:  # no relay has ever run here
        return
    away = "SELECT 1 FROM agents WHERE name = ? AND status IN ('terminated', 'retired')"
    is_away = db.execute(away, (name,)).fetchone() is not None
    db.close()
    if is_away:
        from agent_sdk import Agent, Kind

        with Agent(OPERATOR, home.root, registers=False) as operator:
            body = f"ACTION: agent.revive\nNAME: {name}"
            operator.send(ORCHESTRATOR, body, kind=Kind.COMMAND)


def _role(data: bytes | None) -> str | None:
    """Return the role in a meta.json; None if there is none or it cannot be read."""
    role = (parse_meta(data) or {}).get("role")
    return role if isinstance(role, str) else None


class AgentAlert(NamedTuple):
    """Warnings about one agent, seen before the relay changes its status."""

    ended_pid: int | None = None  # its registered process, which has exited
    silent_since: int | None = None  # Unix ns: no activity although messages wait

    def text(self, now_ns: int, note: str | None = None) -> str | None:
        """Format for a table column, the agent's own note last; None if there is nothing to say."""
        ended = f"process {self.ended_pid} has exited" if self.ended_pid is not None else ""
        silent = f"silent {ago(self.silent_since, now_ns)}" if self.silent_since else ""
        return "; ".join(filter(None, (ended, silent, note))) or None


def find_alerts(home: Home, db: sqlite3.Connection, now_ns: int) -> dict[str, AgentAlert]:
    """Find warnings about present agents, by name. A gone process is seen in the kernel's table,
    whatever the agent's status; silence counts only while the agent has something to read or
    answer."""
    rows = db.execute("SELECT name, status, last_seen_at FROM agents").fetchall()
    waiting = _waiting(db)
    tended = _supervised(db)
    found: dict[str, AgentAlert] = {}
    for name, status, seen_at in rows:
        if status not in PRESENT:
            continue
        ended = None if name in tended else _ended_pid_of(home, name)
        silent: int | None = None
        if name in waiting and name != OPERATOR:  # a person may be away
            since = max(waiting[name], seen_at or 0)
            silent = since if now_ns - since >= SILENT_S * NS_PER_S else None
        if ended is not None or silent is not None:
            found[name] = AgentAlert(ended, silent)
    return found


def _ended_pid_of(home: Home, name: str) -> int | None:
    """Call ``ended_pid``; None if meta.json cannot be read."""
    try:
        return ended_pid(home.read_meta(name))
    except OSError:
        return None


def ended_pid(meta: bytes | None) -> int | None:
    """Return the pid registered in a meta.json if that process has exited."""
    known = parse_meta(meta) or {}
    pid, ticks = known.get("pid"), known.get("pid_start_ticks")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return None
    return None if process_info.runs(pid, ticks if isinstance(ticks, int) else None) else pid


def _waiting(db: sqlite3.Connection) -> dict[str, int]:
    """Return since when each agent has unread mail or a pending answer (Unix ns)."""
    since: dict[str, int] = {}
    for name, at in db.execute(WAITING):
        if at is not None:
            since[name] = min(at, since.get(name, at))
    return since


def _supervised(db: sqlite3.Connection) -> set[str]:
    """Return the agents whose processes the relay supervises, shown by `relay ps`."""
    tended = "SELECT name FROM processes WHERE state NOT IN ('exited', 'failed', 'released')"
    return {row[0] for row in db.execute(tended)}


@click.group(
    epilog="""\b
Examples:
  relay key make alice
  relay key show alice
  relay key trust alice 4f0c…   # 64 hex digits""",
)
def key() -> None:
    """Create and confirm the keys that agents sign with.

    An agent with a key signs its messages; the SDK and `relay send` do it automatically. The relay
    registers the first public key in an agent's meta.json and ignores others until confirmed.
    """


@key.command("make", epilog="\b\nExamples:\n  relay key make alice\n  relay key make operator")
@home_option
@click.argument("name")
@json_option
@click.pass_context
def make_key(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Create an agent's key, and write the public key to its meta.json.

    The private key is agents/NAME/key, mode 600; it is never replaced. To change the key, remove
    the file, create a new one and confirm it with `relay key trust`.
    """
    from relay.base import fsio
    from relay.base.crypto import create_key, load_key, public_key

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        opened.make_agent(name)
        meta = read_agent_meta(opened, name)
        path = opened.path("agents", name, KEY)
        private = load_key(path) if os.path.lexists(path) else create_key(path)
        public = public_key(private).hex()
        if meta.get("public_key") != public:
            data = json.dumps(meta | {"public_key": public}, indent=2).encode() + b"\n"
            fsio.write_atomic(opened.path("agents", name, META), data)
    _print_key(name, public, as_json)


@key.command("show", epilog="\b\nExample:\n  relay key show alice --json")
@home_option
@click.argument("name")
@json_option
@click.pass_context
def show_key(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show the public key used to check an agent's signatures.

    If none is registered, the one in its meta.json, which is registered with its next message.
    """
    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        row = db.execute("SELECT public_key FROM agents WHERE name = ?", (name,)).fetchone()
        db.close()
        public = row["public_key"] if row else None
        if public is None and name in opened.agent_inodes():
            public = read_agent_meta(opened, name).get("public_key")
    if not isinstance(public, str):
        raise NotFound(f"{name!a} has no key", hint=f"create one with `relay key make {name}`")
    _print_key(name, public, as_json)


@key.command(
    "trust", epilog="\b\nExamples:\n  relay key trust alice 4f0c…\n  relay key trust alice none"
)
@control_options
@click.argument("name")
@click.argument("public_key", metavar="HEX")
def trust_key(ctx: click.Context, /, name: str, public_key: str, **caller: Any) -> None:
    """Change the key used to check an agent's signatures.

    HEX is 64 hex digits as printed by `relay key show`, or none: then the key in its meta.json is
    registered with its next message. Only the operator and the lead may do this.
    """
    send_command(ctx, "agent.key", {"NAME": name, "KEY": public_key}, **caller)


def _print_key(name: str, public: str, as_json: bool) -> None:
    if as_json:
        echo_json({"name": name, "public_key": public})
    else:
        click.echo(sanitize(public))
