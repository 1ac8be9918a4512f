"""The table "A process the relay started", row by row, with a clock that stands still."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from relay.agents.spawner import Usage
from tests.process_support import QUICK, ProcessBox

pytestmark = [pytest.mark.box("alice", kind=ProcessBox), pytest.mark.shows("ready 5.3")]


# -- started -------------------------------------------------------------------------------


def test_a_process_is_started_and_the_asker_gets_its_pid(box: ProcessBox) -> None:
    sent = box.spawn("w", "ENV: A=hunter2")

    assert box.said(about=sent) == [f"ack completed started w, pid {box.running.pid.number}"]
    spec = box.running.spec
    assert (spec.argv, spec.env, spec.cwd) == (("sh", "-c", "go"), {"A": "hunter2"}, str(box.cwd))
    row = box.process()
    assert (row.state, row.pid, row.pid_start) == ("starting", *box.running.pid)
    assert (row.cli, row.restart, row.requested_by, row.request_id) == (
        "sh",
        "never",
        "operator",
        sent,
    )
    assert box.row(sent)["status"] == "archived"
    box.tick(2)
    assert box.sql("SELECT status FROM agents WHERE name = 'w'") == [("active",)]


def test_what_the_system_refuses_is_said_and_its_mail_bounces(box: ProcessBox) -> None:
    """It is no recipient of a broadcast; an agent that did something before keeps its mail."""
    box.spawner.refuses = "there is no program sh"
    sent = box.spawn()
    assert box.said(about=sent) == ["nack there is no program sh"]
    assert (box.process().state, box.process().last_error) == ("failed", "there is no program sh")
    assert box.specs() == []
    box.tick(2)
    status = "SELECT status, reason FROM agents WHERE name = 'w'"
    why = "it could not be started: there is no program sh"
    assert box.sql(status) == [("terminated", why)]
    sent = box.send("alice", "TO: w\n\nhi")
    (nack,) = box.said("alice", sent)
    assert f": {why}; start it again" in nack
    box.send("alice", "TO: *\n\nall")
    assert box.inbox("w") == {}

    box.spawner.refuses = ""
    box.spawn()
    box.tick(2)
    assert (box.process().state, box.sql(status)) == ("starting", [("active", None)])

    box.spawner.refuses = "there is no program sh"
    box.send("alice", "TO: operator\n\nalive")
    box.spawn("alice")
    assert box.sql("SELECT status FROM agents WHERE name = 'alice'") == [("active",)]


def test_a_directory_that_went_meanwhile_is_said(box: ProcessBox) -> None:
    (box.cwd / "gone").mkdir()
    box.drop("operator", f"KIND: spawn\nNAME: w\nCLI: sh\nCWD: {box.cwd}/gone\n\ngo")
    box.dispatcher.tick(box.watcher.wait(0))  # decided and accepted, not yet begun
    (box.cwd / "gone").rmdir()
    box.tick(2)

    assert box.said() == [f"nack WORKING_DIR {box.cwd}/gone: there is no such directory"]


def test_never_two_of_one_name(box: ProcessBox) -> None:
    first = box.spawn()
    pid = box.running.pid.number
    second = box.spawn("w", "ENV: A=hunter2")
    for _ in range(2):  # and in one batch
        box.drop("operator", f"KIND: spawn\nNAME: v\nCLI: sh\nCWD: {box.cwd}\n\ngo")
    box.tick(3)

    refusal = f"nack w is already running, pid {pid}: `relay release w` first"
    assert box.said(about=second) == [refusal]
    assert [p.spec.name for p in box.spawner.running()] == ["w", "v"]
    assert box.process().request_id == first
    assert sorted(box.specs()) == ["v", "w"]


def test_many_at_once_are_started_a_few_a_turn(box: ProcessBox) -> None:
    for number in range(10):
        text = f"KIND: spawn\nNAME: w{number}\nCLI: sh\nCWD: {box.cwd}\n\ngo"
        box.drop("operator", text)
    box.tick()
    assert len(box.spawner.running()) == 4
    assert box.supervisor.due_ns() == 0
    box.tick(3)
    assert len(box.spawner.running()) == 10
    assert [text.split(",")[0] for text in box.said()] == [
        f"ack completed started w{number}" for number in range(10)
    ]


def test_who_asked_may_be_gone_when_it_ends(box: ProcessBox) -> None:
    box.path("agents", "alice", "meta.json").write_text('{"role": "lead"}')
    box.spawn(asker="alice")
    shutil.rmtree(box.path("agents", "alice"))
    box.tick()
    box.spawner.end(2)
    box.after(1)
    assert (box.process().state, box.process().exit_code) == ("exited", 2)


def test_who_is_that_agent_already_is_not_doubled(box: ProcessBox) -> None:
    from agent_sdk import Agent

    with Agent("w", box.root):  # this very process says to be w
        sent = box.spawn()
    assert box.said(about=sent)[0].startswith("nack w is already running, pid ")
    assert box.spawner.processes == []


def test_an_unknown_holder_of_the_lock_is_not_doubled(box: ProcessBox) -> None:
    from relay.agents import run_files

    with box.home.dirs() as dirs:
        lock_fd = run_files.take_lock(dirs, "w")
        assert lock_fd is not None
        sent = box.spawn()

        os.close(lock_fd)
    assert box.said(about=sent)[0].startswith("nack an unknown process holds run/w.lock")
    assert box.spawner.processes == []


# -- seen at work --------------------------------------------------------------------------


def test_ready_working_and_idle_follow_the_evidence(box: ProcessBox) -> None:
    box.spawn()
    box.after(6)
    assert box.process().state == "starting"  # nothing was heard of it

    box.send("w", "TO: operator\n\nhello")
    box.after(6)
    assert box.process().state == "ready"
    box.after(61)
    assert (box.process().state, box.process().idle_s) == ("idle", 67)

    sent = box.send("operator", "TO: w\n\nwork")
    box.after(6)
    assert box.process().state == "working"  # it owes a read
    box.take("w", sent)
    box.after(6)
    assert box.process().state == "working"  # it has just read
    box.after(61)
    assert box.process().state == "idle"

    box.running.usage = Usage(3.0, 7 << 20)
    box.after(6)
    row = box.process()
    assert (row.state, row.cpu_percent, row.rss_bytes, row.idle_s) == ("working", 50.0, 7 << 20, 0)


@pytest.mark.parametrize("owes", ["read", "ack"])
def test_stuck_is_said_once_and_ends_with_what_was_owed(box: ProcessBox, owes: str) -> None:
    request = box.spawn()
    box.send("w", "TO: operator\n\nhello")
    kind = "KIND: command\nAWAIT: 2h\n" if owes == "ack" else ""
    sent = box.send("operator", f"TO: w\n{kind}\nwork")
    if owes == "ack":
        box.take("w", sent)
    box.after(890)
    assert box.process().state != "stuck"
    box.after(15)
    assert box.process().state == "stuck"
    box.after(100)
    stuck = [text for text in box.said(about=request) if "stuck" in text]
    assert len(stuck) == 1
    assert stuck[0].startswith("notification w is stuck: it owes a read or an answer for 90")

    if owes == "ack":
        box.send("w", f"TO: operator\nKIND: ack\nRE: {sent}\n\ncompleted")
    else:
        box.take("w", sent)
    box.after(6)
    assert box.process().state == "working"


def test_what_was_owed_before_its_start_counts_from_its_start(box: ProcessBox) -> None:
    box.home.make_agent("w")
    box.tick()
    box.after(31, turns=1)
    box.send("operator", "TO: w\n\nold mail")
    box.after(2000)
    box.spawn()
    box.after(6)
    assert box.process().state == "starting"
    box.after(900)
    assert box.process().state == "stuck"


@pytest.mark.box(kind=ProcessBox, settings=msgspec.structs.replace(QUICK, output_mib=1))
def test_a_log_that_is_too_long_is_rotated_and_bounded(box: ProcessBox) -> None:
    box.spawn()

    for number in range(4):
        os.write(box.running.output, f"{number}".encode() * (1 << 20) + b"\n")
        box.after(6)
        assert sum(p.stat().st_size for p in box.path("logs").glob("w.log.1")) == (1 << 20) + 1
    os.write(box.running.output, b"after\n")
    logs = box.path("logs")
    assert sorted(p.name for p in logs.iterdir()) == ["w.log", "w.log.1", "w.log.2"]
    assert (logs / "w.log").read_text() == "after\n"
    assert [(logs / f"w.log.{n}").read_text()[0] for n in (1, 2)] == ["3", "2"]
    box.spawner.end(0)
    box.after(1)
    assert box.bodies("operator")[-1] == "w exited with code 0\nafter\n"


# -- ended ---------------------------------------------------------------------------------


def test_an_end_is_said_with_its_code_and_last_lines(box: ProcessBox) -> None:
    request = box.spawn("w", "ENV: KEY=hunter2")
    lines = [f"line {n}" for n in range(20)]
    box.spawner.end(3, *lines, "the key is hunter2", "\x1b[31mred" + "x" * 999)
    box.after(0)

    text = box.bodies("operator")[-1]
    said = text.splitlines()
    assert said[0] == "w exited with code 3"
    assert said[1:8] == [*lines[14:], "the key is ***"]
    assert said[8].startswith(" [31mredxxx") and len(said[8]) == 240
    row = box.process()
    assert (row.state, row.pid, row.exit_code, row.request_id) == ("exited", None, 3, request)
    assert box.specs() == []  # nobody needs its secrets
    assert box.sql("SELECT status, reason FROM agents WHERE name = 'w'") == [
        ("terminated", "w exited with code 3")
    ]


def test_the_end_of_a_line_that_never_ended_is_told_without_half_a_secret(box: ProcessBox) -> None:
    box.spawn("w", "ENV: KEY=hunter2")
    os.write(box.running.output, b"x" * 999 + b"hunter2" + b"y" * ((64 << 10) - 4))
    box.spawner.end(1, "", "\x00\x07")
    box.after(0)
    said = box.bodies("operator")[-1].splitlines()
    assert said == ["w exited with code 1", "y" * 240]


@pytest.mark.parametrize(
    ("policy", "code", "state"),
    [
        ("never", 1, "exited"),
        ("on-failure", 0, "exited"),
        ("on-failure", -9, "starting"),
        ("always", 0, "starting"),
    ],
)
def test_the_policy_says_whether_it_is_started_again(
    box: ProcessBox, policy: str, code: int, state: str
) -> None:
    box.spawn("w", f"RESTART: {policy}")
    box.spawner.end(code)
    box.after(0)
    assert box.process().state == state
    box.after(2)
    assert len(box.spawner.running()) == (state == "starting")
    assert len(box.spawner.processes) == 1 + (state == "starting")


def test_backoff_doubles_and_too_many_restarts_are_given_up(box: ProcessBox) -> None:
    request = box.spawn("w", "RESTART: always")
    for pause_s in (1, 2, 4):
        box.after(1)
        box.spawner.end(1)
        box.after(0)
        box.after(pause_s - 0.1)
        assert box.spawner.running() == []
        box.after(0.2)
        assert box.process().pid == box.running.pid.number
    box.spawner.end(1)
    box.after(0)
    box.after(1000)

    assert box.spawner.running() == []
    pids = [p.pid.number for p in box.spawner.processes]
    assert box.said(about=request) == [
        f"ack completed started w, pid {pids[0]}",
        "notification w exited with code 1; it will be restarted in 1 s",
        f"notification w was restarted, pid {pids[1]}",
        "notification w exited with code 1; it will be restarted in 2 s",
        f"notification w was restarted, pid {pids[2]}",
        "notification w exited with code 1; it will be restarted in 4 s",
        f"notification w was restarted, pid {pids[3]}",
        "notification w exited with code 1",
        "notification w is given up: it was restarted 3 times in 100 s",
    ]
    row = box.process()
    assert (row.state, row.restarts, row.exit_code) == ("failed", 3, 1)
    assert row.last_error == "given up after 3 restarts: w exited with code 1"
    assert (row.rss_bytes, row.idle_s) == (None, None)
    assert box.specs() == []


def test_restarts_long_ago_do_not_count(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    for _ in range(6):
        box.after(100)
        box.spawner.end(1)
        box.after(0)
        box.after(1.1)
    assert (box.process().state, box.process().restarts) == ("starting", 6)
    assert len(box.spawner.running()) == 1


def test_what_cannot_be_started_again_is_given_up(box: ProcessBox) -> None:
    request = box.spawn("w", "RESTART: always")
    box.spawner.end(1)
    box.after(0)
    box.spawner.refuses = "there is no program sh"
    box.after(2)
    assert box.said(about=request)[-1] == (
        "notification w is given up: it cannot be restarted: there is no program sh"
    )
    assert box.process().state == "failed"


def test_what_left_its_session_and_holds_its_name_is_said_and_given_up(box: ProcessBox) -> None:
    request = box.spawn("w", "RESTART: always")
    daemon = os.dup(box.running.lock_fd)  # of a child that made a session of its own
    box.spawner.lets_go = True
    os.close(box.running.lock_fd)
    box.running.lock_fd = -1
    box.spawner.end(0)
    box.after(1)
    for _ in range(10):
        box.after(1)
    held = "an unknown process holds run/w.lock: find it with `fuser` or"
    assert box.said(about=request)[-1].startswith(
        f"notification w is given up: it cannot be restarted: {held}"
    )
    assert (box.process().state, box.process().restarts) == ("failed", 0)
    os.close(daemon)
    box.spawn()
    assert box.process().state == "starting"


def test_a_release_says_what_it_does_not_reach(box: ProcessBox) -> None:
    box.spawn()
    daemon = os.dup(box.running.lock_fd)
    os.close(box.running.lock_fd)
    box.running.lock_fd = -1
    sent = box.release()
    (answer,) = box.said(about=sent)
    assert answer.startswith(
        "ack completed released w: it was ended by SIGTERM; an unknown process holds"
    )
    os.close(daemon)


def test_what_is_left_of_its_session_ends_before_it_is_started_again(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    first = box.running
    first.others = 2
    first.dies_of = (9,)
    box.spawner.end(0)
    box.after(0)
    assert (first.signals, box.process().pid) == ([15], first.pid.number)
    box.after(4)
    assert first.signals == [15]
    box.after(1.1)
    assert first.signals == [15, 9]
    box.after(0.1)
    assert box.process().pid is None
    box.after(1.1)
    assert box.running is not first


# -- released ------------------------------------------------------------------------------


def test_released_by_sigterm_both_get_it(box: ProcessBox) -> None:
    Path(box.path("agents", "alice", "meta.json")).write_text('{"role": "lead"}')
    request = box.spawn(asker="alice")
    process = box.running
    sent = box.release(reason="task done")

    assert process.signals == [15]
    assert box.said(about=sent) == ["ack completed released w: it was ended by SIGTERM"]
    assert box.said("alice", request)[-1] == (
        "notification w was ended by SIGTERM: released by operator: task done"
    )
    row = box.process()
    assert (row.state, row.pid, row.exit_code) == ("released", None, -15)
    assert box.sql("SELECT status, reason FROM agents WHERE name = 'w'") == [
        ("terminated", "released by operator: task done")
    ]
    assert box.specs() == []


def test_what_does_not_heed_sigterm_is_killed_after_the_grace(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    process = box.running
    process.dies_of = (9,)
    first, second = box.release(), box.release()
    again = box.spawn()
    assert box.said(about=again) == ["nack w is being released: try again when that is done"]
    box.after(4)
    assert (process.signals, box.process().state) == ([15], "starting")
    box.after(1.1)
    box.after(0.1)
    assert process.signals == [15, 9]
    for sent in (first, second):
        assert box.said(about=sent) == ["ack completed released w: it was ended by SIGKILL"]
    box.after(100)
    assert box.spawner.running() == []  # its policy does not count any more


def test_released_while_it_waits_to_be_started_again(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    box.spawner.end(1)
    box.after(0)
    sent = box.release()
    assert box.said(about=sent) == ["ack completed released w: it exited with code 1"]
    box.after(100)
    assert (box.process().state, box.spawner.running()) == ("released", [])


def test_releasing_what_does_not_run(box: ProcessBox) -> None:
    assert box.said(about=box.release("nobody"))[0].startswith(
        "nack the relay has no process nobody"
    )
    box.spawn()
    box.spawner.end(0)
    box.after(0)
    ended = box.release()
    assert box.said(about=ended) == ["ack completed w is not running (it is exited)"]
    assert box.said("alice", box.release(asker="alice"))[0].startswith("nack release is for lead")
