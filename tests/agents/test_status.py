"""An agent's status from what is known of it; and which process has a pid now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from relay.agents.status import (
    AgentFacts,
    AgentStatus,
    StatusChange,
    next_status,
    parse_status_command,
)
from relay.base import process_info
from relay.base.clock import NS_PER_S
from relay.base.config import AgentSettings
from tests.procs import until

NOW = 1_769_851_800 * NS_PER_S
RULES = AgentSettings(inactive_after_s=1000, dead_after_s=100)
BOB = AgentFacts("bob", AgentStatus.ACTIVE, 0, NOW)


def age_at(now_ns: int) -> Callable[[int], int]:
    """The age of a time, of a relay that never stopped."""
    return lambda since_ns: now_ns - since_ns


def after(facts: AgentFacts, seconds: int) -> str | None:
    """The status that the rules give that much later; None: as it is."""
    change = next_status(facts, age_at(NOW + seconds * NS_PER_S), RULES)
    return str(change.status) if change else None


def test_who_is_silent_for_long_enough_is_inactive() -> None:
    assert after(BOB, 999) is None
    assert next_status(BOB, age_at(NOW + 1000 * NS_PER_S), RULES) == StatusChange(
        "bob", AgentStatus.INACTIVE, "silent since 2026-01-31T09:30:00Z"
    )
    assert after(BOB._replace(status=AgentStatus.INACTIVE), 5000) is None
    assert after(BOB._replace(name="operator"), 10**9) is None


def test_a_live_process_may_be_silent_for_ever() -> None:
    assert after(BOB._replace(pid=7, runs=True), 10**6) is None
    assert after(BOB._replace(status=AgentStatus.INACTIVE, pid=7, runs=True), 10**6) == "active"


def test_who_was_made_active_has_its_whole_time() -> None:
    assert after(BOB._replace(changed_at=NOW + 500 * NS_PER_S), 1400) is None
    assert after(BOB._replace(changed_at=NOW + 500 * NS_PER_S), 1500) == "inactive"


@pytest.mark.parametrize("status", [AgentStatus.ACTIVE, AgentStatus.INACTIVE])
def test_whose_process_ended_is_terminated_once_nothing_was_heard_for_a_while(
    status: AgentStatus,
) -> None:
    dead = BOB._replace(status=status, pid=7, seen_pid=7)
    assert after(dead, 99) is None
    assert next_status(dead, age_at(NOW + 100 * NS_PER_S), RULES) == StatusChange(
        "bob", AgentStatus.TERMINATED, "its process 7 ended; no activity since 2026-01-31T09:30:00Z"
    )


def test_the_time_counts_from_the_last_word_and_from_when_the_end_was_seen() -> None:
    dead = BOB._replace(pid=7, seen_pid=7)
    assert after(dead._replace(seen_at=NOW + 50 * NS_PER_S), 149) is None
    assert after(dead._replace(seen_at=NOW + 50 * NS_PER_S), 150) == "terminated"
    assert after(dead._replace(ended_at=NOW + 60 * NS_PER_S), 159) is None
    assert after(dead._replace(ended_at=NOW + 60 * NS_PER_S), 160) == "terminated"


def test_an_end_that_the_agent_outlived_is_not_held_against_it_again() -> None:
    back = BOB._replace(pid=7, seen_pid=None, started_at=NOW - 9, changed_at=NOW)
    assert after(back, 900) is None
    again = back._replace(started_at=NOW + 1)  # another process, that was never seen to run
    assert after(again, 900) == "terminated"


def test_who_is_away_comes_back_with_a_process_of_its_own() -> None:
    ended = BOB._replace(status=AgentStatus.TERMINATED, changed_at=NOW, pid=7)
    assert after(ended, 10**6) is None
    assert after(ended._replace(runs=True), 1) == "active"
    retired = ended._replace(status=AgentStatus.RETIRED, runs=True, started_at=NOW)
    assert after(retired, 1) is None  # it ran when it was retired
    assert after(retired._replace(started_at=NOW + 1), 1) == "active"


def test_what_a_command_asks_for() -> None:
    fields = {"NAME": "bob", "REASON": "x" * 300}
    assert parse_status_command("agent.retire", fields, "operator") == ("bob", "retired", "x" * 200)
    assert parse_status_command("agent.retire", {"NAME": "bob"}, "al") == (
        "bob",
        "retired",
        "al retired it",
    )
    assert parse_status_command("agent.revive", {"NAME": "bob"}, "al") == ("bob", "active", None)
    assert parse_status_command("channel.join", {"CHANNEL": "x"}, "al") is None


# -- processes -------------------------------------------------------------------------------


def ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def test_a_process_runs_until_it_has_ended() -> None:
    assert process_info.runs(os.getpid(), ticks(os.getpid()))
    assert process_info.runs(os.getpid(), None)
    assert not process_info.runs(os.getpid(), ticks(os.getpid()) + 1)  # its number, another process
    assert not process_info.runs(2**31 - 1, None)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = ticks(child.pid)
    assert process_info.runs(child.pid, started)
    child.send_signal(signal.SIGKILL)
    until(lambda: not process_info.runs(child.pid, started), "a zombie has ended")
    assert os.path.exists(f"/proc/{child.pid}")
    child.communicate()
    assert not process_info.runs(child.pid, started)


def test_without_proc_the_pid_alone_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_info, "PROC", "/nowhere")
    assert process_info.runs(os.getpid(), None)
    assert not process_info.runs(2**31 - 1, None)
