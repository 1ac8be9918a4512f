"""``relay list`` and its saved queries: which messages are so, by the search index and the ledger.

A saved query is a name for a query: it has the same columns, the same JSON rows, and no other
source. What the relay refused is in the ledger alone and is listed beside what it accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from relay.base.clock import NS_PER_S
from relay.base.errors import NotFound
from relay.base.home import lock_holder
from relay.base.message import Kind
from relay.base.names import MSG_SUFFIX
from relay.cli.common import (
    TIME,
    command,
    complete_agents,
    complete_threads,
    echo_json,
    name_home,
    open_home,
    plural,
    sanitize,
)
from relay.cli.tables import (
    colour,
    colour_by_word,
    cut,
    highlight,
    limit_option,
    print_table,
    screen_columns,
    wide_option,
)
from relay.views.ids import short_ids
from relay.views.messages import find_rows
from relay.views.times import local_iso
from relay.views.trace import count_waiting

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.search.query import Query

HEADER = ("ID", "AT", "FROM", "TO", "KIND", "STATUS", "CONTENT")
FLEXIBLE = ("STATUS", "CONTENT")  # columns that are cut to the terminal
MOST_STATUS = 60  # columns; --wide, --json and `relay trace` have all of a long reason
MOST_CONTENT = 1_000  # characters of a line, also without a terminal; --wide and --json have all
LEAST = 5  # columns of a status that is cut
NOTHING = "nothing found"
MOST_LINES = 5  # that match, of one message
INDENT = " " * 4
MOST = 10**9

agent_option = click.option(
    "--agent", metavar="NAME", shell_complete=complete_agents, help="Only this agent."
)


@command(
    "list",
    epilog="""\b
Examples:
  relay list is:open                       who owes an answer, since when
  relay list from:alice kind:command after:2h
  relay list deploy "disk full" is:unread
  relay list is:failed since:1d with:bob

\b
Keys; one that is repeated matches any of its values:
  from: to: with:                 sender, recipient, one of both
  is:unread  is:held              in the inbox, not read; not in it yet
  is:open  is:overdue             the recipient owes an answer; it is overdue
  is:late  is:removed             answered after a reminder; gone from the inbox unread
  is:failed                       a nack, no answer at all, or one of the next four
  is:refused is:dead is:expired is:bounced
  kind: thread: re: channel: topic: priority: has:attachment
  after: before:                  when it was sent: 2h ago, 14:05, 2026-11-20, yesterday
  since:                          when something last happened to it
  sort:                           newest, oldest, priority, sender, kind""",
)
@click.argument("query", nargs=-1)
@limit_option
@wide_option
def list_(
    ctx: click.Context,
    home: str | None,
    query: tuple[str, ...],
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    """List messages by words, phrases, and keys such as from:alice.

    Every word and every "phrase" of QUERY must be in the text as it is written; different keys must
    all match. With is:, there is a row for each recipient for whom it is so. --wide adds the thread
    and the message that each one answers (RE).
    """
    list_messages(ctx, home, _parsed(query), limit=limit, wide=wide, as_json=as_json)


@command(
    epilog="""\b
Examples:
  relay search deploy failed from:alice after:2h
  relay search '"disk full" is:unread'
  relay search --regex 'deploy(ed)? to (staging|production)'"""
)
@click.argument("query", nargs=-1)
@click.option("--regex", is_flag=True, help="QUERY is one regular expression (RE2).")
@limit_option
@wide_option
def search(
    ctx: click.Context,
    home: str | None,
    query: tuple[str, ...],
    regex: bool,
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    """Find messages as `relay list` does, and show the lines that match."""
    from relay.search.query import Query

    parsed = Query(regex=" ".join(query)) if regex else _parsed(query)
    with open_home(ctx, home) as opened:
        rows, has_more = _found(opened, parsed, limit)
    if as_json or not rows:
        print_messages(rows, as_json=as_json, wide=wide, nothing=NOTHING)
        if not rows and parsed.like_keys:
            _say_not_a_key(parsed)
    else:
        ids, columns = _short_ids(rows), screen_columns(wide=wide)
        for row in rows:
            most = None if wide else (columns or MOST_CONTENT + len(INDENT)) - len(INDENT)
            _echo_message(row, ids, _matching_lines(parsed, row["content"], most), columns)
    if has_more:
        _say_more(limit)


@command(epilog="\b\nExamples:\n  relay thread release-42\n  relay thread --short release-42")
@click.argument("thread_id", metavar="THREAD", shell_complete=complete_threads)
@click.option("--short", is_flag=True, help="A table with the first lines.")
@wide_option
def thread(
    ctx: click.Context, home: str | None, thread_id: str, short: bool, wide: bool, as_json: bool
) -> None:
    """Show the messages of one thread, oldest first, with their bodies.

    THREAD is the value of the header, or the id of any message in the thread.
    """
    from relay.base.names import uuid4_of
    from relay.search.query import Query

    query = Query(threads=(uuid4_of(thread_id),), named_threads=(thread_id,), sort="oldest")
    with open_home(ctx, home) as opened:
        rows, _ = _found(opened, query, MOST)
    if not rows:
        raise NotFound(
            f"thread {thread_id} does not exist, and no message in a thread has this id",
            hint="`relay list --wide` lists messages with their threads",
        )
    if short or as_json:
        print_messages(rows, as_json=as_json, wide=wide)
        return
    ids = _short_ids(rows)
    for row in rows:
        _echo_message(row, ids, [sanitize(line) or "" for line in row["content"].splitlines()])


@command(epilog="\b\nExamples:\n  relay unread\n  relay unread --agent bob")
@agent_option
@limit_option
@wide_option
def unread(
    ctx: click.Context, home: str | None, agent: str | None, limit: int, wide: bool, as_json: bool
) -> None:
    """List messages that nobody has read, oldest first: `relay list is:unread sort:oldest`.

    `relay inbox` takes one agent's messages.
    """
    from relay.search.query import Query

    query = Query(states=("unread",), recipients=() if agent is None else (agent,), sort="oldest")
    list_messages(ctx, home, query, "nothing is unread", limit=limit, wide=wide, as_json=as_json)


@command("open", epilog="\b\nExamples:\n  relay open\n  relay open --overdue --agent bob")
@click.option(
    "--agent", metavar="NAME", shell_complete=complete_agents, help="Only what this agent owes."
)
@click.option(
    "--from",
    "sender",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only what this agent waits for.",
)
@click.option("--overdue", is_flag=True, help="Only what is overdue.")
@wide_option
def open_(
    ctx: click.Context,
    home: str | None,
    agent: str | None,
    sender: str | None,
    overdue: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """List who owes an answer, oldest first: `relay list is:open sort:oldest`.

    A command or query is listed until it is completed, failed or given up.
    """
    from relay.search.query import Query

    query = Query(
        states=("overdue" if overdue else "open",),
        recipients=() if agent is None else (agent,),
        senders=() if sender is None else (sender,),
        sort="oldest",
    )
    nothing = "nothing is overdue" if overdue else "no open answers"
    list_messages(ctx, home, query, nothing, limit=MOST, wide=wide, as_json=as_json)


@command(epilog="\b\nExamples:\n  relay failed --since 1d\n  relay failed --agent bob")
@click.option(
    "--agent",
    metavar="NAME",
    shell_complete=complete_agents,
    help="Only messages from or to this agent.",
)
@click.option("--since", type=TIME, help="It failed after this: 10m ago, 14:05, yesterday.")
@limit_option
@wide_option
def failed(
    ctx: click.Context,
    home: str | None,
    agent: str | None,
    since: int | None,
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    """List messages that failed, newest first, and why: `relay list is:failed`.

    refused: by the relay; failed: the recipient sent a nack; dead: no acknowledgment after the last
    attempt; unanswered: the relay no longer waits for the answer.
    """
    from relay.search.query import Query

    query = Query(
        states=("failed",),
        parties=() if agent is None else (agent,),
        since=None if since is None else since // NS_PER_S,
    )
    list_messages(ctx, home, query, "nothing failed", limit=limit, wide=wide, as_json=as_json)


def _parsed(words: tuple[str, ...]) -> Query:
    from relay.search.query import parse

    return parse(" ".join(words), tuple(map(str, Kind)))


def list_messages(
    ctx: click.Context,
    home: str | None,
    query: Query,
    nothing: str = NOTHING,
    *,
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    with open_home(ctx, home) as opened:
        rows, has_more = _found(opened, query, limit)
    print_messages(rows, as_json=as_json, wide=wide, nothing=nothing)
    if not rows and query.like_keys:
        _say_not_a_key(query)
    if has_more:
        _say_more(limit)


def _found(home: Home, query: Query, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The rows, and whether there are more. Notes go to stderr, also of what no relay has seen."""
    rows, has_more, note = find_rows(home, query, limit)
    unseen = count_waiting(home) if lock_holder(home) is None else 0
    if unseen:
        waits = f"{plural(unseen, 'message')} in outboxes, not seen by a relay yet: `relay up`"
        note = "; ".join(filter(None, (note, waits)))
    if note:
        click.echo(name_home(f"relay: {note}"), err=True)
    return rows, has_more


def _say_more(limit: int) -> None:
    """Say on stderr, to programs as well, that a list has more rows than were asked for."""
    click.echo(f"{limit} shown, there are more; a larger --limit shows them", err=True)


def _say_not_a_key(query: Query) -> None:
    text = f"relay: `{query.like_keys[0]}:` is not a key: it is searched as text"
    click.echo(text, err=True)


def print_messages(
    rows: list[dict[str, Any]], *, as_json: bool, wide: bool, nothing: str = NOTHING
) -> None:
    """Print messages as JSON lines or as a table; ``wide`` adds thread and RE."""
    if as_json:
        for row in rows:
            echo_json(row)
        return
    if not rows:
        click.echo(name_home(nothing), err=True)
        return
    from relay.base.names import uuid4_of

    short = _short_ids(rows)
    threads = {uuid4_of(whole): digits for whole, digits in short.items()}
    named = {row["thread"] for row in rows if row["thread"]}
    threads |= {uuid4_of(name): name for name in named if uuid4_of(name) != name}

    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        name = threads.get(uuid4_of(row["thread"]), row["thread"]) if row["thread"] else None
        more = (name, short.get(row["re"])) if wide else ()
        first, *others = row["content"].split("\n", 1)
        if len(first) > MOST_CONTENT and not wide:
            first = f"{first[:MOST_CONTENT]}…"
        return (
            *(short.get(row["id"], row["number"]), local_iso(row["at"])),
            *(row["from"], row["to"], row["kind"], *more),
            _status(row) if wide else cut(_status(row), MOST_STATUS),
            f"{first} …" if any(map(str.strip, others)) else first,
        )

    header = (*HEADER[:5], "THREAD", "RE", *HEADER[5:]) if wide else HEADER
    print_table(header, [cells(row) for row in rows], wide=wide, flexible=FLEXIBLE)


def _status(row: dict[str, Any]) -> str:
    """The status without the name of the file, which a refusal begins with: the id says it."""
    return re.sub(rf"\b{re.escape(row['id'] or '')}{MSG_SUFFIX}(, |: )", "", row["status"], count=1)


def _short_ids(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Shorten the ids of messages and of those that they answer."""
    return short_ids(
        message_id for row in rows for message_id in (row["id"], row["re"]) if message_id
    )


def _echo_message(
    row: dict[str, Any], short: dict[str, str], lines: Iterable[str], columns: int | None = None
) -> None:
    """Print a line about a message, then lines of its content, indented, and an empty line."""
    number = short.get(row["id"], str(row["number"]))
    kind = f"{row['kind']} re {short.get(row['re'], row['re'])}" if row["re"] else row["kind"]
    about = sanitize(f"{local_iso(row['at'])}  {row['from']} -> {row['to']}  {kind}")
    status = sanitize(_status(row)) or ""
    if columns is not None:
        status = cut(status, max(LEAST, columns - len(f"{number}  {about}  ")))
    click.echo(f"{colour(number, bold=True)}  {about}  {colour_by_word(status)}")
    for line in lines:
        click.echo(f"{INDENT}{line}".rstrip())
    click.echo()


def _matching_lines(query: Query, content: str, most: int | None) -> list[str]:
    """Return the lines in which a match begins, with all matches marked.

    A line of more than ``most`` columns begins shortly before its first match. A query without
    words shows the first line.
    """
    found: list[tuple[str, list[tuple[int, int]]]] = []
    begin = line_end = -1
    for start, end in _spans(query, content):
        if start > line_end:
            if len(found) == MOST_LINES:
                break
            begin = content.rfind("\n", 0, start) + 1
            found.append((content[begin:].split("\n", 1)[0], []))
            line_end = begin + len(found[-1][0])
        found[-1][1].append((start - begin, min(end, line_end) - begin))
    return [highlight(line, parts, most) for line, parts in found]


def _spans(query: Query, content: str) -> Iterable[tuple[int, int]]:
    """Where the matches are, in order, without overlaps."""
    import re2

    if query.regex is not None:
        yield from (match.span() for match in re2.finditer(query.regex, content))
        return
    if not query.texts:
        yield (0, 0)
        return
    longest_first = sorted(query.texts, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    yield from (match.span() for match in re.finditer(pattern, content))
