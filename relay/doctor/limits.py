"""What the machine allows, and the versions of what the relay stands on."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
from collections.abc import Iterator
from importlib import metadata

from relay.base import disk
from relay.base.home import LEDGER, TOP_DIRS
from relay.base.lock_file import lock_holder
from relay.doctor.finding import Finding, Place, Severity
from relay.ledger import wal

WATCHES_AN_AGENT = 2
QUEUED_EVENTS = 4096  # a burst of one batch from each of many agents
INSTANCES = 16  # one is ours; the desktop, editors and builds have the others
DESCRIPTORS = 512  # a batch holds some 100 directories open
SQLITE = (3, 35, 0)  # RETURNING
WATCHDOG = ("7.1", "8")  # InotifyFD is not public: read in that series alone
_MIB = 1 << 20


def examine(place: Place) -> Iterator[Finding]:
    """Limits that are too low for this home, a disk that is full, a WAL that is long."""
    yield from _inotify(sum(1 for _ in place.home.agent_names()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        found = f"a process may have {hard} descriptors open, the relay wants {DESCRIPTORS}"
        yield Finding("limits", found, f"`ulimit -n {DESCRIPTORS}`", Severity.WARNING, "RLIMIT")
    yield from _read_only(place)
    yield from _disk(place)
    yield from _versions()
    length = wal.look(place.home.path(LEDGER), place.config.ledger)
    if length.state is not wal.State.OK:
        stops = "; nothing is taken in" if length.state is wal.State.FULL else ""
        readers = wal.others(place.home.path(LEDGER))
        readers.pop(lock_holder(place.home) or 0, None)  # the relay itself does end
        found = length.sentence(readers) + stops
        remedy = "end that process" if readers else "as root, `fuser -v ledger.db` says who"
        severity = Severity.ERROR if stops else Severity.WARNING
        yield Finding("ledger", found, remedy, severity, LEDGER + "-wal")


def _read_only(place: Place) -> Iterator[Finding]:
    """File systems of the home that take no writes: a disk fault leaves them so, too."""
    seen: set[int] = set()
    for name in ("", *TOP_DIRS):
        path = place.home.path(name) if name else place.home.root
        with contextlib.suppress(OSError):  # what is not there is found elsewhere
            device = os.stat(path).st_dev
            if device not in seen and os.statvfs(path).f_flag & os.ST_RDONLY:
                found = f"{path} is on a file system that is mounted read-only: nothing is accepted"
                remedy = "`dmesg` says whether its disk failed; else `mount -o remount,rw` it"
                yield Finding("limits", found, remedy, where=name or ".")
            seen.add(device)


def read_limit(name: str) -> int | None:
    """One of the kernel's limits of inotify; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
            return int(file.read())
    return None


def _inotify(agents: int) -> Iterator[Finding]:
    wanted = {
        "max_user_watches": (WATCHES_AN_AGENT * agents + 1, f"two for each of {agents} agents"),
        "max_queued_events": (QUEUED_EVENTS, "a burst overflows it, and each one costs a scan"),
        "max_user_instances": (INSTANCES, "other programs need some, too"),
    }
    for name, (least, why) in wanted.items():
        limit = read_limit(name)
        if limit is not None and limit < least:
            yield Finding(
                "limits",
                f"fs.inotify.{name} is {limit}, {least} are wanted: {why}",
                f"`sysctl fs.inotify.{name}={max(4 * least, 8192)}`; the relay scans meanwhile",
                Severity.WARNING,
                name,
            )


def _disk(place: Place) -> Iterator[Finding]:
    size, used, free = disk.look(place.home.root)
    percent = used * 100 // max(used + free, 1)
    settings = place.config.disk
    remedy = "free some; `relay prune --dry-run` shows what may go, `relay archive pack` makes room"
    floor = disk.floor_bytes(settings, size)
    if free < floor:
        found = f"{free // _MIB} MiB are free on the disk, below {floor // _MIB} MiB nothing is"
        found += " taken in (disk.floor_mib)"
        yield Finding("limits", found, remedy, Severity.ERROR, place.home.root)
    elif percent >= settings.alert_percent:
        found = f"the disk is {percent} % full, {free // _MIB} MiB are free"
        yield Finding("limits", found, remedy, Severity.WARNING, place.home.root)


def _versions() -> Iterator[Finding]:
    if sqlite3.sqlite_version_info < SQLITE:
        wanted = ".".join(map(str, SQLITE))
        found = f"SQLite is {sqlite3.sqlite_version}, {wanted} is wanted"
        yield Finding("limits", found, "use a Python with a newer one", where="sqlite3")
    have = metadata.version("watchdog")
    number = tuple(int(part) for part in have.split(".")[:2] if part.isdigit())
    if not (7, 1) <= number < (8,):
        found = f"watchdog is {have}, at least {WATCHDOG[0]} and below {WATCHDOG[1]} is wanted"
        yield Finding("limits", found, "install that one", where="watchdog")
