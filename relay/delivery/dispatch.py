"""The flow of a batch: one thread, from the hint to the archive.

    look, record, claim, decide, stage, commit, deliver, note, archive

Accepted is what the journal has (``EventLog.commit``), and nothing is seen outside before that:
no file in an inbox, no word in the ledger. States and what a crash leaves: docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.agents.roster import Roster
from relay.agents.saved_state import StateStore
from relay.agents.status import AgentStatusTracker
from relay.base import directory_guard
from relay.base.clock import NS_PER_S
from relay.base.errors import StoreCapacity, StoreFull
from relay.base.home import Dirs
from relay.base.jobs import Pack, Prune
from relay.base.logs import where
from relay.base.outbox_file import OUTBOX
from relay.base.watcher import WatchEvents
from relay.delivery import file_ops
from relay.delivery.admission import Recorder
from relay.delivery.archive import Archiver
from relay.delivery.carry import BatchWriter
from relay.delivery.context import Context
from relay.delivery.decide import Planner
from relay.delivery.door import RECHECK_NS, Validator
from relay.delivery.event_source import EventSource
from relay.delivery.held import DeferredQueue, FailedDeferral
from relay.delivery.intake import Intake, Parsed, ParseResult
from relay.delivery.loops import ReplyLoops
from relay.delivery.lost_time import DowntimeTracker
from relay.delivery.notifications import Notifier
from relay.delivery.overdue import RetryQueue
from relay.delivery.reminders import Reminders
from relay.delivery.signing import SigningKeys
from relay.delivery.waiting import ThrottleStatus
from relay.delivery.work import EndedDelivery, WorkItem
from relay.engine.archives import Roller
from relay.engine.checkpoint import Flusher
from relay.journal.plan import JournalCommand

PART_BYTES = 32 << 20  # of the journal: room for so much is made at once
EVENTS_BYTES = 2 << 10  # a refusal and its nack, or the events about a message
TRANSIENT_ERRORS = (StoreFull, StoreCapacity, file_ops.DiskFull)  # its file waits in the outbox


class Dispatcher:
    """Does everything that is due when ``tick`` is called. Used from one thread."""

    def __init__(self, context: Context, flusher: Flusher, roller: Roller, roster: Roster) -> None:
        self.tally = context.tally
        self.pauses: dict[str, str] = {}  # who holds the intake up -> why; empty: nobody
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
        """The parts that do the steps, each with what it needs of the others."""
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
        """Why nothing is taken out of the outboxes; empty when it is."""
        return "; ".join(why for why in self.pauses.values() if why)

    @property
    def backlog(self) -> int:
        """Files seen and not yet delivered."""
        return self._intake.backlog

    @property
    def roster(self) -> Roster:
        """The agents there are, and who of them is scanned."""
        return self._roster

    @property
    def journal_end(self) -> int:
        """Bytes of the journal's stream so far."""
        return self._events.journal.end

    def oldest_ns(self) -> int | None:
        """When the file was seen that waits longest in an outbox (monotonic); None: none waits."""
        return self._intake.oldest_ns()

    @property
    def throttled(self) -> ThrottleStatus:
        """Who is over a limit now, and how often that was."""
        return self._intake.throttled

    def requeue(self, files: Iterable[tuple[str, str]]) -> None:
        """Files of open rows, oldest discovery first: they go before anything that is new."""
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True, counted=True)

    def tick(self, wake: WatchEvents) -> int:
        """Do what is due; returns when the next thing is (monotonic ns, 0 for at once)."""
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
        """What was asked of journal and archive since the last time; not repeated after a crash."""
        orders, self._jobs = self._jobs, []
        return orders

    def pop_process_requests(self) -> bool:
        """True when a process was asked for, or its end, since the last time; the ledger has it."""
        asked, self._has_process_requests = self._has_process_requests, False
        return asked

    def drain(self) -> None:
        """The end: everything in hand is finished, the store is written."""
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
        """Those that can be decided now; an attachment that is still being read is waited for."""
        if not looks:
            return looks
        let_in = self._validator.validate(dirs, looks)
        due = self._clock.monotonic_ns() + RECHECK_NS
        for look in let_in.waiting:
            self._intake.retry(look.file.agent, look.file.file_name, due)
        return let_in.ready

    def _process(self, dirs: Dirs, looks: list[ParseResult]) -> None:
        """Take a batch of files through every step up to finish, so many bytes at once."""
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
        """Decide on what was admitted and carry it out, once the journal has room for it."""
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
                why = self._reply_loops.check(work, look.message)
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
        """Who writes is there; so may be, by now, who is written to and was away."""
        written: dict[str, int] = {}
        for work, look in admitted:
            if not work.is_repeat and look.file.place == OUTBOX:
                written[work.agent] = max(written.get(work.agent, 0), look.file.ctime_ns)
        self._statuses.mark_seen(written)
        wanted = {look.message.to for _, look in admitted if isinstance(look, Parsed)}
        if wanted & self._statuses.unavailable.keys():
            self._event_source.check_liveness(wanted & self._statuses.unavailable.keys())

    def _room_for(self, n_bytes: int) -> str:
        """Why the journal has no room for so many bytes, or nothing."""
        try:
            self._events.reserve(n_bytes)
        except OSError as exc:
            return f"journal: {exc.strerror or exc}"
        return ""

    def _is_known(self, work: WorkItem) -> bool:
        """True when the store has accepted it before: who has it keeps it."""
        return self._store.find_by_relay_id(work.message_id, include_archived=True) is not None

    def _plan(self, work: WorkItem, look: ParseResult) -> None:
        """What is to happen with one file; a fault of ours refuses it, and stops no other."""
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
                f"Refused {work.file.path}: the relay has a fault: {fault}",
                action="fault",
                level="error",
                where=where(exc),
            )
            work.outgoing.clear()
            work.requests.clear()
            self._planner.refuse(work, f"the relay has a fault and cannot handle it: {fault}")

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
        """A passing error: the file stays in the outbox and is tried again."""
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
        """Write the store's file when that is due; say once that it cannot be, and can again."""
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
        """Try what is held; where that is over, the sender is told first, then it is noted."""
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
        """A held delivery that is over, for its sender to hear of."""
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
    """Bytes that a file may need in the journal; of a refused one no content is kept."""
    return EVENTS_BYTES + (2 * look.file.size if isinstance(look, Parsed) else 0)
