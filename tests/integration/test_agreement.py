"""Ledger and store say the same of every delivery, whatever happened on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from itertools import count

import pytest

from relay.acomm.model import ChannelState
from relay.base.home import LEDGER, STORE
from relay.daemon import agreement
from relay.ledger.file import connect, open_readonly
from relay.ledger.ledger import SKIPPED
from relay.reach.report import OFFERED, RING, write_report
from tests.box import Box
from tests.disk import failing, flip, hooked
from tests.kills import Killed
from tests.sound import findings_of

COMMAND = "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndeploy"
SYSTEM = "TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: _system\nPATTERN: _system.#"


def restart(box: Box) -> None:
    """SIGKILL, and the next start."""
    box.restart()
    box.tick(2)


def ack(box: Box, agent: str, message_id: str) -> None:
    box.send(agent, f"TO: alice\nKIND: ack\nRE: {message_id}\n\ncompleted")
    box.after(1)  # where the inbox was moved away, the outbox is looked at a second later


def replay(box: Box, message_id: str) -> None:
    box.command("operator", "dead.replay", f"ID: {message_id}")


def agree(box: Box, message_id: str, **expected: str) -> None:
    """The ledger says this of a message, and the store the same."""
    assert box.states(message_id) == expected
    assert [line for line in differences(box) if message_id in line] == []


def differences(box: Box) -> list[str]:
    """What ledger and store say differently of any message."""
    with contextlib.closing(open_readonly(box.home.path(LEDGER))) as db:
        return [one.text for one in agreement.check(db, box.store)]


@contextlib.contextmanager
def away(box: Box, agent: str) -> Iterator[None]:
    """The agent's directory is gone for as long as the block lasts."""
    box.path("agents", agent).rename(box.path("tmp", agent))
    box.tick()
    box.after(1)
    yield
    box.path("tmp", agent).rename(box.path("agents", agent))
    box.tick()


def test_an_ack_after_the_ttl_counts_in_both(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nTTL: 30\nDELIVERY: at-least-once\n\ndeploy")
    box.after(60)
    agree(box, sent, bob="expired")
    ack(box, "bob", sent)
    agree(box, sent, bob="acked")


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_nack_that_found_no_room_is_delivered_once(box: Box, is_killed: bool) -> None:
    box.join("team", "bob", "alice")
    with away(box, "bob"):
        with failing("create"):
            sent = box.send("alice", "TO: #team\n\nhi")
        assert box.nacks("alice") == []
        if is_killed:
            restart(box)
        box.after(60)
        agree(box, sent, bob="bounced")
        restart(box)
        box.after(60)
    assert box.nacks("alice") == ["no recipients: bob: no longer an agent\n"]
    assert differences(box) == []


def test_a_nack_that_a_commit_cut_short_left_in_the_store_is_delivered_once(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def committed(*_: object) -> None:
        """What came before the event of the staged deliveries, and no more."""
        box.events.commit()
        raise Killed

    box.join("team", "bob", "alice")
    with away(box, "bob"):
        monkeypatch.setattr(type(box.store.deliveries), "stage", committed)
        with pytest.raises(Killed):
            box.send("alice", "TO: #team\n\nhi")
        monkeypatch.undo()
        box.kill()
        box.open()
        with failing("create"):
            box.tick()
        box.after(60)
        box.after(60)
        assert len(box.nacks("alice")) == 1
    assert differences(box) == []


def test_an_end_that_found_no_room_leaves_no_nack(box: Box) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", COMMAND)
        with failing("create"), away(box, "bob"):
            box.after(1)
        assert box.states(sent) == {"bob": "held"}
    box.after(60)
    assert box.nacks("alice") == []
    agree(box, sent, bob="written")
    assert differences(box) == []


@contextlib.contextmanager
def room_for(files: int) -> Iterator[None]:
    """The disk is full after so many files."""
    made = count()

    def fault(operation: str, name: str) -> None:
        if operation == "create" and next(made) >= files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with hooked(fault):
        yield


def test_of_two_files_that_tell_of_a_dead_letter_the_second_waits_for_room(box: Box) -> None:
    box.send("carol", SYSTEM)
    sent = box.send("alice", COMMAND)
    for pause_s in (1, 2, 4):
        box.after(60)
        box.after(pause_s)
    before = len(box.inbox("carol"))
    with room_for(2):  # it is looked for with one
        box.after(60)
    agree(box, sent, bob="dead")
    assert len(box.nacks("alice")) + len(box.inbox("carol")) == before + 1
    for _ in range(2):
        box.after(60)
        assert (len(box.nacks("alice")), len(box.inbox("carol"))) == (1, before + 1)
        restart(box)
    assert differences(box) == []


def test_a_reminder_that_found_no_room_is_not_sent_after_the_answer(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    with failing("create"):
        box.after(1800)
    ack(box, "bob", sent)
    restart(box)
    box.after(60)
    assert [one.kind for one in box.inbox("bob").values()] == ["command"]
    assert [one.kind for one in box.inbox("alice").values()] == ["ack"]
    assert differences(box) == []


def test_a_notice_that_its_channel_refuses_is_not_left_staged(box: Box) -> None:
    box.send("carol", SYSTEM)
    channel = box.store.channels.find_by_name("_system")
    assert channel is not None
    box.store.channels.set_state(channel.id, ChannelState.CLOSED)
    sent = box.send("alice", COMMAND)
    before = box.inbox("carol")
    with box.broken_inbox("carol"):
        box.until_dead()
    agree(box, sent, bob="dead")
    sent = box.send("alice", COMMAND)
    box.until_dead()
    agree(box, sent, bob="dead")
    assert len(box.nacks("alice")) == 2
    assert box.inbox("carol") == before
    assert os.listdir(box.path("agents", "carol", "inbox", ".pending")) == []
    assert differences(box) == []


def test_a_full_disk_and_a_broken_inbox_at_once(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nack is held, the notice behind it has no room: put off, and the loop goes on."""
    box.send("carol", SYSTEM)
    sent = box.send("alice", COMMAND)
    with box.broken_inbox("alice"):
        with failing("create"):
            box.until_dead()
        box.until_dead()
        agree(box, sent, bob="dead")
    box.after(60)
    assert len(box.nacks("alice")) == 1


def test_what_expired_unwritten_before_a_crash_is_expired_after_it(box: Box) -> None:
    with box.broken_inbox("bob"):
        sent = box.send(
            "alice", "TO: bob\nKIND: command\nTTL: 30\nDELIVERY: at-least-once\n\ndeploy"
        )
        box.flush()
        flushed = box.path(STORE).read_bytes()
        for _ in range(8):
            box.after(8)
        assert box.states(sent) == {"bob": "expired"}
        box.kill()
        box.path(STORE).write_bytes(flushed)
        box.open()
        agree(box, sent, bob="expired")
    assert len(box.nacks("alice")) == 1


def test_a_replay_before_a_crash_is_not_made_again_after_it(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.until_dead()
    box.flush()
    box.take("bob", sent)
    replay(box, sent)
    box.after(0)
    box.take("bob", sent)  # attempt 5, read
    restart(box)
    box.after(1)
    assert box.inbox("bob") == {}
    agree(box, sent, bob="read")
    box.until_dead()
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "8"


@pytest.mark.damages
def test_the_file_before_does_not_undo_an_acknowledgment(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.flush()
    ack(box, "bob", sent)
    box.flush()
    box.kill()
    flip(box.path(STORE), box.path(STORE).stat().st_size // 2, 0xFF)
    box.open()
    agree(box, sent, bob="acked")
    box.until_dead()
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "1"
    assert box.nacks("alice") == []


def test_every_death_of_a_held_delivery_is_notified_and_announced(box: Box) -> None:
    box.send("carol", SYSTEM)
    before = len(box.inbox("carol"))
    sent = box.send("alice", COMMAND)
    box.until_dead()
    with box.broken_inbox("bob"):
        for deaths in (2, 3):
            replay(box, sent)
            for _ in range(25):  # it is held for a day
                box.after(3600)
            agree(box, sent, bob="dead")
            nacks = [text for text in box.nacks("alice") if "acknowledged by bob" in text]
            assert len(nacks) == deaths
            assert len(box.inbox("carol")) == before + deaths


def test_it_is_announced_when_the_sender_is_gone(box: Box) -> None:
    box.send("carol", SYSTEM)
    before = len(box.inbox("carol"))
    sent = box.send("alice", COMMAND)
    with away(box, "alice"):
        box.until_dead()
        agree(box, sent, bob="dead")
    assert len(box.inbox("carol")) == before + 1


def test_an_original_that_recovery_could_not_reach_is_archived_when_it_can(box: Box) -> None:
    with box.broken_inbox("bob"):
        sent = box.send("alice", COMMAND)
        box.kill()
        os.rename(box.path("agents", "alice"), box.path("tmp", "alice"))
        box.open()
        os.rename(box.path("tmp", "alice"), box.path("agents", "alice"))
        box.after(30)
    box.after(60)
    assert box.row(sent)["file_path"].startswith("archive/")
    assert "rejected" not in box.row(sent)["file_path"]
    assert box.bodies("bob") == ["deploy"]


def test_between_two_attempts_both_say_that_it_was_read(box: Box) -> None:
    """A home that is stopped in the pause before the next attempt is sound."""
    sent = box.send("alice", "TO: bob\nKIND: query\nAWAIT: 3s\n\nready?")
    box.take("bob", sent)
    box.tick(2)
    box.after(3.2, turns=1)  # overdue; the next attempt is due after a second
    agree(box, sent, bob="read")


@pytest.mark.damages
def test_a_row_changed_by_hand_is_not_what_the_journal_says(box: Box) -> None:
    """To the nanosecond; `relay doctor --deep` finds it."""
    read, acked = (
        box.send("alice", f"TO: bob\nKIND: {kind}\n\ndo") for kind in ("message", "command")
    )
    box.take("bob", read)
    box.tick()
    ack(box, "bob", acked)
    box.flush()
    box.close()
    assert findings_of(box.home.root) == []
    for sent, columns in ((read, ("staged_at", "written_at", "read_at")), (acked, ("acked_at",))):
        for column in columns:
            change = f"UPDATE deliveries SET {column} = {column} + ? WHERE message_id = ?"
            with contextlib.closing(connect(box.home.path(LEDGER))) as db:
                db.execute(change, (-1, sent))
                (found,) = findings_of(box.home.root)
                assert f"{sent}: for bob, expected {column} " in found and ", got " in found
                db.execute(change, (1, sent))
    assert findings_of(box.home.root) == []


@pytest.mark.damages
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE messages SET target = 'carol' WHERE agent_name = 'alice'",
        "UPDATE messages SET last_error = 'why' WHERE status = 'failed'",
        "DELETE FROM deliveries",
        "DELETE FROM rejections",
        "UPDATE offers SET state = 'in_context'",
        "DELETE FROM rings",
    ],
)
def test_a_row_that_is_gone_or_changed_is_missed(box: Box, change: str) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.send("alice", "TO: nobody\n\nhi")
    box.path("agents/alice/outbox/no id.msg").write_text("TO: bob\n\nhi")
    box.after(31)
    known = {"session": "claude:0089", "at": box.clock.now_ns()}
    offered = {"what": OFFERED, "ids": [sent], "after": "Stop", "offer": 1, **known}
    rung = {"what": RING, "rung": "command", "messages": 1, "result": "ok", **known}
    write_report(str(box.root), "bob", [offered, rung])
    box.tick()
    box.close()
    assert findings_of(box.home.root) == []
    with contextlib.closing(connect(box.home.path(LEDGER))) as db:
        assert db.execute(change).rowcount > 0
    table = re.findall("messages|deliveries|rejections|offers|rings", change)[0]
    assert any(f"{table} has no such row as the journal" in one for one in findings_of(box.root))


@pytest.mark.damages
def test_one_row_that_the_ledger_refuses_stops_no_other(box: Box) -> None:
    """The journal is the truth; it is logged, and counted for `relay doctor`."""
    box.ledger._db.execute(
        "CREATE TRIGGER refused BEFORE INSERT ON deliveries WHEN NEW.recipient = 'carol' "
        "BEGIN SELECT RAISE(ABORT, 'no carol'); END"
    )
    sent = [box.drop("alice", f"TO: {name}\n\nhi") for name in ("bob", "carol", "bob")]
    box.tick()
    assert box.bodies("bob") == ["hi", "hi"] and box.bodies("carol") == ["hi"]
    assert [box.states(one) for one in sent] == [{"bob": "written"}, {}, {"bob": "written"}]
    said = [line["event"] for line in box.log if line.get("action") == "skip_fact"]
    assert "no carol" in said[0] and "'carol'" in said[0]
    assert "1 fact of the journal is not in the ledger" in said[1]
    assert box.ledger.get_state(SKIPPED) == "1"
    box.ledger._db.execute("DROP TRIGGER refused")
