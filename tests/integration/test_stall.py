"""A real daemon whose loop hangs in a write: it says so meanwhile, and goes on behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
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
from tests.procs import PATIENCE_S, drop, until

pytestmark = pytest.mark.home("alice", "bob", admin={"stall_after_s": 1})

Ask = Callable[[str], tuple[int, str]]


@pytest.fixture
def ask(home: Path) -> Iterator[Ask]:
    """Ask a daemon in a thread of the test's for a page: (status, body)."""
    with Home(str(home)) as opened:
        log = make_log("info", str(home / "logs" / "relay.log"))
        daemon = Daemon(opened, decode(opened.read_config()), log, SystemdNotifier({}))
        ready = threading.Event()
        thread = threading.Thread(target=daemon.run, args=(ready.set,))
        thread.start()
        assert ready.wait(PATIENCE_S)

        def get(path: str) -> tuple[int, str]:
            connection = _UnixConnection(str(home / "admin.sock"), PATIENCE_S)
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            return answer.status, body

        yield get
        daemon.stop()
        thread.join(PATIENCE_S)


@pytest.mark.shows("ready 3.3")
def test_a_loop_that_hangs_in_a_write_is_unhealthy_until_it_continues(
    home: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: ask("/healthz") == (200, "healthy\n"))
    hangs, goes_on = threading.Event(), threading.Event()

    def slow_disk(operation: str, name: str) -> None:
        if operation == "create" and name == "1000000001-01.msg":
            hangs.set()
            assert goes_on.wait(PATIENCE_S)

    def status() -> dict[str, Any]:
        return dict(json.loads(ask("/status")[1]))

    until(lambda: status()["snapshot_age_s"] is not None)
    monkeypatch.setattr(fsio, "fault", slow_disk)
    drop(home, "alice", "TO: bob\n\nhi")
    assert hangs.wait(PATIENCE_S)
    try:
        until(lambda: ask("/healthz")[0] == 503)
        assert ask("/healthz")[1].startswith("the loop is stuck: in step stage for ")
        assert ask("/readyz")[0] == 503
        assert "relay_healthy 0.0" in ask("/metrics")[1]
        before = status()
        assert before["step"] == "stage"
        until(lambda: status()["snapshot_age_s"] > before["snapshot_age_s"])
    finally:
        goes_on.set()
    until(lambda: ask("/healthz")[0] == 200)
    until((home / "agents/bob/inbox/1000000001-01.msg").exists)
    until(lambda: status()["totals"]["written"] == 1)
    until(lambda: ask("/readyz") == (200, "ready\n"))
