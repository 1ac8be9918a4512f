"""One settings file of an agent CLI: what is in it, and its change.

It is replaced by rename, and only if it still is what the change was made from; where it is a
symbolic link, the file that it names is. The file as it was before the first installation is kept
beside it, with the ending ``.before-relay``, until a removal puts it back. An empty one of these
says that there was no file, in a directory that was empty, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
from collections.abc import Iterator
from typing import NamedTuple

from relay.base.errors import SettingsError

BACKUP = ".before-relay"
MAX_BYTES = 16 << 20


class Change(NamedTuple):
    """The change of one file by an installation or removal."""

    path: str
    before: str | None  # its text; None: there is none
    after: str | None  # None: it is removed
    keeps: bool | None = None  # a copy of the text before; False: the copy goes; None: as it is
    made: str = ""  # the directory that goes with the file, if it is empty

    @property
    def is_change(self) -> bool:
        """False if the file stays as it is."""
        return self.before != self.after


def check_writable(path: str) -> None:
    """Refuse a file of another user, or one that is read-only. Errors: SettingsError, OSError."""
    status = os.stat(path)
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to user {status.st_uid}; it was left as it is"
        raise SettingsError(text, hint="run this as that user")
    if not status.st_mode & 0o200:
        hint = f"`chmod u+w {shlex.quote(path)}`, and try again"
        raise SettingsError(f"{path} is read-only; it was left as it is", hint=hint)


def write(change: Change) -> None:
    """Carry a change out. Errors: OSError; SettingsError if the file was changed meanwhile."""
    path = os.path.realpath(change.path)
    folder = os.path.dirname(path)
    is_empty = os.path.isdir(folder) and not os.listdir(folder)
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        if text_of(path) != change.before:
            raise SettingsError(
                f"{path} was changed by another program; it was left as it is", hint="try again"
            )
        mode = 0o600 if change.before is None else stat.S_IMODE(os.stat(path).st_mode)
        if (change.keeps and change.before is not None) or (change.before is None and is_empty):
            _replace(path + BACKUP, change.before or "", mode)
        if change.after is not None:
            _replace(path, change.after, mode)
        else:
            os.unlink(path)
        if change.keeps is False:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + BACKUP)
    if change.after is None and change.made:
        with contextlib.suppress(OSError):  # others have files there
            os.rmdir(change.made)


def made_for(path: str, folder: str) -> str:
    """The directory of a file if an installation made it; empty for ``folder`` and those in which a
    copy shows that they were there before.
    """
    parent = os.path.dirname(path)
    if parent == folder or not os.path.isdir(parent):
        return ""
    return "" if any(name.endswith(BACKUP) for name in os.listdir(parent)) else parent


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keep other installations out of the directory."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: str, text: str, mode: int) -> None:
    temp = f"{path}.relay-tmp"  # the next one writes over what a kill has left
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise


def text_of(path: str) -> str | None:
    """The text of a file; None if there is none. Errors: SettingsError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SettingsError(
                f"{path} is not a regular file; it was left as it is",
                hint="move it away, and try again",
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_BYTES} bytes; it was left as it is")
        return data.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise SettingsError(f"{path} cannot be read: {reason}; it was left as it is") from exc
