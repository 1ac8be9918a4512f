"""Store, journal, tiers, and whether the ledger follows them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from relay.acomm import codec
from relay.acomm.store_file import PREVIOUS
from relay.base.config import Config
from relay.base.errors import LedgerError, RelayError
from relay.base.home import BASE, LEDGER, STORE, Home
from relay.daemon.journal_commands import covered_offset
from relay.daemon.opening import stream_dir
from relay.doctor.finding import RESTORE, Finding, Place, Severity, names, said
from relay.journal import check, commands
from relay.journal.catalog import Catalog, Residency
from relay.journal.format import ManifestType, Reason
from relay.journal.manifest import read_manifest
from relay.journal.reader import JournalReader
from relay.journal.segment import segment_path
from relay.journal.segments import SegmentPolicy
from relay.ledger import open_readonly

_DUMP = "`relay aof dump` reads what is good of it; remove it when nobody needs it any more"
_GONE = "put it back, or go on: the relay begins a new one, and what no checkpoint has is lost"
_LOST = "are lost"  # in a line of the check, behind the offsets
_ASIDE = {  # suffix in the journal -> what happened, what to do
    ".seg.bad": ("a damaged segment was set aside, its good records were kept", _DUMP),
    ".mlog.bad": (
        "a damaged chunk of the manifest was set aside, the manifest was made again",
        "`relay journal status` shows what it says now; remove the file when you like",
    ),
    ".torn": (
        "a write that a crash cut short was set aside: nothing of it was accepted",
        "nothing; remove the file when you like",
    ),
}
_REMEDIES = {  # of what waits for the operator
    Reason.CODEC: "a local copy is damaged: `relay journal hydrate {n}` mends it from another tier",
    Reason.AUTHENTICATION: "mend the credentials of the object store, then start the relay anew or"
    " `relay journal upload {n}`",
    Reason.MISSING: "put the object back from a backup or an earlier version of the bucket, then"
    " `relay journal hydrate {n}`",
}


def examine(place: Place) -> Iterator[Finding]:
    """Everything that is found, in the order store, journal, tiers."""
    home = place.home
    covered = max(covered_offset(home.path(name)) for name in (STORE, STORE + PREVIOUS))
    yield from _store(home)
    if os.path.isdir(stream_dir(home)):
        yield from _journal(home, covered)
        yield from _tiers(read_manifest(stream_dir(home), _ignore).catalog, place.config)
    elif covered:
        found = f"{stream_dir(home)} is gone, and the store covers it up to {covered}"
        yield Finding("journal", found, _GONE)


# -- the store -------------------------------------------------------------------------------


def _store(home: Home) -> Iterator[Finding]:
    """The checkpoints, and those that were set aside."""
    path, previous = home.path(STORE), home.path(STORE) + PREVIOUS
    wrong, wrong_before = _fault(path), _fault(previous)
    written = len(commands.checkpoint_offsets(stream_dir(home)))
    if wrong and (written or os.path.lexists(path)):
        remedy = f"the next start makes the store again of {os.path.basename(previous)}"
        if wrong_before:
            remedy = _without_checkpoints(home)
        yield Finding("store", wrong, remedy)
    if wrong_before and (written > 1 or os.path.lexists(previous)):
        yield Finding("store", wrong_before, "the next checkpoint replaces it")
    base = home.path(BASE)
    if os.path.lexists(base) and (wrong := _fault(base)):
        yield Finding("store", wrong, "the next checkpoint, or `relay journal prune`, replaces it")
    for name in names(home.path(os.path.dirname(STORE))):
        if ".bad" in name:
            found = f"{name}: a damaged file was set aside, the store was made without it"
            yield Finding("store", found, "`relay acomm check` says what it has; remove it then")


def _without_checkpoints(home: Home) -> str:
    """What the next start does when both are damaged or gone."""
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        return "the relay does not start: restore it from a backup, or move it away"
    first = JournalReader(folder).first()
    if covered_offset(home.path(BASE)) < first:
        return "the relay does not start: restore it from a backup"
    return f"the next start makes the store again from the journal{f' and {BASE}' if first else ''}"


def _fault(path: str) -> str:
    """What is wrong with a store file, or nothing."""
    try:
        codec.read(path)
    except FileNotFoundError:
        return f"{path}: missing"
    except (RelayError, OSError) as exc:
        return said(exc)
    return ""


# -- the journal -----------------------------------------------------------------------------


def _journal(home: Home, covered: int) -> Iterator[Finding]:
    """The stream's files, what was set aside, and whether the store's place lies within it."""
    folder = stream_dir(home)
    for problem in check.check_stream(folder).problems:
        yield Finding("journal", problem, _remedy_of(problem))
    for sub in ("segments", "manifest", "warm"):
        for name in names(os.path.join(folder, sub)):
            for suffix, (what, remedy) in _ASIDE.items():
                if suffix in name:
                    yield Finding("journal", f"{os.path.join(folder, sub, name)}: {what}", remedy)
    first, end = reach(folder)
    yield from _surplus(folder, end)
    base = covered_offset(home.path(BASE))
    if max(covered, base) < first:
        yield Finding(
            "journal",
            f"it begins at {first}, and no store file covers what was pruned before",
            f"restore {STORE}, {STORE}{PREVIOUS} or {BASE} from a backup",
        )
    elif base < first:
        yield Finding(
            "journal",
            f"it begins at {first}, and {BASE} does not cover what was pruned before",
            f"keep copies of {STORE} until `relay journal prune` has made one",
        )
    if end is not None and covered > end:
        yield Finding(
            "journal",
            f"it ends at {end}, and the store covers it up to {covered}: files were removed",
            "put them back, or go on: the relay begins a new segment behind the gap",
        )


def _surplus(folder: str, end: int | None) -> Iterator[Finding]:
    """An active segment with more zeros ahead than a relay writes."""
    entries = read_manifest(folder, _ignore).catalog.entries
    active = [entry for entry in entries.values() if not entry.sealed]
    if end is None or not active:
        return
    newest = max(active, key=lambda entry: entry.segment_id)
    path = segment_path(folder, newest.segment_id)
    with contextlib.suppress(FileNotFoundError):  # sealed, and moved on
        ahead = os.stat(path).st_size - (end - newest.base_offset)
        if ahead > 2 * SegmentPolicy().ahead_bytes:
            yield Finding(
                "journal",
                f"{path} has {ahead >> 20} MiB of zeros behind its last record",
                "restart the relay: each start cuts them off",
                Severity.WARNING,
                path,
            )


def _remedy_of(problem: str) -> str:
    if "torn tail" in problem:
        return "the next start sets it aside: nothing of it was accepted"
    if f"{_LOST}; the rest was salvaged" in problem:
        return "what they held is in the store's files and archives, if anywhere"
    return "`relay journal hydrate SEGMENT` mends a segment that another tier has; else a backup"


def reach(folder: str) -> tuple[int, int | None]:
    """Where the stream begins and ends; the end is None where damage hides it.

    In the newest segment damage and a torn tail look alike to who reads on.
    """
    files = check.segment_files(folder)[-1:]
    if any(
        _LOST in problem for file in files for problem in check.check_stream(file.path).problems
    ):
        return JournalReader(folder).first(), None
    reader = JournalReader(folder)
    entries = list(read_manifest(folder, _ignore).catalog.entries.values())
    end = entries[-1].end_offset if entries else 0
    try:
        for record in reader.read(entries[-1].base_offset if entries else 0):
            end = record.end
    except (RelayError, OSError):
        return reader.first(), None
    return reader.first(), end


def _tiers(catalog: Catalog, config: Config) -> Iterator[Finding]:
    """What waits for the operator, and what no configured store can give back."""
    for (number, kind), failure in catalog.failures.items():
        known = {reason.value: reason for reason in Reason}.get(failure.reason)
        if number in catalog.entries and known in _REMEDIES:
            found = f"segment {number}: {ManifestType(kind).name}, {known.name.lower()}"
            found += f", {failure.times} times"
            yield Finding("tiers", found, _REMEDIES[known].format(n=number))
    away = [n for n, entry in catalog.entries.items() if entry.residency == Residency.TIER2]
    if away and not config.journal.objects:
        found = f"{len(away)} segments from {away[0]} on are in Tier 2 alone, and no store is named"
        yield Finding("tiers", found, "name it again: journal.objects in config.json")


# -- the ledger ------------------------------------------------------------------------------


def ledger_position(home: Home) -> int | Finding:
    """Up to where the ledger follows the journal."""
    try:
        db = open_readonly(home.path(LEDGER))
        try:
            query = "SELECT value FROM orchestrator_state WHERE key = 'journal'"
            row = db.execute(query).fetchone()
        finally:
            db.close()
    except LedgerError as exc:
        remedy = exc.hint if exc.hint != LedgerError.hint else f"{exc.hint}; {RESTORE}"
        return Finding("ledger", said(exc), remedy)
    return int(row[0]) if row else 0


def ledger(home: Home, position: int | Finding) -> Iterator[Finding]:
    """Whether what the ledger follows is there."""
    if isinstance(position, Finding):
        yield position
        return
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        if position:
            found = f"it follows the journal up to {position}, and there is none"
            yield Finding("ledger", found, _GONE)
        return
    first, end = reach(folder)
    if end is not None and position > end:
        yield Finding(
            "ledger",
            f"it follows the journal up to {position}, and that ends at {end}: files were removed",
            "put them back, or go on: the relay begins a new segment behind the gap",
        )
    if position < first:
        yield Finding(
            "ledger",
            f"it follows the journal up to {position}, and what came before {first} was pruned",
            "rows of that time are not made again: restore ledger.db from a backup, or do without",
        )


def _ignore(_: str) -> None:
    """``check`` names every finding of the manifest once."""
