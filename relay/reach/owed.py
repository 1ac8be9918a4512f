"""Owed answers: what an agent hears when it wants to stop, and what the relay hears of its state.

The hook of Stop or AfterAgent calls ``at_stop``, which reads the ledger; no relay has to run. A
ledger that is missing, locked or damaged owes nothing: a session is never disturbed. Each
state is told with ``report_state``. Both are called under the session's lock; the session is saved
before anything is printed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from relay.base.clock import elapsed
from relay.base.text import plural
from relay.reach.mailbox import SUFFIX, is_there, open_ledger, read_message
from relay.reach.report import STATE, write_report
from relay.reach.session import IDLE, Session, acting_as

MOST_BLOCKS = 3  # stops in a row that are refused, whatever the vendor allows
MOST_TOLD = 2  # how often a session hears of one message
MOST_SHOWN = 5  # messages in one text; more are counted
MOST_OWED = 256  # answers that are looked at, the oldest first
MOST_WAITING = 64  # files in an outbox that are looked at
HEADER_BYTES = 4096
_OWED = """
SELECT d.message_id, m.agent_name, m.message_type, coalesce(d.written_at, m.discovered_at)
FROM deliveries AS d JOIN messages AS m ON m.message_id = d.message_id
WHERE d.recipient = ? AND d.obligation = 'open' ORDER BY 4, 1 LIMIT ?"""


class OwedAnswer(NamedTuple):
    """An answer that an agent owes."""

    message_id: str
    sender: str
    kind: str  # command or query
    since: int  # Unix ns: when the message was in the inbox

    def how(self, acts: str) -> str:
        """The commands that answer it; ``acts``: their option for the agent's name."""
        name, nack = self.message_id, f"`relay nack{acts} {self.message_id} REASON`"
        if self.kind == "query":
            return f"`relay reply{acts} {name} ANSWER`, or {nack}"
        return f"`relay ack{acts} {name} completed`, or {nack}"


def at_stop(root: str, session: Session, now_ns: int | None = None) -> str | None:
    """The text with which a stop is refused; None: it stops.

    Facts only: what is owed, to whom, since when, and how it is answered. A message is named twice
    at most, and no stop is refused if nothing changed since the last one that was. Changes
    ``session``, but for ``blocks``: call it under its lock, and save it.
    """
    owed = owed_answers(root, session.agent)
    ids = [answer.message_id for answer in owed]
    session.told = {message_id: n for message_id, n in session.told.items() if message_id in ids}
    fresh = [answer for answer in owed if session.told.get(answer.message_id, 0) < MOST_TOLD]
    if not fresh or session.blocks >= MOST_BLOCKS or ids == session.owed:
        return None
    session.owed = ids
    for answer in fresh[:MOST_SHOWN]:
        session.told[answer.message_id] = session.told.get(answer.message_id, 0) + 1
    return owed_text(session.agent, fresh, time.time_ns() if now_ns is None else now_ns)


def owed_text(agent: str, owed: list[OwedAnswer], now_ns: int) -> str:
    """One line for each owed answer, of ``MOST_SHOWN`` at most."""
    acts = acting_as(agent)
    lines = [
        f"{answer.sender} has waited {elapsed(now_ns - answer.since)} for an answer to "
        f"{answer.kind} {answer.message_id}: {answer.how(acts)}."
        for answer in owed[:MOST_SHOWN]
    ]
    if len(owed) > MOST_SHOWN:
        more = len(owed) - MOST_SHOWN
        lines.append(f"{plural(more, 'more answer')} owed: `relay open --agent {agent}` lists all")
    return "agent-relay: " + "\n".join(lines)


def owed_answers(root: str, agent: str) -> list[OwedAnswer]:
    """The answers that an agent owes, oldest first.

    Without messages that are still in its inbox: it was not shown them yet. Without those whose
    answer is in its outbox, for a relay that does not run or comes to it in a moment.
    """
    seen = [
        answer
        for answer in _open_answers(root, agent)
        if not is_there(root, agent, answer.message_id)
    ]
    answered = set(_answered(os.path.join(root, "agents", agent, "outbox"))) if seen else set()
    return [answer for answer in seen if answer.message_id not in answered]


def still_owed(root: str, agent: str, message_id: str) -> str:
    """The line for an agent that wrote about a message and still owes an answer to it; or ""."""
    for answer in _open_answers(root, agent):
        if answer.message_id == message_id:
            how = answer.how(acting_as(agent))
            return f"{answer.sender} still waits for an answer to {answer.kind} {message_id}: {how}"
    return ""


def report_state(root: str, session: Session, state: str) -> None:
    """Change a session's state, and report it to the relay; an idle one with what it owes.

    Nothing is reported if the state is the same. Call it under the session's lock, and save it.
    """
    if state == session.state:
        return
    session.state, session.state_at = state, time.time_ns()
    owes = (
        [answer.message_id for answer in owed_answers(root, session.agent)] if state == IDLE else []
    )
    entry = {"what": STATE, "session": session.key, "at": session.state_at}
    try:
        write_report(root, session.agent, [entry | {"state": state, "owes": owes}])
    except OSError:  # the relay finds the state in the session's file
        pass


def _open_answers(root: str, agent: str) -> list[OwedAnswer]:
    """The open answers of the ledger, oldest first; none if it cannot be read."""
    import sqlite3  # here, because a prompt does not need it

    try:
        with contextlib.closing(open_ledger(root)) as db:
            return [OwedAnswer(*row) for row in db.execute(_OWED, (agent, MOST_OWED))]
    except (OSError, sqlite3.Error):
        return []


def _answered(outbox: str) -> Iterator[str]:
    """Yield the ids of messages that a file in the outbox answers for good."""
    try:
        names = sorted(name for name in os.listdir(outbox) if name.endswith(SUFFIX))
    except OSError:
        return
    for name in names[-MOST_WAITING:]:
        if (read := read_message(os.path.join(outbox, name), HEADER_BYTES)) is None:
            continue  # the relay took it in the meantime
        fields, body = dict(read[0]), read[1] or b""
        kind = fields.get("KIND", "").lower()
        is_end = kind in ("response", "nack") or (
            kind == "ack" and body.lstrip().startswith(b"completed")
        )
        if is_end and fields.get("RE"):
            yield fields["RE"]
