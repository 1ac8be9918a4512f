"""The manifest: what was appended is there, whatever ends the process and whatever is damaged."""

from __future__ import annotations

import os
import random
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relay.base.errors import RelayError
from relay.journal import manifest as manifests
from relay.journal.catalog import snapshot_ids
from relay.journal.manifest import Manifest
from relay.journal.manifest_format import (
    ChunkFlag,
    ManifestRecord,
    ManifestType,
    decode_chunk_header,
)
from relay.journal.manifest_reader import chunk_indexes, decode_chunk, read_manifest
from tests.disk import failing, hooked, killed_before
from tests.fakes import FakeClock
from tests.journal.manifest_support import (
    STREAM_1,
    STREAM_2,
    any_record,
    begin,
    entries_of,
    opened,
    path_of,
    said,
    sealed,
    silent,
    stored,
)
from tests.power import Cut, Durable, Power, build

PHASES = (Phase.explicit, Phase.generate)  # shrinking takes longer than a test may
RECORDS = [record for n in range(6) for record in (opened(n, n * 100), sealed(n, n * 100))]


@pytest.fixture
def stream(tmp_path: Path) -> str:
    """Where the stream is going to be."""
    return str(tmp_path / "journal" / f"{1:020d}")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four or five records, and a snapshot every seven."""
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", 64 + 300)
    monkeypatch.setattr(manifests, "SNAPSHOT_EVERY", 7)


# -- writing and opening again -------------------------------------------------------------


@pytest.mark.parametrize("ahead", [b"\0" * 300, RECORDS[3].encode()], ids=["zeros", "a record"])
def test_a_writer_continues_where_another_had_committed(stream: str, ahead: bytes) -> None:
    """A writer that maps its chunks may be killed with its tail ahead of what it synced."""
    begin(stream).append(*RECORDS[:3])
    path = path_of(stream, 0)
    whole = path.read_bytes()
    header = decode_chunk_header(whole, "it")
    mapped = header._replace(tail_offset=len(whole) + len(ahead))
    path.write_bytes(mapped.encode() + whole[64:] + ahead)
    begin(stream).append(RECORDS[4])
    assert stored(stream) == [*RECORDS[:3], RECORDS[4]]
    assert decode_chunk_header(path.read_bytes(), "it").tail_offset == len(
        whole + RECORDS[4].encode()
    )


@pytest.mark.parametrize("source", [STREAM_1, STREAM_2], ids=["a full chunk", "one that goes on"])
def test_a_chunk_has_the_golden_bytes(
    stream: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = (source / "manifest" / f"{0:020d}.mlog").read_bytes()
    is_full = source == STREAM_1
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", len(golden) + 1000 * (not is_full))
    manifest = begin(stream)
    manifest.append(*decode_chunk(golden, "it", 0).records)
    if is_full:
        manifest.append(opened(0))
    manifest.close()
    assert path_of(stream, 0).read_bytes() == golden
    if is_full:
        head = decode_chunk_header(path_of(stream, 1).read_bytes(), "it")
        assert (head.chunk_index, head.base_record, head.flags) == (1, 8, 0)


@pytest.mark.shows("journal 3.2")
def test_chunks_are_contiguous_and_no_longer_than_their_capacity(stream: str) -> None:
    manifest = begin(stream)
    blob = bytes(60_000)
    for _ in range(9):
        manifest.append(said(ManifestType.CustomEvent, 0, schema_id=7, blob=blob))
    manifest.close()
    heads = [
        decode_chunk_header(path_of(stream, n).read_bytes(), "it") for n in chunk_indexes(stream)
    ]
    assert [(head.chunk_index, bool(head.flags & ChunkFlag.SEALED)) for head in heads] == [
        (0, True),
        (1, True),
        (2, False),
    ]
    assert all(path_of(stream, head.chunk_index).stat().st_size <= 256 << 10 for head in heads)
    assert all(head.tail_offset == head.committed_len for head in heads)
    assert len(stored(stream)) == 9


@pytest.mark.parametrize("index", [0, 1])
def test_a_chunk_that_lost_all_its_bytes_is_begun_again(
    stream: str, index: int, small: None
) -> None:
    lines: list[str] = []
    manifest = begin(stream)
    if index:
        manifest.append(*RECORDS[:3])
    manifest.close()
    path_of(stream, index).write_bytes(b"")
    manifest = Manifest.open(stream, 1, FakeClock(), lines.append)
    assert lines == [f"{path_of(stream, index)}: created and never written; it is started again"]
    assert not manifest.damaged
    for record in RECORDS[3:]:
        manifest.append(record)
    manifest.close()
    assert stored(stream) == ([*RECORDS[:3], *RECORDS[3:]] if index else RECORDS[3:])


def test_a_stream_of_another_number_is_not_taken(stream: str) -> None:
    with pytest.raises(RelayError, match="expected stream 2, found 1"):
        Manifest.open(stream, 2, FakeClock(), silent)
    assert not os.path.exists(stream)


def test_a_closed_manifest_takes_nothing(stream: str) -> None:
    manifest = begin(stream)
    manifest.close()
    manifest.close()
    with pytest.raises(RelayError, match="closed"):
        manifest.append(opened(0))


def test_two_threads_lose_nothing_of_each_other(stream: str, small: None) -> None:
    manifest = begin(stream)

    def work(first: int) -> None:
        for segment in range(first, first + 40):
            manifest.append(opened(segment, segment))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = manifest.entries()
    manifest.close()
    ids = [*range(40), *range(1000, 1040)]
    assert [entry.segment_id for entry in entries] == ids
    again = begin(stream)
    assert again.entries() == entries
    again.close()
    assert sorted(record.segment_id for record in stored(stream)) == ids


# -- crashes -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Cut)
def test_a_kill_and_a_power_cut_lose_nothing_that_returned(
    tmp_path: Path, mode: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any call; what a kill leaves is all that was written."""
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", 64 + 700)  # more than a sector
    monkeypatch.setattr(manifests, "SNAPSHOT_EVERY", 7)
    (tmp_path / "disk").mkdir()
    power = Power(tmp_path / "disk")
    done: list[ManifestRecord] = []
    states: list[tuple[int, Durable]] = []

    def watch(operation: str, name: str) -> None:
        states.append((len(done), power.state()))
        power(operation, name)

    given = [record for n in range(12) for record in (opened(n, n * 100), sealed(n, n * 100))]
    with hooked(watch):
        manifest = begin(str(tmp_path / "disk" / f"{1:020d}"))
        for record in given:
            manifest.append(record)
            done.append(record)
        manifest.snapshot()
    manifest.close()
    power.close()
    assert len(states) > 100
    dice = random.Random(1)
    throws = 2 if mode is Cut.SECTORS else 1
    for number, (returned, state) in enumerate(states * throws):
        left = build(state, power.root, tmp_path / str(number), mode, dice)
        manifest = begin(str(left / f"{1:020d}"))
        found = stored(manifest.stream_dir)
        assert not manifest.damaged and returned <= len(found) <= returned + 1
        assert found == given[: len(found)]
        assert manifest.entries() == list(entries_of(found).values())
        manifest.append(said(ManifestType.CustomEvent, 0, schema_id=1, blob=b"on"))
        manifest.close()
        again = begin(manifest.stream_dir)
        assert len(stored(manifest.stream_dir)) == len(found) + 1 and not again.damaged
        again.close()


@pytest.mark.shows("journal 3.3")
def test_a_torn_tail_is_dropped_and_said(stream: str) -> None:
    lines: list[str] = []
    manifest = begin(stream)
    manifest.append(*RECORDS[:2])
    manifest.close()
    whole = path_of(stream, 0).read_bytes()
    path_of(stream, 0).write_bytes(whole + RECORDS[2].encode()[:-3])
    manifest = Manifest.open(stream, 1, FakeClock(), lines.append)
    assert lines == [f"{path_of(stream, 0)} at {len(whole)}: torn tail of 49 bytes dropped"]
    assert not manifest.damaged and len(manifest.entries()) == 1
    assert path_of(stream, 0).read_bytes() == whole
    manifest.append(RECORDS[2])
    manifest.close()
    assert stored(stream) == RECORDS[:3]


def test_a_reader_takes_a_write_in_progress_for_what_it_is(stream: str) -> None:
    lines: list[str] = []
    manifest = begin(stream)
    manifest.append(*RECORDS[:2])
    with open(path_of(stream, 0), "ab") as file:
        file.write(RECORDS[2].encode())
    view = read_manifest(stream, lines.append)
    assert (view.records, lines, view.damaged) == (RECORDS[:2], [], False)
    manifest.close()


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_full_disk_and_a_failed_sync(stream: str, call: str) -> None:
    manifest = begin(stream)
    manifest.append(RECORDS[0])
    with failing(call), pytest.raises(OSError, match="No space"):
        manifest.append(RECORDS[1])
    assert not manifest.entries()[0].sealed  # not committed: not applied
    if call == "write":
        manifest.append(RECORDS[1])
    else:
        with pytest.raises(RelayError, match="a sync failed"):
            manifest.append(RECORDS[1])
    manifest.close()
    manifest = begin(stream)
    assert manifest.entries()[0].sealed is (call == "write")
    manifest.close()


def test_a_snapshot_that_finds_no_room_fails_no_append(stream: str, small: None) -> None:
    lines: list[str] = []
    manifest = Manifest.open(stream, 1, FakeClock(), lines.append)
    with failing("create", ".snap"):
        for record in RECORDS:
            manifest.append(record)
    manifest.close()
    assert lines and all("cannot write a snapshot of the manifest" in line for line in lines)
    assert stored(stream) == RECORDS and snapshot_ids(stream) == []


# -- the same against a list ---------------------------------------------------------------


class AgainstAList(RuleBasedStateMachine):
    """Append, roll, snapshot, kill and reopen; the chunks hold what the list holds."""

    @initialize(folder=st.uuids())
    def start(self, folder: object) -> None:
        self.folder = Path(os.environ["AOF2_MACHINE"]) / str(folder)
        self.folder.mkdir()
        self.stream = str(self.folder / f"{1:020d}")
        self.written: list[ManifestRecord] = []
        self.manifest = begin(self.stream)

    @rule(records=st.lists(any_record(st.integers(0, 5)), min_size=1, max_size=4))
    def append(self, records: list[ManifestRecord]) -> None:
        mine = [record for record in records if record.type != ManifestType.SnapshotMarker]
        self.manifest.append(*mine)
        self.written += mine

    @rule()
    def snapshot(self) -> None:
        self.manifest.snapshot()

    @rule(record=any_record(st.integers(0, 5)), at=st.integers(0, 9))
    def kill(self, record: ManifestRecord, at: int) -> None:
        """In the middle of an append of one record."""
        if record.type == ManifestType.SnapshotMarker:
            return
        with killed_before(at + 1) as calls:
            self.manifest.append(record)
        if len(calls) <= at:
            self.written.append(record)
            return
        self.manifest.close()
        if stored(self.stream) != self.written:
            self.written.append(record)
        self.manifest = begin(self.stream)

    @rule()
    def reopen(self) -> None:
        self.manifest.close()
        self.manifest = begin(self.stream)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "manifest"):
            return
        assert stored(self.stream) == self.written
        expected = entries_of(self.written)
        assert self.manifest.catalog.entries == expected
        assert list(expected) == sorted(expected)
        view = read_manifest(self.stream, silent)
        assert view.catalog.entries == expected and not view.damaged

    def teardown(self) -> None:
        if hasattr(self, "manifest"):
            self.manifest.close()
            shutil.rmtree(self.folder)


@pytest.mark.shows("journal 2.4")
@pytest.mark.usefixtures("small")
def test_against_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setenv("AOF2_MACHINE", str(tmp_path))
    monkeypatch.setattr(manifests, "CHUNK_CAPACITY", 64 + 700)
    run_state_machine_as_test(
        AgainstAList, settings=settings(max_examples=50, stateful_step_count=20, phases=PHASES)
    )
