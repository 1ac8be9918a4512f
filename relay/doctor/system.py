"""The process and what belongs to it: lock, socket, agents' processes, logs, service unit."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import socket
import sqlite3
from collections.abc import Iterator
from importlib import metadata

import psutil

from relay.base import disk
from relay.base.errors import LedgerError
from relay.base.home import LEDGER, LOCK, TOP_DIRS
from relay.base.lock_file import left, lock_holder, trouble
from relay.base.status_client import SOCKET, StatusReply, ask, silence, socket_path
from relay.doctor.finding import Finding, Repair, Severity, Target, list_dir, recheck
from relay.journal.tiers import FOR_OPERATOR
from relay.ledger import open_readonly, wal

_MIB = 1 << 20


WATCHES_AN_AGENT = 2
QUEUED_EVENTS = 4096  # a burst of one batch from each of many agents
INSTANCES = 16  # one is ours; the desktop, editors and builds have the others
DESCRIPTORS = 512  # a batch holds some 100 directories open
SQLITE = (3, 35, 0)  # RETURNING
WATCHDOG = ("7.1", "8")  # InotifyFD is not public: read in that series alone


def check_process(target: Target) -> Iterator[Finding]:
    """Is the relay serving, and is what lies about the work of one that runs?"""
    home = target.home
    if target.is_running and (why := trouble(home)):
        remedy = "mend what the line says; it begins again by itself"
        yield Finding("process", f"the relay serves nobody now: {why}", remedy, where=LOCK)
    if (gone := left(home)) is not None:
        remedy = "logs/relay.err may say why; the next start recovers what it had in hand"
        yield Finding("process", f"the last relay, {gone}", remedy, Severity.NOTE, LOCK)
    yield from _socket(target)
    answer = ask(home) if target.is_running else StatusReply(None)
    yield from _silence(target, answer)
    yield from _waiting(answer)
    yield from recheck(target, lambda: {f.where: f for f in _processes(target)})
    yield from _logs(target)
    yield from _units(target)


def _socket(target: Target) -> Iterator[Finding]:
    path = socket_path(target.home.root)
    if not os.path.lexists(path) or target.is_running:
        return
    is_inside = os.path.dirname(path) == target.home.root
    where = SOCKET if is_inside else path
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        try:
            client.connect(path)
        except OSError:
            yield Finding(
                "process",
                f"{where}: no relay runs, and nobody listens there",
                "the next start replaces it",
                Severity.WARNING,
                where,
                (Repair("remove", SOCKET),) if is_inside else (),
            )


def _silence(target: Target, answer: StatusReply) -> Iterator[Finding]:
    """A relay that has the lock and the socket, and says nothing: nobody is served."""
    pid = lock_holder(target.home)
    if answer.is_silent and pid is not None:
        what, remedy = silence(pid)
        yield Finding("process", f"the relay, pid {pid}, {what}", remedy, where=LOCK)


def _waiting(answer: StatusReply) -> Iterator[Finding]:
    """What a running relay's tiers could not do, and try again: only it knows.

    What waits for the operator is in the manifest, and found there.
    """
    for line in (answer.status or {}).get("tiers_waiting") or ():
        if not line.startswith(FOR_OPERATOR):
            remedy = "the relay goes on trying; meanwhile nothing is lost, and the disk fills"
            yield Finding("tiers", line, remedy, Severity.WARNING, "journal")


def _processes(target: Target) -> Iterator[Finding]:
    """Rows of processes that are gone, and files of processes that no row names."""
    try:
        with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
            rows = db.execute("SELECT name, state, pid FROM processes").fetchall()
    except LedgerError:
        return  # the ledger's own checks say so
    for name, state, pid in rows:
        if pid is not None and not psutil.pid_exists(pid):
            yield Finding(
                "process",
                f"{name} is {state} as pid {pid}, and there is no such process",
                "restart the relay: a start finds out what became of it"
                if target.is_running
                else "the next start finds out what became of it",
                Severity.WARNING,
                f"process {name}",
            )
    known = {row[0] for row in rows}
    for file in list_dir(target.home.path("run")):
        name = file.partition(".")[0]
        if name not in known and file.endswith((".lock", ".json")):
            yield Finding(
                "process",
                f"run/{file}: of a process that the ledger does not know",
                f"`pgrep -af {shlex.quote(name)}` shows whether it still runs",
                Severity.WARNING,
                f"run/{file}",
            )


def _logs(target: Target) -> Iterator[Finding]:
    settings, folder = target.config.log, target.home.path("logs")
    most = 2 * settings.max_mib * _MIB
    for name in list_dir(folder):
        with contextlib.suppress(FileNotFoundError):
            size = os.lstat(os.path.join(folder, name)).st_size
            if name == "relay.log" and size > most:
                yield Finding(
                    "process",
                    f"logs/{name} has {size // _MIB} MiB, more than twice log.max_mib",
                    "restart the relay, or move the file away",
                    Severity.WARNING,
                    f"logs/{name}",
                )
            if name == "relay.err" and size:
                yield Finding(
                    "process",
                    f"logs/{name} has {size} bytes: the relay met a fault that nobody expected",
                    "report what it says, then remove it",
                    Severity.WARNING,
                    f"logs/{name}",
                )


def _units(target: Target) -> Iterator[Finding]:
    """A systemd unit for this home whose program is gone."""
    folder = os.path.expanduser("~/.config/systemd/user")
    for name in list_dir(folder):
        if not name.endswith(".service"):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            starts = [line[10:] for line in text.splitlines() if line.startswith("ExecStart=")]
            if target.home.root not in text or not starts:
                continue
            program = shlex.split(starts[0].lstrip("-@:+!"))[0]
            if os.path.isabs(program) and not os.path.exists(program):
                yield Finding(
                    "process",
                    f"{folder}/{name} starts {program}, and there is no such program",
                    "install it there again, or write the unit anew",
                    Severity.WARNING,
                    name,
                )


def check_limits(target: Target) -> Iterator[Finding]:
    """Limits that are too low for this home, a disk that is full, a WAL that is long."""
    yield from _inotify(sum(1 for _ in target.home.agent_names()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        found = f"a process may have {hard} descriptors open, the relay wants {DESCRIPTORS}"
        yield Finding("limits", found, f"`ulimit -n {DESCRIPTORS}`", Severity.WARNING, "RLIMIT")
    yield from _read_only(target)
    yield from _disk(target)
    yield from _versions()
    length = wal.measure_wal(target.home.path(LEDGER), target.config.ledger)
    if length.state is not wal.WalState.OK:
        stops = "; nothing is taken in" if length.state is wal.WalState.FULL else ""
        readers = wal.wal_readers(target.home.path(LEDGER))
        readers.pop(lock_holder(target.home) or 0, None)  # the relay itself does end
        found = length.sentence(readers) + stops
        remedy = "end that process" if readers else "as root, `fuser -v ledger.db` says who"
        severity = Severity.ERROR if stops else Severity.WARNING
        yield Finding("ledger", found, remedy, severity, LEDGER + "-wal")


def _read_only(target: Target) -> Iterator[Finding]:
    """File systems of the home that take no writes: a disk fault leaves them so, too."""
    seen: set[int] = set()
    for name in ("", *TOP_DIRS):
        path = target.home.path(name) if name else target.home.root
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


def _disk(target: Target) -> Iterator[Finding]:
    size, used, free = disk.look(target.home.root)
    percent = used * 100 // max(used + free, 1)
    settings = target.config.disk
    remedy = "free some; `relay prune --dry-run` shows what may go, `relay archive pack` makes room"
    floor = disk.floor_bytes(settings, size)
    if free < floor:
        found = f"{free // _MIB} MiB are free on the disk, below {floor // _MIB} MiB nothing is"
        found += " taken in (disk.floor_mib)"
        yield Finding("limits", found, remedy, Severity.ERROR, target.home.root)
    elif percent >= settings.alert_percent:
        found = f"the disk is {percent} % full, {free // _MIB} MiB are free"
        yield Finding("limits", found, remedy, Severity.WARNING, target.home.root)


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
