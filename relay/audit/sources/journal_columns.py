"""Events of a journal as columns: the fields that each column needs, and how it is made.

Events are decoded into structs with only the fields of the requested columns, so other fields are
skipped: a content is hashed, or even copied, only for its own columns. One struct serves all kinds
of events: a field that a kind lacks is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from relay.acomm.model import DeliveryState, LabelledEnum, MessageType
from relay.audit.sources.acomm_messages import LAST_SECOND
from relay.base.errors import FormatError, VersionError
from relay.base.names import sha256_hex
from relay.engine.events import VERSION, Checkpoint, EventCodec, Start
from relay.engine.messages import KIND_OF

Row = tuple[int, int, int, Any]  # offset, end, milliseconds, frame
Decode = Callable[[bytes, int], Any]  # a payload, and the offset of its record
Make = Callable[["RecordRows", pa.DataType], pa.Array]

BATCH_ROWS = 2_000  # their events stay in the processor's cache: a tenth less time than with 10,000
_WORD = str | int | float | bool | None  # what a message's metadata may hold
# The fields of events that columns are made of; deeper ones by their path.
_WIRE: dict[str, Any] = {
    "type": str,
    "message_id": int | str | None,  # FileRefused and OfferChanged have the relay's
    "message_ids": list[int] | None,
    "recipients": list[str] | None,
    "recipient": str | None,
    "participant": str | dict[str, Any] | None,  # ParticipantJoined has more than a name
    "deliveries": list[tuple[int, str, int]] | None,
    "key": tuple[str, int, str] | None,
    "state": int | None,
    "attempt": int,
    "due_ms": int | None,
    "said": str | None,
    "reason": str | None,
    "last_error": str | None,
    "answer_id": str | None,
    "relay_id": str | None,
    "by_ms": int | None,
    "held": bool,
    "channel_id": int | None,
    "channel.id": int,
    "note.name": str,
    "delivery.state": int,
    "delivery.attempt": int,
    "delivery.due_ms": int,
    "origin.agent": str | None,
    "origin.path": str | None,
    "origin.checksum": str | None,
    "origin.target": str | None,
    "origin.discovered_at": int | None,
    "message.id": int,
    "message.message_type": int,
    "message.sender": str | None,
    "message.channel_id": int | None,
    "message.content": bytes,
    "message.correlation_id": str | None,
    "message.created_at": int,
    "message.metadata.relay_id": _WORD,
    "message.metadata.to": _WORD,
    "message.metadata.kind": _WORD,
    "message.metadata.created_ns": _WORD,
}
_DEFAULTS = {int: 0, str: "", bytes: b"", bool: False}
_WITH_RELAY_ID = ("FileRefused", "OfferChanged")  # as their message_id
GAP, SEALED = "Gap", "Sealed"
_MILLIS, _SECONDS = pa.timestamp("ms", "UTC"), pa.timestamp("s", "UTC")


class RecordRows:
    """Records of one segment, a list for each thing that all of them have."""

    def __init__(self, stream: str, segment: int, rows: Sequence[Row] = ()) -> None:
        self.stream = stream
        self.segment = segment
        self.offsets = [row[0] for row in rows]
        self.ends = [row[1] for row in rows]
        self.at_ms = [row[2] for row in rows]
        self.frames = [row[3] for row in rows]
        self.events: list[Any] = [frame.event or NO_EVENT for frame in self.frames]

    def where(self, chosen: Sequence[bool]) -> RecordRows:
        """Those of which ``chosen`` says so, in order."""
        some = RecordRows(self.stream, self.segment)
        for name in ("offsets", "ends", "at_ms", "frames", "events"):
            setattr(some, name, list(compress(getattr(self, name), chosen)))
        return some


def in_batches(stream: str, segment: int, rows: Iterator[Row]) -> Iterator[RecordRows]:
    """Gather rows of a segment, some thousands at a time."""
    while some := list(islice(rows, BATCH_ROWS)):
        yield RecordRows(stream, segment, some)


class _NoEvent:
    """The event of a record without one: each field is None."""

    type = ""
    held = None

    def __getattr__(self, name: str) -> None:
        return None


NO_EVENT = _NoEvent()


class Marker(NamedTuple):
    """In the place of a frame: a record whose payload is not read."""

    kind: str
    reason: str | None = None
    seq: None = None
    event: None = None
    start: None = None
    checkpoint: None = None


class JournalColumn(NamedTuple):
    """One column: the fields it needs, and how it is made of rows."""

    needs: tuple[str, ...]
    make: Make


def decoder(columns: Iterable[str], key: bytes | None, path: str) -> Decode:
    """Make a function that decodes payloads into the frames that these columns need.

    Errors of a call: FormatError and VersionError with the offset; SealedStore without the key,
    or with another one.
    """
    needs = {"type"}.union(*(_COLUMNS[name].needs for name in columns))
    event = _struct("Event", sorted(needs))
    kinds = {"event": event, "start": Start, "checkpoint": Checkpoint, "sealed": bytes, "seq": int}
    fields: list[Any] = [("v", int), *((name, kind | None, None) for name, kind in kinds.items())]
    frame: Any = msgspec.defstruct("Frame", fields, gc=False)
    decode, codec = msgspec.msgpack.Decoder(frame).decode, EventCodec(key)

    def decode_frame(payload: bytes, offset: int) -> Any:
        try:
            found = decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise FormatError(path, offset, f"an event of version {VERSION}", exc) from exc
        if found.v != VERSION:
            raise VersionError(path, offset, f"events of version {VERSION}", found.v)
        if found.sealed is not None:
            return decode_frame(codec.decrypt(found.sealed, offset, path), offset)
        return found

    return decode_frame


def to_batch(rows: RecordRows, schema: pa.Schema) -> pa.RecordBatch:
    """Convert the rows to one Arrow batch with the columns of ``schema``."""
    arrays = [_COLUMNS[field.name].make(rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _struct(name: str, paths: Iterable[str], prefix: str = "") -> Any:
    """Make a struct with these fields of the wire; nested paths become nested structs."""
    inner: dict[str, list[str]] = {}
    for path in paths:
        first, _, rest = path.partition(".")
        inner.setdefault(first, []).extend([rest] if rest else [])
    fields: list[tuple[str, Any, Any]] = []
    for field, rest_of in inner.items():
        kind: Any = _WIRE.get(prefix + field)
        if rest_of:
            kind = _struct(f"{name}_{field}", rest_of, f"{prefix}{field}.") | None
        fields.append((field, kind, _DEFAULTS.get(kind)))
    return msgspec.defstruct(name, fields, gc=False)


# -- how columns are made ---------------------------------------------------------------


def _list(values: Callable[[RecordRows], list[Any]]) -> Make:
    return lambda rows, kind: pa.array(values(rows), kind)


def _of_events(value: Callable[[Any], Any]) -> Make:
    return lambda rows, kind: pa.array([value(event) for event in rows.events], kind)


def _of_message(value: Callable[[Any], Any]) -> Make:
    """Make a column from the message of a MessageSent; NULL for other events."""
    return lambda rows, kind: pa.array(
        [None if (m := event.message) is None else value(m) for event in rows.events], kind
    )


def _same(value: Callable[[RecordRows], Any]) -> Make:
    return lambda rows, kind: pa.repeat(pa.scalar(value(rows), kind), len(rows.frames))


def _time_ms(values: Callable[[RecordRows], list[Any]]) -> Make:
    # Straight from Python's numbers to times takes ten times as long.
    return lambda rows, kind: pa.array(values(rows), pa.int64()).cast(_MILLIS).cast(kind)


def _time_s(values: Callable[[RecordRows], list[int | None]]) -> Make:
    return lambda rows, kind: pa.array(values(rows), pa.int64()).cast(_SECONDS).cast(kind)


def _created_s(event: Any) -> int | None:
    if event.message is None or event.message.created_at > LAST_SECOND:
        return None
    return int(event.message.created_at)


def _u64(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    # From Python's numbers to decimals at once would go by their digits.
    return pa.array(values, pa.uint64()).cast(kind)


def _labels(kind: type[LabelledEnum]) -> dict[int, str]:
    return {int(member): member.label for member in kind}


_STATES, _TYPES = _labels(DeliveryState), _labels(MessageType)
_KIND_OF = {int(member): str(kind) for member, kind in KIND_OF.items()}
_STATE_OF = {
    "MessageSent": "Sent",
    "DeliveriesAdded": "Sent",
    "DeliveriesStaged": "Staged",
    "MessageReceived": "Received",
    "DeadLettered": "Dead",
}
_ABOUT = ("message_id", "message_ids", "deliveries", "key", "message.id")
_RECIPIENT_FIELDS = ("recipients", "recipient", "participant", "deliveries", "key")


def _kinds(rows: RecordRows) -> list[str]:
    return [frame.event.type if frame.event else _control(frame) for frame in rows.frames]


def _control(frame: Any) -> str:
    if isinstance(frame, Marker):
        return frame.kind
    return "Start" if frame.start else "Checkpoint" if frame.checkpoint else "Unknown"


def _about(event: Any) -> Sequence[int]:
    """Return the engine's numbers of the messages that an event is about, each once."""
    if event.message is not None:
        return (event.message.id,)
    number = event.message_id
    if number is not None:
        return (number,) if type(number) is int else ()
    if event.message_ids is not None:
        return event.message_ids  # type: ignore[no-any-return]
    if event.deliveries is not None:
        return tuple({delivery[0]: None for delivery in event.deliveries})
    return (event.key[1],) if event.key is not None else ()


def _number(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    numbers = [_about(event) for event in rows.events]
    return _u64([ids[0] if len(ids) == 1 else None for ids in numbers], kind)


def _message_numbers(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    every = [_about(event) for event in rows.events]
    flat = _u64([number for ids in every for number in ids], kind.value_type)
    return pa.ListArray.from_arrays(_offsets(every), flat, type=kind)


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    """Return where each list begins in the flat one, and the end; NULL for an empty one."""
    at, offsets = 0, []
    for items in lists:
        offsets.append(at if items else None)
        at += len(items)
    return pa.array([*offsets, at], pa.int32())


def _recipients(event: Any) -> Sequence[str] | None:
    if event.recipients is not None:
        return event.recipients  # type: ignore[no-any-return]
    if event.recipient is not None:
        return (event.recipient,)
    if event.deliveries is not None:
        return tuple({delivery[1]: None for delivery in event.deliveries})
    if event.type == "MessageReceived":
        return (event.participant,)
    return (event.key[2],) if event.key is not None else None


def _deliveries(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    numbers: list[int] = []
    names: list[str] = []
    attempts: list[int | None] = []
    offsets: list[int | None] = []
    for event in rows.events:
        before = len(numbers)
        if event.deliveries is not None:
            for number, name, attempt in event.deliveries:
                numbers.append(number)
                names.append(name)
                attempts.append(attempt)
        elif recipients := _recipients(event):
            for number in _about(event):
                numbers += [number] * len(recipients)
                names += recipients
            attempts += [_attempt(event)] * (len(numbers) - before)
        offsets.append(before if len(numbers) > before else None)
    fields = list(kind.value_type)
    lists = (
        _u64(numbers, fields[0].type),
        pa.array(names, pa.string()),
        pa.array(attempts, fields[2].type),
    )
    flat = pa.StructArray.from_arrays(lists, fields=fields)
    at = pa.array([*offsets, len(numbers)], pa.int32())
    return pa.ListArray.from_arrays(at, flat, type=kind)


def _state(event: Any) -> str | None:
    if (known := _STATE_OF.get(event.type)) is not None:
        return known
    if event.type == "DeliveriesMoved":
        return _STATES.get(event.state)
    return None if event.delivery is None else _STATES.get(event.delivery.state)


def _attempt(event: Any) -> int | None:
    if event.delivery is not None:
        return int(event.delivery.attempt)
    return event.attempt or None


def _due_ms(rows: RecordRows) -> list[int | None]:
    return [
        (event.due_ms if (delivery := event.delivery) is None else delivery.due_ms) or None
        for event in rows.events
    ]


def _relay_id(event: Any) -> str | None:
    if event.message is not None:
        return _metadata_text(event.message, "relay_id")
    # empty for a file whose name has no id
    if event.type in _WITH_RELAY_ID:
        return event.message_id or None
    return (event.relay_id or None) if event.type == "DeadLetterDiscarded" else None


def _to(event: Any) -> str | None:
    if event.message is not None:
        return _metadata_text(event.message, "to")
    return event.origin.target if event.origin is not None else None


def _metadata_text(message: Any, name: str) -> str | None:
    value = getattr(message.metadata, name, None)
    return value if isinstance(value, str) else None


def _kind(message: Any) -> str | None:
    return _metadata_text(message, "kind") or _KIND_OF.get(message.message_type)


def _created_ns(event: Any) -> int | None:
    if event.message is not None:
        value = getattr(event.message.metadata, "created_ns", None)
        return value if type(value) is int else None
    return event.origin.discovered_at if event.origin is not None else None


def _of_origin(name: str) -> Make:
    return _of_events(lambda event: getattr(event.origin, name) if event.origin else None)


def _channel_id(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    return _u64([_channel_of(event) for event in rows.events], kind)


def _channel_of(event: Any) -> int | None:
    for owner, name in ((event.message, "channel_id"), (event.channel, "id")):
        if owner is not None:
            return int(getattr(owner, name))
    return event.channel_id  # type: ignore[no-any-return]


def _reasons(rows: RecordRows) -> list[str | None]:
    return [
        event.reason or event.last_error or getattr(frame, "reason", None)
        for event, frame in zip(rows.events, rows.frames, strict=True)
    ]


def _controls(part: str, name: str) -> Make:
    return _list(
        lambda rows: [
            getattr(found, name) if (found := getattr(frame, part)) is not None else None
            for frame in rows.frames
        ]
    )


_COLUMNS: dict[str, JournalColumn] = {
    "stream": JournalColumn((), _same(lambda rows: rows.stream)),
    "segment": JournalColumn((), _same(lambda rows: rows.segment)),
    "offset": JournalColumn((), _list(lambda rows: rows.offsets)),
    "end": JournalColumn((), _list(lambda rows: rows.ends)),
    "at": JournalColumn((), _time_ms(lambda rows: rows.at_ms)),
    "event": JournalColumn((), _list(_kinds)),
    "sequence": JournalColumn((), _list(lambda rows: [frame.seq for frame in rows.frames])),
    "number": JournalColumn(_ABOUT, _number),
    "numbers": JournalColumn(_ABOUT, _of_events(lambda event: len(_about(event)) or None)),
    "relay_id": JournalColumn(
        ("message_id", "relay_id", "message.metadata.relay_id"), _of_events(_relay_id)
    ),
    "message_type": JournalColumn(
        ("message.message_type",), _of_message(lambda m: _TYPES.get(m.message_type))
    ),
    "sender": JournalColumn(
        ("message.sender", "origin.agent"),
        _of_events(
            lambda e: e.message.sender if e.message else e.origin.agent if e.origin else None
        ),
    ),
    "to": JournalColumn(("message.metadata.to", "origin.target"), _of_events(_to)),
    "recipients": JournalColumn(_RECIPIENT_FIELDS, _of_events(_recipients)),
    "checksum": JournalColumn(("message.content",), _of_message(lambda m: sha256_hex(m.content))),
    "content_size": JournalColumn(("message.content",), _of_message(lambda m: len(m.content))),
    "correlation_id": JournalColumn(
        ("message.correlation_id",), _of_message(lambda m: m.correlation_id)
    ),
    "kind": JournalColumn(("message.message_type", "message.metadata.kind"), _of_message(_kind)),
    "created_at": JournalColumn(
        ("message.created_at",), _time_s(lambda rows: [_created_s(e) for e in rows.events])
    ),
    "created_ns": JournalColumn(
        ("message.metadata.created_ns", "origin.discovered_at"), _of_events(_created_ns)
    ),
    "state": JournalColumn(("state", "delivery.state"), _of_events(_state)),
    "attempt": JournalColumn(("attempt", "delivery.attempt"), _of_events(_attempt)),
    "said": JournalColumn(("said",), _of_events(lambda event: event.said or None)),
    "reason": JournalColumn(("reason", "last_error"), _list(_reasons)),
    "answer_id": JournalColumn(("answer_id",), _of_events(lambda event: event.answer_id or None)),
    "message_numbers": JournalColumn(_ABOUT, _message_numbers),
    "deliveries": JournalColumn(
        (*_ABOUT, *_RECIPIENT_FIELDS, "attempt", "delivery.attempt"), _deliveries
    ),
    "due_at": JournalColumn(("due_ms", "delivery.due_ms"), _time_ms(_due_ms)),
    "held": JournalColumn(
        ("held",), _of_events(lambda e: e.held if e.type == "MessageSent" else None)
    ),
    "channel_id": JournalColumn(("channel_id", "channel.id", "message.channel_id"), _channel_id),
    "file_path": JournalColumn(("origin.path",), _of_origin("path")),
    "file_checksum": JournalColumn(("origin.checksum",), _of_origin("checksum")),
    "archive": JournalColumn(
        ("note.name",), _of_events(lambda event: event.note and event.note.name)
    ),
    "lost_ms": JournalColumn(("by_ms",), _of_events(lambda event: event.by_ms)),
    "epoch": JournalColumn((), _controls("start", "epoch")),
    "boot_id": JournalColumn((), _controls("start", "boot_id")),
    "covers": JournalColumn((), _controls("checkpoint", "offset")),
}
