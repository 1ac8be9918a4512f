"""One process that the relay started, as the supervisor has it in memory."""

from __future__ import annotations

from relay.agents.requests import Spec
from relay.agents.spawner import Pid
from relay.ledger.processes import PendingOperation, ProcessRow


class Child:
    """One process and what is in hand for it. Only the supervisor touches it."""

    def __init__(self, row: ProcessRow, spec: Spec | None) -> None:
        self.row = row
        self.spec = spec  # None: it was lost, and it cannot be started again
        self.releases: dict[int, PendingOperation] = {}
        self.pending_notices = 0  # notices about it that are not journalled yet
        self.is_finished = False  # its end has been said, and it waits for its next start
        self.is_over = False  # nothing more comes of it
        self.start_at = 0  # monotonic; of the next start
        self.term_at: int | None = None  # monotonic; SIGTERM was sent
        self.killed = False
        self.waits_since: int | None = None  # monotonic; something holds its lock
        self.check_at = 0  # monotonic; when to look whether it lives
        self.output_from = 0  # bytes of its log that are not this run's
        self.cpu_s: float | None = None
        self.cpu_at = 0  # monotonic
        self.busy_at = 0  # Unix ns; it used CPU

    @property
    def pid(self) -> Pid | None:
        """The process that runs."""
        row = self.row
        return None if row.pid is None else Pid(row.pid, row.pid_start or "")

    @property
    def busy_text(self) -> str:
        """Why another process of its name is not started."""
        row = self.row
        if self.releases:
            return f"{row.name} is being released: ask again when that is done"
        first = f"`relay release {row.name}` first"
        if row.pid is None:
            return f"{row.name} is to be started again: {first}"
        return f"{row.name} runs already, pid {row.pid}: {first}"
