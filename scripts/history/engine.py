"""The engine's side of a history: the relay's own store, journal, archives and tiers, driven by
a clock that runs through it. Nothing here encodes anything.

Events go into the journal with the time of each; they are synced some thousands at once, since
no message of the past is still awaited.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from relay.acomm.model import ChannelType, DeliveryState, Message, MessageStatus, Origin
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.config import Config
from relay.base.home import Home
from relay.base.names import EVERYONE_CHANNEL, ORCHESTRATOR, direct_channel_name
from relay.daemon.opening import open_store
from relay.daemon.session import make_flusher
from relay.engine import events, rules
from relay.engine.archives import Roller
from relay.engine.checkpoint import InlineExecutor
from relay.engine.messages import NewMessage
from relay.engine.retries import OverdueDelivery
from scripts.history.talk import TOPICS, Cast

COMMIT_EVENTS = 4_000
ROLL_MESSAGES = 100_000  # live messages, and so the most of one archive


ENDS = ("completed", "failed")


class Sent(NamedTuple):
    """A message accepted by the engine."""

    number: int
    recipients: tuple[str, ...]


class Engine:
    """One store and its journal, for one history."""

    def __init__(self, home: Home, config: Config, clock: Clock) -> None:
        self._clock = clock
        opened = open_store(home, config, clock, _warn)
        self._store, self._log, self._tiers = opened.store, opened.events, opened.tiers
        self._written = 0  # events since the last commit
        self._roller = Roller(self._store.archives, config.store, InlineExecutor())
        self._flusher = make_flusher(opened, home, config, InlineExecutor())

    @property
    def position(self) -> int:
        """End of the journal."""
        return self._log.journal.durable

    def begin(self, epoch: int) -> None:
        """Start a relay."""
        self._flush()
        self._log.begin(epoch)

    def gather(self, cast: Cast) -> None:
        """Create the named channels."""
        store = self._store
        for name, members in cast.teams.items():
            team = store.channels.create(name, ChannelType.GROUP, members[0])
            for member in members[1:]:
                store.channels.join(team.id, member)
        topics = store.channels.create(TOPICS, ChannelType.PUB_SUB, cast.agents[0])
        for agent in cast.agents[1:]:
            store.channels.join(topics.id, agent)
        for agent, pattern in cast.subscribers.items():
            store.channels.subscribe(topics.id, agent, pattern)
        everyone = store.channels.create(EVERYONE_CHANNEL, ChannelType.GROUP, ORCHESTRATOR)
        for agent in cast.everyone:
            store.channels.join(everyone.id, agent)
        self._flush()

    def accept(
        self,
        sender: str,
        to: str,
        new: NewMessage,
        origin: Origin | None,
        recipients: tuple[str, ...] | None,
    ) -> Sent:
        """Number and route a message; ``recipients`` None: all of its channel."""
        store = self._store
        message = store.messages.accept(
            self._channel(sender, to), sender, new, recipients=recipients, origin=origin
        )
        return Sent(message.id, tuple(store.state.deliveries[message.id]))

    def force(self, sender: str, to: str, new: NewMessage) -> Sent:
        """Accept a message to a recipient that ``accept`` would refuse."""
        number = self._store.state.next_message
        message = Message(
            number,
            new.message_type,
            sender,
            self._channel(sender, to),
            rules.content_bytes(new.content),
            new.topic,
            new.correlation_id,
            new.priority,
            new.metadata,
            self._seconds(),
            status=MessageStatus.SENT,
        )
        self._store.apply(events.MessageSent(message, (to,)))
        return Sent(number, (to,))

    def _channel(self, sender: str, to: str) -> int:
        store = self._store
        if to.startswith("#"):
            name = to[1:]
        elif to == "*":
            name = EVERYONE_CHANNEL
        else:
            name = direct_channel_name(sender, to)
        channel = store.channels.find_by_name(name)
        if channel is None:
            channel = store.channels.create(name, ChannelType.DIRECT, sender)
            store.channels.join(channel.id, to)
        return channel.id

    def find(self, relay_id: str) -> Message | None:
        """Return a message that is still in the store."""
        return self._store.messages.find_by_relay_id(relay_id)

    def stage(self, sent: Sent, attempt: int = 1) -> None:
        """Record that its files are staged and the message accepted."""
        self._store.deliveries.stage(
            (sent.number, recipient, attempt) for recipient in sent.recipients
        )

    def deliver(self, sent: Sent, attempt: int = 0) -> None:
        """Record that its files are in the inboxes."""
        self._store.deliveries.deliver(sent.number, sent.recipients, attempt)

    def overdue(self, sent: Sent) -> OverdueDelivery | None:
        """Return the retry decision for an overdue acknowledgment, if any."""
        found = self._store.retries.due(self._clock.now_ns())
        return next((one for one in found if one.number == sent.number), None)

    def next_due_ns(self) -> int:
        """Time of the next overdue acknowledgment."""
        due_ms = self._store.retries.next_due_ms()
        assert due_ms is not None
        return due_ms * NS_PER_MS

    def owed(self, sent: Sent, recipient: str) -> bool:
        """True while the recipient owes an answer."""
        return recipient in self._store.state.owed.get(sent.number, {})

    def deliver_again(self, sent: Sent) -> None:
        """Record the same delivery twice, which must never happen."""
        moved = events.DeliveriesMoved(
            sent.number, sent.recipients, DeliveryState.DELIVERED, self._seconds()
        )
        self._store.apply(moved)

    def read(self, number: int, recipient: str) -> None:
        """Record a read; of archived messages only the ledger knows it."""
        self._store.deliveries.receive(number, recipient)

    def acknowledge(self, number: int, recipient: str, said: str, answer: tuple[str, str]) -> None:
        """Record an answer: its id and its first line."""
        message = self._store.messages.get(number)
        assert message is not None
        self._store.deliveries.record_answer(
            message, recipient, said, ends=said in ENDS, answer=answer
        )

    def give_up(self, number: int, recipient: str, reason: str) -> None:
        """Make it a dead letter."""
        self._store.retries.dead_letter(number, [recipient], reason)

    def _seconds(self) -> int:
        return self._clock.now_ns() // NS_PER_S

    def tick(self) -> None:
        """Append pending events to the journal, with the current time."""
        self._written += self._log.append()
        if self._written >= COMMIT_EVENTS:
            self._flush()
        if len(self._store.state.messages) >= ROLL_MESSAGES:
            self.roll()

    def _flush(self) -> None:
        self._log.commit()
        self._written = 0

    def roll(self) -> None:
        """Move old, final messages into archives."""
        self._flush()
        self._roller.step()
        while (due := self._roller.due_ns()) is None or due <= self._clock.monotonic_ns():
            self._roller.step()
            self._log.commit()

    def checkpoint(self) -> None:
        """Write the store's file, and move segments between tiers by age."""
        self._flush()
        self._log.journal.roll_if_due()
        self._flusher.flush()
        self._log.commit()
        while self._tiers.run_next() is not None:
            pass

    def close(self) -> None:
        """Sync and close all files."""
        self.checkpoint()
        self._log.close()


def _warn(text: str) -> None:
    print(f"make-history: {text}", file=sys.stderr)
