"""Reads: a file that left an inbox is read only on evidence, and otherwise delivered again.

    in .read                           read, taken                 at once
    gone, in the same inbox            read, removed               after GRACE_NS
    gone with its mailbox (vanished)   held, the next attempt      when the mailbox is back

Removing a whole mailbox removes its files first, one by one: so nothing counts as removed before
the mailbox is known to be still there. A read is a store event at once, and goes into the ledger
with ``flush``, once the journal has it.

A replaced inbox may have the inode of the previous one, so its creation time identifies it where
the file system keeps that. Removing a file sets the mtime of the inbox: an inbox with an older one
was restored from a copy. See docs/states.md.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum, auto

from relay.acomm.model import DeliveryState
from relay.base import disk, fsio
from relay.base.clock import NS_PER_MS, NS_PER_S
from relay.base.errors import UnsafePath
from relay.base.home import PENDING, READ, Dirs
from relay.base.metrics import Metrics
from relay.base.names import MSG_SUFFIX, message_id_of
from relay.base.outcomes import REMOVED
from relay.delivery import file_ops
from relay.delivery.record import LedgerWriter
from relay.delivery.values import Part, Resources
from relay.engine import events
from relay.ledger import TAKEN
from relay.ledger.deliveries import DeliveryFacts, held_delivery

GRACE_NS = NS_PER_S  # between a file's removal and its mailbox's
VANISHED = "the mailbox vanished with it, unread"


class ReadDetector(Part):
    """Detects reads."""

    def __init__(self, given: Resources, ledger_writer: LedgerWriter, metrics: Metrics) -> None:
        super().__init__(given)
        self._ledger_writer = ledger_writer
        self._metrics = metrics
        self._mailboxes = self._ledger.agents.mailboxes()
        self._missing: dict[tuple[str, str], int] = {}  # (agent, id) -> judged then (monotonic)
        self._read: dict[tuple[str, str], None] = {}  # not yet in the ledger,
        self._vanished: dict[tuple[str, str], int] = {}  # nor these: when they are due,
        self._left: list[DeliveryFacts] = []  # those of messages that have left the store,
        self._seen: dict[str, str] = {}  # nor the mailboxes that there are now
        self._taken_back: set[tuple[str, str]] = set()  # by the relay: nobody read them

    def on_removed(self, files: Iterable[tuple[str, str]]) -> None:
        """Process files that the watcher saw leave: (agent, file name)."""
        with self._home.dirs() as dirs:
            for agent, name in files:
                message_id = message_id_of(name)
                if message_id is None:
                    continue
                if (agent, message_id) in self._taken_back:
                    self._taken_back.remove((agent, message_id))
                else:
                    self._check(dirs, agent, message_id)

    def expect_removal(self, agent: str, message_id: str) -> None:
        """Expect that a file leaves this inbox unread: the relay takes it back."""
        self._taken_back.add((agent, message_id))

    def _check(self, dirs: Dirs, agent: str, message_id: str) -> None:
        with suppress(OSError, UnsafePath):  # not now: judged with what is missing
            if was_taken(dirs, agent, message_id):
                self._record_read(agent, message_id, TAKEN)
                return
        due_ns = self._clock.monotonic_ns() + GRACE_NS
        self._missing.setdefault((agent, message_id), due_ns)

    def scan(self, dirs: Dirs, agent: str) -> set[str]:
        """Compare an inbox with its deliveries; returns the ids of other messages in it.

        Errors: OSError, UnsafePath.
        """
        known, seen = self._mailboxes.get(agent), mailbox_identity(dirs, agent)
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
        """Defer the unread messages of a retired agent whose mailbox vanished; they then bounce."""
        if missing := self._ledger.deliveries.unread(agent):
            self._defer_unread(agent, missing)

    def due_ns(self) -> int | None:
        """Time at which a missing file is classified (monotonic)."""
        return min(self._missing.values(), default=None)

    def check_missing(self) -> None:
        """Classify files that have been missing for long enough."""
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
                if self._mailboxes.get(agent) in (None, mailbox_identity(dirs, agent)):
                    self._classify(
                        dirs, agent, {message_id: unread.get(message_id, 0) for message_id in ids}
                    )
                else:  # put in the other's place unseen: all that stood there went with it
                    self.scan(dirs, agent)

    def _classify(self, dirs: Dirs, agent: str, missing: Mapping[str, int]) -> None:
        known = self._mailboxes.get(agent)
        found = file_fates(dirs, agent, known, missing, self._clock.now_ns())
        made_at = inbox_created_ns(known)
        older = [
            message_id
            for message_id, fate in found.items()
            if fate is FileFate.REMOVED and 0 < missing[message_id] < made_at
        ]
        rows = self._ledger.deliveries.rows(older) if older else {}
        for message_id, fate in found.items():
            row = rows.get(message_id, {}).get(agent)
            if row is not None and row.state == "dead":
                continue  # vanished before, or restored from a copy: unknown
            if fate in (FileFate.TAKEN, FileFate.REMOVED):
                how = TAKEN if fate is FileFate.TAKEN else REMOVED
                self._record_read(agent, message_id, how)
        self._defer_unread(
            agent, [message_id for message_id, fate in found.items() if fate is FileFate.VANISHED]
        )

    def _record_read(self, agent: str, message_id: str, how: str) -> None:
        self._missing.pop((agent, message_id), None)
        if (agent, message_id) in self._read:
            return
        stored = self._store.messages.find_by_relay_id(message_id)
        known = self._store.deliveries.of(stored.id) if stored else {}
        now = self._clock.now_ns()
        if stored is not None and agent in known:
            self._store.deliveries.receive(stored.id, agent, how, now)
        elif self._is_unread_row(agent, message_id):
            at, state = now // NS_PER_S, DeliveryState.SENT
            self._store.apply(events.LateRead(0, agent, state, how, at, message_id), now)
        self._read[agent, message_id] = None

    def _is_unread_row(self, agent: str, message_id: str) -> bool:
        """True for a delivery in the ledger: an agent may put any file into its inbox."""
        row = self._ledger.deliveries.rows([message_id]).get(message_id, {}).get(agent)
        return row is not None and row.read_how is None

    def _defer_unread(self, agent: str, ids: Iterable[str]) -> None:
        """Defer unread deliveries, their next attempt due now.

        Deliveries given up or answered stay as they are.
        """
        rows, now = self._ledger.deliveries.rows(ids), self._clock.now_ns()
        for message_id, deliveries in rows.items():
            self._missing.pop((agent, message_id), None)
            row = deliveries.get(agent)
            if row is None or row.state != "written" or (agent, message_id) in self._vanished:
                continue
            attempt = row.attempt + 1
            stored = self._store.messages.find_by_relay_id(message_id)
            is_known = False
            if stored is not None:
                known = self._store.deliveries.of(stored.id).get(agent)
                attempt = max(attempt, known.attempt + 1 if known else 0)
                is_known = self._store.deliveries.postpone(stored.id, agent, attempt, now)
            if not is_known:  # no event speaks of it
                self._left.append(DeliveryFacts(message_id, agent, "held", attempt, now))
            self._vanished[agent, message_id] = now

    def flush(self) -> list[tuple[str, str]]:
        """Record reads in the ledger, once they are written to the journal.

        Returns (agent, message id) of each.
        """
        if not (self._read or self._vanished or self._seen):
            return []
        self._events.write()
        read, self._read = [*self._read], {}
        vanished, self._vanished = self._vanished, {}
        left, self._left = self._left, []
        seen, self._seen = self._seen, {}
        self._metrics.read += len(read)

        def write() -> None:
            agents, deliveries = self._ledger.agents, self._ledger.deliveries
            if vanished:
                # one may be answered now
                rows = deliveries.rows({facts.message_id for facts in left})
                known = [
                    (facts, rows.get(facts.message_id, {}).get(facts.recipient)) for facts in left
                ]
                deliveries.upsert([facts for facts, row in known if row and row.state == "written"])
                deliveries.hold(
                    held_delivery(message_id, agent, VANISHED, at)
                    for (agent, message_id), at in vanished.items()
                )
            agents.set_mailboxes(seen.items())
            agents.mark_seen({agent for agent, _ in read}, self._clock.now_ns())

        self._ledger_writer.write(write)
        for agent, number in Counter(agent for agent, _ in vanished).items():
            self._log(
                f"{describe_vanished(agent, number)}: "
                "delivered again, or back to their senders where it is retired",
                action="mailbox_vanished",
                level="warning",
                agent=agent,
                messages=number,
            )
        return read


# The kernel sets times by a clock that it moves on every few milliseconds. Some file systems keep
# whole seconds, or every other one.
COARSE_NS = 50 * NS_PER_MS
COARSEST_NS = 2 * NS_PER_S


class FileFate(Enum):
    """The fate of a file that was delivered into an inbox."""

    PRESENT = auto()  # it is still there
    TAKEN = auto()  # it is in .read
    REMOVED = auto()  # it was removed
    VANISHED = auto()  # its inbox went with it


def mailbox_identity(dirs: Dirs, agent: str) -> str:
    """An identity unique to this inbox, even among its replacements. Errors: as ``file_fates``."""
    return _identity(dirs.get("agents", agent, "inbox"))


def inbox_created_ns(known: str | None) -> int:
    """Creation time of an inbox by its identity (Unix ns); 0: unknown."""
    return int(known.partition(":")[2]) if known else 0


def was_taken(dirs: Dirs, agent: str, message_id: str) -> bool:
    """True if the file is in ``.read``. Errors: OSError, UnsafePath."""
    try:
        return fsio.exists(message_id + MSG_SUFFIX, dirs.get("agents", agent, "inbox", READ))
    except FileNotFoundError:
        return False


def file_fates(
    dirs: Dirs, agent: str, known: str | None, missing: Mapping[str, int], now_ns: int
) -> dict[str, FileFate]:
    """The fate of each of ``missing``: message id -> when it was written (Unix ns).

    ``known``: the identity of the inbox that was delivered to; None: unknown.
    Errors: FileNotFoundError without an inbox; OSError, UnsafePath if it cannot be read, which
    proves nothing.
    """
    inbox = dirs.get("agents", agent, "inbox")
    is_other = known is not None and _identity(inbox) != known
    changed_at = os.fstat(inbox).st_mtime_ns
    changed_at += COARSE_NS if changed_at % NS_PER_S else COARSEST_NS
    is_whole = fsio.exists(PENDING, inbox) or fsio.exists(READ, inbox)
    found: dict[str, FileFate] = {}
    for message_id, written_at in missing.items():
        if was_taken(dirs, agent, message_id):
            found[message_id] = FileFate.TAKEN
        elif fsio.exists(message_id + MSG_SUFFIX, inbox):
            found[message_id] = FileFate.PRESENT
        elif is_other or changed_at < written_at <= now_ns:  # else the clock was set back
            found[message_id] = FileFate.VANISHED
        elif is_whole:  # else the whole mailbox may be being removed
            found[message_id] = FileFate.REMOVED
    return found


def _identity(fd: int) -> str:
    """Inode and creation time (Unix ns; 0 if the file system does not keep it)."""
    status = os.fstat(fd)
    if sys.platform == "darwin":
        return f"{status.st_ino}:{int(status.st_birthtime * NS_PER_S)}"
    return f"{status.st_ino}:{disk.created_ns(fd)}"


def describe_vanished(agent: str, number: int) -> str:
    """The text about unread messages lost with a mailbox."""
    what = "message" if number == 1 else "messages"
    return f"{number} unread {what} vanished with the mailbox of {agent}"
