"""``relay history``, ``thread`` and ``search``: messages in the store.

They read the store file as of its last flush, at most 100 messages or 5 s ago; the relay may be
running or not.
"""

from __future__ import annotations

import contextlib
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.cli.common import home_option, json_option, open_home, print_rows, sanitize

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
limit_option = click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
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
    help="Channel; dm/alice/bob is the one between two agents.",
)
@click.option("--sender", metavar="NAME")
@click.option("--type", "types", multiple=True, type=click.Choice(TYPES))
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES))
@click.option("--topic", metavar="PATTERN")
@click.option("--priority", "priorities", multiple=True, type=click.IntRange(0, 4))
@click.option("--thread", "thread_id", metavar="THREAD", help="Thread, as in `relay thread`.")
@click.option("--match", metavar="REGEX", help="Regular expression to find in the content.")
@click.option(
    "--after",
    "--since",
    "after",
    metavar="TIME",
    help="Sent after this: 2026-11-20T18:30 (UTC by default), or 30s, 10m, 2h ago.",
)
@click.option("--before", metavar="TIME", help="Sent before this.")
@click.option("--sort", type=click.Choice(SORTS), default="created", show_default=True)
@click.option("--oldest-first", is_flag=True, help="Reverse the sort order (oldest first).")
@limit_option
@click.option("--offset", type=click.IntRange(0), default=0, help="Skip this many messages.")
@click.option("--no-archived", is_flag=True, help="Leave out archived messages.")
@json_option
@click.pass_context
def history(ctx: click.Context, /, home: str | None, as_json: bool, **options: Any) -> None:
    """Show the messages in the store, newest first.

    A message must match every given option; a repeated option matches any of its values. Archived
    messages are included. The column STATUS is the outcome shown by `relay trace`; --status
    filters by the store's own status.
    """
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    wanted = HistoryOptions(**options)
    result = store.messages.query(_filter(store, wanted), grouped=False)
    _show(opened, store, result.messages, as_json)
    if result.has_more and not as_json:
        shown = wanted.offset + len(result.messages)
        click.echo(f"{shown} of {result.total_count}; --offset {shown} shows more", err=True)


@click.command(epilog="\b\nExample:\n  relay thread release-42")
@home_option
@click.argument("thread_id", metavar="THREAD")
@json_option
@click.pass_context
def thread(ctx: click.Context, home: str | None, thread_id: str, as_json: bool) -> None:
    """Show the messages of one thread, oldest first.

    THREAD is the value of the header, or the id of the command or query that started the thread.
    """
    from relay.base.checksums import uuid4_of
    from relay.base.errors import NotFound

    with open_home(ctx, home) as opened:
        store = read_store(opened)
    messages = store.messages.thread(uuid4_of(thread_id))
    if not messages:
        raise NotFound(f"thread {thread_id} does not exist", hint="`relay history` lists messages")
    _show(opened, store, messages, as_json)


@click.command(epilog="\b\nExample:\n  relay search 'deploy(ed)? to (staging|production)'")
@home_option
@click.argument("pattern")
@limit_option
@json_option
@click.pass_context
def search(ctx: click.Context, home: str | None, pattern: str, limit: int, as_json: bool) -> None:
    """Find messages by a regular expression.

    Newest first; archived messages are included.
    """
    with open_home(ctx, home) as opened:
        store = read_store(opened)
    _show(opened, store, store.messages.search(pattern, limit), as_json)


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
    statuses: tuple[str, ...]
    topic: str | None
    priorities: tuple[int, ...]
    thread_id: str | None
    match: str | None
    after: str | None
    before: str | None
    sort: str
    oldest_first: bool
    limit: int
    offset: int
    no_archived: bool


def _filter(store: Engine, wanted: HistoryOptions) -> MessageFilter:
    """Build the engine's filter."""
    from relay.base.checksums import uuid4_of
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
        after=parse_time(wanted.after, "--after, --since") if wanted.after else None,
        before=parse_time(wanted.before, "--before") if wanted.before else None,
        status=tuple(s for s in MessageStatus if s.label in wanted.statuses) or None,
        priority=tuple(map(Priority, wanted.priorities)) or None,
        correlation_id=uuid4_of(wanted.thread_id) if wanted.thread_id else None,
        content_pattern=wanted.match,
        limit=wanted.limit,
        offset=wanted.offset,
        sort_by=SortField(SORTS.index(wanted.sort)),
        sort_order=SortOrder.ASCENDING if wanted.oldest_first else SortOrder.DESCENDING,
        include_archived=not wanted.no_archived,
    )


def _channel_id(store: Engine, name: str) -> int:
    from relay.base.errors import ChannelNotFound

    found = store.channels.get_by_name(name.removeprefix("#"))
    if found is None:
        raise ChannelNotFound(f"channel {name!a} does not exist", hint="`relay channel list --all`")
    return found.id


def parse_time(text: str, option: str) -> int:
    """Parse an ISO 8601 time, or a duration before now, as Unix seconds. Errors: BadParameter."""
    from relay.base.message import parse_duration_ms

    with contextlib.suppress(ValueError):
        return int(time.time() - parse_duration_ms(text) / 1000)
    try:
        at = datetime.fromisoformat(text)
        return max(0, int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError) as exc:
        raise click.BadParameter(
            f"invalid time {text!r}: expected 2026-11-20T18:30 or a duration such as 30s, 10m, 2h",
            param_hint=option,
        ) from exc


def _show(home: Home, store: Engine, messages: list[Message], as_json: bool) -> None:
    rows = [message_facts(store, message) for message in messages]
    outcomes = _outcomes(home, [row["id"] for row in rows if row["id"]])
    for row in rows:
        row["outcome"] = outcomes.get(row["id"])
    header = ("AT", "FROM", "CHANNEL", "TYPE", "STATUS", "CONTENT")
    print_rows(rows, header, _cells, as_json=as_json, nothing="nothing found")


def _outcomes(home: Home, ids: list[str]) -> dict[str, str]:
    """Return the outcomes of messages by the ledger: id -> a word or phrase."""
    from relay.base.errors import LedgerError
    from relay.base.home import LEDGER
    from relay.cli import outcomes
    from relay.ledger import open_readonly

    wanted = (json.dumps(ids),)
    which = "message_id IN (SELECT value FROM json_each(?))"
    try:
        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            rows = db.execute(f"SELECT * FROM messages WHERE {which}", wanted).fetchall()
            found = db.execute(f"SELECT * FROM deliveries WHERE {which}", wanted).fetchall()
    except LedgerError:  # the store can be read without it
        return {}
    deliveries: dict[str, list[outcomes.Fields]] = {}
    for one in found:
        deliveries.setdefault(one["message_id"], []).append(outcomes.delivery_fields(one))
    return {
        row["message_id"]: outcomes.summary(row, deliveries.get(row["message_id"], []))
        for row in rows
    }


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    first_line = row["content"].split("\n", 1)[0]
    return (
        *(row["at"], row["from"], row["channel"]),
        "Nack" if row["kind"] == "nack" else row["type"],
        row["outcome"] or row["status"],
        sanitize(first_line, 40),
    )


def message_facts(store: Engine, message: Message) -> dict[str, Any]:
    """Collect the facts of a message that the commands print."""
    from relay.base.clock import NS_PER_S, iso_time
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
    from relay.ledger import open_readonly

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
