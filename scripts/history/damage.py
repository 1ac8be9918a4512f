"""Faults of files, planted in a finished history, as by a person or a bad disk."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from relay.base.errors import RelayError
from scripts.history.faults import Planted, planted


def spoil(root: Path, found: Iterable[Planted], names: set[str]) -> list[Planted]:
    """Plant the file faults; returns those that concern no message.

    Errors: RelayError where the history is too small to have such a file.
    """
    for one in found:
        if one.fault == "attachment_gone":
            (root / str(one.path)).unlink()
        elif one.fault == "attachment_altered":
            _flip(root / str(one.path))
    more = []
    if "archive_byte" in names:
        more.append(_flip_first(root, "archive_byte", "store/archive/*/*.acomm"))
    if "segment_byte" in names:
        more.append(_flip_first(root, "segment_byte", "journal/*/warm/*.seg.zst"))
    return more


def _flip_first(root: Path, name: str, pattern: str) -> Planted:
    paths = sorted(root.glob(pattern))
    if not paths:
        raise RelayError(f"fault {name}: there is no {pattern}: more messages or days make one")
    _flip(paths[0])
    return planted(name, path=os.fspath(paths[0].relative_to(root)))


def _flip(path: Path) -> None:
    """Invert the byte in the middle; size and times stay the same."""
    data, facts = bytearray(path.read_bytes()), path.stat()
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
