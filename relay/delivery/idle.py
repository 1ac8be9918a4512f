"""Idle agents: what others are told, from the sessions of agent CLIs.

The sender of a message that was read and is not answered hears once that its recipient is idle. An
agent that asked for it (ACTION agent.notify_idle) is answered when another one is idle and has the
message that it named; such requests are in ``pending_operations`` until they are answered.

A state comes as a line of a report. What a report did not tell, or a crash lost, is in the files of
the sessions, which are read every 5 s while an answer is owed or a request open. Every notice has a
derived id, so that none is sent twice. See docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from relay.acomm.model import DeliveryState
from relay.agents.status import Directory
from relay.base.clock import NS_PER_S, elapsed
from relay.base.home import Dirs
from relay.base.message import Kind
from relay.delivery import plan as planning
from relay.delivery.execute import ExecutionResult
from relay.delivery.notifications import notice_to_sender, unanswered_text, unsent
from relay.delivery.values import Effects, Part, Plan, Resources, Subject
from relay.ledger.agents import NOTIFY_IDLE, PendingOperation
from relay.reach.session import IDLE, Session, load_sessions

CHECK_NS = 5 * NS_PER_S  # between two looks at the sessions
GONE_NS = 10 * NS_PER_S  # without a session: another one may follow, as after /clear
HAS_IT = (DeliveryState.RECEIVED, DeliveryState.ACKNOWLEDGED)
NOT_REACHED = ("expired", "bounced", "dead")


class IdleNotices(Part):
    """Tells others that an agent is idle."""

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._next_ns = 0  # of the next look (monotonic)
        self._is_asked = True  # requests are open, as far as it is known
        self._idle: dict[str, int] = {}  # session -> since when it is idle, as seen last
        # agent, its session -> when, its state: nobody's word counts for another's session
        self._reported: dict[tuple[str, str], tuple[int, str]] = {}
        self._unanswered: set[tuple[str, str]] = set()  # agent, message id; to be looked at
        self._gone: dict[str, int] = {}  # agent -> since when it has no session (monotonic)

    def on_state(self, agent: str, state: str, owes: Iterable[str], session: str, at: int) -> None:
        """Take note of a state that a session reported, with the messages it has not answered."""
        known_at = self._reported.get((agent, session), (0, ""))[0]
        if at < known_at <= self._clock.now_ns():  # later than now: the clock was set back
            return
        self._reported[agent, session] = at, state
        if state == IDLE:
            self._unanswered.update((agent, message_id) for message_id in owes)
        self.check_soon()

    def check_soon(self) -> None:
        """Look at requests and sessions with the next plans."""
        self._next_ns = 0
        self._is_asked = True

    def due_ns(self) -> int | None:
        """Time of the next look (monotonic)."""
        is_needed = self._is_asked or self._unanswered or self._store.state.owed
        return self._next_ns if is_needed else None

    def plans_due(self, dirs: Dirs, directory: Directory) -> list[Plan]:
        """Notices about unanswered messages, and answers to requests."""
        looks = [self._clock.monotonic_ns() + CHECK_NS]
        processes = self._ledger.processes
        asked = processes.open_operations(NOTIFY_IDLE) if self._is_asked else {}
        sessions = self._live_sessions()
        self._unanswered.update(self._read_and_owed(sessions))
        plans = self._notices(directory)
        if not plans:
            self._unanswered.clear()
        for number, operation in asked.items():
            answer = self._answer(operation, sessions.get(operation.name))
            if answer is None:
                looks.append(self._clock.monotonic_at(operation.until))
                continue
            to = operation.requested_by if operation.requested_by in directory.agents else ""
            subject = Subject(operation.request_id, operation.requested_by, operation.asked_at)
            outcome = planning.outcome(subject, to, answer[1], "", answer[0])
            plans.append(replace(outcome, effects=Effects(closed_intents=(number,))))
        self._next_ns, self._is_asked = min(looks), bool(asked)
        return plans

    def settle(self, result: ExecutionResult) -> None:
        """Log what was sent; after a refusal all of it is planned again."""
        if result.postponed:
            self.check_soon()
        else:
            self._unanswered.clear()
        for executed in result.executed:
            recipients = {name for file in executed.files for name in file.recipients}
            if recipients:
                self._log(
                    f"Told {', '.join(sorted(recipients))} about an idle agent",
                    action="idle_notice",
                    message_id=executed.message_id,
                )

    def _live_sessions(self) -> dict[str, Session]:
        """The running sessions by agent, with the latest state of each."""
        live = [
            session
            for session in load_sessions(self._home.root)
            if session.agent and session.is_live
        ]
        for session in live:
            at, state = self._reported.get((session.agent, session.key), (0, ""))
            # The hook writes its file after the report. Later than now: the clock was set back.
            if session.state_at < at <= self._clock.now_ns():
                session.state, session.state_at = state, at
        keys = {(session.agent, session.key) for session in live}
        self._reported = {key: state for key, state in self._reported.items() if key in keys}
        return {session.agent: session for session in live}

    def _read_and_owed(self, sessions: Mapping[str, Session]) -> Iterator[tuple[str, str]]:
        """Yield what agents have read and not answered that are idle since the last look."""
        known, self._idle = (
            self._idle,
            {
                session.key: session.state_at
                for session in sessions.values()
                if session.state == IDLE
            },
        )
        idle = {
            name
            for name, session in sessions.items()
            if session.key in self._idle and known.get(session.key) != session.state_at
        }
        for number, owed in self._store.state.owed.items() if idle else ():
            message = self._store.messages.get(number)
            deliveries = self._store.deliveries.of(number)
            for name in idle & owed.keys():
                if message is not None and deliveries[name].state in HAS_IT:
                    yield name, message.relay_id or ""

    def _notices(self, directory: Directory) -> list[Plan]:
        """Tell senders that a recipient is idle, once for each message."""
        now, plans = self._clock.now_ns(), list[Plan]()
        for agent, message_id in sorted(self._unanswered):
            message = self._store.messages.find_by_relay_id(message_id)
            if message is None or agent not in self._store.obligations.of(message.id):
                continue  # answered in the meantime
            if message.sender in directory.agents:
                text = unanswered_text(message, agent, self._store, now, is_idle=True)
                plans.append(notice_to_sender(message, text, f"idle {agent}"))
        return unsent(plans, self._ledger)

    def _answer(
        self, operation: PendingOperation, session: Session | None
    ) -> tuple[Kind, str] | None:
        """The answer to a request; None: not yet."""
        name, message_id, now = operation.name, operation.message_id, self._clock.monotonic_ns()
        has_it, why = self._progress(operation) if message_id else (True, "")
        if why:
            return Kind.NACK, why
        if session is not None:
            self._gone.pop(name, None)
            if has_it and session.state == IDLE:
                about = f" and has read {message_id}" if message_id else ""
                return Kind.ACK, f"completed {name} is idle{about}"
        elif now - self._gone.setdefault(name, now) >= GONE_NS:
            return Kind.NACK, f"the session of {name} has ended"
        if self._clock.now_ns() < operation.until:
            return None
        within = elapsed(operation.until - operation.asked_at)
        if not has_it:
            return Kind.NACK, f"{name} has not read {message_id} within {within}"
        return Kind.NACK, f"{name} was not idle within {within}"

    def _progress(self, operation: PendingOperation) -> tuple[bool, str]:
        """True if the agent has the message; or the reason why it will not get it."""
        name, message_id = operation.name, operation.message_id
        stored = self._store.messages.find_by_relay_id(message_id)
        known = self._store.deliveries.of(stored.id).get(name) if stored else None
        if known is not None and known.state in HAS_IT:  # the ledger learns of it later
            return True, ""
        row = self._ledger.rows([message_id]).get(message_id)
        if row is None or row.status in ("pending", "processing"):
            return False, ""
        delivery = self._ledger.deliveries.rows([message_id]).get(message_id, {}).get(name)
        if row.agent_name != operation.requested_by or (
            delivery is None and row.status != "failed"
        ):
            return False, f"you have sent no message {message_id} to {name}"
        if delivery is None:
            return False, f"message {message_id} was refused"
        if delivery.state in NOT_REACHED:
            return False, f"message {message_id} did not reach {name}: it is {delivery.state}"
        return delivery.state in ("read", "acked"), ""
