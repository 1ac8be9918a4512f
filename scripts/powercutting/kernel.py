"""Calls of the kernel that Python has no function for: mounts, namespaces, loop devices.

A loop device is made by hand for a reason: losetup and ``mount -o loop`` take over a device that
is still there for an image of the same name, and then show losses that are none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

MS_BIND = 0x1000
MNT_DETACH = 2
CLONE_NEWNS = 0x20000
PUNCH_HOLE_KEEP_SIZE = 0x3
LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
AUTOCLEAR = 4  # the device goes with its last user: nothing of a drill that is killed is left
CONFIG_BYTES, FLAGS_AT = 304, 60  # of struct loop_config, and of lo_flags in it
BTRFS_FORGET = 0x50009405
BUSY_TRIES, BUSY_PAUSE_S = 200, 0.02


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2). Errors: OSError."""
    arguments = (source.encode(), bytes(target), kind.encode() or None, flags, options.encode())
    _check(_libc.mount(*arguments), f"mount {source} on {target}")


def unmount(target: Path) -> None:
    """Unmount, once nobody is in it any more; after four seconds it is detached."""
    for _ in range(BUSY_TRIES):
        if _libc.umount2(bytes(target), 0) == 0:
            return
        if ctypes.get_errno() != errno.EBUSY:
            break
        time.sleep(BUSY_PAUSE_S)
    _check(_libc.umount2(bytes(target), MNT_DETACH), f"unmount {target}")


def own_mounts() -> None:
    """From now on this process and its children have mounts of their own."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")


def punch(fd: int, offset: int, length: int) -> None:
    """Make a part of a file a hole, which reads as zeros."""
    where = (ctypes.c_long(offset), ctypes.c_long(length))
    _check(_libc.fallocate(fd, PUNCH_HOLE_KEEP_SIZE, *where), "fallocate")


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """A loop device of this image; it stays as long as it is mounted. Errors: OSError."""
    with image.open("r+b") as file, open("/dev/loop-control", "rb") as control:
        for _ in range(BUSY_TRIES):
            name = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            config = bytearray(CONFIG_BYTES)
            struct.pack_into("=I", config, 0, file.fileno())
            struct.pack_into("=I", config, FLAGS_AT, AUTOCLEAR)
            device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, LOOP_CONFIGURE, bytes(config))
            except OSError as exc:
                os.close(device)
                if exc.errno != errno.EBUSY:
                    raise
                time.sleep(BUSY_PAUSE_S)  # somebody else has just taken it
                continue
            break
        else:
            raise OSError(errno.EBUSY, "no loop device is free")
    try:
        yield name
    finally:
        os.close(device)


@contextmanager
def mounted(image: Path, target: Path, kind: str, options: str) -> Iterator[None]:
    """The file system in an image, mounted. Errors: OSError."""
    with loop_device(image) as device:
        mount(device, target, kind, 0, options)
    try:
        yield
    finally:
        unmount(target)
        if kind == "btrfs":
            _forget(device)


def _forget(device: str) -> None:
    """Let btrfs forget this device: it refuses an older copy of a file system it has seen."""
    with suppress(OSError), open("/dev/btrfs-control", "rb") as control:
        name = struct.pack("=q4088s", 0, device.encode())
        fcntl.ioctl(control, BTRFS_FORGET, bytearray(name))
