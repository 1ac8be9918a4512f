"""The ledger: sound in itself, and beside the files and the store that it speaks of."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator

from relay.base.clock import iso_date
from relay.base.config import RetentionSettings
from relay.base.errors import LedgerDamaged, LedgerError, RelayError, UnsafePath
from relay.base.home import LEDGER
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of
from relay.daemon import prune
from relay.daemon.opening import open_store_readonly, store_key, stream_dir
from relay.daemon.projection import deliveries_of
from relay.delivery import reads
from relay.doctor.finding import (
    RESTORE,
    Finding,
    Place,
    Severity,
    looked_at_part,
    names,
    several,
    twice,
)
from relay.engine.event_codec import EventCodec
from relay.journal.reader import JournalReader
from relay.ledger import SCHEMA_VERSION, archive_pack, open_readonly, schema_sql
from relay.ledger import file as ledger_file

MOST_ROWS = 50_000  # of each kind, the newest: some tenths of a second


def examine(place: Place, position: int) -> Iterator[Finding]:
    """Pages, rows and version; then rows against files, inboxes and store."""
    try:
        with contextlib.closing(open_readonly(place.home.path(LEDGER))) as db:
            yield from _soundness(db)
            yield from _bounds(db)
    except LedgerError as exc:
        yield Finding("ledger", str(exc), exc.hint, where=LEDGER)
        return
    yield from twice(place, lambda: {f.where: f for f in _files(place)})
    with contextlib.suppress(LedgerError):  # damaged, as was said
        yield from twice(place, lambda: _inboxes(place))
    yield from twice(place, lambda: _store(place, position))


def _soundness(db: sqlite3.Connection) -> Iterator[Finding]:
    wrong = ledger_file.problems(db)
    if wrong:
        yield Finding("ledger", f"damaged: {several(wrong)}", LedgerDamaged.hint, where=LEDGER)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        found = f"its schema is {version}, this agent-relay knows {SCHEMA_VERSION}"
        yield Finding("ledger", found, "use the newer agent-relay that wrote it", where=LEDGER)
    elif version < SCHEMA_VERSION:
        found = f"its schema is {version}, of an earlier agent-relay"
        remedy = f"nothing: the next start copies it and brings it to {SCHEMA_VERSION}"
        yield Finding("ledger", found, remedy, Severity.NOTE, LEDGER)
    else:
        with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
            fresh.executescript(schema_sql())
            lacks = sorted(_parts(fresh) - _parts(db))
        if lacks:
            found = f"its schema lacks {several(lacks)}: somebody removed it"
            yield Finding("ledger", found, RESTORE, where=LEDGER)


def _bounds(db: sqlite3.Connection) -> Iterator[Finding]:
    """Notes on tables too large to compare whole: only the newest rows are compared."""
    for table, most in (("messages", MOST_ROWS), ("deliveries", 4 * MOST_ROWS)):
        (total,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        if total > most:
            yield looked_at_part("ledger", most, total, f"rows of {table}, the newest")


def _parts(db: sqlite3.Connection) -> set[str]:
    """Tables, indexes and triggers by kind and name."""
    rows = db.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    return {f"{kind} {name}" for kind, name in rows}


# -- files -------------------------------------------------------------------------------------


def _files(place: Place) -> Iterator[Finding]:
    """Archived rows without a file, and files without a row."""
    with contextlib.closing(open_readonly(place.home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT message_id, file_path FROM messages WHERE status = 'archived' "
            "AND agent_name <> ? ORDER BY id DESC LIMIT ?",
            (ORCHESTRATOR, MOST_ROWS),
        ).fetchall()
        unknown = _unknown(place, db)
    by_folder: dict[str, list[str]] = defaultdict(list)
    for _, path in rows:
        folder, _, name = path.rpartition("/")
        by_folder[folder].append(name)
    missing = [
        f"{folder}/{name}"
        for folder, wanted in by_folder.items()
        if not _is_away(place, folder)
        for name in sorted(set(wanted) - set(names(place.home.path(folder))))
    ]
    if missing:
        yield Finding(
            "ledger",
            f"archived messages whose file is gone: {several(missing)}",
            "restore them from a backup; `relay search` has their text, where the store does",
            Severity.WARNING,
            "rows without a file",
        )
    if unknown:
        yield Finding(
            "ledger",
            f"files in the archive that no row knows: {several(unknown)}",
            "nothing, if the ledger was made anew; else " + RESTORE,
            Severity.WARNING,
            "files without a row",
        )


def _is_away(place: Place, folder: str) -> bool:
    """True where the files of a folder were pruned, or packed: its whole day is."""
    parts = folder.split("/")
    if parts[0] != "archive" or len(parts) < 2:
        return False
    if os.path.exists(place.home.path("archive", parts[1] + archive_pack.SUFFIX)):
        return True
    settings: RetentionSettings = place.config.retention
    last_days = archive_pack.before_yesterday(place.clock.now_ns())
    is_kept = settings.archive_days == settings.archive_mib == 0 or parts[1] >= last_days
    if is_kept or os.path.isdir(place.home.path("archive", parts[1])):
        return False
    is_old = settings.archive_days and parts[1] < iso_date(
        place.clock.now_ns() - settings.archive_days * archive_pack.DAY_NS
    )
    return bool(is_old) or parts[1] < _oldest_kept(place)


def _oldest_kept(place: Place) -> str:
    """The oldest day of the archive that retention has left, for it takes the oldest first; what
    somebody still needs was left of older ones, too."""
    needed = prune.files_in_use(place.home).days
    days = {name.removesuffix(archive_pack.SUFFIX) for name in names(place.home.path("archive"))}
    return min((day for day in days - needed if archive_pack.is_day(day)), default="9999")


def _unknown(place: Place, db: sqlite3.Connection) -> list[str]:
    """Originals of the newest days that no row knows."""
    found: list[tuple[str, str]] = []
    for day in reversed(archive_pack.days(place.home)):
        for agent in names(place.home.path("archive", day)):
            folder = f"archive/{day}/{agent}"
            for name in names(place.home.path(folder)):
                message_id = message_id_of(name)
                if message_id is not None:
                    found.append((message_id, f"{folder}/{name}"))
        if len(found) >= MOST_ROWS:
            break
    unknown = []
    for first in range(0, len(found), 500):
        part = dict(found[first : first + 500])
        marks = ", ".join("?" * len(part))
        query = f"SELECT message_id FROM messages WHERE message_id IN ({marks})"
        known = {row[0] for row in db.execute(query, list(part))}
        unknown += [path for message_id, path in part.items() if message_id not in known]
    return unknown


def _inboxes(place: Place) -> dict[str, Finding]:
    """What vanished with its mailbox; deliveries whose file has left without being noted as read;
    and files that no delivery speaks of."""
    found = {}
    with contextlib.closing(open_readonly(place.home.path(LEDGER))) as db:
        query = "SELECT DISTINCT recipient FROM deliveries WHERE state = 'written'"
        expected = {row[0] for row in db.execute(query)} - {ORCHESTRATOR}
        for agent in sorted(expected.union(place.home.agent_names())):
            query = (
                "SELECT message_id, coalesce(written_at, 0) FROM deliveries "
                "WHERE recipient = ? AND state = 'written'"
            )
            written = {row[0]: row[1] for row in db.execute(query, (agent,))}
            there = {
                name.removesuffix(MSG_SUFFIX)
                for name in names(place.home.path("agents", agent, "inbox"))
                if name.endswith(MSG_SUFFIX)
            }
            missing = {one: at for one, at in written.items() if one not in there}
            vanished = _vanished(place, db, agent, missing)
            if vanished:
                found[f"{agent} vanished"] = _gone(agent, len(vanished))
            if not place.is_running:  # agents may have read since, and the next start notes it
                continue
            for message_id in missing.keys() - vanished:
                found[f"{agent} {message_id}"] = Finding(
                    "ledger",
                    f"{message_id} left the inbox of {agent}, and is not noted as read",
                    "nothing: the next scan notes it, within detection.scan_interval_s",
                    Severity.WARNING,
                    f"agents/{agent}/inbox",
                )
            for message_id in there - written.keys():
                if _was_written(db, message_id, agent):
                    continue
                found[f"{message_id} {agent}"] = Finding(
                    "ledger",
                    f"{message_id} lies in the inbox of {agent}, and no delivery says so",
                    "find out who put it there; the relay did not",
                    Severity.WARNING,
                    f"agents/{agent}/inbox/{message_id}{MSG_SUFFIX}",
                )
    return found


def _vanished(
    place: Place, db: sqlite3.Connection, agent: str, missing: dict[str, int]
) -> set[str]:
    """The missing messages that went with the inbox they were written to."""
    row = db.execute("SELECT * FROM agents WHERE name = ?", (agent,)).fetchone()
    known = row["mailbox"] if row is not None and "mailbox" in row.keys() else None
    if not missing:
        return set()
    try:
        with place.home.dirs() as dirs:
            traces = reads.file_fates(dirs, agent, known, missing)
    except FileNotFoundError:
        return set(missing)
    except (OSError, UnsafePath):  # the checks of files say so
        return set()
    return {one for one, trace in traces.items() if trace is reads.FileFate.VANISHED}


def _gone(agent: str, number: int) -> Finding:
    return Finding(
        "ledger",
        reads.describe_vanished(agent, number),
        f"delivered again when it is back (`relay register {agent}`, and a relay that runs); "
        f"or back to their senders: `relay agents retire {agent}`",
        Severity.WARNING,
        f"agents/{agent}/inbox",
    )


def _was_written(db: sqlite3.Connection, message_id: str, agent: str) -> bool:
    """True for a file that the relay wrote, and whose delivery has ended without a reader: it was
    acknowledged where it stands, or nobody answered and it is a dead letter."""
    query = "SELECT state FROM deliveries WHERE message_id = ? AND recipient = ?"
    row = db.execute(query, (message_id, agent)).fetchone()
    return row is not None and row[0] != "read"


# -- store and journal ---------------------------------------------------------------------------


def _store(place: Place, position: int) -> dict[str, Finding]:
    """Deliveries that ledger and store (its checkpoint and the journal behind it) tell apart."""
    with contextlib.closing(open_readonly(place.home.path(LEDGER))) as db:
        have = {
            (row[0], row[1]): row[2]
            for row in db.execute(
                "SELECT message_id, recipient, state FROM deliveries ORDER BY message_id DESC "
                "LIMIT ?",
                (4 * MOST_ROWS,),
            )
        }
        rows = {
            row[0]
            for row in db.execute(
                "SELECT message_id FROM messages ORDER BY id DESC LIMIT ?", (4 * MOST_ROWS,)
            )
        }
    try:
        key = store_key(place.home, place.config, make=False)
        store = open_store_readonly(place.home, place.clock, place.config, key)
    except (RelayError, OSError):
        return {}  # the checks of store and journal say so
    if not place.is_running and _is_behind(place, position, key):
        return {}  # the next start tells the ledger
    oldest = min(rows, default="")
    found: dict[str, Finding] = {}
    for number, deliveries in store.state.deliveries.items():
        message = store.get_message(number)
        relay_id = message.relay_id if message else None
        if message is None or relay_id is None or relay_id < oldest:
            continue
        if relay_id not in rows:
            found[relay_id] = _differs(relay_id, "the store has it, and the ledger has no row")
            continue
        for fact in deliveries_of(message, relay_id, deliveries):
            state = have.get((relay_id, fact.recipient))
            if state != fact.state:
                what = f"for {fact.recipient} the store says {fact.state}, the ledger {state}"
                found[f"{relay_id} {fact.recipient} {what}"] = _differs(relay_id, what)
    return found


def _is_behind(place: Place, position: int, key: bytes | None) -> bool:
    """True when the journal has events that the ledger has not heard of."""
    folder, codec = stream_dir(place.home), EventCodec(key)
    if not os.path.isdir(folder):
        return False
    try:
        records = JournalReader(folder).read(position)
        return any(codec.decode(one.payload, one.offset).event is not None for one in records)
    except (RelayError, OSError):
        return True  # the journal's checks say why


def _differs(relay_id: str, what: str) -> Finding:
    remedy = f"`relay trace {relay_id}` shows what the ledger has; {RESTORE}"
    return Finding("ledger", f"{relay_id}: {what}", remedy, Severity.ERROR, relay_id)
