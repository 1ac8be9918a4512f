"""The orchestrator's answers, found without their contents: an id says what it answers.

``relay.base.names.answer_id``: behind the time stand the first 32 hex digits of the SHA-256 of
"answer", sender, message id and kind.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relay.base.message import Kind
from relay.base.names import ORCHESTRATOR

_DIGEST_DIGITS = 32
_SEPARATOR = "\0"


def refusals(asked: DataFrame, messages: DataFrame) -> DataFrame:
    """(message_id, answer_id) of those of ``asked`` that the orchestrator answered with a nack.

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
    """What the id of such an answer to a row of ``messages`` ends with."""
    parts = [F.lit("answer"), F.col("agent_name"), F.col("message_id"), F.lit(str(kind))]
    text = F.concat_ws(_SEPARATOR, *parts).cast("binary")
    return F.substring(F.sha2(text, 256), 1, _DIGEST_DIGITS)
