"""``search.db``: the index as a file: its tables, its rows, its locks.

One row for each message, with its text and the facts that queries filter by, and a table of the
trigrams of the texts. A trigram table answers for any substring of three characters and more, with
the case as it is; the text itself then decides, so that a match is exact.

The index is derived. It is filled by one transaction a batch, which also moves the position in the
journal, so a kill loses a batch and no more. Several processes may fill it: a batch counts only
where the position is still the one that it continues. A damaged file, or one of another version,
is removed and filled again. Every process that has it open holds ``search.lock`` shared, and the
one that removes it exclusively: a removed file has no user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from relay.acomm.model import Message
from relay.base import fsio
from relay.base.config import Config
from relay.base.errors import RelayError

VERSION = 3
APPLICATION_ID = 0x52534958  # tells it from any other SQLite file
PAD = "\n\n"  # after each indexed text: its last characters begin a trigram, too
BUSY_MS = 200  # another process commits a batch
LOCK_S = 1.0  # another process removes the file
LOCK_POLL_S = 0.02
# Pages in memory before a segment of trigrams is written: fewer segments are merged later.
HASH_BYTES = 8 << 20
CACHE_KIB = 16 << 10
LEFTOVERS = ("", "-wal", "-shm", "-journal")
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE channels (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE filled (archive TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    at_ns INTEGER NOT NULL,
    relay_id TEXT,
    sender TEXT NOT NULL,
    channel INTEGER NOT NULL,
    type INTEGER NOT NULL,
    kind TEXT NOT NULL,
    priority INTEGER NOT NULL,
    topic TEXT,
    thread TEXT,
    correlation TEXT,
    re TEXT,
    attachments INTEGER NOT NULL,
    archived INTEGER NOT NULL,
    recipients TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX messages_at ON messages (at);
CREATE INDEX messages_relay_id ON messages (relay_id);
CREATE INDEX messages_sender ON messages (sender);
CREATE INDEX messages_channel ON messages (channel);
CREATE INDEX messages_kind ON messages (kind);
CREATE INDEX messages_priority ON messages (priority);
CREATE INDEX messages_topic ON messages (topic) WHERE topic IS NOT NULL;
CREATE INDEX messages_correlation ON messages (correlation) WHERE correlation IS NOT NULL;
CREATE INDEX messages_re ON messages (re) WHERE re IS NOT NULL;
CREATE INDEX messages_attachments ON messages (attachments) WHERE attachments;
CREATE TABLE recipients (name TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (name, id))
    WITHOUT ROWID;
CREATE VIRTUAL TABLE trigrams USING fts5(
    body, content = '', columnsize = 0, detail = none, tokenize = 'trigram case_sensitive 1');
"""
DISORDER = "disorder"  # set once a later message has an earlier time: the clock was set back
_DISORDER = (
    "SELECT EXISTS (SELECT 1 FROM "
    "(SELECT id, lag(id) OVER (ORDER BY at, id) AS before FROM messages) WHERE id < before)"
)
_INSERT = f"INSERT OR IGNORE INTO messages VALUES ({', '.join('?' * 17)})"


class SearchIndexError(RelayError):
    """The search index cannot be used; nothing else needs it."""

    hint = "the relay fills it again by itself; until then `relay search` reads the store"


class SearchIndexDamaged(SearchIndexError):
    """search.db is damaged, of another version, or not what the journal says."""


class SearchIndexBusy(SearchIndexError):
    """Another process writes, creates or removes the index; or it was never created."""


class Entry(NamedTuple):
    """One message, as the index has it; in the order of the columns."""

    id: int
    at: int  # Unix seconds
    at_ns: int
    relay_id: str | None
    sender: str
    channel: int
    type: int
    kind: str
    priority: int
    topic: str | None
    thread: str | None  # the header's value
    correlation: str | None  # the thread's id
    re: str | None
    attachments: int  # how many
    archived: int
    recipients: str  # JSON
    body: str


def why_no_index(config: Config) -> str:
    """The setting by which a home has no search index; empty if it has one."""
    if not config.search.index:
        return "search.index is off"
    if config.store.encrypt and not config.search.sealed:
        return "the store is encrypted (search.sealed allows an index, which is not)"
    return ""


class Position(NamedTuple):
    """The index has every event before ``offset`` of the journal."""

    offset: int
    last: int  # offset of the last record before it; -1: there was none
    digest: str  # of that record's payload: tells this journal from another

    @property
    def begin(self) -> int:
        """Where a reader begins: with the last record, to recognize the journal."""
        return self.offset if self.last < 0 else self.last


_decode_position = msgspec.json.Decoder(Position).decode  # made here: see relay/engine/events.py


def entry_of(message: Message, recipients: Iterable[str], default_kind: str) -> Entry:
    """The row of a message."""
    metadata = message.metadata or {}
    thread, re = metadata.get("thread"), metadata.get("re")
    return Entry(
        message.id,
        message.created_at,
        message.created_ns or message.created_at * 10**9,
        message.relay_id,
        message.sender,
        message.channel_id,
        int(message.message_type),
        str(metadata.get("kind", default_kind)),
        int(message.priority),
        message.topic,
        None if thread is None else str(thread),
        message.correlation_id,
        None if re is None else str(re),
        len(str(metadata.get("attachments", "")).split()),
        int(message.status.label == "Archived"),
        msgspec.json.encode(list(recipients)).decode(),
        message.content.decode(errors="replace"),
    )


@contextlib.contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Translate sqlite3's errors."""
    try:
        yield
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if code in DAMAGE:
            raise SearchIndexDamaged(f"{path}: {exc}") from exc
        # read-only: its creation was cut short, and a reader cannot roll that back
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY):
            raise SearchIndexBusy(f"{path}: {exc}") from exc
        raise SearchIndexError(f"{path}: {exc}") from exc


class Index:
    """An open index. Used in one thread; close it.

    ``path``: search.db. A writer creates the file, and replaces one that cannot be used.
    Errors: SearchIndexError; SearchIndexDamaged for a reader of such a file.
    """

    def __init__(self, path: str, *, writable: bool = False) -> None:
        self.path = path
        self._lock = _open_lock(path)
        try:
            _share(path, self._lock)
            with translated_errors(path):
                self.db = self._open(writable)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, writable: bool) -> sqlite3.Connection:
        if not writable:
            if not os.path.exists(self.path):
                raise SearchIndexBusy(f"{self.path} does not exist yet")
            return self._connect(create=False)
        try:
            return self._connect(create=True)
        except (sqlite3.DatabaseError, SearchIndexDamaged) as exc:
            code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in DAMAGE:
                raise
            self._remove()
            return self._connect(create=True)

    def _connect(self, *, create: bool) -> sqlite3.Connection:
        if os.path.islink(self.path):  # SQLite would write into the file that it names
            raise SearchIndexDamaged(f"{self.path} is a symbolic link")
        quoted = self.path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        if create and not os.path.lexists(self.path):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, fsio.FILE_MODE))
        db = sqlite3.connect(
            f"file:{quoted}?mode={'rw' if create else 'ro'}",
            uri=True,
            timeout=BUSY_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            db.row_factory = sqlite3.Row
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            if create:
                _prepare(db)
            _check(db, self.path)
        except BaseException:
            db.close()
            raise
        return db

    def _remove(self) -> None:
        """Remove the files, if no other process has them open. Errors: SearchIndexBusy."""
        try:
            _remove_locked(self.path, self._lock)
        finally:
            _share(self.path, self._lock)

    def begin_again(self) -> None:
        """Remove everything, to fill the index anew. Errors: SearchIndexError."""
        self.db.close()
        with translated_errors(self.path):
            self._remove()
            self.db = self._connect(create=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and give back the lock."""
        self.db.close()
        os.close(self._lock)

    # -- what it has -------------------------------------------------------------------

    def position(self) -> Position | None:
        """Up to where it has the journal; None while it is being filled from the store."""
        found = self.meta("position")
        return None if found is None else _decode_position(found)

    def meta(self, key: str) -> str | None:
        """A value of the index about itself."""
        with translated_errors(self.path):
            row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def count(self) -> int:
        """The number of messages."""
        with translated_errors(self.path):
            return int(self.db.execute("SELECT count(*) FROM messages").fetchone()[0])

    def has_archive(self, name: str) -> bool:
        """True if all messages of an archive are in the index."""
        with translated_errors(self.path):
            found = self.db.execute("SELECT 1 FROM filled WHERE archive = ?", (name,)).fetchone()
        return found is not None

    # -- one batch ---------------------------------------------------------------------

    @contextlib.contextmanager
    def batch(self, before: Position | None) -> Iterator[bool]:
        """A transaction; yields False if another process has moved the position meanwhile."""
        with translated_errors(self.path):
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.position() == before
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    def add(self, entries: Iterable[Entry]) -> int:
        """Add messages that it does not have; returns how many."""
        added = 0
        newest = self.db.execute("SELECT id, at FROM messages ORDER BY id DESC LIMIT 1").fetchone()
        last, at = newest or (0, 0)
        for entry in entries:
            if entry.id > last:
                if entry.at < at:
                    self.set_meta(DISORDER, "1")
                last, at = entry.id, entry.at
            found = self.db.execute(_INSERT, entry)
            if not found.rowcount:
                continue
            added += 1
            text = _indexed(entry.body)
            self.db.execute("INSERT INTO trigrams (rowid, body) VALUES (?, ?)", (entry.id, text))
            self._add_recipients(entry.id, msgspec.json.decode(entry.recipients, type=list[str]))
        return added

    def _add_recipients(self, number: int, names: Iterable[str]) -> None:
        rows = [(name, number) for name in names]
        self.db.executemany("INSERT OR IGNORE INTO recipients VALUES (?, ?)", rows)

    def add_recipient(self, name: str, numbers: Iterable[int]) -> None:
        """Add a recipient to messages."""
        for number in numbers:
            row = self.db.execute("SELECT recipients FROM messages WHERE id = ?", (number,))
            found = row.fetchone()
            if found is None:
                continue
            names = msgspec.json.decode(found[0], type=list[str])
            text = msgspec.json.encode(list(dict.fromkeys((*names, name)))).decode()
            self.db.execute("UPDATE messages SET recipients = ? WHERE id = ?", (text, number))
            self._add_recipients(number, (name,))

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove messages that the store deleted."""
        for number in numbers:
            found = self.db.execute("SELECT recipients, body FROM messages WHERE id = ?", (number,))
            row = found.fetchone()
            if row is None:
                continue
            self.db.execute(
                "INSERT INTO trigrams (trigrams, rowid, body) VALUES ('delete', ?, ?)",
                (number, _indexed(row["body"])),
            )
            names = msgspec.json.decode(row["recipients"], type=list[str])
            pairs = [(name, number) for name in names]
            self.db.executemany("DELETE FROM recipients WHERE name = ? AND id = ?", pairs)
            self.db.execute("DELETE FROM messages WHERE id = ?", (number,))

    def archive(self, numbers: Iterable[int]) -> None:
        """Note that messages are archived."""
        rows = [(number,) for number in numbers]
        self.db.executemany("UPDATE messages SET archived = 1 WHERE id = ?", rows)

    def note_archive(self, name: str) -> None:
        """Note that all messages of an archive are in the index."""
        self.db.execute("INSERT OR IGNORE INTO filled VALUES (?)", (name,))

    def note_order(self) -> None:
        """Note whether the numbers of all messages are in the order of their times."""
        if self.db.execute(_DISORDER).fetchone()[0]:
            self.set_meta(DISORDER, "1")

    def add_channel(self, number: int, name: str) -> None:
        """Add a channel."""
        self.db.execute("INSERT OR REPLACE INTO channels VALUES (?, ?)", (number, name))

    def set_position(self, position: Position) -> None:
        """Move the position, in a batch."""
        self.set_meta("position", msgspec.json.encode(position).decode())

    def set_meta(self, key: str, value: str) -> None:
        """Set a value, in a batch."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _indexed(body: str) -> str:
    """The text whose trigrams are indexed; the tokenizer ends at a NUL."""
    return body.replace("\0", "\n") + PAD


def remove_index(path: str) -> None:
    """Remove an index for good. Errors: SearchIndexBusy, OSError."""
    if not any(os.path.lexists(path + suffix) for suffix in LEFTOVERS):
        return
    lock = _open_lock(path)
    try:
        _remove_locked(path, lock)
    finally:
        os.close(lock)


def _remove_locked(path: str, lock: int) -> None:
    """Remove the files while no other process has them open. Errors: SearchIndexBusy, OSError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise SearchIndexBusy(f"{path}: another process has it open") from exc
    for suffix in LEFTOVERS:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def _share(path: str, lock: int) -> None:
    """Lock it shared. Errors: SearchIndexBusy when one that removes the index does not end."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SearchIndexBusy(f"{path}: another process removes it") from None
            time.sleep(LOCK_POLL_S)
        else:
            return


def _open_lock(path: str) -> int:
    name = os.path.splitext(path)[0] + ".lock"
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, fsio.FILE_MODE)


def _prepare(db: sqlite3.Connection) -> None:
    """Settings of a writer, and the tables of a new file."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    if db.execute("PRAGMA user_version").fetchone()[0] or _has_tables(db):
        return
    db.execute("BEGIN IMMEDIATE")
    if not _has_tables(db):  # else another process was first
        for statement in _SCHEMA.split(";\n"):
            if statement.strip():
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute(f"INSERT INTO trigrams (trigrams, rank) VALUES ('hashsize', {HASH_BYTES})")
    db.execute("COMMIT")


def _has_tables(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone())


def _check(db: sqlite3.Connection, path: str) -> None:
    """Errors: SearchIndexDamaged: another file or version. SearchIndexBusy: it has no tables."""
    db.execute("BEGIN")  # all of it before another process has created the tables, or after
    mine = db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    version = db.execute("PRAGMA user_version").fetchone()[0]
    has_tables = _has_tables(db)
    db.execute("COMMIT")
    if not version and not has_tables:
        raise SearchIndexBusy(f"{path} is being created")
    if not mine or version != VERSION:
        found = f"version {version}" if mine else "another file"
        raise SearchIndexDamaged(
            f"{path}: expected a search index of version {VERSION}, got {found}"
        )
