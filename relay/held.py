"""Held deliveries: an inbox that could not be written is tried again, and holds up nobody else.

The message comes from its original, wherever that lies now, or, for the orchestrator's own,
from the engine. Source: DESIGN, "When the engine cannot take it"; FORMATS 4, state ``held``.
"""

from __future__ import annotations

from relay import delivery, fsio
from relay.clock import NS_PER_S, Clock
from relay.comm.engine import CommStore
from relay.config import Retry
from relay.decide import rebuild
from relay.delivery import DiskFull, render_delivered
from relay.errors import MessageError, UnsafePath
from relay.home import Dirs
from relay.ledger import Delivery, Ledger, Row
from relay.message import DEFAULT_MAX_BODY_BYTES, MessageFile, max_file_bytes, parse
from relay.names import ORCHESTRATOR


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

    def retry_due(self, dirs: Dirs, limit: int) -> None:
        """Try those whose time has come, ``limit`` at most."""
        at = self._ledger.held_until()
        if at is None or at > self._clock.now_ns():
            return
        now = self._clock.now_ns()
        for held in self._ledger.held_due(now, limit):
            row = self._ledger.rows([held.message_id]).get(held.message_id)
            if row is not None:
                self._try(dirs, held, row, now)

    def _try(self, dirs: Dirs, held: Delivery, row: Row, now: int) -> None:
        stored = self._store.by_relay_id(held.message_id)
        if stored is not None and stored.ttl and now > row.discovered_at + stored.ttl * NS_PER_S:
            with self._ledger.transaction():
                self._ledger.expire(held.message_id, held.recipient)
            return
        reason = self._deliver(dirs, held, row)
        with self._ledger.transaction():
            if reason:
                due = now + self._retry.pause_s(held.attempt) * NS_PER_S
                self._ledger.hold([(held.message_id, held.recipient, reason, due)])
            else:
                self._ledger.written([(held.message_id, held.recipient)], now)
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
                held.attempt,
            )
            failed = delivery.stage(dirs, held.message_id, data, [held.recipient])
        except (OSError, UnsafePath, MessageError, DiskFull) as exc:
            return str(exc)
        if failed:
            return failed[held.recipient]
        return delivery.deliver(dirs, held.message_id, held.recipient)

    def _message(self, dirs: Dirs, row: Row) -> MessageFile:
        if row.agent_name == ORCHESTRATOR:
            stored = self._store.by_relay_id(row.message_id)
            if stored is None or stored.metadata is None:
                raise MessageError("the store does not hold it", file=row.file_path)
            return rebuild(stored, stored.metadata)
        *folder, name = row.file_path.split("/")
        limit = max_file_bytes(DEFAULT_MAX_BODY_BYTES)
        data, _ = fsio.read_regular(name, dirs.get(*folder), limit)
        return parse(data, file=name)

    def _channel(self, message_id: str) -> str | None:
        """The CHANNEL header: the channel that it came through, unless that is one between two."""
        stored = self._store.by_relay_id(message_id)
        return None if stored is None else self._store.shown_channel(stored)
