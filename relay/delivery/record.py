"""Recording what was executed: the archive, and the ledger's transaction of a batch.

The originals of plain messages are moved from their outboxes to the archive, then one transaction
records the batch. If killed in between, recovery finds a claimed row whose file is in the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident, IncidentCounter, Refusal
from relay.base.names import ORCHESTRATOR
from relay.delivery import file_ops
from relay.delivery.values import (
    NO_EFFECTS,
    OUTBOX,
    Applied,
    Inbound,
    ObligationState,
    OutboxFile,
    Plan,
    Reminder,
    Row,
)
from relay.ledger.deliveries import HeldDelivery, ReadDelivery, WrittenDelivery
from relay.ledger.ledger import Ledger


class LedgerWriter:
    """Archives the originals of executed plans, and records the plans. Owned by the loop."""

    def __init__(
        self,
        ledger: Ledger,
        position: Callable[[], int],
        first_pause_s: int,
        clock: Clock,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._position = position  # of the journal: everything before is durable
        self._first_pause_s = first_pause_s
        self._clock = clock
        self._log = log
        self._counted = IncidentCounter(clock)

    def record(
        self, dirs: Dirs, batch: list[Applied], written: list[WrittenDelivery], staged_at: int
    ) -> list[OutboxFile]:
        """Record a batch that was staged at a time (Unix ns), and archive its originals.

        Returns files that were put in the place of others meanwhile: they are to be read.
        """
        replaced: list[OutboxFile] = []
        plain: list[Applied] = []
        rest: list[Applied] = []
        for one in batch:
            if one.plan.inbound is not None:
                (plain if _is_plain(one.plan) else rest).append(one)
        paths = self._archive_all(dirs, plain, replaced)
        with self._ledger.transaction():
            self._record(batch, written, paths, staged_at)
        if rest:
            self._record_paths(rest, self._archive_all(dirs, rest, replaced))
        return replaced

    def fail(self, message_id: str, refusal: Refusal) -> None:
        """Mark a row as failed whose file is still in the outbox: it is refused when it is read."""
        with self._ledger.transaction():
            self._ledger.fail([(message_id, refusal)], self._clock.now_ns())

    def _record(
        self,
        batch: list[Applied],
        written: list[WrittenDelivery],
        paths: dict[str, str | None],
        staged_at: int,
    ) -> None:
        """Record a batch; ``paths``: the originals that are archived already."""
        ledger, deliveries, now = self._ledger, self._ledger.deliveries, self._clock.now_ns()
        own = [file.system for one in batch for file in one.files if file.system is not None]
        files = [(one, one.plan.inbound) for one in batch if one.plan.inbound is not None]
        done = [inbound.file.message_id for one, inbound in files if not one.plan.refusal]
        undelivered = [row for one in batch for row in _undelivered_rows(one, staged_at)]
        if own:
            ledger.add(own)
        if written:
            deliveries.mark_written(written)
        if undelivered:
            deliveries.add_undelivered(undelivered)
            deliveries.hold(self._held(batch, now))
        self._record_refusals([pair for pair in files if pair[0].plan.refusal], staged_at)
        for one in batch:
            self._record_changes(one, now)
        if len(paths) < len(done):
            ledger.complete([one for one in done if one not in paths], now)
        if own or paths:
            ledger.archive([*paths.items(), *((facts.message_id, None) for facts in own)], now)
        # after the end of their messages, for the order in audit_log
        commands = [one for one in written if one.recipient == ORCHESTRATOR]
        if commands:
            deliveries.mark_read(
                [ReadDelivery(one.message_id, ORCHESTRATOR, 1, one.written_at) for one in commands]
            )
        if files:
            ledger.agents.mark_seen({inbound.file.agent for _, inbound in files}, now)
        ledger.set_position(self._position(), now)

    def _record_paths(self, batch: list[Applied], paths: dict[str, str | None]) -> None:
        """Record originals that were archived after their batch was recorded."""
        refused = {one.plan.message_id for one in batch if one.plan.refusal}
        with self._ledger.transaction():
            self._ledger.archive(
                [pair for pair in paths.items() if pair[0] not in refused], self._clock.now_ns()
            )
            self._ledger.set_path(
                [(one, path) for one, path in paths.items() if path and one in refused]
            )

    def _archive_all(
        self, dirs: Dirs, batch: list[Applied], replaced: list[OutboxFile]
    ) -> dict[str, str | None]:
        """Move originals to the archive; the new paths of those with a row, None if it is gone."""
        paths: dict[str, str | None] = {}
        for one in batch:
            inbound = one.plan.inbound
            if inbound is None:
                continue
            try:
                path = self._archive(dirs, inbound, bool(one.plan.refusal), replaced)
            except (OSError, UnsafePath) as exc:
                self._log(
                    f"Could not archive {inbound.file.path}, the next scan tries again: {exc}",
                    action="archive_failed",
                    level="warning",
                    message_id=inbound.file.message_id,
                )
                continue
            if inbound.row is not Row.NONE:
                paths[inbound.file.message_id] = path
        return paths

    def _archive(
        self, dirs: Dirs, inbound: Inbound, is_refused: bool, replaced: list[OutboxFile]
    ) -> str | None:
        file = inbound.file
        if file_ops.is_same_file(dirs, file):
            return file_ops.archive(
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
        return None

    def record_incident(self, incident: Incident) -> None:
        """Record an incident that no message causes, or count it if it is like the last one."""
        fresh = self._counted.fresh([incident])
        if fresh:
            with self._ledger.transaction():
                self._ledger.agents.add_incidents(fresh, self._clock.now_ns(), again=True)

    def record_counts(self, *, include_recent: bool = False) -> None:
        """Record how many repeated refusals each recorded incident represents."""
        if not self._counted.windows:
            return
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

    def _record_refusals(self, refused: list[tuple[Applied, Inbound]], at: int) -> None:
        known = [
            (inbound.file.message_id, one.plan.refusal)
            for one, inbound in refused
            if inbound.has_row and one.plan.refusal
        ]
        if known:
            self._ledger.fail(known, at)
        for one, inbound in refused:
            if not inbound.has_row and one.plan.refusal:
                file, refusal, answer_id = inbound.file, one.plan.refusal, one.system_ids[0]
                self._ledger.add_rejection(
                    file.agent, file.file_name, file.inode, file.mtime_ns, refusal, answer_id, at
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
                    (reference, inbound.file.message_id, now) for reference in references
                )
        answer = plan.answer
        if answer is not None:
            answered, sender = answer.original.relay_id or "", plan.subject.agent
            said = (plan.message_id or None, answer.text or None)
            deliveries.acknowledge(answered, sender, answer.status, answer.at_ns, *said)
            if one.obligation is not None:
                deliveries.set_obligation(answered, sender, *one.obligation)
        for reminder in plan.changes.reminders:
            self._record_reminder(reminder)
        if plan.effects.may_repeat:  # held since a crash, by recovery
            for recipient, reason in plan.changes.bounced.items():
                deliveries.give_up(plan.message_id, recipient, "bounced", reason)
        for ended in (*plan.changes.ended, *one.effects.cancelled):
            state = ended.state.label.lower()
            deliveries.give_up(ended.message_id, ended.recipient, state, ended.reason)

    def _record_effects(self, one: Applied, now: int) -> None:
        effects, agents, processes = one.effects, self._ledger.agents, self._ledger.processes
        if effects.requests or effects.closed_intents or effects.process is not None:
            processes.add_operations([request.intent for request in effects.requests], now)
            processes.close_operations(effects.closed_intents, now)
            processes.put([effects.process] if effects.process is not None else [])
        if effects.idle is not None:
            processes.add_operations([effects.idle.operation(one.plan.subject)], now)
        if effects.discarded:
            at = now // NS_PER_S * NS_PER_S  # as the journal's event has it
            letters = [(one.relay_id, at) for one in effects.discarded if one.relay_id]
            self._ledger.deliveries.discard(letters)
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


def _is_plain(plan: Plan) -> bool:
    """True for a file whose effects are all in the journal: recovery does not need it.

    The effects of a command, and the incidents of a refusal, are in the ledger alone: after a
    crash they are made again of the file in the outbox.
    """
    return plan.inbound is not None and not plan.refusal and plan.command is None


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
