"""The ledger's schema: set up in a new file, and migrated from each version to the next.

Before a migration the ledger is copied, whole and checked, to ``ledger.db.v{N}.bak``; then all
steps are one transaction, with the version set last. Killed anywhere, the ledger has the old
schema or the new one. To change the schema: raise the version in schema.sql and here, add a step
to ``STEPS`` and the text of the old schema to tests/fixtures/ledger.
"""

from __future__ import annotations

import filecmp
import os
import sqlite3
from collections.abc import Iterator

from relay.base import fsio
from relay.ledger import file as ledger_file
from relay.ledger.file import SCHEMA_VERSION

WAL_KEPT_BYTES = 4 << 20  # SQLite checkpoints after 1,000 pages: a longer WAL is held by a reader

PRAGMAS = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
PRAGMA cache_size = -2000;
PRAGMA temp_store = MEMORY;
PRAGMA journal_size_limit = {WAL_KEPT_BYTES};
"""

_TO_6 = """
ALTER TABLE messages ADD COLUMN last_error_code TEXT;
ALTER TABLE rejections ADD COLUMN code TEXT;
ALTER TABLE deliveries ADD COLUMN discarded_at INTEGER;
CREATE TRIGGER deliveries_discarded AFTER UPDATE OF discarded_at ON deliveries
WHEN NEW.discarded_at IS NOT NULL AND OLD.discarded_at IS NULL BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'discarded',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
DROP VIEW all_messages;
CREATE VIEW all_messages AS
SELECT id, message_id, agent_name, direction, file_path, file_size, file_mtime_ns, file_inode,
       checksum, status, message_type, target, discovered_at, processed_at, retry_count, last_error,
       last_error_code
FROM messages
UNION ALL
SELECT m.id, m.message_id, d.recipient, 'inbox',
       'agents/' || d.recipient || '/inbox/' || m.message_id || '.msg',
       m.file_size, m.file_mtime_ns, NULL, m.checksum, d.state, m.message_type, d.recipient,
       d.staged_at, d.written_at, d.attempt - 1, d.last_error, NULL
FROM deliveries AS d JOIN messages AS m USING (message_id);
"""

_TO_7 = """
CREATE TRIGGER deliveries_answered_again AFTER UPDATE OF answer_id ON deliveries
WHEN OLD.state = 'acked' AND NEW.state = 'acked' AND NEW.answer_id IS NOT OLD.answer_id BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state, NEW.attempt,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
"""

STEPS = {5: _TO_6, 6: _TO_7}  # from this version to the next; those before were of previews


def schema_sql() -> str:
    """The text of schema.sql."""
    from importlib import resources  # here: only a new ledger needs it

    return resources.files("relay").joinpath("schema.sql").read_text("utf-8")


def set_up(connection: sqlite3.Connection, path: str) -> None:
    """Apply PRAGMAS; create or migrate the tables.

    Durable when it returns. Errors: LedgerError, FormatError, with the ledger as it was;
    sqlite3.Error.
    """
    connection.executescript(PRAGMAS)
    version = _version(connection)
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {schema_sql()} COMMIT;")
    elif version != SCHEMA_VERSION:
        ledger_file.require_migratable(path, version)
        _migrate(connection, path)


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    """Migrate a ledger to the current schema, after a copy was made."""
    connection.execute("BEGIN IMMEDIATE")  # from here on no other process writes
    try:
        version = _version(connection)
        ledger_file.require_migratable(path, version)
        if version != SCHEMA_VERSION:
            _back_up(path, version)
        for step in range(version, SCHEMA_VERSION):
            for statement in _statements(STEPS[step]):
                fsio.fault("sql", statement)
                connection.execute(statement)
        fsio.fault("sql", "user_version")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION:d}")
        fsio.fault("sql", "COMMIT")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # synced: the copy may be moved away


def _back_up(path: str, version: int) -> None:
    """Make the copy; an equal one, left by an interrupted start, is used as it is."""
    wanted = f"{path}.v{version}.bak"
    with ledger_file.temporary_copy(path, wanted) as (temp, _):
        if not (os.path.exists(wanted) and filecmp.cmp(temp, wanted, shallow=False)):
            ledger_file.install_copy(temp, fsio.free_name(wanted), replace=False)


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> Iterator[str]:
    """The statements of a script: sqlite3's ``executescript`` would commit before the first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""
