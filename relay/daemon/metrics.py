"""``/metrics``: the shared status in the Prometheus text format.

The loop's counts come from its published snapshot; memory and the size of the ledger's WAL are read
at each request. docs/metrics.md lists every metric, and a test compares.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from relay.base.clock import NS_PER_S
from relay.base.home import LEDGER
from relay.base.metrics import Buckets
from relay.daemon.status import SharedStatus, StatusSnapshot

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# field of Metrics -> name of the metric, help text
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


def metrics_page(board: SharedStatus) -> bytes:
    """The body of ``/metrics``."""
    return generate_latest(StatusCollector(board))


class StatusCollector(Collector):
    """Exports the shared status as metrics; safe from any thread."""

    def __init__(self, board: SharedStatus) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Every metric; those of the loop after a session has published its first snapshot."""
        yield from self._process()
        snapshot = self._board.snapshot
        if snapshot is not None:
            yield from self._counters(snapshot)
            yield from self._gauges(snapshot)
            yield from self._histograms(snapshot)

    def _process(self) -> Iterator[Metric]:
        from relay import __version__

        board = self._board
        health, (_, stuck_s) = board.health(), board.tally.stuck_s()
        info = InfoMetricFamily("relay_build", "The version that runs.")
        info.add_metric([], {"version": __version__})
        yield info
        yield _gauge(
            "relay_healthy", "1 while no step of the loop lasts too long.", health.is_healthy
        )
        yield _gauge(
            "relay_ready", "1 while a session serves and takes messages in.", health.is_ready
        )
        yield _gauge("relay_intake_paused", "1 while nothing is taken in.", bool(board.pauses))
        yield self._pauses()
        text = "Steps of the journal's tiers that failed and wait."
        yield _gauge("relay_tiers_waiting", text, len(board.tiers_waiting))
        yield _gauge("relay_sessions_begun", "Starts of this home's relay so far.", board.epoch)
        started = board.started_at_ns / NS_PER_S
        yield _gauge("relay_start_time_seconds", "When the process started, Unix time.", started)
        text = "Time that the loop has been in its present step; 0 while it waits."
        yield _gauge("relay_step_duration_seconds", text, stuck_s)
        age = board.snapshot_age_s()
        if age is not None:
            yield _gauge("relay_snapshot_age_seconds", "Age of what the loop published.", age)
        memory = resident_bytes()
        if memory is not None:
            yield _gauge("relay_resident_memory_bytes", "Memory of the process.", memory)
        wal = wal_bytes(board.home)
        if wal is not None:
            yield _gauge("relay_ledger_wal_bytes", "Size of the ledger's WAL.", wal)
        text = "Size of the ledger's WAL at which intake pauses."
        yield _gauge("relay_ledger_wal_limit_bytes", text, board.config.ledger.wal_most_mib << 20)
        yield from self._disk()

    def _pauses(self) -> Metric:
        """One value for each possible reason to pause intake."""
        family = GaugeMetricFamily(
            "relay_intake_paused_by", "1 while it is for this reason.", labels=["reason"]
        )
        pauses = self._board.pauses
        for who in sorted({"disk", "wal"} | pauses.keys()):
            family.add_metric([who], float(who in pauses))
        return family

    def _disk(self) -> Iterator[Metric]:
        disk = self._board.disk
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
        oldest, now = snapshot.oldest_ns, self._board.clock.monotonic_ns()
        waits_s = 0.0 if oldest is None else (now - oldest) / NS_PER_S
        text = "Files seen in outboxes, not yet taken."
        yield _gauge("relay_queue_files", text, snapshot.queue_files)
        yield _gauge("relay_outbox_age_seconds", "How long the oldest of them waits.", waits_s)
        yield _gauge("relay_agents", "Number of agents.", snapshot.agents)
        text = "Agents that are scanned because inotify has no watch left."
        yield _gauge("relay_agents_unwatched", text, snapshot.unwatched)
        text = "Directories that inotify watches."
        yield _gauge("relay_inotify_watches", text, snapshot.watches)
        text = "Messages throttled by max_pending."
        yield _gauge("relay_messages_held_back", text, snapshot.held_back)
        yield _gauge("relay_messages_active", "Messages of the live store.", snapshot.active)
        text = "Dead letters not yet replayed or discarded."
        yield _gauge("relay_dead_letters", text, snapshot.dead_letters)
        text = "Answers and acknowledgments due."
        yield _gauge("relay_acknowledgments_owed", text, snapshot.owed_acks)
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


def wal_bytes(home: str) -> int | None:
    """Size of the ledger's WAL, 0 if it does not exist; None where it cannot be read."""
    try:
        return os.stat(os.path.join(home, LEDGER + "-wal")).st_size
    except FileNotFoundError:
        return 0
    except OSError:
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
