"""How a run goes, told to whoever watches it."""

from __future__ import annotations

from relay.audit.summary import Examples, JobReport

SNAPSHOT = "taking a snapshot of ledger and store"
STARTING = "starting Spark"
WRITING = "writing the report"


class Watcher:
    """Is told of each step as it begins, and of each job as it ends. This one says nothing."""

    def step(self, what: str) -> None:
        """A step of the run begins: one of the sentences above."""

    def begins(self, name: str, of: int) -> None:
        """The job of this name begins, of so many; another one may be underway.

        Called in a thread of the job's own.
        """

    def ended(self, report: JobReport, examples: Examples) -> None:
        """A job has its verdict."""

    def finished(self) -> None:
        """The run is over, whatever became of it."""
