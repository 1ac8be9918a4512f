"""File operations of the pipeline: inboxes, archive, and reading a message again from either.

    inbox/.pending/{id}.msg   staged, complete; the journal says so before the next step
    inbox/{id}.msg            delivered: after the rename the recipient has it
    archive/{date}/{agent}/{id}.msg and …/rejected/

Every operation may be repeated. The name in the inbox is the message id, so a second delivery
cannot add a second file. A message is read again from its original, wherever that is now, if it is
unchanged; otherwise it is reconstructed from the store. See docs/architecture.md.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterable

from relay.acomm.model import Message, Priority
from relay.agents.requests import redact
from relay.base import archive_pack, fsio
from relay.base.clock import iso_date, iso_time
from relay.base.errors import FormatError, MessageError, RelayError, UnsafePath
from relay.base.home import PENDING, Dirs
from relay.base.message import (
    DEFAULT_MAX_BODY_BYTES,
    SIGNATURE_PREFIX,
    Kind,
    MessageFile,
    max_file_bytes,
    parse,
    render,
)
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, SHA256_PREFIX, sha256_hex
from relay.delivery.values import OUTBOX, OutboxFile, is_same
from relay.engine.engine import Engine
from relay.engine.messages import KIND_OF
from relay.ledger.ledger import MessageRow

DUPLICATES = "duplicates"
MOST_NAME_BYTES = 240  # leaves room for a number; the limit is 255


PROBE = "room"  # a file that is made to see whether there is any
NO_ROOM = "the disk takes no file"  # the reason of a delivery that is held for that


class DiskFull(RelayError):
    """The disk is full; the message waits in its outbox."""

    hint = "free some space; the relay continues by itself"


def render_delivered(
    message: MessageFile,
    message_id: str,
    sender: str,
    sent_ns: int,
    checksum: str,
    channel: str | None,
    attempt: int = 1,
) -> bytes:
    """The file for the recipient: the headers of the original and those of the relay."""
    added = [
        ("ID", message_id),
        ("FROM", sender),
        ("SENT", iso_time(sent_ns)),
        ("ATTEMPT", str(attempt)),
        ("CHECKSUM", SHA256_PREFIX + checksum),
    ]
    if channel:
        added.append(("CHANNEL", channel))
    return render(message, added)


def check_room(dirs: Dirs) -> None:
    """Errors: DiskFull while the disk takes no file."""
    try:
        folder = dirs.ensure("tmp")
        fsio.remove(PROBE, folder)  # the relay was killed here
        fsio.create(PROBE, bytes(4096), folder)
        fsio.remove(PROBE, folder)
    except UnsafePath:
        return
    except OSError as exc:
        if exc.errno in fsio.DISK_ERRNOS:
            raise DiskFull(f"{NO_ROOM}: {exc.strerror}") from exc


def stage(dirs: Dirs, message_id: str, data: bytes, recipients: Iterable[str]) -> dict[str, str]:
    """Write the complete file into each recipient's ``inbox/.pending``.

    Returns the reasons of failures by recipient; the others have the file.
    """
    name = message_id + MSG_SUFFIX
    failed: dict[str, str] = {}
    for recipient in recipients:
        try:
            _create(dirs, recipient, name, data)
        except UnsafePath as exc:
            failed[recipient] = str(exc)
        except OSError as exc:
            failed[recipient] = _refusal(exc)
    return failed


def _create(dirs: Dirs, recipient: str, name: str, data: bytes) -> None:
    try:
        pending = dirs.get("agents", recipient, "inbox", PENDING)
    except FileNotFoundError:
        dirs.get("agents", recipient)  # an agent that was removed is not made again
        pending = dirs.ensure("agents", recipient, "inbox", PENDING)
    try:
        fsio.create(name, data, pending)
    except FileExistsError:  # staged before a crash, never committed
        fsio.remove(name, pending)
        fsio.create(name, data, pending)


def unstage(dirs: Dirs, message_id: str, recipient: str) -> None:
    """Remove a staged file, unless it is missing or out of reach."""
    with contextlib.suppress(OSError, UnsafePath):
        fsio.remove(message_id + MSG_SUFFIX, dirs.get("agents", recipient, "inbox", PENDING))


def deliver(dirs: Dirs, message_id: str, recipient: str, *, again: bool = False) -> str:
    """Rename the staged file into the inbox; returns the reason of a failure, or nothing.

    The recipient has it with the rename. ``again``: after a crash, when a missing staged file was
    already delivered; otherwise a missing file is a failure. Errors: with ``again`` OSError when
    descriptors or memory run out, because the file may have been delivered.
    """
    name = message_id + MSG_SUFFIX
    try:
        inbox = dirs.get("agents", recipient, "inbox")
        pending = dirs.get("agents", recipient, "inbox", PENDING)
    except (OSError, UnsafePath) as exc:
        if again and isinstance(exc, OSError) and exc.errno in fsio.EXHAUSTED:
            raise
        is_full = isinstance(exc, OSError) and exc.errno in fsio.DISK_ERRNOS
        return f"{NO_ROOM if is_full else 'inbox cannot be opened'}: {reason_of(exc)}"
    try:
        fsio.rename(name, pending, name, inbox)
    except FileNotFoundError as exc:
        return "" if again else _refusal(exc)
    except OSError as exc:
        return _refusal(exc)
    return ""


def _refusal(exc: OSError) -> str:
    what = NO_ROOM if exc.errno in fsio.DISK_ERRNOS else "inbox cannot be written"
    return f"{what}: {reason_of(exc)}"


def reason_of(exc: OSError | UnsafePath) -> str:
    """The system's words for it, without the path."""
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


def take_back(dirs: Dirs, message_id: str, recipient: str) -> bool:
    """Rename an unread file from the inbox into ``inbox/.pending``; False if it has left the inbox.

    Errors: OSError, UnsafePath.
    """
    name = message_id + MSG_SUFFIX
    inbox = dirs.get("agents", recipient, "inbox")
    pending = dirs.ensure("agents", recipient, "inbox", PENDING)
    try:
        fsio.rename(name, inbox, name, pending)
    except FileNotFoundError:
        return False
    return True


def archive(
    dirs: Dirs,
    agent: str,
    file_name: str,
    at_ns: int,
    kind: str = "",
    *,
    redacted: bytes | None = None,
    place: tuple[str, ...] = OUTBOX,
) -> str | None:
    """Move an original out of ``place``; returns its new path, or None if it is missing.

    ``kind``: REJECTED or DUPLICATES for a folder of its own, in which a name that is taken gets a
    number: nothing is overwritten. ``redacted``: archived in place of a file that has secrets,
    durable before that file is removed.
    """
    parts = ["archive", iso_date(at_ns), agent] + ([kind] if kind else [])
    target = dirs.ensure(*parts)
    outbox = dirs.get("agents", agent, *place)
    if redacted is not None:
        name = _keep_redacted(file_name, redacted, target, is_numbered=bool(kind))
        fsio.remove(file_name, outbox)
        return "/".join([*parts, name])
    name = _free_name(file_name, target) if kind else file_name
    try:
        fsio.rename(file_name, outbox, name, target)
    except FileNotFoundError:
        return None
    return "/".join([*parts, name])


def _keep_redacted(file_name: str, data: bytes, target: int, *, is_numbered: bool) -> str:
    """Write it under its name, unless a crash left it there; returns the name."""
    with contextlib.suppress(OSError, UnsafePath):
        if fsio.read_regular(file_name, target, len(data) + 1)[0] == data:
            return file_name
    name = _free_name(file_name, target) if is_numbered else file_name
    temp = f".{sha256_hex(os.fsencode(file_name))[:16]}.tmp"  # any name may be as long as it can
    fsio.remove(temp, target)
    fsio.create(temp, data, target, sync=True)
    fsio.rename(temp, target, name, target)
    return name


def has_both_names(name: str, fd: int, other_fd: int) -> bool:
    """True if a file has this name in both open directories: after a power cut, on file systems
    that make a rename durable by half. Errors: OSError."""
    here, there = (os.stat(name, dir_fd=folder, follow_symlinks=False) for folder in (fd, other_fd))
    return os.path.samestat(here, there)


def is_same_file(dirs: Dirs, found: OutboxFile) -> bool:
    """False if the file was replaced, has changed or is gone."""
    outbox = dirs.get("agents", found.agent, *found.place)
    try:
        status = os.stat(found.file_name, dir_fd=outbox, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return is_same(found, status)


def _free_name(file_name: str, directory: int) -> str:
    name, number = file_name, 1
    while fsio.exists(name, directory):
        begin = os.fsdecode(os.fsencode(file_name)[:MOST_NAME_BYTES])
        name = f"{begin}.{number}"
        number += 1
    return name


def staged_files(dirs: Dirs, agent: str) -> list[str]:
    """Names of the files in an agent's ``inbox/.pending``."""
    return os.listdir(dirs.get("agents", agent, "inbox", PENDING))


def inbox_files(dirs: Dirs, agent: str) -> set[str]:
    """Message ids of the files in an agent's inbox."""
    return {
        name.removesuffix(MSG_SUFFIX)
        for name in os.listdir(dirs.get("agents", agent, "inbox"))
        if name.endswith(MSG_SUFFIX)
    }


def render_retry(dirs: Dirs, store: Engine, row: MessageRow, attempt: int) -> bytes:
    """The delivered file of a message, for its ``attempt``.

    Errors: MessageError when neither a file nor the store has it.
    """
    stored = store.messages.find_by_relay_id(row.message_id)
    message = load_original(dirs, row)
    if message is None and stored is None:
        message = _packed(dirs, row)  # last: it is found by reading a whole day
    if message is None and stored is None:  # one of the relay's own, long ago
        with contextlib.suppress(OSError, FormatError):
            stored = store.messages.find_by_relay_id(row.message_id, include_archived=True)
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
        None if stored is None else store.channels.label(stored.channel_id),
        attempt,
    )


def load_original(dirs: Dirs, row: MessageRow) -> MessageFile | None:
    """The original, if it is readable and unchanged since it was accepted."""
    with contextlib.suppress(OSError, UnsafePath):
        return read_original(dirs, row)
    return None


def read_original(dirs: Dirs, row: MessageRow) -> MessageFile | None:
    """The original; None if it is damaged or has other content.

    Errors: FileNotFoundError when it is missing; OSError, UnsafePath when it cannot be read.
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
    """The original, from the pack of its day in the archive."""
    with contextlib.suppress(OSError, UnsafePath, MessageError, FormatError):
        data = archive_pack.read(dirs, row.file_path)
        return None if data is None else _accepted(data, row)
    return None


def _accepted(data: bytes, row: MessageRow) -> MessageFile | None:
    name = row.file_path.rpartition("/")[2]
    message = parse(data, file=name)
    clean = redact(data) if message.kind is Kind.SPAWN else None
    if clean is not None:  # it is still in the outbox, with its secrets
        message = parse(clean.data, file=name)
    return message if sha256_hex(message.content) == row.checksum else None


def reconstruct(message: Message) -> MessageFile:
    """A message as a file, reconstructed from the store."""
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
    kind = Kind(str(metadata.get("kind", KIND_OF[message.message_type])))
    attachments = tuple(str(metadata.get("attachments", "")).split())
    return MessageFile(str(metadata["to"]), kind, headers, message.content, attachments)
