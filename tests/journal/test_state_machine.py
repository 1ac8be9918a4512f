"""Any steps in any order: a journal is a plain list that outlives its process and its power.

The disk is watched all the time, so the power may go between any two steps.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relay.base import fsio
from relay.journal.format import encode_record
from relay.journal.journal import Journal, JournalReader
from relay.journal.segment import FIRST_RECORD, SegmentPolicy
from tests.fakes import FakeClock
from tests.journal.model import Model
from tests.power import Cut, Power

# Published faults: records of odd length lost, one of no length ends the scan, an idle tail is
# never flushed.
pytestmark = pytest.mark.shows("journal 1.9", "journal 2.1", "journal 2.2", "journal 2.8")

STREAM = f"{1:020d}"
PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=40), st.integers(0, 2_500).map(lambda size: b"x" * size)),
    max_size=5,
)


class JournalMachine(RuleBasedStateMachine):
    """Append, commit, roll, kill, tear, cut the power, open again."""

    policy = SegmentPolicy(segment_bytes=2_000, segment_age_s=100, slice_bytes=512)

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.lives = 0
        self.root = self.base / "0"
        self.root.mkdir()
        self.clock = FakeClock(1_780_000_000_000_000_000)
        self.warned: list[str] = []
        self.model = Model()
        self.covered = 0
        self.journal: Journal
        self.power: Power

    @property
    def folder(self) -> str:
        """The stream's directory."""
        return str(self.root / STREAM)

    @initialize()
    def begin(self) -> None:
        """A new stream on a disk that is watched."""
        self.watch()
        self.open()

    def watch(self) -> None:
        """The disk as it is now is what is durable."""
        self.power = Power(self.root)
        self.no_fault, fsio.fault = fsio.fault, self.power

    def open(self) -> None:
        """Open the journal; what it has is what the list has."""
        self.journal = Journal.open(
            self.folder, 1, self.clock, self.policy, self.warned.append, covered=self.covered
        )

    @rule(payloads=PAYLOADS)
    def append(self, payloads: list[bytes]) -> None:
        self.model.append(self.journal, payloads)

    @rule()
    def commit(self) -> None:
        self.journal.commit()
        self.model.promise()

    @rule()
    def prepare(self) -> None:
        self.journal.preallocate()

    @rule(size=st.integers(0, 5_000))
    def has_room(self, size: int) -> None:
        self.journal.reserve(size)

    @rule()
    def seal(self) -> None:
        self.journal.seal()
        self.model.promise()

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds: int) -> None:
        """A segment may grow old."""
        self.clock.advance(seconds)
        self.journal.roll_if_due()

    @rule()
    def checkpoint(self) -> None:
        """Covers what is durable."""
        self.covered = self.journal.durable
        self.journal.note_checkpoint(self.covered)

    @rule()
    def reopen(self) -> None:
        """In order, or killed between two steps: it is the same."""
        self.journal.close()
        self.open()
        self.model.after_crash(self.journal.read())

    @rule(cut=st.integers(1, 60), payload=st.binary(max_size=60))
    def tear(self, cut: int, payload: bytes) -> None:
        """Killed in the middle of a write: a piece of a record stands behind the last."""
        active = self.journal._active
        self.journal.close()
        piece = encode_record(active.end, 1, 0, payload + b"!")[:-1][:cut]
        with open(active.path, "r+b") as file:
            file.seek(FIRST_RECORD + active.end - active.base)
            file.write(piece)
        self.open()
        self.model.after_crash(self.journal.read())

    @rule(mode=st.sampled_from(Cut), seed=st.integers(0, 1 << 30))
    def cut_power(self, mode: Cut, seed: int) -> None:
        self.lives += 1
        left = self.power.cut(self.base / str(self.lives), mode, random.Random(seed))
        self.end_life()
        self.root = left
        self.watch()
        self.open()
        self.model.after_crash(self.journal.read())

    @precondition(lambda self: self.model.appended)
    @rule(pick=st.integers(0, 1 << 30))
    def read_from_the_middle(self, pick: int) -> None:
        committed = self.model.appended[: self.model.committed]
        if committed:
            at = pick % len(committed)
            found = [(one.offset, one.payload) for one in self.journal.read(committed[at][0])]
            assert found == committed[at:]

    @invariant()
    def what_is_committed_is_read(self) -> None:
        """By the writer, and by any other process."""
        if hasattr(self, "journal"):
            self.model.compare(self.journal.read())
            self.model.compare(JournalReader(self.folder).read())

    def end_life(self) -> None:
        self.journal.close()
        self.power.close()
        fsio.fault = self.no_fault

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.end_life()
        shutil.rmtree(self.base)


JournalMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True
)


class TestJournal(JournalMachine.TestCase):  # type: ignore[misc] # made by hypothesis
    """The rules of the machine."""
