"""What agents ask of the orchestrator: every kind, done once, harmless the second time."""

from __future__ import annotations

import pytest

from relay.acomm.model import ChannelType, MessageType, Priority
from relay.base.message import CHANNEL_KINDS, Kind, parse
from relay.delivery.control import handle
from relay.delivery.values import ControlReply, Subject
from relay.engine.engine import Engine
from tests.engine.support import channel_of, group_of, routed, send


def ask(store: Engine, kind: str, body: str, sender: str = "alice") -> ControlReply:
    text = f"TO: __orchestrator__\nKIND: {kind}\nRE: 1769851800000000000-\n\n{body}"
    answer = handle(parse(text.encode()), Subject(agent=sender), store)
    assert "\n" not in answer.text
    return answer


def members(store: Engine, name: str) -> list[str]:
    channel = store.channels.find_by_name(name)
    assert channel is not None
    return [participant.id for participant in channel.participants]


def refused(store: Engine, kind: str, body: str, sender: str = "alice") -> str:
    """It is answered with a nack, and nothing is changed."""
    before = store.snapshot()
    answer = ask(store, kind, body, sender)
    assert answer.ok is False
    assert store.snapshot() == before
    return answer.text


# -- the same as the ACTION of that name, which tests/delivery/test_actions.py shows --------


def test_who_joins_first_makes_the_group(store: Engine) -> None:
    assert ask(store, "join", "CHANNEL: team/b") == ControlReply(
        True, "created the group team/b, its owner is alice"
    )
    channel = store.channels.find_by_name("team/b")
    assert channel and (channel.channel_type, channel.owner) == (ChannelType.GROUP, "alice")
    for _ in range(2):  # again is harmless
        assert ask(store, "join", "CHANNEL: #team/b", "bob") == ControlReply(
            True, "bob is a member of team/b, a Group channel"
        )
    assert members(store, "team/b") == ["alice", "bob"]


def test_a_subscription_or_the_membership_ends(store: Engine) -> None:
    for pattern in ("build.#", "test.#", "deploy.#"):
        ask(store, "subscribe", f"CHANNEL: ci\nPATTERN: {pattern}")
    assert ask(store, "unsubscribe", "CHANNEL: ci\nPATTERN: test.#") == ControlReply(
        True, "1 subscription of alice to ci ended"
    )
    assert ask(store, "unsubscribe", "CHANNEL: ci").text == "2 subscriptions of alice to ci ended"
    assert ask(store, "leave", "CHANNEL: ci").text == "alice is not a member of ci"
    assert members(store, "ci") == []


# -- filters -------------------------------------------------------------------------------


def published(store: Engine, *messages: tuple[str, str, Priority]) -> list[str]:
    """Texts and commands of ci and of boss under build.ok; what alice receives of them."""
    channel = store.channels.find_by_name("ci")
    assert channel is not None
    for sender in ("ci", "boss"):
        store.channels.join(channel.id, sender)
    came = []
    for sender, text, priority in messages:
        kind = MessageType.COMMAND if text.startswith("!") else MessageType.TEXT
        sent = send(store, channel, sender, kind, text, topic="build.ok", priority=priority)
        if "alice" in store.messages.recipients(sent.id):
            came.append(sent)
    return [sent.content.decode() for sent in sorted(came, key=lambda one: (one.priority, one.id))]


MIXED = (
    ("ci", "a failed", Priority.NORMAL),
    ("ci", "b", Priority.HIGH),
    ("boss", "!c failed", Priority.HIGH),
    ("boss", "d", Priority.CRITICAL),
)


@pytest.mark.shows("engine 7.7")
@pytest.mark.parametrize(
    ("line", "came"),
    [
        ("", ["d", "b", "!c failed", "a failed"]),
        ("none", ["d", "b", "!c failed", "a failed"]),
        ("sender=ci", ["b", "a failed"]),
        ("priority=0,1", ["d", "b", "!c failed"]),
        ("type=command", ["!c failed"]),
        ("sender=boss  priority=1 match=fail|x = y", ["!c failed"]),
        ("match=^[ab]", ["b", "a failed"]),
    ],
)
def test_a_subscription_has_a_filter(store: Engine, line: str, came: list[str]) -> None:
    channel_of(store, ChannelType.PUB_SUB, "alice", name="ci")
    answer = ask(store, "subscribe", f"CHANNEL: ci\nPATTERN: build.#\nFILTER: {line}")
    assert answer.ok, answer.text
    words = " ".join(line.split()) if line != "none" else ""
    assert answer.text.endswith(f", where {words}".replace("command", "Command") if words else "ci")
    assert published(store, *MIXED) == came
    assert ask(store, "subscribe", "CHANNEL: ci\nPATTERN: build.#").ok  # again, without one
    assert published(store, *MIXED) == ["d", "b", "!c failed", "a failed"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("fail", "fail"),
        ("sender=", "sender"),
        ("sender=a sender=b", "sender=b"),
        ("sender=a b", "b"),
        ("sender=no/name", "sender=no/name"),
        ("type=Shout", "type=Shout"),
        ("priority=5", "priority=5"),
        ("priority=1,", "priority="),
        ("limit=3", "limit=3"),
    ],
)
def test_a_filter_that_is_none_is_one_line_and_makes_no_channel(
    store: Engine, line: str, word: str
) -> None:
    text = refused(store, "subscribe", f"CHANNEL: ci\nPATTERN: build.#\nFILTER: {line}")
    assert text == (
        f"FILTER {line!r}: expected sender=NAME, type=Command,Query, priority=0,1 and, last, "
        f"match=REGEX, got {word!r}"
    )


def test_who_subscribes_first_makes_the_channel(store: Engine) -> None:
    assert ask(store, "subscribe", "CHANNEL: ci\nPATTERN: build.#") == ControlReply(
        True, "created the channel ci; alice receives build.# from ci"
    )
    channel = store.channels.find_by_name("ci")
    assert channel and channel.channel_type is ChannelType.PUB_SUB
    assert ask(store, "subscribe", "CHANNEL: ci\nPATTERN: *", "bob") == ControlReply(
        True, "bob receives * from ci"
    )
    assert routed(store, channel, "carol", "build.ok") == ("alice",)
    assert routed(store, channel, "carol", "build") == ("alice", "bob")


def test_what_the_engine_refuses_is_a_nack_and_no_channel(store: Engine) -> None:
    for lines, said in (
        ("PATTERN: a..b", "topic_pattern: "),
        ("PATTERN: build.#\nFILTER: match=(", "content_pattern: "),
        ("PATTERN:", "PATTERN is missing"),
        ("", "PATTERN is missing"),
    ):
        assert refused(store, "subscribe", f"CHANNEL: ci\n{lines}").startswith(said)
    group_of(store, "carol", name="team", max_participants=1)
    assert "is limited to 1 participants" in refused(store, "join", "CHANNEL: team")


# -- what every one of them needs ----------------------------------------------------------


def test_a_channel_must_be_named(store: Engine) -> None:
    for kind in sorted(CHANNEL_KINDS):
        said = f"CHANNEL is missing: {kind} needs `TO: #name`, or a body line `CHANNEL: name`"
        for body in ("team", "CHANNEL:", "channel: team", "CHANNEL: #"):
            assert refused(store, kind, body) == said


def test_a_name_that_is_none_of_ours(store: Engine) -> None:
    group_of(store, "carol", name="all")
    channel_of(store, ChannelType.DIRECT, "carol", "bob", name="dm/alice/bob")
    for kind in sorted(CHANNEL_KINDS):
        for name in ("a b", "../x", "a//b", "é", "c" * 129, "all", "dm/alice/bob"):
            text = refused(store, kind, f"CHANNEL: {name}\nPATTERN: #")
            assert text.startswith(f"{name!r} is not a valid channel name for {kind}")


# -- the others ----------------------------------------------------------------------------


OTHERS = set(Kind) - CHANNEL_KINDS - {Kind.STATUS, Kind.COMMAND, Kind.REMINDER}


def test_any_other_kind_is_answered_with_what_there_is(store: Engine) -> None:
    known = ("join", "leave", "subscribe", "unsubscribe", "status", "command with an ACTION")
    for kind in sorted(OTHERS):
        text = refused(store, kind, "hello")
        assert text.startswith(f"the orchestrator does not accept KIND {kind}")
        assert all(word in text for word in known), kind
