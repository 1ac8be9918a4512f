"""A channel's settings and states, and subscriptions that have a filter."""

from __future__ import annotations

from typing import Any

import pytest

from relay.acomm.model import (
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    MessageFilter,
    MessageType,
    Priority,
    Retention,
    RetentionKind,
)
from relay.base.errors import ChannelNotFound, ChannelUnavailable, ValidationFailed
from relay.engine.commstore import CommStore
from tests.engine.support import NOW_S, channel_of, reopened, send
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 4.5")

# -- configure_channel ---------------------------------------------------------------------


def test_what_is_not_named_stays(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b", echo=True)
    clock.advance(5)
    changed = store.configure_channel(channel.id, ack_timeout=10, max_retries=0)
    assert changed.config == ChannelConfig(echo=True, ack_timeout=10, max_retries=0)
    assert (changed.modified_at, store.state.modified_at) == (NOW_S + 5, NOW_S + 5)
    assert changed == store.get_channel(channel.id) == reopened(store, clock).get_channel(1)


GOOD: list[dict[str, Any]] = [
    {},
    {"delivery": DeliveryMode.EXACTLY_ONCE, "echo": True, "sticky_messages": True},
    {"max_message_size": 1, "max_participants": 2, "ack_timeout": 1},
    {"max_message_size": 1_048_576, "max_participants": 2**32 - 1, "ack_timeout": 2**32 - 1},
    {"max_participants": None, "ack_timeout": None},
    {"max_retries": 0, "retry_backoff_ms": 0},
    {"max_retries": 2**32 - 1, "retry_backoff_ms": 2**32 - 1},
    {"retention": Retention(RetentionKind.COUNT, 5), "priority_ordering": False},
]
BAD: list[tuple[str, object]] = [
    ("max_message_size", 0),
    ("max_message_size", 1_048_577),
    ("max_message_size", None),
    ("max_message_size", "10"),
    ("max_participants", 0),
    ("max_participants", 2**32),
    ("ack_timeout", 0),
    ("ack_timeout", -1),
    ("ack_timeout", 1.5),
    ("ack_timeout", 2**32),
    ("max_retries", -1),
    ("max_retries", None),
    ("max_retries", True),
    ("max_retries", 2**32),
    ("retry_backoff_ms", -1),
    ("retry_backoff_ms", None),
    ("retry_backoff_ms", 2**32),
    ("delivery", "ExactlyOnce"),
    ("delivery", 3),
    ("echo", "yes"),
    ("priority_ordering", None),
    ("retention", 5),
    ("retention", Retention(RetentionKind.SIZE, 2**64)),
    ("retention", Retention(RetentionKind.COUNT, -1)),
]


@pytest.mark.parametrize("settings", GOOD)
def test_every_setting_that_is_taken_is_in_the_file(
    store: CommStore, clock: FakeClock, settings: dict[str, Any]
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    changed = store.configure_channel(channel.id, **settings)
    assert {name: getattr(changed.config, name) for name in settings} == settings
    assert reopened(store, clock).get_channel(channel.id) == changed


@pytest.mark.parametrize(("setting", "value"), BAD)
def test_a_wrong_value_is_refused_by_its_name(
    store: CommStore, setting: str, value: object
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    before = store.snapshot()
    with pytest.raises(ValidationFailed) as caught:
        store.configure_channel(channel.id, **{setting: value})
    assert caught.value.field == setting
    assert "\n" not in str(caught.value)
    assert store.snapshot() == before


def test_a_mode_by_its_number_is_that_mode(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    changed = store.configure_channel(channel.id, delivery=2)
    assert changed.config.delivery is DeliveryMode.EXACTLY_ONCE


def test_a_setting_that_is_none_is_refused(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    before = store.snapshot()
    with pytest.raises(ValidationFailed, match="unknown setting colour") as caught:
        store.configure_channel(channel.id, echo=True, colour="red")
    assert caught.value.field == "config"
    with pytest.raises(ChannelNotFound):
        store.configure_channel(7, echo=True)
    assert store.snapshot() == before


def test_a_setting_holds_from_the_next_message_on(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    first = send(store, channel, "a", content="four")
    store.configure_channel(channel.id, max_message_size=3, echo=True)
    with pytest.raises(ValidationFailed, match="max_message_size"):
        send(store, channel, "a", content="four")
    second = send(store, channel, "a", content="six")
    assert (store.recipients(first.id), store.recipients(second.id)) == (("b",), ("a", "b"))


# -- set_channel_state ---------------------------------------------------------------------

NOT_ACTIVE = [ChannelState.PAUSED, ChannelState.DRAINING, ChannelState.CLOSED]


@pytest.mark.parametrize("state", NOT_ACTIVE)
def test_nothing_new_is_taken_and_what_is_there_is_received(
    store: CommStore, clock: FakeClock, state: ChannelState
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    send(store, channel, "a", content="before")
    clock.advance(5)
    changed = store.set_channel_state(channel.id, state)
    assert (changed.state, changed.modified_at) == (state, NOW_S + 5)
    before = store.snapshot()
    with pytest.raises(ChannelUnavailable, match=f"channel c is {state.label}"):
        send(store, channel, "a")
    assert store.snapshot() == before
    assert [m.content for m in reopened(store, clock).receive_messages(1, "b")] == [b"before"]
    assert [m.content for m in store.receive_messages(1, "b")] == [b"before"]


@pytest.mark.parametrize("state", [ChannelState.PAUSED, ChannelState.DRAINING])
def test_a_channel_that_is_active_again_takes_messages(
    store: CommStore, state: ChannelState
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    store.set_channel_state(channel.id, state)
    store.set_channel_state(channel.id, ChannelState.ACTIVE)
    assert send(store, channel, "a").id == 1


@pytest.mark.shows("engine 4.6")
@pytest.mark.parametrize("state", [s for s in ChannelState if s is not ChannelState.CLOSED])
def test_closed_is_final(store: CommStore, clock: FakeClock, state: ChannelState) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    store.set_channel_state(channel.id, ChannelState.CLOSED)
    for one in (store, reopened(store, clock)):
        before = one.snapshot()
        with pytest.raises(ChannelUnavailable, match="channel c was closed, which is permanent"):
            one.set_channel_state(channel.id, state)
        assert one.snapshot() == before


@pytest.mark.parametrize("state", list(ChannelState))
def test_the_same_state_again_is_no_event(
    store: CommStore, clock: FakeClock, state: ChannelState
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    changed = store.set_channel_state(channel.id, state)
    before = store.snapshot()
    clock.advance(5)
    assert store.set_channel_state(channel.id, state) == changed
    assert store.snapshot() == before


def test_a_state_is_a_channels_that_is_there(store: CommStore) -> None:
    with pytest.raises(ChannelNotFound):
        store.set_channel_state(7, ChannelState.PAUSED)


# -- subscriptions with a filter -----------------------------------------------------------

HIGH_BY_A = MessageFilter(sender="a", priority=(Priority.HIGH, Priority.CRITICAL))


@pytest.mark.shows("engine 2.12")
def test_a_filter_narrows_what_a_pattern_matches(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "c")
    store.subscribe(channel.id, "b", "build.#", HIGH_BY_A)
    store.subscribe(channel.id, "d", "build.#")
    for one in (store, reopened(store, clock)):
        for sender, priority, topic, reached in (
            ("a", Priority.HIGH, "build.ok", ("b", "d")),
            ("a", Priority.LOW, "build.ok", ("d",)),
            ("c", Priority.HIGH, "build.ok", ("d",)),
            ("a", Priority.CRITICAL, "test.ok", ()),
        ):
            sent = one.publish(channel.id, sender, topic, "x", priority=priority)
            assert set(one.recipients(sent.id)) == set(reached)


@pytest.mark.parametrize(
    ("wanted", "reached"),
    [
        (MessageFilter(content_pattern="^fail"), False),
        (MessageFilter(content_pattern="^pass"), True),
        (MessageFilter(message_types=(MessageType.NOTIFICATION,)), False),
        (MessageFilter(topic_pattern="build.*"), True),
        (MessageFilter(topic_pattern="*.failed"), False),
        (MessageFilter(limit=0), True),
    ],
)
def test_every_criterion_counts(store: CommStore, wanted: MessageFilter, reached: bool) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    store.subscribe(channel.id, "b", "#", wanted)
    sent = store.publish(channel.id, "a", "build.ok", "passed")
    assert store.recipients(sent.id) == (("b",) if reached else ())


def test_one_of_two_subscriptions_is_enough_and_once(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    store.subscribe(channel.id, "b", "build.#", HIGH_BY_A)
    store.subscribe(channel.id, "b", "build.*")
    for priority in (Priority.HIGH, Priority.LOW):
        sent = store.publish(channel.id, "a", "build.ok", "x", priority=priority)
        assert store.recipients(sent.id) == ("b",)
    assert store.unsubscribe(channel.id, "b", "build.*") == 1
    sent = store.publish(channel.id, "a", "build.ok", "x", priority=Priority.LOW)
    assert store.recipients(sent.id) == ()


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (MessageFilter(content_pattern="("), "content_pattern"),
        (MessageFilter(topic_pattern="a..b"), "topic_pattern"),
    ],
)
def test_a_bad_filter_is_no_subscription_and_joins_nobody(
    store: CommStore, bad: MessageFilter, field: str
) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    before = store.snapshot()
    with pytest.raises(ValidationFailed) as caught:
        store.subscribe(channel.id, "b", "build.#", bad)
    assert caught.value.field == field
    assert store.snapshot() == before


@pytest.mark.parametrize("kind", [k for k in ChannelType if k is not ChannelType.PUB_SUB])
def test_only_a_pubsub_channel_is_published_to(store: CommStore, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    with pytest.raises(ValidationFailed) as caught:
        store.publish(channel.id, "a", "build.ok", "x")
    assert caught.value.field == "channel"
    assert len(store) == 0
