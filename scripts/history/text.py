"""What agents write: bodies of 50 to 600 bytes with a long tail, each of them different."""

from __future__ import annotations

import random

CORPUS_BYTES = 1 << 20  # far more than a compressor looks back at
MEDIAN_BYTES, SPREAD = 180, 0.7  # log-normal: 50 to 600 for nine in ten
MOST_BYTES = 20_000
WORDS = (
    "the agent build test deploy failed passed branch merge review file line error retry queue "
    "worker plan step done waiting for result of task run staging production commit revert please "
    "check logs and report back when finished token limit context summary function module import "
    "type is it not in on with by to from that this was has no yes ok next first last time out "
    "database schema migration endpoint request response timeout latency memory cache index "
    "ändern größe naïve → ✓ refactor coverage flaky rebase artifact cluster replica shard lease"
).split()


class Text:
    """Bodies, drawn from one corpus that the seed makes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        weights = [1 / (place + 4) for place in range(len(WORDS))]
        words = rng.choices(WORDS, weights, k=CORPUS_BYTES // 6)
        self._corpus = " ".join(words).encode()

    def body(self, begins: str = "") -> bytes:
        """A text that nobody wrote before."""
        size = int(self._rng.lognormvariate(0, SPREAD) * MEDIAN_BYTES)
        size = min(max(size, 50), MOST_BYTES)
        start = self._rng.randrange(len(self._corpus) - size)
        text = self._corpus[start : start + size].decode(errors="ignore")
        return f"{begins}{self._rng.getrandbits(40):010x} {text}\n".encode()
