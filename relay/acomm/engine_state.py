"""Section 256: state of the engine that version 1 of the file has no field for.

    tag 1 COUNTERS    next channel id, next message id, next subscription id, sequence: 4 u64
    tag 2 DELIVERIES  count u64; message ids u64; for each, u32, which of the lists is its own;
                      count of lists u32; each: count u32,
                      each: recipient str, state u8, attempt u32, due ms u64, queued bool, spent u32
    tag 3 DEAD        count u64; each: message id u64, at u64, last error str, list of recipient str
    tag 4 DUPLICATES  count u64; each: correlation id str, message id u64, recipient str,
                      expires ms u64
    tag 5 SETTINGS    count u64; each: channel id u64, max pending u64 (0 none), flush u8
    tag 6 HELD        count u64; each: message id u64
    tag 7 ARCHIVES    count u64; each: name str, then 7 u64: messages, first id, last id, first at,
                      last at, archived, size
    tag 8 LEAVING     count u64; each: message id u64
    tag 10 JOURNAL    stream id u64, logical offset u64, boot id str: what the file covers of it
    tag 11 OWED       count u64; each: message id u64, recipient str, due ms u64, reminders u32,
                      said str, since u64
    tag 12 LOST       count u64; each: at u64, lost ms i64

``sequence`` counts the events of the store's whole life; a file covers the events up to its own. A
file without these blocks opens all the same. Table: docs/formats/acomm.md.
"""

from __future__ import annotations

from struct import Struct, pack
from struct import error as StructError
from typing import NamedTuple

import msgspec

from relay.acomm.model import (
    FLUSH_MODES,
    ArchiveInfo,
    ChannelSettings,
    Delivery,
    DeliveryState,
    Obligation,
    StoreFile,
)
from relay.base.errors import FormatError

COUNTERS = 1
DELIVERIES = 2
DEAD = 3
DUPLICATES = 4
SETTINGS = 5
HELD = 6
ARCHIVES = 7
EVICTING = 8
JOURNAL = 10  # 9 is the archives'
OWED = 11
DOWNTIMES = 12
_COUNTERS = Struct("<4Q")
_DELIVERY = Struct("<BIQBI")
_DEAD = Struct("<QQ")
_SETTING = Struct("<QQB")
assert (_COUNTERS.size, _DELIVERY.size, _DEAD.size, _SETTING.size) == (32, 18, 16, 17)
_NOTE = Struct("<7Q")
_JOURNAL = Struct("<QQ")
_OBLIGATION = Struct("<QI")
_LOST = Struct("<Qq")
_COUNT = Struct("<Q")
_LENGTH = Struct("<I")
_STATES = tuple(DeliveryState)
_BOOLS = (False, True)
DuplicateKey = tuple[str, int, str]  # correlation id, message id, recipient


class DeadLetterInfo(NamedTuple):
    """A dead letter without its message."""

    at: int
    last_error: str
    recipients: tuple[str, ...]


class JournalPosition(NamedTuple):
    """A place in a journal: every event before it is in the store."""

    stream_id: int
    offset: int  # logical
    boot_id: str  # of the machine, when it was there


class Downtime(NamedTuple):
    """Time in which the store's owner did not run."""

    at: int  # Unix seconds: its end
    ms: int


class EngineState(NamedTuple):
    """Counters, deliveries, dead letters, the exactly-once set, settings, what is held, owed."""

    next_channel: int = 1
    next_message: int = 1
    next_subscription: int = 1
    sequence: int = 0
    deliveries: dict[int, dict[str, Delivery]] = {}  # noqa: RUF012 - never altered
    dead: dict[int, DeadLetterInfo] = {}  # noqa: RUF012
    duplicates: dict[DuplicateKey, int] = {}  # noqa: RUF012 - key -> expiry, Unix ms
    settings: dict[int, ChannelSettings] = {}  # noqa: RUF012 - by channel
    held: tuple[int, ...] = ()  # messages, ascending
    archives: tuple[ArchiveInfo, ...] = ()
    evicting: tuple[int, ...] = ()  # messages of the last archive that are still in the file
    journal: JournalPosition | None = None  # what the file covers, where there is a journal
    owed: dict[int, dict[str, Obligation]] = {}  # noqa: RUF012
    downtimes: tuple[Downtime, ...] = ()  # oldest first

    def encode(self) -> dict[int, bytes]:
        """The blocks by tag; same values, same bytes."""
        blocks = {
            COUNTERS: _COUNTERS.pack(*self[:4]),
            DELIVERIES: _encode_deliveries(self.deliveries),
        }
        if self.dead:
            blocks[DEAD] = _encode_dead(self.dead)
        if self.duplicates:
            blocks[DUPLICATES] = _encode_duplicates(self.duplicates)
        if self.settings:
            blocks[SETTINGS] = _encode_settings(self.settings)
        if self.held:
            blocks[HELD] = _encode_numbers(self.held)
        if self.archives:
            blocks[ARCHIVES] = _encode_archives(self.archives)
        if self.evicting:
            blocks[EVICTING] = _encode_numbers(self.evicting)
        if self.journal is not None:
            stream_id, offset, boot_id = self.journal
            blocks[JOURNAL] = _JOURNAL.pack(stream_id, offset) + _text(boot_id)
        if self.owed:
            blocks[OWED] = _encode_owed(self.owed)
        if self.downtimes:
            blocks[DOWNTIMES] = _COUNT.pack(len(self.downtimes)) + b"".join(
                _LOST.pack(*one) for one in self.downtimes
            )
        return blocks

    @classmethod
    def decode(cls, blocks: dict[int, bytes]) -> EngineState:
        """The state in a file's blocks; what is missing has its default.

        Errors: FormatError when a block is cut short or names an unknown state.
        """
        nothing = _COUNT.pack(0)
        try:
            channel, message, subscription, sequence = _COUNTERS.unpack(
                blocks.get(COUNTERS, _COUNTERS.pack(1, 1, 1, 0))
            )
            return cls(
                channel,
                message,
                subscription,
                sequence,
                _BlockReader(blocks.get(DELIVERIES, _encode_deliveries({}))).deliveries(),
                _BlockReader(blocks.get(DEAD, nothing)).dead(),
                _BlockReader(blocks.get(DUPLICATES, nothing)).duplicates(),
                _BlockReader(blocks.get(SETTINGS, nothing)).settings(),
                _BlockReader(blocks.get(HELD, nothing)).numbers(),
                _BlockReader(blocks.get(ARCHIVES, nothing)).archives(),
                _BlockReader(blocks.get(EVICTING, nothing)).numbers(),
                _BlockReader(blocks[JOURNAL]).position() if JOURNAL in blocks else None,
                _BlockReader(blocks.get(OWED, nothing)).owed(),
                _BlockReader(blocks.get(DOWNTIMES, nothing)).downtimes(),
            )
        except (StructError, IndexError, UnicodeDecodeError) as exc:
            raise FormatError("section 256", 0, "whole blocks of ENGINE_STATE", exc) from exc


class StoreSnapshot(NamedTuple):
    """A store at one instant, ready to be encoded in any thread."""

    values: StoreFile
    state: EngineState

    def file(self) -> StoreFile:
        """The values to be encoded."""
        return msgspec.structs.replace(self.values, engine_state=self.state.encode())


def _encode_deliveries(deliveries: dict[int, dict[str, Delivery]]) -> bytes:
    """Column by column: nearly all messages stand as one of a few lists says."""
    ids = sorted(deliveries)
    lists: dict[bytes, int] = {}  # in the order of their first use
    seen: dict[int, int] = {}  # messages that came from one file share their lists
    which = []
    for message_id in ids:
        records = deliveries[message_id]
        number = seen.get(id(records))
        if number is None:
            number = lists.setdefault(_encode_list(records), len(lists))
            seen[id(records)] = number
        which.append(number)
    columns = pack(f"<Q{len(ids)}Q{len(ids)}I", len(ids), *ids, *which)
    return b"".join((columns, _LENGTH.pack(len(lists)), *lists))


def _encode_list(records: dict[str, Delivery]) -> bytes:
    parts = [_LENGTH.pack(len(records))]
    for recipient, one in records.items():
        fields = _DELIVERY.pack(one.state, one.attempt, one.due_ms, one.queued, one.spent)
        parts.append(_text(recipient) + fields)
    return b"".join(parts)


def _encode_dead(dead: dict[int, DeadLetterInfo]) -> bytes:
    parts = [_COUNT.pack(len(dead))]
    for message_id, note in sorted(dead.items()):
        parts.append(_DEAD.pack(message_id, note.at) + _text(note.last_error))
        parts.append(_LENGTH.pack(len(note.recipients)))
        parts.extend(_text(recipient) for recipient in note.recipients)
    return b"".join(parts)


def _encode_duplicates(duplicates: dict[DuplicateKey, int]) -> bytes:
    parts = [_COUNT.pack(len(duplicates))]
    for (correlation_id, message_id, recipient), expires_ms in sorted(duplicates.items()):
        parts.append(_text(correlation_id) + _COUNT.pack(message_id))
        parts.append(_text(recipient) + _COUNT.pack(expires_ms))
    return b"".join(parts)


def _encode_settings(settings: dict[int, ChannelSettings]) -> bytes:
    return _COUNT.pack(len(settings)) + b"".join(
        _SETTING.pack(channel_id, one.max_pending or 0, FLUSH_MODES.index(one.flush))
        for channel_id, one in sorted(settings.items())
    )


def _encode_owed(owed: dict[int, dict[str, Obligation]]) -> bytes:
    each = [(number, *item) for number, known in sorted(owed.items()) for item in known.items()]
    parts = [_COUNT.pack(len(each))]
    for number, recipient, one in each:
        parts.append(_COUNT.pack(number) + _text(recipient))
        parts.append(_OBLIGATION.pack(one.due_ms, one.reminders) + _text(one.said))
        parts.append(_COUNT.pack(one.since))
    return b"".join(parts)


def _encode_numbers(numbers: tuple[int, ...]) -> bytes:
    return pack(f"<{len(numbers) + 1}Q", len(numbers), *numbers)


def _encode_archives(notes: tuple[ArchiveInfo, ...]) -> bytes:
    parts = [_COUNT.pack(len(notes))]
    for note in notes:
        name, *numbers = msgspec.structs.astuple(note)
        parts.append(_text(name) + _NOTE.pack(*numbers))
    return b"".join(parts)


def _text(value: str) -> bytes:
    data = value.encode()
    return _LENGTH.pack(len(data)) + data


class _BlockReader:
    """Reads one block from its beginning to its very end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def deliveries(self) -> dict[int, dict[str, Delivery]]:
        """By message; those of one list share it, for it is replaced and never changed."""
        count = self._number()
        ids = self._unpack(Struct(f"<{count}Q"))
        which = self._unpack(Struct(f"<{count}I"))
        (number,) = self._unpack(_LENGTH)
        lists = [self._list() for _ in range(number)]
        self._end()
        return dict(zip(ids, map(lists.__getitem__, which), strict=True))

    def _list(self) -> dict[str, Delivery]:
        records: dict[str, Delivery] = {}
        for _ in range(self._unpack(_LENGTH)[0]):
            name = self._text()
            state, attempt, due_ms, queued, spent = self._unpack(_DELIVERY)
            records[name] = Delivery(_STATES[state], attempt, due_ms, _BOOLS[queued], spent)
        return records

    def position(self) -> JournalPosition:
        """Where the file stands in its journal."""
        stream_id, offset = self._unpack(_JOURNAL)
        found = JournalPosition(stream_id, offset, self._text())
        self._end()
        return found

    def dead(self) -> dict[int, DeadLetterInfo]:
        found: dict[int, DeadLetterInfo] = {}
        for _ in range(self._number()):
            message_id, at = self._unpack(_DEAD)
            last_error = self._text()
            (count,) = self._unpack(_LENGTH)
            found[message_id] = DeadLetterInfo(
                at, last_error, tuple(self._text() for _ in range(count))
            )
        self._end()
        return found

    def duplicates(self) -> dict[DuplicateKey, int]:
        found: dict[DuplicateKey, int] = {}
        for _ in range(self._number()):
            correlation_id, message_id = self._text(), self._number()
            recipient = self._text()
            found[correlation_id, message_id, recipient] = self._number()
        self._end()
        return found

    def settings(self) -> dict[int, ChannelSettings]:
        found: dict[int, ChannelSettings] = {}
        for _ in range(self._number()):
            channel_id, max_pending, flush = self._unpack(_SETTING)
            found[channel_id] = ChannelSettings(max_pending or None, FLUSH_MODES[flush])
        self._end()
        return found

    def numbers(self) -> tuple[int, ...]:
        found = tuple(self._number() for _ in range(self._number()))
        self._end()
        return found

    def owed(self) -> dict[int, dict[str, Obligation]]:
        found: dict[int, dict[str, Obligation]] = {}
        for _ in range(self._number()):
            number, recipient = self._number(), self._text()
            due_ms, reminders = self._unpack(_OBLIGATION)
            one = Obligation(due_ms, reminders, self._text(), self._number())
            found.setdefault(number, {})[recipient] = one
        self._end()
        return found

    def downtimes(self) -> tuple[Downtime, ...]:
        found = tuple(Downtime(*self._unpack(_LOST)) for _ in range(self._number()))
        self._end()
        return found

    def archives(self) -> tuple[ArchiveInfo, ...]:
        found = []
        for _ in range(self._number()):
            name = self._text()
            found.append(ArchiveInfo(name, *self._unpack(_NOTE)))
        self._end()
        return tuple(found)

    def _unpack(self, struct: Struct) -> tuple[int, ...]:
        values = struct.unpack_from(self._data, self._at)
        self._at += struct.size
        return values

    def _number(self) -> int:
        return self._unpack(_COUNT)[0]

    def _text(self) -> str:
        (length,) = self._unpack(_LENGTH)
        if length > len(self._data) - self._at:
            raise IndexError(f"a text of {length} bytes at {self._at}")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _end(self) -> None:
        left = len(self._data) - self._at
        if left:
            raise FormatError("section 256", self._at, "the end of the block", f"{left} bytes")
