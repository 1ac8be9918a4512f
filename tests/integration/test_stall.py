"""A real daemon whose loop hangs in a write: it says so meanwhile, and goes on behind it."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.base import fsio
from relay.base.config import decode
from relay.base.home import Home
from relay.base.logs import make_log
from relay.base.sd_notify import SystemdNotifier
from relay.base.status_client import _UnixConnection
from relay.daemon.process import Daemon
from tests.procs import drop, home_of, until

pytestmark = pytest.mark.timeout(60)


class Running:
    """A daemon in a thread of the test's."""

    def __init__(self, root: Path) -> None:
        self.root = home_of(root / "home", "alice", "bob")
        self.home = Home(str(self.root))
        settings = b'{"admin": {"stall_after_s": 1}, "detection": {"scan_interval_s": 1}}'
        config = decode(settings)
        log = make_log("info", str(self.root / "logs" / "relay.log"))
        self.daemon = Daemon(self.home, config, log, SystemdNotifier({}))
        ready = threading.Event()
        self.thread = threading.Thread(target=self.daemon.run, args=(ready.set,))
        self.thread.start()
        assert ready.wait(30)

    def ask(self, path: str) -> tuple[int, str]:
        """(status, body)."""
        connection = _UnixConnection(str(self.root / "admin.sock"), 5)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    def status(self) -> dict[str, Any]:
        """``/status``."""
        return dict(json.loads(self.ask("/status")[1]))


@pytest.fixture
def running() -> Iterator[Running]:
    """It serves; at the end it is stopped."""
    root = Path(tempfile.mkdtemp(prefix="relay-", dir="/tmp"))
    made = Running(root)
    yield made
    made.daemon.stop()
    made.thread.join(30)
    made.home.close()
    shutil.rmtree(root)


@pytest.mark.shows("ready 3.3")
def test_a_loop_that_hangs_in_a_write_is_unhealthy_until_it_continues(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert running.ask("/healthz") == (200, "healthy\n")
    hangs, goes_on = threading.Event(), threading.Event()

    def slow_disk(operation: str, name: str) -> None:
        if operation == "create" and name == "1000000001-01.msg":
            hangs.set()
            assert goes_on.wait(30)

    until(lambda: running.status()["snapshot_age_s"] is not None)
    monkeypatch.setattr(fsio, "fault", slow_disk)
    drop(running.root, "alice", "TO: bob\n\nhi")
    assert hangs.wait(30)
    try:
        until(lambda: running.ask("/healthz")[0] == 503)
        assert running.ask("/healthz")[1].startswith("the loop is stuck: in step stage for ")
        assert running.ask("/readyz")[0] == 503
        assert "relay_healthy 0.0" in running.ask("/metrics")[1]
        before = running.status()
        assert before["step"] == "stage"
        until(lambda: running.status()["snapshot_age_s"] > before["snapshot_age_s"])
    finally:
        goes_on.set()
    until(lambda: running.ask("/healthz")[0] == 200)
    until((running.root / "agents/bob/inbox/1000000001-01.msg").exists)
    until(lambda: running.status()["totals"]["written"] == 1)
    assert running.ask("/readyz") == (200, "ready\n")


def test_between_two_sessions_it_is_alive_and_not_ready(running: Running) -> None:
    ledger = running.root / "ledger.db"
    ledger.rename(running.root / "away")
    ledger.mkdir()
    drop(running.root, "alice", "TO: bob\n\nhi")
    running.daemon.wake()
    until(lambda: running.ask("/readyz")[0] == 503)
    until(lambda: "will retry" in running.ask("/readyz")[1])
    assert running.ask("/healthz")[0] == 200
    ledger.rmdir()
    (running.root / "away").rename(ledger)
    until(lambda: running.ask("/readyz")[0] == 200)
    until((running.root / "agents/bob/inbox/1000000001-01.msg").exists)
