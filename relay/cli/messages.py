"""``relay send``, ``inbox``, ``ack`` and ``nack``: the SDK on the command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import (
    as_option,
    echo_json,
    home_option,
    json_option,
    print_table,
    root_of,
    sanitize,
)
from relay.cli.request import open_agent, request, require_mailbox, require_relay

if TYPE_CHECKING:
    from agent_sdk import Received
import contextlib
import time
from collections.abc import Iterable

from relay.base.errors import LedgerError
from relay.base.home import LEDGER, Home

NOT_OURS = "not delivered by the relay"
UNKNOWN = "not in the ledger"  # e.g. the relay was killed before it recorded the delivery
PATIENCE_S = 1.0  # the delivery is recorded shortly after the rename


@click.command(
    epilog="""\b
Examples:
  relay send bob "the build is green"
  relay send '*' - < notes.txt
  relay send '#ci' --topic build.front.ok "done"
  relay send bob --kind command --thread t-1 "deploy to staging"
  relay send bob --kind query --await 30s "which branch?\"""",
)
@home_option
@as_option
@click.argument("to")
@click.argument("body")
@click.option("--kind", default="message", show_default=True)
@click.option("--thread", metavar="ID")
@click.option("--re", metavar="ID", help="The message this one answers.")
@click.option("--priority", type=click.IntRange(0, 4), help="0 critical to 4 background.")
@click.option("--topic", metavar="TOPIC")
@click.option("--ttl", "ttl_s", type=click.IntRange(1), metavar="SECONDS")
@click.option("--delivery", type=click.Choice(["at-most-once", "at-least-once", "exactly-once"]))
@click.option("--attach", "files", multiple=True, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--await",
    "awaited",
    metavar="DURATION",
    help="Wait this long for the answer (30s, 1m, 60000 = ms) and print it.",
)
@json_option
@click.pass_context
def send(
    ctx: click.Context,
    /,
    home: str | None,
    agent: str,
    to: str,
    body: str,
    files: tuple[str, ...],
    awaited: str | None,
    as_json: bool,
    **headers: Any,
) -> None:
    """Send a message.

    BODY is the text, or - for standard input. Prints the message id; `relay trace ID` shows its
    state. Without a running relay the message waits in the outbox.

    With --await, prints the body of the answer instead: a response or message that names this one
    in RE, or an ack `completed`. Other acks are shown on stderr. With several recipients (`*`, a
    channel) the first answer counts. A nack is an error, exit code 6; a timeout is exit code 4.
    Without a running relay nothing is sent, exit code 5.
    """
    timeout_s = duration_s(awaited, "--await") if awaited else 0.0
    root = root_of(ctx, home)
    if awaited:
        require_relay(root)
    content: str | bytes = sys.stdin.buffer.read() if body == "-" else body
    with open_agent(agent, root) as me:
        headers["attachments"] = [me.attach(path) for path in files]
        if awaited:
            answer = request(me, to, content, timeout_s, progress=_progress, **headers)
            _show_answer(answer, as_json)
            return
        sent = me.send(to, content, **headers)
    if as_json:
        echo_json({"id": sent, "from": agent, "to": to})
    else:
        click.echo(sent)


@click.command(
    epilog="""\b
Examples:
  relay inbox                 # list messages without reading them
  relay inbox --take          # print the first one and mark it as read
  relay inbox --follow --as bob""",
)
@home_option
@as_option
@click.option("--take", is_flag=True, help="Print the first message and mark it as read.")
@click.option("--follow", is_flag=True, help="Take messages as they arrive, until ^C.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(0, 10**9),
    help="Seconds to wait, with --take or --follow.",
)
@json_option
@click.pass_context
def inbox(
    ctx: click.Context,
    home: str | None,
    agent: str,
    take: bool,
    follow: bool,
    timeout_s: int | None,
    as_json: bool,
) -> int:
    """Show or take the messages in an inbox, by priority, then age."""
    from relay.base.errors import EXIT_OK, EXIT_TIMEOUT

    root = root_of(ctx, home)
    if not (take or follow):
        _list(root, agent, as_json)
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
        _show(taken, as_json, root, agent)
    return EXIT_OK


@click.command(epilog="\b\nExample:\n  relay ack 1706123456789012345-a1b2c3d4 completed 'shipped'")
@home_option
@as_option
@click.argument("message_id")
@click.argument(
    "status", default="received", type=click.Choice(["received", "in_progress", "completed"])
)
@click.argument("text", default="")
@json_option
@click.pass_context
def ack(
    ctx: click.Context,
    home: str | None,
    agent: str,
    message_id: str,
    status: str,
    text: str,
    as_json: bool,
) -> None:
    """Acknowledge a message."""
    from agent_sdk import Agent

    root = root_of(ctx, home)
    require_mailbox(root, agent)
    with Agent(agent, root, registers=False) as me:
        sent = me.ack(message_id, status, text)
    _print_id(sent, message_id, as_json)


@click.command(epilog="\b\nExample:\n  relay nack 1706123456789012345-a1b2c3d4 'no such branch'")
@home_option
@as_option
@click.argument("message_id")
@click.argument("error")
@json_option
@click.pass_context
def nack(
    ctx: click.Context, home: str | None, agent: str, message_id: str, error: str, as_json: bool
) -> None:
    """Report that a message could not be handled, and why."""
    from agent_sdk import Agent

    root = root_of(ctx, home)
    require_mailbox(root, agent)
    with Agent(agent, root, registers=False) as me:
        sent = me.nack(message_id, error)
    _print_id(sent, message_id, as_json)


def _print_id(sent: str, re: str, as_json: bool) -> None:
    if as_json:
        echo_json({"id": sent, "re": re})
    else:
        click.echo(sent)


def _list(root: str, agent: str, as_json: bool) -> None:
    """List the inbox by priority, then age, without changing it."""
    from relay.base import fsio
    from relay.base.errors import MessageError, UnsafePath
    from relay.base.home import Home
    from relay.base.message import DEFAULT_MAX_BODY_BYTES, parse_delivered

    require_mailbox(root, agent)
    found = []
    with Home(root) as home, home.dirs() as dirs:
        folder = dirs.get("agents", agent, "inbox")
        for name in sorted(os.listdir(folder)):
            if not name.endswith(".msg"):
                continue
            try:
                limit = DEFAULT_MAX_BODY_BYTES + (1 << 14)
                data, _ = fsio.read_regular(name, folder, limit, shared=True)
                message = parse_delivered(data, file=name)
            except (MessageError, UnsafePath) as exc:
                click.echo(f"relay: {exc}", err=True)
                continue
            first = message.body.decode().split("\n", 1)[0]
            row = (name[:-4], message.headers.get("FROM"), str(message.kind), first)
            found.append((message.priority, row))
    rows = [row for _, row in sorted(found, key=lambda one: one[0])]
    marked = undelivered_notes(root, agent, [row[0] for row in rows])
    if as_json:
        for row in rows:
            facts = dict(zip(("id", "from", "kind", "first_line"), row, strict=True))
            echo_json(facts | {"delivered": None if marked is None else row[0] not in marked})
    elif rows:
        shown = [(*r[:3], sanitize(r[3], 40), (marked or {}).get(r[0], "")) for r in rows]
        width = 5 if marked else 4
        print_table(("ID", "FROM", "KIND", "BODY", "NOTE")[:width], [r[:width] for r in shown])
    else:
        click.echo(f"no messages for {agent}")


def _show(message: Received, as_json: bool, root: str, agent: str) -> None:
    marked = undelivered_notes(root, agent, [message.id])
    if as_json:
        _echo_message(message, delivered=None if marked is None else not marked)
        return
    about = "".join(
        f"  {label} {value}"
        for label, value in (
            ("re", message.re),
            ("thread", message.thread),
            ("in", message.channel),
        )
        if value
    )
    about += "".join(f"  {mark}" for mark in (marked or {}).values())
    click.echo(sanitize(f"-- {message.id}  {message.kind} from {message.sender}{about}"))
    _echo_body(message)


def _show_answer(message: Received, as_json: bool) -> None:
    if as_json:
        _echo_message(message)
    else:
        _echo_body(message)


def _progress(message: Received) -> None:
    said = sanitize(" ".join(message.body.split())) or "received"
    click.echo(f"relay: {message.sender}: {said}", err=True)


def _echo_message(message: Received, **more: object) -> None:
    echo_json(
        {
            "id": message.id,
            "from": message.sender,
            "to": message.to,
            "kind": str(message.kind),
            "headers": message.headers,
            "body": message.body,
            **more,
        }
    )


def _echo_body(message: Received) -> None:
    is_person = sys.stdout.isatty()  # a pipe gets the text as sent, escape sequences included
    text = sanitize(message.body, lines=True) if is_person else message.body
    click.echo((text or "").rstrip("\n"), color=True)


def undelivered_notes(root: str, agent: str, message_ids: Iterable[str]) -> dict[str, str] | None:
    """Return a note for each inbox message without a delivery in the ledger, by id; None if the
    ledger cannot be read."""
    from relay.base.home import lock_holder

    with Home(root) as home:
        try:
            found = _undelivered(home, agent, set(message_ids))
            if not found:
                return {}
            if lock_holder(home) is None:
                return dict.fromkeys(found, UNKNOWN)
            end = time.monotonic() + PATIENCE_S
            while found and time.monotonic() < end:
                time.sleep(0.05)
                found = _undelivered(home, agent, found)
        except LedgerError:
            return None
    return dict.fromkeys(found, NOT_OURS)


def _undelivered(home: Home, agent: str, message_ids: set[str]) -> set[str]:
    from relay.ledger import open_readonly, undelivered

    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        return undelivered(db, agent, message_ids)


def duration_s(text: str, option: str) -> float:
    """Parse ``30s``, ``1m``, ``2h`` or ``60000`` (ms) as seconds. Errors: BadParameter."""
    from relay.base.message import parse_duration_ms

    try:
        return parse_duration_ms(text) / 1000
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint=option) from exc
