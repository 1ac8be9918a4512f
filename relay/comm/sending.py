"""The send pipeline: validate, number and time, route, keep, deliver.

Source: message-engine.txt, "Send Pipeline"; data-structures.txt, "Message".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relay.checksums import uuid4_of
from relay.comm import events, validation
from relay.comm.model import (
    Channel,
    ChannelType,
    DeliveryState,
    Message,
    MessageStatus,
    MessageType,
    Metadata,
    Priority,
)
from relay.comm.query import select
from relay.comm.receiving import ReceiveCommands, owes_ack
from relay.errors import MessageNotFound, NotParticipant, ValidationFailed

ACK_STATUSES = ("received", "in_progress", "completed", "failed")


class SendCommands(ReceiveCommands):
    """The CommStore's commands that send."""

    def send_message(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        **fields: object,
    ) -> Message:
        """The whole pipeline: the message stands in its recipients' queues when this returns.

        ``fields`` are those of ``accept``. Errors: as there; nothing is kept then.
        """
        message = self.accept(channel_id, sender, message_type, content, **fields)  # type: ignore[arg-type]
        self.deliver(message.id, self.recipients(message.id))
        return self.state.messages[message.id]

    def accept(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        *,
        recipients: Iterable[str] | None = None,
        also: Iterable[str] = (),
        topic: str | None = None,
        correlation_id: str | None = None,
        priority: Priority = Priority.NORMAL,
        metadata: Metadata | None = None,
        ttl: int | None = None,
        signature: bytes | None = None,
    ) -> Message:
        """Stages 1 to 4: the message is kept and its recipients are known, not yet reached.

        ``recipients`` narrows the route, as an answer goes to the original's sender alone;
        ``also`` widens it.
        Errors: ValidationFailed, ChannelNotFound, ChannelUnavailable, NotParticipant.
        """
        body = validation.content_bytes(content)
        channel = self.get_channel(channel_id)
        validation.check_message(
            channel, self.takes_part(channel_id, sender), sender, message_type, body, topic, ttl
        )
        validation.check_metadata(metadata)
        metadata = None if metadata is None else dict(metadata)  # the caller keeps its own
        validation.check_correlation(
            message_type,
            correlation_id,
            (
                (m.message_type, self.expects_ack(m))
                for m in self._asked(message_type, correlation_id)
            ),
        )
        if correlation_id is None and owes_ack(channel, message_type, metadata):
            key = (metadata or {}).get("relay_id", self.state.next_message)
            correlation_id = uuid4_of(str(key))  # its answer must find it
        message = Message(
            self.state.next_message,
            message_type,
            sender,
            channel_id,
            body,
            topic,
            correlation_id,
            priority,
            metadata,
            self._now_s(),
            None,
            None,
            ttl,
            MessageStatus.SENT,
            0,
            signature,
        )
        routed = tuple(recipients) if recipients is not None else self.route(channel, message)
        routed = tuple(dict.fromkeys((*routed, *also)))
        self.apply(events.MessageSent(message, routed))
        return message

    def _asked(self, message_type: MessageType, correlation_id: str | None) -> list[Message]:
        """What an answer might answer; other types do not look at their thread."""
        if message_type not in validation.ANSWERS or correlation_id is None:
            return []
        return self.get_thread(correlation_id)

    def route(self, channel: Channel, message: Message) -> tuple[str, ...]:
        """Stage 3: who receives a message in the channel. Source: guide, "Route"."""
        if channel.channel_type is ChannelType.PUB_SUB:
            reached = dict.fromkeys(self._subscribers(channel.id, message))
        else:
            reached = dict(self.state.members[channel.id])
        if not channel.config.echo or channel.channel_type is ChannelType.DIRECT:
            reached.pop(message.sender, None)
        return tuple(reached)

    def _subscribers(self, channel_id: int, message: Message) -> Iterator[str]:
        trie = self.state.topics.get(channel_id)
        for number in trie.match(message.topic or "") if trie else ():
            subscription = self.state.subscriptions[number]
            if not subscription.active:
                continue
            wanted = subscription.filter
            if wanted is None or select([message], wanted).total_count:
                yield subscription.subscriber

    def shown_channel(self, message: Message) -> str | None:
        """The name of the message's channel, unless that is one between two."""
        channel = self.state.channels[message.channel_id]
        return None if channel.channel_type is ChannelType.DIRECT else channel.name

    def send_query(
        self, channel_id: int, sender: str, content: str | bytes, timeout_s: int | None = None
    ) -> Message:
        """Ask the channel; the query's correlation id is the thread that responses name."""
        metadata: Metadata | None = {"await_ms": timeout_s * 1000} if timeout_s else None
        return self.send_message(
            channel_id,
            sender,
            MessageType.QUERY,
            content,
            metadata=metadata,
        )

    def send_response(
        self, channel_id: int, sender: str, correlation_id: str, content: str | bytes
    ) -> Message:
        """Answer a query; the response goes to who asked, and acknowledges it.

        Errors: ValidationFailed when no query has this correlation id.
        """
        queries = [
            m for m in self.get_thread(correlation_id) if m.message_type is MessageType.QUERY
        ]
        response = self.send_message(
            channel_id,
            sender,
            MessageType.RESPONSE,
            content,
            correlation_id=correlation_id,
            recipients=[query.sender for query in queries if query.sender != sender],
        )
        for query in queries:
            self.move_deliveries(query.id, [sender], DeliveryState.ACKNOWLEDGED)
        return response

    def publish(
        self, channel_id: int, sender: str, topic: str, content: str | bytes, **fields: object
    ) -> Message:
        """Send to whoever subscribed to the topic. Errors: ValidationFailed for another type."""
        channel = self.get_channel(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed("channel", f"{channel.name} is no PubSub channel")
        fields["topic"] = topic
        return self.send_message(channel_id, sender, MessageType.TEXT, content, **fields)

    def broadcast(self, channel_id: int, sender: str, content: str | bytes) -> Message:
        """Send to everybody in the channel, as type Broadcast."""
        return self.send_message(channel_id, sender, MessageType.BROADCAST, content)

    def acknowledge_message(
        self, message_id: int, participant: str, status: str, text: str | None = None
    ) -> Message:
        """Say where a message stands with its recipient; its sender alone hears it.

        ``status``: received, in_progress, completed or failed. Errors: MessageNotFound;
        ValidationFailed for another status or a message that expects none; NotParticipant
        when it was not sent to ``participant``.
        """
        original = self.get_message(message_id)
        if original is None:
            raise MessageNotFound(f"there is no message {message_id}")
        if status not in ACK_STATUSES:
            raise ValidationFailed("status", f"{status!r} is not one of {', '.join(ACK_STATUSES)}")
        if not self.expects_ack(original):
            raise ValidationFailed("message_id", f"message {message_id} expects no acknowledgment")
        if participant not in self.recipients(message_id):
            raise NotParticipant(f"message {message_id} was not sent to {participant}")
        ack = self.send_message(
            original.channel_id,
            participant,
            MessageType.ACKNOWLEDGMENT,
            f"{status}\n{text}" if text else status,
            correlation_id=original.correlation_id,
            metadata={"ack_status": status, "answers": original.id},
            recipients=[original.sender],
        )
        self.move_deliveries(message_id, [participant], DeliveryState.ACKNOWLEDGED)
        return ack
