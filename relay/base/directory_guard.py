"""Owners and modes of the home's own directories and files.

At each start, files and directories that other users could open get mode 600 or 700, and each is
reported. A link or another user's file in place of the ledger, the store or the journal prevents
the start; in place of an agent, a log or an attachment folder it is reported and not entered.
While the relay runs, it stops if store/ or journal/ is replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from relay.base import fsio
from relay.base.errors import ForeignOwner, HardLink, UnsafePath
from relay.base.home import AGENT_DIRS, META, Dirs, Home
from relay.base.incidents import Incident, IncidentKind
from relay.base.names import is_agent_name

VITAL = ("store", "journal")  # whole trees; links in them prevent the start
OWN_TREES = ("logs", "tmp", "run")
SHARED = ("attachments", "archive")  # one level: its directories have mode 700
GUARDED = ("store", "journal")


def secure(home: Home) -> list[Incident]:
    """Close files and directories to other users; report these and what cannot be trusted.

    Errors: UnsafePath for directories that the relay needs; nothing below them is changed.
    """
    incidents = [_repaired(name, None) for name in home.secure()]
    with home.dirs() as dirs:
        for name in VITAL:
            incidents += _tree(dirs, (name,), vital=True)
        for name in OWN_TREES:
            incidents += _tree(dirs, (name,), vital=False)
        for name in SHARED:
            incidents += _level(dirs, name)
    incidents += stray_agents(home)
    for agent in home.agent_names():
        with home.dirs() as dirs:  # for each agent, to limit the open descriptors
            incidents += agent_incidents(dirs, agent)
    return incidents


def agent_incidents(dirs: Dirs, agent: str) -> list[Incident]:
    """Narrow the modes of an agent's directories and its meta.json; report other users' ones."""
    found: list[Incident] = []
    try:
        root = dirs.get("agents", agent)
        for part in ("", *AGENT_DIRS):
            *parents, name = part.split("/")
            folder = dirs.get("agents", agent, *parents) if part else dirs.get("agents")
            name, path = name or agent, "/".join(filter(None, ("agents", agent, part)))
            found += _narrow(name, fsio.DIR_MODE, folder, path, agent)
        found += _narrow(META, fsio.FILE_MODE, root, f"agents/{agent}/{META}", agent)
    except FileNotFoundError:
        pass  # the roster completes it, or it was just removed
    except (UnsafePath, OSError):
        pass  # already reported for the part that could not be opened
    return found


def stray_agents(home: Home) -> list[Incident]:
    """Report links and other users' directories among the agents; they are not agents."""
    found: list[Incident] = []
    with home.dirs() as dirs, os.scandir(dirs.get("agents")) as entries:
        for entry in entries:
            if not is_agent_name(entry.name):
                continue
            path = f"agents/{entry.name}"
            if entry.is_symlink():
                found.append(
                    Incident(
                        IncidentKind.LINKED_DIRECTORY,
                        entry.name,
                        path,
                        f"{path} is a link: left out",
                    )
                )
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid != os.geteuid():
                    text = f"{path} belongs to user {status.st_uid}: left out"
                    found.append(Incident(IncidentKind.FOREIGN_OWNER, entry.name, path, text))
    return sorted(found)


class DirectoryGuard:
    """The identities of the directories that are written by path, from the session's start."""

    def __init__(self, home: Home) -> None:
        self._known = {path: _look(path) for path in map(home.path, GUARDED)}

    def check(self) -> None:
        """Errors: UnsafePath when a directory was replaced or removed."""
        for path, known in self._known.items():
            if _look(path) != known:
                raise UnsafePath(
                    f"{path} was removed or replaced while the relay ran",
                    hint="put the directory back: the relay follows no links",
                )


def _look(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode))


def _tree(dirs: Dirs, parts: tuple[str, ...], *, vital: bool) -> list[Incident]:
    """Restrict a directory and everything below it. Errors: UnsafePath if it is vital."""
    found: list[Incident] = []
    path = "/".join(parts)
    try:
        folder = dirs.get(*parts)
        for name, is_dir in sorted(_entries(folder)):
            below = f"{path}/{name}"
            mode = fsio.DIR_MODE if is_dir else fsio.FILE_MODE
            found += _narrow(name, mode, folder, below, None, vital=vital)
            if is_dir:
                found += _tree(dirs, (*parts, name), vital=vital)
    except FileNotFoundError:
        return found
    except UnsafePath as exc:
        if vital:
            raise
        found.append(_unsafe(exc, path, None))
    return found


def _entries(folder: int) -> Iterator[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _level(dirs: Dirs, name: str) -> list[Incident]:
    """Restrict the directories in a directory; report links and those of other users."""
    found: list[Incident] = []
    try:
        folder = dirs.get(name)
    except FileNotFoundError:
        return found
    for entry, is_dir in sorted(_entries(folder)):
        if is_dir or stat.S_ISLNK(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode):
            found += _narrow(entry, fsio.DIR_MODE, folder, f"{name}/{entry}", None)
    return found


def _narrow(
    name: str, mode: int, folder: int, path: str, agent: str | None, *, vital: bool = False
) -> list[Incident]:
    """Set a mode and report it if it was different. Errors: UnsafePath if it is vital."""
    try:
        if fsio.restrict(name, mode, folder):
            return [_repaired(path, agent, mode)]
    except FileNotFoundError:
        pass
    except HardLink as exc:  # still protected by its directory's mode
        return [Incident(IncidentKind.HARD_LINK, agent, path, f"{exc}; its mode is left alone")]
    except UnsafePath as exc:
        if vital:
            raise type(exc)(str(exc).replace(name, path, 1), hint=exc.hint) from exc
        return [_unsafe(exc, path, agent)]
    return []


def _repaired(path: str, agent: str | None, mode: int | None = None) -> Incident:
    name = "the home itself" if path == "." else path
    text = f"{name} was open to others" + (f", its mode is {mode:o} now" if mode else "")
    return Incident(IncidentKind.MODE_REPAIRED, agent, path, text)


def _unsafe(exc: UnsafePath, path: str, agent: str | None) -> Incident:
    is_foreign = isinstance(exc, ForeignOwner)
    kind = IncidentKind.FOREIGN_OWNER if is_foreign else IncidentKind.LINKED_DIRECTORY
    return Incident(kind, agent, path, f"{exc}: not entered")
