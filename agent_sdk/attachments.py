"""The attachment store: content addressed by its SHA-256, written once.

attachments/{2 hex}/.{…}.tmp → rename → attachments/{2 hex}/{sha256}
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterator, Sequence

from agent_sdk.disk import cleanup_on_error, retry_on_enospc
from agent_sdk.presence import max_attachment_mib
from relay.base import fsio
from relay.base.errors import IntegrityError, MessageError, NotFound, RelayError
from relay.base.home import Dirs, Home
from relay.base.names import CHECKSUM, SHA256_PREFIX, Attachment, file_name_of, sha256_hex

FOLDER = "attachments"
PIECE_BYTES = 1 << 20

Stream = io.BytesIO | io.BufferedReader


class Attachments:
    """Adds and reads attachments. Safe with any number of processes."""

    def __init__(self, home: Home, disk_full_retry_s: float) -> None:
        self._home = home
        self._disk_full_retry_s = disk_full_retry_s

    def add(self, source: bytes | str | os.PathLike[str]) -> Attachment:
        """Store bytes or a file's content and return its ``sha256:…`` and name; durable on return.

        Existing content is not written again. Of a file that grows, what was there is stored.
        Errors: RelayError for what is not a regular file, is too large, or changes; OSError.
        """
        name = "" if isinstance(source, bytes) else os.fspath(source)
        most = max_attachment_mib(self._home) << 20
        with _naming(name), _opened(source, most) as stream:
            digest, size = _measure(stream, name, most)
            with _naming(self._home.path(FOLDER)), self._home.dirs() as dirs:
                retry_on_enospc(
                    lambda: self._keep(stream, digest, size, dirs), self._disk_full_retry_s
                )
                # Existing content, too: its writer may not have synced yet.
                fsio.sync_file(dirs.get(FOLDER, digest[:2]))
                fsio.sync_file(dirs.get(FOLDER))
        return Attachment(SHA256_PREFIX + digest, file_name_of(name))

    def read(self, reference: str) -> bytes:
        """Read and verify the content of ``sha256:…``.

        Errors: MessageError for an invalid reference; NotFound; IntegrityError for damage.
        """
        with self._stored(reference) as stream:
            data = stream.read()
        self._compare(reference, sha256_hex(data))
        return data

    def pieces(self, reference: str) -> Iterator[bytes]:
        """Verify the content, then yield it in pieces, verified again at its end. A large one
        needs no memory of its size. Errors: as ``read``; OSError."""
        with self._stored(reference) as stream, _naming(self._path(reference)):
            self._compare(reference, hashlib.file_digest(stream, "sha256").hexdigest())
            stream.seek(0)
            total = hashlib.sha256()
            while piece := stream.read(PIECE_BYTES):
                total.update(piece)
                yield piece
            self._compare(reference, total.hexdigest())

    def save(self, attachments: Sequence[Attachment], folder: str | os.PathLike[str]) -> list[str]:
        """Write verified attachments into a directory, under their names; returns the paths.

        All or none. Errors: RelayError for a file that exists already, or no directory; as
        ``read``; OSError.
        """
        if not os.path.isdir(folder):
            raise RelayError(f"{os.fspath(folder)!r} is not a directory: create it first")
        paths = [
            os.path.join(folder, attachment.name or attachment.removeprefix(SHA256_PREFIX)[:8])
            for attachment in attachments
        ]
        # Under another name until all are complete: a kill leaves no part of one that looks whole.
        temps = [os.path.join(folder, f".{os.urandom(8).hex()}.tmp") for _ in paths]
        named: list[str] = []
        try:
            for path, temp, attachment in zip(paths, temps, attachments, strict=True):
                _check_is_free(path)
                with _naming(path), open(temp, "xb") as file:
                    file.writelines(self.pieces(attachment))
            for path, temp in zip(paths, temps, strict=True):
                _name(temp, path)
                named.append(path)
        except BaseException as exc:
            for path in named:
                os.unlink(path)
            if isinstance(exc, FileExistsError):
                raise RelayError(f"{exc.filename} exists already: nothing was written") from exc
            raise
        finally:
            for temp in temps:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temp)
        return paths

    def check(self, reference: str) -> str:
        """Return the reference if the attachment exists. Errors: as ``read``."""
        digest = _digest_of(reference)
        with self._home.dirs() as dirs:
            try:
                if fsio.exists(digest, dirs.get(FOLDER, digest[:2])):
                    return reference
            except FileNotFoundError:
                pass
        raise NotFound(f"there is no attachment {reference}", hint="call attach() first")

    def _stored(self, reference: str) -> io.FileIO:
        """Open an attachment for reading. Errors: MessageError; NotFound; UnsafePath."""
        digest = _digest_of(reference)
        with self._home.dirs() as dirs:
            try:
                folder = dirs.get(FOLDER, digest[:2])
                fd, _ = fsio.open_regular(digest, folder, shared=True)
            except FileNotFoundError as exc:
                raise NotFound(f"there is no attachment {reference}") from exc
        return io.FileIO(fd)

    def _path(self, reference: str) -> str:
        return self._home.path(Attachment(reference).path)

    def _compare(self, reference: str, found: str) -> None:
        digest = _digest_of(reference)
        if found != digest:
            error = IntegrityError(self._path(reference), 0, f"SHA-256 {digest}", found)
            error.hint = "restore it from a backup, or ask the sender for a new copy"
            raise error

    def _keep(self, stream: Stream, digest: str, size: int, dirs: Dirs) -> None:
        folder = dirs.ensure(FOLDER, digest[:2])
        try:
            # Renamed after its fsync, so a file of the right size is complete.
            if os.stat(digest, dir_fd=folder, follow_symlinks=False).st_size == size:
                # Refresh its time, so that retention does not remove it as unused.
                os.utime(digest, dir_fd=folder, follow_symlinks=False)
                return
        except FileNotFoundError:
            pass
        disk = os.fstatvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:
            # Before the disk is filled, at each try anew: the relay writes to it, too.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temp = f".{digest[:16]}.{os.urandom(4).hex()}.tmp"
        with cleanup_on_error(temp, folder):
            if _copy(stream, size, temp, folder) != digest:
                raise RelayError("the file changed while it was being attached")
            fsio.rename(temp, folder, digest, folder)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to errors of the system that name no file, as those of a full disk."""
    try:
        yield
    except OSError as exc:
        if path and exc.filename is None:
            exc.filename = path
        raise


def _check_is_free(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _name(temp: str, path: str) -> None:
    """Give a complete file its name, which no other has. Errors: FileExistsError."""
    try:
        os.link(temp, path)
    except FileExistsError as exc:
        exc.filename = path
        raise
    except OSError:  # no hard links here, as on a memory stick
        _check_is_free(path)
        os.rename(temp, path)


def _opened(source: bytes | str | os.PathLike[str], most: int) -> Stream:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    stream = open(source, "rb", opener=_open_at_once)
    status = os.fstat(stream.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return stream
    stream.close()
    if stat.S_ISREG(status.st_mode):
        raise _too_large(os.fspath(source), status.st_size, most)
    raise RelayError(f"{os.fspath(source)!r} is not a regular file")


def _too_large(name: str, size: int, most: int) -> RelayError:
    return RelayError(
        f"{name!r} is {-(-size >> 20)} MiB, at most {most >> 20} (limits.max_attachment_mib): "
        "send its path, or send it in parts"
    )


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _pieces(stream: Stream, most: int) -> Iterator[bytes]:
    """Read up to ``most`` bytes from the start. A file of /proc has no end to seek, and a log or
    one of /sys another than its size."""
    stream.seek(0)
    while piece := stream.read(min(PIECE_BYTES, most)):
        yield piece
        most -= len(piece)


def _measure(stream: Stream, name: str, most: int) -> tuple[str, int]:
    """The SHA-256 and the size of what is there. Errors: RelayError for more than ``most``."""
    total, size = hashlib.sha256(), 0
    for piece in _pieces(stream, most + 1):
        total.update(piece)
        size += len(piece)
    if size > most:
        raise _too_large(name, size, most)
    return total.hexdigest(), size


def _copy(stream: Stream, size: int, name: str, dir_fd: int) -> str:
    """Write and sync a new file in pieces. Returns the SHA-256 of what was written."""
    fsio.fault("create", name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    total = hashlib.sha256()
    with open(os.open(name, flags, fsio.FILE_MODE, dir_fd=dir_fd), "wb") as out:
        for piece in _pieces(stream, size):
            fsio.fault("write", name)
            total.update(piece)
            out.write(piece)
        out.flush()
        fsio.sync_file(out.fileno())
    return total.hexdigest()


def _digest_of(reference: str) -> str:
    if not CHECKSUM.fullmatch(reference):
        raise MessageError(
            f"invalid reference {reference!r}: expected sha256: and 64 hex digits; pass a file to "
            "attach() first",
            header="ATTACHMENT",
        )
    return reference.removeprefix(SHA256_PREFIX)
