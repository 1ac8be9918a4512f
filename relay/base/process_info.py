"""Identify a process by pid and start time, so that a reused pid is not mistaken for it."""

from __future__ import annotations

PROC = "/proc"
START_FIELD = 22  # of /proc/PID/stat: clock ticks after boot
STOPPED = (b"T", b"t")  # by SIGSTOP or the terminal; by a debugger
ENDED = (b"Z", b"X", b"x")  # a zombie has ended, though nobody has asked for its exit code yet


def runs(pid: int, start_ticks: int | None) -> bool:
    """True while the process of that pid, started at that time, has not ended.

    ``start_ticks`` None, and where there is no /proc: any process of that pid is it.
    """
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            stat = file.read()
    except ProcessLookupError:  # it ended between open and read
        return False
    except FileNotFoundError:
        return _runs_elsewhere(pid, start_ticks)
    fields = _fields(stat)
    return fields[0] not in ENDED and start_ticks in (None, int(fields[START_FIELD - 3]))


def is_stopped(pid: int) -> bool:
    """True for a process that a signal holds until SIGCONT; False where that is not known."""
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            return _fields(file.read())[0] in STOPPED
    except (OSError, ValueError):
        return False


def _fields(stat: bytes) -> list[bytes]:
    """Those of /proc/PID/stat from the third on: the second, a command's name in brackets, may
    hold anything."""
    return stat[stat.rindex(b")") + 2 :].split()


def _runs_elsewhere(pid: int, start_ticks: int | None) -> bool:
    """Where there is no /proc the pid alone must do; where there is one, nobody has it."""
    import os

    if os.path.exists(f"{PROC}/self/stat"):
        return False
    import psutil

    return bool(psutil.pid_exists(pid))
