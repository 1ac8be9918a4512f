"""``relay inbox``: the messages that wait in an inbox, listed or taken."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import iso_time, ttl_note
from relay.base.errors import EXIT_OK, EXIT_TIMEOUT, MessageError, UnsafePath
from relay.base.home import Home
from relay.base.message import MessageFile, parse_delivered
from relay.base.names import MSG_SUFFIX, options_of
from relay.cli.common import (
    DURATION,
    as_option,
    command,
    complete_agents,
    echo_quoted,
    echo_received,
    printing_taken,
    root_of,
    root_to_take_from,
    sanitize,
)
from relay.cli.listing import print_messages
from relay.cli.request import open_agent, require_mailbox
from relay.cli.show import attachment_line
from relay.cli.tables import limit_option, wide_option
from relay.reach.mailbox import undelivered_notes
from relay.views.message import size_of
from relay.views.messages import became_of

if TYPE_CHECKING:
    from agent_sdk import Received

Row = dict[str, Any]


def _waiting(home: Home, agent: str, sender: str | None, limit: int) -> tuple[list[Row], int]:
    """The first messages in an inbox as rows of `relay list`, by priority, then age; and how many
    there are. ``sender``: only those of this agent.

    Files among them that are not messages are reported on stderr.
    """
    from agent_sdk.inbox import MAX_FILE_BYTES, priority_in
    from relay.base import fsio

    rows: list[Row] = []
    left = 0
    with home.dirs() as dirs, contextlib.suppress(FileNotFoundError):
        folder = dirs.get("agents", agent, "inbox")
        names = sorted(name for name in os.listdir(folder) if name.endswith(MSG_SUFFIX))
        for name in sorted(names, key=lambda name: priority_in(name, folder)):
            is_left = len(rows) >= limit
            if is_left and sender is None:
                left += 1
                continue
            try:
                data, status = fsio.read_regular(name, folder, MAX_FILE_BYTES, shared=True)
                message = parse_delivered(data, file=name)
            except FileNotFoundError:
                continue  # it has just been read
            except (MessageError, UnsafePath) as exc:
                click.echo(f"relay: {exc}", err=True)
                continue
            if sender not in (None, message.headers.get("FROM")):
                continue
            if is_left:
                left += 1
            else:
                number = name.removesuffix(MSG_SUFFIX)
                rows.append(_row(number, agent, message, status.st_mtime_ns))
    known = became_of(home, agent, [row["id"] for row in rows])
    return [row | known.get(row["id"], {}) for row in rows], len(rows) + left


def _row(number: str, agent: str, message: MessageFile, at_ns: int) -> Row:
    """A row of `relay list` of what a file says, delivered at ``at_ns``."""
    headers = message.headers
    return {
        "at": iso_time(at_ns)[:19] + "Z",
        "id": number,
        **dict.fromkeys(("number", "type", "outcome", "reason", "code", "due_at")),
        "from": headers.get("FROM"),
        "to": agent,
        "recipients": [agent],
        "channel": headers.get("CHANNEL"),
        "kind": str(message.kind),
        "priority": message.priority,
        "topic": headers.get("TOPIC"),
        "thread": headers.get("THREAD"),
        "re": headers.get("RE"),
        "status": "delivered",
        "reminders": 0,
        "content": message.body.decode(errors="replace"),
    }


@command(
    epilog="""\b
Examples:
  relay inbox                 # list messages without reading them
  relay inbox --take          # print the first one and mark it as read
  relay inbox --take --all
  relay inbox --follow --as bob"""
)
@as_option
@click.option("--take", is_flag=True, help="Print the first message and mark it as read.")
@click.option("--all", "take_all", is_flag=True, help="With --take: every message.")
@click.option("--follow", is_flag=True, help="Take messages as they arrive, until ^C.")
@click.option(
    "--timeout",
    "timeout_s",
    type=DURATION,
    help="Longest wait, with --take or --follow.",
)
@click.option(
    "--from",
    "sender",
    metavar="NAME",
    shell_complete=complete_agents,
    help="List only messages of this agent.",
)
@limit_option
@wide_option
def inbox(
    ctx: click.Context,
    home: str | None,
    agent: str,
    take: bool,
    take_all: bool,
    follow: bool,
    timeout_s: float | None,
    sender: str | None,
    limit: int,
    wide: bool,
    as_json: bool,
) -> int:
    """Show or take the messages in an inbox, by priority, then age.

    A text that is taken has a bar before each line, --json has it as it was sent.
    `relay show ID` prints one of them without taking it, `relay unread` lists those of all agents.
    """
    if (take or follow) and sender:
        raise click.UsageError("--from cannot be used with --take or --follow", ctx)
    if take_all and not take:
        raise click.UsageError("--all needs --take", ctx)
    root = (root_to_take_from if take or follow else root_of)(ctx, home)
    if not (take or follow):
        _list(root, agent, sender, limit, wide, as_json)
        return EXIT_OK
    if not follow and not timeout_s:
        require_mailbox(root, agent)  # an agent waiting for its first message may be new
    with open_agent(agent, root) as me:
        if follow:
            for message in me.messages(timeout_s):
                _show(message, as_json, root, agent)
            return EXIT_OK
        taken = me.receive(timeout_s or 0)
        if taken is None:
            click.echo(f"relay: no messages for {agent}", err=True)
            return EXIT_TIMEOUT
        while taken is not None:
            _show(taken, as_json, root, agent)
            taken = me.receive(0) if take_all else None
    return EXIT_OK


def _list(root: str, agent: str, sender: str | None, limit: int, wide: bool, as_json: bool) -> None:
    """List the inbox by priority, then age, without changing it."""
    require_mailbox(root, agent)
    with Home(root) as home:
        rows, number = _waiting(home, agent, sender, limit)
    marked = undelivered_notes(root, agent, [row["id"] for row in rows])
    for row in rows:
        row["delivered"] = None if marked is None else row["id"] not in marked
        row["status"] = (marked or {}).get(row["id"], row["status"])
    print_messages(rows, as_json=as_json, wide=wide, nothing=f"no messages for {agent}")
    if number > limit:
        click.echo(f"{limit} of {number}; --limit {number} shows all", err=True)


def _show(message: Received, as_json: bool, root: str, agent: str) -> None:
    """Print a message that was taken."""
    marked = undelivered_notes(root, agent, [message.id])
    with printing_taken(message):
        if as_json:
            echo_received(message, delivered=None if marked is None else not marked)
            return
        headers = message.headers
        about = "".join(
            f"  {label} {value}"
            for label, value in (
                ("re", message.re),
                ("thread", message.thread),
                ("in", message.channel),
                ("topic", headers.get("TOPIC")),
                ("priority", headers.get("PRIORITY")),
                ("attempt", message.attempt if message.attempt > 1 else None),
            )
            if value
        )
        options = options_of(headers.get("OPTIONS"))
        about += f"  wants one of {', '.join(options)}" if options else ""
        marks = [ttl_note(message.sent_at, headers.get("TTL")), *(marked or {}).values()]
        about += "".join(f"  {mark}" for mark in marks if mark)
        click.echo(sanitize(f"-- {message.id}  {message.kind} from {message.sender}{about}"))
        with Home(root) as home:
            for attachment in message.attachments:
                click.echo(
                    f"   {attachment_line(attachment.name, attachment, size_of(home, attachment))}"
                )
        echo_quoted(message.body)
