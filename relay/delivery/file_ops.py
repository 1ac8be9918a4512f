"""Delivery: files into inboxes, originals into the archive. Every effect is harmless again.

    inbox/.pending/{id}.msg   staged, complete; the ledger says so before the next step
    inbox/{id}.msg            delivered: after the rename the recipient has it
    archive/{date}/{agent}/{id}.msg and …/rejected/

The name in the inbox is the message id, so a second delivery cannot add a second file.
Source: DESIGN, "How a message flows", steps 7, 9 and 11.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from relay.base import fsio
from relay.base.checksums import SHA256_PREFIX, sha256_hex
from relay.base.clock import iso_date, iso_time
from relay.base.errors import RelayError, UnsafePath
from relay.base.home import PENDING, Dirs
from relay.base.home import REJECTED as REJECTED
from relay.base.message import MessageFile, render
from relay.base.names import MSG_SUFFIX
from relay.base.outbox_file import OUTBOX, OutboxFile, is_same

DUPLICATES = "duplicates"
MOST_NAME_BYTES = 240  # a number goes behind, and 255 is the most there can be


class DiskFull(RelayError):
    """The disk takes nothing now; the message waits in its outbox."""

    hint = "free some space; the relay goes on by itself"


def render_delivered(
    message: MessageFile,
    message_id: str,
    sender: str,
    sent_ns: int,
    checksum: str,
    channel: str | None,
    attempt: int = 1,
) -> bytes:
    """The file as the recipient finds it: the original's headers and the relay's own."""
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


def stage(dirs: Dirs, message_id: str, data: bytes, recipients: Iterable[str]) -> dict[str, str]:
    """Put the complete file into each recipient's ``inbox/.pending``.

    Returns why it could not be done, by recipient; the others have it. Errors: DiskFull when
    the disk takes nothing: then nothing of this message is left staged.
    """
    name = message_id + MSG_SUFFIX
    done: list[str] = []
    failed: dict[str, str] = {}
    for recipient in recipients:
        try:
            _create(dirs, recipient, name, data)
            done.append(recipient)
        except UnsafePath as exc:
            failed[recipient] = str(exc)
        except OSError as exc:
            if exc.errno in fsio.DISK_ERRNOS:
                unstage(dirs, message_id, done)
                raise DiskFull(f"inbox of {recipient}: {exc.strerror}") from exc
            failed[recipient] = f"inbox cannot be written: {exc.strerror}"
    return failed


def _create(dirs: Dirs, recipient: str, name: str, data: bytes) -> None:
    dirs.get("agents", recipient)  # an agent that was removed is not made again
    pending = dirs.ensure("agents", recipient, "inbox", PENDING)
    try:
        fsio.create(name, data, pending)
    except FileExistsError:  # staged before a crash, never committed
        fsio.remove(name, pending)
        fsio.create(name, data, pending)


def unstage(dirs: Dirs, message_id: str, recipients: Iterable[str]) -> None:
    """Take staged files back; those that are gone are fine, and one out of reach stops no other."""
    for recipient in recipients:
        with contextlib.suppress(OSError, UnsafePath):
            fsio.remove(message_id + MSG_SUFFIX, dirs.get("agents", recipient, "inbox", PENDING))


def deliver(dirs: Dirs, message_id: str, recipient: str, *, again: bool = False) -> str:
    """Rename the staged file into the inbox; returns why it could not be done, or nothing.

    Committed at the rename. ``again``: after a crash, when a staged file that is gone was
    delivered before; otherwise one that is gone is a fault like any other. Errors: with ``again``
    OSError for want of descriptors or memory: of a file delivered before it would say "not yet".
    """
    name = message_id + MSG_SUFFIX
    try:
        inbox = dirs.get("agents", recipient, "inbox")
        pending = dirs.get("agents", recipient, "inbox", PENDING)
    except (OSError, UnsafePath) as exc:
        if again and isinstance(exc, OSError) and exc.errno in fsio.EXHAUSTED:
            raise
        return f"inbox cannot be opened: {_reason(exc)}"
    try:
        fsio.rename(name, pending, name, inbox)
    except FileNotFoundError as exc:
        return "" if again else f"inbox cannot be written: {_reason(exc)}"
    except OSError as exc:
        return f"inbox cannot be written: {_reason(exc)}"
    return ""


def _reason(exc: OSError | UnsafePath) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


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
    """Move an original out of ``place``; returns its new path, or None when it is gone.

    ``kind``: REJECTED or DUPLICATES for a folder of its own, where a name that is taken gets a
    number: nothing is written over. ``redacted``: what is kept in the place of a file that has
    secrets; it is durable before that is removed.
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
        fsio.move(file_name, outbox, name, target)
    except FileNotFoundError:
        return None
    return "/".join([*parts, name])


def _keep_redacted(file_name: str, data: bytes, target: int, *, is_numbered: bool) -> str:
    """Write it whole under its name, or find it as a crash left it; the name that it has."""
    with contextlib.suppress(OSError, UnsafePath):
        if fsio.read_regular(file_name, target, len(data) + 1)[0] == data:
            return file_name
    name = _free_name(file_name, target) if is_numbered else file_name
    temp = f".{sha256_hex(os.fsencode(file_name))[:16]}.tmp"  # any name may be as long as it can
    fsio.remove(temp, target)
    fsio.create(temp, data, target, sync=True)
    fsio.rename(temp, target, name, target)
    return name


def is_same_file(dirs: Dirs, found: OutboxFile) -> bool:
    """False when another file was put in the place of the one read, it changed, or it is gone."""
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
