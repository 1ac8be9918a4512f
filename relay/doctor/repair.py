"""What is safe to mend: modes, and files that nothing counts on. Each is looked at once more."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator

from relay.base import fsio
from relay.base.errors import AlreadyRunning, UnsafePath
from relay.base.home import LOCK, Home
from relay.doctor.finding import Finding, Repair, said

_MODES = {"chmod 700": fsio.DIR_MODE, "chmod 600": fsio.FILE_MODE}


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
            if one.action in _MODES:
                fsio.restrict(name, _MODES[one.action], dirs.get(*folder))
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
        return said(exc)
    return ""
