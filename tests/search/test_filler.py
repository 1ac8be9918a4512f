"""The thread that fills the index: when it works, and what becomes of its faults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from relay.base.clock import NS_PER_S
from relay.base.config import Config, SearchSettings
from relay.base.home import SEARCH
from relay.daemon import search_filler
from relay.daemon.search_filler import SearchFiller
from tests.box import Box
from tests.search.support import follow


class Filling:
    """The filler of a box, whose thread works when the test says so."""

    def __init__(self, box: Box, config: Config | None = None) -> None:
        self.box = box
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        key, config = box.session.opened.key, config or box.config
        self.filler = SearchFiller(box.home, config, box.clock, key, self, box._log)  # type: ignore[arg-type]

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, work))
        return future

    def work(self) -> None:
        while self.waiting:
            future, work = self.waiting.pop(0)
            try:
                future.set_result(work())
            except Exception as exc:
                future.set_exception(exc)

    def poll(self, **facts: bool) -> int:
        return self.filler.poll(self.box.events.journal.durable, **facts)

    def turn(self, **facts: bool) -> int:
        """The loop polls, a second passes, it polls again, and the thread works."""
        self.poll(**facts)
        self.box.clock.advance(1)
        self.poll(**facts)
        count = len(self.waiting)
        self.work()
        self.poll(**facts)
        return count

    def stop(self) -> int:
        """End it; the messages in the index."""
        self.filler.stop()
        self.work()
        with follow(self.box) as index:
            return index.count()


@pytest.fixture
def filling(box: Box) -> Filling:
    return Filling(box)


def test_it_works_only_where_the_journal_has_more(box: Box, filling: Filling) -> None:
    assert filling.poll() > box.clock.monotonic_ns()
    assert filling.waiting == []  # the start has other work
    box.send("alice", "TO: bob\n\nnumber 1")
    assert filling.turn() == 1
    assert filling.turn() == 0
    assert filling.poll() - box.clock.monotonic_ns() > 60 * NS_PER_S  # an idle relay is not woken
    box.send("alice", "TO: bob\n\nnumber 2")
    assert filling.turn() == 1
    assert filling.stop() == 2


def test_a_nearly_full_disk_is_not_for_an_index(box: Box, filling: Filling) -> None:
    box.send("alice", "TO: bob\n\nnumber 1")
    assert filling.turn(is_low=True) == 0
    assert filling.turn() == 1
    filling.stop()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyError("unforeseen")])
def test_a_fault_is_one_line_of_the_log(
    box: Box, filling: Filling, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    box.send("alice", "TO: bob\n\nnumber 1")

    def fail(*_: object, **__: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(search_filler, "Index", fail)
        assert filling.turn() == 1
        assert filling.turn() == 0  # for a minute
        box.clock.advance(60)
        assert filling.turn() == 1
    lines = [line for line in box.log if line.get("action") == "search_index"]
    assert len(lines) == 1 and lines[0]["level"] == "warning"
    box.clock.advance(60)
    assert filling.turn() == 1
    assert filling.stop() == 1


@pytest.mark.damages
def test_a_file_that_becomes_damaged_is_filled_again(box: Box, filling: Filling) -> None:
    box.send("alice", "TO: bob\n\nnumber 1")
    filling.turn()
    filling.stop()
    path = Path(box.home.path(SEARCH))
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * len(data))
    again = Filling(box)
    box.send("alice", "TO: bob\n\nnumber 2")
    for _ in range(3):
        again.turn()
    assert again.stop() == 2


def test_without_one_the_file_is_removed(box: Box) -> None:
    follow(box).close()
    filling = Filling(box, Config(search=SearchSettings(index=False)))
    assert not Path(box.home.path(SEARCH)).exists()
    assert filling.turn() == 0
