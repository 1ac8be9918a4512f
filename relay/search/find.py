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

from relay.engine.query import compile_pattern
from relay.search.index import DISORDER, Entry, Index, translated_errors
from relay.search.query import Query, required_literals

FEW = 1_000  # rows that are read faster than a list of trigrams is
ALL_TRIGRAMS = 12  # characters up to which each trigram of a phrase is looked up
MOST_TRIGRAMS = 40
SHORTEST = 3  # characters of a trigram
_AT_ONCE = 64  # rows fetched

_STATE_CONDITIONS = {
    "unread": "state = 'written'",
    "dead": "state = 'dead'",
    "owed": "obligation = 'open'",
}


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
    """The newest messages that a query asks for.

    ``ledger``: path of the ledger, for ``is:``. Errors: SearchIndexError; ValidationFailed for an
    invalid regular expression.
    """
    pattern = None if query.regex is None else compile_pattern(query.regex)
    with translated_errors(index.path):
        if query.states:
            _attach(index.db, ledger)
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
    """The relay ids of all messages that are in one of a query's states; for the scan."""
    condition, values = _in_state(query)
    rows = db.execute(f"SELECT message_id FROM deliveries AS d WHERE {condition}", values)
    return frozenset(row[0] for row in rows)


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
    counted = [(_count(db, one), one) for one in conditions if one.ids]
    few = min(counted, key=lambda pair: pair[0], default=None)
    match = _match(query)
    order = "m.id DESC" if in_order else "m.at DESC, m.id DESC"
    source = "messages AS m NOT INDEXED"
    values: tuple[object, ...] = ()
    if few is not None and (few[0] <= FEW or (match is None and len(counted) == 1)):
        source = f"({few[1].ids} ORDER BY id DESC) AS f CROSS JOIN messages AS m ON m.id = f.id"
        values = few[1].values
        order = "f.id DESC" if in_order else order
    elif match is not None:
        source = "trigrams AS t CROSS JOIN messages AS m ON m.id = t.rowid"
        conditions.insert(0, _Condition("trigrams MATCH ?", (match,)))
        conditions[1:1] = [
            _Condition(f"t.rowid {one.sql[5:]}", one.values) for one in _bounds(conditions)
        ]
        conditions = [one._replace(sql=one.probe or one.sql) for one in conditions]
        order = "t.rowid DESC" if in_order else order
    conditions += [_Condition("instr(m.body, ?) > 0", (text,)) for text in query.texts]
    where = " AND ".join(one.sql for one in conditions) or "1"
    values += tuple(value for one in conditions for value in one.values)
    sql = (
        f"SELECT m.*, (SELECT name FROM channels WHERE id = m.channel) FROM {source}"
        f" WHERE {where} ORDER BY {order}"
    )
    return sql, values


def _bounds(conditions: Iterable[_Condition]) -> list[_Condition]:
    """The conditions on the number alone."""
    return [one for one in conditions if one.sql.startswith("m.id ")]


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
        numbers = f"SELECT id FROM channels WHERE name IN ({_marks(query.channels)})"
        yield _indexed("channel", numbers, query.channels)
    if query.recipients:
        marks = _marks(query.recipients)
        sql = f"EXISTS (SELECT 1 FROM recipients AS r WHERE r.name IN ({marks}) AND r.id = {{}})"
        ids = f"SELECT DISTINCT id FROM recipients WHERE name IN ({marks})"
        yield _Condition(sql.format("m.id"), query.recipients, ids, sql.format("t.rowid"))
    if query.with_attachment:
        ids = "SELECT id FROM messages INDEXED BY messages_attachments WHERE attachments"
        yield _Condition("m.attachments", (), ids)
    if query.states:
        condition, state_values = _in_state(query)
        listed = f"SELECT d.message_id FROM ledger.deliveries AS d WHERE {condition}"
        yield _Condition(
            "EXISTS (SELECT 1 FROM ledger.deliveries AS d"
            f" WHERE d.message_id = m.relay_id AND ({condition}))",
            state_values,
            f"SELECT id FROM messages INDEXED BY messages_relay_id WHERE relay_id IN ({listed})",
        )


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


def _in_state(query: Query) -> tuple[str, tuple[str, ...]]:
    """The condition on deliveries, and its values; of the recipients given, if any are."""
    condition = " OR ".join(_STATE_CONDITIONS[state] for state in query.states)
    if not query.recipients:
        return f"({condition})", ()
    return f"({condition}) AND d.recipient IN ({_marks(query.recipients)})", query.recipients


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
