"""A program that uses the store: subscriptions, roles, its path, values that do not change."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest

from relay.base.errors import ValidationFailed
from relay.engine import (
    Channel,
    ChannelType,
    CommStore,
    Message,
    MessageFilter,
    MessageType,
    ParticipantRole,
    Priority,
)
from tests.engine.support import AT_LEAST_ONCE, channel_of, reopened, routed, send
from tests.fakes import FakeClock

HIGH = MessageFilter(priority=(Priority.CRITICAL, Priority.HIGH))


@pytest.fixture
def topics(store: CommStore) -> Channel:
    return channel_of(store, ChannelType.PUB_SUB, "ci")


# -- subscriptions -------------------------------------------------------------------------


@pytest.mark.shows("engine 2.11")
def test_a_subscription_rests(store: CommStore, topics: Channel, clock: FakeClock) -> None:
    one = store.subscribe(topics.id, "bob", "build.#")
    other = store.subscribe(topics.id, "eve", "build.#")
    resting = store.set_subscription_active(one.id, False)
    assert (resting.id, resting.active) == (one.id, False)
    assert routed(store, topics, "ci", "build.ok") == ("eve",)
    opened = reopened(store, clock)
    assert routed(opened, topics, "ci", "build.ok") == ("eve",)
    before = store.sequence
    assert store.set_subscription_active(one.id, False) == resting
    assert store.sequence == before  # again changes nothing
    assert store.set_subscription_active(one.id, True).active
    assert routed(store, topics, "ci", "build.ok") == ("bob", "eve")
    assert store.subscriptions() == [one, other]


@pytest.mark.shows("engine 2.11")
def test_subscribing_again_wakes_it_and_says_its_filter(store: CommStore, topics: Channel) -> None:
    one = store.subscribe(topics.id, "bob", "build.#")
    store.set_subscription_active(one.id, False)
    again = store.subscribe(topics.id, "bob", "build.#", HIGH)
    assert (again.id, again.active) == (one.id, True)
    assert again.filter is not None and again.filter.priority == HIGH.priority
    assert store.subscriptions() == [again]
    send(store, topics, "ci", topic="build.ok")
    send(store, topics, "ci", topic="build.ok", priority=Priority.HIGH)
    assert [m.priority for m in store.receive_messages(None, "bob")] == [Priority.HIGH]


def test_subscriptions_of_a_channel_and_of_a_subscriber(store: CommStore, topics: Channel) -> None:
    other = channel_of(store, ChannelType.PUB_SUB, "ci", name="other")
    made = [
        store.subscribe(topics.id, "bob", "a"),
        store.subscribe(other.id, "bob", "b"),
        store.subscribe(topics.id, "eve", "c"),
    ]
    assert store.subscriptions() == made
    assert store.subscriptions(topics.id) == [made[0], made[2]]
    assert store.subscriptions(subscriber="bob") == made[:2]
    assert store.subscriptions(other.id, "eve") == []
    with pytest.raises(Exception, match="channel 9 does not exist"):
        store.subscriptions(9)


def test_a_subscription_that_is_none(store: CommStore, topics: Channel) -> None:
    store.subscribe(topics.id, "bob", "a")
    for number in (9, "1", None, True):
        with pytest.raises(ValidationFailed, match="subscription_id"):
            store.set_subscription_active(number, False)  # type: ignore[arg-type]
    with pytest.raises(ValidationFailed, match="active"):
        store.set_subscription_active(1, "no")  # type: ignore[arg-type]


# -- roles, and the path -------------------------------------------------------------------


@pytest.mark.shows("engine 4.1")
@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.BROADCAST])
@pytest.mark.parametrize("role", [ParticipantRole.OBSERVER, ParticipantRole.MEMBER])
def test_who_joins_says_as_what(store: CommStore, kind: ChannelType, role: ParticipantRole) -> None:
    channel = channel_of(store, kind, "lead")
    joined = store.join_channel(channel.id, "bob", role=role)
    assert joined.participants[-1].role is role
    assert routed(store, channel, "lead") == ("bob",)
    assert store.join_channel(channel.id, "bob", role=role) == joined


@pytest.mark.shows("engine 4.1")
def test_a_channel_has_the_owner_that_it_has(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "lead")
    with pytest.raises(ValidationFailed, match=r"role: .*lead owns channel c"):
        store.join_channel(channel.id, "bob", role=ParticipantRole.OWNER)
    with pytest.raises(ValidationFailed, match="role: 7 is not"):
        store.join_channel(channel.id, "bob", role=7)  # type: ignore[arg-type]
    assert not store.is_participant(channel.id, "bob")


def test_a_store_knows_its_path(store: CommStore, tmp_path: Path) -> None:
    assert store.path is None
    path = tmp_path / "it.acomm"
    with CommStore.open(str(path)) as opened:
        assert opened.path == str(path)


# -- values --------------------------------------------------------------------------------


def handed_out(store: CommStore) -> dict[str, Message]:
    """A message with metadata, by each way to get one."""
    channel = channel_of(store, ChannelType.GROUP, "lead", "bob", delivery=AT_LEAST_ONCE)
    given = {"relay_id": "r-1", "n": 1}
    sent = send(store, channel, "lead", MessageType.COMMAND, metadata=given)
    given["n"] = 2  # the caller's own stays its own
    found = {
        "sent": sent,
        "got": store.get_message(sent.id),
        "by_relay_id": store.engine.messages.find_by_relay_id("r-1"),
        "queried": store.query_messages().messages[0],
        "searched": store.search("hi")[0],
        "thread": store.get_thread(sent.correlation_id or "")[0],
        "received": store.receive_messages(channel.id, "bob")[0],
        "answer": store.acknowledge_message(sent.id, "bob", "completed"),
    }
    return {way: message for way, message in found.items() if message is not None}


@pytest.mark.shows("engine 1.14")
def test_metadata_that_is_handed_out_does_not_change(store: CommStore, clock: FakeClock) -> None:
    ways = handed_out(store)
    assert len(ways) == 8
    before = store.snapshot()
    for way, message in ways.items():
        metadata = message.metadata
        assert metadata is not None, way
        for change in (
            lambda m: m.update(n=3),
            lambda m: m.pop("n", None),
            lambda m: m.clear(),
            lambda m: m.setdefault("x", 1),
            lambda m: m.popitem(),
            lambda m: m.__setitem__("n", 3),
            lambda m: m.__delitem__("n"),
            lambda m: m.__ior__({"n": 3}),
        ):
            with pytest.raises(TypeError, match="metadata of a message is read-only"):
                change(metadata)
        assert msgspec.json.decode(msgspec.json.encode(metadata)) == metadata
        mine = copy.copy(metadata)
        mine["n"] = 9
        assert metadata.get("n") != 9
    assert ways["sent"].metadata == {"relay_id": "r-1", "n": 1}
    assert store.snapshot() == before
    assert reopened(store, clock).snapshot() == before
