"""The process: where it listens, what it prints, how it ends; and the stream by itself."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from relay.web import stream
from tests.box import Box
from tests.integration.conftest import home, running
from tests.procs import PATIENCE_S, Relay, environment, relay
from tests.web.test_browser import Served, serving

__all__ = ["home", "running"]
pytestmark = pytest.mark.slow


def ask(served: Served, path: str, to: socket.socket | None = None, **headers: str) -> int:
    """The status of a page."""
    host = served.origin.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    if to is not None:
        connection.sock = to
    with contextlib.closing(connection):
        given = {"Authorization": f"Bearer {served.key}"} | headers
        connection.request("GET", path, headers=given)
        return connection.getresponse().status


def test_it_listens_on_this_machine_alone_and_ends_at_once(home: Path) -> None:
    with serving(home) as served:
        assert ask(served, "/search") == 200
        assert ask(served, "/search", Host="localhost:1") == 421
        address, port = served.origin.removeprefix("http://").split(":")
        listening = Path("/proc/net/tcp").read_text()
        assert address == "127.0.0.1" and f"0100007F:{int(port):04X} 00000000:0000 0A" in listening
        follower = http.client.HTTPConnection(address, int(port))
        follower.request("GET", "/events", headers={"Authorization": f"Bearer {served.key}"})
        assert follower.getresponse().readline() == b": here\n"
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_S) == 0  # though somebody follows
        follower.close()


def is_closed(connection: socket.socket) -> bool:
    """True when the other side has closed it; waits for that."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it had not read all
        return True


def test_connections_that_send_no_request_are_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = importlib.import_module("relay.web.__main__")
    with contextlib.closing(process.listen_on(0)) as listening, contextlib.ExitStack() as stack:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        server = process.make_server(str(home), host, "key")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        monkeypatch.setattr(process, "REQUEST_S", 0.1)
        for said in (b"", b"GET / HT"):
            silent = stack.enter_context(socket.create_connection(listening.getsockname()))
            with contextlib.suppress(ConnectionError):
                silent.sendall(said)
            assert is_closed(silent)
        monkeypatch.setattr(process, "REQUEST_S", PATIENCE_S)
        follower = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        stack.callback(follower.close)
        follower.request("GET", "/events", headers={"Authorization": "Bearer key"})
        assert follower.getresponse().readline() == b": here\n"
        (followed,) = server.server_state.connections
        followed.loop.call_soon_threadsafe(followed._check_request, followed.cycle)
        assert ask(Served(f"http://{host}", "key", None), "/search") == 200  # type: ignore[arg-type]
        follower.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):  # what is being answered goes on: it has no end
            while follower.sock.recv(100):
                pass


def test_each_process_has_a_key_of_its_own(home: Path) -> None:
    with serving(home) as first, serving(home) as second:
        assert len(first.key) >= 43 and first.key != second.key
        assert ask(second, "/search", Authorization=f"Bearer {first.key}") == 401


def test_a_port_that_is_taken_is_one_line(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = web("--home", str(home), "--port", str(port))
    assert done.returncode == 1 and done.stderr == f"relay: port {port}: Address already in use\n"


@contextlib.contextmanager
def at_socket(path: Path) -> Iterator[socket.socket]:
    """A connection to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        yield connected


def test_a_socket_is_for_this_user_alone_and_answers_to_the_browsers_port(home: Path) -> None:
    path = home.parent / "web.sock"
    with serving(home, "--uds", str(path), "--port", "8377") as served:
        assert served.origin == "http://127.0.0.1:8377"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with at_socket(path) as connected:
            assert ask(served, "/search", connected) == 200
        with at_socket(path) as connected:
            assert ask(served, "/search", connected, Host="127.0.0.1:8378") == 421
        done = web("--home", str(home), "--uds", str(path), "--port", "8377")
        assert "is served already" in done.stderr
    assert not path.exists()


def test_a_socket_that_a_killed_page_left_is_replaced(home: Path) -> None:
    path = home.parent / "web.sock"
    with serving(home, "--uds", str(path), "--port", "8377") as served:
        served.process.kill()
        served.process.wait()
    assert path.exists()
    with (
        serving(home, "--uds", str(path), "--port", "8377") as served,
        at_socket(path) as connected,
    ):
        assert ask(served, "/search", connected) == 200


def test_a_file_in_the_place_of_the_socket_stays(home: Path) -> None:
    path = home.parent / "web.sock"
    path.write_text("not a socket")
    done = web("--home", str(home), "--uds", str(path), "--port", "8377")
    assert done.returncode == 1 and path.read_text() == "not a socket"
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--uds", "x.sock"], "--uds needs --port"),
        (["--port", "80"], "80 is not in the range"),
        (["--port", "0"], "0 is not in the range"),
        (["--host", "0.0.0.0"], "no such option '--host'"),
        (["--uds", "/tmp/" + "x" * 200, "--port", "8377"], "name a shorter path"),
    ],
)
def test_what_cannot_be_served_is_one_line(home: Path, words: list[str], why: str) -> None:
    done = relay("web", *words, home=home)
    assert done.returncode != 0 and why in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def web(*words: str) -> subprocess.CompletedProcess[str]:
    """The process of the page, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "relay.web", *words],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


INTERRUPTED_START = """
import os, signal, sys
start = os.execv
def interrupted(*words):
    os.kill(os.getpid(), signal.SIGINT)
    start(*words)
os.execv = interrupted
from relay.cli import main
main()
"""


def test_interrupted_while_it_is_loaded_it_ends_at_once(home: Path) -> None:
    words = [sys.executable, "-c", INTERRUPTED_START, "--home", str(home), "web"]
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_needs_no_package_of_another_extra() -> None:
    without = "import sys; sys.modules |= dict.fromkeys(['pyarrow', 'pyspark', 'mcp', 'obstore']);"
    words = [sys.executable, "-c", f"{without} import relay.web.__main__"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- the stream ------------------------------------------------------------------------------


TIME = "event: time\ndata:\n\n"


async def first(events: AsyncIterator[str]) -> str:
    """The first event after the headers; what is still to come is given up."""
    assert await anext(events) == ": here\n\n"
    return await anext(events)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that looks often, and says soon that it is there."""
    monkeypatch.setattr(stream, "POLL_S", 0.01)
    monkeypatch.setattr(stream, "BEAT_S", 0.05)


async def test_a_stream_goes_on_where_the_page_was(box: Box, quick: None) -> None:
    served = SimpleNamespace(root=str(box.root), is_over=False)
    before = stream.position(box.home)
    assert await first(stream.events(served, before)) == TIME  # nothing has happened
    box.send("alice", "TO: bob\n\nwhile it slept")
    event = await first(stream.events(served, before))
    now = stream.position(box.home)
    assert event == f"event: changed\nid: {now}\ndata: {now}\n\n"
    assert await first(stream.events(served, now)) == TIME
    for unknown in ("", "9999999-ffffffff", "no position"):  # of another ledger, or none
        assert f"id: {now}" in await first(stream.events(served, unknown))


async def test_a_stream_ends_with_its_process(box: Box, quick: None) -> None:
    served = SimpleNamespace(root=str(box.root), is_over=False)
    events = stream.events(served, "")
    await first(events)
    served.is_over = True
    assert [one async for one in events] == []


@pytest.mark.damages
async def test_a_home_that_is_gone_ends_no_stream(box: Box, quick: None) -> None:
    served = SimpleNamespace(root=str(box.root), is_over=False)
    events = stream.events(served, stream.position(box.home))
    assert await anext(events) == ": here\n\n"
    os.rename(box.root, f"{box.root}-away")
    while (found := await anext(events)) == TIME:
        pass
    assert found == "event: changed\nid: gone\ndata: gone\n\n"
    os.rename(f"{box.root}-away", box.root)
    while (found := await anext(events)) == TIME:
        pass
    assert "gone" not in found


@pytest.mark.parametrize("event", ["message", "read", "ack", "refusal", "session", "agent"])
def test_whatever_a_page_shows_moves_the_position(box: Box, event: str) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    before = stream.position(box.home)
    assert stream.position(box.home) == before
    if event == "message":
        box.send("bob", "TO: carol\n\nhi")
    elif event == "read":
        box.take("bob", sent)
        box.tick()
    elif event == "ack":
        box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\nin_progress")
    elif event == "refusal":
        box.send("bob", "TO: nobody\n\nhi")
    elif event == "session":
        box.path("sessions", "claude-1.json").write_text("{}")
    else:
        box.send("bob", "TO: __orchestrator__\nKIND: status\n\nat lunch")
    box.flush()
    assert stream.position(box.home) != before


def test_a_relay_that_ends_moves_the_position(running: Relay) -> None:
    from relay.base.home import Home

    with Home(str(running.home)) as opened:
        before = stream.position(opened)
        running.kill()
        assert stream.position(opened) != before
