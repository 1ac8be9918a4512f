"""The archive of originals: single files for the last days, earlier days packed."""

from __future__ import annotations

import contextlib
import os
import tarfile

from relay.base import archive_pack, fsio
from relay.base.clock import NS_PER_S, iso_date
from relay.base.home import Home


class Originals:
    """Archive by day and agent. ``loose_from``: the first day that is not packed."""

    def __init__(self, home: Home, loose_from: str) -> None:
        self._home = home
        self._loose_from = loose_from
        self._packing = contextlib.ExitStack()
        self._day = ""
        self._tar: tarfile.TarFile | None = None
        self._made: set[str] = set()

    def put(self, path: str, data: bytes, at_ns: int) -> None:
        """Write an original below ``archive/``; its name begins with its day."""
        day = path.split("/")[1]
        if day >= self._loose_from:
            self._write(path, data, at_ns)
            return
        if day != self._day:
            self._begin(day)
        assert self._tar is not None
        archive_pack.add(self._tar, path, data, at_ns // NS_PER_S)

    def _write(self, path: str, data: bytes, at_ns: int) -> None:
        folder, name = os.path.split(self._home.path(path))
        if folder not in self._made:
            parts = path.split("/")[:-1]  # a refused one is a folder deeper
            for depth in range(2, len(parts) + 1):
                fsio.ensure_dir(self._home.path(*parts[:depth]))
            self._made.add(folder)
        with open(os.path.join(folder, name), "xb", opener=_private) as file:
            file.write(data)
        os.utime(os.path.join(folder, name), ns=(at_ns, at_ns))

    def _begin(self, day: str) -> None:
        self._packing.close()
        path = self._home.path("archive", day + archive_pack.SUFFIX)
        raw = self._packing.enter_context(open(path, "xb", opener=_private))
        packed = self._packing.enter_context(archive_pack.create(raw))
        self._tar = self._packing.enter_context(
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT)
        )
        self._day = day

    def close(self) -> None:
        """Finish the last pack."""
        self._packing.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, fsio.FILE_MODE)


def loose_from(end_ns: int) -> str:
    """First day that a relay would not pack yet."""
    return archive_pack.before_yesterday(end_ns)


def path_of(agent: str, message_id: str, at_ns: int) -> str:
    """Path of an original, as if its day were not packed."""
    return f"archive/{iso_date(at_ns)}/{agent}/{message_id}.msg"
