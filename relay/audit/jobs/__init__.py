"""All jobs, by name. A new one is an SQL file here and a line in ``sql_jobs.py``."""

from __future__ import annotations

from relay.audit.jobs import capacity
from relay.audit.jobs.job import AuditJob
from relay.audit.jobs.sql_jobs import SQL_JOBS
from relay.base.errors import InvalidName
from relay.base.text import did_you_mean

__all__ = ["JOBS", "AuditJob", "select"]

JOBS: dict[str, AuditJob] = {job.name: job for job in (*SQL_JOBS, capacity.JOB)}


def select(names: tuple[str, ...]) -> list[AuditJob]:
    """Return the jobs of these names, each once, or all. Errors: InvalidName."""
    for name in names:
        if name not in JOBS:
            raise InvalidName(
                f"unknown job {name}: expected one of {', '.join(JOBS)}",
                hint=did_you_mean(name, JOBS) or "`relay audit list` describes them",
            )
    return [JOBS[name] for name in dict.fromkeys(names or JOBS)]
