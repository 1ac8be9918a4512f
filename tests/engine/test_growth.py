"""A long run: what is over leaves nothing behind, and no call walks through all that there was."""

from __future__ import annotations

import pytest

from relay.acomm.model import (
    Channel,
    ChannelType,
    DeliveryMode,
    MessageFilter,
    MessageStatus,
    MessageType,
)
from relay.engine import transitions
from relay.engine.commstore import CommStore
from relay.engine.events import DuplicatesForgotten, Event
from relay.engine.retries import FORGET_PER_MS
from relay.engine.state import State
from relay.engine.tables import MANY_TIMERS
from tests.engine.support import EXACTLY_ONCE, channel_of, reopened, send
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 5.6")


def given_up(store: CommStore, many: int) -> tuple[Channel, list[int]]:
    """A channel with so many dead letters."""
    channel = channel_of(store, ChannelType.GROUP, "lead", "worker")
    numbers = [send(store, channel, "lead", MessageType.COMMAND).id for _ in range(many)]
    for number in numbers:
        store.engine.retries.dead_letter(number, ["worker"], "it is gone")
    return channel, numbers


class Unwalked(dict[int, object]):
    """A table that is looked up, and never gone through."""

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("somebody goes through the whole table")

    values = items = keys = __iter__  # type: ignore[assignment]


@pytest.mark.damages
@pytest.mark.parametrize("call", ["late", "replay", "discard", "other"])
def test_no_call_goes_through_all_dead_letters(store: CommStore, call: str) -> None:
    channel, numbers = given_up(store, 3)
    other = send(store, channel, "lead", MessageType.COMMAND).id
    state = store.state
    state.dead_letters, state.messages = Unwalked(state.dead_letters), Unwalked(state.messages)  # type: ignore[assignment]
    if call == "late":
        store.acknowledge_message(numbers[0], "worker", "completed")
    elif call == "replay":
        store.replay_dead_letter(numbers[0])
    elif call == "discard":
        store.discard_dead_letter(numbers[0])
    else:
        store.acknowledge_message(other, "worker", "completed")
    assert (numbers[0] in store.state.dead_letters) == (call == "other")


def test_dead_letters_are_found_like_others(store: CommStore, clock: FakeClock) -> None:
    _, numbers = given_up(store, 4)
    store.acknowledge_message(numbers[0], "worker", "completed")
    store.discard_dead_letter(numbers[1])
    store.replay_dead_letter(numbers[2])
    opened = reopened(store, clock)
    for one in (store, opened):
        dead = MessageFilter(status=(MessageStatus.DEAD_LETTER,))
        (left,) = one.query_messages(dead).messages
        assert left.id == numbers[3]
        assert one.get_thread(str(left.correlation_id)) == [left]
        assert [m.id for m in one.snapshot().values.messages][:2] == [numbers[0], numbers[2]]


def test_a_large_exactly_once_set_is_gone_through_rarely(
    store: CommStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_of(
        store, ChannelType.GROUP, "lead", "worker", delivery=EXACTLY_ONCE, ack_timeout=10
    )
    many = 100 * FORGET_PER_MS
    for _ in range(many):
        store.acknowledge_message(send(store, channel, "lead").id, "worker", "completed")
        clock.advance(0.001)
    walks: list[int] = []
    apply = transitions.apply

    def counted(state: State, event: Event) -> None:
        walks.append(isinstance(event, DuplicatesForgotten))
        apply(state, event)

    monkeypatch.setattr(transitions, "apply", counted)
    clock.advance(20 - many / 1000)
    for _ in range(many + 200):
        clock.advance(0.001)
        store.tick()
    assert store.state.duplicates == {}
    assert sum(walks) < many / 16


def test_a_long_run_leaves_no_timer_behind(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(
        store,
        ChannelType.GROUP,
        "lead",
        "worker",
        ack_timeout=50_000,
        delivery=DeliveryMode.AT_LEAST_ONCE,
    )
    waits = send(store, channel, "lead", MessageType.COMMAND).id
    for _ in range(3 * MANY_TIMERS):
        number = send(store, channel, "lead", MessageType.COMMAND).id
        store.acknowledge_message(number, "worker", "completed")
    assert len(store.state.timers) <= MANY_TIMERS
    clock.advance(50_001)
    store.tick()
    clock.advance(1)
    assert [again.message.id for again in store.tick()] == [waits]


def test_what_is_gone_for_good_leaves_nothing_behind(store: CommStore) -> None:
    channel = channel_of(
        store, ChannelType.GROUP, "lead", "worker", delivery=EXACTLY_ONCE, ack_timeout=10**6
    )
    store.acknowledge_message(send(store, channel, "lead").id, "worker", "completed")
    store.receive_messages(None, "lead")
    store.receive_messages(None, "worker")
    store.evict()
    store.compact()
    state = store.state
    assert (state.messages, state.archive, state.deliveries) == ({}, {}, {})
    assert (state.duplicates, list(filter(None, state.queues.values()))) == ({}, [])
