"""Status of a running relay: the loop's numbers, its health, and both as Prometheus metrics.

    StatusSnapshot   frozen numbers of one instant, made by the loop when somebody asks
    SharedStatus     the latest snapshot, and what the daemon knows outside of the loop
    metrics_page     both in the Prometheus text format; docs/metrics.md lists every metric

Attributes of ``SharedStatus`` are replaced whole and never changed in place, so any thread may read
them while the loop is busy; then the last snapshot stays, and its age shows it. Memory and the size
of the ledger's WAL are read at each request.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.disk import DiskState, DiskUsage
from relay.base.home import LEDGER
from relay.base.metrics import START, STOP, WAIT, Buckets, Metrics
from relay.base.text import format_size
from relay.base.watcher import Watcher
from relay.delivery.loop import Dispatcher
from relay.engine.engine import Engine
from relay.ledger.wal import wal_bytes

EVERY_NS = NS_PER_S
PATIENCE_S = 0.5  # a request waits so long for the loop
PAUSE_FACTOR = 100  # pause of this many times the last snapshot's cost: at most 1 % of the loop


class StatusSnapshot(NamedTuple):
    """The loop's numbers at one instant."""

    monotonic_ns: int
    watcher: str
    totals: dict[str, int]  # by the field names of Metrics
    stages: dict[str, Buckets]
    delivery_s: Buckets
    commit_s: Buckets
    batch_files: Buckets
    queue_files: int  # seen in outboxes, not taken yet
    oldest_ns: int | None  # monotonic: since when the first of them waits
    agents: int
    unwatched: int  # scanned instead: inotify has no watch left
    watches: int
    held_back: int  # messages that max_pending keeps back
    active: int  # messages of the live store
    dead_letters: int
    owed: Counter[str]  # open answers, by agent
    journal_end: int  # bytes of the stream so far


class StatusPublisher:
    """Makes snapshots for those who ask. Owned by the loop."""

    def __init__(self, dispatcher: Dispatcher, store: Engine, watcher: Watcher) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._watcher = watcher
        self._clock = store.clock
        self._not_before_ns = 0
        self._overflows = 0

    def step(self) -> StatusSnapshot | None:
        """A snapshot; None soon after the last one, which is recent enough."""
        now = self._clock.monotonic_ns()
        if now < self._not_before_ns:
            return None
        snapshot = self._make(now)
        took_ns = self._clock.monotonic_ns() - now
        self._not_before_ns = now + max(EVERY_NS, PAUSE_FACTOR * took_ns)
        return snapshot

    def _make(self, now: int) -> StatusSnapshot:
        dispatcher, state = self._dispatcher, self._store.state
        metrics, roster = dispatcher.metrics, dispatcher.roster
        metrics.overflows += self._watcher.overflows - self._overflows
        self._overflows = self._watcher.overflows
        return StatusSnapshot(
            monotonic_ns=now,
            watcher=self._watcher.name,
            totals={name: getattr(metrics, name) for name in COUNTERS},
            stages={name: times.read() for name, times in metrics.stages.items()},
            delivery_s=metrics.delivery_s.read(),
            commit_s=metrics.commit_s.read(),
            batch_files=metrics.batch_files.read(),
            queue_files=dispatcher.backlog,
            oldest_ns=dispatcher.oldest_ns(),
            agents=len(roster.agents),
            unwatched=len(roster.unwatched),
            watches=self._watcher.watches_held,
            held_back=len(state.pending.held),
            active=len(state.messages),
            dead_letters=len(state.dead),
            owed=Counter(name for known in state.owed.values() for name in known),
            journal_end=dispatcher.journal_end,
        )


class Health(NamedTuple):
    """Health: is the loop alive, and does the relay accept messages?"""

    is_healthy: bool  # no step of the loop has lasted too long
    is_ready: bool  # a session serves and accepts messages
    reasons: tuple[str, ...]  # why it is not healthy or not ready


class SharedStatus:
    """Status of a running relay. Written by the daemon's thread, read by any."""

    def __init__(self, home: str, config: Config, clock: Clock) -> None:
        self.home = home
        self.config = config
        self.clock = clock
        self.metrics = Metrics(clock)
        self.started_at_ns = clock.now_ns()
        self.epoch = 0  # of the session; 0: none has begun
        self.snapshot: StatusSnapshot | None = None
        self.wake: Callable[[], None] | None = None  # ends the loop's wait while it serves
        self.asked: list[threading.Event] = []  # by threads that wait for a new snapshot
        self.disk: DiskUsage | None = None
        self.pauses: dict[str, str] = {}  # source of the pause (disk, wal) -> reason
        self.trouble = ""  # reason why no session serves
        self.admin_trouble = ""  # why a server of health and metrics could not start
        self.config_error = ""  # why the new config.json was not applied
        self.reloads = True  # SIGHUP reads config.json; at a terminal, it stops the relay
        self.tiers_waiting: tuple[str, ...] = ()  # steps of the journal's tiers that failed
        self.left_step: Future[str | None] | None = None  # of the tiers, of a session that ended
        self.ledger_damage = ""  # result of the last check of the ledger
        self.is_serving = False

    @property
    def paused(self) -> str:
        """The reason why intake is paused, in one line; empty if it is not."""
        return "; ".join(self.pauses.values())

    def refresh(self) -> None:
        """Ask the loop for a new snapshot; one that is busy for longer leaves the last one."""
        wake, answer = self.wake, threading.Event()
        if wake is not None:
            self.asked.append(answer)
            wake()
            answer.wait(PATIENCE_S)

    def publish(self, snapshot: StatusSnapshot | None) -> None:
        """Replace the snapshot if there is a new one, and answer who asked."""
        self.snapshot = snapshot or self.snapshot
        while self.asked:
            self.asked.pop().set()

    def health(self) -> Health:
        """Current health, independent of the snapshot's age."""
        reasons: list[str] = []
        step, since_s = self.metrics.stuck_s()
        is_healthy = since_s < self.config.admin.stall_after_s
        if not is_healthy:
            reasons.append(f"the loop is stuck: in step {step} for {since_s:.0f} s")
        if self.trouble:
            reasons.append(f"not serving, will retry: {self.trouble}")
        elif not self.is_serving:
            verbs = {START: "it is starting", STOP: "it is stopping", WAIT: "it is starting"}
            reasons.append(verbs.get(step, "it is starting"))
        if self.hanging_step():
            reasons.append("a step of the journal's tiers, begun by an earlier session, hangs")
        reasons += self.pauses.values()
        is_ready = is_healthy and self.is_serving and not self.pauses
        return Health(is_healthy, is_ready, tuple(reasons))

    def hanging_step(self) -> bool:
        """True while a step of the tiers runs that an ended session left behind."""
        return self.left_step is not None and not self.left_step.done()

    def snapshot_age_s(self) -> float | None:
        """Age of the snapshot; None before the first one."""
        if self.snapshot is None:
            return None
        return (self.clock.monotonic_ns() - self.snapshot.monotonic_ns) / NS_PER_S


def pause_reason(disk: DiskUsage | None) -> str:
    """The reason to pause intake because of the disk, or an empty string."""
    if disk is None or disk.state is not DiskState.FLOOR:
        return ""
    free, floor = format_size(disk.free_bytes), format_size(disk.floor_bytes)
    return (
        f"intake is paused: the disk has {free} free, the floor is {floor}; free some space: "
        "files wait in their outboxes, and intake resumes by itself"
    )


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# field of Metrics -> metric name, help text
COUNTERS = {
    "accepted": ("relay_messages_accepted", "Messages that were accepted: the journal has them."),
    "refused": ("relay_messages_refused", "Files refused; the sender was told why."),
    "postponed": ("relay_messages_postponed", "Times a file was left in its outbox to be retried."),
    "written": ("relay_deliveries_written", "Files put into inboxes, later attempts included."),
    "again": ("relay_deliveries_repeated", "Files put into inboxes for a second time or later."),
    "held": ("relay_deliveries_held", "Times a delivery could not be made and was put off."),
    "bounced": ("relay_deliveries_bounced", "Deliveries whose recipient is no longer an agent."),
    "expired": ("relay_deliveries_expired", "Deliveries given up because their time was over."),
    "dead": ("relay_deliveries_dead", "Deliveries given up after their last attempt."),
    "read": ("relay_deliveries_read", "Files that their recipients took out of their inboxes."),
    "acked": ("relay_acknowledgments", "Answers that acknowledged a message."),
    "overflows": ("relay_inotify_overflows", "Times inotify lost events; a scan followed."),
}


def metrics_page(status: SharedStatus) -> bytes:
    """The body of ``/metrics``."""
    return generate_latest(StatusCollector(status))


class StatusCollector(Collector):
    """Exports the shared status as metrics; safe from any thread."""

    def __init__(self, status: SharedStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Every metric; those of the loop after a session has published its first snapshot."""
        yield from self._process()
        snapshot = self._status.snapshot
        if snapshot is not None:
            yield from self._counters(snapshot)
            yield from self._gauges(snapshot)
            yield from self._histograms(snapshot)

    def _process(self) -> Iterator[Metric]:
        from relay import __version__

        status = self._status
        health, (_, stuck_s) = status.health(), status.metrics.stuck_s()
        info = InfoMetricFamily("relay_build", "The version that runs.")
        info.add_metric([], {"version": __version__})
        yield info
        yield _gauge(
            "relay_healthy", "1 while no step of the loop lasts too long.", health.is_healthy
        )
        yield _gauge(
            "relay_ready", "1 while a session serves and takes messages in.", health.is_ready
        )
        yield _gauge("relay_intake_paused", "1 while nothing is taken in.", bool(status.pauses))
        yield self._pauses()
        text = "Steps of the journal's tiers that failed and wait."
        yield _gauge("relay_tiers_waiting", text, len(status.tiers_waiting))
        yield _gauge("relay_sessions_begun", "Starts of this home's relay so far.", status.epoch)
        started = status.started_at_ns / NS_PER_S
        yield _gauge("relay_start_time_seconds", "When the process started, Unix time.", started)
        text = "Time that the loop has been in its present step; 0 while it waits."
        yield _gauge("relay_step_duration_seconds", text, stuck_s)
        age = status.snapshot_age_s()
        if age is not None:
            yield _gauge("relay_snapshot_age_seconds", "Age of what the loop published.", age)
        memory = resident_bytes()
        if memory is not None:
            yield _gauge("relay_resident_memory_bytes", "Memory of the process.", memory)
        size = wal_bytes(os.path.join(status.home, LEDGER))
        yield _gauge("relay_ledger_wal_bytes", "Size of the ledger's WAL.", size)
        text = "Size of the ledger's WAL at which intake pauses."
        yield _gauge("relay_ledger_wal_limit_bytes", text, status.config.ledger.wal_most_mib << 20)
        yield from self._disk()

    def _pauses(self) -> Metric:
        """One value for each possible reason to pause intake."""
        family = GaugeMetricFamily(
            "relay_intake_paused_by", "1 while it is for this reason.", labels=["reason"]
        )
        pauses = self._status.pauses
        for who in sorted({"disk", "wal"} | pauses.keys()):
            family.add_metric([who], float(who in pauses))
        return family

    def _disk(self) -> Iterator[Metric]:
        disk = self._status.disk
        if disk is None:
            return
        yield _gauge("relay_disk_size_bytes", "Size of the home's file system.", disk.size_bytes)
        yield _gauge("relay_disk_free_bytes", "Bytes that may still be written.", disk.free_bytes)
        text = "Free bytes below which intake pauses."
        yield _gauge("relay_disk_floor_bytes", text, disk.floor_bytes)
        yield _gauge("relay_disk_used_ratio", "Share of it in use.", disk.used_percent / 100)

    def _counters(self, snapshot: StatusSnapshot) -> Iterator[Metric]:
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=snapshot.totals[field])

    def _gauges(self, snapshot: StatusSnapshot) -> Iterator[Metric]:
        oldest, now = snapshot.oldest_ns, self._status.clock.monotonic_ns()
        waits_s = 0.0 if oldest is None else (now - oldest) / NS_PER_S
        text = "Files seen in outboxes, not yet taken."
        yield _gauge("relay_queue_files", text, snapshot.queue_files)
        yield _gauge("relay_outbox_age_seconds", "How long the oldest of them waits.", waits_s)
        yield _gauge("relay_agents", "Number of agents.", snapshot.agents)
        text = "Agents that are scanned because inotify has no watch left."
        yield _gauge("relay_agents_unwatched", text, snapshot.unwatched)
        text = "Directories that inotify watches."
        yield _gauge("relay_inotify_watches", text, snapshot.watches)
        text = "Messages held by max_pending."
        yield _gauge("relay_messages_held_back", text, snapshot.held_back)
        yield _gauge("relay_messages_active", "Messages of the live store.", snapshot.active)
        text = "Dead letters not yet replayed or discarded."
        yield _gauge("relay_dead_letters", text, snapshot.dead_letters)
        text = "Answers that are owed."
        yield _gauge("relay_answers_open", text, snapshot.owed.total())
        text = "Length of the journal's stream since its beginning."
        yield _gauge("relay_journal_stream_bytes", text, snapshot.journal_end)

    def _histograms(self, snapshot: StatusSnapshot) -> Iterator[Metric]:
        stages = HistogramMetricFamily(
            "relay_stage_seconds", "Time that a stage of a batch took.", labels=["stage"]
        )
        for name, times in snapshot.stages.items():
            stages.add_metric([name], *_buckets(times))
        yield stages
        for metric, text, values in (
            (
                "relay_delivery_seconds",
                "From a sender's last write to the file to its delivery.",
                snapshot.delivery_s,
            ),
            (
                "relay_journal_commit_seconds",
                "One write and sync of the journal.",
                snapshot.commit_s,
            ),
            ("relay_batch_files", "Files of a batch.", snapshot.batch_files),
        ):
            buckets, total = _buckets(values)
            yield HistogramMetricFamily(metric, text, buckets=buckets, sum_value=total)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where it cannot be read."""
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except (psutil.Error, OSError):
        return None


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _buckets(values: Buckets) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound, and the sum."""
    seen = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
    return buckets, values.total
