"""Dead letters: deliveries that were given up, with reason, time and outcome.

| class | means |
|---|---|
| waiting | dead, and its message is in the store: replay or discard it |
| discarded | dead, and its message is not in the store any more |
| replayed | dead once, and delivered again, acknowledged or ended since |

| finding | means | severity |
|---|---|---|
| repeated | three or more deliveries to one recipient died for the same reason | warning |
| again | it was replayed, and died again | warning |
| forgotten | waiting for a week: it was neither replayed nor discarded | warning |

A new dead letter is not a finding: its sender was notified, and `relay dead list` shows it.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    count_by,
    make_findings,
)
from relay.audit.jobs.reconcile import STORE_SECTIONS
from relay.audit.schemas import conform, results

NAME = "dead_letters"
REASONS = "dead_letters_reasons"
KEYS = ["message_id", "recipient"]  # of a delivery
REPEATED = 3  # two may be one incident
FORGOTTEN_S = 7 * 86_400  # a weekly look has seen it
SHOWN = 20


def make(inputs: Inputs) -> Tables:
    """Make a row a delivery that is dead, or was; and counts by day, reason and recipient."""
    messages = inputs.ledger("messages", "message_id", "agent_name", "target")
    deliveries = inputs.ledger(
        "deliveries", "message_id", "recipient", "state", "attempt", "last_error"
    )
    stored = inputs.store(STORE_SECTIONS, "relay_id")
    letters = dead_letters(
        messages, deliveries, inputs.delivery_changes(), stored, inputs.snapshot_ns
    )
    by_reason = letters.groupBy("day", "reason_kind", "recipient").agg(
        F.count("*").alias("letters"), F.count_if(F.col("class") == "waiting").alias("waiting")
    )
    return {NAME: letters, REASONS: conform(by_reason, results.DEAD_REASON)}


def dead_letters(
    messages: DataFrame,
    deliveries: DataFrame,
    moves: DataFrame,
    stored: DataFrame,
    snapshot_ns: int,
) -> DataFrame:
    """List every delivery that is dead, or was by audit_log: results.DEAD_LETTER."""
    letters = _that_died(deliveries, moves)
    known = letters.join(messages, on="message_id", how="left").join(
        _kept(stored, letters), on="message_id", how="left"
    )
    age_s = F.lit(snapshot_ns / 10**9) - F.unix_micros("died_at") / 1_000_000
    return conform(
        known.select(
            *KEYS,
            F.col("agent_name").alias("agent"),
            F.col("target").alias("route"),
            F.when(F.col("state") != "dead", "replayed")
            .when(F.col("is_kept"), "waiting")
            .otherwise("discarded")
            .alias("class"),
            "state",
            F.col("last_error").alias("reason"),
            F.regexp_replace("last_error", "[0-9]+", "…").alias("reason_kind"),
            "attempt",
            F.coalesce("times", F.lit(1)).alias("times"),
            "died_at",
            F.to_date("died_at").cast("string").alias("day"),
            age_s.alias("age_s"),
        ),
        results.DEAD_LETTER,
    )


def _that_died(deliveries: DataFrame, moves: DataFrame) -> DataFrame:
    """List the deliveries that are dead, or once were, with time and number of deaths."""
    died = moves.where(F.col("new_status") == "dead").groupBy(*KEYS)
    ended = died.agg(F.count("*").alias("times"), F.max("at").alias("died_at"))
    return deliveries.join(ended, on=KEYS, how="left").where(
        (F.col("state") == "dead") | F.col("times").isNotNull()
    )


def _kept(stored: DataFrame, letters: DataFrame) -> DataFrame:
    """List messages of these deliveries that the store has, once each, with ``is_kept``."""
    kept = stored.where(F.col("relay_id").isNotNull()).select(
        F.col("relay_id").alias("message_id"), F.lit(True).alias("is_kept")
    )
    ids = letters.select("message_id").distinct()
    return kept.join(ids, on="message_id", how="inner").distinct()


def counts(tables: Written) -> dict[str, int]:
    """Count each class."""
    return count_by(tables[NAME])


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Find dead letters that need attention: results.FINDING."""
    letters = tables[NAME]
    dead = letters.where((F.col("state") == "dead") & F.col("reason_kind").isNotNull())
    groups = dead.groupBy("recipient", "reason_kind").agg(
        F.count("*").alias("letters"),
        F.max("died_at").alias("died_at"),
        F.max_by("message_id", "died_at").alias("message_id"),
        F.max_by("agent", "died_at").alias("agent"),
        F.max("reason").alias("reason"),
    )
    repeated = make_findings(
        groups.where(F.col("letters") >= REPEATED),
        f"{NAME}.repeated",
        WARNING,
        observed_at,
        message_id="message_id",
        agent="agent",
        route="recipient",
        detail=("letters", "reason", "died_at"),
    )
    is_again = (F.col("times") > 1) & (F.col("state") == "dead")
    is_forgotten = (F.col("class") == "waiting") & (F.col("age_s") > FORGOTTEN_S)
    single = letters.where(is_again | is_forgotten)
    one_by_one = make_findings(
        single,
        F.when(is_again, f"{NAME}.again").otherwise(f"{NAME}.forgotten"),
        WARNING,
        observed_at,
        message_id="message_id",
        agent="agent",
        route="route",
        detail=("recipient", "times", "reason", "died_at"),
    )
    return repeated.unionByName(one_by_one)


def shown(tables: Written) -> Rows:
    """Choose the reasons to print, the most frequent first."""
    rows = tables[REASONS].to_table(columns=["recipient", "reason_kind", "letters", "waiting"])
    grouped = rows.group_by(["recipient", "reason_kind"])
    summed = grouped.aggregate([("letters", "sum"), ("waiting", "sum")])
    named = summed.rename_columns({"letters_sum": "letters", "waiting_sum": "waiting"})
    order = [("letters", DESCENDING), ("recipient", ASCENDING)]
    first: Rows = named.sort_by(order).slice(0, SHOWN).to_pylist()
    return first


JOB = AuditJob(
    name=NAME,
    description="deliveries given up: reasons, ages, repeats, replays",
    tables={NAME: results.DEAD_LETTER, REASONS: results.DEAD_REASON},
    make=make,
    counts=counts,
    findings=findings,
    checks=("repeated", "again", "forgotten"),
    shown=shown,
)
