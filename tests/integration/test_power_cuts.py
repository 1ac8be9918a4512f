"""What a power cut leaves of single files, and what the next start makes of it.

A cut may undo renames that were not synced, and leave files without content that was not; the
journal is durable. Another boot id tells the relay that it happened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relay.acomm.model import DeliveryState
from relay.base import fsio
from relay.base.config import Config, StoreSettings
from relay.delivery.record import LedgerWriter
from tests.box import Box
from tests.kills import killed_in

pytestmark = pytest.mark.shows("journal 5.3", "ready 1.4")


def send(box: Box, text: str) -> str:
    """A message of alice, delivered, and all of it in the journal and the ledger."""
    sent = box.send("alice", text)
    box.after(0.1)
    return sent


def next_boot(box: Box, boot: str = "boot-2") -> None:
    """The machine starts again, and the relay with it; the loop takes its turns."""
    box.boot = boot
    box.clock.advance(2)
    box.open()
    box.after(2)


def inbox(box: Box, agent: str, message_id: str) -> dict[str, bytes]:
    """Folder -> content, wherever the message is in the inbox."""
    folder = box.path("agents", agent, "inbox")
    return {
        str(path.parent.relative_to(folder)): path.read_bytes()
        for path in folder.glob(f"**/{message_id}.msg")
    }


def undo_rename(box: Box, to: str, source: str, message_id: str) -> None:
    name = f"{message_id}.msg"
    os.rename(box.path(to, name), box.path(source, name))


INBOX = "agents/bob/inbox"
AT_ONCE = StoreSettings(roll_after_s=60, roll_messages=1)


def cut_unsynced(box: Box) -> None:
    """The power goes: what the journal has not synced is zeros again."""
    journal = box.events.journal
    lost = journal.end - journal.durable
    assert lost
    position = journal._active.position
    box.kill()
    with open(journal._active.path, "r+b") as file:
        file.seek(position - lost)
        file.write(bytes(lost))


def test_one_sync_for_a_message_sent_delivered_and_read(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(fsio, "fault", lambda operation, name: calls.append(operation))
    sent = box.send("alice", "TO: bob\n\nhi")
    box.take("bob", sent)
    box.tick()
    assert box.states(sent) == {"bob": "read"} and calls.count("sync") == 1
    box.after(0.5)
    box.send("alice", "TO: bob\n\nnext")  # its sync is that of the read
    assert calls.count("sync") == 2


@pytest.mark.parametrize("lost", ["the read", "the read behind a checkpoint", "the delivery too"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_read_that_the_journal_lost_and_the_ledger_has_is_a_read(
    box: Box, lost: str, is_removed: bool
) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    if lost != "the delivery too":
        box.after(2)
    if lost == "the read behind a checkpoint":
        box.flusher.flush()
    box.take("bob", sent)
    box.tick()
    if is_removed:
        box.path(INBOX, ".read", f"{sent}.msg").unlink()
    assert box.states(sent) == {"bob": "read"}
    cut_unsynced(box)
    next_boot(box)
    assert box.states(sent) == {"bob": "read"} and "." not in inbox(box, "bob", sent)
    number = box.store.state.relay_ids[sent]
    assert box.store.state.deliveries[number]["bob"].state is DeliveryState.RECEIVED


def test_a_read_between_two_attempts_that_the_journal_lost_is_a_read(box: Box) -> None:
    sent = send(box, "TO: bob\nDELIVERY: at-least-once\n\nhi")
    box.clock.advance(60)
    box.tick()  # its acknowledgment is overdue, and the next attempt is not due yet
    box.take("bob", sent)
    box.tick()
    cut_unsynced(box)
    next_boot(box)
    assert box.sql("SELECT attempt, read_how FROM deliveries") == [(2, "taken")]


def test_a_read_that_the_journal_lost_of_what_was_delivered_behind_another_cut_is_a_read(
    box: Box,
) -> None:
    """The first attempt was lost before the ledger had it; its file was sent again."""
    with killed_in(LedgerWriter, "write"):
        box.send("alice", "TO: bob\n\nhi", "1000000001-01.msg")
    box.kill()
    for path in box.path("archive").glob("*/alice/*.msg"):
        os.rename(path, box.path("agents/alice/outbox", path.name))
    box.path(INBOX, "1000000001-01.msg").unlink()
    next_boot(box)
    box.take("bob", "1000000001-01")
    box.tick()
    read = box.sql("SELECT state, read_at FROM deliveries")
    cut_unsynced(box)
    next_boot(box, "boot-3")
    assert box.sql("SELECT state, read_at FROM deliveries") == read


def test_a_read_that_journal_and_ledger_lost_is_what_the_inbox_says(box: Box) -> None:
    """Less than a second before the power went: its file is in the inbox again, and unread."""
    sent = send(box, "TO: bob\n\nhi")
    box.after(2)
    box.take("bob", sent)
    box.tick()
    cut_unsynced(box)
    undo_rename(box, f"{INBOX}/.read", INBOX, sent)
    box.sql("UPDATE deliveries SET state = 'written', read_at = NULL, read_how = NULL")
    next_boot(box)
    assert box.states(sent) == {"bob": "written"} and "." in inbox(box, "bob", sent)
    box.take("bob", sent)
    box.tick()
    assert box.states(sent) == {"bob": "read"}


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_a_delivered_file_that_is_back_in_pending_is_delivered(box: Box, boot: str) -> None:
    """Without another boot, a cancellation that was not committed leaves it so."""
    sent = send(box, "TO: bob\n\nhi")
    whole = inbox(box, "bob", sent)["."]
    box.kill()
    undo_rename(box, INBOX, f"{INBOX}/.pending", sent)
    next_boot(box, boot)
    box.after(2)
    assert inbox(box, "bob", sent) == {".": whole}
    assert box.states(sent) == {"bob": "written"}


def test_before_messages_roll_into_an_archive_their_files_are_synced(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a cut deliveries of the live messages alone are compared with the inboxes."""
    calls: list[str] = []

    def listen(operation: str, name: str) -> None:
        calls.append("archive" if ".acomm" in name and "/archive/" in name else operation)

    send(box, "TO: bob\n\nhi")
    box.flusher.flush()
    box.clock.advance(90_000)
    monkeypatch.setattr(fsio, "fault", listen)
    box.tick(5)
    assert box.store.state.archives and not box.store.state.messages
    assert "syncfs" in calls[: calls.index("archive")]


@pytest.mark.parametrize("move", [os.rename, os.link])  # of one name, or under both
def test_an_original_that_is_back_in_the_outbox_goes_to_its_place_in_the_archive(
    box: Box, move: Callable[[Path, Path], None]
) -> None:
    sent = send(box, "TO: bob\n\nhi")
    original = box.path(box.row(sent)["file_path"])
    box.kill()
    move(original, box.path("agents/alice/outbox", original.name))
    next_boot(box)
    assert box.nacks("alice") == []
    assert original.read_bytes().endswith(b"hi") and box.outbox("alice") == []
    assert box.row(sent)["status"] == "archived"
    assert not list(box.path("archive").glob("*/alice/duplicates/*"))


def test_one_that_is_back_without_its_content_is_written_again_in_the_archive(box: Box) -> None:
    sent = send(box, "TO: bob\n\nhi")
    original = box.path(box.row(sent)["file_path"])
    box.kill()
    original.unlink()
    box.path("agents/alice/outbox", original.name).touch()
    next_boot(box)
    assert original.read_bytes().endswith(b"hi") and box.outbox("alice") == []
    assert box.nacks("alice") == []


@pytest.mark.parametrize(
    ("content", "how"),
    [("whole", "taken"), ("empty", "taken"), ("linked", "taken"), ("whole", "removed")],
)
def test_what_was_read_is_not_in_the_inbox_again(box: Box, content: str, how: str) -> None:
    """A rename between two names of one file does nothing."""
    sent = send(box, "TO: bob\n\nhi")
    whole = inbox(box, "bob", sent)["."]
    box.take("bob", sent) if how == "taken" else box.path(INBOX, f"{sent}.msg").unlink()
    box.after(0.1)
    box.after(1.1)
    assert box.sql("SELECT state, read_how FROM deliveries") == [("read", how)]
    box.kill()
    if content == "linked":
        os.link(box.path(INBOX, ".read", f"{sent}.msg"), box.path(INBOX, f"{sent}.msg"))
    else:
        box.path(INBOX, ".read", f"{sent}.msg").unlink(missing_ok=True)
        box.path(INBOX, f"{sent}.msg").write_bytes(whole if content == "whole" else b"")
    next_boot(box)
    is_kept = how == "taken" and content != "empty"
    assert inbox(box, "bob", sent) == ({".read": whole} if is_kept else {})
    assert box.sql("SELECT state, read_how FROM deliveries") == [("read", how)]


def test_what_was_answered_and_lost_its_content_is_not_in_the_inbox(box: Box) -> None:
    sent = send(box, "TO: bob\nKIND: command\n\ndo")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\nSTATUS: completed\n\ndone")
    assert box.states(sent) == {"bob": "acked"}
    box.kill()
    box.path(INBOX, f"{sent}.msg").write_bytes(b"")
    next_boot(box)
    assert inbox(box, "bob", sent) == {} and box.states(sent) == {"bob": "acked"}


def test_what_was_taken_back_is_not_in_the_inbox_again(box: Box) -> None:
    sent = send(box, "TO: bob\n\nhi")
    whole = inbox(box, "bob", sent)["."]
    box.command("alice", "message.cancel", f"ID: {sent}")
    assert box.states(sent) == {"bob": "expired"} and inbox(box, "bob", sent) == {}
    box.kill()
    box.path(INBOX, f"{sent}.msg").write_bytes(whole)
    next_boot(box)
    assert inbox(box, "bob", sent) == {} and box.states(sent) == {"bob": "expired"}


def test_a_damaged_attempt_comes_again_though_an_earlier_one_was_read(box: Box) -> None:
    sent = send(box, "TO: bob\nDELIVERY: at-least-once\n\ndo")
    box.take("bob", sent)
    box.after(61)
    box.after(1.1)
    assert box.sql("SELECT state, attempt FROM deliveries") == [("written", 2)]
    box.kill()
    box.path(INBOX, f"{sent}.msg").write_bytes(bytes(200))
    next_boot(box)
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "3"
    assert box.sql("SELECT state, attempt FROM deliveries") == [("written", 3)]


def test_a_damaged_file_is_due_at_once_though_its_next_attempt_is_not(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box.flusher, "flush_if_due", lambda: None)  # what it covers is synced
    sent = send(box, "TO: bob\nDELIVERY: at-least-once\n\ndo")
    box.clock.advance(60)
    box.tick()  # its acknowledgment is overdue: it waits for the next attempt
    box.kill()
    box.path(INBOX, f"{sent}.msg").write_bytes(b"")
    box.boot = "boot-2"
    box.open()
    assert box.inbox("bob")[sent].headers["ATTEMPT"] == "2"


def test_what_lost_its_content_and_is_not_delivered_again_leaves_nothing(box: Box) -> None:
    sent = send(box, "TO: bob\nTTL: 5\n\nhi")
    box.kill()
    box.path(INBOX, f"{sent}.msg").write_bytes(bytes(200))
    box.clock.advance(10)
    next_boot(box)
    assert inbox(box, "bob", sent) == {} and box.states(sent) == {"bob": "expired"}
    assert "its TTL of 5 s passed" in box.nacks("alice")[-1]


def test_the_row_of_an_accepted_message_is_that_of_the_journal_whatever_is_in_the_outbox(
    box: Box,
) -> None:
    """The line KIND is not in the file that recovery writes: it says what is so without it."""
    text = "TO: bob\nKIND: message\n\nhi"
    with killed_in(LedgerWriter, "write"):
        box.send("alice", text, "1000000001-01.msg")
    box.kill()
    for path in box.path("archive").glob("*/alice/*.msg"):  # the rename is undone
        os.rename(path, box.path("agents/alice/outbox", path.name))
    box.path("agents/alice/outbox/1000000001-01.msg").write_bytes(b"")
    next_boot(box)
    assert box.bodies("bob") == ["hi"]
    ((status, size, path),) = box.sql(
        "SELECT status, file_size, file_path FROM messages WHERE agent_name = 'alice'"
    )
    assert (status, size) == ("archived", len(text))
    assert box.path(path).read_bytes().endswith(b"\n\nhi")


def test_what_cannot_be_read_now_is_not_taken_for_damaged(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = send(box, "TO: bob\nKIND: command\n\ndo")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\nSTATUS: completed\n\ndone")
    whole, read = inbox(box, "bob", sent), fsio.read_regular
    box.kill()

    def faulty(name: str, *rest: Any, **options: Any) -> Any:
        if name == f"{sent}.msg":
            raise OSError(errno.EIO, "Input/output error")
        return read(name, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "read_regular", faulty)
        next_boot(box)
    assert whole and inbox(box, "bob", sent) == whole


def test_a_file_that_has_its_old_name_as_well_is_sent(box: Box) -> None:
    """btrfs keeps both names of a rename that was synced by half, also before any relay ran."""
    name = box.name()
    box.kill()
    pending = box.path("agents/alice/outbox/.pending", name)
    pending.write_text("TO: bob\n\nhi")
    pending.chmod(0o600)
    os.link(pending, box.path("agents/alice/outbox", name))
    box.open()
    box.after(1)
    assert box.bodies("bob") == ["hi"] and box.nacks("alice") == []
    assert not pending.exists() and box.outbox("alice") == []


@pytest.mark.box("alice", "bob", config=Config(store=AT_ONCE))
def test_what_rolled_unread_and_was_read_later_is_not_in_the_inbox_again(box: Box) -> None:
    sent = send(box, "TO: bob\n\nhi")
    for _ in range(3):
        box.after(70, turns=8)
    assert not box.store.state.messages
    box.flusher.flush()
    box.take("bob", sent)
    box.after(0.1)
    assert box.states(sent) == {"bob": "read"}
    box.kill()
    undo_rename(box, f"{INBOX}/.read", INBOX, sent)
    next_boot(box)
    assert list(inbox(box, "bob", sent)) == [".read"] and box.states(sent) == {"bob": "read"}


@pytest.mark.box("alice", "bob", seconds=1)
def test_what_is_removed_before_the_record_does_not_come_again(box: Box) -> None:
    """No power cut: SIGKILL, and bob removes his files before the relay is back."""
    sent = box.drop("alice", "TO: bob\n\nhi")
    with killed_in(LedgerWriter, "record"):
        box.tick()
    box.kill()
    box.remove("bob", sent)
    box.clock.advance(1.5)
    box.open()
    box.after(2)
    assert box.inbox("bob") == {}
    assert box.sql("SELECT state, read_how, attempt FROM deliveries") == [("read", "removed", 1)]
    assert not [line for line in box.log if line.get("action") == "mailbox_vanished"]
