"""Control messages: requests of agents to the orchestrator, and its replies.

Here: ``join``, ``leave``, ``subscribe``, ``unsubscribe`` and ``status``. A ``command`` is executed
by ``relay.delivery.actions``, ``continuity`` by ``relay.delivery.saved_state``; ``spawn`` and
``release`` by the supervisor. Source: relay-file-system.txt 4.1, FORMATS 1.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.acomm.model import Channel, ChannelType, MessageFilter
from relay.agents.status import StatusChange
from relay.base.errors import CommError, MessageError, Refused
from relay.base.message import CHANNEL_KINDS, Kind, MessageFile, command_fields, control_fields
from relay.base.names import DIRECT_PREFIX, EVERYONE_CHANNEL, is_channel_name
from relay.delivery import actions
from relay.delivery.filters import filter_of, where
from relay.delivery.work import KeyRegistration, Pack, Prune
from relay.engine import topics
from relay.engine.commstore import CommStore
from relay.journal.plan import JournalCommand

EVERYTHING = "#"  # the pattern of a subscription without a topic
JOURNAL_ACCEPTED = "journal.{} started; `relay journal status` shows the result"
JOB_ACCEPTED = "{} started; the result will be in logs/relay.log"


class ControlReply(NamedTuple):
    """The reply of the orchestrator. ``ok`` None: no reply, the message was a statement."""

    ok: bool | None
    text: str = ""
    job: JournalCommand | Prune | Pack | None = None  # to be carried out beside the loop
    key: KeyRegistration | None = None  # for the ledger: a key that counts from now on
    status_change: StatusChange | None = None  # of an agent: noted with the answer
    attached: bytes = b""  # appended to the text


def handle(
    message: MessageFile, sender: str, store: CommStore, lead: str | None = None
) -> ControlReply:
    """Execute a control message, once; repeating it changes nothing.

    ``lead``: the agent with that role, if known; it has the operator's permissions.
    """
    if message.kind is Kind.STATUS:
        return ControlReply(None)
    if message.kind is Kind.COMMAND:
        return _command(message, sender, store, lead)
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
            said = f"TO says {message.to} and CHANNEL says {name}: name one channel"
            return ControlReply(False, said)
        name = message.to[1:]
        fields.setdefault("PATTERN", EVERYTHING if message.kind is Kind.SUBSCRIBE else "")
    if not name:
        return ControlReply(
            False,
            f"CHANNEL is missing: {message.kind} needs `TO: #name`, or a body line `CHANNEL: name`",
        )
    if not is_channel_name(name) or name.startswith(DIRECT_PREFIX) or name == EVERYONE_CHANNEL:
        return ControlReply(
            False,
            f"{name!r} is not a valid channel name to {message.kind}: expected letters, "
            f"digits, _ and -, parts joined by /, at most 128 bytes, neither "
            f"{EVERYONE_CHANNEL} nor {DIRECT_PREFIX}…",
        )
    try:
        return _change_channel(message.kind, name, fields, sender, store)
    except (CommError, Refused) as exc:
        return ControlReply(False, str(exc))


def registered_key(message: MessageFile, sender: str, store: CommStore) -> KeyRegistration | None:
    """The key registered by a message executed before a crash; None if it registers none."""
    if message.kind is not Kind.COMMAND:
        return None
    fields = command_fields(message)
    if fields.get("ACTION", "").lower() != "agent.key":
        return None
    done = actions.execute(fields, sender, sender, store)  # permission was checked before
    return done if isinstance(done, KeyRegistration) else None


def _command(message: MessageFile, sender: str, store: CommStore, lead: str | None) -> ControlReply:
    try:
        fields = command_fields(message)
        done = actions.execute(fields, sender, lead, store)
    except (CommError, MessageError, Refused) as exc:
        return ControlReply(False, str(exc))
    if isinstance(done, JournalCommand):
        return ControlReply(True, JOURNAL_ACCEPTED.format(done.verb), done)
    if isinstance(done, KeyRegistration):
        return ControlReply(True, str(done), key=done)
    if isinstance(done, StatusChange):
        return ControlReply(True, f"{done.name} is {done.status}", status_change=done)
    if isinstance(done, Prune | Pack):
        return ControlReply(True, JOB_ACCEPTED.format(fields["ACTION"].lower()), done)
    return ControlReply(True, done)


def _change_channel(
    kind: Kind, name: str, fields: dict[str, str], sender: str, store: CommStore
) -> ControlReply:
    pattern = fields.get("PATTERN", "")
    channel = store.get_channel_by_name(name)
    if kind is Kind.JOIN:
        if channel is None:
            store.create_channel(name, ChannelType.GROUP, sender)
            return ControlReply(True, f"created the group {name}, you are its owner")
        store.join_channel(channel.id, sender)
        return ControlReply(
            True, f"you are a member of {name}, a {channel.channel_type.label} channel"
        )
    if kind is Kind.SUBSCRIBE:
        wanted = filter_of(fields.get("FILTER", ""))
        return _subscribe(channel, name, pattern, wanted, sender, store)
    if channel is None:
        return ControlReply(False, f"channel {name} does not exist")
    if kind is Kind.LEAVE:
        if not store.is_participant(channel.id, sender):  # it may be obeyed again after a crash
            return ControlReply(True, f"you are not a member of {name}")
        store.leave_channel(channel.id, sender)
        return ControlReply(True, f"you are no longer a member of {name}")
    ended = store.unsubscribe(channel.id, sender, pattern or None)
    return ControlReply(True, f"{ended} subscription{'s' * (ended != 1)} to {name} ended")


def _subscribe(
    channel: Channel | None,
    name: str,
    pattern: str,
    wanted: MessageFilter | None,
    sender: str,
    store: CommStore,
) -> ControlReply:
    if not pattern:
        return ControlReply(
            False, "PATTERN is missing: subscribe needs a body line `PATTERN: build.#`"
        )
    made = channel is None
    if channel is None:
        topics.match_mode(pattern)  # a bad pattern must not leave an empty channel behind
        channel = store.create_channel(name, ChannelType.PUB_SUB, sender)
    store.subscribe(channel.id, sender, pattern, wanted)
    also = f"created the channel {name}; " if made else ""
    return ControlReply(True, f"{also}you receive {pattern} from {name}{where(wanted)}")
