"""The tiers on a disk that loses its power at any call: nothing that was committed is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relay.journal.tier_plan import TierPolicy
from tests.disk import hooked
from tests.journal.tiers_support import AT_ONCE, FaultyObjects, Stream
from tests.power import Cut, Durable, Power, build

pytestmark = pytest.mark.shows("journal 4.9")

EVERYTHING = AT_ONCE._replace(local_bytes=0)


def states_of(root: Path, policy: TierPolicy, *, hydrate: bool) -> tuple[Stream, list[Durable]]:
    """Fill a stream, let the tiers work, and keep what was durable before each call."""
    store = FaultyObjects(root / "tier2")
    stream = Stream(root, policy, store)
    stream.fill(2, records=40)
    stream.cover()
    if hydrate:
        stream.run()
    power = Power(root)
    states: list[Durable] = []

    def watch(operation: str, name: str) -> None:
        power(operation, name)
        states.append(power.state())

    with hooked(watch):
        if hydrate:
            stream.read()
        else:
            stream.run()
    states.append(power.state())
    power.close()
    return stream, states


@pytest.mark.parametrize("mode", Cut)
@pytest.mark.parametrize("way", ["down", "up", "prune"])
def test_after_a_power_cut_everything_committed_is_read(
    way: str, mode: Cut, tmp_path: Path
) -> None:
    policy = EVERYTHING._replace(keep_bytes=10_000) if way == "prune" else EVERYTHING
    made, states = states_of(tmp_path / "home", policy, hydrate=way == "up")
    made.close()
    assert len(states) > 15
    dice = random.Random(mode.value)
    for number, state in enumerate(states):
        if dice.random() < 0.6:
            continue  # each mode looks at others
        root = build(state, str(tmp_path / "home"), tmp_path / str(number), mode, dice)
        after = Stream(root, policy, FaultyObjects(root / "tier2"))
        after.wrote = made.wrote
        assert after.read() == after.expected(), number
        after.cover()
        after.run()
        assert after.read() == after.expected(), number
        after.close()
