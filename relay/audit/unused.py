"""The tables of a home that has seen nothing, without Spark: a JVM costs more than all the rest.

Only what is fine is judged here. Of a home that has a message, or where anything is wrong or
cannot be read, there are no tables: the jobs judge it and say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from relay.acomm import store_file
from relay.audit.jobs.job import FINDINGS
from relay.audit.jobs.sql_jobs import SQL_JOBS
from relay.audit.lake_columns import LEDGER
from relay.audit.schemas.results import FINDING, arrow_table
from relay.audit.snapshot import HomeSnapshot
from relay.audit.sources import home_files, journal_files, ledger_rows, originals
from relay.audit.sources.home_files import VerifiedFile
from relay.base.clock import NS_PER_S
from relay.base.errors import RelayError
from relay.ledger.file import connect_readonly

GONE = ("terminated", "retired")  # as agents.sql has them
AWAY = ("inactive", *GONE)
_REGISTERS = ("agents", "orchestrator_state")  # tables that a relay fills before any message
_NS_PER_US = 1000
_EVENT = pa.schema([("event", pa.string())])
Row = tuple[object, ...]


def tables_of(snapshot: HomeSnapshot) -> dict[str, pa.Table] | None:
    """Make the tables of all jobs in SQL, and no finding; None when the home must be judged."""
    try:
        rows = _rows(snapshot)
    except (RelayError, OSError):
        return None
    if rows is None:
        return None
    schemas = {name: schema for job in SQL_JOBS for name, schema in job.tables.items()}
    schemas[FINDINGS] = FINDING
    return {name: arrow_table(rows.get(name, ()), schema) for name, schema in schemas.items()}


def _rows(snapshot: HomeSnapshot) -> dict[str, Iterable[Row]] | None:
    registered = _registered(snapshot.ledger.path)
    if registered is None or originals.plan(snapshot.home) or set(_events(snapshot)) - {"Start"}:
        return None
    follows = ledger_rows.journal_position(ledger_rows.read_state(snapshot.ledger.path))
    ends = max(snapshot.journal.until.values(), default=None)
    files = list(_files(snapshot))
    if (
        ledger_rows.log_problems(snapshot.ledger.path)
        or (follows or 0) > (ends or 0)
        or any(file.problems or file.warnings or file.day for file in files)
        or _holds_messages(snapshot)
    ):
        return None
    return {
        "integrity": [_verified(file) for file in files],
        "reconcile_journal": [("followed", follows, ends, 0, None)],
        "agents": [_life(snapshot.observed_until_ns, *agent) for agent in registered],
    }


def _registered(ledger: str) -> list[tuple[Any, ...]] | None:
    """The ledger's agents; None if it has anything else."""
    with contextlib.closing(connect_readonly(ledger)) as db:
        for table in LEDGER.keys() - set(_REGISTERS):
            if db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                return None
        return db.execute(
            "SELECT name, status, reason, registered_at, last_seen_at, changed_at FROM agents"
        ).fetchall()


def _events(snapshot: HomeSnapshot) -> Iterator[str]:
    """Kinds of the journal's records."""
    journal = snapshot.journal
    for stream, end in journal.until.items():
        settings = journal_files.ReadSettings({stream: journal.objects}, journal.key_file, False)
        for segment in journal_files.plan(stream, end=end).segments:
            for batch in journal_files.read_segment(segment, _EVENT, settings):
                yield from batch["event"].to_pylist()


def _files(snapshot: HomeSnapshot) -> Iterator[VerifiedFile]:
    given = (snapshot.home, snapshot.store_files, snapshot.folder, snapshot.journal.objects)
    for unit in home_files.plan(*given):
        yield from home_files.verify(snapshot.home, unit)


def _holds_messages(snapshot: HomeSnapshot) -> bool:
    """True for a store, or an archive, with a message; an unnamed attachment is of one as well."""
    stores = [store_file.read(path) for path in snapshot.store_files]
    return any(store.messages or store.dead_letters or store.archive for store in stores)


def _verified(file: VerifiedFile) -> Row:
    return (file.path, file.kind, "sound", *file[2:])


def _life(
    until_ns: int,
    name: str,
    status: str,
    reason: str | None,
    registered_at: int,
    last_seen_at: int | None,
    changed_at: int | None,
) -> Row:
    """A row of agents that neither wrote nor was written to, and has no process."""
    is_gone = status in GONE
    lived_to = until_ns if not is_gone or changed_at is None else changed_at
    seen_at = max(registered_at, last_seen_at or 0)
    return (
        name,
        "away" if status in AWAY else "present",
        status,
        reason,
        *[at and at // _NS_PER_US for at in (registered_at, last_seen_at, changed_at)],
        _seconds(registered_at, lived_to),
        *(0, 0, 0, None, 0),
        _seconds(seen_at, until_ns),
        *(None, None, None, None),
        *(0, 0),
        *(None, None, None, None, None),
    )


def _seconds(begin_ns: int, end_ns: int) -> int:
    """Whole seconds between, by clocks of microseconds."""
    return max((end_ns // _NS_PER_US - begin_ns // _NS_PER_US) * _NS_PER_US // NS_PER_S, 0)
