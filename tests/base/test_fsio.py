"""Writing: whole files or none, modes whatever the umask, and what a full disk leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import ForeignOwner, HardLink, UnsafePath
from tests.disk import failing, hooked
from tests.procs import no_room_above

pytestmark = pytest.mark.shows("engine 8.7")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- modes ---------------------------------------------------------------------------------


@pytest.mark.shows("ready 4.1")
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077], indirect=True)
def test_what_is_made_is_700_and_600_whatever_the_umask(
    umask: int, folder: int, tmp_path: Path
) -> None:
    fsio.ensure_dir("d", folder)
    fsio.create("f", b"x", folder)
    fsio.write_atomic(str(tmp_path / "w"), b"x")
    with fsio.locked(str(tmp_path / "l")):
        pass
    assert mode(tmp_path / "d") == 0o700
    assert [mode(tmp_path / name) for name in "fwl"] == [0o600, 0o600, 0o600]


def test_what_is_there_is_made_700_and_600(folder: int, tmp_path: Path) -> None:
    for number, given in enumerate((0o755, 0o777, 0o500, 0o750)):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"d{number}").chmod(given)
        fsio.ensure_dir(f"d{number}", folder)
        assert mode(tmp_path / f"d{number}") == 0o700
    (tmp_path / "f").write_bytes(b"hi")
    for given in (0o644, 0o666, 0o400, 0o755):
        (tmp_path / "f").chmod(given)
        before = (tmp_path / "f").stat()
        data, status = fsio.read_regular("f", folder, 100)
        assert (data, mode(tmp_path / "f")) == (b"hi", 0o600)
        assert status.st_mtime_ns == before.st_mtime_ns


def test_what_belongs_to_somebody_else_is_refused(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir(0o755)
    (tmp_path / "f").write_bytes(b"hi")
    (tmp_path / "f").chmod(0o644)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UnsafePath, match=f"d belongs to user {owner}, not to {owner + 1}"):
        fsio.ensure_dir("d", folder)
    with pytest.raises(ForeignOwner, match=rf"^f belongs to user {owner}, not to {owner + 1}$"):
        fsio.read_regular("f", folder, 100)
    assert fsio.read_regular("f", folder, 100, shared=True)[0] == b"hi"
    assert (mode(tmp_path / "d"), mode(tmp_path / "f")) == (0o755, 0o644)


def test_a_file_of_another_name_is_refused_and_keeps_its_mode(folder: int, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"hi")
    (tmp_path / "secret").chmod(0o644)
    (tmp_path / "f").hardlink_to(tmp_path / "secret")
    with pytest.raises(
        HardLink, match=r"^f has 2 hard links: it is a file elsewhere, too; use a copy$"
    ):
        fsio.read_regular("f", folder, 100)
    with pytest.raises(HardLink, match="has 2 hard links"):
        fsio.restrict("f", 0o600, folder)
    assert fsio.read_regular("f", folder, 100, shared=True)[0] == b"hi"
    assert mode(tmp_path / "secret") == 0o644


def test_a_file_is_not_replaced_through_a_linked_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").symlink_to("elsewhere")
    with pytest.raises(UnsafePath, match="store is a link or not a directory"):
        fsio.write_atomic(str(tmp_path / "store" / "f"), b"x")
    assert list((tmp_path / "elsewhere").iterdir()) == []


# -- write_atomic --------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    fsio.write_atomic(str(path), b"old")
    first = path.stat().st_ino
    with open(path, "rb") as reader:
        fsio.write_atomic(str(path), b"new" * 100_000)
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new" * 100_000
    assert path.stat().st_ino != first
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.shows("ready 1.1")
def test_the_bytes_are_durable_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        steps.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def move(source: str, target: str, **fds: int) -> None:
        steps.append("rename")
        rename(source, target, **fds)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", move)
    fsio.write_atomic(str(tmp_path / "f"), b"x")
    monkeypatch.chdir(tmp_path)
    fsio.write_atomic("g", b"x")
    here = tmp_path.name
    assert steps == ["sync f.tmp", "rename", f"sync {here}", "sync g.tmp", "rename", f"sync {here}"]


def test_where_there_is_a_full_sync_it_is_used(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"x")
    steps: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: steps.append(f"full {command}"))
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append("plain"))
    with open(tmp_path / "f") as file:
        fsio.sync_file(file.fileno())
        assert steps == ["full 51"]

        def refuse(fd: int, command: int) -> None:
            raise OSError(errno.ENOTSUP, "not on this file system")

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        fsio.sync_file(file.fileno())
        assert steps == ["full 51", "plain"]


@pytest.mark.shows("ready 1.1")
@pytest.mark.parametrize("operation", ["create", "write", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_the_old_file_survives_whatever_fails(operation: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "f"
    fsio.write_atomic(str(path), b"old")
    with failing(operation, code=code), pytest.raises(OSError, match=os.strerror(code)):
        fsio.write_atomic(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert ("f.tmp" in os.listdir(tmp_path)) == (operation == "rename")
    fsio.write_atomic(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_in_the_place_of_the_temp_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"safe")
    (tmp_path / "f.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        fsio.write_atomic(str(tmp_path / "f"), b"new")
    assert (tmp_path / "victim").read_bytes() == b"safe"


# -- create, rename, remove ----------------------------------------------------------------


def test_create_takes_no_name_that_is_there(folder: int, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    fsio.create("f", data, folder)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("f", "link"):
        assert fsio.exists(name, folder)
        with pytest.raises(FileExistsError):
            fsio.create(name, b"two", folder)
    assert (tmp_path / "f").read_bytes() == data
    for _ in range(2):
        fsio.remove("f", folder)
        assert not fsio.exists("f", folder)
    assert os.listdir(tmp_path) == ["link"]


def test_an_error_names_the_whole_path(folder: int, tmp_path: Path) -> None:
    """A read-only disk is one of many: "x: Read-only file system" would not say where."""
    fsio.create("f", b"one", folder)
    for call, name in (
        (lambda: fsio.create("f", b"two", folder), "f"),
        (lambda: fsio.rename("gone", folder, "g", folder), "gone"),
        (lambda: fsio.ensure_dir("none/d", folder), "none/d"),
    ):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.filename == str(tmp_path / name)
    with pytest.raises(UnsafePath, match=f"{tmp_path}/f exists and is not a directory"):
        fsio.ensure_dir("f", folder)


def test_a_full_disk_is_not_filled_with_the_piece(folder: int, tmp_path: Path) -> None:
    fsio.create("f", b"old", folder)
    for call, name in (
        (lambda: fsio.write_atomic(str(tmp_path / "f"), b"x" * 5000), "f"),
        (lambda: fsio.create("g", b"x" * 5000, folder), "g"),
    ):
        with no_room_above(4096), pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            call()
        assert caught.value.filename == str(tmp_path / name)  # it says on which disk
        assert os.listdir(tmp_path) == ["f"]
    assert (tmp_path / "f").read_bytes() == b"old"


def test_rename_moves_between_directories_and_replaces(folder: int, tmp_path: Path) -> None:
    fsio.ensure_dir("d", folder)
    other = fsio.open_dir("d", folder)
    fsio.create("a", b"new", folder)
    fsio.create("b", b"old", other)
    fsio.rename("a", folder, "b", other)
    os.close(other)
    assert (tmp_path / "d" / "b").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["d"]


@pytest.mark.parametrize("moved", ["renamed", "copied"])
def test_a_move_is_a_rename_and_to_another_file_system_a_copy(
    moved: str, folder: int, tmp_path: Path
) -> None:
    fsio.create("a", b"new", folder)
    fsio.create("b", b"old", folder)
    inode = (tmp_path / "a").stat().st_ino
    with failing("rename" if moved == "copied" else "nothing", code=errno.EXDEV):
        fsio.rename("a", folder, "b", folder)
    assert ((tmp_path / "b").stat().st_ino == inode) is (moved == "renamed")
    assert ((tmp_path / "b").read_bytes(), mode(tmp_path / "b")) == (b"new", 0o600)
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize(
    "fails",
    [
        {"rename": errno.EXDEV, "create": errno.ENOSPC},
        {"rename": errno.EXDEV, "write": errno.ENOSPC},
        {"rename": errno.EIO},  # which no copy helps
    ],
)
def test_a_move_that_fails_leaves_the_source(
    fails: dict[str, int], folder: int, tmp_path: Path
) -> None:
    fsio.create("a", b"new", folder)

    def fault(operation: str, name: str) -> None:
        if operation in fails:
            raise OSError(fails[operation], os.strerror(fails[operation]), name)

    with hooked(fault), pytest.raises(OSError, match=os.strerror([*fails.values()][-1])):
        fsio.rename("a", folder, "b", folder)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


# -- the lock ------------------------------------------------------------------------------

HOLDER = """
import sys
from relay.base import fsio
try:
    with fsio.locked(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
except BlockingIOError:
    print("refused", flush=True)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_the_lock_is_one_processs_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with holder(path) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        with holder(path) as second:
            assert second.stdout and second.stdout.readline() == "refused\n"
        with pytest.raises(BlockingIOError), fsio.locked(str(path)):
            pass
        first.kill()
    with fsio.locked(str(path)), holder(path) as third:
        assert third.stdout and third.stdout.readline() == "refused\n"
    with fsio.locked(str(path)):
        pass
    assert mode(path) == 0o600


def test_the_kernel_says_who_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    assert fsio.lock_owner(str(path)) is None
    really = os.open

    def read_only(name: str, flags: int, *args: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        return really(name, flags, *args)

    with holder(path) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        assert fsio.lock_owner(str(path)) == process.pid
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", read_only)
            assert fsio.lock_owner(str(path)) == process.pid  # asking took nothing
        process.kill()
    assert fsio.lock_owner(str(path)) is None


def test_the_lock_is_free_when_its_block_fails(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")
    with pytest.raises(ZeroDivisionError), fsio.locked(path):
        raise ZeroDivisionError
    with fsio.locked(path):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        with fsio.locked(str(tmp_path / ".lock")):
            pass
