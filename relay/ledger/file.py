"""The ledger as a file: connections, checks, and copies made while it is written.

A copy is complete, checked and durable before it gets its name: a crash leaves at most `NAME.tmp`,
which the next copy replaces. Copying reads a snapshot and blocks no writer.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from relay.base import fsio
from relay.base.errors import (
    FormatError,
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerMissing,
    RowRefused,
    VersionError,
    run_as,
)

SCHEMA_VERSION = 7  # of schema.sql
OLDEST_VERSION = 5  # that is migrated; those before were of previews
REBUILD = "`relay ledger rebuild` makes it from the journal, and keeps what the journal lacks"
SLICE_PAGES = 256  # 1 MiB, a few milliseconds
PAUSE_S = 0.002  # between two slices, so that the writer gets the disk
UNREADABLE = "name a ledger's backup; `relay ledger rebuild` rebuilds ledger.db from the journal"
EARLIER = (
    "`relay check` reports damage; a ledger of an earlier agent-relay is migrated to the"
    " current schema by the next `relay up`"
)
LEFTOVERS = ("-journal", "-wal", "-shm")  # files that SQLite puts beside the database
AT_ONCE = 256  # rows fetched at once when iterating
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
UNWRITABLE = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
DISK_FULL = "free some space: nothing is lost, and a running relay continues by itself"
WAL_INDEX_BYTES = 32 << 10  # the least -shm of a ledger that a process has open
LEAST_FREE_BYTES = 64 << 10  # even a reader needs room, for the index of the WAL
REFUSED = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG})

R = TypeVar("R")


class LedgerContent(NamedTuple):
    """The schema version and row counts of a ledger, to compare it with a copy."""

    version: int
    counts: dict[str, int]  # rows by table, in the order of their names

    def __str__(self) -> str:
        rows = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        return f"schema {self.version}, {rows or 'no rows'}"


@contextlib.contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Translate sqlite3's errors into LedgerError and its subclasses."""
    try:
        yield
    except sqlite3.Error as exc:
        raise _translate(path, exc) from exc


def _translate(path: str, exc: sqlite3.Error) -> LedgerError:
    """The LedgerError for an error of sqlite3."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # errors of the Python module have none
    if code in DAMAGE:
        return LedgerDamaged(path, str(exc))
    if code == sqlite3.SQLITE_FULL or (code in UNWRITABLE and _is_disk_full(path)):
        return LedgerError(f"{path}: the disk is full ({exc})", hint=DISK_FULL)
    if code in REFUSED:
        return RowRefused(f"{path}: {exc}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerBusy(f"{path}: {exc}")
    if "unable to open" in str(exc) and (denied := _why_denied(path)):
        return LedgerError(f"{path}: permission denied", hint=denied)
    hint = ""
    if "no such " in str(exc):  # table, column
        hint = EARLIER
    if "unable to open" in str(exc) and _is_read_only(path):
        hint = "SQLite needs to write to its folder, and cannot: use a copy of the home"
    return LedgerError(f"{path}: {exc}", hint=hint)


def _is_disk_full(path: str) -> bool:
    """True if the ledger's disk has no room for the files that SQLite puts beside it."""
    try:
        found = os.statvfs(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < LEAST_FREE_BYTES


def _why_denied(path: str) -> str:
    """The hint for a file that this user may not read or write; empty if it may."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    if os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return ""
    return f"`chmod 600 {path}`" if status.st_uid == os.geteuid() else run_as(status.st_uid)


def as_json(rows: Sequence[Any]) -> str:
    """The rows as a JSON array, for a statement that reads them with ``json_each``."""
    import msgspec  # here: who only reads a ledger does not need it

    return msgspec.json.encode(rows).decode()


def _translating(method: Callable[..., R]) -> Callable[..., R]:
    """A cursor's method that raises LedgerError.

    Without ``translated_errors``: a context manager takes longer than many a statement.
    """

    def translated(cursor: _LedgerCursor, *values: Any) -> R:
        try:
            return method(cursor, *values)
        except sqlite3.Error as exc:
            raise _translate(cursor.connection.path, exc) from exc

    return translated


class _LedgerCursor(sqlite3.Cursor):
    """A cursor that raises LedgerError, also for an unreadable row when it is fetched."""

    connection: Connection
    execute: Callable[..., _LedgerCursor] = _translating(sqlite3.Cursor.execute)
    executemany: Callable[..., _LedgerCursor] = _translating(sqlite3.Cursor.executemany)
    executescript = _translating(sqlite3.Cursor.executescript)
    fetchone = _translating(sqlite3.Cursor.fetchone)
    fetchmany = _translating(sqlite3.Cursor.fetchmany)
    fetchall = _translating(sqlite3.Cursor.fetchall)

    def __iter__(self) -> Any:
        while rows := self.fetchmany(AT_ONCE):
            yield from rows


class Connection(sqlite3.Connection):
    """A connection that raises LedgerError, when it executes and when it fetches rows.

    Made by ``connect``.
    """

    path = ""
    inode: int | None = None  # of the file that was opened

    def check_file(self) -> None:
        """Errors: LedgerError when the file was removed or replaced while it is open."""
        if _inode(self.path) != self.inode:
            raise LedgerError(
                f"{self.path} was removed or replaced while it was open",
                hint="begin again with the one that is there now",
            )

    def execute(self, sql: str, values: Any = ()) -> _LedgerCursor:
        """Run one statement."""
        return self.cursor(_LedgerCursor).execute(sql, values)

    def executemany(self, sql: str, rows: Any) -> _LedgerCursor:
        """Run one statement for each row."""
        return self.cursor(_LedgerCursor).executemany(sql, rows)

    def executescript(self, script: str) -> sqlite3.Cursor:
        """Run several statements."""
        return self.cursor(_LedgerCursor).executescript(script)


def connect(path: str, *, timeout_s: float = 5, uri: str = "", cached: int = 128) -> Connection:
    """Connect to the ledger at ``path``; the caller manages transactions. Errors: LedgerError.

    ``uri``: SQLite's URI of the file, where it needs options.
    """
    inode = _inode(path)
    with translated_errors(path):
        connection = sqlite3.connect(
            uri or path,
            uri=bool(uri),
            timeout=timeout_s,
            isolation_level=None,
            cached_statements=cached,
            factory=Connection,
        )
    connection.path, connection.inode = path, inode
    return connection


def connect_readonly(path: str) -> Connection:
    """Connect without the right to write; the caller manages transactions.

    SQLite creates a -shm beside a ledger to read it. Where it cannot, and no process has the ledger
    open, it is opened as immutable.
    """
    return connect(path, uri=readonly_uri(path))


def readonly_uri(path: str) -> str:
    """SQLite's URI of a ledger that is only read."""
    quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    cannot_create = _is_read_only(path) or _is_disk_full(path)
    is_open = _size(path + "-wal") or _size(path + "-shm") >= WAL_INDEX_BYTES
    mode = "mode=ro&immutable=1" if cannot_create and not is_open else "mode=ro"
    return f"file:{quoted}?{mode}"


def open_readonly(path: str) -> Connection:
    """Open a ledger for reading; never blocks the relay.

    Errors: LedgerMissing, LedgerError when it is damaged, LedgerBusy.
    """
    if not os.path.exists(path):
        hint = "`relay up` creates it, from the journal if there is one; so does a running relay"
        raise LedgerMissing(f"there is no ledger at {path}", hint=hint)
    connection = connect_readonly(path)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("SELECT 1 FROM messages LIMIT 1")
    except BaseException:
        connection.close()
        raise
    return connection


def open_current(path: str) -> Connection:
    """Open a ledger of the current schema for reading.

    Errors: those of ``open_readonly``; LedgerError when an earlier relay wrote it, VersionError
    when a newer one did.
    """
    connection = open_readonly(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == SCHEMA_VERSION:
        return connection
    connection.close()
    require_migratable(path, version)
    raise LedgerError(
        f"{path} is of an earlier agent-relay: its schema is {version}, expected {SCHEMA_VERSION}",
        hint="the next `relay up` upgrades it, and keeps a copy of it as it is",
    )


def require_migratable(path: str, version: int) -> None:
    """Errors: LedgerError for a schema that is not migrated any more, VersionError for one of a
    newer relay."""
    if version > SCHEMA_VERSION:
        raise VersionError(path, 60, f"user_version <= {SCHEMA_VERSION}", version)
    if version < OLDEST_VERSION:
        raise LedgerError(
            f"{path} is of a preview of agent-relay: its schema is {version}, expected"
            f" {OLDEST_VERSION} or {SCHEMA_VERSION}",
            hint=REBUILD,
        )


def _is_read_only(path: str) -> bool:
    """True if no file can be created beside it: another user's folder, a read-only disk."""
    return not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)


def _inode(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino
    return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def content(db: sqlite3.Connection) -> LedgerContent:
    """Schema version and row counts, of one snapshot if the caller is in a transaction."""
    tables = [
        name
        for (name,) in db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite_%' ORDER BY name"
        )
    ]
    counts = {name: db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    return LedgerContent(db.execute("PRAGMA user_version").fetchone()[0], counts)


def quick_check(db: sqlite3.Connection, may_continue: Callable[[], bool] = lambda: True) -> str:
    """The first problems that SQLite finds in a database's pages; empty if it finds none.

    Faster than ``integrity_problems``, which reads every index, too: 5 ms a MiB. Ends early when
    ``may_continue``, called before each table, returns False.
    """
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in ("sqlite_master", *tables):
        if not may_continue():
            break
        found = str(db.execute(f'PRAGMA quick_check("{table}")').fetchone()[0])
        if found != "ok":
            return " ".join(found.split())
    return ""


def integrity_problems(db: sqlite3.Connection) -> list[str]:
    """The problems that SQLite finds in a database, a line each."""
    found = [str(row[0]) for row in db.execute("PRAGMA integrity_check(20)")]
    wrong = [] if found == ["ok"] else found
    for table, rowid, parent, _ in db.execute("PRAGMA foreign_key_check").fetchall()[:20]:
        wrong.append(f"row {rowid} of {table} refers to a missing row of {parent}")
    return wrong


def verify(path: str) -> LedgerContent:
    """Check the pages and rows of a ledger's file; its content.

    Errors: FormatError for a damaged one, LedgerError for a file that is not a ledger.
    """
    with open_snapshot(path) as db:
        wrong = integrity_problems(db)
        if wrong:
            raise FormatError(path, 0, "a sound database", "; ".join(wrong[:3]))
        return ledger_content(db, path)


@contextlib.contextmanager
def open_snapshot(path: str) -> Iterator[Connection]:
    """Open any ledger's file, as a backup, for the block. Errors: LedgerError."""
    try:
        with contextlib.closing(_connect_existing(path)) as db:
            db.execute("BEGIN")
            yield db
    except LedgerError as exc:
        if exc.hint not in (LedgerError.hint, LedgerDamaged.hint):
            raise
        raise LedgerError(exc.message, hint=UNREADABLE) from exc  # the default hint says to check


def ledger_content(db: sqlite3.Connection, path: str) -> LedgerContent:
    """The content of a ledger. Errors: LedgerError for another database."""
    found = content(db)
    if found.version < 1 or "messages" not in found.counts:
        raise LedgerError(f"{path} is a database, but not a ledger", hint="name a ledger's backup")
    return found


def _connect_existing(path: str) -> Connection:
    if not os.path.exists(path):
        raise LedgerError(f"there is no file {path}", hint="name a ledger's backup")
    if not os.path.isfile(path):
        raise LedgerError(f"{path} is not a regular file", hint="name a ledger's backup")
    return connect_readonly(path)


@contextlib.contextmanager
def temporary_copy(source: str, target: str) -> Iterator[tuple[str, LedgerContent]]:
    """Copy a ledger to ``target.tmp``, for the block: (path of the copy, its content).

    The copy is checked; the caller may change it, and gives it its name with ``install_copy``. It
    is written in slices from one snapshot, and its writer never waits. A copy that was not
    installed is removed at the end of the block. Errors: LedgerError, FormatError, OSError.
    """
    temp = target + ".tmp"
    fsio.fault("create", temp)
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(fsio.locked(temp))
        except BlockingIOError as exc:
            hint = "wait for it to end"
            raise LedgerBusy(f"{temp}: being written by another process", hint=hint) from exc
        try:
            os.ftruncate(held, 0)
            remove(temp, *LEFTOVERS)
            expected = _copy(source, temp)
            found = verify(temp)
            if found != expected:
                raise FormatError(temp, 0, expected, found)
            yield temp, found
        finally:
            if os.path.exists(temp) and os.fstat(held).st_ino == os.stat(temp).st_ino:
                remove(temp, "", *LEFTOVERS)


def _copy(source: str, temp: str) -> LedgerContent:
    def pause(status: int, remaining: int, total: int) -> None:
        fsio.fault("write", temp)
        if remaining:
            time.sleep(PAUSE_S)

    with (
        translated_errors(source),  # errors of ``backup`` and of the copy
        contextlib.closing(connect_readonly(source)) as db,
        contextlib.closing(connect(temp)) as copy,
    ):
        db.execute("BEGIN")  # one snapshot: a copy that follows the writer may never end
        expected = content(db)
        db.backup(copy, pages=SLICE_PAGES, progress=pause)
        copy.execute("PRAGMA journal_mode = DELETE")  # a single file, without -wal and -shm
    return expected


def install_copy(temp: str, target: str, *, replace: bool) -> None:
    """Rename a finished copy to its name, durably. Errors: LedgerError when the name is taken."""
    fd = fsio.open_rw(temp)
    try:
        fsio.sync_data(fd, temp)
    finally:
        os.close(fd)
    fsio.fault("rename", target)
    if replace:
        os.rename(temp, target)
    else:
        try:
            os.link(temp, target)
        except FileExistsError:
            raise LedgerError(
                f"{target} exists already", hint="name another file, or use --force"
            ) from None
        os.unlink(temp)
    remove(temp, *LEFTOVERS)  # of who verified it
    fsio.sync_dir(os.path.dirname(os.path.abspath(target)))


def holders(path: str) -> dict[int, str]:
    """The processes that have the ledger or its -wal or -shm open: pid -> program name.

    Processes of other users are not seen. Takes some milliseconds for a hundred processes.
    """
    import psutil  # here: most readers of a ledger do not need it

    names = {os.path.realpath(path) + suffix for suffix in ("", "-wal", "-shm")}
    found = {}
    for process in psutil.process_iter(["name"]):
        try:
            if any(file.path in names for file in process.open_files()):
                found[process.pid] = str(process.info["name"])
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return found


def remove(path: str, *suffixes: str) -> None:
    """Remove the files of these suffixes; missing ones are ignored."""
    for suffix in suffixes:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def first_id_since(db: sqlite3.Connection, table: str, column: str, at_ns: int) -> int:
    """Return the id of the first row of that time or later, or one behind the last row."""
    query = f"SELECT id, {column} FROM {table} WHERE id >= ? ORDER BY id LIMIT 1"
    low, high = 0, (db.execute(f"SELECT max(id) FROM {table}").fetchone()[0] or 0) + 1
    while low < high:
        middle = (low + high) // 2
        row = db.execute(query, (middle,)).fetchone()
        if row is not None and row[1] < at_ns:
            low = row[0] + 1
        else:
            high = middle
    return low
