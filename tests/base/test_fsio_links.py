"""Reading: regular files alone, no link followed at any component, sizes told truly."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import UnsafePath

pytestmark = pytest.mark.shows("ready 4.4")


def make_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"secret")
    path.symlink_to("target")


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes no path this long


ODD: dict[str, Callable[[Path], None]] = {
    "a link": make_link,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a directory": Path.mkdir,
}


def test_a_device_is_refused() -> None:
    dev = fsio.open_dir("/dev")
    try:
        with pytest.raises(UnsafePath, match="zero is not a regular file"):
            fsio.read_regular("zero", dev, 100)
    finally:
        os.close(dev)


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_refused_at_once(kind: str, folder: int, tmp_path: Path) -> None:
    ODD[kind](tmp_path / "odd.msg")
    with pytest.raises(UnsafePath, match=r"odd\.msg is not a regular file") as caught:
        fsio.read_regular("odd.msg", folder, 100)
    assert "\n" not in str(caught.value)
    with pytest.raises((UnsafePath, FileNotFoundError)):
        fsio.open_dir("odd.msg/x", folder)


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a directory"])
def test_what_is_no_regular_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """A device, too: as root, /dev/null was replaced by a page."""
    ODD[kind](tmp_path / "odd")
    before = os.lstat(tmp_path / "odd").st_mode
    with pytest.raises(UnsafePath, match=f"{tmp_path}/odd is not a regular file"):
        fsio.write_atomic(str(tmp_path / "odd"), b"x")
    assert os.lstat(tmp_path / "odd").st_mode == before
    assert os.listdir(tmp_path) == ["odd"]


def test_what_is_not_there(folder: int) -> None:
    with pytest.raises(FileNotFoundError):
        fsio.read_regular("f", folder, 100)
    with pytest.raises(FileNotFoundError):
        fsio.open_dir("d", folder)


@pytest.mark.parametrize("kind", ["a link", "a FIFO", "a socket"])
def test_what_is_no_directory_is_not_opened_as_one(kind: str, folder: int, tmp_path: Path) -> None:
    ODD[kind](tmp_path / "odd")
    with pytest.raises(UnsafePath, match="odd is a link or not a directory"):
        fsio.open_dir("odd", folder)


def test_a_link_to_a_directory_is_not_opened(folder: int, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafePath):
        fsio.open_dir("link", folder)
    with pytest.raises(UnsafePath):
        fsio.open_dir(str(tmp_path / "link"))
    with pytest.raises(UnsafePath, match="link exists and is not a directory"):
        fsio.ensure_dir("link", folder)
    with pytest.raises(NotADirectoryError):
        fsio.sync_dir(str(tmp_path / "link"))


# -- sizes ---------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_limit_and_its_size_is_told(folder: int, tmp_path: Path) -> None:
    for size in (0, 1, 99, 100, 500):
        (tmp_path / "f").write_bytes(b"x" * size)
        data, status = fsio.read_regular("f", folder, 100)
        assert data == b"x" * min(size, 100)
        assert status.st_size == size
        assert status.st_ino == (tmp_path / "f").stat().st_ino


def test_a_file_that_grows_shows(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 50)
    read = os.read

    def read_and_grow(fd: int, size: int) -> bytes:
        data = read(fd, size)
        with open(path, "ab") as writer:
            writer.write(b"more")
        return data

    monkeypatch.setattr(os, "read", read_and_grow)
    data, status = fsio.read_regular("f", folder, 100)
    assert len(data) < status.st_size


def test_a_file_that_shrinks_shows(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 50)
    fstat = os.fstat

    def stat_and_cut(fd: int) -> os.stat_result:
        status = fstat(fd)
        if path.stat().st_size == 50:
            os.truncate(path, 20)
        return status

    monkeypatch.setattr(os, "fstat", stat_and_cut)
    data, status = fsio.read_regular("f", folder, 100)
    assert (len(data), status.st_size) == (20, 20)


def test_short_reads_are_one(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 7)))
    assert fsio.read_regular("f", folder, 1000)[0] == bytes(range(100))
    assert fsio.read_regular("f", folder, 10)[0] == bytes(range(10))
