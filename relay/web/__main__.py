"""``python -m relay.web``: serve the page of one home on loopback, or on a Unix socket."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import stat
import sys
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relay.base import config
from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.status_client import MOST_PATH_BYTES
from relay.web.app import Web

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 100  # at once; a tab has one for its stream
REQUEST_S = 10.0  # for a request to come as a whole: connections that say nothing are others' room


def main() -> int:
    """Serve until SIGTERM or ^C."""
    parser = argparse.ArgumentParser(prog="python -m relay.web")
    parser.add_argument("--home", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds", metavar="PATH")
    given = parser.parse_args()
    try:
        Home(given.home).close()
        listening = listen_at(given.uds) if given.uds else listen_on(given.port)
    except RelayError as exc:
        print(f"relay: {exc}; {exc.hint}" if exc.hint else f"relay: {exc}", file=sys.stderr)
        return exc.exit_code
    except OSError as exc:
        what = given.uds or f"port {given.port}"
        print(f"relay: {what}: {exc.strerror}", file=sys.stderr)
        return 1
    port = given.port if given.uds else listening.getsockname()[1]
    host, secret = f"{ADDRESS}:{port}", secrets.token_urlsafe(32)
    print(f"http://{host}/#{secret}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again at its end
    try:
        with contextlib.suppress(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # of relay/cli/web.py
            make_server(given.home, host, secret).run(sockets=[listening])
    finally:
        listening.close()
        if given.uds:
            with contextlib.suppress(OSError):
                os.unlink(given.uds)
    return 0


def listen_on(port: int) -> socket.socket:
    """A socket of this machine alone; 0: any free port. Errors: OSError."""
    # With the protocol named asyncio sends at once; otherwise each answer waits for 40 ms.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, port))
        listening.listen()  # before the address is printed
    except BaseException:
        listening.close()
        raise
    return listening


def listen_at(path: str) -> socket.socket:
    """A socket of this user alone; one that a process left is replaced.

    Errors: RelayError for a path that is too long, or is served or something else; OSError.
    """
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise RelayError(f"{path} is longer than {MOST_PATH_BYTES} bytes: name a shorter path")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the mode of the socket, from its first instant
    try:
        if _is_left(path):
            os.unlink(path)
        listening.bind(path)
        listening.listen()
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _is_left(path: str) -> bool:
    """True for a socket that nobody serves. Errors: RelayError for anything else that is there."""
    if not os.path.lexists(path):
        return False
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise RelayError(f"{path} is there, and is not a socket", hint="name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    raise RelayError(f"{path} is served already", hint="end that process, or name another path")


class Protocol(H11Protocol):
    """HTTP/1.1; closes a connection on which no request has come for so long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.loop.call_later(REQUEST_S, self._check_request, None)

    def _check_request(self, before: object) -> None:
        cycle = self.cycle  # of the last request; None before the first
        if cycle is before and (cycle is None or cycle.response_complete):
            self.transport.close()
        elif not self.transport.is_closing():
            self.loop.call_later(REQUEST_S, self._check_request, cycle)


def make_server(root: str, host: str, secret: str) -> uvicorn.Server:
    """A server of the page, to be run with the socket that listens."""
    web = Web(root)
    config.decode(b"{}")  # before there are threads: see relay/engine/events.py

    class Server(uvicorn.Server):
        """A server that ends streams, too: by themselves they never do."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            web.is_over = True
            super().handle_exit(sig, frame)

    options = uvicorn.Config(
        web.app(host, secret),
        http=Protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        proxy_headers=False,  # nothing in between is believed
        server_header=False,
        access_log=False,
        log_level="warning",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    return Server(options)


if __name__ == "__main__":
    sys.exit(main())
