"""``relay inbox`` and ``relay unread``: the messages that wait in inboxes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import elapsed, iso_time, ttl_note
from relay.base.errors import EXIT_OK, EXIT_TIMEOUT, MessageError, UnsafePath
from relay.base.home import Home
from relay.base.message import DEFAULT_MAX_BODY_BYTES, MessageFile, parse_delivered
from relay.base.names import MSG_SUFFIX, options_of
from relay.cli.common import (
    DURATION,
    as_option,
    command,
    complete_agents,
    echo_body,
    echo_received,
    print_rows,
    printing_taken,
    root_of,
    root_to_take_from,
    sanitize,
)
from relay.cli.request import open_agent, require_mailbox
from relay.cli.show import attachment_line
from relay.cli.tables import limit_option, wide_option
from relay.reach.strays import undelivered_notes
from relay.views.ids import short_ids
from relay.views.message import size_of

if TYPE_CHECKING:
    from agent_sdk import Received


class Waiting(NamedTuple):
    """A message in an inbox."""

    id: str
    agent: str
    since_ns: int  # when the relay wrote it there
    message: MessageFile

    def facts(self) -> dict[str, Any]:
        """Collect the facts that the commands print."""
        return {
            "id": self.id,
            "agent": self.agent,
            "from": self.message.headers.get("FROM"),
            "kind": str(self.message.kind),
            "delivered_at": iso_time(self.since_ns),
            "first_line": self.message.body.decode().split("\n", 1)[0],
        }


def waiting(home: Home, agent: str) -> Iterator[Waiting]:
    """Yield the messages in an inbox; files that are not messages are reported on stderr."""
    from relay.base import fsio

    limit = DEFAULT_MAX_BODY_BYTES + (1 << 14)
    with home.dirs() as dirs:
        try:
            folder = dirs.get("agents", agent, "inbox")
        except FileNotFoundError:
            return
        for name in sorted(os.listdir(folder)):
            if not name.endswith(MSG_SUFFIX):
                continue
            try:
                data, status = fsio.read_regular(name, folder, limit, shared=True)
                message = parse_delivered(data, file=name)
            except FileNotFoundError:
                continue  # it has just been read
            except (MessageError, UnsafePath) as exc:
                click.echo(f"relay: {exc}", err=True)
                continue
            yield Waiting(name.removesuffix(MSG_SUFFIX), agent, status.st_mtime_ns, message)


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
        found = sorted(waiting(home, agent), key=lambda one: one.message.priority)
    rows = [one.facts() for one in found if sender in (None, one.message.headers.get("FROM"))]
    total, rows = len(rows), rows[:limit]
    marked = undelivered_notes(root, agent, [row["id"] for row in rows])
    short, now_ns = short_ids(row["id"] for row in rows), time.time_ns()
    ages = {one.id: elapsed(now_ns - one.since_ns) for one in found}
    for row in rows:
        row["delivered"] = None if marked is None else row["id"] not in marked
    header = ("ID", "FROM", "KIND", "AGE", *(["NOTE"] if marked else []), "CONTENT")
    print_rows(
        rows,
        header,
        lambda row: (
            *(short[row["id"]], row["from"], row["kind"], ages[row["id"]]),
            *([marked.get(row["id"])] if marked else []),
            row["first_line"],
        ),
        as_json=as_json,
        nothing=f"no messages for {agent}",
        wide=wide,
    )
    if total > limit and not as_json:
        click.echo(f"{limit} of {total}; --limit {total} shows all", err=True)


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
            for one in message.attachments:
                click.echo(f"   {attachment_line(one.name, one, size_of(home, one))}")
        echo_body(message.body)
