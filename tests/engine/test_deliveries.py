"""Receiving: what is new to a participant, by channel and filter; queues across a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relay.acomm.model import (
    Channel,
    DeliveryState,
    MessageFilter,
    MessageType,
    Priority,
    SortField,
    SortOrder,
)
from relay.base.errors import ChannelNotFound, NotParticipant
from relay.commstore.store import CommStore
from tests.engine.support import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    NOW_S,
    accept,
    after,
    group_of,
    reopened,
    send,
    standing,
)
from tests.fakes import FakeClock


def group(store: CommStore, name: str = "c", **config: object) -> Channel:
    return group_of(store, "lead", "worker", name=name, **config)


def texts(
    store: CommStore,
    channel_id: int | None = None,
    filter: MessageFilter | None = None,
    peek: bool = False,
) -> list[str]:
    """What the worker receives."""
    found = store.receive_messages(channel_id, "worker", filter, peek)
    return [message.content.decode() for message in found]


# -- which channel -------------------------------------------------------------------------


@pytest.mark.shows("engine 2.1")
def test_of_one_channel_or_of_all(store: CommStore) -> None:
    one, two = group(store, "one"), group(store, "two")
    for channel, text in ((one, "1a"), (two, "2a"), (one, "1b")):
        send(store, channel, "lead", content=text)
    assert texts(store, one.id) == ["1a", "1b"]
    assert texts(store) == ["2a"]
    assert texts(store) == []


def test_a_channel_is_for_who_takes_part(store: CommStore) -> None:
    channel = group(store)
    send(store, channel, "lead", content="hi")
    with pytest.raises(NotParticipant, match="eve is not a participant of channel c"):
        store.receive_messages(channel.id, "eve")
    with pytest.raises(ChannelNotFound, match="7"):
        store.receive_messages(7, "worker")
    assert store.receive_messages(None, "eve") == []
    store.leave_channel(channel.id, "worker")
    with pytest.raises(NotParticipant):
        store.receive_messages(channel.id, "worker")


# -- a filter ------------------------------------------------------------------------------

ORDERS = [
    ({}, "b d a c e"),
    ({"sort_by": SortField.CREATED_AT}, "d b e c a"),
    ({"sort_order": SortOrder.DESCENDING}, "d b e c a"),
    ({"sort_order": SortOrder.ASCENDING}, "b d a c e"),
    ({"sort_by": SortField.SENDER, "sort_order": SortOrder.ASCENDING}, "d b a e c"),
    ({"sort_by": SortField.MESSAGE_TYPE, "sort_order": SortOrder.DESCENDING}, "d b e c a"),
    ({"sort_by": SortField.PRIORITY, "sort_order": SortOrder.DESCENDING}, "e c a d b"),
    ({"sort_by": SortField.PRIORITY, "sort_order": SortOrder.ASCENDING}, "b d a c e"),
]


def five(store: CommStore, **config: object) -> Channel:
    """a to e, one a second, of two senders; b and d are of high priority."""
    channel = group(store, **config)
    store.join_channel(channel.id, "boss")
    for text, sender, kind, priority in (
        ("a", "boss", MessageType.TEXT, Priority.NORMAL),
        ("b", "lead", MessageType.TEXT, Priority.HIGH),
        ("c", "lead", MessageType.TEXT, Priority.NORMAL),
        ("d", "boss", MessageType.NOTIFICATION, Priority.HIGH),
        ("e", "boss", MessageType.NOTIFICATION, Priority.NORMAL),
    ):
        send(store, channel, sender, kind, text, priority=priority)
        store.engine.clock.advance(1)  # type: ignore[attr-defined]
    return channel


def queried(store: CommStore, wanted: MessageFilter, **options: bool) -> list[str]:
    found = store.query_messages(wanted, **options).messages
    return [message.content.decode() for message in found]


@pytest.mark.shows("engine 2.2", "engine 2.3")
@pytest.mark.parametrize(("order", "came"), ORDERS)
def test_an_order_is_in_a_priority_and_a_limit_takes_the_first(
    store: CommStore, order: dict[str, Any], came: str
) -> None:
    five(store)
    if order:  # without one a query begins with the newest
        assert queried(store, MessageFilter(**order)) == came.split()
    wanted = MessageFilter(limit=2, **order)
    assert texts(store, filter=wanted) == came.split()[:2]
    assert texts(store, filter=MessageFilter(**order)) == came.split()[2:]


@pytest.mark.parametrize(("grouped", "came"), [(True, "d b e"), (False, "e d c")])
def test_a_query_may_leave_priorities_alone(store: CommStore, grouped: bool, came: str) -> None:
    five(store)
    assert queried(store, MessageFilter(limit=3), grouped=grouped) == came.split()


def test_where_a_channel_heeds_no_priority_nothing_is_grouped(store: CommStore) -> None:
    five(store, priority_ordering=False)
    assert queried(store, MessageFilter()) == ["e", "d", "c", "b", "a"]
    newest = MessageFilter(sort_order=SortOrder.DESCENDING, limit=2)
    assert texts(store, filter=newest) == ["e", "d"]
    assert texts(store) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (MessageFilter(), ["go", "stop", "deploy"]),
        (MessageFilter(sender="lead"), ["go", "deploy"]),
        (MessageFilter(topic_pattern="build.*"), ["stop"]),
        (MessageFilter(sender="lead", content_pattern="o$"), ["go"]),
        (MessageFilter(channel_ids=(2,)), []),
        (MessageFilter(before=NOW_S + 1), ["go", "stop"]),
    ],
)
def test_a_filter_takes_what_it_names_and_leaves_the_rest(
    store: CommStore, clock: FakeClock, wanted: MessageFilter, found: list[str]
) -> None:
    channel = group(store)
    store.join_channel(channel.id, "other")
    send(store, channel, "lead", content="go", priority=Priority.HIGH)
    send(store, channel, "other", content="stop", topic="build.ok")
    clock.advance(1)
    send(store, channel, "lead", MessageType.COMMAND, "deploy")
    assert texts(store, filter=wanted, peek=True) == found
    assert texts(store, channel.id, wanted) == found
    assert texts(store) == [text for text in ("go", "stop", "deploy") if text not in found]


# -- peeking, and what is over -------------------------------------------------------------


def test_peeking_is_no_event(store: CommStore) -> None:
    number = send(store, group(store), "lead", content="hi").id
    before = store.snapshot()
    assert texts(store, peek=True) == texts(store, peek=True) == ["hi"]
    assert store.snapshot() == before
    assert texts(store) == ["hi"]
    assert standing(store, number) == {"worker": DeliveryState.RECEIVED}


def test_the_ttl_passes_for_who_has_not_received(store: CommStore, clock: FakeClock) -> None:
    channel = group(store)
    store.join_channel(channel.id, "late")
    number = send(store, channel, "lead", content="hi", ttl=10).id
    clock.advance(9.999)
    assert texts(store) == ["hi"]
    clock.advance(0.001)
    assert store.receive_messages(None, "late") == []
    assert standing(store, number) == {
        "worker": DeliveryState.RECEIVED,
        "late": DeliveryState.EXPIRED,
    }


def test_beyond_a_limit_no_ttl_is_looked_at(store: CommStore, clock: FakeClock) -> None:
    channel = group(store)
    numbers = [send(store, channel, "lead", content=text, ttl=10).id for text in ("a", "c")]
    send(store, channel, "lead", content="b", priority=Priority.HIGH)
    clock.advance(10)
    assert texts(store, filter=MessageFilter(limit=1)) == ["b"]
    assert standing(store, numbers[0]) == {"worker": DeliveryState.DELIVERED}
    assert texts(store, filter=MessageFilter(limit=1)) == []
    assert [standing(store, one) for one in numbers] == [{"worker": DeliveryState.EXPIRED}] * 2


def test_a_message_delivered_again_keeps_its_place(store: CommStore, clock: FakeClock) -> None:
    channel = group(store, delivery=AT_LEAST_ONCE, ack_timeout=1)
    first = send(store, channel, "lead", content="first").id
    assert texts(store) == ["first"]
    after(store, 1)
    send(store, channel, "lead", content="second")
    clock.advance(1)
    while not any(again.message.id == first for again in store.tick()):
        clock.advance(1)
    assert texts(store, filter=MessageFilter(limit=1)) == ["first"]
    assert texts(store, channel.id) == ["second"]


# -- across a restart ----------------------------------------------------------------------


def test_a_queue_holds_what_is_not_received(store: CommStore, clock: FakeClock) -> None:
    channel = group(store)
    send(store, channel, "lead", content="taken")
    assert texts(store) == ["taken"]
    send(store, channel, "lead", content="new")
    accept(store, channel.id, "lead", MessageType.TEXT, "not there yet")
    opened = reopened(store, clock)
    assert texts(opened) == texts(store) == ["new"]
    assert texts(reopened(opened, clock)) == []


@pytest.mark.parametrize("delivery", [AT_LEAST_ONCE, EXACTLY_ONCE])
@pytest.mark.parametrize("received", [False, True])
def test_one_that_waits_is_received_exactly_when_it_was_not(
    store: CommStore, clock: FakeClock, delivery: int, received: bool
) -> None:
    number = send(store, group(store, delivery=delivery, ack_timeout=10), "lead").id
    if received:
        assert texts(store) == ["hi"]
    after(store, 10.1)
    assert standing(store, number) == {"worker": DeliveryState.WAITING}
    opened = reopened(store, clock)
    expected = [] if received else ["hi"]
    assert texts(opened, peek=True) == texts(store, peek=True) == expected
    clock.advance(1.1)
    assert [r.attempt for r in opened.tick()] == [r.attempt for r in store.tick()]
    assert opened.snapshot() == store.snapshot()
    assert texts(opened) == texts(store)


def test_a_delivery_without_its_message_is_none(store: CommStore, clock: FakeClock) -> None:
    send(store, group(store), "lead")
    file = msgspec.structs.replace(store.snapshot().file(), messages=())
    assert CommStore.load(clock, file).receive_messages(None, "worker") == []


def test_a_clock_set_back_changes_no_order(
    store: CommStore, clock: FakeClock, group: Channel
) -> None:
    first = send(store, group, "a")
    clock.jump(-100)
    second = send(store, group, "a")
    opened = CommStore.load(clock, store.snapshot().file())
    for one in (store, opened):
        assert [m.id for m in one.receive_messages(None, "b")] == [first.id, second.id]
