"""Processes of the relay as forks of one process that has loaded all of it already.

Each is a process of its own, with its own pid, descriptors, environment, directory, limits and
exit code; only the start of Python and the imports, up to 0.4 s of CPU each time, happen once for
all of them. What is about the start itself runs anew (``tests.procs``).

One message is one process: its words, environment and limits, and four descriptors: stdin, stdout
and stderr, and one for the answer, which is the pid in a line and later the exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from tests.as_fork import LIMITS, ask

MOST_BYTES = 1 << 18
PROJECT = Path(__file__).resolve().parent.parent
CLI, DAEMON = "relay.cli", "relay.daemon.process"  # each has a main
READY_FD = 3
PATIENCE_S = 30.0  # see be_patient
ABOVE_FD = 64  # no descriptor of the server has a higher number
_lock = threading.Lock()
_servers: dict[tuple[int, int], socket.socket] = {}  # of a test process, and of a user


class Fork:
    """A process that runs, with what ``subprocess.Popen`` offers of it."""

    def __init__(self, words: list[str], answer: int) -> None:
        self.args = words
        self.returncode: int | None = None
        self._answer = os.fdopen(answer, "rb", buffering=0)
        self.pid = int(self._answer.readline())

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Errors: subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._answer], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._answer.read())
            self._answer.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end before the signal is sent
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    module: str, words: list[str], environment: dict[str, str], *streams: int, ready: int = -1
) -> Fork:
    """Start a process with these streams; ``ready`` is its descriptor 3."""
    given = [*streams, *([ready] if ready >= 0 else [])]
    server = _server()
    with _lock:  # it sets the umask, to read it
        answer = ask(server, module, words, environment, given)
    return Fork(words, answer)


def run(
    words: list[str], environment: dict[str, str], stdin: str, patience_s: float
) -> subprocess.CompletedProcess[str]:
    """Run one command line to its end. Errors: subprocess.TimeoutExpired."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode())
        given.seek(0)
        process = start(CLI, words, environment, *(file.fileno() for file in (given, out, err)))
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, _text(out.read()), _text(err.read()))


def _text(data: bytes) -> str:
    """What ``subprocess`` makes of it with ``text=True``."""
    return data.decode().replace("\r\n", "\n").replace("\r", "\n")


def command(folder: Path) -> int:
    """Put a ``relay`` into the folder that runs as such a process; the descriptor it needs.

    A shell is to inherit it. In a process that did not, `relay` starts anew; and so does what
    looks at the process that started it.
    """
    fd = _server().fileno()
    python = shlex.quote(sys.executable)
    anew = f'exec {python} -m relay "$@"'
    lines = (
        "#!/bin/sh",
        f"[ -S /proc/self/fd/{fd} ] || {anew}",
        f"case $1 in bell | hook | up | wake) {anew} ;; esac",
        f'exec {python} -ISs {shlex.quote(str(PROJECT))}/tests/as_fork.py {fd} "$@"',
    )
    (folder / "relay").write_text("\n".join(lines))
    (folder / "relay").chmod(0o755)
    return fd


def _server() -> socket.socket:
    """The socket of this process's server, which is started the first time."""
    key = (os.getpid(), os.geteuid())
    with _lock:
        if key not in _servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
            with theirs:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                    env={**os.environ, "PYTHONPATH": str(PROJECT)},
                    cwd=PROJECT,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            _servers[key] = ours
            atexit.register(_end, server, ours, os.getpid())
        return _servers[key]


def _end(server: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    """End the server, which the closed socket tells; a fork of the test process leaves it alone."""
    if os.getpid() == owner:
        ours.close()
        server.wait()


# -- the server ------------------------------------------------------------------------------


def serve(requests: socket.socket) -> None:
    """Fork for each request until the test process has gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MOST_BYTES, 5)
        if not data:
            return
        if os.fork() == 0:
            requests.close()
            _watch(json.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _watch(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Fork once more, into the process asked for; tell its pid and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer, *given = fds
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        _become(request, given)
    for fd in given:
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):  # the test did not wait for it
        os.write(answer, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(answer, b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any], given: list[int]) -> NoReturn:
    """Be the process asked for, to its end."""
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE_FD) for fd in given]
    os.closerange(0, ABOVE_FD)
    for number, fd in enumerate(kept):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, tuple(values))
    sys.argv = [request["module"], *request["words"]]
    code = 0
    try:
        code = importlib.import_module(request["module"]).main() or 0
    except SystemExit as exc:
        code = int(exc.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # nothing is taken apart: that touches every page, and costs as much as a start


def be_patient() -> None:
    """Let commands and agents wait longer for a relay that is about to answer.

    Two seconds are enough for people; beside a whole suite a relay may not have had its turn.
    """
    from agent_sdk import requests
    from relay.cli import config
    from relay.views import messages

    requests.WAIT_S = messages.WAIT_S = messages.CATCH_UP_S = config.TAKEN_S = PATIENCE_S
    requests.default_wait_s.__defaults__ = (PATIENCE_S,)


def _preload() -> None:
    """Import the daemon, and what commands import but for the audits."""
    from relay.cli import COMMANDS

    be_patient()

    modules = {*COMMANDS.values()} - {"relay.cli.audit"}
    more = ("rich.table", "relay.doctor", "tests.reach.agent_loop", "tests.reach.a_bell")
    for module in (*sorted(modules), DAEMON, *more):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection in a fork touches what is shared


if __name__ == "__main__":
    _preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
