"""The flow of a batch: one thread, from the hint to the archive.

    look, record, claim, decide, stage, commit, deliver, note, archive

Accepted is what the journal has (``EventLog.commit``), and nothing is seen outside before that:
no file in an inbox, no word in the ledger. States and what a crash leaves: docs/states.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from relay import continuity, delivery, hardening
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
from relay.door import ASK_AGAIN_NS, Door
from relay.errors import CommError, StoreCapacity, StoreFull, UnsafePath
from relay.eventlog import EventLog
from relay.finish import Finisher
from relay.held import Ended, HeldMail
from relay.home import Dirs, Home
from relay.incidents import Incident, IncidentKind, Told
from relay.intake import Accepted, Intake, Look
from relay.ledger import Ledger
from relay.lives import Lives
from relay.logs import where
from relay.names import MSG_SUFFIX, message_id_of
from relay.overdue import OverdueMail
from relay.roster import Roster
from relay.saves import Saves
from relay.signing import Keys
from relay.supervision import Notice
from relay.tally import Tally
from relay.waiting import Limited
from relay.watcher import Wake
from relay.work import Over, Work, notice_of_message

Log = Callable[..., object]
PASSING = (StoreFull, StoreCapacity, delivery.DiskFull)  # its file waits in the outbox


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
        tally: Tally | None = None,
    ) -> None:
        self.tally = tally or Tally(clock)
        events_log.commit_s = self.tally.commit_s
        self.pauses: dict[str, str] = {}  # who holds the intake up -> why; empty: nobody
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
        self._intake = Intake(config.detection, config.limits, clock, log, config.security)
        keys = Keys(ledger, store, config.security.require_signatures, clock, log)
        self._door = Door(keys, roster, clock, log)
        self._guard = hardening.Guard(home)
        self._told = Told()
        self._untold: list[Incident] = []  # limits whose agents the disk kept us from telling
        self._admission = Admission(ledger, clock, log)
        self._saves = Saves(home, config.continuity)
        lives = self._lives = Lives(ledger, roster, config.agents, clock, log)
        self._decider = Decider(
            store, roster.lead, lives.away, lives.silent, self._saves, config.spawn
        )
        self._finisher = Finisher(ledger, clock, log)
        self._carrier = Carrier(
            ledger,
            store,
            events_log,
            self._finisher,
            config.retry,
            clock,
            log,
            self.tally,
            debug=config.log_level == "debug",
        )
        self._held = HeldMail(ledger, store, config, clock, lives.away)
        self._overdue = OverdueMail(
            ledger, store, self._decider, self._carrier, config.retry, clock, log, lives.away
        )
        self._next_scan_ns = 0
        self._next_poll_ns = 0
        self._recheck_ns: int | None = None
        self._last_now_ns = 0
        self._taken: list[tuple[str, str, int]] = []  # read, not yet in the ledger
        self._last_flush_error = ""
        self._orders: list[Order | Prune | Pack] = []
        self._asked = False  # for processes to be started or ended

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

    def announce(self, agents: Iterable[str], text: str, key: str, at_ns: int) -> bool:
        """Notify those of ``agents`` that are there, once for each key and time.

        False when disk or store takes nothing now, or nobody is there: ask again.
        """
        names = sorted(self._roster.agents.intersection(agents))
        try:
            works = [self._decider.notify(name, at_ns, key, text) for name in names]
        except (StoreFull, StoreCapacity):
            return False
        with self._home.dirs() as dirs:
            return bool(works) and not self._carrier.carry_out(dirs, works)

    def limited(self) -> Limited:
        """Who is over a limit now, and how often that was."""
        return self._intake.limited

    def feed(self, files: Iterable[tuple[str, str]]) -> None:
        """Files of open rows, oldest discovery first: they go before anything that is new."""
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True, paid=True)

    def tick(self, wake: Wake) -> int:
        """Do what is due; returns when the next thing is (monotonic ns, 0 for at once)."""
        self._watch_clock()
        begin = self.tally.begin
        self._guard.check()
        self._lives.refresh()
        with self._home.dirs() as dirs:
            begin("hear")
            self._hear(wake)
            begin("look")
            limit = 0 if self.paused else self._config.limits.batch_files
            looks = self._let_in(dirs, self._intake.take(dirs, limit, self._finisher.hand))
            if looks:
                self._process(dirs, looks)
            begin("due")
            self._tell_limits(dirs)
            self._retry_held(dirs)
            self._overdue.retry_due(dirs, self._roster.agents)
            begin("archive")
            self._finish(dirs)
            begin("upkeep")
            self._note_taken()
            self._roll()
            self._checkpoint()
            self._events.linger()
        return self._next_due()

    def take_orders(self) -> list[Order | Prune | Pack]:
        """What was asked of journal and archive since the last time; not repeated after a crash."""
        orders, self._orders = self._orders, []
        return orders

    def take_asked(self) -> bool:
        """True when a process was asked for, or its end, since the last time; the ledger has it."""
        asked, self._asked = self._asked, False
        return asked

    def tell(self, notices: Sequence[Notice]) -> set[int]:
        """Tell agents of processes, and note in the ledger what is so; the places of those done.

        The others are to be told later: neither disk nor store takes them now.
        """
        works: list[Work] = []
        for one in notices:
            agent = one.agent if one.agent in self._roster.agents else ""
            try:
                work = self._decider.tell(
                    agent, one.request_id, one.at, one.key, one.text, one.kind
                )
            except (StoreFull, StoreCapacity) as exc:
                self._log(f"Cannot tell {agent} now: {exc}", action="postpone", level="warning")
                break
            work.process, work.closes = one.process, one.closes
            work.life = one.life
            works.append(work)
        with self._home.dirs() as dirs:
            put_off = {id(one.work) for one in self._carrier.carry_out(dirs, works)}
        return {place for place, work in enumerate(works) if id(work) not in put_off}

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
            self._intake.limit.sweep()
            self._note(hardening.stray_agents(self._home))
            self._next_scan_ns = now + self._config.detection.scan_interval_s * NS_PER_S
            self._scan(self._roster.agents)
            self._review(None)
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
                    self._ledger.registry.deactivate(name, now)
            self._lives.refresh()
        return changes.appeared

    def greet(self, name: str, key: str) -> bool:
        """Put the first message of a new life into an agent's inbox (``continuity.welcome``).

        To be called before its process is started; ``key`` tells this start from every other
        one. False: not now, the disk or the store takes nothing; nothing was done.
        """
        try:
            work = continuity.welcome(self._saves, self._store, name, key, self._clock.now_ns())
            with self._home.dirs() as dirs:
                return not (work and self._carrier.carry_out(dirs, [work]))
        except (CommError, OSError, UnsafePath) as exc:
            self._log(f"Cannot greet {name} now: {exc}", action="postpone", level="warning")
            return False

    def _review(self, names: Iterable[str] | None) -> None:
        """Judge who is away; who was and has a process again is greeted, and then active."""
        with self._home.dirs() as dirs:
            comebacks = self._lives.review(dirs, names)
        self._lives.come_back([one for one in comebacks if self.greet(one.name, one.key)])

    def _scan(self, agents: Iterable[str]) -> None:
        """List outboxes for what inotify missed, and inboxes for what was read unseen."""
        left: list[tuple[str, str]] = []
        for agent in sorted(agents):
            try:
                with self._home.dirs() as dirs:  # closed again: a thousand agents are many
                    self._note(hardening.agent_incidents(dirs, agent))
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
        self.tally.read += len(taken)
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.read(taken, now)
            self._ledger.registry.seen({agent for _, agent, _ in taken}, now)
            self._ledger.note_position(self._events.journal.durable, now)
        self._lives.heard({agent for _, agent, _ in taken}, by_reading=True)

    def _note(self, found: list[Incident]) -> None:
        """What a look at the home found, said and kept once while it lasts."""
        repaired = [one for one in found if one.kind is IncidentKind.MODE_REPAIRED]
        fresh = repaired + self._told.fresh([one for one in found if one not in repaired])
        if not fresh:
            return
        with self._ledger.transaction():
            self._ledger.registry.note_incidents(fresh, self._clock.now_ns())
        for one in fresh:
            self._log(one.detail, action=str(one.kind), level="warning", agent=one.agent)

    # -- 2-4 look, record, claim -------------------------------------------------------

    def _let_in(self, dirs: Dirs, looks: list[Look]) -> list[Look]:
        """Those that can be decided now; an attachment that is still being read is waited for."""
        if not looks:
            return looks
        let_in = self._door.let_in(dirs, looks)
        due = self._clock.monotonic_ns() + ASK_AGAIN_NS
        for look in let_in.waiting:
            self._intake.retry(look.found.agent, look.found.file_name, due)
        return let_in.looks

    def _tell_limits(self, dirs: Dirs) -> None:
        """Agents that ran into a limit hear it once, and it is kept."""
        now = self._clock.now_ns()
        works: list[Work] = []
        for one in self._untold + self._intake.take_incidents():
            agent = one.agent or ""
            try:
                work = self._decider.notify(agent, now, f"{one.kind} {now}", one.detail)
            except (StoreFull, StoreCapacity):  # it is kept all the same
                work = notice_of_message("", agent, now, str(one.kind))
            work.incidents.append(one)
            works.append(work)
            self._log(one.detail, action=str(one.kind), level="warning", agent=agent)
        put_off = self._carrier.carry_out(dirs, works) if works else []
        self._untold = [incident for one in put_off for incident in one.work.incidents]

    def _process(self, dirs: Dirs, looks: list[Look]) -> None:
        """Take a batch of files through every step up to finish."""
        self.tally.begin("record")
        admitted = self._admission.admit(dirs, looks)
        self._meet(admitted)
        self.tally.begin("decide")
        room = self._room_for(looks)
        batch: list[Work] = []
        deliveries = 0
        for work, look in admitted:
            if room:
                self._postpone(work, room)
                continue
            if isinstance(look, Accepted) and not (work.again and self._is_known(work)):
                if not work.failure:
                    self._door.refuse(work, look)
            if isinstance(look, Accepted) and not work.failure:
                work.attachments = look.message.attachments
            try:
                self._decide(work, look)
            except PASSING as exc:
                self._postpone(work, str(exc))
                continue
            batch.append(work)
            deliveries += work.deliveries()
            if deliveries >= self._config.limits.batch_deliveries:
                self._carry_out(dirs, batch)
                self.tally.begin("decide")
                batch, deliveries = [], 0
        if batch:
            self._carry_out(dirs, batch)

    def _meet(self, admitted: list[tuple[Work, Look]]) -> None:
        """Who writes is there; so may be, by now, who is written to and was away."""
        self._lives.heard({work.agent for work, _ in admitted if not work.again})
        wanted = {look.message.to for _, look in admitted if isinstance(look, Accepted)}
        if wanted & self._lives.away.keys():
            self._review(wanted & self._lives.away.keys())

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
        except PASSING:
            raise
        except Exception as exc:
            fault = type(exc).__name__  # its text may quote what it choked on
            self._log(
                f"Refused {work.found.path}: the relay has a fault: {fault}",
                action="fault",
                level="error",
                where=where(exc),
            )
            work.postings.clear()
            work.requests.clear()
            self._decider.refuse(work, f"the relay has a fault and cannot handle it: {fault}")

    def _carry_out(self, dirs: Dirs, batch: list[Work]) -> None:
        for work, reason in self._carrier.carry_out(dirs, batch):
            self._postpone(work, reason)
        self._lives.refresh()
        # One that was put off is not decided again: its answer is known by then.
        self._orders += [order for work in batch for order in work.orders]
        self._door.carried_out(dirs, batch)
        self._asked = self._asked or any(work.requests for work in batch)

    def _postpone(self, work: Work, reason: str) -> None:
        """A passing error: the file stays in the outbox and is tried again."""
        self.tally.postponed += 1
        attempts = 1
        if work.has_row:
            with self._ledger.transaction():
                attempts = self._ledger.postpone(work.message_id, reason)
        pause_s = self._config.retry.pause_s(attempts)
        due = self._clock.monotonic_ns() + pause_s * NS_PER_S
        waited_ns = max(0, self._clock.now_ns() - work.discovered_at)
        self._intake.retry(work.agent, work.found.file_name, due, waited_ns)
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
        if self.paused or not self._intake.is_busy:  # else the next batch takes it along
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
        parts = (self._intake, self._events, self._flusher, self._held, self._overdue, self._roller)
        for part in parts:
            at = None if self.paused and part is self._intake else part.due_ns()
            if at is not None:
                due.append(at)
        if self._roster.unwatched:
            due.append(self._next_poll_ns)
        if not self._finisher.is_idle:
            due.append(0)
        return min(due)
