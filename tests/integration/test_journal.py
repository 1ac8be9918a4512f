"""The relay on its journal: what is made again from it, and what it is told of the machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from relay.base.home import LEDGER, STORE
from relay.daemon.opening import open_store_readonly
from relay.delivery.eventlog import EventLog
from relay.journal.format import RecordFlag
from relay.journal.journal import JournalReader
from tests.box import Box
from tests.kills import killed_in

pytestmark = pytest.mark.shows("ready 1.2")

DELIVERIES = (
    "SELECT message_id, recipient, state, attempt, ack_status FROM deliveries ORDER BY 1, 2"
)
MESSAGES = (
    "SELECT message_id, agent_name, file_path, file_size, checksum, status, message_type, target, "
    "discovered_at, last_error FROM messages ORDER BY 1"
)
REJECTIONS = "SELECT agent, file_name, reason, nack_id FROM rejections"
NAMES = (LEDGER, LEDGER + "-wal", LEDGER + "-shm")


def busy_day(box: Box) -> None:
    """Something of everything that a ledger keeps."""
    first = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("alice", "TO: *\n\nlunch")
    box.take("carol", list(box.inbox("carol"))[-1])
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {first}\n\nin_progress halfway")
    box.send("alice", "TO: nobody\n\nlost?")
    box.drop("carol", "TO: bob\n\nno name", "hello.msg")
    box.join("team", "bob")
    box.tick(2)


def restart(box: Box, boot: str = "boot-1") -> None:
    box.kill()
    box.clock.advance(1)
    box.boot = boot
    box.open()
    box.tick(3)


@pytest.mark.shows("journal 5.4")
@pytest.mark.parametrize("is_gone", [True, False])
def test_what_the_ledger_lost_is_made_again(box: Box, tmp_path: Path, is_gone: bool) -> None:
    """All of it, or what came after a copy that is put back."""
    box.send("alice", "TO: bob\n\nbefore")
    keep = tmp_path / "ledger"
    keep.mkdir()
    for name in NAMES:
        shutil.copy(box.path(name), keep / name)
    busy_day(box)
    before = [box.sql(query) for query in (DELIVERIES, MESSAGES, REJECTIONS)]
    assert len(before[-1]) == 1
    box.flush()  # a checkpoint: the whole journal is needed all the same
    box.kill()
    for name in NAMES:
        box.path(name).unlink(missing_ok=True)
        if (keep / name).exists() and not is_gone:
            shutil.copy(keep / name, box.path(name))
    box.open()
    box.tick(3)
    assert [box.sql(query) for query in (DELIVERIES, MESSAGES, REJECTIONS)] == before


@pytest.mark.shows("journal 5.4")
def test_a_store_without_a_file_is_made_again_from_the_journal(box: Box) -> None:
    busy_day(box)
    box.flush()
    box.send("alice", "TO: bob\n\nlast")
    before = box.store.snapshot().file()
    box.kill()
    for path in (STORE, STORE + ".prev"):
        box.path(path).unlink(missing_ok=True)
    box.open()
    after = box.store.snapshot().file()
    assert (after.messages, after.channels) == (before.messages, before.channels)
    assert after.engine_state == before.engine_state
    assert any("rebuilt from the journal" in line["event"] for line in box.log)
    assert "last" in box.bodies("bob")


@pytest.mark.damages
def test_damaged_checkpoints_are_set_aside_and_the_journal_has_it_all(box: Box) -> None:
    busy_day(box)
    box.flush()
    box.send("alice", "TO: bob\n\nmore")
    box.flush()
    before = box.store.snapshot().file().messages
    box.kill()
    for name in (STORE, STORE + ".prev"):
        path = box.path(name)
        path.write_bytes(path.read_bytes()[:-7])
    assert open_store_readonly(box.home, box.clock, box.config).snapshot().file().messages == before
    box.open()
    assert box.store.snapshot().file().messages == before
    assert len(list(box.path("store").glob("*.bad*"))) == 2
    assert any("the store is rebuilt" in line["event"] for line in box.log)


@pytest.mark.damages
def test_a_journal_that_was_removed_begins_behind_the_checkpoint(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nkept")
    box.flush()
    box.kill()
    shutil.rmtree(box.path("journal"))
    box.open()
    box.tick()
    assert box.store.messages.find_by_relay_id(sent) is not None
    assert any("are lost" in line["event"] for line in box.log)
    again = box.send("alice", "TO: bob\n\non")
    restart(box)
    assert box.store.messages.find_by_relay_id(again) is not None
    assert box.bodies("bob") == ["kept", "on"]


def test_a_checkpoint_says_that_nothing_before_it_need_be_compared(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flush()
    box.kill()
    box.path("agents", "bob", "inbox", f"{sent}.msg").unlink()  # read by somebody, unseen
    box.boot = "boot-2"
    box.open()
    box.tick(3)
    box.after(1, turns=1)
    assert box.inbox("bob") == {}
    assert box.states(sent) == {"bob": "read"}


def test_after_a_power_cut_an_empty_original_is_made_again(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nX-TICKET: 42\n\nhi")
    path = box.path(box.row(sent)["file_path"])
    before = path.read_bytes()
    path.write_bytes(b"")
    restart(box, "boot-2")
    assert path.read_bytes() == before
    assert any(line.get("action") == "mend_original" for line in box.log)


@pytest.mark.shows("journal 5.1")
def test_nothing_is_seen_outside_before_it_is_committed(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nhi")
    with killed_in(EventLog, "commit"):
        box.tick()
    assert box.inbox("bob") == {}
    assert box.states(sent) == {}
    assert box.row(sent)["status"] == "processing"
    restart(box)
    assert box.bodies("bob") == ["hi"]


@pytest.mark.shows("journal 2.8")
def test_who_looks_sees_what_happened_a_moment_ago(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.clock.advance(1)
    box.tick()  # what nobody waits for is committed soon, too
    assert not box.path(STORE).exists()
    seen = open_store_readonly(box.home, box.clock, box.config)
    stored = seen.messages.find_by_relay_id(sent)
    assert stored is not None
    assert seen.state.sequence == box.store.sequence
    assert seen.state.deliveries == box.store.state.deliveries


def test_no_tail_stays_in_memory(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.flush()  # the last thing that happens is a checkpoint, and a record says so
    for _ in range(2):
        box.after(1, turns=1)
    assert box.events.journal.end == box.events.journal.durable
    *_, last = JournalReader(str(box.path("journal", f"{1:020d}"))).read()
    assert last.flags & RecordFlag.SNAPSHOT_BOUNDARY


@pytest.mark.shows("journal 5.5")
def test_with_encryption_the_journal_is_sealed_too(tmp_path: Path) -> None:
    from relay.base.config import Config, StoreSettings

    config = Config(store=StoreSettings(encrypt=True))
    box = Box(tmp_path / "sealed", "alice", "bob", config=config)
    box.send("alice", "TO: bob\n\nthe secret word")
    segments = b"".join(p.read_bytes() for p in box.path("journal").glob("*/segments/*.seg"))
    assert b"the secret word" not in segments
    restart(box)
    assert [m.content for m in box.store.messages.query().messages] == [b"the secret word"]
    box.close()
