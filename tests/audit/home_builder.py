"""Homes for the audits' tests: a ledger by relay.ledger, store files by relay.acomm.store_file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.acomm.model import (
    Channel,
    ChannelType,
    Delivery,
    DeliveryState,
    Message,
    MessageType,
    Metadata,
    Participant,
    StoreFile,
)
from relay.audit.extract import extracted
from relay.audit.lake_tables import Inputs
from relay.audit.snapshot import HomeSnapshot, snapshot_home
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock, iso_date
from relay.base.names import sha256_hex
from relay.ledger.ledger import FileFacts, Ledger
from tests.fakes import FakeClock
from tests.ledger.support import put

if TYPE_CHECKING:
    from tests.audit.second_engine import Said

# 2026-01-31T09:30:00Z
START_S = 1_769_851_800
START_NS = START_S * NS_PER_S
FILE_SIZE = 100
DIRECT = Channel(1, "dm/alice/bob", ChannelType.DIRECT, "alice", (Participant("alice"),))

STATE_OF = {
    "held": DeliveryState.SENT,
    "staged": DeliveryState.STAGED,
    "written": DeliveryState.DELIVERED,
    "read": DeliveryState.RECEIVED,
    "acked": DeliveryState.ACKNOWLEDGED,
    "bounced": DeliveryState.BOUNCED,
    "expired": DeliveryState.EXPIRED,
    "dead": DeliveryState.DEAD,
}


def stored_message(
    number: int,
    relay_id: str | None,
    body: bytes = b"hello",
    *,
    sender: str = "alice",
    to: str = "bob",
    created_ns: int = START_NS,
    created_at: int = START_S,
    **fields: object,
) -> Message:
    """What the engine keeps of a message that came through the relay."""
    metadata: Metadata | None = None
    if relay_id is not None:
        metadata = {"relay_id": relay_id, "to": to, "created_ns": created_ns}
    return Message(
        number,
        MessageType.TEXT,
        sender,
        1,
        body,
        metadata=metadata,
        created_at=created_at,
        **fields,  # type: ignore[arg-type]
    )


def file_of(header: str, body: bytes) -> bytes:
    """A message file of FILE_SIZE bytes, by a header of its own; one that is longer as it is."""
    pad = "-" * (FILE_SIZE - len(f"{header}\nX-PAD: \n\n") - len(body))
    return f"{header}\nX-PAD: {pad}\n\n".encode() + body


class HomeBuilder:
    """A home that is filled message by message; ``write_store`` writes what the engine holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "store").mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger.open(str(root / "ledger.db"))
        self.stored: list[Message] = []
        self.files: dict[str, tuple[str, bytes]] = {}  # message id -> sender, what it wrote
        self._looks = 0

    @property
    def path(self) -> str:
        """The home, as the command line takes it."""
        return str(self.root)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()

    def seen(
        self,
        message_id: str,
        body: bytes = b"hello",
        *,
        sender: str = "alice",
        to: str = "bob",
        at_ns: int = START_NS,
    ) -> None:
        """A row, pending."""
        path = f"agents/{sender}/outbox/{message_id}.msg"
        self.files[message_id] = (sender, file_of(f"TO: {to}", body))
        size = len(self.files[message_id][1])
        facts = FileFacts(
            message_id, sender, path, size, at_ns, 7, sha256_hex(body), "message", to, at_ns
        )
        with self.ledger.transaction():
            self.ledger.add([facts])
            self.ledger.reset([message_id])

    def sent(
        self,
        message_id: str,
        body: bytes = b"hello",
        *,
        sender: str = "alice",
        to: str = "bob",
        recipients: tuple[str, ...] = ("bob",),
        at_ns: int = START_NS,
        written_after_ms: float = 5,
    ) -> None:
        """A row, archived, with its deliveries written; the engine holds the message."""
        self.seen(message_id, body, sender=sender, to=to, at_ns=at_ns)
        self.deliver(message_id, recipients, at_ns=at_ns, written_after_ms=written_after_ms)
        self.finish(message_id, at_ns=at_ns)
        self.keep(message_id, body, sender=sender, to=to, at_ns=at_ns)

    def becomes(self, message_id: str, **fields: object) -> None:
        """The engine's message has these fields from now on."""
        place = [message.relay_id for message in self.stored].index(message_id)
        self.stored[place] = msgspec.structs.replace(self.stored[place], **fields)

    def deliver(
        self,
        message_id: str,
        recipients: tuple[str, ...] = ("bob",),
        *,
        at_ns: int = START_NS,
        written_after_ms: float | None = 5,
    ) -> None:
        """Deliveries, staged, and written unless ``written_after_ms`` is None."""
        with self.ledger.transaction():
            self.ledger.claim([message_id])
            for name in recipients:
                put(self.ledger, message_id, name, "staged", staged_at=at_ns)
                if written_after_ms is not None:
                    at = at_ns + int(written_after_ms * NS_PER_MS)
                    put(self.ledger, message_id, name, "written", written_at=at)

    def finish(self, message_id: str, *, at_ns: int = START_NS) -> None:
        """The row is archived, and so is its file, under the day of ``at_ns``."""
        sender, data = self.files[message_id]
        path = f"archive/{iso_date(at_ns)}/{sender}/{message_id}.msg"
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        with self.ledger.transaction():
            self.ledger.complete([message_id], at_ns)
            self.ledger.archive([(message_id, path)], at_ns)

    def keep(
        self,
        message_id: str | None,
        body: bytes = b"hello",
        *,
        sender: str = "alice",
        to: str = "bob",
        at_ns: int = START_NS,
    ) -> None:
        """The engine holds this message, whatever the ledger says."""
        number = len(self.stored) + 1
        self.stored.append(
            stored_message(number, message_id, body, sender=sender, to=to, created_ns=at_ns)
        )

    def engine_deliveries(self, message: Message) -> dict[str, Delivery]:
        """What the engine knows of a message's deliveries: the same as the ledger."""
        relay_id = message.relay_id or ""
        told = self.ledger.deliveries.rows([relay_id]).get(relay_id, {})
        known = {name: Delivery(STATE_OF[one.state], one.attempt) for name, one in told.items()}
        return known or {"bob": Delivery(DeliveryState.DELIVERED)}

    def write_store(self, name: str = "store/relay.acomm", **fields: object) -> str:
        """Write what the engine holds to a file of the home; returns its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        state = EngineState(
            deliveries={message.id: self.engine_deliveries(message) for message in self.stored}
        )
        store = StoreFile(
            START_S,
            START_S,
            channels=(DIRECT,),
            messages=tuple(self.stored),
            engine_state=state.encode(),
            **fields,  # type: ignore[arg-type]
        )
        store_file.write(str(path), store)
        return str(path)

    def snapshot(
        self, folder: Path, clock: Clock | None = None, grace_s: float = 30
    ) -> HomeSnapshot:
        """What a run over this home freezes, an hour after START unless told otherwise."""
        folder.mkdir()
        clock = clock or FakeClock(START_NS + 3600 * NS_PER_S)
        return snapshot_home(self.path, str(folder), clock, grace_s)

    def inputs(self, spark: object, folder: Path, *when: Any, **more: Any) -> Inputs:
        """The inputs of the jobs of such a run."""
        times = {name: more.pop(name) for name in ("clock", "grace_s") if name in more}
        snapshot = self.snapshot(folder, *when, **times)
        lake = extracted(snapshot, more.pop("lake", None))
        return Inputs(spark, snapshot, *lake, **more)

    def says(self, job: str, clock: Clock | None = None, before: Said | None = None) -> Said:
        """What a job in SQL says of this home, by the second engine."""
        from tests.audit.second_engine import says

        self._looks += 1
        snapshot = self.snapshot(self.root.parent / f"look-{self._looks}", clock)
        return says(job, snapshot, before)
