"""A finding as a value, and what every check is given."""

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

RESTORE = "`relay ledger restore FILE` puts a backup back, and the next start tells it the rest"
MAX_NAMED = 3  # of what is wrong in one way; the rest is counted
RECHECK_AFTER_S = 1.0  # what a running relay has in hand is done by then


MODES = {"chmod 700": fsio.DIR_MODE, "chmod 600": fsio.FILE_MODE}


class Severity(StrEnum):
    """How much it matters."""

    ERROR = "error"  # something is lost, or does not work
    WARNING = "warning"  # it will, or somebody should look at it
    NOTE = "note"  # good to know; nothing is wrong


class Repair(NamedTuple):
    """One safe thing to do, below the home."""

    action: str  # remove, or one of MODES
    path: str  # relative to the home


class Finding(NamedTuple):
    """Something wrong, and its remedy."""

    check: str  # config, process, limits, files, store, journal, tiers, ledger, attachments
    finding: str
    remedy: str
    severity: Severity = Severity.ERROR
    where: str = ""  # relative to the home, or a command
    repairs: tuple[Repair, ...] = ()
    is_part: bool = False  # of something large a part was looked at

    @property
    def repairable(self) -> bool:
        """True where ``--repair`` does it."""
        return bool(self.repairs)

    def __str__(self) -> str:
        return f"{self.check}: {self.finding}; {self.remedy}"


class Target(NamedTuple):
    """The home that is examined."""

    home: Home
    config: Config
    clock: Clock
    is_running: bool
    deep: bool


def recheck(target: Target, look: Callable[[], dict[str, Finding]]) -> Iterator[Finding]:
    """What two looks find, where a relay runs: the first may have met what is in hand."""
    found = look()
    if found and target.is_running:
        time.sleep(RECHECK_AFTER_S)
        again = look()
        found = {key: finding for key, finding in again.items() if key in found}
    yield from found.values()


def list_dir(folder: str) -> list[str]:
    """The names in a folder, in order; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def describe_error(exc: RelayError | OSError) -> str:
    """An error in a line."""
    return str(exc) if isinstance(exc, RelayError) else f"{exc.filename}: {exc.strerror}"


def partial_check(check: str, looked: int, total: int, what: str) -> Finding:
    """Say that so many of something were looked at, and not the rest."""
    found = f"looked at {looked} of {total} {what}, the rest was not"
    remedy = "nothing: of so many it would take long"
    return Finding(check, found, remedy, Severity.NOTE, f"part of {what}", is_part=True)


def summarize(items: list[str]) -> str:
    """The first of them, and how many more."""
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return ", ".join(items[:MAX_NAMED]) + more


def repair(home: Home, findings: Iterable[Finding]) -> Iterator[tuple[Repair, str]]:
    """Do what is safe, and say for each what went wrong, or nothing.

    Modes are narrowed beside a running relay, too; files are removed with the home's lock alone.
    """
    with contextlib.ExitStack() as held:
        why = ""
        try:
            held.enter_context(fsio.locked(home.path(LOCK)))
        except BlockingIOError:
            why = str(AlreadyRunning("a relay runs, and looks after that itself"))
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
