"""Homes without a checkpoint, on a read-only file system, and on one that is mounted anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base import disk
from relay.base.home import STORE
from tests.box import Box
from tests.procs import PATIENCE_S, Relay, environment, relay

NO_INODE = """
mount -t tmpfs -o nr_inodes=300,mode=700 none "$1" && cd "$1" || exit
relay() { "$PYTHON" -m relay --home "$1/home" "$2" || echo "exit $?"; }
for word in init up status; do relay "$1" $word; done
n=0; while touch f$n 2>/dev/null; do n=$((n + 1)); done
for word in status doctor attention; do relay "$1" $word; done
rm f*; relay "$1" down
"""
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'


@pytest.fixture
def unshare(tmp_path: Path) -> list[str]:
    """The command that runs another one where it may mount what nobody else sees."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    for user in ([], ["-r"]) if shutil.which("unshare") else ():
        command = ["unshare", *user, "-m"]
        trial = [*command, "mount", "-t", "tmpfs", "none", str(folder)]
        if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
            return command
    pytest.skip("this machine lets nobody mount in a namespace of their own")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_doctor_says_that_a_home_is_read_only(
    running: Relay, home: Path, unshare: list[str]
) -> None:
    running.stop()
    relay("search", "x", home=home)
    assert (home / "search.db").exists()
    python = [sys.executable, "-m", "relay", "--home", str(home)]
    read_only = [*unshare, "sh", "-c", READ_ONLY, "sh", str(home), *python]
    done = run(*read_only, "doctor")
    assert done.returncode == 3, done.stdout + done.stderr
    said = f"limits: {home} is on a read-only file system: no messages are accepted"
    assert said in done.stdout
    assert "must be able to read" not in done.stdout  # of the index
    found = run(*read_only, "search", "x")
    assert "searched the store itself: no search index:" in found.stderr
    assert "Read-only file system" in found.stderr and "[Errno" not in found.stderr
    assert relay("doctor", home=home).stdout == "OK\n"


def test_a_disk_without_a_free_inode_is_not_called_fine(tmp_path: Path, unshare: list[str]) -> None:
    done = run(*unshare, "-p", "--kill-child", "sh", "-c", NO_INODE, "sh", str(tmp_path))
    said, why = done.stdout, "No space left on device"
    assert said.count("; disk ok, ") == 1, said + done.stderr  # before
    assert said.count(f"; disk takes no file ({why}), ") == 1
    assert said.count(f"the disk of {tmp_path}/home takes no file: {why}") == 2  # and attention


@pytest.mark.home("alice", "bob", checkpoint_ms=600_000)
def test_a_home_that_is_mounted_anew_is_compared_as_after_a_power_cut(
    running: Relay, home: Path, unshare: list[str]
) -> None:
    """A disk that fell out and came back: what was written since the last checkpoint, before which
    all is synced, may be damaged."""
    sent = relay("send", "bob", "hello", "--as", "alice", "--wait", "delivered", home=home)
    unread = home / "agents" / "bob" / "inbox" / f"{sent.stdout.strip()}.msg"
    running.kill()
    whole = unread.read_bytes()
    unread.write_bytes(b"")
    running.start()
    assert unread.read_bytes() == b""  # the same boot, the same mount: bob has it, or wrote it
    running.kill()
    fd = os.open(home, os.O_RDONLY)
    is_known = disk.mount_id(fd)
    os.close(fd)
    if not is_known:
        pytest.skip("this kernel does not number its mounts")
    running.start(*unshare, "--")
    assert unread.read_bytes() == whole.replace(b"ATTEMPT: 1", b"ATTEMPT: 2")


def made_again(box: Box) -> list[str]:
    return [one["event"] for one in box.log if "rebuilt from the journal" in one["event"]]


@pytest.mark.box("alice", "bob")
def test_a_home_that_never_had_a_checkpoint_raises_no_alarm(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.kill()
    assert not box.path(STORE).exists()
    for _ in range(2):  # the second start of a young home, and the third
        box.open()
        assert made_again(box) == [] and len(box.store.state.messages) == 1
        box.kill()
