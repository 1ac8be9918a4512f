"""Backpressure: room for one more message, or the error that says what there is too much of.

Memory: at ``limits.active_messages`` the store is flushed and what is final is archived; where
that does not help, StoreFull. Disk: a warning at ``limits.warn_bytes``, StoreCapacity from
``limits.reserve_bytes`` below ``limits.file_bytes`` on. Answers pass both, up to the limits of the
file: without them nothing would ever become final. Source: message-engine.txt, "Backpressure".
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from relay.acomm.model import MessageStatus
from relay.base.errors import StoreCapacity, StoreFull
from relay.engine import ack_rules, events
from relay.engine.retention import Compacted, RetentionCommands
from relay.engine.tables import RECORD_BYTES


class StoreStats(NamedTuple):
    """A store in numbers."""

    channels: int
    messages: dict[MessageStatus, int]  # live ones and dead letters; statuses that occur
    subscriptions: int
    dead_letters: int  # given up for somebody, or for all
    archived: int
    pending: int  # delivered, and not received or not acknowledged
    held: int  # accepted, and kept back by max_pending
    duplicates: int  # entries of the exactly-once set
    file_bytes: int  # when it was last written; 0: never
    used_bytes: int  # about what it would be now
    file_sequence: int  # the events that the file covers
    sequence: int  # the events so far


class PressureCommands(RetentionCommands):
    """The CommStore's commands that keep it within its limits."""

    def compact(self) -> Compacted:
        """Drop archived messages and dead letters for good, and write the file that is left.

        Nothing that has an open delivery is touched.
        Errors: those of ``flush``; what was dropped is dropped all the same.
        """
        state = self.state
        self.flush()
        before = (self.file_bytes, len(state.archive), len(state.dead))
        gone = [*state.archive.values(), *state.dead_letters.values()]
        if state.archive:
            self.apply(events.ArchiveDropped(tuple(sorted(state.archive)), self._now_s()))
        for message_id in sorted(state.dead):
            self.apply(events.DeadLetterDiscarded(message_id, self._now_s()))
        self.flush()
        self._roomy_until = 0
        return Compacted(
            before[1],
            before[2],
            sum(len(message.content) for message in gone),
            max(0, before[0] - self.file_bytes),
        )

    def stats(self) -> StoreStats:
        """The store in numbers. Costs a look at every live message."""
        state = self.state
        pending = sum(
            message.id not in state.pending.held
            and ack_rules.is_pending(
                state.channels[message.channel_id],
                message,
                state.deliveries.get(message.id, {}).values(),
                state.owed.get(message.id, {}),
            )
            for message in state.messages.values()
        )
        known = [*state.messages.values(), *state.dead_letters.values()]
        return StoreStats(
            len(state.channels),
            dict(sorted(Counter(message.status for message in known).items())),
            len(state.subscriptions),
            len(state.dead),
            len(state.archive),
            pending,
            len(state.pending.held),
            len(state.duplicates),
            self.file_bytes,
            self.used_bytes(),
            self.file_sequence,
            state.sequence,
        )

    def used_bytes(self) -> int:
        """About how large the file would be now, or its records before they are compressed."""
        state = self.state
        if not self.file_bytes:
            return state.record_bytes
        return max(self.file_bytes + state.bytes_sent - self._sent_in_file, state.record_bytes)

    def _make_room(self, size: int, is_answer: bool) -> bool:
        """Room for ``size`` bytes of content and metadata.

        True when the file comes near its limit just now.
        Errors: StoreFull, StoreCapacity when there is none.
        """
        state, limits = self.state, self.limits
        kept = len(state.messages) + len(state.dead_letters) + len(state.archive)
        if kept >= limits.messages:
            raise StoreCapacity(f"{kept} messages, a store holds {limits.messages}")
        most = limits.file_bytes if is_answer else limits.file_bytes - limits.reserve_bytes
        used = self.used_bytes() + size + RECORD_BYTES
        if used > most:
            raise StoreCapacity(
                f"{used} bytes of a store file's {limits.file_bytes}, "
                f"and the last {limits.reserve_bytes} are for answers"
            )
        if len(state.messages) >= limits.active_messages and not is_answer:
            self._relieve()
        near = used >= limits.warn_bytes
        is_news = near and not self._warned
        self._warned = near
        until = limits.file_bytes - limits.reserve_bytes if near else limits.warn_bytes
        # each message takes a record's bytes at least, so this bounds their number, too
        room = min(until - self.used_bytes(), (limits.messages - kept) * RECORD_BYTES)
        self._roomy_until = state.bytes_sent + room - RECORD_BYTES
        return is_news

    def _relieve(self) -> None:
        """Archive what is final, once it is in the file. Errors: StoreFull when nothing helped.

        A store that is rolled has its room made by that, beside its owner's work.
        """
        state, most = self.state, self.limits.active_messages
        # A look at every message is dear: one that found little is not repeated for a while.
        if self.archives is None and state.sequence >= self._next_relief:
            final = [m.id for m in state.messages.values() if self.is_final(m)]
            if final:
                self.flush()
                self._archive(final)
            found_little = len(final) < most // 100
            self._next_relief = state.sequence + most // 100 if found_little else 0
        active = len(state.messages)
        if active >= most:
            raise StoreFull(f"{active} active messages, the store takes {most}")
