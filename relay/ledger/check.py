"""Checks of a ledger: its pages, its schema and the rules that hold for its rows."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import cache

from relay.base.errors import BAD_VALUE_ERRORS, LedgerDamaged, LedgerError
from relay.base.finding import Finding, Severity
from relay.ledger.file import (
    OLDEST_VERSION,
    REBUILD,
    SCHEMA_VERSION,
    LedgerContent,
    integrity_problems,
    ledger_content,
    open_readonly,
    open_snapshot,
)
from relay.ledger.ledger import LEDGER_ONLY_TABLES, SKIPPED
from relay.ledger.schema import schema_sql

WHAT = "ledger"
STORED = {"INTEGER": "integer", "REAL": "real", "TEXT": "text"}  # as ``typeof`` names them
RESTORE = "restore a backup with `relay ledger restore FILE`; the next start replays the rest"
# Invalid states of a row -> the rows in it; the relay's own transactions never leave one.
_RULES = {
    "a delivery without its message": (
        "SELECT message_id || ' > ' || recipient FROM deliveries WHERE NOT EXISTS "
        "(SELECT 1 FROM messages WHERE messages.message_id = deliveries.message_id)"
    ),
    "completed without a time of processing": (
        "SELECT message_id FROM messages WHERE status IN ('completed', 'archived') "
        "AND processed_at IS NULL"
    ),
    "failed without a reason": (
        "SELECT message_id FROM messages WHERE status = 'failed' AND last_error IS NULL"
    ),
    "written without a time": (
        "SELECT message_id || ' > ' || recipient FROM deliveries "
        "WHERE state = 'written' AND written_at IS NULL"
    ),
    "held without a time of its next attempt": (
        "SELECT message_id || ' > ' || recipient FROM deliveries "
        "WHERE state = 'held' AND due_at IS NULL AND message_id NOT IN "
        "(SELECT message_id FROM messages WHERE status = 'pending')"  # tried with its file
    ),
    "an obligation that is not one": (
        "SELECT message_id || ' > ' || recipient FROM deliveries WHERE obligation NOT IN "
        "('open', 'answered', 'given_up')"
    ),
    "not 64 hex digits": (
        "SELECT 'the key of ' || name FROM agents "
        "WHERE length(public_key) <> 64 OR public_key GLOB '*[^0-9a-fA-F]*'"
    ),
    "not an inode and a time": (
        "SELECT 'the mailbox of ' || name FROM agents "
        "WHERE mailbox NOT GLOB '[0-9]*:[0-9]*' OR mailbox GLOB '*[^0-9:]*'"
    ),
    "not a number": (
        "SELECT key || ' of orchestrator_state' FROM orchestrator_state "
        f"WHERE key IN ('journal', 'epoch', '{SKIPPED}') AND value GLOB '*[^0-9]*'"
    ),
}


def check_file(path: str) -> tuple[list[Finding], LedgerContent | None]:
    """Check a ledger's file completely: its errors, and its content if there are none.

    Errors: LedgerError for a file that is not a ledger.
    """
    with open_snapshot(path) as db:
        errors = [finding for finding in check(db, path) if finding.severity is Severity.ERROR]
        return errors, None if errors else ledger_content(db, path)


def check(db: sqlite3.Connection, path: str) -> Iterator[Finding]:
    """Check a ledger that is open: SQLite's own checks, the schema, and the rules of its rows.

    Errors: LedgerError when a page cannot be read at all.
    """
    is_damaged = False
    for problem in integrity_problems(db):
        is_damaged = True
        yield Finding(WHAT, path, problem, LedgerDamaged.hint, expected="a sound database")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        found = f"its schema is {version}, this agent-relay supports {SCHEMA_VERSION}"
        yield Finding(WHAT, path, found, "use the newer agent-relay that wrote it")
    elif version < OLDEST_VERSION:
        expected = f"schema {OLDEST_VERSION} or {SCHEMA_VERSION}"
        found = f"schema {version}, of a preview of agent-relay"
        yield Finding(WHAT, path, found, REBUILD, expected=expected)
    elif version < SCHEMA_VERSION:
        found = f"its schema is {version}, from an earlier agent-relay"
        advice = f"no action needed: the next start copies and upgrades it to {SCHEMA_VERSION}"
        yield Finding(WHAT, path, found, advice, Severity.NOTE)
    elif lacks := sorted(_expected_parts() - _parts(db)):
        yield Finding(WHAT, path, f"its schema lacks {', '.join(lacks)}, removed by hand", RESTORE)
    elif not is_damaged:
        yield from _check_skipped(db)
        yield from wrong_rows(db)


def wrong_rows(db: sqlite3.Connection) -> Iterator[Finding]:
    """Find rows that no relay writes, one of each kind. Errors: LedgerError."""
    yield from _wrong_values(db)
    for rule, query in _RULES.items():
        if row := db.execute(query + " LIMIT 1").fetchone():
            yield Finding(WHAT, row[0], f"{row[0]} is {rule}", RESTORE)


def _wrong_values(db: sqlite3.Connection) -> Iterator[Finding]:
    """Find a value in each table that is not of its column's type: SQLite keeps what was set by
    hand, and no code expects it."""
    tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (table,) in tables:
        columns = db.execute(f'PRAGMA table_info("{table}")').fetchall()
        cases = " ".join(
            f"WHEN typeof({name}) NOT IN ('{STORED[kind]}', 'null') "
            f"THEN '{name} is ' || quote({name}) || ', expected {kind}'"
            for _, name, kind, *_ in columns
            if kind in STORED
        )
        keys = [name for _, name, _, _, _, is_key in columns if is_key or name == "message_id"]
        row = " || ' and ' || ".join(f"'{name} = ' || quote({name})" for name in keys)
        if not cases or not row:
            continue
        wrong = f'SELECT CASE {cases} END AS wrong, {row} FROM "{table}" WHERE wrong NOTNULL'
        for what, where in db.execute(wrong + " LIMIT 1"):
            advice = "stop the relay, and set it right with sqlite3"
            advice += "" if table in LEDGER_ONLY_TABLES else "; or make all again, " + REBUILD
            yield Finding(WHAT, where, f"{what}, in the row of {table} where {where}", advice)


def reason_of_error(path: str) -> LedgerError | None:
    """The row in a ledger that an error of Python comes from; None if it has another reason."""
    with contextlib.suppress(LedgerError), contextlib.closing(open_readonly(path)) as db:
        for finding in wrong_rows(db):
            return LedgerError(f"{path}: {finding.text}", hint=finding.advice)
    return None


@contextlib.contextmanager
def naming_bad_rows(path: str) -> Iterator[None]:
    """Replace an error of Python that a row of this ledger causes by one that names the row.

    Errors: LedgerError; any other error as it is.
    """
    try:
        yield
    except BAD_VALUE_ERRORS as exc:
        if (reason := reason_of_error(path)) is None:
            raise
        raise reason from exc


def _check_skipped(db: sqlite3.Connection) -> Iterator[Finding]:
    """Check for facts of the journal that no row could hold."""
    query = "SELECT CAST(value AS INTEGER) FROM orchestrator_state WHERE key = ?"
    for (count,) in db.execute(query, (SKIPPED,)):
        advice = "no action needed: messages are delivered; skip_fact in logs/relay.log names them"
        yield Finding(WHAT, SKIPPED, describe_skipped(count), advice, Severity.WARNING)


def describe_skipped(count: int) -> str:
    """The text about facts of the journal that the ledger cannot hold."""
    facts = "1 fact of the journal is" if count == 1 else f"{count} facts of the journal are"
    return f"{facts} not in the ledger, which cannot hold their values"


def _parts(db: sqlite3.Connection) -> frozenset[str]:
    """Return tables, indexes and triggers as "kind name"."""
    rows = db.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    return frozenset(f"{kind} {name}" for kind, name in rows)


@cache
def _expected_parts() -> frozenset[str]:
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema_sql())
        return _parts(fresh)
