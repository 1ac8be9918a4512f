"""Watch the disk, pause intake below the floor, notify operator and lead.

One notification per episode: its begin is in the ledger, and the notification's id is derived from
it, so that a repetition after a crash has the same id and is dropped.

    killed before the ledger has the begin    the next start sees the disk and begins the episode
    killed before the notification            the begin is in the ledger: it is sent now
    killed after the notification             sent again with the same id: dropped as a duplicate
"""

from __future__ import annotations

from relay.base.clock import NS_PER_S
from relay.base.disk import CHECK_S, DiskState, DiskUsage, DiskWatch
from relay.base.errors import LedgerError
from relay.base.names import OPERATOR
from relay.base.text import format_size
from relay.daemon.status import SharedStatus, pause_reason
from relay.delivery.loop import Dispatcher
from relay.delivery.values import Part, Resources

EPISODE = "disk_alert"  # in orchestrator_state: begin of the episode, NOTIFIED appended; or empty
NOTIFIED = " told"
LEVELS = {DiskState.OK: "info", DiskState.FLOOR: "error"}


class DiskMonitor(Part):
    """Called after every tick."""

    def __init__(
        self, given: Resources, status: SharedStatus, dispatcher: Dispatcher, disk: DiskWatch
    ) -> None:
        super().__init__(given)
        self._status = status
        self._dispatcher = dispatcher
        self._disk = disk
        self._due_ns = 0
        self._trouble = ""

    def due_ns(self) -> int:
        """Time of the next step (monotonic ns)."""
        return self._due_ns

    def check(self) -> None:
        """Check the disk, and pause or resume intake; before the first tick, too."""
        self._due_ns = self._clock.monotonic_ns() + CHECK_S * NS_PER_S
        change = self._disk.check()
        reading = self._disk.reading
        if reading is not None:
            self._status.disk = reading
            self._dispatcher.pause("disk", pause_reason(reading))
            self._status.pauses = self._dispatcher.pauses
            self._log_change(change)

    def step(self) -> None:
        """Check the disk if that is due, and act on it."""
        if self._clock.monotonic_ns() >= self._due_ns:
            self.check()
            if self._disk.reading is not None:
                self._notify(self._disk.reading)

    def _log_change(self, change: tuple[DiskUsage | None, DiskUsage] | None) -> None:
        if change is None or (change[0] is None and not change[1].state.is_alert):
            return
        before, now = change
        paused = f"; {self._status.paused}" if self._status.paused else ""
        resumed = before is not None and before.state is DiskState.FLOOR and not paused
        then = "; intake resumes" if resumed else paused
        self._log(
            f"The disk is {now.state.value}: {now.sentence()}{then}",
            action="disk",
            level=LEVELS.get(now.state, "warning"),
            free_bytes=now.free_bytes,
        )

    def _notify(self, reading: DiskUsage) -> None:
        """Notify operator and lead, once per episode."""
        try:
            episode = self._ledger.get_state(EPISODE) or ""
            if not reading.state.is_alert:
                if episode:
                    self._save_episode("")
                return
            if episode.endswith(NOTIFIED):
                return
            if not episode:
                episode = str(self._clock.now_ns())
                self._save_episode(episode)
            names = {OPERATOR, self._dispatcher.roster.trusted_lead() or OPERATOR}
            if self._dispatcher.notifier.announce(names, _notice(reading), EPISODE, int(episode)):
                self._save_episode(episode + NOTIFIED)
            self._trouble = ""
        except LedgerError as exc:  # a full disk, too: logged, and tried again
            if str(exc) != self._trouble:
                self._trouble = str(exc)
                text = f"Could not notify about the disk: {exc}"
                self._log(text, action="disk", level="warning")

    def _save_episode(self, value: str) -> None:
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.set_state(EPISODE, value, now)


def _notice(reading: DiskUsage) -> str:
    return (
        f"the disk of the relay's home is nearly full: {reading.sentence()}; "
        f"below {format_size(reading.floor_bytes)} free the relay takes no messages in. What to "
        "do: free space on that disk; `relay prune --dry-run` shows what the relay can remove"
    )
