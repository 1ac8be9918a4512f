"""Messages: the send pipeline (validate, number, route, store, deliver), queries and threads.

Source: message-engine.txt, "Send Pipeline", "Receive Pipeline"; data-structures.txt, "Message".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from relay.acomm.model import (
    Channel,
    ChannelType,
    DeliveryState,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Metadata,
    Origin,
    Priority,
    RetentionKind,
    read_only_copy,
)
from relay.base.checksums import uuid4_of
from relay.base.errors import CommError, MessageNotFound, NotParticipant, ValidationFailed
from relay.engine import ack_rules, events, routing, validation
from relay.engine.channels import ChannelCommands
from relay.engine.deliveries import SYSTEM
from relay.engine.query import QueryResult, check_filter, select
from relay.engine.tables import variable_bytes
from relay.engine.validation import check_number, check_text

ACK_STATUSES = ("received", "in_progress", "completed", "failed")
CAPACITY_TOPIC = f"{SYSTEM}.store.capacity"


_INCOMPLETE = frozenset(DeliveryState) - {
    DeliveryState.DELIVERED,
    DeliveryState.RECEIVED,
    DeliveryState.ACKNOWLEDGED,
}


class MessageCommands(ChannelCommands):
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

        Unless ``holds`` says that its channel has too many pending ones. An answer goes to those
        alone whom it answers in this channel, and acknowledges what they sent. ``fields`` are
        those of ``accept``. Errors: as there; nothing is kept then. In a channel that is flushed
        at once also those of ``flush``: then it is kept, and written as soon as the file can be.
        """
        if type(message_type) is not MessageType:
            message_type = validation.check_member("message_type", message_type, MessageType)
        is_routed = "recipients" not in fields and "also" not in fields
        if is_routed and message_type in ack_rules.ANSWERS:
            originals = self._originals(channel_id, message_type, fields.get("correlation_id"))
            return self._answer(channel_id, sender, message_type, content, originals, **fields)
        message = self.accept(channel_id, sender, message_type, content, **fields)  # type: ignore[arg-type]
        self.enqueue_new(message, is_routed)
        if self.state.settings:
            self.flush_if_immediate(channel_id)
        return read_only_copy(self.state.messages[message.id])

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
        origin: Origin | None = None,
    ) -> Message:
        """Stages 1 to 4: the message is kept and its recipients are known, not yet reached.

        ``recipients`` narrows the route, as an answer goes to the original's sender alone;
        ``also`` widens it; ``origin`` goes into the event alone.
        Errors: ValidationFailed, ChannelNotFound, ChannelUnavailable, NotParticipant, StoreFull,
        StoreCapacity.
        """
        channel = self.get_channel(channel_id)
        message = self._build_message(
            channel,
            sender,
            message_type,
            validation.content_bytes(content),
            topic,
            correlation_id,
            priority,
            metadata,
            ttl,
            signature,
        )
        named = None if recipients is None else self._checked("recipients", channel_id, recipients)
        also = self._checked("also", channel_id, also) if also else ()
        is_near_full = self._ensure_room(channel, message)
        routed = self.route(channel, message) if named is None else named
        if also:
            routed = tuple(dict.fromkeys((*routed, *also)))
        held = (
            channel_id in self.state.pending.pending
            and message.message_type not in ack_rules.ANSWERS
            and bool(routed)
            and self._is_pending_full(channel_id)
        )
        self.apply(events.MessageSent(message, routed, held, origin))
        if is_near_full:
            self._warn_of_capacity()
        return read_only_copy(message)

    def _build_message(
        self,
        channel: Channel,
        sender: str,
        message_type: MessageType,
        body: bytes,
        topic: str | None,
        correlation_id: str | None,
        priority: Priority,
        metadata: Metadata | None,
        ttl: int | None,
        signature: bytes | None,
    ) -> Message:
        """Stages 1 and 2: every rule is kept, and the message has its number and time."""
        validation.check_message(
            channel, self.is_participant(channel.id, sender), sender, message_type, body, topic, ttl
        )
        if type(priority) is not Priority or type(message_type) is not MessageType:
            message_type = validation.check_member("message_type", message_type, MessageType)
            priority = validation.check_member("priority", priority, Priority)
        validation.check_metadata(metadata)
        if signature is not None:
            validation.check_signature(signature)
        metadata = None if metadata is None else dict(metadata)  # the caller keeps its own
        correlation_id = self._thread_of(channel, message_type, correlation_id, metadata)
        return Message(
            self.state.next_message,
            message_type,
            sender,
            channel.id,
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

    def _thread_of(
        self,
        channel: Channel,
        message_type: MessageType,
        correlation_id: str | None,
        metadata: Metadata | None,
    ) -> str | None:
        """The correlation id that was given, checked; one of its own for what must be answered."""
        if message_type in ack_rules.ANSWERS or correlation_id is not None:
            asked = self._answerable(message_type, correlation_id)
            thread = ((m.message_type, self.expects_ack(m)) for m in asked)
            validation.check_correlation(message_type, correlation_id, thread)
        if correlation_id is None and ack_rules.requires_ack(channel, message_type, metadata):
            key = (metadata or {}).get("relay_id", self.state.next_message)
            return uuid4_of(str(key))  # its answer must find it
        return correlation_id

    def _ensure_room(self, channel: Channel, message: Message) -> bool:
        """Room for one more, by limits and by retention; True when the file is near its own.

        Errors: StoreFull, StoreCapacity.
        """
        state, is_near_full = self.state, False
        size = variable_bytes(message.content, message.metadata)
        if (
            state.bytes_sent + size >= self._roomy_until
            or len(state.messages) >= self.limits.active_messages
        ):
            is_near_full = self._make_room(size, message.message_type in ack_rules.ANSWERS)
        if channel.config.retention.kind is not RetentionKind.FOREVER:
            self._retain(channel, 1, len(message.content))
        return is_near_full

    def _checked(self, field: str, channel_id: int, names: Iterable[str]) -> tuple[str, ...]:
        """Each name once; those that do not take part are checked like participants' ids."""
        members = self.state.members[channel_id]
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ValidationFailed(field, f"expected a list of participants, got {names!r}")
        names = tuple(names)
        for name in names:
            if not isinstance(name, str) or name not in members:
                validation.check_participant(field, name)
        return tuple(dict.fromkeys(names))

    def _is_pending_full(self, channel_id: int) -> bool:
        """True when the channel has as many pending messages as it may, or holds some back."""
        most = self.get_settings(channel_id).max_pending or 0
        pending = self.state.pending
        return len(pending.pending[channel_id]) >= most or pending.holds_any(channel_id)

    def _answerable(self, message_type: MessageType, correlation_id: str | None) -> list[Message]:
        """Messages that an answer may refer to; empty for other types."""
        if message_type not in ack_rules.ANSWERS or not isinstance(correlation_id, str):
            return []
        return self.thread_in_store(correlation_id) or self.get_thread(correlation_id)

    def route(self, channel: Channel, message: Message) -> tuple[str, ...]:
        """Stage 3: who receives a message in the channel. Source: guide, "Route"."""
        return routing.route(self.state, channel, message, self._warn_of_filter)

    def _warn_of_capacity(self) -> None:
        """Say, in the log and on the system's topic, that the file comes near its limit."""
        text = (
            f"the store has {self.used_bytes()} of {self.limits.file_bytes} bytes: "
            "archive and compact it"
        )
        self.warn(text)
        self.announce(CAPACITY_TOPIC, text)

    def announce(self, topic: str, text: str, also: Iterable[str] = ()) -> None:
        """A Notification on the system's channel, for its subscribers and those in ``also``.

        Where that channel takes nothing it is not sent: whatever it speaks of goes on. An owner
        that delivers has its own way to say such things.
        """
        if not self.delivers_itself:
            return
        with contextlib.suppress(CommError):
            channel = self.get_channel_by_name(SYSTEM)
            if channel is None:
                channel = self.create_channel(SYSTEM, ChannelType.PUB_SUB, SYSTEM)
            self.send_message(
                channel.id, SYSTEM, MessageType.NOTIFICATION, text, topic=topic, also=also
            )

    def channel_label(self, message: Message) -> str | None:
        """The name of the message's channel, unless that is one between two."""
        channel = self.state.channels[message.channel_id]
        return None if channel.channel_type is ChannelType.DIRECT else channel.name

    def send_query(
        self, channel_id: int, sender: str, content: str | bytes, timeout_s: int | None = None
    ) -> Message:
        """Ask the channel; the query's correlation id is the thread that responses name.

        ``timeout_s``: how long its answer is waited for; None: as the channel says. Errors: as
        ``send_message``, ValidationFailed for an invalid timeout.
        """
        metadata: Metadata | None = None
        if timeout_s is not None:
            metadata = {"await_ms": validation.check_timeout(timeout_s) * 1000}
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

        Errors: ValidationFailed when no query of this channel has this correlation id.
        """
        return self.send_message(
            channel_id, sender, MessageType.RESPONSE, content, correlation_id=correlation_id
        )

    def publish(
        self, channel_id: int, sender: str, topic: str, content: str | bytes, **fields: object
    ) -> Message:
        """Send to whoever subscribed to the topic. Errors: ValidationFailed for another type."""
        channel = self.get_channel(channel_id)
        if channel.channel_type is not ChannelType.PUB_SUB:
            raise ValidationFailed("channel", f"{channel.name} is not a PubSub channel")
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
        original = self._find_kept(validation.check_number("message_id", message_id))
        if original is None:
            raise MessageNotFound(f"message {message_id} does not exist")
        if status not in ACK_STATUSES:
            raise ValidationFailed("status", f"{status!r} is not one of {', '.join(ACK_STATUSES)}")
        if text is not None:
            validation.check_text("text", text)
        if not self.expects_ack(original):
            raise ValidationFailed("message_id", f"message {message_id} expects no acknowledgment")
        if validation.check_text("participant", participant) not in self.recipients(message_id):
            raise NotParticipant(f"message {message_id} was not sent to {participant}")
        return self._answer(
            original.channel_id,
            participant,
            MessageType.ACKNOWLEDGMENT,
            f"{status}\n{text}" if text else status,
            [original],
            correlation_id=original.correlation_id,
            metadata={"ack_status": status, "answers": original.id},
        )

    def _originals(
        self, channel_id: int, message_type: MessageType, correlation_id: object
    ) -> list[Message]:
        """Messages that an answer in this channel answers. Errors: ValidationFailed for none."""
        thread = self.get_thread(correlation_id) if isinstance(correlation_id, str) else []
        is_response = message_type == MessageType.RESPONSE
        originals = [
            m
            for m in thread
            if m.channel_id == channel_id
            and (m.message_type is MessageType.QUERY if is_response else self.expects_ack(m))
        ]
        if thread and not originals:
            channel = self.get_channel(channel_id)
            raise ValidationFailed(
                "correlation_id", f"nothing in channel {channel.name} asks for this answer"
            )
        return originals

    def _answer(
        self,
        channel_id: int,
        sender: str,
        message_type: MessageType,
        content: str | bytes,
        originals: list[Message],
        **fields: object,
    ) -> Message:
        """Send an answer to those who asked, alone; its sender owes them nothing any more.

        Both are in the file with the same flush, or a crash would have it asked for again.
        """
        with self.single_flush(channel_id):
            answer = self.accept(
                channel_id,
                sender,
                message_type,
                content,
                recipients=[one.sender for one in originals],
                **fields,  # type: ignore[arg-type]
            )
            self.enqueue_new(answer)
            is_response = message_type == MessageType.RESPONSE
            metadata = answer.metadata or {}
            said = "completed" if is_response else str(metadata.get("ack_status", "received"))
            for one in originals:
                self.record_answer(
                    one, sender, said, ends=ack_rules.ends_obligation(one, said, is_response)
                )
        self.flush_if_immediate(channel_id)
        return read_only_copy(self.state.messages[answer.id])

    def get_message(self, message_id: int) -> Message | None:
        """The message of that number, live or a dead letter."""
        message_id = check_number("message_id", message_id)
        known = self.state.messages.get(message_id) or self.state.dead_letters.get(message_id)
        return None if known is None else read_only_copy(known)

    def find_by_relay_id(self, relay_id: str, *, include_archived: bool = False) -> Message | None:
        """Find the message that came through the relay with this id.

        ``include_archived``: search the archive files, too. Errors then: FormatError, OSError for
        an archive that is damaged or missing.
        """
        number = self.state.relay_ids.get(check_text("relay_id", relay_id))
        found = None if number is None else self._find_kept(number)
        if found is None and include_archived and self.archives is not None:
            archived = self.archives.find(self.state.archives, relay_id)
            found = read_only_copy(archived.message) if archived else None
        return found

    def _find_kept(self, message_id: int) -> Message | None:
        known = self.get_message(message_id)
        archived = self.state.archive.get(message_id) if known is None else None
        return known if archived is None else read_only_copy(archived)

    def incomplete(self) -> dict[str, int]:
        """Relay id -> number of each message that somebody has not got, owes, or is dead for."""
        return {
            relay_id: number
            for relay_id, number in self.state.relay_ids.items()
            if number in self.state.owed
            or any(
                delivery.state in _INCOMPLETE or delivery.due_ms
                for delivery in self.state.deliveries.get(number, {}).values()
            )
        }

    def recipients(self, message_id: int) -> tuple[str, ...]:
        """The recipients of a message, also of an archived one."""
        known = self.state.deliveries.get(check_number("message_id", message_id))
        if known is None and self.archives is not None:
            found = self.archives.get(self.state.archives, message_id)
            known = found.deliveries if found else None
        return tuple(known or ())

    def query_messages(
        self, filter: MessageFilter | None = None, *, grouped: bool = True
    ) -> QueryResult:
        """Messages by every given criterion, newest first by default; dead letters included.

        Where channels heed priority, in groups of one priority each, unless ``grouped`` is False.
        Archives are looked into as far as their indexes say that it is worth it.
        Errors: ValidationFailed for an invalid pattern; FormatError, OSError for an archive that
        is damaged or missing.
        """
        wanted = check_filter(MessageFilter() if filter is None else filter)
        rank = self._rank if grouped else None
        state = self.state
        found = [state.messages[number] for number in state.index.candidates(wanted)]
        found += [state.dead_letters[number] for number in state.dead_index.candidates(wanted)]
        if wanted.include_archived:
            found += [state.archive[number] for number in state.archive_index.candidates(wanted)]
        if self.archives is None or not state.archives:
            return _handed_out(select(found, wanted, rank))
        leaving = state.archives[-1] if state.evicting else None
        here = state.messages.keys() | state.archive.keys() if leaving else ()
        return _handed_out(self.archives.select(state.archives, found, wanted, leaving, here, rank))

    def search(self, pattern: str, limit: int = 100) -> list[Message]:
        """Messages whose content matches a regular expression, newest first."""
        wanted = MessageFilter(content_pattern=pattern, limit=limit, include_archived=True)
        return self.query_messages(wanted, grouped=False).messages

    def get_thread(self, correlation_id: str) -> list[Message]:
        """The messages of a thread, oldest first, archived ones included.

        Errors: FormatError, OSError for an archive that is damaged or gone.
        """
        here = self.thread_in_store(check_text("correlation_id", correlation_id))
        if self.archives is None:
            return here
        known = {message.id for message in here}
        rolled = self.archives.thread(self.state.archives, correlation_id)
        return sorted(
            [*here, *(read_only_copy(m) for m in rolled if m.id not in known)],
            key=lambda message: message.id,
        )

    def thread_in_store(self, correlation_id: str) -> list[Message]:
        """Those of a thread that were not rolled out, oldest first."""
        state = self.state
        live = [state.messages[n] for n in state.index.thread(correlation_id)]
        archived = [state.archive[n] for n in state.archive_index.thread(correlation_id)]
        dead = [state.dead_letters[n] for n in state.dead_index.thread(correlation_id)]
        found = sorted([*archived, *live, *dead], key=lambda message: message.id)
        return [read_only_copy(message) for message in found]

    def __len__(self) -> int:
        return len(self.state.messages)


def _handed_out(result: QueryResult) -> QueryResult:
    return result._replace(messages=[read_only_copy(message) for message in result.messages])
