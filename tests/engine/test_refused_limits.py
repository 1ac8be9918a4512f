"""Values that no file holds: refused where they come in, so that the store can always be written.

A store that took one of them could not be flushed any more, or not be opened again.
"""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from relay.acomm.model import (
    ChannelState,
    ChannelType,
    MessageFilter,
    MessageStatus,
    MessageType,
    SortField,
)
from relay.base.errors import ValidationFailed
from relay.engine.commstore import CommStore
from tests.engine.support import channel_of, reopened, send
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 1.5", "engine 1.8")

HALF = "\ud800"  # of a surrogate pair


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"signature": "text"}, "signature"),
        ({"signature": b"s" * 65}, "signature"),
        ({"correlation_id": uuid.uuid4()}, "correlation_id"),
        ({"topic": HALF}, "topic"),
        ({"topic": 5}, "topic"),
        ({"content": None}, "content"),
        ({"content": 5}, "content"),
        ({"content": bytearray(b"text")}, "content"),
        ({"content": b"caf\xe9"}, "content"),  # Latin-1
        ({"metadata": [("key", 1)]}, "metadata"),
        ({"metadata": "text"}, "metadata"),
        ({"ttl": True}, "ttl"),
        ({"ttl": "5"}, "ttl"),
        ({"priority": 2.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": MessageType.COMMAND}, "priority"),
        ({"kind": True}, "message_type"),
        ({"recipients": ["b", HALF]}, "recipients"),
        ({"recipients": [5]}, "recipients"),
        ({"recipients": ["x" * 129]}, "recipients"),
        ({"also": [HALF]}, "also"),
    ],
)
def test_a_message_that_could_not_be_written_is_not_taken(
    store: CommStore, clock: FakeClock, fields: dict[str, Any], field: str
) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    before = store.snapshot()
    with pytest.raises(ValidationFailed) as caught:
        send(store, channel, "a", **fields)
    assert caught.value.field == field
    assert store.snapshot() == before
    send(store, channel, "a", signature=b"s" * 64, recipients=["b", "b"], also=["x" * 128])
    reopened(store, clock)


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": -1},
        {"limit": 2**64},
        {"offset": -1},
        {"after": -1},
        {"after": "yesterday"},
        {"before": 2**64},
        {"channel_ids": (-1,)},
        {"channel_ids": ("c",)},
        {"message_types": (8,)},
        {"status": ("Sent",)},
        {"priority": (5,)},
        {"sender": 5},
        {"sender": HALF},
        {"correlation_id": HALF},
        {"topic_pattern": HALF},
        {"topic_pattern": 5},
        {"content_pattern": HALF},
        {"content_pattern": "(" * 5000},
        {"sort_by": 4},
        {"sort_order": "up"},
        {"include_archived": "no"},
    ],
)
def test_a_filter_that_could_not_be_written_is_not_taken(
    store: CommStore, clock: FakeClock, fields: dict[str, Any]
) -> None:
    channel = store.create_channel("p", ChannelType.PUB_SUB, "a")
    store.publish(channel.id, "a", "t", "something to look at")
    wanted = MessageFilter(**fields)
    before = store.snapshot()
    for ask in (
        lambda: store.subscribe(channel.id, "b", "t.#", wanted),
        lambda: store.query_messages(wanted),
        lambda: store.receive_messages(None, "a", wanted),
    ):
        with pytest.raises(ValidationFailed) as caught:
            ask()
        assert caught.value.field == next(iter(fields))
        assert len(str(caught.value)) < 400
    assert store.snapshot() == before


def test_a_filter_at_its_limits_is_kept_as_a_file_has_it(
    store: CommStore, clock: FakeClock
) -> None:
    channel = store.create_channel("p", ChannelType.PUB_SUB, "a")
    most = 2**64 - 1
    wanted = MessageFilter(
        channel_ids=[0, most],  # type: ignore[arg-type]
        message_types=(0,),  # type: ignore[arg-type]
        after=0,
        before=most,
        status=[1],  # type: ignore[arg-type]
        limit=0,
        offset=most,
        sort_by=3,  # type: ignore[arg-type]
    )
    kept = store.subscribe(channel.id, "b", "t.#", wanted).filter
    assert kept is not None
    assert (kept.channel_ids, kept.message_types) == ((0, most), (MessageType.TEXT,))
    assert (kept.status, kept.sort_by) == ((MessageStatus.SENT,), SortField.MESSAGE_TYPE)
    reopened(store, clock)


def test_a_channel_has_a_type_and_a_state(store: CommStore, clock: FakeClock) -> None:
    before = store.snapshot()
    for kind in (4, "Group", None):
        with pytest.raises(ValidationFailed, match=r"channel_type: .* is not a number from 0 to 3"):
            store.create_channel("c", kind, "a")  # type: ignore[arg-type]
    assert store.snapshot() == before
    direct = store.create_channel("c", 0, "a")  # type: ignore[arg-type]
    assert direct.channel_type is ChannelType.DIRECT
    with pytest.raises(ValidationFailed, match="state: 9 is not a number from 0 to 3"):
        store.set_channel_state(direct.id, 9)  # type: ignore[arg-type]
    assert store.set_channel_state(direct.id, 1).state is ChannelState.PAUSED  # type: ignore[arg-type]
    reopened(store, clock)


@pytest.mark.parametrize("name", [HALF, None, 5])
def test_a_name_that_is_none(store: CommStore, name: Any) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    for call in (
        lambda: store.create_channel(name, ChannelType.GROUP, "a"),
        lambda: store.join_channel(channel.id, name),
        lambda: store.create_channel("d", ChannelType.GROUP, name),
        lambda: store.send_message(channel.id, name, MessageType.TEXT, "x"),
    ):
        with pytest.raises(ValidationFailed):
            call()


@pytest.mark.parametrize("pattern", [None, 5, ["a"]])
def test_a_pattern_that_is_none(store: CommStore, pattern: Any) -> None:
    channel = store.create_channel("p", ChannelType.PUB_SUB, "a")
    with pytest.raises(ValidationFailed, match=r"^topic_pattern: expected a string, got"):
        store.subscribe(channel.id, "b", pattern)
    assert not store.is_participant(channel.id, "b")
