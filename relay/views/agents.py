"""Agents: who they are, what their sessions report, what waits for them and what they owe."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from relay.base import process_info
from relay.base.clock import NS_PER_S
from relay.base.errors import LedgerError, RelayError
from relay.base.home import LEDGER
from relay.base.names import DIRECT_PREFIX, MSG_SUFFIX, OPERATOR
from relay.ledger import UNREAD
from relay.views.sessions import AgentState, agent_states, latest_calls
from relay.views.times import ago, when

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

    from relay.base.home import Home

SILENT_S = 60  # shorter pauses are normal
PRESENT = ("active", "inactive")  # for the others, the reason of the status says it
WAITING = f"""SELECT recipient, min(written_at) FROM {UNREAD} GROUP BY 1
UNION ALL
SELECT recipient, min(written_at) FROM deliveries WHERE obligation = 'open' GROUP BY 1"""
LATEST = 10  # messages on an agent's page
_NEW: dict[str, Any] = {  # a mailbox that the ledger does not have yet
    **{"status": "new", "reason": "no relay has run since its mailbox was made"},
    **{"changed_at": None, "pid": None, "registered_at": None, "last_seen_at": None},
    **{"note": None, "dead": 0, "owed": 0},
}
_OWED = """SELECT count(*) AS owed, coalesce(sum(due_at <= :now), 0) AS overdue,
    min(written_at) AS oldest_owed_at
FROM deliveries WHERE recipient = :name AND obligation = 'open'"""


_OWED_TO = """SELECT d.recipient, m.agent_name, count(*)
FROM deliveries AS d JOIN messages AS m USING (message_id)
WHERE d.obligation = 'open' GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2"""


class OwedAnswers(NamedTuple):
    """Answers that one agent owes another."""

    by: str
    to: str
    number: int


class ListedAgent(NamedTuple):
    """An agent's facts from ledger, meta.json and inbox."""

    row: Mapping[str, Any]  # of the ledger
    role: str | None  # in its meta.json
    unread: int | None  # in its inbox
    alert: AgentAlert
    state: AgentState | None  # of its session
    called_at: int  # Unix ns: when it last called a tool of the relay

    @property
    def seen_at(self) -> int | None:
        """When it last wrote, read, or called a tool (Unix ns)."""
        return max(self.row["last_seen_at"] or 0, self.called_at) or None

    @property
    def away_since(self) -> int | None:
        """When its status began (Unix ns); None for an active agent and a new one."""
        return None if self.row["status"] == "active" else self.row["changed_at"]

    def text(self, now_ns: int) -> str | None:
        """The state of its session, warnings, and its own note or the reason of its status."""
        row = self.row
        note = self.alert.text(now_ns, row["note"] if row["status"] == "active" else row["reason"])
        doing = self.state and self.state.text(row["owed"], now_ns)
        return "; ".join(filter(None, (doing, note))) or None


def list_agents(home: Home, now_ns: int) -> list[ListedAgent]:
    """List all agents by name, also those whose mailbox no relay has seen. Errors: LedgerError."""
    from relay.ledger.file import open_current

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT name, status, reason, changed_at, pid, registered_at, last_seen_at, note, "
            "(SELECT count(*) FROM deliveries WHERE recipient = name AND state = 'dead' "
            "AND discarded_at IS NULL) AS dead, "
            "(SELECT count(*) FROM deliveries WHERE recipient = name AND obligation = 'open') "
            "AS owed "
            "FROM agents"
        ).fetchall()
        alerts = find_alerts(home, db, now_ns)
    known: dict[str, Mapping[str, Any]] = {row["name"]: row for row in rows}
    known = {name: _NEW | {"name": name} for name in home.agent_names()} | known
    in_inboxes, states, called = unread(home), agent_states(home, now_ns), latest_calls(home)
    return [
        ListedAgent(
            row,
            _role_in(home, name),
            in_inboxes.get(name),
            alerts.get(name, AgentAlert()),
            states.get(name),
            called.get(name, 0),
        )
        for name, row in sorted(known.items())
    ]


def owed_answers(home: Home) -> list[OwedAnswers]:
    """List who owes whom answers, most first. Errors: LedgerError."""
    from relay.ledger.file import open_current

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        return [OwedAnswers(*row) for row in db.execute(_OWED_TO)]


def _role_in(home: Home, name: str) -> str | None:
    """Return the role in an agent's meta.json; None if it cannot be read."""
    try:
        return role_in(home.read_meta(name))
    except OSError:
        return None


def agent_facts(listed: ListedAgent, now_ns: int) -> dict[str, object]:
    row, role, unread, alert, state, _ = listed
    return {
        "name": row["name"],
        "status": row["status"],
        "role": role,
        "pid": row["pid"],
        "registered_at": row["registered_at"],
        "last_seen_at": listed.seen_at,
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
        "state_error": (state and state.error) or None,
        "session": state and state.session,
        "session_seen_at": state and state.seen_at,
    }


def agent_page(home: Home, name: str, now_ns: int) -> dict[str, Any]:
    """Collect what the list of agents does not show."""
    from relay.ledger.file import open_current
    from relay.search.query import Query
    from relay.views.messages import find_rows

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
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
        "latest": find_rows(home, Query(parties=(name,)), LATEST).rows,
    }


def _files(home: Home, name: str, folder: str) -> list[int]:
    """Return when each message in a folder of a mailbox was written (Unix ns)."""
    found: list[int] = []
    with contextlib.suppress(OSError), os.scandir(home.path("agents", name, folder)) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # read in the meantime
                if file.name.endswith(MSG_SUFFIX):
                    found.append(file.stat(follow_symlinks=False).st_mtime_ns)
    return found


def _channels(home: Home, name: str) -> list[str] | None:
    """List the channels in which an agent takes part; None if the store cannot be read."""
    from relay.views.store import read_store

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


def role_in(data: bytes | None) -> str | None:
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
    if process_info.is_elsewhere(known.get("pid_namespace")):
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


def unread(home: Home) -> dict[str, int]:
    """Count the messages in each agent's inbox, whatever their state.

    Agents whose inbox cannot be listed are left out.
    """
    counts = {name: count_unread(home.root, name) for name in home.agent_names()}
    return {name: count for name, count in counts.items() if count is not None}


def count_unread(root: str, name: str) -> int | None:
    """Count the messages in an inbox; None if it cannot be listed."""
    try:
        with os.scandir(os.path.join(root, "agents", name, "inbox")) as files:
            return sum(file.name.endswith(MSG_SUFFIX) for file in files)
    except OSError:
        return None


def parse_meta(data: bytes | None) -> dict[str, object] | None:
    """Decode a meta.json: an empty object without a file, None if it is not a JSON object."""
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def process_facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what --json shows of a process; times are Unix ns."""
    plain = ("name", "state", "pid", "cli", "cwd", "restart", "requested_by", "request_id")
    more = ("restarts", "exit_code", "cpu_percent", "rss_bytes", "idle_s", "last_error")
    times = ("started_at", "changed_at", "ended_at")
    return {name: row[name] for name in (*plain, *more, *times)}


def reached_by_all(home: Home, sender: str) -> tuple[list[str], int]:
    """The agents that a message to `*` goes to, and how many of them have a session to wake."""
    from relay.ledger.file import open_current
    from relay.reach.session import load_sessions

    present = "SELECT name FROM agents WHERE status = 'active'"  # others get no broadcast
    try:
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            names = {row[0] for row in db.execute(present)}
    except LedgerError:  # no relay has run here yet
        names = set(home.agent_names())
    live = {session.agent for session in load_sessions(home.root) if session.is_live}
    found = sorted(names - {sender})
    return found, len(live & set(found))
