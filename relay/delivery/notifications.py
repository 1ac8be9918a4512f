"""Notifications: messages that the relay sends without being asked, and reminders of owed answers.

About disks and limits, processes, and to an agent that starts again. Reminders: the recipient of an
overdue command or query is reminded, then given up; its sender is notified of each. If a process
ends with work begun, the sender is notified once. Every notice has an id derived from its event, so
that a crash sends none twice. See docs/states.md, "An answer that is owed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from relay.acomm.model import DeliveryState, Message, MessageType, Obligation
from relay.agents.processes import ProcessNotice
from relay.agents.roster import Roster
from relay.agents.status import NO_AGENT, AgentStatus, Directory, StatusChange
from relay.base.clock import NS_PER_MS, NS_PER_S, elapsed
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import IncidentKind
from relay.base.message import Kind
from relay.base.names import OPERATOR, ORCHESTRATOR, PERMISSION, permission_ms
from relay.base.text import times
from relay.delivery import plan as planning
from relay.delivery import saved_state
from relay.delivery.execute import ExecutionResult, PlanExecutor
from relay.delivery.limits import Alert
from relay.delivery.plan import subject_of, system_message
from relay.delivery.saved_state import StateStore
from relay.delivery.values import (
    NO_EFFECTS,
    DeliveryChanges,
    Effects,
    Part,
    Plan,
    Reminder,
    Resources,
    Subject,
    SystemMessage,
)
from relay.engine.deliveries import MAX_REMINDERS, OverdueAnswer
from relay.engine.engine import Engine
from relay.ledger.ledger import Ledger


class Notifier(Part):
    """Sends notifications."""

    def __init__(
        self, given: Resources, roster: Roster, executor: PlanExecutor, states: StateStore
    ) -> None:
        super().__init__(given)
        self._roster = roster
        self._executor = executor
        self._states = states

    def announce(
        self,
        agents: Iterable[str],
        text: str,
        key: str,
        at_ns: int,
        effects: Effects = NO_EFFECTS,
    ) -> bool:
        """Notify those of ``agents`` that exist, once for each key and time.

        The effects are recorded with it. False if the disk or the store refuses it now, or none of
        them exists: call again later.
        """
        names = sorted(self._roster.agents.intersection(agents))
        plans = [planning.notice(name, at_ns, key, text) for name in names]
        if not plans:
            return False
        plans[0] = replace(plans[0], effects=effects)
        return not self._execute(plans).postponed

    def send(self, notices: Sequence[ProcessNotice]) -> set[int]:
        """Send notices about processes and update the ledger; returns the indexes of those sent.

        The others are to be sent later: the disk or the store refuses them now.
        """
        plans: list[Plan] = []
        for notice in notices:
            subject = Subject(notice.request_id, notice.agent, notice.at)
            to = notice.agent if notice.agent in self._roster.agents else ""
            effects = Effects(
                status_change=notice.status_change,
                process=notice.process,
                closed_intents=notice.closed_intents,
            )
            outcome = planning.outcome(subject, to, notice.text, notice.key, notice.kind)
            plans.append(replace(outcome, effects=effects))
        ended = [
            (notice.status_change, notice.at)
            for notice in notices
            if notice.status_change is not None
        ]
        also = [plan for change, at in ended for plan in self._plans_of_end(change, at)]
        result = self._execute(plans + also)
        if result.postponed:
            _, reason = result.postponed[0]
            self._log(f"Cannot notify now: {reason}", action="postpone", level="warning")
        return {place for place, plan in enumerate(plans) if result.is_done(plan)}

    def tell_of_end(self, change: StatusChange, at_ns: int) -> bool:
        """Tell the senders of an agent's unread mail, once each, that it is terminated.

        ``at_ns``: of its last activity. False: the disk or the store refuses it now.
        """
        return not self._execute(self._plans_of_end(change, at_ns)).postponed

    def _plans_of_end(self, change: StatusChange, at_ns: int) -> list[Plan]:
        if change.status != AgentStatus.TERMINATED:
            return []
        unread = self._ledger.deliveries.unread_senders(change.name)
        return planning.notices_of_end(change, at_ns, unread, self._roster.agents)

    def answer(self, subject: Subject, kind: Kind, text: str) -> bool:
        """Send the answer to a command that was not answered at once; False: not possible now."""
        to = subject.agent if subject.agent in self._roster.agents else ""
        return not self._execute([planning.outcome(subject, to, text, "", kind)]).postponed

    def send_resume_message(self, name: str, key: str) -> bool:
        """Put the first message of a new run into an agent's inbox.

        To be called before its process is started; ``key`` is unique to this start. False: the disk
        or the store refuses it now; nothing was done.
        """
        try:
            plan = saved_state.resume_plan(self._states, name, key, self._clock.now_ns())
            result = self._execute([plan] if plan else [])
        except (OSError, UnsafePath) as exc:
            reason = str(exc)
        else:
            if not result.postponed:
                return True
            _, reason = result.postponed[0]
        self._log(f"Cannot greet {name} now: {reason}", action="postpone", level="warning")
        return False

    def report(self, alerts: list[Alert]) -> list[Alert]:
        """Report limits that were exceeded, once each: a loop to lead and operator, else to the
        agent itself. Returns those to report later."""
        left: list[Alert] = []
        for alert in alerts:
            incident, agent = alert.incident, alert.incident.agent or ""
            is_loop = incident.kind is IncidentKind.REPLY_LOOP
            recipients = {OPERATOR, self._roster.lead() or OPERATOR} if is_loop else {agent}
            # a loop is detected again after a crash
            effects = Effects((incident,), may_repeat=is_loop)
            if self.announce(recipients, incident.detail, alert.key, alert.at_ns, effects):
                kind = str(incident.kind)
                self._log(incident.detail, action=kind, level="warning", agent=agent)
            elif is_loop or agent in self._roster.agents:
                left.append(alert)
        return left

    def _execute(self, plans: list[Plan]) -> ExecutionResult:
        if not plans:
            return ExecutionResult()
        with self._home.dirs() as dirs:
            return self._executor.execute_own(dirs, plans)


BATCH = 256  # answers in one turn
MOST_QUOTED = 4096  # bytes of the message that a reminder repeats
MOST_ALIKE = 3  # agents with a line each, of whom the same is said
MOST_NAMED = 40  # characters of it that a line to its sender has
CHECK_NS = 5 * NS_PER_S  # between two checks for processes that ended
BEGUN = {"received": "acknowledged it as received", "in_progress": "began it"}


class Reminders(Part):
    """Reminds of overdue answers.

    ``endings`` makes the function of ``AgentStatusTracker.process_endings``.
    """

    def __init__(self, given: Resources, endings: Callable[[], Callable[[str, int], str]]) -> None:
        super().__init__(given)
        self._endings = endings
        self._next_check_ns = 0  # monotonic

    def due_ns(self) -> int | None:
        """Time of the next reminder or check (monotonic)."""
        due_ms = self._store.obligations.next_due_ms()
        if due_ms is None:
            return None
        return min(self._clock.monotonic_at(due_ms * NS_PER_MS), self._next_check_ns)

    def plans_due(self, dirs: Dirs, directory: Directory) -> list[Plan]:
        """Plans for a batch of overdue answers, and for processes that ended."""
        now = self._clock.now_ns()
        groups: dict[int, list[OverdueAnswer]] = {}
        for overdue in self._store.obligations.overdue(BATCH):
            groups.setdefault(overdue.message.id, []).append(overdue)
        plans = [remind(group, directory, self._store, now) for group in groups.values()]
        if self._clock.monotonic_ns() >= self._next_check_ns:
            plans += self._plans_of_ended(directory, now)
            self._next_check_ns = self._clock.monotonic_ns() + CHECK_NS
        return plans

    def settle(self, result: ExecutionResult) -> None:
        """Log the reminders."""
        for executed in result.executed:
            for reminder in executed.changes.reminders:
                if reminder.due_ms and not reminder.reminders:  # a request for permission
                    continue
                word = "Reminded {} of" if reminder.due_ms else "Gave up on {} for"
                self._log(
                    f"{word.format(reminder.recipient)} an answer that is overdue",
                    action="remind" if reminder.due_ms else "give_up_answer",
                    message_id=reminder.message_id,
                    recipient=reminder.recipient,
                    reminders=reminder.reminders,
                )

    def _plans_of_ended(self, directory: Directory, now_ns: int) -> list[Plan]:
        """Tell senders once if the process of a recipient ended with its work begun."""
        begun = [
            (message, name, owed.since)
            for number, known in self._store.state.owed.items()
            for name, owed in known.items()
            if owed.said and (message := self._store.messages.get(number)) is not None
        ]
        plans: list[Plan] = []
        ended = self._endings() if begun else None
        for message, name, since in begun:
            how = ended(name, since * NS_PER_S) if ended else ""
            if how and message.sender in directory.agents:
                text = f"{how}; {unanswered_text(message, name, self._store, now_ns)}"
                plans.append(notice_to_sender(message, text, f"ended {name} {since}"))
        return unsent(plans, self._ledger)


def notice_to_sender(message: Message, text: str, key: str) -> Plan:
    """Send the sender of a message a notice about it, once for each ``key``."""
    subject = subject_of(message)
    notice = system_message(subject, message.sender, Kind.NOTIFICATION, text, key)
    return Plan(subject, messages=(notice,))


def unsent(plans: list[Plan], ledger: Ledger) -> list[Plan]:
    """The plans of one notice each that was not sent before, by the rows of the ledger."""
    ids = [plan.messages[0].message_id for plan in plans]
    rows = ledger.rows(ids) if ids else {}
    found: list[Plan] = []
    for plan in plans:
        own, *rest = plan.messages
        while (row := rows.get(own.message_id)) is not None and row.agent_name != ORCHESTRATOR:
            own = own.with_next_id()
            rows |= ledger.rows([own.message_id])
        if row is None:
            found.append(replace(plan, messages=(own, *rest)))
    return found


def remind(group: list[OverdueAnswer], directory: Directory, store: Engine, now_ns: int) -> Plan:
    """The notices about one message's overdue answers: to its recipients, and to its sender."""
    message = group[0].message
    subject = subject_of(message)
    if waits_ms := permission_ms((message.metadata or {}).get(f"h.{PERMISSION}")):
        return _end_of_request(group, subject, subject.at_ns // NS_PER_MS + waits_ms, now_ns)
    lines: list[tuple[str, str]] = []  # name, and what is said of it
    messages: list[SystemMessage] = []
    reminders: list[Reminder] = []
    for overdue in group:
        name, owed = overdue.recipient, overdue.obligation
        unanswered = unanswered_text(message, name, store, now_ns)
        absence, due_ms, count = directory.absence(name), overdue.next_due_ms, owed.reminders + 1
        if absence or overdue.is_exhausted:
            due_ms, count = 0, owed.reminders
            why = _gone_text(name, absence) or f"it was reminded {times(owed.reminders)}"
            said = f"{unanswered}; its answer is no longer awaited: {why}"
        else:
            key, text = f"reminder {count} {owed.since}", _reminder(message, owed, now_ns)
            messages.append(system_message(subject, name, Kind.REMINDER, text, key, count))
            last = "" if count < MAX_REMINDERS else ", the last one"
            said = f"{unanswered}; it is reminded, {count} of {MAX_REMINDERS}{last}"
        lines.append((name, said.removeprefix(name)))
        reminders.append(Reminder(message.id, subject.message_id, name, count, due_ms))
    if message.sender in directory.agents:
        rounds = [
            (overdue.recipient, overdue.obligation.since, overdue.obligation.reminders)
            for overdue in group
        ]
        count = max(overdue.obligation.reminders for overdue in group) + 1
        text, key = "\n".join(_joined(lines)), f"overdue {rounds}"
        messages.append(
            system_message(subject, message.sender, Kind.NOTIFICATION, text, key, count)
        )
    return Plan(
        subject, messages=tuple(messages), changes=DeliveryChanges(reminders=tuple(reminders))
    )


def _joined(lines: list[tuple[str, str]]) -> Iterator[str]:
    """A line for each agent; one for all of whom the same is said, if they are many."""
    alike: dict[str, list[str]] = {}
    for name, said in lines:
        alike.setdefault(said, []).append(name)
    for name, said in lines:
        names = alike[said]
        if len(names) <= MOST_ALIKE:
            yield name + said
        elif name == names[0]:
            yield f"each of {len(names)} agents{said}: {', '.join(names)}"


def _end_of_request(
    group: list[OverdueAnswer], subject: Subject, over_ms: int, now_ns: int
) -> Plan:
    """A request for permission is awaited until its time is over; nobody is reminded of it."""
    due_ms = over_ms if now_ns < over_ms * NS_PER_MS else 0
    reminders = tuple(
        Reminder(
            overdue.message.id,
            subject.message_id,
            overdue.recipient,
            overdue.obligation.reminders,
            due_ms,
        )
        for overdue in group
    )
    return Plan(subject, changes=DeliveryChanges(reminders=reminders))


def _gone_text(name: str, absence: str) -> str:
    """The reason why an agent is gone, with its name."""
    return f"{name} is {absence}" if absence == NO_AGENT else absence


def _reminder(message: Message, owed: Obligation, now_ns: int) -> str:
    """The body of a reminder: the owed answer, to whom, and the message quoted."""
    asked = _word(message)
    what = f"you have not answered the {asked}"
    if owed.said:
        last = f"you said {owed.said} {_ago(owed.since, now_ns)}"
        what = f"{last}, and have not answered the {asked}"
    sent = f"sent {_ago(message.created_at, now_ns)}"
    return (
        f"reminder {owed.reminders + 1} of {MAX_REMINDERS}: {what} from {message.sender}, {sent}; "
        f"answer with {_how(message)}\n\n{_quoted(message)}"
    )


def unanswered_text(
    message: Message, name: str, store: Engine, now_ns: int, *, is_idle: bool = False
) -> str:
    """The sender's line about a recipient: not read, read, or begun."""
    owed = store.obligations.of(message.id)[name]
    delivery = store.deliveries.of(message.id).get(name)
    if owed.said:
        progress = BEGUN.get(owed.said, f"said {owed.said}")
        known = f"it {progress} {_ago(owed.since, now_ns)}"
    elif delivery is not None and delivery.state is DeliveryState.RECEIVED:
        known = "it has read it"
    else:
        known = "it has not read it"
    idle = "is idle and " if is_idle else ""
    return (
        f"{name} {idle}has not answered the {_word(message)} sent "
        f"{_ago(message.created_at, now_ns)} ({_begin(message)}): {known}"
    )


def _begin(message: Message) -> str:
    """Its first words in quotes, which tell it from other open ones."""
    text = " ".join(message.content[:MOST_QUOTED].decode(errors="ignore").split())
    return f'"{text[:MOST_NAMED]}…"' if len(text) > MOST_NAMED else f'"{text}"'


def _ago(at_s: int, now_ns: int) -> str:
    return f"{elapsed(now_ns - at_s * NS_PER_S)} ago"


def _word(message: Message) -> str:
    return "query" if message.message_type is MessageType.QUERY else "command"


def _how(message: Message) -> str:
    """The commands that answer it; an agent without them writes a file of that KIND and RE."""
    number = message.relay_id
    if message.message_type is MessageType.QUERY:
        answer = f"`relay reply {number} ANSWER`"
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
