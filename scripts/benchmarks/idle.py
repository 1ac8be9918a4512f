"""``idle``: cost of an idle relay with a thousand agents.

Its CPU time by the kernel's count over ``SECONDS`` that hold two scans, its memory, and its
inotify watches; then the same while 20 of the agents send a message a second each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from relay.base.names import new_message_id
from scripts.benchmarks.common import fresh_root, make_home, message, note, report
from scripts.benchmarks.latency import Relay

SECONDS = 65  # two scans of every outbox and inbox, 30 s apart
START_S = 75  # after the first scan in full and the first retention run, which follow a start
BUSY = 20


def run(base: str | None, *, agents: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"idle: {agents} agents for {2 * SECONDS} s in {root}")
    home, names = make_home(root, agents)
    with Relay(home) as pid:
        daemon = psutil.Process(pid)
        time.sleep(START_S)
        idle = _share(daemon, SECONDS, lambda: time.sleep(1))
        watches = watches_of(pid)
        busy = _share(daemon, SECONDS, lambda: _send(home.root, names[:BUSY]))
        report(
            case="idle",
            agents=agents,
            idle_cpu_percent=round(100 * idle, 3),
            busy_agents=BUSY,
            busy_cpu_percent=round(100 * busy, 3),
            rss_mb=round(daemon.memory_info().rss / 1e6, 1),
            watches=watches,
            watches_an_agent=round(watches / agents, 3),
        )


def _share(daemon: psutil.Process, seconds: int, step: Callable[[], object]) -> float:
    """Share of a core used while ``step``, one second long, is repeated."""
    began, before = time.monotonic(), _cpu_s(daemon)
    while time.monotonic() - began < seconds:
        step()
    return (_cpu_s(daemon) - before) / (time.monotonic() - began)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _send(root: str, names: list[str]) -> None:
    """Send one message from each of these agents, spread over a second."""
    for number, name in enumerate(names):
        outbox = Path(root, "agents", name, "outbox")
        file_name = new_message_id(time.time_ns()) + ".msg"
        pending = outbox / ".pending" / file_name
        pending.write_bytes(message(names[(number + 1) % len(names)]))
        os.rename(pending, outbox / file_name)
        time.sleep(1 / len(names))


def watches_of(pid: int) -> int:
    """Number of inotify watches of a process, from /proc."""
    count = 0
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            count += sum(line.startswith("inotify ") for line in entry.read_text().splitlines())
        except OSError:  # closed meanwhile
            continue
    return count
