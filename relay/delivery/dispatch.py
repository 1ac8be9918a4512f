"""The flow of a batch: one thread, from the hint to the archive.

    look, record, claim, decide, stage, commit, deliver, note, archive

Accepted is what the journal has (``EventLog.commit``), and nothing is seen outside before that:
no file in an inbox, no word in the ledger. States and what a crash leaves: docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from relay.agents.roster import Roster
from relay.agents.saved_state import Saves
from relay.agents.status import Lives
from relay.base import directory_guard
from relay.base.clock import NS_PER_S
from relay.base.errors import StoreCapacity, StoreFull
from relay.base.home import Dirs
from relay.base.jobs import Pack, Prune
from relay.base.logs import where
from relay.base.outbox_file import OUTBOX
from relay.base.watcher import WatchEvents
from relay.delivery import file_ops
from relay.delivery.admission import Admission
from relay.delivery.archive import Finisher
from relay.delivery.carry import Carrier
from relay.delivery.context import Basis
from relay.delivery.decide import Decider
from relay.delivery.door import ASK_AGAIN_NS, Door
from relay.delivery.event_source import Hearing
from relay.delivery.held import Ended, HeldMail
from relay.delivery.intake import Accepted, Intake, Look
from relay.delivery.loops import Loops
from relay.delivery.lost_time import LostTime
from relay.delivery.notifications import Teller
from relay.delivery.overdue import OverdueMail
from relay.delivery.reminders import Reminders
from relay.delivery.signing import Keys
from relay.delivery.waiting import Limited
from relay.delivery.work import Over, Work
from relay.engine.flush import Flusher
from relay.engine.rolling import Roller
from relay.journal.plan import JournalCommand

PART_BYTES = 32 << 20  # of the journal: room for so much is made at once
LOOK_BYTES = 2 << 10  # a refusal and its nack, or the events about a message
PASSING = (StoreFull, StoreCapacity, file_ops.DiskFull)  # its file waits in the outbox


class Dispatcher:
    """Does everything that is due when ``tick`` is called. Used from one thread."""

    def __init__(self, basis: Basis, flusher: Flusher, roller: Roller, roster: Roster) -> None:
        self.tally = basis.tally
        self.pauses: dict[str, str] = {}  # who holds the intake up -> why; empty: nobody
        self._config = basis.config
        self._home = basis.home
        self._ledger = basis.ledger
        self._store = basis.store
        self._events = basis.events
        self._events.commit_s = self.tally.commit_s
        self._flusher = flusher
        self._roller = roller
        self._roster = roster
        self._clock = basis.clock
        self._log = basis.log
        self._put_together(basis)
        self._last_roll_error = ""
        self._last_flush_error = ""
        self._orders: list[JournalCommand | Prune | Pack] = []
        self._asked = False  # for processes to be started or ended

    def _put_together(self, basis: Basis) -> None:
        """The parts that do the steps, each with what it needs of the others."""
        config, home, ledger, store, _, clock, log, _ = basis
        roster = self._roster
        self._intake = Intake(config.detection, config.limits, clock, log, config.security)
        keys = Keys(ledger, store, config.security.require_signatures, clock, log)
        self._door = Door(keys, roster, config.limits, clock, log)
        self._guard = directory_guard.DirectoryGuard(home)
        self._admission = Admission(ledger, clock, log)
        saves = Saves(home, config.continuity)
        lives = self._lives = Lives(ledger, roster, config.agents, clock, log)
        self._decider = Decider(
            store,
            roster.lead,
            lives.away,
            lives.silent,
            saves,
            config.spawn,
            roster.trusted_lead,
        )
        self._finisher = Finisher(ledger, clock, log)
        self._carrier = Carrier(basis, self._finisher)
        self._held = HeldMail(ledger, store, config, clock, lives.away)
        self._overdue = OverdueMail(basis, self._decider, self._carrier, lives.away)
        self._loops = Loops(store, config.limits.reply_depth, clock)
        self._lost_time = LostTime(basis)
        self._reminders = Reminders(basis, self._decider, self._carrier, lives.away, lives.endings)
        self.teller = Teller(basis, roster, self._decider, self._carrier, saves)
        self._hearing = Hearing(basis, self._intake, roster, lives, self.teller)

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
    def limited(self) -> Limited:
        """Who is over a limit now, and how often that was."""
        return self._intake.limited

    def feed(self, files: Iterable[tuple[str, str]]) -> None:
        """Files of open rows, oldest discovery first: they go before anything that is new."""
        for agent, file_name in files:
            self._intake.add(agent, file_name, renamed=True, paid=True)

    def tick(self, wake: WatchEvents) -> int:
        """Do what is due; returns when the next thing is (monotonic ns, 0 for at once)."""
        self._lost_time.look()
        begin = self.tally.begin
        self._guard.check()
        self._lives.refresh()
        with self._home.dirs() as dirs:
            begin("hear")
            self._hearing.hear(wake)
            begin("look")
            limit = 0 if self.paused else self._config.limits.batch_files
            looks = self._let_in(dirs, self._intake.take(dirs, limit, self._finisher.hand))
            if looks:
                self._process(dirs, looks)
            begin("due")
            self._loops.put_back(self.teller.loops(self._loops.take_begun()))
            self.teller.limits(dirs, self._intake.take_incidents())
            self._retry_held(dirs)
            self._overdue.retry_due(dirs, self._roster.agents)
            self._reminders.remind_due(dirs, self._roster.agents)
            begin("archive")
            self._finish(dirs)
            begin("upkeep")
            self._hearing.note_taken()
            self._carrier.note_counts()
            self._roll()
            self._checkpoint()
            self._events.linger()
        return self._next_due()

    def take_orders(self) -> list[JournalCommand | Prune | Pack]:
        """What was asked of journal and archive since the last time; not repeated after a crash."""
        orders, self._orders = self._orders, []
        return orders

    def take_asked(self) -> bool:
        """True when a process was asked for, or its end, since the last time; the ledger has it."""
        asked, self._asked = self._asked, False
        return asked

    def drain(self) -> None:
        """The end: everything in hand is finished, the store is written."""
        with self._home.dirs() as dirs:
            while not self._finisher.is_idle:  # what waits in the outboxes is the next start's
                self._finisher.finish(dirs, self._config.limits.batch_files)
                self._finisher.note()
        self._hearing.note_taken()
        self._carrier.note_counts(all_of_them=True)
        self._events.commit()
        self._flusher.flush()
        self._events.commit()
        self._lost_time.note()

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

    def _process(self, dirs: Dirs, looks: list[Look]) -> None:
        """Take a batch of files through every step up to finish, so many bytes at once."""
        self.tally.begin("record")
        admitted = self._admission.admit(dirs, looks)
        self._meet(admitted)
        part: list[tuple[Work, Look]] = []
        part_bytes = 0
        for one in admitted:
            needed = _journal_bytes(one[1])
            if part and part_bytes + needed > PART_BYTES:
                self._process_part(dirs, part, part_bytes)
                part, part_bytes = [], 0
            part.append(one)
            part_bytes += needed
        self._process_part(dirs, part, part_bytes)

    def _process_part(self, dirs: Dirs, part: list[tuple[Work, Look]], part_bytes: int) -> None:
        """Decide on what was admitted and carry it out, once the journal has room for it."""
        self.tally.begin("decide")
        room = self._room_for(part_bytes)
        batch: list[Work] = []
        deliveries = 0
        for work, look in part:
            if room:
                self._postpone(work, room)
                continue
            if isinstance(look, Accepted) and not (work.again and self._is_known(work)):
                if not work.failure:
                    self._door.refuse(work, look)
            if isinstance(look, Accepted) and not work.failure:
                work.attachments = look.message.attachments
                why = self._loops.holds(work, look.message)
                if why and not self._is_known(work):
                    self._postpone(work, why)
                    continue
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
        written: dict[str, int] = {}
        for work, look in admitted:
            if not work.again and look.found.place == OUTBOX:
                written[work.agent] = max(written.get(work.agent, 0), look.found.ctime_ns)
        self._lives.heard(written)
        wanted = {look.message.to for _, look in admitted if isinstance(look, Accepted)}
        if wanted & self._lives.away.keys():
            self._hearing.review(wanted & self._lives.away.keys())

    def _room_for(self, n_bytes: int) -> str:
        """Why the journal has no room for so many bytes, or nothing."""
        try:
            self._events.has_room(n_bytes)
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
        if work.found.place == OUTBOX:  # else the next scan finds it
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
        due = [self._hearing.due_ns()]
        parts = (self._intake, self._events, self._flusher, self._held, self._overdue, self._roller)
        for part in (*parts, self._reminders):
            at = None if part is self._intake and self.paused else part.due_ns()
            if at is not None:
                due.append(at)
        if not self._finisher.is_idle:
            due.append(0)
        return min(due)


def _journal_bytes(look: Look) -> int:
    """Bytes that a file may need in the journal; of a refused one no content is kept."""
    return LOOK_BYTES + (2 * look.found.size if isinstance(look, Accepted) else 0)
