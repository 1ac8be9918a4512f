"""Killed between any two effects of a batch: nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.box import Box
from tests.crash.plays import UNREAD_OR_READ, Play, received

pytestmark = pytest.mark.shows("engine 7.1", "engine 7.3", "journal 5.2", "ready 1.1", "ready 6.3")


def scenario(box: Box) -> None:
    """Everything a batch can hold: direct, broadcast, control, refused, ack, malformed."""
    box.drop("alice", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", "1000000001-01.msg")
    box.drop("bob", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", "1000000002-02.msg")
    box.drop("alice", "TO: bob\nKIND: command\n\ndeploy", "1000000003-03.msg")
    box.drop("alice", "TO: *\n\nto all", "1000000004-04.msg")
    box.drop("bob", "TO: #team\n\nto the team", "1000000005-05.msg")
    box.drop("bob", "TO: alice\nKIND: ack\nRE: 1000000003-03\n\ncompleted", "1000000006-06.msg")
    box.drop("alice", "TO: nobody\n\nlost?", "1000000007-07.msg")
    box.drop("carol", "no message at all", "1000000008-08.msg")
    box.drop("carol", "TO: alice\n\na name of no use", "hello.msg")
    box.tick()
    box.flush()


EXPECTED = {
    "alice": ["ack", "ack 1000000006-06", "message 1000000005-05", "nack"],
    "bob": ["ack", "command 1000000003-03", "message 1000000004-04"],
    "carol": ["message 1000000004-04", "nack", "nack"],
    "operator": ["message 1000000004-04"],
}


def everything(box: Box) -> dict[str, list[str]]:
    """What each agent has ever got, the orchestrator's answers by kind alone."""
    got = {}
    for agent in EXPECTED:
        folder = box.path("agents", agent, "inbox")
        taken = [p.stem for p in folder.glob(".read/*.msg")]
        names = [p.stem for p in folder.glob("*.msg")] + taken
        assert len(names) == len(set(names)), names
        got[agent] = sorted(
            str(m.kind)
            if m.headers["FROM"] == "__orchestrator__"
            else f"{m.kind} {m.headers['ID']}"
            for m in received(box, agent)
        )
    return got


def check(box: Box) -> None:
    """The end is the same whatever happened on the way."""
    assert everything(box) == EXPECTED
    assert box.sql("SELECT DISTINCT status FROM messages ORDER BY 1") == [
        ("archived",),
        ("failed",),
    ]
    assert box.sql("SELECT count(*) FROM messages WHERE status = 'failed'") == [(2,)]
    assert all(box.outbox(agent) == [] for agent in EXPECTED)
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))
    accepted = {
        row[0] for row in box.sql("SELECT message_id FROM messages WHERE status = 'archived'")
    }
    stored = box.stored()
    assert set(stored) == accepted
    assert len(stored) == len(accepted)
    assert box.sql(
        "SELECT state, ack_status FROM deliveries WHERE message_id = '1000000003-03'"
    ) == [("acked", "completed")]
    assert len(list(box.path("archive").glob("*/*/*.msg"))) == 6
    assert len(list(box.path("archive").glob("*/*/rejected/*.msg"))) == 3


def overdue(box: Box) -> None:
    """At least once, and nobody acknowledges: four attempts, a dead letter, a nack, a notice."""
    box.drop(
        "carol",
        "TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: _system\nPATTERN: _system.#",
        "1000000001-01.msg",
    )
    asks = "DELIVERY: at-least-once"
    box.drop("alice", f"TO: bob\nKIND: command\n{asks}\n\ndeploy", "1000000002-02.msg")
    box.tick()
    for pause_s in (60, 1, 60, 2, 60, 4, 60):
        box.after(pause_s, turns=1)
    box.flush()


def check_overdue(box: Box) -> None:
    """However it went: read or not, it is dead at the end, and everybody knows it once."""
    for _ in range(12):  # a crash may have cost an attempt its time, never one too many
        box.after(61, turns=2)
    box.flush()
    assert box.states("1000000002-02") == {"bob": "dead"}
    ((attempt,),) = box.sql("SELECT attempt FROM deliveries WHERE state = 'dead'")
    assert attempt == 4
    for agent, kinds in (("alice", ["nack"]), ("carol", ["ack", "notification"])):
        assert sorted(str(one.kind) for one in received(box, agent)) == kinds
    assert [letter.recipients for letter in box.store.retries.dead_letters()] == [("bob",)]
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))
    assert box.sql("SELECT DISTINCT status FROM messages") == [("archived",)]


ASKED, BEGUN, DONE = "1000000002-02", "1000000003-03", "1000000004-04"


def answer(box: Box, text: str, name: str) -> None:
    """Carol answers what she has, unless that file is on its way already."""
    has_it = any(box.path("agents", "carol", "inbox").rglob(f"{ASKED}.msg"))
    if has_it and (name,) not in box.sql("SELECT message_id FROM messages"):
        box.drop("carol", f"TO: alice\nKIND: ack\nRE: {ASKED}\n\n{text}", f"{name}.msg")
    box.tick()


def owed(box: Box) -> None:
    """A command that nobody answers: two reminders, then it is given up. Another one is begun,
    reminded of once, and done."""
    box.drop("alice", "TO: bob\nKIND: command\n\ndeploy", "1000000001-01.msg")
    box.drop("alice", "TO: carol\nKIND: command\n\ntest", f"{ASKED}.msg")
    box.tick()
    answer(box, "in_progress", BEGUN)
    box.after(1800, turns=1)
    answer(box, "completed", DONE)
    for _ in range(2):
        box.after(1800, turns=1)
    box.flush()


def check_owed(box: Box) -> None:
    """However it went: each reminder, and each word to the sender, is there once."""
    answer(box, "completed", DONE)
    for _ in range(4):
        box.after(1801, turns=2)
    box.flush()
    assert box.store.state.owed == {}
    duties = box.sql(
        "SELECT recipient, obligation, due_at, ack_status FROM deliveries "
        "WHERE obligation IS NOT NULL ORDER BY 1"
    )
    assert duties == [("bob", "given_up", None, None), ("carol", "answered", None, "completed")]
    assert box.sql("SELECT max(reminders) FROM deliveries WHERE recipient = 'bob'") == [(2,)]
    got = {agent: received(box, agent) for agent in ("alice", "bob", "carol")}
    assert Counter(str(one.kind) for one in got["bob"]) == {"command": 1, "reminder": 2}
    kinds = Counter(str(one.kind) for one in got["carol"])
    assert kinds["command"] == 1 and kinds["reminder"] <= 2  # the more, the later it came
    told = [one.body.decode() for one in got["alice"] if one.kind == "notification"]
    about_bob = [text for text in told if text.startswith("bob")]
    assert len(about_bob) == len(set(about_bob)) == 3
    assert sum("no longer awaited" in text for text in about_bob) == 1
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))


def rolled(box: Box) -> None:
    """A day goes by, and what is final leaves for an archive."""
    for number in range(1, 5):
        box.drop("alice", f"TO: bob\n\n{number}", f"100000000{number}-0{number}.msg")
    box.tick()
    box.flush()
    for _ in range(2):
        box.after(90_000, turns=6)
        box.flush()


def check_rolled(box: Box) -> None:
    """Every message is in one archive the store lists, or in the store, and found once."""
    rolled(box)  # whatever was left of it
    found = box.store.messages.query().messages
    assert sorted(m.content for m in found) == [b"1", b"2", b"3", b"4"]
    assert len(box.store.state.messages) == 0
    listed = {note.name for note in box.store.state.archives}
    assert {str(p.relative_to(box.path("store", "archive"))) for p in archives_of(box)} == listed
    for agent, bodies in (("bob", 4), ("alice", 0)):
        assert len([*box.path("agents", agent, "inbox").glob("**/*.msg")]) == bodies
    assert box.sql("SELECT DISTINCT status FROM messages") == [("archived",)]


def archives_of(box: Box) -> list[Path]:
    return [*box.path("store", "archive").glob("*/*.acomm")]


def vanished(box: Box) -> None:
    """One is taken, one removed, and the mailbox goes with the third, and is made again."""
    for number, body in enumerate(("taken", "removed", "unread"), 1):
        box.drop("alice", f"TO: bob\n\n{body}", f"100000000{number}-0{number}.msg")
    box.tick()
    with contextlib.suppress(FileNotFoundError):  # what is held up is not there
        box.take("bob", "1000000001-01")
    box.path("agents", "bob", "inbox", "1000000002-02.msg").unlink(missing_ok=True)
    box.tick()
    box.after(1, turns=1)
    shutil.rmtree(box.path("agents", "bob"))
    box.tick()
    box.home.make_agent("bob")
    for _ in range(2):
        box.after(1, turns=1)
    box.flush()


def check_vanished(box: Box) -> None:
    """What nobody had read is there, once; what is called written stands in the inbox."""
    box.home.make_agent("bob")  # killed before that, it is made again now
    for _ in range(2):
        box.after(1, turns=2)
    folder = box.path("agents", "bob", "inbox")
    have = [path.stem for path in folder.glob("**/*.msg")]
    assert len(have) == len(set(have)) and "1000000003-03" in have
    assert not list(folder.glob(".pending/*"))
    said = dict(box.sql("SELECT message_id, state FROM deliveries"))
    assert {one for one, state in said.items() if state == "written"} == set(box.inbox("bob"))
    assert set(said.values()) <= {"written", "read"} and len(said) == 3
    known = {m.relay_id: m.id for m in box.store.messages.query().messages}
    for message_id, state in said.items():
        one = box.store.state.deliveries[known[message_id]]["bob"]
        assert one.state.label == {"written": "Delivered", "read": "Received"}[state]


SCENARIOS = {
    "batch": (scenario, check),
    "overdue": (overdue, check_overdue),
    "owed": (owed, check_owed),
    "rolled": (rolled, check_rolled),
    "vanished": (vanished, check_vanished),
}


@pytest.mark.shows("ready 1.3")
@pytest.mark.parametrize("name", SCENARIOS)
@UNREAD_OR_READ
def test_killed_before_any_effect_it_ends_the_same(tmp_path: Path, name: str, taking: bool) -> None:
    act, check_end = SCENARIOS[name]

    def ends(box: Box) -> None:
        box.after(31, turns=2)
        box.flush()
        check_end(box)

    play = Play(
        before=lambda root: Box(root, "alice", "bob", "carol"),
        act=act,
        check=ends,
        meanwhile=lambda box: box.clock.advance(1),
        readers=EXPECTED,
    )
    assert play.kill_before_each(tmp_path, taking=taking) > 30
