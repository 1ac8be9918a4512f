"""A relay that hangs or is stopped does not answer; one that has no socket is another thing.

A real relay, stopped with SIGSTOP and let go on with SIGCONT; a home whose path is too long for a
socket; a relay that was killed, and what is said of it until the next one starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess

from relay.base.clock import NS_PER_S
from relay.base.home import Home
from relay.base.status_client import SOCKET, ask
from tests.procs import Relay, relay, rows_of, until


def at_once(home: Path, *commands: str) -> list[CompletedProcess[str]]:
    """Run commands side by side: each waits 3 s for the answer."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda words: relay(*words.split(), home=home), commands))


def test_a_relay_that_is_stopped_does_not_answer(stopped: int, home: Path) -> None:
    done, facts, top = at_once(home, "status", "status --json", "top")
    assert done.returncode == 5
    first = done.stdout.splitlines()[0]
    assert first == (
        f"the relay, pid {stopped}, does not answer within 3 s: it is stopped; "
        f"`kill -CONT {stopped}` lets it continue"
    )
    assert "deliveries continue" not in done.stdout
    assert facts.returncode == 5
    assert json.loads(facts.stdout)["answers"] is False
    assert f"the relay, pid {stopped}, does not answer within 3 s: it is stopped" in top.stdout
    assert "relay up" not in top.stdout


def test_up_and_down_say_that_the_one_there_is_stopped(stopped: int, home: Path) -> None:
    up, down = at_once(home, "up", "down")  # it does not wait for what cannot happen
    assert up.returncode == 5
    assert up.stderr.count("\n") == 1
    assert f"its pid is {stopped}, and does not answer within 3 s: it is stopped" in up.stderr
    assert f"`kill -CONT {stopped}` lets it continue" in up.stderr
    assert down.returncode == 1
    assert "suspended by a signal" in down.stderr and f"kill -CONT {stopped}" in down.stderr


def test_who_accepts_nobody_does_not_answer_either(running: Relay, home: Path) -> None:
    """Its queue of connections is full: to connect is refused at once, and says nothing."""
    os.kill(running.pid, signal.SIGSTOP)
    waiting = []
    with Home(str(home)) as opened:
        while True:
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            waiting.append(client)
            try:
                client.connect(opened.path(SOCKET))
            except BlockingIOError:
                break
        assert ask(opened, 0.2).is_silent
        os.kill(running.pid, signal.SIGCONT)
        for client in waiting:
            client.close()
        until(lambda: ask(opened).status)


def test_no_socket_is_not_the_same_as_no_answer(running: Relay, home: Path) -> None:
    (home / "admin.sock").unlink()
    done = relay("status", home=home)
    assert done.returncode == 0
    assert "no health endpoint (see logs/relay.log)" in done.stdout
    assert "does not answer" not in done.stdout
    assert rows_of("status", home=home)[0]["answers"] is None
    assert "no health endpoint" in relay("top", home=home).stdout


# -- a home whose path is too long for a socket -----------------------------------------------


def test_a_home_with_a_long_path_answers_as_any_other(long_home: Path) -> None:
    path = long_home / SOCKET
    running = Relay(long_home)
    running.start()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    done = relay("status", home=long_home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ready, seen" in done.stdout
    assert rows_of("status", home=long_home)[0]["socket"] == str(path)
    assert "relay ready" in relay("top", home=long_home).stdout
    assert relay("doctor", home=long_home).returncode == 0

    running.kill()
    assert f"{SOCKET}: left over; no relay is running" in relay("doctor", home=long_home).stdout
    with running:
        assert "ready, seen" in relay("status", home=long_home).stdout
    assert not path.exists()


# -- one that did not stop by itself ----------------------------------------------------------


def test_after_a_kill_it_is_said_who_did_not_stop_by_itself(running: Relay, home: Path) -> None:
    pid = running.pid
    before = time.time_ns()
    running.kill()
    done = relay("status", home=home)
    assert done.returncode == 5
    first = done.stdout.splitlines()[0]
    ended = f"pid {pid}, did not stop by itself; its last sign of life"
    said = f"no relay is running: the last one, {ended}"
    assert first.startswith(said) and first.endswith(f"; start one with `relay --home {home} up`")
    assert re.search(r"was at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; start one", first)  # local time
    left = rows_of("status", home=home, exit_code=5)[0]["left"]
    assert left["pid"] == pid
    at_ns = datetime.fromisoformat(left["last_sign_at"]).timestamp() * NS_PER_S
    assert before - 60 * NS_PER_S < at_ns < time.time_ns()
    assert said in relay("top", home=home).stdout

    running.start()
    assert running.stop() == 0
    done = relay("status", home=home)
    assert done.stdout.startswith(f"no relay is running; start one with `relay --home {home} up`\n")
    assert rows_of("status", home=home, exit_code=5)[0]["left"] is None


def test_a_start_that_failed_and_said_why_leaves_no_such_word(home: Path) -> None:
    (home / "ledger.db").write_bytes(b"this is no database, whatever it is called" * 100)
    assert relay("up", home=home).returncode != 0
    assert (home / ".lock").read_bytes() == b""


def test_words_of_the_lock_that_are_none_say_nothing(home: Path) -> None:
    (home / ".lock").write_bytes(b"\x1b]0;owned\x07\n")
    done = relay("status", home=home)
    assert done.stdout.startswith(f"no relay is running; start one with `relay --home {home} up`\n")
