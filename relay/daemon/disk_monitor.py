"""What the loop does for those who look after it: it watches the disk, pauses, tells, publishes.

An alert is told once an episode: when it began stands in the ledger, the notice's id is derived
from that, so a crash in between tells it again under the same name.

    killed before the ledger has it    the next start finds the disk as it is, and begins anew
    killed before the notice           found in the ledger: the same notice, now
    killed behind the notice           the same once more: who has it gets nothing
"""

from __future__ import annotations

from collections.abc import Callable

from relay.base.clock import Clock
from relay.base.disk import DiskState, DiskUsage, DiskWatch
from relay.base.errors import LedgerError
from relay.base.names import OPERATOR
from relay.daemon.status import SharedStatus, StatusPublisher, pause_reason
from relay.delivery.loop import Dispatcher
from relay.delivery.work import Context
from relay.ledger import Ledger

EPISODE = "disk_alert"  # in orchestrator_state: when it began, and TOLD behind that; or empty
TOLD = " told"
LEVELS = {DiskState.OK: "info", DiskState.FLOOR: "error"}


class DiskMonitor:
    """Turned by the loop after every tick. Owned by it."""

    def __init__(
        self,
        board: SharedStatus,
        dispatcher: Dispatcher,
        publisher: StatusPublisher,
        disk: DiskWatch,
        ledger: Ledger,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._board = board
        self._dispatcher = dispatcher
        self._publisher = publisher
        self._disk = disk
        self._ledger = ledger
        self._clock = clock
        self._log = log
        self._trouble = ""

    def due_ns(self) -> int:
        """When there is something to do (monotonic)."""
        due = self._disk.due_ns()
        publish = self._publisher.due_ns()
        return due if publish is None else min(due, publish)

    def begin(self) -> None:
        """Before the first tick: below its floor a disk takes nothing in from the beginning."""
        self._look()

    def step(self) -> None:
        """After a tick: look at the disk, act on it, and publish, as far as each is due."""
        reading = self._look()
        if reading is not None:
            self._tell(reading)
        self._publish_pauses()  # the disk is not the only reason
        snapshot = self._publisher.step(news=True)
        if snapshot is not None:
            self._board.snapshot = snapshot

    def _look(self) -> DiskUsage | None:
        """What the disk is like, where it was time to look."""
        if self._clock.monotonic_ns() < self._disk.due_ns():
            return None
        change = self._disk.check()
        reading = self._disk.reading
        if reading is not None:
            self._board.disk = reading
            self._pause(reading)
            self._say(change)
        return reading

    def _pause(self, reading: DiskUsage) -> None:
        """Stop taking messages in below the floor, and begin again above it."""
        self._dispatcher.pauses["disk"] = pause_reason(reading)
        self._publish_pauses()

    def _publish_pauses(self) -> None:
        pauses = self._dispatcher.pauses
        self._board.pauses = {who: why for who, why in pauses.items() if why}

    def _say(self, change: tuple[DiskUsage | None, DiskUsage] | None) -> None:
        if change is None or (change[0] is None and not change[1].state.is_alert):
            return
        before, now = change
        paused = f"; {self._board.paused}" if self._board.paused else ""
        resumed = before is not None and before.state is DiskState.FLOOR and not paused
        self._log(
            f"The disk is {now.state.value}: {now.sentence()}{paused}"
            + "; intake goes on" * resumed,
            action="disk",
            level=LEVELS.get(now.state, "warning"),
            free_bytes=now.free_bytes,
        )

    def _tell(self, reading: DiskUsage) -> None:
        """Notify operator and lead, once an episode."""
        try:
            began = self._ledger.get_state(EPISODE) or ""
            if not reading.state.is_alert:
                if began:
                    self._note("")
                return
            if began.endswith(TOLD):
                return
            if not began:
                began = str(self._clock.now_ns())
                self._note(began)
            names = {OPERATOR, self._dispatcher.roster.trusted_lead() or OPERATOR}
            if self._dispatcher.notifier.announce(names, _notice(reading), EPISODE, int(began)):
                self._note(began + TOLD)
            self._trouble = ""
        except LedgerError as exc:  # a disk so full: the log has it, and this is tried again
            if str(exc) != self._trouble:
                self._trouble = str(exc)
                self._log(f"Could not tell of the disk: {exc}", action="disk", level="warning")

    def _note(self, value: str) -> None:
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.set_state(EPISODE, value, now)


def make_disk_monitor(
    board: SharedStatus,
    dispatcher: Dispatcher,
    publisher: StatusPublisher,
    context: Context,
) -> DiskMonitor:
    """What looks after a session."""
    disk = DiskWatch(context.home.root, context.config.disk, context.clock)
    return DiskMonitor(
        board, dispatcher, publisher, disk, context.ledger, context.clock, context.log
    )


def _notice(reading: DiskUsage) -> str:
    return (
        f"the disk of the relay's home is nearly full: {reading.sentence()}; "
        f"below {reading.floor_bytes >> 20} MiB free the relay takes no messages in. "
        "What to do: docs/runbook.md, The disk"
    )
