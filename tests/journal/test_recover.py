"""What opening a journal makes good, and what it does when the disk fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import FormatError, JournalFailed
from relay.journal.format import FOOTER, Footer, SegmentFlag, SegmentHeader
from relay.journal.journal import Append, JournalReader
from relay.journal.manifest_format import ManifestType
from relay.journal.manifest_reader import read_manifest
from relay.journal.segment import FIRST_RECORD, UNSYNCED, segment_ids
from tests.disk import failing, flip, killed_before
from tests.journal.support import Stream, payloads, put

# --- what opening makes good


@pytest.mark.shows("journal 1.12")
def test_damage_before_good_records_loses_the_damaged_one_alone(stream: Stream) -> None:
    journal = stream.open()
    for payload in (b"one", b"two", b"", b"four"):
        put(journal, payload)
    stream.crash()
    flip(stream.path(), FIRST_RECORD + 31 + 16)  # its time: a flipped header byte shows
    damaged = stream.path().read_bytes()
    journal = stream.open()
    assert payloads(journal) == [b"one", b"", b"four"]
    assert [record.offset for record in journal.read()] == [0, 62, 90]
    assert Path(f"{stream.path()}.bad").read_bytes() == damaged
    assert "damage; 3 records salvaged, lost offsets: [31, 62)" in stream.warned[0]
    assert put(journal, b"next") == [122]
    assert segment_ids(stream.folder) == [0, 1]
    stream.crash()
    stream.warned.clear()
    journal = stream.open()
    assert payloads(journal) == [b"one", b"", b"four", b"next"]
    assert payloads(JournalReader(stream.folder)) == [b"one", b"", b"four", b"next"]
    footer = Footer(*FOOTER.unpack(stream.path().read_bytes()[-FOOTER.size :]))
    assert footer.flags == SegmentFlag.SEALED | SegmentFlag.PARTIAL


@pytest.mark.shows("journal 1.13")
def test_of_a_commit_that_is_cut_short_nothing_behind_its_gap_counts(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"kept", b"kept too")
    clean = stream.path().read_bytes()
    put(journal, b"one", b"two", b"three")  # the disk writes its sectors in any order
    stream.crash()
    at = FIRST_RECORD + 32 + 36
    flip(stream.path(), at + 31 + 28)
    torn = stream.path().read_bytes()
    journal = stream.open()
    assert payloads(journal) == [b"kept", b"kept too", b"one"]
    assert stream.path().read_bytes() == torn[: at + 31] + clean[at + 31 :]
    assert Path(f"{stream.path()}.torn").read_bytes() == torn[at + 31 :].rstrip(b"\0")
    assert "a torn tail" in stream.warned[0]


@pytest.mark.shows("journal 1.13", "journal 1.14")
@pytest.mark.parametrize(
    ("commits", "flipped", "at_least", "kept"),
    [
        # the ledger followed the commit to its end: it was durable, so this is damage
        ([[b"one", b"two", b"three"]], [31], 95, [b"one", b"three"]),
        (  # damage, and a commit that is cut short behind it
            [[b"one"], [b"two"], [b"three"], [b"cut", b"short", b"behind"]],
            [31, 95 + 31],
            0,
            [b"one", b"three", b"cut"],
        ),
    ],
)
def test_damage_is_salvaged_up_to_a_commit_cut_short(
    stream: Stream, commits: list[list[bytes]], flipped: list[int], at_least: int, kept: list[bytes]
) -> None:
    journal = stream.open()
    for commit in commits:
        put(journal, *commit)
    stream.crash()
    for at in flipped:
        flip(stream.path(), FIRST_RECORD + at)
    assert payloads(stream.open(at_least=at_least)) == kept
    assert "salvaged, lost offsets: [31, 62)" in stream.warned[0]


def test_a_damaged_header_costs_no_record(stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"one", b"two")
    stream.crash()
    flip(stream.path(), 0)
    journal = stream.open()
    assert payloads(journal) == [b"one", b"two"]
    assert "expected magic" in stream.warned[0]


def test_another_streams_segment_is_refused_and_left(stream: Stream) -> None:
    stream.open()
    stream.crash()
    data = SegmentHeader(2, 0, 5).encode() + b"whatever"
    stream.path().write_bytes(data)
    with pytest.raises(FormatError, match=r"at 12: expected .*\(1, 0\), found \(2, 0\)"):
        stream.open()
    assert stream.path().read_bytes() == data


@pytest.mark.shows("journal 1.15")
@pytest.mark.parametrize("zeros_behind", [0, 500])
def test_a_begun_seal_is_finished(stream: Stream, zeros_behind: int) -> None:
    # Published fault: a sealed footer rejected and erased.
    journal = stream.open()
    put(journal, b"one", b"two")
    journal._active.seal()
    stream.crash()
    with stream.path().open("ab") as file:
        file.write(bytes(zeros_behind))
    journal = stream.open()
    assert payloads(journal) == [b"one", b"two"]
    entry = journal.manifest.catalog.entries[0]
    assert entry.sealed and entry.file_bytes == stream.path().stat().st_size
    assert put(journal, b"three") == [62]
    assert segment_ids(stream.folder) == [0, 1]
    assert stream.warned == []


@pytest.mark.shows("journal 2.5")
@pytest.mark.parametrize("left", ["no file", "no bytes", "a piece of header", "zeros"])
def test_a_segment_that_was_made_and_never_written_is_made_good(stream: Stream, left: str) -> None:
    # Published fault: a created but never written segment fails recovery.
    journal = stream.open()
    put(journal, b"one")
    journal.seal()
    stream.crash()
    kept = stream.path(1).read_bytes()
    contents = {"no bytes": b"", "a piece of header": kept[:20], "zeros": bytes(len(kept))}
    stream.path(1).unlink()
    if left in contents:
        stream.path(1).write_bytes(contents[left])
    journal = stream.open()
    assert put(journal, b"two") == [31]
    stream.crash()
    assert payloads(stream.open()) == [b"one", b"two"]
    assert stream.path(1).read_bytes()[:FIRST_RECORD] == kept[:FIRST_RECORD]


@pytest.mark.parametrize("calls", range(20))
def test_a_kill_at_any_call_of_a_roll_is_made_good(calls: int, stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"one")
    with killed_before(calls + 1) as made:
        journal.seal()
    assert len(made) == calls + 1 or calls > 8  # fewer do not make a roll
    stream.crash()
    journal = stream.open()
    assert put(journal, b"two") == [31]
    stream.crash()
    assert payloads(stream.open()) == [b"one", b"two"]
    assert payloads(JournalReader(stream.folder)) == [b"one", b"two"]


@pytest.mark.shows("journal 3.4")
@pytest.mark.parametrize("fault", ["lost", "damaged in the middle"])
def test_a_manifest_is_made_again_from_the_segments(stream: Stream, fault: str) -> None:
    journal = stream.open()
    given = [bytes([65 + number]) * 900 for number in range(12)]
    put(journal, *given)
    before = journal.manifest.entries()
    stream.crash()
    if fault == "lost":
        shutil.rmtree(Path(stream.folder, "manifest"))
    else:
        flip(Path(stream.folder, "manifest", f"{0:020d}.mlog"), 300)
    journal = stream.open()
    assert stream.warned != []
    assert payloads(journal) == given
    assert journal.manifest.entries() == before
    assert put(journal, b"next") == [12 * 928]
    stream.crash()
    assert payloads(stream.open()) == [*given, b"next"]


def test_a_stream_that_lost_its_end_says_so_and_continues_behind_it(stream: Stream) -> None:
    journal = stream.open()
    put(journal, *[b"x" * 900] * 6)
    stream.crash()
    for number in segment_ids(stream.folder)[1:]:
        stream.path(number).unlink()
    shutil.rmtree(Path(stream.folder, "manifest"))
    journal = stream.open(at_least=5_568)
    assert any("the records of offsets [3712, 5568) are lost" in line for line in stream.warned)
    assert put(journal, b"next") == [5_568]
    stream.crash()
    stream.warned.clear()
    journal = stream.open(at_least=5_597, covered=5_000)
    assert stream.warned == []
    assert payloads(journal)[-1] == b"next" and len(payloads(journal)) == 5


# --- when the disk fails


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_after_a_failed_commit_everything_is_refused_until_reopened(
    operation: str, stream: Stream
) -> None:
    journal = stream.open()
    put(journal, b"durable")
    journal.append([Append(b"not known")])
    with failing(operation, ".seg", errno.EIO), pytest.raises(OSError):
        journal.commit()
    for refused in (journal.commit, journal.preallocate, journal.seal, journal.roll_if_due):
        with pytest.raises(JournalFailed, match="the journal failed"):
            refused()
    with pytest.raises(JournalFailed):
        journal.append([Append(b"more")])
    assert payloads(journal) == [b"durable"]
    stream.crash()
    journal = stream.open()
    assert payloads(journal)[0] == b"durable"
    put(journal, b"again")
    assert payloads(journal)[-1] == b"again"


def test_a_short_write_leaves_no_record(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, 0

    def short(fd: int, data: bytes, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data[:40], at)

    journal = stream.open()
    journal.append([Append(b"one"), Append(b"two"), Append(b"three")])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short)
        with pytest.raises(OSError, match="full"):
            journal.commit()
    stream.crash()
    journal = stream.open()
    put(journal, b"next")
    assert payloads(journal) == [b"one", b"next"]


@pytest.fixture
def written(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """What is written into the first segment, and where."""
    found: list[tuple[int, bytes]] = []
    real = fsio.write_at

    def write_at(fd: int, data: bytes, at: int, name: str) -> None:
        if name == str(stream.path()):
            found.append((at, bytes(data)))
        real(fd, data, at, name)

    monkeypatch.setattr(fsio, "write_at", write_at)
    return found


@pytest.mark.shows("journal 1.17")
def test_a_failed_sync_is_remembered(stream: Stream, written: list[tuple[int, bytes]]) -> None:
    journal = stream.open()
    put(journal, b"durable")
    journal.append([Append(b"who knows")])
    with failing("sync", "0.seg", errno.EIO), pytest.raises(OSError):
        journal.commit()
    stream.crash()
    marker = Path(f"{stream.path()}{UNSYNCED}")
    assert marker.read_bytes() == str(FIRST_RECORD + 35).encode()
    written.clear()
    journal = stream.open()
    (rewritten,) = [data for at, data in written if at <= FIRST_RECORD + 35 < at + len(data)]
    assert rewritten.endswith(b"who knows")  # the page cache alone may have had it
    journal.seal()
    seal = read_manifest(stream.folder, pytest.fail).records[-2]
    assert seal.type == ManifestType.SealSegment and seal.fields["flush_failure"] == 1
    assert not marker.exists()


@pytest.mark.shows("journal 1.16")
def test_what_is_not_covered_is_written_again(
    stream: Stream, written: list[tuple[int, bytes]]
) -> None:
    """Its footer was written, its last sync failed, and so did the word about that."""
    journal = stream.open()
    put(journal, b"covered")
    covered = journal.end
    put(journal, b"who knows")
    with failing("truncate", "0.seg", errno.EIO), pytest.raises(OSError):
        journal.seal()
    stream.crash()
    Path(f"{stream.path()}{UNSYNCED}").unlink(missing_ok=True)
    written.clear()
    journal = stream.open(covered=covered)
    ((at, data),) = written
    assert at == FIRST_RECORD + covered and b"who knows" in data and b"covered" not in data
    assert payloads(journal) == [b"covered", b"who knows"]


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
def test_rolling_on_a_full_disk_loses_nothing(operation: str, stream: Stream) -> None:
    journal = stream.open()
    put(journal, b"a" * 3_000)
    journal.append([Append(b"b" * 3_000)])
    with failing(operation, "1.seg"):
        with pytest.raises(OSError, match="No space"):
            journal.commit()
        stream.crash()
        with pytest.raises(OSError, match="No space"):  # it is still full
            stream.open()
    assert not stream.path(1).exists()
    journal = stream.open()
    assert payloads(journal) == [b"a" * 3_000]
    put(journal, b"b" * 3_000)
    assert payloads(journal) == [b"a" * 3_000, b"b" * 3_000]


def test_opening_looks_at_no_sealed_segment(stream: Stream) -> None:
    journal = stream.open()
    for number in range(8):
        put(journal, bytes([number]))
        journal.seal()
    journal.manifest.snapshot()
    stream.crash()
    for number in range(8):
        stream.path(number).chmod(0)
        stream.path(number).rename(stream.path(number).with_suffix(".away"))
    journal = stream.open()
    assert (journal.end, stream.warned) == (8 * 29, [])
