"""All jobs, by name. A new one is a module here and a line below."""

from __future__ import annotations

from relay.audit.jobs import (
    acks,
    agents,
    capacity,
    dead_letters,
    duplicates,
    integrity,
    latency,
    ordering,
    reconcile,
    security,
    threads,
    traffic,
)
from relay.audit.jobs.job import AuditJob
from relay.base.errors import InvalidName
from relay.base.text import did_you_mean

__all__ = ["JOBS", "AuditJob", "select"]

# In the order of a report: losses, then the course of deliveries, then agents, then files.
_EVERY = (
    reconcile.JOB,
    duplicates.JOB,
    dead_letters.JOB,
    acks.JOB,
    ordering.JOB,
    latency.JOB,
    traffic.JOB,
    threads.JOB,
    agents.JOB,
    security.JOB,
    integrity.JOB,
    capacity.JOB,
)
JOBS: dict[str, AuditJob] = {job.name: job for job in _EVERY}


def select(names: tuple[str, ...]) -> list[AuditJob]:
    """Return the jobs of these names, each once, or all. Errors: InvalidName."""
    for name in names:
        if name not in JOBS:
            raise InvalidName(
                f"unknown job {name}: expected one of {', '.join(JOBS)}",
                hint=did_you_mean(name, JOBS) or "`relay audit list` describes them",
            )
    return [JOBS[name] for name in dict.fromkeys(names or JOBS)]
