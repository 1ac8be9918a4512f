"""A channel's settings and states, and subscriptions that have a filter."""

from __future__ import annotations

import pytest

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    MessageFilter,
    MessageType,
    Priority,
)
from relay.base.errors import ChannelUnavailable, ValidationFailed
from relay.engine.commstore import CommStore
from tests.engine.support import NOW_S, channel_of, refused, reopened, send
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


def test_a_setting_holds_from_the_next_message_on(store: CommStore, group: Channel) -> None:
    first = send(store, group, "a", content="four")
    store.configure_channel(group.id, max_message_size=3, echo=True)
    with pytest.raises(ValidationFailed, match="max_message_size"):
        send(store, group, "a", content="four")
    second = send(store, group, "a", content="six")
    assert (store.recipients(first.id), store.recipients(second.id)) == (("b",), ("a", "b"))


# -- set_channel_state ---------------------------------------------------------------------


@pytest.mark.parametrize("state", [s for s in ChannelState if s is not ChannelState.ACTIVE])
def test_nothing_new_is_taken_and_what_is_there_is_received(
    store: CommStore, clock: FakeClock, group: Channel, state: ChannelState
) -> None:
    send(store, group, "a", content="before")
    clock.advance(5)
    changed = store.set_channel_state(group.id, state)
    assert (changed.state, changed.modified_at) == (state, NOW_S + 5)
    error = refused(store, lambda: send(store, group, "a"), ChannelUnavailable)
    assert str(error) == f"channel c is {state.label}"
    assert [m.content for m in reopened(store, clock).receive_messages(1, "b")] == [b"before"]
    assert [m.content for m in store.receive_messages(1, "b")] == [b"before"]
    if state is not ChannelState.CLOSED:
        store.set_channel_state(group.id, ChannelState.ACTIVE)
        assert send(store, group, "a").id == 2


@pytest.mark.shows("engine 4.6")
def test_closed_is_final(store: CommStore, clock: FakeClock, group: Channel) -> None:
    store.set_channel_state(group.id, ChannelState.CLOSED)
    for one in (store, reopened(store, clock)):
        for state in (ChannelState.ACTIVE, ChannelState.PAUSED, ChannelState.DRAINING):
            error = refused(
                one,
                lambda one=one, state=state: one.set_channel_state(group.id, state),
                ChannelUnavailable,
            )
            assert "channel c was closed, which is permanent" in str(error)


def test_the_same_state_again_is_no_event(
    store: CommStore, clock: FakeClock, group: Channel
) -> None:
    for state in (ChannelState.PAUSED, ChannelState.DRAINING, ChannelState.CLOSED):
        changed = store.set_channel_state(group.id, state)
        before = store.snapshot()
        clock.advance(5)
        assert store.set_channel_state(group.id, state) == changed
        assert store.snapshot() == before


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


@pytest.mark.parametrize("kind", [k for k in ChannelType if k is not ChannelType.PUB_SUB])
def test_only_a_pubsub_channel_is_published_to(store: CommStore, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    call = lambda: store.publish(channel.id, "a", "build.ok", "x")  # noqa: E731
    assert refused(store, call, ValidationFailed).field == "channel"
