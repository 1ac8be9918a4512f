"""Messages that exist twice, anywhere.

| class | means | found |
|---|---|---|
| numbered_twice | one id, two numbers of the engine: it was accepted twice | error |
| number_shared | one number, two ids | error |
| recorded_twice | two records of the journal accept it under one number | error |
| archived_twice | two archives hold it | error |
| repeated_in_archive | one archive holds it twice | error |
| delivered_twice | put into an inbox twice in one attempt | error |
| resent | a command or query of the same text to the same target, within a minute | warning |

A message in the live store and in one archive is not a duplicate: it is being rolled. Neither is
a further attempt. A text, an ack or a status may well be repeated; a command that is repeated is
executed twice. A file whose id is in use is refused, which `security` counts.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.job import (
    ERROR,
    WARNING,
    AuditJob,
    Tables,
    Written,
    count_by,
    make_findings,
)
from relay.audit.jobs.reconcile import STORE_SECTIONS
from relay.audit.schemas import conform, results
from relay.base.home import ARCHIVES
from relay.base.names import ORCHESTRATOR

NAME = "duplicates"
RESENT_WITHIN_S = 60  # an intended repetition comes later
RESENT_KINDS = ("command", "query")
CLASSES = (
    "numbered_twice",
    "number_shared",
    "recorded_twice",
    "archived_twice",
    "repeated_in_archive",
    "delivered_twice",
    "resent",
)
_ACCEPTED = ("completed", "archived")


def make(inputs: Inputs) -> Tables:
    """Make one row for each duplicate: results.DUPLICATE."""
    messages = inputs.ledger(
        "messages",
        "id",
        "message_id",
        "agent_name",
        "target",
        "message_type",
        "checksum",
        "status",
        "discovered_at",
    )
    stored = inputs.store(STORE_SECTIONS, "id", "relay_id", "file", "sender", "to")
    journal = inputs.journal("event", "number", "relay_id", "sender", "to")
    copies = copies_of(stored, journal)
    made = [
        _by_id(copies),
        _by_number(copies),
        delivered_twice(inputs.delivery_changes()),
        resent(messages),
    ]
    every = made[0]
    for more in made[1:]:
        every = every.unionByName(more, allowMissingColumns=True)
    return {NAME: conform(every, results.DUPLICATE)}


def copies_of(stored: DataFrame, journal: DataFrame) -> DataFrame:
    """List every place where a message has an engine number; ``file`` NULL: in the journal."""
    sent = journal.where(F.col("event") == "MessageSent")
    in_store = stored.select(
        F.col("id").try_cast("bigint").alias("number"), "relay_id", "file", "sender", "to"
    )
    in_journal = sent.select(
        F.col("number").try_cast("bigint").alias("number"),
        "relay_id",
        F.lit(None).cast("string").alias("file"),
        "sender",
        "to",
    )
    return in_store.unionByName(in_journal).where(F.col("relay_id").isNotNull())


def _by_id(copies: DataFrame) -> DataFrame:
    """Find duplicates among the copies of one id."""
    in_archive = F.col("file").startswith(f"{ARCHIVES}/")
    by_id = copies.groupBy("relay_id").agg(
        F.min("number").alias("lowest"),
        F.max("number").alias("highest"),
        F.count_if(in_archive).alias("archived"),
        F.count_if(F.col("file").isNull()).alias("records"),
        F.min(F.when(in_archive, F.col("file"))).alias("first_file"),
        F.max(F.when(in_archive, F.col("file"))).alias("last_file"),
        F.min("sender").alias("agent"),
        F.min("to").alias("route"),
    )
    is_twice = F.col("lowest") != F.col("highest")
    numbers = F.concat_ws(", ", "lowest", "highest")
    files = F.concat_ws(", ", "first_file", "last_file")
    is_in_two = ~is_twice & (F.col("first_file") != F.col("last_file"))
    is_repeated = ~is_twice & ~is_in_two & (F.col("archived") > 1)
    kinds = F.array(
        _fault(is_twice, "numbered_twice", F.lit(2), numbers),
        _fault(~is_twice & (F.col("records") > 1), "recorded_twice", F.col("records"), numbers),
        _fault(is_in_two, "archived_twice", F.col("archived"), files),
        _fault(is_repeated, "repeated_in_archive", F.col("archived"), F.col("first_file")),
    )
    wrong = by_id.where(is_twice | (F.col("records") > 1) | (F.col("archived") > 1))
    each = wrong.select("relay_id", "agent", "route", F.explode(kinds).alias("one"))
    return each.where(F.col("one").isNotNull()).select(
        F.col("one.class").alias("class"),
        F.col("relay_id").alias("message_id"),
        "agent",
        "route",
        F.lit(None).cast("string").alias("recipient"),
        F.col("one.times").alias("times"),
        F.col("one.what").alias("what"),
        F.lit(None).cast("bigint").alias("interval_ms"),
    )


def _fault(where: Column, name: str, times: Column, what: Column) -> Column:
    value = F.struct(
        F.lit(name).alias("class"), times.cast("bigint").alias("times"), what.alias("what")
    )
    return F.when(where, value)


def _by_number(copies: DataFrame) -> DataFrame:
    by_number = copies.groupBy("number").agg(
        F.min("relay_id").alias("message_id"), F.max("relay_id").alias("other")
    )
    shared = by_number.where(F.col("message_id") != F.col("other"))
    return shared.select(
        F.lit("number_shared").alias("class"),
        "message_id",
        F.lit(2).alias("times"),
        F.concat(F.col("number"), F.lit(": "), F.col("other")).alias("what"),
    )


def delivered_twice(moves: DataFrame) -> DataFrame:
    """Find deliveries that were written again without a new attempt."""
    written = moves.where((F.col("new_status") == "written") & (F.col("recipient") != ORCHESTRATOR))
    # The first writing of an attempt comes from held or staged, and is logged where it was late.
    again = F.col("old_status").isin("written", "read", "acked") & ~F.col("is_again")
    by_attempt = written.groupBy("message_id", "recipient", "attempt").agg(
        (F.count("*") + F.max(again.cast("int"))).alias("times")
    )
    return by_attempt.where(F.col("attempt").isNotNull() & (F.col("times") > 1)).select(
        F.lit("delivered_twice").alias("class"), "message_id", "recipient", "times"
    )


def resent(messages: DataFrame) -> DataFrame:
    """Find commands and queries with the same content as one shortly before."""
    asked = messages.where(
        F.col("message_type").isin(*RESENT_KINDS)
        & F.col("status").isin(*_ACCEPTED)
        & F.col("checksum").isNotNull()
        & (F.col("agent_name") != ORCHESTRATOR)
        & (F.col("target") != ORCHESTRATOR)  # which may be sent the same repeatedly
    )
    same = Window.partitionBy("agent_name", "target", "message_type", "checksum").orderBy("id")
    apart = F.unix_millis("discovered_at") - F.unix_millis(F.lag("discovered_at").over(same))
    timed = asked.select(
        "message_id",
        F.col("agent_name").alias("agent"),
        F.col("target").alias("route"),
        F.lag("message_id").over(same).alias("what"),
        apart.alias("interval_ms"),
    )
    return timed.where(F.abs("interval_ms") <= RESENT_WITHIN_S * 1000).select(
        F.lit("resent").alias("class"),
        "message_id",
        "agent",
        "route",
        F.lit(2).alias("times"),
        "what",
        "interval_ms",
    )


def counts(tables: Written) -> dict[str, int]:
    """Count each class."""
    return count_by(tables[NAME])


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Make each row a finding: results.FINDING."""
    return make_findings(
        tables[NAME],
        F.concat(F.lit(f"{NAME}."), F.col("class")),
        F.when(F.col("class") == "resent", WARNING).otherwise(ERROR),
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=("recipient", "times", "what", "interval_ms"),
    )


JOB = AuditJob(
    name=NAME,
    description="the same message recorded, archived, delivered or sent twice",
    tables={NAME: results.DUPLICATE},
    make=make,
    counts=counts,
    findings=findings,
    checks=CLASSES,
)
