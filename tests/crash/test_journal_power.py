"""The power goes at any call, in any way: what ``commit`` returned for is there, at its offset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base import fsio
from relay.journal.journal import Journal, JournalReader
from relay.journal.segment import SegmentPolicy
from tests.crash.test_power import PowerCut
from tests.fakes import FakeClock
from tests.journal.model import Model
from tests.power import Cut, Power

STREAM = "00000000000000000001"
POLICY = SegmentPolicy(segment_bytes=6_000, slice_bytes=1_500)


class Bench:
    """A journal at work on a disk whose power goes at the given call."""

    def __init__(self, root: Path, seed: int, calls: int) -> None:
        self.root = root
        self.dice = random.Random(seed)
        self.clock = FakeClock(1_780_000_000_000_000_000)
        self.model = Model()
        self.power = Power(root)
        self.left = calls
        self.warned: list[str] = []
        self.covered = 0

    def fault(self, operation: str, name: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise PowerCut
        self.power(operation, name)

    def work(self) -> None:
        journal = self.open(self.root)
        while True:
            step = self.dice.randrange(10)
            if step < 6:
                sizes = [self.dice.choice((0, 3, 200, 900, 7_000)) for _ in range(1 + step)]
                self.model.append(journal, [self.dice.randbytes(size) for size in sizes])
            if step != 7:
                journal.commit()
                self.model.promise()
            if step == 6:
                self.covered = journal.durable
                journal.note_checkpoint(self.covered)
            elif step == 7:
                journal.preallocate()
            elif step == 8:
                journal.seal()

    def open(self, root: Path) -> Journal:
        return Journal.open(
            str(root / STREAM), 1, self.clock, POLICY, self.warned.append, covered=self.covered
        )


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "journal"
    made.mkdir()
    yield made


@pytest.mark.shows("journal 1.9")
@pytest.mark.parametrize("mode", Cut)
@pytest.mark.parametrize("seed", range(12))
def test_what_was_committed_is_there(
    mode: Cut, seed: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(root, seed, calls=random.Random(f"{seed}").randrange(5, 160))
    monkeypatch.setattr(fsio, "fault", bench.fault)
    with pytest.raises(PowerCut):
        bench.work()
    monkeypatch.undo()
    left = bench.power.cut(tmp_path / "after", mode, bench.dice)
    bench.power.close()

    journal = bench.open(left)
    bench.model.after_crash(journal.read())
    assert not [line for line in bench.warned if "salvaged" in line or "lost" in line]
    # It goes on from there, and a second opening finds the same.
    bench.model.append(journal, [b"after", b"", b"x" * 5_000])
    journal.commit()
    bench.model.promise()
    journal.close()
    journal = bench.open(left)
    bench.model.compare(journal.read())
    bench.model.compare(JournalReader(str(left / STREAM)).read())
    journal.close()


@pytest.mark.shows("journal 1.13")
@pytest.mark.parametrize("seed", range(8))
def test_of_a_batch_whose_sync_did_not_return_the_beginning_counts(
    seed: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(root, seed, calls=1_000)
    policy = SegmentPolicy(segment_bytes=60_000, slice_bytes=20_000)
    folder, warned = str(root / STREAM), bench.warned
    journal = Journal.open(folder, 1, bench.clock, policy, warned.append)
    journal.preallocate()
    bench.model.append(journal, [b"kept", b"kept too"])
    journal.commit()
    bench.model.promise()
    bench.power.sync_all()
    bench.left = 1  # the write is done, its sync is not
    monkeypatch.setattr(fsio, "fault", bench.fault)
    sizes = [bench.dice.randrange(20, 700) for _ in range(40)]
    bench.model.append(journal, [bench.dice.randbytes(size) for size in sizes])
    with pytest.raises(PowerCut):
        journal.commit()
    monkeypatch.undo()
    left = bench.power.cut(tmp_path / "after", Cut.SECTORS, bench.dice)
    bench.power.close()

    journal = Journal.open(str(left / STREAM), 1, bench.clock, policy, warned.append)
    bench.model.after_crash(journal.read())
    journal.close()
    assert ["a torn tail" in line for line in warned] == [True]
