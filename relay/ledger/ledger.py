"""The ledger: what became of every file, in SQLite.

One writer, the daemon's loop; readers (``sqlite3``, sqlite-utils, Spark) never block it. One
transaction a step. A state moves by ``UPDATE ... WHERE status = <expected>`` and the rows
that come back say who won. Source: relay-file-system.txt 2.1-2.4 and appendix B, FORMATS 4.

    pending -> processing -> completed -> archived
           <- (recovery, backoff)      -> failed (from pending and processing)
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

from relay.base.errors import LedgerDamaged, LedgerError, VersionError
from relay.base.names import shown
from relay.ledger import file as ledger_file
from relay.ledger.migrations import migrate
from relay.ledger.obligations import Duties
from relay.ledger.processes import Processes
from relay.ledger.registry import Registry
from relay.ledger.values import (
    Delivery,
    DeliveryFacts,
    DutyFacts,
    FileFacts,
    Held,
    Read,
    Row,
    Written,
)

__all__ = [
    "Delivery",
    "DeliveryFacts",
    "DutyFacts",
    "FileFacts",
    "Held",
    "Ledger",
    "Read",
    "Row",
    "Written",
    "schema_sql",
]

SCHEMA_VERSION = 3
OUTBOX = "outbox"
WAL_KEPT_BYTES = 4 << 20  # SQLite folds after 1,000 pages: more is left by a reader alone

PRAGMAS = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
PRAGMA cache_size = -2000;
PRAGMA temp_store = MEMORY;
PRAGMA journal_size_limit = {WAL_KEPT_BYTES};
"""

_ROW = (
    "SELECT message_id, agent_name, file_path, checksum, status, discovered_at, retry_count, "
    "last_error, file_size, file_mtime_ns, file_inode, message_type, target FROM messages "
)
_DELIVERY = "message_id, recipient, state, attempt, staged_at, last_error"
_OPEN = "status IN ('pending', 'processing', 'completed')"


class Ledger:
    """The daemon's connection. Used from the loop's thread alone."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._db = connection
        self.registry = Registry(connection)
        self.processes = Processes(connection)
        self.duties = Duties(connection)
        self._path = path
        self._inode = os.stat(path).st_ino

    def check_file(self) -> None:
        """Errors: LedgerError when the file was removed or replaced under the connection."""
        try:
            inode = os.stat(self._path).st_ino
        except FileNotFoundError:
            inode = None
        if inode != self._inode:
            raise LedgerError(f"{self._path} was removed or replaced while the relay ran")

    @classmethod
    def open(cls, path: str, *, busy_timeout_ms: int = 5000) -> Ledger:
        """Open the ledger for writing, and make it when there is none.

        Errors: VersionError when a newer version wrote it; LedgerError when it is no database.
        """
        _restrict(path)
        connection = ledger_file.connect(path, timeout_s=busy_timeout_ms / 1000, cached=256)
        try:
            _set_up(connection, path, busy_timeout_ms)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path)

    def check(self, *, most_bytes: int) -> None:
        """Errors: LedgerDamaged for one whose pages are not what they must be. A larger one is not
        looked through: 5 ms a MiB."""
        if os.stat(self._path).st_size <= most_bytes and (why := ledger_file.damage(self._db)):
            raise LedgerDamaged(self._path, why)

    def close(self) -> None:
        """Close the connection; the WAL is folded into the database."""
        self._db.close()

    def fold(self) -> bool:
        """Fold the WAL into the database and cut it; False while somebody reads an older state.

        Waits for nobody. Errors: LedgerError.
        """
        (before,) = self._db.execute("PRAGMA busy_timeout").fetchone()
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {before:d}")
        return not busy

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """One step: all of it is there after the block, or none of it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- messages ----------------------------------------------------------------------

    def rows(self, message_ids: Iterable[str]) -> dict[str, Row]:
        """The rows there are for these ids."""
        found = self._db.execute(
            _ROW + "WHERE message_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(message_ids)),),
        )
        return {row[0]: Row(*row) for row in found}

    def record(self, facts: Sequence[FileFacts], *, own: bool = False) -> None:
        """Add rows; the caller has seen that the ids are new.

        ``own``: messages of the orchestrator's, claimed from the start; known ones stay.
        """
        insert, status = ("INSERT OR IGNORE", "processing") if own else ("INSERT", "pending")
        self._db.executemany(
            f"{insert} INTO messages (message_id, agent_name, direction, file_path, file_size, "
            "file_mtime_ns, file_inode, checksum, message_type, target, discovered_at, status) "
            f"VALUES (?, ?, '{OUTBOX}', ?, ?, ?, ?, ?, ?, ?, ?, '{status}')",
            facts,
        )

    def update_facts(self, facts: Sequence[FileFacts]) -> None:
        """A pending file changed: what was read last counts."""
        self._db.executemany(
            "UPDATE messages SET file_size = ?, file_mtime_ns = ?, file_inode = ?, checksum = ?, "
            "message_type = ?, target = ? WHERE message_id = ? AND status = 'pending'",
            [(*fact[3:9], fact.message_id) for fact in facts],
        )

    def claim(self, message_ids: Iterable[str]) -> set[str]:
        """Move these rows from pending to processing; the ids returned are this daemon's."""
        return self._move(message_ids, "pending", "processing", "")

    def complete(self, message_ids: Iterable[str], now_ns: int) -> set[str]:
        """Move rows from processing to completed: every delivery is written, held or bounced."""
        return self._move(message_ids, "processing", "completed", f", processed_at = {now_ns:d}")

    def _move(self, message_ids: Iterable[str], old: str, new: str, also: str) -> set[str]:
        moved = self._db.execute(
            f"UPDATE messages SET status = '{new}'{also} WHERE status = '{old}' "
            "AND message_id IN (SELECT value FROM json_each(?)) RETURNING message_id",
            (json.dumps(list(message_ids)),),
        )
        return {row[0] for row in moved.fetchall()}

    def archive(self, moved: Iterable[tuple[str, str | None]]) -> None:
        """Note (message id, path in the archive; None: the file is gone) of completed rows."""
        self._db.executemany(
            "UPDATE messages SET status = 'archived', file_path = coalesce(?, file_path) "
            "WHERE message_id = ? AND status = 'completed'",
            [(path, message_id) for message_id, path in moved],
        )

    def archive_own(self, message_ids: Iterable[str]) -> None:
        """The orchestrator's own messages have no file: completed is their archive."""
        self._move(message_ids, "completed", "archived", "")

    def fail(self, failures: Iterable[tuple[str, str]], now_ns: int) -> None:
        """Mark (message id, reason) as failed."""
        self._db.executemany(
            "UPDATE messages SET status = 'failed', retry_count = retry_count + 1, "
            f"last_error = ?, processed_at = {now_ns:d} "
            "WHERE message_id = ? AND status IN ('pending', 'processing')",
            [(reason, message_id) for message_id, reason in failures],
        )

    def set_path(self, moved: Iterable[tuple[str, str]]) -> None:
        """Note (message id, path) of files that were moved without a change of status."""
        self._db.executemany(
            "UPDATE messages SET file_path = ? WHERE message_id = ?",
            [(path, message_id) for message_id, path in moved],
        )

    def postpone(self, message_id: str, reason: str) -> int:
        """Put a row back to pending after a passing error; returns how often that happened."""
        row = self._db.execute(
            "UPDATE messages SET status = 'pending', retry_count = retry_count + 1, "
            "last_error = ? WHERE message_id = ? AND status IN ('pending', 'processing') "
            "RETURNING retry_count",
            (reason, message_id),
        ).fetchone()
        return int(row[0]) if row else 0

    def reset(self, message_ids: Iterable[str]) -> set[str]:
        """Recovery: processing rows whose file is still there become pending again."""
        return self._move(message_ids, "processing", "pending", "")

    def open_rows(self) -> list[Row]:
        """Every row not at its end, oldest discovery first."""
        return [
            Row(*row) for row in self._db.execute(_ROW + f"WHERE {_OPEN} ORDER BY id").fetchall()
        ]

    # -- deliveries --------------------------------------------------------------------

    def stage(
        self, deliveries: Iterable[tuple[str, str, str, int, str | None, int | None]]
    ) -> None:
        """Add (message id, recipient, state, staged_at, error, due_at); known ones stay."""
        self._db.executemany(
            "INSERT OR IGNORE INTO deliveries "
            "(message_id, recipient, state, staged_at, last_error, due_at) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            deliveries,
        )

    def written(self, deliveries: Iterable[Written]) -> None:
        """Files that stand in inboxes, for the first time or once more."""
        self._db.executemany(
            "INSERT INTO deliveries (message_id, recipient, state, attempt, staged_at, written_at, "
            "obligation, due_at) "
            "VALUES (?, ?, 'written', ?, ?, ?, ?, ?) ON CONFLICT (message_id, recipient) "
            "DO UPDATE SET "
            "state = 'written', attempt = excluded.attempt, staged_at = excluded.staged_at, "
            "written_at = excluded.written_at, due_at = excluded.due_at, last_error = NULL, "
            "obligation = coalesce(excluded.obligation, obligation) "
            "WHERE state IN ('staged', 'held') "
            "OR (state IN ('written', 'read', 'dead') AND excluded.attempt > attempt)",
            deliveries,
        )

    def restore(self, deliveries: Iterable[DeliveryFacts]) -> None:
        """Rows as the journal has them, where they are missing or behind."""
        self._db.executemany(
            "INSERT INTO deliveries (message_id, recipient, state, attempt, staged_at, written_at, "
            "read_at, acked_at, ack_status, last_error, due_at, read_how, answer_id, answer_text) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (message_id, recipient) "
            "DO UPDATE SET state = excluded.state, attempt = max(attempt, excluded.attempt), "
            "staged_at = CASE WHEN attempt < excluded.attempt "  # its age is that of its attempt
            "THEN coalesce(excluded.staged_at, staged_at) "
            "ELSE coalesce(staged_at, excluded.staged_at) END, "
            "written_at = coalesce(written_at, excluded.written_at), "
            "read_at = coalesce(read_at, excluded.read_at), "
            "acked_at = coalesce(acked_at, excluded.acked_at), "
            "ack_status = coalesce(excluded.ack_status, ack_status), "
            "last_error = coalesce(excluded.last_error, last_error), due_at = excluded.due_at, "
            "read_how = coalesce(excluded.read_how, read_how), "
            "answer_id = coalesce(excluded.answer_id, answer_id), "
            "answer_text = coalesce(excluded.answer_text, answer_text) "
            "WHERE state <> excluded.state OR attempt < excluded.attempt "
            "OR (read_how IS NULL AND excluded.read_how IS NOT NULL) "
            "OR answer_id IS NOT coalesce(excluded.answer_id, answer_id)",
            deliveries,
        )

    def hold(self, held: Iterable[Held]) -> None:
        """Deliveries that could not be made now."""
        self._db.executemany(
            "UPDATE deliveries SET state = 'held', last_error = ?, due_at = ?, attempt = ? "
            "WHERE message_id = ? AND recipient = ? "
            "AND state IN ('staged', 'held', 'written', 'read', 'dead')",
            [(one.reason, one.due_at, one.attempt, *one[:2]) for one in held],
        )

    def let_go(self, message_ids: Iterable[str], now_ns: int) -> None:
        """Held deliveries of these messages are due now."""
        self._db.execute(
            "UPDATE deliveries SET due_at = ? WHERE state = 'held' "
            "AND message_id IN (SELECT value FROM json_each(?))",
            (now_ns, json.dumps(list(message_ids))),
        )

    def end(self, message_id: str, recipient: str, state: str, reason: str) -> None:
        """Given up, as ``expired``, ``bounced`` or ``dead``; what is acked stays so."""
        self._db.execute(
            "UPDATE deliveries SET state = ?, last_error = ?, due_at = NULL, "
            "obligation = CASE obligation WHEN 'open' THEN 'given_up' ELSE obligation END "
            "WHERE message_id = ? AND recipient = ? "
            "AND state IN ('staged', 'held', 'written', 'read', 'dead') AND state <> ?",
            (state, reason, message_id, recipient, state),
        )

    def again(self, vanished: Iterable[tuple[str, str, int]], reason: str, now_ns: int) -> None:
        """(message id, recipient, next attempt): it vanished unread, and is due again now."""
        self._db.executemany(
            "UPDATE deliveries SET state = 'held', attempt = ?, "
            f"staged_at = {now_ns:d}, due_at = {now_ns:d}, last_error = ? "
            "WHERE message_id = ? AND recipient = ? AND state = 'written'",
            [(attempt, reason, message_id, name) for message_id, name, attempt in vanished],
        )

    def read(self, taken: Iterable[Read | tuple[str, str, int]], now_ns: int) -> None:
        """The file left the inbox; no later attempt's did.

        What was given up, or acknowledged where it stood, keeps its state.
        """
        self._db.executemany(
            "UPDATE deliveries SET state = CASE state WHEN 'written' THEN 'read' ELSE state END, "
            f"read_at = CASE state WHEN 'acked' THEN coalesce(read_at, {now_ns:d}) "
            f"ELSE {now_ns:d} END, read_how = ? "
            "WHERE message_id = ? AND recipient = ? AND attempt <= ? AND (state = 'written' "
            "OR (state = 'acked' AND read_how IS NULL) "
            "OR (state IN ('dead', 'expired', 'bounced') AND coalesce(read_at, 0) < written_at))",
            [(one.how, *one[:3]) for one in (Read(*each) for each in taken)],
        )

    def acknowledge(
        self,
        message_id: str,
        recipient: str,
        status: str,
        now_ns: int,
        answer_id: str | None = None,
        text: str | None = None,
    ) -> None:
        """An ack arrived, late or not; a later one replaces the status of an earlier one."""
        self._db.execute(
            "UPDATE deliveries SET state = 'acked', acked_at = ?, ack_status = ?, "
            "read_at = coalesce(read_at, ?), answer_id = ?, answer_text = ? "
            "WHERE message_id = ? AND recipient = ? AND state <> 'staged'",
            (now_ns, status, now_ns, answer_id, text, message_id, recipient),
        )

    def deliveries(self, message_ids: Iterable[str]) -> dict[str, dict[str, Delivery]]:
        """The deliveries there are for these messages: id -> recipient -> delivery."""
        found: dict[str, dict[str, Delivery]] = {}
        for row in self._db.execute(
            f"SELECT {_DELIVERY} FROM deliveries "
            "WHERE message_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(message_ids)),),
        ):
            found.setdefault(row[0], {})[row[1]] = Delivery(*row)
        return found

    def held_until(self) -> int | None:
        """When the next held delivery is due (Unix nanoseconds)."""
        row = self._db.execute(
            "SELECT min(due_at) FROM deliveries WHERE state IN ('held', 'staged')"
        ).fetchone()
        return row[0] if row else None

    def held_due(self, now_ns: int, limit: int) -> list[Delivery]:
        """Held deliveries whose time has come."""
        return [
            Delivery(*row)
            for row in self._db.execute(
                f"SELECT {_DELIVERY} FROM deliveries "
                "WHERE state IN ('held', 'staged') AND state = 'held' AND due_at <= ? LIMIT ?",
                (now_ns, limit),
            )
        ]

    def unread(self, recipient: str) -> dict[str, int]:
        """Message id -> when it was written, of what stands in this agent's inbox as far as the
        ledger knows: what was given up, and is still there, too."""
        return dict(
            self._db.execute(
                "SELECT message_id, coalesce(written_at, 0) FROM deliveries "
                "WHERE recipient = ? AND state = 'written' UNION ALL "
                "SELECT message_id, written_at FROM deliveries "
                "WHERE recipient = ? AND state = 'dead' AND coalesce(read_at, 0) < written_at",
                (recipient, recipient),
            ).fetchall()
        )

    def unread_of(self, recipient: str, message_ids: Iterable[str]) -> dict[str, int]:
        """The same of these messages alone."""
        found = self._db.execute(
            "SELECT message_id, coalesce(written_at, 0) FROM deliveries WHERE recipient = ? "
            "AND state IN ('written', 'dead') AND message_id IN (SELECT value FROM json_each(?))",
            (recipient, json.dumps(list(message_ids))),
        )
        return dict(found.fetchall())

    def undelivered(self, recipient: str, message_ids: set[str]) -> set[str]:
        """Those of these that nothing was ever delivered of to this agent."""
        return ledger_file.undelivered(self._db, recipient, message_ids)

    # -- the rest ----------------------------------------------------------------------

    def reject(
        self,
        agent: str,
        file_name: str,
        inode: int,
        mtime_ns: int,
        reason: str,
        nack_id: str,
        now_ns: int,
    ) -> None:
        """Keep a refusal of a file that gets no row of its own."""
        self._db.execute(
            "INSERT OR IGNORE INTO rejections VALUES (?, ?, ?, ?, ?, ?, ?)",
            (agent, shown(file_name), inode, mtime_ns, reason, nack_id, now_ns),
        )

    def take_over(self, table: str, row: dict[str, object]) -> None:
        """Add a row of another ledger's table, columns by name; one of its key is replaced."""
        names = ", ".join(row)
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})",
            list(row.values()),
        )

    def get_state(self, key: str) -> str | None:
        """A value of ``orchestrator_state``."""
        row = self._db.execute(
            "SELECT value FROM orchestrator_state WHERE key = ?", (key,)
        ).fetchone()
        return row[0] if row else None

    def note_position(self, offset: int, now_ns: int) -> None:
        """The ledger has everything that the journal holds before this offset."""
        self.set_state("journal", str(offset), now_ns)

    def position(self) -> int:
        """Up to where the ledger follows the journal; 0 for a new one."""
        return int(self.get_state("journal") or 0)

    def set_state(self, key: str, value: str, now_ns: int) -> None:
        """Set a value of ``orchestrator_state``."""
        self._db.execute(
            "INSERT INTO orchestrator_state VALUES (?, ?, ?) ON CONFLICT (key) "
            "DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
            (key, value, now_ns),
        )


def schema_sql() -> str:
    """The text of schema.sql."""
    return resources.files("relay").joinpath("schema.sql").read_text()


def _restrict(path: str) -> None:
    """A file of mode 600, made when there is none: SQLite gives its mode to -wal and -shm.

    One that is there is not opened here: closing it would drop the locks of a connection.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        os.chmod(path, 0o600)
    except OSError as exc:
        raise LedgerError(f"{path}: {exc.strerror}") from exc


def _set_up(connection: sqlite3.Connection, path: str, busy_timeout_ms: int) -> None:
    """The settings of appendix B, and the tables where there are none yet."""
    connection.execute(f"PRAGMA busy_timeout = {busy_timeout_ms:d}")
    connection.executescript(PRAGMAS)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise VersionError(path, 60, f"user_version <= {SCHEMA_VERSION}", version)
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {schema_sql()} COMMIT;")
    else:
        migrate(connection, path, SCHEMA_VERSION)
