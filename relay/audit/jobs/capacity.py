"""Growth of the home a day, the day when the disk is full, and the savings of the tiers.

Growth is that of the last seven whole days, or of as many as there are: the first day of a home
and today are none, so that nothing is foreseen of a home of some hours. The ledger,
`store/archive` and the journal (unless config.json bounds it) grow without end; archive, inboxes
and attachments up to the limits of retention. The disk is full at the relay's floor, where it
accepts nothing more. Writes of other programs are not foreseen.

| class | means | found |
|---|---|---|
| below_floor | less is free than `disk.floor_mib` asks for: nothing is taken in | error |
| full_soon | at this rate, and with retention, full within 30 days | warning |
"""

from __future__ import annotations

from datetime import datetime, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.disk_usage import (
    ARCHIVE_PART,
    ATTACHMENT_PART,
    INBOX_PART,
    JOURNAL_PART,
    LEDGER_PART,
    STORE_PART,
    HomeUsage,
)
from relay.audit.inputs import Inputs
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    ERROR,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    first_rows,
    make_findings,
)
from relay.audit.schemas import conform, results

NAME = "capacity"
PARTS, FORECAST = f"{NAME}_parts", f"{NAME}_forecast"
GROWTH_DAYS = 7  # a week has working days and others
SOON_DAYS = 30  # time to order a disk
HORIZON_DAYS = 3650  # ten years: the disk will be another one
DAILY_PARTS = (JOURNAL_PART, STORE_PART, ARCHIVE_PART, INBOX_PART, ATTACHMENT_PART)


def make(inputs: Inputs) -> Tables:
    """Make one row a day, one a part, and one forecast."""
    sizes = inputs.disk_usage
    messages = inputs.ledger("messages", "file_size", "discovered_at")
    measured = inputs.local_table(sizes.measured, results.MEASURED)
    limits = inputs.local_table(sizes.limits, results.RETENTION_LIMIT)
    packs = inputs.local_table(sizes.packs, results.PACK)
    days = inputs.cached("capacity days", lambda: by_day(messages, measured))
    parts = inputs.cached("capacity parts", lambda: by_part(days, measured, limits, sizes))
    return {NAME: days, PARTS: parts, FORECAST: forecast(parts, days, packs, sizes)}


def by_day(messages: DataFrame, measured: DataFrame) -> DataFrame:
    """Sum the bytes of each day on the disk: results.CAPACITY.

    The ledger's file is shared out by messages: a row is as long as any other.
    """
    # So few rows that one task has them all: what follows needs no exchange.
    by_date = messages.groupBy(F.to_date("discovered_at").alias("day"))
    sent = by_date.agg(
        F.count("*").alias("messages"), F.sum("file_size").alias("message_bytes")
    ).coalesce(1)
    kept = (
        measured.where(F.col("day").isNotNull())
        .groupBy("day")
        .agg(*[_of_part(part, "bytes").alias(f"{part}_bytes") for part in DAILY_PARTS])
    )
    ledger = measured.agg(_of_part(LEDGER_PART, "bytes").alias("ledger"))
    filled = sent.join(kept, on="day", how="full_outer").fillna(0).crossJoin(F.broadcast(ledger))
    every = Window.partitionBy(F.lit(0))
    filled = filled.withColumn("all_messages", F.sum("messages").over(every))
    share = F.col("messages") / F.greatest("all_messages", F.lit(1))
    names = [f"{part}_bytes" for part in (LEDGER_PART, *DAILY_PARTS)]
    shared = filled.withColumn(
        "ledger_bytes", F.round(F.coalesce(F.col("ledger") * share, F.lit(0)))
    )
    total = shared.withColumn("total_bytes", sum((F.col(name) for name in names), F.lit(0)))
    return conform(total, results.CAPACITY)


def by_part(days: DataFrame, measured: DataFrame, limits: DataFrame, sizes: HomeUsage) -> DataFrame:
    """Measure the size, growth and limit of each part of the home.

    results.CAPACITY_PART.
    """
    now = measured.groupBy("part").agg(F.sum("files").alias("files"), F.sum("bytes").alias("bytes"))
    names = [f"{part}_bytes" for part in (LEDGER_PART, *DAILY_PARTS)]
    window = days.crossJoin(F.broadcast(_window(days, sizes)))
    inside = window.where((F.col("day") >= F.col("begin")) & (F.col("day") <= F.col("end")))
    grown = inside.agg(*[F.sum(name).alias(name) for name in names], F.first("n_days").alias("n"))
    part = F.regexp_replace("name", "_bytes$", "").alias("part")
    rates = grown.unpivot(["n"], names, "name", "grown").select(
        part, (F.col("grown") / F.col("n")).alias("bytes_per_day")
    )
    joined = now.join(rates, on="part", how="left").join(limits, on="part", how="left")
    # Without a whole day nothing is known; parts that do not grow with the days have no rate.
    joined = joined.crossJoin(grown.select("n"))
    rate = F.when(F.col("n").isNotNull(), F.coalesce("bytes_per_day", F.lit(0.0)))
    by_age = F.col("limit_days") * rate
    return conform(
        joined.select(
            "part",
            "files",
            "bytes",
            rate.alias("bytes_per_day"),
            F.least("limit_bytes", F.ceil(by_age)).alias("limit_bytes"),
        ),
        results.CAPACITY_PART,
    )


def _window(days: DataFrame, sizes: HomeUsage) -> DataFrame:
    """Choose the days that growth is reckoned by: begin, end and number, one row; or none.

    Days without anything count as days. The first one and the last are not whole.
    """
    end = F.lit(sizes.until - timedelta(days=1))
    first = days.where(F.col("messages") > 0).agg(F.min("day").alias("first"))
    begin = F.greatest(F.date_add("first", 1), F.date_sub(end, GROWTH_DAYS - 1))
    whole = first.select(begin.alias("begin"), end.alias("end")).where(F.col("begin") <= end)
    return whole.withColumn("n_days", F.datediff("end", "begin") + 1)


def forecast(parts: DataFrame, days: DataFrame, packs: DataFrame, sizes: HomeUsage) -> DataFrame:
    """Forecast the full disk, and sum the tiers' savings, one row: results.CAPACITY_FORECAST."""
    home = parts.agg(
        F.sum("bytes").alias("home_bytes"), F.sum("bytes_per_day").alias("bytes_per_day")
    )
    ahead = parts.select("*", F.explode(F.sequence(F.lit(1), F.lit(HORIZON_DAYS))).alias("in_days"))
    grown = F.col("bytes") + F.col("bytes_per_day") * F.col("in_days")
    # Everything that is there may be young: retention is not expected to remove it.
    most = F.when(F.col("limit_bytes").isNotNull(), F.greatest("limit_bytes", "bytes"))
    kept = F.least(grown, most)
    room = max(sizes.free_bytes - sizes.floor_bytes, 0)
    by_day = ahead.groupBy("in_days").agg(
        F.sum(grown - F.col("bytes")).alias("grown"),
        F.sum(kept - F.col("bytes")).alias("kept"),
    )
    full = by_day.agg(
        _first_day(F.col("grown") > room).alias("full_in_days"),
        _first_day(F.col("kept") > room).alias("full_in_days_kept"),
    )
    packed = packs.join(days.select("day", "message_bytes"), on="day", how="left").agg(
        F.coalesce(F.sum("message_bytes"), F.lit(0)).alias("packed_raw_bytes"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("packed_bytes"),
    )
    known = {
        "disk_bytes": sizes.disk_bytes,
        "free_bytes": sizes.free_bytes,
        "floor_bytes": sizes.floor_bytes,
        "warm_raw_bytes": sizes.tiers.warm_raw,
        "warm_bytes": sizes.tiers.warm,
        "evicted_bytes": sizes.tiers.evicted,
    }
    row = home.crossJoin(full).crossJoin(packed).fillna(0, ["home_bytes"])
    return conform(
        row.withColumns({name: F.lit(value) for name, value in known.items()}),
        results.CAPACITY_FORECAST,
    )


def counts(tables: Written) -> dict[str, int]:
    """Count by the forecast; unknown numbers are left out."""
    names = ["free_bytes", "home_bytes", "bytes_per_day", "full_in_days", "full_in_days_kept"]
    (row,) = tables[FORECAST].to_table(columns=names).to_pylist()
    return {name: round(value) for name, value in row.items() if value is not None}


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find a disk that is full, or soon will be: results.FINDING."""
    row = tables[FORECAST]
    is_below = F.col("free_bytes") < F.col("floor_bytes")
    below = make_findings(
        row.where(is_below),
        f"{NAME}.below_floor",
        ERROR,
        observed_at,
        detail=("free_bytes", "floor_bytes", "disk_bytes", "home_bytes"),
    )
    soon = make_findings(
        row.where(~is_below & (F.col("full_in_days_kept") <= SOON_DAYS)),
        f"{NAME}.full_soon",
        WARNING,
        observed_at,
        detail=("full_in_days_kept", "free_bytes", "floor_bytes", "bytes_per_day"),
    )
    return below.unionByName(soon)


def shown(tables: Written) -> Rows:
    """Choose the parts to print, largest first."""
    return first_rows(tables[PARTS], {"bytes": DESCENDING, "part": ASCENDING})


def _of_part(part: str, column: str) -> Column:
    return F.coalesce(F.sum(F.when(F.col("part") == part, F.col(column))), F.lit(0))


def _first_day(is_full: Column) -> Column:
    return F.min(F.when(is_full, F.col("in_days")))


JOB = AuditJob(
    name=NAME,
    description="growth a day, when the disk is full, what the tiers save",
    tables={
        NAME: results.CAPACITY,
        PARTS: results.CAPACITY_PART,
        FORECAST: results.CAPACITY_FORECAST,
    },
    make=make,
    counts=counts,
    findings=findings,
    checks=("below_floor", "full_soon"),
    shown=shown,
)
