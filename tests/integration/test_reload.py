"""Signals, as a real process hears them: SIGHUP for another configuration, SIGTERM for the end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from relay.base.clock import Clock
from relay.base.config import decode
from relay.base.home import Home
from relay.daemon.process import open_session
from tests.procs import (
    PATIENCE_S,
    Relay,
    drop,
    environment,
    log_of,
    relay,
    reserved_port,
    rows_of,
    status_of,
    until,
)
from tests.terminals import terminal

pytestmark = pytest.mark.shows("ready 3.1")


def reload(running: Relay, config: str) -> None:
    (running.home / "config.json").write_text(config)
    assert running.process is not None
    running.process.send_signal(signal.SIGHUP)


def test_another_configuration_is_followed_without_a_new_process(
    running: Relay, home: Path
) -> None:
    pid = status_of(home)["pid"]
    drop(home, "alice", "TO: lead\n\nnobody is it", "1000000001-01.msg")
    until(lambda: list((home / "agents/alice/inbox").glob("*.msg")))
    reload(running, '{"lead": "bob", "log_level": "debug"}')
    until(lambda: log_of(home, "ready")[1:], "a second session")
    (said,) = log_of(home, "reload")
    assert "lead: '' -> 'bob'" in said["changed"]
    assert "log_level: 'info' -> 'debug'" in said["changed"]
    drop(home, "alice", "TO: lead\n\nnow there is one", "1000000002-02.msg")
    until((home / "agents/bob/inbox/1000000002-02.msg").exists)
    until(lambda: log_of(home, "deliver_message"))  # said once it is there
    (line,) = log_of(home, "deliver_message")  # a line a message at debug, and never what it says
    assert (line["message_id"], line["recipients"]) == ("1000000002-02", ["bob"])
    assert "now there is one" not in json.dumps(line)
    until(lambda: status_of(home).get("ready"))
    after = status_of(home)
    assert (after["pid"], after["starts"]) == (pid, 2)
    reload(running, (home / "config.json").read_text())
    until(lambda: log_of(home, "reload")[1:])
    assert log_of(home, "reload")[1]["event"] == "Read config.json again: nothing changed"
    assert status_of(home)["starts"] == 2


def test_one_that_is_no_good_leaves_the_one_before(running: Relay, home: Path) -> None:
    no_good = {
        "{": "config.json: line 1, column 2: expecting property name",
        '{"detection": {"settle_msec": 1}}': "setting detection.settle_msec does not exist",
        '{"admin": {"listen": "0.0.0.0:1"}}': "a loopback address",
        '{"store": {"key_file": "nowhere/key", "encrypt": true}}': "no session starts with it: ",
    }
    for number, (config, why) in enumerate(no_good.items()):
        reload(running, config)
        until(lambda why=why: why in (status_of(home).get("config_error") or ""), why)
        until(lambda: status_of(home).get("ready"))
        name = f"100000000{number}-01.msg"
        drop(home, "alice", "TO: bob\n\nhi", name)
        until((home / "agents/bob/inbox" / name).exists)
        said = relay("status", home=home)
        assert said.returncode == 0
        assert "config.json is invalid, still using the previous one: " in said.stdout
        assert why in said.stdout
        assert "Traceback" not in said.stdout + said.stderr
    reload(running, '{"store": {"checkpoint_ms": 50}}')
    until(lambda: status_of(home).get("ready") and not status_of(home)["config_error"])
    assert "still using the previous" not in relay("status", home=home).stdout


def test_what_a_session_held_goes_with_it(home: Path) -> None:
    sessions = []
    with Home(str(home)) as opened:
        config = decode(opened.read_config())
        try:
            for _ in range(3):
                with open_session(opened, config, Clock(), lambda *_, **__: None) as session:
                    sessions.append(weakref.ref(session))
                del session
        finally:
            gc.unfreeze()
    assert [one() is None for one in sessions[:2]] == [True, True]


def test_mail_that_comes_while_it_reloads_is_delivered_once(running: Relay, home: Path) -> None:
    for number in range(1, 61):
        drop(home, "alice", f"TO: bob\n\n{number}", f"1000000{number:03d}-0{number:02d}.msg")
        if number % 20 == 0:
            reload(running, json.dumps({"limits": {"batch_files": number}}))
    inbox = home / "agents" / "bob" / "inbox"
    until(lambda: len(list(inbox.glob("*.msg"))) == 60)
    until(lambda: log_of(home, "reload"))
    assert running.stop() == 0
    (trace,) = rows_of("trace", "1000000020-020", home=home)
    assert trace["deliveries"][0]["attempt"] == 1


def test_metrics_move_to_another_port(running: Relay, home: Path) -> None:
    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        except OSError:
            return False
        return True

    with reserved_port() as port:
        reload(running, json.dumps({"admin": {"listen": f"127.0.0.1:{port}"}}))
        until(answers)
        reload(running, "{}")
        until(lambda: not answers())
        until(lambda: "pid" in status_of(home))


ENDED = """
import os, sys
from relay.base import fsio
from relay.daemon.process import main

number = int(sys.argv.pop())

def end(operation, name):
    if operation == "rename" and name.endswith(".msg"):
        fsio.fault = lambda *_: None
        os.kill(os.getpid(), number)

fsio.fault = end
sys.exit(main())
"""


@pytest.mark.shows("ready 5.1")
def test_what_waits_in_the_outboxes_does_not_hold_up_the_end(home: Path) -> None:
    """It is told to end in a batch: it takes that one, and leaves the rest to the next start."""
    outbox, inbox = (home / "agents" / name for name in ("alice/outbox", "bob/inbox"))
    for count in range(1000):
        (outbox / f"10000{count:05d}-{count:05x}.msg").write_text("TO: bob\n\nhi")
    came = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        words = [sys.executable, "-c", ENDED, "--home", str(home), str(int(number))]
        done = subprocess.run(words, env=environment(), stderr=subprocess.DEVNULL)
        assert done.returncode == 0
        left, before, came = len(list(outbox.glob("*.msg"))), came, len(list(inbox.glob("*.msg")))
        assert left > 0 and came > before
        assert left + came == 1000  # and nothing is half done
        assert not list((inbox / ".pending").iterdir())


HANGS = """
import sys, threading
from relay.journal.tiers import Tiers
from relay.daemon.process import main

def step(self):
    print("begun", flush=True)
    threading.Event().wait()

Tiers.run_next = step
sys.exit(main())
"""


@contextlib.contextmanager
def started(home: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A relay from this code, in a step of the tiers; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--home", str(home)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"
        until(lambda: log_of(home, "ready"))
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()


@pytest.mark.shows("ready 5.1")
def test_an_upload_that_hangs_does_not_hold_up_the_end(home: Path) -> None:
    with started(home, HANGS) as process:
        drop(home, "alice", "TO: bob\n\nhi", "1000000001-01.msg")
        until((home / "agents/bob/inbox/1000000001-01.msg").exists)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert "Left a job of the journal's tiers unfinished" in log_of(home, "stopped")[-1]["event"]
    assert not (home / "admin.sock").exists()
    assert (home / ".lock").read_bytes() == b""
    assert relay("status", home=home).returncode == 5
    again = Relay(home)
    again.start()
    assert again.stop() == 0
    trace = rows_of("trace", "1000000001-01", home=home)[0]
    assert (trace["status"], trace["deliveries"][0]["attempt"]) == ("archived", 1)


@pytest.mark.home("alice", "bob", detection={"scan_interval_s": 1})
def test_an_upload_that_hangs_does_not_hold_up_the_next_session(home: Path) -> None:
    """The ledger is moved away: the session ends, another one begins, then the relay is stopped."""
    with started(home, HANGS) as process:
        (home / "ledger.db").rename(home / "elsewhere.db")
        drop(home, "alice", "TO: bob\n\nhi", "1000000001-01.msg")
        until((home / "agents/bob/inbox/1000000001-01.msg").exists)
        until(lambda: len(log_of(home, "ready")) == 2)
        assert "begun by an earlier session, hangs" in relay("status", home=home).stdout
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_an_upload_that_takes_long_does_not_stop_service_for_a_reload(home: Path) -> None:
    """Each step of the tiers lasts until somebody writes to ``ends``; a reload waits for that."""
    ends = home.parent / "ends"
    code = HANGS.replace("threading.Event().wait()", f"return open({str(ends)!r}).read()")
    os.mkfifo(ends)
    before = (home / "config.json").read_text()
    with started(home, code) as process:
        until(lambda: status_of(home).get("ready"))

        def reload_it(config: str, times: int) -> None:
            (home / "config.json").write_text(config)
            process.send_signal(signal.SIGHUP)
            until(lambda: len(log_of(home, "reload")) == times)

        reload_it('{"lead": "bob"}', 1)
        drop(home, "alice", "TO: bob\n\nhi", "1000000001-01.msg")
        until((home / "agents/bob/inbox/1000000001-01.msg").exists)
        reload_it(before, 2)  # it is taken back
        ends.write_text("done\n")
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"  # the next step, in the same session
        assert status_of(home)["starts"] == 1
        reload_it('{"lead": "bob"}', 3)
        assert status_of(home)["starts"] == 1
        ends.write_text("done\n")  # then it begins with the new one
        until(lambda: status_of(home).get("starts") == 2)


def test_a_relay_at_a_terminal_goes_with_it(home: Path) -> None:
    view = terminal(home, "up", "--foreground")
    view.expect("ready: ")
    view.kill(signal.SIGHUP)
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0
    assert not (home / "admin.sock").exists()


def test_tracebacks_of_long_ago_are_bounded(home: Path) -> None:
    crashes = home / "logs" / "relay.err"
    crashes.write_bytes(b"x" * ((1 << 20) + 1))
    assert relay("up", home=home).returncode == 0
    assert relay("down", home=home).returncode == 0
    assert crashes.read_bytes() == b""
    assert crashes.with_suffix(".err.1").stat().st_size == (1 << 20) + 1


@pytest.mark.shows("ready 5.1")
def test_systemd_is_notified_of_every_turn(home: Path) -> None:
    where = str(home.parent / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as system:
        system.bind(where)
        system.settimeout(PATIENCE_S)

        def hear(word: str) -> str:
            while word not in (said := system.recv(4096).decode()):
                pass
            return said

        process = subprocess.Popen(
            [sys.executable, "-m", "relay.daemon", "--home", str(home)],
            env=environment(NOTIFY_SOCKET=where, WATCHDOG_USEC="200000"),
            stderr=subprocess.PIPE,
        )
        try:
            assert "STATUS=serving" in hear("READY=1")
            hear("WATCHDOG=1")
            (home / "config.json").write_text('{"lead": "bob"}')
            process.send_signal(signal.SIGHUP)
            assert "MONOTONIC_USEC=" in hear("RELOADING=1")
            hear("READY=1")
            process.terminate()
            hear("STOPPING=1")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait(PATIENCE_S)
            assert process.stderr is not None
            said = process.stderr.read()
            process.stderr.close()
        assert said == b"ready\n"
