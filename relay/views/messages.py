"""Messages that are so: looked up in the search index, or in the store where there is none.

find_rows        a query -> rows, with their outcomes by the ledger, and what was refused
count_failed     the number of rows of `relay failed`
messages_about   the messages whose RE names another one
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from relay.base import outcomes
from relay.base.clock import NS_PER_MS, NS_PER_S, iso_time
from relay.base.errors import LedgerError, RelayError
from relay.base.finding import Finding
from relay.base.home import LEDGER, SEARCH, STORE, lock_holder
from relay.base.names import DIRECT_PREFIX, EVERYONE, EVERYONE_CHANNEL, MSG_SUFFIX
from relay.base.text import plural
from relay.views.ids import read_file, resolve_id
from relay.views.names import channel_not_found, check_agents
from relay.views.store import read_store
from relay.views.times import local_iso

if TYPE_CHECKING:
    import sqlite3

    from relay.base.config import Config
    from relay.base.home import Home
    from relay.search.find import Found
    from relay.search.follow import Behind, Source
    from relay.search.index import Entry, Index
    from relay.search.query import Query

MOST_ABOUT = 100  # messages about another one
CATCH_UP_S = 1.0  # where no relay runs
SMALL_STORE_BYTES = 2 << 20  # a larger one is indexed by the relay alone
WAIT_S = 1.0  # for a relay that is about to index the newest messages
POLL_S = 0.02
UNREAD = "unread"  # a state of a query
_AMONG = "message_id IN (SELECT value FROM json_each(?))"


class Rows(NamedTuple):
    """The result of a query."""

    rows: list[dict[str, Any]]  # as `relay list --json` prints them
    has_more: bool
    note: str  # where the index could not be used, or the ledger not be read; else empty


def look_up(home: Home, query: Query, limit: int) -> tuple[Found, str]:
    """The messages found, and a note about what was searched."""
    from relay.base.config import load
    from relay.search.index import why_no_index

    if query.regex is not None:
        from relay.engine.query import compile_pattern

        compile_pattern(query.regex)
    query = query._replace(
        beside=tuple(_message_ids(home, query.named_threads)),
        answered=tuple(_message_ids(home, query.answered)) or query.answered,
    )
    config = load(home)
    why = why_no_index(config)
    if not why and (found := _in_full_index(home, query, limit)) is not None:
        return found, ""
    return _look_up_slowly(home, config, why, query, limit)


def _in_full_index(home: Home, query: Query, limit: int) -> Found | None:
    """The messages found in the index of a relay that runs; None if the index lacks any.

    That saves reading the journal, and loading what reads it: the ledger says how far it is.
    """
    from relay.ledger.file import open_current
    from relay.search.find import find
    from relay.search.index import Index

    if lock_holder(home) is None:
        return None
    with contextlib.suppress(RelayError, OSError), Index(home.path(SEARCH)) as index:
        has = index.position()
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            position = "SELECT value FROM orchestrator_state WHERE key = 'journal'"
            row = db.execute(position).fetchone()
        if has is not None and row is not None and has.offset >= int(row[0]):
            return find(index, query, limit, home.path(LEDGER))
    return None


def _look_up_slowly(
    home: Home, config: Config, why: str, query: Query, limit: int
) -> tuple[Found, str]:
    """The same from an index that may lack the newest, or of the store itself.

    ``why``: the home has no index; empty if it has one.
    """
    from relay.base.clock import Clock
    from relay.daemon.opening import store_key
    from relay.daemon.search_filler import KINDS, source_of
    from relay.search.find import find, ledger_ids
    from relay.search.index import SearchIndexDamaged, remove_index, why_no_index
    from relay.search.scan import scan

    if not why:
        try:
            source = source_of(home, config, Clock(), store_key(home, config, make=False))
            with _open_index(home, source) as index:
                state = _wait(home, index, source)
                if state is not None:
                    found = find(index, query, limit, home.path(LEDGER))
                    if not state.messages or (found.entries and not query.states):
                        return found, _lag(state)
                    why = _lag(state)  # as on a full disk, where nothing is indexed
            why = why or "the search index is not complete yet"
        except SearchIndexDamaged as exc:
            with contextlib.suppress(RelayError, OSError):
                remove_index(home.path(SEARCH))  # refused while a relay has it open
            why = f"the search index is damaged: {exc}"
        except (RelayError, OSError) as exc:
            why = f"no search index: {Finding.of_error('', exc).text}"
    in_state = None
    if query.states or query.since is not None:
        from relay.ledger.file import open_current

        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            in_state = ledger_ids(db, query)
    found = scan(read_store(home), query, limit, KINDS, in_state)
    is_told = query.texts or query.regex is not None or not why_no_index(config)
    return found, f"searched the store itself: {why}" if is_told else ""


def messages_about(home: Home, message_id: str) -> list[Entry]:
    """The messages whose RE names this one, oldest first. Errors: RelayError, OSError."""
    from relay.search.query import Query

    found, _ = look_up(home, Query(answered=(message_id,)), MOST_ABOUT)
    return [entry for entry, _ in reversed(found.entries)]


def _message_ids(home: Home, given: Iterable[str]) -> Iterable[str]:
    """The ids of these messages, which may be short; others are left out."""
    for value in given:
        with contextlib.suppress(RelayError):
            yield resolve_id(home, value)


def _open_index(home: Home, source: Source) -> Index:
    """Open the index; where no relay runs, also continue it for a moment. Errors: RelayError."""
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
    since = local_iso(iso_time((state.since_ms or 0) * NS_PER_MS)[:19] + "Z")
    return f"{plural(state.messages, 'message')}{more} since {since} not indexed yet"


def find_rows(home: Home, query: Query, limit: int, offset: int = 0) -> Rows:
    """The rows that a query asks for, in its order.

    Messages are found without the index and without the ledger, too. Errors: NotFound for the name
    of an agent or a channel that is nobody's, where nothing is found; RelayError, OSError.
    """
    look = _look_up_unread if UNREAD in query.states else look_up
    found, note = look(home, query, limit + offset)
    try:
        rows, has_more = _by_ledger(home, query, found, limit, offset)
    except LedgerError as exc:
        if query.states or query.since is not None:
            raise
        rows = [_facts(*entry) for entry in found.entries[offset : offset + limit]]
        has_more = found.has_more
        why = "; ".join(filter(None, (str(exc), exc.hint)))
        note = note or f"what became of them is not known: {why}"
    if not rows:
        _check_names(home, query)
    return Rows(rows, has_more, note)


def _by_ledger(
    home: Home, query: Query, found: Found, limit: int, offset: int
) -> tuple[list[dict[str, Any]], bool]:
    """The rows of what was found and what was refused, with what became of them."""
    from relay.ledger.file import open_current
    from relay.search.query import largest_first, sort_key

    entries, rows = [*found.entries], []
    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        entries += [(entry, "") for entry in _refused(db, home, query)]
        entries.sort(key=lambda pair: sort_key(query, pair[0]), reverse=largest_first(query))
        for row in _rows(home, db, query, entries[offset : offset + limit]):
            if row["outcome"] == outcomes.Outcome.REFUSED and not row["content"]:
                row["content"] = _body(home, _path_of(db, row["id"]))
            rows.append(row)
    return rows, found.has_more or len(entries) > offset + limit


def _check_names(home: Home, query: Query) -> None:
    """Errors: NotFound for a name in a query that is nobody's, and the one probably meant."""
    check_agents(home, *query.senders, *query.recipients, *query.parties)
    if query.channels:
        known = [channel.name for channel in read_store(home).channels.list_all()]
        for name in query.channels:
            if name not in known:
                raise channel_not_found(name, known)


_REFUSED = """
SELECT 0, message_id, discovered_at, coalesce(processed_at, discovered_at), agent_name, target,
       message_type, file_path
FROM messages WHERE status = 'failed'
UNION ALL
SELECT -1, file_name, at, at, agent, NULL, NULL, NULL FROM rejections"""


def count_failed(db: sqlite3.Connection) -> int:
    """The number of rows that `relay failed` lists, by the ledger alone."""
    from relay.search.query import STATES

    failed = f"SELECT message_id FROM deliveries AS d WHERE {STATES['failed']}"
    counts = [f"(SELECT count(*) FROM ({sql}))" for sql in (_REFUSED, failed)]
    return int(db.execute(f"SELECT {' + '.join(counts)}").fetchone()[0])


def _refused(db: sqlite3.Connection, home: Home, query: Query) -> Iterator[Entry]:
    """Yield what the relay refused, as far as a query asks for it.

    It has no topic, thread or priority, and the channel that it was sent to. Its number is 0, or
    -1 without a row of its own: another message may have its id. Its text is looked into only where
    failures are asked for.
    """
    from relay.search.index import Entry
    from relay.search.query import REFUSED, matches

    of_accepted = (query.threads, query.named_threads, query.answered, query.topics)
    if any(of_accepted) or query.priorities or query.with_attachment:
        return
    has_text = bool(query.texts) or query.regex is not None
    if not {REFUSED, "failed"} & {*query.states} if query.states else has_text:
        return
    regex = None
    if query.regex is not None:
        from relay.search.scan import searcher

        regex = searcher(query.regex)
    for number, message_id, at, changed, sender, target, kind, path in db.execute(_REFUSED):
        if query.since is not None and changed < query.since * NS_PER_S:
            continue
        names = [target] if target else []
        channel = EVERYONE_CHANNEL if target == EVERYONE else ""
        if target and target.startswith("#"):
            channel = target[1:]
        body = _body(home, path) if has_text else ""
        name = message_id.removesuffix(MSG_SUFFIX)
        entry = Entry(
            *(number, at // NS_PER_S, at, name, sender, 0, 0, kind or "", 0),
            *(None, None, None, None, 0, 0, json.dumps(names), body),
        )
        if matches(query, entry, tuple(names), channel, None, regex):
            yield entry


def _path_of(db: sqlite3.Connection, message_id: str) -> str | None:
    sql = "SELECT file_path FROM messages WHERE message_id = ? AND status = 'failed'"
    row = db.execute(sql, (message_id,)).fetchone()
    return None if row is None else row[0]


def _look_up_unread(home: Home, query: Query, most: int) -> tuple[Found, str]:
    """The same as ``look_up``, without what was taken while no relay runs, which has noted it."""
    from relay.ledger.file import open_current
    from relay.search.find import Found

    asked_for = most
    while True:
        found, note = look_up(home, query, asked_for)
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            unread = {message_id for message_id, _ in _wanted(home, db, query, found.entries)}
        kept = [pair for pair in found.entries if pair[0].relay_id in unread]
        if len(kept) >= most or not found.has_more:
            return Found(kept[:most], found.has_more or len(kept) > most), note
        asked_for *= 4


def _is_in_inbox(home: Home, message_id: str, recipient: str) -> bool:
    """False once it was taken, which a relay that does not run has not recorded."""
    return os.path.lexists(home.path("agents", recipient, "inbox", message_id + MSG_SUFFIX))


def _body(home: Home, path: str | None) -> str:
    """The text of a file of the ledger; empty if it is gone, or none."""
    from relay.base.message import split

    if path is None:
        return ""
    with contextlib.suppress(OSError, RelayError):
        data = read_file(home, path)
        return "" if data is None else split(data)[1].decode(errors="replace")
    return ""


def _rows(
    home: Home, db: sqlite3.Connection, query: Query, page: list[tuple[Entry, str]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each message, or for each recipient for whom it is in the query's states."""
    ids = _ids(page)
    found = db.execute(f"SELECT * FROM messages WHERE {_AMONG}", (ids,))
    messages = {row["message_id"]: row for row in found}
    deliveries: dict[str, list[outcomes.Fields]] = {}
    for delivery in outcomes.read_deliveries(db, _AMONG, ids):
        deliveries.setdefault(delivery["message_id"], []).append(delivery)
    wanted = _wanted(home, db, query, page) if query.states else None
    now_ns = time.time_ns()
    for entry, channel in page:
        facts, number = _facts(entry, channel), entry.relay_id or ""
        row, all_of_it = messages.get(number), deliveries.get(number, [])
        if entry.id < 0:
            yield facts | outcomes.refused(*_rejection(db, number))
        elif row is None:
            yield facts
        elif wanted is None or row["status"] == "failed":
            yield facts | outcomes.facts(row, all_of_it, now_ns)
        else:
            for delivery in all_of_it:
                if (number, delivery["recipient"]) in wanted:
                    names = {"to": delivery["recipient"], "recipients": [delivery["recipient"]]}
                    yield facts | names | outcomes.facts(row, [delivery], now_ns)


def became_of(home: Home, recipient: str, message_ids: list[str]) -> dict[str, dict[str, Any]]:
    """When these were sent, and what became of them for a recipient, by id.

    Empty where the ledger cannot be read.
    """
    from relay.ledger.file import open_current

    ids, found = json.dumps(message_ids), dict[str, dict[str, Any]]()
    with contextlib.suppress(RelayError):
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            rows = db.execute(f"SELECT * FROM messages WHERE {_AMONG}", (ids,))
            messages = {row["message_id"]: row for row in rows}
            mine = f"{_AMONG} AND recipient = ?"
            now_ns = time.time_ns()
            for delivery in outcomes.read_deliveries(db, mine, ids, recipient):
                if (row := messages.get(delivery["message_id"])) is not None:
                    at = iso_time(row["discovered_at"])[:19] + "Z"
                    found[row["message_id"]] = {"at": at, **outcomes.facts(row, [delivery], now_ns)}
    return found


def _ids(page: list[tuple[Entry, str]]) -> str:
    return json.dumps([entry.relay_id for entry, _ in page if entry.relay_id])


def _wanted(
    home: Home, db: sqlite3.Connection, query: Query, page: list[tuple[Entry, str]]
) -> frozenset[tuple[str, str]]:
    """The deliveries of these messages that are in the query's states."""
    from relay.search.find import in_state

    def in_states(*states: str) -> Iterator[tuple[str, str]]:
        condition, values = in_state(query._replace(states=states))
        sql = f"SELECT message_id, recipient FROM deliveries AS d WHERE {_AMONG} AND ({condition})"
        yield from ((row[0], row[1]) for row in db.execute(sql, (_ids(page), *values)))

    others = [state for state in query.states if state != UNREAD]
    found = {*in_states(*others)} if others else set()
    if UNREAD in query.states:
        found.update(pair for pair in in_states(UNREAD) if _is_in_inbox(home, *pair))
    return frozenset(found)


def _rejection(db: sqlite3.Connection, name: str) -> tuple[str | None, str | None]:
    """Reason and code of a refusal without a row of its own."""
    sql = "SELECT reason, code FROM rejections WHERE file_name IN (?, ?) ORDER BY at DESC"
    row = db.execute(sql, (name, name + MSG_SUFFIX)).fetchone()
    return (None, None) if row is None else (row["reason"], row["code"])


def _facts(entry: Entry, channel: str) -> dict[str, Any]:
    """The facts of a message, without what became of it."""
    from relay.acomm.model import MessageType

    names = json.loads(entry.recipients)
    to: str | None = f"#{channel}"
    if channel == EVERYONE_CHANNEL:
        to = EVERYONE
    elif not channel or channel.startswith(DIRECT_PREFIX):
        to = ", ".join(names) or None
    at_ns = entry.at_ns or entry.at * NS_PER_S
    return {
        "at": iso_time(at_ns)[:19] + "Z",
        "id": entry.relay_id,
        "number": entry.id if entry.id > 0 else None,
        "from": entry.sender,
        "to": to,
        "recipients": names,
        "channel": channel or None,
        "type": MessageType(entry.type).label if entry.id > 0 else None,
        "kind": entry.kind or None,
        "priority": entry.priority if entry.id > 0 else None,
        "topic": entry.topic,
        "thread": entry.thread or entry.correlation,
        "re": entry.re,
        "status": "archived" if entry.archived else "unknown",  # where the ledger lacks it
        **dict.fromkeys(("outcome", "reason", "code", "due_at")),
        "reminders": 0,
        "content": entry.body,
    }
