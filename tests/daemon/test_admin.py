"""Health, metrics and status over HTTP: a real socket, asked while the loop stands still."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relay.base import status_client
from relay.base.config import AdminSettings, Config
from relay.base.metrics import WAIT
from relay.base.status_client import SOCKET
from relay.daemon import admin
from relay.daemon.admin import Admin
from relay.daemon.status import SharedStatus
from tests.fakes import FakeClock
from tests.procs import PATIENCE_S, reserved_port, until


class Asked:
    """A status, its servers, and who asks them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()
        self.log: list[str] = []
        self.status = SharedStatus(str(root), Config(), self.clock)
        self.admin = Admin(self.status, lambda text, **_: self.log.append(text))

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        address: str = "127.0.0.1",
        port: int = 0,
        host: str = "",
    ) -> tuple[int, str, str]:
        """(status, type, body)."""
        connection: http.client.HTTPConnection
        if port:
            connection = http.client.HTTPConnection(address, port, timeout=PATIENCE_S)
        else:
            connection = status_client._UnixConnection(str(self.root / SOCKET), PATIENCE_S)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, answer.getheader("Content-Type", ""), body

    def serve(self) -> None:
        """As a session that waits."""
        self.status.is_serving = True
        self.status.metrics.begin(WAIT)


@pytest.fixture
def asked() -> Iterator[Asked]:
    """In a directory with a short name: a socket's path may not be long."""
    root = Path(tempfile.mkdtemp(prefix="relay-", dir="/tmp"))
    made = Asked(root)
    yield made
    made.admin.end()
    shutil.rmtree(root)


@pytest.fixture
def served(asked: Asked) -> Asked:
    """The socket answers, and a session serves."""
    asked.serve()
    asked.admin.begin("")
    return asked


def test_each_page_says_what_it_is(served: Asked) -> None:
    text = "text/plain; charset=utf-8"
    assert served.ask("/healthz") == (200, text, "healthy\n")
    assert served.ask("/readyz") == (200, text, "ready\n")
    code, kind, body = served.ask("/metrics?name=x")
    assert code == 200 and kind.startswith("text/plain; version=0.0.4")
    assert "\nrelay_healthy 1.0\n" in body
    code, kind, body = served.ask("/status")
    assert (code, kind, json.loads(body)["pid"]) == (200, "application/json", os.getpid())
    assert served.log == []


def test_a_loop_that_is_stuck_is_named_with_its_step(served: Asked) -> None:
    served.status.metrics.begin("commit")
    served.clock.advance(14)
    assert served.ask("/healthz")[0] == 200
    served.clock.advance(1)
    said = "the loop is stuck: in step commit for 15 s\n"
    assert served.ask("/healthz")[::2] == (503, said)
    assert served.ask("/readyz")[::2] == (503, said)
    status = json.loads(served.ask("/status")[2])
    assert (status["healthy"], status["step"], status["step_s"]) == (False, "commit", 15)
    served.status.metrics.begin(WAIT)  # it goes on by itself
    served.clock.advance(3600)
    assert served.ask("/healthz")[0] == 200
    admin = AdminSettings(stall_after_s=2)
    served.status.config = msgspec.structs.replace(served.status.config, admin=admin)
    served.status.metrics.begin("complete")
    served.clock.advance(3)
    assert served.ask("/healthz")[0] == 503


def test_alive_and_not_ready(asked: Asked) -> None:
    asked.admin.begin("")
    assert asked.ask("/healthz")[0] == 200
    assert asked.ask("/readyz")[::2] == (503, "it is starting\n")
    asked.status.trouble = "the disk is full"
    said = "not serving, will retry: the disk is full\n"
    assert asked.ask("/readyz")[::2] == (503, said)
    asked.status.trouble = ""
    asked.serve()
    asked.status.pauses = {"test": "intake is paused: for the test"}
    assert asked.ask("/readyz")[::2] == (503, "intake is paused: for the test\n")
    assert asked.ask("/healthz")[0] == 200


@pytest.mark.parametrize("path", ["/", "/metrics/"])
def test_another_page_is_404_and_one_line(served: Asked, path: str) -> None:
    code, _, body = served.ask(path)
    assert code == 404
    assert body == "404 there are /healthz, /readyz, /metrics, /status\n"


@pytest.mark.parametrize("method", ["POST", "BREW"])
def test_another_method_is_405_and_one_line(served: Asked, method: str) -> None:
    assert served.ask("/status", method=method)[::2] == (405, "405 GET alone\n")


def connected(asked: Asked, begins: bytes = b"GET /healthz HTTP/1.0\r\n") -> socket.socket:
    """A connection to the socket, with the first bytes of a request."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_S)
    client.connect(str(asked.root / SOCKET))
    client.sendall(begins)
    return client


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"hello\r\n\r\n", b""),
        (b"GET /status HTTP/9.9\r\n\r\n", b""),
        (b"\xff\r\n\r\n", b""),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n", b"414"),
    ],
)
def test_what_is_no_request_gets_a_line_and_stops_nobody(
    served: Asked, line: bytes, said: bytes
) -> None:
    with connected(served, line) as client:
        answer = client.makefile("rb").readline()
    assert answer and said in answer
    assert b"Traceback" not in answer and b"<html" not in answer.lower()
    assert served.ask("/healthz")[0] == 200


def is_cut_off(client: socket.socket) -> bool:
    with client, contextlib.suppress(ConnectionError):
        return client.recv(1) == b""
    return True


def test_of_many_who_linger_the_oldest_is_cut_off(
    served: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(admin, "REQUEST_TIMEOUT_S", PATIENCE_S)  # none for its time
    slow = [connected(served) for _ in range(4)]
    assert is_cut_off(slow[0])
    assert served.ask("/healthz")[0] == 200
    assert is_cut_off(slow[1])
    slow[3].sendall(b"\r\n")
    assert slow[3].recv(12) == b"HTTP/1.0 200"
    for one in slow[2:]:
        one.close()


def test_who_asks_in_drops_has_no_more_time_than_others(served: Asked) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "REQUEST_TIMEOUT_S", 0.5)
        slow = connected(served)
        with contextlib.suppress(OSError):
            until(lambda: slow.sendall(b"X: y\r\n"))  # never true: an error ends it
        assert is_cut_off(slow)
    assert served.ask("/healthz")[0] == 200


def test_the_socket_is_the_owners_and_goes_with_the_relay(served: Asked) -> None:
    status = os.stat(served.root / SOCKET)
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    served.admin.end()
    assert not (served.root / SOCKET).exists()


def test_the_socket_of_a_killed_relay_is_replaced(asked: Asked) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(asked.root / SOCKET))
    asked.serve()
    asked.admin.begin("")
    assert asked.ask("/healthz")[0] == 200
    assert asked.log == []


def test_what_is_no_socket_is_left_alone_and_said(asked: Asked) -> None:
    (asked.root / SOCKET).write_text("mine")
    asked.admin.begin("")
    (line,) = asked.log
    assert line.endswith("exists and is not a socket")
    assert asked.status.admin_trouble in line
    asked.admin.end()
    assert (asked.root / SOCKET).read_text() == "mine"


def test_a_path_too_long_for_an_address_is_served_as_well(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 110)
    root.mkdir()
    long = Asked(root)
    long.serve()
    long.admin.begin("")
    assert long.ask("/healthz")[0] == 200
    long.admin.end()
    assert (long.log, list(root.iterdir())) == ([], [])


def test_where_descriptors_are_no_files_a_long_path_is_said_and_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_client, "DESCRIPTORS", str(tmp_path / "missing"))
    root = tmp_path / ("x" * 110)
    root.mkdir()
    long = Asked(root)
    long.admin.begin("")
    assert long.log == ["Health and metrics: no server on admin.sock: AF_UNIX path too long"]
    assert list(root.iterdir()) == []


@pytest.fixture
def port() -> Iterator[int]:
    """A port of every address of IPv4."""
    with reserved_port("0.0.0.0") as found:
        yield found


def test_on_loopback_when_configured(asked: Asked, port: int) -> None:
    asked.serve()
    asked.admin.begin(f"127.0.0.1:{port}")
    for host in ("", "localhost", f"localhost:{port}", "[::1]:9464"):
        assert asked.ask("/healthz", port=port, host=host)[0] == 200
    assert asked.ask("/healthz")[0] == 200
    asked.admin.end()
    with pytest.raises(ConnectionRefusedError):
        asked.ask("/healthz", port=port)


def test_on_the_newer_loopback_as_well(asked: Asked) -> None:
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(reserved_port("::1"))
        except OSError:
            pytest.skip("this machine has no IPv6")
        asked.serve()
        asked.admin.begin(f"[::1]:{port}")
        assert asked.ask("/healthz", address="::1", port=port)[2] == "healthy\n"


def test_by_any_name_on_the_socket_and_by_its_own_address_on_tcp(asked: Asked, port: int) -> None:
    asked.serve()
    asked.admin.begin(f"127.0.0.2:{port}")
    assert asked.ask("/healthz", host="evil.example")[0] == 200  # who may open it is the owner
    for host, code in (
        ("127.0.0.2", 200),
        (f"127.0.0.2:{port}", 200),
        ("LocalHost", 200),
        ("127.0.0.3", 403),
        ("evil.example", 403),
        ("[::2]", 403),
    ):
        status, _, said = asked.ask("/status", address="127.0.0.2", port=port, host=host)
        assert (status, host) == (code, host)
        if code == 403:
            assert said == "403 ask by one of localhost, 127.0.0.1, [::1], or admin.listen\n"
    with socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S) as bare:
        bare.sendall(b"GET /status HTTP/1.0\r\n\r\n")  # it names no host
        assert bare.recv(100).startswith(b"HTTP/1.0 403 ")


def test_a_port_that_is_taken_is_said_and_the_socket_answers(asked: Asked) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        asked.serve()
        asked.admin.begin(address)
    (line,) = asked.log
    assert f"no server on admin.listen {address}: " in line
    assert json.loads(asked.ask("/status")[2])["admin_trouble"] in line
