"""Columns of time that jobs share: intervals, and the instants that a run is judged by."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

DAY_S = 86_400
HOUR_S = 3_600
_NS_PER_US = 1000
_US_PER_MS = 1000.0
_US_PER_S = 1_000_000


def instant(at_ns: int) -> Column:
    """A timestamp of Unix nanoseconds; they end at microseconds."""
    return F.timestamp_micros(F.lit(at_ns // _NS_PER_US))


def elapsed_ms(begin: str | Column, end: str | Column) -> Column:
    """Milliseconds; negative when the clock was put back in between, NULL where an end is."""
    return (F.unix_micros(end) - F.unix_micros(begin)) / _US_PER_MS


def elapsed_s(begin: str | Column, end: str | Column) -> Column:
    """Whole seconds, rounded down; NULL where an end is."""
    return F.floor((F.unix_micros(end) - F.unix_micros(begin)) / _US_PER_S)


def hour_of(at: str | Column) -> Column:
    """The hour that it is in, UTC."""
    return F.date_trunc("hour", at)
