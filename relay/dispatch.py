"""The flow of a batch: one thread, from the hint to the archive.

    look, record, claim, decide, stage, commit, deliver, finish -- durable --> archive

A row becomes completed, and its original leaves the outbox, once the store's file holds every
event that the message caused (``Flusher.commit``). Until then a crash feeds the original again,
and the ledger's deliveries say who has it already. States and what a crash leaves: docs/states.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set

from relay import attachments, delivery
from relay.admission import Admission
from relay.clock import NS_PER_MS, NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.flush import Flusher
from relay.config import Config
from relay.decide import Decider
from relay.delivery import DiskFull
from relay.errors import UnsafePath
from relay.found import FileKey
from relay.held import HeldMail
from relay.home import Dirs, Home
from relay.intake import Accepted, Intake, Look
from relay.ledger import Ledger
from relay.names import MSG_SUFFIX, ORCHESTRATOR, message_id_of
from relay.roster import Roster
from relay.watcher import Wake
from relay.work import Work

Log = Callable[..., object]


class Dispatcher:
    """Does everything that is due when ``tick`` is called. Used from one thread."""

    def __init__(
        self,
        config: Config,
        home: Home,
        ledger: Ledger,
        store: CommStore,
        flusher: Flusher,
        roster: Roster,
        clock: Clock,
        log: Log,
    ) -> None:
        self._config = config
        self._home = home
        self._ledger = ledger
        self._store = store
        self._flusher = flusher
        self._roster = roster
        self._clock = clock
        self._log = log
        self._intake = Intake(config.detection, config.limits, clock, log)
        self._admission = Admission(ledger, clock, log)
        self._decider = Decider(store, roster.lead)
        self._held = HeldMail(ledger, store, config.retry, clock)
        self._hand: set[FileKey] = set()  # delivered, not yet archived
        self._waiting: deque[Work] = deque()  # their works, in the order of their sequence
        self._next_scan_ns = 0
        self._next_poll_ns = 0
        self._recheck_ns: int | None = None
        self._last_now_ns = 0
        self._last_flush_error = ""

    @property
    def backlog(self) -> int:
        """Files seen and not yet delivered."""
        return self._intake.backlog

    def feed(self, files: Iterable[tuple[str, str]]) -> None:
        """Files of open rows, oldest discovery first: they go before anything that is new."""
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True)

    def tick(self, wake: Wake) -> int:
        """Do what is due; returns when the next thing is (monotonic ns, 0 for at once)."""
        self._watch_clock()
        with self._home.dirs() as dirs:
            self._hear(wake)
            looks = self._intake.take(dirs, self._config.limits.batch_files, self._hand)
            if looks:
                self._process(dirs, looks)
            self._retry_held(dirs)
            self._finish(dirs)
        return self._next_due()

    def drain(self) -> None:
        """The end: everything in hand is finished, the store is written."""
        self._flusher.flush()
        with self._home.dirs() as dirs:
            while self._waiting:
                self._finish(dirs)

    def _watch_clock(self) -> None:
        """Log a clock that was set back; order is order of discovery and does not mind."""
        now = self._clock.now_ns()
        if now < self._last_now_ns - NS_PER_S:
            back_s = (self._last_now_ns - now) / NS_PER_S
            self._log(
                f"The clock was set back by {back_s:.1f} s", action="clock_skew", level="warning"
            )
        self._last_now_ns = now

    # -- 1 wake ------------------------------------------------------------------------

    def _hear(self, wake: Wake) -> None:
        now = self._clock.monotonic_ns()
        scan = wake.scan or now >= self._next_scan_ns
        appeared: list[str] = []
        recheck = self._recheck_ns is not None and now >= self._recheck_ns
        if wake.agents_changed or scan or recheck:
            appeared = self._refresh_agents(complete=scan or recheck)
        for touched in wake.touched:
            if touched.agent in self._roster.agents:
                self._intake.add(touched.agent, touched.file_name, renamed=touched.renamed)
        self._note_reads(wake.left)
        if scan:
            self._ledger.check_file()
            self._next_scan_ns = now + self._config.detection.scan_interval_s * NS_PER_S
            self._scan(self._roster.agents)
        elif self._roster.unwatched and now >= self._next_poll_ns:
            self._scan(self._roster.unwatched | set(appeared))
        elif appeared:
            self._scan(appeared)
        if self._roster.unwatched:
            self._next_poll_ns = now + self._config.detection.poll_interval_ms * NS_PER_MS

    def _refresh_agents(self, *, complete: bool) -> list[str]:
        changes = self._roster.refresh(complete=complete)
        self._recheck_ns = None
        if changes.incomplete and not complete:  # whoever removes something is given a second
            self._recheck_ns = self._clock.monotonic_ns() + NS_PER_S
        if changes.appeared or changes.gone:
            now = self._clock.now_ns()
            with self._ledger.transaction():
                for name in changes.appeared:
                    self._ledger.register(name, now)
                for name in changes.gone:
                    self._ledger.deactivate(name)
        return changes.appeared

    def _scan(self, agents: Iterable[str]) -> None:
        """List outboxes for what inotify missed, and inboxes for what was read unseen."""
        left: list[tuple[str, str]] = []
        for agent in sorted(agents):
            try:
                with self._home.dirs() as dirs:  # closed again: a thousand agents are many
                    self._intake.scan(dirs, agent)
                    gone = self._ledger.unread(agent) - delivery.inbox_files(dirs, agent)
            except FileNotFoundError:  # it has just gone: the roster's next refresh says so
                continue
            except (OSError, UnsafePath) as exc:
                self._log(
                    f"Cannot scan agent {agent}, the next scan tries again: {exc}",
                    action="scan_failed",
                    level="warning",
                    agent=agent,
                )
                continue
            left.extend((agent, message_id + MSG_SUFFIX) for message_id in gone)
        self._note_reads(left)

    def _note_reads(self, left: Iterable[tuple[str, str]]) -> None:
        """The file left the inbox: that is the evidence of reading."""
        taken = [
            (message_id, agent)
            for agent, name in left
            if (message_id := message_id_of(name)) is not None
        ]
        if taken:
            now = self._clock.now_ns()
            with self._ledger.transaction():
                self._ledger.read(taken, now)
                self._ledger.seen({agent for _, agent in taken}, now)
            for message_id, agent in taken:
                stored = self._store.by_relay_id(message_id)
                if stored is not None:
                    self._store.receive(stored.id, agent)

    # -- 2-4 look, record, claim -------------------------------------------------------

    def _process(self, dirs: Dirs, looks: list[Look]) -> None:
        """Take a batch of files through every step up to finish."""
        admitted = self._admission.admit(dirs, looks)
        again = [work.message_id for work, _ in admitted if work.again]
        known = self._ledger.deliveries(again) if again else {}
        batch: list[Work] = []
        deliveries = 0
        for work, look in admitted:
            recipients = known.get(work.message_id)
            if isinstance(look, Accepted) and not recipients:  # who has it already keeps it
                work.failure = work.failure or _missing_attachments(dirs, look)
            self._decide(work, look, recipients.keys() if recipients else None)
            batch.append(work)
            deliveries += work.deliveries()
            if deliveries >= self._config.limits.batch_deliveries:
                self._carry_out(dirs, batch)
                batch, deliveries = [], 0
        if batch:
            self._carry_out(dirs, batch)

    def _decide(self, work: Work, look: Look, known: Set[str] | None) -> None:
        """What is to happen with one file; a fault of ours refuses it, and stops no other."""
        try:
            if isinstance(look, Accepted) and not work.failure:
                now = self._clock.now_ns()
                self._decider.decide(work, look, self._roster.agents, known, now)
            else:
                self._decider.refuse(work, work.failure)
        except Exception as exc:
            self._log(
                f"Refused {work.found.path}: the relay has a fault: {exc!r}",
                action="fault",
                level="error",
                exc_info=True,
            )
            work.postings.clear()
            self._decider.refuse(work, f"the relay has a fault and cannot handle it: {exc!r}")

    # -- 7-10 stage, commit, deliver, finish -------------------------------------------

    def _carry_out(self, dirs: Dirs, batch: list[Work]) -> None:
        works = [work for work in batch if self._stage(dirs, work)]
        self._commit(works)
        self._deliver(dirs, works)
        sequence = self._store.sequence
        for work in works:
            work.sequence = sequence
            self._hand.add(work.found.key)
            self._waiting.append(work)
        refused = sum(bool(work.failure) for work in works)
        delivered = sum(work.deliveries() for work in works)
        self._log(
            "Delivered a batch",
            action="deliver_batch",
            files=len(works),
            deliveries=delivered,
            refused=refused,
        )

    def _stage(self, dirs: Dirs, work: Work) -> bool:
        """Stage everything that this file causes; False when the disk takes nothing now."""
        for number, posting in enumerate(work.postings):
            recipients = self._unstaged(work, posting.message_id, posting.recipients)
            posting = posting._replace(recipients=recipients)
            work.postings[number] = posting
            try:
                failed = delivery.stage(dirs, posting.message_id, posting.data, recipients)
            except DiskFull as exc:
                for earlier in work.postings[:number]:
                    delivery.unstage(dirs, earlier.message_id, earlier.recipients)
                self._postpone(work, str(exc))
                return False
            for recipient, reason in failed.items():
                work.held[posting.message_id, recipient] = reason
        return True

    def _unstaged(
        self, work: Work, message_id: str, recipients: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Without those who have this answer already, from before a crash."""
        new = work.has_row and not work.again  # without a row it may have been refused before
        if new or message_id == work.message_id:
            return recipients
        known = self._ledger.deliveries([message_id]).get(message_id, {})
        return tuple(recipient for recipient in recipients if recipient not in known)

    def _postpone(self, work: Work, reason: str) -> None:
        """A passing error: the file stays in the outbox and is tried again."""
        attempts = 1
        if work.has_row:
            with self._ledger.transaction():
                attempts = self._ledger.postpone(work.message_id, reason)
        pause_s = self._config.retry.pause_s(attempts)
        due = self._clock.monotonic_ns() + pause_s * NS_PER_S
        self._intake.retry(work.agent, work.found.file_name, due)
        self._log(
            f"Left a message in its outbox, to be tried again in {pause_s} s: {reason}",
            action="postpone",
            level="warning",
            message_id=work.message_id,
            agent=work.agent,
        )

    def _commit(self, works: list[Work]) -> None:
        """The decisions, in one transaction: from here on recovery finishes what it finds."""
        now = self._clock.now_ns()
        with self._ledger.transaction():
            ledger = self._ledger
            own = [p.own for work in works for p in work.postings if p.own is not None]
            if own:
                ledger.record(own, own=True)
            ledger.stage(row for work in works for row in work.delivery_rows(now))
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

    def _retry_held(self, dirs: Dirs) -> None:
        """Try what is held; where that is over, the sender is told first, then it is noted."""
        ended = self._held.retry_due(dirs, self._roster.agents, self._config.limits.batch_files)
        if not ended:
            return
        notices = [
            self._decider.tell(
                one.row.agent_name,
                one.row.message_id,
                one.row.discovered_at,
                one.recipient,
                f"not delivered to {one.recipient}: {one.reason}",
            )
            for one in ended
            if one.row.agent_name in self._roster.agents
        ]
        self._carry_out(dirs, notices)
        self._held.end(ended)

    def _deliver(self, dirs: Dirs, works: list[Work]) -> None:
        """Rename what is staged; note what stands in the inboxes, in one transaction."""
        written: list[tuple[str, str]] = []
        for work in works:
            for posting in work.postings:
                reached = self._deliver_posting(dirs, work, posting.message_id, posting.recipients)
                written.extend((posting.message_id, recipient) for recipient in reached)
                self._store.deliver(posting.engine_id, reached)
        now = self._clock.now_ns()
        obeyed = [(work.message_id, ORCHESTRATOR) for work in works if work.control]
        due = now + self._config.retry.pause_s(1) * NS_PER_S
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
            self._ledger.seen({work.agent for work in works}, now)

    def _deliver_posting(
        self, dirs: Dirs, work: Work, message_id: str, recipients: tuple[str, ...]
    ) -> list[str]:
        reached: list[str] = []
        for recipient in recipients:
            if (message_id, recipient) in work.held:
                continue
            reason = delivery.deliver(dirs, message_id, recipient)
            if reason:
                work.held[message_id, recipient] = reason
            else:
                reached.append(recipient)
        return reached

    def _note_effects(self, works: list[Work], now: int) -> None:
        """What answers and status messages say of others' rows."""
        for work in works:
            answer = work.acknowledged
            if answer is not None:
                self._ledger.acknowledge(answer.message_id, answer.recipient, answer.status, now)
            if work.status_note is not None:
                self._ledger.note_status(work.agent, work.status_note, now)

    # -- 11 archive --------------------------------------------------------------------

    def _finish(self, dirs: Dirs) -> None:
        """Complete and archive what the store's file holds by now."""
        durable = self._flusher.commit()
        self._report_flush()
        done: list[Work] = []
        while self._waiting and self._waiting[0].sequence <= durable:
            done.append(self._waiting.popleft())
            if len(done) >= self._config.limits.batch_files:
                break
        if not done:
            return
        now = self._clock.now_ns()
        own = [message_id for work in done for message_id in work.own_ids()]
        good = [work for work in done if not work.failure]
        with self._ledger.transaction():
            self._ledger.complete([work.message_id for work in good] + own, now)
        archived: list[tuple[str, str | None]] = []
        refused: list[tuple[str, str]] = []
        for work in done:
            moved, path = self._archive(dirs, work, delivery.REJECTED if work.failure else "")
            if moved and not work.failure:
                archived.append((work.message_id, path))
            elif path and work.has_row:
                refused.append((work.message_id, path))
        with self._ledger.transaction():
            self._ledger.archive(archived)
            self._ledger.archive_own(own)
            self._ledger.set_path(refused)
        for work in done:
            self._hand.discard(work.found.key)

    def _archive(self, dirs: Dirs, work: Work, kind: str = "") -> tuple[bool, str | None]:
        """(is it out of the outbox?, its path in the archive: None when it is gone)."""
        found = work.found
        if work.notice:
            return True, None  # there is no file
        try:
            if delivery.is_same_file(dirs, found):
                day = work.archive_day_ns
                return True, delivery.archive(dirs, found.agent, found.file_name, day, kind)
            self._intake.add(found.agent, found.file_name, renamed=True)  # another in its place
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {found.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=work.message_id,
            )
            return False, None
        return True, None

    def _report_flush(self) -> None:
        """Say once that the store cannot be written, and once that it can again."""
        error = self._flusher.error
        if error != self._last_flush_error:
            self._last_flush_error = error
            text = f"cannot be written, trying again: {error}" if error else "is written again"
            level = "error" if error else "info"
            self._log(f"The store {text}", action="flush_failed", level=level)

    # -- 12 what is next ---------------------------------------------------------------

    def _next_due(self) -> int:
        due = [self._next_scan_ns]
        if self._recheck_ns is not None:
            due.append(self._recheck_ns)
        for at in (self._intake.due_ns(), self._flusher.due_ns(), self._held.due_ns()):
            if at is not None:
                due.append(at)
        if self._roster.unwatched:
            due.append(self._next_poll_ns)
        if self._waiting and self._waiting[0].sequence <= self._flusher.durable:
            due.append(0)
        return min(due)


def _missing_attachments(dirs: Dirs, look: Accepted) -> str:
    """Why a message cannot be taken for its attachments, or nothing."""
    gone = attachments.missing(dirs, look.message.attachments)  # of none, mostly
    if not gone:
        return ""
    return f"ATTACHMENT {gone[0]} is not in the attachment store: put it there first"
