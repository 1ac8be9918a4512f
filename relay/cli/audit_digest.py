"""``relay audit digest``: what agents did and what is open, in ten lines, or as a page."""

from __future__ import annotations

import html
import os
import time
from typing import Any

import click

from relay.audit.digest import REFUSED, Counts, Digest, Reason, make_digest
from relay.base import fsio
from relay.base.clock import elapsed, local_time
from relay.base.home import LEDGER
from relay.base.text import visible
from relay.cli.common import (
    TIME,
    command,
    echo_json,
    open_home,
    plural,
    with_iso_times,
)
from relay.cli.tables import colour, cut, screen_columns, wide_option
from relay.views.ids import short_ids

MOST_NAMED = 3  # agents, and reasons, in a line; others are counted
MOST_TEXT = 60  # characters of a reason
LABEL = 10  # columns
Line = tuple[str, str]  # label, text

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root{{color-scheme:light dark}}body{{font:1em/1.5 system-ui,sans-serif;margin:2em}}
th{{text-align:left;vertical-align:top;padding-right:1em}}td{{overflow-wrap:anywhere}}</style>
<h1>{title}</h1>
<table>
{rows}
</table>
</html>
"""


@command(
    epilog="""\b
Examples:
  relay audit digest
  relay audit digest --since 8h
  relay audit digest --since 2026-11-20 --out digest.html
  relay audit digest --json | jq .counts"""
)
@click.option(
    "--since",
    "since_ns",
    type=TIME,
    default="yesterday",
    show_default=True,
    help="10m ago, 14:05, '2026-11-20 18:30', or yesterday: from its beginning.",
)
@click.option("--out", metavar="FILE", help="Write a page for a browser here, e.g. digest.html.")
@wide_option
def digest(
    ctx: click.Context, home: str | None, since_ns: int, out: str | None, wide: bool, as_json: bool
) -> None:
    """Show in ten lines what agents did, and what is open.

    Who worked, what was asked and answered, the answers that are owed, the slowest deliveries,
    what was given up and what was refused; and the same numbers of as much time before. It reads
    the ledger only, and starts no Spark.
    """
    now_ns = time.time_ns()
    if since_ns > now_ns:
        raise click.BadParameter("it is in the future", param_hint="--since")
    with open_home(ctx, home) as opened:
        made = make_digest(opened.path(LEDGER), since_ns, now_ns)
    lines = digest_lines(made)
    title = f"since {local_time(since_ns, now_ns)} ({elapsed(now_ns - since_ns)}), {opened.root}"
    if out is not None:
        fsio.write_atomic(os.path.abspath(out), _page(title, lines))
    if as_json:
        echo_json({"home": opened.root, **_facts(made)})
        return
    columns = screen_columns(wide=wide)
    for label, text in [("digest", title), *lines]:
        shown = visible(text) if columns is None else cut(visible(text), columns - LABEL)
        click.echo(f"{colour(label.ljust(LABEL), bold=True)}{shown}")


def _facts(made: Digest) -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = with_iso_times(msgspec.to_builtins(made))
    return facts


def _page(title: str, lines: list[Line]) -> bytes:
    """Make the page: it needs nothing but itself, and whatever agents wrote is text."""
    rows = [
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(visible(text))}</td></tr>"
        for label, text in lines
    ]
    page = PAGE.format(title=html.escape(visible(title)), rows="\n".join(rows))
    return page.encode("utf-8", "replace")


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
    told = ", ".join(f"{count:,} {word}" for word, count in outcomes.items() if count)
    what = "command or query" if counts.asked == 1 else "commands and queries"
    return f"{counts.asked:,} {what}{': ' if told else ''}{told}"


def _given_up(made: Digest) -> list[Line]:
    """Name the last ones that nobody answered: what became of them is in their traces."""
    short = short_ids(one.message_id for one in made.given_up)
    told = [f"{one.agent} > {one.recipient} {short[one.message_id]}" for one in made.given_up]
    left = made.counts.given_up - len(told)
    told += [f"{left:,} more"] if left else []
    return [("given up", ", ".join(told))] if told else []


def _open(made: Digest) -> list[Line]:
    """Return a line for each of the longest waiting answers, the first with the numbers."""
    numbers = f"{plural(made.open_answers, 'answer')} owed, {made.unread:,} unread"
    numbers += f", {made.held:,} not delivered yet" if made.held else ""
    short = short_ids(one.message_id for one in made.open)
    lines = [("open", numbers)]
    for one in made.open:
        late = made.until_at - one.due_at if one.due_at is not None else 0
        overdue = f", overdue {elapsed(late)}" if late > 0 else ""
        age = elapsed(made.until_at - one.asked_at)
        owed = f"{one.recipient} owes {one.agent} an answer for {age}{overdue}"
        lines.append(("", f"{short[one.message_id]} {owed}"))
    return lines


def _slowest(made: Digest) -> str:
    short = short_ids(one.message_id for one in made.slowest)
    slow = [
        f"{_milliseconds(one.inbox_ms)} {one.agent} > {one.recipient} {short[one.message_id]}"
        for one in made.slowest
    ]
    return ", ".join(slow) or "no deliveries"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.1f} s"


def _reasons(total: int, reasons: list[Reason]) -> str:
    told = []
    for one in reasons[:MOST_NAMED]:
        outcome = "" if one.outcome == REFUSED else f" {one.outcome}"  # the label says it
        told.append(f"{one.agent} {one.count:,}{outcome} ({_shortened(one.reason)})")
    left = total - sum(one.count for one in reasons[:MOST_NAMED])
    told += [f"{left:,} more"] if left else []
    return f"{total:,}: {', '.join(told)}" if told else "none"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_TEXT else f"{line[: MOST_TEXT - 1]}…"


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
    told = [f"{name} {new:,} ({old:,})" for name, (new, old) in numbers.items()]
    return ", ".join([f"sent {now.messages:,} (was {before.messages:,})", *told])


def _agents(made: Digest) -> list[Line]:
    told = [f"{name} joined" for name in made.joined]
    told += [f"{name} is {status}" for name, status in made.left.items()]
    return [("agents", _first(told))] if told else []
