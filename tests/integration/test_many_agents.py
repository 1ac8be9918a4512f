"""A thousand agents, all idle but twenty: each is watched, each message arrives."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from relay.base.config import Config, DetectionSettings
from relay.base.names import new_message_id
from relay.delivery import event_source
from relay.delivery.intake import Intake
from scripts.benchmarks.idle import watches_of
from tests.box import Box
from tests.procs import Relay, drop, home_of, until

AGENTS = 1_000
BUSY = 20
EACH = 5


@pytest.mark.shows("ready 6.5")
def test_a_thousand_agents_have_two_watches_each_and_get_their_mail(tmp_path: Path) -> None:
    names = [f"agent{number:04d}" for number in range(AGENTS)]
    home = home_of(tmp_path / "home", *names)
    idle, busy = names[:-BUSY], names[-BUSY:]
    with Relay(home) as relay:
        watches = watches_of(relay.pid)
        # the operator, too; and agents/ itself
        assert 2 * (AGENTS + 1) <= watches <= 2 * (AGENTS + 1) + 1
        sent = {
            send(home, name, idle[(turn * BUSY + number) * 7 % len(idle)])
            for turn in range(EACH)
            for number, name in enumerate(busy)
        }
        until(lambda: sent == {path.stem for path in home.glob("agents/*/inbox/*.msg")})
        assert watches_of(relay.pid) == watches


def send(home: Path, sender: str, to: str) -> str:
    return drop(home, sender, f"TO: {to}\n\nhello", f"{new_message_id(time.time_ns())}.msg")


@pytest.mark.shows("ready 6.5")
@pytest.mark.box("alice", "bob", "carol", "dave")
def test_a_turn_scans_some_of_them_and_the_relay_delivers_meanwhile(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.stop()
    box.drop("dave", "TO: alice\n\nfound by the scan")
    scanned: list[str] = []

    def scan(*args: Any, real: Any = Intake.scan) -> Any:
        scanned.append(args[2])
        return real(*args)

    monkeypatch.setattr(event_source, "SCANNED_AT_ONCE", 1)
    monkeypatch.setattr(Intake, "scan", scan)
    box.open()
    assert scanned == ["alice"]
    box.drop("alice", "TO: bob\n\nseen at once")
    box.drop("dave", "TO: alice\n\nafter the first")
    box.tick()
    assert scanned == ["alice", "bob", "dave"] and box.bodies("bob") == ["seen at once"]
    box.after(1)
    assert box.bodies("alice") == ["found by the scan", "after the first"]
    assert scanned == ["alice", "bob", "dave", "carol", "operator"]


@pytest.mark.box(
    "alice", "bob", "carol", config=Config(detection=DetectionSettings(watcher="scan"))
)
def test_a_scan_that_is_asked_for_with_each_turn_comes_to_its_end(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without inotify: statuses are checked at the end of each."""
    monkeypatch.setattr(event_source, "SCANNED_AT_ONCE", 1)
    facts = {"pid": 4_194_304, "pid_start_ticks": 1, "started_at": box.clock.now_ns()}
    box.path("agents/bob/meta.json").write_text(json.dumps(facts))
    for _ in range(40):
        box.after(10, turns=1)
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("terminated",)]
