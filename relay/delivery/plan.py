"""Planning: what one message, or one event of the relay's own, causes. Pure.

A plan depends on the message, the directory of agents and the store as it is; nothing is written
here. The id of a reply is derived from the message it answers, so planning again after a crash
gives the same files. A message already in the store goes to the recipients it was accepted for. See
docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from msgspec.structs import replace

from relay.acomm.model import ChannelType, Delivery, DeliveryState, Message
from relay.agents.status import NO_AGENT, Directory, StatusChange
from relay.base.clock import NS_PER_S
from relay.base.incidents import Refusal, RefusalCode
from relay.base.message import ANSWERS, Kind, MessageFile, command_fields
from relay.base.names import EVERYONE_CHANNEL, OPERATOR, ORCHESTRATOR, derived_id, shown
from relay.base.text import plural
from relay.delivery import router
from relay.delivery.actions import recorded_effects
from relay.delivery.file_ops import render_delivered
from relay.delivery.values import (
    NO_EFFECTS,
    Answer,
    Cancellation,
    DeliveryChanges,
    Draft,
    Effects,
    Inbound,
    OutgoingFile,
    Plan,
    Route,
    Row,
    Subject,
    SystemMessage,
)
from relay.engine import rules
from relay.engine.deliveries import SYSTEM
from relay.engine.engine import Engine
from relay.engine.retries import DEAD_LETTER_TOPIC, OverdueDelivery
from relay.ledger.ledger import MessageRow

MAY_REPEAT = Effects(may_repeat=True)
DEAD_LETTER_HINT = "`relay dead replay {id}` tries it again, `relay dead discard {id}` lets it go"


def plan_file(inbound: Inbound, directory: Directory, store: Engine) -> Plan:
    """Plan one file. Errors: FormatError, OSError if an archive has to be read and cannot be."""
    if inbound.refusal is not None:
        return refuse(inbound, inbound.refusal)
    message = inbound.message
    assert message is not None  # a file without a message has a refusal
    sender, stored = inbound.file.agent, _find_stored(inbound, store)
    ttl_s = message.ttl_s
    if ttl_s and stored is None and inbound.seen_at > inbound.sent_at + ttl_s * NS_PER_S:
        reason = f"its TTL of {ttl_s} s passed before it could be delivered"
        return refuse(inbound, Refusal(RefusalCode.EXPIRED, reason))
    route: Route | Refusal
    if message.kind in ANSWERS:
        route, original = router.route_answer(message, sender, directory, store)
    else:
        route, original = router.route(message, sender, directory, store), None
    if isinstance(route, Refusal) and stored is not None:
        recipients = sorted(store.messages.recipients(stored.id))
        route, original = router.route_again(sender, recipients), None
    if stored is None and "NOT-BEFORE" in message.headers and isinstance(route, Route):
        if refusal := router.check_not_before(inbound, message, route, store):
            return refuse(inbound, refusal)
    if stored is None and original is not None:
        if refusal := router.check_choice(inbound, message, original, store):
            return refuse(inbound, refusal)
    answer = None if original is None else _answer(message, original)
    if isinstance(route, Refusal):  # the answer counts, even without its sender
        return refuse(inbound, route, answer)
    draft = _draft(inbound, message, route, original, store) if stored is None else None
    effects = MAY_REPEAT if inbound.row is Row.REPEATED else NO_EFFECTS
    plan = Plan(inbound.subject, inbound, draft, answer, effects=effects)
    # else it is long done, and rolled out
    if stored is None or stored.id in store.state.deliveries:
        return _plan_deliveries(plan, message, stored, route, directory, store)
    return plan


def refuse(inbound: Inbound, refusal: Refusal, answer: Answer | None = None) -> Plan:
    """Refuse a file: its sender gets a nack with the reason."""
    name = shown(inbound.file.file_name)
    text = refusal.reason if name in refusal.reason else f"{name}: {refusal.reason}"
    subject, kind = inbound.subject, Kind.NACK
    nack = system_message(subject, subject.agent, kind, f"not delivered: {text}", str(kind))
    return Plan(
        subject,
        replace(inbound, refusal=refusal),
        answer=answer,
        messages=(nack,),
        effects=Effects(inbound.incidents, may_repeat=inbound.row is Row.REPEATED),
    )


def reply(subject: Subject, kind: Kind, text: str, attached: bytes = b"") -> SystemMessage:
    """The reply of the relay to a message: what became of it, or of the command in it."""
    to, key = subject.agent, str(kind)
    return system_message(subject, to, kind, text, key, attached=attached, is_answer=True)


def outcome(subject: Subject, to: str, text: str, key: str, kind: Kind = Kind.NACK) -> Plan:
    """Send an agent the outcome of its message, once for each ``key``; nothing to an empty ``to``.

    Without a key it is the answer to a control message that was not answered at once.
    """
    reply = system_message(subject, to, kind, text, key or str(kind), is_answer=True)
    return Plan(subject, messages=(reply,) if to else ())


def notice(agent: str, at_ns: int, key: str, text: str) -> Plan:
    """Send an agent a notice about no message, once for each ``at_ns`` and ``key``."""
    subject = Subject(agent=agent, at_ns=at_ns)
    return Plan(subject, messages=(system_message(subject, agent, Kind.NOTIFICATION, text, key),))


def notices_of_end(
    change: StatusChange, at_ns: int, unread: Iterable[tuple[str, int, str]], agents: Set[str]
) -> list[Plan]:
    """Tell the senders of an agent's unread mail that it no longer reads, once for each ``at_ns``.

    ``unread``: sender, number of its messages, the first of them.
    """
    plans = []
    for sender, count, oldest in unread:
        if sender in agents and sender != change.name:
            are = "messages of yours were" if count > 1 else "message of yours was"
            text = (
                f"{change.name} is {change.status}: {change.reason}; {count} {are} not read, "
                f"the first is {oldest}"
            )
            plans.append(notice(sender, at_ns, f"end of {change.name}", text))
    return plans


def end_delivery(
    ended: OverdueDelivery, row: MessageRow | None, directory: Directory, store: Engine
) -> Plan:
    """End a delivery; its sender is told, and the system topic of a dead letter."""
    changes = DeliveryChanges(ended=(ended,))
    if row is None:
        return Plan(Subject(ended.relay_id), changes=changes)
    verb = "acknowledged by" if _was_delivered(ended, store) else "delivered to"
    text = f"not {verb} {ended.recipient}: {ended.reason}"
    if ended.state is DeliveryState.DEAD:
        text += f"; {DEAD_LETTER_HINT.format(id=row.message_id)}"
        if row.agent_name != OPERATOR:
            text += f"; only {OPERATOR} and the lead may do either"
    subject = Subject(row.message_id, row.agent_name, row.discovered_at)
    key = f"{ended.state.name} {ended.recipient} {ended.attempt}"
    to = row.agent_name if row.agent_name in directory.agents else ""
    plan = outcome(subject, to, text, key)
    messages = plan.messages
    if ended.state is DeliveryState.DEAD:
        about = f"message {row.message_id} from {row.agent_name} to {ended.recipient} is dead"
        messages += _dead_letter_notice(subject, f"{about}: {ended.reason}", key, directory, store)
    return replace(plan, messages=messages, changes=changes)


def cancelled_notices(
    by: Subject, given: Cancellation | None, store: Engine
) -> tuple[SystemMessage, ...]:
    """The notice to the sender of a message that somebody else took back; ``by``: the command.

    A nack, which ends its waiting for an answer.
    """
    if given is None or not given.recipients:
        return ()
    message = store.messages.get(given.number)
    if message is None or message.sender == by.agent:
        return ()
    text = f"not delivered to {', '.join(given.recipients)}: {given.reason}"
    key, subject = f"cancel {by.message_id}", subject_of(message)
    return (system_message(subject, subject.agent, Kind.NACK, text, key),)


def subject_of(message: Message) -> Subject:
    """A message in the store as the subject of notices."""
    return Subject(message.relay_id or "", message.sender, message.created_ns)


def system_message(
    subject: Subject,
    to: str,
    kind: Kind,
    text: str,
    key: str,
    order: int = 0,
    *,
    attached: bytes = b"",
    is_answer: bool = False,
) -> SystemMessage:
    """A message of the relay about a message, once for each ``key``."""
    headers = {"RE": subject.message_id} if subject.message_id else {}
    message = MessageFile(to, kind, headers, f"{text}\n".encode() + attached)
    message_id = subject.reply_id(to, key, order)
    return SystemMessage(message_id, message, subject.at_ns, (to,), is_answer)


def _find_stored(inbound: Inbound, store: Engine) -> Message | None:
    """The message as stored before a crash or a transient error."""
    stored = store.messages.find_by_relay_id(inbound.file.message_id)
    if stored is None and inbound.row is Row.REPEATED:  # a crash came before its row was completed
        stored = store.messages.find_by_relay_id(inbound.file.message_id, include_archived=True)
    return stored


def _answer(message: MessageFile, original: Message) -> Answer:
    """The effect of an answer on the delivery that it answers."""
    status, text = router.answer_status(message)
    text = text.replace("\0", "\ufffd")  # SQLite's JSON would end there
    ends = rules.ends_obligation(original, status, message.kind is Kind.RESPONSE)
    return Answer(original, status, text, ends)


def _draft(
    inbound: Inbound, message: MessageFile, route: Route, original: Message | None, store: Engine
) -> Draft:
    """The message as the engine gets it."""
    at_ns = inbound.discovered_at
    new = router.new_message(message, inbound.file.message_id, at_ns, original, inbound.sent_at)
    if route.recipients is None:
        channel = store.channels.find_by_name(route.channel)
        assert channel is not None  # the route was made from it
        recipients = store.messages.route(channel, inbound.file.agent, new)
        route = replace(route, recipients=recipients)
    return Draft(route, new)


def _plan_deliveries(
    plan: Plan,
    message: MessageFile,
    stored: Message | None,
    route: Route,
    directory: Directory,
    store: Engine,
) -> Plan:
    """Plan files for recipients with an inbox; the others bounce. One may be the orchestrator."""
    inbound = plan.inbound
    assert inbound is not None
    recipients: tuple[str, ...] = plan.draft.route.recipients or () if plan.draft else ()
    known: Mapping[str, Delivery] = {}
    if stored is not None:
        recipients, known = store.messages.recipients(stored.id), store.deliveries.of(stored.id)
    messages: list[SystemMessage] = []
    if not recipients:
        reason = _no_recipients(message, inbound.file.agent, route, store)
        if reason:
            messages.append(reply(plan.subject, Kind.NACK, reason))
    targets: list[str] = []
    absent: dict[str, str] = {}
    for name in recipients:
        why = "" if name == ORCHESTRATOR else directory.absence(name)
        if not why and name != ORCHESTRATOR:
            targets.append(name)
        elif why and (stored is None or known[name].state is DeliveryState.SENT):
            absent[name] = why
    if ORCHESTRATOR in recipients:
        plan = _plan_command(plan, inbound.original or message, store)
    if absent:
        text = _bounced_text(absent, inbound.file.file_name)
        if message.to.startswith(("*", "#")) and not (targets or _keeps(route, store)):
            text = _nobody_text(absent)  # `send` tells it, as of a group without members
        messages.append(reply(plan.subject, Kind.NACK, text))
    files: tuple[OutgoingFile, ...] = ()
    if targets:
        data = render_delivered(
            message,
            inbound.file.message_id,
            inbound.file.agent,
            inbound.discovered_at,
            inbound.checksum or "",
            route.shown_channel,
        )
        number = stored.id if stored else 0
        files = (OutgoingFile(inbound.file.message_id, number, data, tuple(targets)),)
    if absent or messages:
        number, message_id = stored.id if stored else 0, inbound.file.message_id
        ended = [
            OverdueDelivery(number, message_id, name, 1, DeliveryState.BOUNCED, why)
            for name, why in absent.items()
        ]
        changes = DeliveryChanges(tuple(ended))
        plan = replace(plan, messages=(*plan.messages, *messages), changes=changes)
    return replace(plan, files=files) if files else plan


def _plan_command(plan: Plan, message: MessageFile, store: Engine) -> Plan:
    """Have the orchestrator carry the message out; if it has before a crash, reply as then."""
    for kind in (Kind.ACK, Kind.NACK):
        answer = store.messages.find_by_relay_id(
            plan.subject.reply_id(plan.subject.agent, str(kind))
        )
        if answer is None or answer.sender != ORCHESTRATOR:  # an agent may take any id
            continue
        effects = plan.effects
        if kind is Kind.ACK and message.kind is Kind.COMMAND:
            # what goes into the ledger with it may not have got there
            effects = recorded_effects(command_fields(message), plan.subject, store)
            effects = replace(effects, may_repeat=plan.effects.may_repeat)
        return replace(
            plan,
            command=message,
            is_carried_out=True,
            messages=(  # they say what they said then
                reply(plan.subject, kind, ""),
                *cancelled_notices(plan.subject, effects.cancellation, store),
            ),
            effects=effects,
        )
    return replace(plan, command=message)


def _no_recipients(message: MessageFile, sender: str, route: Route, store: Engine) -> str:
    """The nack for a message without recipients; empty if a sticky channel keeps it."""
    channel = store.channels.find_by_name(route.channel)
    if _keeps(route, store):
        return ""
    if route.channel == EVERYONE_CHANNEL:
        return "no recipients: there are no other active agents"
    if channel is None or channel.channel_type is not ChannelType.PUB_SUB:
        return f"no recipients: {route.channel} has no other members"
    topic = message.headers.get("TOPIC", "")
    without = {
        one.subscriber
        for one in store.channels.subscriptions(channel.id)
        if one.active and rules.topic_matches(topic, one.topic_pattern)
    } - {sender}
    there_are = "there are no other subscribers"
    if without:
        there_are = f"a filter excludes it for {plural(len(without), 'subscriber')}"
    return (
        f"no recipients: {there_are} to topic {topic} of #{route.channel}: "
        f"`relay channel show {route.channel}` lists subscriptions"
    )


def _keeps(route: Route, store: Engine) -> bool:
    """True if later members and subscribers get what is sent there."""
    channel = store.channels.find_by_name(route.channel)
    return channel is not None and channel.config.sticky_messages


def _nobody_text(absent: Mapping[str, str]) -> str:
    """The nack for a message that none of its recipients gets."""
    whys = [f"{name}: {why}" if why == NO_AGENT else why for name, why in absent.items()]
    return f"no recipients: {'; '.join(whys)}"


def _bounced_text(absent: Mapping[str, str], file_name: str) -> str:
    """One line for all unknown agents, and one for each unavailable agent."""
    unknown = [name for name, why in absent.items() if why == NO_AGENT]
    lines = [f"{', '.join(unknown)}: {NO_AGENT}, did not get {file_name}"] if unknown else []
    lines += [
        f"{why}; {name} did not get {file_name}"
        for name, why in absent.items()
        if name not in unknown
    ]
    return "\n".join(lines)


def _was_delivered(ended: OverdueDelivery, store: Engine) -> bool:
    """True if only the acknowledgment is missing."""
    message = store.messages.get(ended.number)
    known = store.deliveries.of(ended.number).get(ended.recipient)
    if message is None or known is None or not store.messages.expects_ack(message):
        return False
    return ended.attempt > 1 or known.state is not DeliveryState.SENT


def _dead_letter_notice(
    subject: Subject, text: str, key: str, directory: Directory, store: Engine
) -> tuple[SystemMessage, ...]:
    """The notice on the system topic, if the system channel exists and an agent gets it."""
    channel = store.channels.find_by_name(SYSTEM)
    if channel is None or channel.channel_type is not ChannelType.PUB_SUB:
        return ()
    headers = {"TOPIC": DEAD_LETTER_TOPIC, "RE": subject.message_id}
    message = MessageFile(f"#{SYSTEM}", Kind.NOTIFICATION, headers, f"{text}\n".encode())
    new = router.new_message(message, "", subject.at_ns, None)
    reached = store.messages.route(channel, ORCHESTRATOR, new)
    targets = tuple(name for name in reached if name in directory.agents)
    message_id = derived_id(subject.at_ns, "dead", subject.message_id, key)
    return (SystemMessage(message_id, message, subject.at_ns, targets),)
