"""A stream in a directory, and what the journal's tests do to it."""

from __future__ import annotations

from pathlib import Path

from relay.journal.journal import Append, Journal, JournalReader
from relay.journal.segment import SegmentPolicy, segment_path
from tests.fakes import FakeClock

SMALL = SegmentPolicy(segment_bytes=4_096, slice_bytes=1_024)


class Stream:
    """A journal in a directory, opened as often as wanted."""

    def __init__(self, root: Path) -> None:
        self.folder = str(root / f"{1:020d}")
        self.clock = FakeClock(1_780_000_000_000_000_000)
        self.warned: list[str] = []
        self.policy = SMALL
        self._opened: list[Journal] = []

    def open(self, **known: int) -> Journal:
        journal = Journal.open(self.folder, 1, self.clock, self.policy, self.warned.append, **known)
        self._opened.append(journal)
        return journal

    def crash(self) -> None:
        """The process is gone: nothing is finished, the kernel closes its files."""
        for journal in self._opened:
            journal.close()
        self._opened.clear()

    def path(self, segment_id: int = 0) -> Path:
        return Path(segment_path(self.folder, segment_id))


def put(journal: Journal, *payloads: bytes) -> list[int]:
    """Append and commit."""
    offsets = journal.append([Append(payload) for payload in payloads])
    assert journal.commit() == journal.end
    return offsets


def payloads(journal: Journal | JournalReader, start: int = 0) -> list[bytes]:
    return [record.payload for record in journal.read(start)]
