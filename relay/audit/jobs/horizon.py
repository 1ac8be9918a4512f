"""The time up to which messages are judged, and how far the ledger follows the journal.

The ledger has its position in the journal: everything before it is in the ledger. A relay moves
it on with every batch, within a second. What is behind it for longer than the grace is missing from
this ledger, whatever the reason: one finding of the home, and none of each message there.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.job import instant
from relay.audit.snapshot import DEFAULT_GRACE_S
from relay.base.clock import NS_PER_S
from relay.base.errors import LedgerError

# Records that are in the journal before the ledger's position passes them. Others follow a batch
# by a moment, and an idle relay leaves them behind the position.
TOLD_FIRST = ("MessageSent", "FileRefused", "DeliveriesStaged", "MessageReceived")
_MOST = 1 << 63
_POSITION = "SELECT value FROM orchestrator_state WHERE key = 'journal'"


class Horizon(NamedTuple):
    """Messages before ``since`` are judged; times after ``until`` have not come yet.

    A time of the ledger's is trusted up to the snapshot and the grace, half a minute at least: a
    clock may be set back by some seconds. A later one does not show that a message is young.
    """

    since: Column
    snapshot: Column
    until: Column

    def is_young(self, *times: str) -> Column:
        """True where one of these times is too young to be judged; a later one proves nothing."""
        young = [
            F.coalesce(F.col(name).between(self.since, self.until), F.lit(False)) for name in times
        ]
        return functools.reduce(Column.__or__, young)


def horizon(inputs: Inputs) -> Horizon:
    """Return the horizon of a run.

    The ledger was read first, and the others after it: younger messages are not judged.
    """
    tolerance_ns = max(inputs.grace_ns, int(DEFAULT_GRACE_S * NS_PER_S))
    since, until = inputs.snapshot_ns - inputs.grace_ns, inputs.snapshot_ns + tolerance_ns
    return Horizon(instant(since), instant(inputs.snapshot_ns), instant(until))


def position(inputs: Inputs) -> int | None:
    """Return the ledger's position in the journal; None for a ledger without one that can be.

    Errors: LedgerError when the snapshot cannot be read.
    """
    path = inputs.snapshot.ledger.path
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            row = db.execute(_POSITION).fetchone()
    except sqlite3.Error as exc:
        raise LedgerError(f"{path}: {exc}") from exc
    value = str(row[0]) if row else ""
    return int(value) if value.isdecimal() and int(value) < _MOST else None


def untold(inputs: Inputs, follows: int | None, judged: Horizon) -> DataFrame:
    """Make one row: what the journal has behind the ledger's position for longer than the grace.

    Columns: follows, ends (both offsets), untold_records, untold_since (the oldest of them).
    """
    late = inputs.journal("end", "at", "event").where(
        (F.col("end") > (follows or 0))
        & F.col("event").isin(*TOLD_FIRST)
        & (F.col("at") < judged.since)
    )
    ends = inputs.snapshot.journal.until.values()
    return late.agg(
        F.lit(follows).cast("bigint").alias("follows"),
        F.lit(max(ends, default=None)).cast("bigint").alias("ends"),
        F.count("*").alias("untold_records"),
        F.min("at").alias("untold_since"),
    )
