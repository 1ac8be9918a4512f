"""What ledger and store tell of agents: when each was last heard, and since when it owes something.

Owed is a message that stands unread in an inbox, and an answer to one that expects it. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from relay.base.clock import NS_PER_S
from relay.base.message import Kind
from relay.base.names import answer_id
from relay.engine.commstore import CommStore
from relay.ledger import Ledger
from relay.ledger.processes import PendingOperation


class LastSeen(NamedTuple):
    """What is known of one agent; Unix nanoseconds."""

    seen_at: int | None  # it wrote or read; None: never
    owes_since: int | None  # the oldest thing that it owes; None: nothing


class Activity:
    """Asks ledger and store. Used from the loop's thread."""

    def __init__(self, ledger: Ledger, store: CommStore) -> None:
        self._ledger = ledger
        self._store = store

    def last_seen(self, names: Iterable[str]) -> dict[str, LastSeen]:
        """What is known of these agents; one look at what awaits an answer for all of them."""
        wanted = set(names)
        heard = self._ledger.processes.last_seen(wanted)
        owes = self._ledger.processes.unread_since(wanted)
        state = self._store.state
        for timer in state.timers:
            _, number, recipient = timer
            if recipient not in wanted or not state.is_current(timer):
                continue
            message = state.messages.get(number)
            if message is not None and message.delivered_at:
                since = message.delivered_at * NS_PER_S
                owes[recipient] = min(since, owes.get(recipient, since))
        for known in state.owed.values():
            for recipient in wanted.intersection(known):
                if not known[recipient].said:  # what has begun takes the time that it takes
                    since = known[recipient].since * NS_PER_S
                    owes[recipient] = min(since, owes.get(recipient, since))
        return {name: LastSeen(heard.get(name), owes.get(name)) for name in wanted}

    def previous_answer(self, intent: PendingOperation) -> tuple[Kind, str] | None:
        """What was said to a request already, before a crash; the same id is never said twice."""
        for kind in (Kind.ACK, Kind.NACK):
            at, agent, message_id = intent.asked_at, intent.requested_by, intent.request_id
            said = self._store.find_by_relay_id(answer_id(at, agent, message_id, kind))
            if said is not None:
                return kind, said.content.decode().removesuffix("\n")
        return None
