"""The jobs there are, by name. A new one is a module here and a line below."""

from __future__ import annotations

from relay.audit.jobs import (
    acks,
    dead_letters,
    duplicates,
    integrity,
    ordering,
    reconcile,
    traffic,
)
from relay.audit.jobs.job import Job
from relay.errors import RelayError

__all__ = ["JOBS", "Job", "select"]

_EVERY = (
    reconcile.JOB,
    duplicates.JOB,
    ordering.JOB,
    acks.JOB,
    dead_letters.JOB,
    integrity.JOB,
    traffic.JOB,
)
JOBS: dict[str, Job] = {job.name: job for job in _EVERY}


def select(names: tuple[str, ...]) -> list[Job]:
    """The jobs of these names, each once; no names are all. Errors: RelayError for another."""
    for name in names:
        if name not in JOBS:
            raise RelayError(
                f"there is no job {name}: there are {', '.join(JOBS)}",
                hint="`relay audit list` says what each one tells",
            )
    return [JOBS[name] for name in dict.fromkeys(names or JOBS)]
