"""Real processes: the relay started as a person starts it, ended as a test must."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relay.base.home import LEDGER, Home
from relay.ledger import Ledger
from tests import forks

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the package importable, whatever its directory."""
    return {**os.environ, "PYTHONPATH": str(PROJECT), **more}


def relay(*arguments: str, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one command line to its end, in a fork of a process that has loaded it already."""
    return forks.run(["--home", str(home), *arguments], environment(), stdin, PATIENCE_S)


def relay_anew(*arguments: str, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one command line to its end, from Python's start on."""
    return subprocess.run(
        [sys.executable, "-m", "relay.cli", "--home", str(home), *arguments],
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def earlier_home(kind: str, folder: Path) -> Path:
    """A home that the code before schema 3 left, put into ``folder``: stopped or killed."""
    with tarfile.open(PROJECT / "tests" / "fixtures" / "homes" / f"schema-v2-{kind}.tar.xz") as tar:
        tar.extraction_filter = lambda member, _: member  # our own file; 3.11.2 asks for none
        tar.extractall(folder)
    (home,) = folder.glob("home-*")
    return home


def home_of(root: Path, *agents: str, checkpoint_ms: int = 50) -> Path:
    """A home with these agents, whose relay writes its store's file so often.

    How full the machine's own disk is does not matter to it.
    """
    disk = b'{"alert_percent": 100, "low_percent": 100, "floor_mib": 0}'
    config = b'{"store": {"checkpoint_ms": %d}, "disk": %s}' % (checkpoint_ms, disk)
    with Home.create(str(root), config) as home:
        Ledger.open(home.path(LEDGER)).close()
        for agent in agents:
            home.make_agent(agent)
    return root


@contextlib.contextmanager
def no_room_above(size: int) -> Iterator[None]:
    """Writes of this process behind so many bytes of a file fail, as on a full disk.

    With EFBIG for ENOSPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield  # no longer: the report of the test may go to a file, too
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def meanwhile(step: Callable[[], object]) -> Iterator[None]:
    """``step`` over and over, in a thread of its own, as long as the block lasts."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            step()
            over.wait(0.005)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Relay:
    """A relay in a process of its own, a fork of one that has loaded the daemon already."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | forks.Fork | None = None

    def start(self, *under: str, wait: bool = True) -> None:
        """Start it, ``under`` a program; by default come back when it says that it is ready.

        Under a program it is started anew, as ``relay up`` and the system's services do.
        """
        read_fd, write_fd = os.pipe()
        words = ["--home", str(self.home), "--ready-fd"]
        if under:
            self.process = subprocess.Popen(
                [*under, sys.executable, "-m", "relay.daemon", *words, str(write_fd)],
                env=environment(),
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
            )
        else:
            words.append(str(forks.READY_FD))
            with open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), 1, 2)
                self.process = forks.start(
                    forks.DAEMON, words, environment(), *streams, ready=write_fd
                )
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as answer:
            if wait:
                assert answer.readline() == b"ready\n"

    def kill(self) -> None:
        """SIGKILL, at this instant."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self.process = None
        return code


def until(what: Callable[[], object], why: str = "", patience_s: float = PATIENCE_S) -> None:
    """Look again and again until it is true; fail when it never is."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline, f"not within {patience_s} s: {why or what}"
        time.sleep(0.005)
