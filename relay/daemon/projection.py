"""Ledger rows derived from the store's events, to restore rows lost in a crash.

Applying the same events again gives the same rows, and so does writing them again. Times are those
of the events: to the nanosecond where a record of the journal has it, else in whole seconds.
However long the history, a projection holds the rows of one piece of it; what the next piece needs
goes on with ``next_piece``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple, replace

from relay.acomm.model import Delivery, DeliveryState, Message
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.incidents import Refusal
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR
from relay.delivery.values import system_message_row
from relay.engine import events, rules
from relay.engine.events import Event
from relay.engine.messages import KIND_OF
from relay.ledger.deliveries import MAX_ATTEMPT, DeliveryFacts, ObligationFacts, ReadDelivery
from relay.ledger.ledger import FileFacts, Ledger
from relay.ledger.offers import OfferChange, Ring

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
_TIMES = {"staged": "staged_at", "written": "written_at", "read": "read_at", "acked": "acked_at"}
Key = tuple[int, str]  # message id in the store, recipient
Fact = TypeVar("Fact")


PIECE = 5_000  # messages, or four times as many deliveries: some 10 MiB


class Projection:
    """Applies events in their order and collects the rows."""

    def __init__(self) -> None:
        self.relay_ids: dict[int, str] = {}  # of the messages accepted in all pieces
        self.rows: dict[str, FileFacts] = {}  # by message id
        self.failures: list[tuple[str, Refusal, int]] = []  # message id, why, when (Unix ns)
        self.rejections: list[tuple[events.FileRefused, int]] = []  # of no row; when, Unix ns
        self.discarded: list[tuple[str, int]] = []  # message id of a dead letter, when
        self.late_reads: list[ReadDelivery] = []  # of messages that the store no longer has
        self.offers: list[OfferChange] = []
        self.rings: list[Ring] = []
        self.references: list[tuple[str, str, int]] = []  # attachment, message id, when
        self.delivery_facts: dict[Key, DeliveryFacts] = {}  # without their message ids
        self.obligation_facts: dict[Key, ObligationFacts] = {}  # likewise
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

    def apply(self, event: Event, at_ns: int, *, is_recent: bool = True) -> None:
        """Apply one event.

        ``at_ns``: when it happened (Unix nanoseconds), 0: by its own seconds; ``is_recent``: it is
        after the checkpoint.
        """
        self._is_recent, self._is_exact = is_recent, bool(at_ns)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            return
        try:
            self._at_ns = at_ns or _seconds_of(event) * NS_PER_S
            handler(self, event)
        except (ArithmeticError, LookupError, TypeError, ValueError) as exc:
            self.skipped.append(f"{exc!r}: {event}")  # it stays in the journal: the start goes on

    def write(
        self, ledger: Ledger, relay_id_of: Callable[[int], str | None], now_ns: int
    ) -> tuple[int, list[str]]:
        """Add or update the rows in a ledger, within the caller's transaction.

        ``relay_id_of`` resolves messages accepted before these events. Returns how many messages
        it lacked, and a text about each fact that no row can hold.
        """
        skipped = [*self.skipped]

        def project(write: Callable[[Sequence[Fact]], object], facts: Sequence[Fact]) -> None:
            skipped.extend(ledger.project(write, facts, now_ns))

        known = ledger.rows(self.rows)
        missing = [facts for one, facts in self.rows.items() if one not in known]
        project(ledger.add, missing)
        project(ledger.deliveries.restore, self._deliveries(relay_id_of, now_ns))
        project(ledger.deliveries.restore_obligations, self._obligations(relay_id_of))
        project(ledger.deliveries.discard, self.discarded)
        project(ledger.deliveries.mark_read, self.late_reads)
        project(lambda failures: _fail(ledger, failures), self.failures)
        project(ledger.agents.add_references, self.references)
        project(ledger.offers.change, self.offers)
        project(ledger.offers.add_rings, self.rings)
        project(lambda refused: _reject(ledger, refused), self.rejections)
        return len(missing), skipped

    def _deliveries(
        self, relay_id_of: Callable[[int], str | None], now_ns: int
    ) -> list[DeliveryFacts]:
        rows: list[DeliveryFacts] = []
        for (number, _), facts in self.delivery_facts.items():
            relay_id = self.relay_ids.get(number) or relay_id_of(number)
            if relay_id is not None:
                due_at = now_ns if facts.state == "held" else None
                rows.append(facts._replace(message_id=relay_id, due_at=due_at))
        return rows

    def _obligations(self, relay_id_of: Callable[[int], str | None]) -> list[ObligationFacts]:
        named = (
            (self.relay_ids.get(key[0]) or relay_id_of(key[0]), key)
            for key in self.obligation_facts
        )
        return [
            self.obligation_facts[key]._replace(message_id=name)
            for name, key in named
            if name is not None
        ]

    def _on_owed(self, event: events.Owed) -> None:
        for recipient in event.recipients:
            before = self.obligation_facts.get(
                (event.message_id, recipient), ObligationFacts("", recipient, "open")
            )
            after = before._replace(
                obligation="open",
                due_at=event.due_ms * NS_PER_MS or None,
                ack_status=event.said or before.ack_status,
                acked_at=self._at_ns if event.said else before.acked_at,
            )
            self.obligation_facts[event.message_id, recipient] = after

    def _on_reminded(self, event: events.Reminded) -> None:
        key, due_at = (event.message_id, event.recipient), event.due_ms * NS_PER_MS
        before = self.obligation_facts.get(key, ObligationFacts("", event.recipient, "open"))
        count = max(before.reminders, event.reminders)  # it was given up once, and owed again
        self.obligation_facts[key] = before._replace(due_at=due_at, reminders=count)

    def _on_owed_no_more(self, event: events.OwedNoMore) -> None:
        for recipient in event.recipients:
            before = self.obligation_facts.get(
                (event.message_id, recipient), ObligationFacts("", recipient, "open")
            )
            after = before._replace(
                obligation="answered" if event.said else "given_up",
                due_at=None,
                ack_status=event.said or before.ack_status,
                acked_at=self._at_ns if event.said else before.acked_at,
            )
            self.obligation_facts[event.message_id, recipient] = after

    def _on_added(self, event: events.DeliveriesAdded) -> None:
        for number in event.message_ids:
            self._update_delivery(number, event.recipient, "held")

    def _on_staged(self, event: events.DeliveriesStaged) -> None:
        for number, recipient, attempt in event.deliveries:
            self._update_delivery(number, recipient, "staged", attempt)

    def _on_received(self, event: events.MessageReceived) -> None:
        self._update_delivery(event.message_id, event.participant, "read", how=event.how)

    def _on_late_read(self, event: events.LateRead) -> None:
        key = (event.message_id, event.recipient)
        if event.relay_id:
            last, how = MAX_ATTEMPT, event.how
            read = ReadDelivery(event.relay_id, event.recipient, last, self._at_ns, how)
            self.late_reads.append(read)
            return
        before = self.delivery_facts.get(key) or DeliveryFacts(
            "", event.recipient, _STATES[event.state], 1
        )
        read_at = self._at_ns
        if event.state is DeliveryState.ACKNOWLEDGED:
            read_at = before.read_at or read_at
        self.delivery_facts[key] = before._replace(read_at=read_at, read_how=event.how)

    def _on_dead_lettered(self, event: events.DeadLettered) -> None:
        for recipient in event.recipients:
            self._update_delivery(event.message_id, recipient, "dead", why=event.last_error)

    def _on_discarded(self, event: events.DeadLetterDiscarded) -> None:
        self.discarded.append((event.relay_id, event.at * NS_PER_S))

    def _on_timed(self, event: events.DeliveryTimed) -> None:
        if event.delivery.state is not DeliveryState.SENT:
            return
        attempt = event.delivery.attempt  # it could not be made
        self._update_delivery(event.message_id, event.recipient, "held", attempt)

    def _on_accepted(self, event: events.MessageSent) -> None:
        message = event.message
        metadata = message.metadata or {}
        relay_id = metadata.get("relay_id")
        if not isinstance(relay_id, str):
            return  # not sent through the relay
        self.relay_ids[message.id] = relay_id
        if event.origin is not None:
            self.rows[relay_id] = FileFacts(relay_id, *astuple(event.origin))
        else:
            self.rows[relay_id] = _system_row(message, relay_id)
        if self._is_recent:
            self.recent.append(relay_id)
        at = message.created_at * NS_PER_S
        names = str(metadata.get("attachments", "")).split()
        self.references += [(one, relay_id, at) for one in names]
        for recipient in event.recipients:
            self._update_delivery(message.id, recipient, "held")

    def _on_refused(self, event: events.FileRefused) -> None:
        if not event.has_row:
            self.rejections.append((event, self._at_ns))
            return
        message_id = event.message_id
        self.rows.setdefault(message_id, FileFacts(message_id, *astuple(event.origin)))
        self.failures.append((message_id, Refusal(event.code, event.reason), self._at_ns))
        if self._is_recent:
            self.recent.append(message_id)

    def _on_offer(self, event: events.OfferChanged) -> None:
        facts = (event.message_id, event.recipient, event.session, event.offer)
        self.offers.append(OfferChange(*facts, event.became, event.detail, event.at_ns))

    def _on_rung(self, event: events.AgentRung) -> None:
        facts = (event.session, event.rung, event.messages, event.result)
        self.rings.append(Ring(event.recipient, event.at_ns, *facts))

    def _on_deliveries_moved(self, event: events.DeliveriesMoved) -> None:
        state = _STATES.get(event.state)
        if state is None:
            return
        for recipient in event.recipients:
            number = event.message_id
            self._update_delivery(
                number, recipient, state, event.attempt, said=event.said, why=event.why
            )
            obligation = self.obligation_facts.get((number, recipient))
            if (
                event.said and obligation is not None
            ):  # the latest status counts, even after the answer
                self.obligation_facts[number, recipient] = obligation._replace(
                    ack_status=event.said, acked_at=self._at_ns
                )
            if event.answer_id:
                delivery_facts = self.delivery_facts[number, recipient]
                answer_id, text = event.answer_id, event.answer_text or None
                self.delivery_facts[number, recipient] = delivery_facts._replace(
                    answer_id=answer_id, answer_text=text
                )
            if state == "written" and self._is_recent:
                self.written.add((number, recipient))

    def _update_delivery(
        self,
        number: int,
        recipient: str,
        state: str,
        attempt: int = 0,
        *,
        said: str = "",
        why: str = "",
        how: str = "",
    ) -> None:
        at = self._at_ns
        before = self.delivery_facts.get((number, recipient)) or DeliveryFacts(
            "", recipient, state, 0
        )
        changed: dict[str, Any] = {"state": state, "attempt": max(attempt, before.attempt, 1)}
        if recipient == ORCHESTRATOR and state in ("written", "acked"):  # it has been carried out
            changed |= {"state": "read", "staged_at": at, "written_at": at, "read_at": at}
        elif state == "held" and (before.staged_at is None or attempt > before.attempt):
            changed["staged_at"] = at  # its age counts from here
        elif state in _TIMES:
            changed[_TIMES[state]] = at
        is_late = not self._is_exact or (before.staged_at or 0) < self._started_ns <= at
        if state == "written":
            changed["last_error"] = None
        if state == "written" and before.state == "staged" and is_late:
            # When exactly is not known after a crash: its recipient may have read it before now.
            changed["written_at"] = before.staged_at
        if state == "acked":  # an answer implies that it was read
            changed["read_at"] = before.read_at or at
        if said:
            changed["ack_status"] = said
        if why:
            changed["last_error"] = why
        if how:
            changed["read_how"] = how
        self.delivery_facts[number, recipient] = before._replace(**changed)


def _fail(ledger: Ledger, failures: Iterable[tuple[str, Refusal, int]]) -> None:
    for message_id, refusal, at in failures:
        ledger.fail([(message_id, refusal)], at)


def _reject(ledger: Ledger, refused: Iterable[tuple[events.FileRefused, int]]) -> None:
    for one, at in refused:
        file, name = one.origin, one.origin.path.rpartition("/")[2]
        refusal = Refusal(one.code, one.reason)
        ledger.add_rejection(
            file.agent, name, file.inode or 0, file.mtime_ns, refusal, one.answer_id, at
        )


def _seconds_of(event: Event) -> int:
    """When an event that makes rows happened, as it says itself (Unix seconds)."""
    at: int = event.message.created_at if isinstance(event, events.MessageSent) else event.at  # type: ignore[union-attr]
    return at


def _system_row(message: Message, relay_id: str) -> FileFacts:
    """Ledger facts of a message sent by the orchestrator, which has no file."""
    metadata = message.metadata or {}
    at = int(metadata.get("created_ns") or 0)
    return system_message_row(
        relay_id,
        message.content,
        str(metadata.get("kind", KIND_OF[message.message_type])),
        str(metadata.get("to", "")),
        at,
    )


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
    """Deliveries of a message as far as the store knows them, without those never staged."""
    at = message.created_at * NS_PER_S
    return [
        DeliveryFacts(
            relay_id,
            recipient,
            "read" if recipient == ORCHESTRATOR else _state_of(one),
            max(one.attempt, 1),
            at,
        )
        for recipient, one in deliveries.items()
        if one.state is not DeliveryState.SENT
    ]


def _state_of(one: Delivery) -> str:
    """The ledger's state; one that waits for its next attempt was read if it left the inbox."""
    was_read = one.state is DeliveryState.WAITING and not one.queued
    return "read" if was_read and not rules.is_replayed(one) else _STATES.get(one.state, "written")


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
