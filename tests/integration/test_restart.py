"""Ends and starts that come at a bad time: a backlog, a start that was cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay import recovery
from tests.box import Box


def test_a_stop_with_files_waiting_ends(tmp_path: Path) -> None:
    box = Box(tmp_path / "home", "alice", "bob")
    for number in range(300):  # more than one batch takes
        box.drop("alice", f"TO: bob\n\n{number}")
    box.tick()
    assert box.dispatcher.backlog
    box.close()
    assert box.sql("SELECT DISTINCT status FROM messages") == [("archived",)]
    assert len(box.outbox("alice")) == 300 - box.config.limits.batch_files


def test_after_a_power_cut_a_start_that_was_cut_short_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(tmp_path / "home", "alice", "bob")
    lost = box.send("alice", "TO: bob\n\nlost")
    box.kill()
    box.path("agents", "bob", "inbox", f"{lost}.msg").unlink()
    box.boot = "boot-2"

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for step in ("_tell_ledger", "_mend_originals", "_settle_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(recovery, step, crash)
            with pytest.raises(KeyboardInterrupt):
                box.open()
        box.events.close()
        box.ledger.close()
    box.open()
    box.tick(3)
    assert {m.body.decode(): m.headers["ATTEMPT"] for m in box.inbox("bob").values()} == {
        "lost": "2"
    }
    box.close()
