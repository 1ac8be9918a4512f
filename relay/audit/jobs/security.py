"""Security: the relay's incidents, and everything that it refused.

By agent, hour and kind, from four sources:

| source | from | kinds |
|---|---|---|
| event | `security_events` | the words of relay/base/incidents.py |
| rejection | `rejections` | bad_name, id_taken, unsafe_file, and those of `failed` |
| failed | rows of `messages` that failed | see FAILURES |
| request | requests that the orchestrator refused | refused_request |

A kind is an error where it shows tampering, a warning where a person should look, and else only
counted: the sender of a refused message has the reason and must fix it. There is one finding an
agent and kind, of the days that are judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.deliveries import refusals
from relay.audit.jobs.job import (
    ASCENDING,
    DESCENDING,
    ERROR,
    WARNING,
    AuditJob,
    Rows,
    Tables,
    Written,
    hour_of,
    instant,
    lookup,
    make_findings,
)
from relay.audit.schemas import conform, results
from relay.base.names import ORCHESTRATOR

NAME = "security"
EVENT, REJECTION, FAILED, REQUEST = "event", "rejection", "failed", "request"
OTHER = "other"
SHOWN = 20

# Severity by kind of incident; an unknown kind is of a newer relay, and a warning.
EVENTS: Mapping[str, str | None] = {
    "attachment_mismatch": ERROR,  # the content does not match its name
    "attachment_unsafe": ERROR,  # a link, or another user's file, among the attachments
    "bad_signature": ERROR,  # not of the registered key, or changed after signing
    "foreign_owner": ERROR,  # another user has written into the home
    "linked_directory": ERROR,  # an attempt to make the relay write elsewhere
    "not_a_regular_file": ERROR,  # an attempt to make it read elsewhere
    "hard_link": WARNING,  # the same, or a backup by hard links
    "key_changed": WARNING,  # a new key, or another agent's
    "mode_repaired": WARNING,  # it was readable by others for a while
    "quota_exceeded": WARNING,  # an agent that loops
    "rate_limited": WARNING,  # likewise
    "reply_loop": WARNING,  # agents that answer each other endlessly
    "stray_message": WARNING,  # a program writes into inboxes, past the relay
    "unsigned": WARNING,  # an agent without its key, or an impostor
    "audit_pruned": None,  # retention
    "key_confirmed": None,  # by a person
    "key_registered": None,  # the first one
}
# Reason of a refusal, as a pattern -> kind; the first that matches. Texts of earlier relays stay:
# their ledgers are audited, too.
FAILURES: Mapping[str, str] = {
    # From the beginning: what follows may quote its sender.
    r"^(the relay has a fault|internal error of the relay)": "fault",
    r"^file_disappeared$": "file_disappeared",
    r"is not signed|no public key of ": "unsigned",
    r"^SIGNATURE (is not of|does not match) the key": "bad_signature",
    r"ATTACHMENT ": "attachment",
    r"(no|not a) regular file|: a file of other names|hard links: |belongs to user": "unsafe_file",
    r"is no name of a message|is not a valid message name": "bad_name",
    r"^its id is ": "id_taken",
    r"^found in \.pending": "unsent",
    r"too large": "too_large",
    r"CHECKSUM": "checksum",
    r"its TTL of ": "expired",
    r" is (terminated|retired)": "recipient_away",
    r"there is no agent|is a reserved name|nobody is Lead|no lead is set|no longer here"
    r"|is no longer an agent|nobody else takes part|nobody received it|no recipients: ": (
        "no_recipient"
    ),
    r"is the sender itself|cannot send a message to itself": "to_itself",
    r"there is no channel|^channel .* does not exist|is (Paused|Draining|Closed)"
    r"|is a (direct channel:|channel between)|is everybody|means every agent": "channel",
    r"^RE |^THREAD |a response answers a query|expects no acknowledgment"
    r"|does not expect an acknowledgment": "answers_nothing",
    r"header|, line \d+|is empty|is missing|control character|given twice|UTF-8|: TO |KIND|TTL": (
        "malformed"
    ),
}
# Severity of refusals that are not incidents as well.
REFUSED: Mapping[str, str] = {
    "fault": ERROR,  # of the relay's own
    "file_disappeared": WARNING,  # taken out of the outbox: not delivered
    "id_taken": WARNING,  # ids are random: one used twice, or by another
}

# An incident of a newer relay is a finding, too, under a kind that is not listed here.
CHECKS = (*(kind for kind, severity in EVENTS.items() if severity is not None), *REFUSED)


def make(inputs: Inputs) -> Tables:
    """Make one row an agent, hour, source and kind: results.SECURITY."""
    events = inputs.ledger("security_events", "at", "kind", "agent", "path", "detail")
    rejections = inputs.ledger("rejections", "agent", "file_name", "reason", "nack_id", "at")
    messages = inputs.ledger(
        "messages",
        "message_id",
        "agent_name",
        "target",
        "message_type",
        "status",
        "file_path",
        "discovered_at",
        "processed_at",
        "last_error",
    )
    seen = incidents(events).unionByName(refused_files(rejections)).unionByName(failures(messages))
    every = seen.unionByName(refused_requests(messages))
    return {NAME: by_hour(every, inputs.recent_since_ns)}


def incidents(events: DataFrame) -> DataFrame:
    """Read security_events."""
    kind = F.col("kind")
    severity = F.when(kind.isin(*EVENTS), lookup(EVENTS, kind)).otherwise(WARNING)
    return _seen(events, EVENT, kind, severity, at="at", path="path", detail="detail")


def refused_files(rejections: DataFrame) -> DataFrame:
    """Read files that were refused without a row of their own."""
    kind = _kind(F.col("reason"))
    return _seen(
        rejections,
        REJECTION,
        kind,
        _severity(kind),
        at="at",
        message_id="nack_id",
        path="file_name",
        detail="reason",
    )


def failures(messages: DataFrame) -> DataFrame:
    """Read messages that failed."""
    failed = messages.where(F.col("status") == "failed").withColumnRenamed("agent_name", "agent")
    kind = _kind(F.col("last_error"))
    return _seen(
        failed.withColumn("at", F.coalesce("processed_at", "discovered_at")),
        FAILED,
        kind,
        _severity(kind),
        at="at",
        message_id="message_id",
        path="file_path",
        detail="last_error",
    )


def refused_requests(messages: DataFrame) -> DataFrame:
    """Find requests that the orchestrator answered with a nack, which has the reason."""
    asked = messages.where((F.col("target") == ORCHESTRATOR) & (F.col("status") != "failed"))
    joined = refusals(asked, messages).join(asked, on="message_id", how="inner")
    return _seen(
        joined.withColumnRenamed("agent_name", "agent"),
        REQUEST,
        F.lit("refused_request"),
        F.lit(None),
        at="discovered_at",
        message_id="message_id",
        path="file_path",
        detail="message_type",
    )


def by_hour(seen: DataFrame, recent_since_ns: int) -> DataFrame:
    """Count each kind, by agent and hour: results.SECURITY."""
    counted = seen.groupBy("agent", hour_of("at").alias("hour"), "source", "kind", "severity").agg(
        F.count("*").alias("events"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
        F.max_by(F.struct("message_id", "path", "detail"), "at").alias("last"),
    )
    recent = (F.col("last_at") >= instant(recent_since_ns)).alias("recent")
    return conform(counted.select("*", "last.*", recent), results.SECURITY)


def counts(tables: Written) -> dict[str, int]:
    """Count each kind; an event in two sources counts in each."""
    rows = tables[NAME].to_table(columns=["source", "kind", "events"])
    summed = rows.group_by(["source", "kind"]).aggregate([("events", "sum")]).to_pylist()
    return dict(sorted((f"{row['source']}.{row['kind']}", row["events_sum"]) for row in summed))


def findings(tables: Tables, observed_at: datetime) -> DataFrame:
    """Make one finding an agent and kind that is an error or a warning: results.FINDING."""
    wrong = tables[NAME].where(F.col("recent") & F.col("severity").isNotNull())
    totals = wrong.groupBy("agent", "kind", "severity").agg(
        F.sum("events").alias("events"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
        F.max_by(F.struct("message_id", "path", "detail"), "last_at").alias("last"),
    )
    return make_findings(
        totals.select("*", "last.*"),
        F.concat(F.lit(f"{NAME}."), F.col("kind")),
        F.col("severity"),
        observed_at,
        message_id="message_id",
        agent="agent",
        path="path",
        detail=("events", "first_at", "last_at", "detail"),
    )


def shown(tables: Written) -> Rows:
    """Choose agents and kinds to print: errors, then warnings, then the rest."""
    keys = ["severity", "source", "kind", "agent"]
    grouped = tables[NAME].to_table(columns=[*keys, "events"]).group_by(keys)
    summed = grouped.aggregate([("events", "sum")]).rename_columns({"events_sum": "events"})
    order = [("severity", ASCENDING), ("events", DESCENDING), ("kind", ASCENDING)]
    first: Rows = summed.sort_by(order).slice(0, SHOWN).to_pylist()  # NULL comes last
    return first


def _kind(reason: Column) -> Column:
    """Classify the reason of a refusal."""
    kind = F.lit(OTHER)
    for pattern, name in reversed(list(FAILURES.items())):
        kind = F.when(reason.rlike(pattern), name).otherwise(kind)
    return kind


def _severity(kind: Column) -> Column:
    """Return the severity of a refusal; NULL for one that is only counted."""
    return lookup(REFUSED, kind)


def _seen(
    rows: DataFrame, source: str, kind: Column, severity: Column, **columns: str
) -> DataFrame:
    """Give the rows of one source the columns that all have; others are NULL."""
    named = [
        (F.col(columns[to]) if to in columns else F.lit(None).cast("string")).alias(to)
        for to in ("message_id", "path", "detail")
    ]
    return rows.select(
        "agent",
        F.col(columns["at"]).alias("at"),
        F.lit(source).alias("source"),
        kind.alias("kind"),
        severity.cast("string").alias("severity"),
        *named,
    )


JOB = AuditJob(
    name=NAME,
    description="incidents and refusals by kind, agent and hour; which are errors",
    tables={NAME: results.SECURITY},
    make=make,
    counts=counts,
    findings=findings,
    checks=CHECKS,
    shown=shown,
)
