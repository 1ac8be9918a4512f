"""OverdueDelivery acknowledgments: delivered again with the next ATTEMPT, or given up and told so.

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
from relay.delivery.carry import BatchWriter
from relay.delivery.context import Context
from relay.delivery.decide import Planner
from relay.delivery.held import GONE
from relay.delivery.redelivery import render_retry
from relay.delivery.work import (
    EndedDelivery,
    OutgoingFile,
    WorkItem,
    system_work,
    system_work_about,
)
from relay.engine.retries import OverdueDelivery, RetryDecision
from relay.ledger import MessageRow

DEAD_LETTER_HINT = "`relay dead replay {id}` tries it again, `relay dead discard {id}` lets it go"


class RetryQueue:
    """Does what is overdue. Owned by the loop."""

    def __init__(
        self,
        context: Context,
        planner: Planner,
        writer: BatchWriter,
        unavailable: Mapping[str, str],
    ) -> None:
        self._unavailable = (
            unavailable  # who is terminated or retired, and why nothing is delivered to them
        )
        self._ledger = context.ledger
        self._store = context.store
        self._planner = planner
        self._writer = writer
        self._retry = context.config.retry
        self._clock = context.clock
        self._log = context.log
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
        again: list[OverdueDelivery] = []
        over: list[EndedDelivery] = []
        for one in due:
            if one.decision is not RetryDecision.RETRY:
                over.append(_ended(one, DeliveryState[one.decision.name]))
            elif (
                one.recipient in agents
                and one.recipient not in self._unavailable
                and _relay_id(one) in rows
            ):
                again.append(one)
            else:
                reason = self._unavailable.get(one.recipient, GONE)
                gone = one._replace(attempt=one.attempt - 1, reason=reason)
                over.append(_ended(gone, DeliveryState.BOUNCED))
        self._deliver_again(dirs, again, rows)
        self._end_deliveries(dirs, over, rows, agents)

    def _deliver_again(
        self, dirs: Dirs, again: list[OverdueDelivery], rows: dict[str, MessageRow]
    ) -> None:
        groups: dict[tuple[int, int], list[OverdueDelivery]] = {}
        for one in again:
            groups.setdefault((one.message.id, one.attempt), []).append(one)
        works: list[WorkItem] = []
        for (number, attempt), group in groups.items():
            row = rows[_relay_id(group[0])]
            try:
                data = render_retry(dirs, self._store, row, attempt)
            except MessageError as exc:  # not while the engine knows it
                self._store.dead_letter(number, [one.recipient for one in group], str(exc))
                continue
            work = system_work(row, f"attempt {attempt}")
            recipients = tuple(one.recipient for one in group)
            work.outgoing.append(
                OutgoingFile(row.message_id, number, data, recipients, attempt=attempt)
            )
            works.append(work)
        for work in self._execute(dirs, works):
            self._log_retry(work)

    def _log_retry(self, work: WorkItem) -> None:
        (posting,) = work.outgoing
        reached = [r for r in posting.recipients if (posting.message_id, r) not in work.undelivered]
        if reached:
            self._log(
                f"Delivered again, attempt {posting.attempt}: no acknowledgment",
                action="deliver_again",
                message_id=posting.message_id,
                recipients=reached,
            )

    def _end_deliveries(
        self, dirs: Dirs, over: list[EndedDelivery], rows: dict[str, MessageRow], agents: Set[str]
    ) -> None:
        """Tell the senders, and note it: both with one commit."""
        works: list[WorkItem] = []
        for one in over:
            row = rows.get(one.message_id)
            try:
                works.append(self.failure_notice(one, row, agents))
            except (StoreFull, StoreCapacity) as exc:
                self._pause(str(exc))
                break
        for work in self._execute(dirs, works):
            self._log_end(work.ended[0])

    def _execute(self, dirs: Dirs, works: list[WorkItem]) -> list[WorkItem]:
        """Those that were; the rest is due again after a while."""
        put_off = self._writer.execute(dirs, works) if works else []
        if put_off:
            self._pause(put_off[0].reason)
        waits = {id(one.work) for one in put_off}
        return [work for work in works if id(work) not in waits]

    def failure_notice(
        self, one: EndedDelivery, row: MessageRow | None, agents: Set[str]
    ) -> WorkItem:
        """What ends a delivery, and tells who is there to hear it. Errors: as ``tell``."""
        work = self.sender_notice(one, row, agents) if row else system_work_about(one.message_id)
        work.ended.append(one)
        return work

    def _log_end(self, one: EndedDelivery) -> None:
        self._log(
            f"Gave up a delivery to {one.recipient}: {one.reason}",
            action="give_up",
            level="warning",
            message_id=one.message_id,
            recipient=one.recipient,
        )

    def sender_notice(self, one: EndedDelivery, row: MessageRow, agents: Set[str]) -> WorkItem:
        """What the sender hears, and who listens on the system's topic; the same again as before.

        Errors: StoreFull, StoreCapacity.
        """
        verb = "acknowledged by" if self._was_delivered(one) else "delivered to"
        text = f"not {verb} {one.recipient}: {one.reason}"
        if one.state is DeliveryState.DEAD:
            text += f"; {DEAD_LETTER_HINT.format(id=row.message_id)}"
        key = f"{one.state.name} {one.recipient} {one.attempt}"
        work = self._planner.reply(
            row.agent_name if row.agent_name in agents else "",
            row.message_id,
            row.discovered_at,
            key,
            text,
        )
        if one.state is DeliveryState.DEAD:
            about = f"message {row.message_id} from {row.agent_name} to {one.recipient} is dead"
            self._planner.publish_dead_letter(work, f"{about}: {one.reason}", agents)
        return work

    def _was_delivered(self, one: EndedDelivery) -> bool:
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


def _ended(one: OverdueDelivery, state: DeliveryState) -> EndedDelivery:
    return EndedDelivery(
        one.message.id, _relay_id(one), one.recipient, state, one.attempt, one.reason
    )


def _relay_id(one: OverdueDelivery) -> str:
    return one.message.relay_id or ""
