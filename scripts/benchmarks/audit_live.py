"""``audit live``: what a relay's deliveries pay for an audit of its home beside them.

One message every 10 ms, rename in the outbox -> visible in the inbox, three times in one run:
alone, beside `relay audit run` over and over, and alone again. The ratio is to the mean of the
two alone. The audit is a process of its own, as somebody starts it, with its own priority.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from relay.home import Home
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report
from scripts.benchmarks.latency import Relay, _measure


def run(base: str | None, *, agents: int, messages: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"audit live: {messages} messages, {agents} agents in {root}")
    home, names = make_home(root, agents)
    taken: dict[str, list[float]] = {}
    with Relay(home):
        for name in ("before", "beside", "after"):
            with _audits(home) if name == "beside" else _nothing():
                taken[name] = _measure(home, names[0], names[1], message(names[1]), messages)
    beside = taken["beside"]
    facts: dict[str, float] = {}
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        alone = [percentile(taken[one], share) for one in ("before", "after")]
        facts |= {f"{name}_ms": round(percentile(beside, share) * 1e3, 2)}
        facts |= {f"alone_{name}_ms": round(sum(alone) / 2 * 1e3, 2)}
        facts |= {f"ratio_{name}": round(percentile(beside, share) / (sum(alone) / 2), 2)}
    report(case="audit live", agents=agents, messages=len(beside), **facts)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _audits(home: Home) -> Iterator[None]:
    """Audits of the home, one after the other, until the block ends."""
    audit = f"{sys.executable} -m relay.cli --home '{home.root}' audit run --master 'local[1]'"
    loop = f"while true; do {audit} >/dev/null 2>&1; done"
    running = subprocess.Popen(["sh", "-c", loop], start_new_session=True)
    try:
        yield
    finally:
        _end(running)


def _end(running: subprocess.Popen[bytes]) -> None:
    """The loop, and the audit in it, with its JVM."""
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
