"""Is a loaded store valid? Its tables agree with each other, and the archives that it lists exist.

A table that is derived from others is updated with every event. Loading the store's own snapshot
derives it again, so both must be equal.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Iterator

from relay.acomm.model import ArchiveInfo
from relay.base.errors import FormatError
from relay.base.finding import Finding
from relay.engine.state import State

WHAT = "store"
_DERIVED = (
    "names",
    "members",
    "counts",
    "settings",
    "record_bytes",
    "kept",
    "retained",
    "relay_ids",
    "timers",
    "reminders",
    "pending",
    "held",
    "deliveries",
    "owed",
    "dead",
    "next_channel",
    "next_message",
    "next_subscription",
)


def check(state: State) -> Iterator[Finding]:
    """Compare the tables of a store with those that a load of its snapshot derives."""
    try:
        fresh = State.load(state.snapshot().file())
    except FormatError as exc:
        yield Finding.of_error(WHAT, exc)
        return
    for table, have, want in zip(_DERIVED, _tables(state), _tables(fresh), strict=True):
        if have == want:
            continue
        if isinstance(have, dict) and isinstance(want, dict):
            key = next(k for k in (*have, *want) if have.get(k) != want.get(k))
            table, have, want = f"{table}[{key!r}]", have.get(key), want.get(key)
        expected = f"{reprlib.repr(want)} as derived from the other tables"
        yield Finding(WHAT, f"the table {table}", reprlib.repr(have), expected=expected)


def _tables(state: State) -> list[object]:
    """The tables in the order of ``_DERIVED``, without what is stale or empty."""
    derived = {
        "timers": set(state.timers.current()),
        "reminders": set(state.reminders.current()),
        "pending": state.pending.pending,
        "held": set(state.pending.held),
    }
    return [derived[name] if name in derived else getattr(state, name) for name in _DERIVED]


def check_archives(folder: str, listed: Iterable[ArchiveInfo]) -> Iterator[Finding]:
    """Check that the archives that a store lists exist, with their size."""
    for archive in listed:
        path = os.path.join(folder, archive.name)
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            found = f"{path}: missing, but the store lists it"
            yield Finding(WHAT, path, found, "restore it from a backup")
            continue
        if archive.size and size != archive.size:
            expected = f"{archive.size} bytes"
            yield Finding(WHAT, path, str(size), "restore it from a backup", expected=expected)
