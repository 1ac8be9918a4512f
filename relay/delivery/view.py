"""Read-only queries of the store: all that planning sees of it."""

from __future__ import annotations

from collections.abc import Mapping

from relay.acomm.model import Channel, Delivery, Message, Obligation
from relay.engine.engine import Engine
from relay.engine.messages import NewMessage

NO_DELIVERIES: Mapping[str, Delivery] = {}
NOTHING_OWED: Mapping[str, Obligation] = {}


class StoreView:
    """The store as it is now."""

    def __init__(self, store: Engine) -> None:
        self._store = store

    def find(self, relay_id: str, *, include_archived: bool = False) -> Message | None:
        """The message with this id; errors with ``include_archived``: FormatError, OSError."""
        return self._store.messages.find_by_relay_id(relay_id, include_archived=include_archived)

    def message(self, number: int) -> Message | None:
        """The message of that number, live or a dead letter."""
        return self._store.messages.get(number)

    def thread(self, correlation_id: str) -> list[Message]:
        """The messages of a thread in the store; what is owed never leaves it for an archive."""
        return self._store.messages.thread_in_store(correlation_id)

    def channel(self, name: str) -> Channel | None:
        """The channel of that name."""
        return self._store.channels.find_by_name(name)

    def channel_of(self, message: Message) -> Channel:
        """The channel of a message."""
        return self._store.channels.find(message.channel_id)

    def channel_label(self, message: Message) -> str | None:
        """The CHANNEL header of a message; None in a direct channel."""
        return self._store.channels.label(message.channel_id)

    def is_limited(self, channel: Channel) -> bool:
        """True if ``max_pending`` limits the pending messages of the channel."""
        return self._store.channels.settings(channel.id).max_pending is not None

    def is_participant(self, channel: Channel, name: str) -> bool:
        """True for a member of the channel."""
        return self._store.channels.is_participant(channel.id, name)

    def route(self, channel: Channel, sender: str, new: NewMessage) -> tuple[str, ...]:
        """The recipients of a message in a channel, by the channel's type."""
        return self._store.messages.route(channel, sender, new)

    def recipients(self, number: int) -> tuple[str, ...]:
        """The recipients of a message, also of an archived one."""
        return self._store.messages.recipients(number)

    def deliveries(self, number: int) -> Mapping[str, Delivery]:
        """The deliveries of a message; empty once it is archived."""
        return self._store.state.deliveries.get(number, NO_DELIVERIES)

    def is_live(self, number: int) -> bool:
        """True until a message is archived."""
        return number in self._store.state.deliveries

    def owed(self, number: int) -> Mapping[str, Obligation]:
        """The answers owed for a message, by recipient."""
        return self._store.state.owed.get(number, NOTHING_OWED)

    def all_owed(self) -> Mapping[int, Mapping[str, Obligation]]:
        """Every owed answer: by number of the message, and recipient."""
        return self._store.state.owed

    def expects_ack(self, message: Message) -> bool:
        """True if recipients are expected to acknowledge it."""
        return self._store.messages.expects_ack(message)

    def tracks_answer(self, message: Message) -> bool:
        """True for messages whose recipients owe an answer."""
        return self._store.obligations.tracks(message)

    def is_answered(self, number: int, recipient: str) -> bool:
        """True once the recipient has acknowledged or answered it."""
        return self._store.deliveries.is_answered(number, recipient)

    def is_held(self, number: int) -> bool:
        """True while ``max_pending`` of its channel holds an accepted message."""
        return self._store.deliveries.is_held(number)
