"""A real daemon on a real file system of 8 MiB that is full: mail waits, and goes on by itself.

The file system is a tmpfs in a mount namespace of its own: a process holds it, everything else
enters it. Where the machine allows neither, there is nothing to be seen here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs import PATIENCE_S, environment, until

pytestmark = pytest.mark.shows("journal 5.7", "ready 5.4")
MIB = 1 << 20
NAMESPACES = {"user": ["-r", "-m"], "root": ["-m"]}
ENTER = {"user": ["-U", "-m", "--preserve-credentials"], "root": ["-m"]}
# What a write does on a disk that is full: the relay does not stop before.
NO_FLOOR = '{"disk": {"floor_mib": 0}}'
# 8 MiB: a twentieth is the floor, whatever the setting
FLOORED = "{}"
HOLD = 'mount -t tmpfs -o size=8m,mode=700 relay "$1" && echo mounted && exec cat'


class SmallDisk:
    """A home on a file system of 8 MiB, and the processes that see it."""

    def __init__(self, place: Path, how: str) -> None:
        place.mkdir(exist_ok=True)
        self._enter = ENTER[how]
        self._place = place
        self._daemon: subprocess.Popen[bytes] | None = None
        command = ["unshare", *NAMESPACES[how], "sh", "-c", HOLD, "sh", str(place)]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._holder.stdout is not None
        self.is_there = self._holder.stdout.readline() == b"mounted\n"
        self._root = Path(f"/proc/{self._holder.pid}/root{place}")
        self.home = self._root / "home"  # as the test sees it

    def command(self, *words: str) -> list[str]:
        """A command of the project's, run where the file system is seen."""
        inside = str(self._place / "home")
        enter = ["nsenter", "-t", str(self._holder.pid), *self._enter, f"--wd={os.getcwd()}"]
        return [*enter, sys.executable, "-m", *(inside if w == "HOME" else w for w in words)]

    def relay(self, *words: str) -> str:
        """What one command line of ``relay`` says."""
        done = subprocess.run(
            self.command("relay", "--home", "HOME", *words),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout + done.stderr

    def configure(self, text: str) -> None:
        """Write config.json."""
        (self.home / "config.json").write_text(text)

    def start(self) -> None:
        """Start the daemon; come back when it is ready."""
        read_fd, write_fd = os.pipe()
        command = self.command("relay.daemon", "--home", "HOME", "--ready-fd", str(write_fd))
        self._daemon = subprocess.Popen(command, env=environment(), pass_fds=(write_fd,))
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as answer:
            assert answer.readline() == b"ready\n"

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._daemon is not None
        self._daemon.send_signal(signal.SIGTERM)
        code = self._daemon.wait(PATIENCE_S)
        self._daemon = None
        return code

    def fill(self, left: int = 0) -> None:
        """Somebody else takes all the space, but for so many bytes."""
        with (self._root / "filler").open("ab", buffering=0) as file:
            while (more := shutil.disk_usage(self._root).free - left) > 0:
                file.write(bytes(min(more, MIB)))

    def free(self) -> None:
        """It is removed again."""
        (self._root / "filler").unlink()

    def pending(self, agent: str, text: str, name: str) -> None:
        """Write a message, not sent yet."""
        path = self.home / "agents" / agent / "outbox" / ".pending" / name
        path.write_text(text)
        path.chmod(0o600)

    def send(self, agent: str, name: str) -> None:
        """Send what was written: a rename takes no space."""
        outbox = self.home / "agents" / agent / "outbox"
        os.rename(outbox / ".pending" / name, outbox / name)

    def inbox(self, agent: str) -> list[str]:
        """What stands there."""
        return sorted(p.stem for p in (self.home / "agents" / agent / "inbox").glob("*.msg"))

    def log(self) -> str:
        """What the daemon has written down."""
        return (self.home / "logs" / "relay.log").read_text()

    def close(self) -> None:
        """Nothing is left of it."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait(PATIENCE_S)
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()
        self._holder.wait(PATIENCE_S)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """A small file system with a relay on it that runs, and two agents; its disk has a floor where
    the test says so."""
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: no small file system can be made")
    for how in NAMESPACES:
        small = SmallDisk(tmp_path / "disk", how)
        if small.is_there:
            break
        small.close()
    else:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of its own")
    small.relay("init")
    small.configure(getattr(request, "param", NO_FLOOR))
    for agent in ("alice", "bob"):
        small.relay("register", agent)
    small.start()
    yield small
    small.close()


NAMES = [f"100000000{number}-0{number}.msg" for number in range(1, 6)]
IDS = [name.removesuffix(".msg") for name in NAMES]


def send_all(disk: SmallDisk) -> None:
    """Five messages, sent when there is no space left."""
    for number, name in enumerate(NAMES):
        disk.pending("alice", f"TO: bob\n\n{number}", name)
    disk.fill()
    for name in NAMES:
        disk.send("alice", name)


def test_mail_waits_while_nothing_can_be_written_and_goes_on_by_itself(disk: SmallDisk) -> None:
    send_all(disk)
    until(lambda: "disk is full" in disk.log() or "No space left" in disk.log())
    assert disk.inbox("bob") == []
    assert "the relay is running" in disk.relay("status")

    disk.free()
    until(lambda: disk.inbox("bob") == IDS)
    assert disk.inbox("alice") == []  # nobody was nacked for it
    until(lambda: not list((disk.home / "agents" / "alice" / "outbox").glob("*.msg")))
    assert disk.stop() == 0
    disk.start()
    assert disk.stop() == 0
    assert disk.inbox("bob") == IDS  # nothing comes twice


def test_without_a_free_byte_and_a_relay_commands_read_the_ledger(disk: SmallDisk) -> None:
    """SQLite cannot make the files that a reader needs where others write."""
    assert disk.stop() == 0
    disk.fill()
    assert "no relay is running" in disk.relay("status")
    assert "alice     active" in disk.relay("agents")


@pytest.mark.parametrize("disk", [FLOORED], indirect=True)
def test_below_the_floor_nothing_is_taken_in_and_above_it_goes_on_by_itself(
    disk: SmallDisk,
) -> None:
    disk.pending("alice", "TO: bob\n\nbefore", NAMES[0])
    disk.send("alice", NAMES[0])
    until(lambda: disk.inbox("bob") == IDS[:1])
    for name in NAMES[1:]:
        disk.pending("alice", "TO: bob\n\nwaits", name)

    def paused() -> bool:
        disk.fill(left=MIB * 3 // 8)  # again: the relay may have given back some of its own
        return "intake is paused" in disk.relay("status")

    until(paused)
    for name in NAMES[1:]:
        disk.send("alice", name)
    disk.relay("inbox", "--as", "bob", "--take")  # reading goes on, and is noted
    until(lambda: "read by bob" in disk.relay("trace", IDS[0]))
    assert disk.inbox("bob") == []
    outbox = disk.home / "agents" / "alice" / "outbox"
    assert sorted(path.name for path in outbox.glob("*.msg")) == NAMES[1:]
    notices = [
        disk.home / "agents" / "operator" / "inbox" / f"{one}.msg" for one in disk.inbox("operator")
    ]
    assert "nearly full" in notices[0].read_text()

    disk.free()
    until(lambda: disk.inbox("bob") == IDS[1:])
    assert "paused" not in disk.relay("status")
    assert "intake resumes" in disk.log()
    assert len(disk.inbox("operator")) == 1
    assert disk.stop() == 0
