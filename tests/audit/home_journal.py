"""A home's journal for the audits' tests: it tells what ledger and store say, or something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relay.acomm.model import DeliveryState, Message
from relay.engine import events
from relay.engine.events import Event
from tests.audit.home_builder import START_NS, START_S, HomeBuilder
from tests.audit.journal_builder import JournalBuilder

Change = Callable[[list[Event]], Iterable[Event]]


def events_of(home: HomeBuilder, message: Message) -> list[Event]:
    """The events of one message: accepted for whom the engine knows, and moved as it says."""
    deliveries = home.engine_deliveries(message)
    said: list[Event] = [events.MessageSent(message, tuple(deliveries))]
    for name, one in deliveries.items():
        if one.state is not DeliveryState.SENT:
            said.append(moved(message.id, name, one.state))
    return said


def moved(number: int, name: str, state: DeliveryState, attempt: int = 0, due_s: int = 0) -> Event:
    """A delivery moved on; ``due_s`` after START its acknowledgment is overdue."""
    due_ms = (START_S + due_s) * 1000 if due_s else 0
    return events.DeliveriesMoved(number, (name,), state, START_S, due_ms, attempt)


def write_journal(
    home: HomeBuilder,
    changes: dict[str, Change] | None = None,
    later: Iterable[Event] = (),
    after_s: int = 0,
) -> int:
    """Write the journal of what the engine holds; the ledger follows it to its end: that offset.

    ``changes``: by message id, what is made of its events. ``later``: events so long after them.
    """
    journal = JournalBuilder(home.root)
    journal.start()
    for message in home.stored:
        said: Iterable[Event] = events_of(home, message)
        if message.relay_id is not None:
            if change := (changes or {}).get(message.relay_id):
                said = change(list(said))
            for event in said:
                journal.say(event)
    journal.clock.advance(after_s)
    journal.say(*later)
    journal.close()
    with home.ledger.transaction():
        home.ledger.set_position(journal.journal.end, START_NS)
    return journal.journal.end
