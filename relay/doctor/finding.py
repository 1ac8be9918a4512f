"""Findings, helpers of the checks, and the safe repairs."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.errors import AlreadyRunning, RelayError, UnsafePath
from relay.base.home import LOCK, Home

RESTORE = "restore a backup with `relay ledger restore FILE`; the next start replays the rest"
MAX_NAMED = 3  # examples named in a finding; the others are counted
RECHECK_AFTER_S = 1.0  # a running relay has finished its current batch by then


MODES = {"chmod 700": fsio.DIR_MODE, "chmod 600": fsio.FILE_MODE}


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # something is lost or does not work
    WARNING = "warning"  # may become an error, or needs attention
    NOTE = "note"  # information, not a problem


class Repair(NamedTuple):
    """One safe change of a file in the home."""

    action: str  # remove, or one of MODES
    path: str  # relative to the home


class Finding(NamedTuple):
    """A problem and its remedy."""

    check: str  # config, process, limits, files, store, journal, tiers, ledger, attachments
    finding: str
    remedy: str
    severity: Severity = Severity.ERROR
    where: str = ""  # relative to the home, or a command
    repairs: tuple[Repair, ...] = ()
    is_part: bool = False  # only a part was checked

    @property
    def repairable(self) -> bool:
        """Return whether ``--repair`` can fix it."""
        return bool(self.repairs)

    def __str__(self) -> str:
        return f"{self.check}: {self.finding}; {self.remedy}"


class Target(NamedTuple):
    """The home to check."""

    home: Home
    config: Config
    clock: Clock
    is_running: bool
    deep: bool


def recheck(target: Target, look: Callable[[], dict[str, Finding]]) -> Iterator[Finding]:
    """Yield what ``look`` finds; with a running relay only what a second call finds again."""
    found = look()
    if found and target.is_running:
        time.sleep(RECHECK_AFTER_S)
        again = look()
        found = {key: finding for key, finding in again.items() if key in found}
    yield from found.values()


def list_dir(folder: str) -> list[str]:
    """List a folder's names in order; empty if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def describe_error(exc: RelayError | OSError) -> str:
    """Format an error as one line."""
    return str(exc) if isinstance(exc, RelayError) else f"{exc.filename}: {exc.strerror}"


def partial_check(check: str, looked: int, total: int, what: str) -> Finding:
    """Make the note that only a part was checked."""
    found = f"checked {looked} of {total} {what}"
    remedy = "no action needed; checking all would take long"
    return Finding(check, found, remedy, Severity.NOTE, f"part of {what}", is_part=True)


def summarize(items: list[str]) -> str:
    """Join the first items, and count the others."""
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return ", ".join(items[:MAX_NAMED]) + more


def repair(home: Home, findings: Iterable[Finding]) -> Iterator[tuple[Repair, str]]:
    """Apply the safe repairs; yield each with its error, or "".

    Modes are changed even while a relay is running; files are removed only with the home's lock.
    """
    with contextlib.ExitStack() as held:
        why = ""
        try:
            held.enter_context(fsio.locked(home.path(LOCK)))
        except BlockingIOError:
            why = str(AlreadyRunning("a running relay does this itself"))
        for finding in findings:
            for one in finding.repairs:
                yield one, _do(home, one, why)


def _do(home: Home, one: Repair, why_not: str) -> str:
    *folder, name = one.path.split("/")
    try:
        with home.dirs() as dirs:
            if one.action in MODES:
                fsio.restrict(name, MODES[one.action], dirs.get(*folder))
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
