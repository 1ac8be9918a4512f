"""Control messages: requests of agents to the orchestrator, and its replies.

Here: ``join``, ``leave``, ``subscribe``, ``unsubscribe`` and ``status``. A ``command`` is executed
by ``relay.delivery.actions``, ``continuity`` by ``relay.delivery.saved_state``; ``spawn`` and
``release`` by the supervisor, once they are accepted. See docs/formats/msg.md.
"""

from __future__ import annotations

from msgspec.structs import replace

from relay.acomm.model import ChannelType
from relay.agents import run_files
from relay.agents.requests import Requester, Spec, read_request
from relay.agents.roster import Roster
from relay.agents.status import AgentStatus, AgentStatusTracker, StatusChange
from relay.base.errors import CommError, MessageError, Refused, UnsafePath
from relay.base.message import CHANNEL_KINDS, Kind, MessageFile, command_fields, control_fields
from relay.delivery import actions, saved_state
from relay.delivery.cancel import Canceller
from relay.delivery.channel_fields import filter_of
from relay.delivery.file_ops import DiskFull
from relay.delivery.plan import notices_of_end
from relay.delivery.saved_state import StateStore
from relay.delivery.values import ControlReply, Effects, Part, Resources, Subject, SystemMessage
from relay.engine import rules
from relay.engine.engine import Engine
from relay.reach.session import NO_SESSION, live_session

PROCESS_KINDS = frozenset({Kind.SPAWN, Kind.RELEASE})
MAX_NOTE = 500  # characters of a status that the agents table keeps
EVERYTHING = "#"  # the pattern of a subscription without a topic
FIELDS = {Kind.SUBSCRIBE: ("PATTERN", "FILTER"), Kind.UNSUBSCRIBE: ("PATTERN",)}


class Orchestrator(Part):
    """Carries out the messages that are addressed to the orchestrator."""

    def __init__(
        self,
        given: Resources,
        roster: Roster,
        statuses: AgentStatusTracker,
        states: StateStore,
        canceller: Canceller,
    ) -> None:
        super().__init__(given)
        self._roster = roster
        self._statuses = statuses
        self._states = states
        self._canceller = canceller

    def carry_out(self, message: MessageFile, subject: Subject) -> ControlReply:
        """Carry out a message. Errors: DiskFull, which is transient."""
        lead = self._roster.trusted_lead()
        sender, message_id = subject.agent, subject.message_id
        if message.kind in PROCESS_KINDS:
            requester = Requester(sender, message_id, subject.at_ns, lead)
            request = read_request(message, requester, self._config.spawn)
            if isinstance(request, str):
                return ControlReply(False, request)
            if request.spec is not None:
                self._save(request.spec)
            return ControlReply(None, effects=Effects(asked=request.intent))
        if message.kind is Kind.CONTINUITY:
            return saved_state.handle(message, message_id, sender, lead, self._states)
        if message.kind is Kind.STATUS:
            note = message.content.decode()[:MAX_NOTE]
            return ControlReply(None, effects=Effects(status_note=note))
        reply = handle(message, subject, self._store, lead)
        if reply.effects.cancellation is not None:
            return self._canceller.cancel(reply.effects.cancellation)
        asked = reply.effects.asked
        if asked is not None and (why := self._no_session(asked.name)):
            return ControlReply(False, why)
        change = reply.effects.status_change
        if change is None:
            return reply
        if self._exists(change):
            return replace(reply, told=self._notices_of_end(change, subject.at_ns))
        return ControlReply(False, f"there is no agent {change.name}: `relay agents` lists them")

    def _save(self, spec: Spec) -> None:
        """Write what is to be started into run/. Errors: DiskFull."""
        try:
            with self._home.dirs() as dirs:
                run_files.save_spec(dirs, spec)
        except (OSError, UnsafePath) as exc:
            raise DiskFull(f"run/ cannot be written: {exc}") from exc

    def _no_session(self, name: str) -> str:
        """The reason why it is not known when an agent is idle; empty if it is known."""
        if name not in self._roster.agents:
            return f"there is no agent {name}: `relay agents` lists them"
        if live_session(self._home.root, name) is None:
            return NO_SESSION.format(name)
        return ""

    def _notices_of_end(self, change: StatusChange, at_ns: int) -> tuple[SystemMessage, ...]:
        """Notices to the senders of an agent's unread mail when it is retired."""
        if change.status != AgentStatus.RETIRED or change.name in self._statuses.retired:
            return ()
        unread = self._ledger.deliveries.unread_senders(change.name)
        plans = notices_of_end(change, at_ns, unread, self._roster.agents)
        return tuple(message for plan in plans for message in plan.messages)

    def _exists(self, change: StatusChange) -> bool:
        """True if the status may change; an agent without a mailbox may be retired.

        What vanished with that mailbox goes back to its senders.
        """
        if change.name in self._roster.agents:
            return True
        return change.status == AgentStatus.RETIRED and self._statuses.is_away(change.name)


def handle(
    message: MessageFile, subject: Subject, store: Engine, lead: str | None = None
) -> ControlReply:
    """Execute a control message, once; repeating it changes nothing.

    ``subject``: the message. ``lead``: the agent with that role, if known; it has the operator's
    permissions.
    """
    if message.kind is Kind.COMMAND:
        return _command(message, subject, store, lead)
    if message.kind not in CHANNEL_KINDS:
        return ControlReply(
            False,
            f"the orchestrator does not accept KIND {message.kind}: "
            "expected join, leave, subscribe, unsubscribe, spawn, release, continuity, status, "
            "and command with an ACTION",
        )
    fields = control_fields(message)
    name = fields.get("CHANNEL", "").removeprefix("#")
    if message.to.startswith("#"):
        if name not in ("", message.to[1:]):
            reason = f"TO says {message.to} and CHANNEL says {name}: name one channel"
            return ControlReply(False, reason)
        name = message.to[1:]
        fields.setdefault("PATTERN", EVERYTHING if message.kind is Kind.SUBSCRIBE else "")
    if not name:
        return ControlReply(
            False,
            f"CHANNEL is missing: {message.kind} needs `TO: #name`, or a body line `CHANNEL: name`",
        )
    try:
        return ControlReply(True, _change_channel(message.kind, name, fields, subject, store))
    except (CommError, Refused) as exc:
        return ControlReply(False, str(exc))


def _command(
    message: MessageFile, subject: Subject, store: Engine, lead: str | None
) -> ControlReply:
    try:
        done = actions.execute(command_fields(message), subject, lead, store)
    except (CommError, MessageError, Refused) as exc:
        return ControlReply(False, str(exc))
    return ControlReply(True, done) if isinstance(done, str) else done


def _change_channel(
    kind: Kind, name: str, fields: dict[str, str], subject: Subject, store: Engine
) -> str:
    """Do what the ACTION of the same name does; who joins or subscribes first makes the channel.

    Errors: Refused and CommError, with nothing changed.
    """
    actions.valid_channel_name(name, kind)
    is_new = store.channels.find_by_name(name) is None
    if is_new and kind is Kind.JOIN:
        store.channels.create(name, ChannelType.GROUP, subject.agent)
        return f"created the group {name}, its owner is {subject.agent}"
    action = f"channel.{kind}"
    given = {field: fields[field] for field in FIELDS.get(kind, ()) if fields.get(field)}
    done = {"ACTION": action, **given, "CHANNEL": name}
    if is_new and kind is Kind.SUBSCRIBE and "PATTERN" in given:
        # What is refused must not leave an empty channel behind.
        rules.match_mode(given["PATTERN"])
        filter_of(given.get("FILTER", ""))
        store.channels.create(name, ChannelType.PUB_SUB, subject.agent)
        return f"created the channel {name}; {actions.execute(done, subject, None, store)}"
    return str(actions.execute(done, subject, None, store))
