"""The power goes at any call of a relay at work, in any way: what was accepted arrives.

The disk is ``tests.power``: what was synced is there, what was not is there or not, whole, in
part, empty, under its old name or its new one. Then another boot finds it.

Of the calls each distinct one (``tests.kills``) is cut at: every sync in every mode, because what
was written is in the balance there, and the others in every third mode. Some modes take the first
call of those that are the same, some the last.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.home import LEDGER
from relay.base.names import ORCHESTRATOR
from relay.delivery.eventlog import EventLog
from tests.box import Box
from tests.crash.test_every_step import scenario
from tests.kills import Effect, effect, firsts, lasts
from tests.power import Cut, Power
from tests.sound import findings_of

pytestmark = pytest.mark.shows("journal 5.3", "ready 1.4", "ready 6.3")

TAKEN = ("1000000004-04", "bob")
LEDGER_FILES = (LEDGER, LEDGER + "-wal", LEDGER + "-shm")


class PowerCut(BaseException):
    """Nothing is cleaned up by it."""


class Disk(Power):
    """A relay's disk. SQLite syncs by itself: of its files there is an old and a new state."""

    def __init__(self, root: Path, aside: Path, falls_at: int = 0) -> None:
        super().__init__(root)
        self.calls: list[Effect] = []
        self.falls_at = falls_at
        self._aside = aside
        self._keep_ledger()

    def __call__(self, operation: str, name: str) -> None:
        self.calls.append(effect(operation, name, self.root))
        if len(self.calls) == self.falls_at:
            raise PowerCut
        if operation == "syncfs":
            self.sync_all()
            self._keep_ledger()
        super().__call__(operation, name)

    def _keep_ledger(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()
        for name in LEDGER_FILES:
            if (Path(self.root) / name).exists():
                shutil.copy(Path(self.root) / name, self._aside / name)

    def cut(self, target: Path, mode: Cut, dice: random.Random) -> Path:
        super().cut(target, mode, dice)
        is_old = mode in (Cut.OLD, Cut.NEW_NAMES) or (mode is Cut.SECTORS and dice.random() < 0.5)
        for name in LEDGER_FILES:
            source = (self._aside if is_old else Path(self.root)) / name
            (target / name).unlink(missing_ok=True)
            if source.exists():
                shutil.copy(source, target / name)
        return target


def work(box: Box) -> None:
    """A batch of every kind, some of it read, a checkpoint, and another batch."""
    scenario(box)
    box.take("bob", "1000000004-04")
    box.tick()
    box.drop("carol", "TO: alice\n\nafter the checkpoint", "1000000010-10.msg")
    box.drop("alice", "TO: bob\nKIND: query\n\nhow are you?", "1000000011-11.msg")
    box.tick()


def run(root: Path, falls_at: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Disk, set[str]]:
    """Work until the power goes; the disk, and the ids of what was accepted by then."""
    box = Box(root / "home", "alice", "bob", "carol")
    accepted: set[str] = set()
    commit = EventLog.commit

    def counted(log: EventLog) -> None:
        commit(log)
        accepted.update(box.store.state.relay_ids)

    monkeypatch.setattr(EventLog, "commit", counted)
    disk = Disk(root / "home", root / "ledger", falls_at)
    monkeypatch.setattr(fsio, "fault", disk)
    try:
        work(box)
    except PowerCut:
        pass
    finally:
        monkeypatch.undo()
    box.kill()
    return disk, accepted


def reopen(root: Path) -> Box:
    """The next boot: everything that is due in the next minute happens."""
    box = Box(root, "alice", "bob", "carol", boot="boot-2", seconds=60)
    for _ in range(3):
        box.after(31)
    return box


def check(box: Box, accepted: set[str]) -> None:
    """Every accepted message stands whole with each recipient; the ledger says the same."""
    state = box.store.state
    for relay_id in sorted(accepted):
        assert relay_id in state.relay_ids, f"{relay_id} was accepted, and is lost"
    for relay_id, number in state.relay_ids.items():
        message = box.store.messages.get(number)
        assert message is not None
        for recipient in state.deliveries[number]:
            if recipient == ORCHESTRATOR:
                continue
            stands = [
                path.read_bytes().endswith(message.content)
                for path in box.path("agents", recipient, "inbox").glob(f"**/{relay_id}.msg")
            ]
            known = box.states(relay_id)[recipient]
            # Who answered it or took it needs it no more; an agent's own rename that was durable
            # by half stands under both names.
            is_had = known == "acked" or (
                (relay_id, recipient) == TAKEN and (known == "read" or stands == [True, True])
            )
            assert stands == [True] or is_had, (relay_id, recipient, known, stands)
            assert known in ("written", "read", "acked")
        assert box.row(relay_id)["status"] == "archived"
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))
    for path in box.path("archive").glob("*/*/1*.msg"):
        assert path.read_bytes(), f"{path.name} is empty in the archive"


@pytest.mark.damages
@pytest.mark.parametrize("mode", Cut)
def test_the_power_goes_at_any_call(
    tmp_path: Path, mode: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, _ = run(tmp_path / "whole", 0, monkeypatch)
    calls = disk.calls
    disk.close()
    assert len(calls) > 60
    number = list(Cut).index(mode)
    distinct = (firsts, lasts)[number % 2](calls)
    syncs = {at for at in distinct if calls[at - 1].operation == "sync"}
    chosen = syncs.union(distinct[number % 3 :: 3], [len(calls) + 1])
    for falls_at in sorted(chosen):
        root = tmp_path / f"at-{falls_at:03d}"
        root.mkdir()
        disk, accepted = run(root, falls_at, monkeypatch)
        # at a sync the sectors of a whole batch fall, one way or another
        throws = 5 if mode is Cut.SECTORS and falls_at in syncs else 1
        for throw in range(throws):
            after = disk.cut(root / f"after-{throw}", mode, random.Random(f"{falls_at} {throw}"))
            box = reopen(after)
            check(box, accepted)
            box.close()
            left = [line for line in findings_of(str(after)) if "was set aside" not in line]
            assert left == []
        disk.close()
