"""``relay history`` and ``relay thread``: messages in the store.

They read the store file as of its last flush, at most 100 messages or 5 s ago; the relay may be
running or not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import NS_PER_S
from relay.base.message import Kind
from relay.base.names import DIRECT_PREFIX, EVERYONE, EVERYONE_CHANNEL
from relay.cli.common import (
    TIME,
    channel_not_found,
    check_agents,
    complete_agents,
    complete_channels,
    complete_threads,
    home_option,
    json_option,
    open_home,
    print_rows,
    sanitize,
)
from relay.cli.ids import resolve_id, short_ids
from relay.cli.tables import (
    colour,
    colour_by_word,
    limit_option,
    local_iso,
    wide_option,
)

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.engine import Engine, Message, MessageFilter

TYPES = (
    "Text",
    "Command",
    "Query",
    "Response",
    "Broadcast",
    "Notification",
    "Acknowledgment",
    "Error",
)
STATUSES = ("Created", "Sent", "Delivered", "Acknowledged", "Failed", "DeadLetter", "Archived")
SORTS = ("created", "priority", "sender", "type")  # in the order of the engine's SortField
HEADER = ("ID", "AT", "FROM", "TO", "KIND", "STATUS", "CONTENT")
INDENT = " " * 4
MOST_MESSAGES = 10**9
# A flush is due after 5 s; one that a large store or a slow disk holds up is not waited for.
FLUSH_TIMEOUT_S = 15.0
FLUSH_POLL_S = 0.05


@click.command(
    epilog="""\b
Examples:
  relay history --sender alice --limit 10
  relay history --type Command --status Delivered    # commands not acknowledged yet
  relay history --channel ci --topic 'build.#' --since 2h
  relay history --after 2026-11-20 --before 2026-11-20T18:30 --sort priority""",
)
@home_option
@click.option(
    "--channel",
    "channels",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_channels,
    help="Channel; dm/alice/bob is the one between two agents.",
)
@click.option("--sender", metavar="NAME", shell_complete=complete_agents)
@click.option("--type", "types", multiple=True, type=click.Choice(TYPES, case_sensitive=False))
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice([str(kind) for kind in Kind], case_sensitive=False),
    help="As in the file: several kinds have one type, e.g. ack and nack.",
)
@click.option(
    "--status", "statuses", multiple=True, type=click.Choice(STATUSES, case_sensitive=False)
)
@click.option("--topic", metavar="PATTERN")
@click.option("--priority", "priorities", multiple=True, type=click.IntRange(0, 4))
@click.option(
    "--thread",
    "thread_id",
    metavar="THREAD",
    shell_complete=complete_threads,
    help="Thread, as in `relay thread`.",
)
@click.option("--match", metavar="REGEX", help="Regular expression to find in the content.")
@click.option(
    "--after",
    "--since",
    "after",
    type=TIME,
    help="Sent after this: 10m ago, 14:05, '2026-11-20 18:30', yesterday.",
)
@click.option("--before", "--until", "before", type=TIME, help="Sent before this.")
@click.option("--sort", type=click.Choice(SORTS), default="created", show_default=True)
@click.option("--oldest-first", is_flag=True, help="Reverse the sort order (oldest first).")
@limit_option
@click.option("--offset", type=click.IntRange(0), default=0, help="Skip this many messages.")
@click.option("--no-archived", is_flag=True, help="Leave out archived messages.")
@wide_option
@json_option
@click.pass_context
def history(
    ctx: click.Context, /, home: str | None, wide: bool, as_json: bool, **options: Any
) -> None:
    """Show the messages in the store, newest first.

    A message must match every given option; a repeated option matches any of its values. Archived
    messages are included. The column STATUS is the outcome shown by `relay trace`; --status
    filters by the store's own status. Every command that takes an id takes the one shown here.
    --wide adds the thread and the message that each one answers (RE).
    """
    wanted = HistoryOptions(**options)
    with open_home(ctx, home) as opened:
        store = read_store(opened)
        result = store.messages.query(_filter(opened, store, wanted), grouped=False)
        if not result.total_count:
            check_agents(opened, wanted.sender)
    messages, total = result.messages, result.total_count
    if wanted.kinds:
        messages = [m for m in messages if message_facts(store, m)["kind"] in wanted.kinds]
        total = len(messages)
        messages = messages[wanted.offset : wanted.offset + wanted.limit]
    rows = rows_of(opened, store, messages)
    print_table(rows, as_json=as_json, wide=wide)
    shown = wanted.offset + len(messages)
    if shown < total and not as_json:
        click.echo(f"{shown} of {total}; --offset {shown} shows more", err=True)


@click.command(epilog="\b\nExamples:\n  relay thread release-42\n  relay thread --short release-42")
@home_option
@click.argument("thread_id", metavar="THREAD", shell_complete=complete_threads)
@click.option("--short", is_flag=True, help="A table with the first lines.")
@wide_option
@json_option
@click.pass_context
def thread(
    ctx: click.Context, home: str | None, thread_id: str, short: bool, wide: bool, as_json: bool
) -> None:
    """Show the messages of one thread, oldest first, with their bodies.

    THREAD is the value of the header, or the id of any message in the thread.
    """
    from relay.base.errors import NotFound

    with open_home(ctx, home) as opened:
        store = read_store(opened)
        messages = store.messages.thread(_thread(opened, store, thread_id))
    if not messages:
        raise NotFound(
            f"thread {thread_id} does not exist, and no message in a thread has this id",
            hint="`relay history --wide` lists messages with their threads",
        )
    rows = rows_of(opened, store, messages)
    if short or as_json:
        print_table(rows, as_json=as_json, wide=wide)
        return
    ids = short_ids_of(rows)
    for row in rows:
        echo_message(row, ids, [sanitize(line) or "" for line in row["content"].splitlines()])


def _thread(home: Home, store: Engine, given: str) -> str:
    """Return the id of the thread of this name, or of the one that the message of this id is in."""
    from relay.base.errors import InvalidName, NotFound
    from relay.base.names import uuid4_of

    named = uuid4_of(given)
    if not store.messages.thread(named):
        with contextlib.suppress(NotFound, InvalidName):
            whole = resolve_id(home, given)
            found = store.messages.find_by_relay_id(whole, include_archived=True)
            if found is not None and found.correlation_id is not None:
                return found.correlation_id
    return named


def echo_message(row: dict[str, Any], short: dict[str, str], lines: Iterable[str]) -> None:
    """Print a line about a message, then lines of its content, indented, and an empty line."""
    shown = colour(short.get(row["id"], str(row["number"])), bold=True)
    kind = f"{row['kind']} re {short.get(row['re'], row['re'])}" if row["re"] else row["kind"]
    about = sanitize(f"{local_iso(row['at'])}  {row['from']} -> {_target(row)}  {kind}")
    click.echo(f"{shown}  {about}  {colour_by_word(row['outcome'] or row['status'])}")
    for line in lines:
        click.echo(f"{INDENT}{line}".rstrip())
    click.echo()


def read_store(home: Home) -> Engine:
    """Open the store read-only from its file.

    Errors: FormatError for a damaged file; KeyFileError, SealedStore for an encrypted one.
    """
    from relay.base.clock import Clock
    from relay.base.config import load
    from relay.daemon.opening import open_store_readonly, store_key

    config = load(home)
    return open_store_readonly(home, Clock(), config, store_key(home, config, make=False))


class HistoryOptions(NamedTuple):
    """Options of ``relay history``, as click passes them."""

    channels: tuple[str, ...]
    sender: str | None
    types: tuple[str, ...]
    kinds: tuple[str, ...]
    statuses: tuple[str, ...]
    topic: str | None
    priorities: tuple[int, ...]
    thread_id: str | None
    match: str | None
    after: int | None
    before: int | None
    sort: str
    oldest_first: bool
    limit: int
    offset: int
    no_archived: bool


def _filter(home: Home, store: Engine, wanted: HistoryOptions) -> MessageFilter:
    """Build the engine's filter."""
    from relay.engine import (
        MessageFilter,
        MessageStatus,
        MessageType,
        Priority,
        SortField,
        SortOrder,
    )

    return MessageFilter(
        channel_ids=tuple(_channel_id(store, name) for name in wanted.channels) or None,
        sender=wanted.sender,
        message_types=tuple(t for t in MessageType if t.label in wanted.types) or None,
        topic_pattern=wanted.topic,
        after=None if wanted.after is None else wanted.after // NS_PER_S,
        before=None if wanted.before is None else wanted.before // NS_PER_S,
        status=tuple(s for s in MessageStatus if s.label in wanted.statuses) or None,
        priority=tuple(map(Priority, wanted.priorities)) or None,
        correlation_id=_thread(home, store, wanted.thread_id) if wanted.thread_id else None,
        content_pattern=wanted.match,
        limit=MOST_MESSAGES if wanted.kinds else wanted.limit,  # the engine knows no kinds
        offset=0 if wanted.kinds else wanted.offset,
        sort_by=SortField(SORTS.index(wanted.sort)),
        sort_order=SortOrder.ASCENDING if wanted.oldest_first else SortOrder.DESCENDING,
        include_archived=not wanted.no_archived,
    )


def _channel_id(store: Engine, name: str) -> int:
    found = store.channels.get_by_name(name.removeprefix("#"))
    if found is None:
        raise channel_not_found(name, [one.name for one in store.channels.list_all()])
    return found.id


def rows_of(home: Home, store: Engine, messages: list[Message]) -> list[dict[str, Any]]:
    """Collect the facts of messages, with their outcomes by the ledger."""
    rows = [message_facts(store, message) for message in messages]
    outcomes = outcomes_of(home, [row["id"] for row in rows if row["id"]])
    for row in rows:
        row["outcome"] = outcomes.get(row["id"])
    return rows


def outcomes_of(home: Home, ids: list[str]) -> dict[str, str]:
    """Return the outcomes of messages by the ledger: id -> a word or phrase."""
    from relay.base import outcomes
    from relay.base.errors import LedgerError
    from relay.base.home import LEDGER
    from relay.ledger.file import open_readonly

    wanted = (json.dumps(ids),)
    which = "message_id IN (SELECT value FROM json_each(?))"
    try:
        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            rows = db.execute(f"SELECT * FROM messages WHERE {which}", wanted).fetchall()
            found = outcomes.read_deliveries(db, which, *wanted)
    except LedgerError:  # the store can be read without it
        return {}
    deliveries: dict[str, list[outcomes.Fields]] = {}
    for one in found:
        deliveries.setdefault(one["message_id"], []).append(one)
    return {
        row["message_id"]: outcomes.summary(row, deliveries.get(row["message_id"], []))
        for row in rows
    }


def short_ids_of(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Shorten the ids of messages and of those that they answer."""
    return short_ids(one for row in rows for one in (row["id"], row["re"]) if one)


def print_table(rows: list[dict[str, Any]], *, as_json: bool, wide: bool) -> None:
    """Print messages as a table; ``wide`` adds the thread and what each one answers."""
    from relay.base.names import uuid4_of

    short = short_ids_of(rows)
    threads = {uuid4_of(whole): digits for whole, digits in short.items()}
    named = {row["thread"] for row in rows if row["thread"]}
    threads |= {uuid4_of(name): name for name in named if uuid4_of(name) != name}

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        thread = threads.get(uuid4_of(row["thread"]), row["thread"]) if row["thread"] else None
        more = (thread, short.get(row["re"])) if wide else ()
        first, *others = row["content"].split("\n", 1)
        return (
            *(short.get(row["id"], row["number"]), local_iso(row["at"])),
            *(row["from"], _target(row), row["kind"], *more, row["outcome"] or row["status"]),
            f"{first} …" if any(map(str.strip, others)) else first,
        )

    header = (*HEADER[:5], "THREAD", "RE", *HEADER[5:]) if wide else HEADER
    print_rows(rows, header, cells, as_json=as_json, nothing="nothing found", wide=wide)


def _target(row: dict[str, Any]) -> str:
    """Return the recipient of a direct message, ``*`` or a channel's name with ``#``."""
    if row["channel"] == EVERYONE_CHANNEL:
        return EVERYONE
    if row["channel"].startswith(DIRECT_PREFIX):
        return ", ".join(row["recipients"])
    return f"#{row['channel']}"


def message_facts(store: Engine, message: Message) -> dict[str, Any]:
    """Collect the facts of a message that the commands print."""
    from relay.base.clock import iso_time
    from relay.delivery.router import KIND_OF

    metadata = message.metadata or {}
    at_ns = metadata.get("created_ns")
    at_ns = at_ns if isinstance(at_ns, int) else message.created_at * NS_PER_S
    return {
        "at": iso_time(at_ns)[:19] + "Z",
        "id": metadata.get("relay_id"),
        "number": message.id,
        "from": message.sender,
        "recipients": list(store.messages.recipients(message.id)),
        "channel": store.channels.get(message.channel_id).name,
        "type": message.message_type.label,
        "kind": str(metadata.get("kind", KIND_OF[message.message_type])),
        "status": message.status.label,
        "priority": int(message.priority),
        "topic": message.topic,
        "thread": metadata.get("thread") or message.correlation_id,
        "re": metadata.get("re"),
        "content": message.content.decode(errors="replace"),
    }


def wait_for_flush(home: Home) -> None:
    """Wait until the store's file contains the effect of earlier commands.

    A change of a channel is thus visible to the next command. After 15 s a line on stderr says
    that the file is not up to date.
    """
    from relay.base.home import LEDGER, lock_holder
    from relay.base.names import ORCHESTRATOR
    from relay.ledger.file import open_readonly

    db = open_readonly(home.path(LEDGER))
    newest = db.execute("SELECT max(id) FROM messages").fetchone()[0]
    waits = (
        "SELECT 1 FROM messages WHERE status IN ('pending', 'processing', 'completed') "
        "AND status = 'processing' AND target = ? AND id <= ? LIMIT 1"
    )
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while lock_holder(home) is not None and db.execute(waits, (ORCHESTRATOR, newest)).fetchone():
        if time.monotonic() > deadline:
            click.echo("relay: the store file does not have the latest changes yet", err=True)
            break
        time.sleep(FLUSH_POLL_S)
    db.close()
