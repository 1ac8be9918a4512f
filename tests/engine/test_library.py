"""A program that uses the store: what it gives is looked at, what it gets does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from relay.acomm import store_file
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import ArchiveInfo, ChannelConfig, ChannelState, SortField, SortOrder
from relay.base.errors import ChannelNotFound, RelayError, ValidationFailed
from relay.commstore import (
    Channel,
    ChannelType,
    CommStore,
    Message,
    MessageFilter,
    MessageType,
    ParticipantRole,
    Priority,
)
from relay.engine.archive_files import ArchiveFiles
from tests.engine.support import (
    AT_LEAST_ONCE,
    NOW_S,
    channel_of,
    group_of,
    new_store,
    refused,
    reopened,
    routed,
    send,
)
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 1.8")

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
    channel = group_of(store, "lead")
    with pytest.raises(ValidationFailed, match=r"role: .*lead owns channel c"):
        store.join_channel(channel.id, "bob", role=ParticipantRole.OWNER)
    with pytest.raises(ValidationFailed, match="role: 7 is not"):
        store.join_channel(channel.id, "bob", role=7)  # type: ignore[arg-type]
    assert not store.is_participant(channel.id, "bob")


# -- values --------------------------------------------------------------------------------


def handed_out(store: CommStore) -> dict[str, Message]:
    """A message with metadata, by each way to get one."""
    channel = group_of(store, "lead", "bob", delivery=AT_LEAST_ONCE)
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


VALUES: tuple[Any, ...] = (
    None, -1, 2**64, 1.5, float("nan"), True, "", "\ud800", "x" * 300, b"\xff", [], ["a"], [[]],
    {}, {"a": object()}, object(), bytearray(b"x"), {"b"},
)  # fmt: skip
GROUP, TOPICS = 1, 2
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "acknowledge_message": ((1, "b", "received", "text"), {}),
    "archive": ((1,), {"before": 5}),
    "broadcast": ((GROUP, "a", "hi"), {}),
    "engine.messages.find_by_relay_id": (("17-ab",), {}),
    "configure_channel": (
        (GROUP,),
        {name: None for name in (*ChannelConfig.__struct_fields__, "flush", "tags", "max_pending")},
    ),
    "create_channel": (
        ("new", ChannelType.GROUP, "a", ChannelConfig()),
        {"description": "text", "tags": ()},
    ),
    "discard_dead_letter": ((1,), {}),
    "get_channel": ((GROUP,), {}),
    "get_channel_by_name": (("group",), {}),
    "get_message": ((1,), {}),
    "get_thread": (("id",), {}),
    "engine.deliveries.is_held": ((1,), {}),
    "engine.deliveries.is_answered": ((1, "b"), {}),
    "join_channel": ((GROUP, "z"), {"role": None}),
    "leave_channel": ((GROUP, "b"), {}),
    "message_count": ((GROUP,), {}),
    "publish": ((TOPICS, "a", "x.y", "hi"), {}),
    "purge_dead_letters": ((5,), {}),
    "query_messages": ((MessageFilter(),), {}),
    "engine.deliveries.receive": ((1, "b"), {}),
    "receive_messages": ((GROUP, "b", MessageFilter()), {}),
    "recipients": ((1,), {}),
    "replay_dead_letter": ((1,), {}),
    "search": (("x", 5), {}),
    "send_message": (
        (GROUP, "a", MessageType.TEXT, "hi"),
        {
            name: None
            for name in (
                "topic", "correlation_id", "priority", "metadata", "ttl", "signature", "recipients",
                "also",
            )
        },
    ),
    "send_query": ((GROUP, "a", "what?", 5), {}),
    "send_response": ((GROUP, "b", "id", "so"), {}),
    "set_channel_state": ((GROUP, ChannelState.PAUSED), {}),
    "set_identities": (({"b": "aid_1"},), {}),
    "set_subscription_active": ((1, False), {}),
    "subscribe": ((TOPICS, "c", "y.*", MessageFilter()), {}),
    "subscriptions": ((TOPICS, "b"), {}),
    "tick": ((5,), {}),
    "unsubscribe": ((TOPICS, "b", "x.#"), {}),
}  # fmt: skip


def prepared() -> CommStore:
    """A group and topics; b has not answered a command."""
    store = new_store()
    channel = group_of(store, "a", "b", name="group")
    store.subscribe(channel_of(store, ChannelType.PUB_SUB, "a", name="topics").id, "b", "x.#")
    send(store, channel, "a", MessageType.COMMAND)
    return store


def attempts(name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Its arguments, each in turn replaced by each value."""
    args, named = CALLS[name]
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for value in VALUES:
        found += [((*args[:n], value, *args[n + 1 :]), {}) for n in range(len(args))]
        found += [(args, {key: value}) for key in named]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_whatever_it_is_given_it_says_so_or_does_it(name: str) -> None:
    store = prepared()
    for args, named in attempts(name):
        before = store.snapshot()
        try:
            attrgetter(name)(store)(*args, **named)
        except RelayError as exc:
            assert "\n" not in str(exc)
            assert store.snapshot() == before, (args, named)
        else:
            store_file.encode(store.snapshot().file())
            store.query_messages()
            store = prepared()


@pytest.mark.parametrize("field", MessageFilter.__struct_fields__)
def test_a_filter_of_anything_says_so_or_finds(field: str) -> None:
    store = prepared()
    for wanted in (MessageFilter(**{field: value}) for value in VALUES):
        for ask, *given in (
            (store.query_messages,),
            (store.receive_messages, GROUP, "b"),
            (store.subscribe, TOPICS, "c", "y"),
        ):
            try:
                ask(*given, wanted)
            except ValidationFailed as exc:
                assert exc.field == field


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda s: s.send_message(GROUP, "a", MessageType.TEXT, "x", recipients="bob"),
            "expected a list",
        ),
        (lambda s: s.set_subscription_active(True, False), "subscription_id"),
        (lambda s: s.set_subscription_active(1, "no"), "active"),
        (lambda s: s.send_query(GROUP, "a", "what?", "5"), "timeout_s"),
        (lambda s: s.send_query(GROUP, "a", "what?", 0), "timeout_s"),
        (lambda s: s.acknowledge_message(1, "b", "completed", b"done"), "text"),
        (lambda s: s.unsubscribe(9, "b"), "channel 9 does not exist"),
        (lambda s: s.join_channel(True, "c"), "channel True does not exist"),
        (lambda s: s.tick(2**70), "now_ns"),
    ],
)
def test_what_was_taken_for_something_else(call: Callable[[CommStore], object], says: str) -> None:
    store = prepared()
    error = refused(store, lambda: call(store))
    assert isinstance(error, (ValidationFailed, ChannelNotFound)) and says in str(error)


def test_a_query_with_plain_numbers_is_the_same_with_archives(tmp_path: Any) -> None:
    """sort_by and sort_order may be given as the numbers that they are in a file."""
    store = prepared()
    send(store, store.get_channel(GROUP), "a", priority=Priority.LOW)
    store.engine.archives.files = ArchiveFiles(str(tmp_path))
    archived = prepared().snapshot()
    snapshot = StoreSnapshot(archived.values, archived.state)
    size = store.engine.archives.files.write("d/1.acomm", snapshot)
    store.state.archives = (ArchiveInfo("d/1.acomm", 1, 1, 1, NOW_S, NOW_S, 0, size),)
    named = MessageFilter(sort_by=SortField.PRIORITY, sort_order=SortOrder.DESCENDING)
    plain = MessageFilter(sort_by=1, sort_order=1)  # type: ignore[arg-type]
    assert store.query_messages(plain) == store.query_messages(named)
    assert [m.priority for m in store.query_messages(plain).messages] == [3, 2, 2]
    with pytest.raises(ValidationFailed):
        store.query_messages(MessageFilter(limit=-1))
