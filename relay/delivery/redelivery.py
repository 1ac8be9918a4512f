"""A message that was accepted, as a file once more.

From its original, wherever that lies now, while that is what was accepted; else from what the
engine keeps of it, as for the orchestrator's own messages.
"""

from __future__ import annotations

import base64
import contextlib

from relay.acomm.model import Message, Priority
from relay.base import fsio
from relay.base.checksums import sha256_hex
from relay.base.errors import FormatError, MessageError, UnsafePath
from relay.base.home import Dirs
from relay.base.message import (
    DEFAULT_MAX_BODY_BYTES,
    SIGNATURE_PREFIX,
    Kind,
    MessageFile,
    max_file_bytes,
    parse,
)
from relay.base.names import ORCHESTRATOR
from relay.base.redaction import redact
from relay.delivery import router
from relay.delivery.file_ops import render_delivered
from relay.engine.commstore import CommStore
from relay.ledger import MessageRow, archive_pack


def render_retry(dirs: Dirs, store: CommStore, row: MessageRow, attempt: int) -> bytes:
    """The delivered file of a message, for its ``attempt``.

    Errors: MessageError when neither a file nor the store holds it.
    """
    stored = store.find_by_relay_id(row.message_id)
    message = load_original(dirs, row)
    if message is None and stored is None:
        message = _packed(dirs, row)  # last: it is found by reading a whole day
    if message is None and stored is None:
        raise MessageError("neither file nor store holds it", file=row.file_path)
    if message is None:
        assert stored is not None
        message = reconstruct(stored)
    return render_delivered(
        message,
        row.message_id,
        row.agent_name,
        row.discovered_at,
        row.checksum or "",
        None if stored is None else store.channel_label(stored),
        attempt,
    )


def load_original(dirs: Dirs, row: MessageRow) -> MessageFile | None:
    """The file itself, when it can be read and still says what was accepted."""
    with contextlib.suppress(OSError, UnsafePath):
        return read_original(dirs, row)
    return None


def read_original(dirs: Dirs, row: MessageRow) -> MessageFile | None:
    """The file itself; None when it is damaged, or says something else.

    Errors: FileNotFoundError when it is gone; OSError, UnsafePath when it cannot be read.
    """
    if row.agent_name == ORCHESTRATOR:
        return None
    *folder, name = row.file_path.split("/")
    limit = max_file_bytes(DEFAULT_MAX_BODY_BYTES)
    data, _ = fsio.read_regular(name, dirs.get(*folder), limit, shared=True)
    with contextlib.suppress(MessageError):
        return _accepted(data, row)
    return None


def _packed(dirs: Dirs, row: MessageRow) -> MessageFile | None:
    """The same, from the pack of its day in the archive."""
    with contextlib.suppress(OSError, UnsafePath, MessageError, FormatError):
        data = archive_pack.read(dirs, row.file_path)
        return None if data is None else _accepted(data, row)
    return None


def _accepted(data: bytes, row: MessageRow) -> MessageFile | None:
    name = row.file_path.rpartition("/")[2]
    message = parse(data, file=name)
    clean = redact(data) if message.kind is Kind.SPAWN else None
    if clean is not None:  # it lies in the outbox still, with its secrets
        message = parse(clean.data, file=name)
    return message if sha256_hex(message.content) == row.checksum else None


def reconstruct(message: Message) -> MessageFile:
    """A message as a file again, from what the engine keeps of it."""
    metadata = message.metadata or {}
    kept = {
        "THREAD": metadata.get("thread"),
        "RE": metadata.get("re"),
        "DELIVERY": metadata.get("delivery"),
        "TOPIC": message.topic,
        "TTL": message.ttl,
        "PRIORITY": None if message.priority is Priority.NORMAL else int(message.priority),
        "AWAIT": metadata.get("await_ms"),
    }
    headers = {name: str(value) for name, value in kept.items() if value is not None}
    if message.signature is not None:
        headers["SIGNATURE"] = SIGNATURE_PREFIX + base64.b64encode(message.signature).decode()
    for key, value in metadata.items():
        if key.startswith("h."):
            headers[key[2:]] = str(value)
    kind = Kind(str(metadata.get("kind", router.KIND_OF[message.message_type])))
    attachments = tuple(str(metadata.get("attachments", "")).split())
    return MessageFile(str(metadata["to"]), kind, headers, message.content, attachments)
