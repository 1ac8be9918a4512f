"""Applying plans to the store: the message, the effect of an answer, commands, replies.

In memory: the events become durable with the commit of their batch. Three commands write at once,
under the id of their message or in a way that is undone at a start without the commit: a saved
state, the spec of a process, and the files that a cancel sets aside. A message that is in the store
already is not stored again, so applying a plan after a crash repeats nothing.

The relay's own messages are stored with what they are about. The reply to a command tells a plan
that is made again that the command was carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from relay.acomm.model import ChannelType, DeliveryState, Message, MessageType, Origin
from relay.base.clock import NS_PER_S, iso_time
from relay.base.errors import (
    ChannelNotFound,
    ChannelUnavailable,
    CommError,
    DuplicateChannel,
    NotParticipant,
    StateFault,
    StoreCapacity,
    StoreFull,
)
from relay.base.incidents import Refusal, RefusalCode
from relay.base.logs import LogCall, where
from relay.base.message import Kind
from relay.base.names import ORCHESTRATOR, direct_channel_name, sha256_hex
from relay.delivery import router
from relay.delivery.control import Orchestrator
from relay.delivery.file_ops import DiskFull, render_delivered
from relay.delivery.plan import cancelled_notices, refuse, reply
from relay.delivery.values import (
    Answer,
    ControlReply,
    Draft,
    Inbound,
    OutgoingFile,
    Part,
    Plan,
    Resources,
    Route,
    Subject,
    SystemMessage,
)
from relay.engine.deliveries import SYSTEM
from relay.engine.retries import OverdueDelivery
from relay.ledger.deliveries import DeliveryFacts, held_delivery

TRANSIENT_ERRORS = (StoreFull, StoreCapacity, DiskFull)  # the plan is to be executed again
NOTICES = frozenset({Kind.NOTIFICATION, Kind.REMINDER})  # of the relay's: they answer nothing
CHANNEL_FULL = "the channel has as many pending messages as max_pending allows"
CHANNEL_FULL_RECHECK_NS = 60 * NS_PER_S  # delivered as soon as the limit allows; checked this often
STICKY = "sent before it joined"


class PlanApplier(Part):
    """Applies plans to the store."""

    def __init__(self, given: Resources, orchestrator: Orchestrator) -> None:
        super().__init__(given)
        self._orchestrator = orchestrator

    def apply(self, plan: Plan) -> Plan:
        """Apply a plan; returns it with what the store made of it: its files, what waits, effects.

        A file that the engine refuses, or that meets a bug, is refused.
        Errors: ``TRANSIENT_ERRORS``; CommError for a plan of the relay's own; StateFault.
        """
        try:
            return self._apply(plan)
        except (*TRANSIENT_ERRORS, StateFault):
            raise
        except CommError as exc:
            if plan.inbound is None:
                raise
            return self._apply(refuse(plan.inbound, Refusal(_code(exc), str(exc))))
        except Exception as exc:
            if plan.inbound is None:
                raise
            return self._apply(refuse_fault(plan.inbound, exc, self._log))

    def _apply(self, plan: Plan) -> Plan:
        """Store the message and the effect of its answer, carry out its command, store replies."""
        stored: Message | None = None
        files, changes, held = plan.files, plan.changes, list[DeliveryFacts]()
        if plan.draft is not None and plan.inbound is not None:
            inbound = plan.inbound
            answers = plan.answer.original if plan.answer is not None else None
            stored = self._accept(plan.draft, inbound.file.agent, inbound.origin(), answers)
            files = tuple(map(partial(replace, number=stored.id), files))
        elif plan.message_id:
            stored = self._store.messages.find_by_relay_id(plan.message_id)
        if plan.answer is not None:
            self._record_answer(plan.subject, plan.answer)
        if plan.inbound is not None and stored and files:
            waits = "not_before_ns" in (stored.metadata or ())
            if waits or self._store.deliveries.is_held(stored.id):
                files, held = self._hold(stored, files, plan.inbound.seen_at)
        effects, own = plan.effects, plan.messages
        if plan.command is not None and not plan.is_carried_out and stored is not None:
            given = self._orchestrator.carry_out(plan.command, plan.subject)
            effects = replace(given.effects, may_repeat=effects.may_repeat)
            held += self._sticky_copies()
            deliveries, relay, at = self._store.deliveries, [ORCHESTRATOR], plan.subject.at_ns
            deliveries.deliver(stored.id, relay, at_ns=at)
            if self._store.messages.expects_ack(stored):
                deliveries.move(stored.id, relay, DeliveryState.ACKNOWLEDGED, at_ns=at)
            notices = cancelled_notices(plan.subject, given.effects.cancellation, self._store)
            own = (*_reply_of(plan.subject, given), *notices, *given.told, *own)
        files += tuple(self._store_own(own, stored))
        if held or (changes.ended and stored is not None):
            changes = replace(changes, ended=_numbered(changes.ended, stored), held=tuple(held))
        return replace(plan, files=files, changes=changes, effects=effects)

    def _hold(
        self, stored: Message, files: tuple[OutgoingFile, ...], now_ns: int
    ) -> tuple[tuple[OutgoingFile, ...], list[DeliveryFacts]]:
        """The files to be written now, and the deliveries that are not made yet."""
        if stored.not_before_ns > now_ns:
            why, due = waits_for(stored), stored.not_before_ns
        elif self._store.deliveries.is_held(stored.id):
            why, due = CHANNEL_FULL, channel_full_until(stored, now_ns)
        else:  # its time has passed
            return files, []
        every = [(file, name) for file in files for name in file.recipients]
        return (), [held_delivery(file.message_id, name, why, due) for file, name in every]

    def _accept(
        self,
        draft: Draft,
        sender: str,
        origin: Origin | None = None,
        answers: Message | None = None,
    ) -> Message:
        """Store a message; its channel is created or joined if necessary."""
        store, route = self._store, draft.route
        channel = store.channels.find_by_name(route.channel)
        if channel is None:
            is_direct = route.channel_type is ChannelType.DIRECT
            owner = route.members[0] if is_direct else ORCHESTRATOR
            channel = store.channels.create(route.channel, route.channel_type, owner)
        members = store.state.members[channel.id]
        for name in route.members:
            if name not in members:
                store.channels.join(channel.id, name)
        return store.messages.accept(
            channel.id,
            sender,
            draft.message,
            recipients=route.recipients,
            origin=origin,
            answers=answers,
        )

    def _record_answer(self, subject: Subject, answer: Answer) -> None:
        """Apply an answer to the delivery that it answers."""
        answered = (subject.message_id, answer.text)
        self._store.deliveries.record_answer(
            answer.original,
            subject.agent,
            answer.status,
            ends=answer.ends,
            answer=answered,
            at_ns=subject.at_ns,
        )

    def _sticky_copies(self) -> list[DeliveryFacts]:
        """Copies for new subscribers, due now."""
        now = self._clock.now_ns()
        copies = [
            (self._store.messages.get(number), name)
            for number, name in self._store.channels.pop_sticky()
        ]
        return [
            held_delivery(copied.relay_id, name, STICKY, now)
            for copied, name in copies
            if copied is not None and copied.relay_id is not None
        ]

    def _store_own(
        self, messages: Iterable[SystemMessage], stored: Message | None
    ) -> Iterator[OutgoingFile]:
        """Store messages of the relay's own, each once; yields the files of those somebody gets.

        ``stored``: what they are about. One is left out if its topic's channel accepts none. Its
        time is when it was first stored, possibly a day after the event it describes.
        """
        for own in messages:
            message, recipients, at = own.message, own.recipients, own.at_ns
            find = self._store.messages.find_by_relay_id
            while (kept := find(own.message_id)) is not None and kept.sender != ORCHESTRATOR:
                own = own.with_next_id()
            if kept is None:
                at = max(at, self._clock.now_ns())
                asks = stored is not None and self._store.messages.expects_ack(stored)
                draft = _own_draft(own, at, stored if own.is_answer and asks else None)
                try:
                    kept = self._accept(draft, ORCHESTRATOR)
                except CommError as exc:
                    if draft.message.topic is None or isinstance(exc, TRANSIENT_ERRORS):
                        raise
                    continue  # paused or closed: no notices wanted
            else:
                at = kept.created_ns or at
                message = message._replace(body=kept.content)
                known = self._store.messages.recipients(kept.id)
                recipients = tuple([name for name in recipients if name in known])
            if recipients:
                label = SYSTEM if "TOPIC" in message.headers else None
                checksum = sha256_hex(message.body)
                data = render_delivered(message, own.message_id, ORCHESTRATOR, at, checksum, label)
                yield OutgoingFile(own.message_id, kept.id, data, recipients)


def refuse_fault(inbound: Inbound, exc: Exception, log: LogCall) -> Plan:
    """Refuse a file because of a bug in the relay, which stops no other file."""
    fault = type(exc).__name__  # its text may quote what it choked on
    log(
        f"Refused {inbound.file.path}: internal error: {fault}",
        action="fault",
        level="error",
        where=where(exc),
    )
    return refuse(inbound, Refusal(RefusalCode.FAULT, f"internal error of the relay: {fault}"))


def _code(exc: CommError) -> RefusalCode:
    """The code of what the engine refuses: channels have states and rules, the rest is the text."""
    about_channels = (ChannelNotFound, ChannelUnavailable, DuplicateChannel, NotParticipant)
    return RefusalCode.CHANNEL if isinstance(exc, about_channels) else RefusalCode.MALFORMED


def _numbered(
    ended: tuple[OverdueDelivery, ...], stored: Message | None
) -> tuple[OverdueDelivery, ...]:
    """The ends of deliveries of a message that is in the store by now, if it was not."""
    number = stored.id if stored is not None else 0
    return tuple([one if one.number else one._replace(number=number) for one in ended])


def waits_for(stored: Message) -> str:
    """Why a message with NOT-BEFORE is held."""
    return f"not before {iso_time(stored.not_before_ns)[:19]}Z, as its sender asked"


def channel_full_until(stored: Message, now_ns: int) -> int:
    """Next check of a message whose channel is full: in at most 60 s, no later than its TTL."""
    due = now_ns + CHANNEL_FULL_RECHECK_NS
    if stored.ttl_over_ns is not None:
        due = min(due, max(stored.ttl_over_ns, now_ns) + 1)
    return due


def _reply_of(subject: Subject, given: ControlReply) -> tuple[SystemMessage, ...]:
    """The reply to a command; empty if it needs none, or the supervisor will answer."""
    if given.ok is None:
        return ()
    text = f"completed {given.text}" if given.ok else given.text
    return (reply(subject, Kind.ACK if given.ok else Kind.NACK, text, given.attached),)


def _own_draft(own: SystemMessage, at_ns: int, answered: Message | None) -> Draft:
    """A message of the relay's own as the engine gets it; an acknowledgment if one is expected."""
    message = own.message
    new = router.new_message(message, own.message_id, at_ns, None)
    metadata = {**(new.metadata or {}), "kind": str(message.kind)}
    new = replace(new, metadata=metadata)
    if message.kind not in NOTICES:
        kind = MessageType.ERROR if answered is None else MessageType.ACKNOWLEDGMENT
        thread = None if answered is None else answered.correlation_id
        new = replace(new, message_type=kind, correlation_id=thread)
    if new.topic is not None:
        return Draft(Route(SYSTEM, ChannelType.PUB_SUB, (ORCHESTRATOR,)), new)
    name = direct_channel_name(message.to, ORCHESTRATOR)
    members = (message.to, ORCHESTRATOR)
    return Draft(Route(name, ChannelType.DIRECT, members, (message.to,)), new)
