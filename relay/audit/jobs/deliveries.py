"""Every delivery, of one message to one recipient, as ledger, store and journal report it.

``sent`` is one join of deliveries and messages for all jobs that need both; ``refusals`` finds
the orchestrator's nacks by their ids; the rest compares the states of the three sources.

The three name states in words of their own, and not at the same instant. The journal is first,
the ledger follows it, and an archive keeps what was so when the message was rolled, however often
it was read or acknowledged later. ``AGREE`` says which words go together; what moved within the
grace, or behind the journal's position of a ledger that was not told of it, is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.audit.inputs import Inputs
from relay.audit.jobs.job import named_values
from relay.base.home import ARCHIVES
from relay.base.message import Kind
from relay.base.names import ORCHESTRATOR

_COLUMNS = (
    "ledger_id",
    "message_id",
    "sender",
    "target",
    "recipient",
    "kind",
    "file_size",
    "retry_count",
    "state",
    "attempt",
    "ack_status",
    "discovered_at",
    "staged_at",
    "written_at",
    "read_at",
    "acked_at",
    "obligation",
    "owed_until",
    "reminders",
    "waited",
)


def sent(inputs: Inputs) -> DataFrame:
    """Make one row a delivery of the ledger, computed once in a run.

    ``waited`` is true for a delivery that waited for a reason outside the relay: its inbox could
    not be written, the channel was full, it was delivered again, it is the copy of a recipient that
    joined later, or the full disk deferred its message.
    """

    def make() -> DataFrame:
        messages = inputs.ledger(
            "messages",
            "id",
            "message_id",
            "agent_name",
            "target",
            "message_type",
            "file_size",
            "discovered_at",
            "processed_at",
            "retry_count",
        )
        deliveries = inputs.ledger(
            "deliveries",
            "message_id",
            "recipient",
            "state",
            "attempt",
            "ack_status",
            "staged_at",
            "written_at",
            "read_at",
            "acked_at",
            "obligation",
            "due_at",
            "reminders",
        )
        return with_messages(deliveries, messages)

    return inputs.cached("sent", make)


def with_messages(deliveries: DataFrame, messages: DataFrame) -> DataFrame:
    """Deliveries with sender, TO, kind, size, order and discovery of their messages."""
    names = {"id": "ledger_id", "agent_name": "sender", "message_type": "kind"}
    facts = messages.withColumnsRenamed(names)
    until = F.when(F.col("obligation") == "open", F.col("due_at"))
    joined = deliveries.withColumn("owed_until", until).join(facts, on="message_id", how="inner")
    return joined.withColumn("waited", _waited()).select(*_COLUMNS)


def _waited() -> Column:
    # A message that is accepted at once is committed before it is completed.
    later = F.coalesce(F.col("staged_at") > F.col("processed_at"), F.lit(False))
    put_off = F.coalesce(F.col("retry_count") > 0, F.lit(False))
    return later | put_off | (F.col("attempt") > 1)


_DIGEST_DIGITS = 32
_SEPARATOR = "\0"


def refusals(asked: DataFrame, messages: DataFrame) -> DataFrame:
    """List (message_id, answer_id) of the requests that the orchestrator answered with a nack.

    ``asked`` and ``messages`` have the ledger's columns message_id, agent_name, message_type.
    """
    nacks = messages.where(
        (F.col("agent_name") == ORCHESTRATOR) & (F.col("message_type") == str(Kind.NACK))
    )
    said = nacks.select(
        F.col("message_id").alias("answer_id"),
        F.substring_index("message_id", "-", -1).alias("digest"),
    )
    wanted = asked.select("message_id", digest(Kind.NACK).alias("digest"))
    return wanted.join(said, on="digest", how="inner").select("message_id", "answer_id")


def digest(kind: Kind) -> Column:
    """Return the last part of the id of such an answer to a row of ``messages``.

    ``relay.base.names.answer_id``: after the time come the first 32 hex digits of the SHA-256 of
    "answer", sender, message id and kind.
    """
    parts = [F.lit("answer"), F.col("agent_name"), F.col("message_id"), F.lit(str(kind))]
    text = F.concat_ws(_SEPARATOR, *parts).cast("binary")
    return F.substring(F.sha2(text, 256), 1, _DIGEST_DIGITS)


# The ledger's state -> states of store and journal that say the same, or what comes just before.
AGREE: Mapping[str, tuple[str, ...]] = {
    "held": ("Sent", "Staged", "Waiting"),
    "staged": ("Sent", "Staged", "Waiting"),
    # overdue, an acknowledgment waits for the next attempt, and only that reaches the ledger
    "written": ("Staged", "Waiting", "Delivered", "Received"),
    "read": ("Staged", "Waiting", "Delivered", "Received"),
    "acked": ("Acknowledged",),
    "expired": ("Expired",),
    "bounced": ("Bounced",),
    "dead": ("Dead", "Staged", "Waiting"),  # replayed: its next attempt is due
}
# Control messages are executed by the relay itself: `read` in the ledger, whatever the outcome.
CARRIED_OUT = (*AGREE["read"], "Acknowledged")
_MADE = "Delivered"


def by_recipient(ledger: DataFrame, stored: DataFrame, journal: DataFrame) -> DataFrame:
    """Make one row a message and recipient, of whichever source has the two.

    ``ledger``: message_id, recipient, state, attempt, its times, ack_status, answer_id.
    ``stored``: id, relay_id, recipient, state, file. ``journal``: end, at, event, relay_id, state,
    deliveries, said, answer_id. Messages without a relay id were sent through the engine alone,
    and are left out.
    """
    engine = _by_number(stored, journal)
    rows = ledger.select(
        "message_id",
        "recipient",
        F.col("state").alias("ledger_state"),
        "attempt",
        _lacking_time().alias("lacks_time"),
        "ack_status",
        "answer_id",
        *[_nothing(name, kind) for name, kind in _ENGINE.items()],
    )
    both = rows.unionByName(
        engine.select(
            F.col("relay_id").alias("message_id"),
            "recipient",
            *[_nothing(name, kind) for name, kind in _LEDGER.items()],
            *_ENGINE,
        )
    )
    # One shuffle for this and all that goes by the message behind it.
    merged = (
        both.repartition("message_id")
        .groupBy("message_id", "recipient")
        .agg(*[F.max(name).alias(name) for name in (*_LEDGER, *_ENGINE)])
    )
    return merged


def delivery_class(
    names: Mapping[str, Column],
    judged_before: Column,
    untold_from: Column,
    young: Column,
    differs: Column,
) -> Column:
    """Return the class of a delivery, the first that is true: see reconcile.

    ``names``: status and agent of the message's row. ``untold_from``: the place in the journal of
    what the ledger was not told, NULL: it was told. ``young``: the message itself is not judged.
    ``differs``: of ``differences``.
    """
    status, agent = names["status"], names["agent"]
    state = F.col("ledger_state")
    moved = (F.col("moved_at") >= judged_before) | (F.col("moved_end") > untold_from)
    is_recent = F.coalesce(moved, F.lit(False)) | young
    made = F.col("made") > F.greatest(F.col("attempts"), F.coalesce("attempt", F.lit(1)))
    is_duplicate = (made | (F.col("first_made") > 1)) & (F.col("recipient") != ORCHESTRATOR)
    return (
        F.when(status.isNull(), "unknown")
        .when(status == "failed", "failed")
        .when(status.isin("pending", "processing"), "in_flight")
        .when(F.coalesce(is_duplicate, F.lit(False)), "duplicate")
        .when(is_recent, F.coalesce(state, F.lit("recent")))
        .when(state.isNull() & (agent == ORCHESTRATOR), "undeliverable_reply")
        .when(state.isNull(), "missing")
        .when(_engine_state().isNull() & F.col("is_known"), _if_whole("orphan"))
        .when(differs.isNotNull(), _if_whole("conflict"))
        .otherwise(state)
    )


def _if_whole(name: str) -> Column:
    """Return this class, where all of store and journal was read."""
    return F.when(F.col("is_whole"), name).otherwise("not_checked")


_LEDGER = {
    "ledger_state": "string",
    "attempt": "bigint",
    "lacks_time": "string",  # name of the time of its state
    "ack_status": "string",
    "answer_id": "string",
}
_ENGINE = {
    "stored_state": "string",  # in the live store, or the one archive
    "is_archived": "boolean",
    "journal_state": "string",  # by the last record about it
    "moved_end": "bigint",  # the journal's offset behind that record
    "moved_at": "timestamp",
    "made": "bigint",  # how often it was put into the inbox
    "first_made": "bigint",  # of these, the first attempt
    "attempts": "bigint",  # the highest attempt that was begun
    "last_made": "bigint",  # the highest that was put into the inbox
    "said": "string",  # the status of the last acknowledgment
    "said_in": "string",  # the message with it
}


def _in_store(stored: DataFrame) -> DataFrame:
    return stored.select(
        F.col("id").try_cast("bigint").alias("number"),
        "recipient",
        "relay_id",
        F.col("state").alias("stored_state"),
        F.col("file").startswith(f"{ARCHIVES}/").alias("is_archived"),
        _nothing("last", _LAST),
        _nothing("attempt", "bigint"),
        F.lit(False).alias("is_made"),
        _nothing("ack", _ACK),
    )


def _in_journal(journal: DataFrame) -> DataFrame:
    """A row for each time that a record moved a delivery."""
    moved = journal.where(F.col("state").isNotNull() & F.col("deliveries").isNotNull()).select(
        *("end", "at", "event", "relay_id", "state", "said", "answer_id"),
        F.explode("deliveries").alias("one"),
    )
    return moved.select(
        F.col("one.number").try_cast("bigint").alias("number"),
        F.col("one.recipient").alias("recipient"),
        "relay_id",
        _nothing("stored_state", "string"),
        _nothing("is_archived", "boolean"),
        F.struct("end", "state", "at").alias("last"),
        F.greatest(F.coalesce("one.attempt", F.lit(1)), F.lit(1)).alias("attempt"),
        ((F.col("event") == "DeliveriesMoved") & (F.col("state") == _MADE)).alias("is_made"),
        F.when(F.col("said").isNotNull(), F.struct("end", "said", "answer_id")).alias("ack"),
    )


def _by_number(stored: DataFrame, journal: DataFrame) -> DataFrame:
    """Join store and journal, which have the engine's numbers, with the ledger's ids."""
    is_made = F.col("is_made")
    return (
        _in_store(stored)
        .unionByName(_in_journal(journal))
        .groupBy("number", "recipient")
        .agg(
            F.max("relay_id").alias("relay_id"),
            F.max("stored_state").alias("stored_state"),
            F.bool_or("is_archived").alias("is_archived"),
            F.max("last").alias("last"),
            F.count_if(is_made).alias("made"),
            F.count_if(is_made & (F.col("attempt") <= 1)).alias("first_made"),
            F.max("attempt").alias("attempts"),
            F.max(F.when(is_made, F.col("attempt"))).alias("last_made"),
            F.max("ack").alias("ack"),
        )
        .where(F.col("relay_id").isNotNull())
        .select(
            "relay_id",
            "recipient",
            "stored_state",
            "is_archived",
            F.col("last.state").alias("journal_state"),
            F.col("last.end").alias("moved_end"),
            F.col("last.at").alias("moved_at"),
            "made",
            "first_made",
            "attempts",
            "last_made",
            F.col("ack.said").alias("said"),
            F.col("ack.answer_id").alias("said_in"),
        )
    )


def is_known_to_engine() -> Column:
    """True where store or journal have the recipient, and so know the message."""
    return _engine_state().isNotNull()


def _engine_state() -> Column:
    return F.coalesce("journal_state", "stored_state")


def differences(reaches: Column) -> Column:
    """Name what store or journal contradict, with the values; NULL: nothing.

    ``reaches``: the journal goes back to the message's discovery, so it has all of its changes.
    """
    of_journal = [
        _other_attempt(),
        F.concat(F.col("lacks_time"), F.lit(": missing in the ledger")),
    ]
    said = [_other_state(), *[F.when(reaches, one) for one in of_journal], _other_ack(reaches)]
    return F.nullif(F.concat_ws("; ", *said), F.lit(""))


def _other_state() -> Column:
    """Name a state in store or journal that does not go with the ledger's."""
    agree = F.create_map(
        *[
            part
            for state, words in AGREE.items()
            for part in (F.lit(state), F.array(*map(F.lit, words)))
        ]
    )
    words = F.when(F.col("recipient") == ORCHESTRATOR, F.array(*map(F.lit, CARRIED_OUT))).otherwise(
        agree[F.col("ledger_state")]
    )
    # a late answer to what was rolled is in the ledger alone
    is_late = F.coalesce("is_archived", F.lit(False)) & (F.col("ledger_state") == "acked")
    is_other = ~is_late & (_excludes("stored_state", words) | _excludes("journal_state", words))
    values = named_values(
        "state", ledger="ledger_state", store="stored_state", journal="journal_state"
    )
    return F.when(is_other, values)


def _other_ack(reaches: Column) -> Column:
    """Name a status of the last acknowledgment that is not the one in the journal.

    Of a message that was rolled, the journal lacks later ones; they are in other messages.
    """
    is_live = F.col("is_archived") == F.lit(False)
    is_same = (F.col("answer_id") == F.col("said_in")) | (is_live & F.col("said_in").isNotNull())
    is_other = is_same & ~F.col("said").eqNullSafe(F.col("ack_status"))
    is_unsaid = F.col("said").isNull() & (F.col("journal_state") != "Acknowledged")
    is_made_up = reaches & is_live & F.col("ack_status").isNotNull() & is_unsaid
    said = {
        source: F.coalesce(name, F.lit("none"))
        for source, name in (("ledger", "ack_status"), ("journal", "said"))
    }
    wrong = F.coalesce(is_other, F.lit(False)) | F.coalesce(is_made_up, F.lit(False))
    return F.when(wrong, named_values("ack_status", **said))


def _lacking_time() -> Column:
    """Name the time that a row's state lacks."""
    times = {"written": "written_at", "read": "read_at", "acked": "acked_at"}
    lacking = [
        F.when((F.col("state") == state) & F.col(at).isNull(), F.lit(at))
        for state, at in times.items()
    ]
    return F.coalesce(*lacking)


def _other_attempt() -> Column:
    """Name another number of attempts in the ledger than in the journal.

    A held delivery may be of an attempt that a crash kept from the journal, and attempts are no
    longer counted once there is an answer: more attempts than in the ledger are known only for
    files in an inbox.
    """
    state = F.col("ledger_state")
    more = state.isin("written", "read", "acked") & (F.col("attempt") > F.col("attempts"))
    fewer = state.isin("written", "read") & (F.col("attempt") < F.col("last_made"))
    is_agents = F.col("recipient") != ORCHESTRATOR
    return F.when(
        more & is_agents, named_values("attempt", ledger="attempt", journal="attempts")
    ).when(fewer & is_agents, named_values("attempt", ledger="attempt", journal="last_made"))


def _excludes(name: str, words: Column) -> Column:
    return F.coalesce(~F.array_contains(words, F.col(name)), F.lit(False))


_ACK = "struct<end:bigint,said:string,answer_id:string>"
_LAST = "struct<end:bigint,state:string,at:timestamp>"


def _nothing(name: str, kind: str) -> Column:
    return F.lit(None).cast(kind).alias(name)
