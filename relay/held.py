"""Held deliveries: an inbox that could not be written is tried again, and holds up nobody else.

Tried after 1, 2, 4 … 60 s, until the message's TTL, or ``delivery.give_up_after_s``, is over.
Source: DESIGN, "When the engine cannot take it"; FORMATS 4, state ``held``.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from relay import delivery
from relay.clock import NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.model import DeliveryState
from relay.config import Config
from relay.decide import HELD_BACK, HELD_BACK_NS
from relay.delivery import DiskFull
from relay.errors import MessageError, UnsafePath
from relay.home import Dirs
from relay.ledger import Delivery, Ledger, Row
from relay.originals import render_again

GONE = "no longer an agent"


class Ended(NamedTuple):
    """A held delivery that is over before it was made."""

    row: Row
    delivery: Delivery
    state: DeliveryState  # EXPIRED, BOUNCED or DEAD
    reason: str

    @property
    def recipient(self) -> str:
        """Who will not get it."""
        return self.delivery.recipient


class HeldMail:
    """Tries held deliveries when they are due. Owned by the loop."""

    def __init__(self, ledger: Ledger, store: CommStore, config: Config, clock: Clock) -> None:
        self._ledger = ledger
        self._store = store
        self._config = config
        self._clock = clock
        self._let_gone: set[int] = set()  # engine ids that were made due, and not yet delivered

    def due_ns(self) -> int | None:
        """When the next one is due (monotonic)."""
        at = self._ledger.held_until()
        if at is None:
            return None
        return self._clock.monotonic_ns() + max(0, at - self._clock.now_ns())

    def retry_due(self, dirs: Dirs, agents: Set[str], limit: int) -> list[Ended]:
        """Try those whose time has come, ``limit`` at most; those that are over, for ``end``."""
        now = self._clock.now_ns()
        self._let_go(now)
        at = self._ledger.held_until()
        if at is None or at > now:
            return []
        due = self._ledger.held_due(now, limit)
        rows = self._ledger.rows(held.message_id for held in due)
        ended: list[Ended] = []
        for held in due:
            row = rows.get(held.message_id)
            if row is None:  # removed by hand: due for ever, it would never let us sleep
                with self._ledger.transaction():
                    self._ledger.end(held.message_id, held.recipient, "bounced", "its row is gone")
            elif over := self._is_over(held, row, agents, now):
                ended.append(over)
            elif self._is_held_back(held):
                with self._ledger.transaction():
                    due_at = now + HELD_BACK_NS
                    self._ledger.hold([(held.message_id, held.recipient, HELD_BACK, due_at)])
            else:
                self._try(dirs, held, row, now)
        return ended

    def _let_go(self, now: int) -> None:
        """What ``max_pending`` held back and may go now is due now, once."""
        ready = set(self._store.resumable())
        fresh = ready - self._let_gone
        self._let_gone = ready
        if fresh:
            messages = (self._store.get_message(number) for number in sorted(fresh))
            ids = [str((m.metadata or {}).get("relay_id")) for m in messages if m is not None]
            with self._ledger.transaction():
                self._ledger.let_go(ids, now)

    def _is_over(self, held: Delivery, row: Row, agents: Set[str], now: int) -> Ended | None:
        stored = self._store.by_relay_id(held.message_id)
        if stored and stored.ttl and now > row.discovered_at + stored.ttl * NS_PER_S:
            text = f"its TTL of {stored.ttl} s passed before the inbox could be written"
            return Ended(row, held, DeliveryState.EXPIRED, text)
        if held.recipient not in agents:
            return Ended(row, held, DeliveryState.BOUNCED, GONE)
        age_s = (now - held.staged_at) // NS_PER_S
        if age_s >= self._config.delivery.give_up_after_s:
            text = f"its inbox could not be written for {age_s} s: {held.last_error}"
            return Ended(row, held, DeliveryState.DEAD, text)
        return None

    def put_off(self, ended: list[Ended]) -> None:
        """Their senders could not be told now: due again in a while."""
        due = self._clock.now_ns() + self._config.retry.first_s * NS_PER_S
        with self._ledger.transaction():
            self._ledger.hold((one.row.message_id, one.recipient, one.reason, due) for one in ended)

    def _is_held_back(self, held: Delivery) -> bool:
        stored = self._store.by_relay_id(held.message_id)
        if stored is None or not self._store.holds(stored.id):
            return False
        return stored.id not in self._let_gone

    def end(self, ended: list[Ended]) -> None:
        """Give these up; their senders have been told."""
        with self._ledger.transaction():
            for one in ended:
                state = one.state.label.lower()
                self._ledger.end(one.row.message_id, one.recipient, state, one.reason)
        for one in ended:
            stored = self._store.by_relay_id(one.row.message_id)
            if stored is None:
                continue
            if one.state is DeliveryState.DEAD:
                self._store.give_up(stored.id, [one.recipient], one.reason)
            else:
                self._store.move_deliveries(stored.id, [one.recipient], one.state)

    def _try(self, dirs: Dirs, held: Delivery, row: Row, now: int) -> None:
        reason = self._deliver(dirs, held, row)
        with self._ledger.transaction():
            if reason:
                pause_s = self._config.retry.pause_after_s((now - held.staged_at) // NS_PER_S)
                due = now + pause_s * NS_PER_S
                self._ledger.hold([(held.message_id, held.recipient, reason, due)])
            else:
                self._ledger.written([(held.message_id, held.recipient)], now)
        stored = self._store.by_relay_id(held.message_id)
        if not reason and stored is not None:
            self._store.deliver(stored.id, [held.recipient], held.attempt)

    def _deliver(self, dirs: Dirs, held: Delivery, row: Row) -> str:
        """Why it did not work, or nothing."""
        try:
            data = render_again(dirs, self._store, row, held.attempt)
            failed = delivery.stage(dirs, held.message_id, data, [held.recipient])
        except (OSError, UnsafePath, MessageError, DiskFull) as exc:
            return str(exc)
        if failed:
            return failed[held.recipient]
        return delivery.deliver(dirs, held.message_id, held.recipient)
