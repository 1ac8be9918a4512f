"""``audit live``: latency of deliveries while an audit of the home runs.

One message every 10 ms, rename in the outbox -> visible in the inbox, in short windows that take
turns: `relay audit run` beside it goes on in every other one, and is stopped (SIGSTOP) in those
between. So both kinds have the same share of whatever else the machine does meanwhile. The home
has a history; the audit is a process of its own in a session of its own, as one from another
terminal, with its own priority. ``audit_cpu`` says how many cores it had: with none it would
harm nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from relay.base.home import Home
from scripts.benchmarks.common import fresh_root, message, note, percentile, report
from scripts.benchmarks.latency import Relay, measure
from scripts.history.make import Given, History

WINDOWS = 20  # of each kind
HISTORY = 10_000
HISTORY_DAYS = 2
AGE_NS = 300 * 10**9


def run(base: str | None, *, agents: int, messages: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"audit live: {messages} messages, {agents} agents in {root}")
    path = str(root / "home")
    History(path, Given(HISTORY, agents, HISTORY_DAYS, time.time_ns() - AGE_NS)).make()
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    cpu_s, beside_s = 0.0, 0.0
    with Home(path) as home, Relay(home), _audits(home) as audits:
        sender, reader = sorted(os.listdir(home.path("agents")))[:2]
        for number in range(2 * WINDOWS):
            beside = number % 4 in (1, 2)  # A B B A: a trend of the machine is in both
            audits.go_on(beside)
            began, before = time.monotonic(), audits.cpu_s()
            data = message(reader)
            taken[beside].append(measure(home, sender, reader, data, messages // WINDOWS))
            if beside:
                beside_s += time.monotonic() - began
                cpu_s += audits.cpu_s() - before
    report(
        case="audit live",
        agents=agents,
        messages=sum(map(len, taken[True])),
        audit_cpu=round(cpu_s / beside_s, 2),
        **_facts(taken[False], taken[True]),
    )


def _facts(alone: list[list[float]], beside: list[list[float]]) -> dict[str, float]:
    """Percentiles over all windows of each kind, and their ratio."""
    facts: dict[str, float] = {}
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        both = [
            percentile([one for window in kind for one in window], share) * 1e3
            for kind in (alone, beside)
        ]
        facts |= {f"alone_{name}_ms": round(both[0], 2), f"{name}_ms": round(both[1], 2)}
        facts |= {f"ratio_{name}": round(both[1] / both[0], 2)}
        medians = [
            statistics.median(percentile(window, share) for window in kind)
            for kind in (alone, beside)
        ]
        facts |= {f"ratio_of_median_windows_{name}": round(medians[1] / medians[0], 2)}
    return facts


class _Audits:
    """Repeated audits of a home."""

    def __init__(self, home: Home) -> None:
        audit = f"{sys.executable} -m relay --home '{home.root}' audit run"
        loop = f"while true; do {audit} >/dev/null 2>&1; done"
        self._process = subprocess.Popen(["sh", "-c", loop], start_new_session=True)
        self._cpu_s: dict[tuple[int, float], float] = {}

    def go_on(self, going: bool) -> None:
        """Resume or pause them and all their child processes."""
        self._signal(signal.SIGCONT if going else signal.SIGSTOP)

    def cpu_s(self) -> float:
        """CPU seconds used since the start; for ended processes, the last measured value."""
        for one in self._family():
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                self._cpu_s[one.pid, one.create_time()] = times.user + times.system
        return sum(self._cpu_s.values())

    def end(self) -> None:
        """End the loop and the current audit with its JVM."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # Parents first, and until there is nobody new: who is stopped starts nothing.
        done: set[int] = set()
        while family := [one for one in self._family() if one.pid not in done]:
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.send_signal(number)
                done.add(one.pid)

    def _family(self) -> list[psutil.Process]:
        mine = psutil.Process(self._process.pid)
        return [mine, *mine.children(recursive=True)]


@contextlib.contextmanager
def _audits(home: Home) -> Iterator[_Audits]:
    audits = _Audits(home)
    try:
        yield audits
    finally:
        audits.end()
