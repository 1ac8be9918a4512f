"""Archives: which messages leave the live ones, the room they need, and rolling into archive files.

Retention decides which messages leave the live ones for the archive: by policy, by command, or for
room. Never one with an open delivery, an answer that is owed, or a dead letter. An archived
message stays in the store's file and can be queried; ``drop`` deletes it.

Memory: a new message is refused with StoreFull at ``limits.active_messages``, and in a relay where
few have room and half of these are its sender's. Disk: a warning at
``limits.warn_bytes``, StoreCapacity from ``limits.reserve_bytes`` below ``limits.file_bytes`` on.
Answers are accepted up to the limits of the file, because without them no message would become
final.

A store with archive files rolls its final messages into them. ``Roller`` does a slice at a time:

    scan             a few thousand messages a step: which are final, and old enough?
    write            the archive, in another thread
    Rolled           the event: the archive counts, its messages are being evicted
    MessagesEvicted  a few thousand of them a step

After a crash before the event is committed the file is a stray, and the messages are still live.
See docs/formats/acomm.md.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future

import msgspec

from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    Message,
    MessageStatus,
    RetentionKind,
    StoreFile,
)
from relay.base.clock import NS_PER_S, iso_date
from relay.base.config import StoreSettings
from relay.base.errors import (
    MessageNotFound,
    RelayError,
    StoreCapacity,
    StoreFull,
    ValidationFailed,
)
from relay.base.names import ORCHESTRATOR
from relay.engine import events, rules
from relay.engine.archive_files import ArchiveFiles
from relay.engine.rules import check_number
from relay.engine.state import RECORD_BYTES, Core, variable_bytes

# Scanning the open messages at every send would make sends linear in them: after a scan that met
# n of them in vain, the next n / RESCAN_DIVISOR calls do not scan.
RESCAN_DIVISOR = 16


class Archives:
    """Retention, the room of a store, and what was archived. Part of an engine."""

    def __init__(self, core: Core, files: ArchiveFiles | None) -> None:
        self._core = core
        self.state = core.state
        self.clock = core.clock
        self.files = files  # of what was rolled out
        self.file_bytes = 0  # of the store's file, when that was last written
        self.file_sequence = 0  # the events that it covers
        self.is_near_full = False  # the file reaches its warning limit
        self._sent_in_file = 0  # ``state.bytes_sent`` as that file has it
        self._active: Counter[str] = Counter()  # active messages by sender, as counted last
        self._counted = (0, 0)  # ``state.messages_sent`` and the active messages then
        self._scans_to_skip: dict[int, int] = {}  # channel -> looks at its retention to be skipped
        # ``state.bytes_sent`` below which no limit but that of memory is near
        self._roomy_until = 0

    def apply(self, event: events.Event) -> None:
        """Change the store by an event of the ``Roller``."""
        self._core.apply(event)

    def rename_strays(self) -> list[str]:
        """Rename archive files that a crash left unlisted; returns their new names."""
        state = self.state
        if self.files is None:
            return []
        return self.files.rename_strays(state.archives, state.next_archive)

    def archive(self, message_id: int | None = None, *, before: int | None = None) -> int:
        """Archive one message, or all sent before a time (Unix seconds); returns their number.

        With ``before``, messages with an open delivery stay. Errors: MessageNotFound;
        ValidationFailed for one message with such a delivery, or when not exactly one of the two
        arguments is given.
        """
        if (message_id is None) == (before is None):
            raise ValidationFailed("archive", "pass either message_id or before, not both")
        if message_id is None:
            check_number("before", before)
            messages = self.state.messages.values()
            old = [m.id for m in messages if m.created_at < (before or 0) and self.is_final(m)]
            return self.archive_all(old)
        message = self.state.messages.get(check_number("message_id", message_id))
        if message is None:
            raise MessageNotFound(f"live message {message_id} does not exist")
        if not self.is_final(message):
            raise ValidationFailed(
                "message_id", f"message {message_id} has an open or dead delivery"
            )
        return self.archive_all([message_id])

    def evict(self) -> int:
        """Archive every message that has no open delivery; returns their number."""
        return self.archive_all([m.id for m in self.state.messages.values() if self.is_final(m)])

    def retain(self) -> int:
        """Archive the messages past their channel's retention; returns their number."""
        state = self.state
        return sum(self.retain_in(state.channels[number]) for number in sorted(state.retained))

    def retain_in(self, channel: Channel, more: int = 0, more_bytes: int = 0) -> int:
        """Apply a channel's retention, leaving room for ``more`` messages."""
        kind, amount = channel.config.retention.kind, channel.config.retention.amount
        if kind is RetentionKind.FOREVER:
            return 0
        patience = self._scans_to_skip.get(channel.id, 0)
        if patience > 0:
            self._scans_to_skip[channel.id] = patience - 1
            return 0
        by_count = kind is RetentionKind.COUNT
        kept = self.state.kept.get(channel.id, 0) + (more if by_count else more_bytes)
        now_s = self._core.now_s()
        past: list[int] = []
        in_vain = 0
        for message_id in self.state.index.channel(channel.id):
            message = self.state.messages[message_id]
            if kind is RetentionKind.DURATION:
                if message.created_at > now_s:
                    continue  # sent while the clock was ahead; those after it may be past
                is_past = message.created_at <= now_s - amount
            else:
                is_past = kept > amount
            if not is_past:
                break
            if self.is_final(message):
                past.append(message_id)
                kept -= 1 if by_count else len(message.content)
            else:
                in_vain += 1
        self._scans_to_skip[channel.id] = in_vain // RESCAN_DIVISOR
        return self.archive_all(past)

    def archive_all(self, message_ids: list[int]) -> int:
        """Archive these messages, which must be final; returns their number."""
        if message_ids:
            self._core.apply(events.MessagesArchived(tuple(message_ids), self._core.now_s()))
        return len(message_ids)

    def is_final(self, message: Message) -> bool:
        """True when the message has no open delivery, owed answer or dead letter."""
        deliveries = self.state.deliveries.get(message.id, {}).values()
        channel = self.state.channels[message.channel_id]
        if message.id in self.state.dead or message.id in self.state.owed:
            return False
        return not rules.is_open(channel, message, deliveries, self._core.rules.by_files)

    def drop(self) -> tuple[int, int, int]:
        """Delete archived messages and dead letters permanently; open deliveries are kept.

        Returns the number of both, and the bytes of their content.
        """
        state, now = self.state, self._core.now_s()
        removed = [*state.archive.values(), *state.dead_letters.values()]
        dropped = len(state.archive), len(state.dead), sum(len(m.content) for m in removed)
        if state.archive:
            self._core.apply(events.ArchiveDropped(tuple(sorted(state.archive)), now))
        for message_id in sorted(state.dead):
            self._core.apply(events.DeadLetterDiscarded(message_id, now))
        self._roomy_until = 0
        return dropped

    def file_written(self, size: int, sequence: int, bytes_sent: int) -> None:
        """Note that the store's file was written, its size and what it covers."""
        self.file_bytes = size
        self.file_sequence = sequence
        self._sent_in_file = bytes_sent
        self._roomy_until = 0

    def loaded_from(self, path: str) -> None:
        """Note that the file at ``path``, if it is still there, has everything so far."""
        with contextlib.suppress(FileNotFoundError):
            self.file_written(os.path.getsize(path), self.state.sequence, 0)

    def used_bytes(self) -> int:
        """Estimate of the file's present size, at least that of its uncompressed records."""
        state = self.state
        if not self.file_bytes:
            return state.record_bytes
        return max(self.file_bytes + state.bytes_sent - self._sent_in_file, state.record_bytes)

    def capacity_warning(self) -> str:
        """The warning of a store whose file is near its limit."""
        return (
            f"the store has {self.used_bytes()} of {self._core.limits.file_bytes} bytes: "
            "archive and compact it"
        )

    def make_room(self, channel: Channel, message: Message) -> None:
        """Make room for a message: apply its channel's retention, and check the limits.

        Errors: StoreFull, StoreCapacity.
        """
        state = self.state
        most = len(message.content) + rules.MOST_METADATA_BYTES
        if (
            state.bytes_sent + most >= self._roomy_until
            or len(state.messages) >= self._core.limits.active_messages // 2
        ):
            size = variable_bytes(message.content, message.metadata)
            is_answer = message.message_type in rules.ANSWERS
            self._check_limits(size, is_answer)
            if self._core.rules.by_files and not is_answer:
                self._check_share(message)
        if channel.config.retention.kind is not RetentionKind.FOREVER:
            self.retain_in(channel, 1, len(message.content))

    def _check_limits(self, size: int, is_answer: bool) -> None:
        """Check that ``size`` bytes of content and metadata fit. Errors: as ``make_room``."""
        state, limits = self.state, self._core.limits
        kept = len(state.messages) + len(state.dead_letters) + len(state.archive)
        if kept >= limits.messages:
            raise StoreCapacity(f"the store has {kept} messages, its limit is {limits.messages}")
        most = limits.file_bytes if is_answer else limits.file_bytes - limits.reserve_bytes
        used = self.used_bytes() + size + RECORD_BYTES
        if used > most:
            raise StoreCapacity(
                f"the store file would need {used} of {limits.file_bytes} bytes, "
                f"and the last {limits.reserve_bytes} are reserved for answers"
            )
        active = len(state.messages)
        if active >= limits.active_messages and not is_answer:
            raise StoreFull(
                f"the store has {active} active messages, its limit is {limits.active_messages}"
            )
        self.is_near_full = used >= limits.warn_bytes
        until = limits.file_bytes - limits.reserve_bytes if self.is_near_full else limits.warn_bytes
        # each message takes a record's bytes at least, so this bounds their number, too
        room = min(until - self.used_bytes(), (limits.messages - kept) * RECORD_BYTES)
        self._roomy_until = state.bytes_sent + room - RECORD_BYTES

    def _check_share(self, message: Message) -> None:
        """Check, where few have room, that a sender has less than half of all active messages.

        Final ones are rolled before there are so many. Errors: StoreFull.
        """
        state, limit = self.state, self._core.limits.active_messages
        sender, to = message.sender, (message.metadata or {}).get("to")
        if len(state.messages) * 4 < limit * 3 or ORCHESTRATOR in (sender, to):
            return
        now = (state.messages_sent, len(state.messages))
        if now[0] >= self._counted[0] + limit // 100 or (
            self._active[sender] * 2 >= limit and now != self._counted
        ):  # seldom: it looks at every message
            self._active = Counter(one.sender for one in state.messages.values())
            self._counted = now
        if self._active[sender] * 2 >= limit:
            raise StoreFull(
                f"the store has {self._active[sender]} active messages of {sender}, "
                f"half of its limit of {limit}"
            )


SCAN_BATCH = 2_000  # messages in one step: about 2 ms
EVICT_BATCH = 2_000
PAUSE_S = 60  # between two scans of all messages
ROLLED_RECORD_BYTES = 128  # of a message, besides its content
DAY_S = 86_400


MOST_ROLLED = 100_000  # messages in one archive
MOST_ROLLED_BYTES = 64 << 20  # of content and records, uncompressed

_WrittenArchive = tuple[ArchiveInfo, tuple[int, ...]]  # and the numbers of its messages


class Roller:
    """Rolls one store. Called from its owner's thread; files are written in the executor."""

    def __init__(self, archives: Archives, settings: StoreSettings, executor: Executor) -> None:
        self._archives = archives
        assert archives.files is not None
        self._files = archives.files
        self._state = archives.state
        self._settings = settings
        self._clock = archives.clock
        self._executor = executor
        self._unscanned: list[int] = []  # message ids still to be checked, the next one last
        self._final: list[int] = []
        self._bytes = 0
        self._pressed = False
        self._writing: Future[_WrittenArchive] | None = None
        self._next_scan_ns = 0  # monotonic
        self.error = ""  # why the last archive could not be written; empty when it could

    def due_ns(self) -> int | None:
        """Deadline of the next step (monotonic); None while an archive is written."""
        if self._state.evicting or self._unscanned:
            return 0
        if self._writing is not None:
            return None  # its end wakes the owner
        return self._next_scan_ns

    def step(self) -> None:
        """Do one slice of the work, a few milliseconds at most."""
        state = self._state
        if state.evicting:
            count = min(EVICT_BATCH, len(state.evicting))
            self._archives.apply(events.MessagesEvicted(count, self._clock.now_ns() // NS_PER_S))
        elif self._writing is not None:
            self._collect(self._writing)
        elif self._unscanned:
            self._scan()
        elif self._clock.monotonic_ns() >= self._next_scan_ns or self._is_pressed():
            self._start_scan()

    def _is_pressed(self) -> bool:
        pressed = len(self._state.messages) > self._settings.active_messages // 2
        return pressed and not self._pressed  # once a pause: what is not final stays

    def _start_scan(self) -> None:
        self._pressed = self._is_pressed()
        self._next_scan_ns = self._clock.monotonic_ns() + PAUSE_S * NS_PER_S
        self._archives.retain()  # channels without new messages expire, too
        state = self._state
        self._unscanned = [*reversed(state.messages), *reversed(state.archive)]
        self._final, self._bytes = [], 0

    def _scan(self) -> None:
        state = self._state
        now_s = self._clock.now_ns() // NS_PER_S
        limit_s = now_s - (0 if self._pressed else self._settings.roll_after_s)
        for _ in range(min(SCAN_BATCH, len(self._unscanned))):
            number = self._unscanned.pop()
            message = state.messages.get(number)
            if message is None:
                message = state.archive.get(number)
            elif limit_s < message.created_at <= now_s:
                self._unscanned = []  # the following ones are younger still
                break
            elif message.created_at > now_s and not self._pressed:
                continue  # sent while the clock was ahead; those after it may be old
            if message is None or not self._archives.is_final(message):
                continue
            self._final.append(message.id)
            self._bytes += len(message.content) + ROLLED_RECORD_BYTES
            if len(self._final) >= MOST_ROLLED or self._bytes >= MOST_ROLLED_BYTES:
                self._unscanned = []
                break
        if not self._unscanned and self._is_enough():
            self._write()

    def _is_enough(self) -> bool:
        first = next(self._messages(self._final), None)
        if first is None:
            return False
        is_old = first.created_at <= self._clock.now_ns() // NS_PER_S - DAY_S
        return self._pressed or is_old or len(self._final) >= self._settings.roll_messages

    def _messages(self, numbers: Iterable[int]) -> Iterator[Message]:
        """The final messages, without those removed meanwhile."""
        state = self._state
        for number in numbers:
            message = state.messages.get(number) or state.archive.get(number)
            if message is not None:
                yield message

    def _write(self) -> None:
        now_ns, state = self._clock.now_ns(), self._state
        name = f"{iso_date(now_ns)}/{state.next_archive:06d}.acomm"
        self._writing = self._executor.submit(self._make, name, tuple(self._final), now_ns)

    def _make(self, name: str, numbers: tuple[int, ...], now_ns: int) -> _WrittenArchive:
        """Write the archive, in the executor; it is listed if its messages are still final then."""
        messages = sorted(self._messages(numbers), key=lambda m: (m.created_at, m.id))
        ids = tuple(message.id for message in messages)
        size = self._files.write(name, self._snapshot(messages, now_ns // NS_PER_S))
        note = ArchiveInfo(
            name,
            len(messages),
            min(ids),
            max(ids),
            messages[0].created_at,
            messages[-1].created_at,
            sum(message.status is MessageStatus.ARCHIVED for message in messages),
            size,
        )
        return note, ids

    def _snapshot(self, messages: Sequence[Message], now_s: int) -> StoreSnapshot:
        """The content of the archive: the messages, their channels and recipients."""
        state = self._state
        counts = Counter(message.channel_id for message in messages)
        channels = tuple(
            msgspec.structs.replace(state.channels[number], message_count=count)
            for number, count in sorted(counts.items())
        )
        deliveries = {m.id: state.deliveries.get(m.id, {}) for m in messages}
        return StoreSnapshot(
            StoreFile(messages[0].created_at, now_s, channels, tuple(messages)),
            EngineState(deliveries=deliveries),
        )

    def _collect(self, writing: Future[_WrittenArchive]) -> None:
        if not writing.done():
            return
        self._writing = None
        error = writing.exception()
        if isinstance(error, OSError | RelayError):
            self.error = str(error)  # they stay, and are rolled later
            return
        note, ids = writing.result()
        self.error = ""
        if not self._state.owed.keys().isdisjoint(ids):
            self._files.remove(note.name)  # one was reopened meanwhile
            return
        self._pressed = False  # there may be more of it
        now_s = self._clock.now_ns() // NS_PER_S
        self._archives.apply(events.Rolled(note, ids, now_s))
