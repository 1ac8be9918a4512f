"""``audit_runs``: what an audit costs, by the number of messages of its home.

For each size a history is made (50 agents, ``scripts/make-history``), and four commands follow,
each in a process of its own:

    extract   ``relay audit extract`` into a new lake
    again     the same, when nothing is new
    run       ``relay audit run --lake --out``: snapshot, extract, all jobs, tables, the report
    later     the same, after a relay has delivered a hundredth more messages

``cpu_s`` is of the command and all processes below it, ``peak_mb`` what they had at most of their
own (USS), both seen ten times a second. ``us_per_message`` is the CPU time beyond an empty home's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from relay.base.errors import EXIT_FINDINGS, EXIT_OK
from relay.base.home import Home
from relay.base.names import OPERATOR
from scripts.benchmarks.common import fill, fresh_root, note, report
from scripts.history.make import Given, History

SIZES = (0, 3_000, 100_000)
LARGE = 500_000  # with --large
AGENTS = 50
MESSAGES_A_DAY = 33_000  # a month of a million
LOOK_S = 0.1
AGE_NS = 300 * 10**9


class Cost(NamedTuple):
    """What a command and the processes below it took."""

    cpu_s: float
    wall_s: float
    peak_mb: int


def run(base: str | None, *, large: bool = False) -> None:
    """Run every size and print one line a command."""
    root = fresh_root(base)
    empty: dict[str, float] = {}
    for messages in (*SIZES, LARGE) if large else SIZES:
        home = root / f"home-{messages}"
        note(f"audit: a history of {messages} messages in {home}")
        _make(home, messages)
        lake, kept, out = (str(root / f"{name}-{messages}") for name in ("lake", "kept", "out"))
        commands = {
            "extract": ["extract", "--lake", lake],
            "again": ["extract", "--lake", lake],
            "run": ["run", "--lake", kept, "--out", out],
            "later": ["run", "--lake", kept, "--out", f"{out}-later"],
        }
        for name, words in commands.items():
            if name == "later":
                _deliver(home, messages // 100)
            cost = _cost([sys.executable, "-m", "relay", "--home", str(home), "audit", *words])
            beyond = cost.cpu_s - empty.setdefault(name, cost.cpu_s)
            report(
                case=f"audit_runs, {name}",
                messages=messages,
                **cost._asdict(),
                us_per_message=round(beyond * 1e6 / messages) if messages else None,
            )


def _make(home: Path, messages: int) -> None:
    if not messages:
        subprocess.run(
            [sys.executable, "-m", "relay", "--home", str(home), "init"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return
    days = max(2.0, messages / MESSAGES_A_DAY)
    History(str(home), Given(messages, AGENTS, days, time.time_ns() - AGE_NS)).make()


def _deliver(home: Path, messages: int) -> None:
    """Let a relay deliver so many new messages."""
    with Home(str(home)) as opened:
        names = sorted(set(opened.agent_names()) - {OPERATOR})
        made = fill(opened, names, messages) if names else []
        left = [Path(opened.path("agents", agent, "outbox", name)) for agent, name in made]
        relay = [sys.executable, "-m", "relay", "--home", str(home)]
        subprocess.run([*relay, "up"], stdout=subprocess.DEVNULL, check=True)
        while any(path.exists() for path in left):
            time.sleep(LOOK_S)
    subprocess.run([*relay, "down"], stdout=subprocess.DEVNULL, check=True)


def _cost(command: list[str]) -> Cost:
    """Run a command to its end. A process that ends between two looks counts as last seen."""
    began = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    cpu_s: dict[int, float] = {}
    peak = 0
    while process.poll() is None:
        held = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                times = one.cpu_times()
                cpu_s[one.pid] = times.user + times.system
                held += one.memory_full_info().uss
            except psutil.Error:
                continue
        peak = max(peak, held)
        time.sleep(LOOK_S)
    if process.returncode not in (EXIT_OK, EXIT_FINDINGS):
        raise SystemExit(f"{' '.join(command)}: {process.stderr.read().decode()}")
    wall_s = time.perf_counter() - began
    return Cost(round(sum(cpu_s.values()), 1), round(wall_s, 1), peak >> 20)
