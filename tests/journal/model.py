"""What a journal must be: a plain list of what was appended, and how far it was committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.journal.format import Record
from relay.journal.journal import Append, Journal


class Model:
    """Takes what goes into a journal, and compares."""

    def __init__(self) -> None:
        self.appended: list[tuple[int, bytes]] = []  # offset and payload
        self.committed = 0  # how many of them are durable
        self.before: set[tuple[int, bytes]] = set()  # of earlier lives, not committed: maybe there

    def append(self, journal: Journal, payloads: Sequence[bytes]) -> None:
        """Append to both; the offsets follow each other."""
        offsets = journal.append([Append(payload) for payload in payloads])
        self.appended += zip(offsets, payloads, strict=True)

    def promise(self) -> None:
        """A commit returned."""
        self.committed = len(self.appended)

    def compare(self, records: Iterable[Record]) -> None:
        """The records are exactly those committed."""
        found = [(record.offset, record.payload) for record in records]
        assert found == self.appended[: self.committed]

    def after_crash(self, records: Iterable[Record]) -> None:
        """Everything committed is there; of what was not, the beginning may be, and is from now
        on: never a record without those before it."""
        found = [(record.offset, record.payload) for record in records]
        assert len(found) >= self.committed
        assert found == self.appended[: len(found)]
        self.appended = found
        self.committed = len(found)
