"""Reads the store's file for commands: as of its last flush, at most 100 messages or 5 s ago."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.engine import Engine, Message

# A flush is due after 5 s; one that a large store or a slow disk holds up is not waited for.
FLUSH_TIMEOUT_S = 15.0
FLUSH_POLL_S = 0.05


def read_store(home: Home) -> Engine:
    """Open the store read-only from its file.

    Errors: FormatError for a damaged file; KeyFileError, SealedStore for an encrypted one.
    """
    from relay.base.clock import Clock
    from relay.base.config import load
    from relay.daemon.opening import open_store_readonly, store_key

    config = load(home)
    return open_store_readonly(home, Clock(), config, store_key(home, config, make=False))


def message_facts(store: Engine, message: Message) -> dict[str, Any]:
    """Collect the facts of a message that the commands print."""
    from relay.base.clock import NS_PER_S, iso_time
    from relay.delivery.router import KIND_OF

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


def wait_for_flush(home: Home) -> None:
    """Wait until the store's file contains the effect of earlier commands.

    A change of a channel is thus visible to the next command. After 15 s a line on stderr says
    that the file is not up to date.
    """
    from relay.base.home import LEDGER, lock_holder
    from relay.base.names import ORCHESTRATOR
    from relay.ledger.file import open_readonly

    db = open_readonly(home.path(LEDGER))
    newest = db.execute("SELECT max(id) FROM messages").fetchone()[0]
    waits = (
        "SELECT 1 FROM messages WHERE status IN ('pending', 'processing', 'completed') "
        "AND status = 'processing' AND target = ? AND id <= ? LIMIT 1"
    )
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while lock_holder(home) is not None and db.execute(waits, (ORCHESTRATOR, newest)).fetchone():
        if time.monotonic() > deadline:
            click.echo("relay: the store file does not have the latest changes yet", err=True)
            break
        time.sleep(FLUSH_POLL_S)
    db.close()
