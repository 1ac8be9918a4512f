"""Section 256 at odds with the rest of its file, as a writer leaves it that does not know it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.model import (
    ArchiveInfo,
    ChannelConfig,
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    StoreFile,
)
from relay.base.errors import FormatError
from relay.cli.acomm import acomm as command
from relay.engine.commstore import CommStore
from tests.engine.support import NOW_S, channel_of, new_store, send, standing
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 6.11")

HIGHEST = 2**64 - 1


def kept_store() -> StoreSnapshot:
    """Message 1, a dead letter for b; message 2, on its way; settings."""
    store = new_store()
    channel = channel_of(store, ChannelType.GROUP, "a", "b", ack_timeout=1)
    send(store, channel, "a", MessageType.COMMAND)
    store.engine.retries.dead_letter(1, ["b"], "nobody is there")
    send(store, channel, "a")
    store.configure_channel(channel.id, max_pending=5)
    return store.snapshot()


def opened(file: StoreFile) -> CommStore:
    """Through the bytes of a file."""
    return CommStore.load(FakeClock(NOW_S * 10**9), store_file.decode(store_file.encode(file)))


def checked(path: Path, file: StoreFile) -> list[str]:
    """What `relay acomm check` says of the file, without its name."""
    store_file.write(str(path), file)
    printed = CliRunner().invoke(command, ["check", str(path)], catch_exceptions=False).output
    return [line.removeprefix(f"{path}: ") for line in printed.splitlines()]


def test_a_dead_letter_that_another_writer_dropped_is_gone(tmp_path: Path) -> None:
    file = msgspec.structs.replace(kept_store().file(), dead_letters=())
    store = opened(file)
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
    store = opened(msgspec.structs.replace(snapshot.file(), messages=messages))
    assert standing(store, 7) == {"b": DeliveryState.SENT}
    store._queues.enqueue_undelivered()
    assert [one.id for one in store.receive_messages(1, "b")] == [2, 7]
    assert send(store, store.get_channel(1), "a").id == 8


def test_settings_of_a_channel_that_is_gone_are_left_out(tmp_path: Path) -> None:
    file = msgspec.structs.replace(kept_store().file(), channels=(), messages=(), dead_letters=())
    assert opened(file).create_channel("new", ChannelType.GROUP, "a").id == 2
    assert "section 256: expected settings of a channel in the file, found channel 1" in checked(
        tmp_path / "a.acomm", file
    )


def test_a_retry_count_at_its_limit_is_counted_on_from_what_fits() -> None:
    snapshot = kept_store()
    (sent,) = snapshot.values.messages
    tried = msgspec.structs.replace(sent, message_type=MessageType.COMMAND, retry_count=2**32 - 1)
    store = opened(msgspec.structs.replace(snapshot.values, messages=(tried,)))
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
    store = opened(msgspec.structs.replace(snapshot.file(), channels=(channel,)))
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
        opened(file)
    (said, errors) = checked(tmp_path / "a.acomm", file)
    assert said.startswith("it cannot be opened as a store: expected ") and says in said
    assert errors == "1 error found"
