"""Sending: who gets it, by the type of the channel, and what becomes of each delivery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay.acomm.model import (
    Channel,
    ChannelType,
    DeliveryState,
    MatchMode,
    Message,
    MessageStatus,
    MessageType,
    ParticipantRole,
    Priority,
)
from relay.base.errors import ChannelNotFound
from relay.base.names import uuid4_of
from relay.commstore.store import CommStore
from tests.engine.support import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    NOW_S,
    UUID,
    accept,
    channel_of,
    group_of,
    new_store,
    routed,
    send,
    standing,
)
from tests.fakes import FakeClock

SENT, DELIVERED = DeliveryState.SENT, DeliveryState.DELIVERED
ACKNOWLEDGED, BOUNCED = DeliveryState.ACKNOWLEDGED, DeliveryState.BOUNCED


# -- routing -------------------------------------------------------------------------------


def test_a_pubsub_channel_reaches_who_has_a_pattern_of_it_and_once(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "b")
    other = channel_of(store, ChannelType.PUB_SUB, "a", name="other")
    store.subscribe(other.id, "b", "#")
    assert routed(store, channel, "a", "build.ok") == ()
    for pattern in ("build.#", "build.*"):
        store.subscribe(channel.id, "b", pattern)
    assert routed(store, channel, "a", "build.ok") == ("b",)


@pytest.mark.shows("engine 1.10")
@pytest.mark.parametrize("kind", ChannelType)
def test_everybody_else_gets_it_and_with_echo_the_sender(kind: ChannelType) -> None:
    others = ("b",) if kind is ChannelType.DIRECT else ("b", "c")
    for echo in (False, True):
        store = new_store()
        channel = channel_of(store, kind, "a", *others, echo=echo)
        role = ParticipantRole.OBSERVER if kind is ChannelType.BROADCAST else ParticipantRole.MEMBER
        assert [p.role for p in channel.participants[1:]] == [role] * len(others)
        if kind is ChannelType.PUB_SUB:
            for who in ("a", *others):
                store.subscribe(channel.id, who, "#")
        own = ("a",) if echo and kind is not ChannelType.DIRECT else ()
        assert routed(store, channel, "a", "t") == (*own, *others)


def test_who_left_gets_nothing_and_has_no_subscription(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "c")
    other = channel_of(store, ChannelType.PUB_SUB, "a", name="other")
    for pattern in ("build.#", "test.#"):
        store.subscribe(channel.id, "b", pattern)
    store.subscribe(channel.id, "c", "build.#")
    store.subscribe(other.id, "b", "build.#")
    store.leave_channel(channel.id, "b")
    assert routed(store, channel, "a", "build.ok") == ("c",)
    assert routed(store, other, "a", "build.ok") == ("b",)
    assert [p.id for p in store.get_channel(channel.id).participants] == ["a", "c"]
    store.join_channel(channel.id, "b")
    assert routed(store, channel, "a", "build.ok") == ("c",)


# -- channels and subscriptions ------------------------------------------------------------


def test_a_channel_as_it_is_made(store: CommStore, clock: FakeClock) -> None:
    first = group_of(store, "a")
    clock.advance(5)
    second = channel_of(store, ChannelType.PUB_SUB, "b", name="team/b")
    assert (first.id, second.id) == (1, 2)
    assert (second.name, second.owner, second.channel_type) == ("team/b", "b", ChannelType.PUB_SUB)
    assert (second.created_at, second.modified_at) == (NOW_S + 5, NOW_S + 5)
    (owner,) = second.participants
    assert (owner.id, owner.role, owner.joined_at) == ("b", ParticipantRole.OWNER, NOW_S + 5)
    assert store.get_channel_by_name("team/b") == store.get_channel(2) == second
    assert store.get_channel_by_name("team") is None
    assert store.list_channels() == [first, second]


def test_joining_and_leaving_change_the_channels_time(store: CommStore, clock: FakeClock) -> None:
    channel = group_of(store, "a")
    clock.advance(7)
    joined = store.join_channel(channel.id, "b")
    assert (joined.created_at, joined.modified_at) == (NOW_S, NOW_S + 7)
    assert joined.participants[1].joined_at == NOW_S + 7
    clock.advance(1)
    assert store.leave_channel(channel.id, "b").modified_at == NOW_S + 8


@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.DIRECT])
def test_joining_again_changes_nothing(
    store: CommStore, clock: FakeClock, kind: ChannelType
) -> None:
    channel = channel_of(store, kind, "a", "b")
    before = store.snapshot()
    clock.advance(5)
    for who in ("a", "b"):
        assert store.join_channel(channel.id, who) == store.get_channel(channel.id)
    assert store.snapshot() == before


def test_subscribing_joins_and_again_changes_nothing(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    first = store.subscribe(channel.id, "b", "build.*.ok")
    assert (first.id, first.match_mode, first.active) == (1, MatchMode.WILDCARD, True)
    assert (first.created_at, first.subscriber) == (NOW_S, "b")
    assert store.is_participant(channel.id, "b")
    before, sequence = store.snapshot(), store.sequence
    clock.advance(5)
    assert store.subscribe(channel.id, "b", "build.*.ok") == first
    assert (store.snapshot(), store.sequence) == (before, sequence)
    assert store.subscribe(channel.id, "b", "build.#").id == 2
    assert store.subscribe(channel.id, "c", "build.#").id == 3


def test_ending_subscriptions(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    for pattern in ("build.#", "test.#", "deploy.#"):
        store.subscribe(channel.id, "b", pattern)
    store.subscribe(channel.id, "c", "build.#")
    clock.advance(3)
    assert store.unsubscribe(channel.id, "b", "build.#") == 1
    assert store.state.modified_at == NOW_S + 3
    assert store.unsubscribe(channel.id, "b", "build.#") == 0
    assert routed(store, channel, "a", "build.ok") == ("c",)
    assert store.unsubscribe(channel.id, "b") == 2
    assert store.is_participant(channel.id, "b")
    assert store.subscribe(channel.id, "b", "build.#").id == 5  # no number twice


def test_every_change_has_its_time(store: CommStore, clock: FakeClock) -> None:
    changes: list[Callable[[], object]] = [
        lambda: store.create_channel("c", ChannelType.PUB_SUB, "a"),
        lambda: store.join_channel(1, "b"),
        lambda: store.subscribe(1, "b", "#"),
        lambda: accept(store, 1, "a", MessageType.TEXT, "hi", topic="t"),
        lambda: store.engine.deliveries.deliver(1, ["b"]),
        lambda: store.unsubscribe(1, "b"),
        lambda: store.leave_channel(1, "b"),
    ]
    for number, change in enumerate(changes, 1):
        clock.advance(1)
        change()
        assert store.state.modified_at == NOW_S + number
        assert store.snapshot().values.modified_at == NOW_S + number
    assert store.state.created_at == NOW_S


# -- the pipeline --------------------------------------------------------------------------


def test_a_message_as_it_is_kept(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    store.subscribe(channel.id, "b", "#")
    clock.advance(1)
    given: dict[str, Any] = {
        **{"topic": "build.ok", "correlation_id": UUID, "priority": Priority.HIGH},
        **{"metadata": {"k": 1}, "ttl": 60, "signature": b"s" * 64},
    }
    kind, status = MessageType.NOTIFICATION, MessageStatus.SENT
    message = accept(store, channel.id, "a", kind, "héllo", **given)
    kept = {"created_at": NOW_S + 1, "status": status, **given}
    assert message == Message(1, kind, "a", channel.id, "héllo".encode(), **kept)
    assert store.get_message(1) == message
    assert store.get_message(2) is None
    assert store.state.modified_at == NOW_S + 1


@pytest.mark.shows("engine 1.9")
def test_numbers_grow_and_are_counted(store: CommStore) -> None:
    one = group_of(store, "a", "b", name="one")
    two = group_of(store, "a", "b", name="two")
    assert [send(store, channel, "a").id for channel in (one, two, one)] == [1, 2, 3]
    assert (store.message_count(one.id), store.message_count(two.id)) == (2, 1)
    assert (len(store), store.state.messages_sent) == (3, 3)
    assert [channel.message_count for channel in store.snapshot().values.channels] == [2, 1]
    assert [channel.message_count for channel in store.list_channels()] == [2, 1]
    for found in (store.get_channel(1), store.get_channel_by_name("one")):
        assert found is not None and found.message_count == 2
    with pytest.raises(ChannelNotFound):
        store.message_count(3)


def test_recipients_may_be_narrowed(store: CommStore) -> None:
    channel = group_of(store, "a", "b", "c")
    message = accept(store, channel.id, "a", MessageType.TEXT, "x", recipients=iter(["c"]))
    assert store.recipients(message.id) == ("c",)
    nobody = accept(store, channel.id, "a", MessageType.TEXT, "x", recipients=[])
    assert store.recipients(nobody.id) == ()
    assert store.recipients(99) == ()


def test_a_message_is_found_by_its_relay_id(store: CommStore, group: Channel) -> None:
    message = send(store, group, "a", metadata={"relay_id": "1706123456789012345-a1"})
    send(store, group, "a", metadata={"relay_id": 7})
    assert store.engine.messages.find_by_relay_id("1706123456789012345-a1") == message
    assert store.engine.messages.find_by_relay_id("1706123456789012345-") is None


def test_a_text_does_not_look_at_its_thread(store: CommStore, group: Channel) -> None:
    send(store, group, "a", correlation_id=UUID)
    looked: list[str] = []
    store.engine.messages.thread = lambda thread: looked.append(thread) or []  # type: ignore[method-assign]
    send(store, group, "a", correlation_id=UUID)
    assert looked == []


@pytest.mark.parametrize("delivery", [AT_LEAST_ONCE, EXACTLY_ONCE])
def test_what_expects_an_answer_has_a_correlation_id(store: CommStore, delivery: int) -> None:
    plain = group_of(store, "a", "b", name="plain")
    sure = group_of(store, "a", "b", name="sure", delivery=delivery)
    assert send(store, plain, "a").correlation_id is None
    assert send(store, sure, "a").correlation_id == uuid4_of("2")
    assert send(store, plain, "a", MessageType.COMMAND).correlation_id == uuid4_of("3")
    named = send(store, plain, "a", MessageType.QUERY, metadata={"relay_id": "r-1"})
    assert named.correlation_id == uuid4_of("r-1")
    assert send(store, sure, "a", correlation_id=UUID).correlation_id == UUID
    assert store.get_thread(uuid4_of("r-1")) == [named]


def test_channels_of_two_are_not_shown(store: CommStore) -> None:
    direct = channel_of(store, ChannelType.DIRECT, "a", "b", name="dm/a/b")
    group = group_of(store, "a", "b", name="team")
    assert store.engine.channels.label(send(store, direct, "a").channel_id) is None
    assert store.engine.channels.label(send(store, group, "a").channel_id) == "team"


# -- deliveries ----------------------------------------------------------------------------


def accepted(store: CommStore, *recipients: str) -> int:
    channel = group_of(store, "sender", *recipients)
    return accept(store, channel.id, "sender", MessageType.COMMAND, "go").id


def status(store: CommStore, number: int) -> tuple[MessageStatus, int | None, int | None]:
    message = store.get_message(number)
    assert message is not None
    return message.status, message.delivered_at, message.acknowledged_at


@pytest.mark.shows("engine 1.11")
def test_a_message_is_as_far_as_its_slowest_delivery(store: CommStore, clock: FakeClock) -> None:
    number = accepted(store, "b", "c")
    store.engine.deliveries.deliver(number, ["b"])
    assert status(store, number) == (MessageStatus.SENT, None, None)
    clock.advance(1)
    store.engine.deliveries.deliver(number, ["c"])
    assert status(store, number) == (MessageStatus.DELIVERED, NOW_S + 1, None)
    clock.advance(1)
    store.engine.deliveries.move(number, ["b"], ACKNOWLEDGED)
    assert status(store, number) == (MessageStatus.DELIVERED, NOW_S + 1, None)
    clock.advance(1)
    store.engine.deliveries.move(number, ["c"], ACKNOWLEDGED)
    assert status(store, number) == (MessageStatus.ACKNOWLEDGED, NOW_S + 1, NOW_S + 3)


def test_acknowledged_at_once_it_was_delivered_then(store: CommStore) -> None:
    number = accepted(store, "b")
    store.engine.deliveries.move(number, ["b"], ACKNOWLEDGED)
    assert status(store, number) == (MessageStatus.ACKNOWLEDGED, NOW_S, NOW_S)
    answered = store.engine.deliveries.is_answered
    assert [answered(number, "b"), answered(number, "c"), answered(99, "b")] == [True, False, False]


def test_bounced_the_others_say_how_far_it_is(store: CommStore) -> None:
    number = accepted(store, "b", "c")
    store.engine.deliveries.move(number, ["b"], BOUNCED)
    assert status(store, number)[0] is MessageStatus.SENT
    store.engine.deliveries.deliver(number, ["c"])
    assert status(store, number)[0] is MessageStatus.DELIVERED
    store.engine.deliveries.move(number, ["c"], BOUNCED)
    assert status(store, number)[0] is MessageStatus.FAILED


@pytest.mark.parametrize("first", list(DeliveryState))
@pytest.mark.parametrize("then", list(DeliveryState))
def test_no_delivery_goes_back(store: CommStore, first: DeliveryState, then: DeliveryState) -> None:
    number = accepted(store, "b")
    store.engine.deliveries.move(number, ["b"], first)
    sequence = store.sequence
    store.engine.deliveries.move(number, ["b"], then)
    onward = then > first and first is not ACKNOWLEDGED
    if first > ACKNOWLEDGED:  # given up
        onward = then is ACKNOWLEDGED  # late, and welcome
    assert standing(store, number) == {"b": then if onward else first}
    assert store.sequence == sequence + onward


def test_what_somebody_has_not_got_yet(store: CommStore) -> None:
    channel = group_of(store, "a", "b", "c")
    numbers = [
        accept(store, channel.id, "a", MessageType.TEXT, "x", metadata={"relay_id": f"r-{n}"}).id
        for n in range(3)
    ]
    accept(store, channel.id, "a", MessageType.TEXT, "of nobody's relay")
    store.engine.deliveries.deliver(numbers[0], ["b", "c"])
    store.engine.deliveries.deliver(numbers[1], ["b"])
    assert store.engine.messages.incomplete() == {"r-1": numbers[1], "r-2": numbers[2]}
    store.engine.deliveries.move(numbers[1], ["c"], BOUNCED)  # and may still be acknowledged
    assert store.engine.messages.incomplete() == {"r-1": numbers[1], "r-2": numbers[2]}
    store.engine.deliveries.deliver(numbers[2], ["b", "c"])
    assert store.engine.messages.incomplete() == {"r-1": numbers[1]}


def test_the_same_again_or_of_a_stranger_is_no_event(store: CommStore) -> None:
    number = accepted(store, "b", "c")
    store.engine.deliveries.deliver(number, ["b", "b", "stranger"])
    assert standing(store, number) == {"b": DELIVERED, "c": SENT}
    sequence = store.sequence
    store.engine.deliveries.deliver(number, ["b"])
    store.engine.deliveries.deliver(number, ["stranger"])
    store.engine.deliveries.deliver(number, [])
    store.engine.deliveries.deliver(99, ["b"])
    assert store.sequence == sequence
