"""What systemd is told, through a socket as it has one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.sd_notify import SystemdNotifier, Watchdog
from tests.procs import until


@pytest.fixture
def system(tmp_path: Path) -> Iterator[socket.socket]:
    """Systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(60)
        yield receiver


def environ(system: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": system.getsockname(), "PATH": "/bin", **more}


def test_every_line_of_one_word_comes_at_once(system: socket.socket) -> None:
    notifier = SystemdNotifier(environ(system))
    notifier.say("READY=1", "STATUS=serving /home")
    assert system.recv(4096) == b"READY=1\nSTATUS=serving /home"
    notifier.reloading(5_000_001_999)
    assert system.recv(4096) == b"RELOADING=1\nMONOTONIC_USEC=5000001"


def test_no_child_inherits_the_right_to_speak(system: socket.socket) -> None:
    variables = environ(system, WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()))
    SystemdNotifier(variables)
    assert variables == {"PATH": "/bin"}


@pytest.mark.skipif(not os.path.exists("/proc/net/unix"), reason="abstract sockets are Linux's")
def test_an_abstract_socket_is_one_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0agent-relay-test-{os.getpid()}")
        receiver.settimeout(60)
        SystemdNotifier({"NOTIFY_SOCKET": f"@agent-relay-test-{os.getpid()}"}).say("READY=1")
        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/nobody/there", "vsock:2:1"])
def test_without_somebody_to_tell_nothing_happens(address: str) -> None:
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "soon"})
    notifier.say("READY=1")
    assert notifier.watchdog_s == 0


@pytest.mark.parametrize(
    ("pid", "seconds"),
    [("", 0.04), (str(os.getpid()), 0.04), ("1", 0), ("x", 0)],
    ids=["none", "ours", "another", "invalid"],
)
def test_anothers_watchdog_is_not_ours(system: socket.socket, pid: str, seconds: float) -> None:
    variables = environ(system, WATCHDOG_USEC="40000", WATCHDOG_PID=pid)
    assert SystemdNotifier(variables).watchdog_s == seconds


def test_the_watchdog_speaks_while_the_loop_goes_on(system: socket.socket) -> None:
    asked: list[bool] = []

    def is_healthy() -> bool:
        asked.append(len(asked) < 3)
        return asked[-1]

    watchdog = Watchdog(SystemdNotifier(environ(system, WATCHDOG_USEC="10000")), is_healthy)
    watchdog.begin()
    for _ in range(3):
        assert system.recv(4096) == b"WATCHDOG=1"
    until(lambda: len(asked) > 5, "it goes on asking")
    watchdog.end()
    system.settimeout(0)
    with pytest.raises(BlockingIOError):
        system.recv(4096)
