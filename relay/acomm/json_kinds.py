"""How each kind of value of the engine stands in JSON, in both directions.

A ``Kind`` is a pair: ``dump`` gives what ``json`` can write, ``load`` gives the value back or
raises ``Wrong`` with the field's path and the rule that it breaks. The tables at the end name
a kind for every field of every value, in the order in which model.py declares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    Labelled,
    MatchMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Metadata,
    MetadataValue,
    Participant,
    ParticipantRole,
    Priority,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
    Subscription,
)

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
NOT_FINITE = ({"Float": "NaN"}, {"Float": "Infinity"}, {"Float": "-Infinity"})


class Wrong(Exception):
    """A JSON value is not what its field wants: the field's path, and the rule."""

    def __init__(self, rule: str, field: str = "") -> None:
        super().__init__(f"{field}: {rule}" if field else rule)
        self.rule = rule
        self.field = field

    def inside(self, outer: str) -> Wrong:
        """The same, seen from the value that holds this one in its field ``outer``."""
        joint = "" if not self.field or self.field.startswith("[") else "."
        return Wrong(self.rule, f"{outer}{joint}{self.field}")


class Kind(NamedTuple):
    """Both directions of one kind of value; ``load`` raises Wrong."""

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def record(cls: type[msgspec.Struct], **kinds: Kind) -> Kind:
    """An object with a key for every field of ``cls``; fields with a default may be missing."""
    assert tuple(kinds) == cls.__struct_fields__, cls
    required = [field.name for field in msgspec.structs.fields(cls) if field.required]

    def dump(value: msgspec.Struct) -> dict[str, Any]:
        return {name: kind.dump(getattr(value, name)) for name, kind in kinds.items()}

    def load(row: Any) -> Any:
        if not isinstance(row, dict):
            raise _unexpected("an object", row)
        for name in row:
            if name not in kinds:
                raise Wrong("no such field", name)
        for name in required:
            if name not in row:
                raise Wrong("is missing", name)
        values = {}
        for name, value in row.items():
            try:
                values[name] = kinds[name].load(value)
            except Wrong as exc:
                raise exc.inside(name) from None
        return cls(**values)

    return Kind(dump, load)


def label(enum: type[Labelled], absent: Labelled | None = None) -> Kind:
    """A member by the document's word for it; ``absent`` stands for one that is not given."""
    members = {member.label: member for member in enum}

    def load(value: Any) -> Labelled:
        if not isinstance(value, str) or value not in members:
            raise _unexpected(f"one of {', '.join(members)}", value)
        return members[value]

    return Kind(
        lambda member: (member if absent is None or member is not None else absent).label, load
    )


def integer(most: int, least: int = 0) -> Kind:
    """A whole number from ``least`` to ``most``."""

    def load(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _unexpected(f"an integer from {least} to {most}", value)
        return value

    return Kind(_as_it_is, load)


def opt(kind: Kind) -> Kind:
    """null for None."""
    return Kind(
        lambda value: None if value is None else kind.dump(value),
        lambda value: None if value is None else kind.load(value),
    )


def many(kind: Kind) -> Kind:
    """A list for a tuple."""

    def load(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list):
            raise _unexpected("a list", values)
        loaded = []
        for number, value in enumerate(values):
            try:
                loaded.append(kind.load(value))
            except Wrong as exc:
                raise exc.inside(f"[{number}]") from None
        return tuple(loaded)

    return Kind(lambda values: [kind.dump(value) for value in values], load)


def _as_it_is(value: Any) -> Any:
    return value


def _unexpected(expected: str, found: object) -> Wrong:
    text = json.dumps(found)
    return Wrong(f"expected {expected}, found {text if len(text) <= 60 else text[:57] + '...'}")


def _load_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unexpected("true or false", value)
    return value


def _load_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _unexpected("a text", value)
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a pair, UTF-8 cannot
        raise _unexpected("a text without half surrogate pairs", value) from None
    return value


def _load_hex(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise _unexpected("hex digits, two a byte", value) from None


def _dump_metadata(metadata: Metadata) -> dict[str, Any]:
    return {key: _dump_metadata_value(value) for key, value in metadata.items()}


def _dump_metadata_value(value: MetadataValue) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return {"Float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}


def _load_metadata(row: Any) -> Metadata:
    if not isinstance(row, dict):
        raise _unexpected("an object", row)
    metadata: Metadata = {}
    for key, value in row.items():
        try:
            metadata[_load_text(key)] = _load_metadata_value(value)
        except Wrong as exc:
            raise exc.inside(key) from None
    return metadata


def _load_metadata_value(value: Any) -> MetadataValue:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return _load_text(value)
    if isinstance(value, int):
        return int(integer(I64_MAX, I64_MIN).load(value))
    if isinstance(value, dict) and value in NOT_FINITE:
        return float(value["Float"])
    raise _unexpected("a text, number, true, false, null or a Float", value)


def _dump_retention(retention: Retention) -> Any:
    kind = retention.kind
    return kind.label if kind is RetentionKind.FOREVER else {kind.label: retention.amount}


def _load_retention(value: Any) -> Retention:
    if value == RetentionKind.FOREVER.label:
        return Retention()
    if isinstance(value, dict) and len(value) == 1:
        ((word, amount),) = value.items()
        kind = label(RetentionKind).load(word)
        if kind is not RetentionKind.FOREVER:
            return Retention(kind, U64.load(amount))
    raise _unexpected('"Forever" or an object with Duration, Count or Size', value)


def _dump_message(message: Message) -> dict[str, Any]:
    """The fields of a message, ``content_hex`` in the place of content that is no text."""
    row: dict[str, Any] = _MESSAGE_FIELDS.dump(message)
    if row["content"] is not None:
        return row
    names = ("content_hex" if name == "content" else name for name in row)
    return dict(zip(names, {**row, "content": message.content.hex()}.values(), strict=True))


def _load_message(row: Any) -> Message:
    if isinstance(row, dict) and "content_hex" in row:
        if "content" in row:
            raise Wrong("content is given as well", "content_hex")
        try:
            content = _load_hex(row["content_hex"])
        except Wrong as exc:
            raise exc.inside("content_hex") from None
        row = {name: value for name, value in row.items() if name != "content_hex"}
        row["content"] = content
    message: Message = _MESSAGE_FIELDS.load(row)
    return message


def _dump_content(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _load_content(value: Any) -> bytes:
    return value if isinstance(value, bytes) else _load_text(value).encode()


U32 = integer(2**32 - 1)
U64 = integer(2**64 - 1)
BOOL = Kind(_as_it_is, _load_bool)
TEXT = Kind(_as_it_is, _load_text)
HEX = Kind(bytes.hex, _load_hex)

_MESSAGE_FIELDS = record(
    Message,
    id=U64,
    message_type=label(MessageType),
    sender=TEXT,
    channel_id=U64,
    content=Kind(_dump_content, _load_content),
    topic=opt(TEXT),
    correlation_id=opt(TEXT),
    priority=label(Priority),
    metadata=opt(Kind(_dump_metadata, _load_metadata)),
    created_at=U64,
    delivered_at=opt(U64),
    acknowledged_at=opt(U64),
    ttl=opt(U64),
    status=label(MessageStatus),
    retry_count=U32,
    signature=opt(HEX),
)
MESSAGE = Kind(_dump_message, _load_message)
PARTICIPANT = record(
    Participant, id=TEXT, role=label(ParticipantRole), joined_at=U64, identity_id=opt(TEXT)
)
CONFIG = record(
    ChannelConfig,
    delivery=label(DeliveryMode),
    max_message_size=U64,
    max_participants=opt(U32),
    retention=Kind(_dump_retention, _load_retention),
    ack_timeout=opt(U64),
    max_retries=U32,
    retry_backoff_ms=U64,
    echo=BOOL,
    sticky_messages=BOOL,
    priority_ordering=BOOL,
)
CHANNEL = record(
    Channel,
    id=U64,
    name=TEXT,
    channel_type=label(ChannelType),
    owner=TEXT,
    participants=many(PARTICIPANT),
    config=CONFIG,
    state=label(ChannelState),
    created_at=U64,
    modified_at=U64,
    message_count=U64,
    description=opt(TEXT),
    tags=many(TEXT),
)
FILTER = record(
    MessageFilter,
    channel_ids=opt(many(U64)),
    sender=opt(TEXT),
    message_types=opt(many(label(MessageType))),
    topic_pattern=opt(TEXT),
    after=opt(U64),
    before=opt(U64),
    status=opt(many(label(MessageStatus))),
    priority=opt(many(label(Priority))),
    correlation_id=opt(TEXT),
    content_pattern=opt(TEXT),
    limit=U64,
    offset=U64,
    sort_by=label(SortField, SortField.CREATED_AT),
    sort_order=label(SortOrder, SortOrder.DESCENDING),
    include_archived=BOOL,
)
SUBSCRIPTION = record(
    Subscription,
    id=U64,
    channel_id=U64,
    subscriber=TEXT,
    topic_pattern=TEXT,
    match_mode=label(MatchMode),
    created_at=U64,
    active=BOOL,
    filter=opt(FILTER),
)
