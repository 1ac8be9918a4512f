"""Retries: held deliveries, and delivered messages whose acknowledgment is overdue.

An inbox that could not be written is retried after 1, 2, 4 … 60 s, until the TTL passes or
``delivery.give_up_after_s`` of the relay's running time. An overdue message is delivered again with
the next ATTEMPT, or given up and its sender notified. Each attempt, and each end, is a plan like
any other; after a crash before the commit it is due again, and the notice has the same id. See
docs/formats/ledger.md, docs/states.md.
"""

from __future__ import annotations

from typing import Protocol

from relay.acomm.model import DeliveryState, Message
from relay.agents.status import NO_AGENT, Directory
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import MessageError, UnsafePath
from relay.base.home import Dirs
from relay.delivery.apply import CHANNEL_FULL, channel_full_until, waits_for
from relay.delivery.execute import ExecutionResult
from relay.delivery.file_ops import NO_ROOM, render_retry
from relay.delivery.plan import end_delivery
from relay.delivery.values import (
    FIRST_PAUSE_S,
    MOST_PAUSE_S,
    OutgoingFile,
    Part,
    Plan,
    Resources,
    Subject,
)
from relay.engine.retries import OverdueDelivery
from relay.ledger.deliveries import DeliveryFacts
from relay.ledger.ledger import MessageRow

ACCEPTED = "accepted before a crash, and not delivered then"


def pause_after(attempts: int) -> int:
    """Seconds before the next try after ``attempts``: 1, 2, 4 … 60."""
    return min(FIRST_PAUSE_S << min(max(attempts - 1, 0), 30), MOST_PAUSE_S)


class PlanSource(Protocol):
    """A source of plans that are due at times of their own."""

    def due_ns(self) -> int | None:
        """Time of its next plan (monotonic); None: never."""

    def plans_due(self, dirs: Dirs, directory: Directory) -> list[Plan]:
        """A batch of plans that are due."""

    def settle(self, result: ExecutionResult) -> None:
        """Take note of what was executed; what was postponed is planned again."""


class HeldQueue(Part):
    """Tries held deliveries again when they are due."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._released: set[int] = set()  # engine ids that were made due, and not yet delivered

    def due_ns(self) -> int | None:
        """Time of the next retry (monotonic); makes due what ``max_pending`` permits now."""
        if self._released or self._store.state.pending.held:
            self._release(self._clock.now_ns())
        at = self._ledger.deliveries.next_due()
        return None if at is None else self._clock.monotonic_at(at)

    def plans_due(self, dirs: Dirs, directory: Directory) -> list[Plan]:
        """Plans for a batch of due deliveries: attempts, and ends of those given up."""
        now = self._clock.now_ns()
        due = self._ledger.deliveries.due(now, self._config.limits.batch_files)
        rows = self._ledger.rows(held.message_id for held in due)
        plans = [self._plan(dirs, held, rows.get(held.message_id), directory, now) for held in due]
        return [plan for plan in plans if plan is not None]

    def settle(self, result: ExecutionResult) -> None:
        """Nothing: what was not executed stays due; an inbox that refused is in the ledger."""

    def _release(self, now: int) -> None:
        """Make messages of full channels due once ``max_pending`` permits them."""
        ready = set(self._store.deliveries.resumable())
        fresh = ready - self._released
        self._released = ready
        if fresh:
            messages = (self._store.messages.get(number) for number in sorted(fresh))
            ids = [m.relay_id for m in messages if m is not None and m.relay_id is not None]
            with self._ledger.transaction():
                self._ledger.deliveries.release(ids, now)

    def _plan(
        self,
        dirs: Dirs,
        held: DeliveryFacts,
        row: MessageRow | None,
        directory: Directory,
        now: int,
    ) -> Plan | None:
        """The plan for a due delivery; None if there is nothing to do, or not yet."""
        if row is None:  # removed by hand: it would stay due and keep the loop awake
            with self._ledger.transaction():
                self._ledger.deliveries.end_orphans(held.message_id, "its row is gone")
            return None
        stored = self._store.messages.find_by_relay_id(held.message_id)
        is_early = stored is not None and stored.not_before_ns > now  # recovery makes it due
        if stored is not None and is_early and not directory.absence(held.recipient):
            self._hold(held, waits_for(stored), stored.not_before_ns)
            return None
        is_full = stored is not None and self._is_full(stored)
        end = self._end_of(held, stored, directory, now, is_full=is_full)
        if end is not None:
            ended = OverdueDelivery(
                stored.id if stored else 0, held.message_id, held.recipient, held.attempt, *end
            )
            return end_delivery(ended, row, directory, self._store)
        if stored is not None and is_full:
            self._hold(held, CHANNEL_FULL, channel_full_until(stored, now))
            return None
        return self._attempt(dirs, held, row, stored, now)

    def _end_of(
        self,
        held: DeliveryFacts,
        stored: Message | None,
        directory: Directory,
        now: int,
        *,
        is_full: bool,
    ) -> tuple[DeliveryState, str] | None:
        """The state and the reason with which a delivery is given up; None: it is retried."""
        if stored and stored.is_expired(now):
            way = "its channel released it" if is_full else "the inbox could be written"
            return DeliveryState.EXPIRED, f"its TTL of {stored.ttl} s passed before {way}"
        if away := directory.absence(held.recipient):
            return DeliveryState.BOUNCED, away
        since = max(held.staged_at or now, stored.not_before_ns if stored else 0)
        age_s = self._store.deliveries.running_ns(since) // NS_PER_S
        why = held.last_error or ""
        is_ours = why == ACCEPTED or why.startswith(NO_ROOM)  # it fails for no fault of the inbox
        was_tried = not is_ours and (stored is None or why != waits_for(stored))
        if was_tried and age_s >= self._config.delivery.give_up_after_s:
            what = "its channel did not release it" if is_full else "its inbox could not be written"
            return DeliveryState.DEAD, f"{what} for {age_s} s: {why}"
        return None

    def _is_full(self, stored: Message) -> bool:
        """True while the message waits for others of its channel."""
        return self._store.deliveries.is_held(stored.id) and stored.id not in self._released

    def _attempt(
        self, dirs: Dirs, held: DeliveryFacts, row: MessageRow, stored: Message | None, now: int
    ) -> Plan | None:
        """A plan that delivers it; None if its file cannot be made now, and it is retried later."""
        age_s = max(0, now - (held.staged_at or now)) // NS_PER_S
        pause_s = min(FIRST_PAUSE_S + age_s, MOST_PAUSE_S)
        try:
            data = render_retry(dirs, self._store, row, held.attempt)
        except (OSError, UnsafePath, MessageError) as exc:
            self._hold(held, str(exc), now + pause_s * NS_PER_S)
            return None
        number = stored.id if stored else 0
        file = OutgoingFile(held.message_id, number, data, (held.recipient,), held.attempt, pause_s)
        return Plan(_subject(row), files=(file,))

    def _hold(self, held: DeliveryFacts, reason: str, due_at: int) -> None:
        held.last_error, held.due_at = reason, due_at
        with self._ledger.transaction():
            self._ledger.deliveries.hold([held])


class RetryQueue(Part):
    """Retries or ends deliveries whose acknowledgment is overdue."""

    def due_ns(self) -> int | None:
        """Time of the next retry (monotonic)."""
        due_ms = self._store.retries.next_due_ms()
        return None if due_ms is None else self._clock.monotonic_at(due_ms * NS_PER_MS)

    def plans_due(self, dirs: Dirs, directory: Directory) -> list[Plan]:
        """Plans for a batch of overdue deliveries: further attempts, and ends."""
        due = self._store.retries.due()
        if not due:
            return []
        rows = self._ledger.rows({overdue.relay_id for overdue in due})
        again: dict[tuple[int, int], list[OverdueDelivery]] = {}
        ends: list[Plan] = []
        for overdue in due:
            row = rows.get(overdue.relay_id)
            away = directory.absence(overdue.recipient) or ("" if row else NO_AGENT)
            if overdue.state is DeliveryState.WAITING and not away:
                again.setdefault((overdue.number, overdue.attempt), []).append(overdue)
                continue
            if overdue.state is DeliveryState.WAITING:
                state, attempt = DeliveryState.BOUNCED, overdue.attempt - 1
                overdue = overdue._replace(state=state, attempt=attempt, reason=away)
            ends.append(end_delivery(overdue, row, directory, self._store))
        attempts = [self._attempt(dirs, group, rows) for group in again.values()]
        return [plan for plan in attempts if plan is not None] + ends

    def settle(self, result: ExecutionResult) -> None:
        """Log what was delivered again or given up."""
        for plan in result.executed:
            for file in plan.files:
                reached = [r for r in file.recipients if (file.message_id, r) not in result.missed]
                if file.attempt and reached:
                    self._log(
                        f"Delivered again, attempt {file.attempt}: no acknowledgment",
                        action="deliver_again",
                        message_id=file.message_id,
                        recipients=reached,
                    )
            for ended in plan.changes.ended:
                self._log(
                    f"Gave up a delivery to {ended.recipient}: {ended.reason}",
                    action="give_up",
                    level="warning",
                    message_id=ended.relay_id,
                    recipient=ended.recipient,
                )

    def _attempt(
        self, dirs: Dirs, group: list[OverdueDelivery], rows: dict[str, MessageRow]
    ) -> Plan | None:
        """A plan that delivers a message again; None if it cannot be made, which ends it."""
        number, attempt, row = group[0].number, group[0].attempt, rows[group[0].relay_id]
        recipients = tuple(overdue.recipient for overdue in group)
        try:
            data = render_retry(dirs, self._store, row, attempt)
        except MessageError as exc:  # not while the engine knows it
            self._store.retries.dead_letter(number, recipients, str(exc))
            return None
        file = OutgoingFile(row.message_id, number, data, recipients, attempt)
        return Plan(_subject(row), files=(file,))


def _subject(row: MessageRow) -> Subject:
    return Subject(row.message_id, row.agent_name, row.discovered_at)
