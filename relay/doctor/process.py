"""The process and what belongs to it: lock, socket, agents' processes, logs, service unit."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator

import psutil

from relay.base.errors import LedgerError
from relay.base.home import LEDGER, LOCK
from relay.base.lock_file import left, lock_holder, trouble
from relay.base.status_client import SOCKET, StatusReply, ask, silence, socket_path
from relay.doctor.finding import Finding, Place, Repair, Severity, names, twice
from relay.journal.tiers import FOR_OPERATOR
from relay.ledger import open_readonly

_MIB = 1 << 20


def examine(place: Place) -> Iterator[Finding]:
    """Is the relay serving, and is what lies about the work of one that runs?"""
    home = place.home
    if place.is_running and (why := trouble(home)):
        remedy = "mend what the line says; it begins again by itself"
        yield Finding("process", f"the relay serves nobody now: {why}", remedy, where=LOCK)
    if (gone := left(home)) is not None:
        remedy = "logs/relay.err may say why; the next start recovers what it had in hand"
        yield Finding("process", f"the last relay, {gone}", remedy, Severity.NOTE, LOCK)
    yield from _socket(place)
    answer = ask(home) if place.is_running else StatusReply(None)
    yield from _silence(place, answer)
    yield from _waiting(answer)
    yield from twice(place, lambda: {f.where: f for f in _processes(place)})
    yield from _logs(place)
    yield from _units(place)


def _socket(place: Place) -> Iterator[Finding]:
    path = socket_path(place.home.root)
    if not os.path.lexists(path) or place.is_running:
        return
    is_inside = os.path.dirname(path) == place.home.root
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


def _silence(place: Place, answer: StatusReply) -> Iterator[Finding]:
    """A relay that has the lock and the socket, and says nothing: nobody is served."""
    pid = lock_holder(place.home)
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


def _processes(place: Place) -> Iterator[Finding]:
    """Rows of processes that are gone, and files of processes that no row names."""
    try:
        with contextlib.closing(open_readonly(place.home.path(LEDGER))) as db:
            rows = db.execute("SELECT name, state, pid FROM processes").fetchall()
    except LedgerError:
        return  # the ledger's own checks say so
    for name, state, pid in rows:
        if pid is not None and not psutil.pid_exists(pid):
            yield Finding(
                "process",
                f"{name} is {state} as pid {pid}, and there is no such process",
                "restart the relay: a start finds out what became of it"
                if place.is_running
                else "the next start finds out what became of it",
                Severity.WARNING,
                f"process {name}",
            )
    known = {row[0] for row in rows}
    for file in names(place.home.path("run")):
        name = file.partition(".")[0]
        if name not in known and file.endswith((".lock", ".json")):
            yield Finding(
                "process",
                f"run/{file}: of a process that the ledger does not know",
                f"`pgrep -af {shlex.quote(name)}` shows whether it still runs",
                Severity.WARNING,
                f"run/{file}",
            )


def _logs(place: Place) -> Iterator[Finding]:
    settings, folder = place.config.log, place.home.path("logs")
    most = 2 * settings.max_mib * _MIB
    for name in names(folder):
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


def _units(place: Place) -> Iterator[Finding]:
    """A systemd unit for this home whose program is gone."""
    folder = os.path.expanduser("~/.config/systemd/user")
    for name in names(folder):
        if not name.endswith(".service"):
            continue
        with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
            starts = [line[10:] for line in text.splitlines() if line.startswith("ExecStart=")]
            if place.home.root not in text or not starts:
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
