"""The ledger's schema: set up in a new file, and migrated from each version to the next.

Before a migration the ledger is copied, whole and checked, to ``ledger.db.v{N}.bak``; then all
steps are one transaction, with the version set last. Killed anywhere, the ledger has the old
schema or the new one. To change the schema: raise the version in schema.sql and here, add a step
to ``STEPS`` and the text of the old schema to tests/fixtures/ledger.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from relay.base import fsio
from relay.base.errors import VersionError
from relay.ledger import file as ledger_file

SCHEMA_VERSION = 5
WAL_KEPT_BYTES = 4 << 20  # SQLite checkpoints after 1,000 pages: a longer WAL is held by a reader

PRAGMAS = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
PRAGMA cache_size = -2000;
PRAGMA temp_store = MEMORY;
PRAGMA journal_size_limit = {WAL_KEPT_BYTES};
"""

_GUARD = "SELECT RAISE(ABORT, '{table} is append-only');\nEND;\n"
_KEPT = """(SELECT CAST(value AS INTEGER) FROM orchestrator_state
    WHERE key = 'audit_kept_from')"""


def _append_only(table: str) -> str:
    """Triggers that make a table append-only, except for rows older than the retention limit."""
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

_TO_4 = """
CREATE TABLE offers (
    message_id TEXT NOT NULL,
    recipient TEXT NOT NULL,
    offer INTEGER NOT NULL,
    session TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('offered', 'in_context', 'returned')),
    after TEXT,
    offered_at INTEGER NOT NULL,
    ended_at INTEGER,
    evidence TEXT,
    PRIMARY KEY (message_id, recipient, offer)
) WITHOUT ROWID;
CREATE INDEX offers_open ON offers (recipient, message_id) WHERE state = 'offered';
CREATE TABLE rings (
    agent TEXT NOT NULL,
    at INTEGER NOT NULL,
    session TEXT NOT NULL,
    rung TEXT NOT NULL,
    messages INTEGER NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY (agent, at, session)
) WITHOUT ROWID;
CREATE TRIGGER offers_added AFTER INSERT ON offers BEGIN
    INSERT INTO audit_log (at, what, old_status, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id || ' > ' || NEW.recipient, NULL, NEW.state,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER offers_moved AFTER UPDATE OF state ON offers
WHEN OLD.state <> NEW.state BEGIN
    INSERT INTO audit_log (at, what, old_status, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id || ' > ' || NEW.recipient, OLD.state, NEW.state,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
"""

_TO_5 = """
DROP TRIGGER messages_added;
DROP TRIGGER messages_moved;
DROP TRIGGER deliveries_moved;
DROP TRIGGER deliveries_read_late;
DROP TRIGGER offers_added;
DROP TRIGGER offers_moved;
DROP TRIGGER audit_log_keeps_rows;
DROP TRIGGER audit_log_keeps_values;
DROP TRIGGER audit_log_replaces_none;
DROP INDEX deliveries_open;
CREATE INDEX deliveries_open ON deliveries (due_at) WHERE state IN ('held', 'staged');
CREATE INDEX deliveries_failed ON deliveries (message_id) WHERE ack_status = 'failed'
    OR obligation = 'given_up' OR state IN ('expired', 'bounced', 'dead');
ALTER TABLE audit_log RENAME TO audit_log_4;
CREATE TABLE audit_log (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    message_id TEXT,
    recipient TEXT,
    old_status TEXT,
    new_status TEXT NOT NULL,
    who TEXT,
    attempt INTEGER,
    staged_at INTEGER,
    written_at INTEGER
);
INSERT INTO audit_log SELECT id, at, substr(what, 1, instr(what || ' > ', ' > ') - 1),
    CASE WHEN instr(what, ' > ') THEN substr(what, instr(what, ' > ') + 3) END,
    old_status, new_status, who, attempt, staged_at, written_at FROM audit_log_4;
DROP TABLE audit_log_4;
CREATE INDEX audit_log_message ON audit_log (message_id);
CREATE TRIGGER messages_added AFTER INSERT ON messages BEGIN
    INSERT INTO audit_log (at, message_id, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.status,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER messages_moved AFTER UPDATE OF status ON messages
WHEN OLD.status <> NEW.status BEGIN
    INSERT INTO audit_log (at, message_id, old_status, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, OLD.status, NEW.status,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_moved AFTER UPDATE OF state, attempt ON deliveries
WHEN OLD.state <> NEW.state OR OLD.attempt <> NEW.attempt BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, who, attempt,
        staged_at, written_at) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'), NEW.attempt,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.staged_at END,
        CASE WHEN OLD.attempt <> NEW.attempt THEN OLD.written_at END);
END;
CREATE TRIGGER deliveries_read_late AFTER UPDATE OF read_at ON deliveries
WHEN OLD.state = NEW.state AND NEW.state IN ('dead', 'expired', 'bounced')
AND NEW.read_at IS NOT OLD.read_at BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, NEW.state, 'read', NEW.attempt,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_asked AFTER INSERT ON deliveries WHEN NEW.obligation = 'open' BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'asked',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_asked_later AFTER UPDATE OF obligation ON deliveries
WHEN NEW.obligation IS NOT OLD.obligation AND NEW.obligation IN ('open', 'given_up') BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient,
        CASE NEW.obligation WHEN 'open' THEN 'asked' ELSE 'given_up' END,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER deliveries_reminded AFTER UPDATE OF reminders ON deliveries
WHEN NEW.reminders > OLD.reminders BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, 'reminded',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER offers_added AFTER INSERT ON offers BEGIN
    INSERT INTO audit_log (at, message_id, recipient, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, NEW.state, NEW.offer,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER offers_moved AFTER UPDATE OF state ON offers
WHEN OLD.state <> NEW.state BEGIN
    INSERT INTO audit_log (at, message_id, recipient, old_status, new_status, attempt, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.message_id, NEW.recipient, OLD.state, NEW.state, NEW.offer,
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER rings_added AFTER INSERT ON rings BEGIN
    INSERT INTO audit_log (at, recipient, new_status, who) VALUES (
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000000,
        NEW.agent, 'rung',
        (SELECT value FROM orchestrator_state WHERE key = 'writer'));
END;
CREATE TRIGGER audit_log_keeps_rows BEFORE DELETE ON audit_log
WHEN OLD.at >= coalesce((SELECT CAST(value AS INTEGER) FROM orchestrator_state
    WHERE key = 'audit_kept_from'), 0) BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
CREATE TRIGGER audit_log_keeps_values BEFORE UPDATE ON audit_log BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
CREATE TRIGGER audit_log_replaces_none BEFORE INSERT ON audit_log
WHEN EXISTS (SELECT 1 FROM audit_log WHERE id = NEW.id) BEGIN
    SELECT RAISE(ABORT, 'audit_log is append-only');
END;
"""

STEPS = {1: _TO_2, 2: _TO_3, 3: _TO_4, 4: _TO_5}  # from this version to the next


def schema_sql() -> str:
    """The text of schema.sql."""
    from importlib import resources  # here: only a new ledger needs it

    return resources.files("relay").joinpath("schema.sql").read_text()


def set_up(connection: sqlite3.Connection, path: str, busy_timeout_ms: int) -> None:
    """Apply the settings of appendix B; create or migrate the tables."""
    connection.execute(f"PRAGMA busy_timeout = {busy_timeout_ms:d}")
    connection.executescript(PRAGMAS)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise VersionError(path, 60, f"user_version <= {SCHEMA_VERSION}", version)
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {schema_sql()} COMMIT;")
    else:
        migrate(connection, path, SCHEMA_VERSION)


def migrate(connection: sqlite3.Connection, path: str, newest: int) -> str:
    """Migrate a ledger to the newest schema; the path of the copy that was made first, or "".

    Durable when it returns. Errors: LedgerError, FormatError, with the ledger as it was;
    sqlite3.Error.
    """
    if _version(connection) == newest:
        return ""
    connection.execute("BEGIN IMMEDIATE")  # from here on no other process writes
    try:
        version = _version(connection)
        backup = "" if version == newest else _back_up(path, version)
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


def _back_up(path: str, version: int) -> str:
    """Make the copy; an equal one, left by an interrupted start, is used as it is."""
    wanted = f"{path}.v{version}.bak"
    with ledger_file.temporary_copy(path, wanted) as (temp, _):
        if ledger_file.same_bytes(temp, wanted):
            return wanted
        wanted = fsio.free_name(wanted)
        ledger_file.install_copy(temp, wanted, replace=False)
    return wanted


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
