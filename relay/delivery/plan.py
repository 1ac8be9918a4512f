"""Planning: the recipients of a message, and the replies of the orchestrator.

Fills a WorkItem with outgoing files. The id of a reply is derived from the message it answers, so
planning again after a crash gives the same files. Writes nothing but the states saved by agents
(``relay.delivery.saved_state``): they are durable before the ack is committed.
Source: DESIGN, "How a message flows", steps 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from relay.acomm.model import Channel, ChannelType, DeliveryState, Message, MessageType, Metadata
from relay.agents.requests import Requester, read_request
from relay.agents.status import AgentStatus, StatusChange, parse_status_command
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.config import SpawnSettings
from relay.base.errors import CommError, StoreCapacity, StoreFull
from relay.base.incidents import Incident, IncidentKind
from relay.base.message import Kind, MessageFile, command_fields
from relay.base.names import (
    EVERYONE_CHANNEL,
    ORCHESTRATOR,
    answer_id,
    derived_id,
    direct_channel_name,
    shown,
)
from relay.delivery import control, router, saved_state
from relay.delivery.control import ControlReply
from relay.delivery.file_ops import render_delivered
from relay.delivery.intake import Parsed, sent_at
from relay.delivery.router import Bounce, Directory, Route
from relay.delivery.saved_state import StateStore
from relay.delivery.work import (
    Acknowledged,
    DeferredDelivery,
    KeyRegistration,
    ObligationState,
    OutgoingFile,
    WorkItem,
    system_message_row,
    system_work_about,
)
from relay.engine import ack_rules
from relay.engine.commstore import CommStore
from relay.engine.deliveries import SYSTEM
from relay.engine.retries import DEAD_LETTER_TOPIC

THROTTLED = "throttled: the channel has as many pending messages as max_pending allows"
THROTTLED_RECHECK_NS = 60 * NS_PER_S  # it is let go as soon as it may, and looked at this often
PROCESS_KINDS = frozenset({Kind.SPAWN, Kind.RELEASE})
NOTICES = frozenset({Kind.NOTIFICATION, Kind.REMINDER})  # of the relay's: they answer nothing
STICKY = "sent before it joined"
MAX_NOTE = 500  # characters of a status that the agents table keeps
NO_AGENT = "no longer an agent"
ALL_AVAILABLE: Mapping[str, str] = {}
DEFAULT_SPAWN = SpawnSettings()


class Planner:
    """Plans accepted messages. Owned by the loop."""

    def __init__(
        self,
        store: CommStore,
        lead: Callable[[], str | None],
        unavailable: Mapping[str, str] = ALL_AVAILABLE,
        inactive: Set[str] = frozenset(),
        states: StateStore | None = None,
        spawn: SpawnSettings = DEFAULT_SPAWN,
        trusted_lead: Callable[[], str | None] | None = None,
    ) -> None:
        self._store = store
        self._lead = lead
        self._trusted_lead = trusted_lead or lead  # the agent with the lead's permissions
        self._unavailable = (
            unavailable  # terminated or retired agents -> the nack for their senders
        )
        self._inactive = inactive  # agents that get no broadcasts
        self._states = states
        self._spawn = spawn

    def plan(self, work: WorkItem, accepted: Parsed, agents: Set[str], now_ns: int) -> None:
        """Plan a message that has a row; planning it again after a crash gives the same.

        A message already in the store goes to the recipients it was accepted for.
        """
        message = accepted.message
        stored = self._find_stored(work)
        work.is_stored = stored is not None
        ttl_s = message.ttl_s
        sent = sent_at(work.file, work.discovered_at)
        if ttl_s and stored is None and now_ns > sent + ttl_s * NS_PER_S:
            self.refuse(work, f"its TTL of {ttl_s} s passed before it could be delivered")
            return
        route = self._route(message, work.agent, stored, agents)
        if isinstance(route, Bounce):
            if route.answers is not None:  # the answer counts, even without its sender
                work.acknowledged = self._acknowledge(message, work, route.answers)
            self.refuse(work, route.reason)
            return
        try:
            stored = stored or self._send(work, message, route)
        except (StoreFull, StoreCapacity):
            raise
        except CommError as exc:
            self.refuse(work, str(exc))
            return
        if route.answers is not None:
            work.acknowledged = self._acknowledge(message, work, route.answers)
        if stored.id in self._store.state.deliveries:  # else it is long done, and rolled out
            self._plan_deliveries(work, accepted, stored, route, agents)

    def refuse(self, work: WorkItem, reason: str) -> None:
        """Refuse a file: the sender gets a nack with the reason."""
        work.failure = reason
        name = shown(work.file.file_name)
        text = reason if name in reason else f"{name}: {reason}"
        self._answer(work, Kind.NACK, f"not delivered: {text}", None)

    def reply(
        self, agent: str, message_id: str, at_ns: int, key: str, text: str, kind: Kind = Kind.NACK
    ) -> WorkItem:
        """Work that tells an agent the outcome of its message, once for each ``key``.

        Without a key it is the answer to a control message that was not answered at once.
        Nothing is sent if ``agent`` is empty.
        """
        work = system_work_about(message_id, agent, at_ns, f"{message_id} {key}")
        reply_id = "" if key else answer_id(at_ns, agent, message_id, kind)
        if agent:
            stored = self._store.find_by_relay_id(message_id)
            self._answer(work, kind, text, stored, reply_id)
        return work

    def notify(self, agent: str, at_ns: int, key: str, text: str) -> WorkItem:
        """Work that sends an agent an unrequested notice, once for each ``at_ns`` and ``key``.

        Errors: StoreFull, StoreCapacity.
        """
        work = system_work_about("", agent, at_ns, key)
        self._answer(work, Kind.NOTIFICATION, text, None)
        return work

    def publish_dead_letter(self, work: WorkItem, text: str, agents: Set[str]) -> None:
        """Publish a dead letter on the system topic, if the system channel exists.

        Source: message-engine.txt, "Retry Semantics", step 3c.
        """
        channel = self._store.get_channel_by_name(SYSTEM)
        if channel is None or channel.channel_type is not ChannelType.PUB_SUB:
            return
        notice_id = derived_id(work.discovered_at, "dead", work.message_id, work.notice_key)
        stored = self._store.find_by_relay_id(notice_id)
        body = f"{text}\n".encode()
        to = f"#{SYSTEM}"
        if stored is None:
            metadata: Metadata = {
                "relay_id": notice_id,
                "to": to,
                "created_ns": max(work.discovered_at, self._store.now_ns()),
                "re": work.message_id,
            }
            self._store.join_channel(channel.id, ORCHESTRATOR)
            try:
                stored = self._store.accept(
                    channel.id,
                    ORCHESTRATOR,
                    MessageType.NOTIFICATION,
                    body,
                    topic=DEAD_LETTER_TOPIC,
                    metadata=metadata,
                )
            except CommError:  # paused or closed: no notices wanted
                return
        targets = tuple(name for name in self._store.recipients(stored.id) if name in agents)
        if targets:
            headers = {"TOPIC": DEAD_LETTER_TOPIC, "RE": work.message_id}
            notice = MessageFile(to, Kind.NOTIFICATION, headers, body)
            self._add_system_message(work, notice, notice_id, stored, targets, SYSTEM)

    def add_message(
        self, work: WorkItem, to: str, kind: Kind, text: str, key: str, order: int = 0
    ) -> None:
        """Add a message of the orchestrator about the work's message to that work.

        Sent once for each ``key``: when repeated it is the same message. Messages about one message
        sort by ``order`` in an inbox. Errors: StoreFull, StoreCapacity.
        """
        own_id = answer_id(work.discovered_at + order, to, work.message_id, key)
        said = self._store.find_by_relay_id(own_id)
        body = said.content if said else f"{text}\n".encode()
        message = MessageFile(to, kind, {"RE": work.message_id}, body)
        kept = said or self._store_reply(work, message, own_id, None)
        self._add_system_message(work, message, own_id, kept, (to,))

    def _find_stored(self, work: WorkItem) -> Message | None:
        """The message as stored before a crash or a transient error."""
        stored = self._store.find_by_relay_id(work.message_id)
        if stored is None and work.is_repeat:  # a crash came before its row was completed
            stored = self._store.find_by_relay_id(work.message_id, include_archived=True)
        return stored

    def _route(
        self, message: MessageFile, sender: str, stored: Message | None, agents: Set[str]
    ) -> Route | Bounce:
        is_lead = message.to.lower() == "lead"
        directory = Directory(
            agents, self._lead() if is_lead else None, self._unavailable, self._inactive
        )
        route = router.route(message, sender, directory, self._store)
        if isinstance(route, Bounce) and stored is not None:
            return router.route_again(sender, sorted(self._store.recipients(stored.id)))
        return route

    def _send(self, work: WorkItem, message: MessageFile, route: Route) -> Message:
        channel = self._channel(route)
        fields = router.engine_fields(message, work.message_id, work.discovered_at, route.answers)
        if fields.ttl:
            fields.metadata["sent_ns"] = sent_at(work.file, work.discovered_at)
        return self._store.accept(
            channel.id,
            work.agent,
            fields.message_type,
            message.content,
            recipients=route.recipients,
            topic=fields.topic,
            correlation_id=fields.correlation_id,
            priority=fields.priority,
            metadata=fields.metadata,
            ttl=fields.ttl,
            signature=fields.signature,
            origin=work.origin,
        )

    def _channel(self, route: Route) -> Channel:
        """The channel of a route, created or joined if the route requires it."""
        channel = self._store.get_channel_by_name(route.channel)
        if channel is None:
            owner = route.members[0] if len(route.members) == 2 else ORCHESTRATOR
            channel = self._store.create_channel(route.channel, route.channel_type, owner)
        for member in route.members:
            if not self._store.is_participant(channel.id, member):
                self._store.join_channel(channel.id, member)
        return channel

    def _plan_deliveries(
        self, work: WorkItem, accepted: Parsed, stored: Message, route: Route, agents: Set[str]
    ) -> None:
        """Plan the deliveries of a stored message; the orchestrator may be a recipient."""
        recipients = self._store.recipients(stored.id)
        if not recipients:
            nobody = self._no_recipients_reason(stored, route)
            if nobody:
                self._answer(work, Kind.NACK, nobody, stored)
        if ORCHESTRATOR in recipients:
            work.is_control = True
            self._execute_control(work, accepted.original or accepted.message, stored, agents)
        self._add_deliveries(work, accepted, stored, route, recipients, agents)

    def _no_recipients_reason(self, stored: Message, route: Route) -> str:
        """The nack for a message without recipients; empty if a sticky channel keeps it."""
        if route.channel_type is not ChannelType.PUB_SUB:
            if route.channel == EVERYONE_CHANNEL:
                return "nobody received it: there are no other active agents"
            return f"nobody received it: {route.channel} has no other members"
        if self._store.get_channel(stored.channel_id).config.sticky_messages:
            return ""  # later subscribers get it
        return (
            "nobody received it: there are no other subscribers to "
            f"topic {stored.topic} of #{route.channel}: "
            f"`relay channel show {route.channel}` lists subscriptions"
        )

    def _acknowledge(self, message: MessageFile, work: WorkItem, original: Message) -> Acknowledged:
        """Apply an answer to the delivery that it answers."""
        status, text = router.answer_status(message)
        sender, answer = work.agent, (work.message_id, text)
        ends = ack_rules.ends_obligation(original, status, message.kind is Kind.RESPONSE)
        store = self._store
        store.record_answer(original, sender, status, ends=ends, answer=answer)
        owed = store.state.owed.get(original.id, {}).get(sender)
        duty = ObligationState("open", owed.due_ms * NS_PER_MS or None) if owed else None
        if ends and store.tracks_answer(original):
            duty = ObligationState("answered")
        return Acknowledged(original.relay_id or "", sender, status, *answer, duty)

    def _execute_control(
        self, work: WorkItem, message: MessageFile, stored: Message, agents: Set[str]
    ) -> None:
        """Execute a message addressed to the orchestrator, once, and answer it."""
        for kind in (Kind.ACK, Kind.NACK):
            said = self._store.find_by_relay_id(_answer_id(work, kind))
            if said is not None:  # before a crash: done with it, and this is what came of it
                if kind is Kind.ACK and message.kind is Kind.COMMAND:
                    # what went with it into the ledger may not have got there
                    work.status_change = _status_change(message, work.agent)
                    self._register_key(
                        work, control.registered_key(message, work.agent, self._store)
                    )
                self._reply(work, kind, said.content, stored)
                return
        answer = self._control_reply(work, message, agents)
        if answer.job is not None:
            work.jobs.append(answer.job)
        self._register_key(work, answer.key)
        for number, recipient in self._store.pop_sticky():
            copied = self._store.get_message(number)
            relay_id = copied.relay_id if copied else None
            if relay_id is not None:
                work.deferred.append(DeferredDelivery(relay_id, recipient, STICKY, work.seen_at))
        self._store.deliver(stored.id, [ORCHESTRATOR])
        if self._store.expects_ack(stored):
            self._store.move_deliveries(stored.id, [ORCHESTRATOR], DeliveryState.ACKNOWLEDGED)
        if work.requests:  # the supervisor will answer
            return
        if answer.ok is None:
            work.status_note = message.content.decode()[:MAX_NOTE]
            return
        if answer.ok:
            work.status_change = answer.status_change
            text = f"completed {answer.text}\n".encode()
            self._reply(work, Kind.ACK, text + answer.attached, stored)
        else:
            self._answer(work, Kind.NACK, answer.text, stored)

    def _register_key(self, work: WorkItem, key: KeyRegistration | None) -> None:
        if key is not None:
            work.key = key
            path = f"agents/{key.name}/meta.json"
            detail = f"{work.agent} says: {key}"
            work.incidents.append(Incident(IncidentKind.KEY_CONFIRMED, key.name, path, detail))

    def _control_reply(
        self, work: WorkItem, message: MessageFile, agents: Set[str]
    ) -> ControlReply:
        lead = self._trusted_lead()
        if message.kind in PROCESS_KINDS:
            return self._request_process(work, message)
        if message.kind is Kind.CONTINUITY and self._states is not None:
            return saved_state.handle(message, work.message_id, work.agent, lead, self._states)
        answer = control.handle(message, work.agent, self._store, lead)
        change = answer.status_change
        if change is None or change.name in agents:
            return answer
        # whose mailbox is gone may be retired: what vanished with it goes back to its senders
        if (
            change.status == AgentStatus.RETIRED
            and change.name in self._inactive | self._unavailable.keys()
        ):
            return answer
        return ControlReply(False, f"there is no agent {change.name}: `relay agents` lists them")

    def _request_process(self, work: WorkItem, message: MessageFile) -> ControlReply:
        """Request that a process is started or ended once the message is accepted."""
        requester = Requester(work.agent, work.message_id, work.discovered_at, self._trusted_lead())
        request = read_request(message, requester, self._spawn)
        if isinstance(request, str):
            return ControlReply(False, request)
        work.requests.append(request)
        return ControlReply(None)

    def _add_deliveries(
        self,
        work: WorkItem,
        accepted: Parsed,
        stored: Message,
        route: Route,
        recipients: tuple[str, ...],
        agents: Set[str],
    ) -> None:
        """Add deliveries to recipients with an inbox; the others bounce, with a nack."""
        states = self._store.state.deliveries[stored.id]
        away = self._unavailable
        targets = tuple([r for r in recipients if r in agents and r not in away])
        gone = {
            r: away.get(r, NO_AGENT)
            for r in recipients
            if (r not in agents or r in away)
            and r != ORCHESTRATOR
            and states[r].state is DeliveryState.SENT
        }
        if gone:
            work.bounced = gone
            self._answer(work, Kind.NACK, _bounced_text(gone, work.file.file_name), stored)
        if self._store.is_held(stored.id):
            due = throttled_until(stored, work.seen_at)
            work.deferred += [
                DeferredDelivery(work.message_id, name, THROTTLED, due) for name in targets
            ]
        elif targets:
            data = render_delivered(
                accepted.message,
                work.message_id,
                work.agent,
                work.discovered_at,
                accepted.checksum,
                route.shown_channel,
            )
            work.outgoing.append(OutgoingFile(work.message_id, stored.id, data, targets))

    def _answer(
        self, work: WorkItem, kind: Kind, text: str, stored: Message | None, reply_id: str = ""
    ) -> None:
        self._reply(work, kind, f"{text}\n".encode(), stored, reply_id)

    def _reply(
        self, work: WorkItem, kind: Kind, body: bytes, stored: Message | None, reply_id: str = ""
    ) -> None:
        """Reply to the sender; the id is derived from the message answered."""
        reply_id, to = reply_id or _answer_id(work, kind), work.agent
        headers = {"RE": work.message_id} if work.message_id else {}
        reply = MessageFile(to, kind, headers, body)
        kept = self._store.find_by_relay_id(reply_id) or self._store_reply(
            work, reply, reply_id, stored
        )
        self._add_system_message(work, reply, reply_id, kept, (to,))

    def _add_system_message(
        self,
        work: WorkItem,
        message: MessageFile,
        message_id: str,
        kept: Message,
        targets: tuple[str, ...],
        channel: str | None = None,
    ) -> None:
        """Add a message of the orchestrator, with a row of its own.

        Its time is when it was first stored, possibly a day after the event it describes.
        """
        at = int((kept.metadata or {}).get("created_ns") or work.discovered_at)
        facts = system_message_row(message_id, message.body, str(message.kind), message.to, at)
        checksum = facts.checksum or ""
        data = render_delivered(message, message_id, ORCHESTRATOR, at, checksum, channel)
        work.outgoing.append(OutgoingFile(message_id, kept.id, data, targets, facts))

    def _store_reply(
        self, work: WorkItem, reply: MessageFile, reply_id: str, stored: Message | None
    ) -> Message:
        """Store the reply, as an acknowledgment if one is expected."""
        store = self._store
        name = direct_channel_name(reply.to, ORCHESTRATOR)
        channel = self._channel(Route(name, ChannelType.DIRECT, (reply.to, ORCHESTRATOR)))
        is_notice = reply.kind in NOTICES
        acknowledges = stored is not None and store.expects_ack(stored) and not is_notice
        metadata: Metadata = {
            "relay_id": reply_id,
            "to": reply.to,
            "created_ns": max(work.discovered_at, self._store.now_ns()),
            "kind": str(reply.kind),
        }
        metadata.update({"re": work.message_id} if work.message_id else {})
        return store.accept(
            channel.id,
            ORCHESTRATOR,
            _type_of(reply.kind, acknowledges=acknowledges),
            reply.body,
            recipients=(reply.to,),
            correlation_id=stored.correlation_id if stored and acknowledges else None,
            metadata=metadata,
        )


def _type_of(kind: Kind, *, acknowledges: bool) -> MessageType:
    if kind in NOTICES:
        return MessageType.NOTIFICATION
    return MessageType.ACKNOWLEDGMENT if acknowledges else MessageType.ERROR


def _status_change(message: MessageFile, sender: str) -> StatusChange | None:
    """The status change requested by a command executed before a crash."""
    fields = command_fields(message)
    return parse_status_command(fields.get("ACTION", "").lower(), fields, sender)


def _bounced_text(gone: Mapping[str, str], file_name: str) -> str:
    """One line for all unknown agents, and one for each unavailable agent."""
    unknown = [name for name, why in gone.items() if why == NO_AGENT]
    lines = [f"{', '.join(unknown)}: {NO_AGENT}, did not get {file_name}"] if unknown else []
    lines += [
        f"{why}; {name} did not get {file_name}"
        for name, why in gone.items()
        if name not in unknown
    ]
    return "\n".join(lines)


def throttled_until(stored: Message, now_ns: int) -> int:
    """Next check of a throttled message: at most 60 s from now, and no later than its TTL."""
    due = now_ns + THROTTLED_RECHECK_NS
    if stored.ttl_over_ns is not None:
        due = min(due, max(stored.ttl_over_ns, now_ns) + 1)
    return due


def _answer_id(work: WorkItem, kind: Kind) -> str:
    about = work.message_id if work.has_row else work.file
    return answer_id(work.discovered_at, work.agent, about, work.notice_key or kind)
