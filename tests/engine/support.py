"""What the tests of the message engine share."""

from __future__ import annotations

from typing import Any

from relay.acomm import store_file
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageType,
    Participant,
    ParticipantRole,
    StoreFile,
)
from relay.engine.commstore import CommStore
from relay.engine.core import DeliverySettings
from relay.engine.engine import Engine
from tests.fakes import FakeClock

NOW_S = 1_769_851_800
UUID = "6ba7b810-9dad-41d1-80b4-00c04fd430c8"
OTHER = "f81d4fae-7dec-4cd0-a765-00a0c91e6bf6"


BY_FILES = DeliverySettings(by_files=True)


def relay_engine(clock: FakeClock) -> Engine:
    """An empty engine as a relay has it: its owner delivers files."""
    return Engine(clock, settings=BY_FILES)


def receive(store: CommStore, number: int, who: str) -> None:
    """One message leaves its recipient's queue."""
    store.engine.deliveries.receive(number, who)
    store._queues.resume()


def new_store() -> CommStore:
    """An empty store whose clock stands at NOW_S."""
    return CommStore(FakeClock(NOW_S * 10**9))


def channel_of(
    store: CommStore, kind: ChannelType, owner: str, *others: str, name: str = "c", **config: Any
) -> Channel:
    """A channel with its owner and others in it."""
    channel = store.create_channel(name, kind, owner, ChannelConfig(**config))
    for other in others:
        channel = store.join_channel(channel.id, other)
    return channel


def send(
    store: CommStore,
    channel: Channel,
    sender: str,
    kind: MessageType = MessageType.TEXT,
    content: str | bytes = "hi",
    **fields: Any,
) -> Message:
    """The whole pipeline."""
    return store.send_message(channel.id, sender, kind, content, **fields)


def routed(
    store: CommStore, channel: Channel, sender: str, topic: str | None = None
) -> tuple[str, ...]:
    """Who would get a text of ``sender``, on this topic, in this channel."""
    return store.engine.channels.route(
        channel, Message(0, MessageType.TEXT, sender, channel.id, b"x", topic)
    )


def standing(store: CommStore | Engine, number: int) -> dict[str, DeliveryState]:
    """Where each delivery of a message stands, as a snapshot has it."""
    deliveries = store.snapshot().state.deliveries[number]
    return {recipient: delivery.state for recipient, delivery in deliveries.items()}


def store_with(state: ChannelState, kind: ChannelType = ChannelType.GROUP) -> CommStore:
    """A store with channel 1 in this state: a, its owner, and b."""
    members = (Participant("a", ParticipantRole.OWNER, NOW_S), Participant("b", joined_at=NOW_S))
    channel = Channel(1, "c", kind, "a", members, ChannelConfig(), state, NOW_S, NOW_S)
    return CommStore.load(FakeClock(NOW_S * 10**9), StoreFile(NOW_S, NOW_S, (channel,)))


AT_LEAST_ONCE = DeliveryMode.AT_LEAST_ONCE
EXACTLY_ONCE = DeliveryMode.EXACTLY_ONCE


def reopened(store: CommStore, clock: FakeClock) -> CommStore:
    """Through the bytes of a file, and the same store."""
    snapshot = store.snapshot()
    opened = CommStore.load(clock, store_file.decode(store_file.encode(snapshot.file())))
    assert opened.snapshot() == snapshot
    return opened
