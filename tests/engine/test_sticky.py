"""Who comes later to a sticky channel gets what was sent before, once."""

from __future__ import annotations

import pytest

from relay.acomm.model import (
    Channel,
    ChannelType,
    DeliveryState,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
    Retention,
    RetentionKind,
)
from relay.engine.commstore import CommStore
from tests.engine.support import (
    AT_LEAST_ONCE,
    accept,
    channel_of,
    relay_engine,
    reopened,
    send,
    standing,
)
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 4.7")


def received(store: CommStore, channel_id: int, who: str) -> list[str]:
    return [m.content.decode() for m in store.receive_messages(channel_id, who)]


@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.BROADCAST])
def test_who_joins_gets_what_was_sent_oldest_first_and_once(
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
    channel = channel_of(store, ChannelType.GROUP, "a", "b", sticky_messages=True)
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
    channel = channel_of(store, ChannelType.GROUP, "a", sticky_messages=True, retention=keeps)
    send(store, channel, "a", content="old")
    clock.advance(95)
    send(store, channel, "a", content="short", ttl=5)
    send(store, channel, "a", content="long", ttl=50)
    clock.advance(5)
    store.join_channel(channel.id, "late")
    assert received(store, channel.id, "late") == ["long"]


@pytest.mark.shows("engine 4.8")
def test_an_acknowledgment_is_owed_only_where_one_is_still_expected(
    store: CommStore, clock: FakeClock
) -> None:
    channel = channel_of(
        store, ChannelType.GROUP, "a", "b", sticky_messages=True, delivery=AT_LEAST_ONCE
    )
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
    channel = channel_of(engine, ChannelType.GROUP, "a", sticky_messages=True)
    early = accept(engine, channel.id, "a", MessageType.TEXT, "x", metadata={"relay_id": "r-1"})
    engine.channels.join(channel.id, "late")
    assert standing(engine, early.id) == {"late": DeliveryState.SENT}
