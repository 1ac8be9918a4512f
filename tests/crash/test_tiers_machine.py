"""Any order of appends, seals, steps of the tiers, kills and failures against a plain list."""

from __future__ import annotations

import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relay.base.errors import ObjectError
from relay.journal.catalog import Residency
from relay.journal.journal import Append
from relay.journal.manifest_format import Reason
from tests.disk import killed_before
from tests.journal.tiers_support import AT_ONCE, FaultyObjects, Stream

pytestmark = pytest.mark.shows("journal 4.9")


def test_reading_while_segments_move(tmp_path: Path) -> None:
    """The loop appends, seals and reads while the worker compresses, uploads and evicts."""
    stream = Stream(tmp_path, AT_ONCE._replace(local_bytes=0), FaultyObjects(tmp_path / "tier2"))
    done: list[str] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            line = stream.tiers.run_next()
            if line:
                done.append(line)

    with ThreadPoolExecutor(1) as executor:
        working = executor.submit(work)
        try:
            while len(done) < 12:  # however slowly the worker gets its turns
                stream.fill(1, records=20)
                stream.cover()
                assert stream.read() == stream.expected()
        finally:
            stop.set()
        working.result()
    stream.run()
    assert stream.read() == stream.expected()
    assert stream.warnings == []
    stream.close()


class TiersMachine(RuleBasedStateMachine):
    """The list is ``stream.wrote``; what is read has to be its end, from the first segment kept."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.away = False

    @initialize(with_store=st.booleans())
    def start(self, with_store: bool) -> None:
        """A new stream."""
        self.store = FaultyObjects(self.root / "tier2")
        self.store.fault = self._call
        self.stream = Stream(self.root, AT_ONCE, self.store if with_store else None)

    def _call(self, call: str, key: str) -> None:
        if self.away:
            raise ObjectError("away", Reason.UNAVAILABLE)

    def teardown(self) -> None:
        """Everything that was kept is there in the end, whatever happened."""
        self.away = False
        self.stream.reopen()
        self.stream.run()
        assert self.stream.read() == self.stream.expected()
        self.stream.close()
        shutil.rmtree(self.root)

    @rule(sizes=st.lists(st.sampled_from([0, 1, 100, 5000, 70_000]), min_size=1, max_size=5))
    def append(self, sizes: list[int]) -> None:
        """Append and commit."""
        payloads = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
        offsets = self.stream.journal.append([Append(payload) for payload in payloads])
        self.stream.journal.commit()
        self.stream.wrote += zip(offsets, payloads, strict=True)

    @rule()
    def seal(self) -> None:
        """The segment is done."""
        self.stream.journal.seal()

    @rule()
    def cover(self) -> None:
        """Two checkpoints cover everything."""
        self.stream.cover()

    @rule(local=st.sampled_from([0, 10_000, 1 << 30]), keep=st.sampled_from([None, None, 50_000]))
    def change_policy(self, local: int, keep: int | None) -> None:
        """Other budgets."""
        policy = self.stream.tiers.policy
        self.stream.tiers.policy = policy._replace(local_bytes=local, keep_bytes=keep)

    @rule(steps=st.integers(1, 12))
    def work(self, steps: int) -> None:
        """The worker goes on."""
        for _ in range(steps):
            self.stream.tiers.run_next()

    @rule(steps=st.integers(1, 4), calls=st.integers(0, 40))
    def work_and_be_killed(self, steps: int, calls: int) -> None:
        """The process ends in the middle of a step, and starts again."""
        with killed_before(calls + 1):
            for _ in range(steps):
                self.stream.tiers.run_next()
        self.stream.reopen()

    @rule(away=st.booleans())
    def lose_the_store(self, away: bool) -> None:
        """The network goes and comes."""
        self.away = away
        self.stream.clock.advance(700)

    @rule(number=st.integers(0, 12))
    @precondition(lambda self: not self.away)
    def hydrate(self, number: int) -> None:
        """Somebody wants a segment back in Tier 0."""
        catalog = self.stream.journal.manifest.catalog
        if number in catalog.entries and number not in catalog.deleting:
            self.stream.tiers.hydrate(number)
            assert catalog.entries[number].residency & Residency.TIER0

    @rule()
    def restart(self) -> None:
        """Stop and start."""
        self.stream.reopen()

    @invariant()
    def reads_the_same(self) -> None:
        """Wherever the segments lie; a store that is away is allowed to say so."""
        if not hasattr(self, "stream"):
            return
        try:
            assert self.stream.read() == self.stream.expected()
        except ObjectError:
            assert self.away


TiersMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestTiers = TiersMachine.TestCase
