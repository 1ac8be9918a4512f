"""The power goes at any call, in any way: what ``commit`` returned for is there, at its offset."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.journal.journal import Journal, JournalReader
from relay.journal.segment import SegmentPolicy
from tests.disk import hooked
from tests.fakes import FakeClock
from tests.journal.model import Model
from tests.power import Cut, Durable, Power, build

STREAM = "00000000000000000001"
POLICY = SegmentPolicy(segment_bytes=6_000, slice_bytes=1_500)


class Instant(NamedTuple):
    """What was appended, how much of it promised, what a checkpoint covers; and the disk."""

    appended: list[tuple[int, bytes]]
    committed: int
    covered: int
    disk: Durable


def opened(
    root: Path, warn: Callable[[str], object], covered: int = 0, policy: SegmentPolicy = POLICY
) -> Journal:
    clock = FakeClock(1_780_000_000_000_000_000)
    return Journal.open(str(root / STREAM), 1, clock, policy, warn, covered=covered)


def instants_of(root: Path, dice: random.Random) -> list[Instant]:
    """The instants before each call of a journal at work."""
    model, power, covered = Model(), Power(root), 0
    found: list[Instant] = []

    def watch(operation: str, name: str) -> None:
        found.append(Instant(list(model.appended), model.committed, covered, power.state()))
        power(operation, name)

    with hooked(watch):
        journal = opened(root, pytest.fail)
        while len(found) < 120:
            step = dice.randrange(10)
            if step < 6:
                sizes = [dice.choice((0, 3, 200, 900, 7_000)) for _ in range(1 + step)]
                model.append(journal, [dice.randbytes(size) for size in sizes])
            if step != 7:
                journal.commit()
                model.promise()
            if step == 6:
                covered = journal.durable
                journal.note_checkpoint(covered)
            elif step == 7:
                journal.preallocate()
            elif step == 8:
                journal.seal()
    journal.close()
    power.close()
    return found


@pytest.mark.shows("journal 1.9")
@pytest.mark.parametrize("mode", Cut)
def test_what_was_committed_is_there(mode: Cut, tmp_path: Path) -> None:
    root, dice = tmp_path / "journal", random.Random(mode.value)
    root.mkdir()
    for number, instant in enumerate(instants_of(root, dice)):
        left = build(instant.disk, str(root), tmp_path / str(number), mode, dice)
        model, warned = Model(), list[str]()
        model.appended, model.committed = instant.appended, instant.committed
        journal = opened(left, warned.append, instant.covered)
        model.after_crash(journal.read())
        assert not [line for line in warned if "salvaged" in line or "lost" in line]
        # It goes on from there, and a second opening finds the same.
        model.append(journal, [b"after", b"", b"x" * 5_000])
        journal.commit()
        model.promise()
        journal.close()
        journal = opened(left, warned.append, instant.covered)
        model.compare(journal.read())
        model.compare(JournalReader(str(left / STREAM)).read())
        journal.close()


@pytest.mark.shows("journal 1.13")
@pytest.mark.parametrize("seed", range(8))
def test_of_a_batch_whose_sync_did_not_return_the_beginning_counts(
    seed: int, tmp_path: Path
) -> None:
    root, dice, model = tmp_path / "journal", random.Random(seed), Model()
    root.mkdir()
    policy = SegmentPolicy(segment_bytes=60_000, slice_bytes=20_000)
    journal = opened(root, pytest.fail, policy=policy)
    journal.preallocate()
    model.append(journal, [b"kept", b"kept too"])
    journal.commit()
    model.promise()
    power = Power(root)
    states: list[Durable] = []
    model.append(journal, [dice.randbytes(dice.randrange(20, 700)) for _ in range(40)])
    with hooked(lambda *_: states.append(power.state())):
        journal.commit()
    journal.close()
    power.close()
    _, written, *_ = states  # the write is done, its sync is not
    left = build(written, str(root), tmp_path / "after", Cut.SECTORS, dice)
    warned: list[str] = []
    journal = opened(left, warned.append, policy=policy)
    model.after_crash(journal.read())
    journal.close()
    assert ["a torn tail" in line for line in warned] == [True]
