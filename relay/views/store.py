"""Reads the store as it is now: its file, and the journal after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.engine import Engine, Message


def read_store(home: Home) -> Engine:
    """Open the store read-only.

    Errors: FormatError for a damaged file; KeyFileError, SealedStore for an encrypted one.
    """
    from relay.base.clock import Clock
    from relay.base.config import load
    from relay.daemon.opening import open_store_readonly, store_key

    config = load(home)
    return open_store_readonly(home, Clock(), config, store_key(home, config, make=False))


def stored_facts(store: Engine, message: Message) -> dict[str, Any]:
    """Collect the facts of a message that the commands print."""
    from relay.base.clock import NS_PER_S, iso_time
    from relay.engine.messages import KIND_OF

    metadata = message.metadata or {}
    at_ns = metadata.get("created_ns")
    at_ns = at_ns if isinstance(at_ns, int) else message.created_at * NS_PER_S
    return {
        "at": iso_time(at_ns)[:19] + "Z",
        "id": metadata.get("relay_id"),
        "number": message.id,
        "from": message.sender,
        "recipients": list(store.messages.recipients(message.id)),
        "channel": store.channels.get(message.channel_id).name,
        "type": message.message_type.label,
        "kind": str(metadata.get("kind", KIND_OF[message.message_type])),
        "status": message.status.label,
        "priority": int(message.priority),
        "topic": message.topic,
        "thread": metadata.get("thread") or message.correlation_id,
        "re": metadata.get("re"),
        "content": message.content.decode(errors="replace"),
    }
