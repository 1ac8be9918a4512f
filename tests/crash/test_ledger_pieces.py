"""A ledger that is behind follows the journal piece by piece; a start that is killed goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from relay.base.config import Config, StoreSettings
from relay.base.home import LEDGER
from relay.daemon import recovery
from relay.delivery import projection
from relay.ledger.file import LEFTOVERS
from tests.box import Box
from tests.ledger.support import Look

CONFIG = Config(store=StoreSettings(roll_after_s=60, roll_messages=3))
ROWS = (
    "SELECT message_id, agent_name, status, last_error, file_path FROM messages ORDER BY 1",
    "SELECT message_id, recipient, state, attempt, staged_at, written_at, read_at, acked_at, "
    "ack_status, read_how, answer_id, obligation, reminders FROM deliveries ORDER BY 1, 2",
    "SELECT name, status, reason FROM agents ORDER BY 1",
)


class Killed(BaseException):
    """The start ends here."""


def history(root: Path) -> None:
    """Messages of every end; the final ones are in an archive, and the ledger is gone."""
    box = Box(root, "alice", "bob", "carol", config=CONFIG)
    for number in range(4):
        box.take("bob", box.send("alice", f"TO: bob\n\n{number}"))
    asked = box.send("alice", "TO: bob\nKIND: command\n\nfive")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")
    box.send("alice", "TO: nobody\n\nrefused")
    box.send("carol", "TO: __orchestrator__\nKIND: command\n\nACTION: terminate\nNAME: carol")
    box.send("alice", "TO: *\n\nunread")
    box.after(5)
    box.flush()
    for _ in range(3):
        box.after(100, turns=8)
    box.send("alice", "TO: bob\nKIND: query\nAWAIT: 24h\n\nopen")
    box.after(5)
    assert box.store.state.archives
    box.stop()
    box.home.close()
    for end in ("", *LEFTOVERS):
        (root / (LEDGER + end)).unlink(missing_ok=True)


def started(root: Path, killed_after: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Start and stop a relay; the number of pieces that were written."""
    written = 0

    def write(restorer: recovery.Restorer, *piece: Any) -> None:
        nonlocal written
        real(restorer, *piece)
        written += 1
        if written == killed_after:
            raise Killed

    with monkeypatch.context() as patched:
        real = recovery.Restorer.write
        patched.setattr(recovery.Restorer, "write", write)
        Box(root, config=CONFIG, seconds=1000).close()
    return written


def rows(root: Path) -> list[list[Any]]:
    with Look(root / LEDGER) as look:
        return [look.all(query) for query in ROWS]


def test_killed_between_two_pieces_it_goes_on_and_the_rows_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history(tmp_path / "kept")

    def home(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "kept", tmp_path / name, symlinks=True))

    assert started(home("whole"), 0, monkeypatch) == 1
    monkeypatch.setattr(projection, "PIECE", 1)
    pieces = started(home("pieces"), 0, monkeypatch)
    assert pieces > 8 and rows(tmp_path / "pieces") == rows(tmp_path / "whole")
    for number in range(1, pieces):
        root = home(f"killed-{number}")
        with pytest.raises(Killed):
            started(root, number, monkeypatch)
        assert started(root, 0, monkeypatch) == pieces - number
        assert rows(root) == rows(tmp_path / "whole"), number
        shutil.rmtree(root)
