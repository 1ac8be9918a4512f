"""The ledger's rows of the store's events: a batch of them, or those of a journal.

The running relay, recovery and a rebuild write these rows with the same code. Applying the same
events again gives the same rows, and so does writing them again, in any number of pieces. Times
are those of the events: to the nanosecond where a record of the journal has it, else in whole
seconds. However long the history, a projection holds the rows of one piece of it; what the next
piece needs goes on with ``next_piece``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple, replace

from relay.acomm.model import Delivery, DeliveryState, Message
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.incidents import Refusal
from relay.base.logs import LogCall
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, sha256_hex
from relay.engine import events, rules
from relay.engine.events import Event, FreshEvent
from relay.engine.messages import KIND_OF
from relay.ledger.check import describe_skipped
from relay.ledger.deliveries import DeliveryFacts, ObligationFacts, OfferChange
from relay.ledger.ledger import FileFacts, Ledger

_STATES = {
    DeliveryState.SENT: "held",
    DeliveryState.STAGED: "staged",
    DeliveryState.DELIVERED: "written",
    DeliveryState.RECEIVED: "read",
    DeliveryState.ACKNOWLEDGED: "acked",
    DeliveryState.BOUNCED: "bounced",
    DeliveryState.EXPIRED: "expired",
    DeliveryState.DEAD: "dead",
}
Key = tuple[int, str]  # message id in the store, recipient
Facts = TypeVar("Facts", DeliveryFacts, ObligationFacts)


PIECE = 5_000  # messages, or four times as many deliveries: some 10 MiB
SHOWN_FACTS = 20  # of those that a piece skips, in the log


class Projection:
    """Applies events in their order and collects the rows.

    ``has_claims``: the ledger has the rows of the files.
    """

    def __init__(self, *, has_claims: bool = False) -> None:
        self._has_claims = has_claims
        self.relay_ids: dict[int, str] = {}  # of the messages accepted in all pieces
        self.rows: dict[str, FileFacts] = {}  # by message id
        self.failures: list[tuple[str, Refusal, int]] = []  # message id, why, when (Unix ns)
        self.rejections: list[tuple[object, ...]] = []  # of files without a row, as the table
        self.discarded: list[tuple[str, int]] = []  # message id of a dead letter, when
        self._dead: dict[int, list[DeliveryFacts]] = {}  # message -> those given up in this piece
        self.late_reads: list[DeliveryFacts] = []  # of messages that the store no longer has
        self.offers: list[OfferChange] = []
        self.rings: list[tuple[object, ...]] = []  # as the table takes them
        self.references: list[tuple[str, str, int]] = []  # attachment, message id, when
        self.delivery_facts: dict[Key, DeliveryFacts] = {}  # without their message ids
        self.obligation_facts: dict[Key, ObligationFacts] = {}  # likewise
        self._held_since: dict[Key, int] = {}  # of deliveries that are tried again
        self._is_recent = True
        self._at_ns = 0  # of the event being applied
        self._is_exact = True  # False: it has whole seconds only
        self._started_ns = 0  # when the writer of these events started
        self.written: set[Key] = set()  # delivered to an inbox by recent events
        self.recent: list[str] = []  # ids of the rows of recent events
        self.skipped: list[str] = []  # texts about events that make no row

    def is_piece(self, event: Event) -> bool:
        """True if the rows are to be written before this event is applied.

        A batch begins with it: the relay's answers to the commands before it are in the store.
        """
        begins = isinstance(event, events.MessageSent) and event.origin is not None
        deliveries = len(self.delivery_facts) // 4
        return max(len(self.rows), deliveries) >= PIECE * (1 if begins else 2)

    def next_piece(self) -> Projection:
        """The projection of the events that follow, once these rows are written."""
        after = Projection()
        after.relay_ids, after.written, after.recent = self.relay_ids, self.written, self.recent
        after._started_ns = self._started_ns
        after.delivery_facts = {
            key: facts for key, facts in self.delivery_facts.items() if facts.state == "staged"
        }
        return after

    def start(self, at_ns: int) -> None:
        """Note that a writer started: what the one before had staged, it delivered."""
        self._started_ns = at_ns

    def apply_all(self, fresh: Iterable[FreshEvent]) -> None:
        """Apply events in their order, each with its time."""
        handlers = _HANDLERS
        for event, at_ns in fresh:
            if (handler := handlers.get(type(event))) is not None:
                self._at_ns = at_ns
                handler(self, event)

    def apply(self, event: Event, at_ns: int, *, is_recent: bool = True) -> None:
        """Apply one event of a journal; what does not fit is skipped.

        ``at_ns``: when it happened (Unix nanoseconds), 0: by its own seconds; ``is_recent``: it is
        after the checkpoint.
        """
        self._is_recent, self._is_exact = is_recent, bool(at_ns)
        if type(event) not in _HANDLERS:
            return
        try:
            self.apply_all([(event, at_ns or event.at * NS_PER_S)])
        except (ArithmeticError, LookupError, TypeError, ValueError) as exc:
            self.skipped.append(f"{exc!r}: {event}")  # it stays in the journal: the start goes on

    def write(
        self, ledger: Ledger, relay_id_of: Callable[[int], str | None], now_ns: int
    ) -> tuple[int, list[str]]:
        """Add or update the rows in a ledger, within the caller's transaction.

        ``relay_id_of`` resolves messages accepted before these events. Returns how many messages
        it lacked, and a text about each fact that no row can hold; those are counted.
        """
        deliveries, offers, added = ledger.deliveries, ledger.offers, list[str]()
        rows: tuple[tuple[Callable[[Sequence[Any]], object], Sequence[Any]], ...] = (
            (lambda rows: added.extend(ledger.add(rows)), [*self.rows.values()]),
            (deliveries.discard, self.discarded),  # first: what died afterwards is not discarded
            (deliveries.upsert, self._named(self.delivery_facts, relay_id_of)),
            (deliveries.set_obligations, self._named(self.obligation_facts, relay_id_of)),
            (deliveries.mark_read, self.late_reads),
            (lambda failures: _fail(ledger, failures), self.failures),
            (ledger.agents.add_references, self.references),
            (offers.change, self.offers),
            (offers.add_rings, self.rings),
            (ledger.add_rejections, self.rejections),
        )
        skipped = [*self.skipped]
        for write, facts in rows:
            if facts:
                skipped += ledger.project(write, facts)
        if skipped:
            ledger.count_skipped(len(skipped), now_ns)
        return len(added), skipped

    def _named(
        self, known: Mapping[Key, Facts], relay_id_of: Callable[[int], str | None]
    ) -> list[Facts]:
        """Facts with the ids of their messages; without those of messages that have none."""
        named: list[Facts] = []
        for (number, _), facts in known.items():
            relay_id = self.relay_ids.get(number) or relay_id_of(number)
            if relay_id is not None:
                facts.message_id = relay_id
                named.append(facts)
        return named

    def _obligation(self, number: int, recipient: str) -> ObligationFacts:
        key = number, recipient
        facts = self.obligation_facts.get(key)
        if facts is None:
            facts = self.obligation_facts[key] = ObligationFacts("", recipient, "open")
        return facts

    def _on_owed(self, event: events.Owed) -> None:
        for recipient in event.recipients:
            facts = self._obligation(event.message_id, recipient)
            facts.obligation, facts.due_at = "open", event.due_ms * NS_PER_MS or None
            if event.said:
                facts.ack_status, facts.acked_at = event.said, self._at_ns

    def _on_reminded(self, event: events.Reminded) -> None:
        facts = self._obligation(event.message_id, event.recipient)
        facts.due_at = event.due_ms * NS_PER_MS
        # it was given up once, and owed again
        facts.reminders = max(facts.reminders, event.reminders)

    def _on_owed_no_more(self, event: events.OwedNoMore) -> None:
        for recipient in event.recipients:
            facts = self._obligation(event.message_id, recipient)
            facts.obligation, facts.due_at = "answered" if event.said else "given_up", None
            if event.said:
                facts.ack_status, facts.acked_at = event.said, self._at_ns

    def _on_added(self, event: events.DeliveriesAdded) -> None:
        for number in event.message_ids:
            self._hold(number, event.recipient, 1)

    def _on_staged(self, event: events.DeliveriesStaged) -> None:
        for number, recipient, attempt in event.deliveries:
            before = self.delivery_facts.get((number, recipient))
            if before is not None and before.state == "held" and attempt == before.attempt:
                self._held_since[number, recipient] = before.staged_at or self._at_ns
            else:
                self._held_since.pop((number, recipient), None)
            facts = self._delivery(number, recipient, attempt)
            facts.state, facts.staged_at = "staged", self._at_ns

    def _on_received(self, event: events.MessageReceived) -> None:
        facts = self._delivery(event.message_id, event.participant)
        self._read(facts)
        facts.read_how = event.how or facts.read_how

    def _on_late_read(self, event: events.LateRead) -> None:
        if event.relay_id:
            read = DeliveryFacts(event.relay_id, event.recipient, "read", 0)
            read.read_at, read.read_how = self._at_ns, event.how
            self.late_reads.append(read)
            return
        facts = self._delivery(event.message_id, event.recipient)
        facts.state = _STATES[event.state]
        facts.read_at, facts.read_how = _read_at(facts, self._at_ns), event.how

    def _on_dead_lettered(self, event: events.DeadLettered) -> None:
        for recipient in event.recipients:
            facts = self._delivery(event.message_id, recipient)
            self._end(facts, event.message_id, "dead", event.last_error)
            self._dead.setdefault(event.message_id, []).append(facts)

    def _on_discarded(self, event: events.DeadLetterDiscarded) -> None:
        at_ns = event.at * NS_PER_S
        self.discarded.append((event.relay_id, at_ns))
        for facts in self._dead.pop(event.message_id, ()):
            facts.discarded_at = at_ns if facts.state == "dead" else None
        self.relay_ids.setdefault(event.message_id, event.relay_id)  # the store forgets it

    def _on_timed(self, event: events.DeliveryTimed) -> None:
        if event.delivery.state is not DeliveryState.SENT:
            return
        # it could not be made
        self._hold(event.message_id, event.recipient, event.delivery.attempt)

    def _on_accepted(self, event: events.MessageSent) -> None:
        message = event.message
        metadata = message.metadata or {}
        relay_id = metadata.get("relay_id")
        if not isinstance(relay_id, str):
            return  # not sent through the relay
        self.relay_ids[message.id] = relay_id
        if event.origin is None:
            self.rows[relay_id] = _system_row(message, relay_id)
        elif not self._has_claims:
            self.rows[relay_id] = FileFacts(relay_id, *astuple(event.origin))
        if self._is_recent:
            self.recent.append(relay_id)
        if names := metadata.get("attachments"):
            self.references += [(name, relay_id, self._at_ns) for name in str(names).split()]
        number, at = message.id, self._at_ns
        for recipient in event.recipients:
            if recipient != ORCHESTRATOR:  # it is carried out, or not yet
                facts = DeliveryFacts("", recipient, "held", 1, at)
                self.delivery_facts[number, recipient] = facts

    def _on_refused(self, event: events.FileRefused) -> None:
        if not event.has_row:
            file, name = event.origin, event.origin.path.rpartition("/")[2]
            facts = (file.agent, name, file.inode or 0, file.mtime_ns)
            self.rejections.append(
                (*facts, event.reason, event.answer_id, self._at_ns, event.code or None)
            )
            return
        message_id = event.message_id
        if not self._has_claims:
            self.rows.setdefault(message_id, FileFacts(message_id, *astuple(event.origin)))
        self.failures.append((message_id, Refusal(event.code, event.reason), self._at_ns))
        if self._is_recent:
            self.recent.append(message_id)

    def _on_offer(self, event: events.OfferChanged) -> None:
        facts = (event.message_id, event.recipient, event.session, event.offer)
        self.offers.append(OfferChange(*facts, event.became, event.detail, event.at_ns))

    def _on_rung(self, event: events.AgentRung) -> None:
        facts = (event.session, event.rung, event.messages, event.result)
        self.rings.append((event.recipient, event.at_ns, *facts))

    def _on_deliveries_moved(self, event: events.DeliveriesMoved) -> None:
        state, number = _STATES.get(event.state), event.message_id
        if state is None:
            return
        for recipient in event.recipients:
            facts = self._delivery(number, recipient, event.attempt)
            if recipient == ORCHESTRATOR and state in ("written", "acked"):
                self._carry_out(facts)
            elif state == "written":
                self._write(facts)
                if self._is_recent:
                    self.written.add((number, recipient))
            elif state == "acked":
                self._acknowledge(facts, event)
            elif state == "read":
                self._read(facts)
            else:
                self._end(facts, number, state, event.why)

    def _delivery(self, number: int, recipient: str, attempt: int = 1) -> DeliveryFacts:
        """The facts of a delivery, of this attempt or a later one."""
        facts = self.delivery_facts.get((number, recipient))
        if facts is None:
            facts = DeliveryFacts("", recipient, "", attempt or 1)
            self.delivery_facts[number, recipient] = facts
        elif attempt > facts.attempt:
            facts.attempt = attempt
        return facts

    def _hold(self, number: int, recipient: str, attempt: int) -> None:
        before = self.delivery_facts.get((number, recipient))
        is_further = before is None or before.staged_at is None or attempt > before.attempt
        facts = self._delivery(number, recipient, attempt)
        facts.state = "held"
        if is_further:  # its age counts from here
            facts.staged_at = self._at_ns
        elif (since := self._held_since.get((number, recipient))) is not None:
            facts.staged_at = since  # it was tried again, and is held as before

    def _carry_out(self, facts: DeliveryFacts) -> None:
        """A command is delivered and read in one."""
        at, facts.state = self._at_ns, "read"
        facts.staged_at, facts.written_at, facts.read_at = at, at, at

    def _write(self, facts: DeliveryFacts) -> None:
        at, staged_at = self._at_ns, facts.staged_at
        is_late = not self._is_exact or (staged_at or 0) < self._started_ns <= at
        # When exactly is not known after a crash: its recipient may have read it before now.
        facts.written_at = staged_at if facts.state == "staged" and is_late else at
        facts.state, facts.last_error = "written", None

    def _read(self, facts: DeliveryFacts) -> None:
        facts.state, facts.read_at = "read", _read_at(facts, self._at_ns)

    def _acknowledge(self, facts: DeliveryFacts, event: events.DeliveriesMoved) -> None:
        at, said = self._at_ns, event.said
        if facts.state == "held":
            facts.last_error = None
        facts.read_at = _read_at(facts, at)  # an answer implies that it was read
        facts.state, facts.acked_at, facts.discarded_at = "acked", at, None
        if said:  # the latest status counts, even after the answer
            facts.ack_status = said
            owed = self.obligation_facts.get((event.message_id, facts.recipient))
            if owed is not None:
                owed.ack_status, owed.acked_at = said, at
        if event.answer_id:
            facts.answer_id, facts.answer_text = event.answer_id, event.answer_text or None

    def _end(self, facts: DeliveryFacts, number: int, state: str, why: str) -> None:
        """A delivery is given up, and so is the answer to it."""
        facts.state, facts.last_error = state, why or facts.last_error
        owed = self.obligation_facts.get((number, facts.recipient))
        if owed is not None and owed.obligation == "open":
            owed.obligation, owed.due_at = "given_up", None


def _read_at(facts: DeliveryFacts, at: int) -> int:
    """When the file of the last attempt was read, if one more sign of it is of this time.

    As the ledger's upsert has it. The state tells whether the time known is that of the last
    attempt; of what was given up only times can tell, which a clock that is set back confuses.
    """
    known = facts.read_at
    if known is None or facts.state in ("held", "staged", "written"):
        return at
    if facts.state not in ("read", "acked") and known < (facts.written_at or 0):
        return at
    return min(known, at)


def log_skipped(skipped: Sequence[str], log: LogCall) -> None:
    """Log the facts that no row can hold, and how many there are."""
    for why in skipped[:SHOWN_FACTS]:
        log(f"A fact of the journal is skipped: {why}", action="skip_fact", level="error")
    if skipped:
        log(describe_skipped(len(skipped)), action="skip_fact", level="error")


def _fail(ledger: Ledger, failures: Iterable[tuple[str, Refusal, int]]) -> None:
    for message_id, refusal, at in failures:
        ledger.fail([(message_id, refusal)], at)


def _system_row(message: Message, relay_id: str) -> FileFacts:
    """Ledger facts of a message sent by the orchestrator, which has no file."""
    metadata, content = message.metadata or {}, message.content
    kind = str(metadata.get("kind", KIND_OF[message.message_type]))
    path, at = f"{ORCHESTRATOR}/{relay_id}{MSG_SUFFIX}", message.created_ns
    checksum, to = sha256_hex(content), str(metadata.get("to", ""))
    size = len(content)
    return FileFacts(relay_id, ORCHESTRATOR, path, size, at, None, checksum, kind, to, at)


def facts_of(message: Message, relay_id: str) -> FileFacts:
    """Ledger facts of an accepted message, as far as the store knows them."""
    if message.sender == ORCHESTRATOR:
        return _system_row(message, relay_id)
    known = _system_row(message, relay_id)
    path = f"agents/{message.sender}/outbox/{relay_id}{MSG_SUFFIX}"
    return replace(known, agent_name=message.sender, file_path=path, file_mtime_ns=0)


def deliveries_of(
    message: Message, relay_id: str, deliveries: Mapping[str, Delivery]
) -> list[DeliveryFacts]:
    """Deliveries of a message as far as the store knows them, without a command not carried out."""
    at = message.created_at * NS_PER_S
    return [
        DeliveryFacts(
            relay_id,
            recipient,
            "read" if recipient == ORCHESTRATOR else _state_of(delivery),
            max(delivery.attempt, 1),
            at,
        )
        for recipient, delivery in deliveries.items()
        if recipient != ORCHESTRATOR or delivery.state is not DeliveryState.SENT
    ]


def _state_of(delivery: Delivery) -> str:
    """The ledger's state; one that waits for its next attempt was read if it left the inbox."""
    if rules.is_replayed(delivery):
        return "dead"  # until its attempt
    was_read = delivery.state is DeliveryState.WAITING and not delivery.queued
    return "read" if was_read else _STATES.get(delivery.state, "written")


_HANDLERS: dict[type, Callable[..., None]] = {
    events.MessageSent: Projection._on_accepted,
    events.FileRefused: Projection._on_refused,
    events.DeliveriesAdded: Projection._on_added,
    events.DeliveriesStaged: Projection._on_staged,
    events.DeliveriesMoved: Projection._on_deliveries_moved,
    events.MessageReceived: Projection._on_received,
    events.LateRead: Projection._on_late_read,
    events.OfferChanged: Projection._on_offer,
    events.AgentRung: Projection._on_rung,
    events.DeadLettered: Projection._on_dead_lettered,
    events.DeadLetterDiscarded: Projection._on_discarded,
    events.DeliveryTimed: Projection._on_timed,
    events.Owed: Projection._on_owed,
    events.Reminded: Projection._on_reminded,
    events.OwedNoMore: Projection._on_owed_no_more,
}
