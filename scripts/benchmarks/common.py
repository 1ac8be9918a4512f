"""Shared parts of the benchmarks: fresh homes, message files, timing and reports.

A ratio is taken against a floor of the same run, on the same disk, in fresh directories:
ext4 avoids inodes freed in the last minutes, so nothing is removed between runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from relay.base.home import Home
from relay.base.names import new_message_id

BODY_BYTES = 1024


def fresh_root(base: str | None) -> Path:
    """A new directory on the disk under ``base`` (default: the temporary directory's)."""
    return Path(tempfile.mkdtemp(prefix="agent-relay-bench-", dir=base))


def make_home(root: Path, agents: int) -> tuple[Home, list[str]]:
    """Create a home with so many agents."""
    home = Home.create(str(root / "home"))
    names = [f"agent{number:04d}" for number in range(agents)]
    for name in names:
        home.make_agent(name)
    return home, names


def message(to: str) -> bytes:
    """Content of a message file with a body of 1 KiB."""
    return f"TO: {to}\n\n".encode() + b"x" * BODY_BYTES


def fill(home: Home, names: list[str], files: int) -> list[tuple[str, str]]:
    """Put ``files`` messages into the outboxes, each to the next agent; (agent, file name)."""
    made = []
    for number in range(files):
        agent = names[number % len(names)]
        name = new_message_id(time.time_ns()) + ".msg"
        with open(home.path("agents", agent, "outbox", name), "wb") as file:
            file.write(message(names[(number + 1) % len(names)]))
        made.append((agent, name))
    return made


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(**facts: object) -> None:
    """Print one JSON line."""
    print(json.dumps(facts), flush=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def note(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def sync() -> None:
    """Flush earlier writes to the disk before timing."""
    os.sync()
