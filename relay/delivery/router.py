"""The router: the recipients of a message. Pure; no I/O.

| TO | recipients |
|---|---|
| a name | that agent, through the Direct channel ``dm/{a}/{b}`` |
| ``Lead`` (any case) | the agent of exactly that name, else with that role, else so named |
| ``*`` | every active agent but the sender, through the Group channel ``all`` |
| ``#channel`` | by the channel's type |
| ``__orchestrator__`` | the relay itself, for control messages |

An ack, nack or response goes to the sender of the message it answers, whatever TO says. See
docs/formats/msg.md.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from relay.acomm.model import ChannelType, DeliveryState, Message, MessageType, Metadata, Priority
from relay.agents.status import Directory
from relay.base.clock import NS_PER_MS, NS_PER_S, iso_time, later_time
from relay.base.errors import FormatError
from relay.base.incidents import Refusal, RefusalCode
from relay.base.message import (
    CHANNEL_KINDS,
    FOR_ORCHESTRATOR,
    SIGNATURE_PREFIX,
    Kind,
    MessageFile,
)
from relay.base.names import (
    DIRECT_PREFIX,
    EVERYONE,
    EVERYONE_CHANNEL,
    LEAD,
    ORCHESTRATOR,
    PERMISSION,
    direct_channel_name,
    is_agent_name,
    lead_by_name,
    options_of,
    permission_ms,
    uuid4_of,
)
from relay.base.text import did_you_mean
from relay.delivery.values import Inbound, Route
from relay.engine.engine import Engine
from relay.engine.messages import KIND_OF, NewMessage

MOST_IN_THREAD = 200  # messages to its sender that are looked at for an answer without RE
MOST_COMPARED = 50  # agents, for a suggestion: a millisecond or two
MAX_ANSWER = 200  # characters of an answer that the ledger keeps with what it answers
ACK_WORD = re.compile(r"\s*(received|in_progress|completed)\b")
MESSAGE_TYPES = {
    Kind.MESSAGE: MessageType.TEXT,
    Kind.COMMAND: MessageType.COMMAND,
    Kind.QUERY: MessageType.QUERY,
    Kind.RESPONSE: MessageType.RESPONSE,
    Kind.ACK: MessageType.ACKNOWLEDGMENT,
    Kind.NACK: MessageType.ACKNOWLEDGMENT,
    Kind.ERROR: MessageType.ERROR,
    Kind.STATUS: MessageType.NOTIFICATION,
    Kind.NOTIFICATION: MessageType.NOTIFICATION,
    Kind.REMINDER: MessageType.NOTIFICATION,
}
CONTROL_KINDS = CHANNEL_KINDS | FOR_ORCHESTRATOR
AT_MOST_ONCE = "at-most-once"
# Headers that have a field of their own in the engine, or are checked and done with.
_KNOWN_HEADERS = frozenset(
    ("THREAD", "RE", "PRIORITY", "TOPIC", "TTL", "CHECKSUM", "DELIVERY", "SIGNATURE", "AWAIT")
)


def route(
    message: MessageFile, sender: str, directory: Directory, store: Engine
) -> Route | Refusal:
    """Choose the recipients of a message that is not an answer; or why it has none."""
    if message.kind in CONTROL_KINDS and message.to != ORCHESTRATOR:
        return _route_control(message, sender)
    if message.to == EVERYONE:
        active = directory.agents - directory.unavailable.keys() - directory.inactive
        everyone = tuple(sorted(active | {sender}))
        others = tuple(name for name in everyone if name != sender)
        return Route(
            EVERYONE_CHANNEL,
            ChannelType.GROUP,
            everyone,
            others,
            shown_channel=EVERYONE_CHANNEL,
        )
    if message.to.startswith("#"):
        return _route_channel(message.to[1:], store)
    if _is_alias(message, directory, store):
        name = directory.lead or lead_by_name(directory.agents)
        if not name:
            return Refusal(
                RefusalCode.NO_RECIPIENT,
                "no lead is set; choose one with `relay register NAME --role lead`, "
                "or the setting `lead` in config.json",
            )
        return _route_direct(name, sender, directory)
    return _route_direct(message.to, sender, directory)


def _is_alias(message: MessageFile, directory: Directory, store: Engine) -> bool:
    """True if TO means the lead, and neither an agent so named nor the sender of RE."""
    to, answers = message.to, message.headers.get("RE")
    if to.lower() != LEAD or to in directory.agents:
        return False
    original = store.messages.find_by_relay_id(answers) if answers else None
    return original is None or original.sender != to


def _route_control(message: MessageFile, sender: str) -> Route | Refusal:
    """The route of a control message, or the reason why it cannot go to an agent."""
    where = ORCHESTRATOR
    if message.kind in CHANNEL_KINDS:
        if message.to.startswith("#"):
            return _direct(sender, ORCHESTRATOR)
        where = f"#channel, or {ORCHESTRATOR}"
    reason = f"KIND {message.kind} is for the relay itself: send it TO: {where}"
    return Refusal(RefusalCode.MALFORMED, reason)


def _route_direct(name: str, sender: str, directory: Directory) -> Route | Refusal:
    if name == ORCHESTRATOR:
        return _direct(sender, ORCHESTRATOR)
    if name == sender:
        return Refusal(RefusalCode.TO_ITSELF, "an agent cannot send a message to itself")
    if name in directory.unavailable:
        return Refusal(RefusalCode.RECIPIENT_AWAY, directory.unavailable[name])
    if name not in directory.agents:
        return Refusal(RefusalCode.NO_RECIPIENT, _no_agent(name, directory))
    return _direct(sender, name)


def _no_agent(name: str, directory: Directory) -> str:
    if not is_agent_name(name):
        return f"{name} is a reserved name, not an agent"
    meant = did_you_mean(name, directory.agents, MOST_COMPARED)
    return (
        f"there is no agent {name}: {meant + ' ' if meant else ''}`relay register {name}` "
        "creates it" + (f" in {directory.home}" if directory.home else "")
    )


def route_again(sender: str, recipients: Sequence[str]) -> Route:
    """The route of a message planned before a crash, if its original route is gone."""
    if len(recipients) == 1:
        return _direct(sender, recipients[0])
    return Route(EVERYONE_CHANNEL, ChannelType.GROUP, (sender, *recipients), tuple(recipients))


def _direct(sender: str, other: str) -> Route:
    return Route(direct_channel_name(sender, other), ChannelType.DIRECT, (sender, other), (other,))


def _route_channel(name: str, store: Engine) -> Route | Refusal:
    if name.startswith(DIRECT_PREFIX):
        reason = f"#{name} is a direct channel: write to the agent by its name"
        return Refusal(RefusalCode.CHANNEL, reason)
    if name == EVERYONE_CHANNEL:
        return Refusal(RefusalCode.CHANNEL, f"#{name} means every agent: write TO: {EVERYONE}")
    channel = store.channels.find_by_name(name)
    if channel is None:
        return Refusal(
            RefusalCode.CHANNEL,
            f"channel {name} does not exist: `relay channel create {name}` creates it "
            "(or a message of KIND join or subscribe to it)",
        )
    return Route(name, channel.channel_type, shown_channel=name)


def route_answer(
    message: MessageFile, sender: str, directory: Directory, store: Engine
) -> tuple[Route | Refusal, Message | None]:
    """Route an answer through the channel of its original, to the original's sender alone.

    Returns also the original: the answer counts, even if it cannot be delivered.
    """
    original = find_original(message, sender, store)
    if isinstance(original, Refusal):
        return original, None
    return _route_back(original, sender, directory, store), original


def _route_back(
    original: Message, sender: str, directory: Directory, store: Engine
) -> Route | Refusal:
    channel = store.channels.find(original.channel_id)
    if original.sender in directory.unavailable:
        return Refusal(
            RefusalCode.RECIPIENT_AWAY,
            f"{directory.unavailable[original.sender]}; its message is recorded as answered",
        )
    if original.sender != ORCHESTRATOR and original.sender not in directory.agents:
        return Refusal(
            RefusalCode.NO_RECIPIENT,
            f"its sender {original.sender} is no longer an agent; it is recorded as answered",
        )
    # who has left does not join again by answering
    if not store.channels.is_participant(channel.id, sender):
        return _direct(sender, original.sender)
    return Route(
        channel.name,
        channel.channel_type,
        (),
        (original.sender,),
        shown_channel=None if channel.channel_type is ChannelType.DIRECT else channel.name,
    )


def find_original(message: MessageFile, sender: str, store: Engine) -> Message | Refusal:
    """The message that an answer answers; a refusal if there is none, or none of its kind."""
    original = _find_asked(message, sender, store)
    if isinstance(original, Refusal):
        return original
    if message.kind is Kind.RESPONSE:
        if original.message_type is not MessageType.QUERY:
            return _answers_nothing(
                f"a response answers a query, and {_relay_id(original)} is not a query: "
                "send it as KIND message with RE"
            )
    elif not store.messages.expects_ack(original):
        why = "only a command, a query or a message sent with DELIVERY at-least-once does"
        if (original.metadata or {}).get("kind") == Kind.REMINDER:
            why = "it is a reminder; answer the message that its RE names"
        return _answers_nothing(f"{_relay_id(original)} does not expect an acknowledgment: {why}")
    return original


def _find_asked(message: MessageFile, sender: str, store: Engine) -> Message | Refusal:
    """The message that RE names, or the only one in THREAD that awaits an answer."""
    relay_id = message.headers.get("RE")
    if relay_id is not None:
        try:
            original = store.messages.find_by_relay_id(relay_id, include_archived=True)
        except (OSError, FormatError) as exc:
            return _answers_nothing(f"RE {relay_id} cannot be looked up: {exc}")
        if original is None:
            return _answers_nothing(f"RE {relay_id} does not name a message known to the relay")
        if sender not in store.messages.recipients(original.id):
            return _answers_nothing(f"RE {relay_id} was not sent to {sender}")
        return original
    thread = message.headers["THREAD"]
    sent = store.messages.sent_in_thread(uuid4_of(thread), sender, MOST_IN_THREAD + 1)
    if len(sent) > MOST_IN_THREAD:
        return _answers_nothing(
            f"THREAD {thread} has more than {MOST_IN_THREAD} messages to {sender}: "
            "name the one with RE"
        )
    asked = [candidate for candidate in sent if store.messages.expects_ack(candidate)]
    # What is acknowledged as received may be completed later: it counts when nothing else waits.
    waiting = [
        question for question in asked if not store.deliveries.is_answered(question.id, sender)
    ] or asked
    if len(waiting) != 1:
        return _answers_nothing(
            f"THREAD {thread} has {len(waiting)} messages that await an answer from {sender}: "
            "name the one with RE"
        )
    return waiting[0]


def _answers_nothing(reason: str) -> Refusal:
    return Refusal(RefusalCode.ANSWERS_NOTHING, reason)


def check_not_before(
    inbound: Inbound, message: MessageFile, route: Route, store: Engine
) -> Refusal | None:
    """Why NOT-BEFORE cannot be kept; None if it can."""
    at = later_time(message.headers["NOT-BEFORE"], inbound.sent_at)
    if message.ttl_s and at >= inbound.sent_at + message.ttl_s * NS_PER_S:
        reason = f"its TTL of {message.ttl_s} s is over before NOT-BEFORE"
        return Refusal(RefusalCode.MALFORMED, reason)
    channel = store.channels.find_by_name(route.channel)
    if channel is not None and store.channels.settings(channel.id).max_pending is not None:
        return Refusal(
            RefusalCode.CHANNEL,
            f"#{channel.name} has max_pending, and would take no other message until NOT-BEFORE: "
            "send it to the agents themselves",
        )
    return None


def check_choice(
    inbound: Inbound, message: MessageFile, original: Message, store: Engine
) -> Refusal | None:
    """Why an answer to a question with OPTIONS is refused; None if it is not.

    It must be one of them, and the first: two people may answer at the same time. A request for
    permission is decided elsewhere once its time is over.
    """
    options = options_of((original.metadata or {}).get("h.OPTIONS"))
    if not options or message.kind is Kind.ACK:
        return None
    if over := _why_over(inbound, message, original, store):
        return Refusal(RefusalCode.ANSWERS_NOTHING, over)
    choice = message.body.decode().strip().partition("\n")[0].strip()
    if message.kind is Kind.RESPONSE and choice.lower() not in [
        option.lower() for option in options
    ]:
        reason = f"{choice[:MAX_ANSWER]!r} is not an answer: expected one of {', '.join(options)}"
        return Refusal(RefusalCode.MALFORMED, reason)
    return None


def _why_over(inbound: Inbound, message: MessageFile, original: Message, store: Engine) -> str:
    """Why a question awaits no answer of this sender any more; empty if it does."""
    sender, metadata = inbound.file.agent, original.metadata or {}
    given = store.deliveries.of(original.id).get(sender)
    if given is not None and given.state is DeliveryState.EXPIRED:
        return f"{_relay_id(original)} was withdrawn, or is over: nobody waits for an answer"
    owes = sender in store.obligations.of(original.id)
    if not owes and (first := _first_answer(original, sender, store)):
        return f"{_relay_id(original)} was answered by {sender} {first}"
    waits_ms = permission_ms(metadata.get(f"h.{PERMISSION}"))
    over = original.created_ns + waits_ms * NS_PER_MS
    if waits_ms and inbound.discovered_at > over and message.kind is Kind.RESPONSE:
        return f"{_relay_id(original)} no longer waits: the agent's own dialog asks now"
    return ""


def _first_answer(original: Message, sender: str, store: Engine) -> str:
    """When and how a question was answered; empty without an answer.

    Errors: FormatError, OSError if an archive has to be read and cannot be.
    """
    thread = original.correlation_id
    is_live = original.id in store.state.deliveries
    look = store.messages.thread_in_store if is_live else store.messages.thread
    for message in look(thread) if thread else ():
        known = message.metadata or {}
        is_end = message.message_type is MessageType.RESPONSE or known.get("kind") == Kind.NACK
        if is_end and message.sender == sender and known.get("re") == original.relay_id:
            line = message.content.decode(errors="replace").strip().partition("\n")[0]
            at = iso_time(message.created_ns)[:19]
            return f"at {at}Z: {line[:MAX_ANSWER]}"
    return ""


def _relay_id(message: Message) -> str:
    return message.relay_id or str(message.id)


def new_message(
    message: MessageFile,
    message_id: str,
    discovered_at: int,
    answers: Message | None,
    sent_ns: int | None = None,
) -> NewMessage:
    """Translate a message file for the engine. See docs/formats/msg.md, docs/formats/acomm.md.

    ``sent_ns``: when its TTL began; None: when it was discovered.
    """
    headers = message.headers
    metadata: Metadata = {"relay_id": message_id, "to": message.to, "created_ns": discovered_at}
    message_type = MESSAGE_TYPES.get(message.kind, MessageType.COMMAND)
    if message.to == EVERYONE and message.kind is Kind.MESSAGE:
        message_type = MessageType.BROADCAST
    if KIND_OF[message_type] is not message.kind:
        metadata["kind"] = str(message.kind)
    if not headers and not message.attachments and message.kind is Kind.MESSAGE:
        # the common case: a text to one agent
        return NewMessage(message_type, message.content, metadata=metadata)
    for name, value in headers.items():
        if name not in _KNOWN_HEADERS:
            metadata[f"h.{name}"] = value
    for name in ("THREAD", "RE", "DELIVERY"):
        if name in headers:
            metadata[name.lower()] = headers[name]
    if "AWAIT" in headers:
        metadata["await_ms"] = message.await_ms or 0
        # a waiting sender needs the answer
        if metadata.get("delivery", AT_MOST_ONCE) == AT_MOST_ONCE:
            metadata["delivery"] = "at-least-once"
    if message.attachments:
        metadata["attachments"] = " ".join(message.attachments)
    metadata |= _times(message, discovered_at, sent_ns)
    signature = headers.get("SIGNATURE")
    return NewMessage(
        message_type,
        message.content,
        headers.get("TOPIC"),
        _correlation_id(message, answers),
        Priority(message.priority),
        metadata,
        message.ttl_s,
        base64.b64decode(signature.removeprefix(SIGNATURE_PREFIX)) if signature else None,
    )


def _times(message: MessageFile, discovered_at: int, sent_ns: int | None) -> Metadata:
    """When its TTL began, and until when it is held."""
    found: Metadata = {}
    if message.ttl_s and sent_ns is not None:
        found["sent_ns"] = sent_ns
    if "NOT-BEFORE" in message.headers:
        at = message.headers["NOT-BEFORE"]
        found["not_before_ns"] = later_time(at, sent_ns or discovered_at)
    return found


def answer_status(message: MessageFile) -> tuple[str, str]:
    """The status given by an ack, nack or response, and the first line of its text."""
    text = message.body.decode().lstrip()
    if message.kind is Kind.NACK:
        status = "failed"
    elif message.kind is Kind.RESPONSE:
        status = "completed"
    else:
        word = ACK_WORD.match(message.content.decode())
        status = word[1] if word else "received"
        text = text.removeprefix(status).lstrip(" :,\t\r\n") if word else text
    return status, text.partition("\n")[0].rstrip()[:MAX_ANSWER]


def _correlation_id(message: MessageFile, answers: Message | None) -> str | None:
    """The thread's id; None: the engine starts one where an answer is expected."""
    if answers is not None:
        return answers.correlation_id
    thread = message.headers.get("THREAD")
    return None if thread is None else uuid4_of(thread)
