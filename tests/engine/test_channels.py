"""A channel's settings, states and end, its participants, and its subscribers' filters."""

from __future__ import annotations

import random
import time
from functools import partial

import msgspec
import pytest

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryState,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
)
from relay.base.errors import ChannelUnavailable, ValidationFailed
from relay.base.names import ORCHESTRATOR
from relay.commstore.store import CommStore
from relay.engine import channels
from relay.engine.engine import state_of
from tests.engine.support import (
    AT_LEAST_ONCE,
    NOW_S,
    after,
    channel_of,
    group_of,
    refused,
    relay_engine,
    reopened,
    send,
    standing,
)
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 4.5", "engine 4.6")

# -- configure_channel ---------------------------------------------------------------------


def test_what_is_not_named_stays(store: CommStore, clock: FakeClock) -> None:
    channel = group_of(store, "a", "b", echo=True)
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


@pytest.mark.shows("engine 1.2")
@pytest.mark.parametrize("state", [s for s in ChannelState if s is not ChannelState.ACTIVE])
def test_nothing_new_is_taken_and_what_is_there_is_received(
    store: CommStore, clock: FakeClock, group: Channel, state: ChannelState
) -> None:
    send(store, group, "a", content="before")
    clock.advance(5)
    changed = store.set_channel_state(group.id, state)
    assert (changed.state, changed.modified_at) == (state, NOW_S + 5)
    error = refused(store, lambda: send(store, group, "a"), ChannelUnavailable)
    assert str(error).startswith(f"channel c is {state.label}: ")
    assert [m.content for m in reopened(store, clock).receive_messages(1, "b")] == [b"before"]
    assert [m.content for m in store.receive_messages(1, "b")] == [b"before"]
    if state is not ChannelState.CLOSED:
        store.set_channel_state(group.id, ChannelState.ACTIVE)
        assert send(store, group, "a").id == 2


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


def test_the_same_state_is_no_event(store: CommStore, clock: FakeClock, group: Channel) -> None:
    for state in (ChannelState.PAUSED, ChannelState.DRAINING, ChannelState.CLOSED):
        changed = store.set_channel_state(group.id, state)
        before = store.snapshot()
        clock.advance(5)
        assert store.set_channel_state(group.id, state) == changed
        assert store.snapshot() == before


# -- subscriptions with a filter -----------------------------------------------------------

# what is asked of a query alone, its limit, is no criterion
HIGH_BY_A = MessageFilter(sender="a", priority=(Priority.HIGH, Priority.CRITICAL), limit=0)


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


@pytest.mark.parametrize("kind", [k for k in ChannelType if k is not ChannelType.PUB_SUB])
def test_only_a_pubsub_channel_is_published_to(store: CommStore, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    call = lambda: store.publish(channel.id, "a", "build.ok", "x")  # noqa: E731
    assert refused(store, call, ValidationFailed).field == "channel"


# -- draining ------------------------------------------------------------------------------


@pytest.mark.shows("engine 3.3")
@pytest.mark.parametrize("state", [ChannelState.PAUSED, ChannelState.DRAINING])
def test_a_draining_channel_takes_answers(
    store: CommStore, state: ChannelState, group: Channel
) -> None:
    command = send(store, group, "a", MessageType.COMMAND)
    query = store.send_query(group.id, "a", "how many?")
    store.set_channel_state(group.id, state)
    with pytest.raises(ChannelUnavailable, match=f"channel c is {state.label}"):
        send(store, group, "b")
    store.acknowledge_message(command.id, "b", "completed")
    store.send_response(group.id, "b", str(query.correlation_id), "seven")
    assert {m.status for m in map(store.get_message, (command.id, query.id)) if m} == {
        MessageStatus.ACKNOWLEDGED
    }
    assert len(store.receive_messages(group.id, "a")) == 2


def test_a_closed_one_takes_nothing(store: CommStore, group: Channel) -> None:
    command = send(store, group, "a", MessageType.COMMAND)
    store.set_channel_state(group.id, ChannelState.CLOSED)
    answer = partial(store.acknowledge_message, command.id, "b", "completed")
    refused(store, answer, ChannelUnavailable)


# -- receiving -----------------------------------------------------------------------------


@pytest.mark.shows("engine 2.4")
def test_who_has_left_is_served_nothing_of_that_channel(store: CommStore) -> None:
    left = group_of(store, "a", "b", name="left")
    stays = group_of(store, "a", "b", name="stays")
    asks = {"delivery": "at-least-once"}
    text = send(store, left, "a")
    command = send(store, left, "a", MessageType.COMMAND, metadata=asks)
    other = send(store, stays, "a")
    store.leave_channel(left.id, "b")
    assert standing(store, text.id) == {"b": DeliveryState.BOUNCED}
    assert [m.id for m in store.receive_messages(None, "b")] == [other.id]
    store.join_channel(left.id, "b")
    assert [m.id for m in store.receive_messages(None, "b")] == [command.id]


def test_who_left_owing_an_answer_is_given_up(store: CommStore) -> None:
    channel = group_of(store, "a", "b", max_retries=0, ack_timeout=5, delivery=AT_LEAST_ONCE)
    command = send(store, channel, "a", MessageType.COMMAND)
    store.leave_channel(channel.id, "b")
    after(store, 5)
    assert [letter.recipients for letter in store.dead_letters()] == [("b",)]
    notice = store.receive_messages(None, "a")
    assert f"message {command.id} to b is dead" in notice[0].content.decode()


def test_where_the_owner_delivers_what_lies_in_an_inbox_stays(clock: FakeClock) -> None:
    engine = relay_engine(clock)
    channel = group_of(engine, "a", "b")
    message = send(engine, channel, "a")
    engine.channels.leave(channel.id, "b")
    assert standing(engine, message.id) == {"b": DeliveryState.DELIVERED}


def test_one_agent_owns_a_thousand_channels_at_most(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MOST_OWNED", 2)
    made = relay_engine(clock).channels
    for name in ("a/1", "a/2"):
        made.create(name, ChannelType.GROUP, "a")
    with pytest.raises(ValidationFailed, match="a owns 2 channels, at most 2: use one with topics"):
        made.create("a/3", ChannelType.PUB_SUB, "a")
    made.create("dm/a/b", ChannelType.DIRECT, "a")
    for name in ("b/1", "b/2", "b/3"):
        made.create(name, ChannelType.GROUP, ORCHESTRATOR)


# -- a costly filter -----------------------------------------------------------------------


@pytest.mark.shows("engine 2.12")
def test_a_subscribers_slow_filter_holds_up_no_publisher(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", sticky_messages=True)
    store.subscribe(channel.id, "slow", "#", MessageFilter(content_pattern="^(a|a?)+$"))
    store.subscribe(channel.id, "quick", "#")
    began = time.process_time()
    for _ in range(2):
        sent = store.publish(channel.id, "a", "t", "a" * 5000 + "c")
        assert store.recipients(sent.id) == ("quick",)
    assert time.process_time() - began < 2
    sent = store.publish(channel.id, "a", "t", "aaa")
    assert set(store.recipients(sent.id)) == {"slow", "quick"}


@pytest.mark.shows("engine 2.12")
def test_a_filter_that_costs_too_much_is_not_asked_again(clock: FakeClock) -> None:
    said: list[str] = []
    store = CommStore(clock, warn=said.append)
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    costly = "|".join(f"{first}[ab]{{900}}c" for first in ("a", "b", "aa", "bb", "ab", "ba"))
    costly_filter = MessageFilter(content_pattern=costly)
    store.subscribe(channel.id, "slow", "#", costly_filter)
    text = "".join(random.Random(1).choices("ab", k=1 << 20))
    for _ in range(3):
        sent = store.publish(channel.id, "a", "t", text)
        assert store.recipients(sent.id) in ((), ("slow",))
    assert store.recipients(sent.id) == ("slow",)  # rather too much than too little
    assert said == [
        "subscription 1 of slow: its content pattern takes too long, so every message matches; "
        "subscribe again with another one"
    ]
    store.subscribe(channel.id, "slow", "#", MessageFilter(content_pattern="c"))
    assert store.recipients(store.publish(channel.id, "a", "t", text).id) == ()


@pytest.mark.shows("engine 2.12")
def test_a_slow_filter_holds_up_its_own_subscriber_for_a_while_at_most(clock: FakeClock) -> None:
    store = CommStore(clock, warn=lambda _: None)
    channel = channel_of(store, ChannelType.PUB_SUB, "a", sticky_messages=True)
    for _ in range(100):
        store.publish(channel.id, "a", "t", "a" * 5000 + "c")
    store.publish(channel.id, "a", "t", "aaa")
    began = time.process_time()
    store.subscribe(channel.id, "slow", "#", MessageFilter(content_pattern="^(a|a?)+$"))
    assert time.process_time() - began < 4


def test_a_broken_filter_of_a_file_matches_nothing(store: CommStore, clock: FakeClock) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    store.subscribe(channel.id, "odd", "#")
    store.subscribe(channel.id, "quick", "#")
    file = store.snapshot().file()
    odd, quick = file.subscriptions
    odd = msgspec.structs.replace(odd, filter=MessageFilter(content_pattern="("))
    said: list[str] = []
    state = state_of(msgspec.structs.replace(file, subscriptions=(odd, quick)))
    opened = CommStore(clock, state, warn=said.append)
    for _ in range(2):
        sent = opened.publish(channel.id, "a", "t", "x")
        assert opened.recipients(sent.id) == ("quick",)
    assert len(said) == 1 and "subscription 1 of odd: its content pattern is not" in said[0]


# -- owners --------------------------------------------------------------------------------


def test_an_owner_who_comes_back_is_its_owner(store: CommStore) -> None:
    channel = group_of(store, "boss", "w")
    store.leave_channel(channel.id, "boss")
    back = store.join_channel(channel.id, "boss")
    assert [(p.id, p.role.label) for p in back.participants] == [("w", "Member"), ("boss", "Owner")]


@pytest.mark.shows("engine 4.2")
def test_a_broadcast_channel_keeps_its_one_owner(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.BROADCAST, "boss", "w")
    error = refused(store, lambda: store.leave_channel(channel.id, "boss"), ValidationFailed)
    assert "boss owns broadcast channel c" in str(error) and ": close the" in str(error)
    store.leave_channel(channel.id, "w")
