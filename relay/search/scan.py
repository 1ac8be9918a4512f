"""Answers queries from the store itself: exact, slow, and the definition of what a query finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relay.acomm.model import MessageFilter, MessageType
from relay.engine.engine import Engine
from relay.engine.query import compile_pattern
from relay.search.find import Found
from relay.search.index import Entry, entry_of
from relay.search.query import SORTS, Query, largest_first, matches, sort_key

MOST = 10**9
_NOT_PLAIN = frozenset("\\^$.|?*+()[]{}\ufffd")


def scan(
    store: Engine,
    query: Query,
    limit: int,
    kinds: Mapping[MessageType, str],
    in_state: frozenset[str] | None = None,
) -> Found:
    """The messages of a store that a query asks for, up to ``limit``, in its order.

    ``in_state``: the relay ids of those in the query's states, or changed since then.
    Errors: those of the engine's query.
    """
    for relay_id in query.beside:
        beside = store.messages.find_by_relay_id(relay_id, include_archived=True)
        if beside is not None and beside.correlation_id is not None:
            query = query._replace(threads=(*query.threads, beside.correlation_id))
    plain = [text for text in query.texts if _NOT_PLAIN.isdisjoint(text)]
    pattern = query.regex if query.regex is not None else max(plain, key=len, default=None)
    wanted = MessageFilter(
        content_pattern=pattern,
        after=query.after,
        before=query.before,
        limit=MOST,
        include_archived=True,
    )
    regex = None if query.regex is None else searcher(query.regex)
    found: list[tuple[Entry, str]] = []
    for message in store.messages.query(wanted, grouped=False).messages:
        has_names = query.recipients or query.parties
        recipients = store.messages.recipients(message.id) if has_names else ()
        entry = entry_of(message, recipients, kinds[message.message_type])
        channel = store.channels.get(message.channel_id).name
        if matches(query, entry, recipients, channel, in_state, regex):
            names = store.messages.recipients(message.id)
            found.append((entry_of(message, names, kinds[message.message_type]), channel))
            if len(found) > limit and query.sort == SORTS[0]:
                break
    found.sort(key=lambda pair: sort_key(query, pair[0]), reverse=largest_first(query))
    return Found(found[:limit], len(found) > limit)


def searcher(pattern: str) -> Callable[[str], bool]:
    search = compile_pattern(pattern).search
    return lambda body: search(body.encode()) is not None
