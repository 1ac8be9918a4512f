"""``relay tail``: events from the ledger, one line each.

The ledger's audit_log has every change of a status, and what happened to a delivery besides.
Reading it blocks nothing and needs no running relay.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from textwrap import indent
from typing import Any

import click

from relay.base.home import LEDGER
from relay.base.outcomes import Outcome, by_whom
from relay.base.text import visible
from relay.cli.common import (
    TIME,
    command,
    complete_agents,
    echo_json,
    open_home,
    sanitize,
    when,
)
from relay.cli.tables import clock_of, colour, colour_by_word, cut, day_of, wide_option
from relay.views.events import INTERMEDIATE, EventCursor, body_of, is_of
from relay.views.ids import SHORT, short_ids
from relay.views.names import check_agents

POLL_S = 0.2
LONGEST_KIND = len("notification")


@command(
    epilog="""\b
Examples:
  relay tail
  relay tail --agent bob --body
  relay tail --since 1h --no-follow --json
  relay tail --security --no-follow --limit 100"""
)
@click.option("-f/ ", "--follow/--no-follow", default=True, help="Keep printing new events [yes].")
@click.option(
    "--agent",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only messages from or to this agent.",
)
@click.option("--since", type=TIME, help="Start 10m ago, at 14:05, '2026-11-20 18:30', yesterday.")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=10,
    show_default=True,
    help="Without --since: start with this many of the newest.",
)
@click.option("--security", is_flag=True, help="Only security events.")
@click.option("--body", "has_bodies", is_flag=True, help="Also show what the messages say.")
@click.option("--all", "everything", is_flag=True, help="Also show intermediate states.")
@wide_option
def tail(
    ctx: click.Context,
    home: str | None,
    follow: bool,
    agent: str | None,
    since: int | None,
    limit: int,
    security: bool,
    has_bodies: bool,
    everything: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """Show events as they happen, one line each.

    --body adds the text of each message when it is delivered or refused. The relay need not be
    running. ^C ends it.
    """
    from relay.ledger.file import open_current

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_home(ctx, home))
        db = stack.enter_context(contextlib.closing(open_current(opened.path(LEDGER))))
        cursor = EventCursor(db, since, limit, security=security)
        is_silent = True
        lines = EventLines(wide=wide)
        while True:
            found = cursor.read()
            for event in found:
                path = event.pop("path")
                if (everything or event["event"] not in INTERMEDIATE) and is_of(event, agent):
                    if has_bodies:
                        event["body"] = body_of(opened, event, path)
                    if as_json:
                        echo_json({"at": when(event.pop("at_ns")), **event})
                    else:
                        lines.show(event)
                    is_silent = False
            sys.stdout.flush()
            if not found and is_silent:
                check_agents(opened, agent)
            if not found and not follow:
                if is_silent and not as_json:
                    click.echo("nothing found", err=True)
                return
            if not found:
                time.sleep(POLL_S)


class EventLines:
    """Prints events for people: local times, a line above each new day, short ids."""

    def __init__(self, *, wide: bool) -> None:
        """``wide``: lines are not cut to the terminal."""
        self._most = None
        if not wide and sys.stdout.isatty():
            self._most = shutil.get_terminal_size().columns
        self._day = day_of(time.time_ns())

    def show(self, event: dict[str, Any]) -> None:
        """Print one event."""
        at = event["at_ns"]
        if self._day != day_of(at):
            self._day = day_of(at)
            click.echo(self._day)
        if "text" in event:  # a step of a session
            self._echo(f"{event['event']:<9}", at, [event["text"]])
            return
        to = ", ".join(event["recipients"] or ()) or event["to"]
        route = f"{event['from'] or '?'} -> {to}" if to else event["from"] or "?"
        name = f"{event['event']:<9}"
        message_id = event["message_id"] or "-"
        short, kind = short_ids([message_id])[message_id], event["kind"] or "-"
        parts = [f"{short:<{SHORT}}", f"{kind:<{LONGEST_KIND}}", route]
        if why := event["detail"]:
            parts.append(f"({by_whom(why) if event['event'] == Outcome.CANCELLED else why})")
        is_failed = event["event"] == "acked" and (event["detail"] or "").startswith("failed")
        self._echo(name, at, parts, "red" if is_failed else "")
        if event.get("body"):
            click.echo(indent(sanitize(event["body"].rstrip(), lines=True) or "", " " * 14))

    def _echo(self, name: str, at: int, parts: list[str], as_colour: str = "") -> None:
        line = visible("  ".join([clock_of(at), name, *parts]))
        if self._most:
            line = cut(line, self._most)
        coloured = colour(name, as_colour) if as_colour else colour_by_word(name)
        click.echo(line.replace(name, coloured, 1))
