"""The sections that are read, their schemas, and the rows of those that hold no messages.

Only the columns that somebody asked for are computed. Messages come from ``acomm_arrow``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.types import StructType

from relay.acomm.engine_state import EngineState
from relay.acomm.model import Channel, Message, MetadataValue, StoreFile, Subscription
from relay.audit import schemas
from relay.audit.acomm_arrow import LAST_SECOND, MICROS
from relay.base.errors import RelayError

Columns = Mapping[str, Callable[[Any], object]]

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
    """The rows of a section without messages of the store that was read from ``path``."""
    file: Columns = {"file": lambda _: path}
    if section == "channels":
        return Rows(store.channels, {**file, **_CHANNEL})
    if section == "subscriptions":
        return Rows(store.subscriptions, {**file, **_SUBSCRIPTION})
    return Rows(_deliveries(store), {**file, **_DELIVERY})


def _deliveries(store: StoreFile) -> list[StoredDelivery]:
    kept = (*store.messages, *store.dead_letters, *store.archive)
    relay_ids = {message.id: _relay_id(message) for message in kept}
    return [
        StoredDelivery(number, relay_ids.get(number), recipient, delivery.state.label)
        for number, deliveries in EngineState.decode(store.engine_state).deliveries.items()
        for recipient, delivery in deliveries.items()
    ]


def _at(seconds: int | None) -> int | None:
    """Microseconds for a timestamp column; NULL behind the last time that Spark has."""
    return seconds * MICROS if seconds is not None and seconds <= LAST_SECOND else None


def _as_text(value: MetadataValue) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _relay_id(message: Message) -> str | None:
    return _as_text((message.metadata or {}).get("relay_id"))


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
