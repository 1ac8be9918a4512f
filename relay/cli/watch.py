"""``relay watch``: what one agent does, live: its session's steps, and its messages."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from relay.base.home import LEDGER
from relay.cli.common import command, complete_agents, echo_json, open_home, when
from relay.cli.tables import wide_option
from relay.cli.tail import EventLines
from relay.views.names import check_agents

if TYPE_CHECKING:
    from relay.views.transcript import Transcript

POLL_S = 0.2
LOOK_S = 2.0  # for another session of the agent
MOST_EVENTS = 1000  # of all agents, in which the last ones of this one are looked for
MOST_BEFORE = 40  # lines of what was before


@command(epilog="\b\nExamples:\n  relay watch bob\n  relay watch bob --no-follow")
@click.argument("name", shell_complete=complete_agents)
@click.option("-f/ ", "--follow/--no-follow", default=True, help="Keep printing what comes [yes].")
@wide_option
def watch(
    ctx: click.Context, home: str | None, name: str, follow: bool, wide: bool, as_json: bool
) -> None:
    """Show what an agent does, one line each: prompts, answers, tool calls, messages.

    From the transcript of its session, if its agent CLI has hooks of the relay, and the events of
    its messages. It only reads; nothing is typed into the session. ^C ends it.
    """
    from relay.ledger.file import open_current
    from relay.views.events import INTERMEDIATE, EventCursor, is_of
    from relay.views.transcript import Transcript, transcript_of

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_home(ctx, home))
        check_agents(opened, name)
        db = stack.enter_context(contextlib.closing(open_current(opened.path(LEDGER))))
        cursor = EventCursor(db, None, MOST_EVENTS, security=False)
        lines, transcript, look_at, most = EventLines(wide=wide), None, 0.0, MOST_BEFORE
        while True:
            if time.monotonic() >= look_at:
                path, look_at = transcript_of(opened, name), time.monotonic() + LOOK_S
                if path and (transcript is None or transcript.path != path):
                    transcript = Transcript(path)
                elif not path and most:
                    notice = f"no session of {name} has a transcript; its messages are shown"
                    click.echo(f"relay: {notice}", err=True)
            found = [event for event in cursor.read() if is_of(event, name)]
            found = [event for event in found if event["event"] not in INTERMEDIATE]
            found += _steps(transcript, name)
            found.sort(key=lambda event: int(event["at_ns"]))
            for event in found[-most:]:
                event.pop("path", None)
                if as_json:
                    echo_json({"at": when(event.pop("at_ns")), **event})
                else:
                    lines.show(event)
            sys.stdout.flush()
            if not found and not follow:
                return
            most = 0  # all, from now on
            if not found:
                time.sleep(POLL_S)


def _steps(transcript: Transcript | None, name: str) -> list[dict[str, Any]]:
    """The new steps of a transcript, as events."""
    now = time.time_ns()
    return [
        {"at_ns": step.at or now, "event": step.what, "agent": name, "text": step.text}
        for step in (transcript.read() if transcript else ())
    ]
