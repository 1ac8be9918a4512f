"""``relay agents`` and ``register``: agents, their status and warnings."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from typing import Any, NamedTuple

import click

from relay.base import process_info
from relay.base.clock import NS_PER_S
from relay.base.errors import RelayError
from relay.base.home import LEDGER, META, Home
from relay.base.names import (
    DIRECT_PREFIX,
    LEAD,
    MSG_SUFFIX,
    OPERATOR,
    check_agent_name,
)
from relay.cli.common import (
    agent_not_found,
    ago,
    command,
    complete_agents,
    echo_json,
    home_option,
    json_option,
    name_home,
    open_home,
    parse_meta,
    plural,
    read_agent_meta,
    root_of,
    sanitize,
    unread,
    when,
    with_iso_times,
)
from relay.cli.listing import print_messages
from relay.cli.lookup import find_rows
from relay.cli.request import control_options, send_command
from relay.cli.sessions import AgentState, agent_states, latest_calls
from relay.cli.tables import colour_by_word, print_table, wide_option

SILENT_S = 60  # shorter pauses are normal
PRESENT = ("active", "inactive")  # for the others, the reason of the status says it
WAITING = """SELECT recipient, min(written_at) FROM deliveries WHERE state = 'written' GROUP BY 1
UNION ALL
SELECT recipient, min(written_at) FROM deliveries WHERE obligation = 'open' GROUP BY 1"""

LATEST = 10  # messages on an agent's page
_OWED = """SELECT count(*) AS owed, coalesce(sum(due_at <= :now), 0) AS overdue,
    min(written_at) AS oldest_owed_at
FROM deliveries WHERE recipient = :name AND obligation = 'open'"""


@click.group(
    invoke_without_command=True,
    epilog="""\b
Examples:
  relay agents
  relay agents --json
  relay agents show bob
  relay agents retire bob --reason "its work is done"
  relay agents revive bob""",
)
@home_option
@wide_option
@json_option
@click.pass_context
def agents(ctx: click.Context, home: str | None, wide: bool, as_json: bool) -> None:
    """List the agents and their status.

    SINCE: when the current status began (- for active agents). SEEN: when it last wrote or
    read a message. UNREAD: messages in its inbox. DEAD: dead letters addressed to it. NOTE: what
    its session reports (working, idle, idle and owes 2, blocked on a person since 12:03, failing:
    rate limit, not seen since 12:03); that its registered process has exited; how long it has been
    silent with messages waiting; its own status text.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = {"home": root_of(ctx, home)}
        return
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        listed = _listed(opened, now)
    if as_json:
        for one in listed:
            echo_json(with_iso_times(_facts(one, now)))
        return
    header = ("NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE")
    print_table(header, [_cells(one, now) for one in listed], wide=wide)


class _Listed(NamedTuple):
    """An agent's facts from ledger, meta.json and inbox."""

    row: sqlite3.Row  # of the ledger
    role: str | None  # in its meta.json
    unread: int | None  # in its inbox
    alert: AgentAlert
    state: AgentState | None  # of its session
    called_at: int  # Unix ns: when it last called a tool of the relay

    @property
    def seen_at(self) -> int | None:
        """When it last wrote, read, or called a tool (Unix ns)."""
        return max(self.row["last_seen_at"] or 0, self.called_at) or None

    def text(self, now_ns: int) -> str | None:
        """The state of its session, warnings, and its own note or the reason of its status."""
        row = self.row
        note = self.alert.text(now_ns, row["note"] if row["status"] == "active" else row["reason"])
        doing = self.state and self.state.text(row["owed"], now_ns)
        return "; ".join(filter(None, (doing, note))) or None


def _listed(home: Home, now_ns: int) -> list[_Listed]:
    """List all agents by name. Errors: LedgerError."""
    from relay.ledger.file import open_readonly

    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT name, status, reason, changed_at, pid, registered_at, last_seen_at, note, "
            "(SELECT count(*) FROM deliveries WHERE recipient = name AND state = 'dead') AS dead, "
            "(SELECT count(*) FROM deliveries WHERE recipient = name AND obligation = 'open') "
            "AS owed "
            "FROM agents ORDER BY name"
        ).fetchall()
        alerts = find_alerts(home, db, now_ns)
    in_inboxes, states, called = unread(home), agent_states(home, now_ns), latest_calls(home)
    return [
        _Listed(
            row,
            _role_in(home, row["name"]),
            in_inboxes.get(row["name"]),
            alerts.get(row["name"], AgentAlert()),
            states.get(row["name"]),
            called.get(row["name"], 0),
        )
        for row in rows
    ]


def _role_in(home: Home, name: str) -> str | None:
    """Return the role in an agent's meta.json; None if it cannot be read."""
    try:
        return _role(home.read_meta(name))
    except OSError:
        return None


def _facts(one: _Listed, now_ns: int) -> dict[str, object]:
    row, role, unread, alert, state, _ = one
    return {
        "name": row["name"],
        "status": row["status"],
        "role": role,
        "pid": row["pid"],
        "registered_at": row["registered_at"],
        "last_seen_at": one.seen_at,
        "unread": unread,
        "dead": row["dead"],
        "note": row["note"],
        "reason": row["reason"],
        "status_since": when(row["changed_at"]),
        "process_ended": alert.ended_pid,
        "silent_s": alert.silent_since and (now_ns - alert.silent_since) // NS_PER_S,
        "owed": row["owed"],
        "state": state and state.state,
        "state_since": state and when(state.since),
        "session": state and state.session,
        "session_seen_at": state and state.seen_at,
    }


def _cells(one: _Listed, now_ns: int) -> tuple[object, ...]:
    row, role, unread, *_ = one
    is_active = row["status"] == "active"
    return (
        row["name"],
        row["status"],
        None if is_active else ago(row["changed_at"], now_ns),
        role,
        ago(one.seen_at, now_ns),
        unread,
        row["dead"],
        sanitize(one.text(now_ns)),
    )


@command(of=agents, epilog="\b\nExamples:\n  relay agents show bob\n  relay agents show bob --json")
@click.argument("name", shell_complete=complete_agents)
def show(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show everything about one agent on one page.

    Status, process, unread messages, open answers, dead letters, channels, and the latest messages
    from or to it.
    """
    now = time.time_ns()
    with open_home(ctx, home) as opened:
        listed = next((one for one in _listed(opened, now) if one.row["name"] == name), None)
        if listed is None:
            raise agent_not_found(opened, name)
        facts = _facts(listed, now) | _page(opened, name, now)
    if as_json:
        echo_json(with_iso_times(facts))
    else:
        _show_page(facts, listed, now)


def _page(home: Home, name: str, now_ns: int) -> dict[str, Any]:
    """Collect what the list of agents does not show."""
    from relay.cli.processes import process_facts
    from relay.ledger.file import open_readonly
    from relay.search.query import Query

    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        process = db.execute("SELECT * FROM processes WHERE name = ?", (name,)).fetchone()
        owed = db.execute(_OWED, {"name": name, "now": now_ns}).fetchone()
    inbox = _files(home, name, "inbox")
    return {
        "mailbox": home.path("agents", name),
        "outbox": len(_files(home, name, "outbox")),
        "oldest_unread_at": min(inbox, default=None),
        "owed": owed["owed"],
        "overdue": owed["overdue"],
        "oldest_owed_at": owed["oldest_owed_at"],
        "process": process and process_facts(process),
        "channels": _channels(home, name),
        "latest": find_rows(home, Query(parties=(name,)), LATEST)[0],
    }


def _files(home: Home, name: str, folder: str) -> list[int]:
    """Return when each message in a folder of a mailbox was written (Unix ns)."""
    found: list[int] = []
    with contextlib.suppress(OSError), os.scandir(home.path("agents", name, folder)) as files:
        for one in files:
            with contextlib.suppress(FileNotFoundError):  # read in the meantime
                if one.name.endswith(MSG_SUFFIX):
                    found.append(one.stat(follow_symlinks=False).st_mtime_ns)
    return found


def _channels(home: Home, name: str) -> list[str] | None:
    """List the channels in which an agent takes part; None if the store cannot be read."""
    from relay.cli.store import read_store

    try:
        store = read_store(home)
    except (RelayError, OSError):  # `relay doctor` reports it
        return None
    return [
        channel.name
        for channel in store.channels.list_all()
        if not channel.name.startswith(DIRECT_PREFIX)
        and name in [member.id for member in channel.participants]
    ]


def _show_page(facts: dict[str, Any], listed: _Listed, now_ns: int) -> None:
    """Print an agent's page."""

    def echo(label: str, *texts: str | None) -> None:
        click.echo(f"  {label:<10}{sanitize(', '.join(filter(None, texts)))}")

    def aged(what: str, at: int | None) -> str:
        return what if at is None else f"{what}, the oldest for {ago(at, now_ns)}"

    row = listed.row
    status = colour_by_word(row["status"])
    since = None if row["status"] == "active" else f"since {ago(row['changed_at'], now_ns)}"
    click.echo(facts["name"])
    click.echo(
        f"  {'status':<10}{', '.join(filter(None, (status, since, sanitize(facts['role']))))}"
    )
    echo("seen", ago(row["last_seen_at"], now_ns) + " ago" * (row["last_seen_at"] is not None))
    if text := listed.text(now_ns):
        echo("note", text)
    if facts["session"]:
        echo("session", facts["session"], f"seen {ago(facts['session_seen_at'], now_ns)} ago")
    if one := facts["process"]:
        pid = f"pid {one['pid']}" if one["pid"] else None
        echo("process", one["state"], pid, one["cli"], plural(one["restarts"], "restart"))
        echo("", one["last_error"], name_home(f"`relay logs {facts['name']}` shows its output"))
    elif facts["pid"]:
        echo("process", f"pid {facts['pid']}")
    echo("mailbox", facts["mailbox"])
    echo("outbox", plural(facts["outbox"], "message"))
    unread_text = f"{facts['unread'] or 0} unread"
    echo("inbox", aged(unread_text, facts["oldest_unread_at"]))
    answers = aged(plural(facts["owed"], "answer"), facts["oldest_owed_at"])
    echo("owes", answers, f"{facts['overdue']} overdue" if facts["overdue"] else None)
    echo("dead", plural(facts["dead"], "dead letter"))
    channels = facts["channels"]
    echo("channels", "unknown" if channels is None else ", ".join(channels) or "none")
    if facts["latest"]:
        click.echo()
        print_messages(facts["latest"], as_json=False, wide=False)


@agents.command(epilog='\b\nExample:\n  relay agents retire bob --reason "its work is done"')
@control_options
@click.argument("name", shell_complete=complete_agents)
@click.option("--reason", metavar="TEXT", help="Reason, shown to agents that write to it.")
def retire(ctx: click.Context, /, name: str, reason: str | None, **caller: Any) -> None:
    """Take an agent out of service: mail to it bounces, with the reason.

    Its inbox stays. It becomes active again by `revive`, by writing a message, or when a new
    process registers as it.
    """
    send_command(ctx, "agent.retire", {"NAME": name, "REASON": reason}, **caller)


@agents.command(epilog="\b\nExample:\n  relay agents revive bob")
@control_options
@click.argument("name", shell_complete=complete_agents)
def revive(ctx: click.Context, /, name: str, **caller: Any) -> None:
    """Make a retired or terminated agent active again, with inbox and history."""
    send_command(ctx, "agent.revive", {"NAME": name}, **caller)


@command(epilog="\b\nExamples:\n  relay register bob\n  relay register alice --role lead")
@click.argument("name")
@click.option("--role", type=click.Choice(["lead", "member"]), help="`TO: Lead` means the lead.")
def register(
    ctx: click.Context, home: str | None, name: str, role: str | None, as_json: bool
) -> None:
    """Create an agent's mailbox, or change its role.

    Only needed to set a role: a directory made with `mkdir -p` is an agent, too. A terminated or
    retired agent becomes active again, by a message to the relay.
    """
    from relay.base import fsio
    from relay.reach.binding import revive

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        every = list(opened.agent_names())
        alike = [one for one in every if one != name and one.lower() == name.lower()]
        opened.make_agent(name)
        if role is not None:
            meta = read_agent_meta(opened, name)
            path = opened.path("agents", name, META)
            fsio.write_atomic(path, json.dumps(meta | {"role": role}).encode())
        meta_role = _role(opened.read_meta(name))
        revive(opened, name)
    leads = [one for one in every if one.lower() == LEAD and one != name]
    if meta_role == LEAD and leads:
        line = f"relay: `TO: {leads[0]}` means the agent of that name; {name} gets what is sent"
        click.echo(f"{line} TO: Lead in another spelling", err=True)
    elif name.lower() == LEAD != meta_role:
        line = f"relay: `TO: {name}` means this agent; another spelling of Lead means the agent"
        click.echo(f"{line} with the role lead", err=True)
    elif alike:
        line = f"relay: there is also an agent {', '.join(sorted(alike))}; names are case-sensitive"
        click.echo(line, err=True)
    if as_json:
        echo_json({"name": name, "role": meta_role})
    else:
        click.echo(f"registered {name}; mailbox: {opened.path('agents', name)}")


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
    tended, called = _supervised(db), latest_calls(home)
    found: dict[str, AgentAlert] = {}
    for name, status, seen_at in rows:
        if status not in PRESENT:
            continue
        ended = None if name in tended else _ended_pid_of(home, name)
        silent: int | None = None
        if name in waiting and name != OPERATOR:  # a person may be away
            since = max(waiting[name], seen_at or 0, called.get(name, 0))
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
