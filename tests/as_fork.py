"""What asks the server of ``tests.forks`` for a process; and a command of a shell that does.

    python tests/as_fork.py DESCRIPTOR WORD ...

runs ``relay WORD ...``, with this process's streams and for it: signals are passed on, and it ends
as the other ended. It imports little: a shell starts it in place of all of the relay.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys

LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def ask(
    server: socket.socket,
    module: str,
    words: list[str],
    environment: dict[str, str],
    streams: list[int],
) -> int:
    """Ask for a process with these streams; the descriptor of its answer."""
    mask = os.umask(0o077)
    os.umask(mask)
    request = {
        "module": module,
        "words": words,
        "environment": environment,
        "directory": os.getcwd(),
        "umask": mask,
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
    }
    answer, theirs = os.pipe()
    try:
        socket.send_fds(server, [json.dumps(request).encode()], [theirs, *streams])
    finally:
        os.close(theirs)
    return answer


def main(descriptor: str, *words: str) -> int:
    """Run the command; its exit code, negative for a signal."""
    with socket.socket(fileno=int(descriptor)) as server:
        answer = ask(server, "relay.__main__", list(words), dict(os.environ), [0, 1, 2])
    with os.fdopen(answer, "rb", buffering=0) as lines:
        pid = int(lines.readline())

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it may end before the signal is sent
                os.kill(pid, number)

        for number in SIGNALS:
            signal.signal(number, pass_on)
        return int(lines.read())


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
