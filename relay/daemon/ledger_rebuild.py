"""Rebuild the ledger from the journal: `relay ledger rebuild`.

The same recovery as at a start without ``ledger.db``, on a new ledger beside the current one, which
it replaces once it is verified. Rows that the journal does not have are copied from the old ledger
as far as it can be read: agents and their keys, processes, security events, and the home's id.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.errors import AlreadyRunning, LedgerError
from relay.base.home import LEDGER, LOCK, Home
from relay.daemon.ledger_backup import check_unused, set_aside
from relay.daemon.session import begin_epoch, open_recovered
from relay.ledger import Ledger
from relay.ledger import file as ledger_file
from relay.ledger.file import LEFTOVERS, LedgerContent

BEFORE = ".before-rebuild"
UNFINISHED = ".rebuilt"
# Tables that the journal does not have; of orchestrator_state all but the journal's position.
LEDGER_ONLY_TABLES = (
    "orchestrator_state",
    "agents",
    "processes",
    "pending_operations",
    "security_events",
)
POSITION_KEY = "journal"


class Rebuilt(NamedTuple):
    """The result of a rebuild, and where the previous ledger is."""

    content: LedgerContent
    aside: str  # its path now; empty when there was none
    kept: dict[str, int]  # rows taken over from it, by table
    lost: tuple[str, ...]  # missing from the new one, a line each


def rebuild(home: Home, config: Config, clock: Clock, log: Callable[..., object]) -> Rebuilt:
    """Rebuild the ledger; the previous one is set aside, never removed.

    Committed by one rename: if killed before, the ledger is unchanged, and recovery's changes to
    inboxes and journal are those of the next start. Errors: AlreadyRunning; LedgerBusy while
    another process has the ledger open; those of ``open_store``; OSError.
    """
    path = home.path(LEDGER)
    temp = path + UNFINISHED
    lost: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fsio.locked(home.path(LOCK)))
        except BlockingIOError as exc:
            raise AlreadyRunning(f"a relay runs for {home.root}") from exc
        check_unused(path)
        ledger_file.remove(temp, "", *LEFTOVERS)
        fsio.fault("create", temp)
        with contextlib.closing(Ledger.open(temp)) as ledger, contextlib.ExitStack() as opened:
            kept = _copy_rows(path, ledger, lost)
            begin_epoch(ledger, clock)
            open_recovered(opened, home, config, clock, log, ledger, lost.append, make_key=False)
        content = ledger_file.verify(temp)
        if os.path.exists(path):
            lost.append("audit_log: changes before now are only in the previous ledger")
        aside = set_aside(path, BEFORE)
        ledger_file.install_copy(temp, path, replace=True)
    return Rebuilt(content, aside, kept, tuple(lost))


def _copy_rows(path: str, ledger: Ledger, lost: list[str]) -> dict[str, int]:
    """Copy the rows that only the old ledger has, as far as readable; returns counts by table."""
    kept: dict[str, int] = {}
    for table in LEDGER_ONLY_TABLES if os.path.exists(path) else ():
        rows, why = _readable_rows(path, table)
        with ledger.transaction():
            for row in rows:
                ledger.import_row(table, row)
        kept[table] = len(rows)
        if why:
            after = f" after the first {len(rows)}" if rows else ""
            lost.append(f"{_LOST[table].format(after=after)}: {why}")
    return kept


_LOST = {
    "orchestrator_state": "the home's id, and the number of its starts",
    "agents": "agents{after} and their keys; the next start lists those that have"
    " a mailbox, and `relay key show NAME` says which key it takes from now on",
    "processes": "processes{after}; the next start takes over those that run",
    "pending_operations": "requests to processes{after}",
    "security_events": "security events{after}",
}


def _readable_rows(path: str, table: str) -> tuple[list[dict[str, object]], str]:
    """The rows of a table up to the first unreadable one, and the error."""
    rows: list[dict[str, object]] = []
    why = ""
    try:
        with contextlib.closing(ledger_file.connect_readonly(path)) as db:
            found = db.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in found.description]
            for row in iter(found.fetchone, None):
                rows.append(dict(zip(names, row, strict=True)))
    except LedgerError as exc:
        why = str(exc)
    return [row for row in rows if row.get("key") != POSITION_KEY], why
