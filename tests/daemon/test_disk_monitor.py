"""How full the disk is: states, their edges, and what the relay does about each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base.config import DiskSettings
from relay.base.disk import MIB, DiskState, DiskWatch, floor_bytes, measure_disk
from relay.daemon.status import SharedStatus
from relay.ledger.ledger import Ledger
from tests.box import Box
from tests.fakes import FakeDisk
from tests.kills import Killed


class Watched:
    """A disk that is looked at."""

    def __init__(self) -> None:
        self.disk = FakeDisk()
        self.watch = DiskWatch("/", DiskSettings(), self.disk)

    def fill(self, used_mib: int) -> DiskState:
        """So much is used; what the next look says."""
        self.disk.used_mib = used_mib
        self.watch.check()
        assert self.watch.reading is not None
        return self.watch.reading.state


@pytest.mark.parametrize(
    ("used_mib", "state"),
    [
        (89_999, DiskState.OK),
        (90_000, DiskState.ALERT),
        (94_999, DiskState.ALERT),
        (95_000, DiskState.LOW),
        (99_936, DiskState.LOW),  # 64 MiB free: the floor itself
        (99_937, DiskState.FLOOR),
    ],
)
def test_the_state_by_what_is_used(used_mib: int, state: DiskState) -> None:
    assert Watched().fill(used_mib) is state


def test_a_state_is_left_with_some_room_to_spare() -> None:
    watched = Watched()
    path = [
        (90_000, DiskState.ALERT),
        (88_001, DiskState.ALERT),
        (87_999, DiskState.OK),
        (89_000, DiskState.OK),
        (99_937, DiskState.FLOOR),
        (99_921, DiskState.FLOOR),  # 79 MiB free
        (99_920, DiskState.LOW),  # 80: five quarters of the floor
        (99_930, DiskState.LOW),
        (93_500, DiskState.LOW),
        (92_999, DiskState.ALERT),
        (94_000, DiskState.ALERT),
        (0, DiskState.OK),
    ]
    assert [(used, watched.fill(used)) for used, _ in path] == path


def test_news_is_a_change() -> None:
    watched = Watched()
    first = watched.watch.check()
    assert first is not None and first[0] is None
    assert watched.watch.check() is None  # nothing new
    watched.disk.used_mib = 91_000
    change = watched.watch.check()
    assert change is not None and change[0] is not None
    assert (change[0].state, change[1].state) == (DiskState.OK, DiskState.ALERT)
    assert change[1].sentence() == "91 % used, 9000 MiB free"


def test_a_disk_that_cannot_be_asked_is_as_it_was() -> None:
    watched = Watched()
    watched.fill(91_000)
    watched.disk.error = OSError(5, "Input/output error")
    assert watched.fill(0) is DiskState.ALERT


@pytest.mark.parametrize(
    ("floor_mib", "size_mib", "floor_is_mib"),
    [(64, 100_000, 64), (64, 1280, 64), (64, 100, 5), (0, 100_000, 0)],
)
def test_a_small_disk_is_not_all_floor(floor_mib: int, size_mib: int, floor_is_mib: int) -> None:
    assert floor_bytes(DiskSettings(floor_mib=floor_mib), size_mib * MIB) == floor_is_mib * MIB


def test_no_floor_is_never_reached() -> None:
    watched = Watched()
    watched.watch = DiskWatch("/", DiskSettings(floor_mib=0), watched.disk)
    assert watched.fill(100_000) is DiskState.LOW


def test_a_real_disk_has_a_size(tmp_path: Path) -> None:
    size, used, free = measure_disk(str(tmp_path))
    assert size > 0 and used >= 0 and 0 <= free <= size


# -- what the loop does about it -----------------------------------------------------------


class Looked:
    """A box whose disk fills and empties, a turn at a time."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.disk = box.disk

    @property
    def status(self) -> SharedStatus:
        """What others see."""
        return self.box.session.status

    def turn(self, used_mib: int) -> None:
        """So much is used; five seconds later."""
        self.disk.used_mib = used_mib
        self.box.after(5, turns=1)

    def notices(self, agent: str) -> list[str]:
        """What an agent was told."""
        return [m.body.decode() for m in self.box.inbox(agent).values() if m.kind == "notification"]


@pytest.fixture
def looked(box: Box) -> Looked:
    """The box, looked after."""
    return Looked(box)


def test_two_pauses_end_each_by_itself(looked: Looked) -> None:
    box, status = looked.box, looked.status
    box.dispatcher.pause("test", "a reader does not end")
    looked.turn(99_990)
    assert status.pauses.keys() == {"test", "disk"}
    assert len(status.health().reasons) == 2 + (not status.is_serving)
    box.drop("alice", "TO: bob\n\nwaits")
    looked.turn(50_000)
    assert status.pauses == {"test": "a reader does not end"} and box.inbox("bob") == {}
    looked.turn(99_990)
    box.dispatcher.pause("test", "")
    looked.turn(99_990)
    assert status.pauses.keys() == {"disk"} and box.inbox("bob") == {}
    looked.turn(50_000)
    box.tick(2)
    assert status.pauses == {} and box.bodies("bob") == ["waits"]


@pytest.mark.shows("ready 5.4")
def test_below_the_floor_files_wait_and_the_rest_continues(looked: Looked) -> None:
    box = looked.box
    before = box.send("alice", "TO: bob\n\nbefore")
    looked.turn(99_990)
    assert (
        "intake is paused: the disk has 10 MiB free, the floor is 64 MiB; free some"
        in looked.status.paused
    )
    waits = box.drop("alice", "TO: bob\n\nwaits")
    box.take("bob", before)
    looked.turn(99_990)
    assert box.outbox("alice") == [f"{waits}.msg"]
    assert box.states(before) == {"bob": "read"}  # what is in hand goes on
    assert box.dispatcher.backlog == 1
    assert box.deadline > box.clock.monotonic_ns()  # it does not turn for nothing
    looked.turn(99_930)  # 70 MiB: not yet
    assert looked.status.paused
    looked.turn(50_000)
    assert not looked.status.paused
    box.tick(2)
    assert box.bodies("bob") == ["waits"]
    assert box.nacks("alice") == []
    assert any("intake resumes" in line["event"] for line in box.log)


def test_it_is_looked_at_every_five_seconds(looked: Looked) -> None:
    looked.turn(0)
    looked.disk.used_mib = 99_990
    looked.box.after(4, turns=1)
    assert not looked.status.paused
    looked.box.after(1, turns=1)
    assert looked.status.paused


def test_a_disk_below_its_floor_takes_nothing_in_from_the_first_turn(looked: Looked) -> None:
    looked.box.kill()
    looked.disk.used_mib = 100_000
    looked.box.open()
    looked.box.send("alice", "TO: bob\n\nhi")
    assert looked.box.bodies("bob") == []


@pytest.mark.shows("ready 5.4")
def test_operator_and_lead_are_notified_once_an_episode(looked: Looked) -> None:
    box = looked.box
    box.path("agents", "alice", "meta.json").write_text('{"role": "lead"}')
    for used_mib in (91_000, 96_000, 99_990, 96_000, 91_000):
        looked.turn(used_mib)
    for name in ("operator", "alice"):
        (told,) = looked.notices(name)
        assert "nearly full: 91 % used, 9000 MiB free" in told
        assert "`relay prune --dry-run` shows what" in told and "docs/" not in told
    assert looked.notices("bob") == []
    looked.turn(0)
    looked.turn(91_000)
    assert len(looked.notices("operator")) == 2
    said = [line["event"] for line in box.log if line.get("action") == "disk"]
    states = ["alert", "low", "floor", "low", "alert", "ok", "alert"]
    assert [line.split(":")[0].removeprefix("The disk is ") for line in said] == states


@pytest.mark.parametrize("killed_at", [1, 2])
def test_killed_before_the_episode_is_noted_it_is_told_once(
    looked: Looked, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1: before the ledger has its beginning; 2: the notice is out, and nobody noted that."""

    left, set_state = [killed_at], Ledger.set_state

    def killed(ledger: Ledger, key: str, value: str, now_ns: int) -> None:
        left[0] -= key == "disk_alert"
        if key == "disk_alert" and not left[0]:
            raise Killed
        set_state(ledger, key, value, now_ns)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "set_state", killed)
        with pytest.raises(Killed):
            looked.turn(91_000)
    looked.box.kill()
    looked.box.open()
    looked.turn(91_000)
    looked.turn(91_000)
    looked.box.restart()  # in the middle of the episode
    looked.turn(91_000)
    assert len(looked.notices("operator")) == 1
    assert len(looked.box.inbox("operator")) == 1


def test_a_notice_that_has_no_room_is_sent_when_there_is(
    looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses: Callable[..., bool] = lambda *_, **__: False  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(looked.box.dispatcher.notifier, "announce", refuses)
        looked.turn(91_000)
    assert looked.notices("operator") == []
    looked.turn(91_000)
    assert len(looked.notices("operator")) == 1
