"""The loop: one thread takes a batch of files from the outboxes through every stage.

    read, validate, record, plan, stage, commit, deliver, complete, archive

A message is accepted once the journal has it (``EventLog.commit``). Nothing is visible outside
before that: no file in an inbox, no change in the ledger. States, and what a crash leaves of them:
docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.agents.roster import Roster
from relay.agents.status import AgentStatusTracker
from relay.base import directory_guard
from relay.base.clock import NS_PER_S
from relay.base.errors import StoreCapacity, StoreFull
from relay.base.home import Dirs
from relay.base.logs import where
from relay.base.watcher import WatchEvents
from relay.delivery import file_ops
from relay.delivery.downtime import DowntimeTracker
from relay.delivery.event_source import EventSource
from relay.delivery.execute import Archiver, BatchWriter
from relay.delivery.intake import OUTBOX, Intake, Parsed, ParseResult
from relay.delivery.limits import ReplyLoops, ThrottleStatus
from relay.delivery.notifications import Notifier, Reminders
from relay.delivery.plan import Planner
from relay.delivery.retry import DeferredQueue, FailedDeferral, RetryQueue
from relay.delivery.saved_state import StateStore
from relay.delivery.validate import RECHECK_NS, Recorder, SigningKeys, Validator
from relay.delivery.work import Context, EndedDelivery, Pack, Prune, WorkItem
from relay.engine.archives import Roller
from relay.engine.checkpoint import Flusher
from relay.journal.plan import JournalCommand

PART_BYTES = 32 << 20  # of the journal: room for so much is made at once
EVENTS_BYTES = 2 << 10  # a refusal and its nack, or the events about a message
TRANSIENT_ERRORS = (StoreFull, StoreCapacity, file_ops.DiskFull)  # its file waits in the outbox


class Dispatcher:
    """Does all due work when ``tick`` is called. Used from one thread."""

    def __init__(self, context: Context, flusher: Flusher, roller: Roller, roster: Roster) -> None:
        self.tally = context.tally
        self.pauses: dict[str, str] = {}  # source of a pause -> reason; empty: not paused
        self._config = context.config
        self._home = context.home
        self._ledger = context.ledger
        self._store = context.store
        self._events = context.events
        self._events.commit_s = self.tally.commit_s
        self._flusher = flusher
        self._roller = roller
        self._roster = roster
        self._clock = context.clock
        self._log = context.log
        self._build_parts(context)
        self._last_roll_error = ""
        self._last_flush_error = ""
        self._jobs: list[JournalCommand | Prune | Pack] = []
        self._has_process_requests = False  # for processes to be started or ended

    def _build_parts(self, context: Context) -> None:
        """Build the stages of the pipeline, each with its dependencies."""
        config, home, ledger, store, _, clock, log, _ = context
        roster = self._roster
        self._intake = Intake(config.detection, config.limits, clock, log, config.security)
        keys = SigningKeys(ledger, store, config.security.require_signatures, clock, log)
        self._validator = Validator(keys, roster, config.limits, clock, log)
        self._guard = directory_guard.DirectoryGuard(home)
        self._recorder = Recorder(ledger, clock, log)
        states = StateStore(home, config.continuity)
        statuses = self._statuses = AgentStatusTracker(ledger, roster, config.agents, clock, log)
        self._planner = Planner(
            store,
            roster.lead,
            statuses.unavailable,
            statuses.inactive,
            states,
            config.spawn,
            roster.trusted_lead,
        )
        self._archiver = Archiver(ledger, clock, log)
        self._writer = BatchWriter(context, self._archiver)
        self._deferred = DeferredQueue(ledger, store, config, clock, statuses.unavailable)
        self._retries = RetryQueue(context, self._planner, self._writer, statuses.unavailable)
        self._reply_loops = ReplyLoops(store, config.limits.reply_depth, clock)
        self._downtime = DowntimeTracker(context)
        self._reminders = Reminders(
            context, self._planner, self._writer, statuses.unavailable, statuses.process_endings
        )
        self.notifier = Notifier(context, roster, self._planner, self._writer, states)
        self._event_source = EventSource(context, self._intake, roster, statuses, self.notifier)

    @property
    def paused(self) -> str:
        """The reason why intake is paused; empty if it is not."""
        return "; ".join(why for why in self.pauses.values() if why)

    @property
    def backlog(self) -> int:
        """Files seen but not yet delivered."""
        return self._intake.backlog

    @property
    def roster(self) -> Roster:
        """The agents, and which of them are scanned."""
        return self._roster

    @property
    def journal_end(self) -> int:
        """Bytes of the journal's stream so far."""
        return self._events.journal.end

    def oldest_ns(self) -> int | None:
        """Time at which the longest waiting file was seen (monotonic); None if none waits."""
        return self._intake.oldest_ns()

    @property
    def throttled(self) -> ThrottleStatus:
        """Agents over a limit, and counts of such episodes."""
        return self._intake.throttled

    def requeue(self, files: Iterable[tuple[str, str]]) -> None:
        """Queue the files of open rows, oldest discovery first, ahead of new ones."""
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True, counted=True)

    def tick(self, wake: WatchEvents) -> int:
        """Do all due work; returns the next due time (monotonic ns, 0 for at once)."""
        self._downtime.check()
        begin = self.tally.begin
        self._guard.check()
        self._statuses.refresh()
        with self._home.dirs() as dirs:
            begin("detect")
            self._event_source.poll(wake)
            begin("read")
            limit = 0 if self.paused else self._config.limits.batch_files
            looks = self._validate(
                dirs, self._intake.read_batch(dirs, limit, self._archiver.in_progress)
            )
            if looks:
                self._process(dirs, looks)
            begin("retry")
            self._reply_loops.requeue(self.notifier.report_loops(self._reply_loops.pop_new()))
            self.notifier.report_limits(dirs, self._intake.pop_new_alerts())
            self._retry_deferred(dirs)
            self._retries.retry_due(dirs, self._roster.agents)
            self._reminders.remind_due(dirs, self._roster.agents)
            begin("archive")
            self._archive(dirs)
            begin("maintain")
            self._event_source.flush_reads()
            self._writer.record_counts()
            self._roll()
            self._checkpoint()
            self._events.commit_if_due()
        return self._next_due()

    def pop_jobs(self) -> list[JournalCommand | Prune | Pack]:
        """Journal commands and jobs requested since the last call; lost in a crash."""
        orders, self._jobs = self._jobs, []
        return orders

    def pop_process_requests(self) -> bool:
        """True if a process was requested to start or end since the last call; see the ledger."""
        asked, self._has_process_requests = self._has_process_requests, False
        return asked

    def drain(self) -> None:
        """Finish everything in progress and write the store, before a stop."""
        with self._home.dirs() as dirs:
            while not self._archiver.is_idle:  # what waits in the outboxes is the next start's
                self._archiver.archive(dirs, self._config.limits.batch_files)
                self._archiver.flush()
        self._event_source.flush_reads()
        self._writer.record_counts(include_recent=True)
        self._events.commit()
        self._flusher.flush()
        self._events.commit()
        self._downtime.record()

    # -- 2-4 look, record, claim -------------------------------------------------------

    def _validate(self, dirs: Dirs, looks: list[ParseResult]) -> list[ParseResult]:
        """Files that can be planned now; those whose attachments are being read are deferred."""
        if not looks:
            return looks
        let_in = self._validator.validate(dirs, looks)
        due = self._clock.monotonic_ns() + RECHECK_NS
        for look in let_in.waiting:
            self._intake.retry(look.file.agent, look.file.file_name, due)
        return let_in.ready

    def _process(self, dirs: Dirs, looks: list[ParseResult]) -> None:
        """Take a batch of files through every stage, a limited number of bytes at a time."""
        self.tally.begin("record")
        admitted = self._recorder.claim(dirs, looks)
        self._mark_senders_active(admitted)
        part: list[tuple[WorkItem, ParseResult]] = []
        part_bytes = 0
        for one in admitted:
            needed = _journal_bytes(one[1])
            if part and part_bytes + needed > PART_BYTES:
                self._process_part(dirs, part, part_bytes)
                part, part_bytes = [], 0
            part.append(one)
            part_bytes += needed
        self._process_part(dirs, part, part_bytes)

    def _process_part(
        self, dirs: Dirs, part: list[tuple[WorkItem, ParseResult]], part_bytes: int
    ) -> None:
        """Plan and execute a part of a batch, if the journal has room for it."""
        self.tally.begin("route")
        room = self._room_for(part_bytes)
        batch: list[WorkItem] = []
        deliveries = 0
        for work, look in part:
            if room:
                self._postpone(work, room)
                continue
            if isinstance(look, Parsed) and not (work.is_repeat and self._is_known(work)):
                if not work.failure:
                    self._validator.refuse_invalid(work, look)
            if isinstance(look, Parsed) and not work.failure:
                work.attachments = look.message.attachments
                why = self._reply_loops.check(
                    work.agent, work.message_id, work.discovered_at, look.message
                )
                if why and not self._is_known(work):
                    self._postpone(work, why)
                    continue
            try:
                self._plan(work, look)
            except TRANSIENT_ERRORS as exc:
                self._postpone(work, str(exc))
                continue
            batch.append(work)
            deliveries += work.deliveries()
            if deliveries >= self._config.limits.batch_deliveries:
                self._execute(dirs, batch)
                self.tally.begin("route")
                batch, deliveries = [], 0
        if batch:
            self._execute(dirs, batch)

    def _mark_senders_active(self, admitted: list[tuple[WorkItem, ParseResult]]) -> None:
        """Mark senders active; check again unavailable recipients that now have mail."""
        written: dict[str, int] = {}
        for work, look in admitted:
            if not work.is_repeat and look.file.place == OUTBOX:
                written[work.agent] = max(written.get(work.agent, 0), look.file.ctime_ns)
        self._statuses.mark_seen(written)
        wanted = {look.message.to for _, look in admitted if isinstance(look, Parsed)}
        if wanted & self._statuses.unavailable.keys():
            self._event_source.check_liveness(wanted & self._statuses.unavailable.keys())

    def _room_for(self, n_bytes: int) -> str:
        """The reason why the journal has no room for ``n_bytes``; empty if it has."""
        try:
            self._events.reserve(n_bytes)
        except OSError as exc:
            return f"journal: {exc.strerror or exc}"
        return ""

    def _is_known(self, work: WorkItem) -> bool:
        """True if the store has accepted it before; it then stays accepted."""
        return self._store.find_by_relay_id(work.message_id, include_archived=True) is not None

    def _plan(self, work: WorkItem, look: ParseResult) -> None:
        """Plan one file; a bug in the relay refuses this file and stops no other."""
        try:
            if isinstance(look, Parsed) and not work.failure:
                now = self._clock.now_ns()
                self._planner.plan(work, look, self._roster.agents, now)
            else:
                self._planner.refuse(work, work.failure)
        except TRANSIENT_ERRORS:
            raise
        except Exception as exc:
            fault = type(exc).__name__  # its text may quote what it choked on
            self._log(
                f"Refused {work.file.path}: internal error: {fault}",
                action="fault",
                level="error",
                where=where(exc),
            )
            work.outgoing.clear()
            work.requests.clear()
            self._planner.refuse(work, f"internal error of the relay: {fault}")

    def _execute(self, dirs: Dirs, batch: list[WorkItem]) -> None:
        for work, reason in self._writer.execute(dirs, batch):
            self._postpone(work, reason)
        self._statuses.refresh()
        # One that was put off is not decided again: its answer is known by then.
        self._jobs += [order for work in batch for order in work.jobs]
        self._validator.after_commit(dirs, batch)
        self._has_process_requests = self._has_process_requests or any(
            work.requests for work in batch
        )

    def _postpone(self, work: WorkItem, reason: str) -> None:
        """Leave a file in its outbox after a transient error, to be tried again."""
        self.tally.postponed += 1
        attempts = 1
        if work.has_row:
            with self._ledger.transaction():
                attempts = self._ledger.postpone(work.message_id, reason)
        pause_s = self._config.retry.pause_s(attempts)
        due = self._clock.monotonic_ns() + pause_s * NS_PER_S
        waited_ns = max(0, self._clock.now_ns() - work.discovered_at)
        if work.file.place == OUTBOX:  # else the next scan finds it
            self._intake.retry(work.agent, work.file.file_name, due, waited_ns)
        self._log(
            f"Left a message in its outbox, to be tried again in {pause_s} s: {reason}",
            action="postpone",
            level="warning",
            message_id=work.message_id,
            agent=work.agent,
        )

    # -- 11 archive, 12 due work --------------------------------------------------------

    def _archive(self, dirs: Dirs) -> None:
        for found in self._archiver.archive(dirs, self._config.limits.batch_files):
            self._intake.add(found.agent, found.file_name, renamed=True)
        if self.paused or not self._intake.is_busy:  # else the next batch takes it along
            self._archiver.flush()

    def _checkpoint(self) -> None:
        """Write the store's file if due; log once when that fails and when it works again."""
        self._flusher.commit()
        error = self._flusher.error
        if error != self._last_flush_error:
            self._last_flush_error = error
            text = f"cannot be written, trying again: {error}" if error else "is written again"
            level = "error" if error else "info"
            self._log(f"The store {text}", action="flush_failed", level=level)

    def _roll(self) -> None:
        self._roller.step()
        error = self._roller.error
        if error != self._last_roll_error:
            self._last_roll_error = error
            text = f"cannot be written, trying again: {error}" if error else "are written again"
            level = "error" if error else "info"
            self._log(f"Archives {text}", action="roll_failed", level=level)

    def _retry_deferred(self, dirs: Dirs) -> None:
        """Retry deferred deliveries; of those given up the sender is notified first."""
        agents = self._roster.agents
        works, ended = self._deferred.due(dirs, agents, self._config.limits.batch_files)
        if not works and not ended:
            return
        endings: list[WorkItem] = []
        try:
            endings = [
                self._retries.failure_notice(self._ended_delivery(one), one.row, agents)
                for one in ended
            ]
        except (StoreFull, StoreCapacity) as exc:
            self._log(f"Cannot tell a sender now: {exc}", action="postpone", level="warning")
        put_off = {id(one.work) for one in self._writer.execute(dirs, works + endings)}
        told = [one for one, work in zip(ended, endings, strict=False) if id(work) not in put_off]
        self._deferred.postpone([one for one in ended if one not in told])
        self._deferred.retry_later([work for work in works if id(work) in put_off])

    def _ended_delivery(self, one: FailedDeferral) -> EndedDelivery:
        """A deferred delivery that is given up, for the notice to its sender."""
        stored = self._store.find_by_relay_id(one.row.message_id)
        number = stored.id if stored else 0
        message_id, attempt = one.row.message_id, one.delivery.attempt
        return EndedDelivery(number, message_id, one.recipient, one.state, attempt, one.reason)

    def _next_due(self) -> int:
        due = [self._event_source.due_ns()]
        parts = (
            self._intake,
            self._events,
            self._flusher,
            self._deferred,
            self._retries,
            self._roller,
        )
        for part in (*parts, self._reminders):
            at = None if part is self._intake and self.paused else part.due_ns()
            if at is not None:
                due.append(at)
        if not self._archiver.is_idle:
            due.append(0)
        return min(due)


def _journal_bytes(look: ParseResult) -> int:
    """Journal bytes that a file may need; the content of a refused file is not kept."""
    return EVENTS_BYTES + (2 * look.file.size if isinstance(look, Parsed) else 0)
