"""Does the ledger agree with the store? Compares what both say of every message that is kept.

The ledger may be behind the journal, which the next start repairs with the same comparison
(``relay.daemon.recovery``). ``check`` is for a ledger that has followed the journal to its end.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

from relay.acomm.model import Delivery, Message
from relay.base.errors import FormatError, RelayError
from relay.base.finding import Finding
from relay.delivery.projection import Projection, deliveries_of
from relay.engine.engine import Engine
from relay.engine.events import EventCodec
from relay.journal.journal import JournalReader
from relay.ledger import file as ledger_file
from relay.ledger.check import RESTORE, WHAT
from relay.ledger.deliveries import DeliveryTable
from relay.ledger.ledger import Ledger
from relay.ledger.schema import schema_sql

_OPEN = ("held", "staged")
# Of a relay that was killed: what follows a commit reaches the journal with the next one.
_AHEAD = frozenset(
    {("staged", "written"), ("staged", "held"), ("staged", "read"), ("written", "read")}
)
Obligation = tuple[str, str, str]  # message id, recipient, status of its last ack
SHOWN_ROWS = 20  # that differ
REBUILD = "stop the relay, and `relay ledger rebuild` makes it again from the journal"
_COLUMNS = (
    "state, last_error, attempt, staged_at, written_at, discarded_at, "
    "read_at, read_how, acked_at, ack_status, answer_id, answer_text, obligation, reminders"
).split(", ")
# What a message that has left the store learns later is in the ledger alone.
_LATER = frozenset({"state", *_COLUMNS[6:]})
_DIFFERENCES = (
    "SELECT made.message_id, made.recipient, "
    + ", ".join(f"{table}.{column}" for table in ("made", "kept") for column in _COLUMNS)
    + " FROM deliveries AS made JOIN messages USING (message_id) "
    "JOIN live.deliveries AS kept USING (message_id, recipient) WHERE "
    + " OR ".join(f"made.{column} IS NOT kept.{column}" for column in _COLUMNS)
)
# Not the times of the file: after a power cut it may be one that its sender has put there again.
_OF_FILES = "agent_name, file_size, checksum, message_type, target, discovered_at".split(", ")
_REFUSED = "status, last_error, last_error_code".split(", ")
# Rows of the journal that the ledger lacks, or has otherwise: table, id, recipient.
_LACKING = (
    "SELECT 'messages', message_id, NULL FROM messages AS made "
    "LEFT JOIN live.messages AS kept USING (message_id) WHERE "
    + " OR ".join(f"made.{column} IS NOT kept.{column}" for column in _OF_FILES)
    + " OR made.status = 'failed' AND ("
    + " OR ".join(f"made.{column} IS NOT kept.{column}" for column in _REFUSED)
    + ") UNION ALL SELECT 'deliveries', message_id, recipient FROM deliveries "
    "WHERE (message_id, recipient) NOT IN (SELECT message_id, recipient FROM live.deliveries) "
    "UNION ALL SELECT 'rejections', nack_id, agent FROM "
    "(SELECT * FROM rejections EXCEPT SELECT * FROM live.rejections) "
    "UNION ALL SELECT 'offers', message_id, recipient FROM "
    "(SELECT * FROM offers EXCEPT SELECT * FROM live.offers) "
    "UNION ALL SELECT 'rings', session, agent FROM "
    "(SELECT * FROM rings EXCEPT SELECT * FROM live.rings)"
)


def check(
    db: sqlite3.Connection,
    store: Engine,
    *,
    most_rows: int | None = None,
    is_killed: bool = False,
) -> Iterator[Finding]:
    """Compare messages, deliveries and owed answers.

    ``most_rows``: only messages as recent as so many rows. ``is_killed``: the ledger may have steps
    that the journal lost with the relay; the next start finds them in the inboxes.
    """
    limit = -1 if most_rows is None else most_rows
    query = "SELECT message_id FROM messages ORDER BY id DESC LIMIT ?"
    rows = {row[0] for row in db.execute(query, (limit,))}
    oldest = min(rows, default="")
    for _, relay_id, _ in relayed(store):
        if relay_id >= oldest and relay_id not in rows:
            yield _finding(relay_id, "in the store, but not in the ledger")
    query = "SELECT message_id, recipient, state FROM deliveries ORDER BY message_id DESC LIMIT ?"
    states = {(row[0], row[1]): row[2] for row in db.execute(query, (limit,))}
    yield from _check_deliveries(store, rows, states, is_killed)
    if not is_killed:
        yield from _check_obligations(db, store, rows)


def _check_deliveries(
    store: Engine,
    rows: Set[str],
    states: Mapping[tuple[str, str], str],
    is_killed: bool,
) -> Iterator[Finding]:
    expected: dict[tuple[str, str], str | None] = {}
    for message, relay_id, deliveries in relayed(store):
        for fact in deliveries_of(message, relay_id, deliveries):
            expected[relay_id, fact.recipient] = fact.state
    differ = [
        (key, wanted, states.get(key))
        for key, wanted in expected.items()
        if key[0] in rows and states.get(key) != wanted
    ]
    differ += [
        (key, None, state)
        for key, state in states.items()
        if state in _OPEN and key not in expected and not _is_archived(store, key[0])
    ]
    for (relay_id, recipient), wanted, state in differ:
        if not is_killed or (wanted, state) not in _AHEAD:
            stored, kept = wanted or "nothing", state or "nothing"
            yield _finding(relay_id, f"for {recipient} the store says {stored}, the ledger {kept}")


def _is_archived(store: Engine, relay_id: str) -> bool:
    """True for a message that has left the live ones: a further delivery is in the ledger alone."""
    message = store.messages.find_by_relay_id(relay_id, include_archived=True)
    return message is not None and message.id not in store.state.messages


def _check_obligations(db: sqlite3.Connection, store: Engine, rows: Set[str]) -> Iterator[Finding]:
    owed = DeliveryTable(db).open_obligations()
    for (relay_id, recipient, _), _message in unmatched_obligations(store, owed):
        yield _finding(relay_id, f"an answer of {recipient} is owed in the ledger alone")
    known = {(relay_id, recipient) for relay_id, recipient, _ in owed}
    for message, relay_id, _ in relayed(store):
        for recipient in store.state.owed.get(message.id, {}):
            if relay_id in rows and (relay_id, recipient) not in known:
                yield _finding(relay_id, f"an answer of {recipient} is owed in the store alone")


def check_history(path: str, store: Engine, journal: str, key: bytes | None) -> Iterator[Finding]:
    """Compare the ledger at ``path`` with what a rebuild makes of the journal in a folder.

    Messages, deliveries, refusals, offers and rings, to the nanosecond, since records have times.
    The rebuilt rows are in memory, or where SQLite puts what is too large. Errors: RelayError,
    OSError when the journal cannot be read.
    """
    with contextlib.closing(ledger_file.connect("", uri="file:")) as db:
        db.executescript(schema_sql())
        _rebuild(Ledger(db, ""), store, journal, key)
        db.execute("ATTACH ? AS live", (ledger_file.readonly_uri(path),))
        present = {message.relay_id for message in store.state.messages.values()}
        differ = (_differences(row, present) for row in db.execute(_DIFFERENCES))
        yield from islice((text for text in differ if text is not None), SHOWN_ROWS)
        for table, message_id, recipient in islice(db.execute(_LACKING), SHOWN_ROWS):
            about = f"{message_id} of {recipient}" if recipient else message_id
            found = f"{about}: {table} has no such row as the journal"
            yield Finding(WHAT, message_id, found, REBUILD)


def _differences(row: tuple[Any, ...], present: Set[str | None]) -> Finding | None:
    """Describe what differs in a row; None where that is expected."""
    message_id, recipient, *values = row
    made, kept = values[: len(_COLUMNS)], values[len(_COLUMNS) :]
    columns = set(_COLUMNS)
    if made[0] == "held":  # why, the ledger says
        columns.discard("last_error")
    if message_id not in present:
        attempt = _COLUMNS.index("attempt")  # a further one is in the ledger alone, too
        columns = columns - _LATER if made[attempt] == kept[attempt] else set()
    written, staged = _COLUMNS.index("written_at"), _COLUMNS.index("staged_at")
    if made[written] is None:  # answered in the batch that delivered it
        columns.discard("written_at")
    elif made[written] == made[staged] <= (kept[written] or 0):
        columns.discard("written_at")  # completed by a start: the ledger may know when it was
    differ = [
        f"expected {column} {here!r} as in the journal, got {there!r}"
        for column, here, there in zip(_COLUMNS, made, kept, strict=True)
        if here != there and column in columns
    ]
    if not differ:
        return None
    found = f"{message_id}: for {recipient}, {'; '.join(differ)}"
    return Finding(WHAT, message_id, found, REBUILD)


def _rebuild(ledger: Ledger, store: Engine, journal: str, key: bytes | None) -> None:
    """Write the rows that records with times make."""
    codec, projection = EventCodec(key, journal), Projection()

    def write() -> None:
        with ledger.transaction():
            projection.write(ledger, relay_ids(store, projection).get, 0)

    for record in JournalReader(journal).read():
        frame = codec.decode(record.payload, record.offset)
        if frame.start is not None:
            projection.start(frame.start.at)
        if frame.event is not None and frame.at_ns:
            if projection.is_piece(frame.event):
                write()
                projection = projection.next_piece()
            projection.apply(frame.event, frame.at_ns)
    write()


def relayed(store: Engine) -> Iterator[tuple[Message, str, Mapping[str, Delivery]]]:
    """Yield the kept messages that passed a relay: message, relay id, deliveries."""
    for number, deliveries in store.state.deliveries.items():
        message = store.messages.get(number)
        if message is not None and message.relay_id is not None:
            yield message, message.relay_id, deliveries


def unmatched_obligations(
    store: Engine, owed: Iterable[Obligation]
) -> Iterator[tuple[Obligation, Message | None]]:
    """Yield the owed answers of the ledger that the store does not have.

    With their message; None if that is not live any more.
    """
    for facts in owed:
        message = store.messages.find_by_relay_id(facts[0])
        if message is None or message.id not in store.state.messages:
            yield facts, None
        elif facts[1] not in store.state.owed.get(message.id, {}):
            yield facts, message


def relay_ids(store: Engine, projection: Projection) -> dict[int, str]:
    """The relay ids of the messages that a piece has deliveries of.

    Those accepted before it are in the store or, when a start was killed between two pieces, in
    an archive.
    """
    numbers = {key[0] for key in (*projection.delivery_facts, *projection.obligation_facts)}
    found = {
        number: projection.relay_ids[number] for number in numbers & projection.relay_ids.keys()
    }
    kept = {number: store.messages.find_kept(number) for number in numbers - found.keys()}
    found |= {number: m.relay_id for number, m in kept.items() if m is not None and m.relay_id}
    unknown = {number for number, message in kept.items() if message is None}
    files = store.archives.files
    for note in store.state.archives if unknown else ():
        if files is not None and any(note.first_id <= number <= note.last_id for number in unknown):
            with contextlib.suppress(OSError, FormatError):  # damaged: the doctor says it
                for message, _ in files.all_of(note):
                    if message.id in unknown and message.relay_id is not None:
                        found[message.id] = message.relay_id
    return found


def is_behind(folder: str, position: int, key: bytes | None) -> bool:
    """Return whether the journal has events after the ledger's position, or cannot be read."""
    codec = EventCodec(key)
    try:
        records = JournalReader(folder).read(position)
        return any(
            codec.decode(record.payload, record.offset).event is not None for record in records
        )
    except (RelayError, OSError):
        return True


def _finding(relay_id: str, found: str) -> Finding:
    advice = f"`relay trace {relay_id}` shows what the ledger has; {RESTORE}"
    return Finding(WHAT, relay_id, f"{relay_id}: {found}", advice)
