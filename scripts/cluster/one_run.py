"""``python -m scripts.cluster.one_run HOME OUT MASTER NOW_NS [JOB]...``: all jobs, or those named,
as of a given time.

Two runs of the same home are compared row by row, so both must ask at the same time.
"""

from __future__ import annotations

import sys

from relay.audit.run import RunRequest, run_audit
from relay.audit.summary import to_json
from relay.base.clock import Clock
from relay.base.errors import RelayError


class StandingClock(Clock):
    """A clock whose wall time does not advance."""

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def now_ns(self) -> int:
        """The fixed time."""
        return self._at_ns


def main() -> int:
    """Run once; print the summary, return the exit code of ``relay audit run``."""
    home, out, master, now_ns, *jobs = sys.argv[1:]
    request = RunRequest(home, tuple(jobs), out=out, master=master)
    try:
        report, _ = run_audit(request, StandingClock(int(now_ns)))
    except RelayError as exc:
        print(f"{exc}; {exc.hint}" if exc.hint else exc, file=sys.stderr)
        return exc.exit_code
    print(to_json(report).decode())
    for job in report.jobs.values():
        if job.error is not None:
            print(job.verdict, file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
