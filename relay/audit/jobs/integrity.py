"""Integrity of every stored file, and of every day against an earlier run.

| class | means | found |
|---|---|---|
| sound | its checksums are right, and manifest and store agree with it | |
| warned | the same, with something worth knowing | |
| damaged | it has changed since it was written; `problems` says where. Of the ledger: | error |
| | rows of audit_log or security_events, or their triggers, are missing | |
| unreadable | an original, or a pack of them, that cannot be read | error |
| unreferenced | an attachment that no message names: retention removes it, in time | |
| missing | an attachment that a message names which is unread, or so young that | error |
| | retention cannot have removed it; the journal | |

Files that never change belong to a day: an archive, a sealed segment in whatever tier, an
original in its folder or its pack. A day's hash is over names and checksums, sorted. Compared with
the table `integrity_days` of an earlier run, a day is:

| class | means | found |
|---|---|---|
| new, same, grown | not there before; as it was; with more files | |
| pruned | with fewer files, and no older day is as it was: retention removed them | |
| shrunk | with fewer files, while older days are as they were | error |
| changed | with as many files, and another hash | error |
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from datetime import datetime

import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from relay.audit.inputs import Inputs
from relay.audit.jobs.job import (
    DAY_S,
    ERROR,
    AuditJob,
    Tables,
    Written,
    count_by,
    instant,
    make_findings,
)
from relay.audit.schemas import conform, formats, results
from relay.base.clock import NS_PER_S
from relay.base.errors import LedgerError
from relay.base.home import LEDGER
from relay.ledger.schema import schema_sql

NAME = "integrity"
DAYS = "integrity_days"
WRONG = ("damaged", "unreadable", "missing")
SOUND = ("sound", "warned", "unreferenced")
WRONG_DAYS = ("changed", "shrunk")
WANTED = ("held", "staged", "written")  # a delivery that is still unread
LOGS = ("audit_log", "security_events")
_TRIGGER = re.compile(r"^CREATE TRIGGER (\w+)", re.MULTILINE)
_UNPRUNED = "archive"  # archives of the store are never pruned


def make(inputs: Inputs) -> Tables:
    """Make a row a file, and a row a day and kind of file."""
    files = inputs.files(*formats.KEPT_FILE.names)
    originals = inputs.originals("path", "kind", "day", "size", "sha256", "problem")
    every = verify(files, originals, wanted(inputs)).unionByName(behind(inputs))
    every = every.unionByName(log_of(inputs))
    verified = every.persist(StorageLevel.MEMORY_AND_DISK)
    return {NAME: verified, DAYS: days(verified, inputs.previous_run(DAYS, results.INTEGRITY_DAY))}


def wanted(inputs: Inputs) -> DataFrame:
    """List the attachments that messages name, and whether each must be there.

    Columns: named, is_open (a message that is still unread names it), is_kept (retention has not
    removed it), last_named (the message that named it last).
    """
    refs = inputs.ledger("attachment_refs", "sha256", "message_id", "at")
    open_ones = (
        inputs.ledger("deliveries", "message_id", "state")
        .where(F.col("state").isin(*WANTED))
        .select("message_id", F.lit(True).alias("is_open"))
        .distinct()
    )
    joined = open_ones.join(F.broadcast(refs), on="message_id", how="right")
    return joined.groupBy(F.regexp_replace("sha256", "^sha256:", "").alias("named")).agg(
        F.bool_or(F.coalesce("is_open", F.lit(False))).alias("is_open"),
        (F.max("at") >= instant(kept_since_ns(inputs))).alias("is_kept"),
        F.max_by("message_id", "at").alias("last_named"),
    )


def kept_since_ns(inputs: Inputs) -> int:
    """Return the time since which an attachment that was named cannot have been removed.

    Retention takes whole days, counted from the midnight before its run, and never the last; a run
    may have come a day after the snapshot. By size it takes as many as it must. References go with
    their files. Unix nanoseconds; 0: attachments are kept for ever.
    """
    days = inputs.config.retention.attachments_days
    if inputs.config.retention.attachments_mib:
        days = 1
    day_ns = DAY_S * NS_PER_S
    today_ns = inputs.snapshot_ns // day_ns * day_ns
    return today_ns - (days - 1) * day_ns if days else 0


def behind(inputs: Inputs) -> DataFrame:
    """Make a row when the journal ends before the position that the ledger has, or is missing.

    The ledger follows the journal, whose end was read after the ledger's snapshot: even after a
    crash the journal is the longer of the two.
    """
    state = inputs.ledger("orchestrator_state", "key", "value")
    position = F.col("value").try_cast("bigint")
    ends = inputs.snapshot.journal.until.values()
    is_gone = F.lit(not ends)
    shorter = state.where((F.col("key") == "journal") & (position > max(ends, default=0)))
    problem = F.concat(
        F.lit("the ledger follows it up to "),
        F.col("value"),
        F.lit(f", but it ends at {max(ends)}" if ends else ", but it is missing"),
    )
    return _verified(
        shorter.select(
            F.lit("journal").alias("path"),
            F.lit("journal").alias("kind"),
            F.when(is_gone, "missing").otherwise("damaged").alias("class"),
            F.array(problem).alias("problems"),
        )
    )


def log_of(inputs: Inputs) -> DataFrame:
    """Make a row when the ledger's log of its own changes is incomplete."""
    problems = _log_problems(inputs.snapshot.ledger.path)
    fields = [results.VERIFIED[name] for name in ("path", "kind", "class", "problems")]
    rows = [(LEDGER, "ledger", "damaged", problems)] if problems else []
    return _verified(inputs.local_table(rows, StructType(fields)))


def _log_problems(snapshot: str) -> list[str]:
    """List what is wrong with the ledger's log of its own changes, a line each.

    audit_log and security_events are append-only, by triggers. Retention takes the first rows
    alone, and a rollback leaves no gap, so ids follow one another: a row that is missing in the
    middle was deleted after removing a trigger. Rows that are missing at the
    end cannot be seen. Errors: LedgerError when the snapshot cannot be read.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{snapshot}?mode=ro", uri=True)) as db:
            gaps = [_log_gap(db, table) for table in LOGS]
            rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            there = {name for (name,) in rows}
    except sqlite3.Error as exc:
        raise LedgerError(f"{snapshot}: {exc}") from exc
    gone = [name for name in _TRIGGER.findall(schema_sql()) if name not in there]
    return [gap for gap in gaps if gap] + [f"its trigger {name} is missing" for name in gone]


def _log_gap(db: sqlite3.Connection, table: str) -> str:
    count, first, last = db.execute(f"SELECT count(*), min(id), max(id) FROM {table}").fetchone()
    missing = last - first + 1 - count if count else 0
    return f"{table} lacks {missing} of its rows {first} to {last}" if missing else ""


def _verified(row: DataFrame) -> DataFrame:
    """Give a row that is not about one file all columns."""
    whole = row.withColumn("warnings", F.array().cast("array<string>"))
    absent = [field for field in results.VERIFIED if field.name not in whole.columns]
    nothing = {field.name: F.lit(None).cast(field.dataType) for field in absent}
    return conform(whole.withColumns(nothing), results.VERIFIED)


def verify(files: DataFrame, originals: DataFrame, named: DataFrame) -> DataFrame:
    """List all files, and attachments that should be there: results.VERIFIED."""
    every = _of_files(files, named).unionByName(_of_originals(originals))
    return conform(
        every.unionByName(_missing(files, named), allowMissingColumns=True), results.VERIFIED
    )


def _of_originals(originals: DataFrame) -> DataFrame:
    is_wrong, nothing = F.col("problem").isNotNull(), F.array().cast("array<string>")
    return originals.select(
        "path",
        F.lit("original").alias("kind"),
        "day",
        F.col("path").alias("item"),
        "size",
        "sha256",
        F.when(is_wrong, F.array("problem")).otherwise(nothing).alias("problems"),
        nothing.alias("warnings"),
        F.when(is_wrong & (F.col("kind") != "rejected"), "unreadable")
        .otherwise("sound")
        .alias("class"),
    )


def _of_files(files: DataFrame, named: DataFrame) -> DataFrame:
    is_named = (F.col("kind") == "attachment") & (F.col("item") == F.col("named"))
    joined = files.join(F.broadcast(named), on=is_named, how="left")
    is_unnamed = (F.col("kind") == "attachment") & F.col("named").isNull()
    judged = joined.withColumn(
        "class",
        F.when(F.size("problems") > 0, "damaged")
        .when(is_unnamed, "unreferenced")
        .when(F.size("warnings") > 0, "warned")
        .otherwise("sound"),
    )
    return judged.drop(*named.columns)


def _missing(files: DataFrame, named: DataFrame) -> DataFrame:
    """List attachments that must be there and are missing."""
    there = files.where(F.col("kind") == "attachment").select("item")
    absent = named.where("is_open OR is_kept").join(
        there, F.col("named") == F.col("item"), "left_anti"
    )
    path = F.concat_ws("/", F.lit("attachments"), F.substring("named", 1, 2), "named")
    unread = F.lit("missing, and a message that is not read yet names it")
    kept = F.concat(F.lit("missing, but not for its age: named by "), "last_named")
    return absent.select(
        path.alias("path"),
        F.lit("attachment").alias("kind"),
        F.lit("missing").alias("class"),
        F.col("named").alias("item"),
        F.array(F.when(F.col("is_open"), unread).otherwise(kept)).alias("problems"),
        F.array().cast("array<string>").alias("warnings"),
    )


def days(verified: DataFrame, before: DataFrame) -> DataFrame:
    """Compare the hash of each day and kind with the previous run: results.INTEGRITY_DAY.

    In two steps, by the first digits of each file's own hash: no task holds a whole day's names.
    """
    earlier = before.select(
        "day",
        "kind",
        F.col("files").alias("files_before"),
        F.col("hash").alias("hash_before"),
    ).where(F.col("files_before") > 0)
    both = _hashed_days(_items(verified)).join(earlier, on=["day", "kind"], how="full_outer")
    same = both.where(F.col("hash") == F.col("hash_before"))
    oldest = same.groupBy("kind").agg(F.min("day").alias("first_same"))
    judged = both.join(F.broadcast(oldest), on="kind", how="left")
    none = F.lit(0)
    return conform(
        judged.withColumns(
            {
                "class": _class_of_day(),
                "files": F.coalesce("files", none),
                "bytes": F.coalesce("bytes", none),
                "hash": F.coalesce("hash", F.lit("")),
                "is_partial": F.coalesce("is_partial", F.lit(False)),
            }
        ),
        results.INTEGRITY_DAY,
    )


def _items(verified: DataFrame) -> DataFrame:
    """List the items of each day; a segment in two tiers, or an original and its pack, is one."""
    is_kept = F.col("day").isNotNull() & F.col("item").isNotNull()
    kind = F.when(F.col("kind") == "object", "segment").otherwise(F.col("kind"))
    grouped = verified.where(is_kept).groupBy("day", kind.alias("kind"), "item")
    return grouped.agg(
        F.min("sha256").alias("sha256"),
        F.max("size").alias("size"),
        F.bool_or(F.col("sha256").isNull()).alias("is_partial"),
    )


def _hashed_days(items: DataFrame) -> DataFrame:
    hashed = items.withColumn(
        "one", F.sha2(F.concat_ws(" ", "item", F.coalesce("sha256", F.lit("-"))), 256)
    )
    buckets = hashed.groupBy("day", "kind", F.substring("one", 1, 2).alias("bucket")).agg(
        _hash_of("one").alias("hash"),
        F.count("*").alias("files"),
        F.sum("size").alias("bytes"),
        F.bool_or("is_partial").alias("is_partial"),
    )
    return buckets.groupBy("day", "kind").agg(
        F.sum("files").alias("files"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("bytes"),
        _hash_of("hash").alias("hash"),
        F.bool_or("is_partial").alias("is_partial"),
    )


def _hash_of(name: str) -> Column:
    return F.sha2(F.array_join(F.sort_array(F.collect_list(name)), "\n"), 256)


def _class_of_day() -> Column:
    files, before = F.coalesce("files", F.lit(0)), F.col("files_before")
    older_stay = F.coalesce(F.col("first_same") < F.col("day"), F.lit(False))
    return (
        F.when(before.isNull(), "new")
        .when(F.col("hash") == F.col("hash_before"), "same")
        .when(files > before, "grown")
        .when(files == before, "changed")
        .when(older_stay | (F.col("kind") == _UNPRUNED), "shrunk")
        .otherwise("pruned")
    )


def counts(tables: Written) -> dict[str, int]:
    """Count files of each kind and class, and days that are wrong."""
    rows = tables[NAME].to_table(columns=["kind", "class"]).group_by(["kind", "class"])
    found = Counter[str]()
    for row in rows.aggregate([([], "count_all")]).to_pylist():
        name = f"{row['kind']}s" if row["class"] in SOUND else row["class"]
        found[name] += row["count_all"]
    wrong = count_by(tables[DAYS], where=pc.field("class").isin(list(WRONG_DAYS)))
    found.update({f"days_{name}": count for name, count in wrong.items()})
    return dict(sorted(found.items()))


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find damaged or missing files, and days that changed: results.FINDING."""
    wrong = tables[NAME].where(F.col("class").isin(*WRONG))
    files = make_findings(
        wrong.withColumn("problem", F.array_join("problems", "; ")),
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        ERROR,
        observed_at,
        path="path",
        detail=("kind", "problem"),
    )
    changed = make_findings(
        tables[DAYS].where(F.col("class").isin(*WRONG_DAYS)),
        F.concat(F.lit(f"{NAME}.day_"), F.col("class")),
        ERROR,
        observed_at,
        detail=("kind", "day", "files", "files_before", "hash", "hash_before"),
    )
    return files.unionByName(changed)


JOB = AuditJob(
    name=NAME,
    description="checksum of every file; each day against an earlier run",
    tables={NAME: results.VERIFIED, DAYS: results.INTEGRITY_DAY},
    make=make,
    counts=counts,
    findings=findings,
    checks=(*WRONG, *(f"day_{name}" for name in WRONG_DAYS)),
)
