"""A store's values as columns: for each section its schema, its rows, and how a row gives each.

Only the columns that somebody asked for are computed: a checksum nobody reads is not hashed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.types import StructType

from relay.audit import schemas
from relay.checksums import sha256_hex
from relay.comm.engine_state import EngineState
from relay.comm.message_record import SEAL_BYTES
from relay.comm.model import Channel, Message, MetadataValue, StoreFile, Subscription
from relay.errors import RelayError

Columns = Mapping[str, Callable[[Any], object]]

LAST_SECOND = 253_402_300_799  # 9999-12-31T23:59:59Z: Spark's times end there
MICROS = 1_000_000
MESSAGE_SECTIONS = ("messages", "dead_letters", "archive")
SECTIONS: dict[str, StructType] = {
    **dict.fromkeys(MESSAGE_SECTIONS, schemas.STORED_MESSAGE),
    "channels": schemas.STORED_CHANNEL,
    "subscriptions": schemas.STORED_SUBSCRIPTION,
    "deliveries": schemas.STORED_DELIVERY,
}


class StoredDelivery(NamedTuple):
    """One recipient of one live message."""

    id: int
    relay_id: str | None
    recipient: str
    state: str


class Rows(NamedTuple):
    """One section of one file."""

    values: Sequence[Any]
    columns: Columns


def sections_of(text: str) -> tuple[str, ...]:
    """The sections that an option names, divided by commas; all must have the same columns.

    Errors: RelayError for a name that is none, and for a mixture.
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise RelayError(f"section {name!r} is none of {', '.join(SECTIONS)}")
    if len({id(SECTIONS[name]) for name in names}) > 1:
        raise RelayError(f"sections {text} have different columns: read them one by one")
    return names


def rows(store: StoreFile, section: str, path: str) -> Rows:
    """The rows of one section of the store that was read from ``path``."""
    file: Columns = {"file": lambda _: path}
    if section == "channels":
        return Rows(store.channels, {**file, **_CHANNEL})
    if section == "subscriptions":
        return Rows(store.subscriptions, {**file, **_SUBSCRIPTION})
    if section == "deliveries":
        return Rows(_deliveries(store), {**file, **_DELIVERY})
    messages: tuple[Message, ...] = getattr(store, section)
    return Rows(messages, {**file, **_MESSAGE, **_message_context(store, section)})


def _deliveries(store: StoreFile) -> list[StoredDelivery]:
    kept = (*store.messages, *store.dead_letters, *store.archive)
    relay_ids = {message.id: _relay_id(message) for message in kept}
    return [
        StoredDelivery(number, relay_ids.get(number), recipient, delivery.state.label)
        for number, deliveries in EngineState.decode(store.engine_state).deliveries.items()
        for recipient, delivery in deliveries.items()
    ]


def _message_context(store: StoreFile, section: str) -> Columns:
    """Columns of a message that depend on the file it lies in."""
    names = {channel.id: channel.name for channel in store.channels}
    sealed = store.encrypted
    seal = SEAL_BYTES if sealed else 0
    return {
        "section": lambda _: section,
        "channel": lambda m: names.get(m.channel_id),
        "content_size": lambda m: len(m.content) - seal,
        # the ledger's checksum is of the plain text, which a sealed content does not tell
        "checksum": lambda m: None if sealed else sha256_hex(m.content),
        "sealed": lambda _: sealed,
    }


def _at(seconds: int | None) -> int | None:
    """Microseconds for a timestamp column; NULL behind the last time that Spark has."""
    return seconds * MICROS if seconds is not None and seconds <= LAST_SECOND else None


def _as_text(value: MetadataValue) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _metadata(message: Message) -> list[tuple[str, str | None]] | None:
    if message.metadata is None:
        return None
    return [(key, _as_text(value)) for key, value in message.metadata.items()]


def _relay_id(message: Message) -> str | None:
    return _as_text((message.metadata or {}).get("relay_id"))


def _to(message: Message) -> str | None:
    return _as_text((message.metadata or {}).get("to"))


def _created_ns(message: Message) -> int | None:
    value = (message.metadata or {}).get("created_ns")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_MESSAGE: dict[str, Callable[[Message], object]] = {
    "id": lambda m: m.id,
    "message_type": lambda m: m.message_type.label,
    "sender": lambda m: m.sender,
    "channel_id": lambda m: m.channel_id,
    "content": lambda m: m.content,
    "topic": lambda m: m.topic,
    "correlation_id": lambda m: m.correlation_id,
    "priority": lambda m: m.priority.label,
    "metadata": _metadata,
    "relay_id": _relay_id,
    "to": _to,
    "created_ns": _created_ns,
    "created_at": lambda m: _at(m.created_at),
    "delivered_at": lambda m: _at(m.delivered_at),
    "acknowledged_at": lambda m: _at(m.acknowledged_at),
    "ttl_s": lambda m: m.ttl,
    "status": lambda m: m.status.label,
    "retry_count": lambda m: m.retry_count,
    "signature": lambda m: m.signature,
}

_DELIVERY: dict[str, Callable[[StoredDelivery], object]] = {
    "id": lambda d: d.id,
    "relay_id": lambda d: d.relay_id,
    "recipient": lambda d: d.recipient,
    "state": lambda d: d.state,
}

_CHANNEL: dict[str, Callable[[Channel], object]] = {
    "id": lambda c: c.id,
    "name": lambda c: c.name,
    "channel_type": lambda c: c.channel_type.label,
    "owner": lambda c: c.owner,
    "participants": lambda c: [participant.id for participant in c.participants],
    "delivery": lambda c: c.config.delivery.label,
    "ack_timeout_s": lambda c: c.config.ack_timeout,
    "max_retries": lambda c: c.config.max_retries,
    "state": lambda c: c.state.label,
    "created_at": lambda c: _at(c.created_at),
    "modified_at": lambda c: _at(c.modified_at),
    "message_count": lambda c: c.message_count,
    "description": lambda c: c.description,
    "tags": lambda c: list(c.tags),
}

_SUBSCRIPTION: dict[str, Callable[[Subscription], object]] = {
    "id": lambda s: s.id,
    "channel_id": lambda s: s.channel_id,
    "subscriber": lambda s: s.subscriber,
    "topic_pattern": lambda s: s.topic_pattern,
    "match_mode": lambda s: s.match_mode.label,
    "created_at": lambda s: _at(s.created_at),
    "active": lambda s: s.active,
}
