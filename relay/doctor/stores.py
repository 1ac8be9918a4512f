"""Checks of the stores of a home: each by the check of its own, then whether they agree.

Adds what only the home knows: what the next start makes of damage, files set aside, the offsets
that store, journal and ledger cover, tiers, and the encryption key.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from relay.acomm import check as acomm_check
from relay.acomm.store_file import PREVIOUS
from relay.base.config import Config
from relay.base.errors import KeyFileError, LedgerError, RelayError, SealedStore, SegmentAway
from relay.base.finding import Finding, Severity
from relay.base.home import ARCHIVES, BASE, LEDGER, SEARCH, STORE, Home, unclean_stop
from relay.base.text import times
from relay.daemon import agreement
from relay.daemon.home_journal import covered_offset, stream_dir
from relay.daemon.opening import open_store_readonly, store_key
from relay.doctor.report import (
    Target,
    describe_error,
    list_dir,
    partial_check,
    recheck,
    unreadable_ledger,
    wrong_type,
)
from relay.engine import check as engine_check
from relay.engine.engine import Engine
from relay.engine.events import Event
from relay.journal import check as journal_check
from relay.journal.catalog import Catalog, Residency, SegmentEntry
from relay.journal.journal import JournalReader
from relay.journal.manifest_format import ManifestType, Reason
from relay.journal.manifest_reader import checkpoint_offsets, read_manifest
from relay.journal.segment import SegmentPolicy, segment_files, segment_path
from relay.ledger import check as ledger_check
from relay.ledger.file import open_readonly
from relay.search import check as search_check

MAX_ROWS = 50_000  # the newest of each kind; takes some tenths of a second
_DUMP = "`relay dump` prints its valid records; remove the file when it is not needed"
GONE = "put it back, or continue: the relay begins a new one; events after the checkpoint are lost"
_ASIDE = {  # suffix in the journal -> what happened, what to do
    ".seg.bad": ("a damaged segment was set aside; its valid records were kept", _DUMP),
    ".mlog.bad": (
        "a damaged manifest chunk was set aside; the manifest was rebuilt",
        "`relay journal status` shows the current one; the file may be removed",
    ),
    ".torn": (
        "a write cut short by a crash was set aside; nothing in it had been accepted",
        "no action needed; the file may be removed",
    ),
}
_ADVICE = {  # for failures that need the operator
    Reason.CODEC: "damaged local copy: `relay journal move --to 0 {n}` restores it from another",
    Reason.AUTHENTICATION: "fix the credentials of the object store, then restart the relay or"
    " `relay journal move --to 2 --copy {n}`",
    Reason.MISSING: "restore the object from a backup or an earlier version of the bucket, then"
    " `relay journal move --to 0 {n}`",
}


def check_stores(target: Target) -> Iterator[Finding]:
    """Check the store, the journal, the tiers, the ledger, and that they agree, in this order."""
    home = target.home
    with contextlib.ExitStack() as stack:
        position: int | Finding
        try:
            db = stack.enter_context(contextlib.closing(open_readonly(home.path(LEDGER))))
            query = "SELECT value FROM orchestrator_state WHERE key = 'journal'"
            row = db.execute(query).fetchone()  # before the journal, which may grow meanwhile
            position = int(row[0]) if row else 0
        except LedgerError as exc:
            position = unreadable_ledger(exc)
        except ValueError as exc:
            position = wrong_type(exc)
        yield from _check_store_files(target)
        yield from _check_journal(target, position)
        if isinstance(position, Finding):
            yield from _check_loaded(target, None)
            yield position
            return
        yield from _check_ledger(db)
        yield from recheck(target, lambda target: _check_loaded(target, db, position), str)


def check_search(target: Target) -> Iterator[Finding]:
    """Check the search index, which is derived: damage of it is a warning."""
    path = target.home.path(SEARCH)
    yield from search_check.check(path, deep=target.deep, is_running=target.is_running)


# -- the store -------------------------------------------------------------------------------


def _check_store_files(target: Target) -> Iterator[Finding]:
    """Check the checkpoints, the base, archives (``deep``), and files that were set aside."""
    home = target.home
    path, previous, base = home.path(STORE), home.path(STORE) + PREVIOUS, home.path(BASE)
    written = len(checkpoint_offsets(stream_dir(home)))  # before the files: a relay may write them
    has_previous = os.path.lexists(previous)
    wrong, wrong_before = _check_file(path), _check_file(previous)
    if written or os.path.lexists(path):
        advice = f"the next start rebuilds the store from {os.path.basename(previous)}"
        if not _opens(wrong_before):
            advice = _without_checkpoints(home)
        yield from _advised(wrong, advice)
    if has_previous:
        yield from _advised(wrong_before, "the next checkpoint replaces it")
    elif written > 1:  # a backup has the newest alone
        severity = Severity.NOTE if _opens(wrong) else Severity.ERROR
        advice = "the next checkpoint replaces it"
        yield from _advised(
            [finding._replace(severity=severity) for finding in wrong_before], advice
        )
    if os.path.lexists(base):
        advice = "the next checkpoint, or `relay journal prune`, replaces it"
        yield from _advised(_check_file(base), advice)
    for name in list_dir(home.path(os.path.dirname(STORE))):
        if ".bad" in name:
            found = f"{name}: a damaged file was set aside; the store was rebuilt without it"
            advice = "inspect it with `relay check`, then remove it"
            yield Finding("store", name, found, advice)
    for folder, _, names in os.walk(home.path(ARCHIVES)) if target.deep else ():
        for name in sorted(names):
            if name.endswith(".acomm"):
                findings = _check_file(os.path.join(folder, name))
                yield from _advised(findings, "restore it from a backup")


def _check_file(path: str) -> list[Finding]:
    """Check one file; a missing one is a finding, too."""
    if not os.path.lexists(path):
        return [Finding("store", path, f"{path}: missing")]
    found = acomm_check.check_file(path)
    return [finding for finding in found if finding.severity is Severity.ERROR]


def _opens(findings: list[Finding]) -> bool:
    return all(finding.advice == acomm_check.OPENS for finding in findings)


def _advised(findings: list[Finding], advice: str) -> Iterator[Finding]:
    for finding in findings:
        yield finding._replace(advice=finding.advice or advice)


def _without_checkpoints(home: Home) -> str:
    """Describe what the next start does when both checkpoints are damaged or missing."""
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        return "the relay does not start: restore the store from a backup, or move it away"
    first = JournalReader(folder).first()
    if covered_offset(home.path(BASE)) < first:
        return "the relay does not start: restore it from a backup"
    return f"the next start rebuilds the store from the journal{f' and {BASE}' if first else ''}"


# -- the journal -----------------------------------------------------------------------------


def _check_journal(target: Target, position: int | Finding) -> Iterator[Finding]:
    """Check the stream, files set aside, tiers, and that the offsets of the stores agree."""
    folder = stream_dir(target.home)
    begin, end = 0, None
    if os.path.isdir(folder):
        findings = [
            finding for finding in journal_check.check(folder) if finding.severity is Severity.ERROR
        ]
        yield from findings
        yield from _check_set_aside(folder)
        view = read_manifest(folder, _ignore)
        entries = list(view.catalog.entries.values())
        begin = 0 if view.damaged else min((entry.base_offset for entry in entries), default=0)
        end = _end_of(folder, entries, findings)
        if end is not None:
            yield from _check_surplus(folder, entries, end)
        yield from _check_tiers(view.catalog, target.config)
    yield from _check_offsets(target.home, position, begin, end)


def _end_of(folder: str, entries: list[SegmentEntry], findings: list[Finding]) -> int | None:
    """Return the stream's end, or None if damage hides it.

    In the newest segment a reader cannot tell damage from a torn tail.
    """
    newest = [path for path, _ in list(segment_files(folder).values())[-1:] if path]
    damaged = [finding.where for finding in findings if finding.advice != journal_check.TORN]
    if any(where.startswith(path) for path in newest for where in damaged):
        return None
    end = entries[-1].end_offset if entries else 0
    try:
        for record in JournalReader(folder).read(entries[-1].base_offset if entries else 0):
            end = record.end
    except (RelayError, OSError):
        return None
    return end


def _check_set_aside(folder: str) -> Iterator[Finding]:
    for sub in ("segments", "manifest", "warm"):
        for name in list_dir(os.path.join(folder, sub)):
            for suffix, (what, advice) in _ASIDE.items():
                if suffix in name:
                    path = os.path.join(folder, sub, name)
                    severity = Severity.NOTE if suffix == ".torn" else Severity.ERROR
                    yield Finding("journal", path, f"{path}: {what}", advice, severity)


def _check_surplus(folder: str, entries: list[SegmentEntry], end: int) -> Iterator[Finding]:
    """Check for an active segment with more zeros ahead than a relay writes."""
    active = [entry for entry in entries if not entry.sealed]
    if not active:
        return
    newest = max(active, key=lambda entry: entry.segment_id)
    path = segment_path(folder, newest.segment_id)
    with contextlib.suppress(FileNotFoundError):  # sealed, and moved on
        ahead = os.stat(path).st_size - (end - newest.base_offset)
        if ahead > 2 * SegmentPolicy().ahead_bytes:
            found = f"{path} has {ahead >> 20} MiB of zeros after its last record"
            advice = "restart the relay: each start truncates them"
            yield Finding("journal", path, found, advice, Severity.WARNING)


def _check_tiers(catalog: Catalog, config: Config) -> Iterator[Finding]:
    """Check for failures that need the operator, and for segments without a configured store."""
    for (number, kind), failure in catalog.failures.items():
        known = {reason.value: reason for reason in Reason}.get(failure.reason)
        if number in catalog.entries and known in _ADVICE:
            found = f"segment {number}: {ManifestType(kind).name}, {known.name.lower()}"
            found += f", {times(failure.times)}"
            yield Finding("tiers", f"segment {number}", found, _ADVICE[known].format(n=number))
    away = [n for n, entry in catalog.entries.items() if entry.residency == Residency.TIER2]
    if away and not config.journal.objects:
        found = f"{len(away)} segments from {away[0]} on are in Tier 2, which is not configured"
        yield Finding("tiers", f"segment {away[0]}", found, "set journal.objects in config.json")


def _check_offsets(
    home: Home, position: int | Finding, first: int, end: int | None
) -> Iterator[Finding]:
    """Check that store and ledger are covered by the journal, and the journal by the store."""
    folder = stream_dir(home)
    base = covered_offset(home.path(BASE))
    covered = max(covered_offset(home.path(name)) for name in (STORE, STORE + PREVIOUS))
    if not os.path.isdir(folder):
        if covered:
            found = f"{folder} is missing, but the store covers it up to {covered}"
            yield Finding("journal", folder, found, GONE)
        if isinstance(position, int) and position:
            found = f"it follows the journal up to {position}, but there is no journal"
            yield Finding("ledger", LEDGER, found, GONE)
        return
    if max(covered, base) < first:
        found = f"it begins at {first}, but no store file covers the pruned records before it"
        advice = f"restore {STORE}, {STORE}{PREVIOUS} or {BASE} from a backup"
        yield Finding("journal", folder, found, advice)
    elif base < first:
        found = f"it begins at {first}, but {BASE} does not cover the pruned part before"
        advice = f"keep copies of {STORE} until `relay journal prune` has written a new one"
        yield Finding("journal", folder, found, advice)
    again = "put them back, or continue: the relay begins a new segment after the gap"
    if end is not None and covered > end:
        found = f"it ends at {end}, but the store covers it up to {covered}: files were removed"
        yield Finding("journal", folder, found, again)
    if not isinstance(position, int):
        return
    if end is not None and position > end:
        found = f"it follows the journal up to {position}, but that ends at {end}: files were"
        yield Finding("ledger", LEDGER, f"{found} removed", again)
    if position < first:
        found = f"it follows the journal up to {position}, but everything before {first} was pruned"
        advice = "rows of that time cannot be rebuilt: restore ledger.db from a backup, or do"
        yield Finding("ledger", LEDGER, found, f"{advice} without")


# -- the ledger, and the store as a start loads it ---------------------------------------------


def _check_ledger(db: sqlite3.Connection) -> Iterator[Finding]:
    try:
        yield from ledger_check.check(db, LEDGER)
        for table, most in (("messages", MAX_ROWS), ("deliveries", 4 * MAX_ROWS)):
            (total,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            if total > most:
                yield partial_check("ledger", most, total, f"rows of {table}, the newest")
    except LedgerError as exc:
        yield Finding("ledger", LEDGER, str(exc), exc.hint)


def _check_loaded(
    target: Target, db: sqlite3.Connection | None, position: int = 0
) -> Iterator[Finding]:
    """Load the store as a start does, check its tables, and compare it with the ledger."""
    home = target.home
    is_killed = unclean_stop(home) is not None and not target.is_running

    def on_event(_: Event, _at_ns: int) -> None:
        nonlocal is_killed  # a stop ends with a checkpoint
        is_killed = not target.is_running

    try:
        key = store_key(home, target.config, make=False)
        store = open_store_readonly(home, target.clock, target.config, key, on_event)
    except (KeyFileError, SealedStore) as exc:
        found = describe_error(exc)
        if isinstance(exc, SealedStore):  # an event names the journal without its folder
            found = os.path.join(home.root, found)
        yield Finding("store", STORE, found, f"the relay does not start: {exc.hint}")
        return
    except (RelayError, OSError):
        return  # reported by the checks above
    yield from engine_check.check_archives(home.path(ARCHIVES), store.state.archives)
    if target.deep:
        yield from engine_check.check(store.state)
    if db is None or not (
        target.is_running or not agreement.is_behind(stream_dir(home), position, key)
    ):
        return  # the next start updates the ledger
    with contextlib.suppress(LedgerError):  # damage was reported above
        yield from agreement.check(db, store, most_rows=4 * MAX_ROWS, is_killed=is_killed)
        if target.deep and not is_killed:
            yield from _check_history(home, store, key)


def _check_history(home: Home, store: Engine, key: bytes | None) -> Iterator[Finding]:
    """Compare the ledger with the whole journal, where that is here."""
    try:
        yield from agreement.check_history(home.path(LEDGER), store, stream_dir(home), key)
    except SegmentAway as exc:
        found = f"deliveries were not compared with the journal: {exc}"
        yield Finding("ledger", LEDGER, found, "no action needed", Severity.NOTE)
    except (RelayError, OSError):
        return  # damage was reported above


def _ignore(_: str) -> None:
    """Ignore warnings, which other checks report."""
