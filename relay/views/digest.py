"""The digest of a home: what agents did since a time, and what is still open. Without Spark.

Read from the ledger in one read transaction; nothing is written, also not when the last digest
was made: what happened is compared with what happened in as much time before. Rows of a time are
found by bisection, since ids are in order of time: after the clock was set back some rows may
count for the neighbouring time.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from relay.base.names import ORCHESTRATOR
from relay.ledger import NOT_CANCELLED, UNREAD
from relay.ledger.file import first_id_since, open_current

REFUSED = "refused"  # outcome
MOST_NAMED = 3  # answers and slow deliveries in a digest


class Counts(msgspec.Struct):
    """The events of a period, by number."""

    messages: int = 0  # sent by agents
    asked: int = 0  # commands and queries to agents
    answered: int = 0  # of the answers to these
    failed: int = 0  # answered by a nack
    unanswered: int = 0  # still open
    given_up: int = 0
    ended: int = 0  # deliveries dead, expired or bounced
    refused: int = 0


class Owed(msgspec.Struct):
    """An answer that is owed, or was until it was given up."""

    message_id: str
    agent: str  # who asked
    recipient: str  # who owes it
    kind: str
    asked_at: int  # discovery, Unix ns
    due_at: int | None
    reminders: int


class Slow(msgspec.Struct):
    """A delivery and its time from discovery to inbox."""

    message_id: str
    agent: str
    recipient: str
    inbox_ms: float


class Reason(msgspec.Struct):
    """Deliveries that ended, or messages that were refused, for the same agent and reason."""

    agent: str  # the recipient; of a refusal the sender
    outcome: str  # dead, expired, bounced or refused
    reason: str
    count: int


class Digest(msgspec.Struct):
    """The work of agents since a time, and the open answers. Times are Unix nanoseconds."""

    since_at: int
    until_at: int
    counts: Counts
    before: Counts | None  # of as much time before; None: the ledger begins later
    agents: int  # known ones
    worked: dict[str, int]  # agent -> messages sent, the most first; 0: it only read
    joined: list[str]  # registered since
    left: dict[str, str]  # agent -> status, where that changed and it is not active
    open_answers: int
    open: list[Owed]  # the longest waiting first
    held: int  # deliveries that are not in an inbox yet
    unread: int
    slowest: list[Slow]
    ended: list[Reason]  # the most frequent first
    refused: list[Reason]
    given_up: list[Owed]  # of the commands and queries since then, the latest first


class _Period(NamedTuple):
    """Rows of a time: from the first id to before the last one."""

    since: int
    until: int
    first: int
    end: int
    log_first: int
    log_end: int


def make_digest(ledger: str, since_ns: int, now_ns: int) -> Digest:
    """Read the digest of ``since_ns`` to ``now_ns`` from the ledger at this path.

    Errors: LedgerMissing; LedgerError for a ledger that is damaged or of an earlier schema.
    """
    with contextlib.closing(open_current(ledger)) as db:
        db.execute("BEGIN")  # all of it is of one instant
        period = _period(db, since_ns, now_ns)
        ended = _ended(db, period)
        agents = db.execute(_AGENTS).fetchall()
        sent = dict(map(tuple, db.execute(_SENT, period._asdict())))
        owed = db.execute(_OPEN).fetchall()
        return Digest(
            since_at=since_ns,
            until_at=now_ns,
            counts=_counts(db, period, len(ended)),
            before=_before(db, period, ended),
            agents=len(agents),
            worked=sent
            | {agent["name"]: 0 for agent in agents if _only_read(agent, sent, since_ns)},
            joined=[agent["name"] for agent in agents if agent["registered_at"] >= since_ns],
            left={
                agent["name"]: agent["status"]
                for agent in agents
                if agent["status"] != "active" and (agent["changed_at"] or 0) >= since_ns
            },
            open_answers=len(owed),
            open=[Owed(*row) for row in owed[:MOST_NAMED]],
            held=db.execute(_HELD).fetchone()[0],
            unread=db.execute(_UNREAD).fetchone()[0],
            slowest=[Slow(*row) for row in db.execute(_SLOWEST, period._asdict())],
            ended=_by_reason(ended.values()),
            refused=_by_reason(_refused(db, period)),
            given_up=[Owed(*row) for row in db.execute(_GIVEN_UP, period._asdict())],
        )


_AGENTS = "SELECT name, registered_at, last_seen_at, status, changed_at FROM agents ORDER BY name"
_SENT = f"""
SELECT agent_name, count(*) FROM messages
WHERE id >= :first AND id < :end AND agent_name <> '{ORCHESTRATOR}'
GROUP BY 1 ORDER BY 2 DESC, 1"""
# Conditions word for word as in schema.sql: each has an index.
_OWED = """
SELECT d.message_id, m.agent_name, d.recipient, m.message_type, m.discovered_at, d.due_at,
       d.reminders"""
_OPEN = f"""{_OWED}
FROM deliveries AS d JOIN messages AS m USING (message_id)
WHERE d.obligation = 'open' ORDER BY m.discovered_at, m.id, d.recipient"""
_HELD = "SELECT count(*) FROM deliveries WHERE state IN ('held', 'staged')"
_UNREAD = f"SELECT count(*) FROM {UNREAD}"
_ASKED = f"""
SELECT message_id FROM messages
WHERE id >= :first AND id < :end AND message_type IN ('command', 'query') AND status <> 'failed'
  AND agent_name <> '{ORCHESTRATOR}' AND target IS NOT '{ORCHESTRATOR}'"""
_ANSWERS = f"""
SELECT iif(d.obligation = 'answered' AND d.ack_status IS 'failed', 'failed', d.obligation), count(*)
FROM ({_ASKED}) AS m CROSS JOIN deliveries AS d USING (message_id)
WHERE d.obligation IS NOT NULL AND {NOT_CANCELLED} GROUP BY 1"""
_GIVEN_UP = f"""{_OWED}
FROM ({_ASKED}) AS a CROSS JOIN deliveries AS d USING (message_id)
CROSS JOIN messages AS m USING (message_id)
WHERE d.obligation = 'given_up' AND {NOT_CANCELLED}
ORDER BY m.id DESC, d.recipient LIMIT {MOST_NAMED}"""
# As `relay audit run latency` measures: not what waited for a reason outside the relay, nor whole
# seconds, which a start has rebuilt from the journal.
_SLOWEST = f"""
SELECT m.message_id, m.agent_name, d.recipient, (d.written_at - m.discovered_at) / 1e6 AS ms
FROM messages AS m CROSS JOIN deliveries AS d USING (message_id)
WHERE m.id >= :first AND m.id < :end AND m.agent_name <> '{ORCHESTRATOR}'
  AND d.written_at % 1000000000 <> 0 AND d.attempt = 1 AND coalesce(m.retry_count, 0) = 0
  AND NOT coalesce(d.staged_at > m.processed_at, 0)
ORDER BY ms DESC LIMIT {MOST_NAMED}"""
_ENDS = "('dead', 'expired', 'bounced')"
# By the log, and where a delivery ended as it was recorded, which the log does not have.
_ENDED = f"""
SELECT d.message_id, d.recipient, d.state, d.last_error
FROM messages AS m CROSS JOIN deliveries AS d USING (message_id)
WHERE m.id >= :first AND m.id < :end AND d.state IN {_ENDS} AND m.agent_name <> '{ORCHESTRATOR}'
  AND {NOT_CANCELLED}
UNION
SELECT d.message_id, d.recipient, d.state, d.last_error
FROM audit_log AS a CROSS JOIN deliveries AS d USING (message_id, recipient)
CROSS JOIN messages AS m USING (message_id)
WHERE a.id >= :log_first AND a.id < :log_end AND a.new_status IN {_ENDS} AND d.state IN {_ENDS}
  AND m.agent_name <> '{ORCHESTRATOR}' AND {NOT_CANCELLED}"""
_REFUSED = """
SELECT agent_name, last_error FROM messages
WHERE status = 'failed' AND id >= :first AND id < :end
UNION ALL SELECT agent, reason FROM rejections WHERE at >= :since AND at < :until"""

# (message id, recipient) -> recipient, state, reason
Ended = dict[tuple[str, str], tuple[str, str, str]]


def _only_read(agent: sqlite3.Row, sent: dict[str, int], since_ns: int) -> bool:
    return agent["name"] not in sent and (agent["last_seen_at"] or -1) >= since_ns


def _period(db: sqlite3.Connection, since_ns: int, until_ns: int) -> _Period:
    edges = [
        first_id_since(db, table, column, at_ns)
        for table, column in (("messages", "discovered_at"), ("audit_log", "at"))
        for at_ns in (since_ns, until_ns)
    ]
    return _Period(since_ns, until_ns, *edges)


def _counts(db: sqlite3.Connection, period: _Period, ended: int) -> Counts:
    values = period._asdict()
    answers = dict(map(tuple, db.execute(_ANSWERS, values)))
    return Counts(
        messages=sum(row[1] for row in db.execute(_SENT, values)),
        asked=db.execute(f"SELECT count(*) FROM ({_ASKED})", values).fetchone()[0],
        answered=answers.get("answered", 0),
        failed=answers.get("failed", 0),
        unanswered=answers.get("open", 0),
        given_up=answers.get("given_up", 0),
        ended=ended,
        refused=len(_refused(db, period)),
    )


def _before(db: sqlite3.Connection, period: _Period, ended: Ended) -> Counts | None:
    """Count in as much time before; what has ended since then counts once, as ended later."""
    since_ns = 2 * period.since - period.until
    first = db.execute("SELECT discovered_at FROM messages ORDER BY id LIMIT 1").fetchone()
    if first is None or first[0] > since_ns:
        return None
    before = _period(db, since_ns, period.since)
    return _counts(db, before, len(_ended(db, before).keys() - ended.keys()))


def _ended(db: sqlite3.Connection, period: _Period) -> Ended:
    rows = db.execute(_ENDED, period._asdict())
    return {(of, to): (to, state, reason or "") for of, to, state, reason in rows}


def _refused(db: sqlite3.Connection, period: _Period) -> list[tuple[str, str, str]]:
    rows = db.execute(_REFUSED, period._asdict())
    return [(agent, REFUSED, reason or "") for agent, reason in rows]


def _by_reason(rows: Iterable[tuple[str, str, str]]) -> list[Reason]:
    counts = sorted(Counter(rows).items(), key=lambda of: (-of[1], of[0]))
    return [Reason(*key, count) for key, count in counts]
