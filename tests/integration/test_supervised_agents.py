"""An agent whose process the relay started: what that process does, what its end means, and what is
taken over, never doubled, when a relay ends or is killed."""

from __future__ import annotations

import pytest

from relay.base.watcher import WatchEvents
from tests.disk import failing
from tests.process_support import ProcessBox

pytestmark = pytest.mark.box("alice", kind=ProcessBox)

WEEK_S = 7 * 86_400
RETIRE = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: w\nREASON: enough"


def test_a_silent_process_that_runs_is_no_inactive_agent(box: ProcessBox) -> None:
    box.spawn()
    box.after(WEEK_S + 60)
    assert box.life("w") == ("active", None)
    assert box.life("alice")[0] == "inactive"
    sent = box.send("operator", "TO: *\n\nall of you")
    assert box.states(sent) == {"w": "written"}

    box.spawner.end(0)
    box.after(1)
    assert box.life("w") == ("terminated", "w exited with code 0")
    box.restart()
    box.after(400)
    assert [one for one in box.bodies("operator") if "not read" in one] == [
        f"w is terminated: w exited with code 0; 1 message of yours was not read, "
        f"the first is {sent}\n"
    ]


def test_a_silent_agent_is_active_again_while_it_waits_for_its_next_start(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    box.spawner.end(1)
    box.tick(3)
    assert box.process().pid is None
    with box.ledger.transaction():
        box.ledger.agents.set_status("w", "inactive", "silent", box.clock.now_ns())
    box.dispatcher.tick(WatchEvents(scan=True))  # and it is not started yet
    assert box.life("w") == ("active", None)


def test_another_process_of_it_that_ended_is_not_its_end(box: ProcessBox) -> None:
    """A loop in a shell starts one program of the SDK after the other."""
    box.spawn()
    meta = box.path("agents", "w", "meta.json")
    meta.write_text(f'{{"pid": 4194304, "pid_start_ticks": 1, "started_at": {box.clock.now_ns()}}}')
    with box.ledger.transaction():
        box.ledger.agents.set_pid("w", 4194304)
    box.after(31)
    box.after(400)
    assert box.life("w") == ("active", None)


@pytest.mark.parametrize("how", ["writes", "says its status", "reads", "reads and removes"])
@pytest.mark.parametrize("when", ["before its end", "after it"])
def test_what_it_did_before_its_end_and_is_found_later_brings_nobody_back(
    box: ProcessBox, how: str, when: str
) -> None:
    box.spawn()
    mail = box.send("operator", "TO: w\n\nhi")
    inbox = box.path("agents", "w", "inbox")

    def do() -> None:
        if how == "writes":
            box.drop("w", "TO: alice\n\nmy last words")
        elif how == "says its status":
            box.drop("w", "TO: __orchestrator__\nKIND: status\n\nbye")
        elif how == "reads":
            (inbox / f"{mail}.msg").rename(inbox / ".read" / f"{mail}.msg")
        else:
            (inbox / f"{mail}.msg").unlink()

    if when == "before its end":
        box.clock.advance(3600)  # files have the real time: this end is behind it
        do()
    box.spawner.end(0)
    box.session.poll_supervisor()
    box.session.poll_supervisor()
    assert box.life("w")[0] == "terminated"
    if when == "after it":
        do()
    box.tick(3)
    box.clock.advance(1)  # what is not in .read is given a second
    box.tick()
    assert box.life("w")[0] == ("terminated" if when == "before its end" else "active")
    if how == "writes":
        assert box.bodies("alice") == ["my last words"]


def test_a_clock_that_was_set_back_keeps_nobody_away(box: ProcessBox) -> None:
    box.spawn()
    box.clock.advance(3600)
    box.spawner.end(0)
    box.after(1)
    assert box.life("w")[0] == "terminated"
    box.clock.jump(-3600)
    box.send("w", "TO: alice\n\nI am here")
    assert box.life("w") == ("active", None)


@pytest.mark.parametrize("restart", ["never", "always"])
def test_who_is_retired_stays_that_when_its_process_ends(box: ProcessBox, restart: str) -> None:
    box.spawn("w", f"RESTART: {restart}")
    box.send("operator", RETIRE)
    box.spawner.end(1)
    box.after(2)
    assert box.life("w") == ("retired", "enough")
    box.send("alice", "TO: w\n\nhi")
    assert "w is retired since" in box.nacks("alice")[0]

    if restart == "always":
        box.release()
        box.after(1)
        assert box.life("w") == ("retired", "enough")
    box.spawn()
    assert box.life("w") == ("active", None)  # somebody wants it again


# -- what runs when a relay ends or is killed ----------------------------------------------


def reopen(box: ProcessBox) -> None:
    box.kill()
    box.spawner.adopt_all()
    box.open()
    box.tick(2)


@pytest.mark.shows("ready 5.5")
def test_what_runs_is_taken_over_not_doubled(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    process = box.running
    reopen(box)
    box.after(10)
    assert box.spawner.processes == [process]
    assert (box.process().state, box.process().pid) == ("starting", process.pid.number)
    box.spawner.end(0)  # nobody can know the code of somebody else's child
    box.after(1.1)
    assert box.said()[-1] == (
        "notification w ended, its exit code is not known; it will be restarted in 1 s"
    )
    box.after(1.1)
    assert box.running is not process


def test_a_session_that_began_again_knows_the_codes_of_its_children(box: ProcessBox) -> None:
    box.spawn()
    box.kill()  # a fault ended the session; the process of the relay is the same
    box.open()
    box.tick(2)
    box.spawner.end(3)
    box.after(0)
    assert box.said()[-1] == "notification w exited with code 3"


def test_where_the_disk_is_full_a_spawn_waits(box: ProcessBox) -> None:
    with failing("write", ".json"):
        sent = box.spawn()
        assert box.row(sent)["status"] == "pending"
        assert "run/ cannot be written" in box.row(sent)["last_error"]
        assert (box.said(), box.spawner.processes) == ([], [])
    box.after(2)
    assert box.said() == [f"ack completed started w, pid {box.running.pid.number}"]


def test_where_the_disk_is_full_nothing_continues_before_it_is_said(box: ProcessBox) -> None:
    request = box.spawn("w", "RESTART: always")
    with failing("write"):
        box.spawner.end(1)
        for _ in range(5):
            box.after(1.1)
        assert box.spawner.running() == []
        assert len(box.said(about=request)) == 1
    box.after(1.1)
    box.after(1.1)
    assert len(box.said(about=request)) == 3
    assert box.process().pid == box.running.pid.number


@pytest.mark.parametrize(("policy", "state"), [("never", "exited"), ("on-failure", "starting")])
def test_what_ended_while_no_relay_ran_follows_its_policy(
    box: ProcessBox, policy: str, state: str
) -> None:
    box.spawn("w", f"RESTART: {policy}")
    box.kill()
    box.spawner.adopt_all()
    box.spawner.end(0)
    box.open()
    box.tick(2)
    assert (box.process().state, box.process().exit_code) == (state, None)
    box.after(2)
    assert len(box.spawner.running()) == (state == "starting")


def test_without_its_spec_it_is_looked_after_and_not_started_again(box: ProcessBox) -> None:
    box.spawn("w", "RESTART: always")
    for path in box.path("run").glob("*.json"):
        path.unlink()
    reopen(box)
    assert box.process().pid == box.running.pid.number
    box.spawner.end(1)
    box.after(1.1)
    assert box.said()[-1].endswith("; its spec was lost, so it is not restarted")
    assert box.process().state == "failed"


def test_a_ledger_that_is_gone_does_not_double_it(box: ProcessBox) -> None:
    box.spawn()
    process = box.running
    box.kill()
    for path in box.root.glob("ledger.db*"):
        path.unlink()
    box.spawner.adopt_all()
    box.open()
    box.tick(2)
    assert (box.process().state, box.process().pid) == ("starting", process.pid.number)
    sent = box.spawn()
    assert box.said(about=sent)[0].startswith("nack w is already running")


def test_a_spec_that_is_lost_is_said_and_rolled_back(box: ProcessBox) -> None:
    box.drop("operator", f"KIND: spawn\nNAME: w\nCLI: sh\nCWD: {box.cwd}\n\ngo")
    box.dispatcher.tick(box.watcher.wait(0))
    for path in box.path("run").glob("*.json"):
        path.unlink()
    reopen(box)
    assert box.said() == ["nack its spec was lost in a crash: send it again"]
    assert (box.spawner.processes, box.rows()) == ([], {})


def test_a_spec_that_nobody_needs_is_removed_at_the_start(box: ProcessBox) -> None:
    box.path("run", "v.1769851800000000000-01.json").write_text("{}")
    reopen(box)
    assert box.specs() == []
