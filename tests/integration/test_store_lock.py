"""The store's lock where the file system has no flock: the text of the lock file decides."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relay.acomm import lock
from relay.base.errors import StoreLocked
from relay.engine import CommStore
from tests.procs import environment

NO_FLOCK = """
import errno, fcntl, sys, time
from relay.engine import CommStore
from relay.base.errors import StoreLocked
def flock(fd, operation):
    raise OSError(errno.ENOLCK, "no locks available")
fcntl.flock = flock
"""
HOLD = NO_FLOCK + "store = CommStore.open(sys.argv[1])\nprint('held', flush=True)\nsys.stdin.read()"
# Everybody looks at the same stale lock at once; each says when it got it, and lets it go.
RACE = (
    NO_FLOCK
    + """
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    try:
        with CommStore.open(sys.argv[1]) as store:
            with open(sys.argv[2], "x"):
                pass
            time.sleep(0.002)
            __import__("os").unlink(sys.argv[2])
            print("held", flush=True)
    except StoreLocked:
        pass
"""
)


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def no_flock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A file system without locks; each says so in its own words."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    return out


def words(pid: int, host: str = socket.gethostname()) -> str:
    return f"PID: {pid}\nSTARTED: 1\nHOSTNAME: {host}\n"


def aged(path: Path, text: str, seconds: int) -> Path:
    path.write_text(text)
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))
    return path


@pytest.fixture
def gone() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_file_is_the_lock_and_goes_with_it(tmp_path: Path, no_flock: None) -> None:
    path, held = str(tmp_path / "s.acomm"), tmp_path / "s.acomm.lock"
    with CommStore.open(path):
        assert held.read_text().startswith(f"PID: {os.getpid()}\nSTARTED: ")
        with pytest.raises(StoreLocked, match=f"PID: {os.getpid()}, STARTED: .*HOSTNAME: "):
            CommStore.open(path)
        assert held.exists()
    assert not held.exists()
    CommStore.open(path).close()
    assert {one.name for one in tmp_path.iterdir()} == {"s.acomm"}


@pytest.mark.shows("engine 6.10")
@pytest.mark.parametrize(
    ("host", "seconds", "is_free"),
    [
        (socket.gethostname(), 61, True),
        (socket.gethostname(), 5, False),
        ("another-host", 10_000, False),
    ],
)
def test_a_lock_whose_holder_is_gone(
    tmp_path: Path, no_flock: None, gone: int, host: str, seconds: int, is_free: bool
) -> None:
    held = aged(tmp_path / "s.acomm.lock", words(gone, host), seconds)
    if is_free:
        CommStore.open(str(tmp_path / "s.acomm")).close()
        assert not held.exists()
    else:
        with pytest.raises(StoreLocked, match=f"PID: {gone}"):
            CommStore.open(str(tmp_path / "s.acomm"))
        assert held.read_text() == words(gone, host)


def test_one_who_lives_keeps_it_however_old_it_is(tmp_path: Path, no_flock: None) -> None:
    aged(tmp_path / "s.acomm.lock", words(os.getpid()), 10_000)
    with pytest.raises(StoreLocked):
        CommStore.open(str(tmp_path / "s.acomm"))


def test_a_lock_without_a_word_is_waited_for_and_then_taken(tmp_path: Path, no_flock: None) -> None:
    aged(tmp_path / "s.acomm.lock", "", 5)
    with pytest.raises(StoreLocked):
        CommStore.open(str(tmp_path / "s.acomm"))
    aged(tmp_path / "s.acomm.lock", "PID: 12", 61)
    CommStore.open(str(tmp_path / "s.acomm")).close()


def test_a_take_over_that_was_killed_is_said_so(tmp_path: Path, no_flock: None, gone: int) -> None:
    aged(tmp_path / "s.acomm.lock", words(gone), 61)
    guard = tmp_path / "s.acomm.lock.takeover"
    guard.touch()
    with pytest.raises(StoreLocked, match=f"remove {guard}"):
        CommStore.open(str(tmp_path / "s.acomm"))
    guard.unlink()
    CommStore.open(str(tmp_path / "s.acomm")).close()


def test_any_other_failure_is_no_reason_to_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="input/output error"):
        CommStore.open(str(tmp_path / "s.acomm"))


def test_a_killed_process_is_followed_after_sixty_seconds(tmp_path: Path, no_flock: None) -> None:
    path, held = str(tmp_path / "s.acomm"), tmp_path / "s.acomm.lock"
    holder = start(HOLD, path)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(StoreLocked, match=f"PID: {holder.pid}"):
        CommStore.open(path)
    aged(held, held.read_text(), 61)
    with pytest.raises(StoreLocked, match=f"PID: {holder.pid}"):
        CommStore.open(path)
    holder.kill()
    end(holder)
    CommStore.open(path).close()


@pytest.mark.shows("engine 6.10")
def test_two_writers_never_both_have_it(tmp_path: Path, gone: int) -> None:
    path, inside = str(tmp_path / "s.acomm"), str(tmp_path / "somebody-writes")
    aged(tmp_path / "s.acomm.lock", words(gone), 61)
    writers = [start(RACE, path, inside) for _ in range(3)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [end(writer) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert "".join(said).count("held") > 3
    assert not os.path.exists(path + ".lock")


def test_what_a_lock_says_is_read_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "l").write_bytes(b"\xff" * 10_000)
    assert len(lock._words(str(tmp_path / "l"))) == 4096
