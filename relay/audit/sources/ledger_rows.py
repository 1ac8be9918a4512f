"""Rows of a ledger as Arrow batches, from a snapshot of it.

A ledger in use is never read in pieces: ``VACUUM INTO`` gives one consistent state, made by a
reader that blocks no writer.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa

from relay.base.clock import Clock
from relay.base.errors import LedgerDamaged, LedgerError, RelayError
from relay.ledger.file import connect_readonly, open_current
from relay.ledger.schema import schema_sql

BATCH_ROWS = 20_000
_MOST = 1 << 63
LOGS = ("audit_log", "security_events")
_TRIGGER = re.compile(r"^CREATE TRIGGER (\w+)", re.MULTILINE)


class LedgerSnapshot(NamedTuple):
    """A consistent copy of a ledger that does not change."""

    path: str
    taken_ns: int  # Unix; everything committed before is in it


def take_snapshot(ledger: str, target: str, clock: Clock) -> LedgerSnapshot:
    """Copy a ledger, as it is at one instant, into the new file ``target``.

    The relay may continue writing. Errors: LedgerError when there is none, it is damaged or of an
    earlier schema, or ``target`` cannot be written; VersionError when a newer relay wrote it.
    """
    taken_ns = clock.now_ns()  # before it begins: what is committed meanwhile may be in it
    with contextlib.closing(open_current(ledger)) as connection:
        # The copy is not needed after a power cut, and a sync would make a relay wait.
        connection.execute("PRAGMA synchronous = OFF")
        try:
            connection.execute("VACUUM INTO ?", (target,))
        except LedgerDamaged:
            raise
        except LedgerError as exc:
            raise _snapshot_error(ledger, target, exc) from exc
    os.chmod(target, 0o600)
    return LedgerSnapshot(target, taken_ns)


def _snapshot_error(ledger: str, target: str, exc: LedgerError) -> RelayError:
    """Explain why; the disk of the copy may be full."""
    why = exc.__cause__
    if getattr(why, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return RelayError(
            f"cannot make a snapshot of {ledger} in {os.path.dirname(target)}: {why}",
            hint="free space there, or set TMPDIR to a folder with as much as the ledger takes",
        )
    return LedgerError(f"cannot make a snapshot of {ledger}: {why}")


def read_rows(path: str, table: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read columns of a table of a snapshot. Errors: LedgerError that names file and table."""
    # Who only plans does not load it.
    from adbc_driver_sqlite import dbapi

    try:
        with dbapi.connect(snapshot_uri(path)) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(query(table, columns))
            yield from _without_first_row(cursor.fetch_record_batch(), columns)
    except (dbapi.Error, OSError, pa.ArrowException) as exc:
        raise LedgerError(f"{path}, table {table}: {exc}") from exc


def query(table: str, schema: pa.Schema) -> str:
    """Return the SQL for a table: a row of typed values first, then the rows.

    ADBC guesses a column's type from the first rows, and takes one that is NULL in all of them
    for a number. The first row fixes the types; it is dropped afterwards.
    """
    typed = ", ".join(f"{_typed(field)} AS {_quoted(field.name)}" for field in schema)
    wanted = ", ".join(_value(field) for field in schema)
    return f"SELECT {typed} UNION ALL SELECT {wanted} FROM {_quoted(table)}"


def snapshot_uri(path: str) -> str:
    """Return the URI that opens a snapshot without locks: it does not change."""
    return f"file:{quote(path)}?immutable=1&mode=ro"


def _typed(field: pa.Field) -> str:
    return "''" if pa.types.is_string(field.type) else "0"


def _value(field: pa.Field) -> str:
    name = _quoted(field.name)
    return f"{name} / 1000" if pa.types.is_timestamp(field.type) else name


def _quoted(name: str) -> str:
    return f'"{name}"'


def _without_first_row(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    skip = 1
    for batch in batches:
        rows = batch.slice(skip)
        skip = 0
        arrays = [rows.column(i).cast(field.type) for i, field in enumerate(schema)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def log_problems(snapshot: str) -> list[str]:
    """List what is wrong with the ledger's log of its own changes, a line each.

    audit_log and security_events are append-only, by triggers. Retention takes the first rows
    alone, and a rollback leaves no gap, so ids follow one another: a row that is missing in the
    middle was deleted after removing a trigger. Rows that are missing at the
    end cannot be seen. Errors: LedgerError when the snapshot cannot be read.
    """
    with contextlib.closing(connect_readonly(snapshot)) as db:
        gaps = [_log_gap(db, table) for table in LOGS]
        rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        there = {name for (name,) in rows}
    gone = [name for name in _TRIGGER.findall(schema_sql()) if name not in there]
    return [gap for gap in gaps if gap] + [f"its trigger {name} is missing" for name in gone]


def _log_gap(db: sqlite3.Connection, table: str) -> str:
    # Retention leaves rows of a clock that was ahead, and takes those after them.
    before_last = f"at <= (SELECT at FROM {table} ORDER BY id DESC LIMIT 1)"
    since = f"id >= (SELECT min(id) FROM {table} WHERE {before_last})"
    rows = f"SELECT count(*), min(id), max(id) FROM {table} WHERE {since}"
    count, first, last = db.execute(rows).fetchone()
    missing = last - first + 1 - count if count else 0
    return f"{table} lacks {missing} of its rows {first} to {last}" if missing else ""


def read_state(snapshot: str) -> dict[str, str]:
    """Read the table orchestrator_state. Errors: LedgerError."""
    query = "SELECT key, value FROM orchestrator_state WHERE value IS NOT NULL"
    with contextlib.closing(connect_readonly(snapshot)) as db:
        return {str(key): str(value) for key, value in db.execute(query)}


def journal_position(state: Mapping[str, str]) -> int | None:
    """Return the ledger's position in the journal; None without one that can be."""
    value = state.get("journal", "")
    return int(value) if value.isdecimal() and int(value) < _MOST else None
