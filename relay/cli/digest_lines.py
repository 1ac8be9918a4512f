"""The lines of `relay audit digest`, without colour."""

from __future__ import annotations

from relay.base.clock import elapsed
from relay.cli.common import plural, sanitize
from relay.views.digest import REFUSED, Counts, Digest, Reason
from relay.views.ids import short_ids

MOST_NAMED = 3  # agents, and reasons, in a line; others are counted
MOST_TEXT = 60  # characters of a reason
Line = tuple[str, str]  # label, text


def digest_lines(made: Digest) -> list[Line]:
    """Return the lines below the title: label and text, which is not escaped yet."""
    return [
        ("worked", _worked(made)),
        ("asked", _asked(made.counts)),
        *_given_up(made),
        *_open(made),
        ("slowest", _slowest(made)),
        ("dead", _reasons(made.counts.ended, made.ended)),
        ("refused", _reasons(made.counts.refused, made.refused)),
        ("changed", _changed(made)),
        *_agents(made),
    ]


def _worked(made: Digest) -> str:
    sent = [f"{name} {count:,}" for name, count in made.worked.items() if count]
    quiet = [name for name, count in made.worked.items() if not count]
    parts = [f"sent: {_first(sent)}"] if sent else []
    parts += [f"read only: {_first(quiet)}"] if quiet else []
    return "; ".join([f"{len(made.worked)} of {plural(made.agents, 'agent')}", *parts])


def _first(names: list[str]) -> str:
    """Join the first names; the others are counted."""
    left = len(names) - MOST_NAMED
    more = [f"{left:,} more"] if left > 0 else []
    return ", ".join([*names[:MOST_NAMED], *more])


def _asked(counts: Counts) -> str:
    outcomes = {
        "answered": counts.answered,
        "failed": counts.failed,
        "open": counts.unanswered,
        "given up": counts.given_up,
    }
    parts = ", ".join(f"{count:,} {word}" for word, count in outcomes.items() if count)
    what = "command or query" if counts.asked == 1 else "commands and queries"
    return f"{counts.asked:,} {what}{': ' if parts else ''}{parts}"


def _given_up(made: Digest) -> list[Line]:
    """Name the last ones that nobody answered: what became of them is in their traces."""
    short = short_ids(message.message_id for message in made.given_up)
    parts = [
        f"{message.agent} > {message.recipient} {short[message.message_id]}"
        for message in made.given_up
    ]
    left = made.counts.given_up - len(parts)
    parts += [f"{left:,} more"] if left else []
    return [("given up", ", ".join(parts))] if parts else []


def _open(made: Digest) -> list[Line]:
    """Return a line for each of the longest waiting answers, the first with the numbers."""
    numbers = f"{plural(made.open_answers, 'answer')} owed, {made.unread:,} unread"
    numbers += f", {made.held:,} not delivered yet" if made.held else ""
    short = short_ids(message.message_id for message in made.open)
    lines = [("open", numbers)]
    for message in made.open:
        late = made.until_at - message.due_at if message.due_at is not None else 0
        overdue = f", overdue {elapsed(late)}" if late > 0 else ""
        age = elapsed(made.until_at - message.asked_at)
        owed = f"{message.recipient} owes {message.agent} an answer for {age}{overdue}"
        lines.append(("", f"{short[message.message_id]} {owed}"))
    return lines


def _slowest(made: Digest) -> str:
    short = short_ids(message.message_id for message in made.slowest)
    slow = [
        f"{_milliseconds(row.inbox_ms)} {row.agent} > {row.recipient} {short[row.message_id]}"
        for row in made.slowest
    ]
    return ", ".join(slow) or "no deliveries"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.1f} s"


def _reasons(total: int, reasons: list[Reason]) -> str:
    parts = []
    for refusal in reasons[:MOST_NAMED]:
        outcome = "" if refusal.outcome == REFUSED else f" {refusal.outcome}"  # the label says it
        reason = sanitize(" ".join(refusal.reason.split()), MOST_TEXT)
        parts.append(f"{refusal.agent} {refusal.count:,}{outcome} ({reason})")
    left = total - sum(refusal.count for refusal in reasons[:MOST_NAMED])
    parts += [f"{left:,} more"] if left else []
    return f"{total:,}: {', '.join(parts)}" if parts else "none"


def _changed(made: Digest) -> str:
    """Compare the numbers with those of as much time before."""
    now, before = made.counts, made.before
    if before is None:
        span = elapsed(made.until_at - made.since_at)
        return f"nothing to compare with: the ledger does not have the {span} before"
    numbers = {
        "asked": (now.asked, before.asked),
        "dead": (now.ended, before.ended),
        "refused": (now.refused, before.refused),
    }
    parts = [f"{name} {new:,} ({old:,})" for name, (new, old) in numbers.items()]
    return ", ".join([f"sent {now.messages:,} (was {before.messages:,})", *parts])


def _agents(made: Digest) -> list[Line]:
    parts = [f"{name} joined" for name in made.joined]
    parts += [f"{name} is {status}" for name, status in made.left.items()]
    return [("agents", _first(parts))] if parts else []
