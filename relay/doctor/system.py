"""Checks of the process and the machine: lock, socket, agents' processes, logs, unit, limits."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shlex
import socket
import sqlite3
from collections.abc import Iterator

from watchdog.version import VERSION_STRING

from relay.base import disk
from relay.base.errors import LedgerError
from relay.base.finding import Finding, Repair, Severity
from relay.base.home import LEDGER, LOCK, TOP_DIRS, lock_holder, running_trouble, unclean_stop
from relay.base.process_info import pid_text
from relay.base.status_client import SOCKET, StatusReply, ask, silence, socket_address
from relay.base.text import format_size
from relay.doctor.report import Target, list_dir, recheck, unreadable_ledger
from relay.ledger import wal
from relay.ledger.file import open_readonly

_MIB = 1 << 20


WATCHES_AN_AGENT = 2
QUEUED_EVENTS = 4096  # a burst of one batch from each of many agents
INSTANCES = 16  # one for the relay, the others for desktop, editors and builds
DESCRIPTORS = 512  # a batch holds some 100 directories open
SQLITE = (3, 35, 0)  # RETURNING
WATCHDOG = ("7.1", "8")  # InotifyFD is not public: tested with this series only


def check_process(target: Target) -> Iterator[Finding]:
    """Check that the relay serves, its socket, agents' processes, logs and service unit."""
    home = target.home
    if target.is_running and (why := running_trouble(home)):
        advice = "fix the cause; the relay retries on its own"
        yield Finding("process", LOCK, f"the relay is not serving: {why}", advice)
    if (stopped := unclean_stop(home)) is not None:
        advice = "logs/relay.err may say why; the next start recovers its unfinished work"
        yield Finding("process", LOCK, f"the last relay, {stopped}", advice, Severity.NOTE)
    yield from _socket(target)
    answer = ask(home) if target.is_running else StatusReply(None)
    yield from _silence(target, answer)
    yield from _check_tier_retries(answer)
    yield from recheck(target, _processes)
    yield from _logs(target)
    yield from _units(target)


def check_ledger_opens(target: Target) -> Iterator[Finding]:
    """Check that the ledger can be read: all that is known of it without the checks of stores."""
    try:
        with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
            db.execute("SELECT value FROM orchestrator_state LIMIT 1").fetchone()
    except LedgerError as exc:
        yield unreadable_ledger(exc)


def _socket(target: Target) -> Iterator[Finding]:
    path = target.home.path(SOCKET)
    if not os.path.lexists(path) or target.is_running:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        try:
            with socket_address(path) as address:
                client.connect(address)
        except OSError:
            yield Finding(
                "process",
                SOCKET,
                f"{SOCKET}: left over; no relay is running",
                "the next start replaces it",
                Severity.WARNING,
                repairs=(Repair("remove", SOCKET),),
            )


def _silence(target: Target, answer: StatusReply) -> Iterator[Finding]:
    """Check for a relay that holds the lock but does not answer."""
    pid = lock_holder(target.home)
    if answer.is_silent and pid is not None:
        what, advice = silence(pid)
        yield Finding("process", LOCK, f"the relay, {pid_text(pid)}, {what}", advice)


def _check_tier_retries(answer: StatusReply) -> Iterator[Finding]:
    """Check for tier operations that a running relay retries.

    Those that need the operator are in the manifest and are found there.
    """
    waiting = (answer.status or {}).get("tiers_waiting") or ()
    if waiting:
        from relay.journal.tiers import FOR_OPERATOR  # much is loaded with it
    for line in waiting:
        if not line.startswith(FOR_OPERATOR):
            advice = "the relay keeps retrying; nothing is lost, but the disk fills up"
            yield Finding("tiers", "journal", line, advice, Severity.WARNING)


def _processes(target: Target) -> Iterator[Finding]:
    """Check for rows of processes that no longer exist, and files of processes without a row."""
    try:
        with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
            rows = db.execute("SELECT name, state, pid FROM processes").fetchall()
    except LedgerError:
        return  # reported by the checks of the ledger
    if not rows or lock_holder(target.home) == 0:  # it sees processes that are not visible here
        return
    import psutil  # 20 ms, which `relay attention` need not wait for

    for name, state, pid in rows:
        if pid is not None and not psutil.pid_exists(pid):
            found = f"{name} is {state} as pid {pid}, but there is no such process"
            advice = "restart the relay: it" if target.is_running else "the next start"
            yield _warning(f"process {name}", found, f"{advice} finds out what happened")
    known = {row[0] for row in rows}
    for file in list_dir(target.home.path("run")):
        name = file.partition(".")[0]
        if name not in known and file.endswith((".lock", ".json")):
            found = f"run/{file}: belongs to a process that is not in the ledger"
            advice = f"`pgrep -af {shlex.quote(name)}` shows whether it is still running"
            yield _warning(f"run/{file}", found, advice)


def _logs(target: Target) -> Iterator[Finding]:
    settings, folder = target.config.log, target.home.path("logs")
    most = 2 * settings.max_mib * _MIB
    for name in list_dir(folder):
        with contextlib.suppress(FileNotFoundError):
            size = os.lstat(os.path.join(folder, name)).st_size
            if name == "relay.log" and size > most:
                found = f"logs/{name} has {size // _MIB} MiB, more than twice log.max_mib"
                yield _warning(f"logs/{name}", found, "restart the relay, or move the file away")
            if name == "relay.err" and size:
                found = f"logs/{name} has {size} bytes: the relay met an unexpected error"
                yield _warning(f"logs/{name}", found, "report its content, then remove it")


def _units(target: Target) -> Iterator[Finding]:
    """Check for a systemd unit of this home whose program is missing."""
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
                found = f"{folder}/{name} starts {program}, which does not exist"
                advice = "install it there again, or run `relay service install`"
                yield _warning(name, found, advice)


def _warning(where: str, found: str, advice: str) -> Finding:
    return Finding("process", where, found, advice, Severity.WARNING)


def check_limits(target: Target) -> Iterator[Finding]:
    """Check limits of the system, file systems, disk space, versions and the ledger's WAL."""
    yield from _inotify(sum(1 for _ in target.home.agent_names()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        found = f"the limit of open files is {hard}, the relay needs {DESCRIPTORS}"
        yield Finding("limits", "RLIMIT", found, f"`ulimit -n {DESCRIPTORS}`", Severity.WARNING)
    yield from _no_file(target)
    yield from _disk(target)
    yield from _versions()
    state, n_bytes = wal.measure_wal(target.home.path(LEDGER), target.config.ledger)
    if state is not wal.WalState.OK:
        stops = "; no messages are accepted" if state is wal.WalState.FULL else ""
        readers = wal.wal_readers(target.home.path(LEDGER))
        readers.pop(lock_holder(target.home) or 0, None)  # not the relay itself
        found = wal.describe_wal(n_bytes, readers) + stops
        advice = "end that process" if readers else "as root, `fuser -v ledger.db` names it"
        severity = Severity.ERROR if stops else Severity.WARNING
        yield Finding("ledger", LEDGER + "-wal", found, advice, severity)


def _no_file(target: Target) -> Iterator[Finding]:
    """Check for file systems that take no file, as after a disk fault."""
    seen: set[int] = set()
    for name in ("", *TOP_DIRS):
        path = target.home.path(name) if name else target.home.root
        with contextlib.suppress(OSError):  # missing files are reported elsewhere
            device = os.stat(path).st_dev
            why = "" if device in seen else disk.refuses_files(path)
            if why == os.strerror(errno.EROFS):
                found = f"{path} is on a read-only file system: no messages are accepted"
                advice = "check `dmesg` for a disk fault; else run `mount -o remount,rw`"
                yield Finding("limits", name or ".", found, advice)
            elif why:
                found = f"the disk of {path} takes no file: {why}"
                advice = "free some space, or inodes (`df -i`), or raise the quota"
                yield Finding("limits", name or ".", found, advice)
            seen.add(device)


def read_limit(name: str) -> int | None:
    """Read one of the kernel's inotify limits, if there is any."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/sys/fs/inotify/{name}", encoding="ascii") as file:
            return int(file.read())
    return None


def _inotify(agents: int) -> Iterator[Finding]:
    wanted = {
        "max_user_watches": (WATCHES_AN_AGENT * agents + 1, f"two for each of {agents} agents"),
        "max_queued_events": (QUEUED_EVENTS, "each overflow by a burst costs a scan"),
        "max_user_instances": (INSTANCES, "other programs need some as well"),
    }
    for name, (least, why) in wanted.items():
        limit = read_limit(name)
        if limit is not None and limit < least:
            found = f"fs.inotify.{name} is {limit}, expected at least {least}: {why}"
            advice = (
                f"`sysctl fs.inotify.{name}={max(4 * least, 8192)}`; until then the relay scans"
            )
            yield Finding("limits", name, found, advice, Severity.WARNING)


def _disk(target: Target) -> Iterator[Finding]:
    size, used, free = disk.measure_disk(target.home.root)
    percent = used * 100 // max(used + free, 1)
    settings = target.config.disk
    advice = "free some space; see `relay prune --dry-run`"
    floor = disk.floor_bytes(settings, size)
    if free < floor:
        found = f"only {format_size(free)} are free on the disk; below {format_size(floor)}"
        found += " (disk.floor_mib) no messages are accepted"
        yield Finding("limits", target.home.root, found, advice, Severity.ERROR)
    elif percent >= settings.alert_percent:
        found = f"the disk is {percent} % full, {format_size(free)} are free"
        yield Finding("limits", target.home.root, found, advice, Severity.WARNING)


def _versions() -> Iterator[Finding]:
    if sqlite3.sqlite_version_info < SQLITE:
        wanted = ".".join(map(str, SQLITE))
        found = f"SQLite is {sqlite3.sqlite_version}, expected {wanted} or newer"
        yield Finding("limits", "sqlite3", found, "use a Python with a newer SQLite")
    number = tuple(int(part) for part in VERSION_STRING.split(".")[:2] if part.isdigit())
    if not (7, 1) <= number < (8,):
        found = (
            f"watchdog is {VERSION_STRING}, expected at least {WATCHDOG[0]} and below {WATCHDOG[1]}"
        )
        yield Finding("limits", "watchdog", found, "install such a version")
