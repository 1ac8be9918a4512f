"""Execution of planned work: staged, committed, delivered, recorded, archived.

    stage     every file complete in inbox/.pending
    commit    the events in the journal, one sync: from here on recovery finishes the work
    deliver   renamed into the inboxes
    complete  deliveries and completed rows in the ledger, one transaction
    archive   the original moved from its outbox to the archive

The ledger is never ahead of the journal. If killed before the archiving, the next start finds a
completed row whose file is in the outbox, and archives it. Source: DESIGN, "How a message flows".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from relay.acomm.model import DeliveryState, Obligation
from relay.agents import run_files
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import IncidentCounter
from relay.base.names import ORCHESTRATOR
from relay.delivery import file_ops
from relay.delivery.file_ops import DiskFull
from relay.delivery.intake import OUTBOX, OutboxFile
from relay.delivery.intake_queue import FileKey
from relay.delivery.work import Context, ObligationState, OutgoingFile, Reminder, WorkItem
from relay.engine import events
from relay.ledger import HeldDelivery, Ledger, WrittenDelivery

SHOWN_IDS = 8  # of a batch, in its line of the log: enough to find the rest in the ledger


class Deferred(NamedTuple):
    """Work that could not be executed now; nothing of it was done."""

    work: WorkItem
    reason: str


class BatchWriter:
    """Executes work items, a batch at a time. Owned by the loop."""

    def __init__(self, context: Context, archiver: Archiver) -> None:
        self._ledger = context.ledger
        self._store = context.store
        self._events = context.events
        self._tally = context.tally
        self._debug = context.config.log_level == "debug"  # a line a message
        self._archiver = archiver
        self._retry = context.config.retry
        self._clock = context.clock
        self._log = context.log
        self._counted = IncidentCounter(context.clock)

    def execute(self, dirs: Dirs, batch: list[WorkItem]) -> list[Deferred]:
        """Execute every item; those that the disk does not accept now are returned."""
        put_off: list[Deferred] = []
        works: list[WorkItem] = []
        begin = self._tally.begin
        begin("stage")
        for work in batch:
            reason = self._stage(dirs, work)
            if reason:
                put_off.append(Deferred(work, reason))
            else:
                works.append(work)
        staged_at = self._clock.now_ns()
        begin("commit")
        self._commit(works, staged_at)
        begin("deliver")
        written = self._deliver(dirs, works, staged_at)
        begin("complete")
        self._record(works, written)
        self._archiver.add(works)
        self._count(works, written)
        if works:
            self._log_batch(works)
        return put_off

    def record_counts(self, *, include_recent: bool = False) -> None:
        """Record how many repeated refusals each recorded incident stands for."""
        over = self._counted.take_over(all_of_them=include_recent)
        if over:
            with self._ledger.transaction():
                self._ledger.agents.add_incidents(over, self._clock.now_ns())

    def _count(self, works: list[WorkItem], written: list[WrittenDelivery]) -> None:
        """Add a batch to the totals."""
        tally, now = self._tally, self._clock.now_ns()
        files = [work for work in works if not work.notice_key]
        taken = [work for work in files if not work.failure]
        tally.accepted += len(taken)
        tally.refused += len(files) - len(taken)
        tally.written += len(written) - sum(work.is_control for work in works)
        tally.again += sum(one.attempt > 1 for one in written)
        if files:
            tally.batch_files.observe(len(files))
        observe = tally.delivery_s.observe
        for work in taken:
            observe((now - work.file.mtime_ns) / NS_PER_S)
        for work in works:
            tally.held += len(work.undelivered)
            tally.bounced += len(work.bounced)
            tally.acked += work.acknowledged is not None
            for one in work.ended:
                tally.bounced += one.state is DeliveryState.BOUNCED
                tally.expired += one.state is DeliveryState.EXPIRED
                tally.dead += one.state is DeliveryState.DEAD

    def _log_batch(self, works: list[WorkItem]) -> None:
        """Log one line a batch; at level debug also one line a message, never its content."""
        self._log(
            "Delivered a batch",
            action="deliver_batch",
            files=sum(not work.notice_key for work in works),
            deliveries=sum(work.deliveries() for work in works),
            refused=sum(bool(work.failure) for work in works),
            first_ids=[work.message_id for work in works[:SHOWN_IDS]],
        )
        for work in works if self._debug else ():
            self._log(
                "Refused a message" if work.failure else "Carried a message",
                action="deliver_message",
                level="debug",
                message_id=work.message_id,
                agent=work.agent,
                recipients=[name for one in work.outgoing for name in one.recipients],
                held=[recipient for _, recipient in work.undelivered],
            )

    # -- 7 stage -----------------------------------------------------------------------

    def _stage(self, dirs: Dirs, work: WorkItem) -> str:
        """Stage everything an item causes; returns why the disk accepts nothing now, or nothing."""
        for request in work.requests:
            try:
                if request.spec is not None:
                    run_files.save_spec(dirs, request.spec)
            except (OSError, UnsafePath) as exc:
                return f"run/ cannot be written: {exc}"
        for number, posting in enumerate(work.outgoing):
            posting = posting._replace(recipients=self._recipients_left(work, posting))
            work.outgoing[number] = posting
            try:
                failed = file_ops.stage(dirs, posting.message_id, posting.data, posting.recipients)
            except DiskFull as exc:
                for earlier in work.outgoing[:number]:
                    file_ops.unstage(dirs, earlier.message_id, earlier.recipients)
                return str(exc)
            for recipient, reason in failed.items():
                work.undelivered[posting.message_id, recipient] = reason
        return ""

    def _recipients_left(self, work: WorkItem, posting: OutgoingFile) -> tuple[str, ...]:
        """Recipients without those delivered to before a crash."""
        if posting.attempt:
            return posting.recipients
        known = self._store.state.deliveries.get(posting.engine_id, {})
        return tuple(
            recipient
            for recipient in posting.recipients
            if (one := known.get(recipient)) is None
            or one.state is DeliveryState.SENT
            # its answer was in the same batch
            or (one.state is DeliveryState.ACKNOWLEDGED and not work.is_stored)
        )

    # -- 8 commit ----------------------------------------------------------------------

    def _commit(self, works: list[WorkItem], now: int) -> None:
        """Make everything planned durable: now it is accepted."""
        ready: list[tuple[int, str, int]] = []
        for work in works:
            for posting in work.outgoing:
                ready.extend(
                    (posting.engine_id, recipient, posting.attempt or 1)
                    for recipient in posting.recipients
                    if (posting.message_id, recipient) not in work.undelivered
                )
            bounced = self._store.find_by_relay_id(work.message_id) if work.bounced else None
            if bounced is not None:
                self._store.move_deliveries(bounced.id, tuple(work.bounced), DeliveryState.BOUNCED)
            for one in work.ended:
                self._end(one.number, one.recipient, one.state, one.reason)
            for reminder in work.reminders:
                self._remind(reminder)
            if work.failure and work.origin is not None:
                self._store.record_event(self._refusal(work, now))
        self._store.stage(ready)  # last: a batch that was cut short has staged nothing
        self._events.commit()

    def _end(self, number: int, recipient: str, state: DeliveryState, reason: str) -> None:
        if state is DeliveryState.DEAD:
            self._store.dead_letter(number, [recipient], reason)
        else:
            self._store.move_deliveries(number, [recipient], state)

    def _remind(self, one: Reminder) -> None:
        if one.due_ms:
            self._store.record_reminder(one.number, one.recipient, one.due_ms)
        else:
            self._store.end_obligation(one.number, [one.recipient])

    def _refusal(self, work: WorkItem, now: int) -> events.FileRefused:
        assert work.origin is not None
        answers = work.system_ids()
        return events.FileRefused(
            work.message_id,
            work.origin,
            work.failure,
            answers[0] if answers else "",
            work.has_row,
            work.is_unsafe,
            now // NS_PER_S,
        )

    # -- 9 deliver ---------------------------------------------------------------------

    def _deliver(self, dirs: Dirs, works: list[WorkItem], staged_at: int) -> list[WrittenDelivery]:
        """Rename the staged files; returns the files now in inboxes."""
        written: list[WrittenDelivery] = []
        for work in works:
            for posting in work.outgoing:
                reached = self._deliver_posting(dirs, work, posting)
                attempt = posting.attempt or 1
                now = self._clock.now_ns()
                self._store.deliver(posting.engine_id, reached, posting.attempt)
                owed = self._store.state.owed.get(posting.engine_id, {})
                written.extend(
                    WrittenDelivery(
                        posting.message_id,
                        recipient,
                        attempt,
                        staged_at,
                        now,
                        *(_obligation(owed[recipient]) if recipient in owed else ()),
                    )
                    for recipient in reached
                )
            if work.is_control:
                now = self._clock.now_ns()
                written.append(WrittenDelivery(work.message_id, ORCHESTRATOR, 1, staged_at, now))
        return written

    def _deliver_posting(self, dirs: Dirs, work: WorkItem, posting: OutgoingFile) -> list[str]:
        reached: list[str] = []
        for recipient in posting.recipients:
            reason = work.undelivered.get((posting.message_id, recipient), "")
            if not reason:
                reason = file_ops.deliver(dirs, posting.message_id, recipient)
            if not reason:
                reached.append(recipient)
                continue
            work.undelivered[posting.message_id, recipient] = reason
            # the deferred queue retries it, no timer does
            self._store.postpone(posting.engine_id, recipient, posting.attempt or 1)
        return reached

    # -- 10 note -----------------------------------------------------------------------

    def _record(self, works: list[WorkItem], written: list[WrittenDelivery]) -> None:
        """Record the batch in the ledger, in one transaction."""
        ledger, now = self._ledger, self._clock.now_ns()
        own = [p.system for work in works for p in work.outgoing if p.system is not None]
        obeyed = [(work.message_id, ORCHESTRATOR, 1) for work in works if work.is_control]
        with ledger.transaction():
            self._archiver.record()
            ledger.add(own, system=True)
            ledger.deliveries.mark_written(written)
            ledger.deliveries.stage(row for work in works for row in work.undelivered_rows(now))
            ledger.deliveries.hold(self._deferrals(works, now))
            self._record_refusals(works, now)
            self._record_effects(works, now)
            done = [work.message_id for work in works if not work.failure and not work.notice_key]
            ledger.complete(done + [facts.message_id for facts in own], now)
            ledger.deliveries.mark_read(obeyed, now)  # after delivered, for the order in audit_log
            ledger.archive_system([facts.message_id for facts in own])
            ledger.agents.mark_seen({work.agent for work in works if not work.notice_key}, now)
            ledger.set_position(self._events.journal.durable, now)

    def _deferrals(self, works: list[WorkItem], now: int) -> list[HeldDelivery]:
        held: list[HeldDelivery] = []
        for work in works if any(work.undelivered for work in works) else ():
            due = now + (work.pause_s or self._retry.first_s) * NS_PER_S
            attempts = {posting.message_id: posting.attempt or 1 for posting in work.outgoing}
            held += [
                HeldDelivery(message_id, recipient, attempts[message_id], reason, due)
                for (message_id, recipient), reason in work.undelivered.items()
            ]
        return held

    def _record_refusals(self, works: list[WorkItem], now: int) -> None:
        refused = [work for work in works if work.failure and not work.notice_key]
        if not refused:
            return
        self._ledger.fail([(w.message_id, w.failure) for w in refused if w.has_row], now)
        for work in refused:
            found = work.file
            if not work.has_row:
                self._ledger.add_rejection(
                    found.agent,
                    found.file_name,
                    found.inode,
                    found.mtime_ns,
                    work.failure,
                    work.system_ids()[0],
                    now,
                )

    def _record_processes(self, work: WorkItem, now: int) -> None:
        processes = self._ledger.processes
        processes.add_operations([request.intent for request in work.requests], now)
        processes.close_operations(work.closed_intents, now)
        processes.put([work.process] if work.process is not None else [])

    def _record_reminder(self, one: Reminder) -> None:
        duty = (
            ObligationState("open", one.due_ms * NS_PER_MS)
            if one.due_ms
            else ObligationState("given_up")
        )
        self._ledger.deliveries.set_obligation(one.message_id, one.recipient, *duty, one.reminders)

    def _record_effects(self, works: list[WorkItem], now: int) -> None:
        """Record the effects of answers, status messages and ended deliveries on other rows."""
        agents = self._ledger.agents
        for work in works:
            if work.requests or work.closed_intents or work.process is not None:
                self._record_processes(work, now)
            if work.incidents:
                fresh = self._counted.fresh(work.incidents)
                agents.add_incidents(fresh, now, again=work.is_repeat)
            if work.attachments:
                agents.add_references((one, work.message_id, now) for one in work.attachments)
            if work.key is not None:
                agents.set_public_keys([work.key], now)
            answer = work.acknowledged
            if answer is not None:
                said = (answer.answer_id or None, answer.text or None)
                self._ledger.deliveries.acknowledge(*answer[:3], now, *said)
                if answer.obligation is not None:
                    self._ledger.deliveries.set_obligation(
                        answer.message_id, answer.recipient, *answer.obligation
                    )
            for reminder in work.reminders:
                self._record_reminder(reminder)
            if work.status_note is not None:
                agents.set_note(work.agent, work.status_note, now)
            if work.status_change is not None:
                agents.set_status(*work.status_change, now)
            for one in work.ended:
                state = one.state.label.lower()
                self._ledger.deliveries.give_up(one.message_id, one.recipient, state, one.reason)


def _obligation(one: Obligation) -> ObligationState:
    """The ledger's entry for an answer that is still owed."""
    return ObligationState("open", one.due_ms * NS_PER_MS or None)


class Archiver:
    """Moves originals of completed work to the archive. Owned by the loop."""

    def __init__(self, ledger: Ledger, clock: Clock, log: Callable[..., object]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._log = log
        self.in_progress: set[FileKey] = set()  # files not to be read again
        self._waiting: deque[WorkItem] = deque()
        self._archived: list[tuple[str, str | None]] = []  # moved, not yet noted
        self._refused: list[tuple[str, str]] = []

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be archived or recorded."""
        return not (self._waiting or self._archived or self._refused)

    def add(self, works: Iterable[WorkItem]) -> None:
        """Queue the originals of work that is delivered and recorded."""
        for work in works:
            if not work.notice_key:  # it has a file
                self.in_progress.add(work.file.key)
                self._waiting.append(work)

    def archive(self, dirs: Dirs, limit: int) -> list[OutboxFile]:
        """Archive up to ``limit`` originals.

        Returns files that were replaced by another file meanwhile: they are to be read again.
        """
        replaced: list[OutboxFile] = []
        for _ in range(min(limit, len(self._waiting))):
            work = self._waiting.popleft()
            moved, path = self._archive(dirs, work, replaced)
            if moved and not work.failure:
                self._archived.append((work.message_id, path))
            elif path and work.has_row:
                self._refused.append((work.message_id, path))
            self.in_progress.discard(work.file.key)
        return replaced

    def flush(self) -> None:
        """Record the paths of archived originals if no batch does."""
        if self._archived or self._refused:
            with self._ledger.transaction():
                self.record()

    def record(self) -> None:
        """Record the paths of archived originals, within the caller's transaction."""
        if self._archived:
            self._ledger.archive(self._archived)
        if self._refused:
            self._ledger.set_path(self._refused)
        self._archived, self._refused = [], []

    def _archive(
        self, dirs: Dirs, work: WorkItem, replaced: list[OutboxFile]
    ) -> tuple[bool, str | None]:
        """(is it out of the outbox?, its path in the archive: None if the file is gone)."""
        found = work.file
        kind = file_ops.REJECTED if work.failure else ""
        try:
            if file_ops.is_same_file(dirs, found):
                day = work.archive_day_ns
                return True, file_ops.archive(
                    dirs,
                    found.agent,
                    found.file_name,
                    day,
                    kind,
                    redacted=work.redacted,
                    place=found.place,
                )
            if found.place == OUTBOX:
                replaced.append(found)
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {found.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=work.message_id,
            )
            return False, None
        return True, None
