"""What a channel keeps: beyond ``max_pending``, for who comes later, and replays while paused."""

from __future__ import annotations

from typing import Any

import pytest

from relay.acomm.model import (
    Channel,
    ChannelState,
    ChannelType,
    DeliveryState,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
    Retention,
    RetentionKind,
)
from relay.base.errors import ChannelUnavailable
from relay.commstore.store import CommStore
from relay.engine.engine import Engine
from relay.engine.state import State
from tests.engine.support import (
    AT_LEAST_ONCE,
    BY_FILES,
    accept,
    after,
    channel_of,
    group_of,
    receive,
    refused,
    relay_engine,
    reopened,
    send,
    standing,
)
from tests.fakes import FakeClock


def narrow(store: CommStore, most: int = 2, **config: object) -> Channel:
    channel = group_of(store, "a", "b", **config)
    return store.configure_channel(channel.id, max_pending=most)


def waiting(store: CommStore, who: str = "b") -> list[str]:
    return [m.content.decode() for m in store.receive_messages(None, who, peek=True)]


@pytest.mark.shows("engine 4.10")
def test_beyond_the_limit_messages_wait_in_order(store: CommStore, clock: FakeClock) -> None:
    channel = narrow(store)
    sent = [send(store, channel, "a", content=f"{n}") for n in range(5)]
    assert [m.status for m in sent] == [MessageStatus.DELIVERED] * 2 + [MessageStatus.SENT] * 3
    assert [store.engine.deliveries.is_held(m.id) for m in sent] == [False] * 2 + [True] * 3
    assert standing(store, sent[2].id) == {"b": DeliveryState.SENT}
    for one in (reopened(store, clock), store):
        assert waiting(one) == ["0", "1"] and one.engine.deliveries.resumable() == []
        receive(one, sent[1].id, "b")
        assert waiting(one) == ["0", "2"]
        assert [m.content for m in one.receive_messages(None, "b")] == [b"0", b"2"]
        assert waiting(one) == ["3", "4"]
        assert one.stats().held == 0


def test_what_owes_an_acknowledgment_counts_until_that_comes(store: CommStore) -> None:
    channel = narrow(store, 1, delivery=AT_LEAST_ONCE)
    first, second = send(store, channel, "a"), send(store, channel, "a", content="second")
    store.receive_messages(None, "b")
    assert store.engine.deliveries.is_held(second.id) and store.stats().pending == 1
    store.acknowledge_message(first.id, "b", "received")
    assert waiting(store) == ["second"]


def test_answers_are_never_held_and_hold_up_nothing(store: CommStore) -> None:
    channel = narrow(store, 1)
    query = store.send_query(channel.id, "a", "how many?")
    answer = store.send_response(channel.id, "b", str(query.correlation_id), "seven")
    assert answer.status is MessageStatus.DELIVERED
    assert send(store, channel, "a").status is MessageStatus.DELIVERED


@pytest.mark.shows("engine 4.10")
@pytest.mark.parametrize(
    ("heeds", "order"), [(True, ["high", "one", "two"]), (False, ["one", "high", "two"])]
)
def test_they_continue_by_priority_where_the_channel_heeds_it(
    store: CommStore, clock: FakeClock, heeds: bool, order: list[str]
) -> None:
    channel = narrow(store, 1, priority_ordering=heeds)
    first = send(store, channel, "a", content="first")
    for text, priority in (("one", 2), ("high", 1), ("two", 2)):
        send(store, channel, "a", content=text, priority=Priority(priority))
    store = reopened(store, clock)
    receive(store, first.id, "b")
    came = []
    while got := store.receive_messages(None, "b"):
        came += [m.content.decode() for m in got]
    assert came == order


def test_a_larger_limit_or_none_lets_them_go(store: CommStore) -> None:
    channel = narrow(store, 1)
    for number in range(4):
        send(store, channel, "a", content=f"{number}")
    store.configure_channel(channel.id, max_pending=3)
    assert waiting(store) == ["0", "1", "2"]
    store.configure_channel(channel.id, max_pending=None)
    assert waiting(store) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("state", "goes"),
    [(ChannelState.PAUSED, False), (ChannelState.DRAINING, True), (ChannelState.CLOSED, True)],
)
def test_a_paused_channel_holds_all(store: CommStore, state: ChannelState, goes: bool) -> None:
    channel = narrow(store, 1)
    send(store, channel, "a", content="first")
    send(store, channel, "a", content="second")
    store.set_channel_state(channel.id, state)
    store.receive_messages(None, "b")
    assert waiting(store) == (["second"] if goes else [])
    if not goes:
        store.set_channel_state(channel.id, ChannelState.ACTIVE)
        assert waiting(store) == ["second"]


@pytest.mark.shows("engine 2.5")
def test_past_its_ttl_a_held_message_is_not_delivered(store: CommStore, clock: FakeClock) -> None:
    channel = narrow(store, 1)
    send(store, channel, "a", content="first")
    short = send(store, channel, "a", content="short", ttl=5)
    send(store, channel, "a", content="long")
    clock.advance(5)
    store.receive_messages(None, "b")
    assert waiting(store) == ["long"]
    assert standing(store, short.id) == {"b": DeliveryState.EXPIRED}


def test_who_has_left_bounces_and_the_others_get_it(clock: FakeClock) -> None:
    said: list[str] = []
    store = CommStore(clock, warn=said.append)
    channel = narrow(store, 1)
    store.join_channel(channel.id, "c")
    send(store, channel, "a", content="first")
    second = send(store, channel, "a", content="second")
    store.leave_channel(channel.id, "c")
    store.receive_messages(None, "b")
    assert waiting(store) == ["second"]
    assert standing(store, second.id) == {"b": DeliveryState.DELIVERED, "c": DeliveryState.BOUNCED}
    assert said == [f"message {second.id}: 1 recipients have left the channel, c first"]


@pytest.mark.shows("engine 4.11")
def test_where_the_owner_delivers_it_is_told_what_may_go(clock: FakeClock) -> None:
    engine = relay_engine(clock)
    channel = group_of(engine, "a", "b")
    engine.channels.configure(channel.id, max_pending=1)
    numbers = [
        accept(engine, channel.id, "a", MessageType.TEXT, "x", priority=priority).id
        for priority in (Priority.NORMAL, Priority.LOW, Priority.HIGH)
    ]
    deliveries = engine.deliveries
    assert [deliveries.is_held(number) for number in numbers] == [False, True, True]
    assert deliveries.resumable() == []
    deliveries.deliver(numbers[0], ["b"])
    deliveries.receive(numbers[0], "b")
    assert deliveries.resumable() == [numbers[2]] == deliveries.resumable()
    assert standing(engine, numbers[2]) == {"b": DeliveryState.SENT}
    deliveries.deliver(numbers[2], ["b"])
    assert not deliveries.is_held(numbers[2]) and deliveries.resumable() == []


def test_an_answer_that_is_owed_counts_after_a_start_as_well(clock: FakeClock) -> None:
    engine = relay_engine(clock)
    channel = engine.channels.create("c", ChannelType.GROUP, "a")
    engine.channels.join(channel.id, "b")
    engine.channels.configure(channel.id, max_pending=1)
    first = accept(engine, channel.id, "a", MessageType.COMMAND, "x").id
    engine.deliveries.deliver(first, ["b"])
    engine.deliveries.receive(first, "b")  # read, and not answered
    opened = Engine(clock, State.load(engine.state.snapshot().file()), rules=BY_FILES)
    for one in (engine, opened):
        second = accept(one, channel.id, "a", MessageType.TEXT, "y").id
        assert one.deliveries.is_held(second)


def test_ten_thousand_held_messages_continue_one_by_one(store: CommStore) -> None:
    channel = narrow(store, 1)
    for _ in range(10_000):
        send(store, channel, "a")
    seen = 0
    while got := store.receive_messages(None, "b"):
        seen += len(got)
    assert seen == 10_000


def received(store: CommStore, channel_id: int, who: str) -> list[str]:
    return [m.content.decode() for m in store.receive_messages(channel_id, who)]


@pytest.mark.shows("engine 4.7")
@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.BROADCAST])
def test_who_joins_gets_what_was_sent(
    store: CommStore, clock: FakeClock, kind: ChannelType
) -> None:
    channel = channel_of(store, kind, "a", "b", sticky_messages=True)
    for text in ("one", "two", "three"):
        send(store, channel, "a", content=text)
        clock.advance(1)
    store.join_channel(channel.id, "late")
    assert received(reopened(store, clock), channel.id, "late") == ["one", "two", "three"]
    assert received(store, channel.id, "late") == ["one", "two", "three"]
    store.leave_channel(channel.id, "late")
    store.join_channel(channel.id, "late")
    assert received(store, channel.id, "late") == []
    assert received(store, channel.id, "b") == ["one", "two", "three"]


def test_without_the_setting_nothing_of_before_comes(store: CommStore, group: Channel) -> None:
    send(store, group, "a")
    store.join_channel(group.id, "late")
    assert received(store, group.id, "late") == []


def test_its_own_messages_and_answers_to_others_do_not_come(store: CommStore) -> None:
    channel = group_of(store, "a", "b", sticky_messages=True)
    send(store, channel, "b", content="of b")
    command = send(store, channel, "a", MessageType.COMMAND, content="do it")
    store.acknowledge_message(command.id, "b", "completed")
    query = store.send_query(channel.id, "a", "how many?")
    store.send_response(channel.id, "b", str(query.correlation_id), "seven")
    store.receive_messages(None, "b")
    store.leave_channel(channel.id, "b")
    store.join_channel(channel.id, "b")
    assert received(store, channel.id, "b") == []
    store.join_channel(channel.id, "late")
    assert received(store, channel.id, "late") == ["of b", "do it", "how many?"]


def test_past_its_ttl_or_its_retention_nothing_comes(store: CommStore, clock: FakeClock) -> None:
    keeps = Retention(RetentionKind.DURATION, 100)
    channel = group_of(store, "a", sticky_messages=True, retention=keeps)
    send(store, channel, "a", content="old")
    clock.advance(95)
    send(store, channel, "a", content="short", ttl=5)
    send(store, channel, "a", content="long", ttl=50)
    clock.advance(5)
    store.join_channel(channel.id, "late")
    assert received(store, channel.id, "late") == ["long"]


@pytest.mark.shows("engine 4.8")
def test_an_answer_is_owed_only_where_one_is_expected(store: CommStore) -> None:
    channel = group_of(store, "a", "b", sticky_messages=True, delivery=AT_LEAST_ONCE)
    done, open_ = send(store, channel, "a"), send(store, channel, "a")
    store.acknowledge_message(done.id, "b", "completed")
    store.join_channel(channel.id, "late")
    assert store.state.messages[done.id].status is MessageStatus.ACKNOWLEDGED
    due = {number: store.state.deliveries[number]["late"].due_ms for number in (done.id, open_.id)}
    assert (due[done.id], due[open_.id] > 0) == (0, True)
    assert standing(store, open_.id) == dict.fromkeys(["b", "late"], DeliveryState.DELIVERED)
    store.acknowledge_message(open_.id, "b", "completed")
    assert store.state.messages[open_.id].status is MessageStatus.DELIVERED
    store.acknowledge_message(open_.id, "late", "completed")
    assert store.state.messages[open_.id].status is MessageStatus.ACKNOWLEDGED


def test_a_subscriber_gets_what_its_pattern_and_filter_match(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", sticky_messages=True)
    for topic, priority in (
        ("build.ok", Priority.NORMAL),
        ("build.failed", Priority.HIGH),
        ("deploy.ok", Priority.HIGH),
    ):
        store.publish(channel.id, "a", topic, topic, priority=priority)
    store.join_channel(channel.id, "b")
    assert received(store, channel.id, "b") == []
    store.subscribe(channel.id, "b", "build.#")
    assert received(store, channel.id, "b") == ["build.failed", "build.ok"]
    store.subscribe(channel.id, "b", "*.ok", MessageFilter(priority=(Priority.HIGH,)))
    assert received(store, channel.id, "b") == ["deploy.ok"]


def test_where_the_owner_delivers_they_wait_for_it(clock: FakeClock) -> None:
    engine = relay_engine(clock)
    channel = group_of(engine, "a", sticky_messages=True)
    early = accept(engine, channel.id, "a", MessageType.TEXT, "x", metadata={"relay_id": "r-1"})
    engine.channels.join(channel.id, "late")
    assert standing(engine, early.id) == {"late": DeliveryState.SENT}


# -- a dead letter that is replayed ---------------------------------------------------------


@pytest.fixture
def dead(store: CommStore, clock: FakeClock) -> Channel:
    """A channel whose message 1, of lead, is dead for worker."""
    once: dict[str, Any] = {"delivery": AT_LEAST_ONCE, "ack_timeout": 10, "max_retries": 0}
    made = group_of(store, "lead", "worker", **once)
    send(store, made, "lead")
    after(store, 11)
    assert [letter.message.id for letter in store.dead_letters()] == [1]
    return made


@pytest.mark.shows("engine 3.5")
def test_a_paused_channel_holds_a_replay(store: CommStore, dead: Channel) -> None:
    store.set_channel_state(dead.id, ChannelState.PAUSED)
    assert store.replay_dead_letter(1).status is MessageStatus.SENT
    assert store.dead_letters() == []
    for _ in range(3):
        assert after(store, 60) == []
    assert store.next_due_ms() is None
    assert store.receive_messages(dead.id, "worker") == []
    store.set_channel_state(dead.id, ChannelState.ACTIVE)
    assert standing(store, 1) == {"worker": DeliveryState.DELIVERED}
    assert [m.id for m in store.receive_messages(dead.id, "worker")] == [1]
    after(store, 11)
    assert [letter.message.retry_count for letter in store.dead_letters()] == [0]


@pytest.mark.shows("engine 3.5")
@pytest.mark.parametrize("state", [ChannelState.DRAINING, ChannelState.CLOSED])
def test_a_held_replay_goes_when_the_channel_drains_or_closes(
    store: CommStore, dead: Channel, state: ChannelState
) -> None:
    store.set_channel_state(dead.id, ChannelState.PAUSED)
    store.replay_dead_letter(1)
    store.set_channel_state(dead.id, state)
    assert standing(store, 1) == {"worker": DeliveryState.DELIVERED}


@pytest.mark.shows("engine 3.5")
@pytest.mark.parametrize("state", [ChannelState.DRAINING, ChannelState.CLOSED])
def test_others_refuse_a_replay(store: CommStore, dead: Channel, state: ChannelState) -> None:
    store.set_channel_state(dead.id, state)
    error = refused(store, lambda: store.replay_dead_letter(1), ChannelUnavailable)
    assert str(error).startswith(f"channel c is {state.label}")
