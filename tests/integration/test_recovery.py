"""The table "After a crash" in docs/states.md: what no kill by itself leaves, or leaves seldom.

What each kill leaves is in tests/crash."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from relay.acomm import store_file
from relay.base.config import LimitSettings
from relay.base.home import STORE
from relay.delivery.eventlog import EventLog
from relay.delivery.record import LedgerWriter
from tests.box import Box
from tests.disk import failing
from tests.kills import killed_in

pytestmark = pytest.mark.shows("ready 1.4")


def restart(box: Box) -> None:
    """SIGKILL, and the next start."""
    box.kill()
    box.clock.advance(1)
    box.open()
    box.tick(2)


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


def test_a_row_whose_outbox_is_no_directory_now_waits_and_continues(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nhi")
    with killed_in(EventLog, "commit"):
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
    assert box.states(sent) == {"bob": "held"}
    box.flusher.flush()
    box.path(*box.row(sent)["file_path"].split("/")).unlink()
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


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def a_link(box: Box, sent: str) -> None:
    """A backup that saves space makes a hard link of the file."""
    os.link(box.path("agents/alice/outbox", f"{sent}.msg"), box.path("tmp/a-link"))


def a_limit(box: Box, sent: str) -> None:
    """Smaller bodies are accepted from now on."""
    box.config = replace(box.config, limits=LimitSettings(max_body_bytes=1024))


@pytest.mark.parametrize("change", [a_link, a_limit])
def test_what_was_accepted_is_not_refused_for_what_changed_since(
    box: Box, change: Callable[[Box, str], None]
) -> None:
    with killed_in(LedgerWriter, "record"):
        box.send("alice", "TO: bob\n\n" + "x" * 2000)
    (sent,) = box.inbox("bob")
    change(box, sent)
    box.restart()
    box.after(6)
    assert box.nacks("alice") == [] and list(box.inbox("bob")) == [sent]
    assert (box.row(sent)["status"], box.outbox("alice")) == ("archived", [])


@pytest.mark.damages
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


def test_a_command_obeyed_before_a_crash_is_not_obeyed_again(box: Box) -> None:
    asks = "DELIVERY: at-least-once"
    sent = box.send("alice", f"TO: bob\nKIND: command\n{asks}\n\ndeploy")
    box.until_dead()
    number = box.store.retries.dead_letters()[0].message.id
    asked = "TO: __orchestrator__\nKIND: command\n\nACTION: dead.discard\nID: "
    box.send("operator", f"{asked}{number}")
    store_file.write(box.home.path(STORE), box.store.snapshot().file())  # and no row completed
    box.restart()
    box.flush()
    assert [str(m.kind) for m in box.inbox("operator").values()] == ["ack"]
    assert box.nacks("operator") == []
    assert sent not in box.stored()
