"""Looks at processes that run: what they use, owe and wrote, and the state that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relay.agents.activity import Activity, LastSeen
from relay.agents.child import Child
from relay.agents.log_rotation import Rotations
from relay.agents.rules import BUSY_PERCENT, next_state
from relay.agents.spawner import Spawner, Usage
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import SpawnSettings
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.ledger import Ledger
from relay.ledger.processes import STUCK


class ProcessMonitor:
    """Takes a look when asked to. Used from the loop's thread."""

    def __init__(
        self,
        settings: SpawnSettings,
        home: Home,
        ledger: Ledger,
        activity: Activity,
        spawner: Spawner,
        clock: Clock,
        log: LogCall,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._activity = activity
        self._spawner = spawner
        self._clock = clock
        self._rotations = Rotations(
            home,
            settings.output_mib << 20,
            settings.output_files,
            clock,
            log,
        )
        self.due_ns = self._rotations.due_ns
        self.close = self._rotations.close

    def measure(self, running: Sequence[Child]) -> list[tuple[Child, LastSeen]]:
        """Note what is so now; returns those that have just become stuck, which are not noted:
        whoever tells their requesters does that with it."""
        seen = self._activity.last_seen(child.row.name for child in running)
        usage = self._spawner.usage([child.pid for child in running if child.pid])
        stuck = []
        for child in running:
            before = child.row.state
            if child.pid in usage:
                self._measure_one(child, seen[child.row.name], usage[child.pid])
            if child.row.state == STUCK != before:
                stuck.append((child, seen[child.row.name]))
        told = {child.row.name for child, _ in stuck}
        with self._ledger.transaction():
            self._ledger.processes.put(c.row for c in running if c.row.name not in told)
        return stuck

    def _measure_one(self, child: Child, seen: LastSeen, usage: Usage) -> None:
        now, mono = self._clock.now_ns(), self._clock.monotonic_ns()
        percent = None
        if child.cpu_s is not None and mono > child.cpu_at:
            used_s = max(0.0, usage.cpu_s - child.cpu_s)
            percent = round(100 * used_s * NS_PER_S / (mono - child.cpu_at), 1)
            if percent >= BUSY_PERCENT:
                child.busy_at = now
        child.cpu_s, child.cpu_at = usage.cpu_s, mono
        active_at = max(child.busy_at, seen.seen_at or 0, child.row.started_at or 0)
        child.row = child.row._replace(
            cpu_percent=percent,
            rss_bytes=usage.rss_bytes,
            idle_s=max(0, now - active_at) // NS_PER_S,
        )
        state = next_state(child.row, seen, child.busy_at, self._settings, now)
        if state != child.row.state:
            child.row = child.row.moved(state, now)

    def rotate_logs(self, children: Iterable[Child]) -> None:
        """Look after the logs of those that run, and of those that have just ended."""
        running = {child.row.name: child for child in children if child.row.pid is not None}
        for name in self._rotations.step(running):
            if name in running:
                running[name].output_from = 0
