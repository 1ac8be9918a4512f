"""What the loop costs, counted: calls of Python functions, which no machine and no load changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from relay.base.watcher import NOTHING
from tests.box import Box


def calls(work: Callable[[], object]) -> int:
    """How many Python functions a piece of work calls, those of fakes left out."""
    count = 0
    tests = str(Path(__file__).parents[1])

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and not frame.f_code.co_filename.startswith(tests)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def box(box: Box) -> Box:
    """A relay that has delivered some messages, and to which nothing is due."""
    for number in range(10):
        box.send("alice", f"TO: bob\n\n{number}")
    box.after(3)
    return box


def test_nothing_is_asked_in_a_turn_in_which_nothing_happened(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(box.watcher, "wait", lambda _: NOTHING)  # the time was up
    box.ledger._db.set_trace_callback(asked.append)
    assert calls(box.session.turn) <= 25
    assert asked == []
    box.ledger._db.set_trace_callback(None)


def test_a_message_alone(box: Box) -> None:
    box.drop("alice", "TO: bob\n\nhi")
    assert calls(box.session.turn) <= 400


def test_a_message_of_many(box: Box) -> None:
    for number in range(256):
        box.drop("alice", f"TO: bob\n\n{number}")
    assert calls(box.session.turn) / 256 <= 160
