"""Logs of processes: rotated by copy and truncate, however fast the process writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.agents.run_files import BLOCK_BYTES, LogRotator, rotate
from relay.base.home import Home
from relay.engine.checkpoint import InlineExecutor
from tests.disk import killed_before
from tests.fakes import FakeClock

MOST = 2 * BLOCK_BYTES


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


def make_rotator(home: Home, clock: FakeClock, logged: list[str]) -> LogRotator:
    def note(text: str, **facts: Any) -> None:
        logged.append(text)

    return LogRotator(home, MOST, InlineExecutor(), clock, note)


def test_who_writes_faster_than_it_is_copied_does_not_hold_it_up(
    home: Home, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write_bytes(b"a" * (MOST + 1))
    pread = os.pread

    def grow(fd: int, size: int, at: int) -> bytes:
        with log.open("ab") as child:
            child.write(b"b" * 3 * BLOCK_BYTES)
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", grow)
    rotate(home, "w", MOST)
    kept = (log.parent / "w.log.1").read_bytes()
    assert len(kept) < 2 * MOST + BLOCK_BYTES
    assert b"bytes left out: they came faster than a log is kept]\n" in kept[-100:]
    assert log.stat().st_size == 0


def test_of_one_that_is_much_too_long_the_end_is_kept(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * 9 * MOST + b"the end\n")
    rotator = make_rotator(home, FakeClock(), [])
    assert rotator.poll({"w"}) == []
    assert rotator.poll({"w"}) == ["w"]
    kept = (log.parent / "w.log.1").read_bytes()
    assert kept.startswith(f"\n[{8 * MOST + 8} bytes left out: they came".encode())
    assert kept.endswith(b"aaa" + b"the end\n")
    assert len(kept) < MOST + 100


def test_the_process_keeps_its_descriptor(home: Home, log: Path) -> None:
    with log.open("ab") as child:
        child.write(b"a" * (MOST + 1))
        child.flush()
        rotate(home, "w", MOST)
        child.write(b"after\n")
    assert log.read_bytes() == b"after\n"


def test_one_that_filled_it_and_ended_is_cut_all_the_same(home: Home, log: Path) -> None:
    rotator = make_rotator(home, FakeClock(), [])
    rotator.poll({"w"})
    log.write_bytes(b"a" * (MOST + 1))
    rotator.poll(set())
    assert rotator.poll(set()) == ["w"]
    assert log.stat().st_size == 0
    assert rotator.due_ns() is None


def test_killed_at_any_step_nothing_of_the_log_is_lost(home: Home, log: Path) -> None:
    data = os.urandom(MOST + 1000)
    for kill_at in range(10):
        for old in log.parent.iterdir():
            old.unlink()
        log.write_bytes(data)
        (log.parent / "w.log.1").write_bytes(b"the one before")
        with killed_before(kill_at + 1) as calls:
            rotate(home, "w", MOST)
        if len(calls) < kill_at:
            break
        rotate(home, "w", MOST)
        kept = {path.name: path.read_bytes() for path in log.parent.iterdir()}
        assert data in kept.values()
        assert "w.log.part" not in kept
    assert 3 < kill_at < 9, "every step was one of these"


def test_a_rotation_that_cannot_begin_is_said_and_tried_again(home: Home, log: Path) -> None:
    log.write_bytes(b"a" * (MOST + 1))
    (log.parent / "w.log.part").mkdir()
    clock, logged = FakeClock(), list[str]()
    rotator = make_rotator(home, clock, logged)
    rotator.poll({"w"})
    assert rotator.poll({"w"}) == []
    assert [text.partition(":")[0] for text in logged] == ["Cannot rotate logs/w.log, trying again"]
    clock.advance(1)
    rotator.poll({"w"})
    rotator.poll({"w"})
    assert len(logged) == 1
    (log.parent / "w.log.part").rmdir()
    clock.advance(5)
    rotator.poll({"w"})
    assert rotator.poll({"w"}) == ["w"]
    assert log.stat().st_size == 0
