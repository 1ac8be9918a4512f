"""Check after a soak test: every message has a final state known to its sender, none twice."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from relay.base.errors import MessageError
from relay.base.message import MessageFile, parse_delivered
from relay.base.names import ORCHESTRATOR

ENDED_BADLY = ("bounced", "expired", "dead")


def faults(home: Path, books: Path) -> Iterator[str]:
    """Faults, one line each; empty if there are none."""
    for path in sorted(books.glob("*.twice")):
        yield f"two processes of {path.stem} lived at once: pid {path.read_text().strip()}"
    for path in sorted(books.glob("*.got")):
        times = Counter(one for one, _ in map(str.split, _lines(path)))
        yield from (f"{path.stem} got {one} {n} times" for one, n in times.items() if n > 1)
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:
        yield from (row[0] for row in db.execute("PRAGMA integrity_check") if row[0] != "ok")
        yield from _messages(home, books, db)


def sent(books: Path) -> dict[str, tuple[str, str]]:
    """Message id -> (sender, recipient), from the senders' records."""
    lines = [(path.stem, *line.split()) for path in books.glob("*.sent") for line in _lines(path)]
    return {message_id: (name, to) for name, message_id, to in lines}


def _lines(path: Path) -> list[str]:
    """Complete lines; the writer may have been killed within the last one."""
    return [line for line in path.read_text().split("\n")[:-1] if len(line.split()) == 2]


def _messages(home: Path, books: Path, db: sqlite3.Connection) -> Iterator[str]:
    rows = dict(db.execute("SELECT message_id, status FROM messages"))
    ends: dict[str, dict[str, str]] = {}
    for message_id, recipient, state in db.execute(
        "SELECT message_id, recipient, state FROM deliveries"
    ):
        ends.setdefault(message_id, {})[recipient] = state
    nacked = {(m.to, m.headers.get("RE")) for m in _from_relay(home) if m.kind == "nack"}
    for path in books.glob("*.nacked"):
        nacked |= {(path.stem, one) for one in path.read_text().split()}
    for message_id, (sender, to) in sent(books).items():
        status = rows.get(message_id)
        if status not in ("archived", "failed"):
            yield f"{message_id} of {sender} to {to}: its row is {status}"
        states = ends.get(message_id, {})
        if status == "archived" and set(states) != {to}:
            yield f"{message_id} of {sender} to {to}: its deliveries are {states}"
        is_bad = status == "failed" or any(state in ENDED_BADLY for state in states.values())
        if is_bad and (sender, message_id) not in nacked:
            yield f"{message_id} of {sender} to {to}: {states or status}, sender not notified"
    taken = {
        path.stem: {one for one, _ in map(str.split, _lines(path))}
        for path in books.glob("*.got")
        if int(path.stem[-1]) % 2 == 1  # it removes what it has read
    }
    for message_id, states in ends.items():
        for recipient, state in states.items():
            fault = _place(home, message_id, recipient, state, taken.get(recipient))
            if fault:
                yield fault


def _place(
    home: Path, message_id: str, recipient: str, state: str, removed: set[str] | None
) -> str:
    """Reason why the file of a delivery is not where its state says, or nothing.

    ``removed``: what a recipient has read that removes its files; the last second of that is
    recorded by the next start.
    """
    inbox = home / "agents" / recipient / "inbox"
    name = f"{message_id}.msg"
    if recipient == ORCHESTRATOR or state not in ("written", "read", "acked"):
        return ""
    is_new, is_read = (inbox / name).exists(), (inbox / ".read" / name).exists()
    if removed is not None:
        is_read = not is_new and (state != "written" or message_id in removed)
        state = "read" if is_read else state
    if is_new == is_read or is_new != (state == "written"):
        # an answer may be given before the file is moved, by an agent that reads it in place
        return (
            f"{name} for {recipient} is {state}: in the inbox {is_new}, among those read {is_read}"
        )
    return ""


def _from_relay(home: Path) -> Iterator[MessageFile]:
    for path in home.glob("agents/*/inbox/**/*.msg"):
        with contextlib.suppress(MessageError):
            message = parse_delivered(path.read_bytes(), file=path.name)
            if message.headers.get("FROM") == ORCHESTRATOR:
                yield message
