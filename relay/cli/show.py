"""One message: ``relay show`` prints it, ``trace`` its steps, ``attachment`` gets its files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import click

from agent_sdk.attachments import Attachments
from relay.base import fsio
from relay.base.errors import MessageError, NotFound, Refused
from relay.base.home import Home, lock_holder
from relay.base.names import Attachment, attachments_of
from relay.base.text import format_size, plural
from relay.cli.common import (
    as_option,
    check_no_home_file,
    command,
    echo_json,
    echo_quoted,
    name_home,
    not_empty,
    open_home,
    root_of,
    sanitize,
    with_iso_times,
)
from relay.cli.tables import clock_of, colour, colour_by_word, day_of
from relay.views.ids import short_ids
from relay.views.message import StoredMessage, find_file, message_facts, read_message
from relay.views.times import local_iso
from relay.views.trace import (
    UNRECORDED_TEXT,
    describe_hop,
    describe_unrecorded,
    not_yet,
    trace_message,
)

MOST_RECIPIENTS = 20  # a line each; the text follows them

_ANSWER = re.compile(r"\(answer (\S+)\)")


def check_is_not_query(root: str, given: str) -> None:
    """Check that a message is not a query, which an ack does not answer. Errors: Refused."""
    with contextlib.suppress(NotFound, MessageError):
        message = read_message(root, given)
        if message.file.kind == "query":
            raise Refused(
                f"message {message.id} is a query, which `completed` does not answer: "
                f"`relay reply {message.id} TEXT` does"
            )


@command(epilog="\b\nExamples:\n  relay show 3f6777fc\n  relay show 3f6777fc --raw")
@click.argument("message_id", metavar="ID")
@click.option("--raw", is_flag=True, help="Print the file as its sender wrote it.")
def show(ctx: click.Context, home: str | None, message_id: str, raw: bool, as_json: bool) -> None:
    """Show a whole message: body, attachments, what became of it, and the answers.

    Reading it this way does not mark it as read. Texts have a bar before each line, --json has them
    as they were sent. `relay trace ID` shows every step with its time.
    """
    root = root_of(ctx, home)
    if raw:
        sys.stdout.buffer.write(find_file(root, message_id).data)
        return
    message = read_message(root, message_id)
    with Home(root) as opened:
        facts = message_facts(opened, message)
    if as_json:
        echo_json(facts)
    else:
        _echo(facts)


def attachment_line(name: str, reference: str, size: int | None) -> str:
    """Say what an attachment is called, its size, and its reference."""
    found = "missing" if size is None else format_size(size)
    return sanitize(f"attachment {name}, {found} ({reference})") or ""


def _echo(facts: dict[str, Any]) -> None:
    click.echo(colour(facts["id"], bold=True))
    at = f", {local_iso(facts['at'])}" if facts["at"] else ""
    _echo_line(f"{facts['kind']} from {facts['from']} to {facts['to']}{at}")
    for name, value in facts["headers"].items():
        _echo_line(f"{name.lower()} {value}")
    lines = [*facts["recipients"].values()] if len(facts["recipients"]) > 1 else [facts["outcome"]]
    if (left := len(lines) - MOST_RECIPIENTS) > 0:
        more = name_home(f"and {left:,} more: `relay trace {facts['id']}`")
        lines = [facts["outcome"], *lines[:MOST_RECIPIENTS], more]
    for text in lines:
        click.echo(colour_by_word(sanitize(text) or ""))
    for each in facts["attached"]:
        click.echo(attachment_line(each["name"], each["reference"], each["bytes"]))
    click.echo()
    echo_quoted(facts["body"])
    for answer in facts["answers"]:
        click.echo()
        _echo_line(f"{answer['from']} answered, {answer['id']}:")
        echo_quoted(answer["body"] or "(its file is gone)")
    for message in facts["about"]:
        click.echo()
        _echo_line(f"{message['from']} sent a {message['kind']} about it, {message['id']}:")
        echo_quoted(message["body"])


def _echo_line(text: str) -> None:
    click.echo(sanitize(text))


@click.group(epilog="\b\nExample:\n  relay attachment get 3f6777fc -o report.txt")
def attachment() -> None:
    """Get the files sent with messages; `relay send --attach FILE` sends them."""


@command(
    of=attachment,
    json=False,
    epilog="""\b
Examples:
  relay attachment get 3f6777fc                 # of the message with this id, to stdout
  relay attachment get 3f6777fc plan.txt -o plan.txt
  relay attachment get 3f6777fc -o .            # all, under their names
  relay attachment get sha256:4ac1… -o report.txt""",
)
@as_option
@click.argument("reference", metavar="ID|REFERENCE")
@click.argument("which", metavar="[NAME|NUMBER]", default="")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE|DIRECTORY",
    callback=not_empty,
    help="An existing FILE is replaced; in a DIRECTORY none is.",
)
def get(
    ctx: click.Context, home: str | None, agent: str, reference: str, which: str, output: str | None
) -> None:
    """Print an attachment, or write it to a file; its checksum is verified.

    By the id of its message, with its name or number if there are several, or by its reference.
    Into a directory all of them are written, or the one that is named.
    """
    root = root_of(ctx, home)
    folder = output if output and (output.endswith("/") or os.path.isdir(output)) else None
    if reference.startswith("sha256:"):
        if which or folder:
            raise click.UsageError("a name or a directory needs the id of a message", ctx)
        chosen: tuple[Attachment, ...] = (Attachment(reference),)
    else:
        chosen = _choose(read_message(root, reference), which, may_be_all=bool(folder))
    with Home(root) as opened:
        store = Attachments(opened, 0)
        if folder:
            for path in store.save(chosen, folder):
                _echo_line(path)
        else:
            _write(store.pieces(chosen[0]), output)


def _write(pieces: Iterator[bytes], output: str | None) -> None:
    if output in (None, "-"):
        sys.stdout.buffer.writelines(pieces)
        return
    target = check_no_home_file(output)
    if os.path.lexists(output) and (os.path.islink(output) or not os.path.isfile(output)):
        # a device, a pipe, or a link such as /dev/stdout: written to, and not replaced
        first = next(pieces, b"")  # once all are verified
        with open(output, "wb") as file:
            file.write(first)
            file.writelines(pieces)
    else:
        fsio.write_atomic(target, pieces)


def _choose(message: StoredMessage, which: str, *, may_be_all: bool) -> tuple[Attachment, ...]:
    """The attachment that is named, the only one, or all. Errors: NotFound."""
    found = attachments_of(message.file.headers, message.file.attachments)
    if not found:
        hint = "`relay list has:attachment` lists messages that have one"
        raise NotFound(f"message {message.id} has no attachment", hint=hint)
    if not which and (may_be_all or len(found) == 1):
        return found
    by_word = {str(number): each for number, each in enumerate(found, 1)}
    by_word |= {each.name: each for each in found}
    if which in by_word:
        return (by_word[which],)
    named = ", ".join(f"{number} {each.name}" for number, each in enumerate(found, 1))
    expected = f"expected the name or number of one, got {which!r}" if which else "which one?"
    raise NotFound(
        f"message {message.id} has {plural(len(found), 'attachment')}, {named}: {expected}",
        hint=f"`relay attachment get {message.id} 1` gets the first, `-o DIRECTORY/` writes all",
    )


@command(epilog="\b\nExamples:\n  relay trace a1b2c3d4\n  relay trace 1706123456789012345-a1b2c3d4")
@click.argument("message_id", metavar="ID")
def trace(ctx: click.Context, home: str | None, message_id: str, as_json: bool) -> None:
    """Show every step of a message with its time.

    ID may be the beginning of either part of an id, as long as only one message has it.
    For a message that no relay has seen yet, prints where its file is.
    """
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
        _echo_steps(facts)


def _echo_steps(facts: dict[str, Any]) -> None:
    known = [delivery["answer"] for delivery in facts["deliveries"] if delivery["answer"]]
    before = [hop["detail"] for hop in facts["hops"] if hop["what"] == "answered"]
    answers = short_ids([*known, *(_ANSWER.findall(text)[-1] for text in before)])

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
    for hop in facts["hops"]:
        if hop["at"] and day != day_of(hop["at"]):
            day = day_of(hop["at"])
            click.echo(f"  {day}")
        echo(clock_of(hop["at"]) if hop["at"] else "unknown", describe_hop(hop, facts))
    for text in not_yet(facts["deliveries"], facts.get("kind") in ("command", "query")):
        echo("not yet", text)
    if not facts["deliveries"] and facts["status"] in ("completed", "archived"):
        echo("-", "no recipients")
    if facts["error"] and facts["error"] not in facts["outcome"]:
        echo("waited" if facts["status"] in ("completed", "archived") else "why", facts["error"])
