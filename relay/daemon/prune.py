"""Retention of files and rows that are no longer needed, by age and size.

    archive      archive/{date}/…, archive/{date}.tar.zst   archive_days, archive_mib
    rejected     …/rejected/ of younger days                rejected_days
    read         agents/*/inbox/.read                       read_days, read_mib
    output       logs/{agent}.log* of agents no more        output_days
    attachments  that no message names                      attachments_days, attachments_mib
    unfinished   attachments/…/.….tmp of interrupted sends  an hour after the last write
    audit        audit_log, security_events                 audit_days

Settings: `retention` in config.json. The archive goes in whole days, oldest first, never the last
day, and never a file that an open row or a pending delivery needs. Files are only removed, so a run
killed anywhere is continued by the next. Rows keep their `file_path`: `relay trace` says "pruned".
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from typing import NamedTuple

import psutil

from relay.base import archive_pack, fsio
from relay.base.archive_pack import DAY_NS, SUFFIX
from relay.base.clock import NS_PER_S, iso_date, parse_time
from relay.base.config import RetentionSettings
from relay.base.errors import UnsafePath
from relay.base.home import LEDGER, READ, REJECTED, Home
from relay.base.incidents import IncidentKind
from relay.base.names import MSG_SUFFIX, is_agent_name, message_id_of
from relay.ledger import attachments
from relay.ledger.agents import AgentTable
from relay.ledger.file import SCHEMA_VERSION, open_readonly
from relay.ledger.ledger import Ledger

SLICE = 200  # files examined between pauses: a millisecond, which the loop may wait for
REMOVAL = 12  # the cost of a removal, in examined files: ext4 avoids inodes freed just now
SLICE_ROWS = 500  # some 2 ms of the loop
KINDS = ("archive", "rejected", "read", "output", "attachments", "unfinished", "audit")
UNFINISHED_NS = 3600 * NS_PER_S
_UNFINISHED = re.compile(r"\..+\.tmp")  # as senders name what they have not renamed yet
_PREFIX = re.compile(r"[0-9a-f]{2}")
_MIB = 1 << 20


class File(NamedTuple):
    """One candidate for removal."""

    folder: tuple[str, ...]
    name: str
    n_bytes: int
    at_ns: int  # what its age is counted from


class Pruned(NamedTuple):
    """Files or rows removed, or that would be, of one kind."""

    kind: str  # of KINDS
    number: int = 0  # of files, or rows
    n_bytes: int = 0
    oldest_ns: int | None = None
    newest_ns: int | None = None
    next_number: int = 0  # of a dry run: those that go next because of their age
    next_ns: int | None = None  # and when they go

    def plus(self, n_bytes: int, at_ns: int) -> Pruned:
        """One more."""
        oldest = at_ns if self.oldest_ns is None else min(self.oldest_ns, at_ns)
        newest = at_ns if self.newest_ns is None else max(self.newest_ns, at_ns)
        return self._replace(
            number=self.number + 1,
            n_bytes=self.n_bytes + n_bytes,
            oldest_ns=oldest,
            newest_ns=newest,
        )

    def later(self, at_ns: int, days: int) -> Pruned:
        """One more that goes later: when it has been ``days`` old for a whole day."""
        due_ns = (at_ns // DAY_NS + days + 1) * DAY_NS
        if self.next_ns is not None and due_ns > self.next_ns:
            return self
        same = self.next_number if due_ns == self.next_ns else 0
        return self._replace(next_number=same + 1, next_ns=due_ns)


def prune_files(
    home: Home, settings: RetentionSettings, now_ns: int, *, dry_run: bool = False
) -> Iterator[list[Pruned] | None]:
    """Remove the files past their retention; yields None after each slice, so that the caller can
    pause, and finally a summary per kind.

    The caller holds the home's lock or is the relay, except with ``dry_run``. Errors: LedgerError,
    because only the ledger knows which files are needed; OSError.
    """
    needed, needed_days = files_in_use(home)
    pruned: list[Pruned] = []
    cutoff = 0
    for kind, files, days, mib in _kinds(home, settings):
        from_ns = cutoff if kind == "rejected" else 0  # older ones went with the archive
        cutoff = yield from _cutoff(files(), now_ns, days, mib)
        total, cost = Pruned(kind), 0
        with home.dirs() as dirs:
            for file in files():
                cost += 1
                if from_ns <= file.at_ns < cutoff and not _is_needed(file, needed, needed_days):
                    cost += REMOVAL
                    if dry_run or _remove(dirs.get(*file.folder), file.name):
                        total = total.plus(file.n_bytes, file.at_ns)
                elif dry_run and days and file.at_ns >= cutoff:
                    total = total.later(file.at_ns, days)
                if cost >= SLICE:
                    yield None
                    cost = 0
        pruned.append(total)
    pruned.append((yield from _remove_attachments(home, settings, now_ns, dry_run=dry_run)))
    left = unfinished_attachments(home, now_ns)
    pruned.append((yield from remove_files(home, "unfinished", left, dry_run=dry_run)))
    if not dry_run:
        for day in archive_pack.days(home):
            if _is_past(settings.archive_days, _day_ns(day), now_ns):
                archive_pack.remove_empty(home, "archive", day)
    yield pruned


def _kinds(
    home: Home, settings: RetentionSettings
) -> tuple[tuple[str, Callable[[], Iterator[File]], int, int], ...]:
    """Each kind of file, in the order of removal: its name, its files, days and MiB to be kept."""

    def rejected() -> Iterator[File]:
        return (file for file in _archive_files(home) if file.folder[-1] == REJECTED)

    return (
        ("archive", lambda: _archive_files(home), settings.archive_days, settings.archive_mib),
        ("rejected", rejected, settings.rejected_days, 0),
        ("read", lambda: _read_files(home), settings.read_days, settings.read_mib),
        ("output", lambda: _orphaned_logs(home), settings.output_days, 0),
    )


def _cutoff(files: Iterable[File], now_ns: int, days: int, mib: int) -> Generator[None, None, int]:
    """The time before which files are removed, by age or total size; 0: none.

    Always midnight, because the archive is pruned by whole days; a day that ended less than a day
    ago stays. Yields None after each slice.
    """
    today = now_ns // DAY_NS * DAY_NS
    cutoff = today - days * DAY_NS if days else 0
    if mib:
        by_day: Counter[int] = Counter()
        for number, file in enumerate(files):
            if file.at_ns >= cutoff:
                by_day[file.at_ns // DAY_NS] += file.n_bytes
            if number % SLICE == SLICE - 1:
                yield
        over = sum(by_day.values()) - mib * _MIB
        for day in sorted(by_day):
            if over <= 0:
                break
            over -= by_day[day]
            cutoff = (day + 1) * DAY_NS
    return min(cutoff, today - DAY_NS)


def files_in_use(home: Home) -> tuple[Set[str], Set[str]]:
    """The messages with open rows or pending deliveries, and the days of the archive that have
    their files. Errors: LedgerError."""
    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        rows = db.execute(
            "SELECT message_id, file_path, discovered_at FROM messages "
            "WHERE status IN ('pending', 'processing', 'completed') UNION "
            "SELECT d.message_id, m.file_path, m.discovered_at "
            "FROM deliveries AS d JOIN messages AS m USING (message_id) "
            "WHERE d.state IN ('held', 'staged')"
        ).fetchall()
    parts = [row[1].split("/") for row in rows]
    days = {part[1] for part in parts if part[0] == "archive" and len(part) > 1}
    days |= {iso_date(row[2]) for row in rows}  # it may be archived already, and not yet recorded
    return {row[0] for row in rows}, days


def _is_needed(file: File, message_ids: Set[str], days: Set[str]) -> bool:
    if file.name.endswith(SUFFIX):
        return file.name.removesuffix(SUFFIX) in days
    # a refused or duplicate file may have a number appended
    name = file.name[: file.name.find(MSG_SUFFIX) + len(MSG_SUFFIX)]
    return message_id_of(name) in message_ids


def _remove(folder: int, name: str) -> bool:
    there = fsio.exists(name, folder)
    fsio.remove(name, folder)
    return there


def _is_past(days: int, at_ns: int, now_ns: int) -> bool:
    return bool(days) and at_ns < now_ns - days * DAY_NS


# -- files by kind ------------------------------------------------------------------------------


def _archive_files(home: Home) -> Iterator[File]:
    """Every file of the archive, packs included, dated by its day."""
    for name in sorted(_names(home.path("archive"))):
        day = name.removesuffix(SUFFIX)
        if not archive_pack.is_day(day):
            continue
        if day != name:
            size = os.lstat(home.path("archive", name)).st_size
            yield File(("archive",), name, size, _day_ns(day))
        else:
            yield from _files_below(home, ("archive", day), _day_ns(day))


def _files_below(home: Home, parts: tuple[str, ...], at_ns: int) -> Iterator[File]:
    """Every file below a folder; with ``at_ns`` 0 dated by its modification time."""
    folders = []
    with home.dirs() as dirs, contextlib.suppress(FileNotFoundError, UnsafePath):
        with os.scandir(dirs.get(*parts)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield File(parts, entry.name, status.st_size, at_ns or status.st_mtime_ns)
    for name in sorted(folders):
        yield from _files_below(home, (*parts, name), at_ns)


def _read_files(home: Home) -> Iterator[File]:
    """Files that agents have read, dated by when they were moved there."""
    for agent in home.agent_names():
        parts = ("agents", agent, "inbox", READ)
        with home.dirs() as dirs, contextlib.suppress(FileNotFoundError, UnsafePath):
            with os.scandir(dirs.get(*parts)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if entry.is_file(follow_symlinks=False):
                            yield File(parts, entry.name, status.st_size, status.st_ctime_ns)


def _orphaned_logs(home: Home) -> Iterator[File]:
    """Logs of agents whose directory is gone."""
    agents = set(home.agent_names()) | {"relay"}
    for name in sorted(_names(home.path("logs"))):
        agent, dot, _ = name.partition(".log")
        if dot and is_agent_name(agent) and agent not in agents:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(home.path("logs", name))
                yield File(("logs",), name, status.st_size, status.st_mtime_ns)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _day_ns(day: str) -> int:
    return parse_time(f"{day}T00Z")


# -- attachments -------------------------------------------------------------------------------


def _remove_attachments(
    home: Home, settings: RetentionSettings, now_ns: int, *, dry_run: bool
) -> Generator[None, None, Pruned]:
    """Remove attachments that no message names and no recipient is still to read."""
    days, mib = settings.attachments_days, settings.attachments_mib
    older_than_ns = yield from _cutoff(_attachment_files(home), now_ns, days, mib)
    path = home.path(LEDGER)
    if older_than_ns <= 0 or not _is_current_version(path):
        return Pruned("attachments")
    # A connection of its own, which only reads: the loop is the ledger's only writer.
    with contextlib.closing(open_readonly(path)) as db:
        files = unneeded_attachments(home, AgentTable(db), older_than_ns)
        return (yield from remove_files(home, "attachments", files, dry_run=dry_run))


def remove_files(
    home: Home, kind: str, files: Iterator[File | None], *, dry_run: bool
) -> Generator[None, None, Pruned]:
    """Remove files as they are found; yields None where that does."""
    pruned = Pruned(kind)
    with home.dirs() as dirs:
        for file in files:
            if file is None:
                yield
            elif dry_run or _remove(dirs.get(*file.folder), file.name):
                pruned = pruned.plus(file.n_bytes, file.at_ns)
    return pruned


def unneeded_attachments(
    home: Home, agents: AgentTable, older_than_ns: int
) -> Iterator[File | None]:
    """Yield attachments that are no longer needed, and None after each slice.

    These were last written, and last referred to, before ``older_than_ns`` (Unix ns); a sender that
    attaches an existing file updates its mtime. Attachments of undelivered or unread messages stay.
    ``agents``: of any connection, it is only read.
    """
    cost = 0
    for file in _attachment_files(home):
        cost += 1
        is_in_place = len(file.folder) == 2 and _PREFIX.fullmatch(file.folder[1])
        if is_in_place and file.at_ns < older_than_ns:
            if not agents.needs_attachment(file.name, older_than_ns):
                cost += REMOVAL
                yield file
        if cost >= SLICE:
            yield None
            cost = 0


def unfinished_attachments(home: Home, now_ns: int) -> Iterator[File | None]:
    """Yield what interrupted senders left of attachments, and None after each slice.

    One that was suspended as it wrote, with its machine or by ^Z, still has the file open.
    """
    in_use: set[str] | None = None
    for number, file in enumerate(_attachment_files(home)):
        if _UNFINISHED.fullmatch(file.name) and file.at_ns < now_ns - UNFINISHED_NS:
            in_use = _open_paths() if in_use is None else in_use
            if os.path.realpath(home.path(*file.folder, file.name)) not in in_use:
                yield file
        if number % SLICE == SLICE - 1:
            yield None


def _open_paths() -> set[str]:
    """Paths of the files that processes of this user have open."""
    paths: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths.update(file.path for file in process.open_files())
    return paths


def _is_current_version(path: str) -> bool:
    """False for a ledger that opening would migrate: the next start does that."""
    with contextlib.closing(open_readonly(path)) as db:
        return bool(db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION)


def _attachment_files(home: Home) -> Iterator[File]:
    for folder in sorted(_names(home.path("attachments"))):
        yield from _files_below(home, ("attachments", folder), 0)


# -- rows of the ledger -------------------------------------------------------------------------


def audit_due(db: sqlite3.Connection, settings: RetentionSettings, now_ns: int) -> Pruned:
    """Rows of audit_log and security_events past their age, and those of the day after; their
    size is unknown."""
    if not settings.audit_days:
        return Pruned("audit")
    kept_ns = settings.audit_days * DAY_NS
    number, oldest, newest = db.execute(_LOGGED, (0, now_ns - kept_ns) * 2).fetchone()
    first = db.execute(_LOGGED, (now_ns - kept_ns, _FOREVER) * 2).fetchone()[1]
    pruned = Pruned("audit", number, 0, oldest, newest)
    if first is None:
        return pruned
    later = db.execute(_LOGGED, (first, first + DAY_NS) * 2).fetchone()[0]
    return pruned._replace(next_number=later, next_ns=first + kept_ns)


_FOREVER = 2**63 - 1
_LOGGED = """
SELECT count(*), min(at), max(at) FROM (SELECT at FROM audit_log WHERE at >= ? AND at < ?
UNION ALL SELECT at FROM security_events WHERE at >= ? AND at < ?)"""


def prune_rows(
    home: Home, ledger: Ledger, settings: RetentionSettings, now_ns: int
) -> Iterator[int]:
    """Remove rows past their retention, a slice at a time, in the thread that owns the ledger.

    Yields after each slice how many rows of audit_log and security_events were removed. References
    to attachments that are gone follow them.
    """
    while pruned := prune_audit(ledger, settings, now_ns):
        yield pruned
    for _ in attachments.remove_references(home, ledger, now_ns - DAY_NS):
        yield 0


def prune_audit(ledger: Ledger, settings: RetentionSettings, now_ns: int) -> int:
    """Remove a slice of rows past their age, oldest first; returns how many.

    One transaction with the row in security_events that records it.
    """
    if not settings.audit_days:
        return 0
    before = now_ns - settings.audit_days * DAY_NS
    with ledger.transaction():
        pruned = ledger.agents.prune_log(before, now_ns, SLICE_ROWS)
        if sum(pruned.values()):
            summary = ", ".join(
                f"{count} rows of {table}" for table, count in pruned.items() if count
            )
            detail = f"removed {summary} from before {iso_date(before)}: retention.audit_days"
            ledger.agents.add_security_event(IncidentKind.AUDIT_PRUNED, None, None, detail, now_ns)
    return sum(pruned.values())
