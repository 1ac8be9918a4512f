"""The ledger as a file: read by others, copied while it is written, compared with its copy.

A copy is complete, checked and durable before it has its name: a crash leaves `NAME.tmp` at
most, which the next copy begins anew. Nobody is held up by one: it reads a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from relay.base import fsio, owners
from relay.base.errors import FormatError, LedgerBusy, LedgerDamaged, LedgerError

SLICE_PAGES = 256  # 1 MiB, a few milliseconds
PAUSE_S = 0.002  # between two slices the disk is the writer's
UNREADABLE = (
    "name a ledger's backup; where it is ledger.db, `relay ledger rebuild` makes it again from the"
    " journal"
)
EARLIER = (
    "`relay ledger check` says whether it is damaged; one that an earlier agent-relay made is"
    " brought to the present schema by the next `relay up`"
)
LEFTOVERS = ("-journal", "-wal", "-shm")  # what SQLite puts beside a file
AT_ONCE = 256  # rows, where one after the other is asked for
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})


class Content(NamedTuple):
    """What is in a ledger: enough to see that two are the same."""

    version: int
    counts: dict[str, int]  # rows by table, in the order of their names

    def __str__(self) -> str:
        rows = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        return f"schema {self.version}, {rows or 'no rows'}"


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """sqlite3's errors become ours, once, here."""
    try:
        yield
    except sqlite3.Error as exc:
        raise _ours(path, exc) from exc


def _ours(path: str, exc: sqlite3.Error) -> LedgerError:
    """The error to raise in the place of one of sqlite3's."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the module's own errors have none
    if code in DAMAGE:
        return LedgerDamaged(path, str(exc))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LedgerBusy(f"{path}: {exc}")
    if "unable to open" in str(exc) and (denied := owners.why_denied(path)):
        return LedgerError(f"{path}: permission denied", hint=denied)
    hint = "free some space" if "is full" in str(exc) else ""
    if "no such " in str(exc):  # table, column
        hint = EARLIER
    if "unable to open" in str(exc) and _is_read_only(path):
        hint = "its folder cannot be written, and SQLite has to: look at a copy of the home"
    return LedgerError(f"{path}: {exc}", hint=hint)


class Connection(sqlite3.Connection):
    """A connection whose errors are ours, wherever rows are asked for, read or written.

    Made by ``connect``.
    """

    path = ""

    def execute(self, sql: str, values: Any = ()) -> _Cursor:
        """Run one statement."""
        return self.cursor(_Cursor).execute(sql, values)

    def executemany(self, sql: str, rows: Any) -> _Cursor:
        """Run one statement for each of these."""
        return self.cursor(_Cursor).executemany(sql, rows)

    def executescript(self, script: str) -> _Cursor:
        """Run several statements."""
        return self.cursor(_Cursor).executescript(script)


class _Cursor(sqlite3.Cursor):
    """A cursor whose errors are ours: an unreadable row is noticed when it is fetched."""

    connection: Connection

    def execute(self, sql: str, values: Any = ()) -> _Cursor:
        try:
            super().execute(sql, values)
        except sqlite3.Error as exc:
            raise _ours(self.connection.path, exc) from exc
        return self

    def executemany(self, sql: str, rows: Any) -> _Cursor:
        with translated(self.connection.path):
            super().executemany(sql, rows)
        return self

    def executescript(self, script: str) -> _Cursor:
        with translated(self.connection.path):
            super().executescript(script)
        return self

    def __iter__(self) -> Any:
        while rows := self.fetchmany(AT_ONCE):
            yield from rows

    def fetchone(self) -> Any:
        try:
            return super().fetchone()
        except sqlite3.Error as exc:
            raise _ours(self.connection.path, exc) from exc

    def fetchmany(self, size: int | None = 1) -> list[Any]:
        with translated(self.connection.path):
            return super().fetchmany(size)

    def fetchall(self) -> list[Any]:
        with translated(self.connection.path):
            return super().fetchall()


def connect(path: str, *, timeout_s: float = 5, uri: str = "", cached: int = 128) -> Connection:
    """A connection to the ledger at ``path``; transactions are the caller's. Errors: LedgerError.

    ``uri``: how to open it, where the path alone does not say.
    """
    with translated(path):
        connection = sqlite3.connect(
            uri or path,
            uri=bool(uri),
            timeout=timeout_s,
            isolation_level=None,
            cached_statements=cached,
            factory=Connection,
        )
    connection.path = path
    return connection


def connect_readonly(path: str) -> Connection:
    """A connection that cannot write, whose transactions the caller begins and ends.

    SQLite makes a -shm beside a ledger to read it. Where it may not, and there is no -wal, nobody
    has the ledger open, and it is read as it stands.
    """
    quoted = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    is_still = _is_read_only(path) and not os.path.exists(path + "-wal")
    mode = "mode=ro&immutable=1" if is_still else "mode=ro"
    return connect(path, uri=f"file:{quoted}?{mode}")


def open_readonly(path: str) -> Connection:
    """A reader's connection; it never blocks the relay and cannot write.

    Errors: LedgerError when there is none or it is damaged, LedgerBusy.
    """
    if not os.path.exists(path):
        hint = (
            "`relay up` makes it, of the journal where there is one; a relay that runs does so too"
        )
        raise LedgerError(f"there is no ledger at {path}", hint=hint)
    connection = connect_readonly(path)
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("SELECT 1 FROM messages LIMIT 1")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_read_only(path: str) -> bool:
    """True where nothing can be made beside a file: another's folder, a disk mounted to be read."""
    return not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK)


def content(db: sqlite3.Connection) -> Content:
    """Version and counts, of one snapshot when the caller is in a transaction."""
    tables = [
        name
        for (name,) in db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name NOT LIKE 'sqlite_%' ORDER BY name"
        )
    ]
    counts = {name: db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    return Content(db.execute("PRAGMA user_version").fetchone()[0], counts)


def damage(db: sqlite3.Connection, goes_on: Callable[[], bool] = lambda: True) -> str:
    """The first problems that SQLite finds in a database's pages; empty when there are none.

    Faster than ``problems``, which looks into every index, too: 5 ms a MiB. ``goes_on`` is asked
    before each table.
    """
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in ("sqlite_master", *tables):
        if not goes_on():
            break
        found = str(db.execute(f'PRAGMA quick_check("{table}")').fetchone()[0])
        if found != "ok":
            return " ".join(found.split())
    return ""


def problems(db: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong with a database, a line each; none when it is sound."""
    found = [str(row[0]) for row in db.execute("PRAGMA integrity_check(20)")]
    wrong = [] if found == ["ok"] else found
    for table, rowid, parent, _ in db.execute("PRAGMA foreign_key_check").fetchall()[:20]:
        wrong.append(f"row {rowid} of {table} names none of {parent}")
    return wrong


def verify(path: str) -> Content:
    """What a ledger's file has, once all of it is found to be sound.

    Errors: FormatError for a damaged one, LedgerError for what is no ledger at all.
    """
    try:
        with contextlib.closing(_sound(path)) as db:
            db.execute("BEGIN")
            wrong = problems(db)
            if wrong:
                raise FormatError(path, 0, "a sound database", "; ".join(wrong[:3]))
            found = content(db)
    except LedgerError as exc:
        if exc.hint not in (LedgerError.hint, LedgerDamaged.hint):
            raise
        raise LedgerError(exc.message, hint=UNREADABLE) from exc  # it was checked just now
    if found.version < 1 or "messages" not in found.counts:
        raise LedgerError(f"{path} is a database, and no ledger", hint="name a ledger's backup")
    return found


def _sound(path: str) -> Connection:
    if not os.path.exists(path):
        raise LedgerError(f"there is no file {path}", hint="name a ledger's backup")
    if not os.path.isfile(path):
        raise LedgerError(f"{path} is not a regular file", hint="name a ledger's backup")
    return connect_readonly(path)


@contextlib.contextmanager
def copied(source: str, target: str) -> Iterator[tuple[str, Content]]:
    """A copy of a ledger as it is now: (its path ``target.tmp``, what it has), for the block.

    It is whole and sound; the caller gives it its name, or changes it first. Written in slices,
    from one snapshot: its writer waits for nothing. What still is ``target.tmp`` at the end of the
    block is removed. Errors: LedgerError, FormatError; OSError for a full disk.
    """
    temp = target + ".tmp"
    fsio.fault("create", temp)
    with _alone(temp) as held:
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


@contextlib.contextmanager
def _alone(temp: str) -> Iterator[int]:
    """Hold the unfinished copy, so that no second one is written under its name."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(fsio.locked(temp))
        except BlockingIOError as exc:
            hint = "wait for it to end"
            raise LedgerBusy(f"{temp}: another process writes it", hint=hint) from exc
        yield held


def _copy(source: str, temp: str) -> Content:
    def pause(status: int, remaining: int, total: int) -> None:
        fsio.fault("write", temp)
        if remaining:
            time.sleep(PAUSE_S)

    with (
        translated(source),  # of ``backup`` and of what the copy says
        contextlib.closing(connect_readonly(source)) as db,
        contextlib.closing(connect(temp)) as copy,
    ):
        db.execute("BEGIN")  # one snapshot: a copy that followed the writer would never end
        expected = content(db)
        db.backup(copy, pages=SLICE_PAGES, progress=pause)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, whoever opens it
    return expected


def place(temp: str, target: str, *, replace: bool) -> None:
    """Give a finished copy its name, durably. Errors: LedgerError when the name is taken."""
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
                f"{target} is there already", hint="name another file, or say --force"
            ) from None
        os.unlink(temp)
    fsio.sync_dir(os.path.dirname(os.path.abspath(target)))


def same_bytes(one: str, other: str) -> bool:
    """True when two files are the same to the byte; False where one is missing."""
    try:
        with open(one, "rb") as first, open(other, "rb") as second:
            while block := first.read(1 << 20):
                if block != second.read(1 << 20):
                    return False
            return not second.read(1)
    except OSError:
        return False


def holders(path: str) -> dict[int, str]:
    """Who has this file, or what SQLite keeps beside it, open: pid -> name of its program.

    Processes of other users are not seen. Takes some milliseconds for a hundred processes.
    """
    import psutil  # here: who only reads a ledger does without

    names = {os.path.realpath(path) + suffix for suffix in ("", "-wal", "-shm")}
    found = {}
    for process in psutil.process_iter(["name"]):
        try:
            if any(file.path in names for file in process.open_files()):
                found[process.pid] = str(process.info["name"])
        except (psutil.Error, OSError):
            continue  # it has ended, or is another user's
    return found


def remove(path: str, *suffixes: str) -> None:
    """Remove the files of these suffixes; what is gone already is fine."""
    for suffix in suffixes:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def undelivered(db: sqlite3.Connection, recipient: str, message_ids: set[str]) -> set[str]:
    """Those of these ids that no row of deliveries has for this recipient."""
    found = db.execute(
        "SELECT value FROM json_each(?) WHERE NOT EXISTS "
        "(SELECT 1 FROM deliveries WHERE message_id = value AND recipient = ?)",
        (json.dumps(sorted(message_ids)), recipient),
    )
    return {row[0] for row in found}
