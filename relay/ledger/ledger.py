"""The ledger: the status of every file and delivery, in SQLite.

One writer, the daemon's loop; readers (``sqlite3``, sqlite-utils, Spark) never block it. One
transaction a step. A status changes by ``UPDATE ... WHERE status = <expected>``, and the rows
returned show which updates succeeded. See docs/formats/ledger.md.

    pending -> processing -> archived, or completed until its original is archived
           <- (recovery, backoff)      -> failed (from pending and processing)
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from relay.base.errors import LedgerDamaged, LedgerError, RowRefused
from relay.base.incidents import Refusal
from relay.ledger import file as ledger_file
from relay.ledger.agents import AgentTable, ProcessTable
from relay.ledger.deliveries import DeliveryTable, OfferTable
from relay.ledger.schema import set_up

Fact = TypeVar("Fact")
LEDGER_ONLY_TABLES = (  # which a rebuild takes from the ledger before: no journal has them
    "orchestrator_state",
    "agents",
    "processes",
    "pending_operations",
    "security_events",
)
SKIPPED = "skipped_facts"  # key of their count in orchestrator_state
REBUILT = "rebuilt_at"  # key of when the rows were made again from a journal
SHOWN_CHARS = 500  # of a fact that is skipped


class FileFacts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The facts recorded of one file, each under the name of its column."""

    message_id: str
    agent_name: str
    file_path: str
    file_size: int
    file_mtime_ns: int
    file_inode: int | None
    checksum: str | None
    message_type: str | None
    target: str | None
    discovered_at: int


class MessageRow(NamedTuple):
    """A row of ``messages``, as far as the relay reads it back."""

    message_id: str
    agent_name: str
    file_path: str
    checksum: str | None
    status: str
    discovered_at: int
    retry_count: int
    last_error: str | None
    file_size: int
    file_mtime_ns: int
    file_inode: int | None
    message_type: str | None
    target: str | None
    last_error_code: str | None = None


_ROW = f"SELECT {', '.join(MessageRow._fields)} FROM messages "
_OPEN = "status IN ('pending', 'processing', 'completed')"
# One statement for the rows of a batch: a third of the time of one for each row.
_FACTS = FileFacts.__struct_fields__
_ADD = (
    f"INSERT INTO messages (direction, status, {', '.join(_FACTS)}) SELECT 'outbox', 'processing', "
    + ", ".join(f"json_extract(value, '$[{place}]')" for place in range(len(_FACTS)))
    + " FROM json_each(?) WHERE true ORDER BY key "
    "ON CONFLICT (message_id) DO NOTHING RETURNING message_id"
)
_ARCHIVE = (
    "UPDATE messages SET status = 'archived', processed_at = coalesce(processed_at, ?), "
    "file_path = coalesce(path, file_path) "
    "FROM (SELECT json_extract(value, '$[0]') AS id_, json_extract(value, '$[1]') AS path "
    "FROM json_each(?)) WHERE message_id = id_ AND status IN ('processing', 'completed')"
)
_POSTPONE = (
    "UPDATE messages SET status = 'pending', retry_count = retry_count + 1, last_error = reason "
    "FROM (SELECT json_extract(value, '$[0]') AS id_, json_extract(value, '$[1]') AS reason "
    "FROM json_each(?)) WHERE message_id = id_ AND status IN ('pending', 'processing') "
    "RETURNING message_id, retry_count"
)


class Transaction:
    """A step that is committed as a whole, or rolled back."""

    __slots__ = ("_db",)

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self._db.execute("COMMIT")
        elif self._db.in_transaction:  # a full disk has rolled it back already
            self._db.execute("ROLLBACK")


BUSY_TIMEOUT_MS = 5000  # longest wait for another process that writes the ledger


class Ledger:
    """The daemon's connection. Used from the loop's thread alone."""

    def __init__(self, connection: ledger_file.Connection, path: str) -> None:
        self._db = connection
        self.agents = AgentTable(connection)
        self.deliveries = DeliveryTable(connection)
        self.offers = OfferTable(connection)
        self.processes = ProcessTable(connection)
        self._path = path

    def check_file(self) -> None:
        """Errors: LedgerError when the file was removed or replaced while it is open."""
        self._db.check_file()

    @classmethod
    def open(cls, path: str) -> Ledger:
        """Open the ledger for writing; create it if it does not exist.

        Errors: VersionError when a newer version wrote it; LedgerError when it is not a database.
        """
        _restrict(path)
        connection = ledger_file.connect(path, timeout_s=BUSY_TIMEOUT_MS / 1000, cached=256)
        try:
            set_up(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path)

    def check(self, *, most_bytes: int) -> None:
        """Verify the pages of a ledger of up to ``most_bytes``: it takes 5 ms a MiB.

        Errors: LedgerDamaged.
        """
        if os.stat(self._path).st_size <= most_bytes and (why := ledger_file.quick_check(self._db)):
            raise LedgerDamaged(self._path, why)

    def close(self) -> None:
        """Close the connection; SQLite checkpoints the WAL into the database."""
        self._db.close()

    def transaction(self) -> Transaction:
        """Commit the block as one step, or roll all of it back."""
        return Transaction(self._db)

    def project(
        self, write: Callable[[Sequence[Fact]], object], facts: Sequence[Fact]
    ) -> list[str]:
        """Write facts of the journal; returns a text about each one that no row can hold.

        The journal is the truth and cannot be changed: one fact that the ledger refuses must stop
        neither a start nor a rebuild. Within the caller's transaction.
        """
        try:
            write(facts)
        except (RowRefused, OverflowError, UnicodeEncodeError) as exc:
            if len(facts) > 1:  # those that were written are written again, which changes nothing
                return [why for fact in facts for why in self.project(write, [fact])]
            return [f"{exc}: {str(facts[0])[:SHOWN_CHARS]}"]
        return []

    def count_skipped(self, number: int, now_ns: int) -> None:
        """Add to the count of facts without a row, for ``relay doctor``."""
        self.set_state(SKIPPED, str(int(self.get_state(SKIPPED) or 0) + number), now_ns)

    # -- messages ----------------------------------------------------------------------

    def rows(self, message_ids: Iterable[str]) -> dict[str, MessageRow]:
        """The existing rows of these ids."""
        found = self._db.execute(
            _ROW + "WHERE message_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(message_ids)),),
        )
        return {row[0]: MessageRow(*row) for row in found}

    def add(self, facts: Sequence[FileFacts]) -> set[str]:
        """Add rows, claimed from the start; existing ones stay. Returns the ids that are added."""
        added = self._db.execute(_ADD, (ledger_file.as_json(facts),))
        return {row[0] for row in added.fetchall()}

    def update_facts(self, facts: Sequence[FileFacts]) -> None:
        """Update the rows of pending files that changed."""
        self._db.executemany(
            "UPDATE messages SET file_size = ?, file_mtime_ns = ?, file_inode = ?, checksum = ?, "
            "message_type = ?, target = ? WHERE message_id = ? AND status = 'pending'",
            [
                (
                    fact.file_size,
                    fact.file_mtime_ns,
                    fact.file_inode,
                    fact.checksum,
                    fact.message_type,
                    fact.target,
                    fact.message_id,
                )
                for fact in facts
            ],
        )

    def claim(self, message_ids: Iterable[str]) -> set[str]:
        """Move these rows from pending to processing; the ids returned are this daemon's."""
        return self._move(message_ids, "pending", "processing")

    def complete(self, message_ids: Iterable[str], now_ns: int) -> set[str]:
        """Move rows from processing to completed: their originals are not archived yet."""
        return self._move(message_ids, "processing", "completed", now_ns)

    def _move(
        self, message_ids: Iterable[str], old: str, new: str, processed_ns: int | None = None
    ) -> set[str]:
        moved = self._db.execute(
            "UPDATE messages SET status = ?, processed_at = coalesce(?, processed_at) "
            "WHERE status = ? AND message_id IN (SELECT value FROM json_each(?)) "
            "RETURNING message_id",
            (new, processed_ns, old, json.dumps(list(message_ids))),
        )
        return {row[0] for row in moved.fetchall()}

    def archive(self, moved: Sequence[tuple[str, str | None]], now_ns: int) -> None:
        """Archive completed work: (message id, path in the archive; None: it has no file)."""
        self._db.execute(_ARCHIVE, (now_ns, ledger_file.as_json(moved)))

    def fail(self, failures: Iterable[tuple[str, Refusal]], now_ns: int) -> None:
        """Mark messages, by id, as failed."""
        self._db.executemany(
            "UPDATE messages SET status = 'failed', retry_count = retry_count + 1, "
            "last_error = ?, last_error_code = ?, processed_at = ? "
            "WHERE message_id = ? AND status IN ('pending', 'processing')",
            [
                (refusal.reason, refusal.code or None, now_ns, message_id)
                for message_id, refusal in failures
            ],
        )

    def set_path(self, moved: Iterable[tuple[str, str]], *, is_rewritten: bool = False) -> None:
        """Update (message id, path) of files that moved without a change of status.

        ``is_rewritten``: they are not their senders' any more, and may have another size.
        """
        inode = "NULL" if is_rewritten else "file_inode"
        self._db.executemany(
            f"UPDATE messages SET file_path = ?, file_inode = {inode} WHERE message_id = ?",
            [(path, message_id) for message_id, path in moved],
        )

    def postpone(self, reasons: Sequence[tuple[str, str]]) -> dict[str, int]:
        """Put rows (message id, reason) back to pending after a transient error; returns their
        retry counts."""
        return dict(self._db.execute(_POSTPONE, (ledger_file.as_json(reasons),)).fetchall())

    def reset(self, message_ids: Iterable[str]) -> set[str]:
        """Put processing rows back to pending, in recovery, where their file still exists."""
        return self._move(message_ids, "processing", "pending")

    def open_rows(self, at_once: int) -> Iterator[list[MessageRow]]:
        """Every row that is not archived or failed, oldest discovery first, in slices.

        The caller may settle a slice before it asks for the next.
        """
        last = 0
        while True:
            query = f"SELECT id FROM messages WHERE {_OPEN} AND id > ? ORDER BY id LIMIT ?"
            ids = [row[0] for row in self._db.execute(query, (last, at_once)).fetchall()]
            if not ids:
                return
            query = _ROW + f"WHERE {_OPEN} AND id BETWEEN ? AND ? ORDER BY id"
            yield [
                MessageRow(*row) for row in self._db.execute(query, (ids[0], ids[-1])).fetchall()
            ]
            last = ids[-1]

    # -- rejections and state ----------------------------------------------------------

    def add_rejections(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Record files that get no row in ``messages``, in the order of the table's columns: agent,
        name, inode, mtime (Unix ns), reason, id of the answer, Unix ns, code."""
        self._db.executemany(
            "INSERT OR IGNORE INTO rejections VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
        )

    def import_row(self, table: str, row: dict[str, object]) -> None:
        """Add or replace a row of another ledger's table, columns by name."""
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

    def set_position(self, offset: int, now_ns: int) -> None:
        """Record that the ledger has everything in the journal before this offset."""
        self.set_state("journal", str(offset), now_ns)

    def position(self) -> int:
        """The journal offset that the ledger has reached; 0 for a new one."""
        return int(self.get_state("journal") or 0)

    def set_state(self, key: str, value: str, now_ns: int) -> None:
        """Set a value of ``orchestrator_state``."""
        self._db.execute(
            "INSERT INTO orchestrator_state VALUES (?, ?, ?) ON CONFLICT (key) "
            "DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
            (key, value, now_ns),
        )

    def alive_at(self) -> int:
        """The time the relay last ran (Unix nanoseconds); 0: unknown."""
        row = self._db.execute(
            "SELECT max(updated_at) FROM orchestrator_state WHERE key IN ('alive_at', 'journal')"
        ).fetchone()
        return int(row[0] or 0)


def _restrict(path: str) -> None:
    """Give the file mode 600, and create it if needed: SQLite copies its mode to -wal and -shm.

    An existing file is not opened here: closing it would drop the locks of a connection.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        os.chmod(path, 0o600)
    except OSError as exc:
        raise LedgerError(f"{path}: {exc.strerror}") from exc
