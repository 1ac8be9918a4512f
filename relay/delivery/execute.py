"""Execution of plans, the only writer of the pipeline: a batch is stored, staged, committed.

    store     the engine takes the message, commands are carried out, the relay's replies are stored
    stage     every file complete in inbox/.pending
    commit    the events in the journal, one sync: from here on recovery finishes the work
    deliver   renamed into the inboxes
    complete  originals renamed into the archive; deliveries and archived rows in the ledger

What is accepted is in the journal first, and recovery restores the rows that the ledger lacks.
Rows of renames and reads may be ahead of the journal until the turn ends. See docs/architecture.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from relay.acomm.model import DeliveryState
from relay.base.clock import NS_PER_S
from relay.base.errors import CommError, StateFault
from relay.base.home import Dirs
from relay.base.incidents import Refusal, RefusalCode
from relay.base.metrics import Metrics
from relay.delivery import file_ops
from relay.delivery.apply import TRANSIENT_ERRORS, PlanApplier
from relay.delivery.cancel import Canceller, is_cancel
from relay.delivery.file_ops import DiskFull
from relay.delivery.record import LedgerWriter
from relay.delivery.values import (
    Inbound,
    Job,
    Missed,
    OutboxFile,
    OutgoingFile,
    Part,
    Plan,
    Reminder,
    Resources,
    Subject,
)
from relay.engine import events
from relay.engine.retries import OverdueDelivery
from relay.ledger.deliveries import DeliveryFacts

# The kernel wakes a recipient on the core of who renamed its file: it runs now, and not only when
# this thread has archived and recorded the batch.
_yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
BATCH_DELIVERIES = 2000  # a broadcast to all holds up no other message
SHOWN_IDS = 8  # of a batch, in its line of the log: enough to find the rest in the ledger


class ExecutionResult(msgspec.Struct):
    """The result of an execution."""

    executed: list[Plan] = []
    missed: Missed = {}  # of those: what could not be put into an inbox
    postponed: list[tuple[Plan, str]] = []  # could not be executed now, and why
    jobs: list[tuple[Subject, Job]] = []  # of commands, also of postponed ones: not run again
    replaced: list[OutboxFile] = []  # files put in the place of others while these were processed

    def is_done(self, plan: Plan) -> bool:
        """True unless the plan was postponed."""
        return all(postponed is not plan for postponed, _ in self.postponed)


class PlanExecutor(Part):
    """Executes plans, a batch at a time."""

    def __init__(
        self,
        given: Resources,
        plan_applier: PlanApplier,
        canceller: Canceller,
        ledger_writer: LedgerWriter,
        metrics: Metrics,
    ) -> None:
        super().__init__(given)
        self._plan_applier = plan_applier
        self._canceller = canceller
        self._ledger_writer = ledger_writer
        self._metrics = metrics
        self._is_verbose = given.config.log_level == "debug"  # a line of the log for each message

    def execute_own(self, dirs: Dirs, plans: Sequence[Plan]) -> ExecutionResult:
        """Execute plans of the relay's own; all are postponed while the disk takes no file.

        Errors: as ``execute``.
        """
        try:
            file_ops.check_room(dirs)
        except DiskFull as exc:
            return ExecutionResult(postponed=[(plan, str(exc)) for plan in plans])
        return self.execute(dirs, plans)

    def execute(self, dirs: Dirs, plans: Iterable[Plan]) -> ExecutionResult:
        """Execute plans, in batches of a limited number of deliveries.

        Each plan is stored before the next one is made: it may answer a message of this batch.
        Plans that the store does not accept now, or whose command the disk does not, are returned;
        of those, at most some events in the store are made, which planning again finds.
        Errors: StateFault, which ends the session: nothing of the batch is durable then.
        """
        result = ExecutionResult()
        batch: list[Plan] = []
        deliveries = 0
        for plan in plans:
            # what is cancelled may be in this batch: its files are to be in the inboxes, or nowhere
            cancels = plan.command is not None and is_cancel(plan.command)
            if batch and (deliveries >= BATCH_DELIVERIES or cancels):
                self._execute_batch(dirs, batch, result)
                self._metrics.begin("plan")
                batch, deliveries = [], 0
            try:
                plan = self._plan_applier.apply(plan)
            except (*TRANSIENT_ERRORS, CommError) as exc:
                if plan.inbound is not None and not isinstance(exc, TRANSIENT_ERRORS):
                    raise  # the fault is the file's
                result.postponed.append((plan, str(exc)))
                continue
            except StateFault as exc:
                if plan.inbound is not None:  # else it would end the next session, too
                    self._ledger_writer.fail(plan.message_id, Refusal(RefusalCode.FAULT, str(exc)))
                raise
            batch.append(plan)
            for file in plan.files:
                deliveries += len(file.recipients)
            if plan.effects.job is not None:
                result.jobs.append((plan.subject, plan.effects.job))
        if batch:
            self._execute_batch(dirs, batch, result)
        return result

    def _execute_batch(self, dirs: Dirs, batch: list[Plan], result: ExecutionResult) -> None:
        begin, missed = self._metrics.begin, Missed()
        begin("stage")
        batch = [self._stage(dirs, plan, missed) for plan in batch]
        staged_at = self._clock.now_ns()
        begin("commit")
        without_event = self._make_events(batch, missed, staged_at)
        self._events.commit()
        begin("deliver")
        if self._canceller.taken_back:
            self._canceller.remove(dirs)
        delivered = self._deliver(dirs, batch, missed, staged_at, without_event)
        if delivered:
            _yield_core()
        if missed:
            self._unstage(dirs, missed)
        begin("complete")
        replaced = self._ledger_writer.record(dirs, batch, missed, without_event)
        result.replaced.extend(replaced)
        result.executed.extend(batch)
        result.missed.update(missed)
        self._count(batch, missed, delivered)
        self._log_batch(batch, missed, delivered)

    # -- stage -------------------------------------------------------------------------

    def _stage(self, dirs: Dirs, plan: Plan, missed: Missed) -> Plan:
        """Stage every file of a plan; ``missed`` gets those whose inbox cannot be written."""
        files = plan.files
        if plan.draft is None:  # else it was stored just now
            files = tuple([self._without_delivered(file) for file in files])
        for file in files:
            failed = file_ops.stage(dirs, file.message_id, file.data, file.recipients)
            for recipient, reason in failed.items():
                missed[file.message_id, recipient] = reason
        return plan if files == plan.files else replace(plan, files=files)

    def _without_delivered(self, file: OutgoingFile) -> OutgoingFile:
        """A file without the recipients that got it before a crash, or whose first attempt was lost
        in a power cut: the queue of held deliveries makes their next attempt."""
        if file.attempt:
            return file
        known = self._store.deliveries.of(file.number)
        left = tuple(
            [
                name
                for name in file.recipients
                if (delivery := known.get(name)) is None
                or (delivery.state is DeliveryState.SENT and delivery.attempt <= 1)
            ]
        )
        return file if len(left) == len(file.recipients) else replace(file, recipients=left)

    # -- the events of the commit ------------------------------------------------------

    def _make_events(self, batch: list[Plan], missed: Missed, now: int) -> list[DeliveryFacts]:
        """Make the other events of a batch: what ended, what is refused and staged.

        Returns what ended of messages that have left the store: no event speaks of it.
        """
        without_event: list[DeliveryFacts] = []
        ready: list[tuple[int, str, int]] = []
        for plan in batch:
            for file in plan.files:
                for recipient in file.recipients:
                    if (file.message_id, recipient) not in missed:
                        ready.append((file.number, recipient, file.attempt or 1))
            for ended in plan.changes.ended:
                if not self._end(ended):
                    without_event.append(_end_of(ended))
            for reminder in plan.changes.reminders:
                self._remind(reminder)
            if (inbound := plan.inbound) is not None and inbound.refusal is not None:
                answer_id = plan.files[0].message_id if plan.files else ""  # its nack alone
                self._store.apply(_refused(inbound, inbound.refusal, answer_id, now), now)
        # last: a batch that was cut short has staged nothing
        self._store.deliveries.stage(ready, now)
        return without_event

    def _end(self, ended: OverdueDelivery) -> bool:
        """End a delivery; False if the store has nothing to be ended."""
        number, recipients = ended.number, [ended.recipient]
        if ended.state is DeliveryState.DEAD:
            return self._store.retries.dead_letter(number, recipients, ended.reason)
        return bool(self._store.deliveries.move(number, recipients, ended.state, why=ended.reason))

    def _remind(self, reminder: Reminder) -> None:
        if reminder.due_ms:
            self._store.obligations.record_reminder(
                reminder.number, reminder.recipient, reminder.due_ms, reminder.reminders
            )
        else:
            self._store.obligations.end(reminder.number, [reminder.recipient])

    # -- deliver -----------------------------------------------------------------------

    def _deliver(
        self,
        dirs: Dirs,
        batch: list[Plan],
        missed: Missed,
        staged_at: int,
        without_event: list[DeliveryFacts],
    ) -> int:
        """Rename the staged files; returns how many are now in inboxes.

        ``without_event`` gets those of which no event speaks.
        """
        delivered = 0
        for file in chain.from_iterable([plan.files for plan in batch]):
            now = self._clock.now_ns()  # before the rename: a bell rings after it
            reached = self._deliver_file(dirs, file, missed)
            moved = self._store.deliveries.deliver(file.number, reached, file.attempt, now)
            delivered += len(reached)
            if file.attempt > 1:
                self._metrics.again += len(reached)
            if len(moved) < len(reached):
                unmoved = set(reached).difference(moved)
                without_event += self._written_facts(file, unmoved, staged_at, now)
        return delivered

    def _written_facts(
        self, file: OutgoingFile, reached: set[str], staged_at: int, now: int
    ) -> Iterator[DeliveryFacts]:
        """Rows of files of which no event speaks: their message left the store, or is answered."""
        has_left = file.number not in self._store.state.messages
        attempt = file.attempt or 1
        for name in reached:
            if has_left:
                yield DeliveryFacts(file.message_id, name, "written", attempt, staged_at, now)
            elif attempt == 1 and self._store.deliveries.is_answered(file.number, name):
                yield DeliveryFacts(file.message_id, name, "acked", 1, staged_at, now)

    def _deliver_file(self, dirs: Dirs, file: OutgoingFile, missed: Missed) -> list[str]:
        """The recipients that have it; ``missed`` gets those whose inbox cannot be written."""
        reached: list[str] = []
        for recipient in file.recipients:
            key = (file.message_id, recipient)
            reason = missed.get(key) or file_ops.deliver(dirs, file.message_id, recipient)
            if not reason:
                reached.append(recipient)
                continue
            missed[key] = reason
            # the queue of what is held retries it, no timer does
            self._store.deliveries.postpone(file.number, recipient, file.attempt or 1)
        return reached

    def _unstage(self, dirs: Dirs, missed: Missed) -> None:
        """Remove the copies of files that could not be renamed: they are written anew when due.

        First it is durable that they are held: a copy that is gone counts as delivered.
        """
        self._events.commit()
        for message_id, recipient in missed:
            file_ops.unstage(dirs, message_id, recipient)

    # -- count and log -----------------------------------------------------------------

    def _count(self, batch: list[Plan], missed: Missed, delivered: int) -> None:
        """Add a batch, and the number of files in inboxes, to the totals."""
        metrics, now = self._metrics, self._clock.now_ns()
        files = refused = 0
        for plan in batch:
            inbound = plan.inbound
            if inbound is not None:
                files += 1
                if inbound.refusal:
                    refused += 1
                else:
                    metrics.delivery_s.observe((now - inbound.file.mtime_ns) / NS_PER_S)
            metrics.acked += plan.answer is not None
            for ended in plan.changes.ended:
                metrics.bounced += ended.state is DeliveryState.BOUNCED
                metrics.expired += ended.state is DeliveryState.EXPIRED
                metrics.dead += ended.state is DeliveryState.DEAD
        metrics.accepted += files - refused
        metrics.refused += refused
        metrics.written += delivered
        metrics.held += len(missed)
        if files:
            metrics.batch_files.observe(files)

    def _log_batch(self, batch: list[Plan], missed: Missed, deliveries: int) -> None:
        """Log one line a batch; at level debug also one line a message, never its content."""
        files = refused = 0
        for plan in batch:
            if (inbound := plan.inbound) is not None:
                files += 1
                refused += inbound.refusal is not None
        self._log(
            "Delivered a batch",
            action="deliver_batch",
            files=files,
            deliveries=deliveries,
            refused=refused,
            first_ids=[plan.message_id for plan in batch[:SHOWN_IDS]],
        )
        for plan in batch if self._is_verbose else ():
            deliveries_of = [(file.message_id, to) for file in plan.files for to in file.recipients]
            self._log(
                "Refused a message" if plan.refusal else "Processed a message",
                action="deliver_message",
                level="debug",
                message_id=plan.message_id,
                agent=plan.subject.agent,
                recipients=[name for _, name in deliveries_of],
                held=[key[1] for key in deliveries_of if key in missed],
            )


def _end_of(ended: OverdueDelivery) -> DeliveryFacts:
    state = ended.state.label.lower()
    return DeliveryFacts(
        ended.relay_id, ended.recipient, state, ended.attempt, last_error=ended.reason
    )


def _refused(inbound: Inbound, refusal: Refusal, answer_id: str, now: int) -> events.FileRefused:
    return events.FileRefused(
        inbound.file.message_id,
        inbound.origin(),
        refusal.reason,
        answer_id,
        inbound.has_row,
        inbound.is_unsafe,
        now // NS_PER_S,
        refusal.code,
    )
