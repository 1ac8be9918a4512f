"""An agent of the soak test: sends random messages to the others and records them.

python worker.py NAME BOOKS OTHER...

BOOKS/NAME.sent     message id, recipient: a line each, once the message is renamed
BOOKS/NAME.got      message id, attempt: a line each, once the message is taken
BOOKS/NAME.nacked   message id: a line each, of what a nack refused that was removed

Every second agent reads as a shell does: it removes its files with `rm`, in place of moving them to
``.read``.
BOOKS/NAME.lock     held while it lives; BOOKS/NAME.twice: two lived at once
"""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time
from pathlib import Path
from typing import TextIO

from agent_sdk import Agent, Kind, RelayError
from relay.base.message import parse_delivered

PAUSE_S = (0.3, 1.0)
CRASH_EVERY = 150  # so many turns, about; so restarts are tried, too


def main() -> None:
    """Send and receive until ended."""
    name, books, *others = sys.argv[1:]
    folder = Path(books)
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / f"{name}.twice").write_text(f"{os.getpid()}\n")
        raise
    rng = random.Random(os.getpid() ^ time.time_ns())
    with (
        Agent(name) as me,
        (folder / f"{name}.sent").open("a", buffering=1) as sent,
        (folder / f"{name}.got").open("a", buffering=1) as got,
    ):
        removes = int(name[-1]) % 2 == 1
        while rng.randrange(CRASH_EVERY):
            to = rng.choice([*others, "nobody"])
            kind = Kind.COMMAND if rng.random() < 0.3 else Kind.MESSAGE
            message_id = me.send(to, f"{name} says {rng.random()}", kind=kind, wait=0)
            sent.write(f"{message_id} {to}\n")
            if removes:
                remove(me, got, folder / f"{name}.nacked")
                time.sleep(rng.uniform(*PAUSE_S))
            else:
                answer(me, got, rng.uniform(*PAUSE_S))
    sys.exit(1)


def remove(me: Agent, got: TextIO, nacked: Path) -> None:
    """Read and remove the messages in the inbox, and acknowledge the commands."""
    for path in sorted(Path(me.home, "agents", me.name, "inbox").glob("*.msg")):
        message = parse_delivered(path.read_bytes(), file=path.name)
        if message.kind is Kind.NACK:
            with nacked.open("a") as book:
                book.write(f"{message.headers.get('RE')}\n")
        path.unlink()
        got.write(f"{path.stem} {message.headers['ATTEMPT']}\n")
        if message.kind is Kind.COMMAND:
            me.send(message.headers["FROM"], "completed done", kind=Kind.ACK, re=path.stem, wait=0)


def answer(me: Agent, got: TextIO, seconds: float) -> None:
    """Receive messages for so long, and acknowledge the commands."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        message = me.receive(left)
        if message is None:
            return
        got.write(f"{message.id} {message.attempt}\n")
        if message.kind is Kind.COMMAND:
            try:
                me.ack(message, "completed", "done")
            except RelayError as exc:
                print(exc, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
