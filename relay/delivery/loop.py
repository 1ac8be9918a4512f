"""The loop: one thread takes a batch of files from the outboxes through every step.

The steps, and the function of each: docs/architecture.md. A message is accepted once the journal
has it (``EventLog.commit``). Before that no recipient sees anything: inboxes have no file of it,
and the ledger has only the claim of its row. States, and what a crash leaves of them:
docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from relay.agents.roster import Roster
from relay.agents.status import AgentStatusTracker
from relay.base import directory_guard
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.home import Dirs
from relay.base.metrics import Metrics
from relay.base.names import LEAD
from relay.base.watcher import NOTHING, WatchEvents
from relay.delivery import file_ops
from relay.delivery.apply import PlanApplier, refuse_fault
from relay.delivery.cancel import Canceller
from relay.delivery.control import Orchestrator
from relay.delivery.downtime import Deadlines
from relay.delivery.event_source import EventSource
from relay.delivery.execute import PlanExecutor
from relay.delivery.idle import IdleNotices
from relay.delivery.intake import Intake
from relay.delivery.intake_queue import in_turns
from relay.delivery.limits import ReplyLoops
from relay.delivery.notifications import Notifier, Reminders
from relay.delivery.plan import plan_file
from relay.delivery.reads import ReadDetector
from relay.delivery.record import LedgerWriter
from relay.delivery.reports import ReportReader
from relay.delivery.retry import HeldQueue, PlanSource, RetryQueue, pause_after
from relay.delivery.saved_state import StateStore
from relay.delivery.validate import RECHECK_NS, Claimer, SigningKeys, Validator
from relay.delivery.values import (
    FIRST_PAUSE_S,
    NO_EFFECTS,
    OUTBOX,
    Inbound,
    Job,
    Part,
    Plan,
    Resources,
    Row,
    Subject,
)
from relay.engine.archives import Roller
from relay.engine.checkpoint import Flusher
from relay.ledger.agents import NOTIFY_IDLE

_AGENT = attrgetter("file.agent")
BATCH_NS = 250 * NS_PER_MS  # of files, in one turn: what is left gives way to other agents
PART_BYTES = 32 << 20  # of the journal: room for so much is made at once
EVENTS_BYTES = 2 << 10  # a refusal and its nack, or the events about a message


class Dispatcher(Part):
    """Does all due work when ``tick`` is called. Used from one thread."""

    def __init__(
        self,
        given: Resources,
        *,
        flusher: Flusher,
        roller: Roller,
        roster: Roster,
        metrics: Metrics,
    ) -> None:
        super().__init__(given)
        self.metrics = metrics
        self._flusher = flusher
        self._roller = roller
        self._roster = roster
        self._build(given)
        self._events.measure(metrics.commit_s)
        self._pauses: dict[str, str] = {}  # source of a pause -> reason; empty: not paused
        self._left: list[Inbound] = []  # claimed, and not begun in the time of their batch
        self._batch_ends_ns = 0  # then (monotonic)
        self._errors: dict[str, str] = {}  # what could not be written -> why, as logged last
        self._refusal = ""  # why a retry or a notice could not be written
        self._pause_until_ns = 0  # of retries and notices, after that (monotonic)
        self._jobs: list[tuple[Subject, Job]] = []
        self._has_process_requests = False  # for processes to be started or ended
        self._due_ns = 0  # of the next turn with something to do (monotonic)

    def _build(self, given: Resources) -> None:
        """Build and connect the parts, in the order of a turn."""
        roster, metrics = self._roster, self.metrics
        _, home, ledger, store, _, clock, log = given
        self.guard = directory_guard.DirectoryGuard(home)
        # what a file passes before it is planned
        self._intake = Intake(given)
        self._validator = Validator(given, SigningKeys(given), roster)
        self._claimer = Claimer(given)
        self._reply_loops = ReplyLoops(given)
        age_ns, settings = store.deliveries.running_ns, given.config.agents
        statuses = AgentStatusTracker(ledger, roster, settings, clock, age_ns, log)
        self._statuses = statuses
        # what executes plans
        states = StateStore(home, given.config.continuity)
        writer = self._ledger_writer = LedgerWriter(given)
        reads = ReadDetector(given, writer, metrics)
        canceller = Canceller(given, reads)
        orchestrator = Orchestrator(given, roster, statuses, states, canceller)
        applier = PlanApplier(given, orchestrator)
        self._executor = PlanExecutor(given, applier, canceller, writer, metrics)
        self.notifier = Notifier(given, roster, self._executor, states)
        # what makes plans without a file, and what finds files
        self.idle = IdleNotices(given)
        self._sources: tuple[PlanSource, ...] = (
            HeldQueue(given),
            RetryQueue(given),
            Reminders(given, statuses.process_endings),
            self.idle,
        )
        self._deadlines = Deadlines(given)
        limit, on_state = self._intake.rate_limit, self.idle.on_state
        self._reports = ReportReader(given, writer, limit, on_state)
        self._event_source = EventSource(
            given,
            reads=reads,
            reports=self._reports,
            deadlines=self._deadlines,
            intake=self._intake,
            roster=roster,
            statuses=statuses,
            notifier=self.notifier,
        )

    def pause(self, source: str, reason: str) -> None:
        """Pause intake for a reason; an empty one ends this source's pause."""
        if self._pauses.get(source, "") != reason:
            self._pauses[source] = reason
            self._due_ns = 0

    @property
    def pauses(self) -> dict[str, str]:
        """The reasons why intake is paused, by source."""
        return {source: reason for source, reason in self._pauses.items() if reason}

    @property
    def backlog(self) -> int:
        """Files seen but not yet delivered."""
        return self._intake.backlog + len(self._left)

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

    def requeue(self, files: Iterable[tuple[str, str]]) -> None:
        """Queue the files of open rows, oldest discovery first, ahead of new ones."""
        self._due_ns = 0
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True, counted=True)

    @property
    def due_ns(self) -> int:
        """Time of the next turn with something to do (monotonic); 0: at once."""
        return 0 if self._store.fresh_events else self._due_ns

    def tick(self, wake: WatchEvents) -> bool:
        """Do all due work; False if nothing happened and nothing is due: then nothing is asked."""
        begin = self.metrics.begin
        now = begin("detect")
        self._deadlines.check(now)
        if wake is NOTHING and now < self.due_ns:
            return False
        self.guard.check()
        self._statuses.refresh()
        with self._home.dirs() as dirs:
            self._event_source.poll(wake, now)
            begin("read")
            paused = bool(self.pauses)
            if not paused:
                # first: nothing that a session is being shown is taken back
                self._reports.take(dirs)
                senders = {inbound.file.agent for inbound in self._left}
                batch = self._intake.read_batch(dirs, self._config.limits.batch_files, senders)
                if batch or self._left:
                    self._process(dirs, self._screen(dirs, batch))
            begin("retry")
            for limit in (self._reply_loops, self._intake.rate_limit):
                if limit.alerts:
                    limit.alerts = self.notifier.report(limit.alerts)
            self._event_source.flush_reads()
            due_ns = self._execute_due(dirs)
            begin("maintain")
            self._ledger_writer.catch_up()
            self._ledger_writer.record_counts()
            self._roller.step()
            self._flusher.flush_if_due()
            if self._roller.error or self._flusher.error or self._refusal or self._errors:
                self._log_errors()
            self._events.end_turn()
        self._due_ns = self._next_due(due_ns, is_paused=paused)
        return True

    @property
    def has_requests(self) -> bool:
        """True if there are jobs, or requests about processes, to be popped."""
        return self._has_process_requests or bool(self._jobs)

    def pop_jobs(self) -> list[tuple[Subject, Job]]:
        """Journal commands and jobs since the last call, and who asked; lost in a crash."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def pop_process_requests(self) -> bool:
        """True if a process was requested to start or end since the last call; see the ledger."""
        asked, self._has_process_requests = self._has_process_requests, False
        return asked

    def drain(self) -> None:
        """Write what is done, and the store, before a stop; a start goes on with the rest."""
        self._event_source.flush_reads()
        self._ledger_writer.record_counts(include_recent=True)
        self._events.commit()
        self._flusher.flush()
        self._events.commit()
        self._ledger_writer.write()  # the position, too: that of the journal's end
        self._deadlines.record_alive()

    # -- a batch of files --------------------------------------------------------------

    def _screen(self, dirs: Dirs, batch: list[Inbound]) -> list[Inbound]:
        """Files that can be planned now; those whose attachments are not read yet are deferred."""
        ready, later, waiting, failed = self._validator.screen(dirs, batch)
        for file in (inbound.file for inbound in later):
            self._intake.add(file.agent, file.file_name, renamed=True, counted=True)
        for inbound, reason, attempts in failed:
            self._retry_later(inbound, reason, attempts)
        due = self._clock.monotonic_ns() + RECHECK_NS
        for inbound in waiting:
            self._intake.retry(inbound.file.agent, inbound.file.file_name, due)
        return ready

    def _process(self, dirs: Dirs, batch: list[Inbound]) -> None:
        """Take files through every stage, a limited number of journal bytes at a time.

        With those for which the batch before had no time agents take turns.
        """
        self._batch_ends_ns = self.metrics.begin("claim") + BATCH_NS
        claimed = self._claimer.claim(dirs, batch)
        self._mark_senders_active(claimed)
        if self._left:
            claimed, self._left = in_turns([*claimed, *self._left], _AGENT), []
        part: list[Inbound] = []
        part_bytes = 0
        for number, inbound in enumerate(claimed):
            needed = _journal_bytes(inbound)
            if part and part_bytes + needed > PART_BYTES:
                self._execute_part(dirs, part, part_bytes)
                part, part_bytes = [], 0
                if self._clock.monotonic_ns() > self._batch_ends_ns:
                    self._left += claimed[number:]
                    return
            part.append(inbound)
            part_bytes += needed
        self._execute_part(dirs, part, part_bytes)

    def _execute_part(self, dirs: Dirs, part: list[Inbound], part_bytes: int) -> None:
        """Plan and execute files, if the journal has room for them."""
        self.metrics.begin("plan")
        room = self._room_for(part_bytes)
        if room:
            self._postpone([(inbound, room) for inbound in part])
            return
        postponed: list[tuple[Inbound, str]] = []
        result = self._executor.execute(dirs, self._plans(part, postponed))
        for planned, why in result.postponed:
            if planned.inbound is not None:
                postponed.append((planned.inbound, why))
        if postponed:
            self._postpone(postponed)
        self._statuses.refresh()
        for found in result.replaced:
            self._intake.add(found.agent, found.file_name, renamed=True)
        self._jobs += result.jobs
        keys_changed = False
        for plan in result.executed:
            if (effects := plan.effects) is not NO_EFFECTS:
                keys_changed |= effects.key is not None
                if (asked := effects.asked) is not None and asked.operation == NOTIFY_IDLE:
                    self.idle.check_soon()
                self._has_process_requests |= asked is not None
        self._validator.after_commit(dirs, keys_changed=keys_changed)

    def _plans(self, part: list[Inbound], postponed: list[tuple[Inbound, str]]) -> Iterator[Plan]:
        """Plan one file after the other, each when the previous one is in the store.

        ``postponed`` gets those of a reply loop, and why; ``_left`` those without time left.
        """
        everybody = self._statuses.directory()
        for number, inbound in enumerate(part):
            if number and self._clock.monotonic_ns() > self._batch_ends_ns:
                # what was left in .pending has no row: the next scan finds it
                self._left = [one for one in part[number:] if one.file.place == OUTBOX]
                return
            if inbound.row is not Row.REPEATED or not self._is_known(inbound):
                inbound = self._validator.validate(inbound)
            message = inbound.message
            if message is not None and "RE" in message.headers:
                why = self._reply_loops.check(inbound)
                if why and not self._is_known(inbound):
                    postponed.append((inbound, why))
                    continue
            directory = everybody
            if message is not None and message.to.lower() == LEAD:
                directory = self._statuses.directory(self._roster.lead())
            try:
                planned = plan_file(inbound, directory, self._store)
            except Exception as exc:
                planned = refuse_fault(inbound, exc, self._log)
            yield planned

    def _mark_senders_active(self, claimed: list[Inbound]) -> None:
        """Mark senders active; check again unavailable recipients that now have mail."""
        written: dict[str, int] = {}
        for inbound in claimed:
            file = inbound.file
            if inbound.row is not Row.REPEATED and file.place == OUTBOX:
                written[file.agent] = max(written.get(file.agent, 0), file.ctime_ns)
        self._statuses.mark_seen(written)
        if unavailable := self._statuses.unavailable:
            wanted = {
                inbound.message.to for inbound in claimed if inbound.message
            } & unavailable.keys()
            if wanted:
                self._event_source.check_liveness(wanted)

    def _room_for(self, n_bytes: int) -> str:
        """The reason why the journal has no room for ``n_bytes``; empty if it has."""
        try:
            self._events.reserve(n_bytes)
        except OSError as exc:
            return f"journal: {exc.strerror or exc}"
        return ""

    def _is_known(self, inbound: Inbound) -> bool:
        """True if the store has accepted it before; it then stays accepted."""
        message_id, find = inbound.file.message_id, self._store.messages.find_by_relay_id
        return find(message_id, include_archived=True) is not None

    def _postpone(self, postponed: list[tuple[Inbound, str]]) -> None:
        """Leave files in their outboxes after a transient error, to be tried again."""
        attempts: dict[str, int] = {}
        if rows := [
            (inbound.file.message_id, reason) for inbound, reason in postponed if inbound.has_row
        ]:
            with self._ledger.transaction():
                attempts = self._ledger.postpone(rows)
        for inbound, reason in postponed:
            self._retry_later(inbound, reason, attempts.get(inbound.file.message_id, 1))

    def _retry_later(self, inbound: Inbound, reason: str, attempts: int) -> None:
        self.metrics.postponed += 1
        file, pause_s = inbound.file, pause_after(attempts)
        due = self._clock.monotonic_ns() + pause_s * NS_PER_S
        waited_ns = max(0, self._clock.now_ns() - inbound.discovered_at)
        if file.place == OUTBOX:  # else the next scan finds it
            self._intake.retry(file.agent, file.file_name, due, waited_ns)
        self._log(
            f"Left a message in its outbox, to be tried again in {pause_s} s: {reason}",
            action="postpone",
            level="warning",
            message_id=inbound.file.message_id,
            agent=file.agent,
        )

    # -- due work ----------------------------------------------------------------------

    def _execute_due(self, dirs: Dirs) -> int | None:
        """Execute the plans of each source that are due; returns when the next ones are.

        If the disk or the store refuses some, all sources pause.
        """
        if self._clock.monotonic_ns() < self._pause_until_ns:
            return self._pause_until_ns
        if self._refusal and self._is_full(dirs):  # before plans are made, for which files are read
            return self._pause_sources()
        times: list[int] = []
        self._refusal = ""
        for source in self._sources:
            due_ns = source.due_ns()  # what is overdue is due at the instant of asking
            if due_ns is not None and due_ns <= self._clock.monotonic_ns():
                plans = source.plans_due(dirs, self._statuses.directory())
                if plans:
                    result = self._executor.execute_own(dirs, plans)
                    source.settle(result)
                    if result.postponed:
                        _, self._refusal = result.postponed[0]
                due_ns = 0 if plans else source.due_ns()  # they may change any other's
            if due_ns is not None:
                times.append(due_ns)
        return self._pause_sources() if self._refusal else min(times, default=None)

    def _is_full(self, dirs: Dirs) -> bool:
        try:
            file_ops.check_room(dirs)
        except file_ops.DiskFull as exc:
            self._refusal = str(exc)
            return True
        return False

    def _pause_sources(self) -> int:
        self._pause_until_ns = self._clock.monotonic_ns() + FIRST_PAUSE_S * NS_PER_S
        return self._pause_until_ns

    def _log_errors(self) -> None:
        """Log once what cannot be written, and that it can be again."""
        for what, error, again, action in (
            ("Retries and notices", self._refusal, "are written again", "postpone"),
            ("Archives", self._roller.error, "are written again", "roll_failed"),
            ("The store", self._flusher.error, "is written again", "flush_failed"),
        ):
            if error != self._errors.get(what, ""):
                self._errors[what] = error
                text = f"cannot be written, trying again: {error}" if error else again
                self._log(f"{what} {text}", action=action, level="error" if error else "info")
        self._errors = {what: error for what, error in self._errors.items() if error}

    def _next_due(self, sources_due_ns: int | None, *, is_paused: bool) -> int:
        times = [self._events.due_ns(), self._flusher.next_ns, self._roller.due_ns()]
        if not is_paused:
            times += [0 if self._left else self._intake.due_ns(), self._reports.due_ns()]
        due = [at for at in (sources_due_ns, *times) if at is not None]
        return min([self._event_source.due_ns(), *due])


def _journal_bytes(inbound: Inbound) -> int:
    """Journal bytes that a file may need; the content of a refused file is not kept."""
    return EVENTS_BYTES + (2 * inbound.file.size if inbound.message is not None else 0)
