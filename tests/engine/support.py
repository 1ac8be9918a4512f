"""What the tests of the message engine share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relay.acomm import store_file
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
)
from relay.base.errors import CommError
from relay.commstore.queues import Redelivery
from relay.commstore.store import CommStore
from relay.engine.engine import Engine
from relay.engine.messages import NewMessage
from relay.engine.state import DeliveryRules
from tests.fakes import FakeClock

NOW_S = 1_769_851_800
UUID = "6ba7b810-9dad-41d1-80b4-00c04fd430c8"
OTHER = "f81d4fae-7dec-4cd0-a765-00a0c91e6bf6"


BY_FILES = DeliveryRules(by_files=True)


def relay_engine(clock: FakeClock | None = None) -> Engine:
    """An empty engine as a relay has it: its owner delivers files."""
    return Engine(clock or FakeClock(NOW_S * 10**9), rules=BY_FILES)


def new_store() -> CommStore:
    """An empty store whose clock stands at NOW_S."""
    return CommStore(FakeClock(NOW_S * 10**9))


def engine_of(store: CommStore | Engine) -> Engine:
    return store.engine if isinstance(store, CommStore) else store


def channel_of(
    store: CommStore | Engine,
    kind: ChannelType,
    owner: str,
    *others: str,
    name: str = "c",
    **config: Any,
) -> Channel:
    """A channel with its owner and others in it."""
    channels = engine_of(store).channels
    channel = channels.create(name, kind, owner, ChannelConfig(**config))
    for other in others:
        channel = channels.join(channel.id, other)
    return channel


def group_of(store: CommStore | Engine, owner: str, *others: str, **config: Any) -> Channel:
    """A group."""
    return channel_of(store, ChannelType.GROUP, owner, *others, **config)


def accept(
    store: CommStore | Engine,
    channel_id: int,
    sender: str,
    kind: MessageType,
    content: str | bytes,
    *,
    recipients: Any = None,
    also: Any = (),
    **fields: Any,
) -> Message:
    """Stored, and delivered to nobody yet."""
    new = NewMessage(kind, content, **fields)
    messages = engine_of(store).messages
    return messages.accept(channel_id, sender, new, recipients=recipients, also=also)


def send(
    store: CommStore | Engine,
    channel: Channel,
    sender: str,
    kind: MessageType = MessageType.TEXT,
    content: str | bytes = "hi",
    **fields: Any,
) -> Message:
    """The whole pipeline; in an engine every recipient has its file."""
    if isinstance(store, CommStore):
        return store.send_message(channel.id, sender, kind, content, **fields)
    number = accept(store, channel.id, sender, kind, content, **fields).id
    store.deliveries.deliver(number, store.messages.recipients(number))
    sent = store.messages.get(number)
    assert sent is not None
    return sent


def after(store: CommStore, seconds: float) -> list[Redelivery]:
    """Time goes by, and what is due is done; what was delivered again."""
    clock = store.engine.clock
    assert isinstance(clock, FakeClock)
    clock.advance(seconds)
    return store.tick()


def receive(store: CommStore, number: int, who: str) -> None:
    """One message leaves its recipient's queue."""
    store.engine.deliveries.receive(number, who)
    store._queues.resume()


def refused(store: CommStore, call: Callable[[], object], kind: type[CommError] = CommError) -> Any:
    """The call is refused in one line, and the store is as it was."""
    before = store.snapshot()
    with pytest.raises(kind) as caught:
        call()
    assert store.snapshot() == before
    assert "\n" not in str(caught.value)
    return caught.value


def routed(
    store: CommStore | Engine, channel: Channel, sender: str, topic: str | None = None
) -> tuple[str, ...]:
    """Who would get a text of ``sender``, on this topic, in this channel."""
    new = NewMessage(MessageType.TEXT, b"x", topic)
    return engine_of(store).messages.route(channel, sender, new)


def standing(store: CommStore | Engine, number: int) -> dict[str, DeliveryState]:
    """Where each delivery of a message stands, as a snapshot has it."""
    deliveries = store.snapshot().state.deliveries[number]
    return {recipient: delivery.state for recipient, delivery in deliveries.items()}


def status_of(store: CommStore, number: int) -> MessageStatus:
    """Of a message, dead or alive."""
    message = store.get_message(number)
    assert message is not None
    return message.status


AT_LEAST_ONCE = DeliveryMode.AT_LEAST_ONCE
EXACTLY_ONCE = DeliveryMode.EXACTLY_ONCE


def reopened(store: CommStore, clock: FakeClock) -> CommStore:
    """Through the bytes of a file, and the same store."""
    snapshot = store.snapshot()
    opened = CommStore.load(clock, store_file.decode(store_file.encode(snapshot.file())))
    assert opened.snapshot() == snapshot
    return opened
