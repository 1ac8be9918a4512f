"""Messages: accepting them (validate, number, route, store), queries and threads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import msgspec

from relay.acomm.model import (
    Channel,
    DeliveryState,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Metadata,
    Origin,
    Priority,
    read_only_copy,
)
from relay.base.errors import ValidationFailed
from relay.base.message import Kind
from relay.base.names import uuid4_of
from relay.engine import events, rules
from relay.engine.archives import Archives
from relay.engine.channels import Channels
from relay.engine.query import QueryResult, check_filter, select
from relay.engine.rules import check_number, check_text
from relay.engine.state import Core

# The default kind of a type; other kinds are kept in metadata `kind`.
KIND_OF = {
    MessageType.TEXT: Kind.MESSAGE,
    MessageType.BROADCAST: Kind.MESSAGE,
    MessageType.COMMAND: Kind.COMMAND,
    MessageType.QUERY: Kind.QUERY,
    MessageType.RESPONSE: Kind.RESPONSE,
    MessageType.ACKNOWLEDGMENT: Kind.ACK,
    MessageType.ERROR: Kind.ERROR,
    MessageType.NOTIFICATION: Kind.NOTIFICATION,
}
_UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.I)
_INCOMPLETE = frozenset(DeliveryState) - {
    DeliveryState.DELIVERED,
    DeliveryState.RECEIVED,
    DeliveryState.ACKNOWLEDGED,
}


class NewMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as its sender gives it. It is part of no cycle, like ``Message``."""

    message_type: MessageType
    content: str | bytes
    topic: str | None = None
    correlation_id: str | None = None
    priority: Priority = Priority.NORMAL
    metadata: Metadata | None = None
    ttl: int | None = None
    signature: bytes | None = None


class Messages:
    """Messages: accepting, finding and querying them. Part of an engine."""

    def __init__(self, core: Core, channels: Channels, archives: Archives) -> None:
        self._core = core
        self._state = core.state
        self._channels = channels
        self._archives = archives

    def accept(
        self,
        channel_id: int,
        sender: str,
        new: NewMessage,
        *,
        recipients: Iterable[str] | None = None,
        also: Iterable[str] = (),
        origin: Origin | None = None,
        answers: Message | None = None,
    ) -> Message:
        """Store the message and its recipients, without delivering it.

        Returns the store's own message: a caller does not change its metadata.

        ``recipients`` replaces the route, for answers, which go only to the original's sender;
        ``also`` adds recipients; ``origin`` is only recorded in the event;
        ``answers`` is the original of an answer, where the caller has found it.
        Errors: ValidationFailed, ChannelNotFound, ChannelUnavailable, NotParticipant, StoreFull,
        StoreCapacity.
        """
        channel = self._channels.find(channel_id)
        message = self._build(channel, sender, new, answers)
        if recipients is not None:
            recipients = self._check_names("recipients", channel_id, recipients)
        also = self._check_names("also", channel_id, also) if also else ()
        was_near_full = self._archives.is_near_full
        self._archives.make_room(channel, message)
        routed = self._channels.route(channel, message) if recipients is None else recipients
        if also:
            routed = tuple(dict.fromkeys((*routed, *also)))
        held = (
            channel_id in self._state.pending.pending
            and message.message_type not in rules.ANSWERS
            and bool(routed)
            and self._is_pending_full(channel_id)
        )
        self._core.apply(events.MessageSent(message, routed, held, origin))
        if self._archives.is_near_full and not was_near_full:
            self._core.warn(self._archives.capacity_warning())
        return message

    def route(self, channel: Channel, sender: str, new: NewMessage) -> tuple[str, ...]:
        """The recipients that a valid message would have in the channel."""
        message = Message(
            0,
            new.message_type,
            sender,
            channel.id,
            rules.content_bytes(new.content),
            new.topic,
            new.correlation_id,
            new.priority,
            new.metadata,
            self._core.now_s(),
            status=MessageStatus.SENT,
        )
        return self._channels.route(channel, message)

    def _build(
        self, channel: Channel, sender: str, new: NewMessage, answers: Message | None
    ) -> Message:
        """Validate the message, and give it a number and a time."""
        body = rules.content_bytes(new.content)
        message_type, priority = new.message_type, new.priority
        is_participant = self._channels.is_participant(channel.id, sender)
        rules.check_message(channel, is_participant, sender, message_type, body, new.topic, new.ttl)
        if type(priority) is not Priority or type(message_type) is not MessageType:
            message_type = rules.check_member("message_type", message_type, MessageType)
            priority = rules.check_member("priority", priority, Priority)
        rules.check_metadata(new.metadata)
        if new.signature is not None:
            rules.check_signature(new.signature)
        metadata = None if new.metadata is None else dict(new.metadata)  # the caller keeps its own
        return Message(
            self._state.next_message,
            message_type,
            sender,
            channel.id,
            body,
            new.topic,
            self._thread_of(channel, message_type, new.correlation_id, metadata, answers),
            priority,
            metadata,
            self._core.now_s(),
            None,
            None,
            new.ttl,
            MessageStatus.SENT,
            0,
            new.signature,
        )

    def _thread_of(
        self,
        channel: Channel,
        message_type: MessageType,
        correlation_id: str | None,
        metadata: Metadata | None,
        answers: Message | None,
    ) -> str | None:
        """The given correlation id, checked; a new one for a message that must be answered."""
        if message_type in rules.ANSWERS or correlation_id is not None:
            asked = (answers,) if answers else self._answerable(message_type, correlation_id)
            thread = ((m.message_type, self.expects_ack(m)) for m in asked)
            _check_correlation(message_type, correlation_id, thread)
        if correlation_id is None and rules.requires_ack(channel, message_type, metadata):
            key = (metadata or {}).get("relay_id", self._state.next_message)
            return uuid4_of(str(key))  # its answer must find it
        return correlation_id

    def _check_names(self, field: str, channel_id: int, names: Iterable[str]) -> tuple[str, ...]:
        """The names without duplicates; those of non-participants are checked for validity."""
        members = self._state.members[channel_id]
        if not isinstance(names, tuple) and (
            isinstance(names, str) or not isinstance(names, Iterable)
        ):
            raise ValidationFailed(field, f"expected a list of participants, got {names!r}")
        names = tuple(names)
        for name in names:
            if not isinstance(name, str) or name not in members:
                rules.check_participant(field, name)
        return tuple(dict.fromkeys(names))

    def _is_pending_full(self, channel_id: int) -> bool:
        """True when the channel has reached ``max_pending``, or holds messages already."""
        most = self._channels.settings(channel_id).max_pending or 0
        pending = self._state.pending
        return len(pending.pending[channel_id]) >= most or pending.holds_any(channel_id)

    def _answerable(
        self, message_type: MessageType, correlation_id: str | None
    ) -> Iterable[Message]:
        """Messages that an answer may refer to; empty for other types."""
        if message_type not in rules.ANSWERS or not isinstance(correlation_id, str):
            return ()
        here = self._in_thread(correlation_id)
        first = next(here, None)
        return self.thread(correlation_id) if first is None else chain((first,), here)

    def answered_by(
        self, channel_id: int, message_type: MessageType, correlation_id: object
    ) -> list[Message]:
        """The messages that an answer in this channel answers. Errors: ValidationFailed if none."""
        thread = self.thread(correlation_id) if isinstance(correlation_id, str) else []
        is_response = message_type == MessageType.RESPONSE
        originals = [
            m
            for m in thread
            if m.channel_id == channel_id
            and (m.message_type is MessageType.QUERY if is_response else self.expects_ack(m))
        ]
        if thread and not originals:
            channel = self._channels.get(channel_id)
            raise ValidationFailed(
                "correlation_id", f"no message in channel {channel.name} expects this answer"
            )
        return originals

    def get(self, message_id: int) -> Message | None:
        """The message of that number, live or a dead letter."""
        message_id = check_number("message_id", message_id)
        known = self._state.messages.get(message_id) or self._state.dead_letters.get(message_id)
        return None if known is None else read_only_copy(known)

    def find_by_relay_id(self, relay_id: str, *, include_archived: bool = False) -> Message | None:
        """Find the message that came through the relay with this id.

        ``include_archived``: search the archive files, too. Errors then: FormatError, OSError for
        an archive that is damaged or missing.
        """
        number = self._state.relay_ids.get(check_text("relay_id", relay_id))
        found = None if number is None else self.find_kept(number)
        if found is None and include_archived and self._archives.files is not None:
            archived = self._archives.files.find(self._state.archives, relay_id)
            found = read_only_copy(archived.message) if archived else None
        return found

    def expects_ack(self, message: Message) -> bool:
        """True for a Command, a Query, and any message delivered at least once.

        An Acknowledgment never expects one, whatever the delivery mode of its channel.
        """
        channel = self._state.channels[message.channel_id]
        return rules.requires_ack(channel, message.message_type, message.metadata)

    def rank(self, message: Message) -> int:
        """The message's priority, or normal if its channel does not use priorities."""
        heeds = self._state.channels[message.channel_id].config.priority_ordering
        return message.priority if heeds else Priority.NORMAL

    def find_kept(self, message_id: int) -> Message | None:
        """The message of that number: live, a dead letter or archived in the store."""
        known = self.get(message_id)
        archived = self._state.archive.get(message_id) if known is None else None
        return known if archived is None else read_only_copy(archived)

    def incomplete(self, among: Iterable[int] | None = None) -> dict[str, int]:
        """Relay id -> number of each message with an undelivered, owing or dead recipient.

        ``among``: the numbers to check, if not all.
        """
        state = self._state
        known = state.deliveries
        if among is not None:
            known = {number: known.get(number, {}) for number in among}
        numbers = {
            number
            for number, deliveries in known.items()
            for delivery in deliveries.values()
            if delivery.state in _INCOMPLETE or delivery.due_ms
        }
        numbers |= state.owed.keys() if among is None else state.owed.keys() & known.keys()
        found = map(self.find_kept, sorted(numbers))
        return {m.relay_id: m.id for m in found if m is not None and m.relay_id is not None}

    def recipients(self, message_id: int) -> tuple[str, ...]:
        """The recipients of a message, also of an archived one."""
        known = self._state.deliveries.get(check_number("message_id", message_id))
        if known is None and self._archives.files is not None:
            found = self._archives.files.get(self._state.archives, message_id)
            known = found.deliveries if found else None
        return tuple(known or ())

    def query(self, filter: MessageFilter | None = None, *, grouped: bool = True) -> QueryResult:
        """Messages by every given criterion, newest first by default; dead letters included.

        If channels use priorities, grouped by priority, unless ``grouped`` is False. Archives are
        read only where their times do not exclude a match.
        Errors: ValidationFailed for an invalid pattern; FormatError, OSError for an archive that
        is damaged or missing.
        """
        wanted = check_filter(MessageFilter() if filter is None else filter)
        rank = self.rank if grouped else None
        state = self._state
        found = [state.messages[number] for number in state.index.candidates(wanted)]
        found += [state.dead_letters[number] for number in state.dead_index.candidates(wanted)]
        if wanted.include_archived:
            found += [state.archive[number] for number in state.archive_index.candidates(wanted)]
        return _handed_out(select(chain(found, self._rolled(wanted)), wanted, rank))

    def _rolled(self, wanted: MessageFilter) -> Iterator[Message]:
        """The messages of the archives that a filter may match, without those still here."""
        state, files = self._state, self._archives.files
        if files is None:
            return
        for note in state.archives:
            is_leaving = bool(state.evicting) and note is state.archives[-1]
            for message in files.messages(note, wanted):
                number = message.id
                if not (is_leaving and (number in state.messages or number in state.archive)):
                    yield message

    def search(self, pattern: str, limit: int = 100) -> list[Message]:
        """Messages whose content matches a regular expression, newest first."""
        wanted = MessageFilter(content_pattern=pattern, limit=limit, include_archived=True)
        return self.query(wanted, grouped=False).messages

    def thread(self, correlation_id: str) -> list[Message]:
        """The messages of a thread, oldest first, archived ones included.

        Errors: FormatError, OSError for an archive that is damaged or missing.
        """
        here = self.thread_in_store(check_text("correlation_id", correlation_id))
        if self._archives.files is None:
            return here
        known = {message.id for message in here}
        rolled = self._archives.files.thread(self._state.archives, correlation_id)
        return sorted(
            [*here, *(read_only_copy(m) for m in rolled if m.id not in known)],
            key=lambda message: message.id,
        )

    def thread_in_store(self, correlation_id: str) -> list[Message]:
        """The messages of a thread that are still in the store, oldest first."""
        found = sorted(self._in_thread(correlation_id), key=lambda message: message.id)
        return [read_only_copy(message) for message in found]

    def sent_in_thread(self, correlation_id: str, recipient: str, most: int) -> list[Message]:
        """The messages of a thread in the store that an agent was sent, up to ``most``."""
        known = self._state.deliveries
        sent = (m for m in self._in_thread(correlation_id) if recipient in known.get(m.id, ()))
        return [read_only_copy(message) for message in islice(sent, most)]

    def _in_thread(self, correlation_id: str) -> Iterator[Message]:
        """The messages of a thread that are still in the store, lazily."""
        state = self._state
        for index, messages in (
            (state.archive_index, state.archive),
            (state.index, state.messages),
            (state.dead_index, state.dead_letters),
        ):
            for number in index.thread(correlation_id):
                yield messages[number]


def _handed_out(result: QueryResult) -> QueryResult:
    return result._replace(messages=[read_only_copy(message) for message in result.messages])


def _check_correlation(
    message_type: MessageType,
    correlation_id: str | None,
    thread: Iterable[tuple[MessageType, bool]],
) -> None:
    """The correlation id's form, and that an answer answers something.

    ``thread``: type and "expects an acknowledgment" of each message that has this id.
    """
    if correlation_id is not None and not (
        isinstance(correlation_id, str) and _UUID4.fullmatch(correlation_id)
    ):
        raise ValidationFailed("correlation_id", f"{correlation_id!r} is not a valid UUID v4")
    if message_type is MessageType.RESPONSE:
        if not any(kind is MessageType.QUERY for kind, _ in thread):
            raise ValidationFailed("correlation_id", "a Response must answer an existing Query")
    elif message_type is MessageType.ACKNOWLEDGMENT and not any(owes for _, owes in thread):
        raise ValidationFailed(
            "correlation_id", "an Acknowledgment must answer a message that expects one"
        )
