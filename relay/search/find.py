"""Answers queries from the index, newest first.

One of the conditions drives: the one that an index says matches few messages, else the trigrams
of the text, else the newest messages. All others are checked on each row, the text last, so the
result does not depend on the choice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import re2

from relay.base.clock import NS_PER_S
from relay.ledger.file import first_id_since
from relay.search.index import DISORDER, Entry, Index, translated_errors
from relay.search.query import (
    STATES,
    Query,
    any_topic_matches,
    largest_first,
    required_literals,
)

FEW = 1_000  # rows that are read faster than a list of trigrams is
ALL_TRIGRAMS = 12  # characters up to which each trigram of a phrase is looked up
MOST_TRIGRAMS = 40
SHORTEST = 3  # characters of a trigram
_AT_ONCE = 64  # rows fetched

_FIRST = {"priority": ("m.priority", -1), "sender": ("m.sender", 1), "kind": ("m.kind", 1)}


class Found(NamedTuple):
    """The messages found: a page of them, newest first."""

    entries: list[tuple[Entry, str]]  # with the name of the channel
    has_more: bool


class _Condition(NamedTuple):
    """One condition on the rows."""

    sql: str
    values: tuple[object, ...]
    ids: str = ""  # a query of the ids that fulfil it, where an index has them
    probe: str = ""  # the same for the rowid of ``t``, from the index alone


def find(index: Index, query: Query, limit: int, ledger: str = "") -> Found:
    """The messages that a query asks for, up to ``limit``, in its order.

    ``ledger``: path of the ledger, for ``is:`` and ``since:``. Errors: SearchIndexError;
    ValidationFailed for an invalid regular expression.
    """
    pattern = None
    if query.regex is not None:
        from relay.engine.query import compile_pattern

        pattern = compile_pattern(query.regex)
    with translated_errors(index.path):
        if query.states or query.since is not None:
            _attach(index.db, ledger)
        if query.topics:
            index.db.create_function(
                "is_of_topics", 1, lambda topic: any_topic_matches(topic, query.topics)
            )
        if query.beside:
            marks = _marks(query.beside)
            sql = f"SELECT correlation FROM messages WHERE relay_id IN ({marks})"
            named = (row[0] for row in index.db.execute(sql, query.beside) if row[0])
            query = query._replace(threads=(*query.threads, *named))
        sql, values = _statement(index, query)
        rows = index.db.execute(sql, values)
        found: list[tuple[Entry, str]] = []
        for row in _rows(rows):
            *fields, channel = row
            entry = Entry(*fields)
            if pattern is None or _matches(pattern, entry.body):
                found.append((entry, channel or ""))
                if len(found) > limit:
                    break
        rows.close()
    return Found(found[:limit], len(found) > limit)


def ledger_ids(db: sqlite3.Connection, query: Query) -> frozenset[str]:
    """The relay ids of all messages that are in one of a query's states, and changed since then;
    for the scan."""
    found: list[frozenset[str]] = []
    if query.states:
        condition, values = in_state(query)
        rows = db.execute(f"SELECT message_id FROM deliveries AS d WHERE {condition}", values)
        found.append(frozenset(row[0] for row in rows))
    if query.since is not None:
        first = first_id_since(db, "audit_log", "at", query.since * NS_PER_S)
        rows = db.execute("SELECT message_id FROM audit_log WHERE id >= ?", (first,))
        found.append(frozenset(row[0] for row in rows))
    return frozenset.intersection(*found)


def _matches(pattern: re2._Regexp[bytes], body: str) -> bool:
    return pattern.search(body.encode()) is not None


def _rows(cursor: sqlite3.Cursor) -> Iterator[Any]:
    while rows := cursor.fetchmany(_AT_ONCE):
        yield from rows


def _attach(db: sqlite3.Connection, ledger: str) -> None:
    if any(row[1] == "ledger" for row in db.execute("PRAGMA database_list")):
        return
    quoted = ledger.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    db.execute("ATTACH ? AS ledger", (f"file:{quoted}?mode=ro",))


def _statement(index: Index, query: Query) -> tuple[str, tuple[object, ...]]:
    """The statement whose rows, in order, are the messages found."""
    db = index.db
    in_order = index.meta(DISORDER) is None
    conditions = list(_conditions(db, query, in_order))
    # A driver with few rows, each of which is then checked by all conditions.
    counted = [(_count(db, condition), condition) for condition in conditions if condition.ids]
    few = min(counted, key=lambda pair: pair[0], default=None)
    match = _match(query)
    order = _order(query, "m.id", in_order)
    source = "messages AS m NOT INDEXED"
    if query.sort in _FIRST:
        source = f"messages AS m INDEXED BY messages_{query.sort}"
    values: tuple[object, ...] = ()
    if few is not None and (few[0] <= FEW or (match is None and len(counted) == 1)):
        ids = f"{few[1].ids} ORDER BY {_order(Query(), 'id', in_order=True)}"
        source = f"({ids}) AS f CROSS JOIN messages AS m ON m.id = f.id"
        values = few[1].values
        order = _order(query, "f.id", in_order)
    elif match is not None:
        source = "trigrams AS t CROSS JOIN messages AS m ON m.id = t.rowid"
        conditions.insert(0, _Condition("trigrams MATCH ?", (match,)))
        conditions[1:1] = [
            _Condition(f"t.rowid {condition.sql[5:]}", condition.values)
            for condition in _bounds(conditions)
        ]
        conditions = [
            condition._replace(sql=condition.probe or condition.sql) for condition in conditions
        ]
        order = _order(query, "t.rowid", in_order)
    conditions += [_Condition("instr(m.body, ?) > 0", (text,)) for text in query.texts]
    where = " AND ".join(condition.sql for condition in conditions) or "1"
    values += tuple(value for condition in conditions for value in condition.values)
    sql = (
        f"SELECT m.*, (SELECT name FROM channels WHERE id = m.channel) FROM {source}"
        f" WHERE {where} ORDER BY {order}"
    )
    return sql, values


def _order(query: Query, number: str, in_order: bool) -> str:
    """The order of the rows; ``number``: the column that has that of the message."""
    terms = [(number, -1)] if in_order else [("m.at", -1), ("m.id", -1)]
    if query.sort in _FIRST:
        terms.insert(0, _FIRST[query.sort])
    way = -1 if largest_first(query) else 1
    return ", ".join(f"{term} {'ASC' if sign * way > 0 else 'DESC'}" for term, sign in terms)


def _bounds(conditions: Iterable[_Condition]) -> list[_Condition]:
    """The conditions on the number alone."""
    return [condition for condition in conditions if condition.sql.startswith("m.id ")]


def _conditions(db: sqlite3.Connection, query: Query, in_order: bool) -> Iterator[_Condition]:
    """All conditions but the texts."""
    yield from _times(db, query, in_order)
    for column, values in (
        ("sender", query.senders),
        ("correlation", query.threads),
        ("re", query.answered),
        ("kind", query.kinds),
    ):
        if values:
            yield _indexed(column, _marks(values), values)
    if query.channels:
        named = f"SELECT id FROM channels WHERE name IN ({_marks(query.channels)})"
        yield _indexed("channel", named, query.channels)
    if query.recipients:
        marks = _marks(query.recipients)
        sql = f"EXISTS (SELECT 1 FROM recipients AS r WHERE r.name IN ({marks}) AND r.id = {{}})"
        ids = f"SELECT DISTINCT id FROM recipients WHERE name IN ({marks})"
        yield _Condition(sql.format("m.id"), query.recipients, ids, sql.format("t.rowid"))
    if query.parties:
        marks = _marks(query.parties)
        named = f"SELECT id FROM recipients WHERE name IN ({marks})"
        sent = f"SELECT id FROM messages INDEXED BY messages_sender WHERE sender IN ({marks})"
        values = (*query.parties, *query.parties)
        sql = f"(m.sender IN ({marks}) OR m.id IN ({named}))"
        yield _Condition(sql, values, f"{sent} UNION {named}")
    if query.with_attachment:
        ids = "SELECT id FROM messages INDEXED BY messages_attachments WHERE attachments"
        yield _Condition("m.attachments", (), ids)
    yield from _plain(query)
    yield from _of_ledger(db, query)


def _plain(query: Query) -> Iterator[_Condition]:
    """Conditions without an index."""
    if query.priorities:
        yield _Condition(f"+m.priority IN ({_marks(query.priorities)})", query.priorities)
    if query.topics:
        named = "FROM messages INDEXED BY messages_topic WHERE topic IS NOT NULL"
        such = f"SELECT topic FROM (SELECT DISTINCT topic {named}) WHERE is_of_topics(topic)"
        ids = f"SELECT id {named} AND topic IN ({such})"
        yield _Condition(f"+m.topic IN ({such})", (), ids)


def _of_ledger(db: sqlite3.Connection, query: Query) -> Iterator[_Condition]:
    """Conditions on what became of a message."""
    by_id = "SELECT id FROM messages INDEXED BY messages_relay_id WHERE relay_id IN ({})"
    if query.since is not None:
        first = first_id_since(db, "ledger.audit_log", "at", query.since * NS_PER_S)
        changed = "SELECT message_id FROM ledger.audit_log AS a WHERE a.id >= ?"
        sql = f"EXISTS ({changed} AND a.message_id = m.relay_id)"
        yield _Condition(sql, (first,), by_id.format(changed))
    if query.states:
        condition, values = in_state(query)
        such = f"SELECT d.message_id FROM ledger.deliveries AS d WHERE ({condition})"
        sql = f"EXISTS ({such} AND d.message_id = m.relay_id)"
        yield _Condition(sql, values, by_id.format(such))


def _indexed(column: str, wanted: str, values: tuple[object, ...]) -> _Condition:
    """The condition that a column with an index has one of the values wanted."""
    rows = f"messages AS x INDEXED BY messages_{column} WHERE x.{column} IN ({wanted})"
    return _Condition(
        f"+m.{column} IN ({wanted})",
        values,
        f"SELECT id FROM {rows}",
        f"EXISTS (SELECT 1 FROM {rows} AND x.id = t.rowid)",
    )


def _times(db: sqlite3.Connection, query: Query, in_order: bool) -> Iterator[_Condition]:
    """Conditions on the time: on the number, where numbers are in the order of times."""
    if not in_order:
        if query.after is not None:
            yield _Condition("m.at > ?", (query.after,))
        if query.before is not None:
            yield _Condition("m.at < ?", (query.before,))
        return
    first_at = "SELECT id FROM messages WHERE at >= ? ORDER BY at, id LIMIT 1"
    if query.after is not None:
        row = db.execute(first_at, (query.after + 1,)).fetchone()
        yield _Condition("m.id >= ?", (row[0],)) if row else _Condition("0", ())
    if query.before is not None:
        row = db.execute(first_at, (query.before,)).fetchone()
        if row:
            yield _Condition("m.id < ?", (row[0],))


def in_state(query: Query) -> tuple[str, tuple[str, ...]]:
    """The condition on deliveries, and its values; of the recipients given, if any are."""
    condition = " OR ".join(STATES[state] for state in query.states)
    if len(query.states) > 1:
        condition = f"({condition})"
    if not query.recipients:
        return condition, ()
    return f"{condition} AND d.recipient IN ({_marks(query.recipients)})", query.recipients


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _count(db: sqlite3.Connection, condition: _Condition) -> int:
    """The number of rows that fulfil a condition, up to FEW + 1."""
    sql = f"SELECT count(*) FROM ({condition.ids} LIMIT {FEW + 1})"
    return int(db.execute(sql, condition.values).fetchone()[0])


def _match(query: Query) -> str | None:
    """The trigrams that the text of a match has; None where no text is long enough."""
    texts = query.texts
    if query.regex is not None:
        texts = (*texts, *required_literals(query.regex))
    grams = dict.fromkeys(gram for text in texts for gram in _trigrams(text))
    if not grams:
        return None
    return " AND ".join('"' + gram.replace('"', '""') + '"' for gram in grams)


def _trigrams(text: str) -> list[str]:
    """Trigrams of a text that together have all of its characters, or of its beginning."""
    text = text.replace("\0", "\n")
    last = len(text) - SHORTEST
    if last < 0:
        return []
    # Within a word each third is enough; those with spaces are what tells a phrase from its words.
    is_phrase = any(map(str.isspace, text))
    step = 1 if is_phrase and len(text) <= ALL_TRIGRAMS else SHORTEST
    begins = [*range(0, last, step), last][:MOST_TRIGRAMS]
    return [text[begin : begin + SHORTEST] for begin in begins]
