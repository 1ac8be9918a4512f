"""Real processes: the relay started as a person starts it, ended as a test must."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from unittest import mock

from relay.base.home import LEDGER, Home
from relay.base.status_client import ask_status
from relay.cli import run
from relay.ledger.ledger import Ledger
from tests import forks

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_S = 120


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the package importable, whatever its directory."""
    return {**os.environ, "PYTHONPATH": str(PROJECT), **more}


def relay(*arguments: str, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one command line to its end, in this process.

    In a thread, and if it starts a server or Spark, in a fork of one that has loaded it already.
    """
    words = ["--home", str(home), *arguments]
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or arguments[0] in ("up", "audit", "web"):
        return forks.run(words, environment(), stdin, PATIENCE_S)
    streams = [io.TextIOWrapper(io.BytesIO(text), "utf-8") for text in (stdin.encode(), b"", b"")]
    with mock.patch.multiple(sys, **dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))):
        code = run(words)
    for stream in streams:
        stream.seek(0)
    return subprocess.CompletedProcess(words, code, *(stream.read() for stream in streams[1:]))


def rows_of(*arguments: str, home: Path, exit_code: int = 0) -> list[dict[str, Any]]:
    """The lines that a command prints with ``--json``."""
    done = relay(*arguments, "--json", home=home)
    assert done.returncode == exit_code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def agents_of(home: Path) -> dict[str, dict[str, Any]]:
    """Name -> what `relay agents` prints of an agent."""
    return {row["name"]: row for row in rows_of("agents", home=home)}


def relay_anew(*arguments: str, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run one command line to its end, from Python's start on."""
    return subprocess.run(
        [sys.executable, "-m", "relay", "--home", str(home), *arguments],
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def earlier_home(kind: str, folder: Path) -> Path:
    """A home that a relay of schema 5 left, put into ``folder``: stopped or killed."""
    with tarfile.open(PROJECT / "tests" / "fixtures" / "homes" / f"schema-v5-{kind}.tar.xz") as tar:
        tar.extraction_filter = lambda member, _: member  # our own file; 3.11.2 asks for none
        tar.extractall(folder)
    (home,) = folder.glob("home-*")
    return home


def home_of(root: Path, *agents: str, checkpoint_ms: int = 50, **settings: Any) -> Path:
    """A home with these agents and settings, whose relay writes its store's file so often.

    How full the machine's own disk is does not matter to it.
    """
    disk = {"alert_percent": 100, "low_percent": 100, "floor_mib": 0}
    config = {"store": {"checkpoint_ms": checkpoint_ms}, "disk": disk, **settings}
    with Home.create(str(root), json.dumps(config).encode()) as home:
        Ledger.open(home.path(LEDGER)).close()
        for agent in agents:
            home.make_agent(agent)
    return root


def project_of(folder: Path) -> Path:
    """A project with modules that have names of the relay's, of a library's and of Python's own."""
    for name in ("relay/__init__", "msgspec", "json", "queue", "selectors", "socket", "uuid"):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('a module of the project was run')")
    return folder


def drop(home: Path, agent: str, text: str, name: str = "1000000001-01.msg") -> str:
    """Write into .pending and rename into the outbox, as a shell does; the message id."""
    outbox = home / "agents" / agent / "outbox"
    (outbox / ".pending" / name).write_text(text)
    os.rename(outbox / ".pending" / name, outbox / name)
    return name.removesuffix(".msg")


def send(home: Path, *words: str, sender: str = "alice") -> str:
    """Send, and wait until the relay has recorded what became of it; the id."""
    done = relay("send", "--as", sender, "--wait", "delivered", *words, home=home)
    assert done.stdout, done.stderr
    return done.stdout.strip()


def inbox_of(home: Path, agent: str) -> list[Path]:
    """The messages in an inbox, oldest first."""
    return sorted((home / "agents" / agent / "inbox").glob("*.msg"))


def status_of(home: Path) -> dict[str, Any]:
    """The status of the relay, from its socket; empty when it does not answer."""
    with Home(str(home)) as opened:
        return ask_status(opened) or {}


def log_of(home: Path, action: str = "") -> list[dict[str, Any]]:
    """The lines of the relay's log with this action, or all."""
    whole, _, _ = (
        (home / "logs" / "relay.log").read_text().rpartition("\n")
    )  # one may be half there
    lines = map(json.loads, whole.splitlines())
    return [line for line in lines if not action or line["action"] == action]


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
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port on which a server may listen that reuses addresses, and which nobody else gets."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(holder.getsockname()[1])


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
    """A relay in a process of its own, a fork of one that has loaded the daemon already.

    As a context manager it is started, and stopped at the end unless the block did that.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | forks.Fork | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process is None:
            return
        if kind is not None:
            self.kill()
        else:
            assert self.stop() == 0

    @property
    def pid(self) -> int:
        """The pid of the process that runs."""
        assert self.process is not None
        return self.process.pid

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


def until(what: Callable[[], Any], why: str = "", patience_s: float = PATIENCE_S) -> Any:
    """Look again and again until it is true, and give it; fail when it never is."""
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {patience_s} s: {why or what}"
        time.sleep(0.005)
    return found
