"""A store of another writer, without ENGINE_STATE: deliveries come from what messages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelType,
    DeliveryState,
    MatchMode,
    Message,
    MessageStatus,
    MessageType,
    Participant,
    ParticipantRole,
    StoreFile,
    Subscription,
)
from relay.engine.commstore import CommStore
from tests.engine.support import NOW_S, UUID, channel_of, new_store, send, standing
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 6.11")

MEMBERS = (
    Participant("a", ParticipantRole.OWNER, NOW_S),
    Participant("b", joined_at=NOW_S),
    Participant("late", joined_at=NOW_S + 50),
)


def message(status: MessageStatus, **fields: object) -> Message:
    kept = {"id": 1, "message_type": MessageType.COMMAND, "sender": "a", "channel_id": 1}
    return Message(**kept | {"content": b"x", "created_at": NOW_S, "status": status} | fields)  # type: ignore[arg-type]


def opened(
    *messages: Message, kind: ChannelType = ChannelType.GROUP, **sections: tuple[object, ...]
) -> CommStore:
    """Through the bytes of a file that has no section 256."""
    members = MEMBERS[:2] if kind is ChannelType.DIRECT else MEMBERS
    channel = Channel(1, "c", kind, "a", members, ChannelConfig())
    file = StoreFile(NOW_S, NOW_S, (channel,), messages, **sections)  # type: ignore[arg-type]
    read = store_file.decode(store_file.encode(file))
    assert read.engine_state == {}
    return CommStore.load(FakeClock((NOW_S + 100) * 10**9), read)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (MessageStatus.CREATED, DeliveryState.SENT),
        (MessageStatus.SENT, DeliveryState.SENT),
        (MessageStatus.DELIVERED, DeliveryState.RECEIVED),
        (MessageStatus.ACKNOWLEDGED, DeliveryState.ACKNOWLEDGED),
        (MessageStatus.FAILED, DeliveryState.BOUNCED),
        (MessageStatus.DEAD_LETTER, DeliveryState.DEAD),
        (MessageStatus.ARCHIVED, DeliveryState.ACKNOWLEDGED),
    ],
)
def test_a_status_is_its_deliveries_for_those_who_were_there(
    status: MessageStatus, state: DeliveryState
) -> None:
    assert standing(opened(message(status)), 1) == {"b": state}


@pytest.mark.parametrize(
    ("kind", "recipients"),
    [
        (ChannelType.DIRECT, {"b"}),
        (ChannelType.GROUP, {"b"}),
        (ChannelType.BROADCAST, {"b"}),
        (ChannelType.PUB_SUB, {"d", "e"}),
    ],
)
def test_recipients_by_the_type_of_the_channel(kind: ChannelType, recipients: set[str]) -> None:
    interests = tuple(
        Subscription(number, 1, who, pattern, MatchMode.MULTI_LEVEL, at)
        for number, (who, pattern, at) in enumerate(
            [
                ("d", "build.#", NOW_S),
                ("e", "#", NOW_S + 9),
                ("e", "build.#", NOW_S),
                ("f", "deploy.#", NOW_S),
                ("g", "#", NOW_S + 9),
            ]
        )
    )
    store = opened(
        message(MessageStatus.SENT, topic="build.ok"),
        kind=kind,
        subscriptions=interests if kind is ChannelType.PUB_SUB else (),
    )
    assert standing(store, 1).keys() == recipients


def test_an_answer_went_to_who_asked() -> None:
    store = opened(
        message(MessageStatus.DELIVERED, message_type=MessageType.QUERY, correlation_id=UUID),
        message(
            MessageStatus.SENT,
            id=2,
            message_type=MessageType.RESPONSE,
            sender="b",
            correlation_id=UUID,
        ),
        message(MessageStatus.SENT, id=3, message_type=MessageType.RESPONSE, sender="b"),
    )
    assert standing(store, 2) == {"a": DeliveryState.SENT}
    assert standing(store, 3) == {}


def test_a_dead_letter_in_either_section_can_be_replayed() -> None:
    dead = message(MessageStatus.DEAD_LETTER)
    for store in (opened(dead), opened(dead_letters=(dead,))):
        assert [letter.recipients for letter in store.dead_letters()] == [("b",)]
        store.replay_dead_letter(1)
        assert [m.id for m in store.receive_messages(1, "b")] == [1]


def test_opened_as_a_file_what_was_sent_is_delivered(tmp_path: Path) -> None:
    path = str(tmp_path / "foreign.acomm")
    channel = Channel(1, "c", ChannelType.GROUP, "a", MEMBERS, ChannelConfig())
    sent = message(MessageStatus.SENT)
    done = message(MessageStatus.DELIVERED, id=2, correlation_id=UUID)
    store_file.write(path, StoreFile(NOW_S, NOW_S, (channel,), (sent, done)))
    with CommStore.open(path, clock=FakeClock(NOW_S * 10**9)) as store:
        assert [m.id for m in store.receive_messages(1, "b")] == [1]
        assert store.acknowledge_message(2, "b", "completed").id == 3
        assert store.state.messages[2].status is MessageStatus.ACKNOWLEDGED


def test_a_store_of_our_own_is_believed_not_derived() -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.GROUP, "a", "b")
    number = send(store, channel, "a", recipients=[]).id
    again = CommStore.load(FakeClock(NOW_S * 10**9), store.snapshot().file())
    assert standing(again, number) == {}
