"""Checks of the ledger's rows against the files of the home: archive, inboxes, attachments."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator

from relay.base import archive_pack
from relay.base.archive_pack import DAY_NS
from relay.base.clock import NS_PER_S, elapsed, iso_date
from relay.base.errors import LedgerError, UnsafePath
from relay.base.finding import Finding, Severity
from relay.base.home import LEDGER
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of
from relay.daemon import prune
from relay.delivery import reads
from relay.doctor.report import Target, list_dir, listed, recheck, wrong_type
from relay.ledger import attachments
from relay.ledger.check import RESTORE
from relay.ledger.file import open_readonly

CLOCK_NS = 60 * 60 * NS_PER_S  # less of a difference misleads nobody
MAX_ROWS = 50_000  # the newest; takes some tenths of a second
_ATTACHMENT_REFS = (
    "SELECT r.sha256, EXISTS (SELECT 1 FROM deliveries AS d WHERE d.message_id = r.message_id "
    "AND d.state IN ('held', 'staged', 'written')) FROM attachment_refs AS r"
)


def check_rows(target: Target) -> Iterator[Finding]:
    """Check archived messages, inboxes, and missing, unused or (with ``deep``) damaged
    attachments."""
    try:
        for check in (_check_clock, _check_archive, _check_inboxes, _check_references):
            yield from recheck(target, check)
    except LedgerError:
        pass  # reported by the checks of the stores
    except (TypeError, ValueError) as exc:
        yield wrong_type(exc)
    for path in _stored(target).values() if target.deep else ():
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            yield from attachments.check_file(target.home.path(path))


def _check_clock(target: Target) -> Iterator[Finding]:
    """Check for messages of a later time than now."""
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        query = "SELECT max(discovered_at) FROM (SELECT * FROM messages ORDER BY id DESC LIMIT ?)"
        (newest,) = db.execute(query, (MAX_ROWS,)).fetchone()
    ahead_ns = (newest or 0) - target.clock.now_ns()
    if ahead_ns > CLOCK_NS:
        found = f"the clock was set back: the ledger has a message from {elapsed(ahead_ns)} ahead"
        advice = (
            "set it if it is wrong now; ages of earlier messages are wrong, and nothing is lost"
        )
        yield Finding("ledger", LEDGER, found, advice, Severity.WARNING)


# -- the archive -------------------------------------------------------------------------------


def _check_archive(target: Target) -> Iterator[Finding]:
    """Check for archived rows without a file, and archive files without a row."""
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT file_path FROM messages WHERE status = 'archived' "
            "AND agent_name <> ? ORDER BY id DESC LIMIT ?",
            (ORCHESTRATOR, MAX_ROWS),
        ).fetchall()
        unknown = _unknown(target, db)
    by_folder: dict[str, list[str]] = defaultdict(list)
    for (path,) in rows:
        folder, _, name = path.rpartition("/")
        by_folder[folder].append(name)
    missing = [
        f"{folder}/{name}"
        for folder, wanted in by_folder.items()
        if not _is_away(target, folder)
        for name in sorted(set(wanted) - set(list_dir(target.home.path(folder))))
    ]
    found = "archived messages whose file is missing"
    advice = "restore them from a backup; `relay search` finds their text if the store has it"
    yield from listed("ledger", found, missing, advice, where="rows without a file")
    found = "files in the archive without a row"
    advice = "no action needed if the ledger was rebuilt, or the home restored and not started yet"
    advice += "; else " + RESTORE
    yield from listed("ledger", found, unknown, advice, where="files without a row")


def _is_away(target: Target, folder: str) -> bool:
    """Return whether a folder's day was pruned or packed."""
    parts = folder.split("/")
    if parts[0] != "archive" or len(parts) < 2:
        return False
    if os.path.exists(target.home.path("archive", parts[1] + archive_pack.SUFFIX)):
        return True
    settings = target.config.retention
    last_days = archive_pack.before_yesterday(target.clock.now_ns())
    is_kept = settings.archive_days == settings.archive_mib == 0 or parts[1] >= last_days
    if is_kept or os.path.isdir(target.home.path("archive", parts[1])):
        return False
    is_old = settings.archive_days and parts[1] < iso_date(
        target.clock.now_ns() - settings.archive_days * DAY_NS
    )
    return bool(is_old) or parts[1] < _oldest_kept(target)


def _oldest_kept(target: Target) -> str:
    """Return the oldest day of the archive that retention has kept; older days that are still in
    use do not count."""
    _, needed = prune.files_in_use(target.home)
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


# -- inboxes -----------------------------------------------------------------------------------


def _check_inboxes(target: Target) -> Iterator[Finding]:
    """Check for messages that vanished with a mailbox, files taken but not recorded as read, and
    files without a delivery."""
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        query = "SELECT DISTINCT recipient FROM deliveries WHERE state = 'written'"
        expected = {row[0] for row in db.execute(query)} - {ORCHESTRATOR}
        for agent in sorted(expected.union(target.home.agent_names())):
            yield from _check_inbox(target, db, agent)


def _check_inbox(target: Target, db: sqlite3.Connection, agent: str) -> Iterator[Finding]:
    query = (
        "SELECT message_id, coalesce(written_at, 0) FROM deliveries "
        "WHERE recipient = ? AND state = 'written'"
    )
    written = {row[0]: row[1] for row in db.execute(query, (agent,))}
    inbox = f"agents/{agent}/inbox"
    there = {
        name.removesuffix(MSG_SUFFIX)
        for name in list_dir(target.home.path(inbox))
        if name.endswith(MSG_SUFFIX)
    }
    missing = {message_id: at for message_id, at in written.items() if message_id not in there}
    vanished = _vanished(target, db, agent, missing)
    if vanished:
        found = reads.describe_vanished(agent, len(vanished))
        advice = (
            f"a running relay delivers them again after `relay register {agent}`, or returns them "
            f"to their senders after `relay agents retire {agent}`"
        )
        yield Finding("ledger", inbox, found, advice, Severity.WARNING)
    if not target.is_running:  # the next start records later reads
        return
    for message_id in missing.keys() - vanished:
        found = f"{message_id} left the inbox of {agent}, but is not recorded as read"
        advice = "no action needed: the next scan, within detection.scan_interval_s, records it"
        yield Finding(
            "ledger", f"{inbox}/{message_id}{MSG_SUFFIX}", found, advice, Severity.WARNING
        )
    for message_id in there - written.keys():
        if not _was_delivered(db, message_id, agent):
            found = f"{message_id} in {agent}'s inbox was not delivered by the relay"
            where = f"{inbox}/{message_id}{MSG_SUFFIX}"
            yield Finding("ledger", where, found, "find out who put it there", Severity.WARNING)


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
            traces = reads.file_fates(dirs, agent, known, missing, target.clock.now_ns())
    except FileNotFoundError:
        return set(missing)
    except (OSError, UnsafePath):  # reported by the checks of files
        return set()
    return {message_id for message_id, trace in traces.items() if trace is reads.FileFate.VANISHED}


def _was_delivered(db: sqlite3.Connection, message_id: str, agent: str) -> bool:
    """Return whether the relay wrote this file, although its delivery has ended without a read: it
    was acknowledged unread, or became a dead letter."""
    query = "SELECT state FROM deliveries WHERE message_id = ? AND recipient = ?"
    row = db.execute(query, (message_id, agent)).fetchone()
    return row is not None and row[0] != "read"


# -- attachments -------------------------------------------------------------------------------


def _check_references(target: Target) -> Iterator[Finding]:
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        if db.execute("PRAGMA user_version").fetchone()[0] < 2:
            return  # the next start creates the table
        live: dict[str, bool] = {}
        for digest, is_live in db.execute(_ATTACHMENT_REFS):
            live[digest] = live.get(digest, False) or bool(is_live)
    stored = _stored(target)
    missing = sorted(digest for digest, is_live in live.items() if is_live and digest not in stored)
    found = "missing, but referenced by unread messages"
    advice = "ask the senders to attach them again"
    yield from listed(
        "attachments", found, missing, advice, Severity.ERROR, where="attachments missing"
    )
    days = target.config.retention.attachments_days
    oldest_ns = target.clock.now_ns() - 2 * max(days, 1) * DAY_NS
    unused = [
        path
        for digest, path in stored.items()
        if live and digest not in live and _written_ns(target, path) < oldest_ns
    ]
    found = "not referenced by any message"
    advice = "`relay prune` removes them" if days else "kept: retention.attachments_days is 0"
    yield from listed(
        "attachments", found, unused, advice, Severity.NOTE, where="attachments unnamed"
    )
    files = prune.unfinished_attachments(target.home, target.clock.now_ns())
    left = ["/".join([*file.folder, file.name]) for file in files if file is not None]
    found = "left by senders that were interrupted"
    advice = "`relay prune` removes them"
    yield from listed(
        "attachments", found, left, advice, Severity.NOTE, where="attachments unfinished"
    )


def _stored(target: Target) -> dict[str, str]:
    """Map digest -> path in the home."""
    return {
        name: f"attachments/{folder}/{name}"
        for folder in list_dir(target.home.path("attachments"))
        for name in list_dir(target.home.path("attachments", folder))
        if len(name) == 64 and name.startswith(folder)
    }


def _written_ns(target: Target, path: str) -> int:
    try:
        return os.lstat(target.home.path(path)).st_mtime_ns
    except FileNotFoundError:
        return target.clock.now_ns()
