"""The flow of a batch: one thread, from the hint to the archive.

    look, record, claim, decide, stage, commit, deliver, note, archive

Accepted is what the journal has (``EventLog.commit``), and nothing is seen outside before that:
no file in an inbox, no word in the ledger. States and what a crash leaves: docs/states.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relay import attachments, delivery
from relay.admission import Admission
from relay.aof2.plan import Order
from relay.asked import Pack, Prune
from relay.carry import Carrier
from relay.clock import NS_PER_MS, NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.flush import Flusher
from relay.comm.rolling import Roller
from relay.config import Config
from relay.decide import Decider
from relay.errors import StoreCapacity, StoreFull, UnsafePath
from relay.eventlog import EventLog
from relay.finish import Finisher
from relay.held import Ended, HeldMail
from relay.home import Dirs, Home
from relay.intake import Accepted, Intake, Look
from relay.ledger import Ledger
from relay.names import MSG_SUFFIX, message_id_of
from relay.overdue import OverdueMail
from relay.roster import Roster
from relay.watcher import Wake
from relay.work import Over, Work

Log = Callable[..., object]


class Dispatcher:
    """Does everything that is due when ``tick`` is called. Used from one thread."""

    def __init__(
        self,
        config: Config,
        home: Home,
        ledger: Ledger,
        store: CommStore,
        events_log: EventLog,
        flusher: Flusher,
        roller: Roller,
        roster: Roster,
        clock: Clock,
        log: Log,
    ) -> None:
        self._config = config
        self._home = home
        self._ledger = ledger
        self._store = store
        self._events = events_log
        self._flusher = flusher
        self._roller = roller
        self._last_roll_error = ""
        self._roster = roster
        self._clock = clock
        self._log = log
        self._intake = Intake(config.detection, config.limits, clock, log)
        self._admission = Admission(ledger, clock, log)
        self._decider = Decider(store, roster.lead)
        self._finisher = Finisher(ledger, clock, log)
        self._carrier = Carrier(ledger, store, events_log, self._finisher, config.retry, clock, log)
        self._held = HeldMail(ledger, store, config, clock)
        self._overdue = OverdueMail(
            ledger, store, self._decider, self._carrier, config.retry, clock, log
        )
        self._next_scan_ns = 0
        self._next_poll_ns = 0
        self._recheck_ns: int | None = None
        self._last_now_ns = 0
        self._taken: list[tuple[str, str, int]] = []  # read, not yet in the ledger
        self._last_flush_error = ""
        self._orders: list[Order | Prune | Pack] = []
        self.paused = ""  # why nothing is taken in: files wait in their outboxes

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
            limit = 0 if self.paused else self._config.limits.batch_files
            looks = self._intake.take(dirs, limit, self._finisher.hand)
            if looks:
                self._process(dirs, looks)
            self._retry_held(dirs)
            self._overdue.retry_due(dirs, self._roster.agents)
            self._finish(dirs)
            self._note_taken()
            self._roll()
            self._checkpoint()
            self._events.linger()
        return self._next_due()

    def take_orders(self) -> list[Order | Prune | Pack]:
        """What was asked of journal and archive since the last time; not repeated after a crash."""
        orders, self._orders = self._orders, []
        return orders

    def drain(self) -> None:
        """The end: everything in hand is finished, the store is written."""
        with self._home.dirs() as dirs:
            while not self._finisher.is_idle:  # what waits in the outboxes is the next start's
                self._finisher.finish(dirs, self._config.limits.batch_files)
                self._finisher.note()
        self._note_taken()
        self._events.commit()
        self._flusher.flush()
        self._events.commit()

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
                    self._ledger.registry.register(name, now)
                for name in changes.gone:
                    self._ledger.registry.deactivate(name)
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
        for agent, name in left:
            message_id = message_id_of(name)
            if message_id is None:
                continue
            stored = self._store.by_relay_id(message_id)
            known = self._store.state.deliveries.get(stored.id, {}) if stored else {}
            attempt = known[agent].attempt if agent in known else 1 << 31
            if stored is not None:
                self._store.receive(stored.id, agent)
            self._taken.append((message_id, agent, attempt))

    def _note_taken(self) -> None:
        """What was read goes into the ledger, once the journal has it."""
        if not self._taken:
            return
        self._events.commit()
        taken, self._taken = self._taken, []
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.read(taken, now)
            self._ledger.registry.seen({agent for _, agent, _ in taken}, now)
            self._ledger.note_position(self._events.journal.durable, now)

    # -- 2-4 look, record, claim -------------------------------------------------------

    def _process(self, dirs: Dirs, looks: list[Look]) -> None:
        """Take a batch of files through every step up to finish."""
        admitted = self._admission.admit(dirs, looks)
        room = self._room_for(looks)
        batch: list[Work] = []
        deliveries = 0
        for work, look in admitted:
            if room:
                self._postpone(work, room)
                continue
            if isinstance(look, Accepted) and not (work.again and self._is_known(work)):
                work.failure = work.failure or _missing_attachments(dirs, look)
            try:
                self._decide(work, look)
            except (StoreFull, StoreCapacity) as exc:  # it passes
                self._postpone(work, str(exc))
                continue
            batch.append(work)
            deliveries += work.deliveries()
            if deliveries >= self._config.limits.batch_deliveries:
                self._carry_out(dirs, batch)
                batch, deliveries = [], 0
        if batch:
            self._carry_out(dirs, batch)

    def _room_for(self, looks: list[Look]) -> str:
        """Why the journal has no room for these, or nothing."""
        try:
            self._events.has_room(sum(2 * look.found.size for look in looks))
        except OSError as exc:
            return f"journal: {exc.strerror or exc}"
        return ""

    def _is_known(self, work: Work) -> bool:
        """True when the store has accepted it before: who has it keeps it."""
        return self._store.ever_by_relay_id(work.message_id) is not None

    def _decide(self, work: Work, look: Look) -> None:
        """What is to happen with one file; a fault of ours refuses it, and stops no other."""
        try:
            if isinstance(look, Accepted) and not work.failure:
                now = self._clock.now_ns()
                self._decider.decide(work, look, self._roster.agents, now)
            else:
                self._decider.refuse(work, work.failure)
        except (StoreFull, StoreCapacity):
            raise
        except Exception as exc:
            self._log(
                f"Refused {work.found.path}: the relay has a fault: {exc!r}",
                action="fault",
                level="error",
                exc_info=True,
            )
            work.postings.clear()
            self._decider.refuse(work, f"the relay has a fault and cannot handle it: {exc!r}")

    def _carry_out(self, dirs: Dirs, batch: list[Work]) -> None:
        for work, reason in self._carrier.carry_out(dirs, batch):
            self._postpone(work, reason)
        # One that was put off is not decided again: its answer is known by then.
        self._orders += [order for work in batch for order in work.orders]

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

    # -- 11 archive, 12 due work --------------------------------------------------------

    def _finish(self, dirs: Dirs) -> None:
        for found in self._finisher.finish(dirs, self._config.limits.batch_files):
            self._intake.add(found.agent, found.file_name, renamed=True)
        if not self._intake.is_busy:  # else the next batch takes it along
            self._finisher.note()

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

    def _retry_held(self, dirs: Dirs) -> None:
        """Try what is held; where that is over, the sender is told first, then it is noted."""
        agents = self._roster.agents
        works, ended = self._held.due(dirs, agents, self._config.limits.batch_files)
        if not works and not ended:
            return
        endings: list[Work] = []
        try:
            endings = [self._overdue.ending(self._over(one), one.row, agents) for one in ended]
        except (StoreFull, StoreCapacity) as exc:
            self._log(f"Cannot tell a sender now: {exc}", action="postpone", level="warning")
        put_off = {id(one.work) for one in self._carrier.carry_out(dirs, works + endings)}
        told = [one for one, work in zip(ended, endings, strict=False) if id(work) not in put_off]
        self._held.put_off([one for one in ended if one not in told])
        self._held.wait([work for work in works if id(work) in put_off])

    def _over(self, one: Ended) -> Over:
        """A held delivery that is over, for its sender to hear of."""
        stored = self._store.by_relay_id(one.row.message_id)
        number = stored.id if stored else 0
        message_id, attempt = one.row.message_id, one.delivery.attempt
        return Over(number, message_id, one.recipient, one.state, attempt, one.reason)

    def _next_due(self) -> int:
        due = [self._next_scan_ns]
        if self._recheck_ns is not None:
            due.append(self._recheck_ns)
        parts = (self._events, self._flusher, self._held, self._overdue, self._roller)
        for part in parts if self.paused else (self._intake, *parts):
            at = part.due_ns()
            if at is not None:
                due.append(at)
        if self._roster.unwatched:
            due.append(self._next_poll_ns)
        if not self._finisher.is_idle:
            due.append(0)
        return min(due)


def _missing_attachments(dirs: Dirs, look: Accepted) -> str:
    """Why a message cannot be taken for its attachments, or nothing."""
    gone = attachments.missing(dirs, look.message.attachments)  # of none, mostly
    if not gone:
        return ""
    return f"ATTACHMENT {gone[0]} is not in the attachment store: put it there first"
