"""A store's file and the one before it: ``NAME.acomm`` and ``NAME.acomm.prev``.

    write   NAME.acomm.tmp, synced  ->  NAME.acomm becomes .prev  ->  .tmp becomes NAME.acomm
    open    NAME.acomm; damaged or gone: .prev, and the damaged one is set aside as NAME.bad

At any instant one of the two names has a whole file. Nothing is set aside unless the other is
whole, and what is set aside is never written over. Source: acomm-file-format.txt, "Design Goals":
readers fall back to the last known-good state; FORMATS section 2, "Reading".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from relay.acomm import codec, container
from relay.acomm.encryption import seal
from relay.acomm.engine_state import Snapshot
from relay.acomm.model import StoreFile
from relay.base import fsio
from relay.base.errors import FormatError, LimitError, VersionError

WITHOUT = "without what came after"  # said where no journal has it
PREVIOUS = ".prev"
SUFFIX = ".acomm"
T = TypeVar("T")


def write(path: str, snapshot: Snapshot, compress: bool = True, key: bytes | None = None) -> int:
    """Replace the store's file, and keep the one that was there; the size of the new one.

    With a ``key`` every content is sealed.

    Errors: StoreCapacity, ValidationFailed before anything is touched; OSError.
    """
    data = codec.encode(seal(snapshot.file(), key), compress)
    fsio.write_atomic(path, data, keep=path + PREVIOUS)
    return len(data)


def load(
    path: str,
    make: Callable[[StoreFile, str], T],
    warn: Callable[[str], object],
    *,
    keep: bool = False,
    after: str = WITHOUT,
) -> T | None:
    """What ``make`` makes of the file, or of the one before it; None when neither is there.
    It is given the name as well.

    ``warn`` hears it when the file was damaged or gone, and what was lost with it. ``keep``:
    who only looks leaves a damaged file where it is. ``after``: what became of what came after.
    Errors: FormatError of the file when both are damaged, or it is of another version or format,
    or whole and beyond a limit: then nothing is touched; OSError, UnsafePath.
    """
    previous = path + PREVIOUS
    try:
        return make(codec.read(path), path)
    except FileNotFoundError:
        if not fsio.exists(previous):
            return None
        made = make(codec.read(previous), previous)
        warn(f"{path} is gone: the store is that of {previous}, {after}")
        return made
    except FormatError as exc:
        if isinstance(exc, VersionError | LimitError) or not fsio.exists(previous):
            raise
        made = _make_of_previous(path, previous, make, exc)
        said = f"{exc}; the store is that of {previous}, {after}"
        warn(said if keep else f"{said}, and the damaged file is now {set_aside(path)}")
        return made


def _make_of_previous(
    path: str, previous: str, make: Callable[[StoreFile, str], T], fault: FormatError
) -> T:
    """The store of the file before. Errors: the fault of the file itself when that is no use."""
    with open(path, "rb") as file:
        container.refuse_other_format(file.read(container.HEADER.size), path)
    try:
        return make(codec.read(previous), previous)
    except FormatError as exc:
        fault.hint = f"{previous} is damaged as well ({exc}); both were left as they are"
        raise fault from None


def set_aside(path: str) -> str:
    """Rename a damaged file to a name that nothing has; that name, or none where it is gone."""
    if not os.path.lexists(path):
        return ""
    stem = path.removesuffix(SUFFIX) + ".bad"
    aside, number = stem, 0
    while os.path.lexists(aside):
        number += 1
        aside = f"{stem}.{number}"
    os.rename(path, aside)
    fsio.sync_dir(os.path.dirname(path) or ".")
    return aside
