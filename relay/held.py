"""Held deliveries: an inbox that could not be written is tried again, and holds up nobody else.

The message comes from its original, wherever that lies now, or, for the orchestrator's own,
from the engine. Source: DESIGN, "When the engine cannot take it"; FORMATS 4, state ``held``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import NamedTuple

from relay import delivery, fsio
from relay.checksums import sha256_hex
from relay.clock import NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.comm.model import DeliveryState
from relay.config import Retry
from relay.decide import rebuild
from relay.delivery import DiskFull, render_delivered
from relay.errors import MessageError, UnsafePath
from relay.home import Dirs
from relay.ledger import Delivery, Ledger, Row
from relay.message import DEFAULT_MAX_BODY_BYTES, MessageFile, max_file_bytes, parse
from relay.names import ORCHESTRATOR


class Ended(NamedTuple):
    """A held delivery that is over before it was made."""

    row: Row
    recipient: str
    expired: bool  # else it bounces
    reason: str


class HeldMail:
    """Tries held deliveries when they are due. Owned by the loop."""

    def __init__(self, ledger: Ledger, store: CommStore, retry: Retry, clock: Clock) -> None:
        self._ledger = ledger
        self._store = store
        self._retry = retry
        self._clock = clock

    def due_ns(self) -> int | None:
        """When the next one is due (monotonic)."""
        at = self._ledger.held_until()
        if at is None:
            return None
        return self._clock.monotonic_ns() + max(0, at - self._clock.now_ns())

    def retry_due(self, dirs: Dirs, agents: Set[str], limit: int) -> list[Ended]:
        """Try those whose time has come, ``limit`` at most; those that are over, for ``end``."""
        now = self._clock.now_ns()
        at = self._ledger.held_until()
        if at is None or at > now:
            return []
        ended: list[Ended] = []
        for held in self._ledger.held_due(now, limit):
            row = self._ledger.rows([held.message_id]).get(held.message_id)
            if (
                row is None
            ):  # somebody removed it by hand: due for ever, it would never let us sleep
                with self._ledger.transaction():
                    self._ledger.bounce(held.message_id, held.recipient, "its message is gone")
                continue
            stored = self._store.by_relay_id(held.message_id)
            if stored and stored.ttl and now > row.discovered_at + stored.ttl * NS_PER_S:
                text = f"its TTL of {stored.ttl} s passed before the inbox could be written"
                ended.append(Ended(row, held.recipient, True, text))
            elif held.recipient not in agents:
                ended.append(Ended(row, held.recipient, False, "no longer an agent"))
            else:
                self._try(dirs, held, row, now)
        return ended

    def end(self, ended: list[Ended]) -> None:
        """Give these up; their senders have been told."""
        with self._ledger.transaction():
            for row, recipient, expired, text in ended:
                if expired:
                    self._ledger.expire(row.message_id, recipient)
                else:
                    self._ledger.bounce(row.message_id, recipient, text)
        for row, recipient, expired, _ in ended:
            stored = self._store.by_relay_id(row.message_id)
            if stored is not None:
                state = DeliveryState.EXPIRED if expired else DeliveryState.BOUNCED
                self._store.move_deliveries(stored.id, [recipient], state)

    def _try(self, dirs: Dirs, held: Delivery, row: Row, now: int) -> None:
        reason = self._deliver(dirs, held, row)
        with self._ledger.transaction():
            if reason:
                due = now + self._retry.pause_s(held.attempt) * NS_PER_S
                self._ledger.hold([(held.message_id, held.recipient, reason, due)])
            else:
                self._ledger.written([(held.message_id, held.recipient)], now)
        stored = self._store.by_relay_id(held.message_id)
        if not reason and stored is not None:
            self._store.deliver(stored.id, [held.recipient])

    def _deliver(self, dirs: Dirs, held: Delivery, row: Row) -> str:
        """Why it did not work, or nothing."""
        try:
            message = self._message(dirs, row)
            data = render_delivered(
                message,
                held.message_id,
                row.agent_name,
                row.discovered_at,
                row.checksum or "",
                self._channel(held.message_id),
            )
            failed = delivery.stage(dirs, held.message_id, data, [held.recipient])
        except (OSError, UnsafePath, MessageError, DiskFull) as exc:
            return str(exc)
        if failed:
            return failed[held.recipient]
        return delivery.deliver(dirs, held.message_id, held.recipient)

    def _message(self, dirs: Dirs, row: Row) -> MessageFile:
        """The original where it is still what was accepted, else what the engine keeps of it."""
        if row.agent_name != ORCHESTRATOR:
            *folder, name = row.file_path.split("/")
            with contextlib.suppress(OSError, UnsafePath, MessageError):
                limit = max_file_bytes(DEFAULT_MAX_BODY_BYTES)
                data, _ = fsio.read_regular(name, dirs.get(*folder), limit)
                message = parse(data, file=name)
                if sha256_hex(message.content) == row.checksum:
                    return message
        stored = self._store.by_relay_id(row.message_id)
        if stored is None:
            raise MessageError("neither file nor store holds it", file=row.file_path)
        return rebuild(stored)

    def _channel(self, message_id: str) -> str | None:
        """The CHANNEL header: the channel that it came through, unless that is one between two."""
        stored = self._store.by_relay_id(message_id)
        return None if stored is None else self._store.shown_channel(stored)
