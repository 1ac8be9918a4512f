"""A process may write faster than its log is copied: it is cut all the same, in short steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.agents.log_rotation import SLICE, Rotation, Rotations
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.home import Dirs, Home
from tests.fakes import FakeClock

MOST = 2 * SLICE


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(str(tmp_path / "home"), b"{}") as made:
        yield made


@pytest.fixture
def log(home: Home) -> Path:
    path = Path(home.path("logs", "w.log"))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return path


def rotations(home: Home, clock: FakeClock, told: list[str]) -> Rotations:
    def note(text: str, **facts: Any) -> None:
        told.append(text)

    return Rotations(home, MOST, 2, clock, note)


def test_a_step_is_short_and_nothing_is_left_out_of_a_log_a_little_too_long(
    home: Home, log: Path
) -> None:
    data = os.urandom(MOST + 1000)
    log.write_bytes(data)
    with home.dirs() as dirs:
        rotation = Rotation(dirs, "w", MOST, 2)
        assert [rotation.step(dirs) for _ in range(3)] == [False, False, True]
        rotation.close()
    assert (log.parent / "w.log.1").read_bytes() == data
    assert log.stat().st_size == 0
    assert not (log.parent / "w.log.part").exists()


def test_who_writes_faster_than_it_is_copied_does_not_hold_it_up(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * (MOST + 1))
    steps = 0
    with home.dirs() as dirs:
        rotation = Rotation(dirs, "w", MOST, 2)
        while not rotation.step(dirs):
            with log.open("ab") as child:
                child.write(b"b" * 3 * SLICE)
            steps += 1
            assert steps < 100
        rotation.close()
    kept = (log.parent / "w.log.1").read_bytes()
    assert len(kept) < 2 * MOST + SLICE
    assert b"bytes left out: they came faster than a log is kept]\n" in kept[-100:]
    assert log.stat().st_size == 0


def test_of_one_that_is_much_too_long_the_end_is_kept(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * 9 * MOST + b"the end\n")
    clock, told = FakeClock(), list[str]()
    made = rotations(home, clock, told)
    made.step({"w"})
    clock.advance(1)
    while not made.step({"w"}):
        assert made.due_ns() == 0
    kept = (log.parent / "w.log.1").read_bytes()
    assert kept.startswith(f"\n[{8 * MOST + 8} bytes left out: they came".encode())
    assert kept.endswith(b"aaa" + b"the end\n")
    assert len(kept) < MOST + 100


def test_one_that_grows_fast_is_looked_at_before_it_is_full(home: Home, log: Path) -> None:
    clock = FakeClock()
    made = rotations(home, clock, [])
    made.step({"w"})
    log.write_bytes(b"a" * (MOST // 2))  # half of it in the first half second
    clock.advance(0.5)
    made.step({"w"})
    due = made.due_ns()
    assert due == clock.monotonic_ns() + 250 * NS_PER_MS  # the rest takes as long: half of that
    clock.advance(0.25)
    made.step({"w"})
    assert made.due_ns() == clock.monotonic_ns() + 5 * NS_PER_S  # it has stopped


def test_one_that_filled_it_and_ended_is_cut_all_the_same(home: Home, log: Path) -> None:
    made = rotations(home, FakeClock(), [])
    made.step({"w"})
    log.write_bytes(b"a" * (MOST + 1))
    while not made.step(set()):
        assert made.due_ns() == 0
    assert log.stat().st_size == 0
    assert made.due_ns() is None


def test_what_a_crash_left_of_a_copy_is_begun_anew(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * MOST + b"b")
    with home.dirs() as dirs:
        cut_short = Rotation(dirs, "w", MOST, 2)
        cut_short.step(dirs)
        cut_short.close()  # killed here
        again = Rotation(dirs, "w", MOST, 2)
        while not again.step(dirs):
            pass
        again.close()
    assert (log.parent / "w.log.1").read_bytes() == b"a" * MOST + b"b"


class Killed(BaseException):
    """Nothing after this instant is done."""


def test_killed_at_any_step_nothing_of_the_log_is_lost(
    home: Home, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(MOST + 1000)
    for kill_at in range(10):
        for old in log.parent.iterdir():
            old.unlink()
        log.write_bytes(data)
        (log.parent / "w.log.1").write_bytes(b"the one before")
        left = [kill_at]

        def fault(operation: str, name: str, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1

        monkeypatch.setattr(fsio, "fault", fault)
        with contextlib.suppress(Killed), home.dirs() as dirs:
            rotate(dirs)
        monkeypatch.undo()
        if left[0]:
            break
        with home.dirs() as dirs:
            rotate(dirs)
        kept = {path.name: path.read_bytes() for path in log.parent.iterdir()}
        assert data in kept.values()
        assert "w.log.part" not in kept
    assert 3 < kill_at < 9, "every step was one of these"


def rotate(dirs: Dirs) -> None:
    with contextlib.closing(Rotation(dirs, "w", MOST, 2)) as rotation:
        while not rotation.step(dirs):
            pass


def test_a_rotation_that_cannot_begin_is_said_and_tried_again(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * (MOST + 1))
    (log.parent / "w.log.part").mkdir()
    clock, told = FakeClock(), list[str]()
    made = rotations(home, clock, told)
    made.step({"w"})
    clock.advance(1)
    made.step({"w"})
    assert [text.partition(":")[0] for text in told] == ["Cannot rotate logs/w.log, trying again"]
    made.step({"w"})
    assert len(told) == 1
    (log.parent / "w.log.part").rmdir()
    clock.advance(5)
    while not made.step({"w"}):
        assert made.due_ns() == 0
    assert log.stat().st_size == 0
