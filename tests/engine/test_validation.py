"""What is refused: every rule by itself, in one line that names the field; nothing is kept of it.

A store that took a value that no file holds could not be flushed any more, or not be opened again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Priority,
    Retention,
    RetentionKind,
    SortField,
)
from relay.base.errors import (
    ChannelNotFound,
    DuplicateChannel,
    NotParticipant,
    ValidationFailed,
)
from relay.commstore.store import CommStore
from relay.engine import rules
from tests.engine.support import (
    AT_LEAST_ONCE,
    OTHER,
    UUID,
    accept,
    channel_of,
    group_of,
    refused,
    reopened,
    send,
)
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 1.5", "engine 1.6", "engine 1.7", "engine 1.8")

HALF = "\ud800"  # of a surrogate pair


def refused_field(
    store: CommStore, field: str, call: Callable[..., object], *given: Any, **named: Any
) -> ValidationFailed:
    error = refused(store, lambda: call(*given, **named), ValidationFailed)
    assert error.field.split()[0] == field
    assert str(error).startswith(f"{error.field}: ")
    return error


# -- sender, channel, participant ----------------------------------------------------------


def test_the_channel_must_be_there(store: CommStore) -> None:
    for call in (
        lambda: store.send_message(7, "a", MessageType.TEXT, "hi"),
        lambda: store.get_channel(7),
        lambda: store.join_channel(7, "a"),
        lambda: store.leave_channel(7, "a"),
        lambda: store.subscribe(7, "a", "#"),
        lambda: store.configure_channel(7, echo=True),
        lambda: store.set_channel_state(7, ChannelState.PAUSED),
        lambda: store.message_count(7),
    ):
        assert "7" in str(refused(store, call, ChannelNotFound))


@pytest.mark.shows("engine 1.1", "engine 1.2")
@pytest.mark.parametrize("kind", ChannelType)
def test_the_sender_must_take_part(store: CommStore, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    refused(store, lambda: send(store, channel, "eve", topic="t"), NotParticipant)
    refused(store, lambda: store.leave_channel(channel.id, "eve"), NotParticipant)
    for who in ("", "a b", "é", "a/b", "x" * 129, "a\n", HALF, None, 5):
        refused_field(store, "sender", send, store, channel, who, topic="t")


@pytest.mark.shows("engine 1.2")
def test_in_a_broadcast_channel_the_owner_alone_sends(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.BROADCAST, "a", "b", "c")
    assert "its owner a" in str(refused(store, lambda: send(store, channel, "b"), NotParticipant))
    query = send(store, channel, "a", MessageType.QUERY, correlation_id=UUID)
    assert (query.id, answer(store, MessageType.RESPONSE, UUID).id) == (1, 2)


def test_a_direct_channel_has_two(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.DIRECT, "a")
    error = refused_field(store, "channel", send, store, channel, "a")
    assert "has no second participant" in error.reason
    store.join_channel(channel.id, "b")
    error = refused_field(store, "participant", store.join_channel, channel.id, "c")
    assert error.reason == "channel c is full: it is limited to 2 participants"


def test_a_channel_has_as_many_as_it_may(store: CommStore) -> None:
    channel = group_of(store, "a", "b", max_participants=2)
    refused_field(store, "participant", store.join_channel, channel.id, "c")
    store.leave_channel(channel.id, "b")
    store.join_channel(channel.id, "c")


# -- what a message carries ----------------------------------------------------------------

GOOD: dict[str, tuple[Any, ...]] = {
    "content": ("naïve".encode(), "é" * 524_288, b"x" * 1_048_576),
    "topic": ("a", "a-b_9.C", "a.*.#", "a.b*", "t" * 256),
    "metadata": (
        {},
        {"k" * 128: "v" * 4096},
        {"é" * 128: "é" * 2048},
        {str(number): number for number in range(64)},
        {"least": -(2**63), "most": 2**63 - 1, "f": 1.5, "b": True, "n": None},
    ),
    "priority": (*Priority,),
    "ttl": (1, 2**64 - 1),
    "correlation_id": (UUID,),
    "signature": (b"s" * 64,),
    "recipients": (["b", "b"],),
    "also": (["x" * 128],),
}
BAD: dict[str, tuple[Any, ...]] = {
    "content": (
        *("", b"", HALF, None, 5, bytearray(b"text")),
        *(b"na\xefve", b"\xed\xa0\x80", b"caf\xc3", b"x" * 1_048_577),
    ),
    "topic": ("", ".a", "a b", "*", "t" * 257, HALF, 5),
    "metadata": (
        *([("key", 1)], "text", {5: "x"}, {"k": [1]}, {"k": b"x"}, {"k": HALF}, {HALF: "v"}),
        *({"k" * 129: ""}, {"k": "v" * 4097}, {"k": "é" * 2049}, {"k": 2**63}),
        *({"k": -(2**63) - 1}, {str(number): number for number in range(65)}),
    ),
    "priority": (5, "high", 2.0, True, MessageType.COMMAND),
    "ttl": (0, -1, 1.5, True, "5", 2**64),
    "correlation_id": (
        *("", "x", UUID[:-1], UUID + "0", uuid.UUID(UUID)),
        *(UUID.replace("-41d1-", "-11d1-"), UUID.replace("-80b4-", "-c0b4-")),
    ),
    "signature": ("text", b"s" * 65),
    "recipients": (["b", HALF], [5], ["x" * 129]),
    "also": ([HALF],),
}


@pytest.mark.parametrize("field", GOOD)
def test_within_its_limits_it_is_kept(store: CommStore, group: Channel, field: str) -> None:
    for value in GOOD[field]:
        sent = send(store, group, "a", **{field: value})
        kept = getattr(sent, field, value)
        assert kept == (value.encode() if field == "content" and isinstance(value, str) else value)
        assert store.get_message(sent.id) == sent


@pytest.mark.parametrize("field", BAD)
@pytest.mark.parametrize("kind", [ChannelType.GROUP, ChannelType.PUB_SUB])
def test_what_no_rule_or_file_allows(store: CommStore, field: str, kind: ChannelType) -> None:
    channel = channel_of(store, kind, "a", "b")
    for value in BAD[field]:
        fields = {"topic": "t"} | {field: value}
        refused_field(store, field, send, store, channel, "a", **fields)


@pytest.mark.shows("engine 1.3")
def test_content_has_the_channels_limit_in_bytes(store: CommStore) -> None:
    group = group_of(store, "a", "b", max_message_size=10)
    assert send(store, group, "a", content="é" * 5).content == "é".encode() * 5
    error = refused_field(store, "content", send, store, group, "a", content="é" * 5 + "x")
    assert error.reason == "Message content exceeds channel max_message_size (10 bytes)"
    assert error.value_length == 11


@pytest.mark.shows("engine 1.4")
def test_a_pubsub_channel_needs_a_topic(store: CommStore) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "b")
    error = refused_field(store, "topic", send, store, channel, "a")
    assert "needs a TOPIC" in error.reason
    assert send(store, channel, "a", topic="build.ok").topic == "build.ok"


def test_types_by_their_numbers(store: CommStore, group: Channel) -> None:
    sent = store.send_message(group.id, "a", 1, "x", priority=0)  # type: ignore[arg-type]
    assert (sent.message_type, sent.priority) == (MessageType.COMMAND, Priority.CRITICAL)
    assert sent.correlation_id
    for kind in (8, True):
        refused_field(store, "message_type", send, store, group, "a", kind)
    direct = store.create_channel("d", 0, "a")  # type: ignore[arg-type]
    assert direct.channel_type is ChannelType.DIRECT
    for kind in (4, "Group", None):
        refused_field(store, "channel_type", store.create_channel, "e", kind, "a")
    refused_field(store, "state", store.set_channel_state, direct.id, 9)  # type: ignore[arg-type]
    assert store.set_channel_state(direct.id, 1).state is ChannelState.PAUSED  # type: ignore[arg-type]


# -- answers -------------------------------------------------------------------------------


def answer(store: CommStore, kind: MessageType, correlation: str | None) -> Message:
    return accept(store, 1, "b", kind, "yes", recipients=["a"], correlation_id=correlation)


@pytest.mark.shows("engine 1.4")
@pytest.mark.parametrize("asked", sorted(set(MessageType) - rules.ANSWERS))
def test_a_response_answers_a_query(store: CommStore, group: Channel, asked: MessageType) -> None:
    send(store, group, "a", asked, correlation_id=UUID)
    if asked is MessageType.QUERY:
        assert answer(store, MessageType.RESPONSE, UUID).correlation_id == UUID
        return
    error = refused_field(store, "correlation_id", answer, store, MessageType.RESPONSE, UUID)
    assert "existing Query" in error.reason


@pytest.mark.parametrize("kind", [MessageType.RESPONSE, MessageType.ACKNOWLEDGMENT])
def test_an_answer_without_an_id_is_none(
    store: CommStore, group: Channel, kind: MessageType
) -> None:
    send(store, group, "a", MessageType.QUERY)
    for thread in (None, OTHER):
        refused_field(store, "correlation_id", answer, store, kind, thread)


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
def test_an_acknowledgment_answers_what_expects_one_and_expects_none(
    store: CommStore, asked: MessageType, metadata: Any, mode: dict[str, Any], owed: bool
) -> None:
    group = group_of(store, "a", "b", **mode)
    message = send(store, group, "a", asked, correlation_id=UUID, metadata=metadata)
    assert store.engine.messages.expects_ack(message) is owed
    if owed:
        ack = answer(store, MessageType.ACKNOWLEDGMENT, UUID)
        assert ack.correlation_id == UUID and not store.engine.messages.expects_ack(ack)
    else:
        refused_field(store, "correlation_id", answer, store, MessageType.ACKNOWLEDGMENT, UUID)


# -- channels and subscriptions ------------------------------------------------------------


@pytest.mark.shows("engine 4.3")
def test_names_keep_their_rules(store: CommStore, group: Channel) -> None:
    for name in ("", "a b", "/a", "a/", "a//b", "é", "c" * 129, HALF, None, 5):
        refused_field(store, "name", store.create_channel, name, ChannelType.GROUP, "a")
    for name in ("", "a b", "x" * 129, HALF, None, 5):
        refused_field(store, "owner", store.create_channel, "d", ChannelType.GROUP, name)
        refused_field(store, "participant", store.join_channel, group.id, name)
    longest = store.join_channel(group.id, "x" * 128)
    assert send(store, longest, "x" * 128).sender == "x" * 128


def test_a_channels_name_is_one_channels(store: CommStore) -> None:
    store.create_channel("team", ChannelType.GROUP, "a")
    refused(store, lambda: store.create_channel("team", ChannelType.PUB_SUB, "b"), DuplicateChannel)
    store.create_channel("team/backend", ChannelType.GROUP, "a")


def test_a_subscription_is_of_a_pubsub_channel(store: CommStore, group: Channel) -> None:
    refused_field(store, "channel", store.subscribe, group.id, "z", "build.#")
    channel = channel_of(store, ChannelType.PUB_SUB, "a", name="p")
    for bad in ("", "#.a", "a..b", "a*", None, 5, ["a"]):
        refused_field(store, "topic_pattern", store.subscribe, channel.id, "b", bad)


FILTERS: dict[str, tuple[Any, ...]] = {
    "limit": (-1, 2**64),
    "offset": (-1,),
    "after": (-1, "yesterday"),
    "before": (2**64,),
    "channel_ids": ((-1,), ("c",)),
    "message_types": ((8,),),
    "status": (("Sent",),),
    "priority": ((5,),),
    "sender": (5, HALF),
    "correlation_id": (HALF,),
    "topic_pattern": (HALF, 5, "a..b", "a.#.b"),
    "content_pattern": (
        *(HALF, "(", "(" * 5000, "a(?=b)", r"(a)\1", "\\p{L}{900}" * 9),
        *("(((a{100}){100}){100}){100}", "(a{2000}){2000}"),
    ),
    "sort_by": (4,),
    "sort_order": ("up",),
    "include_archived": ("no",),
}


@pytest.mark.shows("engine 2.7")
@pytest.mark.parametrize("field", FILTERS)
def test_a_filter_that_is_none_changes_nothing(
    store: CommStore, clock: FakeClock, field: str
) -> None:
    channel = channel_of(store, ChannelType.PUB_SUB, "a", "b")
    store.subscribe(channel.id, "b", "t.#")
    store.publish(channel.id, "a", "t", "something to look at", ttl=1)
    clock.advance(2)
    for value in FILTERS[field]:
        wanted = MessageFilter(**{field: value})
        for ask in (
            lambda wanted=wanted: store.subscribe(channel.id, "c", "t.#", wanted),
            lambda wanted=wanted: store.query_messages(wanted),
            lambda wanted=wanted: store.receive_messages(None, "b", wanted),
        ):
            assert len(str(refused_field(store, field, ask))) < 400


def test_a_filter_at_its_limits_is_kept(store: CommStore, clock: FakeClock) -> None:
    channel = store.create_channel("p", ChannelType.PUB_SUB, "a")
    most = 2**64 - 1
    plain: dict[str, Any] = {
        **{"channel_ids": [0, most], "message_types": (0,), "status": [1], "sort_by": 3},
        **{"after": 0, "before": most, "limit": 0, "offset": most},
    }
    kept = store.subscribe(channel.id, "b", "t.#", MessageFilter(**plain)).filter
    assert kept is not None
    assert (kept.channel_ids, kept.message_types) == ((0, most), (MessageType.TEXT,))
    assert (kept.status, kept.sort_by) == ((MessageStatus.SENT,), SortField.MESSAGE_TYPE)
    reopened(store, clock)


# -- settings ------------------------------------------------------------------------------

HIGHEST = 2**32 - 1
TAKEN: list[dict[str, Any]] = [
    {},
    {"delivery": DeliveryMode.EXACTLY_ONCE, "echo": True, "sticky_messages": True},
    {"max_message_size": 1, "max_participants": 2, "ack_timeout": 1},
    {"max_message_size": 1_048_576, "max_participants": HIGHEST, "ack_timeout": HIGHEST},
    {"max_participants": None, "ack_timeout": None},
    {"max_retries": 0, "retry_backoff_ms": 0},
    {"max_retries": HIGHEST, "retry_backoff_ms": HIGHEST},
    {"retention": Retention(RetentionKind.COUNT, 5), "priority_ordering": False},
]
REFUSED: dict[str, tuple[Any, ...]] = {
    "max_message_size": (0, 1_048_577, None, "10"),
    "max_participants": (0, 2**32),
    "ack_timeout": (0, -1, 1.5, 2**32),
    "max_retries": (-1, None, True, 2**32),
    "retry_backoff_ms": (-1, None, 2**32),
    "delivery": ("ExactlyOnce", 3),
    "echo": ("yes",),
    "priority_ordering": (None,),
    "retention": (5, Retention(RetentionKind.SIZE, 2**64), Retention(RetentionKind.COUNT, -1)),
    "max_pending": (0, -1, 1.5, True, "3", 2**32),
}


@pytest.mark.parametrize("settings", TAKEN)
def test_every_setting_that_is_taken_is_in_the_file(
    store: CommStore, clock: FakeClock, group: Channel, settings: dict[str, Any]
) -> None:
    changed = store.configure_channel(group.id, **settings)
    assert {name: getattr(changed.config, name) for name in settings} == settings
    assert reopened(store, clock).get_channel(group.id) == changed
    mode = store.configure_channel(group.id, delivery=2).config.delivery
    assert mode is DeliveryMode.EXACTLY_ONCE  # by its number


@pytest.mark.parametrize("setting", REFUSED)
def test_a_wrong_setting_is_named(store: CommStore, group: Channel, setting: str) -> None:
    for value in REFUSED[setting]:
        change = {setting: value}
        refused_field(store, setting, store.configure_channel, group.id, **change)
        if setting in ChannelConfig.__struct_fields__:
            made = ChannelConfig(**change)
            refused_field(store, setting, store.create_channel, "d", ChannelType.GROUP, "a", made)


def test_a_setting_that_is_none_is_refused(store: CommStore, group: Channel) -> None:
    unknown = {"echo": True, "colour": "red"}
    error = refused_field(store, "config", store.configure_channel, group.id, **unknown)
    assert "unknown setting colour" in str(error)


@pytest.mark.shows("engine 4.3")
def test_a_channel_is_not_limited_to_fewer_than_it_has(store: CommStore) -> None:
    for kind in (ChannelType.GROUP, ChannelType.DIRECT):
        channel = channel_of(store, kind, "a", "b", name=kind.label)
        narrow = {"max_participants": 1}
        error = refused_field(store, *narrow, store.configure_channel, channel.id, **narrow)
        assert f"too few for channel {kind.label}" in str(error)


@pytest.mark.shows("engine 4.4")
@pytest.mark.parametrize(
    ("words", "length"),
    [
        ({"description": "é" * 1025}, 1025),
        ({"description": HALF}, None),
        ({"description": 5}, None),
        ({"tags": ["x"] * 101}, 101),
        ({"tags": ["é" * 33]}, 66),
        ({"tags": [""]}, 0),
        ({"tags": "one"}, None),
        ({"tags": [5]}, None),
    ],
)
def test_words_that_are_too_many_are_refused(
    store: CommStore, group: Channel, words: dict[str, Any], length: int | None
) -> None:
    for call in (
        lambda: store.create_channel("other", ChannelType.GROUP, "a", **words),
        lambda: store.configure_channel(group.id, **words),
    ):
        assert refused_field(store, next(iter(words)), call).value_length == length
