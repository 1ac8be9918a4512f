"""Recovery of inboxes: the deliveries in the journal are compared with the files.

A SIGKILL undoes nothing: what was staged in the journal is renamed now, or was renamed before.
A power cut may undo renames that were not synced, and leave files without their content:

| delivery | file | done |
|---|---|---|
| staged, or delivered lately | whole in inbox/.pending | renamed into the inbox |
| delivered, unread | whole in inbox/.pending, SIGKILL in a cancellation | the same |
| the same | missing everywhere, or damaged in the inbox | removed; due again, as the next attempt |
| delivered, read in the ledger alone | anywhere | read: recorded again |
| read, taken | whole in the inbox | moved to inbox/.read again |
| read, removed; or cancelled | in the inbox | removed again |
| read, answered or ended | damaged in the inbox | removed |
| delivered again, after it left the store | damaged in the inbox | due again, then removed |

Lately means since the last checkpoint, before which everything is synced; so it is before
messages roll into an archive. See docs/states.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from relay.acomm.model import Delivery, DeliveryState, Message
from relay.base import fsio
from relay.base.errors import MessageError, UnsafePath
from relay.base.home import PENDING, READ, Dirs, Home
from relay.base.message import (
    DEFAULT_MAX_BODY_BYTES,
    MessageFile,
    max_file_bytes,
    parse_delivered,
)
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of
from relay.base.outcomes import is_cancelled
from relay.delivery import file_ops
from relay.delivery.reads import was_taken
from relay.engine.engine import Engine
from relay.ledger import TAKEN
from relay.ledger.deliveries import DeliveryFacts, held_delivery
from relay.ledger.ledger import Ledger

Key = tuple[int, str]  # number of a message in the store, recipient
ROWS = 5_000  # looked up at once
DAMAGED = "its file was damaged by a power cut"
ENDED = ("read", "acked", "dead", "expired", "bounced")


class InboxRepair:
    """Compares the deliveries in the journal with the files in inboxes."""

    def __init__(
        self, dirs: Dirs, store: Engine, ledger: Ledger, *, may_lack_unsynced: bool
    ) -> None:
        self._dirs = dirs
        self._store = store
        self._ledger = ledger
        self._may_lack_unsynced = may_lack_unsynced

    def finish_staged(self, open_ones: Iterable[int]) -> int:
        """Rename the files of committed deliveries; those without a file were delivered.

        ``open_ones``: numbers of the messages that may have some.
        """
        known = self._store.state.deliveries
        staged = [
            (number, recipient)
            for number in open_ones
            for recipient, delivery in known.get(number, {}).items()
            if delivery.state is DeliveryState.STAGED
        ]
        reads = self._reads_of(staged) if self._may_lack_unsynced else {}
        for message, relay_id, recipient, attempt in self._found(staged):
            if self._may_lack_unsynced:
                key = message.id, recipient
                if key in reads or self._restore(message, recipient, attempt):
                    self._store.deliveries.deliver(message.id, [recipient], attempt)
            elif file_ops.deliver(self._dirs, relay_id, recipient, again=True):
                self._store.deliveries.postpone(message.id, recipient, attempt)
            else:
                self._store.deliveries.deliver(message.id, [recipient], attempt)
        return len(staged)

    def compare(self, written: Iterable[Key]) -> int:
        """Compare recent deliveries with the inboxes after a power cut; returns how many are due
        again. ``written``: number of the message, recipient."""
        self._record_reads()
        known = self._store.state.deliveries
        recent = [
            (number, recipient)
            for number, recipient in sorted(written)
            if (delivery := known.get(number, {}).get(recipient)) is not None
            and recipient != ORCHESTRATOR
            and _is_unread(delivery)
        ]
        return sum(
            not self._restore(message, recipient, attempt)
            for message, _, recipient, attempt in self._found(recent)
        )

    def _record_reads(self) -> None:
        """Record the reads that the ledger has and the journal lost, after a power cut."""
        delivered = [
            (number, recipient)
            for number, known in self._store.state.deliveries.items()
            for recipient, delivery in known.items()
            if _is_unread(delivery) and recipient != ORCHESTRATOR
        ]
        for first in range(0, len(delivered), ROWS):
            for (number, recipient), row in self._reads_of(delivered[first : first + ROWS]).items():
                how = row.read_how or TAKEN
                self._store.deliveries.receive(number, recipient, how, row.read_at)

    def _reads_of(self, deliveries: list[Key]) -> dict[Key, DeliveryFacts]:
        """The rows of those that the ledger has as read in their present attempt, or a later one:
        the journal has lost that."""
        found = list(self._found(deliveries))
        rows = self._ledger.deliveries.rows({relay_id for _, relay_id, _, _ in found})
        reads: dict[Key, DeliveryFacts] = {}
        for message, relay_id, recipient, attempt in found:
            row = rows.get(relay_id, {}).get(recipient)
            if row is not None and row.state == "read" and row.attempt >= attempt:
                reads[message.id, recipient] = row
        return reads

    def _found(self, deliveries: Iterable[Key]) -> Iterator[tuple[Message, str, str, int]]:
        """Yield the message, its relay id, the recipient and the attempt of each."""
        for number, recipient in deliveries:
            message = self._store.messages.get(number)
            if message is not None and message.relay_id is not None:
                attempt = self._store.state.deliveries[number][recipient].attempt
                yield message, message.relay_id, recipient, attempt

    def _restore(self, message: Message, recipient: str, attempt: int) -> bool:
        """Make sure that a delivered file is in the inbox or in ``.read``; False: it is due again.

        Held and not timed: exactly-once stops a timer's attempt, and this one was lost.
        """
        assert message.relay_id is not None
        if self._read_whole(message, recipient):
            return True
        if not self._is_there(message, recipient) and self._read_whole(message, recipient, READ):
            return True  # a damaged one in the inbox is of a later attempt than the one in .read
        if not self._read_whole(message, recipient, PENDING):
            with contextlib.suppress(OSError, UnsafePath):  # there may be no further attempt
                inbox = self._dirs.get("agents", recipient, "inbox")
                fsio.remove(f"{message.relay_id}{MSG_SUFFIX}", inbox)
            self._store.deliveries.postpone(message.id, recipient, attempt + 1)
            return False
        if file_ops.deliver(self._dirs, message.relay_id, recipient, again=True):
            self._store.deliveries.postpone(message.id, recipient, attempt)
            return False
        return True

    def clear_ended(self, home: Home, now_ns: int) -> None:
        """Take out of the inboxes, after a power cut, what was read, and what is damaged and ended,
        or a further attempt of what has left the store: no event says that it was made.

        The ledger has all events of the journal by then.
        """
        for agent in list(home.agent_names()):
            found = set[str]()
            with contextlib.suppress(OSError, UnsafePath):
                found = file_ops.inbox_files(self._dirs, agent)
            for message_id, rows in self._ledger.deliveries.rows(found).items():
                with contextlib.suppress(OSError, UnsafePath):  # it stays: it may be whole
                    if agent in rows:
                        self._clear(agent, message_id, rows[agent], now_ns)

    def _clear(self, agent: str, message_id: str, row: DeliveryFacts, now_ns: int) -> None:
        """Errors: OSError, UnsafePath."""
        state = self._store.state
        has_left = state.relay_ids.get(message_id) not in state.messages
        is_further = row.state == "written" and row.attempt > 1 and has_left
        if row.state not in ENDED and not is_further:
            return
        name = message_id + MSG_SUFFIX
        inbox = self._dirs.get("agents", agent, "inbox")
        if is_further:
            if self._parse(agent, name) is None:
                self._hold(message_id, agent, row.attempt + 1, now_ns)
                fsio.remove(name, inbox)  # after that: a file that is gone counts as read
            return
        read = self._dirs.ensure("agents", agent, "inbox", READ)
        is_whole = self._parse(agent, name) is not None
        was_taken = row.state == "read" and row.read_how == TAKEN
        was_cancelled = is_cancelled(row.state, row.last_error)
        if was_taken and is_whole and not fsio.exists(name, read):
            fsio.rename(name, inbox, name, read)
        elif row.state == "read" or was_cancelled or not is_whole:
            fsio.remove(name, inbox)

    def _hold(self, message_id: str, agent: str, attempt: int, now_ns: int) -> None:
        """Make a further attempt due of a message that has left the store."""
        deliveries = self._ledger.deliveries
        with self._ledger.transaction():
            deliveries.upsert([DeliveryFacts(message_id, agent, "held", attempt, now_ns)])
            deliveries.hold([held_delivery(message_id, agent, DAMAGED, now_ns)])

    def remove_strays(self, home: Home) -> int:
        """Remove files staged by a batch that was not committed."""
        removed = 0
        for agent in list(home.agent_names()):
            try:
                for name in file_ops.staged_files(self._dirs, agent):
                    removed += self._remove_stray(agent, name)
            except (OSError, UnsafePath):
                continue  # broken, or not yet complete: the roster says so, and mends what it can
        return removed

    def _remove_stray(self, agent: str, name: str) -> int:
        message = self._store.messages.find_by_relay_id(message_id_of(name) or "")
        known = self._store.state.deliveries.get(message.id, {}) if message else {}
        delivery = known.get(agent)
        if message is not None and delivery is not None:
            state = delivery.state
            if state is DeliveryState.STAGED:
                return 0  # its inbox is out of reach for now
            was_answered = state is DeliveryState.ACKNOWLEDGED and not self._may_lack_unsynced
            if was_answered or self._was_taken_back(message, agent, delivery):
                file_ops.deliver(self._dirs, name.removesuffix(MSG_SUFFIX), agent, again=True)
                return 0
        fsio.remove(name, self._dirs.get("agents", agent, "inbox", PENDING))
        return 1

    def _was_taken_back(self, message: Message, agent: str, delivery: Delivery) -> bool:
        """True for an unread file that a command was to take back, which was not committed.

        The file of a further attempt has another ATTEMPT.
        """
        name = f"{message.relay_id}{MSG_SUFFIX}"
        found = self._read_whole(message, agent, PENDING) if delivery.queued else None
        return (
            found is not None
            and found.headers.get("ATTEMPT") == str(max(delivery.attempt, 1))
            and not fsio.exists(name, self._dirs.get("agents", agent, "inbox"))
            and not was_taken(self._dirs, agent, message.relay_id or "")
        )

    def _is_there(self, message: Message, recipient: str) -> bool:
        """True unless the inbox has no file of the message, or cannot be read."""
        with contextlib.suppress(OSError, UnsafePath):
            inbox = self._dirs.get("agents", recipient, "inbox")
            return fsio.exists(f"{message.relay_id}{MSG_SUFFIX}", inbox)
        return False

    def _read_whole(self, message: Message, recipient: str, *folder: str) -> MessageFile | None:
        """The delivered file in the inbox, or in a folder of it; None unless it is complete."""
        try:
            found = self._parse(recipient, f"{message.relay_id}{MSG_SUFFIX}", *folder)
        except (OSError, UnsafePath) as exc:
            if isinstance(exc, OSError) and exc.errno in fsio.EXHAUSTED:
                raise  # it would apply to every file: the session restarts
            return None  # an unreadable file does not count as delivered
        return found if found is not None and found.content == message.content else None

    def _parse(self, recipient: str, name: str, *folder: str) -> MessageFile | None:
        """A delivered file; None if it is damaged. Errors: OSError, UnsafePath."""
        inbox = self._dirs.get("agents", recipient, "inbox", *folder)
        limit = max_file_bytes(DEFAULT_MAX_BODY_BYTES)
        data, _ = fsio.read_regular(name, inbox, limit, shared=True)
        try:
            return parse_delivered(data, file=name)
        except MessageError:
            return None


def _is_unread(delivery: Delivery) -> bool:
    """True for a delivery whose file must be in the inbox, also between two attempts."""
    return delivery.queued and delivery.state in (DeliveryState.DELIVERED, DeliveryState.WAITING)
