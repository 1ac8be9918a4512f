"""Calls with arguments that are none: one error that says which, and a store as it was before.

Every command is given every value in the place of every argument, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from relay.acomm import store_file
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import (
    ArchiveInfo,
    ChannelConfig,
    ChannelState,
    ChannelType,
    MessageFilter,
    MessageType,
    Priority,
    SortField,
    SortOrder,
)
from relay.base.errors import ChannelNotFound, RelayError, ValidationFailed
from relay.engine.archive_files import ArchiveFiles
from relay.engine.commstore import CommStore
from tests.engine.support import NOW_S, channel_of, new_store, send, standing

pytestmark = pytest.mark.shows("engine 1.8")

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
    channel = channel_of(store, ChannelType.GROUP, "a", "b", name="group")
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
@pytest.mark.parametrize("value", VALUES)
def test_a_filter_of_anything_says_so_or_finds(field: str, value: Any) -> None:
    wanted = MessageFilter(**{field: value})
    for ask in (
        lambda store: store.query_messages(wanted),
        lambda store: store.receive_messages(GROUP, "b", wanted),
        lambda store: store.subscribe(TOPICS, "c", "y", wanted),
    ):
        try:
            ask(prepared())
        except ValidationFailed as exc:
            assert exc.field == field


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda s: s.send_message(GROUP, "a", MessageType.TEXT, "x", recipients="bob"),
            "expected a list",
        ),
        (lambda s: s.send_message(GROUP, "a", MessageType.TEXT, "x", ttl=True), "ttl"),
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
    before = store.snapshot()
    with pytest.raises((ValidationFailed, ChannelNotFound), match=says):
        call(store)
    assert store.snapshot() == before


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


def test_acknowledging_twice_and_out_of_order_changes_nothing_that_stands() -> None:
    store = prepared()
    for status in ("completed", "received", "completed", "failed"):
        store.acknowledge_message(1, "b", status)
    assert {state.label for state in standing(store, 1).values()} == {"Acknowledged"}
