"""When the store's file is written, how far it is durable, and what a failure does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from relay.acomm import store_file
from relay.acomm.model import Message, MessageType
from relay.base.clock import NS_PER_S
from relay.engine.checkpoint import Flusher, FlushPolicy, InlineExecutor
from relay.engine.engine import Engine, state_of
from tests.disk import failing
from tests.engine.support import NOW_S, accept, group_of
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 6.1")

BATCH = FlushPolicy()
IMMEDIATE = FlushPolicy(messages=1, ms=None)
MANUAL = FlushPolicy(messages=None, ms=None)


class LaterExecutor(Executor):
    """Its thread gets to the work when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[_Later] = []
        self.writes = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.waiting == []  # one at a time
        self.writes += 1
        self.waiting.append(_Later(self, lambda: fn(*args, **kwargs)))
        return self.waiting[0]

    def run(self) -> None:
        later = self.waiting.pop()
        later.set_result(later.work())


class _Later(Future[Any]):
    def __init__(self, thread: LaterExecutor, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work
        self._thread = thread

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._thread.run()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self.exception()
        return super().result(timeout)


class Bench:
    """A store, its clock and what writes its file."""

    def __init__(self, path: Path, policy: FlushPolicy, executor: Executor) -> None:
        self.path = path
        self.clock = FakeClock(NOW_S * NS_PER_S)
        self.store = Engine(self.clock)
        self.channel = group_of(self.store, "a", "b")
        self.flusher = Flusher(self.store, str(path), policy, executor)

    def send(self, times: int = 1) -> None:
        for _ in range(times):
            accept(self.store, self.channel.id, "a", MessageType.TEXT, "hi")

    def commit(self) -> bool:
        """One turn of the loop; True when every event is durable."""
        return self.flusher.flush_if_due() == self.store.sequence

    def on_disk(self) -> int:
        """Messages in the file; -1 when there is none."""
        return len(store_file.read(str(self.path)).messages) if self.path.exists() else -1

    def due_in_s(self) -> float | None:
        due = self.flusher.due_ns()
        return None if due is None else (due - self.clock.monotonic_ns()) / NS_PER_S


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> MakeBench:
    def make(policy: FlushPolicy, executor: Executor | None = None) -> Bench:
        return Bench(tmp_path / "s.acomm", policy, executor or InlineExecutor())

    return make


# -- policies ------------------------------------------------------------------------------


def test_a_batch_of_100_is_written_at_once(bench: MakeBench) -> None:
    one = bench(BATCH)
    one.send(99)
    assert not one.commit()
    assert one.on_disk() == -1
    one.send()
    assert one.commit()
    assert one.on_disk() == 100
    one.send(99)
    assert not one.commit()
    one.send()
    assert one.commit()
    assert one.on_disk() == 200


def test_after_5_s_a_smaller_one_is_written(bench: MakeBench) -> None:
    one = bench(BATCH)
    one.send()
    assert not one.commit()
    assert one.due_in_s() == 5
    one.clock.advance(4.999)
    assert not one.commit()
    one.send()  # a later one does not put it off
    assert not one.commit()
    assert one.due_in_s() == pytest.approx(0.001)
    one.clock.advance(0.001)
    assert one.commit()
    assert one.on_disk() == 2
    assert one.due_in_s() is None


def test_what_is_no_message_is_written_after_5_s_too(bench: MakeBench) -> None:
    one = bench(IMMEDIATE._replace(ms=5000))
    one.send()
    assert one.commit()
    one.store.deliveries.deliver(1, ["b"])
    assert not one.commit()
    one.clock.advance(5)
    assert one.commit()


def test_with_nothing_new_nothing_is_written(bench: MakeBench) -> None:
    one = bench(BATCH)
    assert one.flusher.error == ""
    assert one.commit()
    one.clock.advance(60)
    assert one.commit()
    assert one.on_disk() == -1
    assert one.due_in_s() is None
    assert one.flusher.flush() == one.store.sequence
    assert one.on_disk() == -1


def test_manual_is_never_by_itself(bench: MakeBench) -> None:
    one = bench(MANUAL)
    one.send(1000)
    one.clock.advance(3600)
    assert not one.commit()
    assert one.due_in_s() is None
    assert one.flusher.flush() == one.store.sequence
    assert one.on_disk() == 1000


def test_plain_or_compressed(bench: MakeBench) -> None:
    for compress in (True, False):
        one = bench(MANUAL._replace(compress=compress))
        one.send(50)
        one.flusher.flush()
        assert bool(store_file.peek_header(str(one.path)).flags & 1) is compress


def test_an_opened_store_is_durable(bench: MakeBench, tmp_path: Path) -> None:
    one = bench(MANUAL)
    one.send(3)
    one.flusher.flush()
    opened = Engine(one.clock, state_of(store_file.read(str(one.path))))
    again = Flusher(opened, str(one.path), BATCH, InlineExecutor())
    assert again.durable == again.flush_if_due() == opened.sequence == one.store.sequence
    assert again.due_ns() is None


# -- beside the loop -----------------------------------------------------------------------


def test_a_flush_holds_what_was_there_when_it_began(bench: MakeBench) -> None:
    thread = LaterExecutor()
    one = bench(IMMEDIATE, thread)
    one.send()
    covered = one.store.sequence
    assert not one.commit()
    one.send()  # while it is being written
    assert not one.commit()
    assert len(thread.waiting) == 1  # one at a time
    assert one.due_in_s() is None

    thread.run()
    assert one.flusher.durable < covered  # not seen yet
    assert one.flusher.flush_if_due() == covered  # and the next one begins
    assert one.on_disk() == 1
    thread.run()
    assert one.commit()
    assert one.on_disk() == 2


@pytest.mark.parametrize("more", [0, 1])
def test_flush_waits_for_the_one_that_runs_and_writes_the_rest(bench: MakeBench, more: int) -> None:
    thread = LaterExecutor()
    one = bench(IMMEDIATE, thread)
    one.send()
    one.commit()
    one.send(more)
    assert one.flusher.flush() == one.store.sequence
    assert (one.on_disk(), thread.writes) == (1 + more, 1 + more)


class SlowExecutor(InlineExecutor):
    """Takes so many seconds of the fake clock."""

    def __init__(self) -> None:
        self.clock: FakeClock | None = None
        self.takes_s = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.clock is not None
        self.clock.advance(self.takes_s)
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize("factor", [20, 0])
def test_a_long_flush_is_followed_by_a_longer_pause(bench: MakeBench, factor: int) -> None:
    thread = SlowExecutor()
    one = bench(FlushPolicy(messages=1, ms=5000, pause_factor=factor), thread)
    thread.clock, thread.takes_s = one.clock, 0.5
    one.send()
    assert one.commit()
    one.send()
    if factor:
        assert not one.commit()
        assert one.due_in_s() == 10  # not after 5 s
        one.clock.advance(9.999)
        assert not one.commit()
        one.clock.advance(0.001)
    assert one.commit()
    assert one.on_disk() == 2


# -- failure -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failure_keeps_the_old_file_and_is_retried(bench: MakeBench, code: int) -> None:
    one = bench(BATCH)
    one.send(100)
    assert one.commit()
    one.send(100)
    durable = one.flusher.durable
    with failing("write", code=code):
        for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
            assert one.flusher.flush_if_due() == durable
            assert os.strerror(code) in one.flusher.error
            assert one.flusher.error.startswith(str(one.path))
            assert one.due_in_s() == pause_s
            one.send()  # more work makes it no sooner
            one.clock.advance(pause_s - 0.001)
            assert one.flusher.flush_if_due() == durable
            assert one.due_in_s() == pytest.approx(0.001)
            one.clock.advance(0.001)
    assert one.on_disk() == 100
    assert one.commit()
    assert one.flusher.error == ""
    assert one.on_disk() == 208
    one.send(100)
    with failing("write", code=code):
        one.commit()
    assert one.due_in_s() == 1  # it begins anew


@pytest.mark.damages
def test_a_value_that_no_file_holds_is_a_failure(bench: MakeBench) -> None:
    one = bench(IMMEDIATE)
    bad = Message(2**64, MessageType.TEXT, "a", one.channel.id, b"x")
    one.store.state.add_message(bad)
    one.send()
    assert not one.commit()
    assert "outside" in one.flusher.error
    assert one.due_in_s() == 1
    assert one.on_disk() == -1


def test_other_errors_are_raised(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(store_file, "encode", broken)
    one = bench(IMMEDIATE)
    one.send()
    with pytest.raises(ZeroDivisionError):
        one.commit()


def test_a_failed_flush_can_be_tried_again(bench: MakeBench) -> None:
    one = bench(MANUAL)
    one.send()
    for _ in range(2):
        with failing("write"), pytest.raises(OSError, match="No space"):
            one.flusher.flush()
    assert one.flusher.flush() == one.store.sequence
    assert one.on_disk() == 1
    assert one.flusher.error == ""
