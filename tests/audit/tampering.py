"""What tampered.toml says, done to a home: first what a relay would do, then what nobody may."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from relay.acomm.model import DeliveryState, Message, MessageType
from relay.base.clock import NS_PER_S
from relay.engine import events
from relay.engine.events import Event
from tests.audit.home_builder import START_NS, START_S, HomeBuilder, file_of, stored_message
from tests.audit.home_journal import Change, moved, write_journal
from tests.ledger.support import put

DAY = "archive/2026-01-31/alice"
IN_2099 = 4_070_908_800 * NS_PER_S
replace = msgspec.structs.replace


class Tampering(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is done to one message, and what is found."""

    finds: list[str]
    sent: str = "sent"
    archived: bool = False
    ledger_ack: tuple[str, str] | None = None
    said_ack: tuple[str, str] | None = None
    said: str = "as_it_was"
    store: str = "as_it_was"
    after: str = ""
    messages: str = ""
    deliveries: str = ""
    original: str = ""
    class_: str | None = msgspec.field(default=None, name="class")
    differs: str | None = None
    headers: str | None = None
    delivery: str | None = None


def known() -> dict[str, Tampering]:
    """Name -> what is done; what is done to the store is done to an archive as well."""
    text = Path(__file__).with_name("tampered.toml").read_bytes()
    listed = msgspec.convert(tomllib.loads(text.decode()), dict[str, Tampering])
    archived = {
        f"archived_{name}": replace(one, archived=True)
        for name, one in listed.items()
        if name.startswith("kept_")
    }
    return listed | archived


def write(home: HomeBuilder, table: str, changes: dict[str, str], before: str = "") -> None:
    """Message id -> what its rows of a table are set to."""
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute(before)
        for name, change in changes.items():
            db.execute(f"UPDATE {table} SET {change} WHERE message_id = '1-{name}'")


def tamper(home: HomeBuilder, listed: dict[str, Tampering]) -> None:
    """A home with one message for each, to which that is done."""
    for name, one in listed.items():
        SENT[one.sent](home, f"1-{name}")
        if one.ledger_ack is not None:
            status, answer_id = one.ledger_ack
            with home.ledger.transaction():
                acknowledge(home, f"1-{name}", status, answer_id or None)
    write_journal(home, {f"1-{name}": said_of(one) for name, one in listed.items()})
    live, archived = home.stored, []
    for name, one in listed.items():
        mine = [message for message in live if message.relay_id == f"1-{name}"]
        live = [message for message in live if message not in mine]
        kept = STORE[one.store](mine[0] if mine else stored_message(900, f"1-{name}"))
        if kept is not None:
            (archived if one.archived else live).append(kept)
    home.stored = archived
    home.write_store("store/archive/2026-01-31/000001.acomm")
    home.stored = live
    home.write_store()
    for table in ("messages", "deliveries"):
        changes = {name: getattr(one, table) for name, one in listed.items()}
        write(home, table, {name: change for name, change in changes.items() if change})
    for name, one in listed.items():
        if one.original:
            original(home, f"1-{name}").write_bytes(file_of(one.original, b"hello"))
        if one.after:
            AFTER[one.after](home, f"1-{name}")


def acknowledge(
    home: HomeBuilder, message_id: str, status: str, answer_id: str | None = None
) -> None:
    """The recipient's answer, as the ledger has it."""
    times = {"acked_at": START_NS, "read_at": START_NS}
    said = {"ack_status": status, "answer_id": answer_id}
    put(home.ledger, message_id, "bob", "acked", **times, **said)


def original(home: HomeBuilder, message_id: str) -> Path:
    """The archived file of a message."""
    return home.root / DAY / f"{message_id}.msg"


# -- how it comes into the home ------------------------------------------------------------


def received(home: HomeBuilder, message_id: str) -> None:
    """The recipient has acknowledged it."""
    home.sent(message_id)
    with home.ledger.transaction():
        acknowledge(home, message_id, "received")


def taken(home: HomeBuilder, message_id: str) -> None:
    """The recipient has read it."""
    home.sent(message_id)
    with home.ledger.transaction():
        put(home.ledger, message_id, "bob", "read", read_at=START_NS)


def dead(home: HomeBuilder, message_id: str) -> None:
    """Its delivery was given up."""
    home.sent(message_id)
    with home.ledger.transaction():
        put(home.ledger, message_id, "bob", "dead", last_error="no acknowledgment")


def staged_for_two(home: HomeBuilder, message_id: str) -> None:
    """Completed, and neither recipient has it."""
    home.seen(message_id)
    home.deliver(message_id, ("bob", "carol"), written_after_ms=None)
    home.finish(message_id)
    home.keep(message_id)


SENT: dict[str, Callable[[HomeBuilder, str], None]] = {
    "sent": lambda home, message_id: home.sent(message_id),
    "in_two_hours": lambda home, message_id: home.sent(
        message_id, at_ns=START_NS + 7200 * NS_PER_S
    ),
    "for_two": lambda home, message_id: home.sent(message_id, recipients=("bob", "dave")),
    "nobody": lambda home, message_id: None,
    "received": received,
    "taken": taken,
    "dead": dead,
    "staged_for_two": staged_for_two,
}

# -- what its records in the journal say ---------------------------------------------------


def said_of(one: Tampering) -> Change:
    """What is made of a message's events."""
    if one.said_ack is None:
        return SAID[one.said]
    status, answer_id = one.said_ack
    state = DeliveryState.ACKNOWLEDGED
    return lambda said: [
        said[0],
        events.DeliveriesMoved(
            accepted(said).message.id,
            ("bob",),
            state,
            START_S,
            said=status,
            answer_id=answer_id,
            answer_text="done",
        ),
    ]


def accepted(said: list[Event]) -> events.MessageSent:
    """The first of a message's events."""
    assert isinstance(said[0], events.MessageSent)
    return said[0]


def then(state: DeliveryState, attempt: int = 0) -> Callable[[list[Event]], Event]:
    """Its delivery to bob moved on."""
    return lambda said: moved(accepted(said).message.id, "bob", state, attempt)


def another_content(said: list[Event]) -> Iterable[Event]:
    """It was accepted with another content."""
    message = replace(accepted(said).message, content=b"something else")
    return [replace(accepted(said), message=message), *said[1:]]


def for_carol_too(said: list[Event]) -> Iterable[Event]:
    """It was accepted for one more."""
    return [replace(accepted(said), recipients=("bob", "carol")), *said[1:]]


SAID: dict[str, Change] = {
    "as_it_was": lambda said: said,
    "nothing": lambda said: [],
    "said_twice": lambda said: [*said, said[-1]],
    "a_second_attempt": lambda said: [*said, then(DeliveryState.DELIVERED, 2)(said)],
    "delivered": lambda said: [*said, then(DeliveryState.DELIVERED)(said)],
    "delivered_alone": lambda said: [said[0], then(DeliveryState.DELIVERED)(said)],
    "bounced": lambda said: [said[0], then(DeliveryState.BOUNCED)(said)],
    "another_content": another_content,
    "for_carol_too": for_carol_too,
}

# -- what the engine's files hold ----------------------------------------------------------


def told(one: Message, **facts: object) -> Message:
    """The message with other facts of the relay's."""
    return replace(one, metadata={**(one.metadata or {}), **facts})


STORE: dict[str, Callable[[Message], Message | None]] = {
    "as_it_was": lambda one: one if one.id != 900 else None,
    "lost": lambda one: None,
    "planted": lambda one: one,
    "planted_in_2099": lambda one: replace(
        told(one, created_ns=IN_2099), id=901, created_at=IN_2099 // NS_PER_S
    ),
    "earlier": lambda one: told(one, created_ns=1_769_851_000),
    "older": lambda one: replace(one, created_at=START_S - 60),
    "sender": lambda one: replace(one, sender="mallory"),
    "route": lambda one: told(one, to="carol"),
    "command": lambda one: replace(one, message_type=MessageType.COMMAND),
    "kind": lambda one: told(one, kind="spawn"),
    "urgent": lambda one: replace(one, priority=0),
    "eternal": lambda one: replace(one, ttl=2**64 - 1),
}

# -- what is done to the whole -------------------------------------------------------------


def no_delivery(home: HomeBuilder, message_id: str) -> None:
    """The ledger knows none."""
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute("DELETE FROM deliveries WHERE message_id = ?", (message_id,))


def bounced_for_zed(home: HomeBuilder, message_id: str) -> None:
    """The ledger knows one that nobody was told of."""
    with home.ledger.transaction():
        put(home.ledger, message_id, "zed", "bounced", staged_at=START_NS, last_error="planted")


def original_copied(home: HomeBuilder, message_id: str) -> None:
    """The same file is there for another agent, too."""
    there = original(home, message_id)
    folder = there.parents[1] / "zed"
    folder.mkdir(exist_ok=True)
    shutil.copy(there, folder / there.name)


def original_longer(home: HomeBuilder, message_id: str) -> None:
    """A byte more, in a header that nobody reads."""
    path = original(home, message_id)
    path.write_bytes(path.read_bytes().replace(b"X-PAD", b"X-NOTE"))


AFTER: dict[str, Callable[[HomeBuilder, str], object]] = {
    "no_delivery": no_delivery,
    "bounced_for_zed": bounced_for_zed,
    "original_gone": lambda home, message_id: original(home, message_id).unlink(),
    "original_edited": lambda home, message_id: original(home, message_id).write_bytes(
        b"TO: bob\n\nforged"
    ),
    "original_longer": original_longer,
    "original_copied": original_copied,
}
