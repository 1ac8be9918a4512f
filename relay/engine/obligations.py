"""Answers that are owed to a relay's agents: from when, until when, and how each one ends.

    delivered -- answer --> none
              -- due --> reminded -- due --> reminded -- due --> given up

A plain command or query that a relay delivers is owed an answer by each that has it: a command ends
with ``completed`` or ``failed``, a query with its response or ``failed``; ``received`` and
``in_progress`` end neither, and their time begins anew. While attempts to deliver it go on there is
no time: they end in an acknowledgment or a dead letter. A store that delivers by itself knows
nothing of this. Source: message-engine.txt, "Acknowledgment Statuses"; DESIGN, "Attempts".
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from relay.acomm.model import Message, MessageType, Obligation
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.names import ORCHESTRATOR
from relay.engine import ack_rules, events
from relay.engine.base import StoreBase

MOST_REMINDERS = 2  # then it is given up
LONGEST_MS = 2**53  # beyond any wait, and twice of it from now is a time that a file holds


class Due(NamedTuple):
    """An answer that is overdue."""

    message: Message
    recipient: str
    obligation: Obligation
    next_due_ms: int  # where the recipient is reminded now

    @property
    def is_over(self) -> bool:
        """True when it was reminded as often as anybody is: it is given up."""
        return self.obligation.reminders >= MOST_REMINDERS


class OwingCommands(StoreBase):
    """The CommStore's commands around what recipients owe."""

    def next_reminder_ms(self) -> int | None:
        """When the next answer is overdue (Unix ms)."""
        reminders = self.state.reminders
        while reminders and not self.state.is_due(reminders[0]):
            heappop(reminders)
        return reminders[0][0] if reminders else None

    def overdue_answers(self, limit: int) -> list[Due]:
        """Up to ``limit`` answers that are overdue, the one first that is so for longest.

        The same again until ``remind`` or ``release`` says what was done about it.
        """
        now_ms = self._now_ms()
        next_ms = self.next_reminder_ms()
        if next_ms is None or next_ms > now_ms:
            return []
        found: dict[tuple[int, int, str], Due] = {}  # one may stand in the heap twice
        while next_ms is not None and next_ms <= now_ms and len(found) < limit:
            reminder = heappop(self.state.reminders)
            _, number, recipient = reminder
            message, one = self.state.messages[number], self.state.owed[number][recipient]
            again_ms = now_ms + self._answer_timeout_ms(message)
            found[reminder] = Due(message, recipient, one, again_ms)
            next_ms = self.next_reminder_ms()
        for reminder in found:
            heappush(self.state.reminders, reminder)
        return list(found.values())

    def remind(self, message_id: int, recipient: str, due_ms: int) -> None:
        """It was reminded of its answer, which is overdue again at ``due_ms``."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None:
            count = one.reminders + 1
            self.apply(events.Reminded(message_id, recipient, due_ms, count, self._now_s()))

    def release(self, message_id: int, recipients: Iterable[str], said: str = "") -> None:
        """These have answered (``said``: the status), or their answer is waited for no longer."""
        self.apply(events.OwedNoMore(message_id, tuple(recipients), self._now_s(), said))

    def lose_time(self, by_ms: int) -> None:
        """So long nobody ran, or the clock was set forward by it: each deadline is later by it."""
        self.apply(events.TimeLost(by_ms, self._now_s()))

    def lost_ns(self, since_ns: int) -> int:
        """The part of the time since then in which no relay ran (ns)."""
        since = since_ns // NS_PER_S
        return sum(one.ms for one in self.state.lost if one.at > since) * NS_PER_MS

    def _owe(self, message: Message, recipients: Iterable[str], now_ms: int) -> None:
        """These have the message now, and owe its answer where one is owed at all."""
        known = self.state.owed.get(message.id, {})
        retried = ack_rules.still_retried(self.state.channels[message.channel_id], message)
        due_ms = 0 if retried else now_ms + self._answer_timeout_ms(message)
        owing = tuple(
            name
            for name in recipients
            if name not in (message.sender, ORCHESTRATOR)
            and ((one := known.get(name)) is None or (due_ms and not one.due_ms))
        )
        if owing:
            self.apply(events.Owed(message.id, owing, due_ms, now_ms // 1000))

    def _suspend(self, message_id: int, recipient: str) -> None:
        """It has the message no more, or not yet: the answer's time begins when it has it."""
        one = self.state.owed.get(message_id, {}).get(recipient)
        if one is not None and one.due_ms:
            self.apply(events.Owed(message_id, (recipient,), 0, self._now_s(), one.said))

    def owe_again(self, message: Message, recipient: str, said: str) -> None:
        """Its owner's books say that this is owed, and the store does not know: from now on it is.

        ``said``: the recipient's last acknowledgment that ended nothing; empty: none.
        """
        if said:
            self._go_on(message, recipient, said)
        else:
            self._owe(message, [recipient], self._now_ms())

    def is_owed(self, message: Message) -> bool:
        """True for what its recipients owe an answer, here in a relay."""
        return not self.delivers_itself and ack_rules.is_to_be_answered(message)

    def _go_on(self, message: Message, recipient: str, said: str) -> None:
        """It said that its answer is under way: its time begins anew."""
        due_ms = self._now_ms() + self._answer_timeout_ms(message)
        self.apply(events.Owed(message.id, (recipient,), due_ms, self._now_s(), said))

    def _answer_timeout_ms(self, message: Message) -> int:
        """The time for an answer: the message's, else its channel's, else its kind's."""
        asked_ms = self._asked_ms(message)
        if asked_ms is not None:
            return asked_ms
        is_command = message.message_type is MessageType.COMMAND
        return 1000 * (self.command_timeout_s if is_command else self.ack_timeout_s)

    def _ack_timeout_ms(self, message: Message) -> int:
        """The acknowledgment timeout: the message's, else its channel's, else the default."""
        asked_ms = self._asked_ms(message)
        return min(self.ack_timeout_s * 1000, LONGEST_MS) if asked_ms is None else asked_ms

    def _asked_ms(self, message: Message) -> int | None:
        asked_ms = (message.metadata or {}).get("await_ms")
        if isinstance(asked_ms, int) and asked_ms > 0:
            return min(asked_ms, LONGEST_MS)
        asked_s = self.state.channels[message.channel_id].config.ack_timeout
        return min(asked_s * 1000, LONGEST_MS) if asked_s else None
