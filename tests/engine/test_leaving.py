"""Channels that end, participants who leave, and subscribers whose filter is costly or invalid."""

from __future__ import annotations

import time

import msgspec
import pytest

import relay.engine
from relay.acomm.model import (
    Channel,
    ChannelState,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
)
from relay.base.errors import ChannelUnavailable, ValidationFailed
from relay.engine.checkpoint import state_of
from relay.engine.commstore import CommStore
from tests.engine.support import channel_of, relay_engine, send, standing
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 4.6")

# -- draining ------------------------------------------------------------------------------


@pytest.mark.shows("engine 3.3")
@pytest.mark.parametrize("state", [ChannelState.PAUSED, ChannelState.DRAINING])
def test_a_draining_channel_takes_the_answers_to_what_it_delivered(
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
    before = store.snapshot()
    with pytest.raises(ChannelUnavailable):
        store.acknowledge_message(command.id, "b", "completed")
    assert store.snapshot() == before


# -- receiving -----------------------------------------------------------------------------


@pytest.mark.shows("engine 2.3")
def test_a_limit_takes_the_first_to_be_delivered_and_leaves_the_rest(
    store: CommStore, group: Channel
) -> None:
    for number in range(5):
        priority = Priority.HIGH if number == 3 else Priority.NORMAL
        send(store, group, "a", content=f"{number}", priority=priority)
    two = MessageFilter(limit=2)
    came = []
    while got := store.receive_messages(group.id, "b", two):
        came.append([m.content.decode() for m in got])
    assert came == [["3", "0"], ["1", "2"], ["4"]]


@pytest.mark.shows("engine 2.4")
def test_who_has_left_is_served_nothing_of_that_channel(store: CommStore) -> None:
    left = channel_of(store, ChannelType.GROUP, "a", "b", name="left")
    stays = channel_of(store, ChannelType.GROUP, "a", "b", name="stays")
    asks = {"delivery": "at-least-once"}
    text = send(store, left, "a")
    command = send(store, left, "a", MessageType.COMMAND, metadata=asks)
    other = send(store, stays, "a")
    store.leave_channel(left.id, "b")
    assert standing(store, text.id) == {"b": DeliveryState.BOUNCED}
    assert [m.id for m in store.receive_messages(None, "b")] == [other.id]
    store.join_channel(left.id, "b")
    assert [m.id for m in store.receive_messages(None, "b")] == [command.id]


def test_whoever_left_an_acknowledgment_owing_is_given_up_in_time(
    store: CommStore, clock: FakeClock
) -> None:
    channel = channel_of(
        store,
        ChannelType.GROUP,
        "a",
        "b",
        max_retries=0,
        ack_timeout=5,
        delivery=DeliveryMode.AT_LEAST_ONCE,
    )
    command = send(store, channel, "a", MessageType.COMMAND)
    store.leave_channel(channel.id, "b")
    clock.advance(5)
    store.tick()
    assert [letter.recipients for letter in store.dead_letters()] == [("b",)]
    notice = store.receive_messages(None, "a")
    assert f"message {command.id} to b is dead" in notice[0].content.decode()


def test_where_the_owner_delivers_what_lies_in_an_inbox_stays(clock: FakeClock) -> None:
    engine = relay_engine(clock)
    channel = channel_of(engine, ChannelType.GROUP, "a", "b")
    message = send(engine, channel, "a")
    engine.channels.leave(channel.id, "b")
    assert standing(engine, message.id) == {"b": DeliveryState.DELIVERED}


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
def test_a_slow_filter_holds_up_its_own_subscriber_for_a_while_at_most(clock: FakeClock) -> None:
    store = CommStore(clock, warn=lambda _: None)
    channel = channel_of(store, ChannelType.PUB_SUB, "a", sticky_messages=True)
    for _ in range(100):
        store.publish(channel.id, "a", "t", "a" * 5000 + "c")
    store.publish(channel.id, "a", "t", "aaa")
    began = time.process_time()
    store.subscribe(channel.id, "slow", "#", MessageFilter(content_pattern="^(a|a?)+$"))
    assert time.process_time() - began < 4


def test_a_filter_that_a_file_had_and_is_none_matches_nothing(
    store: CommStore, clock: FakeClock
) -> None:
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


# -- names ---------------------------------------------------------------------------------

CALLS = """open create create_channel get_channel get_channel_by_name list_channels join_channel
leave_channel set_channel_state configure_channel send_message send_query send_response publish
broadcast subscribe unsubscribe subscriptions set_subscription_active
receive_messages query_messages search get_thread
acknowledge_message dead_letters replay_dead_letter discard_dead_letter purge_dead_letters archive
compact flush stats tick""".split()


def test_every_call_is_there_and_says_what_it_does() -> None:
    assert all(getattr(CommStore, name).__doc__ for name in CALLS)


def test_the_public_names_are_in_order() -> None:
    assert sorted(relay.engine.__all__) == relay.engine.__all__
    assert all(hasattr(relay.engine, name) for name in relay.engine.__all__)


def test_an_owner_who_comes_back_is_its_owner(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "boss", "w")
    store.leave_channel(channel.id, "boss")
    back = store.join_channel(channel.id, "boss")
    assert [(p.id, p.role.label) for p in back.participants] == [("w", "Member"), ("boss", "Owner")]


@pytest.mark.shows("engine 4.2")
def test_a_broadcast_channel_keeps_its_one_owner(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.BROADCAST, "boss", "w")
    before = store.snapshot()
    with pytest.raises(ValidationFailed, match=r"boss owns broadcast channel c, .*: close the"):
        store.leave_channel(channel.id, "boss")
    assert store.snapshot() == before
    store.leave_channel(channel.id, "w")
