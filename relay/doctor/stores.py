"""Checks of the store, the journal, its tiers, and the encryption key."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from relay.acomm import store_file
from relay.acomm.container import Flag
from relay.acomm.store_file import PREVIOUS
from relay.base.config import Config
from relay.base.errors import FormatError, KeyFileError, RelayError, SealedStore
from relay.base.home import BASE, STORE, Home
from relay.daemon.journal_commands import covered_offset
from relay.daemon.opening import opens, store_key, stream_dir
from relay.doctor.finding import Finding, Severity, Target, describe_error, list_dir
from relay.journal import check
from relay.journal.catalog import Catalog, Residency
from relay.journal.format import ManifestType, Reason
from relay.journal.journal import JournalReader
from relay.journal.replay import checkpoint_offsets, read_manifest
from relay.journal.segment import SegmentPolicy, segment_files, segment_path

_DUMP = "`relay aof dump` prints its valid records; remove the file when it is not needed"
GONE = "put it back, or continue: the relay begins a new one; events after the checkpoint are lost"
_LOST = "are lost"  # in a line of the journal's check, after the offsets
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
_REMEDIES = {  # for failures that need the operator
    Reason.CODEC: "damaged local copy: `relay journal hydrate {n}` replaces it from another tier",
    Reason.AUTHENTICATION: "fix the credentials of the object store, then restart the relay or"
    " `relay journal upload {n}`",
    Reason.MISSING: "restore the object from a backup or an earlier version of the bucket, then"
    " `relay journal hydrate {n}`",
}


def check_stores(target: Target) -> Iterator[Finding]:
    """Check the store, the journal and the tiers, in this order."""
    home = target.home
    covered = max(covered_offset(home.path(name)) for name in (STORE, STORE + PREVIOUS))
    yield from _store(home)
    if os.path.isdir(stream_dir(home)):
        yield from _journal(home, covered)
        yield from _tiers(read_manifest(stream_dir(home), _ignore).catalog, target.config)
    elif covered:
        found = f"{stream_dir(home)} is missing, but the store covers it up to {covered}"
        yield Finding("journal", found, GONE)


# -- the store -------------------------------------------------------------------------------


def _store(home: Home) -> Iterator[Finding]:
    """Check the checkpoints and the files that were set aside."""
    path, previous = home.path(STORE), home.path(STORE) + PREVIOUS
    wrong, wrong_before = _damage_of(path), _damage_of(previous)
    written = len(checkpoint_offsets(stream_dir(home)))
    if wrong and (written or os.path.lexists(path)):
        remedy = f"the next start rebuilds the store from {os.path.basename(previous)}"
        if wrong_before:
            remedy = _without_checkpoints(home)
        yield Finding("store", wrong, remedy)
    if wrong_before and (written > 1 or os.path.lexists(previous)):
        yield Finding("store", wrong_before, "the next checkpoint replaces it")
    base = home.path(BASE)
    if os.path.lexists(base) and (wrong := _damage_of(base)):
        yield Finding("store", wrong, "the next checkpoint, or `relay journal prune`, replaces it")
    for name in list_dir(home.path(os.path.dirname(STORE))):
        if ".bad" in name:
            found = f"{name}: a damaged file was set aside; the store was rebuilt without it"
            yield Finding("store", found, "inspect it with `relay acomm check`, then remove it")


def _without_checkpoints(home: Home) -> str:
    """Describe what the next start does when both checkpoints are damaged or missing."""
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        return "the relay does not start: restore the store from a backup, or move it away"
    first = JournalReader(folder).first()
    if covered_offset(home.path(BASE)) < first:
        return "the relay does not start: restore it from a backup"
    return f"the next start rebuilds the store from the journal{f' and {BASE}' if first else ''}"


def _damage_of(path: str) -> str:
    """Describe the damage of a store file, or return ""."""
    try:
        store_file.read(path)
    except FileNotFoundError:
        return f"{path}: missing"
    except (RelayError, OSError) as exc:
        return describe_error(exc)
    return ""


# -- the journal -----------------------------------------------------------------------------


def _journal(home: Home, covered: int) -> Iterator[Finding]:
    """Check the stream's files, files set aside, and the offsets that the store covers."""
    folder = stream_dir(home)
    for problem in check.check_stream(folder).problems:
        yield Finding("journal", problem, _remedy_of(problem))
    for sub in ("segments", "manifest", "warm"):
        for name in list_dir(os.path.join(folder, sub)):
            for suffix, (what, remedy) in _ASIDE.items():
                if suffix in name:
                    yield Finding("journal", f"{os.path.join(folder, sub, name)}: {what}", remedy)
    first, end = stream_range(folder)
    yield from _surplus(folder, end)
    base = covered_offset(home.path(BASE))
    if max(covered, base) < first:
        yield Finding(
            "journal",
            f"it begins at {first}, but no store file covers the pruned records before it",
            f"restore {STORE}, {STORE}{PREVIOUS} or {BASE} from a backup",
        )
    elif base < first:
        yield Finding(
            "journal",
            f"it begins at {first}, but {BASE} does not cover the pruned part before",
            f"keep copies of {STORE} until `relay journal prune` has written a new one",
        )
    if end is not None and covered > end:
        yield Finding(
            "journal",
            f"it ends at {end}, but the store covers it up to {covered}: files were removed",
            "put them back, or continue: the relay begins a new segment after the gap",
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
                f"{path} has {ahead >> 20} MiB of zeros after its last record",
                "restart the relay: each start truncates them",
                Severity.WARNING,
                path,
            )


def _remedy_of(problem: str) -> str:
    if "torn tail" in problem:
        return "the next start sets it aside; nothing in it had been accepted"
    if f"{_LOST}; the rest was salvaged" in problem:
        return "their events may still be in the store's files and archives"
    return "`relay journal hydrate SEGMENT` repairs a segment from another tier; else use a backup"


def stream_range(folder: str) -> tuple[int, int | None]:
    """Return the stream's first offset and its end, or None if damage hides the end.

    In the newest segment a reader cannot tell damage from a torn tail.
    """
    files = segment_files(folder)[-1:]
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
    """Check for failures that need the operator, and for segments without a configured store."""
    for (number, kind), failure in catalog.failures.items():
        known = {reason.value: reason for reason in Reason}.get(failure.reason)
        if number in catalog.entries and known in _REMEDIES:
            found = f"segment {number}: {ManifestType(kind).name}, {known.name.lower()}"
            found += f", {failure.times} times"
            yield Finding("tiers", found, _REMEDIES[known].format(n=number))
    away = [n for n, entry in catalog.entries.items() if entry.residency == Residency.TIER2]
    if away and not config.journal.objects:
        found = f"{len(away)} segments from {away[0]} on are in Tier 2, which is not configured"
        yield Finding("tiers", found, "set journal.objects in config.json")


def _ignore(_: str) -> None:
    """Ignore warnings, which other checks report."""


def check_encryption(target: Target) -> Iterator[Finding]:
    """Check that the configured key opens store and journal; yield the first failure."""
    home = target.home
    try:
        key = store_key(home, target.config, make=False)
        for path in (home.path(STORE), home.path(STORE) + PREVIOUS):
            _open(path, key)
        if not opens(home, key):
            what = ", and no key was given" if key is None else " with another key"
            raise SealedStore(f"{stream_dir(home)} is encrypted{what}")
    except (KeyFileError, SealedStore) as exc:
        yield Finding("store", describe_error(exc), f"the relay does not start: {exc.hint}")
    except (FormatError, OSError):
        return  # damage is reported by the other checks


def _open(path: str, key: bytes | None) -> None:
    """Errors: SealedStore."""
    with contextlib.suppress(FormatError, OSError):
        if store_file.peek_header(path).flags & Flag.ENCRYPTED:
            store_file.decrypt(store_file.read(path, warn=_ignore), key, path)
