"""What the tests of search share."""

from __future__ import annotations

from pathlib import Path

from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import LEDGER, SEARCH
from relay.base.message import Kind
from relay.daemon.opening import open_store_readonly
from relay.daemon.search_filler import KINDS, source_of
from relay.ledger.file import open_readonly
from relay.search.find import find, ledger_ids
from relay.search.follow import Follower, Source
from relay.search.index import Entry, Index
from relay.search.query import Query, parse
from relay.search.scan import scan
from tests.box import Box

KIND_WORDS = tuple(map(str, Kind))


def asked(text: str) -> Query:
    return parse(text, KIND_WORDS)


def entry(number: int, body: str, *recipients: str, sender: str = "alice", at: int = 0) -> Entry:
    """A message of the index; its recipients are ``bob`` unless they are given."""
    names = ", ".join(f'"{name}"' for name in recipients or ("bob",))
    return Entry(
        *(number, at or number, number * 10**9, f"{number}-aa", sender, 1, 0, "message", 2),
        *(None, None, None, None, 0, 0, f"[{names}]", body),
    )


def filled(folder: Path, *entries: Entry) -> Index:
    """An index with these messages, in the channel ``c``."""
    index = Index(str(folder / SEARCH), writable=True)
    with index.batch(None):
        index.add_channel(1, "c")
        index.add(entries)
        index.note_order()
    return index


def source(box: Box) -> Source:
    return source_of(box.home, box.config, Clock(), box.session.opened.key)


def follow(box: Box) -> Index:
    """The index of a box, filled up to the end of its journal."""
    index = Index(box.home.path(SEARCH), writable=True)
    follower = Follower(index, source(box))
    while not follower.step().is_done:
        pass
    return index


def by_index(box: Box, text: str | Query, limit: int = 100) -> list[str]:
    """The texts that the index finds, newest first."""
    query = asked(text) if isinstance(text, str) else text
    with follow(box) as index:
        found = find(index, query, limit, box.home.path(LEDGER))
    return [entry.body for entry, _ in found.entries]


def by_scan(box: Box, text: str | Query, limit: int = 100) -> list[str]:
    """The texts that the scan of the store finds, newest first."""
    query = asked(text) if isinstance(text, str) else text
    db = open_readonly(box.home.path(LEDGER))
    in_state = ledger_ids(db, query) if query.states else None
    db.close()
    store = open_store_readonly(box.home, Clock(), Config(), box.session.opened.key)
    found = scan(store, query, limit, KINDS, in_state)
    return [entry.body for entry, _ in found.entries]
