"""SQL on the ledger for people and scripts: one statement that reads.

The connection cannot write, and an authorizer refuses all other statements: a read-only connection
alone would still attach files, copy the ledger with ``VACUUM INTO`` or checkpoint the WAL.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

from relay.base.errors import InvalidQuery, LedgerError
from relay.ledger.file import Connection, open_readonly

_READS = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    }
)
_PRAGMAS_OF_A_TABLE = frozenset(
    "foreign_key_check foreign_key_list index_info index_list index_xinfo integrity_check "
    "quick_check table_info table_list table_xinfo".split()
)
_PRAGMAS = _PRAGMAS_OF_A_TABLE | frozenset(
    "application_id collation_list compile_options database_list encoding freelist_count "
    "function_list journal_mode module_list page_count page_size pragma_list schema_version "
    "user_version".split()
)
# Errors of the statement, not of the file
_OF_THE_STATEMENT = (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG)
_WRITES = (sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY)
_SHOWN = 60  # characters of a statement in an error
_SEVERAL = "expected one statement, got several"
_NAMES_HINT = '`relay ledger query "select sql from sqlite_master"` lists the tables and columns'


@contextlib.contextmanager
def open_for_queries(path: str) -> Iterator[Connection]:
    """Open the ledger for ``run_query``. Errors: LedgerError."""
    with contextlib.closing(open_readonly(path)) as db:
        db.row_factory = None
        db.text_factory = lambda data: data.decode(errors="replace")
        db.set_authorizer(_authorize)
        yield db


def run_query(db: Connection, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run one statement that reads; the names of its columns, and its rows as they are fetched.

    Errors: InvalidQuery, also while rows are fetched; LedgerError.
    """
    with _query_errors(sql):
        cursor = db.execute(sql)
    if cursor.description is None:
        raise InvalidQuery("expected a statement that reads, got an empty one")
    return [column[0] for column in cursor.description], _fetch(cursor, sql)


def _fetch(cursor: sqlite3.Cursor, sql: str) -> Iterator[tuple[Any, ...]]:
    with _query_errors(sql):
        yield from cursor


@contextlib.contextmanager
def _query_errors(sql: str) -> Iterator[None]:
    """Raise InvalidQuery for errors of the statement."""
    try:
        yield
    except sqlite3.Warning as exc:  # Python 3.11; later ones raise a ProgrammingError
        raise InvalidQuery(_SEVERAL) from exc
    except UnicodeEncodeError as exc:
        raise InvalidQuery("expected a statement in UTF-8") from exc
    except LedgerError as exc:
        text = str(exc.__cause__).rstrip(".")
        if _code(exc) in _WRITES:
            shown = " ".join(sql.split())
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
            raise InvalidQuery(f"expected a statement that reads, got {shown!r}") from exc
        if _code(exc) in _OF_THE_STATEMENT:
            hint = _NAMES_HINT if "no such " in text else ""
            raise InvalidQuery(_SEVERAL if "one statement" in text else text, hint=hint) from exc
        raise


def _code(exc: LedgerError) -> int:
    """SQLite's error code; 0 for errors of the Python module."""
    return int(getattr(exc.__cause__, "sqlite_errorcode", 0)) & 0xFF


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        is_allowed = first in (_PRAGMAS if second is None else _PRAGMAS_OF_A_TABLE)
    else:
        is_allowed = action in _READS
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY
