"""Commands to the orchestrator: messages, channels, dead letters, the journal, agents and keys.

Each ACTION is done completely, or refused with nothing changed and one line with the reason;
repeating it changes nothing. Permissions: an agent for itself; the owner of a channel for that
channel; the operator and the lead for everything. Fields: docs/formats/msg.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from relay.acomm.model import (
    Channel,
    ChannelState,
    ChannelType,
    DeadLetter,
)
from relay.agents.status import RETIRE, REVIVE, parse_status_command
from relay.base.clock import NS_PER_MS, Clock, duration_ms
from relay.base.errors import Refused
from relay.base.incidents import Incident, IncidentKind
from relay.base.message import DIGITS
from relay.base.names import (
    DIRECT_PREFIX,
    EVERYONE_CHANNEL,
    MSG_SUFFIX,
    OPERATOR,
    ORCHESTRATOR,
    is_agent_name,
    is_channel_name,
    message_id_of,
)
from relay.base.text import plural
from relay.delivery.cancel import CANCEL, find_message, recorded_cancellation
from relay.delivery.channel_fields import SETTINGS, filter_of, settings_of, where
from relay.delivery.values import (
    PUBLIC_KEY,
    ControlReply,
    Effects,
    Pack,
    Prune,
    Subject,
)
from relay.engine import rules
from relay.engine.engine import Engine
from relay.journal.tier_plan import PRUNE, SEAL, VERBS, JournalCommand
from relay.ledger.agents import NOTIFY_IDLE, PendingOperation

TYPES = {
    "group": ChannelType.GROUP,
    "broadcast": ChannelType.BROADCAST,
    "pubsub": ChannelType.PUB_SUB,
    "direct": ChannelType.DIRECT,
}
STATES = {
    "channel.pause": ChannelState.PAUSED,
    "channel.resume": ChannelState.ACTIVE,
    "channel.drain": ChannelState.DRAINING,
    "channel.close": ChannelState.CLOSED,
}
NO_KEY = "none"
IDLE_WITHIN = "24h"  # a request to be told when an agent is idle is given up
REGISTER_KEY = "agent.key"
JOURNAL_ACCEPTED = "journal.{} started; `relay journal status` shows the result"


ActionResult = str | ControlReply  # a line that says what is so now; or that and its effects


class ControlCommand(NamedTuple):
    """One command: its action, its fields and the message that has it."""

    action: str
    fields: dict[str, str]  # by upper-case name, ACTION left out
    subject: Subject
    lead: str | None

    @property
    def sender(self) -> str:
        """The agent that sent it."""
        return self.subject.agent

    @property
    def is_privileged(self) -> bool:
        """True for senders with permission for everything."""
        return self.sender in (OPERATOR, self.lead)

    @property
    def settings(self) -> dict[str, str]:
        """Channel settings: the fields that the action itself does not define."""
        known = {*ACTIONS[self.action].needs, *ACTIONS[self.action].takes}
        return {name.lower(): v for name, v in self.fields.items() if name not in known}


class Action(NamedTuple):
    """One ACTION: its function, its required and its optional fields."""

    do: Callable[[ControlCommand, Engine], ActionResult]
    needs: tuple[str, ...] = ("CHANNEL",)
    takes: tuple[str, ...] = ()
    has_settings: bool = False
    is_privileged: bool = False  # for the operator and the lead alone


def execute(
    fields: dict[str, str], subject: Subject, lead: str | None, store: Engine
) -> ActionResult:
    """Execute a command. Errors: Refused and CommError, with nothing changed.

    ``subject``: the message that has it. ``lead``: the agent with that role, if known.
    """
    given = dict(fields)
    name = given.pop("ACTION", "").lower()
    if name not in ACTIONS:
        what = f"there is no ACTION {name[:60]!r}" if name else "ACTION is missing"
        raise Refused(f"{what}: a command has a body line `ACTION: …`, one of {', '.join(ACTIONS)}")
    action = ACTIONS[name]
    missing = [field for field in action.needs if not given.get(field)]
    if missing:
        raise Refused(f"{missing[0]} is missing: {name} needs a body line `{missing[0]}: …`")
    unknown = sorted(given.keys() - {*action.needs, *action.takes})
    if unknown and not action.has_settings:
        there_are = ", ".join((*action.needs, *action.takes))
        raise Refused(
            f"{name} does not accept {unknown[0]}: expected {there_are or 'ACTION alone'}"
        )
    command = ControlCommand(name, given, subject, lead)
    if action.is_privileged and not command.is_privileged:
        raise Refused(f"{name} is for {OPERATOR} and the lead alone, not for {command.sender}")
    return action.do(command, store)


def recorded_effects(fields: dict[str, str], subject: Subject, store: Engine) -> Effects:
    """The effects on the ledger of a command that was executed before a crash."""
    sender = subject.agent
    given = dict(fields)
    name = given.pop("ACTION", "").lower()
    if name == CANCEL:
        return recorded_cancellation(given.get("ID", ""), sender, store)
    if name == REGISTER_KEY:
        return _register_key(ControlCommand(name, given, subject, lead=sender), store).effects
    return Effects(status_change=parse_status_command(name, given, sender))


# -- channels --------------------------------------------------------------------------------


def _create(command: ControlCommand, store: Engine) -> str:
    name = valid_channel_name(command.fields["CHANNEL"], command.action)
    word = command.fields["TYPE"].lower()
    if word not in TYPES:
        raise Refused(f"TYPE {word[:60]!r} is not one of {', '.join(TYPES)}")
    owner = command.fields.get("OWNER") or command.sender
    if owner != command.sender and not command.is_privileged:
        raise Refused(
            f"only {OPERATOR} and the lead can create a channel for another agent, "
            f"not {command.sender}"
        )
    _check_agent("OWNER", owner)
    settings = settings_of(command.settings)
    trials = Engine(Clock())  # only for this one: what it refuses has left nothing in the store
    trial = _make(trials, name, TYPES[word], owner, settings)
    known = store.channels.find_by_name(name)
    if known is None:
        _make(store, name, TYPES[word], owner, settings)
        return f"created the {trial.channel_type.label} channel {name}, its owner is {owner}"
    same = (known.channel_type, known.owner) == (trial.channel_type, owner)
    if settings:
        same = same and _shape(known, store) == _shape(trial, trials)
    if known.state is ChannelState.CLOSED:
        raise Refused(f"channel {name} was closed, which is permanent: choose another name")
    if not same:
        raise Refused(
            f"channel {name} already exists: {known.channel_type.label}, "
            f"{known.state.label}, its owner is {known.owner}"
        )
    return f"the {trial.channel_type.label} channel {name} already exists with these settings"


def _make(
    store: Engine, name: str, kind: ChannelType, owner: str, settings: dict[str, object]
) -> Channel:
    channel = store.channels.create(name, kind, owner)
    return store.channels.configure(channel.id, **settings) if settings else channel


def _shape(channel: Channel, store: Engine) -> tuple[object, ...]:
    return channel.config, channel.description, channel.tags, store.channels.settings(channel.id)


def _join(command: ControlCommand, store: Engine) -> str:
    channel = _open_channel(command, store)
    agent = _agent(command, channel)
    store.channels.join(channel.id, agent)
    kind = channel.channel_type.label
    return f"{agent} is a member of {channel.name}, a {kind} channel{_if_closed(channel)}"


def _if_closed(channel: Channel) -> str:
    return ", which is Closed" if channel.state is ChannelState.CLOSED else ""


def _leave(command: ControlCommand, store: Engine) -> str:
    channel = _open_channel(command, store)
    agent = _agent(command, channel)
    if store.channels.is_participant(channel.id, agent):
        store.channels.leave(channel.id, agent)
    return f"{agent} is not a member of {channel.name}"


def _subscribe(command: ControlCommand, store: Engine) -> str:
    channel = _open_channel(command, store)
    agent = _agent(command, channel)
    wanted = filter_of(command.fields.get("FILTER", ""))
    store.channels.subscribe(channel.id, agent, command.fields["PATTERN"], wanted)
    what = f"{command.fields['PATTERN']} from {channel.name}{where(wanted)}"
    return f"{agent} receives {what}{_if_closed(channel)}"


def _unsubscribe(command: ControlCommand, store: Engine) -> str:
    channel = _open_channel(command, store)
    agent = _agent(command, channel)
    pattern = command.fields.get("PATTERN") or None
    if pattern is not None:
        rules.match_mode(pattern)  # refuse an invalid pattern
    ended = store.channels.unsubscribe(channel.id, agent, pattern)
    return f"{plural(ended, 'subscription')} of {agent} to {channel.name} ended"


def _configure(command: ControlCommand, store: Engine) -> str:
    channel = _own_channel(command, store)
    settings = settings_of(command.settings)
    if not settings:
        raise Refused(f"no setting is given: expected any of {', '.join(SETTINGS)}")
    store.channels.configure(channel.id, **settings)
    changed = ", ".join(f"{name} {value}" for name, value in command.settings.items())
    return f"channel {channel.name} has {changed}"


def _set_state(command: ControlCommand, store: Engine) -> str:
    channel = _own_channel(command, store)
    state = STATES[command.action]
    if state is ChannelState.CLOSED and channel.name.startswith(DIRECT_PREFIX):
        raise Refused(f"{channel.name} is a direct channel, and closing is final: pause it instead")
    store.channels.set_state(channel.id, state)
    return f"channel {channel.name} is {state.label}"


def _channel(command: ControlCommand, store: Engine) -> Channel:
    name = command.fields["CHANNEL"].removeprefix("#")
    channel = store.channels.find_by_name(name)
    if channel is None:
        if not is_channel_name(name):
            raise Refused(f"{name[:60]!r} is not a valid channel name")
        raise Refused(f"channel {name} does not exist: `relay channel create {name}` makes one")
    return channel


def valid_channel_name(given: str, action: str) -> str:
    """The name of a channel that any agent may create or join. Errors: Refused."""
    name = given.removeprefix("#")
    if not is_channel_name(name) or name.startswith(DIRECT_PREFIX) or name == EVERYONE_CHANNEL:
        raise Refused(
            f"{name[:130]!r} is not a valid channel name for {action}: expected letters, "
            f"digits, _ and -, parts joined by /, at most 128 bytes, neither "
            f"{EVERYONE_CHANNEL} nor {DIRECT_PREFIX}…"
        )
    return name


def _open_channel(command: ControlCommand, store: Engine) -> Channel:
    valid_channel_name(command.fields["CHANNEL"], command.action)
    return _channel(command, store)


def _own_channel(command: ControlCommand, store: Engine) -> Channel:
    """The channel, if the sender may change it."""
    channel = _channel(command, store)
    # Where these take nothing, the orchestrator could not even answer.
    if channel.name == EVERYONE_CHANNEL or store.channels.is_participant(channel.id, ORCHESTRATOR):
        raise Refused(f"{channel.name} belongs to the relay and cannot be changed")
    is_between_two = channel.name.startswith(DIRECT_PREFIX)  # created by the first message
    if not command.is_privileged and (is_between_two or command.sender != channel.owner):
        who = "" if is_between_two else f"its owner {channel.owner}, "
        raise Refused(
            f"{command.action} of {channel.name} is for {who}{OPERATOR} and the lead, "
            f"not for {command.sender}"
        )
    return channel


def _agent(command: ControlCommand, channel: Channel) -> str:
    """The agent that the command is about: AGENT, or the sender."""
    agent = command.fields.get("AGENT") or command.sender
    _check_agent("AGENT", agent)
    if agent != command.sender and not command.is_privileged and command.sender != channel.owner:
        raise Refused(
            f"{command.action} of {agent} is for {agent} itself, {channel.owner} who owns "
            f"{channel.name}, {OPERATOR} and the lead, not for {command.sender}"
        )
    return agent


def _check_agent(field: str, name: str) -> None:
    if not is_agent_name(name):
        raise Refused(f"{field} {name[:70]!r} is not a valid agent name")


# -- messages and dead letters ---------------------------------------------------------------


def _cancel(command: ControlCommand, store: Engine) -> ControlReply:
    """The message that is to be cancelled; the caller takes it back."""
    asked = find_message(command.fields["ID"], command.sender, store, command.is_privileged)
    return ControlReply(None, effects=Effects(cancellation=asked))


def _replay(command: ControlCommand, store: Engine) -> str:
    letter = _dead_letter(command, store)
    store.retries.replay(letter.message.id)
    name, recipients = command.fields["ID"], ", ".join(letter.recipients)
    channel = store.channels.get(letter.message.channel_id)
    if channel.state is ChannelState.PAUSED:
        return (
            f"dead letter {name} is held: channel {channel.name} is Paused; "
            f"it is sent again to {recipients} when the channel is resumed"
        )
    return f"dead letter {name} is sent again to {recipients}"


def _discard(command: ControlCommand, store: Engine) -> str:
    store.retries.discard(_dead_letter(command, store).message.id)
    return f"dead letter {command.fields['ID']} is discarded"


def _purge(command: ControlCommand, store: Engine) -> str:
    age = command.fields["OLDER_THAN"]
    if not DIGITS.fullmatch(age):
        raise Refused(f"OLDER_THAN: expected seconds, got {age[:60]!r}")
    discarded = store.retries.purge(int(age))
    return f"{plural(len(discarded), 'dead letter')} discarded"


def _dead_letter(command: ControlCommand, store: Engine) -> DeadLetter:
    """The dead letter with that relay message id, or number in the store."""
    wanted = command.fields["ID"]
    for letter in store.retries.dead_letters():
        if wanted in (str(letter.message.id), letter.message.relay_id):
            return letter
    raise Refused(f"dead letter {wanted[:60]!r} does not exist: `relay dead list` lists them")


# -- the journal -----------------------------------------------------------------------------


def _order(command: ControlCommand, store: Engine) -> ControlReply:
    """The journal command that a command asks for."""
    verb = command.action.removeprefix(JOURNAL)
    words = command.fields.get("SEGMENTS", "").split()
    numbers = {name: command.fields[name] for name in KEEPS if name in command.fields}
    for name, text in [("SEGMENTS", word) for word in words] + list(numbers.items()):
        if not DIGITS.fullmatch(text) or len(text) > MOST_DIGITS:
            raise Refused(f"{name}: expected an integer, got {text[:60]!r}")
    age, size = (int(numbers[name]) if name in numbers else None for name in KEEPS)
    job = JournalCommand(verb, tuple(map(int, words)), age, size)
    return ControlReply(True, JOURNAL_ACCEPTED.format(verb), Effects(job=job))


def _register_key(command: ControlCommand, store: Engine) -> ControlReply:
    """Register a key for an agent."""
    name, word = command.fields["NAME"], command.fields["KEY"].lower()
    _check_agent("NAME", name)
    if word != NO_KEY and not PUBLIC_KEY.fullmatch(word):
        raise Refused(
            f"KEY {word[:80]!r} is not a valid public key: expected 64 hex digits, or {NO_KEY}"
        )
    key = "" if word == NO_KEY else word
    text = f"no key is registered for {name} any more"
    if key:
        text = f"the key {key} is registered for {name}"
    path, detail = f"agents/{name}/meta.json", f"{command.sender} says: {text}"
    incident = Incident(IncidentKind.KEY_CONFIRMED, name, path, detail)
    return ControlReply(True, text, Effects((incident,), key=(name, key)))


# -- agents ----------------------------------------------------------------------------------


def _set_agent_status(command: ControlCommand, store: Engine) -> ControlReply:
    """The new status of an agent; the caller checks that the agent exists."""
    name = command.fields["NAME"]
    _check_agent("NAME", name)
    if name == OPERATOR:
        raise Refused(f"{OPERATOR} is the person at the keyboard and cannot be retired")
    change = parse_status_command(command.action, command.fields, command.sender)
    assert change is not None
    return ControlReply(True, f"{change.name} is {change.status}", Effects(status_change=change))


def _notify_idle(command: ControlCommand, store: Engine) -> ControlReply:
    """The request to be told when an agent is idle; the caller checks that it has a session."""
    subject, name, message_id = (
        command.subject,
        command.fields["NAME"],
        command.fields.get("ID", ""),
    )
    _check_agent("NAME", name)
    if message_id and message_id_of(message_id + MSG_SUFFIX) is None:
        raise Refused(f"ID {message_id[:70]!r} is not a message id")
    try:
        within_ms = duration_ms(command.fields.get("WITHIN", IDLE_WITHIN), "ms", 1)
    except ValueError as exc:
        raise Refused(f"WITHIN: {exc}") from exc
    asked = PendingOperation(
        NOTIFY_IDLE,
        subject.message_id,
        subject.agent,
        subject.at_ns,
        name,
        message_id=message_id,
        until=subject.at_ns + within_ms * NS_PER_MS,
    )
    return ControlReply(None, effects=Effects(asked=asked))


# -- retention -------------------------------------------------------------------------------


def _prune(command: ControlCommand, store: Engine) -> ControlReply:
    return ControlReply(None, effects=Effects(job=Prune()))


def _pack(command: ControlCommand, store: Engine) -> ControlReply:
    before = command.fields.get("BEFORE", "")
    if before and not DAY.fullmatch(before):
        raise Refused(f"BEFORE: expected a day such as 2026-01-31, got {before[:60]!r}")
    return ControlReply(None, effects=Effects(job=Pack(before)))


JOURNAL = "journal."
KEEPS = ("KEEP_AGE", "KEEP_BYTES")
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
MOST_DIGITS = 15
_FIELDS = {SEAL: (), PRUNE: KEEPS}
_PATTERN = ("CHANNEL", "PATTERN")
ACTIONS = {
    CANCEL: Action(_cancel, ("ID",)),
    "channel.create": Action(_create, ("CHANNEL", "TYPE"), ("OWNER",), has_settings=True),
    "channel.join": Action(_join, takes=("AGENT",)),
    "channel.leave": Action(_leave, takes=("AGENT",)),
    "channel.subscribe": Action(_subscribe, _PATTERN, ("FILTER", "AGENT")),
    "channel.unsubscribe": Action(_unsubscribe, takes=("PATTERN", "AGENT")),
    "channel.config": Action(_configure, has_settings=True),
    **{name: Action(_set_state) for name in STATES},
    REGISTER_KEY: Action(_register_key, ("NAME", "KEY"), is_privileged=True),
    RETIRE: Action(_set_agent_status, ("NAME",), ("REASON",), is_privileged=True),
    REVIVE: Action(_set_agent_status, ("NAME",), is_privileged=True),
    "agent.notify_idle": Action(_notify_idle, ("NAME",), ("ID", "WITHIN")),
    "dead.replay": Action(_replay, ("ID",), is_privileged=True),
    "dead.discard": Action(_discard, ("ID",), is_privileged=True),
    "dead.purge": Action(_purge, ("OLDER_THAN",), is_privileged=True),
    **{
        JOURNAL + verb: Action(_order, (), _FIELDS.get(verb, ("SEGMENTS",)), is_privileged=True)
        for verb in VERBS
    },
    "prune": Action(_prune, (), is_privileged=True),
    "archive.pack": Action(_pack, (), ("BEFORE",), is_privileged=True),
}
