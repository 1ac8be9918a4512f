"""Replay of a dead letter keeps to its channel's state: held while paused, else refused."""

from __future__ import annotations

from typing import Any

import pytest

from relay.acomm.model import Channel, ChannelState, DeliveryState, MessageStatus
from relay.base.errors import ChannelUnavailable
from relay.delivery.actions import execute
from relay.engine.commstore import CommStore
from tests.engine.support import AT_LEAST_ONCE, group_of, send, standing
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 3.5")

ONCE: dict[str, Any] = {"delivery": AT_LEAST_ONCE, "ack_timeout": 10, "max_retries": 0}


@pytest.fixture
def store(clock: FakeClock) -> CommStore:
    """Empty; it makes the attempts itself."""
    return CommStore(clock)


@pytest.fixture
def channel(store: CommStore, clock: FakeClock) -> Channel:
    """A channel whose message 1, of lead, is dead for worker."""
    made = group_of(store, "lead", "worker", **ONCE)
    send(store, made, "lead")
    clock.advance(11)
    store.tick()
    assert [letter.message.id for letter in store.dead_letters()] == [1]
    return made


def test_a_paused_channel_holds_a_replay(
    store: CommStore, channel: Channel, clock: FakeClock
) -> None:
    store.set_channel_state(channel.id, ChannelState.PAUSED)
    assert store.replay_dead_letter(1).status is MessageStatus.SENT
    assert store.dead_letters() == []
    for _ in range(3):
        clock.advance(60)
        assert store.tick() == []
    assert store.next_due_ms() is None
    assert store.receive_messages(channel.id, "worker") == []
    store.set_channel_state(channel.id, ChannelState.ACTIVE)
    assert standing(store, 1) == {"worker": DeliveryState.DELIVERED}
    assert [m.id for m in store.receive_messages(channel.id, "worker")] == [1]
    clock.advance(11)
    store.tick()
    assert [letter.message.retry_count for letter in store.dead_letters()] == [0]


@pytest.mark.parametrize("state", [ChannelState.DRAINING, ChannelState.CLOSED])
def test_a_held_replay_goes_when_the_channel_drains_or_closes(
    store: CommStore, channel: Channel, state: ChannelState
) -> None:
    store.set_channel_state(channel.id, ChannelState.PAUSED)
    store.replay_dead_letter(1)
    store.set_channel_state(channel.id, state)
    assert standing(store, 1) == {"worker": DeliveryState.DELIVERED}


@pytest.mark.parametrize("state", [ChannelState.DRAINING, ChannelState.CLOSED])
def test_others_refuse_a_replay(store: CommStore, channel: Channel, state: ChannelState) -> None:
    store.set_channel_state(channel.id, state)
    before = store.snapshot()
    with pytest.raises(ChannelUnavailable, match=f"channel c is {state.label}"):
        store.replay_dead_letter(1)
    assert store.snapshot() == before


def test_the_command_says_that_it_waits_for_the_channel(store: CommStore, channel: Channel) -> None:
    store.set_channel_state(channel.id, ChannelState.PAUSED)
    said = execute({"ACTION": "dead.replay", "ID": "1"}, "operator", None, store.engine)
    assert said == (
        "dead letter 1 is held: channel c is Paused; "
        "it is sent again to worker when the channel is resumed"
    )
