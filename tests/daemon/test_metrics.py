"""``/metrics``: read back as a collector reads it, and compared with the page that lists it."""

from __future__ import annotations

import os
import re
import threading

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from relay.base.disk import DiskState, DiskUsage
from relay.base.metrics import STAGES, Metrics
from relay.daemon.status import COUNTERS, SharedStatus, StatusPublisher, metrics_page
from tests.box import Box
from tests.procs import PATIENCE_S, PROJECT, until


def published(box: Box) -> tuple[SharedStatus, StatusPublisher]:
    """The session's status as of now."""
    status = box.session.status
    status.disk = DiskUsage(DiskState.OK, 1000, 300, 70.0, 50)
    publisher = StatusPublisher(box.dispatcher, box.store, box.watcher)
    status.publish(publisher.step())
    return status, publisher


def families(status: SharedStatus) -> dict[str, Metric]:
    return {
        family.name: family
        for family in text_string_to_metric_families(metrics_page(status).decode())
    }


def value(status: SharedStatus, name: str, **labels: str) -> float:
    (sample,) = (
        one
        for family in families(status).values()
        for one in family.samples
        if one.name == name and one.labels == labels
    )
    return float(sample.value)


def test_every_total_is_a_metric(box: Box) -> None:
    status, _ = published(box)
    counters = [name for name, family in families(status).items() if family.type == "counter"]
    assert sorted(counters) == sorted(name for name, _ in COUNTERS.values())
    totals = {name for name, value in vars(Metrics(box.clock)).items() if isinstance(value, int)}
    assert COUNTERS.keys() == totals


def test_histograms_add_up(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.after(1, turns=1)
    status, _ = published(box)
    histograms = [f for f in families(status).values() if f.type == "histogram"]
    assert len(histograms) == 4
    for family in histograms:
        by_labels: dict[str, list[tuple[float, float]]] = {}
        counts: dict[str, float] = {}
        for one in family.samples:
            key = one.labels.get("stage", "")
            if one.name.endswith("_bucket"):
                by_labels.setdefault(key, []).append((float(one.labels["le"]), one.value))
            elif one.name.endswith("_count"):
                counts[key] = one.value
        for key, buckets in by_labels.items():
            assert buckets == sorted(buckets)
            assert [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert buckets[-1] == (float("inf"), counts[key])
    (stages,) = (f for f in histograms if f.name == "relay_stage_seconds")
    assert {one.labels["stage"] for one in stages.samples} == set(STAGES)


@pytest.mark.shows("ready 3.2")
def test_the_numbers_are_those_of_the_box(box: Box) -> None:
    box.drop("alice", "TO: bob\n\nhi")
    box.drop("alice", "TO: nobody\n\nhi")
    box.send("alice", "TO: bob\nKIND: command\n\ndo it")
    status, _ = published(box)
    assert value(status, "relay_messages_accepted_total") == 2
    assert value(status, "relay_messages_refused_total") == 1
    assert value(status, "relay_deliveries_written_total") == 3
    assert value(status, "relay_delivery_seconds_count") == 2
    assert value(status, "relay_batch_files_sum") == 3
    assert value(status, "relay_answers_open") == 1
    assert value(status, "relay_agents") == 4
    assert value(status, "relay_inotify_watches") == 9
    assert value(status, "relay_journal_commit_seconds_count") > 0
    assert value(status, "relay_disk_used_ratio") == 0.7
    assert value(status, "relay_resident_memory_bytes") > 1_000_000
    wal = os.stat(box.path("ledger.db-wal")).st_size
    assert value(status, "relay_ledger_wal_bytes") == wal > 0
    assert value(status, "relay_build_info", version="0.1.0") == 1


def test_each_reason_of_a_pause_is_its_own(box: Box) -> None:
    status, _ = published(box)
    assert value(status, "relay_intake_paused_by", reason="disk") == 0
    status.pauses = {"wal": "a reader"}
    assert value(status, "relay_intake_paused_by", reason="disk") == 0
    assert value(status, "relay_intake_paused_by", reason="wal") == 1
    assert value(status, "relay_intake_paused") == 1
    assert value(status, "relay_ledger_wal_limit_bytes") == 1024 << 20


def test_a_file_that_waits_makes_queue_and_age(box: Box) -> None:
    box.dispatcher.pause("test", "for the test")
    box.send("alice", "TO: bob\n\nhi")
    status, _ = published(box)
    box.clock.advance(90)
    assert value(status, "relay_queue_files") == 1
    assert value(status, "relay_outbox_age_seconds") == 90
    assert value(status, "relay_snapshot_age_seconds") == 90
    box.dispatcher.pause("test", "")
    box.tick()
    status, _ = published(box)
    assert value(status, "relay_queue_files") == value(status, "relay_outbox_age_seconds") == 0


def test_a_file_that_is_put_off_again_and_again_ages(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box.dispatcher, "_room_for", lambda looks: "no room")
    box.send("alice", "TO: bob\n\nhi")
    for _ in range(3):
        box.after(20, turns=1)
    status, _ = published(box)
    assert value(status, "relay_outbox_age_seconds") == pytest.approx(60, abs=1)
    assert value(status, "relay_messages_postponed_total") == 4


def test_before_the_first_session_there_is_little_to_say(box: Box) -> None:
    status = SharedStatus(box.home.root, box.config, box.clock)
    assert "relay_queue_files" not in families(status)
    assert value(status, "relay_ready") == 0


def test_a_snapshot_when_somebody_asks_and_one_a_second(box: Box) -> None:
    status, publisher = published(box)
    assert publisher.step() is None  # the last one is recent enough
    box.clock.advance(1)
    later = publisher.step()
    assert later is not None and status.snapshot is not None
    assert later.monotonic_ns - status.snapshot.monotonic_ns == 10**9


def test_who_asks_waits_for_the_loop_but_not_for_one_that_is_stuck(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = box.session.status
    before = status.snapshot
    monkeypatch.setattr("relay.daemon.status.PATIENCE_S", PATIENCE_S)
    box.clock.advance(2)
    asking = threading.Thread(target=status.refresh)
    asking.start()
    until(lambda: bool(status.asked), "it asks")
    box.tick()
    asking.join(PATIENCE_S)
    assert not asking.is_alive() and status.snapshot is not before
    monkeypatch.setattr("relay.daemon.status.PATIENCE_S", 0.001)
    status.refresh()  # nobody turns the loop
    assert status.snapshot_age_s() == 0


def test_overflows_are_counted_once(box: Box) -> None:
    status, publisher = published(box)
    box.watcher.overflows += 2
    for _ in range(2):
        box.clock.advance(1)
        status.publish(publisher.step())
        assert value(status, "relay_inotify_overflows_total") == 2


def test_the_page_lists_every_metric(box: Box) -> None:
    status, _ = published(box)
    rows = re.findall(
        r"^\| `(relay_\w+)`(?:, by `(\w+)`)? \| (\w+) \| ([^|]+) \|$",
        (PROJECT / "docs" / "metrics.md").read_text(),
        re.M,
    )
    listed = [
        (name.removesuffix("_total") if kind == "counter" else name, kind, text.strip())
        for name, _, kind, text in rows
    ]
    there = [(f.name, f.type, f.documentation) for f in families(status).values()]
    assert listed == there
    assert len(there) > 30 and all(family.samples for family in families(status).values())


def test_the_page_lists_every_stage() -> None:
    text = (PROJECT / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", text, re.M) == list(STAGES.items())
