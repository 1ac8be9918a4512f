"""Private folders below TMPDIR, for copies of a home and for Spark's own files.

Mode 700, and removed when they are no longer needed. A killed process leaves them: the next audit
removes those whose lock is free.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from relay.base import fsio

PREFIX = "relay-audit-"
_LOCK = "lock"


def private_folder(purpose: str) -> str:
    """Make a folder that is removed when the process ends."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(temporary_folder(purpose))
    atexit.register(stack.close)
    return folder


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[str]:
    """Make a folder that is removed after the block."""
    _remove_orphans(tempfile.gettempdir())
    made = tempfile.mkdtemp(prefix=f".{PREFIX}")
    parent, name = os.path.split(made)
    folder = os.path.join(parent, f"{PREFIX}{purpose}-{name.removeprefix(f'.{PREFIX}')}")
    try:
        with fsio.locked(os.path.join(made, _LOCK)):
            os.rename(made, folder)  # only now: by this name others look for orphans
            yield folder
    finally:
        for path in (made, folder):  # the first, where a full disk has no room for the lock
            shutil.rmtree(path, ignore_errors=True)


def _remove_orphans(parent: str) -> None:
    """Remove folders of killed audits: the copy of a ledger may have gigabytes."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            is_one = entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)
            if is_one and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_unless_held(entry.path)


def _remove_unless_held(folder: str) -> None:
    with contextlib.suppress(OSError), fsio.locked(os.path.join(folder, _LOCK)):
        shutil.rmtree(folder, ignore_errors=True)
