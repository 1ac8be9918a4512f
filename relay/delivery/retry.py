"""Retries: deferred deliveries, and delivered messages whose acknowledgment is overdue.

An inbox that could not be written is retried after 1, 2, 4 … 60 s, until the TTL passes or
``delivery.give_up_after_s`` of the relay's running time. An overdue message is delivered again
with the next ATTEMPT, or given up and its sender notified. Each attempt, and each end, is a work
item like any other; after a crash before the commit it is due again, and the notice has the same
id. Source: DESIGN, "When the engine cannot take it"; message-engine.txt, "Retry Semantics";
FORMATS 4, states ``held`` and ``dead``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from relay.acomm.model import DeliveryState, Message
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.config import Config
from relay.base.errors import MessageError, StoreCapacity, StoreFull, UnsafePath
from relay.base.home import Dirs
from relay.delivery.execute import BatchWriter
from relay.delivery.file_ops import render_retry
from relay.delivery.plan import ALL_AVAILABLE, NO_AGENT, THROTTLED, Planner, throttled_until
from relay.delivery.work import (
    Context,
    EndedDelivery,
    OutgoingFile,
    WorkItem,
    system_work,
    system_work_about,
)
from relay.engine.commstore import CommStore
from relay.engine.retries import OverdueDelivery, RetryDecision
from relay.ledger import DeliveryRow, HeldDelivery, Ledger, MessageRow

GONE = NO_AGENT


class FailedDeferral(NamedTuple):
    """A deferred delivery that is given up."""

    row: MessageRow
    delivery: DeliveryRow
    state: DeliveryState  # EXPIRED, BOUNCED or DEAD
    reason: str

    @property
    def recipient(self) -> str:
        return self.delivery.recipient


class DeferredQueue:
    """Retries deferred deliveries when due. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        config: Config,
        clock: Clock,
        unavailable: Mapping[str, str] = ALL_AVAILABLE,
    ) -> None:
        self._unavailable = unavailable  # terminated or retired agents -> the reason
        self._ledger = ledger
        self._store = store
        self._config = config
        self._clock = clock
        self._released: set[int] = set()  # engine ids that were made due, and not yet delivered

    def due_ns(self) -> int | None:
        """Time of the next retry (monotonic)."""
        at = self._ledger.deliveries.next_due()
        if at is None:
            return None
        return self._clock.monotonic_ns() + max(0, at - self._clock.now_ns())

    def due(
        self, dirs: Dirs, agents: Set[str], limit: int
    ) -> tuple[list[WorkItem], list[FailedDeferral]]:
        """Up to ``limit`` due deliveries: work items to execute, and those given up."""
        now = self._clock.now_ns()
        self._release(now)
        at = self._ledger.deliveries.next_due()
        if at is None or at > now:
            return [], []
        due = self._ledger.deliveries.due(now, limit)
        rows = self._ledger.rows(held.message_id for held in due)
        works: list[WorkItem] = []
        ended: list[FailedDeferral] = []
        for held in due:
            row = rows.get(held.message_id)
            if row is None:  # removed by hand: due for ever, it would never let us sleep
                with self._ledger.transaction():
                    self._ledger.deliveries.give_up(
                        held.message_id, held.recipient, "bounced", "its row is gone"
                    )
            elif over := self._end_of(held, row, agents, now):
                ended.append(over)
            elif stored := self._throttled(held):
                with self._ledger.transaction():
                    due_at = throttled_until(stored, now)
                    self._ledger.deliveries.hold([_again(held, THROTTLED, due_at)])
            elif work := self._work(dirs, held, row, now):
                works.append(work)
        return works, ended

    def _release(self, now: int) -> None:
        """Make throttled messages due once ``max_pending`` permits them."""
        ready = set(self._store.resumable())
        fresh = ready - self._released
        self._released = ready
        if fresh:
            messages = (self._store.get_message(number) for number in sorted(fresh))
            ids = [m.relay_id for m in messages if m is not None and m.relay_id is not None]
            with self._ledger.transaction():
                self._ledger.deliveries.release(ids, now)

    def _end_of(
        self, held: DeliveryRow, row: MessageRow, agents: Set[str], now: int
    ) -> FailedDeferral | None:
        stored = self._store.find_by_relay_id(held.message_id)
        if stored and stored.ttl_over_ns is not None and now > stored.ttl_over_ns:
            way = (
                "its channel released it" if self._throttled(held) else "the inbox could be written"
            )
            text = f"its TTL of {stored.ttl} s passed before {way}"
            return FailedDeferral(row, held, DeliveryState.EXPIRED, text)
        if held.recipient in self._unavailable:
            return FailedDeferral(
                row, held, DeliveryState.BOUNCED, self._unavailable[held.recipient]
            )
        if held.recipient not in agents:
            return FailedDeferral(row, held, DeliveryState.BOUNCED, GONE)
        age_s = (now - held.staged_at - self._store.downtime_ns(held.staged_at)) // NS_PER_S
        if age_s >= self._config.delivery.give_up_after_s:
            text = f"its inbox could not be written for {age_s} s: {held.last_error}"
            if self._throttled(held):
                text = f"its channel did not release it for {age_s} s: {held.last_error}"
            return FailedDeferral(row, held, DeliveryState.DEAD, text)
        return None

    def postpone(self, ended: list[FailedDeferral]) -> None:
        """Retry the given-up deliveries later: their senders could not be notified."""
        due = self._clock.now_ns() + self._config.retry.first_s * NS_PER_S
        with self._ledger.transaction():
            self._ledger.deliveries.hold(_again(one.delivery, one.reason, due) for one in ended)

    def retry_later(self, works: list[WorkItem]) -> None:
        """Retry these later: the disk is full."""
        if works:
            now = self._clock.now_ns()
            with self._ledger.transaction():
                self._ledger.deliveries.hold(
                    HeldDelivery(
                        posting.message_id, recipient, posting.attempt, "the disk is full", due
                    )
                    for work in works
                    for due in (now + work.pause_s * NS_PER_S,)
                    for posting in work.outgoing
                    for recipient in posting.recipients
                )

    def _throttled(self, held: DeliveryRow) -> Message | None:
        """The message, if its channel throttles it."""
        stored = self._store.find_by_relay_id(held.message_id)
        if stored is None or not self._store.is_held(stored.id):
            return None
        return None if stored.id in self._released else stored

    def _work(self, dirs: Dirs, held: DeliveryRow, row: MessageRow, now: int) -> WorkItem | None:
        """Work that delivers it; None if its file cannot be made now, and it is retried later."""
        pause_s = self._config.retry.pause_after_s((now - held.staged_at) // NS_PER_S)
        try:
            data = render_retry(dirs, self._store, row, held.attempt)
        except (OSError, UnsafePath, MessageError) as exc:
            with self._ledger.transaction():
                self._ledger.deliveries.hold([_again(held, str(exc), now + pause_s * NS_PER_S)])
            return None
        stored = self._store.find_by_relay_id(held.message_id)
        number = stored.id if stored else 0
        work = system_work(row, f"held {held.recipient}")
        work.pause_s = pause_s
        work.outgoing.append(
            OutgoingFile(held.message_id, number, data, (held.recipient,), attempt=held.attempt)
        )
        return work


def _again(held: DeliveryRow, reason: str, due_at: int) -> HeldDelivery:
    return HeldDelivery(held.message_id, held.recipient, held.attempt, reason, due_at)


DEAD_LETTER_HINT = "`relay dead replay {id}` tries it again, `relay dead discard {id}` lets it go"


class RetryQueue:
    """Retries or ends deliveries whose acknowledgment is overdue. Owned by the loop."""

    def __init__(
        self,
        context: Context,
        planner: Planner,
        writer: BatchWriter,
        unavailable: Mapping[str, str],
    ) -> None:
        self._unavailable = unavailable  # terminated or retired agents -> the reason
        self._ledger = context.ledger
        self._store = context.store
        self._planner = planner
        self._writer = writer
        self._retry = context.config.retry
        self._clock = context.clock
        self._log = context.log
        self._not_before_ns = 0  # monotonic: the disk, or the store, took nothing

    def due_ns(self) -> int | None:
        """Time of the next retry (monotonic)."""
        due_ms = self._store.next_due_ms()
        if due_ms is None:
            return None
        wait_ns = max(0, due_ms * NS_PER_MS - self._clock.now_ns())
        return max(self._clock.monotonic_ns() + wait_ns, self._not_before_ns)

    def retry_due(self, dirs: Dirs, agents: Set[str]) -> None:
        """Retry or end a batch of overdue deliveries."""
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
        """Notify the senders and record the ends, with one commit."""
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
        """The executed items; the rest is due again later."""
        put_off = self._writer.execute(dirs, works) if works else []
        if put_off:
            self._pause(put_off[0].reason)
        waits = {id(one.work) for one in put_off}
        return [work for work in works if id(work) not in waits]

    def failure_notice(
        self, one: EndedDelivery, row: MessageRow | None, agents: Set[str]
    ) -> WorkItem:
        """Work that ends a delivery and notifies its sender. Errors: StoreFull, StoreCapacity."""
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
        """The notices to the sender and on the system topic; the same when repeated.

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
        """True if only the acknowledgment is missing."""
        message = self._store.get_message(one.number)
        known = self._store.state.deliveries.get(one.number, {}).get(one.recipient)
        if message is None or known is None or not self._store.expects_ack(message):
            return False
        return one.attempt > 1 or known.state is not DeliveryState.SENT

    def _pause(self, reason: str) -> None:
        """Pause after the disk or the store refused a write."""
        self._not_before_ns = self._clock.monotonic_ns() + self._retry.first_s * NS_PER_S
        self._log(
            f"Paused retries for {self._retry.first_s} s: {reason}",
            action="postpone",
            level="warning",
        )


def _ended(one: OverdueDelivery, state: DeliveryState) -> EndedDelivery:
    return EndedDelivery(
        one.message.id, _relay_id(one), one.recipient, state, one.attempt, one.reason
    )


def _relay_id(one: OverdueDelivery) -> str:
    return one.message.relay_id or ""
