"""What the system refuses for a while: the relay says so in a line, and serves on."""

from __future__ import annotations

import os
from pathlib import Path

from tests.faults.test_failed_looks import NAMES, drop, inbox
from tests.faults.tracing import Tracing
from tests.procs import Relay, log_of, status_of, until


def listening(home: Path) -> str:
    """The socket of admin.sock as a descriptor's name has it."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split(maxsplit=7)
        if fields[-1] == f"{home}/admin.sock" and fields[3] == "00010000":  # it accepts connections
            return f"socket:[{fields[6]}]"
    raise AssertionError("nobody listens there")


def test_the_admin_thread_outlives_an_error_of_its_selector(relay: Relay, tmp_path: Path) -> None:
    home = relay.home
    relay.start()
    assert relay.process is not None and status_of(home)
    refusing = Tracing(tmp_path, [listening(home)], "poll:error=ENOMEM:when=1..3")
    with refusing.attached(relay.pid):
        until(lambda: refusing.text().count("(INJECTED)") == 3, "three errors")
        until(lambda: status_of(home), "an answer")
    (said,) = log_of(home, "admin")
    assert "error on admin.sock, still serving" in said["event"]
    assert "Cannot allocate memory" in said["event"] and "exception" not in said
    assert relay.stop() == 0  # the thread ends, too


def test_a_foreseen_fault_is_a_line_and_says_what_to_do(relay: Relay, tmp_path: Path) -> None:
    home = relay.home
    relay.start()
    without_threads = Tracing(tmp_path, [], "clone3:error=EAGAIN", "clone:error=EAGAIN")
    with without_threads.attached(relay.pid):
        os.rename(home / "store", home / "elsewhere")
        drop(home, "bob", NAMES[0])
        until(lambda: log_of(home, "begin_again"), "the first")
        os.rename(home / "elsewhere", home / "store")
        until(lambda: log_of(home, "begin_again")[-1]["error"] == "RuntimeError", "no thread")
    until(lambda: inbox(home, "alice") == NAMES[:1], "the message")
    first, *_, last = log_of(home, "begin_again")
    assert first["error"] == "UnsafePath" and "put the directory back" in first["event"]
    assert "can't start new thread; raise the limit of processes" in last["event"]
    assert not [line for line in log_of(home, "begin_again") if "exception" in line]
    relay.stop()
