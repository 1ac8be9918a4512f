"""Answers go back to who asked; and what the engine is told of each message."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from relay.acomm.model import Channel, ChannelType, DeliveryState, Message, MessageType, Priority
from relay.agents.status import Directory
from relay.base.incidents import Refusal
from relay.base.message import Kind, MessageFile, parse
from relay.base.names import ORCHESTRATOR, uuid4_of
from relay.delivery import router
from relay.delivery.router import find_original, new_message, route_answer
from relay.delivery.values import Route
from relay.engine.engine import Engine
from relay.engine.messages import NewMessage
from tests.delivery.support import bounce
from tests.engine.support import NOW_S, UUID, channel_of, group_of, relay_engine, send

AGENTS = Directory(frozenset({"alice", "bob", "carol"}))
ASKED = f"{NOW_S}000000000-a1"
ID = f"{NOW_S}000000001-b2"
AT_NS = NOW_S * 10**9


class Talk:
    """A store with a group of three in which alice asks."""

    def __init__(self) -> None:
        self.store: Engine = relay_engine()
        self.group: Channel = group_of(self.store, "alice", "bob", "carol", name="team")
        self.direct: Channel = channel_of(
            self.store, ChannelType.DIRECT, "alice", "bob", name="dm/alice/bob"
        )

    def ask(
        self,
        kind: MessageType = MessageType.COMMAND,
        relay_id: str = ASKED,
        thread: str | None = None,
        channel: Channel | None = None,
        sender: str = "alice",
        **metadata: Any,
    ) -> Message:
        return send(
            self.store,
            channel or self.group,
            sender,
            kind,
            "go",
            correlation_id=uuid4_of(thread) if thread else None,
            metadata={"relay_id": relay_id, **metadata},
        )

    def answer(
        self, kind: Kind, sender: str = "bob", directory: Directory = AGENTS, **headers: str
    ) -> Route | Refusal:
        message = MessageFile("whoever", kind, headers, b"received")
        found, self.answered = route_answer(message, sender, directory, self.store)
        return found


@pytest.fixture
def talk() -> Talk:
    return Talk()


# -- the way back --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.NACK])
def test_an_ack_goes_to_who_asked_alone_whatever_to_says(talk: Talk, kind: Kind) -> None:
    asked = talk.ask()
    assert talk.answer(kind, RE=ASKED) == Route(
        "team",
        ChannelType.GROUP,
        (),  # an answer is no reason to join
        ("alice",),
        shown_channel="team",
    )
    assert talk.answered == asked


@pytest.mark.parametrize(
    ("answer", "asked", "says"),
    [
        (Kind.ACK, MessageType.COMMAND, ""),
        (Kind.NACK, MessageType.QUERY, ""),
        (Kind.RESPONSE, MessageType.QUERY, ""),
        (Kind.ACK, MessageType.TEXT, f"{ASKED} does not expect an acknowledgment"),
        (Kind.NACK, MessageType.NOTIFICATION, f"{ASKED} does not expect an acknowledgment"),
        (
            Kind.RESPONSE,
            MessageType.COMMAND,
            f"a response answers a query, and {ASKED} is not a query",
        ),
    ],
)
def test_who_expects_an_answer(talk: Talk, answer: Kind, asked: MessageType, says: str) -> None:
    message = talk.ask(asked, channel=talk.direct)
    found = talk.answer(answer, RE=ASKED)
    if says:
        assert bounce(found).startswith(says)
        return
    assert isinstance(found, Route)
    assert (found.channel, found.shown_channel) == ("dm/alice/bob", None)  # between two
    assert (found.recipients, talk.answered) == (("alice",), message)


def test_an_answer_to_what_nobody_knows(talk: Talk) -> None:
    assert bounce(talk.answer(Kind.ACK, RE=ASKED)) == (
        f"RE {ASKED} does not name a message known to the relay"
    )


def test_an_answer_of_one_who_was_not_asked(talk: Talk) -> None:
    talk.ask(channel=talk.direct)
    assert bounce(talk.answer(Kind.ACK, "carol", RE=ASKED)) == f"RE {ASKED} was not sent to carol"
    assert bounce(talk.answer(Kind.ACK, "alice", RE=ASKED)) == f"RE {ASKED} was not sent to alice"


def test_an_answer_of_one_who_has_left_the_group_goes_between_the_two(talk: Talk) -> None:
    asked = talk.ask()
    talk.store.channels.leave(talk.group.id, "bob")
    assert talk.answer(Kind.ACK, RE=ASKED) == Route(
        "dm/alice/bob", ChannelType.DIRECT, ("bob", "alice"), ("alice",)
    )
    assert talk.answered == asked


def test_an_answer_to_one_who_has_left(talk: Talk) -> None:
    asked = talk.ask()
    here = Directory(frozenset({"bob", "carol"}))
    assert bounce(talk.answer(Kind.ACK, directory=here, RE=ASKED)) == (
        "its sender alice is no longer an agent; it is recorded as answered"
    )
    assert talk.answered == asked


def test_an_answer_to_the_orchestrator(talk: Talk) -> None:
    channel = channel_of(
        talk.store, ChannelType.DIRECT, ORCHESTRATOR, "bob", name="dm/__orchestrator__/bob"
    )
    talk.ask(channel=channel, sender=ORCHESTRATOR)
    found = talk.answer(Kind.ACK, RE=ASKED)
    assert isinstance(found, Route) and found.recipients == (ORCHESTRATOR,)


# -- by THREAD -----------------------------------------------------------------------------


def test_a_thread_with_one_that_awaits_is_enough(talk: Talk) -> None:
    asked = talk.ask(thread="t-1")
    talk.ask(MessageType.TEXT, ASKED + "0", "t-1")
    talk.ask(MessageType.COMMAND, ASKED + "1", "t-1", sender="bob")
    talk.ask(MessageType.COMMAND, ASKED + "2", "t-2")
    found = talk.answer(Kind.ACK, THREAD="t-1")
    assert isinstance(found, Route) and talk.answered == asked


@pytest.mark.parametrize("thread", ["none", UUID])
def test_a_thread_with_none_that_awaits(talk: Talk, thread: str) -> None:
    talk.ask(MessageType.TEXT, thread=UUID)
    text = bounce(talk.answer(Kind.ACK, THREAD=thread))
    assert text.startswith(f"THREAD {thread} has 0 messages that await an answer from bob")
    assert "RE" in text


def test_of_two_that_await_re_names_one(talk: Talk) -> None:
    talk.ask(thread="t-1")
    second = talk.ask(relay_id=ASKED + "0", thread="t-1")
    assert "has 2 messages" in bounce(talk.answer(Kind.ACK, THREAD="t-1"))
    found = talk.answer(Kind.ACK, THREAD="t-1", RE=ASKED + "0")
    assert isinstance(found, Route) and talk.answered == second


def test_a_long_thread_is_not_looked_through(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MOST_IN_THREAD", 2)
    for number in range(3):  # of others: they do not count
        talk.ask(MessageType.TEXT, f"{ASKED}{number}", "t-1", sender="bob")
    asked = talk.ask(relay_id=f"{ASKED}3", thread="t-1")
    assert isinstance(talk.answer(Kind.ACK, THREAD="t-1"), Route) and talk.answered == asked
    for number in range(4, 6):
        talk.ask(MessageType.TEXT, f"{ASKED}{number}", "t-1")
    text = bounce(talk.answer(Kind.ACK, THREAD="t-1"))
    assert text == "THREAD t-1 has more than 2 messages to bob: name the one with RE"


def test_what_is_answered_no_longer_awaits(talk: Talk) -> None:
    first = talk.ask(thread="t-1")
    second = talk.ask(relay_id=ASKED + "0", thread="t-1")
    talk.store.deliveries.move(first.id, ["bob"], DeliveryState.ACKNOWLEDGED)
    found = talk.answer(Kind.ACK, THREAD="t-1")
    assert isinstance(found, Route)
    assert talk.answered is not None and talk.answered.id == second.id
    assert "has 2 messages" in bounce(talk.answer(Kind.ACK, "carol", THREAD="t-1"))


def test_received_first_and_completed_later(talk: Talk) -> None:
    asked = talk.ask(thread="t-1")
    talk.store.deliveries.move(asked.id, ["bob"], DeliveryState.ACKNOWLEDGED)
    message = MessageFile("alice", Kind.ACK, {"THREAD": "t-1"}, b"completed")
    found = find_original(message, "bob", talk.store)
    assert isinstance(found, Message) and found.id == asked.id


# -- what the engine is told ---------------------------------------------------------------


def fields(text: str, answers: Message | None = None) -> NewMessage:
    return new_message(parse(text.encode()), ID, AT_NS, answers)


def test_every_header_has_its_place() -> None:
    signature = bytes(range(64))
    text = (
        "TO: #ops\nKIND: query\nTHREAD: t-1\nRE: 1769851800000000000-\nPRIORITY: 0\n"
        "TOPIC: build.ok\nTTL: 60\nDELIVERY: exactly-once\nX-Ticket: 42\nNAME: w\n"
        f"SIGNATURE: ed25519:{base64.b64encode(signature).decode()}\nAWAIT: 1m\n"
        f"ATTACHMENT: sha256:{'a' * 64}\nATTACHMENT: sha256:{'b' * 64}\n\nhow many?"
    )
    assert fields(text) == NewMessage(
        MessageType.QUERY,
        b"how many?",
        "build.ok",
        uuid4_of("t-1"),
        Priority.CRITICAL,
        {
            "relay_id": ID,
            "to": "#ops",
            "created_ns": AT_NS,
            "h.X-TICKET": "42",
            "h.NAME": "w",
            "thread": "t-1",
            "re": "1769851800000000000-",
            "delivery": "exactly-once",
            "await_ms": 60_000,
            "attachments": f"sha256:{'a' * 64} sha256:{'b' * 64}",
        },
        60,
        signature,
    )


T = uuid4_of("t")
AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"
TOLD: list[tuple[str, dict[str, Any]]] = [
    ("TO: *", {"message_type": MessageType.BROADCAST}),
    ("TO: *\nPRIORITY: 1", {"message_type": MessageType.BROADCAST}),
    ("TO: *\nKIND: query", {"message_type": MessageType.QUERY}),
    (f"TO: bob\nTHREAD: {UUID}", {"correlation_id": UUID, "thread": UUID}),
    ("TO: bob\nDELIVERY: at-most-once", {"correlation_id": None}),
    ("TO: bob\nKIND: notification", {"correlation_id": None}),
    ("TO: bob\nPRIORITY: 1", {"correlation_id": None}),
    ("TO: bob\nKIND: command\nTHREAD: t", {"correlation_id": T}),
    ("TO: bob\nAWAIT: 30s\nTHREAD: t", {"correlation_id": T}),
    ("TO: bob\nPRIORITY: 1\nTHREAD: t", {"correlation_id": T}),
    # who awaits an answer gets at least once
    ("TO: bob\nAWAIT: 500ms", {"delivery": AT_LEAST_ONCE, "await_ms": 500}),
    ("TO: bob\nDELIVERY: at-most-once\nAWAIT: 500ms", {"delivery": AT_LEAST_ONCE}),
    ("TO: bob\nDELIVERY: at-least-once\nAWAIT: 500ms", {"delivery": AT_LEAST_ONCE}),
    ("TO: bob\nDELIVERY: exactly-once\nAWAIT: 500ms", {"delivery": EXACTLY_ONCE}),
]


@pytest.mark.parametrize(("head", "told"), TOLD)
def test_what_a_header_means_to_the_engine(head: str, told: dict[str, Any]) -> None:
    found = fields(f"{head}\n\nhi")
    for name, value in told.items():
        assert getattr(found, name, found.metadata.get(name)) == value


def test_an_answer_is_of_the_thread_that_it_answers() -> None:
    asked = Message(1, MessageType.QUERY, "alice", 1, b"?", correlation_id=UUID)
    text = f"TO: alice\nKIND: response\nRE: {ASKED}\nTHREAD: another\n\nyes"
    assert fields(text, asked).correlation_id == UUID
