"""Overdue acknowledgments: delivered again with the next ATTEMPT, or given up and told so.

The engine says what is due (``CommStore.due``); each attempt, and each end with what its sender
is told, is carried out like any other work: staged, committed, delivered, noted. A crash before
the commit finds it due again; the same answer has the same id.
Source: message-engine.txt, "Retry Semantics"; FORMATS 4, state ``dead``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from relay.acomm.model import DeliveryState
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import MessageError, StoreCapacity, StoreFull
from relay.base.home import Dirs
from relay.delivery.carry import Carrier
from relay.delivery.context import Basis
from relay.delivery.decide import Decider
from relay.delivery.held import GONE
from relay.delivery.redelivery import render_again
from relay.delivery.work import Over, Posting, Work, notice_of, notice_of_message
from relay.engine.acks import Overdue, Verdict
from relay.ledger import MessageRow

WHAT_NOW = "`relay dead replay {id}` tries it again, `relay dead discard {id}` lets it go"


class OverdueMail:
    """Does what is overdue. Owned by the loop."""

    def __init__(
        self, basis: Basis, decider: Decider, carrier: Carrier, away: Mapping[str, str]
    ) -> None:
        self._away = away  # who is terminated or retired, and why nothing is delivered to them
        self._ledger = basis.ledger
        self._store = basis.store
        self._decider = decider
        self._carrier = carrier
        self._retry = basis.config.retry
        self._clock = basis.clock
        self._log = basis.log
        self._not_before_ns = 0  # monotonic: the disk, or the store, took nothing

    def due_ns(self) -> int | None:
        """When there is something to do next (monotonic)."""
        due_ms = self._store.next_due_ms()
        if due_ms is None:
            return None
        wait_ns = max(0, due_ms * NS_PER_MS - self._clock.now_ns())
        return max(self._clock.monotonic_ns() + wait_ns, self._not_before_ns)

    def retry_due(self, dirs: Dirs, agents: Set[str]) -> None:
        """Do what is due now, a batch of it."""
        if self._clock.monotonic_ns() < self._not_before_ns:
            return
        due = self._store.due()
        if not due:
            return
        rows = self._ledger.rows({_relay_id(one) for one in due})
        again: list[Overdue] = []
        over: list[Over] = []
        for one in due:
            if one.verdict is not Verdict.AGAIN:
                over.append(_over(one, DeliveryState[one.verdict.name]))
            elif (
                one.recipient in agents
                and one.recipient not in self._away
                and _relay_id(one) in rows
            ):
                again.append(one)
            else:
                reason = self._away.get(one.recipient, GONE)
                gone = one._replace(attempt=one.attempt - 1, reason=reason)
                over.append(_over(gone, DeliveryState.BOUNCED))
        self._deliver_again(dirs, again, rows)
        self._end(dirs, over, rows, agents)

    def _deliver_again(self, dirs: Dirs, again: list[Overdue], rows: dict[str, MessageRow]) -> None:
        groups: dict[tuple[int, int], list[Overdue]] = {}
        for one in again:
            groups.setdefault((one.message.id, one.attempt), []).append(one)
        works: list[Work] = []
        for (number, attempt), group in groups.items():
            row = rows[_relay_id(group[0])]
            try:
                data = render_again(dirs, self._store, row, attempt)
            except MessageError as exc:  # not while the engine knows it
                self._store.give_up(number, [one.recipient for one in group], str(exc))
                continue
            work = notice_of(row, f"attempt {attempt}")
            recipients = tuple(one.recipient for one in group)
            work.postings.append(Posting(row.message_id, number, data, recipients, attempt=attempt))
            works.append(work)
        for work in self._carry_out(dirs, works):
            self._log_again(work)

    def _log_again(self, work: Work) -> None:
        (posting,) = work.postings
        reached = [r for r in posting.recipients if (posting.message_id, r) not in work.held]
        if reached:
            self._log(
                f"Delivered again, attempt {posting.attempt}: no acknowledgment",
                action="deliver_again",
                message_id=posting.message_id,
                recipients=reached,
            )

    def _end(
        self, dirs: Dirs, over: list[Over], rows: dict[str, MessageRow], agents: Set[str]
    ) -> None:
        """Tell the senders, and note it: both with one commit."""
        works: list[Work] = []
        for one in over:
            row = rows.get(one.message_id)
            try:
                works.append(self.ending(one, row, agents))
            except (StoreFull, StoreCapacity) as exc:
                self._pause(str(exc))
                break
        for work in self._carry_out(dirs, works):
            self._log_end(work.over[0])

    def _carry_out(self, dirs: Dirs, works: list[Work]) -> list[Work]:
        """Those that were; the rest is due again after a while."""
        put_off = self._carrier.carry_out(dirs, works) if works else []
        if put_off:
            self._pause(put_off[0].reason)
        waits = {id(one.work) for one in put_off}
        return [work for work in works if id(work) not in waits]

    def ending(self, one: Over, row: MessageRow | None, agents: Set[str]) -> Work:
        """What ends a delivery, and tells who is there to hear it. Errors: as ``tell``."""
        work = self.tell(one, row, agents) if row else notice_of_message(one.message_id)
        work.over.append(one)
        return work

    def _log_end(self, one: Over) -> None:
        self._log(
            f"Gave up a delivery to {one.recipient}: {one.reason}",
            action="give_up",
            level="warning",
            message_id=one.message_id,
            recipient=one.recipient,
        )

    def tell(self, one: Over, row: MessageRow, agents: Set[str]) -> Work:
        """What the sender hears, and who listens on the system's topic; the same again as before.

        Errors: StoreFull, StoreCapacity.
        """
        verb = "acknowledged by" if self._was_delivered(one) else "delivered to"
        text = f"not {verb} {one.recipient}: {one.reason}"
        if one.state is DeliveryState.DEAD:
            text += f"; {WHAT_NOW.format(id=row.message_id)}"
        key = f"{one.state.name} {one.recipient} {one.attempt}"
        work = self._decider.tell(
            row.agent_name if row.agent_name in agents else "",
            row.message_id,
            row.discovered_at,
            key,
            text,
        )
        if one.state is DeliveryState.DEAD:
            about = f"message {row.message_id} from {row.agent_name} to {one.recipient} is dead"
            self._decider.announce_dead(work, f"{about}: {one.reason}", agents)
        return work

    def _was_delivered(self, one: Over) -> bool:
        """True when an acknowledgment is what is missing."""
        message = self._store.get_message(one.number)
        known = self._store.state.deliveries.get(one.number, {}).get(one.recipient)
        if message is None or known is None or not self._store.expects_ack(message):
            return False
        return one.attempt > 1 or known.state is not DeliveryState.SENT

    def _pause(self, reason: str) -> None:
        """Neither disk nor store takes anything now: look again in a while, not at once."""
        self._not_before_ns = self._clock.monotonic_ns() + self._retry.first_s * NS_PER_S
        self._log(
            f"Left what is overdue for {self._retry.first_s} s: {reason}",
            action="postpone",
            level="warning",
        )


def _over(one: Overdue, state: DeliveryState) -> Over:
    return Over(one.message.id, _relay_id(one), one.recipient, state, one.attempt, one.reason)


def _relay_id(one: Overdue) -> str:
    return one.message.relay_id or ""
