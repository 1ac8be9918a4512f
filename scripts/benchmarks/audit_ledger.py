"""``audit ledger``: a table of a million rows read by Spark, to ADBC reading the same file.

Both read every column of the same snapshot. Floor: one ADBC connection, in Arrow batches of as
many rows, in this process. Ours: the format ``relay_ledger`` in ``local[2]``, into no sink. Each
the best of three, the floor between ours. ``snapshot``: how long the copy takes with a writer at
work, and how much write-ahead log is left once it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from relay.audit.session import spark_session
from relay.audit.sources.ledger_source import BATCH_ROWS, schema_of, snapshot_uri, take_snapshot
from relay.base.clock import Clock
from relay.ledger.ledger import Ledger
from scripts.benchmarks.common import fresh_root, note, report, timed

TRIES = 3
MASTER = "local[2]"
FEW = ["message_id", "agent_name", "target", "status", "discovered_at"]
_GROUP = 10_000
_WRITER = """
import sys
from relay.ledger.ledger import FileFacts, Ledger
ledger, number = Ledger.open(sys.argv[1]), 0
while True:
    with ledger.transaction():
        ledger.add(
            [FileFacts(f"w-{number}-{n}", "a", "x", 1, 1, None, "c", "text", "b", 1)
             for n in range(10)])
    if not number:
        print("writing", flush=True)
    number += 1
"""


def run(base: str | None, *, rows: int) -> None:
    """Run the cases and print their lines."""
    root = fresh_root(base)
    note(f"audit ledger: {rows} rows in {root}")
    ledger = root / "ledger.db"
    _fill(ledger, rows)
    snapshot = _measure_snapshot(ledger, root / "snapshot.db")
    spark = spark_session(MASTER, "bench")
    for case, columns in (("audit ledger", schema_of("messages").names), ("audit ledger, 5", FEW)):
        ours, floor = [], []
        for _ in range(TRIES):
            frame = spark.read.format("relay_ledger").load(snapshot).select(*columns)
            frame = spark.read.format("relay_ledger").schema(frame.schema).load(snapshot)
            writer = frame.write.format("noop").mode("overwrite")
            ours.append(timed(writer.save))
            floor.append(timed(functools.partial(_read_plainly, snapshot, columns)))
        report(
            case=case,
            rows=rows,
            columns=len(columns),
            mib=os.path.getsize(snapshot) >> 20,
            rows_per_s=int(rows / min(ours)),
            floor_rows_per_s=int(rows / min(floor)),
            ratio_to_adbc=round(min(floor) / min(ours), 2),
        )
    spark.stop()


def _fill(path: Path, rows: int) -> None:
    Ledger.open(str(path)).close()
    insert = (
        "INSERT INTO messages (message_id, agent_name, direction, file_path, file_size,"
        " file_mtime_ns, file_inode, checksum, status, message_type, target, discovered_at,"
        " processed_at, retry_count) VALUES (?,?,'outbox',?,?,?,?,?,'archived','text',?,?,?,0)"
    )
    with contextlib.closing(sqlite3.connect(path)) as db:
        for begin in range(0, rows, _GROUP):
            db.executemany(insert, map(_row, range(begin, min(begin + _GROUP, rows))))
            db.commit()


def _row(number: int) -> tuple[object, ...]:
    at = 1_769_851_800_000_000_000 + number * 1_000_000
    name, sender = f"{at}-{number:08x}", f"agent{number % 100:03d}"
    path = f"archive/2026-01-31/{sender}/{name}.msg"
    to = f"agent{(number + 1) % 100:03d}"
    return name, sender, path, 1024, at, number, f"{number:064x}", to, at, at + 5_000_000


def _measure_snapshot(ledger: Path, target: Path) -> str:
    """Take a snapshot while a writer works; returns its path."""
    command = [sys.executable, "-c", _WRITER, str(ledger)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
        seconds = timed(lambda: take_snapshot(str(ledger), str(target), Clock()))
    finally:
        writer.kill()
        writer.communicate()
    grown = os.path.getsize(f"{ledger}-wal")
    with contextlib.closing(sqlite3.connect(ledger)) as db:
        busy, left, moved = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    report(
        case="audit ledger, snapshot",
        mib=os.path.getsize(target) >> 20,
        seconds=round(seconds, 2),
        wal_mib=grown >> 20,
        wal_pinned=bool(busy or left != moved),
    )
    return str(target)


def _read_plainly(path: str, columns: list[str]) -> int:
    from adbc_driver_sqlite import dbapi

    names = ", ".join(f'"{name}"' for name in columns)
    with dbapi.connect(snapshot_uri(path)) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
        cursor.execute(f"SELECT {names} FROM messages")
        return sum(batch.num_rows for batch in cursor.fetch_record_batch())
