"""From each version of the ledger's schema to the next; never back.

A ledger that is older is copied first, whole and checked, to ``ledger.db.v{N}.bak``; then all the
steps are one transaction, the version last in it. Killed anywhere, the ledger is the old one or
the new one. To change the schema: raise the version in schema.sql and ledger/ledger.py, add the
step here and the text of the old schema to tests/fixtures/ledger.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from relay.base import fsio
from relay.ledger import file as ledger_file

_GUARD = "SELECT RAISE(ABORT, '{table} is append-only');\nEND;\n"
_KEPT = """(SELECT CAST(value AS INTEGER) FROM orchestrator_state
    WHERE key = 'audit_kept_from')"""


def _append_only(table: str) -> str:
    """What was removed by nobody may be removed by retention; what is there is not replaced."""
    guard = _GUARD.format(table=table)
    return (
        f"DROP TRIGGER {table}_keeps_rows;\n"
        f"CREATE TRIGGER {table}_keeps_rows BEFORE DELETE ON {table}\n"
        f"WHEN OLD.at >= coalesce({_KEPT}, 0) BEGIN\n{guard}"
        f"CREATE TRIGGER {table}_replaces_none BEFORE INSERT ON {table}\n"
        f"WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id) BEGIN\n{guard}"
    )


_TO_2 = f"""
ALTER TABLE agents ADD COLUMN reason TEXT;
ALTER TABLE agents ADD COLUMN changed_at INTEGER;
ALTER TABLE agents ADD COLUMN public_key TEXT;
CREATE TABLE processes (
    name TEXT PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('starting', 'ready', 'working', 'idle', 'stuck',
        'exited', 'failed', 'released')),
    pid INTEGER,
    pid_start TEXT,
    cli TEXT NOT NULL,
    cwd TEXT NOT NULL,
    restart TEXT NOT NULL,
    requested_by TEXT NOT NULL,
    request_id TEXT NOT NULL,
    restarts INTEGER NOT NULL DEFAULT 0,
    restarted_at TEXT NOT NULL DEFAULT '[]',
    started_at INTEGER,
    changed_at INTEGER NOT NULL,
    ended_at INTEGER,
    exit_code INTEGER,
    cpu_percent REAL,
    rss_bytes INTEGER,
    idle_s INTEGER,
    last_error TEXT
);
CREATE TABLE attachment_refs (
    sha256 TEXT NOT NULL,
    message_id TEXT NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (sha256, message_id)
) WITHOUT ROWID;
ALTER TABLE audit_log ADD COLUMN attempt INTEGER;
ALTER TABLE audit_log ADD COLUMN staged_at INTEGER;
ALTER TABLE audit_log ADD COLUMN written_at INTEGER;
DROP TRIGGER deliveries_moved;
CREATE TRIGGER deliveries_moved AFTER UPDATE OF state, attempt ON deliveries
WHEN OLD.state <> NEW.state OR OLD.attempt <> NEW.attempt BEGIN
    INSERT INTO audit_log
        (at, what, old_status, new_status, who, attempt, staged_at, written_at)
    VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id || ' > ' || NEW.recipient, OLD.state, NEW.state,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'), NEW.attempt,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.staged_at END,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.written_at END);
END;
{_append_only("audit_log")}{_append_only("security_events")}"""

_TO_3 = """
ALTER TABLE deliveries ADD COLUMN read_how TEXT;
ALTER TABLE deliveries ADD COLUMN answer_id TEXT;
ALTER TABLE deliveries ADD COLUMN answer_text TEXT;
ALTER TABLE deliveries ADD COLUMN obligation TEXT;
ALTER TABLE deliveries ADD COLUMN reminders INTEGER NOT NULL DEFAULT 0;
UPDATE deliveries SET obligation = 'open' WHERE (state IN ('written', 'read')
    OR state = 'acked' AND ack_status IN ('received', 'in_progress'))
    AND recipient <> '__orchestrator__' AND message_id IN
    (SELECT message_id FROM messages WHERE message_type IN ('command', 'query'));
CREATE INDEX deliveries_owed ON deliveries (recipient, message_id) WHERE obligation = 'open';
CREATE INDEX deliveries_dead ON deliveries (recipient, message_id) WHERE state = 'dead';
ALTER TABLE agents ADD COLUMN mailbox TEXT;
CREATE TRIGGER deliveries_read_late AFTER UPDATE OF read_at ON deliveries
WHEN OLD.state = NEW.state AND NEW.state IN ('dead', 'expired', 'bounced')
AND NEW.read_at IS NOT OLD.read_at BEGIN
    INSERT INTO audit_log (at, what, old_status, new_status, who, attempt) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id || ' > ' || NEW.recipient, NEW.state, 'read',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'), NEW.attempt);
END;
"""

STEPS = {1: _TO_2, 2: _TO_3}  # from this version to the next


def migrate(connection: sqlite3.Connection, path: str, newest: int) -> str:
    """Bring a ledger to the newest schema; the path of the copy that was made first, or "".

    Durable when it returns. Errors: LedgerError, FormatError, with the ledger as it was;
    sqlite3.Error.
    """
    if _version(connection) == newest:
        return ""
    connection.execute("BEGIN IMMEDIATE")  # from here on nobody else writes
    try:
        version = _version(connection)
        backup = "" if version == newest else _keep(path, version)
        for step in range(version, newest):
            for statement in _statements(STEPS[step]):
                fsio.fault("sql", statement)
                connection.execute(statement)
        fsio.fault("sql", "user_version")
        connection.execute(f"PRAGMA user_version = {newest:d}")
        fsio.fault("sql", "COMMIT")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # synced: the copy may be moved away
    return backup


def _keep(path: str, version: int) -> str:
    """The copy; one that is there already, of a start that was cut short, serves as well."""
    wanted = f"{path}.v{version}.bak"
    with ledger_file.copied(path, wanted) as (temp, _):
        if ledger_file.same_bytes(temp, wanted):
            return wanted
        wanted = fsio.free_name(wanted)
        ledger_file.place(temp, wanted, replace=False)
    return wanted


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> Iterator[str]:
    """One after the other: sqlite3's ``executescript`` would commit before the first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""
