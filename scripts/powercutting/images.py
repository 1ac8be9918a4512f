"""From the log of a disk to what a power cut may have left on it.

All that was written before the last flush is there. Of what was written since, anything may be:
all, nothing, some writes and not others, and of a write some sectors and not others.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from scripts.powercutting.disk import FLUSH, RECORD
from scripts.powercutting.kernel import punch

HOLE_BYTES = 1 << 16  # zeros of that length are not worth their memory


class Event(NamedTuple):
    """A write or a flush of the disk; ``begin`` and ``end`` of its data in the log."""

    is_flush: bool
    at_ns: int
    offset: int
    begin: int
    end: int


class Keep(StrEnum):
    """What is kept of the writes since the last flush."""

    ALL = "all"
    NONE = "none"
    TENTH = "10 %"
    HALF = "50 %"
    MOST = "90 %"
    NOT_LAST = "not the last"
    TORN_512 = "torn at 512"
    TORN_4096 = "torn at 4096"


SHARES = {Keep.ALL: 1.0, Keep.NONE: 0.0, Keep.TENTH: 0.1, Keep.HALF: 0.5, Keep.MOST: 0.9}
SECTORS = {Keep.TORN_512: 512, Keep.TORN_4096: 4096}


class Cut(NamedTuple):
    """The power goes before event number ``end``; what is kept is drawn with ``seed``."""

    end: int
    keep: Keep
    seed: int


class Piece(NamedTuple):
    """Bytes ``begin`` to ``end`` of the log, written at ``offset``."""

    offset: int
    begin: int
    end: int


def read_log(data: Sequence[int] | mmap.mmap) -> list[Event]:
    """All events; a last one that is not complete is left out."""
    events: list[Event] = []
    at = 0
    while at + RECORD.size <= len(data):
        what, at_ns, offset, length = RECORD.unpack_from(data, at)  # type: ignore[arg-type]
        begin = at + RECORD.size
        at = begin + length
        if at <= len(data):
            events.append(Event(what == FLUSH, at_ns, offset, begin, at))
    return events


def last_flush(events: Sequence[Event], end: int) -> int:
    """Number of the event behind the last flush before ``end``."""
    while end > 0 and not events[end - 1].is_flush:
        end -= 1
    return end


def choose(events: Sequence[Event], since_ns: int, number: int, dice: random.Random) -> list[Cut]:
    """Cuts spread over the flushes from a time on, half of them just before the next flush.

    In order of time. Each way of keeping writes has its share.
    """
    first = bisect_left(events, since_ns, key=lambda event: event.at_ns)
    flushes = [at for at in range(first, len(events)) if events[at].is_flush]
    if not flushes:
        return []
    keeps = [list(Keep)[one % len(Keep)] for one in range(number)]
    dice.shuffle(keeps)
    cuts = []
    for one, keep in enumerate(keeps):
        at = one * len(flushes) // number
        begin = flushes[at] + 1
        end = flushes[at + 1] if at + 1 < len(flushes) else len(events)
        if dice.random() < 0.5:
            end = dice.randint(begin, end)
        cuts.append(Cut(end, keep, dice.getrandbits(32)))
    return sorted(cuts)


def cut_at_ns(events: Sequence[Event], cut: Cut) -> int:
    """The time of a cut: what was said before it was said with the power on."""
    return events[cut.end].at_ns if cut.end < len(events) else events[-1].at_ns


def survivors(pending: Sequence[Event], cut: Cut) -> Iterator[Piece]:
    """What is kept of these writes."""
    dice = random.Random(cut.seed)
    if cut.keep is Keep.NOT_LAST:
        pending = pending[: max(0, len(pending) - dice.randint(1, 3))]
    share = SHARES.get(cut.keep, 1.0)
    sector = SECTORS.get(cut.keep)
    torn_share = dice.uniform(0.1, 0.9)
    for _, _, offset, begin, end in pending:
        if sector is None:
            if dice.random() < share:
                yield Piece(offset, begin, end)
            continue
        for at in range(begin, end, sector):
            if dice.random() < torn_share:
                yield Piece(offset + at - begin, at, min(at + sector, end))


class Builder:
    """Builds the images of cuts, which must be in order of time: an own copy goes along."""

    def __init__(self, base: Path, log: Path, own: Path) -> None:
        copy(base, own)
        self._own = own
        self._fd = os.open(own, os.O_RDWR | os.O_CLOEXEC)
        with log.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self.events = read_log(self._data)
        self._done = 0

    def build(self, cut: Cut, target: Path) -> None:
        """Make the image that this cut leaves."""
        flushed = last_flush(self.events, cut.end)
        assert flushed >= self._done, "cuts are built in order of time"
        for event in self.events[self._done : flushed]:
            self._write(self._fd, Piece(event.offset, event.begin, event.end))
        self._done = flushed
        copy(self._own, target)
        fd = os.open(target, os.O_RDWR | os.O_CLOEXEC)
        try:
            for piece in survivors(self.events[flushed : cut.end], cut):
                self._write(fd, piece)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the own copy."""
        os.close(self._fd)
        self._data.close()
        self._own.unlink()

    def _write(self, fd: int, piece: Piece) -> None:
        data = self._data[piece.begin : piece.end]
        if len(data) >= HOLE_BYTES and data.count(0) == len(data):
            punch(fd, piece.offset, len(data))
        elif data:
            os.pwrite(fd, data, piece.offset)


def copy(source: Path, target: Path) -> None:
    """Copy a file with its holes; where the file system can, without its data."""
    subprocess.run(["cp", "--reflink=auto", "--sparse=auto", str(source), str(target)], check=True)
