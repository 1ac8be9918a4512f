"""Run the benchmarks: all cases, or those named."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from relay.daemon.process import tune_process
from scripts.benchmarks import (
    audit_acomm,
    audit_live,
    audit_runs,
    drain,
    end_to_end,
    engine,
    hook,
    idle,
    journal,
    latency,
    mcp,
    peers,
    ring,
    search,
    senders,
    start,
    web,
)

DRAIN = [
    # agents, files, rows that the ledger has already
    (10, 1_000, 0),
    (10, 20_000, 0),
    (100, 20_000, 0),
    (1_000, 20_000, 0),
    (100, 20_000, 1_000_000),
]
LATENCY = [10, 100, 1_000]
LATENCY_MESSAGES = 1_000
END_TO_END_MESSAGES = 8_000  # below the burst that one agent may send
ENGINE_MESSAGES = 100_000
JOURNAL_SEGMENTS = 1_000
START_MESSAGES = 100_000
WEB_MESSAGES = 100_000
SEARCHED = [100_000, 1_000_000]
IDLE_AGENTS = 1_000
RINGS = 100
HOOK_CALLS = 100
MCP_CALLS = 200
AUDIT_MESSAGES = 2_000
# The audits' parts; ``audit`` is all of them.
AUDITS = ("audit_acomm", "audit_live", "audit_runs")
PEERS = "peers"  # only where it is named: it needs other packages
CASES = (
    "audit",
    "drain",
    "end_to_end",
    "engine",
    "hook",
    "idle",
    "journal",
    "latency",
    "mcp",
    "ring",
    "search",
    "senders",
    "start",
    "web",
)


def main() -> None:
    """Run the requested cases; print one JSON line each."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    known = ", ".join((*CASES, *AUDITS, PEERS))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{known} [all]")
    parser.add_argument("--dir", help="parent of the temporary directories [the system's]")
    parser.add_argument("--large", action="store_true", help="audit: also 500,000 messages")
    arguments = parser.parse_args()
    cases = arguments.cases or CASES
    if unknown := set(cases) - {*CASES, *AUDITS, PEERS}:
        parser.error(f"no case {', '.join(sorted(unknown))}: {known}")
    tune_process()
    base = arguments.dir
    single: dict[str, Callable[[], object]] = {
        "engine": lambda: engine.run(base, messages=ENGINE_MESSAGES),
        "journal": lambda: journal.run(base, segments=JOURNAL_SEGMENTS),
        "idle": lambda: idle.run(base, agents=IDLE_AGENTS),
        "end_to_end": lambda: end_to_end.run(base, messages=END_TO_END_MESSAGES),
        "search": lambda: search.run(base, sizes=SEARCHED),
        "senders": lambda: senders.run(base),
        "start": lambda: start.run(base, messages=START_MESSAGES),
        "web": lambda: web.run(base, messages=WEB_MESSAGES),
        PEERS: lambda: peers.run(base),
    }
    for case, run in single.items():
        if case in cases:
            run()
    if "latency" in cases:
        for agents in LATENCY:
            latency.run(base, agents=agents, messages=LATENCY_MESSAGES)
        latency.run_with_tiers(base, agents=LATENCY[0], messages=LATENCY_MESSAGES)
    for agents, files, rows in DRAIN if "drain" in cases else ():
        drain.run(base, agents=agents, files=files, ledger_rows=rows)
    run_reach(cases, arguments.dir)
    run_audits(cases, arguments.dir, large=arguments.large)


def run_reach(cases: Sequence[str], base: str | None) -> None:
    """Benchmark how agents are reached."""
    if "hook" in cases:
        hook.run(base, calls=HOOK_CALLS)
    if "ring" in cases:
        ring.run(base, rings=RINGS)
    if "mcp" in cases:
        mcp.run(base, calls=MCP_CALLS)


def run_audits(cases: Sequence[str], base: str | None, *, large: bool) -> None:
    """Benchmark the sources one by one, then whole runs. Only these import Spark."""
    cases = AUDITS if "audit" in cases else cases
    if "audit_acomm" in cases:
        audit_acomm.run(base)
    if "audit_live" in cases:
        audit_live.run(base, agents=LATENCY[0], messages=AUDIT_MESSAGES)
    if "audit_runs" in cases:
        audit_runs.run(base, large=large)


if __name__ == "__main__":
    main()
