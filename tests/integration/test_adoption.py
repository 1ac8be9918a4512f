"""What runs, and what was in hand, when a relay ends or is killed: taken over, never doubled."""

from __future__ import annotations

import pytest

from tests.disk import failing
from tests.process_support import ProcessBox

pytestmark = pytest.mark.box("alice", kind=ProcessBox)


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
