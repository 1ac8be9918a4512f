"""A relay in a process of its own that has something to do, and what its journal says of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relay.base.names import new_message_id
from relay.journal.format import Record
from relay.journal.journal import JournalReader
from tests.procs import Relay, home_of

PACE_S = 0.03


def stream_of(home: Path) -> Path:
    """The folder of its journal's stream."""
    return home / "journal" / f"{1:020d}"


def records(home: Path) -> list[Record]:
    """Every record of its journal."""
    return list(JournalReader(str(stream_of(home))).read())


def put(home: Path, number: int, sender: str = "alice", to: str = "bob") -> None:
    """A message file, renamed into the outbox."""
    name = new_message_id(1_769_851_800_000_000_000 + number) + ".msg"
    outbox = home / "agents" / sender / "outbox"
    pending = outbox / ".pending" / name
    pending.write_text(f"TO: {to}\n\nmessage {number}\n")
    os.chmod(pending, 0o600)
    os.rename(pending, outbox / name)


@contextmanager
def busy_relay(root: Path) -> Iterator[Path]:
    """A relay whose agents go on writing for the block; stopped, and at rest, at its end."""
    home = home_of(root, "alice", "bob")
    relay = Relay(home)
    relay.start()
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.wait(PACE_S):
            put(home, number, to="bob" if number % 7 else "nobody")
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield home
    finally:
        over.set()
        writer.join()
        relay.stop()
