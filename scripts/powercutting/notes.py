"""What senders and readers note, outside of the disk that loses power.

One line of JSON for each thing, written when it was done: a message sent is acknowledged from
then on. A reader notes before it takes a message as well, for the power may go in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from relay.base.names import sha256_hex

SENDERS = ("alice", "bob", "carol", "dave")
READERS = ("erin", "frank", "grace")  # how each takes messages: agents.py
AGENTS = (*SENDERS, *READERS, "heidi", "operator")  # heidi reads nothing
RECIPIENTS = (*READERS, "heidi")
EVERYONE = "*"


class Note(msgspec.Struct, frozen=True):
    """Of a message that was sent, or taken. Monotonic times, in ns."""

    what: str  # sent, taken
    by: str
    id: str
    to: str = ""
    body: str = ""  # its SHA-256
    since_ns: int = 0  # taken: looked for from then on
    at_ns: int = 0


class Book:
    """The notes of one process."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}.notes").open("ab", buffering=0)
        self._name = name

    def sent(self, message_id: str, to: str, body: str) -> None:
        """A message was acknowledged just now."""
        checksum = sha256_hex(body.encode())
        self._add(Note("sent", self._name, message_id, to, checksum, 0, time.monotonic_ns()))

    def taken(self, message_id: str, since_ns: int) -> None:
        """A message was taken, after ``since_ns``."""
        self._add(Note("taken", self._name, message_id, "", "", since_ns, time.monotonic_ns()))

    def _add(self, note: Note) -> None:
        self._file.write(msgspec.json.encode(note) + b"\n")


def read_notes(folder: Path) -> list[Note]:
    """All notes; of one that is not complete nothing."""
    lines = (line for path in folder.glob("*.notes") for line in _lines(path))
    return [msgspec.json.decode(line, type=Note) for line in lines]


def _lines(path: Path) -> Iterator[bytes]:
    yield from path.read_bytes().split(b"\n")[:-1]


def recipients(note: Note) -> Iterable[str]:
    """Who gets a message."""
    return (one for one in AGENTS if one != note.by) if note.to == EVERYONE else (note.to,)
