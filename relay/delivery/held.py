"""Held deliveries: an inbox that could not be written is tried again, and holds up nobody else.

Tried after 1, 2, 4 … 60 s, until the message's TTL is over, or ``delivery.give_up_after_s`` of the
time that the relay runs.
Source: DESIGN, "When the engine cannot take it"; FORMATS 4, state ``held``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from relay.acomm.model import DeliveryState, Message
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.errors import MessageError, UnsafePath
from relay.base.home import Dirs
from relay.delivery.decide import ALL_AVAILABLE, NO_AGENT, THROTTLED, throttled_until
from relay.delivery.redelivery import render_retry
from relay.delivery.work import OutgoingFile, WorkItem, system_work
from relay.engine.commstore import CommStore
from relay.ledger import DeliveryRow, HeldDelivery, Ledger, MessageRow

GONE = NO_AGENT


class FailedDeferral(NamedTuple):
    """A held delivery that is over before it was made."""

    row: MessageRow
    delivery: DeliveryRow
    state: DeliveryState  # EXPIRED, BOUNCED or DEAD
    reason: str

    @property
    def recipient(self) -> str:
        """Who will not get it."""
        return self.delivery.recipient


class DeferredQueue:
    """Tries held deliveries when they are due. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        config: Config,
        clock: Clock,
        unavailable: Mapping[str, str] = ALL_AVAILABLE,
    ) -> None:
        self._unavailable = (
            unavailable  # who is terminated or retired, and why nothing is delivered to them
        )
        self._ledger = ledger
        self._store = store
        self._config = config
        self._clock = clock
        self._released: set[int] = set()  # engine ids that were made due, and not yet delivered

    def due_ns(self) -> int | None:
        """When the next one is due (monotonic)."""
        at = self._ledger.deliveries.next_due()
        if at is None:
            return None
        return self._clock.monotonic_ns() + max(0, at - self._clock.now_ns())

    def due(
        self, dirs: Dirs, agents: Set[str], limit: int
    ) -> tuple[list[WorkItem], list[FailedDeferral]]:
        """Those whose time has come, ``limit`` at most: to be carried out, and what is over."""
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
        """What ``max_pending`` held back and may go now is due now, once."""
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
            way = "its channel let it go" if self._throttled(held) else "the inbox could be written"
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
                text = f"its channel did not let it go for {age_s} s: {held.last_error}"
            return FailedDeferral(row, held, DeliveryState.DEAD, text)
        return None

    def postpone(self, ended: list[FailedDeferral]) -> None:
        """Their senders could not be told now: due again in a while."""
        due = self._clock.now_ns() + self._config.retry.first_s * NS_PER_S
        with self._ledger.transaction():
            self._ledger.deliveries.hold(_again(one.delivery, one.reason, due) for one in ended)

    def retry_later(self, works: list[WorkItem]) -> None:
        """The disk took nothing of these: they are due again in a while."""
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
        """The message, when its channel holds it back."""
        stored = self._store.find_by_relay_id(held.message_id)
        if stored is None or not self._store.is_held(stored.id):
            return None
        return None if stored.id in self._released else stored

    def _work(self, dirs: Dirs, held: DeliveryRow, row: MessageRow, now: int) -> WorkItem | None:
        """What delivers it; None when its file cannot be made now: it is due again later."""
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
