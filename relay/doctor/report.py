"""The home to check, helpers of the checks, and the safe repairs."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.errors import AlreadyRunning, LedgerError, RelayError, UnsafePath
from relay.base.finding import Finding, Repair, Severity
from relay.base.home import LEDGER, Home, locked_home
from relay.ledger.check import RESTORE

MAX_NAMED = 3  # examples named in a finding; the others are counted
RECHECK_AFTER_S = 1.0  # a running relay has finished its current batch by then
MODES = {"chmod 700": fsio.DIR_MODE, "chmod 600": fsio.FILE_MODE}


class Target(NamedTuple):
    """The home to check."""

    home: Home
    config: Config
    clock: Clock
    is_running: bool = False
    deep: bool = False


def recheck(
    target: Target,
    check: Callable[[Target], Iterable[Finding]],
    key: Callable[[Finding], str] = attrgetter("where"),
) -> Iterator[Finding]:
    """Yield what a check finds; with a running relay only what a second run finds again.

    ``key``: equal for the same finding in both runs.
    """
    found = {key(finding): finding for finding in check(target)}
    if found and target.is_running:
        time.sleep(RECHECK_AFTER_S)
        found = {key(finding): finding for finding in check(target) if key(finding) in found}
    yield from found.values()


def list_dir(folder: str) -> list[str]:
    """List a folder's names in order; empty if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def unreadable_ledger(exc: LedgerError) -> Finding:
    """Say why the ledger cannot be read, and how to get one that can."""
    advice = exc.hint if exc.hint != LedgerError.hint else f"{exc.hint}; {RESTORE}"
    return Finding("ledger", LEDGER, describe_error(exc), advice)


def wrong_type(exc: TypeError | ValueError) -> Finding:
    """Say that a row has a value of another type, which SQLite keeps: no relay writes such."""
    found = f"a value is not of its column's type ({exc}); the rest is not checked"
    return Finding("ledger", LEDGER, found, "stop the relay, then `relay ledger rebuild`")


def describe_error(exc: RelayError | OSError) -> str:
    """Format an error as one line."""
    return Finding.of_error("", exc).text


def partial_check(what: str, checked: int, total: int, of: str) -> Finding:
    """Make the note that only a part was checked."""
    found = f"checked {checked} of {total} {of}"
    advice = "no action needed; checking all would take long"
    return Finding(what, f"part of {of}", found, advice, Severity.NOTE, is_partial=True)


def listed(
    what: str,
    found: str,
    items: Sequence[str],
    advice: str,
    severity: Severity = Severity.WARNING,
    *,
    where: str = "",
    repairs: Iterable[Repair] = (),
) -> Iterator[Finding]:
    """Yield a finding that names the first of these items and counts the others, if any."""
    if items:
        more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
        found = f"{found}: {', '.join(items[:MAX_NAMED])}{more}"
        yield Finding(what, where or items[0], found, advice, severity, repairs=tuple(repairs))


def repair(home: Home, findings: Iterable[Finding]) -> Iterator[tuple[Repair, str]]:
    """Apply the safe repairs; yield each with its error, or "".

    Modes are changed even while a relay is running; files are removed only with the home's lock.
    """
    with contextlib.ExitStack() as held:
        why = ""
        try:
            held.enter_context(locked_home(home.root))
        except BlockingIOError:
            why = str(AlreadyRunning("a running relay does this itself"))
        for finding in findings:
            for repair in finding.repairs:
                yield repair, _do(home, repair, why)


def _do(home: Home, repair: Repair, why_not: str) -> str:
    *folder, name = repair.path.split("/")
    try:
        with home.dirs() as dirs:
            if repair.action in MODES:
                fsio.restrict(name, MODES[repair.action], dirs.get(*folder))
                return ""
            if why_not:
                return why_not
            status = os.stat(name, dir_fd=dirs.get(*folder), follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISSOCK(status.st_mode):
                return "it is not a regular file"
            fsio.remove(name, dirs.get(*folder))
    except FileNotFoundError:
        return ""
    except (OSError, UnsafePath) as exc:
        return describe_error(exc)
    return ""
