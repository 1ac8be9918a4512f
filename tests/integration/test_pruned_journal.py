"""A journal whose beginning was pruned: what the store can be made of, and what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.config import Config, JournalSettings
from relay.base.errors import JournalPruned
from relay.base.home import BASE, STORE
from relay.daemon.opening import open_store_readonly
from tests.box import Box

pytestmark = pytest.mark.shows("journal 5.9")

KEEP_LITTLE = Config(
    journal=JournalSettings(segment_bytes=4096, keep_age_s=1, compress_segments=False)
)
FILES = (STORE, STORE + ".prev", BASE)


@pytest.fixture
def pruned(tmp_path: Path) -> Box:
    """A relay that is down; its journal begins behind its first records."""
    box = Box(tmp_path / "home", "alice", "bob", config=KEEP_LITTLE)
    box.send_many(40, flush_every=10)
    assert box.events.journal.first > 0
    box.kill()
    return box


def damage(box: Box, *names: str) -> None:
    for name in names:
        path = box.path(name)
        data = path.read_bytes()
        path.unlink()  # base.acomm may be the same file
        path.write_bytes(data[:-7])


def everything(box: Box) -> dict[str, bytes]:
    """All files of store and journal."""
    folders = (box.path("store"), box.path("journal"))
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def test_a_pruned_journal_is_no_damage(pruned: Box) -> None:
    pruned.open()
    pruned.tick()
    assert not [line["event"] for line in pruned.log if "lost" in line["event"]]
    assert len(pruned.store.state.messages) == 40
    assert len(open_store_readonly(pruned.home, pruned.clock, pruned.config).state.messages) == 40


@pytest.mark.damages
def test_the_store_is_made_again_from_its_base(pruned: Box) -> None:
    damage(pruned, STORE, STORE + ".prev")
    assert len(open_store_readonly(pruned.home, pruned.clock, pruned.config).state.messages) == 40
    pruned.open()
    assert len(pruned.store.state.messages) == 40
    assert any("is rebuilt" in line["event"] for line in pruned.log)
    assert not any("missing" in line["event"] for line in pruned.log)


@pytest.mark.damages
def test_without_a_base_it_cannot_be_made_again_and_nothing_is_touched(pruned: Box) -> None:
    damage(pruned, *FILES)
    before = everything(pruned)
    for attempt in (
        pruned.open,
        lambda: open_store_readonly(pruned.home, pruned.clock, pruned.config),
    ):
        with pytest.raises(JournalPruned) as caught:
            attempt()
        assert "were pruned, and no store file from there on can be read" in str(caught.value)
        assert str(pruned.path(STORE)) in str(caught.value)
        assert BASE in caught.value.hint and "backup" in caught.value.hint
    assert everything(pruned) == before

    for name in FILES:  # files that are gone are no empty store
        pruned.path(name).unlink()
    with pytest.raises(JournalPruned):
        pruned.open()
    assert not pruned.path(STORE).exists()


@pytest.mark.damages
def test_a_file_from_before_the_first_record_is_refused(pruned: Box, tmp_path: Path) -> None:
    other = Box(tmp_path / "other", "alice", "bob")
    other.send("alice", "TO: bob\n\nan old backup")
    other.flush()
    for name in FILES:
        pruned.path(name).write_bytes(other.path(STORE).read_bytes())
    other.close()
    with pytest.raises(JournalPruned, match=r"the best one covers the journal before \d+"):
        pruned.open()


@pytest.mark.damages
def test_a_ledger_from_before_is_told_of(pruned: Box) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        pruned.path(name).unlink(missing_ok=True)
    pruned.open()
    assert any("rows of that time are not restored" in line["event"] for line in pruned.log)
