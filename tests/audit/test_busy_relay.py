"""A run over a home whose relay goes on delivering: one instant each, and nobody is held up."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from relay.audit.extract import extracted
from relay.audit.lake_tables import Inputs
from relay.audit.own_checks import VIEWS
from relay.audit.snapshot import snapshot_home
from relay.base.clock import Clock
from tests.audit import busy_relay
from tests.procs import until

pytestmark = pytest.mark.shows("audit 1.11")

ENOUGH = 30  # messages before it is looked at


def test_ledger_store_and_journal_agree_while_they_are_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    with busy_relay.busy_relay(tmp_path / "home") as home:
        until(lambda: len(busy_relay.records(home)) > 4 * ENOUGH)
        (tmp_path / "run").mkdir()
        snapshot = snapshot_home(str(home), str(tmp_path / "run"), Clock())
        inputs = Inputs(spark, snapshot, *extracted(snapshot, None))
        (stopped_at,) = inputs.snapshot.journal.until.values()
        messages = inputs.table("ledger_messages").collect()
        deliveries = inputs.table("ledger_deliveries").collect()
        stored = inputs.table("store_messages").collect()
        journal = VIEWS["journal"](inputs, "SELECT end, event, relay_id").collect()
        # It went on all the while, and nobody kept its log from being taken in.
        until(lambda: busy_relay.records(home)[-1].end > stopped_at)
        until(lambda: _is_taken_in(home))
    done = {m["message_id"] for m in messages if m["status"] in ("completed", "archived")}
    kept = {row["relay_id"] for row in stored}
    accepted = {row["relay_id"] for row in journal if row["event"] == "MessageSent"}
    refused = {row["relay_id"] for row in journal if row["event"] == "FileRefused"}
    assert len(done) >= ENOUGH / 2
    assert done <= kept <= accepted
    assert done <= {row["message_id"] for row in deliveries} <= {m["message_id"] for m in messages}
    assert {m["message_id"] for m in messages if m["status"] == "failed"} <= refused
    assert max(row["end"] for row in journal) == stopped_at


def _is_taken_in(home: Path) -> bool:
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:
        busy, frames, moved = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return not busy and frames == moved
