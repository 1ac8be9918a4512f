"""The list of all that waits for a person: no agent and no relay settles it by itself.

An item vanishes when what it says is no longer so. One that was hushed is left out until the time
given, or until the same trouble begins anew; ``attention.json`` in the home has those.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, local_time
from relay.base.errors import RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import LEDGER, Home, lock_holder, unclean_stop
from relay.base.message import parse_delivered
from relay.base.names import (
    MESSAGE_ID,
    MSG_SUFFIX,
    OPERATOR,
    ORCHESTRATOR,
    PERMISSION,
    options_of,
    permission_ms,
)
from relay.base.text import plural
from relay.ledger import UNREAD
from relay.reach.session import ENDED, session_lock
from relay.views.agents import ListedAgent, list_agents
from relay.views.ids import messages_in, read_file
from relay.views.message import read_message
from relay.views.sessions import UNSEEN

if TYPE_CHECKING:
    import sqlite3

KNOWN = "attention.json"  # in the home
FOREVER = 1 << 62
WAITING_NS = 60 * NS_PER_S  # a file that waits in its outbox is often taken soon
IDLE_NS = 60 * NS_PER_S  # an agent that has just become idle may go on by itself
MOST = 200  # of one kind
MOST_HUSHED = 1000
# The newest of each sender first: ids are the senders', and nobody's hide what another asks.
_ASKED = """
SELECT message_id, agent_name, message_type, at, count(*) OVER (PARTITION BY agent_name) AS in_all,
    row_number() OVER (PARTITION BY agent_name ORDER BY at DESC) AS turn
FROM (
    SELECT d.message_id, m.agent_name, m.message_type, coalesce(d.written_at, m.discovered_at) AS at
    FROM deliveries AS d JOIN messages AS m USING (message_id)
    WHERE d.recipient = ? AND (d.obligation = 'open'
        OR d.obligation = 'given_up' AND d.state NOT IN ('expired', 'bounced')))
ORDER BY turn, at DESC LIMIT ?"""
_MAIL = f"""
SELECT count(*), max(d.written_at), coalesce(sum(m.agent_name = ?), 0)
FROM {UNREAD} JOIN deliveries AS d USING (message_id, recipient)
JOIN messages AS m USING (message_id)
WHERE d.recipient = ? AND d.obligation IS NULL"""
_ENDED = """
SELECT name, state, changed_at, last_error FROM processes
WHERE state IN ('failed', 'stuck') AND started_at IS NOT NULL  -- who asked for another was told
ORDER BY changed_at DESC LIMIT ?"""
_DEAD = """
SELECT d.message_id, d.recipient, m.agent_name, d.last_error,
    coalesce((SELECT max(at) FROM audit_log AS a WHERE a.message_id = d.message_id
              AND a.recipient = d.recipient AND a.new_status = 'dead'),
             d.written_at, d.staged_at) AS at
FROM deliveries AS d JOIN messages AS m USING (message_id)
WHERE d.state = 'dead' AND d.discarded_at IS NULL ORDER BY at DESC LIMIT ?"""
_REFUSED = """
SELECT d.message_id, d.recipient, d.written_at
FROM deliveries AS d JOIN messages AS m USING (message_id)
WHERE d.state = 'written' AND d.recipient <> ? AND m.agent_name = ? AND m.message_type = 'nack'
ORDER BY d.message_id DESC LIMIT ?"""
_DIED = """
SELECT 1 FROM deliveries WHERE message_id = :id AND state = 'dead'
UNION ALL SELECT 1 FROM audit_log WHERE message_id = :id AND new_status = 'dead'"""
_HELD = """
SELECT min(d.message_id), d.recipient, count(*), min(coalesce(d.staged_at, m.discovered_at)),
    max(d.last_error)
FROM deliveries AS d JOIN messages AS m USING (message_id)
WHERE d.state = 'held' AND coalesce(d.last_error, '') NOT LIKE 'not before %'
GROUP BY d.recipient ORDER BY 4 DESC LIMIT ?"""
_WAITING = """
SELECT agent_name, count(*), min(discovered_at) AS at, last_error, min(message_id)
FROM messages WHERE status IN ('pending', 'processing', 'completed')  -- the index messages_open
    AND status = 'pending' AND last_error IS NOT NULL
GROUP BY agent_name HAVING at < ? ORDER BY at LIMIT ?"""
_UNREAD_SINCE = f"SELECT recipient, min(written_at), count(*) FROM {UNREAD} GROUP BY 1"


class Item(NamedTuple):
    """Something that waits for a person."""

    key: str  # of this trouble, to hush it: a message id, or ``kind:name``
    kind: str  # question, permission, mail, blocked, gone, idle, dead, refused, held, waits, …
    at: int  # Unix ns: since when; 0: not known
    who: str | None  # the agent that it is about, or that waits
    what: str  # in words; may contain what an agent wrote
    command: str  # what settles it
    id: str | None = None  # of the message
    options: tuple[str, ...] = ()  # of a question: one of them answers it


def attention(
    home: Home, findings: Iterable[Finding] = (), now_ns: int | None = None
) -> list[Item]:
    """All that waits for a person, the newest last; what was hushed is left out.

    ``findings``: of doctor; errors count, and a disk that fills up. Errors: RelayError, OSError.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    hushed = _read(home).hushed
    items = [*_of_messages(home, now_ns), *_of_agents(home, now_ns), *_of_relay(home, now_ns)]
    items += _of_findings(findings)
    items = [item for item in items if not _is_hushed(item, hushed.get(item.key), now_ns)]
    return sorted(items, key=lambda item: (item.at, item.key))


def hush(home: Home, item: Item, until_ns: int = FOREVER) -> None:
    """Leave an item out until then, or until it begins anew. Errors: OSError."""
    with _changing(home) as known:
        known.hushed[item.key] = (item.at, until_ns)
        newest = sorted(known.hushed.items(), key=lambda pair: pair[1])[-MOST_HUSHED:]
        known.hushed = dict(newest)


def tell_new(home: Home, items: Sequence[Item], tell: Callable[[list[Item]], None]) -> None:
    """Call ``tell`` with the items that it was not told of; remember them once it returns.

    Errors: those of ``tell``, and OSError.
    """
    told = _read(home).told
    if new := [item for item in items if told.get(item.key, -1) < item.at]:
        tell(new)
    with _changing(home) as known:
        known.told = {item.key: item.at for item in items}


class _Known(msgspec.Struct):
    """The content of ``attention.json``; times are Unix ns."""

    hushed: dict[str, tuple[int, int]] = {}  # key -> the item's time, until when it is left out
    told: dict[str, int] = {}  # key -> the item's time


@contextlib.contextmanager
def _changing(home: Home) -> Iterator[_Known]:
    with session_lock(home.root, "attention"):
        known = _read(home)
        yield known
        fsio.write_atomic(home.path(KNOWN), msgspec.json.encode(known))


def _read(home: Home) -> _Known:
    """The content of the file; none of one that ``_changing`` did not write."""
    try:
        with open(home.path(KNOWN), "rb") as file:
            return msgspec.json.decode(file.read(1 << 20), type=_Known)
    except (OSError, msgspec.DecodeError, RecursionError):
        return _Known()


def _is_hushed(item: Item, entry: tuple[int, int] | None, now_ns: int) -> bool:
    return entry is not None and item.at <= entry[0] and now_ns < entry[1]


def _of_messages(home: Home, now_ns: int) -> Iterator[Item]:
    """Yield what messages wait for: questions, mail, dead letters, refusals, what is held."""
    from relay.ledger.file import open_current

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        asked = db.execute(_ASKED, (OPERATOR, MOST)).fetchall()
        mail = db.execute(_MAIL, (ORCHESTRATOR, OPERATOR)).fetchone()
        dead = db.execute(_DEAD, (MOST,)).fetchall()
        refusals = [*_refusals(db, home, now_ns)]
        held = db.execute(_HELD, (MOST,)).fetchall()
        waiting = db.execute(_WAITING, (now_ns - WAITING_NS, MOST)).fetchall()
    shown = Counter(row["agent_name"] for row in asked)
    for message_id, sender, kind, at, in_all, turn in asked:
        item, over = _question(home, message_id, sender, kind, at)
        if now_ns < over:
            yield item
        if turn == shown[sender] < in_all:
            what = f"{in_all - turn} more, older ones"
            command = f"relay list is:open from:{sender} to:{OPERATOR}"
            yield Item(f"more:{sender}", "question", at, sender, what, command)
    if mail[0]:
        what = f"{plural(mail[0], 'unread message')} for the operator"
        if mail[2]:
            what += f", {'' if mail[2] == mail[0] else f'{mail[2]} of them '}from the relay"
        yield Item("mail:operator", "mail", mail[1] or now_ns, None, what, "relay inbox")
    dead.sort(key=lambda row: (row["message_id"], row["recipient"]))
    for message_id, rows in itertools.groupby(dead, lambda row: row["message_id"]):
        yield _dead_letter(message_id, [*rows], now_ns)
    yield from refusals
    for message_id, recipient, count, at, why in held:
        what = f"{plural(count, 'message')} held" + (f": {why}" if why else "")
        command = f"relay trace {message_id}"
        yield Item(f"held:{recipient}", "held", at, recipient, what, command, message_id)

    for agent, count, at, why, message_id in waiting:
        if not _has_files(home, agent):
            continue  # their sender took them back: a start of the relay notes it
        what = f"{plural(count, 'message')} in its outbox: {why}"
        yield Item(f"waits:{agent}", "waits", at, agent, what, f"relay trace {message_id}")


def _has_files(home: Home, agent: str) -> bool:
    with contextlib.suppress(OSError):
        names = os.listdir(home.path("agents", agent, "outbox"))
        return any(name.endswith(MSG_SUFFIX) for name in names)
    return False


def _dead_letter(message_id: str, rows: list[sqlite3.Row], now_ns: int) -> Item:
    """A dead letter, to one recipient or several: one replay is for all of them."""
    names = [row["recipient"] for row in rows]
    to = f" to {plural(len(rows), 'recipient')}" if len(rows) > 1 else ""
    what = f"from {rows[0]['agent_name']}{to}: {rows[0]['last_error'] or 'no acknowledgment'}"
    at = max(row["at"] or now_ns for row in rows)
    who = names[0] if len(names) == 1 else None
    key = f"{message_id}:{','.join(names)}"
    return Item(key, "dead", at, who, what, f"relay dead replay {message_id}", message_id)


def _question(home: Home, message_id: str, sender: str, kind: str, at: int) -> tuple[Item, int]:
    """A question or a request to the operator, and when it no longer matters (Unix ns)."""
    text, options, waits_ms = "", tuple[str, ...](), 0
    with contextlib.suppress(RelayError):
        file = read_message(home.root, message_id).file
        waits_ms = permission_ms(file.headers.get(PERMISSION))
        text = file.body.decode(errors="replace").strip().partition("\n")[0]
        options = options_of(file.headers.get("OPTIONS"))
    if options:
        may_approve = "yes" in [option.lower() for option in options]
        dashes = "-- " * options[0].startswith("-")
        command = f"relay reply {dashes}{message_id} {shlex.quote(options[0])}"
        command = f"relay approve {message_id}" if may_approve else command
        text = f"{text} ({', '.join(options)})"
    elif kind == "query":
        command = f'relay reply {message_id} "…"'
    else:
        command = f"relay ack {message_id} completed"
    what = text or f"a {kind}"
    name = "question" if kind == "query" else "request"
    over = FOREVER
    if waits_ms:  # then the agent's own dialog asks
        name, over = "permission", at + waits_ms * NS_PER_MS
    return Item(message_id, name, at, sender, what, command, message_id, options), over


def _refusals(db: sqlite3.Connection, home: Home, now_ns: int) -> Iterator[Item]:
    """Yield an item for each agent with unread refusals. What died is an item of its own, as long
    as it waits; the operator's are mail."""
    by_sender: dict[str, list[Item]] = {}
    for nack_id, recipient, at in db.execute(_REFUSED, (OPERATOR, ORCHESTRATOR, MOST)):
        item = _refusal(home, nack_id, at or now_ns, recipient)
        if db.execute(_DIED, {"id": item.id}).fetchone() is None:
            by_sender.setdefault(recipient, []).append(item)
    for recipient, (item, *others) in by_sender.items():
        if others:
            count = plural(1 + len(others), "message")
            what = f"{count} of it were refused, the last one {item.what}"
            item = item._replace(what=what, command=f"relay inbox --as {recipient}")
        yield item


def _refusal(home: Home, nack_id: str, at: int, recipient: str) -> Item:
    """A nack of the relay that lies unread in the inbox of its sender."""
    about, why = nack_id, "a message of it was refused"
    path = f"agents/{recipient}/inbox/{nack_id}{MSG_SUFFIX}"
    with contextlib.suppress(OSError, RelayError):
        nack = parse_delivered(read_file(home, path) or b"", file=path)
        given = nack.headers.get("RE", "")
        about = given if MESSAGE_ID.fullmatch(given) else nack_id  # the agent may have written it
        why = nack.body.decode(errors="replace").partition("\n")[0]
        why = why.replace(f"{about}{MSG_SUFFIX}: ", "")
    return Item(nack_id, "refused", at, recipient, why, f"relay trace {about}", about)


def _of_agents(home: Home, now_ns: int) -> Iterator[Item]:
    """Yield agents that need a person: blocked, failing, gone or idle with answers owed."""
    from relay.ledger.file import open_current

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        unread = {row[0]: (row[1], row[2]) for row in db.execute(_UNREAD_SINCE)}
        ended = db.execute(_ENDED, (MOST,)).fetchall()
    for name, state, at, why in ended:
        what = f"its process {'is stuck' if state == 'stuck' else 'has failed'}"
        what += f": {why}" if why else ""
        yield Item(f"process:{name}", "process", at, name, what, f"relay logs {name}")
    for agent in list_agents(home, now_ns):
        name, state = agent.row["name"], agent.state
        if name in (OPERATOR, ORCHESTRATOR):
            continue
        if (item := _of_agent(agent, now_ns)) is not None:
            yield item
        since, count = unread.get(name, (0, 0))
        if count and agent.unread is None:
            what = f"its mailbox is gone, and {plural(count, 'unread message')} with it"
            yield Item(f"mailbox:{name}", "gone", since, name, what, f"relay register {name}")
        elif count and state and (why := _why_not_rung(home, name)):
            what = f"{plural(count, 'message')} unread, and {why}"
            command = f"relay wake status {name}"
            yield Item(f"bell:{name}", "bell", since or state.since, name, what, command)


def _of_agent(agent: ListedAgent, now_ns: int) -> Item | None:
    row, state = agent.row, agent.state
    name, owed = row["name"], row["owed"]
    owes = f"owes {plural(owed, 'answer')}"
    show, open_ = f"relay agents show {name}", f"relay open --agent {name}"
    doing = state.state if state else ""
    if state and doing in WAITING_STATES:
        return Item(f"{doing}:{name}", doing, state.since, name, state.text(owed, now_ns), show)
    if not owed:
        return None
    is_away = row["status"] != "active"
    if is_away or agent.alert.ended_pid is not None or doing in (ENDED, UNSEEN):
        since = (row["changed_at"] if is_away else agent.seen_at) or now_ns
        seen = f"not seen since {local_time(agent.seen_at, now_ns)}" if agent.seen_at else "gone"
        how = row["status"] if is_away else seen
        return Item(f"gone:{name}", "gone", since, name, f"{how}, and {owes}", open_)
    if state and doing == "idle" and now_ns - state.since >= IDLE_NS and not agent.unread:
        return Item(f"idle:{name}", "idle", state.since, name, f"idle, and {owes}", open_)
    return None


WAITING_STATES = ("blocked", "failing")  # of a session: a person has to do something there


def _why_not_rung(home: Home, name: str) -> str:
    """Why a live session is not rung that should be; empty if it is."""
    from relay.reach.rungs import silence
    from relay.reach.session import IDLE, is_ringing, load_sessions

    live = [
        session for session in load_sessions(home.root) if session.agent == name and session.is_live
    ]
    idle = [session for session in live if session.state == IDLE]
    if any(not is_ringing(home.root, session) for session in idle):
        return "its bell does not run"
    return next((f"it was {why}" for session in idle if (why := silence(home.root, session))), "")


def _of_relay(home: Home, now_ns: int) -> Iterator[Item]:
    """Yield files that wait for a relay that does not run."""
    if lock_holder(home) is not None:
        return
    waiting = [(agent, message_id) for agent, message_id in messages_in(home, "outbox")]
    if waiting or unclean_stop(home) is not None:
        first = min((_sent_ns(home, *message) for message in waiting), default=0)
        what = f"no relay is running; {plural(len(waiting), 'message')} in outboxes"
        yield Item("relay", "relay", min(first, now_ns), None, what, "relay up")


def _sent_ns(home: Home, agent: str, message_id: str) -> int:
    """When a file was renamed into the outbox (Unix ns); a name may say anything."""
    try:
        return os.lstat(home.path("agents", agent, "outbox", message_id + MSG_SUFFIX)).st_ctime_ns
    except OSError:  # taken in the meantime
        return time.time_ns()


def _of_findings(findings: Iterable[Finding]) -> Iterator[Item]:
    """Yield doctor's errors, and its word on a disk that fills up."""
    for finding in findings:
        is_disk = finding.what == "limits" and "disk" in finding.found
        if finding.severity is Severity.ERROR or (is_disk and finding.severity is Severity.WARNING):
            kind = "disk" if is_disk else "doctor"
            key = f"{kind}:{finding.what}:{finding.where}"
            yield Item(key, kind, 0, None, finding.text, finding.advice or "relay doctor")
