"""``relay search``: messages by words, phrases and keys, from the search index or the store."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import NS_PER_S, iso_time
from relay.base.errors import NotFound
from relay.base.home import LEDGER, SEARCH, STORE, lock_holder
from relay.base.text import plural
from relay.cli.common import check_agents, home_option, json_option, open_home
from relay.cli.history import (
    echo_message,
    outcomes_of,
    print_table,
    read_store,
    short_ids_of,
)
from relay.cli.tables import highlight, limit_option, local_iso, screen_columns, wide_option

if TYPE_CHECKING:
    from relay.base.home import Home
    from relay.search.find import Found
    from relay.search.follow import Behind, Source
    from relay.search.index import Entry, Index
    from relay.search.query import Query

MOST_LINES = 5  # that match, of one message
MOST_ABOUT = 100  # messages about another one
INDENT = " " * 4
CATCH_UP_S = 1.0  # where no relay runs
SMALL_STORE_BYTES = 2 << 20  # a larger one is indexed by the relay alone
WAIT_S = 1.0  # for a relay that is about to index the newest messages
POLL_S = 0.02


@click.command(
    epilog="""\b
Examples:
  relay search deploy failed from:alice after:2h
  relay search '"disk full" is:unread'
  relay search kind:command to:bob is:owed
  relay search --regex 'deploy(ed)? to (staging|production)'

\b
Keys:
  from: to: thread: kind: channel:     as `relay history` shows them
  re:                                  the id of the message that they answer or are about
  is:unread  is:dead  is:owed          by the ledger; with to: of this recipient
  has:attachment
  after: before:                       2h ago, 14:05, 2026-11-20T18:30, yesterday""",
)
@home_option
@click.argument("query", nargs=-1)
@click.option("--regex", is_flag=True, help="QUERY is one regular expression (RE2).")
@limit_option
@wide_option
@json_option
@click.pass_context
def search(
    ctx: click.Context,
    home: str | None,
    query: tuple[str, ...],
    regex: bool,
    limit: int,
    wide: bool,
    as_json: bool,
) -> None:
    """Find messages by words, phrases, and keys such as from:alice; show the lines that match.

    Every word and every "phrase" of QUERY must be in the text as it is written: with its case, and
    also inside of a longer word. A key that is repeated matches any of its values. Newest first;
    archived messages are included.
    """
    from relay.base.message import Kind
    from relay.search.query import Query, parse

    text = " ".join(query)
    if regex:
        parsed = Query(regex=text)
    else:
        parsed = parse(text, tuple(str(kind) for kind in Kind))
    with open_home(ctx, home) as opened:
        found, note = _find(opened, parsed, limit)
        rows = _rows(opened, found)
        if not rows:
            note = note or _unknown_agent(opened, *parsed.senders, *parsed.recipients)
    if note:
        click.echo(f"relay: {note}", err=True)
    if as_json or not rows:
        print_table(rows, as_json=as_json, wide=wide)
        if not rows and parsed.like_keys:
            click.echo(
                f"relay: `{parsed.like_keys[0]}:` is not a key: it is searched as text",
                err=True,
            )
        return
    ids, columns = short_ids_of(rows), screen_columns(wide=wide)
    for row in rows:
        echo_message(row, ids, _matching_lines(parsed, row["content"], columns))
    if found.has_more:
        click.echo(f"{limit} shown, there are more; --limit shows more", err=True)


def _unknown_agent(home: Home, *names: str) -> str:
    """The line about the first of these that is not an agent; it may have been one."""
    try:
        check_agents(home, *names)
    except NotFound as exc:
        return f"{exc}; {exc.hint}"
    return ""


def _find(home: Home, query: Query, limit: int) -> tuple[Found, str]:
    """The messages found, and a note about what was searched."""
    from relay.base.clock import Clock
    from relay.base.config import load
    from relay.base.errors import RelayError
    from relay.daemon.opening import store_key
    from relay.daemon.search_filler import KINDS, source_of, why_no_index
    from relay.doctor.report import describe_error
    from relay.engine.query import compile_pattern
    from relay.search.find import find, ledger_ids
    from relay.search.index import SearchIndexDamaged, remove_index
    from relay.search.scan import scan

    if query.regex is not None:
        compile_pattern(query.regex)
    beside, answered = (
        tuple(_message_ids(home, given)) for given in (query.named_threads, query.answered)
    )
    query = query._replace(beside=beside, answered=answered or query.answered)
    config = load(home)
    why = why_no_index(config)
    if not why:
        try:
            source = source_of(home, config, Clock(), store_key(home, config, make=False))
            with _open_index(home, source) as index:
                state = _wait(home, index, source)
                if state is not None:
                    return find(index, query, limit, home.path(LEDGER)), _lag(state)
            why = "the search index is not complete yet"
        except SearchIndexDamaged as exc:
            with contextlib.suppress(RelayError, OSError):
                remove_index(home.path(SEARCH))  # refused while a relay has it open
            why = f"the search index is damaged: {exc}"
        except (RelayError, OSError) as exc:
            why = f"no search index: {describe_error(exc)}"
    in_state = None
    if query.states:
        from relay.ledger.file import open_readonly

        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            in_state = ledger_ids(db, query)
    return scan(
        read_store(home), query, limit, KINDS, in_state
    ), f"searched the store itself: {why}"


def messages_about(home: Home, message_id: str) -> list[Entry]:
    """The messages whose RE names this one, oldest first. Errors: RelayError, OSError."""
    from relay.search.query import Query

    found, _ = _find(home, Query(answered=(message_id,)), MOST_ABOUT)
    return [entry for entry, _ in reversed(found.entries)]


def _message_ids(home: Home, given: Iterable[str]) -> Iterable[str]:
    """The ids of these messages, which may be short; others are left out."""
    from relay.base.errors import RelayError
    from relay.cli.ids import resolve_id

    for value in given:
        with contextlib.suppress(RelayError):
            yield resolve_id(home, value)


def _open_index(home: Home, source: Source) -> Index:
    """Open the index; where no relay runs, also continue it for a moment. Errors: RelayError."""
    from relay.base.errors import RelayError
    from relay.search.follow import Follower
    from relay.search.index import (
        Index,
        SearchIndexBusy,
        SearchIndexDamaged,
        SearchIndexError,
    )

    path = home.path(SEARCH)
    if lock_holder(home) is not None:
        deadline = _deadline(home)
        while True:
            try:
                return Index(path)
            except SearchIndexDamaged:
                raise
            except SearchIndexError:  # it does not exist yet, or is being created
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)
    try:
        index = Index(path, writable=True)
    except (RelayError, OSError):
        return Index(path)
    try:
        if index.position() is not None or _is_small(home):
            Follower(index, source).run(CATCH_UP_S)
    except SearchIndexBusy:
        pass  # another search does it
    except BaseException:
        index.close()
        raise
    return index


def _is_small(home: Home) -> bool:
    try:
        return os.path.getsize(home.path(STORE)) <= SMALL_STORE_BYTES
    except FileNotFoundError:
        return True


def _deadline(home: Home) -> float:
    """Until when to wait for a relay that begins an index: for that of a large store not at all."""
    return time.monotonic() + WAIT_S * _is_small(home)


def _wait(home: Home, index: Index, source: Source) -> Behind | None:
    """The backlog of the index, after a moment for a relay that runs; None: it is not complete."""
    from relay.search.follow import behind

    is_running = lock_holder(home) is not None
    deadline = time.monotonic() + WAIT_S * is_running
    begun_by = _deadline(home) if is_running else 0
    while True:
        state = behind(index, source)
        now = time.monotonic()
        if now > (begun_by if state is None else deadline) or (state and not state.messages):
            return state
        time.sleep(POLL_S)


def _lag(state: Behind) -> str:
    """The backlog of the index, in words."""
    if not state.messages:
        return ""
    more = " or more" if state.is_more else ""
    since = local_iso(iso_time((state.since_ms or 0) * 10**6)[:19] + "Z")
    return f"{plural(state.messages, 'message')}{more} since {since} not indexed yet"


def _rows(home: Home, found: Found) -> list[dict[str, Any]]:
    """The facts of the messages found, with their outcomes by the ledger."""
    ids = [entry.relay_id for entry, _ in found.entries if entry.relay_id]
    outcomes, states = outcomes_of(home, ids), _states(home, ids)
    return [
        _facts(entry, channel, states.get(entry.relay_id or "", []))
        | {"outcome": outcomes.get(entry.relay_id or "")}
        for entry, channel in found.entries
    ]


class _State(NamedTuple):
    """The state of one delivery by the ledger."""

    state: str
    was_written: bool


def _states(home: Home, ids: list[str]) -> dict[str, list[_State]]:
    """The deliveries of messages by the ledger."""
    import json

    from relay.base.errors import LedgerError
    from relay.ledger.file import open_readonly

    states: dict[str, list[_State]] = {}
    sql = (
        "SELECT message_id, state, written_at FROM deliveries"
        " WHERE message_id IN (SELECT value FROM json_each(?))"
    )
    with (
        contextlib.suppress(LedgerError),
        contextlib.closing(open_readonly(home.path(LEDGER))) as db,
    ):
        for number, state, written_at in db.execute(sql, (json.dumps(ids),)):
            states.setdefault(number, []).append(_State(state, written_at is not None))
    return states


def _status(entry: Entry, states: list[_State]) -> str:
    """The status of a message in the store, by its deliveries in the ledger."""
    if entry.archived:
        return "Archived"
    found = {one.state for one in states}
    if found & {"held", "staged"} or not found:
        return "Delivered" if any(one.was_written for one in states) else "Sent"
    if found & {"written", "read"}:
        return "Delivered"
    if "acked" in found:
        return "Delivered" if "dead" in found else "Acknowledged"
    return "DeadLetter" if "dead" in found else "Failed"


def _facts(entry: Entry, channel: str, states: list[_State]) -> dict[str, Any]:
    """The facts of a message that the commands print."""
    import msgspec

    from relay.engine import MessageType

    at_ns = entry.at_ns or entry.at * NS_PER_S
    return {
        "at": iso_time(at_ns)[:19] + "Z",
        "id": entry.relay_id,
        "number": entry.id,
        "from": entry.sender,
        "recipients": msgspec.json.decode(entry.recipients, type=list[str]),
        "channel": channel,
        "type": MessageType(entry.type).label,
        "kind": entry.kind,
        "status": _status(entry, states),
        "priority": entry.priority,
        "topic": entry.topic,
        "thread": entry.thread or entry.correlation,
        "re": entry.re,
        "content": entry.body,
    }


def _matching_lines(query: Query, content: str, columns: int | None) -> list[str]:
    """Return the lines in which a match begins, with all matches marked.

    On ``columns`` of the terminal a line begins shortly before its first match. A query without
    words shows the first line.
    """
    found: dict[int, tuple[str, list[tuple[int, int]]]] = {}
    for start, end in _spans(query, content):
        begin = content.rfind("\n", 0, start) + 1
        if begin not in found and len(found) == MOST_LINES:
            break
        line, parts = found.setdefault(begin, (content[begin:].split("\n", 1)[0], []))
        parts.append((start - begin, min(end - begin, len(line))))
    most = None if columns is None else columns - len(INDENT)
    return [highlight(line, parts, most) for line, parts in found.values()]


def _spans(query: Query, content: str) -> Iterable[tuple[int, int]]:
    """Where the matches are, in order, without overlaps."""
    import re

    import re2

    if query.regex is not None:
        yield from (one.span() for one in re2.finditer(query.regex, content))
        return
    if not query.texts:
        yield (0, 0)
        return
    longest_first = sorted(query.texts, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first))
    yield from (one.span() for one in re.finditer(pattern, content))
