"""The audits give way: to a relay that delivers, and to all else that the machine does.

A priority counts among the processes of one session alone where the kernel gives each session
its share (autogroup: so most desktops and servers do): an audit in a terminal of its own would
take half of what a relay needs, at any priority. So the JVM gets a session of its own, and that
session the priority; the workers that it starts are in it.

A processor that is busy with the least of tasks lets a relay wait for some milliseconds all the
same. Beside a relay that runs one is left free, where there are two.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import psutil

from relay.audit.served import is_served

NICE_VARIABLE = "AGENT_RELAY_AUDIT_NICE"
NICE = 19  # of 19: a relay that delivers comes first, and the audit has what is left
_POLL_S = 0.01


class _Given:
    """What this process gave up."""

    nice = 0


def give_way(home: str) -> None:
    """Let everything else on the machine go before this process, its JVM and its workers.

    For commands: what is given is not given back. A relay that serves ``home`` gets a processor
    for itself.
    """
    wanted = os.environ.get(NICE_VARIABLE, "")
    _Given.nice = int(wanted) if wanted.isdecimal() else NICE
    with contextlib.suppress(OSError):
        os.nice(max(0, _Given.nice - os.nice(0)))
    if _Given.nice and is_served(home):
        _leave_a_processor()


def _leave_a_processor() -> None:
    """Where the system lets a process say on which ones it runs: Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return
    processors = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors[1:] or processors)


@contextlib.contextmanager
def lowered_children() -> Iterator[None]:
    """Sessions that children of this process begin in the block give way as it does."""
    if not _Given.nice:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        # A JVM is busiest while it starts: it is not waited for.
        lowered: set[int] = set()
        while not over.wait(_POLL_S):
            for child in psutil.Process().children():
                if child.pid not in lowered and _leads(child.pid):
                    lowered.add(child.pid)
                    _lower(child.pid)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def _lower(session: int) -> None:
    """Errors: none, where there are no such groups or they are nobody's to change."""
    with contextlib.suppress(OSError), open(f"/proc/{session}/autogroup", "w") as file:
        file.write(str(min(_Given.nice, 19)))
