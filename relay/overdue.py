"""Overdue acknowledgments: delivered again with the next ATTEMPT, or given up and told so.

The engine says what is due (``CommStore.due``); what is done here is done to files and ledger
first and told to the engine last, so that a crash in between finds it due again, and the second
time is harmless. Source: message-engine.txt, "Retry Semantics"; FORMATS 4, state ``dead``.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from relay.carry import Carrier
from relay.clock import NS_PER_MS, NS_PER_S, Clock
from relay.comm.acks import Overdue, Verdict
from relay.comm.engine import CommStore
from relay.comm.model import DeliveryState
from relay.config import Retry
from relay.decide import Decider
from relay.errors import MessageError, StoreCapacity, StoreFull
from relay.found import Found
from relay.held import GONE
from relay.home import Dirs
from relay.ledger import Ledger, Row
from relay.originals import render_again
from relay.work import Posting, Work

STATES = {
    Verdict.EXPIRED: DeliveryState.EXPIRED,
    Verdict.DEAD: DeliveryState.DEAD,
    Verdict.AGAIN: DeliveryState.BOUNCED,  # its recipient is gone
}
WHAT_NOW = "`relay dead replay {id}` tries it again, `relay dead discard {id}` lets it go"


class OverdueMail:
    """Does what is overdue. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        decider: Decider,
        carrier: Carrier,
        retry: Retry,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._decider = decider
        self._carrier = carrier
        self._retry = retry
        self._clock = clock
        self._log = log
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
        over: list[Overdue] = []
        for one in due:
            if one.verdict is Verdict.AGAIN and one.recipient in agents and _relay_id(one) in rows:
                again.append(one)
            elif one.verdict is Verdict.AGAIN:
                over.append(one._replace(reason=GONE))
            else:
                over.append(one)
        self._deliver_again(dirs, again, rows)
        self._end(dirs, over, rows, agents)

    def _deliver_again(self, dirs: Dirs, again: list[Overdue], rows: dict[str, Row]) -> None:
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
            work = Work(_no_file(row), row.message_id, row.discovered_at)
            work.has_row = False
            work.notice = f"attempt {attempt}"
            recipients = tuple(one.recipient for one in group)
            work.postings.append(Posting(row.message_id, number, data, recipients, attempt=attempt))
            works.append(work)
            self._log(
                f"Delivering again, attempt {attempt}: no acknowledgment",
                action="deliver_again",
                message_id=row.message_id,
                recipients=list(recipients),
            )
        if works and (put_off := self._carrier.carry_out(dirs, works)):
            self._pause(put_off[0].reason)

    def _end(self, dirs: Dirs, over: list[Overdue], rows: dict[str, Row], agents: Set[str]) -> None:
        """Tell the senders, then note it, then let the engine know."""
        told: list[tuple[Overdue, Work | None]] = []
        for one in over:
            row = rows.get(_relay_id(one))
            try:
                told.append((one, row and self._tell(one, row, agents)))
            except (StoreFull, StoreCapacity) as exc:
                self._pause(str(exc))
                break
        put_off = self._carrier.carry_out(dirs, [work for _, work in told if work is not None])
        if put_off:
            self._pause(put_off[0].reason)
        waits = {id(one.work) for one in put_off}
        done = [one for one, work in told if id(work) not in waits]
        with self._ledger.transaction():
            for one in done:
                state = STATES[one.verdict].label.lower()
                self._ledger.end(_relay_id(one), one.recipient, state, one.reason)
        for one in done:
            self._end_in_engine(one)

    def _end_in_engine(self, one: Overdue) -> None:
        number = one.message.id
        if one.verdict is Verdict.DEAD:
            self._store.give_up(number, [one.recipient], one.reason)
        else:
            self._store.move_deliveries(number, [one.recipient], STATES[one.verdict])
        self._log(
            f"Gave up a delivery to {one.recipient}: {one.reason}",
            action="give_up",
            level="warning",
            message_id=_relay_id(one),
            recipient=one.recipient,
        )

    def _tell(self, one: Overdue, row: Row, agents: Set[str]) -> Work | None:
        """What the sender hears, and who listens on the system's topic."""
        text = f"not acknowledged by {one.recipient}: {one.reason}"
        if one.verdict is Verdict.DEAD:
            text += f"; {WHAT_NOW.format(id=row.message_id)}"
        if row.agent_name not in agents:
            return None
        key = f"{one.verdict.name} {one.recipient} {one.attempt}"
        work = self._decider.tell(row.agent_name, row.message_id, row.discovered_at, key, text)
        if one.verdict is Verdict.DEAD:
            about = f"message {row.message_id} from {row.agent_name} to {one.recipient} is dead"
            self._decider.announce_dead(work, f"{about}: {one.reason}", agents)
        return work

    def _pause(self, reason: str) -> None:
        """Neither disk nor store takes anything now: look again in a while, not at once."""
        self._not_before_ns = self._clock.monotonic_ns() + self._retry.first_s * NS_PER_S
        self._log(
            f"Left what is overdue for {self._retry.first_s} s: {reason}",
            action="postpone",
            level="warning",
        )


def _relay_id(one: Overdue) -> str:
    return str((one.message.metadata or {}).get("relay_id", ""))


def _no_file(row: Row) -> Found:
    return Found(row.agent_name, "", None, 0, 0, 0)
