"""Events of a journal as columns, and how each is made.

One struct serves all kinds of events, with the fields that columns are made of: one that a kind
lacks is None. A content is hashed for its own column alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

_Word = str | int | float | bool | None  # a value of a message's metadata


class _Metadata(msgspec.Struct, gc=False):
    relay_id: _Word = None
    to: _Word = None
    kind: _Word = None
    created_ns: _Word = None


class _MessageFields(msgspec.Struct, gc=False):
    id: int = 0
    message_type: int = 0
    sender: str | None = None
    channel_id: int | None = None
    content: bytes = b""
    correlation_id: str | None = None
    created_at: int = 0
    metadata: _Metadata | None = None


class _OriginFields(msgspec.Struct, gc=False):
    agent: str | None = None
    path: str | None = None
    checksum: str | None = None
    target: str | None = None
    discovered_at: int | None = None


class _DeliveryFields(msgspec.Struct, gc=False):
    state: int = 0
    attempt: int = 0
    due_ms: int = 0


class _ChannelFields(msgspec.Struct, gc=False):
    id: int = 0


class _Note(msgspec.Struct, gc=False):
    name: str = ""


class _EventFields(msgspec.Struct, gc=False):
    type: str = ""
    message_id: int | str | None = None  # FileRefused and OfferChanged have the relay's
    message_ids: list[int] | None = None
    recipients: list[str] | None = None
    recipient: str | None = None
    participant: str | dict[str, Any] | None = None  # ParticipantJoined has more than a name
    deliveries: list[tuple[int, str, int]] | None = None
    key: tuple[str, int, str] | None = None
    state: int = -1
    attempt: int = 0
    due_ms: int | None = None
    said: str | None = None
    reason: str | None = None
    last_error: str | None = None
    answer_id: str | None = None
    relay_id: str | None = None
    by_ms: int | None = None
    held: bool = False
    channel_id: int | None = None
    channel: _ChannelFields | None = None
    note: _Note | None = None
    delivery: _DeliveryFields | None = None
    origin: _OriginFields | None = None
    message: _MessageFields | None = None


class _Frame(msgspec.Struct, gc=False):
    v: int
    event: _EventFields | None = None
    start: Start | None = None
    checkpoint: Checkpoint | None = None
    sealed: bytes | None = None
    seq: int | None = None


_NO_EVENT = _EventFields()
_decode = msgspec.msgpack.Decoder(_Frame).decode
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
        self.events: list[_EventFields] = [frame.event or _NO_EVENT for frame in self.frames]

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


class Marker(NamedTuple):
    """In the place of a frame: a record whose payload is not read."""

    kind: str
    reason: str | None = None
    seq: None = None
    event: None = None
    start: None = None
    checkpoint: None = None


def decoder(key: bytes | None, path: str) -> Decode:
    """Make a function that decodes payloads into frames.

    Errors of a call: FormatError and VersionError with the offset; SealedStore without the key,
    or with another one.
    """
    codec = EventCodec(key)

    def decode_frame(payload: bytes, offset: int) -> Any:
        try:
            found = _decode(payload)
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
    arrays = [_COLUMNS[field.name](rows, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# -- how columns are made ---------------------------------------------------------------


def _list(values: Callable[[RecordRows], list[Any]]) -> Make:
    return lambda rows, kind: pa.array(values(rows), kind)


def _of_events(value: Callable[[_EventFields], Any]) -> Make:
    return lambda rows, kind: pa.array([value(event) for event in rows.events], kind)


def _of_message(value: Callable[[_MessageFields], Any]) -> Make:
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


def _created_s(event: _EventFields) -> int | None:
    if event.message is None or event.message.created_at > LAST_SECOND:
        return None
    return event.message.created_at


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


def _kinds(rows: RecordRows) -> list[str]:
    return [frame.event.type if frame.event else _control(frame) for frame in rows.frames]


def _control(frame: Any) -> str:
    if isinstance(frame, Marker):
        return frame.kind
    return "Start" if frame.start else "Checkpoint" if frame.checkpoint else "Unknown"


def _about(event: _EventFields) -> Sequence[int]:
    """Return the engine's numbers of the messages that an event is about, each once."""
    if event.message is not None:
        return (event.message.id,)
    number = event.message_id
    if number is not None:
        return (number,) if type(number) is int else ()
    if event.message_ids is not None:
        return event.message_ids
    if event.deliveries is not None:
        return tuple({delivery[0]: None for delivery in event.deliveries})
    return (event.key[1],) if event.key is not None else ()


def _number(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    numbers = [_about(event) for event in rows.events]
    return _u64([ids[0] if len(ids) == 1 else None for ids in numbers], kind)


def _message_numbers(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    numbers = [_about(event) or None for event in rows.events]
    return pa.array(numbers, pa.list_(pa.uint64())).cast(kind)


def _recipients(event: _EventFields) -> Sequence[str] | None:
    if event.recipients is not None:
        return event.recipients
    if event.recipient is not None:
        return (event.recipient,)
    if event.deliveries is not None:
        return tuple({delivery[1]: None for delivery in event.deliveries})
    if event.type == "MessageReceived":
        return (str(event.participant),)
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


def _state(event: _EventFields) -> str | None:
    if (known := _STATE_OF.get(event.type)) is not None:
        return known
    if event.type == "DeliveriesMoved":
        return _STATES.get(event.state)
    return None if event.delivery is None else _STATES.get(event.delivery.state)


def _attempt(event: _EventFields) -> int | None:
    if event.delivery is not None:
        return event.delivery.attempt
    return event.attempt or None


def _due_ms(rows: RecordRows) -> list[int | None]:
    return [
        (event.due_ms if (delivery := event.delivery) is None else delivery.due_ms) or None
        for event in rows.events
    ]


def relay_id_of(event: _EventFields) -> str | None:
    """Return the message_id that an event has."""
    if event.message is not None:
        return _metadata_text(event.message, "relay_id")
    # empty for a file whose name has no id
    if event.type in _WITH_RELAY_ID:
        return str(event.message_id) if event.message_id else None
    return (event.relay_id or None) if event.type == "DeadLetterDiscarded" else None


def _to(event: _EventFields) -> str | None:
    if event.message is not None:
        return _metadata_text(event.message, "to")
    return event.origin.target if event.origin is not None else None


def _metadata_text(message: _MessageFields, name: str) -> str | None:
    value = getattr(message.metadata, name, None)
    return value if isinstance(value, str) else None


def _kind(message: _MessageFields) -> str | None:
    return _metadata_text(message, "kind") or _KIND_OF.get(message.message_type)


def _created_ns(event: _EventFields) -> int | None:
    if event.message is not None:
        value = getattr(event.message.metadata, "created_ns", None)
        return value if type(value) is int else None
    return event.origin.discovered_at if event.origin is not None else None


def _of_origin(name: str) -> Make:
    return _of_events(lambda event: getattr(event.origin, name) if event.origin else None)


def _channel_id(rows: RecordRows, kind: pa.DataType) -> pa.Array:
    return _u64([_channel_of(event) for event in rows.events], kind)


def _channel_of(event: _EventFields) -> int | None:
    for owner, name in ((event.message, "channel_id"), (event.channel, "id")):
        if owner is not None:
            return int(getattr(owner, name))
    return event.channel_id


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


_COLUMNS: dict[str, Make] = {
    "stream": _same(lambda rows: rows.stream),
    "segment": _same(lambda rows: rows.segment),
    "offset": _list(lambda rows: rows.offsets),
    "end": _list(lambda rows: rows.ends),
    "at": _time_ms(lambda rows: rows.at_ms),
    "event": _list(_kinds),
    "sequence": _list(lambda rows: [frame.seq for frame in rows.frames]),
    "number": _number,
    "numbers": _of_events(lambda event: len(_about(event)) or None),
    "relay_id": _of_events(relay_id_of),
    "message_type": _of_message(lambda m: _TYPES.get(m.message_type)),
    "sender": _of_events(
        lambda e: e.message.sender if e.message else e.origin.agent if e.origin else None
    ),
    "to": _of_events(_to),
    "recipients": _of_events(_recipients),
    "checksum": _of_message(lambda m: sha256_hex(m.content)),
    "content_size": _of_message(lambda m: len(m.content)),
    "correlation_id": _of_message(lambda m: m.correlation_id),
    "kind": _of_message(_kind),
    "created_at": _time_s(lambda rows: [_created_s(e) for e in rows.events]),
    "created_ns": _of_events(_created_ns),
    "state": _of_events(_state),
    "attempt": _of_events(_attempt),
    "said": _of_events(lambda event: event.said or None),
    "reason": _list(_reasons),
    "answer_id": _of_events(lambda event: event.answer_id or None),
    "message_numbers": _message_numbers,
    "deliveries": _deliveries,
    "due_at": _time_ms(_due_ms),
    "held": _of_events(lambda e: e.held if e.type == "MessageSent" else None),
    "channel_id": _channel_id,
    "file_path": _of_origin("path"),
    "file_checksum": _of_origin("checksum"),
    "archive": _of_events(lambda event: event.note and event.note.name),
    "lost_ms": _of_events(lambda event: event.by_ms),
    "epoch": _controls("start", "epoch"),
    "boot_id": _controls("start", "boot_id"),
    "covers": _controls("checkpoint", "offset"),
}
