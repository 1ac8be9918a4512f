"""What a process is started with, and who holds its name: ``run/`` in the home, mode 700.

    run/{name}.{request id}.json   its Spec with the values of ENV, until it has ended for good
    run/{name}.lock                locked by the process itself, as long as it lives

And ``logs/{name}.log``: what it writes, kept short by ``rotation``. Everything here is
harmless the second time.
"""

from __future__ import annotations

import os

import msgspec

from relay.agents.requests import Spec
from relay.base import fsio
from relay.base.errors import UnsafePath
from relay.base.home import RUN, Dirs, Home
from relay.base.redaction import mask

SUFFIX = ".json"
LOGS = "logs"
MOST_SPEC = 8 << 20
TAIL_BYTES = 64 << 10
TAIL_LINES = 8
TAIL_LINE = 240  # characters


def keep(dirs: Dirs, spec: Spec) -> None:
    """Write a spec, durably; the same again is no fault. Errors: OSError, UnsafePath."""
    name, run = _name(spec.name, spec.request_id), dirs.ensure(RUN)
    fsio.remove(name, run)
    fsio.create(name, msgspec.json.encode(spec), run, sync=True)


def read(dirs: Dirs, name: str, request_id: str) -> Spec | None:
    """The spec of a request; None where there is none, or a crash cut it short."""
    try:
        data, _ = fsio.read_regular(_name(name, request_id), dirs.ensure(RUN), MOST_SPEC)
        return msgspec.json.decode(data, type=Spec)
    except (FileNotFoundError, UnsafePath, msgspec.MsgspecError):
        return None


def forget(dirs: Dirs, name: str, request_id: str) -> None:
    """Its process has ended for good, or never began: nobody needs its secrets."""
    fsio.remove(_name(name, request_id), dirs.ensure(RUN))


def specs(dirs: Dirs) -> list[tuple[str, str]]:
    """(name, request id) of the specs there are."""
    found = []
    for file_name in sorted(os.listdir(dirs.ensure(RUN))):
        name, dot, request_id = file_name.removesuffix(SUFFIX).partition(".")
        if dot and file_name.endswith(SUFFIX):
            found.append((name, request_id))
    return found


def lock(dirs: Dirs, name: str) -> int | None:
    """The name's lock, to be handed to the process and closed; None while one holds it."""
    return fsio.take_lock(f"{name}.lock", dirs.ensure(RUN))


def open_output(dirs: Dirs, name: str) -> int:
    """Where the process writes to: the end of its log, wherever that is after a rotation."""
    return fsio.open_append(f"{name}.log", dirs.ensure(LOGS))


def output_size(dirs: Dirs, name: str) -> int:
    """Bytes in its log; 0 where there is none."""
    try:
        return os.stat(f"{name}.log", dir_fd=dirs.ensure(LOGS), follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def last_lines(home: Home, name: str, begin: int, secrets: tuple[str, ...]) -> list[str]:
    """The last lines that a process wrote from ``begin`` on, with no value of its ENV in them."""
    with home.dirs() as dirs:
        size = output_size(dirs, name)
        begin = begin if begin <= size else 0  # it was rotated since
        is_cut = begin < size - TAIL_BYTES
        begin = max(begin, size - TAIL_BYTES)
        try:
            fd = os.open(
                f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirs.ensure(LOGS)
            )
        except OSError:
            return []
        try:
            data = os.pread(fd, TAIL_BYTES, begin)
        finally:
            os.close(fd)
    if is_cut:  # it may begin with the end of a secret
        data = data[max((len(one.encode()) for one in secrets), default=0) :]
    text = mask(data.decode(errors="replace"), secrets)
    lines = [line for line in map(_plain, text.splitlines()) if line]
    return [line[:TAIL_LINE] for line in lines[-TAIL_LINES:]]


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line).rstrip()


def _name(name: str, request_id: str) -> str:
    return f"{name}.{request_id}{SUFFIX}"
