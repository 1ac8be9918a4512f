"""Recording what was executed: the ledger's transaction of a batch, and the archive.

Originals of completed work are moved from their outboxes to the archive; their paths go into the
transaction of the next batch, or into one of their own if there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import IncidentCounter
from relay.base.names import ORCHESTRATOR
from relay.delivery import file_ops
from relay.delivery.intake_queue import FileKey
from relay.delivery.values import (
    NO_EFFECTS,
    OUTBOX,
    Applied,
    Inbound,
    ObligationState,
    OutboxFile,
    Reminder,
)
from relay.ledger import HeldDelivery, Ledger, WrittenDelivery


class LedgerWriter:
    """Records executed plans in the ledger. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        position: Callable[[], int],
        archiver: Archiver,
        first_pause_s: int,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._position = position  # of the journal: everything before is durable
        self._archiver = archiver
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._counted = IncidentCounter(clock)

    def record(self, batch: list[Applied], written: list[WrittenDelivery]) -> None:
        """Record a batch in one transaction, and have its originals archived."""
        ledger, now = self._ledger, self._clock.now_ns()
        own = [file.system for one in batch for file in one.files if file.system is not None]
        commands = [one.plan.message_id for one in batch if one.plan.command is not None]
        files = [(one, one.plan.inbound) for one in batch if one.plan.inbound is not None]
        with ledger.transaction():
            self._archiver.record()
            ledger.add(own, system=True)
            ledger.deliveries.mark_written(written)
            ledger.deliveries.add_undelivered(
                row for one in batch for row in _undelivered_rows(one, now)
            )
            ledger.deliveries.hold(self._held(batch, now))
            self._record_refusals([pair for pair in files if pair[0].plan.refusal], now)
            for one in batch:
                self._record_changes(one, now)
            done = [inbound.message_id for one, inbound in files if not one.plan.refusal]
            ledger.complete(done + [facts.message_id for facts in own], now)
            # after delivered, for the order in audit_log
            ledger.deliveries.mark_read([(one, ORCHESTRATOR, 1) for one in commands], now)
            ledger.archive_system([facts.message_id for facts in own])
            ledger.agents.mark_seen({inbound.file.agent for _, inbound in files}, now)
            ledger.set_position(self._position(), now)
        self._archiver.add((inbound, bool(one.plan.refusal)) for one, inbound in files)

    def record_counts(self, *, include_recent: bool = False) -> None:
        """Record how many repeated refusals each recorded incident represents."""
        over = self._counted.take_over(all_of_them=include_recent)
        if over:
            with self._ledger.transaction():
                self._ledger.agents.add_incidents(over, self._clock.now_ns())

    def _held(self, batch: list[Applied], now: int) -> list[HeldDelivery]:
        """Deliveries whose inbox could not be written, to be tried again."""
        return [
            HeldDelivery(
                file.message_id,
                recipient,
                file.attempt or 1,
                one.undelivered[file.message_id, recipient],
                now + (file.pause_s or self._first_pause_s) * NS_PER_S,
            )
            for one in batch
            if one.undelivered
            for file in one.files
            for recipient in file.recipients
            if (file.message_id, recipient) in one.undelivered
        ]

    def _record_refusals(self, refused: list[tuple[Applied, Inbound]], now: int) -> None:
        known = [
            (inbound.message_id, one.plan.refusal) for one, inbound in refused if inbound.has_row
        ]
        if known:
            self._ledger.fail(known, now)
        for one, inbound in refused:
            if not inbound.has_row:
                file, reason, answer_id = inbound.file, one.plan.refusal, one.system_ids[0]
                self._ledger.add_rejection(
                    file.agent, file.file_name, file.inode, file.mtime_ns, reason, answer_id, now
                )

    def _record_changes(self, one: Applied, now: int) -> None:
        """Record the effects of answers, commands and ended deliveries on other rows."""
        plan, deliveries = one.plan, self._ledger.deliveries
        if one.effects is not NO_EFFECTS:
            self._record_effects(one, now)
        inbound = plan.inbound
        if inbound is not None and inbound.is_valid and inbound.message is not None:
            references = inbound.message.attachments
            if references:
                self._ledger.agents.add_references(
                    (reference, inbound.message_id, now) for reference in references
                )
        answer = plan.answer
        if answer is not None:
            answered, sender = answer.original.relay_id or "", plan.subject.agent
            said = (plan.message_id or None, answer.text or None)
            deliveries.acknowledge(answered, sender, answer.status, now, *said)
            if one.obligation is not None:
                deliveries.set_obligation(answered, sender, *one.obligation)
        for reminder in plan.changes.reminders:
            self._record_reminder(reminder)
        for ended in plan.changes.ended:
            state = ended.state.label.lower()
            deliveries.give_up(ended.message_id, ended.recipient, state, ended.reason)

    def _record_effects(self, one: Applied, now: int) -> None:
        effects, agents, processes = one.effects, self._ledger.agents, self._ledger.processes
        if effects.requests or effects.closed_intents or effects.process is not None:
            processes.add_operations([request.intent for request in effects.requests], now)
            processes.close_operations(effects.closed_intents, now)
            processes.put([effects.process] if effects.process is not None else [])
        if effects.incidents:
            fresh = self._counted.fresh(list(effects.incidents))
            agents.add_incidents(fresh, now, again=effects.may_repeat)
        if effects.key is not None:
            agents.set_public_keys([effects.key], now)
        if effects.status_note is not None:
            agents.set_note(one.plan.subject.agent, effects.status_note, now)
        if effects.status_change is not None:
            agents.set_status(*effects.status_change, now)

    def _record_reminder(self, one: Reminder) -> None:
        state = ObligationState("given_up")
        if one.due_ms:
            state = ObligationState("open", one.due_ms * NS_PER_MS)
        self._ledger.deliveries.set_obligation(one.message_id, one.recipient, *state, one.reminders)


def _undelivered_rows(
    one: Applied, now_ns: int
) -> Iterator[tuple[str, str, str, int, str | None, int | None]]:
    """Rows for the ledger's ``stage``: every recipient that was not reached now."""
    for (message_id, recipient), reason in one.undelivered.items():
        yield message_id, recipient, "held", now_ns, reason, None
    for recipient, reason in one.plan.changes.bounced.items():
        yield one.plan.message_id, recipient, "bounced", now_ns, reason, None
    for deferral in one.deferred:
        message_id, recipient, reason, due_at = deferral
        yield message_id, recipient, "held", now_ns, reason, due_at


class Archiver:
    """Moves originals of completed work to the archive. Owned by the loop."""

    def __init__(self, ledger: Ledger, log: Callable[..., object]) -> None:
        self._ledger = ledger
        self._log = log
        self._in_progress: set[FileKey] = set()
        self._waiting: deque[tuple[Inbound, bool]] = deque()  # with: it was refused
        self._archived: list[tuple[str, str | None]] = []  # moved, not yet noted
        self._refused: list[tuple[str, str]] = []

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be archived or recorded."""
        return not (self._waiting or self._archived or self._refused)

    def __contains__(self, key: object) -> bool:
        """True for the key of a file in progress, which is not to be read again."""
        return key in self._in_progress

    def add(self, files: Iterable[tuple[Inbound, bool]]) -> None:
        """Queue originals that are delivered and recorded; with each if it was refused."""
        for inbound, is_refused in files:
            self._in_progress.add(inbound.file.key)
            self._waiting.append((inbound, is_refused))

    def archive(self, dirs: Dirs, limit: int) -> list[OutboxFile]:
        """Archive up to ``limit`` originals.

        Returns files that were replaced by another file meanwhile: they are to be read again.
        """
        replaced: list[OutboxFile] = []
        for _ in range(min(limit, len(self._waiting))):
            inbound, is_refused = self._waiting.popleft()
            moved, path = self._archive(dirs, inbound, is_refused, replaced)
            if moved and not is_refused:
                self._archived.append((inbound.message_id, path))
            elif path and inbound.has_row:
                self._refused.append((inbound.message_id, path))
            self._in_progress.discard(inbound.file.key)
        return replaced

    def flush(self) -> None:
        """Record the paths of archived originals if no batch does."""
        if self._archived or self._refused:
            with self._ledger.transaction():
                self.record()

    def record(self) -> None:
        """Record the paths of archived originals, within the caller's transaction."""
        if self._archived:
            self._ledger.archive(self._archived)
        if self._refused:
            self._ledger.set_path(self._refused)
        self._archived, self._refused = [], []

    def _archive(
        self, dirs: Dirs, inbound: Inbound, is_refused: bool, replaced: list[OutboxFile]
    ) -> tuple[bool, str | None]:
        """(is it out of the outbox?, its path in the archive: None if the file is gone)."""
        file = inbound.file
        try:
            if file_ops.is_same_file(dirs, file):
                return True, file_ops.archive(
                    dirs,
                    file.agent,
                    file.file_name,
                    inbound.archive_day_ns,
                    file_ops.REJECTED if is_refused else "",
                    redacted=inbound.redacted,
                    place=file.place,
                )
            if file.place == OUTBOX:
                replaced.append(file)
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {file.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=inbound.message_id,
            )
            return False, None
        return True, None
