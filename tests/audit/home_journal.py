"""A home's journal for the audits' tests: it tells what ledger and store say, or something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from pyspark.sql import DataFrame, Row

from relay.acomm.model import DeliveryState, Message
from relay.audit.inputs import Inputs
from relay.audit.jobs import AuditJob
from relay.engine import events
from relay.engine.events import Event
from tests.audit.home_builder import START_NS, START_S, HomeBuilder
from tests.audit.journal_builder import JournalBuilder

NOW = datetime(2026, 1, 31, 10, 30, tzinfo=UTC)
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


class Outcome(NamedTuple):
    """What one job made and found."""

    tables: dict[str, list[Row]]
    checks: dict[str, set[str]]  # check, without its job -> message ids; of files and days, names
    found: list[Row]  # its findings


def computed(frame: DataFrame) -> DataFrame:
    """The same rows, computed once and known to the driver: to ask for them is no Spark job."""
    return frame.sparkSession.createDataFrame(frame.toArrow())


def run(job: AuditJob, inputs: Inputs) -> Outcome:
    """Run a job as a run does: its tables are computed once, and findings made from them."""
    tables = {name: computed(frame) for name, frame in job.make(inputs).items()}
    rows = {name: frame.collect() for name, frame in tables.items()}
    assert {name: frame.columns for name, frame in tables.items()} == {
        name: schema.names for name, schema in job.tables.items()
    }
    assert job.findings is not None
    checks: dict[str, set[str]] = {}
    found = job.findings(tables, NOW).collect()
    for row in found:
        check = row["check"].removeprefix(f"{job.name}.")
        assert check in job.checks, "what a job finds is among what it says that it finds"
        checks.setdefault(check, set()).add(
            row["message_id"] or row["path"] or row["detail"].get("day")
        )
    return Outcome(rows, checks, found)
