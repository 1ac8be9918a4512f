"""The facts of two pages: whether all is well now, and what the last audit found."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from relay.audit.summary import REPORT, SUMMARY, read_summary
from relay.base.clock import NS_PER_S, iso_time, parse_time
from relay.base.home import LEDGER, Home, lock_holder, running_trouble, unclean_stop
from relay.base.status_client import ask
from relay.doctor import examine
from relay.views.digest import make_digest
from relay.views.sessions import agent_states, last_rings

Facts = dict[str, Any]
AUDITS = "audits"  # in the home: where the page finds what `relay audit run` wrote
FULL_EVERY_S = 60
ASK_S = 1.0  # for the relay's word about itself
RATES = ("accepted", "written", "read", "refused", "dead")


def health_facts(home: Home, *, is_full: bool) -> Facts:
    """Process, disk, rates, doctor's findings, and how agents were last rung.

    ``is_full``: all that doctor looks at, which takes longer with more messages.
    """
    pid = lock_holder(home)
    reply = ask(home, ASK_S) if pid is not None else None
    return {
        "home": home.root,
        "pid": pid,
        "is_silent": reply is not None and reply.is_silent,
        "trouble": running_trouble(home) if pid is not None else str(unclean_stop(home) or ""),
        "status": reply.status if reply else None,
        "rates": _rates(reply.status) if reply and reply.status else {},
        "is_full": is_full,
        "findings": _all_findings(home) if is_full else _findings(home, is_full=False),
        "rungs": _rungs(home),
    }


def _rates(status: Facts) -> dict[str, Facts]:
    """The relay's totals since it started, and per second."""
    seconds = max(1, time.time() - parse_time(status["started_at"]) / NS_PER_S)
    totals = status["totals"]
    return {
        name: {"total": totals[name], "per_s": round(totals[name] / seconds, 3)} for name in RATES
    }


_looked: dict[str, tuple[float, list[Facts]]] = {}  # home -> when, and what was found


def _all_findings(home: Home) -> list[Facts]:
    """All findings, of the last minute: an open page asks whenever something happens."""
    at, found = _looked.get(home.root, (0.0, []))
    if not at or time.monotonic() - at > FULL_EVERY_S:
        found = _findings(home, is_full=True)
        _looked[home.root] = (time.monotonic(), found)
    return found


def _findings(home: Home, *, is_full: bool) -> list[Facts]:
    return [
        {
            "what": finding.what,
            "text": finding.text,
            "advice": finding.advice,
            "severity": finding.severity,
        }
        for finding in examine(home, quick=not is_full)
    ]


def _rungs(home: Home) -> list[Facts]:
    """The rung that worked last for each agent with a session, or the last that did not."""
    found = []
    for name in sorted(agent_states(home, time.time_ns())):
        if rings := last_rings(home, name):
            worked = next((ring for ring in rings if ring["result"].startswith("rang")), None)
            found.append({"agent": name, "worked": worked is not None, **(worked or rings[0])})
    return found


def audit_facts(home: Home) -> Facts:
    """The last run that wrote into ``audits`` of the home, and the day in numbers."""
    now_ns = time.time_ns()
    digest = make_digest(home.path(LEDGER), parse_time("yesterday"), now_ns)
    report: Facts | None = None
    if os.path.lexists(home.path(AUDITS, SUMMARY)):
        made = read_summary(home.path(AUDITS))
        jobs = [
            {"name": job.name, "outcome": job.outcome, "seconds": job.seconds}
            | {"errors": job.errors, "warnings": job.warnings, "failed": job.error is not None}
            for job in made.jobs.values()
        ]
        page = home.path(AUDITS, REPORT)
        report = {"at": made.snapshot_at, "findings": made.findings, "jobs": jobs, "page": page}
    since_at = iso_time(digest.since_at)
    return {"report": report, "folder": home.path(AUDITS), "since_at": since_at} | {
        "counts": msgspec.to_builtins(digest.counts)
    }
