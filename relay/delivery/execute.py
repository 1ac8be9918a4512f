"""Execution of plans, the only writer of the pipeline: a batch is stored, staged, committed.

    store     the engine takes the message, commands are carried out, replies are stored
    stage     every file complete in inbox/.pending
    commit    the events in the journal, one sync: from here on recovery finishes the work
    deliver   renamed into the inboxes
    complete  deliveries and completed rows in the ledger, one transaction (``record``)

The ledger is never ahead of the journal. If killed before the archiving, the next start finds a
completed row whose file is in the outbox, and archives it. Source: DESIGN, "How a message flows".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from relay.acomm.model import (
    ChannelType,
    DeliveryState,
    Message,
    MessageType,
    Obligation,
    Origin,
)
from relay.agents import run_files
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import CommError, StoreCapacity, StoreFull, UnsafePath
from relay.base.home import Dirs
from relay.base.logs import LogCall, where
from relay.base.message import Kind
from relay.base.metrics import Metrics
from relay.base.names import ORCHESTRATOR, direct_channel_name
from relay.delivery import file_ops, router
from relay.delivery.control import Orchestrator
from relay.delivery.eventlog import EventLog
from relay.delivery.file_ops import DiskFull, render_delivered
from relay.delivery.plan import control_reply, refuse
from relay.delivery.record import Acknowledged, Deferral, Executed, LedgerRecord, ObligationState
from relay.delivery.values import (
    Answer,
    ControlReply,
    Draft,
    EndedDelivery,
    Inbound,
    Job,
    OutgoingFile,
    Plan,
    Reminder,
    Subject,
    SystemMessage,
    system_message_row,
)
from relay.delivery.view import StoreView
from relay.engine import events
from relay.engine.commstore import CommStore
from relay.engine.deliveries import SYSTEM
from relay.ledger import WrittenDelivery

SHOWN_IDS = 8  # of a batch, in its line of the log: enough to find the rest in the ledger
TRANSIENT_ERRORS = (StoreFull, StoreCapacity, DiskFull)  # the plan is to be executed again
NOTICES = frozenset({Kind.NOTIFICATION, Kind.REMINDER})  # of the relay's: they answer nothing
THROTTLED = "throttled: the channel has as many pending messages as max_pending allows"
THROTTLED_RECHECK_NS = 60 * NS_PER_S  # delivered as soon as the limit allows; checked this often
STICKY = "sent before it joined"


class Postponed(NamedTuple):
    """A plan that could not be executed now."""

    plan: Plan
    cause: Exception

    @property
    def reason(self) -> str:
        return str(self.cause)


class Outcome(NamedTuple):
    """The result of an execution."""

    executed: list[Executed]
    postponed: list[Postponed]
    jobs: list[Job]  # requested by commands, also of postponed plans: these are not run again

    def is_done(self, plan: Plan) -> bool:
        """True unless the plan was postponed."""
        return all(one.plan is not plan for one in self.postponed)


class Executor:
    """Executes plans, a batch at a time. Owned by the loop."""

    def __init__(
        self,
        *,
        store: CommStore,
        view: StoreView,
        events: EventLog,
        orchestrator: Orchestrator,
        record: LedgerRecord,
        metrics: Metrics,
        batch_deliveries: int,
        clock: Clock,
        log: LogCall,
        is_verbose: bool,
    ) -> None:
        self._store = store
        self._view = view
        self._events = events
        self._orchestrator = orchestrator
        self._record = record
        self._metrics = metrics
        self._batch_deliveries = batch_deliveries
        self._clock = clock
        self._log = log
        self._is_verbose = is_verbose  # a line of the log for each message

    def execute(self, dirs: Dirs, plans: Iterable[Plan]) -> Outcome:
        """Execute plans, in batches of a limited number of deliveries.

        Each plan is stored before the next one is made: it may answer a message of this batch.
        Plans that the store or the disk does not accept now are returned; of those, at most events
        in the store are done.
        """
        outcome = Outcome([], [], [])
        batch: list[Executed] = []
        deliveries = 0
        for plan in plans:
            try:
                one = self._store_plan(plan)
            except TRANSIENT_ERRORS as exc:
                outcome.postponed.append(Postponed(plan, exc))
                continue
            except CommError as exc:
                if plan.inbound is not None:
                    raise
                outcome.postponed.append(Postponed(plan, exc))
                continue
            batch.append(one)
            deliveries += one.deliveries
            if one.effects.job is not None:
                outcome.jobs.append(one.effects.job)
            if deliveries >= self._batch_deliveries:
                self._execute_batch(dirs, batch, outcome)
                self._metrics.begin("route")
                batch, deliveries = [], 0
        if batch:
            self._execute_batch(dirs, batch, outcome)
        return outcome

    def _execute_batch(self, dirs: Dirs, batch: list[Executed], outcome: Outcome) -> None:
        begin, done = self._metrics.begin, list[Executed]()
        begin("stage")
        for one in batch:
            try:
                done.append(self._stage(dirs, one))
            except DiskFull as exc:
                outcome.postponed.append(Postponed(one.plan, exc))
        staged_at = self._clock.now_ns()
        begin("commit")
        self._commit(done, staged_at)
        begin("deliver")
        done, written = self._deliver(dirs, done, staged_at)
        begin("complete")
        self._record.record(done, written)
        outcome.executed.extend(done)
        self._count(done, written)
        if done:
            self._log_batch(done)

    # -- store -------------------------------------------------------------------------

    def _store_plan(self, plan: Plan) -> Executed:
        """Apply a plan to the store; one that the engine refuses, or a bug, becomes a refusal."""
        try:
            return self._apply(plan)
        except TRANSIENT_ERRORS:
            raise
        except CommError as exc:
            if plan.inbound is None:
                raise
            return self._apply(refuse(plan.inbound, str(exc)))
        except Exception as exc:
            if plan.inbound is None:
                raise
            return self._apply(refuse_fault(plan.inbound, exc, self._log))

    def _apply(self, plan: Plan) -> Executed:
        """Store the message, the effect of an answer, and every reply; carry out a command."""
        stored: Message | None = None
        files, deferred = plan.files, list[Deferral]()
        if plan.draft is not None and plan.inbound is not None:
            stored = self._store_draft(plan.draft, plan.inbound)
            files = tuple([one._replace(number=stored.id) for one in files])
        elif plan.subject.message_id:
            stored = self._view.find(plan.subject.message_id)
        acknowledged = self._acknowledge(plan.subject, plan.answer) if plan.answer else None
        if plan.inbound is not None and stored and files and self._view.is_held(stored.id):
            due = throttled_until(stored, plan.inbound.seen_at)
            deferred = [_deferral(file, name, due) for file in files for name in file.recipients]
            files = ()
        messages, effects = plan.messages, plan.effects
        if plan.command is not None and not plan.command.is_done and stored is not None:
            reply = self._orchestrator.carry_out(plan.command.message, plan.subject)
            effects = reply.effects._replace(may_repeat=effects.may_repeat)
            deferred += self._sticky_copies()
            self._store.deliver(stored.id, [ORCHESTRATOR])
            if self._view.expects_ack(stored):
                state = DeliveryState.ACKNOWLEDGED
                self._store.move_deliveries(stored.id, [ORCHESTRATOR], state)
            messages = (*_reply_of(plan.subject, reply), *messages)
        own = [self._store_message(one, plan.subject, stored) for one in messages]
        files = (*files, *(one for one in own if one is not None))
        return Executed(plan, files, tuple(deferred), acknowledged, effects)

    def _store_draft(self, draft: Draft, inbound: Inbound) -> Message:
        assert inbound.message is not None
        content, origin = inbound.message.content, inbound.origin()
        return self._accept(draft, inbound.file.agent, content, origin)

    def _accept(
        self, draft: Draft, sender: str, content: bytes, origin: Origin | None = None
    ) -> Message:
        """Store a message; its channel is created or joined if necessary."""
        store, fields = self._store, draft.fields
        channel = store.get_channel_by_name(draft.channel)
        if channel is None:
            owner = draft.members[0] if len(draft.members) == 2 else ORCHESTRATOR
            channel = store.create_channel(draft.channel, draft.channel_type, owner)
        for member in draft.members:
            if not store.is_participant(channel.id, member):
                store.join_channel(channel.id, member)
        return store.accept(
            channel.id,
            sender,
            fields.message_type,
            content,
            recipients=draft.recipients,
            topic=fields.topic,
            correlation_id=fields.correlation_id,
            priority=fields.priority,
            metadata=fields.metadata,
            ttl=fields.ttl,
            signature=fields.signature,
            origin=origin,
        )

    def _acknowledge(self, subject: Subject, answer: Answer) -> Acknowledged:
        """Apply an answer to the delivery that it answers."""
        store, original, sender = self._store, answer.original, subject.agent
        said = (subject.message_id, answer.text)
        store.record_answer(original, sender, answer.status, ends=answer.ends, answer=said)
        owed = self._view.owed(original.id).get(sender)
        duty = _obligation(owed) if owed else None
        if answer.ends and self._view.tracks_answer(original):
            duty = ObligationState("answered")
        return Acknowledged(original.relay_id or "", sender, answer.status, *said, duty)

    def _sticky_copies(self) -> list[Deferral]:
        """Copies for new subscribers, due now."""
        now = self._clock.now_ns()
        copies = [(self._view.message(number), name) for number, name in self._store.pop_sticky()]
        return [
            Deferral(copied.relay_id, name, STICKY, now)
            for copied, name in copies
            if copied is not None and copied.relay_id is not None
        ]

    def _store_message(
        self, one: SystemMessage, subject: Subject, stored: Message | None
    ) -> OutgoingFile | None:
        """Store a message of the relay's own, once; None if its channel accepts none.

        Its time is when it was first stored, possibly a day after the event it describes.
        """
        message_id, message = one.message_id, one.message
        kept = self._view.find(message_id)
        if kept is None:
            is_answer = one.is_answer and stored is not None and self._view.expects_ack(stored)
            draft = _own_draft(
                one, max(one.at_ns, self._clock.now_ns()), stored if is_answer else None
            )
            try:
                kept = self._accept(draft, ORCHESTRATOR, message.content)
            except (StoreFull, StoreCapacity):
                raise
            except CommError:
                if draft.fields.topic is None:
                    raise
                return None  # paused or closed: no notices wanted
        at = int((kept.metadata or {}).get("created_ns") or one.at_ns)
        message = message._replace(body=kept.content)
        facts = system_message_row(message_id, message.body, str(message.kind), message.to, at)
        label = self._view.channel_label(kept)
        data = render_delivered(message, message_id, ORCHESTRATOR, at, facts.checksum or "", label)
        known = self._view.recipients(kept.id)
        recipients = tuple([name for name in one.recipients if name in known])
        if not recipients:
            return None
        return OutgoingFile(message_id, kept.id, data, recipients, system=facts)

    # -- stage -------------------------------------------------------------------------

    def _stage(self, dirs: Dirs, one: Executed) -> Executed:
        """Stage every file of a plan. Errors: DiskFull; then nothing of it is staged."""
        for request in one.effects.requests:
            try:
                if request.spec is not None:
                    run_files.save_spec(dirs, request.spec)
            except (OSError, UnsafePath) as exc:
                raise DiskFull(f"run/ cannot be written: {exc}") from exc
        files = [self._without_delivered(file, one.plan) for file in one.files]
        undelivered: dict[tuple[str, str], str] = {}
        for number, file in enumerate(files):
            try:
                failed = file_ops.stage(dirs, file.message_id, file.data, file.recipients)
            except DiskFull:
                for earlier in files[:number]:
                    file_ops.unstage(dirs, earlier.message_id, earlier.recipients)
                raise
            for recipient, reason in failed.items():
                undelivered[file.message_id, recipient] = reason
        return one._replace(files=tuple(files), undelivered=undelivered)

    def _without_delivered(self, file: OutgoingFile, plan: Plan) -> OutgoingFile:
        """A file without the recipients that got it before a crash."""
        if file.attempt:
            return file
        known = self._view.deliveries(file.number)
        left = tuple(
            [
                name
                for name in file.recipients
                if (one := known.get(name)) is None
                or one.state is DeliveryState.SENT
                # its answer was in the same batch
                or (one.state is DeliveryState.ACKNOWLEDGED and plan.draft is not None)
            ]
        )
        return file if len(left) == len(file.recipients) else file._replace(recipients=left)

    # -- commit ------------------------------------------------------------------------

    def _commit(self, batch: list[Executed], now: int) -> None:
        """Make everything planned durable: now it is accepted."""
        ready: list[tuple[int, str, int]] = []
        for one in batch:
            plan, changes = one.plan, one.plan.changes
            for file in one.files:
                ready.extend(
                    [
                        (file.number, recipient, file.attempt or 1)
                        for recipient in file.recipients
                        if (file.message_id, recipient) not in one.undelivered
                    ]
                )
            bounced = self._view.find(plan.subject.message_id) if changes.bounced else None
            if bounced is not None:
                state = DeliveryState.BOUNCED
                self._store.move_deliveries(bounced.id, tuple(changes.bounced), state)
            for ended in changes.ended:
                self._end(ended)
            for reminder in changes.reminders:
                self._remind(reminder)
            if plan.refusal and plan.inbound is not None:
                self._store.record_event(_refusal(plan, plan.inbound, one.system_ids, now))
        self._store.stage(ready)  # last: a batch that was cut short has staged nothing
        self._events.commit()

    def _end(self, one: EndedDelivery) -> None:
        if one.state is DeliveryState.DEAD:
            self._store.dead_letter(one.number, [one.recipient], one.reason)
        else:
            self._store.move_deliveries(one.number, [one.recipient], one.state)

    def _remind(self, one: Reminder) -> None:
        if one.due_ms:
            self._store.record_reminder(one.number, one.recipient, one.due_ms)
        else:
            self._store.end_obligation(one.number, [one.recipient])

    # -- deliver -----------------------------------------------------------------------

    def _deliver(
        self, dirs: Dirs, batch: list[Executed], staged_at: int
    ) -> tuple[list[Executed], list[WrittenDelivery]]:
        """Rename the staged files; returns the batch, and the files now in inboxes."""
        done: list[Executed] = []
        written: list[WrittenDelivery] = []
        for one in batch:
            failed = one.undelivered
            for file in one.files:
                reached, missed = self._deliver_file(dirs, file, failed)
                failed = {**failed, **missed} if missed else failed
                now = self._clock.now_ns()
                self._store.deliver(file.number, reached, file.attempt)
                owed = self._view.owed(file.number)
                written += [
                    WrittenDelivery(
                        file.message_id,
                        recipient,
                        file.attempt or 1,
                        staged_at,
                        now,
                        *(_obligation(owed[recipient]) if recipient in owed else ()),
                    )
                    for recipient in reached
                ]
            if one.plan.command is not None:
                message_id, now = one.plan.subject.message_id, self._clock.now_ns()
                written.append(WrittenDelivery(message_id, ORCHESTRATOR, 1, staged_at, now))
            done.append(one if failed is one.undelivered else one._replace(undelivered=failed))
        return done, written

    def _deliver_file(
        self, dirs: Dirs, file: OutgoingFile, unstaged: Mapping[tuple[str, str], str]
    ) -> tuple[list[str], dict[tuple[str, str], str]]:
        """(recipients that have it, reasons of those whose inbox cannot be written)."""
        reached: list[str] = []
        missed: dict[tuple[str, str], str] = {}
        for recipient in file.recipients:
            key = (file.message_id, recipient)
            reason = unstaged.get(key) or file_ops.deliver(dirs, file.message_id, recipient)
            if not reason:
                reached.append(recipient)
                continue
            missed[key] = reason
            # the deferred queue retries it, no timer does
            self._store.postpone(file.number, recipient, file.attempt or 1)
        return reached, missed

    # -- count and log -----------------------------------------------------------------

    def _count(self, batch: list[Executed], written: list[WrittenDelivery]) -> None:
        """Add a batch to the totals."""
        metrics, now = self._metrics, self._clock.now_ns()
        files = refused = commands = 0
        for one in batch:
            inbound, changes = one.plan.inbound, one.plan.changes
            if inbound is not None:
                files += 1
                if one.plan.refusal:
                    refused += 1
                else:
                    metrics.delivery_s.observe((now - inbound.file.mtime_ns) / NS_PER_S)
            commands += one.plan.command is not None
            metrics.held += len(one.undelivered)
            metrics.bounced += len(changes.bounced)
            metrics.acked += one.acknowledged is not None
            for ended in changes.ended:
                metrics.bounced += ended.state is DeliveryState.BOUNCED
                metrics.expired += ended.state is DeliveryState.EXPIRED
                metrics.dead += ended.state is DeliveryState.DEAD
        metrics.accepted += files - refused
        metrics.refused += refused
        metrics.written += len(written) - commands
        metrics.again += sum([one.attempt > 1 for one in written])
        if files:
            metrics.batch_files.observe(files)

    def _log_batch(self, batch: list[Executed]) -> None:
        """Log one line a batch; at level debug also one line a message, never its content."""
        self._log(
            "Delivered a batch",
            action="deliver_batch",
            files=sum([one.plan.inbound is not None for one in batch]),
            deliveries=sum([one.deliveries for one in batch]),
            refused=sum([bool(one.plan.refusal) for one in batch]),
            first_ids=[one.plan.subject.message_id for one in batch[:SHOWN_IDS]],
        )
        for one in batch if self._is_verbose else ():
            self._log(
                "Refused a message" if one.plan.refusal else "Carried a message",
                action="deliver_message",
                level="debug",
                message_id=one.plan.subject.message_id,
                agent=one.plan.subject.agent,
                recipients=[name for file in one.files for name in file.recipients],
                held=[recipient for _, recipient in one.undelivered],
            )


def refuse_fault(inbound: Inbound, exc: Exception, log: LogCall) -> Plan:
    """Refuse a file because of a bug in the relay, which stops no other file."""
    fault = type(exc).__name__  # its text may quote what it choked on
    log(
        f"Refused {inbound.file.path}: internal error: {fault}",
        action="fault",
        level="error",
        where=where(exc),
    )
    return refuse(inbound, f"internal error of the relay: {fault}")


def throttled_until(stored: Message, now_ns: int) -> int:
    """Next check of a throttled message: at most 60 s from now, and no later than its TTL."""
    due = now_ns + THROTTLED_RECHECK_NS
    if stored.ttl_over_ns is not None:
        due = min(due, max(stored.ttl_over_ns, now_ns) + 1)
    return due


def _deferral(file: OutgoingFile, recipient: str, due_at: int) -> Deferral:
    return Deferral(file.message_id, recipient, THROTTLED, due_at)


def _reply_of(subject: Subject, reply: ControlReply) -> tuple[SystemMessage, ...]:
    """The reply to a command; empty if it needs none, or the supervisor will answer."""
    if reply.ok is None:
        return ()
    text = f"completed {reply.text}\n" if reply.ok else f"{reply.text}\n"
    body, kind = text.encode() + reply.attached, Kind.ACK if reply.ok else Kind.NACK
    return (control_reply(subject, kind, body),)


def _own_draft(one: SystemMessage, at_ns: int, answered: Message | None) -> Draft:
    """A message of the relay's own as the engine gets it; an acknowledgment if one is expected."""
    message = one.message
    fields = router.engine_fields(message, one.message_id, at_ns, None)
    fields.metadata["kind"] = str(message.kind)
    if message.kind not in NOTICES:
        kind = MessageType.ERROR if answered is None else MessageType.ACKNOWLEDGMENT
        thread = None if answered is None else answered.correlation_id
        fields = fields._replace(message_type=kind, correlation_id=thread)
    if fields.topic is not None:
        return Draft(SYSTEM, ChannelType.PUB_SUB, (ORCHESTRATOR,), None, fields)
    name = direct_channel_name(message.to, ORCHESTRATOR)
    members = (message.to, ORCHESTRATOR)
    return Draft(name, ChannelType.DIRECT, members, (message.to,), fields)


def _refusal(plan: Plan, inbound: Inbound, answers: list[str], now: int) -> events.FileRefused:
    return events.FileRefused(
        inbound.message_id,
        inbound.origin(),
        plan.refusal,
        answers[0] if answers else "",
        inbound.has_row,
        inbound.is_unsafe,
        now // NS_PER_S,
    )


def _obligation(one: Obligation) -> ObligationState:
    """The ledger's entry for an answer that is still owed."""
    return ObligationState("open", one.due_ms * NS_PER_MS or None)
