"""Steps 7 to 10: what was decided is staged, committed, delivered, and noted as such.

    stage     every file complete in inbox/.pending
    commit    the deliveries in the ledger, one transaction: recovery finishes them from here on
    deliver   renamed into the inboxes
    note      written, read, acked, held: one transaction

Source: DESIGN, "How a message flows".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from relay import delivery
from relay.clock import NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.model import DeliveryState
from relay.config import Retry
from relay.delivery import DiskFull
from relay.finish import Finisher
from relay.home import Dirs
from relay.ledger import HAS_IT, Ledger
from relay.names import ORCHESTRATOR
from relay.work import Posting, Work


class PutOff(NamedTuple):
    """A work that could not be carried out now; nothing of it was done."""

    work: Work
    reason: str


class Carrier:
    """Carries works out, a batch at a time. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        store: CommStore,
        finisher: Finisher,
        retry: Retry,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._finisher = finisher
        self._retry = retry
        self._clock = clock
        self._log = log

    def carry_out(self, dirs: Dirs, batch: list[Work]) -> list[PutOff]:
        """Every step for every work; those that the disk takes nothing of now are returned."""
        put_off: list[PutOff] = []
        works: list[Work] = []
        for work in batch:
            reason = self._stage(dirs, work)
            if reason:
                put_off.append(PutOff(work, reason))
            else:
                works.append(work)
        self._commit(works)
        self._deliver(dirs, works)
        self._finisher.take(works, self._store.sequence)
        self._log(
            "Delivered a batch",
            action="deliver_batch",
            files=sum(not work.notice for work in works),
            deliveries=sum(work.deliveries() for work in works),
            refused=sum(bool(work.failure) for work in works),
        )
        return put_off

    def write_soon(self) -> None:
        """The store's file shall have what happened with the next flush that may begin."""
        self._finisher.hurry()

    def _stage(self, dirs: Dirs, work: Work) -> str:
        """Stage everything that this work causes; why the disk takes nothing now, or nothing."""
        for number, posting in enumerate(work.postings):
            recipients = self._unstaged(work, posting)
            posting = posting._replace(recipients=recipients)
            work.postings[number] = posting
            try:
                failed = delivery.stage(dirs, posting.message_id, posting.data, recipients)
            except DiskFull as exc:
                for earlier in work.postings[:number]:
                    delivery.unstage(dirs, earlier.message_id, earlier.recipients)
                return str(exc)
            for recipient, reason in failed.items():
                work.held[posting.message_id, recipient] = reason
        return ""

    def _unstaged(self, work: Work, posting: Posting) -> tuple[str, ...]:
        """Without those who have this answer already, from before a crash."""
        new = work.has_row and not work.again  # without a row it may have been refused before
        if new or posting.message_id == work.message_id:
            return posting.recipients
        known = self._ledger.deliveries([posting.message_id]).get(posting.message_id, {})
        has_it = [one.recipient for one in known.values() if one.state in HAS_IT]
        self._store.deliver(posting.engine_id, has_it)
        return tuple(recipient for recipient in posting.recipients if recipient not in known)

    def _commit(self, works: list[Work]) -> None:
        """The decisions, in one transaction: from here on recovery finishes what it finds."""
        now = self._clock.now_ns()
        with self._ledger.transaction():
            ledger = self._ledger
            own = [p.own for work in works for p in work.postings if p.own is not None]
            if own:
                ledger.record(own, own=True)
            ledger.stage(row for work in works for row in work.delivery_rows(now))
            ledger.stage_again([row for work in works for row in work.redelivery_rows()], now)
            failures = [(w.message_id, w.failure) for w in works if w.failure and w.has_row]
            if failures:
                ledger.fail(failures, now)
            for work in works:
                if work.failure and not work.has_row:
                    self._record_rejection(work, now)
                if work.unsafe:
                    ledger.security_event(
                        "not_a_regular_file", work.agent, work.found.path, work.failure, now
                    )

    def _record_rejection(self, work: Work, now: int) -> None:
        found = work.found
        self._ledger.reject(
            found.agent,
            found.file_name,
            found.inode,
            found.mtime_ns,
            work.failure,
            work.own_ids()[0],
            now,
        )

    def _deliver(self, dirs: Dirs, works: list[Work]) -> None:
        """Rename what is staged; note what stands in the inboxes, in one transaction."""
        written: list[tuple[str, str]] = []
        for work in works:
            bounced = self._store.by_relay_id(work.message_id) if work.bounced else None
            if bounced is not None:
                self._store.move_deliveries(bounced.id, work.bounced, DeliveryState.BOUNCED)
            for posting in work.postings:
                reached = self._deliver_posting(dirs, work, posting)
                written.extend((posting.message_id, recipient) for recipient in reached)
                self._store.deliver(posting.engine_id, reached, posting.attempt)
                if self._store.wants_flush(posting.engine_id):
                    self.write_soon()
        now = self._clock.now_ns()
        obeyed = [(work.message_id, ORCHESTRATOR) for work in works if work.control]
        due = now + self._retry.first_s * NS_PER_S
        held = [
            (message_id, recipient, reason, due)
            for work in works
            for (message_id, recipient), reason in work.held.items()
        ]
        with self._ledger.transaction():
            self._ledger.written(written + obeyed, now)
            if obeyed:
                self._ledger.read(obeyed, now)
            if held:
                self._ledger.hold(held)
            self._note_effects(works, now)
            self._ledger.seen({work.agent for work in works if not work.notice}, now)

    def _deliver_posting(self, dirs: Dirs, work: Work, posting: Posting) -> list[str]:
        reached: list[str] = []
        for recipient in posting.recipients:
            reason = work.held.get((posting.message_id, recipient), "")
            if not reason:
                reason = delivery.deliver(dirs, posting.message_id, recipient)
            if not reason:
                reached.append(recipient)
                continue
            work.held[posting.message_id, recipient] = reason
            if posting.attempt:  # held mail makes this attempt now, no timer does
                self._store.hold(posting.engine_id, recipient, posting.attempt)
        return reached

    def _note_effects(self, works: list[Work], now: int) -> None:
        """What answers and status messages say of others' rows."""
        for work in works:
            answer = work.acknowledged
            if answer is not None:
                self._ledger.acknowledge(answer.message_id, answer.recipient, answer.status, now)
            if work.status_note is not None:
                self._ledger.note_status(work.agent, work.status_note, now)
