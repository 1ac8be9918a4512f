"""A disk that writes down all that it is told: one file, served through /dev/fuse.

    with recorded(folder / "image", folder / "log", folder / "disk"):
        ...                 # a loop device on folder/disk, and a file system on that

Whatever the kernel's file system writes goes into the image and into the log, and each flush
(the fsync that the loop device makes of it) into the log, with its time, before it is answered.

It speaks the kernel's protocol itself. A library would be more: those on PyPI need libfuse and a
compiler, or the packages of a distribution. The root of this file system is the one file, so there
are no names to look up and nine requests to answer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.powercutting.kernel import mount, unmount

WRITE, FLUSH = b"W", b"F"
RECORD = struct.Struct("<cQQI")  # what, monotonic ns, offset, length; the data follow

REQUEST = struct.Struct("<IIQQIIIHH")  # length, request, number, node, uid, gid, pid, 2 unused
ANSWER = struct.Struct("<IiQ")  # length, error, number
TRANSFER = struct.Struct("<QQIIQII")  # of READ and WRITE: handle, offset, size, ...
GETATTR, SETATTR, OPEN, READ, DO_WRITE = 3, 4, 14, 15, 16
RELEASE, FSYNC, CLOSE, INIT = 18, 20, 25, 26
UNANSWERED = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
MAX_WRITE = 1 << 20
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22
KEEP_CACHE = 2
FOREVER_S = 1 << 30
PR_SET_PDEATHSIG = 1


class _Server:
    """Answers the kernel until the file is unmounted."""

    def __init__(self, fuse: int, image: int, log: int) -> None:
        self._fuse, self._image, self._log = fuse, image, log
        self._does: dict[int, Callable[[memoryview], bytes]] = {
            INIT: self._init,
            GETATTR: self._attributes,
            SETATTR: self._attributes,
            OPEN: lambda _: struct.pack("<QII", 1, KEEP_CACHE, 0),
            READ: self._read,
            DO_WRITE: self._write,
            FSYNC: self._flush,
            CLOSE: lambda _: b"",  # a close: it makes nothing durable
            RELEASE: lambda _: b"",
        }

    def serve(self) -> None:
        buffer = bytearray(MAX_WRITE + 4096)
        while True:
            try:
                length = os.readv(self._fuse, [buffer])
            except OSError as exc:
                if exc.errno in (errno.EINTR, errno.ENOENT):
                    continue  # the request was taken back
                return  # ENODEV: unmounted
            _, request, number, *_ = REQUEST.unpack_from(buffer)
            if request in UNANSWERED:
                continue
            answer, error = b"", 0
            does = self._does.get(request)
            if does is None:
                error = errno.ENOSYS  # the kernel does not ask for it again
            else:
                try:
                    answer = does(memoryview(buffer)[REQUEST.size : length])
                except OSError as exc:
                    error = exc.errno or errno.EIO
            head = ANSWER.pack(ANSWER.size + len(answer), -error, number)
            try:
                os.writev(self._fuse, [head, answer])
            except OSError as exc:
                if exc.errno != errno.ENOENT:
                    return

    def _init(self, body: memoryview) -> bytes:
        major, _, readahead, _ = struct.unpack_from("<IIII", body)
        flags = BIG_WRITES | MAX_PAGES
        answer = struct.pack("<IIIIHHIIHHII", major, 31, readahead, flags, 64, 48, MAX_WRITE, 1,
                             MAX_WRITE // 4096, 0, 0, 0)  # fmt: skip
        return answer.ljust(64, b"\0")

    def _attributes(self, _: memoryview) -> bytes:
        size = os.fstat(self._image).st_size
        mode = stat.S_IFREG | 0o600
        file = struct.pack("<6Q10I", 1, size, size >> 9, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096,
                           0)  # fmt: skip
        return struct.pack("<QII", FOREVER_S, 0, 0) + file

    def _read(self, body: memoryview) -> bytes:
        _, offset, size, *_ = TRANSFER.unpack_from(body)
        return os.pread(self._image, size, offset)

    def _write(self, body: memoryview) -> bytes:
        now = time.monotonic_ns()
        _, offset, size, *_ = TRANSFER.unpack_from(body)
        data = body[TRANSFER.size : TRANSFER.size + size]
        os.pwrite(self._image, data, offset)
        os.writev(self._log, [RECORD.pack(WRITE, now, offset, size), data])
        return struct.pack("<II", size, 0)

    def _flush(self, _: memoryview) -> bytes:
        os.write(self._log, RECORD.pack(FLUSH, time.monotonic_ns(), 0, 0))
        return b""


@contextmanager
def recorded(image: Path, log: Path, disk: Path) -> Iterator[None]:
    """Serve ``image`` as the file ``disk``, and write to ``log`` what happens to it."""
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    disk.touch()
    mount("powercut", disk, "fuse", 0, f"fd={fuse},rootmode=100000,user_id=0,group_id=0")
    server = os.fork()
    if server == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the mount
            with image.open("r+b", buffering=0) as file, log.open("ab", buffering=0) as notes:
                _Server(fuse, file.fileno(), notes.fileno()).serve()
        finally:
            os._exit(0)
    os.close(fuse)
    try:
        yield
    finally:
        unmount(disk)
        os.waitpid(server, 0)
