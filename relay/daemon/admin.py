"""Health, metrics and status over HTTP: on ``admin.sock`` in the home, and on loopback.

    /healthz   200 while the loop makes progress; 503 with the stage it is stuck in
    /readyz    200 while a session accepts messages; 503 with the reason otherwise
    /metrics   in the Prometheus text format
    /status    JSON; docs/cli-json.md

Served by separate threads from the status the loop has published, so it answers while the loop is
busy. Read-only. Access to the home includes access to the socket (mode 600).
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import stat
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from relay.base.clock import NS_PER_S, iso_time
from relay.base.config import digest
from relay.base.disk import DiskUsage
from relay.base.home import LEDGER
from relay.base.logs import LogCall
from relay.base.names import listen_address
from relay.base.status_client import SOCKET, socket_address
from relay.base.text import json_line
from relay.daemon.status import (
    CONTENT_TYPE,
    SharedStatus,
    StatusSnapshot,
    metrics_page,
    resident_bytes,
)
from relay.ledger.wal import measure_wal

REQUEST_TIMEOUT_S = 5  # a slow or silent client is disconnected then
MOST_CONNECTIONS = 32  # at once, per server: each takes a descriptor, and the loop needs some
QUIET_S = 60  # the same error is not logged again sooner
POLL_S = 0.5  # within this time slow clients are cut off, and a server ends
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Admin:
    """The HTTP servers. Started and stopped by the daemon, which holds the home's lock."""

    def __init__(self, status: SharedStatus, log: LogCall) -> None:
        self._status = status
        self._log = log
        self._servers: list[_Threads] = []

    def begin(self, listen: str) -> None:
        """Serve on the socket, and on ``listen`` unless it is empty.

        A server that cannot start is logged, and the relay runs without it.
        """
        self._status.admin_trouble = ""
        path = os.path.join(self._status.home, SOCKET)
        self._start(SOCKET, lambda: _UnixServer(path, self._handler()))
        address = listen_address(listen)
        if address is not None:
            kind = _Tcp6Server if ":" in address[0] else _TcpServer
            self._start(f"admin.listen {listen}", lambda: kind(address, self._handler()))

    def end(self) -> None:
        """Stop serving; removes the socket."""
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_RDWR)  # wakes its thread
            server.shutdown()
            server.server_close()
        self._servers = []

    def _start(self, name: str, make: Callable[[], _Threads]) -> None:
        try:
            server = make()
        except (OSError, ValueError) as exc:
            trouble = self._status.admin_trouble = f"no server on {name}: {exc}"
            self._log(f"Health and metrics: {trouble}", action="admin", level="warning")
            return
        self._servers.append(server)
        threading.Thread(
            target=self._serve, args=(name, server), name=f"admin {name}", daemon=True
        ).start()

    def _serve(self, name: str, server: _Threads) -> None:
        """Serve until stopped; errors of the system are logged once and do not end it."""
        logged_at = float(-QUIET_S)
        while not server.is_ended.is_set():
            try:
                server.serve_forever(POLL_S)
            except Exception as exc:
                if time.monotonic() - logged_at > QUIET_S:
                    text = f"Health and metrics: error on {name}, still serving: {exc}"
                    self._log(text, action="admin", level="warning")
                logged_at = time.monotonic()
                server.is_ended.wait(POLL_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (RequestHandler,), {"status": self._status})


class RequestHandler(BaseHTTPRequestHandler):
    """One request: GET a page, or an error of one line."""

    server_version = "agent-relay"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S
    status: SharedStatus  # of the relay that answers

    def do_GET(self) -> None:
        """Answer with a page."""
        if not self._is_allowed_host():
            self.send_error(403, f"ask by one of {', '.join(LOOPBACK_NAMES)}, or admin.listen")
            return
        pages = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/status": self._status,
        }
        page = pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404, f"there are {', '.join(pages)}")
            return
        page()

    def _is_allowed_host(self) -> bool:
        """False for a Host header with a foreign name (DNS rebinding in a browser)."""
        if self.server.address_family == socket.AF_UNIX:  # type: ignore[attr-defined]
            return True
        host = self.headers.get("Host", "").lower()
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name in (*LOOPBACK_NAMES, self.server.server_address[0])  # type: ignore[index]

    def _healthz(self) -> None:
        health = self.status.health()
        self._line(health.is_healthy, "healthy", health.reasons)

    def _readyz(self) -> None:
        health = self.status.health()
        self._line(health.is_ready, "ready", health.reasons)

    def _line(self, is_well: bool, word: str, reasons: tuple[str, ...]) -> None:
        text = word if is_well else "; ".join(reasons)
        self._send(200 if is_well else 503, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _metrics(self) -> None:
        self.status.refresh()
        self._send(200, CONTENT_TYPE, metrics_page(self.status))

    def _status(self) -> None:
        self.status.refresh()
        body = json_line(status_of(self.status))
        self._send(200, "application/json", f"{body}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line; a method that is not GET is 405."""
        if code == 501:
            code, message = 405, "GET alone"
        with contextlib.suppress(OSError):
            body = f"{code} {message or explain or ''}".rstrip() + "\n"
            self._send(code, "text/plain; charset=utf-8", body.encode(errors="backslashreplace"))

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if code == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a scrape every few seconds would fill the log."""


class _Threads(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread per request. A connection is closed after ``REQUEST_TIMEOUT_S``, and the oldest one
    when there are more than ``MOST_CONNECTIONS``."""

    daemon_threads = True
    request_queue_size = 64  # monitors need far fewer
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        self._since: dict[socket.socket, float] = {}  # the oldest first
        self._lock = threading.Lock()
        self.is_ended = threading.Event()
        super().__init__(*arguments)

    def shutdown(self) -> None:
        """Stop serving for good."""
        self.is_ended.set()
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        with self._lock:
            self._since[request] = time.monotonic()
            over = len(self._since) - MOST_CONNECTIONS
            for oldest in list(self._since)[: max(over, 0)]:
                self._cut(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Between two requests, every ``POLL_S`` at least."""
        overdue = time.monotonic() - REQUEST_TIMEOUT_S
        with self._lock:
            for request in [request for request, since in self._since.items() if since < overdue]:
                self._cut(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered or shut down; its thread ends."""
        with self._lock:  # closed while locked: a reused descriptor must not be shut down
            self._since.pop(request, None)
            super().shutdown_request(request)

    def _cut(self, request: socket.socket) -> None:
        """Shut a connection down, so that its thread reads the end; the lock is held."""
        del self._since[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> Any:
        """Accept a connection; without a free descriptor, wait a moment instead of spinning."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.2)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that went away or does not speak HTTP."""


class _UnixServer(_Threads):
    """Server on a socket path. A socket left by a killed relay is replaced, because this process
    holds the home's lock."""

    address_family = socket.AF_UNIX
    _bound: os.stat_result | None = None

    def server_bind(self) -> None:
        path = str(self.server_address)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ValueError(f"{path} exists and is not a socket")
            os.unlink(path)
        with socket_address(path) as address:
            self.socket.bind(address)
        os.chmod(path, 0o600)
        self._bound = os.lstat(path)

    def server_close(self) -> None:
        super().server_close()
        path = str(self.server_address)
        if self._bound is not None:  # another file there is not ours
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(path), self._bound):
                    os.unlink(path)


class _TcpServer(_Threads):
    allow_reuse_address = True


class _Tcp6Server(_TcpServer):
    address_family = socket.AF_INET6


def status_of(status: SharedStatus) -> dict[str, Any]:
    """The body of ``/status``."""
    health, snapshot, disk = status.health(), status.snapshot, status.disk
    step, step_s = status.metrics.stuck_s()
    age = status.snapshot_age_s()
    wal_state, n_bytes = measure_wal(os.path.join(status.home, LEDGER), status.config.ledger)
    page: dict[str, Any] = {
        "home": status.home,
        "pid": os.getpid(),
        "started_at": iso_time(status.started_at_ns),
        "starts": status.epoch,
        "healthy": health.is_healthy,
        "ready": health.is_ready,
        "reasons": list(health.reasons),
        "step": step,
        "step_s": round(step_s, 3),
        "paused": status.paused,
        "pauses": status.pauses,
        "trouble": status.trouble,
        "admin_trouble": status.admin_trouble,
        "config": digest(status.config),
        "config_error": status.config_error,
        "reloads": status.reloads,
        "tiers_waiting": list(status.tiers_waiting),
        "ledger_damage": status.ledger_damage,
        "rss_bytes": resident_bytes(),
        "wal_bytes": n_bytes,
        "wal_state": wal_state.value,
        "snapshot_age_s": None if age is None else round(age, 3),
        "disk": None if disk is None else _disk_status(disk),
    }
    if snapshot is not None:
        page |= _session_status(snapshot, status.clock.monotonic_ns())
    return page


def _disk_status(disk: DiskUsage) -> dict[str, Any]:
    return {
        "state": disk.state.value,
        "size_bytes": disk.size_bytes,
        "free_bytes": disk.free_bytes,
        "used_percent": round(disk.used_percent, 1),
        "floor_bytes": disk.floor_bytes,
    }


def _session_status(snapshot: StatusSnapshot, now_ns: int) -> dict[str, Any]:
    """The session's part of ``/status``. ``now_ns``: of the monotonic clock."""
    waits = snapshot.oldest_ns and now_ns - snapshot.oldest_ns
    return {
        "watcher": snapshot.watcher,
        "totals": snapshot.totals,
        "queue_files": snapshot.queue_files,
        "oldest_s": round(waits / NS_PER_S, 1) if waits else None,
        "agents": snapshot.agents,
        "unwatched": snapshot.unwatched,
        "watches": snapshot.watches,
        "held_back": snapshot.held_back,
        "active": snapshot.active,
        "dead_letters": snapshot.dead_letters,
        "owed": snapshot.owed,
        "open_answers": snapshot.owed.total(),
        "delivery_p50_s": snapshot.delivery_s.quantile(0.5),
        "delivery_p99_s": snapshot.delivery_s.quantile(0.99),
    }
