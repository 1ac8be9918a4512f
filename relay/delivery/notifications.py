"""Notifications: messages that the relay sends without being asked, and reminders of owed answers.

About disks and limits, processes, and to an agent that starts again. Reminders: the recipient of an
overdue command or query is reminded, then given up; its sender is told of each. If a process ends
with its work begun, the sender is told once. Every notice has an id derived from its occasion, so
that a crash sends none twice. Source: DESIGN, "Attempts"; docs/states.md, "An answer that is owed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from relay.acomm.model import DeliveryState, Message, MessageType, Obligation
from relay.agents.processes import ProcessNotice
from relay.agents.roster import Roster
from relay.base.clock import NS_PER_MS, NS_PER_S, elapsed
from relay.base.errors import CommError, StoreCapacity, StoreFull, UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident
from relay.base.message import Kind
from relay.base.names import OPERATOR
from relay.delivery import saved_state
from relay.delivery.execute import BatchWriter
from relay.delivery.limits import ReplyLoop
from relay.delivery.plan import Planner
from relay.delivery.retry import GONE
from relay.delivery.saved_state import StateStore
from relay.delivery.work import Context, Reminder, WorkItem, system_work_about
from relay.engine.deliveries import MAX_REMINDERS, OverdueAnswer


class Notifier:
    """Sends notifications. Owned by the loop."""

    def __init__(
        self,
        context: Context,
        roster: Roster,
        planner: Planner,
        writer: BatchWriter,
        states: StateStore,
    ) -> None:
        self._home = context.home
        self._store = context.store
        self._roster = roster
        self._planner = planner
        self._writer = writer
        self._states = states
        self._clock = context.clock
        self._log = context.log
        self._pending: list[Incident] = []  # limits whose agents the disk kept us from telling

    def announce(
        self,
        agents: Iterable[str],
        text: str,
        key: str,
        at_ns: int,
        incident: Incident | None = None,
    ) -> bool:
        """Notify those of ``agents`` that exist, once for each key and time.

        An incident is recorded with it. False if the disk or the store refuses it now, or none of
        them exists: call again later.
        """
        names = sorted(self._roster.agents.intersection(agents))
        try:
            works = [self._planner.notify(name, at_ns, key, text) for name in names]
        except (StoreFull, StoreCapacity):
            return False
        for work in works[:1] if incident is not None else ():
            assert incident is not None
            work.incidents, work.is_repeat = [incident], True
        with self._home.dirs() as dirs:
            return bool(works) and not self._writer.execute(dirs, works)

    def send(self, notices: Sequence[ProcessNotice]) -> set[int]:
        """Send notices about processes and update the ledger; returns the indexes of those sent.

        The others are to be sent later: the disk or the store refuses them now.
        """
        works: list[WorkItem] = []
        for one in notices:
            agent = one.agent if one.agent in self._roster.agents else ""
            try:
                work = self._planner.reply(
                    agent, one.request_id, one.at, one.key, one.text, one.kind
                )
            except (StoreFull, StoreCapacity) as exc:
                self._log(f"Cannot tell {agent} now: {exc}", action="postpone", level="warning")
                break
            work.process, work.closed_intents = one.process, one.closed_intents
            work.status_change = one.status_change
            works.append(work)
        with self._home.dirs() as dirs:
            put_off = {id(one.work) for one in self._writer.execute(dirs, works)}
        return {place for place, work in enumerate(works) if id(work) not in put_off}

    def send_resume_message(self, name: str, key: str) -> bool:
        """Put the first message of a new run into an agent's inbox.

        To be called before its process is started; ``key`` is unique to this start. False: the disk
        or the store refuses it now; nothing was done.
        """
        try:
            work = saved_state.resume_message(
                self._states, self._store, name, key, self._clock.now_ns()
            )
            with self._home.dirs() as dirs:
                return not (work and self._writer.execute(dirs, [work]))
        except (CommError, OSError, UnsafePath) as exc:
            self._log(f"Cannot greet {name} now: {exc}", action="postpone", level="warning")
            return False

    def report_loops(self, begun: list[ReplyLoop]) -> list[ReplyLoop]:
        """Report loops to lead and operator, once each; returns those to report later."""
        untold: list[ReplyLoop] = []
        for one in begun:
            hears = {OPERATOR, self._roster.lead() or OPERATOR}
            key, detail = f"loop {one.message_id}", one.incident.detail
            if self.announce(hears, detail, key, one.at_ns, one.incident):
                kind, agent = str(one.incident.kind), one.incident.agent
                self._log(detail, action=kind, level="warning", agent=agent)
            else:
                untold.append(one)
        return untold

    def report_limits(self, dirs: Dirs, begun: list[Incident]) -> None:
        """Notify agents that exceeded a limit, once an episode, and record the incidents."""
        now = self._clock.now_ns()
        works: list[WorkItem] = []
        for one in self._pending + begun:
            agent = one.agent or ""
            try:
                work = self._planner.notify(agent, now, f"{one.kind} {now}", one.detail)
            except (StoreFull, StoreCapacity):  # it is kept all the same
                work = system_work_about("", agent, now, str(one.kind))
            work.incidents.append(one)
            works.append(work)
            self._log(one.detail, action=str(one.kind), level="warning", agent=agent)
        put_off = self._writer.execute(dirs, works) if works else []
        self._pending = [incident for one in put_off for incident in one.work.incidents]


BATCH = 256  # answers in one turn
MOST_QUOTED = 4096  # bytes of the message that a reminder repeats
LOOK_NS = 5 * NS_PER_S  # between two looks for processes that ended
BEGUN = {"received": "acknowledged it as received", "in_progress": "began it"}


class Reminders:
    """Reminds of overdue answers. Owned by the loop.

    ``endings`` makes the function of ``AgentStatusTracker.process_endings``.
    """

    def __init__(
        self,
        context: Context,
        planner: Planner,
        writer: BatchWriter,
        unavailable: Mapping[str, str],
        endings: Callable[[], Callable[[str, int], str]],
    ) -> None:
        self._store = context.store
        self._planner = planner
        self._writer = writer
        self._unavailable = unavailable
        self._endings = endings
        self._retry = context.config.retry
        self._clock = context.clock
        self._log = context.log
        self._not_before_ns = 0  # monotonic: the disk, or the store, took nothing
        self._next_look_ns = 0  # monotonic
        self._told: set[tuple[int, str, int]] = set()  # ended processes reported to the sender

    def due_ns(self) -> int | None:
        """Time of the next reminder or check (monotonic)."""
        due_ms = self._store.next_reminder_ms()
        if due_ms is None:
            return None
        now_ns = self._clock.monotonic_ns()
        wait_ns = max(0, due_ms * NS_PER_MS - self._clock.now_ns())
        return min(
            max(now_ns + wait_ns, self._not_before_ns),
            max(self._next_look_ns, self._not_before_ns),
        )

    def remind_due(self, dirs: Dirs, agents: Set[str]) -> None:
        """Send a batch of due reminders."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._not_before_ns:
            return
        works: list[WorkItem] = []
        try:
            self._add_overdue(works, agents)
            if now_ns >= self._next_look_ns:
                self._add_ended(works, agents)
                self._next_look_ns = now_ns + LOOK_NS
        except (StoreFull, StoreCapacity) as exc:
            self._pause(str(exc))
        put_off = self._writer.execute(dirs, works) if works else []
        if put_off:
            self._pause(put_off[0].reason)
        waits = {id(one.work) for one in put_off}
        for work in works:
            if id(work) not in waits:
                self._log_done(work)

    def _add_overdue(self, works: list[WorkItem], agents: Set[str]) -> None:
        groups: dict[int, list[OverdueAnswer]] = {}
        for one in self._store.overdue_answers(BATCH):
            groups.setdefault(one.message.id, []).append(one)
        for group in groups.values():
            works.append(self._overdue_work(group, agents))

    def _overdue_work(self, group: list[OverdueAnswer], agents: Set[str]) -> WorkItem:
        """The notices about one message: to its recipients, and to its sender."""
        message = group[0].message
        work = _work_about(message, "overdue")
        told: list[str] = []
        for one in group:
            name, owed = one.recipient, one.obligation
            gone = self._unavailable.get(name, "" if name in agents else f"{name} is {GONE}")
            count = owed.reminders + 1
            if gone or one.is_exhausted:
                due_ms, count = 0, owed.reminders
                told.append(self._given_up(message, one, gone))
            else:
                due_ms = one.next_due_ms
                key = f"reminder {count} {owed.since}"
                text = self._reminder(message, one)
                self._planner.add_message(work, name, Kind.REMINDER, text, key, count)
                told.append(self._overdue(message, one))
            mine = Reminder(message.id, work.message_id, name, count, due_ms)
            work.reminders.append(mine)
        if message.sender in agents:
            rounds = [
                (one.recipient, one.obligation.since, one.obligation.reminders) for one in group
            ]
            count = max(one.obligation.reminders for one in group) + 1
            text, key = "\n".join(told), f"overdue {rounds}"
            self._planner.add_message(work, message.sender, Kind.NOTIFICATION, text, key, count)
        return work

    def _reminder(self, message: Message, one: OverdueAnswer) -> str:
        """The body of a reminder: the owed answer, to whom, and the message quoted."""
        owed, asked = one.obligation, _word(message)
        count = owed.reminders + 1
        what = f"you have not answered the {asked}"
        if owed.said:
            what = (
                f"you said {owed.said} {self._ago(owed.since)}, and have not answered the {asked}"
            )
        sent = f"sent {self._ago(message.created_at)}"
        return (
            f"reminder {count} of {MAX_REMINDERS}: {what} from {message.sender}, {sent}; "
            f"answer with {_how(message)}\n\n{_quoted(message)}"
        )

    def _overdue(self, message: Message, one: OverdueAnswer) -> str:
        count = one.obligation.reminders + 1
        last = "" if count < MAX_REMINDERS else ", the last one"
        return (
            f"{self._unanswered(message, one.recipient, one.obligation)}; "
            f"it is reminded, {count} of {MAX_REMINDERS}{last}"
        )

    def _given_up(self, message: Message, one: OverdueAnswer, gone: str) -> str:
        why = gone or f"it was reminded {one.obligation.reminders} times"
        return (
            f"{self._unanswered(message, one.recipient, one.obligation)}; "
            f"its answer is no longer awaited: {why}"
        )

    def _unanswered(self, message: Message, name: str, owed: Obligation) -> str:
        """The sender's line about a recipient: not read, read, or begun."""
        delivery = self._store.state.deliveries.get(message.id, {}).get(name)
        if owed.said:
            known = f"it {BEGUN.get(owed.said, f'said {owed.said}')} {self._ago(owed.since)}"
        elif delivery is not None and delivery.state is DeliveryState.RECEIVED:
            known = "it has read it"
        else:
            known = "it has not read it"
        return (
            f"{name} has not answered the {_word(message)} sent "
            f"{self._ago(message.created_at)}: {known}"
        )

    def _add_ended(self, works: list[WorkItem], agents: Set[str]) -> None:
        """Tell senders once if the process of a recipient ended with its work begun."""
        begun = {
            (number, name, owed.since)
            for number, known in self._store.state.owed.items()
            for name, owed in known.items()
            if owed.said
        }
        self._told &= begun
        fresh = sorted(begun - self._told)
        if not fresh:
            return
        ended = self._endings()
        for number, name, since in fresh:
            message = self._store.state.messages.get(number)
            how = ended(name, since * NS_PER_S)
            if message is None or not how:
                continue
            self._told.add((number, name, since))
            if message.sender not in agents:
                continue
            owed = self._store.state.owed[number][name]
            text = f"{how}; {self._unanswered(message, name, owed)}"
            work = _work_about(message, f"ended {name}")
            self._planner.add_message(
                work, message.sender, Kind.NOTIFICATION, text, f"ended {name} {since}"
            )
            works.append(work)

    def _ago(self, at_s: int) -> str:
        return f"{elapsed(self._clock.now_ns() - at_s * NS_PER_S)} ago"

    def _log_done(self, work: WorkItem) -> None:
        for one in work.reminders:
            word = (
                f"Reminded {one.recipient} of" if one.due_ms else f"Gave up on {one.recipient} for"
            )
            self._log(
                f"{word} an answer that is overdue",
                action="remind" if one.due_ms else "give_up_answer",
                message_id=work.message_id,
                recipient=one.recipient,
                reminders=one.reminders,
            )

    def _pause(self, reason: str) -> None:
        """Pause after the disk or the store refused a write."""
        self._not_before_ns = self._clock.monotonic_ns() + self._retry.first_s * NS_PER_S
        self._log(
            f"Paused reminders for {self._retry.first_s} s: {reason}",
            action="postpone",
            level="warning",
        )


def _work_about(message: Message, key: str) -> WorkItem:
    metadata = message.metadata or {}
    at_ns = int(metadata.get("created_ns") or 0)
    return system_work_about(message.relay_id or "", message.sender, at_ns, key)


def _word(message: Message) -> str:
    return "query" if message.message_type is MessageType.QUERY else "command"


def _how(message: Message) -> str:
    """The commands that answer it; an agent without them writes a file of that KIND and RE."""
    number = message.relay_id
    if message.message_type is MessageType.QUERY:
        answer = f"`relay send {message.sender} --kind response --re {number} ANSWER`"
    else:
        answer = f"`relay ack {number} completed`"
    return f"{answer} or `relay nack {number} WHY`"


def _quoted(message: Message) -> str:
    """The message's text, each line quoted with ``> ``, up to ``MOST_QUOTED`` bytes."""
    text = message.content[:MOST_QUOTED].decode(errors="ignore")
    lines: Iterable[str] = text.removesuffix("\n").split("\n")
    quoted = "\n".join(f"> {line}".rstrip() for line in lines)
    if len(message.content) > MOST_QUOTED:
        quoted += f"\n> … ({len(message.content)} bytes in all)"
    return quoted
