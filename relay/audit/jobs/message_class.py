"""The class of a message, of its row of ``side_by_side`` and of what the whole home has."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from relay.audit.jobs.horizon import Horizon
from relay.audit.jobs.job import named_values
from relay.audit.jobs.messages import ARCHIVED, impossible_time, is_filed
from relay.base.clock import NS_PER_S
from relay.base.message import Kind

OPEN = ("pending", "processing")
STATUS, HEADERS = "status_differs", "headers_differ"


def message_class(judged: Horizon, grace_ns: int) -> Column:
    """Return the class: the first that is true, worst first."""
    status = F.col("status")
    unknown = F.col("checksum").isNull() | (F.col("checksums") < F.col("copies"))
    return (
        F.when(status.isNull(), _class_without_row(judged))
        .when((status.isin(*OPEN) | (status == "failed")) & _is_accepted(judged), STATUS)
        .when(status.isin(*OPEN, "failed") & impossible_time(judged).isNotNull(), HEADERS)
        .when(status.isin(*OPEN), "in_flight")
        .when(status == "failed", "failed")
        .when(F.col("copies").isNull() & (F.col("dead") > 0), "discarded")
        .when(F.col("copies").isNull() & F.col("is_whole"), "missing")
        .when(_differs("lowest_checksum", "highest_checksum"), "checksum_differs")
        .when(_lacks_checksum(), "checksum_differs")
        .when(_differs("lowest_journaled", "journal_checksum"), "journal_differs")
        .when(F.col("headers").isNotNull(), HEADERS)
        .when(_lacks_ack(judged, grace_ns), STATUS)
        .when(_is_unjournaled(), "unjournaled")
        .when(_differs("lowest_original", "original_checksum"), "original_differs")
        .when(_has_other_size(), "original_differs")
        .when(_lacks_original(), "original_missing")
        .when(_has_other_path(), "path_differs")
        .when(F.col("copies").isNull(), "not_checked")  # nothing else is wrong with it
        .when(F.col("waiting_for").isNotNull(), "undelivered")
        .when(F.col("ended_for").isNotNull(), "returned")
        .when(unknown, "unverified")
        .otherwise("delivered")
    )


def other_values() -> Column:
    """Name status, size or path in the ledger and elsewhere, for a ``class`` that is about them."""
    size = F.when(F.col("least_size") != F.col("file_size"), F.col("least_size")).otherwise(
        F.col("most_size")
    )
    accepted, archived = F.lit("accepted"), F.lit("archived")
    status = named_values(
        "status",
        ledger="status",
        store=F.when(F.col("copies").isNotNull(), accepted),
        journal=F.when(F.col("records").isNotNull(), accepted),
        archive=F.when(F.col("original_path").isNotNull(), archived),
        audit_log=F.when(F.col("was_archived"), archived),
    )
    path = named_values("path", ledger="file_path", original="original_path")
    return (
        F.when(F.col("class") == STATUS, status)
        .when(F.col("class") == "path_differs", path)
        .when(
            (F.col("class") == "original_differs") & _has_other_size(),
            named_values("size", ledger="file_size", original=size),
        )
    )


def _class_without_row(judged: Horizon) -> Column:
    """Classify a message without a ledger row. The journal may be ahead of the ledger."""
    is_unknown_file = F.coalesce("copies", "records").isNull()
    filed_now = F.coalesce(F.col("original_at") >= judged.since, F.lit(False))
    return (
        F.when(_is_recent(judged) | filed_now, "recent")
        .when(is_unknown_file, "unknown_file")
        .when(_is_behind(), "behind")
        .otherwise("orphan")
    )


def _is_recent(judged: Horizon) -> Column:
    """True for a message that is too young, or that the ledger is just being told of."""
    told_now = F.coalesce(_is_ahead() & (F.col("journaled_at") >= judged.since), F.lit(False))
    return judged.is_young("dated", "stored_at", "journaled_at") | told_now


def _is_ahead() -> Column:
    """True where its record is behind the ledger's position in the journal."""
    return F.col("journal_end") > F.coalesce("follows", F.lit(0))


def _is_behind() -> Column:
    """True where the ledger was not told of it; so ``untold_records`` are a finding of the home.

    So is a message from before the first record that there still is, where the ledger has not
    come as far.
    """
    is_pruned = (F.col("untold_records") > 0) & (
        F.col("journal_begin") > F.coalesce("follows", F.lit(0))
    )
    is_older = F.greatest("dated", "stored_at") < F.col("journal_from")
    return F.coalesce(_is_ahead(), is_pruned & is_older, F.lit(False))


def _is_accepted(judged: Horizon) -> Column:
    """True where store or journal have it, before the ledger's position in the journal."""
    is_there = F.coalesce("copies", "records").isNotNull()
    is_judged = ~_is_recent(judged) & ~_is_behind()
    return is_there & F.col("follows").isNotNull() & is_judged


def _differs(*names: str) -> Column:
    """True when one of these checksums differs from the ledger's."""
    differs = [F.col(name) != F.col("checksum") for name in names]
    return F.coalesce(differs[0] | differs[1], F.lit(False))


def _lacks_checksum() -> Column:
    """True where the ledger lacks the checksum, and another source has it."""
    sides = F.coalesce("highest_checksum", "journal_checksum", "original_checksum")
    return F.col("checksum").isNull() & sides.isNotNull()


def _lacks_ack(judged: Horizon, grace_ns: int) -> Column:
    """True where a completed row should be ``archived`` by now, or once was.

    ``was_archived``: of Inputs.reverted_archives.
    """
    grace = F.make_dt_interval(secs=F.lit(grace_ns / NS_PER_S))
    possible = F.when(F.col("processed_at") <= judged.until, F.col("processed_at"))
    filed_at = F.greatest("original_at", "discovered_at", possible)
    is_there = (F.col("status") == "completed") & F.col("original_path").isNotNull()
    is_old = (filed_at < judged.since) & (filed_at + grace < F.col("noted_at"))
    is_undone = (F.col("status") == "completed") & F.col("was_archived").isNotNull()
    return F.coalesce(is_there & is_old, F.lit(False)) | is_undone


def _is_unjournaled() -> Column:
    """True where the journal goes back to its discovery, but does not have it."""
    reaches = F.col("discovered_at") >= F.col("journal_from")
    return F.col("is_whole") & F.col("records").isNull() & F.coalesce(reaches, F.lit(False))


def _has_other_size() -> Column:
    """True where an original differs in size from the file that the ledger saw in the outbox.

    A spawn is archived without its secrets; a row without an inode was rebuilt from the store,
    which does not know the size.
    """
    size = F.col("file_size")
    is_other = (F.col("least_size") != size) | (F.col("most_size") != size)
    is_known = F.col("file_inode").isNotNull() & (F.col("message_type") != Kind.SPAWN)
    return F.coalesce(is_other & is_known, F.lit(False))


def _lacks_original() -> Column:
    is_judged = F.coalesce(F.col("day") >= F.col("originals_from"), F.lit(False))
    is_read = F.col("is_broken").isNull()
    return is_filed() & F.col("original_path").isNull() & is_judged & is_read


def _has_other_path() -> Column:
    """True where the only original of a row has another path than the row says.

    A row that still names its outbox is not judged: a rebuilt ledger does not know the path of a
    packed file.
    """
    is_archived = (F.col("status") == ARCHIVED) & ~F.col("file_path").startswith("agents/")
    is_other = (F.col("originals") == 1) & (F.col("original_path") != F.col("file_path"))
    return F.coalesce(is_archived & is_other, F.lit(False))
