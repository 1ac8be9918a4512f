"""`relay doctor`: a fault is planted in a home, and the line that names it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from relay.base.config import Config, JournalSettings
from relay.base.home import BASE, STORE
from relay.cli.common import plural
from relay.daemon.home_journal import carry_out
from relay.doctor import Severity, examine
from relay.journal.manifest_format import ManifestType, Reason
from relay.journal.tier_plan import PRUNE, JournalCommand
from relay.ledger.ledger import Ledger
from tests.box import INLINE, Box
from tests.disk import flip
from tests.fakes import IdleExecutor
from tests.procs import relay, rows_of

JOURNAL = JournalSettings(segment_bytes=4096, compress_segments=False, keep_age_s=1)

KEPT = INLINE._replace(tiers=IdleExecutor())  # no segment is pruned

pytestmark = [
    pytest.mark.damages,
    pytest.mark.box("alice", "bob", config=Config(journal=JOURNAL), executors=KEPT),
    pytest.mark.usefixtures("private_files"),
    pytest.mark.usefixtures("no_patience"),
    pytest.mark.shows("journal 5.11"),
]


@pytest.fixture
def box(box: Box) -> Box:
    """A relay that was stopped after some checkpoints; its journal has several segments."""
    box.send_many(40, flush_every=10)
    box.stop()
    return box


def doctor(box: Box) -> list[str]:
    """The findings; both ways of printing say the same, and so does the exit code."""
    before = {path: path.stat().st_mtime_ns for path in box.root.rglob("*.*") if path.is_file()}
    done = relay("doctor", home=box.root)
    *said, last = done.stdout.splitlines()
    assert done.returncode == (3 if said else 0)
    assert last == (f"{plural(len(said), 'problem')} found" if said else "OK")
    rows = rows_of("doctor", home=box.root, exit_code=done.returncode)
    assert [f"{row['check']}: {row['finding']}; {row['remedy']}" for row in rows] == said
    changed = {path for path, at in before.items() if path.stat().st_mtime_ns != at}
    assert not {path for path in changed if "ledger" not in path.name}
    return said


def segment(box: Box, number: int) -> Path:
    return box.path("journal", f"{1:020d}", "segments", f"{number:020d}.seg")


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-7])


def note_position(box: Box, offset: int) -> None:
    with contextlib.closing(Ledger.open(str(box.path("ledger.db")))) as ledger:
        with ledger.transaction():
            ledger.set_position(offset, 0)


def test_a_setting_that_there_is_not(box: Box) -> None:
    box.path("config.json").write_text('{"journl": {}}')
    (line,) = doctor(box)
    assert line.startswith("config: ") and "journl" in line and "fix it" in line


def test_a_damaged_checkpoint_and_what_becomes_of_it(box: Box) -> None:
    cut(box.path(STORE))
    (line,) = doctor(box)
    assert line.startswith(f"store: {box.path(STORE)} at ")
    assert line.endswith("rebuilds the store from relay.acomm.prev")
    box.open()
    assert any("the journal has the later events" in line["event"] for line in box.log)
    box.flush()
    box.kill()
    (line,) = doctor(box)
    assert line.startswith("store: relay.bad: a damaged file was set aside")


def test_checkpoints_that_are_gone(box: Box) -> None:
    box.path(STORE).unlink()
    box.path(STORE + ".prev").unlink()
    first, second = doctor(box)
    assert first == (
        f"store: {box.path(STORE)}: missing; the next start rebuilds the store from the journal"
    )
    assert second.startswith(f"store: {box.path(STORE)}.prev: missing; the next checkpoint")


def test_a_checkpoint_alone_as_in_a_backup_is_a_note(box: Box) -> None:
    box.path(STORE + ".prev").unlink()
    (finding,) = examine(box.home)
    assert finding.found == f"{box.path(STORE)}.prev: missing"
    assert finding.severity is Severity.NOTE


def test_checkpoints_without_a_journal(box: Box) -> None:
    shutil.rmtree(box.path("journal", f"{1:020d}"))
    cut(box.path(STORE))
    box.path(STORE + ".prev").unlink()
    line, gone = doctor(box)
    assert line.endswith(
        "the relay does not start: restore the store from a backup, or move it away"
    )
    assert gone.startswith("ledger: it follows the journal up to ")


def test_a_damaged_segment(box: Box) -> None:
    flip(segment(box, 1), 900, 7)
    lines = doctor(box)
    assert lines and all(line.startswith(f"journal: {segment(box, 1)}") for line in lines)
    assert all(f"`relay --home {box.root} journal move --to 0 SEGMENT`" in line for line in lines)


def test_damage_in_the_active_segment_is_not_called_files_that_are_gone(box: Box) -> None:
    last = max(segment(box, 0).parent.glob("*.seg"))
    flip(last, 200, 7)
    lines = doctor(box)
    assert lines and all(line.startswith(f"journal: {last}") for line in lines)


def test_a_journal_that_is_gone(box: Box) -> None:
    shutil.rmtree(box.path("journal"))
    first, second = doctor(box)
    assert first.startswith(
        f"journal: {box.path('journal', f'{1:020d}')} is missing, but the store "
    )
    assert second.startswith("ledger: it follows the journal up to ")
    assert all("put it back, or continue" in line for line in (first, second))
    box.open()
    box.send("alice", "TO: bob\n\nit goes on")
    box.flush()
    box.kill()
    assert not any("is missing" in line for line in doctor(box))


def test_a_missing_segment(box: Box) -> None:
    segment(box, 2).unlink()
    (line,) = doctor(box)
    assert f"{segment(box, 2)}: missing, but in the manifest as tier0" in line


def test_what_was_set_aside(box: Box) -> None:
    segment(box, 1).with_name("00000000000000000001.seg.bad.1").write_bytes(b"kept")
    (bad,) = doctor(box)
    assert "seg.bad.1: a damaged segment was set aside" in bad and "relay dump" in bad


def test_a_write_that_a_crash_cut_short_is_a_note(box: Box) -> None:
    segment(box, 1).with_name("00000000000000000001.seg.torn").write_bytes(b"kept")
    done = relay("doctor", home=box.root)
    assert "seg.torn: a write cut short by a crash was set aside" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (Reason.AUTHENTICATION, "fix the credentials"),
        (Reason.CODEC, "`relay --home HOME journal move --to 0 1`"),
        (Reason.UNAVAILABLE, ""),  # it is tried again
    ],
)
def test_tiers_that_wait_for_the_operator(box: Box, reason: Reason, remedy: str) -> None:
    box.open()
    manifest = box.events.journal.manifest
    manifest.record(ManifestType.UploadFailed, 1, 0, key="k", reason_code=int(reason))
    box.kill()
    lines = doctor(box)
    if not remedy:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith(f"tiers: segment 1: UploadFailed, {reason.name.lower()}, once; ")
    assert remedy.replace("HOME", str(box.root)) in line


def test_a_journal_that_ends_before_store_and_ledger(box: Box) -> None:
    shutil.rmtree(box.path("journal", f"{1:020d}"))
    box.path("journal", f"{1:020d}", "segments").mkdir(parents=True)
    lines = doctor(box)
    assert any(line.startswith("journal: it ends at 0, but the store covers") for line in lines)
    assert any(line.startswith("ledger: it follows the journal up to") for line in lines)


def test_a_pruned_journal(box: Box) -> None:
    box.open()
    assert list(carry_out(box.home, box.tiers, box.clock, JournalCommand(PRUNE)))
    box.kill()
    assert doctor(box) == []
    note_position(box, 1)
    (line,) = doctor(box)
    assert line.startswith("ledger: it follows the journal up to 1, but everything before ")
    note_position(box, 1 << 20)
    box.path(BASE).unlink()
    journal, ledger_line = doctor(box)
    assert "store/base.acomm does not cover the pruned part before" in journal
    assert "but that ends at" in ledger_line
    for name in (STORE, STORE + ".prev"):
        cut(box.path(name))
    lines = doctor(box)
    assert lines[0].endswith("the relay does not start: restore it from a backup")
    assert any("no store file covers the pruned records before it" in line for line in lines)


def test_a_ledger_that_is_gone_or_is_none(box: Box) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        box.path(name).unlink(missing_ok=True)
    (line,) = doctor(box)
    assert line.startswith("ledger: there is no ledger at ")
    box.path("ledger.db").write_bytes(b"no database" * 100)
    (line,) = doctor(box)
    relay_ledger = f"`relay --home {box.root} ledger"
    assert line.startswith("ledger: ") and f"{relay_ledger} rebuild` rebuilds it" in line
    assert f"{relay_ledger} restore FILE`" in line
