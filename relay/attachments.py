"""The attachment store: ``attachments/{2 hex}/{sha256}``, addressed by content.

Senders put files there before they name them; the relay looks whether they are there.
Source: relay-file-system.txt 3.4, FORMATS 1, header ATTACHMENT.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay import fsio
from relay.checksums import SHA256_PREFIX
from relay.errors import UnsafePath
from relay.home import Dirs


def missing(dirs: Dirs, references: Iterable[str]) -> list[str]:
    """Of these ``sha256:…`` references, those that are not in the store."""
    return [reference for reference in references if not _is_there(dirs, reference)]


def _is_there(dirs: Dirs, reference: str) -> bool:
    digest = reference.removeprefix(SHA256_PREFIX)
    try:
        return fsio.exists(digest, dirs.get("attachments", digest[:2]))
    except (FileNotFoundError, UnsafePath):
        return False
