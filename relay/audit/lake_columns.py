"""The tables of an audit lake and of the results, and their columns: name, type and comment.

    lake.sql      store_messages, journal_sent, originals, ...: made of the files of a home
    schema.sql    ledger_messages, ledger_deliveries, ...: the tables of the ledger
    results.sql   what the jobs make of them

Needs neither Spark nor a home.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from relay.base.names import sha256_hex
from relay.ledger.schema import schema_sql

TEXT, NUMBER, FLOAT = pa.string(), pa.int64(), pa.float64()
TIME = pa.timestamp("us", tz="UTC")
U64 = pa.decimal128(20, 0)
MOVED = pa.struct([("number", U64), ("recipient", TEXT), ("attempt", NUMBER)])
LEDGER_PREFIX = "ledger_"
_COMMENT_KEY = b"comment"
_HAS_TIME = r"^[1-8][0-9]{18}-"  # the nanoseconds that an id of the relay begins with

# Comments of ledger columns that have none in schema.sql.
_LEDGER_COMMENTS = {
    "acked_at": "the ack was discovered",
    "agent": "owner of the directory",
    "at": "when it was seen or done",
    "completed_at": "done or rolled back",
    "created_at": "when it was meant",
    "cwd": "its working directory",
    "detail": "for people",
    "discovered_at": "seen in the outbox",
    "ended_at": "seen to have ended",
    "file_inode": "NULL for the orchestrator's own",
    "file_mtime_ns": "Unix nanoseconds",
    "file_name": "as it stood in the outbox",
    "id": "order of creation",
    "inode": "of the file",
    "key": "epoch, writer, boot_id",
    "last_error": "why it failed or waits",
    "message_id": "stem of the file's name",
    "mtime_ns": "Unix nanoseconds",
    "name": "of the agent",
    "new_status": "of message or delivery",
    "offered_at": "printed by the hook",
    "path": "relative to the home",
    "pid": "process id",
    "reason": "text that the sender was sent",
    "recipient": "agent",
    "registered_at": "first seen",
    "restarts": "how often it was started again",
    "retry_count": "failures: times put back to pending, and the last",
    "rss_bytes": "resident memory",
    "sha256": "of the attachment, 64 hex",
    "state": "see docs/states.md",
    "updated_at": "when it was set",
    "value": "as text",
}
_TABLE = re.compile(
    r"^CREATE TABLE (\w+) \(\n(.*?)^\)(?: WITHOUT ROWID)?;", re.MULTILINE | re.DOTALL
)
_TYPES = {
    **{"TEXT": TEXT, "INTEGER": NUMBER, "BIGINT": NUMBER, "REAL": FLOAT, "DOUBLE": FLOAT},
    **{"BOOLEAN": pa.bool_(), "TIMESTAMPTZ": TIME, "DATE": pa.date32(), "DECIMAL(20)": U64},
    **{"BLOB": pa.binary(), "TEXT[]": pa.list_(TEXT), "DECIMAL(20)[]": pa.list_(U64)},
    "MAP(TEXT, TEXT)": pa.map_(TEXT, TEXT),
    "STRUCT(number DECIMAL(20), recipient TEXT, attempt BIGINT)[]": pa.list_(MOVED),
}
_KINDS = "|".join(map(re.escape, sorted(_TYPES, key=len, reverse=True)))
_COLUMN = re.compile(rf"^ {{4}}(\w+) ({_KINDS})([, ][^\n]*?|)(?:-- ([^\n]*))?$", re.MULTILINE)


def _column(name: str, kind: str, constraints: str, comment: str) -> pa.Field:
    is_time = kind == "INTEGER" and (name == "at" or name.endswith("_at"))
    is_key = kind == "INTEGER" and "PRIMARY KEY" in constraints
    said = {_COMMENT_KEY: (comment or _LEDGER_COMMENTS[name]).encode()}
    never_null = is_key or "NOT NULL" in constraints
    return pa.field(name, TIME if is_time else _TYPES[kind], not never_null, said)


def _tables(sql: str) -> dict[str, pa.Schema]:
    """Parse the columns of each CREATE TABLE."""
    return {
        table: pa.schema([_column(*column) for column in _COLUMN.findall(columns)])
        for table, columns in _TABLE.findall(sql)
    }


def comment_of(column: pa.Field) -> str:
    """Return the comment of a column."""
    return str(column.metadata[_COMMENT_KEY].decode())


_OWN = _tables(resources.files(__package__).joinpath("lake.sql").read_text("utf-8"))
(HOME,) = _OWN.pop("every_table")
ACOMM, AOF2 = _OWN.pop("acomm"), _OWN.pop("aof2")
LEDGER = _tables(schema_sql())
RESULTS = _tables(resources.files(__package__).joinpath("results.sql").read_text("utf-8"))
FINDING = RESULTS["findings"]


def _with_bucket(columns: pa.Schema) -> pa.Schema:
    """Put the bucket first where the rows are about a message."""
    bucket = _OWN["originals"].field("bucket")
    return columns.insert(0, bucket) if "message_id" in columns.names else columns


TABLES: dict[str, pa.Schema] = {
    **_OWN,
    **{f"{LEDGER_PREFIX}{table}": _with_bucket(columns) for table, columns in LEDGER.items()},
}


def buckets_of(ids: pa.Array) -> pa.Array:
    """Return the bucket of each message id: the day of its time, or one of sixteen by its hash."""
    has_time = pc.fill_null(pc.match_substring_regex(ids, _HAS_TIME), False)
    digits = pc.utf8_slice_codeunits(ids, 0, 19)
    numbers = pc.if_else(has_time, digits, pa.scalar("0")).cast(pa.int64())
    days = numbers.cast(pa.timestamp("ns")).cast(pa.date32(), safe=False).cast(pa.string())
    if pc.all(has_time, min_count=0).as_py():
        return days
    others = [None if known else _hashed(message_id) for message_id, known in
              zip(ids.to_pylist(), has_time.to_pylist(), strict=True)]  # fmt: skip
    return pc.if_else(has_time, days, pa.array(others, pa.string()))


def _hashed(message_id: str | None) -> str:
    digest = sha256_hex((message_id or "").encode(errors="surrogateescape"))
    return f"h{int(digest[0], 16):02}"


def batch_of(rows: Sequence[Sequence[Any]], columns: pa.Schema) -> pa.RecordBatch:
    """Make a batch of rows, each in the order of the columns; times are numbers or have a zone."""
    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    arrays = [pa.array(given, column.type) for given, column in zip(values, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def arrow_table(rows: Iterable[Sequence[Any]], columns: pa.Schema) -> pa.Table:
    """Make a table of rows; times in microseconds, or with a time zone."""
    plain = pa.schema([column.remove_metadata() for column in columns])  # a file needs no comments
    return pa.Table.from_batches([batch_of(list(rows), plain)])


def with_bucket(columns: pa.Schema, batch: pa.RecordBatch, of: str) -> pa.RecordBatch:
    """Give rows the columns of a table of the lake; ``of``: the one with the message's id."""
    arrays = [
        buckets_of(batch.column(of)) if field.name == "bucket" else batch.column(field.name)
        for field in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
