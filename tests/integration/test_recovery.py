"""Each row of the table "After a crash" in docs/states.md, by itself."""

from __future__ import annotations

import os

import pytest

from relay.acomm import store_file
from relay.base.home import STORE
from relay.delivery.eventlog import EventLog
from relay.delivery.record import LedgerWriter
from tests.box import Box
from tests.disk import failing, killed_before

pytestmark = pytest.mark.shows("ready 1.4")


def restart(box: Box) -> None:
    """SIGKILL, and the next start."""
    box.kill()
    box.clock.advance(1)
    box.open()
    box.tick(2)


def test_a_row_whose_file_is_there_begins_again(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")  # delivered, not flushed
    box.take("bob", sent)
    restart(box)

    assert box.inbox("bob") == {}  # bob had it, and gets it once
    assert box.states(sent) == {"bob": "read"}
    box.flush()
    assert box.row(sent)["status"] == "archived"
    assert box.stored() == [sent]


def test_a_message_the_store_holds_is_not_numbered_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flusher.flush()  # in the file, the ledger does not know it yet
    number = box.store.messages.find_by_relay_id(sent)
    restart(box)
    again = box.store.messages.find_by_relay_id(sent)

    assert number is not None and again is not None
    assert again.id == number.id
    assert len(box.store.state.messages) == 1
    box.flush()
    assert box.row(sent)["status"] == "archived"


def test_a_row_whose_file_is_archived_is_archived(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flush()
    box.ledger._db.execute("UPDATE messages SET status = 'processing'")
    restart(box)
    assert box.row(sent)["status"] == "archived"
    assert box.inbox("bob").keys() == {sent}


def test_a_row_whose_file_is_gone_but_delivered_is_archived(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.path(box.row(sent)["file_path"]).unlink()
    box.ledger._db.execute("UPDATE messages SET status = 'processing'")
    restart(box)
    assert box.row(sent)["status"] == "archived"  # bob has it, and the ledger says so
    assert box.states(sent) == {"bob": "written"}


def test_a_row_whose_file_disappeared_fails(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put off before anything was accepted, and its writer took it back."""
    with monkeypatch.context() as patch:
        patch.setattr(EventLog, "reserve", _no_room)
        sent = box.send("alice", "TO: bob\n\nhi")
    assert box.row(sent)["status"] == "pending"
    assert "No space left" in box.row(sent)["last_error"]
    box.path("agents", "alice", "outbox", f"{sent}.msg").unlink()
    restart(box)
    assert box.states(sent) == {}
    assert box.row(sent)["status"] == "failed"
    assert box.row(sent)["last_error"] == "file_disappeared"


def test_D1_a_row_whose_outbox_is_no_directory_now_waits_and_continues(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: EventLog) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(EventLog, "commit", killed)
        sent = box.drop("alice", "TO: bob\n\nhi")
        with pytest.raises(KeyboardInterrupt):
            box.tick()
    outbox, elsewhere = box.path("agents", "alice", "outbox"), box.path("elsewhere")
    outbox.rename(elsewhere)
    outbox.symlink_to(elsewhere)
    restart(box)
    assert box.row(sent)["status"] == "pending"
    assert [line.get("action") for line in box.log].count("read_failed") == 1

    outbox.unlink()
    elsewhere.rename(outbox)
    restart(box)
    assert box.bodies("bob") == ["hi"] and box.inbox("alice") == {}


def test_what_was_accepted_is_delivered_though_its_file_is_gone(box: Box) -> None:
    """Numbered by the engine, never staged: the journal has all that is needed."""
    with failing("create", ".msg"):
        sent = box.send("alice", "TO: bob\n\nhi")
    assert box.row(sent)["status"] == "pending"
    box.flusher.flush()
    box.path("agents", "alice", "outbox", f"{sent}.msg").unlink()
    restart(box)
    assert box.bodies("bob") == ["hi"]
    assert box.states(sent) == {"bob": "written"}
    assert box.row(sent)["status"] == "archived"


def test_a_completed_row_with_its_file_in_the_outbox_is_archived(box: Box) -> None:
    name = box.name()
    sent = box.send("alice", "TO: bob\n\nhi", name)
    box.flush()
    box.ledger._db.execute("UPDATE messages SET status = 'completed'")
    os.rename(box.path(box.row(sent)["file_path"]), box.path("agents", "alice", "outbox", name))
    restart(box)
    box.after(1, turns=1)
    assert box.row(sent)["status"] == "archived"
    assert box.outbox("alice") == []
    assert not list(box.path("archive").glob("*/alice/duplicates/*"))
    assert list(box.inbox("bob")) == [sent]


def test_a_staged_delivery_is_finished(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nhi")
    with killed_before(1, "rename"):
        box.tick()
    assert box.states(sent) == {}  # the journal knows; the ledger will
    assert box.inbox("bob") == {}
    restart(box)
    assert box.states(sent) == {"bob": "written"}
    assert box.bodies("bob") == ["hi"]


def test_a_staged_delivery_without_a_file_was_delivered(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LedgerWriter, "record", _fail)
        sent = box.drop("alice", "TO: bob\n\nhi")
        with pytest.raises(KeyboardInterrupt):
            box.tick()
    box.take("bob", sent)  # it was quick
    restart(box)
    assert box.states(sent) == {"bob": "read"}
    assert box.inbox("bob") == {}


def test_a_staged_file_nobody_committed_is_removed(box: Box) -> None:
    stray = box.path("agents", "bob", "inbox", ".pending", box.name())
    stray.write_text("FROM: x\nTO: bob\n\nhalf")
    restart(box)
    assert not stray.exists()
    assert box.inbox("bob") == {}


def test_a_flush_cut_short_leaves_the_old_file(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    first = box.send("alice", "TO: bob\n\none")
    box.flush()
    second = box.send("alice", "TO: bob\n\ntwo")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _fail)
        with pytest.raises(KeyboardInterrupt):
            box.flusher.flush()
    assert os.path.exists(box.home.path(STORE) + ".tmp")
    assert box.stored() == [first]
    restart(box)
    box.flush()
    assert box.stored() == [first, second]
    assert store_file.read(box.home.path(STORE)).messages[1].content == b"two"


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _fail(*_: object, **__: object) -> None:
    raise KeyboardInterrupt  # SIGKILL: nothing is cleaned up


def test_a_staged_delivery_to_an_agent_that_is_gone_is_not_called_delivered(box: Box) -> None:
    box.events.end_turn = lambda: None  # type: ignore[method-assign]  # it is killed before
    sent = box.send("alice", "TO: bob\n\nhi")
    box.ledger._db.execute("UPDATE deliveries SET state = 'staged', written_at = NULL")
    box.kill()
    os.rename(box.path("agents", "bob"), box.path("tmp", "bob"))
    box.clock.advance(1)
    box.open()
    box.after(1)
    assert box.states(sent) == {"bob": "bounced"}
    assert "not delivered to bob: no longer an agent" in box.nacks("alice")[0]


def test_one_agents_broken_inbox_does_not_stop_the_start(box: Box) -> None:
    box.send("alice", "TO: carol\n\nhi")
    box.kill()
    inbox = box.path("agents", "bob", "inbox")
    os.rename(inbox, box.path("tmp", "inbox"))
    inbox.symlink_to(box.path("tmp", "inbox"))
    (box.path("agents", "carol", "inbox", ".pending") / "a directory").mkdir()
    box.open()
    assert box.states(box.send("alice", "TO: carol\n\nstill"))["carol"] == "written"
    inbox.unlink()
    os.rename(box.path("tmp", "inbox"), inbox)


def test_an_open_intent_is_rolled_back(box: Box) -> None:
    box.ledger._db.execute(
        "INSERT INTO pending_operations (operation_type, payload, created_at) "
        "VALUES ('spawn', '{}', 1)"
    )
    restart(box)
    assert box.sql("SELECT count(*) FROM pending_operations WHERE completed_at IS NULL") == [(0,)]
    assert any("spawn {}" in line["event"] for line in box.log)


def test_what_was_read_while_the_relay_was_down_is_noted(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flush()
    box.kill()
    box.take("bob", sent)
    box.open()
    assert box.states(sent) == {"bob": "read"}


def test_a_command_obeyed_before_a_crash_is_not_obeyed_again(box: Box) -> None:
    asks = "DELIVERY: at-least-once"
    sent = box.send("alice", f"TO: bob\nKIND: command\n{asks}\n\ndeploy")
    for pause_s in (60, 1, 60, 2, 60, 4, 60):
        box.after(pause_s, turns=1)
    number = box.store.retries.dead_letters()[0].message.id
    asked = "TO: __orchestrator__\nKIND: command\n\nACTION: dead.discard\nID: "
    box.send("operator", f"{asked}{number}")
    store_file.write(box.home.path(STORE), box.store.snapshot().file())  # and no row completed
    box.restart()
    box.flush()
    assert [str(m.kind) for m in box.inbox("operator").values()] == ["ack"]
    assert box.nacks("operator") == []
    assert sent not in box.stored()
