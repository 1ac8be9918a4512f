"""The check of the search index."""

from __future__ import annotations

import os
from collections.abc import Iterator

from relay.base.finding import Finding, Repair, Severity
from relay.search.index import (
    LEFTOVERS,
    Index,
    SearchIndexBusy,
    SearchIndexError,
    translated_errors,
)

CHECKED_BYTES = 32 << 20  # larger ones are read as a whole only by a deep check: 5 ms a MiB
_FILLED_AGAIN = "no message is lost: a relay that runs fills it again; until then searches are slow"


def check(path: str, *, deep: bool = False, is_running: bool = False) -> Iterator[Finding]:
    """Yield a finding if the index is damaged or of another version.

    ``is_running``: a relay has the file open, so that it must not be removed.
    """
    if not os.path.exists(path):
        return
    try:
        with Index(path) as index, translated_errors(path):
            index.position()
            if not deep and os.path.getsize(path) > CHECKED_BYTES:
                return
            found = str(index.db.execute("PRAGMA quick_check(1)").fetchone()[0])
            if found == "ok":
                return
            problem = f"{path}: {' '.join(found.split())}"
    except SearchIndexBusy:
        return
    except SearchIndexError as exc:
        problem = str(exc)
    name = os.path.basename(path)
    stop = "`relay down`, then " if is_running else ""
    repairs: tuple[Repair, ...] = ()
    if not is_running:
        left = (name + suffix for suffix in LEFTOVERS if os.path.lexists(path + suffix))
        repairs = tuple(Repair("remove", path) for path in left)
    advice = f"{stop}`relay doctor --repair` removes it; {_FILLED_AGAIN}"
    yield Finding("search", name, problem, advice, Severity.WARNING, repairs=repairs)
