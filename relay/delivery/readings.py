"""Files that left the inboxes: noted as read on evidence, and otherwise delivered again.

    left an inbox   in .read                     read, taken             at once
                    not there                    read, removed           after GRACE_NS
                    its mailbox vanished with it held, the next attempt  when that is back

Who removes a whole mailbox removes its files first, one by one: so nothing counts as removed
before it is known that the mailbox still stands. What is found is the store's event at once, and
the ledger's with ``note``, once the journal has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

from relay.base.clock import NS_PER_S
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.names import message_id_of
from relay.delivery import file_ops, mailbox
from relay.delivery.context import Context
from relay.delivery.mailbox import FileFate
from relay.ledger import ReadDelivery
from relay.ledger.deliveries import REMOVED, TAKEN

GRACE_NS = NS_PER_S  # between a file's removal and its mailbox's
VANISHED = "the mailbox vanished with it, unread"
_NOT_KNOWN = 1 << 31  # an attempt that none is behind


class ReadDetector:
    """Owned by the loop."""

    def __init__(self, context: Context) -> None:
        self._home = context.home
        self._ledger = context.ledger
        self._store = context.store
        self._events = context.events
        self._tally = context.tally
        self._clock = context.clock
        self._log = context.log
        self._mailboxes = self._ledger.agents.mailboxes()
        self._missing: dict[tuple[str, str], int] = {}  # (agent, id) -> judged then (monotonic)
        self._read: dict[tuple[str, str], ReadDelivery] = {}  # not yet in the ledger,
        self._vanished: dict[tuple[str, str], int] = {}  # nor these: their next attempt,
        self._seen: dict[str, str] = {}  # nor the mailboxes that there are now

    def on_removed(self, files: Iterable[tuple[str, str]]) -> None:
        """The kernel saw these leave: (agent, file name)."""
        with self._home.dirs() as dirs:
            for agent, name in files:
                message_id = message_id_of(name)
                if message_id is not None:
                    self._check(dirs, agent, message_id)

    def _check(self, dirs: Dirs, agent: str, message_id: str) -> None:
        with suppress(OSError, UnsafePath):  # not now: judged with what is missing
            if mailbox.was_taken(dirs, agent, message_id):
                self._record_read(agent, message_id, TAKEN)
                return
        due_ns = self._clock.monotonic_ns() + GRACE_NS
        self._missing.setdefault((agent, message_id), due_ns)

    def scan(self, dirs: Dirs, agent: str) -> set[str]:
        """Compare an inbox with what should stand there; ids of what else is in it.

        Errors: OSError, UnsafePath.
        """
        known, seen = self._mailboxes.get(agent), mailbox.identity(dirs, agent)
        missing, others = self._ledger.deliveries.unread(agent), file_ops.inbox_files(dirs, agent)
        for message_id in missing.keys() & others:
            del missing[message_id]
            others.remove(message_id)
        if known in (None, seen):
            for message_id in missing:
                self._check(dirs, agent, message_id)
        else:
            self._classify(dirs, agent, missing)
        if known != seen:
            self._mailboxes[agent] = self._seen[agent] = seen
        return others

    def return_unread(self, agent: str) -> None:
        """Nobody is to read what vanished with the mailbox of this agent, who is away for good."""
        if missing := self._ledger.deliveries.unread(agent):
            self._defer_unread(agent, missing)

    def due_ns(self) -> int | None:
        """When something that is missing is judged (monotonic)."""
        return min(self._missing.values(), default=None)

    def check_missing(self) -> None:
        """Judge what has been missing for long enough."""
        now = self._clock.monotonic_ns()
        due: dict[str, list[str]] = defaultdict(list)
        for (agent, message_id), at in list(self._missing.items()):
            if at <= now:
                due[agent].append(message_id)
                del self._missing[agent, message_id]
        for agent, ids in due.items():
            unread = self._ledger.deliveries.unread_of(agent, ids)
            # a scan finds again what is not known now, when its mailbox is back
            with suppress(OSError, UnsafePath), self._home.dirs() as dirs:
                if self._mailboxes.get(agent) in (None, mailbox.identity(dirs, agent)):
                    self._classify(dirs, agent, {one: unread.get(one, 0) for one in ids})
                else:  # put in the other's place unseen: all that stood there went with it
                    self.scan(dirs, agent)

    def _classify(self, dirs: Dirs, agent: str, missing: Mapping[str, int]) -> None:
        known = self._mailboxes.get(agent)
        found = mailbox.file_fates(dirs, agent, known, missing)
        born_ns = mailbox.born_ns(known)
        older = [
            one
            for one, trace in found.items()
            if trace is FileFate.REMOVED and 0 < missing[one] < born_ns
        ]
        rows = self._ledger.deliveries.rows(older) if older else {}
        for message_id, trace in found.items():
            row = rows.get(message_id, {}).get(agent)
            if row is not None and row.state == "dead":
                continue  # it vanished with the inbox before, or stood in a copy: nobody knows
            if trace in (FileFate.TAKEN, FileFate.REMOVED):
                how = TAKEN if trace is FileFate.TAKEN else REMOVED
                self._record_read(agent, message_id, how)
        self._defer_unread(
            agent, [one for one, trace in found.items() if trace is FileFate.VANISHED]
        )

    def _record_read(self, agent: str, message_id: str, how: str) -> None:
        self._missing.pop((agent, message_id), None)
        if (agent, message_id) in self._read:
            return
        stored = self._store.find_by_relay_id(message_id)
        known = self._store.state.deliveries.get(stored.id, {}) if stored else {}
        attempt = known[agent].attempt if agent in known else _NOT_KNOWN
        if stored is not None:
            self._store.receive(stored.id, agent, how)
        self._read[agent, message_id] = ReadDelivery(message_id, agent, attempt, how)

    def _defer_unread(self, agent: str, ids: Iterable[str]) -> None:
        """Hold what nobody read, its next attempt due now, like what could not be written.

        What was given up, or answered, stays that.
        """
        rows = self._ledger.deliveries.rows(ids)
        for message_id, deliveries in rows.items():
            self._missing.pop((agent, message_id), None)
            row = deliveries.get(agent)
            if row is None or row.state != "written" or (agent, message_id) in self._vanished:
                continue
            attempt = row.attempt + 1
            stored = self._store.find_by_relay_id(message_id)
            if stored is not None:
                known = self._store.state.deliveries.get(stored.id, {}).get(agent)
                attempt = max(attempt, known.attempt + 1 if known else 0)
                self._store.postpone(stored.id, agent, attempt)
            self._vanished[agent, message_id] = attempt

    def flush(self) -> list[ReadDelivery]:
        """Tell the ledger, once the journal has it; what was read."""
        if not (self._read or self._vanished or self._seen):
            return []
        self._events.commit()
        read, self._read = [*self._read.values()], {}
        vanished, self._vanished = self._vanished, {}
        seen, self._seen = self._seen, {}
        self._tally.read += len(read)
        now = self._clock.now_ns()
        with self._ledger.transaction():
            self._ledger.deliveries.mark_read(read, now)
            again = ((one, agent, attempt) for (agent, one), attempt in vanished.items())
            self._ledger.deliveries.redeliver(again, VANISHED, now)
            self._ledger.agents.set_mailboxes(seen.items())
            self._ledger.agents.mark_seen({one.recipient for one in read}, now)
            self._ledger.set_position(self._events.journal.durable, now)
        for agent, number in Counter(agent for agent, _ in vanished).items():
            self._log(
                f"{mailbox.describe_vanished(agent, number)}: "
                "delivered again, or back to their senders where it is retired",
                action="mailbox_vanished",
                level="warning",
                agent=agent,
                messages=number,
            )
        return read
