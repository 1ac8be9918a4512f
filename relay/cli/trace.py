"""``relay trace``: every step of a message with its time."""

from __future__ import annotations

from typing import Any

import click

from relay.cli.common import command, echo_json, name_home, open_home, sanitize, with_iso_times
from relay.cli.tables import clock_of, colour_by_word, day_of
from relay.views.ids import short_ids
from relay.views.trace import (
    UNRECORDED_TEXT,
    describe_hop,
    describe_unrecorded,
    not_yet,
    trace_message,
)


@command(epilog="\b\nExamples:\n  relay trace a1b2c3d4\n  relay trace 1706123456789012345-a1b2c3d4")
@click.argument("message_id")
def trace(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show every step of a message with its time.

    MESSAGE_ID may be the beginning of either part of an id, as long as only one message has it.
    For a message that no relay has seen yet, prints where its file is.
    """
    from relay.base.home import lock_holder

    with open_home(ctx, home) as opened:
        facts, note = trace_message(opened, message_id)
        is_running = lock_holder(opened) is not None
    if note:
        click.echo(f"relay: {note}", err=True)
    if as_json:
        echo_json(with_iso_times(facts))
    elif facts["status"] in UNRECORDED_TEXT:
        text = f"{facts['message_id']}\n  {name_home(describe_unrecorded(facts, is_running))}"
        click.echo(sanitize(text, lines=True))
    else:
        _show(facts)


def _show(facts: dict[str, Any]) -> None:
    answers = short_ids(one["answer"] for one in facts["deliveries"] if one["answer"])

    def shown(text: str) -> str:
        for answer, short in answers.items():
            text = text.replace(answer, short)
        return sanitize(text) or ""

    def echo(at: str, text: str) -> None:
        click.echo(f"  {at:<12}  {shown(text)}")

    click.echo(sanitize(facts["message_id"]))
    kind, to = facts.get("kind"), facts.get("to")
    about = f"{kind or 'unknown'} {facts['from']} -> {to or 'unknown'}"
    if not (kind or to):  # the file could not be parsed
        about = f"a file of {facts['from']}"
    click.echo(f"  {sanitize(about)}: {colour_by_word(shown(facts['outcome']))}")
    day = ""
    for one in facts["hops"]:
        if one["at"] and day != day_of(one["at"]):
            day = day_of(one["at"])
            click.echo(f"  {day}")
        echo(clock_of(one["at"]) if one["at"] else "unknown", describe_hop(one, facts))
    for text in not_yet(facts["deliveries"], facts.get("kind") in ("command", "query")):
        echo("not yet", text)
    if not facts["deliveries"] and facts["status"] in ("completed", "archived"):
        echo("-", "no recipients")
    if facts["error"] and facts["error"] not in facts["outcome"]:
        echo("why", facts["error"])
