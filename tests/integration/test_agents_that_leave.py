"""Agents that go away and come back: who bounces, who is told what, what stays in the inbox."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from relay.agents.roster import META
from relay.agents.status import AgentStatusTracker
from tests.box import Box
from tests.disk import failing
from tests.process_support import end, registered

DAY_S = 86_400
RETIRE = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: {}\nREASON: done here"
REVIVE = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.revive\nNAME: {}"
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(box: Box) -> Iterator[Start]:
    """Start a process that registers as an agent, as the SDK does."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(agent: str) -> subprocess.Popen[bytes]:
        running.append(registered(box, agent))
        return running[-1]

    yield begin
    for process in running:
        end(process)


def retire(box: Box, agent: str) -> None:
    sent = box.send("operator", RETIRE.format(agent))
    (answer,) = [m for m in box.inbox("operator").values() if m.headers["RE"] == sent]
    assert (answer.kind, answer.body) == ("ack", f"completed {agent} is retired\n".encode())


# -- retired ---------------------------------------------------------------------------------


def test_mail_to_a_retired_agent_bounces_with_the_reason(box: Box) -> None:
    before = box.send("alice", "TO: bob\n\nbefore")
    retire(box, "bob")
    sent = box.send("alice", "TO: bob\n\nafter")
    (nack,) = box.nacks("alice")
    assert f"{sent}.msg: bob is retired since " in nack
    assert "Z: done here; `relay agents revive bob` brings it back" in nack
    assert list(box.inbox("bob")) == [before]  # what was there stays
    box.take("bob", before)
    box.tick()
    assert box.life("bob") == ("retired", "done here")  # reading brings nobody back


def test_an_answer_to_a_retired_agent_bounces_and_counts_as_given(box: Box) -> None:
    asked = box.send("bob", "TO: alice\nKIND: command\n\ndeploy")
    retire(box, "bob")
    box.send("alice", f"TO: bob\nKIND: ack\nRE: {asked}\n\ncompleted")
    assert "bob is retired" in box.nacks("alice")[0]
    assert box.states(asked) == {"alice": "acked"}


def test_what_it_owes_an_ack_for_is_not_delivered_again_but_bounced(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nAWAIT: 5s\n\ndeploy")
    retire(box, "bob")
    for _ in range(4):
        box.after(10)
    assert box.states(sent) == {"bob": "bounced"}
    assert "not acknowledged by bob: bob is retired" in box.nacks("alice")[0]
    (late,) = box.inbox("bob")
    box.take("bob", late)
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")  # it comes back, and answers
    assert box.states(sent) == {"bob": "acked"}


@pytest.mark.parametrize("how", ["command", "file", "process"])
def test_it_comes_back_with_inbox_and_history(box: Box, start: Start, how: str) -> None:
    before = box.send("alice", "TO: bob\n\nbefore")
    running = start("bob")
    retire(box, "bob")
    box.after(31)
    assert box.life("bob")[0] == "retired"  # that process was there all the time
    if how == "command":
        box.send("operator", REVIVE.format("bob"))
    elif how == "file":
        box.send("bob", "TO: alice\n\nI am back")
    else:
        box.clock.advance(1)
        end(running)
        start("bob")
    sent = box.send("alice", "TO: bob\n\nafter")
    assert box.states(sent) == {"bob": "written"}
    assert {before, sent} <= set(box.inbox("bob"))
    assert box.life("bob") == ("active", None)
    assert any(line.get("action") == "agent_status" for line in box.log) or how == "command"


def test_retired_and_gone_still_says_why(box: Box) -> None:
    retire(box, "bob")
    box.path("agents", "bob").rename(box.path("tmp", "bob"))
    box.after(31)
    box.send("alice", "TO: bob\n\nhi")
    assert "done here" in box.nacks("alice")[0]
    box.home.make_agent("bob")
    box.after(31)
    assert box.life("bob") == ("retired", "done here")


def test_an_answer_that_the_disk_did_not_take_comes_later(box: Box) -> None:
    with failing("write", ".msg"):
        box.send("operator", RETIRE.format("bob"))
    assert (box.life("bob"), box.inbox("operator")) == (("retired", "done here"), {})
    box.after(2)
    assert box.bodies("operator") == ["completed bob is retired\n"]


def test_what_it_wrote_before_and_still_waits_brings_nobody_back(box: Box) -> None:
    name = box.name()
    with failing("write", name):
        sent = box.send("bob", "TO: alice\n\nmy last words", name)
        retire(box, "bob")
        box.after(2)
        assert box.life("bob")[0] == "retired"
    box.after(61)
    assert box.states(sent) == {"alice": "written"}
    assert box.life("bob")[0] == "retired"


@pytest.mark.parametrize(
    ("sender", "name", "says"),
    [
        ("alice", "bob", "agent.retire is for operator and the lead alone, not for alice"),
        ("operator", "operator", "operator is the person at the keyboard"),
        ("operator", "../bob", "NAME '../bob' is not a valid agent name"),
    ],
)
def test_who_may_not_be_retired_or_by_whom(box: Box, sender: str, name: str, says: str) -> None:
    box.send(sender, RETIRE.format(name))
    (nack,) = box.nacks(sender)
    assert nack.startswith(says)
    assert box.sql("SELECT DISTINCT status FROM agents") == [("active",)]


# -- terminated ------------------------------------------------------------------------------


@pytest.mark.shows("ready 5.5")
def test_whose_process_died_bounces_after_a_while(box: Box, start: Start) -> None:
    process = start("bob")
    box.after(31)
    assert box.sql("SELECT pid FROM agents WHERE name = 'bob'") == [(process.pid,)]
    end(process)
    box.after(31)
    early = box.send("alice", "TO: bob\n\nearly")  # it may be started again any moment
    assert box.states(early) == {"bob": "written"}
    box.after(300)
    box.send("alice", "TO: bob\n\nlate")
    assert f"its process {process.pid} ended" in box.nacks("alice")[0]
    assert "start it again" in box.nacks("alice")[0]
    assert list(box.inbox("bob")) == [early]
    box.take("bob", early)  # somebody reads as bob: so it is there
    box.tick()
    assert box.life("bob") == ("active", None)


def test_the_senders_of_its_unread_mail_are_told_once(box: Box, start: Start) -> None:
    process = start("bob")
    box.after(31)
    first = box.send("alice", "TO: bob\n\none")
    box.send("alice", "TO: bob\n\ntwo")
    box.take("bob", box.send("carol", "TO: bob\n\nread"))
    box.after(31)
    end(process)
    box.after(31)
    with pytest.MonkeyPatch.context() as patch:  # killed between the notice and the status
        patch.setattr(AgentStatusTracker, "set_statuses", lambda *_: None)
        box.after(300)
    box.restart()
    for _ in range(3):
        box.after(300)
    assert box.life("bob")[0] == "terminated"
    (told,) = box.bodies("alice")
    assert told.startswith(f"bob is terminated: its process {process.pid} ended; no activity since")
    assert told.endswith(f"; 2 messages of yours were not read, the first is {first}\n")
    assert box.bodies("carol") == []


def test_who_is_retired_leaves_nobody_waiting_for_it(box: Box) -> None:
    """The senders of what it has not read are told, in the commit of its retirement."""
    first = box.send("alice", "TO: bob\n\none")
    box.take("bob", box.send("carol", "TO: bob\n\nread"))
    box.tick()
    box.command("operator", "agent.retire", "NAME: bob", "REASON: done")
    box.restart()
    box.tick(3)
    assert box.life("bob")[0] == "retired"
    text = f"bob is retired: done; 1 message of yours was not read, the first is {first}\n"
    assert box.bodies("alice") == [text]
    assert box.bodies("carol") == []
    box.command("operator", "agent.retire", "NAME: bob", "REASON: really")
    assert box.bodies("alice") == [text]


def test_a_process_that_comes_back_gets_its_mail_at_once(box: Box, start: Start) -> None:
    process = start("bob")
    box.after(31)
    end(process)
    for seconds in (31, 300):
        box.after(seconds)
    assert box.life("bob")[0] == "terminated"
    start("bob")
    sent = box.send("alice", "TO: bob\n\nare you there?")  # no scan in between
    assert box.states(sent) == {"bob": "written"}


def test_who_left_in_good_order_gets_mail_for_ever(box: Box, start: Start) -> None:
    process = start("bob")
    box.after(31)
    end(process)
    box.path("agents", "bob", META).write_text("{}")
    box.after(31)
    box.after(1000)
    assert box.states(box.send("alice", "TO: bob\n\nhi")) == {"bob": "written"}
    assert box.sql("SELECT pid FROM agents WHERE name = 'bob'") == [(None,)]


def test_what_is_no_process_of_anybody_harms_nobody(box: Box) -> None:
    for meta in (
        '{"pid": 0}',
        '{"pid": -5}',
        '{"pid": 99999999999999999999}',
        '{"pid": 7, "started_at": "today", "pid_start_ticks": "x"}',
        '{"pid": "seven"}',
    ):
        box.path("agents", "bob", META).write_text(meta)
        box.after(31)
        assert box.states(box.send("alice", "TO: bob\n\nhi")) == {"bob": "written"}, meta


# -- inactive --------------------------------------------------------------------------------


@pytest.mark.shows("ready 5.5")
def test_who_is_silent_for_a_week_gets_mail_and_no_broadcasts(box: Box) -> None:
    box.join("team", "bob", "alice")
    box.after(4 * DAY_S)
    box.send("alice", "TO: carol\n\nstill here")
    box.after(4 * DAY_S)
    assert box.life("bob")[0] == "inactive" and box.life("alice")[0] == "active"
    assert box.life("operator") == ("active", None)  # a person may be away
    box.restart()
    assert box.life("bob")[0] == "inactive"
    sent = box.send("alice", "TO: *\n\nall of you")
    assert set(box.states(sent)) == {"operator"}
    team = box.send("alice", "TO: #team\n\nnews")  # it asked to be told
    assert box.states(team) == {"bob": "written"}
    direct = box.send("alice", "TO: bob\n\nhi")
    assert box.states(direct) == {"bob": "written"}
    assert box.life("bob")[0] == "inactive"  # that others write to it is no sign of life
    box.take("bob", direct)
    box.tick()
    assert box.life("bob") == ("active", None)


def test_time_that_goes_by_moves_no_status(box: Box, start: Start) -> None:
    start("bob")
    box.after(31)
    changes = box.ledger.agents.changes
    for _ in range(20):
        box.after(31)
    assert box.ledger.agents.changes == changes
