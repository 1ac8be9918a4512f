"""Every store of a test is valid when the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relay.acomm.model import Channel
from relay.commstore.queues import Queues
from relay.commstore.store import CommStore
from relay.engine.check import check
from relay.engine.state import State
from tests.engine.support import group_of

MOST_MESSAGES = 1000  # larger ones take longer than their test


@pytest.fixture(autouse=True)
def stores_are_sound(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The tables of every store agree; except of those that a test ``damages``."""
    made: list[State] = []
    begin = State.__init__

    def init(self: State, created_at: int) -> None:
        begin(self, created_at)
        made.append(self)

    monkeypatch.setattr(State, "__init__", init)
    yield
    monkeypatch.undo()
    if request.node.get_closest_marker("damages") is None:
        small = [state for state in made if len(state.messages) < MOST_MESSAGES]
        found = [one.text for state in small for one in check(state)]
        # a test may use a relay id twice, a relay never does
        assert [line for line in found if "relay_ids" not in line] == []
        assert [state for state in small if not queues_agree(state)] == []


def queues_agree(state: State) -> bool:
    """True when the queues of a library have what its deliveries say."""
    if not isinstance(state.observer, Queues):
        return True
    waiting: dict[str, set[int]] = {}
    for number in state.messages:
        for recipient, delivery in state.deliveries.get(number, {}).items():
            if delivery.queued:
                waiting.setdefault(recipient, set()).add(number)
    return waiting == {name: set(one) for name, one in state.observer._queued.items() if one}


@pytest.fixture
def group(store: CommStore) -> Channel:
    """A group of a, who owns it, and b."""
    return group_of(store, "a", "b")
