"""Stage 1 of sending: every rule by itself, and that a refusal leaves the store as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay.acomm.model import ChannelState, ChannelType, Message, MessageType, Priority
from relay.base.errors import (
    ChannelNotFound,
    ChannelUnavailable,
    CommError,
    DuplicateChannel,
    NotParticipant,
    ValidationFailed,
)
from relay.engine import rules
from relay.engine.commstore import CommStore
from tests.engine.support import (
    AT_LEAST_ONCE,
    OTHER,
    UUID,
    accept,
    channel_of,
    new_store,
    send,
    store_with,
)

pytestmark = pytest.mark.shows("engine 1.6", "engine 1.7")


def unchanged(store: CommStore, call: Callable[[], object]) -> CommError:
    """The call is refused in one line, and nothing is kept of it."""
    before, sequence = store.snapshot(), store.sequence
    with pytest.raises(CommError) as caught:
        call()
    assert store.snapshot() == before
    assert store.sequence == sequence
    assert "\n" not in str(caught.value)
    return caught.value


def refused(store: CommStore, field: str, call: Callable[[], object]) -> ValidationFailed:
    error = unchanged(store, call)
    assert isinstance(error, ValidationFailed)
    assert error.field == field
    assert str(error).startswith(f"{field}: ")
    return error


# -- sender, channel, participant ----------------------------------------------------------


@pytest.mark.shows("engine 1.1")
@pytest.mark.parametrize("sender", ["", "a b", "é", "a/b", "x" * 129, "a\n"])
def test_the_sender_is_a_participants_id(store: CommStore, sender: str) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    error = refused(store, "sender", lambda: send(store, group, sender))
    assert error.value_length == len(sender.encode())


def test_a_sender_of_128_characters_is_the_longest(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "x" * 128)
    assert send(store, group, "x" * 128).sender == "x" * 128


def test_the_channel_must_be_there(store: CommStore) -> None:
    error = unchanged(store, lambda: store.send_message(7, "a", MessageType.TEXT, "hi"))
    assert isinstance(error, ChannelNotFound)
    assert "7" in str(error)


@pytest.mark.shows("engine 1.2")
@pytest.mark.parametrize("state", [ChannelState.PAUSED, ChannelState.DRAINING, ChannelState.CLOSED])
def test_the_channel_must_be_active(state: ChannelState) -> None:
    store = store_with(state)
    error = unchanged(store, lambda: store.send_message(1, "a", MessageType.TEXT, "hi"))
    assert isinstance(error, ChannelUnavailable)
    assert str(error) == f"channel c is {state.label}"


def test_an_active_channel_takes_it() -> None:
    assert store_with(ChannelState.ACTIVE).send_message(1, "a", MessageType.TEXT, "hi").id == 1


@pytest.mark.shows("engine 1.2")
@pytest.mark.parametrize("kind", list(ChannelType))
def test_the_sender_must_take_part(store: CommStore, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    error = unchanged(store, lambda: send(store, channel, "eve", topic="t"))
    assert isinstance(error, NotParticipant)


@pytest.mark.shows("engine 1.2")
def test_in_a_broadcast_channel_the_owner_alone_sends(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.BROADCAST, "a", "b", "c")
    error = unchanged(store, lambda: send(store, channel, "b"))
    assert isinstance(error, NotParticipant)
    assert "its owner a" in str(error)
    query = send(store, channel, "a", MessageType.QUERY, correlation_id=UUID)
    answer = accept(
        store, channel.id, "b", MessageType.RESPONSE, "yes", recipients=["a"], correlation_id=UUID
    )
    assert (query.id, answer.id) == (1, 2)


def test_a_direct_channel_needs_its_second(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.DIRECT, "a")
    assert (
        "has no second participant"
        in refused(store, "channel", lambda: send(store, channel, "a")).reason
    )


# -- content -------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", b""])
def test_content_is_never_empty(store: CommStore, content: str | bytes) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    error = refused(store, "content", lambda: send(store, group, "a", content=content))
    assert error.value_length == 0


def test_content_is_utf_8() -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    for content in (b"na\xefve", b"\xed\xa0\x80", b"caf\xc3"):
        with pytest.raises(ValidationFailed, match="not UTF-8") as caught:
            send(store, channel, "a", content=content)
        assert caught.value.field == "content"
    assert send(store, channel, "a", content="naïve".encode()).content == b"na\xc3\xafve"


@pytest.mark.shows("engine 1.3")
def test_content_has_the_channels_limit_in_bytes(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b", max_message_size=10)
    assert send(store, group, "a", content="é" * 5).content == "é".encode() * 5
    error = refused(store, "content", lambda: send(store, group, "a", content="é" * 5 + "x"))
    assert error.reason == "Message content exceeds channel max_message_size (10 bytes)"
    assert error.value_length == 11


def test_no_channel_goes_above_a_mebibyte(store: CommStore) -> None:
    refused(
        store,
        "max_message_size",
        lambda: channel_of(store, ChannelType.GROUP, "a", name="other", max_message_size=2**20 + 1),
    )
    group = channel_of(store, ChannelType.GROUP, "a", "b", max_message_size=2**20)
    assert len(send(store, group, "a", content=b"x" * 1_048_576).content) == 1_048_576
    error = refused(store, "content", lambda: send(store, group, "a", content=b"x" * 1_048_577))
    assert "(1048576 bytes)" in error.reason


def test_content_that_is_no_text_is_refused(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    refused(store, "content", lambda: send(store, group, "a", content="\ud800"))


# -- topic, ttl, metadata, priority --------------------------------------------------------


@pytest.mark.parametrize("topic", ["", ".a", "a b", "*", "t" * 257])
@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.PUB_SUB])
def test_a_topic_keeps_its_rule_in_every_channel(
    store: CommStore, kind: ChannelType, topic: str
) -> None:
    channel = channel_of(store, kind, "a", "b")
    refused(store, "topic", lambda: send(store, channel, "a", topic=topic))


@pytest.mark.shows("engine 1.4")
def test_a_pubsub_channel_needs_a_topic(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "b")
    assert "needs a TOPIC" in refused(store, "topic", lambda: send(store, channel, "a")).reason
    assert send(store, channel, "a", topic="build.ok").topic == "build.ok"
    assert send(store, channel_of(store, ChannelType.GROUP, "a", name="g"), "a").topic is None


@pytest.mark.parametrize("ttl", [0, -1])
def test_a_ttl_is_above_0(store: CommStore, ttl: int) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    refused(store, "ttl", lambda: send(store, group, "a", ttl=ttl))
    assert send(store, group, "a", ttl=1).ttl == 1


GOOD_METADATA: list[dict[str, Any]] = [
    {},
    {"k" * 128: "v" * 4096},
    {"é" * 128: "é" * 2048},
    {str(number): number for number in range(64)},
    {"least": -(2**63), "most": 2**63 - 1, "f": 1.5, "b": True, "n": None},
]
BAD_METADATA: list[dict[str, Any]] = [
    {"k" * 129: ""},
    {"k": "v" * 4097},
    {"k": "é" * 2049},
    {str(number): number for number in range(65)},
    {"k": 2**63},
    {"k": -(2**63) - 1},
    {"k": "\ud800"},
    {"\ud800": "v"},
]


@pytest.mark.parametrize("metadata", GOOD_METADATA)
def test_metadata_within_its_limits_is_kept(store: CommStore, metadata: dict[str, Any]) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    assert send(store, group, "a", metadata=metadata).metadata == metadata


@pytest.mark.parametrize("metadata", BAD_METADATA)
def test_metadata_that_no_file_could_hold_is_refused(
    store: CommStore, metadata: dict[str, Any]
) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    error = unchanged(store, lambda: send(store, group, "a", metadata=metadata))
    assert isinstance(error, ValidationFailed)
    assert error.field.startswith("metadata")


@pytest.mark.parametrize("priority", list(Priority))
def test_every_priority_is_taken(store: CommStore, priority: Priority) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    assert send(store, group, "a", priority=priority).priority is priority


# -- correlation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "correlation",
    [
        "",
        "x",
        UUID[:-1],
        UUID.replace("-41d1-", "-11d1-"),
        UUID.replace("-80b4-", "-c0b4-"),
        UUID + "0",
    ],
)
def test_a_correlation_id_is_a_uuid_4(store: CommStore, correlation: str) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    refused(store, "correlation_id", lambda: send(store, group, "a", correlation_id=correlation))
    assert send(store, group, "a", correlation_id=UUID).correlation_id == UUID


def answer(store: CommStore, kind: MessageType, correlation: str | None) -> Message:
    return accept(store, 1, "b", kind, "yes", recipients=["a"], correlation_id=correlation)


@pytest.mark.shows("engine 1.4")
@pytest.mark.parametrize("asked", sorted(set(MessageType) - rules.ANSWERS))
def test_a_response_answers_a_query(store: CommStore, asked: MessageType) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    send(store, group, "a", asked, correlation_id=UUID)
    if asked is MessageType.QUERY:
        assert answer(store, MessageType.RESPONSE, UUID).correlation_id == UUID
        return
    error = refused(store, "correlation_id", lambda: answer(store, MessageType.RESPONSE, UUID))
    assert "existing Query" in error.reason


@pytest.mark.parametrize("kind", [MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT])
def test_an_answer_without_a_correlation_id_answers_nothing(
    store: CommStore, kind: MessageType
) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b")
    send(store, group, "a", MessageType.QUERY)
    refused(store, "correlation_id", lambda: answer(store, kind, None))
    refused(store, "correlation_id", lambda: answer(store, kind, OTHER))


@pytest.mark.shows("engine 1.4")
@pytest.mark.parametrize(
    ("asked", "metadata", "mode", "owed"),
    [
        (MessageType.COMMAND, None, {}, True),
        (MessageType.QUERY, None, {}, True),
        (MessageType.TEXT, None, {}, False),
        (MessageType.NOTIFICATION, {"delivery": "at-most-once"}, {}, False),
        (MessageType.TEXT, {"delivery": "at-least-once"}, {}, True),
        (MessageType.TEXT, {"delivery": "exactly-once"}, {}, True),
        (MessageType.TEXT, None, {"delivery": AT_LEAST_ONCE}, True),
    ],
)
def test_an_acknowledgment_answers_what_expects_one(
    store: CommStore,
    asked: MessageType,
    metadata: dict[str, Any] | None,
    mode: dict[str, Any],
    owed: bool,
) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b", **mode)
    message = send(store, group, "a", asked, correlation_id=UUID, metadata=metadata)
    assert store.engine.messages.expects_ack(message) is owed
    if owed:
        assert answer(store, MessageType.ACKNOWLEDGMENT, UUID).correlation_id == UUID
    else:
        refused(store, "correlation_id", lambda: answer(store, MessageType.ACKNOWLEDGMENT, UUID))


def test_an_acknowledgment_is_never_acknowledged(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a", "b", delivery=AT_LEAST_ONCE)
    send(store, group, "a", MessageType.COMMAND, correlation_id=UUID)
    assert not store.engine.messages.expects_ack(answer(store, MessageType.ACKNOWLEDGMENT, UUID))


# -- channels ------------------------------------------------------------------------------


@pytest.mark.shows("engine 4.3")
@pytest.mark.parametrize("name", ["", "a b", "/a", "a/", "a//b", "é", "c" * 129])
def test_a_channels_name_keeps_its_rule(store: CommStore, name: str) -> None:
    refused(store, "name", lambda: store.create_channel(name, ChannelType.GROUP, "a"))


@pytest.mark.parametrize("owner", ["", "a b", "x" * 129])
def test_an_owner_is_a_participants_id(store: CommStore, owner: str) -> None:
    refused(store, "owner", lambda: store.create_channel("c", ChannelType.GROUP, owner))


def test_a_channels_name_is_one_channels(store: CommStore) -> None:
    store.create_channel("team", ChannelType.GROUP, "a")
    error = unchanged(store, lambda: store.create_channel("team", ChannelType.PUB_SUB, "b"))
    assert isinstance(error, DuplicateChannel)
    store.create_channel("team/backend", ChannelType.GROUP, "a")


@pytest.mark.parametrize("name", ["", "a b", "x" * 129])
def test_who_joins_is_a_participant(store: CommStore, name: str) -> None:
    group = channel_of(store, ChannelType.GROUP, "a")
    refused(store, "participant", lambda: store.join_channel(group.id, name))


def test_a_direct_channel_has_two(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.DIRECT, "a", "b")
    error = refused(store, "participant", lambda: store.join_channel(channel.id, "c"))
    assert error.reason == "channel c is full: it is limited to 2 participants"


def test_a_channel_has_as_many_as_it_may(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.GROUP, "a", "b", max_participants=2)
    refused(store, "participant", lambda: store.join_channel(channel.id, "c"))
    store.leave_channel(channel.id, "b")
    store.join_channel(channel.id, "c")


def test_only_a_pubsub_channel_has_subscriptions(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a")
    refused(store, "channel", lambda: store.subscribe(group.id, "b", "build.#"))
    assert not store.is_participant(group.id, "b")


@pytest.mark.parametrize("pattern", ["", "#.a", "a..b", "a*"])
def test_a_bad_pattern_is_no_subscription_and_joins_nobody(store: CommStore, pattern: str) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    refused(store, "topic_pattern", lambda: store.subscribe(channel.id, "b", pattern))
    assert not store.is_participant(channel.id, "b")


def test_who_does_not_take_part_cannot_leave(store: CommStore) -> None:
    group = channel_of(store, ChannelType.GROUP, "a")
    assert isinstance(unchanged(store, lambda: store.leave_channel(group.id, "b")), NotParticipant)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get_channel(7),
        lambda store: store.join_channel(7, "a"),
        lambda store: store.leave_channel(7, "a"),
        lambda store: store.subscribe(7, "a", "#"),
    ],
)
def test_a_channel_that_is_not_there(store: CommStore, call: Callable[[CommStore], object]) -> None:
    assert isinstance(unchanged(store, lambda: call(store)), ChannelNotFound)
