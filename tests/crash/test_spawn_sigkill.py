"""SIGKILL of a real relay at many instants of spawns: one process a name, one answer each."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from agent_sdk import Agent
from relay.base.home import Home, lock_holder
from tests.procs import Relay, home_of, until

ROUNDS = 8
STEP_S = 0.004  # a spawn takes some ten milliseconds: the kills fall on all of it


def leaders(home: Path) -> dict[str, list[int]]:
    """Agent -> the pids of session leaders that were started for it and live."""
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get("AGENT_RELAY_DIR") != str(home) or "AGENT_RELAY_SPAWN" not in environ:
                continue
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and os.getsid(process.pid) == process.pid:
                found.setdefault(environ["AGENT_RELAY_NAME"], []).append(process.pid)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


@pytest.mark.timeout(120)
def test_killed_at_many_instants_each_is_started_once(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    relay = Relay(home)
    answers: dict[str, list[str]] = {}
    try:
        with Agent("operator", home) as me:
            sent = {}
            for number in range(ROUNDS):
                # a child between fork and exec may hold the killed relay's lock for an instant
                with Home(str(home)) as opened:
                    until(lambda opened=opened: lock_holder(opened) is None)
                relay.start()
                name = f"w{number}"
                sent[me.spawn(name, "sh", "sleep 1000", cwd=tmp_path)] = name
                time.sleep(number * STEP_S)  # where the kill falls; no verdict hangs on it
                relay.kill()
            relay.start()

            def all_said() -> bool:
                while (message := me.receive(0)) is not None:
                    answers.setdefault(sent[str(message.re)], []).append(message.body)
                return len(answers) == ROUNDS

            until(all_said)
            running = leaders(home)
            assert {name: len(pids) for name, pids in running.items()} == dict.fromkeys(
                sent.values(), 1
            )
            for name, pids in running.items():
                assert answers[name] == [f"completed started {name}, pid {pids[0]}\n"]
    finally:
        if relay.process is not None:
            relay.stop()
        for pids in leaders(home).values():
            for pid in pids:
                os.killpg(pid, 9)
