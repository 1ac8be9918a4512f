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


class Steps:
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, work))
        return future

    def run(self) -> None:
        while self.waiting:
            future, work = self.waiting.pop(0)
            try:
                future.set_result(work())
            except Exception as exc:
                future.set_exception(exc)


def filler_of(box: Box, steps: Steps, config: Config | None = None) -> SearchFiller:
    key, log = box.session.opened.key, box._log
    return SearchFiller(box.home, config or box.config, box.clock, key, steps, log)  # type: ignore[arg-type]


def turn(box: Box, filler: SearchFiller, steps: Steps, **facts: bool) -> int:
    """The loop polls, a second passes, it polls again, and the thread works."""
    filler.poll(box.events.journal.durable, **facts)
    box.clock.advance(1)
    filler.poll(box.events.journal.durable, **facts)
    count = len(steps.waiting)
    steps.run()
    filler.poll(box.events.journal.durable, **facts)
    return count


def indexed(box: Box) -> int:
    with follow(box) as index:
        return index.count()


def test_it_works_only_where_the_journal_has_more(box: Box) -> None:
    steps = Steps()
    filler = filler_of(box, steps)
    assert filler.poll(box.events.journal.durable) > box.clock.monotonic_ns()
    assert steps.waiting == []  # the start has other work
    box.send("alice", "TO: bob\n\nnumber 1")
    assert turn(box, filler, steps) == 1
    assert turn(box, filler, steps) == 0
    due = filler.poll(box.events.journal.durable)
    assert due - box.clock.monotonic_ns() > 60 * NS_PER_S  # an idle relay is not woken
    box.send("alice", "TO: bob\n\nnumber 2")
    assert turn(box, filler, steps) == 1
    filler.stop()
    steps.run()
    assert indexed(box) == 2


def test_a_nearly_full_disk_is_not_for_an_index(box: Box) -> None:
    steps = Steps()
    filler = filler_of(box, steps)
    box.send("alice", "TO: bob\n\nnumber 1")
    assert turn(box, filler, steps, is_low=True) == 0
    assert turn(box, filler, steps) == 1
    filler.stop()
    steps.run()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyError("unforeseen")])
def test_a_fault_is_one_line_of_the_log(
    box: Box, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    steps = Steps()
    filler = filler_of(box, steps)
    box.send("alice", "TO: bob\n\nnumber 1")

    def fail(*_: object, **__: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(search_filler, "Index", fail)
        assert turn(box, filler, steps) == 1
        assert turn(box, filler, steps) == 0  # for a minute
        box.clock.advance(60)
        assert turn(box, filler, steps) == 1
    lines = [line for line in box.log if line.get("action") == "search_index"]
    assert len(lines) == 1 and lines[0]["level"] == "warning"
    box.clock.advance(60)
    assert turn(box, filler, steps) == 1
    filler.stop()
    steps.run()
    assert indexed(box) == 1


@pytest.mark.damages
def test_a_file_that_becomes_damaged_is_filled_again(box: Box) -> None:
    steps = Steps()
    filler = filler_of(box, steps)
    box.send("alice", "TO: bob\n\nnumber 1")
    turn(box, filler, steps)
    filler.stop()
    steps.run()
    path = Path(box.home.path(SEARCH))
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * len(data))
    again = filler_of(box, steps)
    box.send("alice", "TO: bob\n\nnumber 2")
    for _ in range(3):
        turn(box, again, steps)
    again.stop()
    steps.run()
    assert indexed(box) == 2


def test_without_one_the_file_is_removed(box: Box) -> None:
    follow(box).close()
    steps = Steps()
    filler = filler_of(box, steps, Config(search=SearchSettings(index=False)))
    assert not Path(box.home.path(SEARCH)).exists()
    assert turn(box, filler, steps) == 0
