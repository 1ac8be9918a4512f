"""The shape of a job: what it reads, the one table it makes, what it counts and what it finds.

A job's functions are pure, DataFrame in and DataFrame out; time comes in as an argument. The
table is written once, and counts and findings are made from what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from relay.audit.evidence import Evidence


@dataclass(frozen=True)
class Job:
    """One audit."""

    name: str  # on the command line, and the folder of its table
    explains: str  # what it tells, one line
    schema: StructType  # of its table
    table: Callable[[Evidence], DataFrame]
    counts: Callable[[DataFrame], DataFrame]  # table -> schemas.COUNT
    findings: Callable[[DataFrame, datetime], DataFrame] | None = None  # -> schemas.FINDING
    shown: Callable[[DataFrame], DataFrame] | None = None  # the rows of the table to print
