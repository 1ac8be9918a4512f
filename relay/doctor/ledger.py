"""Checks of the ledger: its integrity, and its agreement with files, store and journal."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator

from relay.base.clock import iso_date
from relay.base.config import RetentionSettings
from relay.base.errors import LedgerDamaged, LedgerError, RelayError, UnsafePath
from relay.base.home import LEDGER, Home
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of
from relay.daemon import prune
from relay.daemon.opening import open_store_readonly, store_key, stream_dir
from relay.daemon.projection import deliveries_of
from relay.delivery import reads
from relay.doctor.finding import (
    RESTORE,
    Finding,
    Severity,
    Target,
    describe_error,
    list_dir,
    partial_check,
    recheck,
    summarize,
)
from relay.doctor.stores import GONE, stream_range
from relay.engine.events import EventCodec
from relay.journal.journal import JournalReader
from relay.ledger import SCHEMA_VERSION, archive_pack, open_readonly, schema_sql
from relay.ledger import file as ledger_file

MAX_ROWS = 50_000  # the newest of each kind; takes some tenths of a second


def check_ledger(target: Target, position: int) -> Iterator[Finding]:
    """Check pages, rows and schema, then rows against files, inboxes and store."""
    try:
        with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
            yield from _soundness(db)
            yield from _bounds(db)
    except LedgerError as exc:
        yield Finding("ledger", str(exc), exc.hint, where=LEDGER)
        return
    yield from recheck(target, lambda: {f.where: f for f in _files(target)})
    with contextlib.suppress(LedgerError):  # damage was reported above
        yield from recheck(target, lambda: _inboxes(target))
    yield from recheck(target, lambda: _store(target, position))


def _soundness(db: sqlite3.Connection) -> Iterator[Finding]:
    wrong = ledger_file.integrity_problems(db)
    if wrong:
        yield Finding("ledger", f"damaged: {summarize(wrong)}", LedgerDamaged.hint, where=LEDGER)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        found = f"its schema is {version}, this agent-relay supports {SCHEMA_VERSION}"
        yield Finding("ledger", found, "use the newer agent-relay that wrote it", where=LEDGER)
    elif version < SCHEMA_VERSION:
        found = f"its schema is {version}, from an earlier agent-relay"
        remedy = f"no action needed: the next start copies and upgrades it to {SCHEMA_VERSION}"
        yield Finding("ledger", found, remedy, Severity.NOTE, LEDGER)
    else:
        with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
            fresh.executescript(schema_sql())
            lacks = sorted(_parts(fresh) - _parts(db))
        if lacks:
            found = f"its schema lacks {summarize(lacks)}, removed by hand"
            yield Finding("ledger", found, RESTORE, where=LEDGER)


def _bounds(db: sqlite3.Connection) -> Iterator[Finding]:
    """Note tables of which only the newest rows are compared."""
    for table, most in (("messages", MAX_ROWS), ("deliveries", 4 * MAX_ROWS)):
        (total,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        if total > most:
            yield partial_check("ledger", most, total, f"rows of {table}, the newest")


def _parts(db: sqlite3.Connection) -> set[str]:
    """Return tables, indexes and triggers as "kind name"."""
    rows = db.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    return {f"{kind} {name}" for kind, name in rows}


# -- files -------------------------------------------------------------------------------------


def _files(target: Target) -> Iterator[Finding]:
    """Check for archived rows without a file, and archive files without a row."""
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT message_id, file_path FROM messages WHERE status = 'archived' "
            "AND agent_name <> ? ORDER BY id DESC LIMIT ?",
            (ORCHESTRATOR, MAX_ROWS),
        ).fetchall()
        unknown = _unknown(target, db)
    by_folder: dict[str, list[str]] = defaultdict(list)
    for _, path in rows:
        folder, _, name = path.rpartition("/")
        by_folder[folder].append(name)
    missing = [
        f"{folder}/{name}"
        for folder, wanted in by_folder.items()
        if not _is_away(target, folder)
        for name in sorted(set(wanted) - set(list_dir(target.home.path(folder))))
    ]
    if missing:
        yield Finding(
            "ledger",
            f"archived messages whose file is missing: {summarize(missing)}",
            "restore them from a backup; `relay search` finds their text if the store has it",
            Severity.WARNING,
            "rows without a file",
        )
    if unknown:
        yield Finding(
            "ledger",
            f"files in the archive without a row: {summarize(unknown)}",
            "no action needed if the ledger was rebuilt; else " + RESTORE,
            Severity.WARNING,
            "files without a row",
        )


def _is_away(target: Target, folder: str) -> bool:
    """Return whether a folder's day was pruned or packed."""
    parts = folder.split("/")
    if parts[0] != "archive" or len(parts) < 2:
        return False
    if os.path.exists(target.home.path("archive", parts[1] + archive_pack.SUFFIX)):
        return True
    settings: RetentionSettings = target.config.retention
    last_days = archive_pack.before_yesterday(target.clock.now_ns())
    is_kept = settings.archive_days == settings.archive_mib == 0 or parts[1] >= last_days
    if is_kept or os.path.isdir(target.home.path("archive", parts[1])):
        return False
    is_old = settings.archive_days and parts[1] < iso_date(
        target.clock.now_ns() - settings.archive_days * archive_pack.DAY_NS
    )
    return bool(is_old) or parts[1] < _oldest_kept(target)


def _oldest_kept(target: Target) -> str:
    """Return the oldest day of the archive that retention has kept; older days that are still in
    use do not count."""
    needed = prune.files_in_use(target.home).days
    days = {
        name.removesuffix(archive_pack.SUFFIX) for name in list_dir(target.home.path("archive"))
    }
    return min((day for day in days - needed if archive_pack.is_day(day)), default="9999")


def _unknown(target: Target, db: sqlite3.Connection) -> list[str]:
    """List originals of the newest days without a row."""
    found: list[tuple[str, str]] = []
    for day in reversed(archive_pack.days(target.home)):
        for agent in list_dir(target.home.path("archive", day)):
            folder = f"archive/{day}/{agent}"
            for name in list_dir(target.home.path(folder)):
                message_id = message_id_of(name)
                if message_id is not None:
                    found.append((message_id, f"{folder}/{name}"))
        if len(found) >= MAX_ROWS:
            break
    unknown = []
    for first in range(0, len(found), 500):
        part = dict(found[first : first + 500])
        marks = ", ".join("?" * len(part))
        query = f"SELECT message_id FROM messages WHERE message_id IN ({marks})"
        known = {row[0] for row in db.execute(query, list(part))}
        unknown += [path for message_id, path in part.items() if message_id not in known]
    return unknown


def _inboxes(target: Target) -> dict[str, Finding]:
    """Check for messages that vanished with a mailbox, files taken but not recorded as read, and
    files without a delivery."""
    found = {}
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        query = "SELECT DISTINCT recipient FROM deliveries WHERE state = 'written'"
        expected = {row[0] for row in db.execute(query)} - {ORCHESTRATOR}
        for agent in sorted(expected.union(target.home.agent_names())):
            query = (
                "SELECT message_id, coalesce(written_at, 0) FROM deliveries "
                "WHERE recipient = ? AND state = 'written'"
            )
            written = {row[0]: row[1] for row in db.execute(query, (agent,))}
            there = {
                name.removesuffix(MSG_SUFFIX)
                for name in list_dir(target.home.path("agents", agent, "inbox"))
                if name.endswith(MSG_SUFFIX)
            }
            missing = {one: at for one, at in written.items() if one not in there}
            vanished = _vanished(target, db, agent, missing)
            if vanished:
                found[f"{agent} vanished"] = _vanished_finding(agent, len(vanished))
            if not target.is_running:  # the next start records later reads
                continue
            for message_id in missing.keys() - vanished:
                found[f"{agent} {message_id}"] = Finding(
                    "ledger",
                    f"{message_id} left the inbox of {agent}, but is not recorded as read",
                    "no action needed: the next scan, within detection.scan_interval_s, records it",
                    Severity.WARNING,
                    f"agents/{agent}/inbox",
                )
            for message_id in there - written.keys():
                if _was_delivered(db, message_id, agent):
                    continue
                found[f"{message_id} {agent}"] = Finding(
                    "ledger",
                    f"{message_id} in {agent}'s inbox was not delivered by the relay",
                    "find out who put it there",
                    Severity.WARNING,
                    f"agents/{agent}/inbox/{message_id}{MSG_SUFFIX}",
                )
    return found


def _vanished(
    target: Target, db: sqlite3.Connection, agent: str, missing: dict[str, int]
) -> set[str]:
    """Return the missing messages that vanished with their inbox."""
    row = db.execute("SELECT * FROM agents WHERE name = ?", (agent,)).fetchone()
    known = row["mailbox"] if row is not None and "mailbox" in row.keys() else None
    if not missing:
        return set()
    try:
        with target.home.dirs() as dirs:
            traces = reads.file_fates(dirs, agent, known, missing)
    except FileNotFoundError:
        return set(missing)
    except (OSError, UnsafePath):  # reported by the checks of files
        return set()
    return {one for one, trace in traces.items() if trace is reads.FileFate.VANISHED}


def _vanished_finding(agent: str, number: int) -> Finding:
    return Finding(
        "ledger",
        reads.describe_vanished(agent, number),
        f"a running relay delivers them again after `relay register {agent}`, or returns them to "
        f"their senders after `relay agents retire {agent}`",
        Severity.WARNING,
        f"agents/{agent}/inbox",
    )


def _was_delivered(db: sqlite3.Connection, message_id: str, agent: str) -> bool:
    """Return whether the relay wrote this file, although its delivery has ended without a read: it
    was acknowledged unread, or became a dead letter."""
    query = "SELECT state FROM deliveries WHERE message_id = ? AND recipient = ?"
    row = db.execute(query, (message_id, agent)).fetchone()
    return row is not None and row[0] != "read"


# -- store and journal ---------------------------------------------------------------------------


def _store(target: Target, position: int) -> dict[str, Finding]:
    """Compare deliveries in the ledger with the store (its checkpoint and the journal after it)."""
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        have = {
            (row[0], row[1]): row[2]
            for row in db.execute(
                "SELECT message_id, recipient, state FROM deliveries ORDER BY message_id DESC "
                "LIMIT ?",
                (4 * MAX_ROWS,),
            )
        }
        rows = {
            row[0]
            for row in db.execute(
                "SELECT message_id FROM messages ORDER BY id DESC LIMIT ?", (4 * MAX_ROWS,)
            )
        }
    try:
        key = store_key(target.home, target.config, make=False)
        store = open_store_readonly(target.home, target.clock, target.config, key)
    except (RelayError, OSError):
        return {}  # reported by the checks of store and journal
    if not target.is_running and _is_behind(target, position, key):
        return {}  # the next start updates the ledger
    oldest = min(rows, default="")
    found: dict[str, Finding] = {}
    for number, deliveries in store.state.deliveries.items():
        message = store.get_message(number)
        relay_id = message.relay_id if message else None
        if message is None or relay_id is None or relay_id < oldest:
            continue
        if relay_id not in rows:
            found[relay_id] = _differs(relay_id, "in the store, but not in the ledger")
            continue
        for fact in deliveries_of(message, relay_id, deliveries):
            state = have.get((relay_id, fact.recipient))
            if state != fact.state:
                what = f"for {fact.recipient} the store says {fact.state}, the ledger {state}"
                found[f"{relay_id} {fact.recipient} {what}"] = _differs(relay_id, what)
    return found


def _is_behind(target: Target, position: int, key: bytes | None) -> bool:
    """Return whether the journal has events that are not in the ledger yet."""
    folder, codec = stream_dir(target.home), EventCodec(key)
    if not os.path.isdir(folder):
        return False
    try:
        records = JournalReader(folder).read(position)
        return any(codec.decode(one.payload, one.offset).event is not None for one in records)
    except (RelayError, OSError):
        return True  # reported by the checks of the journal


def _differs(relay_id: str, what: str) -> Finding:
    remedy = f"`relay trace {relay_id}` shows what the ledger has; {RESTORE}"
    return Finding("ledger", f"{relay_id}: {what}", remedy, Severity.ERROR, relay_id)


def ledger_position(home: Home) -> int | Finding:
    """Return the journal offset up to which the ledger is complete."""
    try:
        db = open_readonly(home.path(LEDGER))
        try:
            query = "SELECT value FROM orchestrator_state WHERE key = 'journal'"
            row = db.execute(query).fetchone()
        finally:
            db.close()
    except LedgerError as exc:
        remedy = exc.hint if exc.hint != LedgerError.hint else f"{exc.hint}; {RESTORE}"
        return Finding("ledger", describe_error(exc), remedy)
    return int(row[0]) if row else 0


def check_ledger_position(home: Home, position: int | Finding) -> Iterator[Finding]:
    """Check that the ledger's offset is in the journal."""
    if isinstance(position, Finding):
        yield position
        return
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        if position:
            found = f"it follows the journal up to {position}, but there is no journal"
            yield Finding("ledger", found, GONE)
        return
    first, end = stream_range(folder)
    if end is not None and position > end:
        yield Finding(
            "ledger",
            f"it follows the journal up to {position}, but that ends at {end}: files were removed",
            "put them back, or continue: the relay begins a new segment after the gap",
        )
    if position < first:
        yield Finding(
            "ledger",
            f"it follows the journal up to {position}, but everything before {first} was pruned",
            "rows of that time cannot be rebuilt: restore ledger.db from a backup, or do without",
        )
