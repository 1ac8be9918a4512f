"""Identify a process by pid and start time, so that a reused pid is not mistaken for it.

Both are known in one PID namespace alone: a container or a sandbox has its own.
"""

from __future__ import annotations

import os

PROC = "/proc"
START_FIELD = 22  # of /proc/PID/stat: clock ticks after boot
STOPPED = (b"T", b"t")  # by SIGSTOP or the terminal; by a debugger
ENDED = (b"Z", b"X", b"x")  # a zombie has ended, but its parent has not collected its exit code


def pid_namespace() -> int:
    """The number of this process's PID namespace, as in pid_namespaces(7); 0 if unknown."""
    try:
        return os.stat(f"{PROC}/self/ns/pid").st_ino
    except OSError:
        return 0


def is_elsewhere(namespace: object) -> bool:
    """True for a PID namespace of another container: its pids mean nothing here.

    ``namespace``: as a file has it; 0, or no integer, is not known, and taken for this one.
    """
    return type(namespace) is int and namespace not in (0, pid_namespace())


def calls_itself(pid: int, own: int) -> bool:
    """True if ``own`` is a process's pid in its own PID namespace, that of a container for example.

    Of a process that is not visible (``pid`` 0) nothing is known, and it may be.
    """
    inner = pid
    try:
        with open(f"{PROC}/{pid:d}/status", "rb") as file:
            for line in file:
                if line.startswith(b"NSpid:"):
                    inner = int(line.split()[-1])
    except OSError:  # it has ended, or there is no /proc
        pass
    return own == inner or not pid


def pid_text(pid: int) -> str:
    """The holder of a lock in a sentence; its pid is 0 when it is not visible from here."""
    return f"pid {pid}" if pid else "outside this container or sandbox"


def runs(pid: int, start_ticks: int | None) -> bool:
    """True while the process of that pid, started at that time, has not ended.

    With ``start_ticks`` None, or without /proc, any process of that pid counts.
    """
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            stat = file.read()
    except ProcessLookupError:  # it ended between open and read
        return False
    except FileNotFoundError:
        return _runs_without_proc(pid, start_ticks)
    fields = _fields(stat)
    return fields[0] not in ENDED and start_ticks in (None, int(fields[START_FIELD - 3]))


def started_at(pid: int) -> int | None:
    """When a process was started, in clock ticks after boot; None if unknown."""
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            return int(_fields(file.read())[START_FIELD - 3])
    except (OSError, ValueError):
        return None


def program_of(pid: int) -> tuple[str, int, int | None]:
    """Name of the program, pid of the parent, and start time, as in ``started_at``.

    Errors: ProcessLookupError if it has ended; OSError.
    """
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            stat = file.read()
    except FileNotFoundError as exc:
        if os.path.exists(f"{PROC}/self/stat"):
            raise ProcessLookupError(pid) from exc
        import psutil

        try:
            process = psutil.Process(pid)
            return process.name(), process.ppid(), None
        except psutil.Error as error:
            raise ProcessLookupError(pid) from error
    fields = _fields(stat)
    name = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode(errors="replace")
    return name, int(fields[1]), int(fields[START_FIELD - 3])


def words_of(pid: int) -> list[str]:
    """The words of the command that a process runs; empty if unknown."""
    try:
        with open(f"{PROC}/{pid:d}/cmdline", "rb") as file:
            return file.read(1 << 16).decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """True for a process that was stopped by a signal; False if unknown."""
    try:
        with open(f"{PROC}/{pid:d}/stat", "rb") as file:
            return _fields(file.read())[0] in STOPPED
    except (OSError, ValueError):
        return False


def _fields(stat: bytes) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on.

    The second, a command's name in parentheses, may contain anything.
    """
    return stat[stat.rindex(b")") + 2 :].split()


def _runs_without_proc(pid: int, start_ticks: int | None) -> bool:
    """Look up the pid alone on systems without /proc; False where there is one."""
    if os.path.exists(f"{PROC}/self/stat"):
        return False
    import psutil

    return bool(psutil.pid_exists(pid))
