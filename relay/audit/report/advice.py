"""Findings as sentences, with what to do: by the headers of the jobs, or a default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from relay.audit.jobs.sql_files import check_of
from relay.audit.report.tables import duration_ms, shortened
from relay.audit.summary import with_noun

WITH_MESSAGE = "`relay trace` with the message's id shows every hop of it."
DEFAULT = "docs/audit.md, section {job}, explains the check."


def advice(check: str, *, has_message: bool) -> str:
    """Return the advice on a check; commands are in backquotes."""
    default = DEFAULT.format(job=check.partition(".")[0])
    if known := check_of(check):
        return known.advice
    return f"{WITH_MESSAGE} {default}" if has_message else default


PLURALS = {"command or query": "commands and queries", "day": "days"}
_NOUN = re.compile(r"\[([^]]+)\]")
MOST_NAMED = 3  # agents in a sentence
CLOCKS_AHEAD = ("ordering.future_id", "ordering.future_mtime")


def sentence(check: str, count: int) -> str:
    """Say in plain English what the check found: ``3 messages missing from the journal``."""
    job, _, name = check.partition(".")
    other = f"[{job.replace('_', ' ')} finding] {name.replace('_', ' ')}"
    known = check_of(check)
    return _NOUN.sub(lambda noun: _counted(noun[1], count), known.sentence if known else other)


def _counted(noun: str, count: int) -> str:
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {PLURALS.get(noun, plural)}"


def by_whom(check: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the agents that did not answer: ``: bob, w2``; else ""."""
    if check != "acks.given_up":
        return ""
    names = sorted({str(dict(row["detail"]).get("recipient", "")) for row in rows})
    more = ", …" if len(names) > MOST_NAMED else ""
    return f": {', '.join(map(shortened, names[:MOST_NAMED]))}{more}" if names else ""


def told_clock(check: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Say whose clock is ahead, and by how much: ``fixer-2's clock is 2 h ahead``; else ""."""
    if check not in CLOCKS_AHEAD or not rows:
        return ""
    behind = [(float(dict(row["detail"]).get("by_ms") or 0), str(row["agent"])) for row in rows]
    by_ms, agent = max(behind, key=lambda of: abs(of[0]))
    others = len({name for _, name in behind}) - 1
    more = f", and {with_noun(others, 'other')}" if others else ""
    what = "clock is" if check == CLOCKS_AHEAD[0] else "files are dated"
    return f"{shortened(agent)}'s {what} {duration_ms(abs(by_ms))} ahead{more}"


def command(check: str, message_id: object = None) -> str:
    """Return the command that looks into a finding.

    An id that is not one of ours is not put into a command.
    """
    text = str(message_id or "")
    if text.isascii() and text.replace("-", "").isalnum():
        return f"relay trace {text}"
    known_check = check_of(check)
    parts = (known_check.advice if known_check else "").split("`")[1::2]
    known = (part for part in parts if part.startswith("relay ") and part not in NEEDS_ID)
    return next(known, "relay doctor")


# Commands of the advice that need the id of a message or the path of a file.
NEEDS_ID = (
    *("relay trace", "relay check", "relay dump"),
    *("relay thread", "relay resend", "relay release", "relay key make", "relay key trust"),
)
