"""A store of another writer, or one whose parts are at odds: read as far as it goes, and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from relay.acomm import store_file
from relay.acomm.check import check_file
from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    ChannelConfig,
    ChannelType,
    Delivery,
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
from relay.base.errors import FormatError
from relay.commstore.store import CommStore
from relay.engine.check import check, check_archives
from tests.engine.support import NOW_S, UUID, group_of, new_store, send, standing
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
def test_a_status_is_that_of_its_deliveries(status: MessageStatus, state: DeliveryState) -> None:
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


HIGHEST = 2**64 - 1


def kept_store() -> StoreSnapshot:
    """Message 1, a dead letter for b; message 2, on its way; settings."""
    store = new_store()
    channel = group_of(store, "a", "b", ack_timeout=1)
    send(store, channel, "a", MessageType.COMMAND)
    store.engine.retries.dead_letter(1, ["b"], "nobody is there")
    send(store, channel, "a")
    store.configure_channel(channel.id, max_pending=5)
    return store.snapshot()


def loaded(file: StoreFile) -> CommStore:
    """Through the bytes of a file."""
    return CommStore.load(FakeClock(NOW_S * 10**9), store_file.decode(store_file.encode(file)))


def checked(path: Path, file: StoreFile) -> list[str]:
    """What the check of a store says of the file, without its name."""
    store_file.write(str(path), file)
    return [one.text.removeprefix(f"{path}: ") for one in check_file(str(path))]


def test_a_dead_letter_that_another_writer_dropped_is_gone(tmp_path: Path) -> None:
    file = msgspec.structs.replace(kept_store().file(), dead_letters=())
    store = loaded(file)
    assert store.dead_letters() == []
    assert store.stats().dead_letters == 0
    assert store.purge_dead_letters(0) == 0
    assert checked(tmp_path / "a.acomm", file)[:2] == [
        "section 256: expected deliveries of a message in the file, found message 1",
        "section 256: expected dead letters of a message in the file, found message 1",
    ]
    assert send(store, store.get_channel(1), "a").id == 3


def test_a_message_that_another_writer_added_is_delivered() -> None:
    snapshot = kept_store()
    added = Message(7, MessageType.TEXT, "a", 1, b"new", created_at=NOW_S, status=MessageStatus(1))
    messages = (*snapshot.values.messages, added)
    store = loaded(msgspec.structs.replace(snapshot.file(), messages=messages))
    assert standing(store, 7) == {"b": DeliveryState.SENT}
    store._queues.enqueue_undelivered()
    assert [one.id for one in store.receive_messages(1, "b")] == [2, 7]
    assert send(store, store.get_channel(1), "a").id == 8


def test_settings_of_a_channel_that_is_gone_are_left_out(tmp_path: Path) -> None:
    file = msgspec.structs.replace(kept_store().file(), channels=(), messages=(), dead_letters=())
    assert loaded(file).create_channel("new", ChannelType.GROUP, "a").id == 2
    assert "section 256: expected settings of a channel in the file, found channel 1" in checked(
        tmp_path / "a.acomm", file
    )


def test_a_retry_count_at_its_limit_is_counted_on_from_what_fits() -> None:
    snapshot = kept_store()
    (sent,) = snapshot.values.messages
    tried = msgspec.structs.replace(sent, message_type=MessageType.COMMAND, retry_count=2**32 - 1)
    store = loaded(msgspec.structs.replace(snapshot.values, messages=(tried,)))
    store.tick()
    (kept,) = store_file.decode(store_file.encode(store.snapshot().file())).messages
    assert kept.retry_count == 2**32 - 1


@pytest.mark.parametrize(
    "config",
    [
        ChannelConfig(ack_timeout=HIGHEST),
        ChannelConfig(ack_timeout=1, retry_backoff_ms=HIGHEST),
        ChannelConfig(ack_timeout=1, retry_backoff_ms=2**63, max_retries=2**32 - 1),
    ],
)
def test_a_wait_beyond_all_times_can_be_written(config: ChannelConfig) -> None:
    snapshot = kept_store()
    (channel,) = snapshot.values.channels
    channel = msgspec.structs.replace(channel, config=config)
    store = loaded(msgspec.structs.replace(snapshot.file(), channels=(channel,)))
    number = send(store, channel, "a", MessageType.COMMAND).id
    for _ in range(3):
        store_file.encode(store.snapshot().file())
        store.tick((NOW_S + 5) * 10**9)
    assert standing(store, number).keys() == {"b"}


def note(name: str, last_id: int = 1) -> ArchiveInfo:
    return ArchiveInfo(name, 1, 1, last_id, NOW_S, NOW_S, 0, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda kept: kept._replace(next_message=HIGHEST), "the next_message of section 256"),
        (lambda kept: kept._replace(sequence=HIGHEST), "the sequence of section 256"),
        (lambda kept: kept._replace(archives=(note("../../x/1.acomm"),)), "the name of an archive"),
        (lambda kept: kept._replace(archives=(note("d/first.acomm"),)), "the name of an archive"),
        (lambda kept: kept._replace(archives=(note("d/1.acomm", HIGHEST),)), "the last id of"),
        (lambda kept: kept._replace(evicting=(2,)), "an archive for the messages"),
        (
            lambda kept: kept._replace(deliveries={2: {"b": Delivery(attempt=2**32 - 1)}}),
            "attempts at most",
        ),
    ],
)
def test_numbers_and_names_that_nothing_can_follow_are_refused(
    tmp_path: Path, change: Callable[[EngineState], EngineState], says: str
) -> None:
    snapshot = kept_store()
    file = snapshot._replace(state=change(snapshot.state)).file()
    with pytest.raises(FormatError, match=says):
        loaded(file)
    (said,) = checked(tmp_path / "a.acomm", file)
    assert said.startswith("it cannot be opened as a store: expected ") and says in said


@pytest.mark.damages
def test_a_table_that_an_event_did_not_update_is_found(store: CommStore) -> None:
    send(store, group_of(store, "a", "b"), "a")
    state = store.engine.state
    assert list(check(state)) == []
    state.names.clear()
    (found,) = check(state)
    assert found.text.startswith("the table names['") and "derived from the other" in found.text


def test_archives_that_are_gone_or_have_another_size_are_found(tmp_path: Path) -> None:
    (tmp_path / "2026-01-30").mkdir()
    names = [f"2026-01-30/{number:06d}.acomm" for number in (1, 2, 3)]
    for name in names[:2]:
        (tmp_path / name).write_bytes(b"1234")
    listed = [
        ArchiveInfo(name, 1, 1, 1, 0, 0, 0, size)
        for name, size in zip(names, (4, 5, 4), strict=True)
    ]
    assert [one.text for one in check_archives(str(tmp_path), listed)] == [
        f"{tmp_path / names[1]}: expected 5 bytes, found 4",
        f"{tmp_path / names[2]}: missing, but the store lists it",
    ]
