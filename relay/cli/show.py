"""``relay show`` and ``relay attachment``: one message whole, and the files sent with messages."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base import outcomes
from relay.base.errors import LedgerError, MessageError, NotFound, Refused, RelayError
from relay.base.home import LEDGER, READ, Home
from relay.base.message import ANSWERS, MessageFile, parse, parse_delivered
from relay.base.names import (
    ATTACHMENT_NAMES,
    MSG_SUFFIX,
    ORCHESTRATOR,
    Attachment,
    attachments_of,
)
from relay.base.text import format_size, plural
from relay.cli.common import (
    as_option,
    command,
    echo_json,
    root_of,
    sanitize,
    when,
)
from relay.cli.ids import PLACES, messages_in, read_file, resolve_id
from relay.cli.request import open_agent
from relay.cli.tables import colour, colour_by_word, local_iso

if TYPE_CHECKING:
    from relay.search.index import Entry

# What a message sent again gets anew, or from arguments of its own.
OWN_HEADERS = ("CHECKSUM", "SIGNATURE", "ID", "FROM", "SENT", "ATTEMPT", "CHANNEL", "ATTACHMENT")
UNSHOWN_HEADERS = (*OWN_HEADERS, ATTACHMENT_NAMES)


class StoredFile(NamedTuple):
    """The file of a message: the original, or a copy in an inbox."""

    id: str
    sender: str  # empty for a copy, whose header names it
    path: str  # below the home
    data: bytes

    @property
    def place(self) -> str:
        """``inbox`` or ``outbox``; empty for an original in the archive."""
        folder = self.path.split("/")
        return folder[2] if folder[0] == "agents" else ""


class StoredMessage(NamedTuple):
    """A message and where it was found."""

    id: str
    sender: str
    file: MessageFile
    path: str
    place: str


def find_file(root: str, given: str) -> StoredFile:
    """Find the file of a message by its id or the beginning of it. Errors: NotFound."""
    with Home(root) as home:
        message_id = resolve_id(home, given, must_exist=True)
        for sender, path in _places(home, message_id):
            data = read_file(home, path)
            if data is not None:
                return StoredFile(message_id, sender, path, data)
    raise NotFound(
        f"the file of message {message_id} is gone",
        hint=f"`relay trace {message_id}` shows what became of it",
    )


def read_message(root: str, given: str) -> StoredMessage:
    """Read a message by its id or the beginning of it, wherever its file is.

    Errors: NotFound; MessageError for a file that is not a message.
    """
    found = find_file(root, given)
    try:
        parse_file = parse_delivered if found.place == "inbox" else parse
        message = parse_file(found.data, file=found.path)
    except MessageError as exc:
        exc.hint = f"`relay show --raw {found.id}` prints the file"
        raise
    sender = found.sender or message.headers.get("FROM", "")
    return StoredMessage(found.id, sender, message, found.path, found.place)


def check_is_not_query(root: str, given: str) -> None:
    """Check that a message is not a query, which an ack does not answer. Errors: Refused."""
    with contextlib.suppress(NotFound, MessageError):
        message = read_message(root, given)
        if message.file.kind == "query":
            raise Refused(
                f"message {message.id} is a query, which `completed` does not answer: "
                f"`relay reply {message.id} TEXT` does"
            )


def _places(home: Home, message_id: str) -> Iterator[tuple[str, str]]:
    """Yield where a message's file may be: (sender or empty, path below the home)."""
    for row in _ledger_rows(home, "SELECT * FROM messages WHERE message_id = ?", message_id):
        yield row["agent_name"], row["file_path"]
    for row in _ledger_rows(home, "SELECT * FROM deliveries WHERE message_id = ?", message_id):
        for folder in ("inbox", f"inbox/{READ}"):
            yield "", f"agents/{row['recipient']}/{folder}/{message_id}{MSG_SUFFIX}"
    for place in PLACES:
        for agent, found in messages_in(home, place):
            if found == message_id:
                sender = "" if place == "inbox" else agent
                yield sender, f"agents/{agent}/{place}/{message_id}{MSG_SUFFIX}"


def _ledger_rows(home: Home, query: str, message_id: str) -> list[Any]:
    from relay.ledger.file import open_readonly

    try:
        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            return db.execute(query, (message_id,)).fetchall()
    except LedgerError:
        return []


def _deliveries(home: Home, message_id: str) -> list[outcomes.Fields]:
    from relay.ledger.file import open_readonly

    try:
        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            return outcomes.read_deliveries(db, "message_id = ?", message_id)
    except LedgerError:
        return []


@command(epilog="\b\nExamples:\n  relay show 3f6777fc\n  relay show 3f6777fc --raw")
@click.argument("message_id", metavar="ID")
@click.option("--raw", is_flag=True, help="Print the file as its sender wrote it.")
def show(ctx: click.Context, home: str | None, message_id: str, raw: bool, as_json: bool) -> None:
    """Show a whole message: body, attachments, what became of it, and the answers.

    Reading it this way does not mark it as read. `relay trace ID` shows every step with its time.
    """
    root = root_of(ctx, home)
    if raw:
        sys.stdout.buffer.write(find_file(root, message_id).data)
        return
    one = read_message(root, message_id)
    with Home(root) as opened:
        facts = _facts(opened, one)
    if as_json:
        echo_json(facts)
    else:
        _echo(facts)


def _facts(home: Home, one: StoredMessage) -> dict[str, Any]:
    rows = _ledger_rows(home, "SELECT * FROM messages WHERE message_id = ?", one.id)
    deliveries = _deliveries(home, one.id)
    answers = {each["answer_id"]: each["recipient"] for each in deliveries if each["answer_id"]}
    now_ns, row = time.time_ns(), rows[0] if rows else None
    attached = attachments_of(one.file.headers, one.file.attachments)
    sizes = {each: size_of(home, each) for each in attached}
    kind = str(one.file.kind)
    return {
        "id": one.id,
        "from": one.sender,
        "to": one.file.to,
        "kind": kind,
        "at": when(row["discovered_at"]) if row else None,
        "outcome": outcomes.headline(row, deliveries, now_ns) if row else _unknown(one),
        "recipients": {
            each["recipient"]: outcomes.describe(each, kind, now_ns) for each in deliveries
        },
        "headers": {k: v for k, v in one.file.headers.items() if k not in UNSHOWN_HEADERS},
        "attachments": sizes,
        "attached": [
            {"name": each.name, "reference": each, "bytes": sizes[each]} for each in attached
        ],
        "body": one.file.body.decode(errors="replace"),
        "answers": [_answer(home, *each) for each in answers.items()],
        "about": [_about(each) for each in _messages_about(home, one.id)],
        "path": one.path,
    }


def _messages_about(home: Home, message_id: str) -> list[Entry]:
    """Messages of agents that name this one in RE, acks left out; empty if they are not known."""
    from relay.cli.lookup import messages_about

    with contextlib.suppress(RelayError, OSError):
        found = messages_about(home, message_id)
        return [e for e in found if e.kind not in ANSWERS and e.sender != ORCHESTRATOR]
    return []


def _about(entry: Entry) -> dict[str, Any]:
    return {"id": entry.relay_id, "from": entry.sender, "kind": entry.kind, "body": entry.body}


def _unknown(one: StoredMessage) -> str:
    return "not in the ledger" if one.place == "inbox" else "not seen by a relay yet"


def _answer(home: Home, answer_id: str, sender: str) -> dict[str, Any]:
    """The facts of the last answer of a recipient; without a body if its file is gone."""
    body = None
    with contextlib.suppress(RelayError):
        body = read_message(home.root, answer_id).file.body.decode(errors="replace")
    return {"id": answer_id, "from": sender, "body": body}


def size_of(home: Home, one: Attachment) -> int | None:
    """Return the bytes of an attachment; None if it is not there."""
    with contextlib.suppress(OSError):
        return os.stat(home.path(one.path)).st_size if one.path else None
    return None


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
    said = facts["recipients"].values() if len(facts["recipients"]) > 1 else [facts["outcome"]]
    for text in said:
        click.echo(colour_by_word(sanitize(text) or ""))
    for each in facts["attached"]:
        click.echo(attachment_line(each["name"], each["reference"], each["bytes"]))
    click.echo()
    _echo_text(facts["body"])
    for answer in facts["answers"]:
        click.echo()
        _echo_line(f"{answer['from']} answered, {answer['id']}:")
        _echo_text(answer["body"] or "(its file is gone)")
    for one in facts["about"]:
        click.echo()
        _echo_line(f"{one['from']} sent a {one['kind']} about it, {one['id']}:")
        _echo_text(one["body"])


def _echo_line(text: str) -> None:
    click.echo(sanitize(text))


def _echo_text(text: str) -> None:
    shown = sanitize(text, lines=True) if sys.stdout.isatty() else text  # a pipe gets it as sent
    click.echo((shown or "").rstrip("\n"), color=True)


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
    with open_agent(agent, root) as me:
        if folder:
            for path in me.save_attachments(chosen, folder):
                _echo_line(path)
            return
        data = me.open_attachment(chosen[0])
    if output in (None, "-"):
        sys.stdout.buffer.write(data)
    else:
        with open(output, "wb") as file:
            file.write(data)


def _choose(one: StoredMessage, which: str, *, may_be_all: bool) -> tuple[Attachment, ...]:
    """The attachment that is named, the only one, or all. Errors: NotFound."""
    found = attachments_of(one.file.headers, one.file.attachments)
    if not found:
        raise NotFound(f"message {one.id} has no attachment")
    if not which and (may_be_all or len(found) == 1):
        return found
    by_word = {str(number): each for number, each in enumerate(found, 1)}
    by_word |= {each.name: each for each in found}
    if which in by_word:
        return (by_word[which],)
    named = ", ".join(f"{number} {each.name}" for number, each in enumerate(found, 1))
    expected = f"expected the name or number of one, got {which!r}" if which else "which one?"
    raise NotFound(
        f"message {one.id} has {plural(len(found), 'attachment')}, {named}: {expected}",
        hint=f"`relay attachment get {one.id} 1` gets the first, `-o DIRECTORY/` writes all",
    )
