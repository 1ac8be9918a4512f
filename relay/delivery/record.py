"""Recording what was executed: the archive, and the ledger's transaction of a batch.

The originals of plain messages are moved from their outboxes to the archive, then one transaction
records the batch: the rows of its events, and what only the ledger has. If killed in between,
recovery finds a claimed row whose file is in the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from relay.base.clock import NS_PER_S
from relay.base.errors import UnsafePath
from relay.base.home import REJECTED, Dirs
from relay.base.incidents import Incident, IncidentCounter, Refusal
from relay.delivery import file_ops
from relay.delivery.projection import Projection, log_skipped
from relay.delivery.values import (
    FIRST_PAUSE_S,
    NO_EFFECTS,
    OUTBOX,
    Answer,
    Inbound,
    Missed,
    OutboxFile,
    Part,
    Plan,
    Resources,
    Row,
)
from relay.engine.events import FreshEvent
from relay.ledger.deliveries import DeliveryFacts, ObligationFacts, held_delivery


class LedgerWriter(Part):
    """Makes the ledger follow the journal, and archives originals.

    The rows of events are written with the next transaction after their append. The ledger's
    position is then the journal's durable end: rows of what follows it are written again by a
    start, which changes nothing.
    """

    def __init__(self, given: Resources) -> None:
        super().__init__(given)
        self._counted = IncidentCounter(given.clock)
        self._fresh: list[FreshEvent] = []  # of which the ledger does not have the rows yet
        given.events.follow(self._fresh.extend)

    def write(self, more: Callable[[], object] | None = None) -> None:
        """Write the rows of all events so far, and in the same transaction what ``more`` writes.

        Errors: LedgerError, which ends the session: the next one begins at the ledger's position.
        """
        self._events.append()
        rows, now = Projection(has_claims=True), self._clock.now_ns()
        rows.apply_all(self._fresh)
        with self._ledger.transaction():
            _, skipped = rows.write(self._ledger, self._relay_id, now)
            if more is not None:
                more()
            if rows.rows:  # the relay's own messages: they have no file
                self._ledger.archive([(message_id, None) for message_id in rows.rows], now)
            self._ledger.set_position(self._events.journal.durable, now)
        self._fresh.clear()
        log_skipped(skipped, self._log)

    def catch_up(self) -> None:
        """Write the rows of events that no batch has taken along."""
        if self._fresh or self._store.fresh_events:
            self.write()

    def _relay_id(self, number: int) -> str | None:
        message = self._store.messages.find_kept(number)
        return None if message is None else message.relay_id

    def record(
        self,
        dirs: Dirs,
        batch: list[Plan],
        missed: Missed,
        without_event: list[DeliveryFacts],
    ) -> list[OutboxFile]:
        """Record a batch, and archive its originals.

        ``missed``: what could not be put into an inbox, and why.
        ``without_event``: rows of which no event speaks, as of messages that have left the store.
        Returns files that were put in the place of others meanwhile: they are to be read.
        """
        replaced: list[OutboxFile] = []
        plain: list[Plan] = []
        rest: list[Plan] = []
        for plan in batch:
            inbound = plan.inbound
            if inbound is None:
                continue
            # The effects of a command, and the incidents of a refusal, are in the ledger alone:
            # after a crash they are made again of the file, which is in the outbox until then.
            is_in_journal = inbound.refusal is None and plan.command is None
            (plain if is_in_journal else rest).append(plan)
        paths = self._archive_all(dirs, plain, replaced)
        self.write(partial(self._record, batch, missed, without_event, paths))
        if rest:
            self._record_paths(rest, self._archive_all(dirs, rest, replaced))
        return replaced

    def fail(self, message_id: str, refusal: Refusal) -> None:
        """Mark a row as failed whose file is still in the outbox: it is refused when it is read."""
        with self._ledger.transaction():
            self._ledger.fail([(message_id, refusal)], self._clock.now_ns())

    def _record(
        self,
        batch: list[Plan],
        missed: Missed,
        without_event: list[DeliveryFacts],
        paths: dict[str, str | None],
    ) -> None:
        """Record what only the ledger has; ``paths``: the originals that are archived already."""
        ledger, deliveries, now = self._ledger, self._ledger.deliveries, self._clock.now_ns()
        senders = set[str]()
        done: list[str] = []
        held: list[DeliveryFacts] = []
        late = [*without_event]
        for plan in batch:
            inbound = plan.inbound
            if plan.answer is not None:
                late += self._late_answer(plan, plan.answer)
            held += plan.changes.held
            if missed:
                held += _held(plan, missed, now)
            if plan.effects is not NO_EFFECTS:
                self._record_effects(plan, now)
            if inbound is not None:
                senders.add(inbound.file.agent)
                if inbound.refusal is None:
                    done.append(inbound.file.message_id)
        if late:
            deliveries.upsert(late)
        if held:
            deliveries.hold(held)
        if len(paths) < len(done):
            ledger.complete([message_id for message_id in done if message_id not in paths], now)
        if paths:
            ledger.archive([*paths.items()], now)
        if senders:
            ledger.agents.mark_seen(senders, now)

    def _record_paths(self, batch: list[Plan], paths: dict[str, str | None]) -> None:
        """Record originals that were archived after their batch was recorded."""
        refused = {plan.message_id for plan in batch if plan.refusal}
        with self._ledger.transaction():
            self._ledger.archive(
                [pair for pair in paths.items() if pair[0] not in refused], self._clock.now_ns()
            )
            self._ledger.set_path(
                [
                    (message_id, path)
                    for message_id, path in paths.items()
                    if path and message_id in refused
                ]
            )

    def _archive_all(
        self, dirs: Dirs, batch: list[Plan], replaced: list[OutboxFile]
    ) -> dict[str, str | None]:
        """Move originals to the archive; the new paths of those with a row, None if it is gone."""
        paths: dict[str, str | None] = {}
        for plan in batch:
            inbound = plan.inbound
            if inbound is None:
                continue
            try:
                path = self._archive(dirs, inbound, replaced)
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

    def _archive(self, dirs: Dirs, inbound: Inbound, replaced: list[OutboxFile]) -> str | None:
        file = inbound.file
        if file_ops.is_same_file(dirs, file):
            return file_ops.archive(
                dirs,
                file.agent,
                file.file_name,
                inbound.archive_day_ns,
                REJECTED if inbound.refusal else "",
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

    def _late_answer(self, plan: Plan, answer: Answer) -> list[DeliveryFacts]:
        """The row of an answer to a message that has left the store: no event speaks of it."""
        if answer.original.id in self._store.state.deliveries:
            return []
        deliveries, message_id = self._ledger.deliveries, answer.original.relay_id or ""
        sender, at = plan.subject.agent, plan.subject.at_ns
        row = deliveries.rows([message_id]).get(message_id, {}).get(sender)
        if row is None:
            return []
        acked = DeliveryFacts(message_id, sender, "acked", row.attempt, read_at=at, acked_at=at)
        acked.ack_status = answer.status
        acked.answer_id, acked.answer_text = plan.message_id or None, answer.text or None
        if answer.ends and self._store.obligations.tracks(answer.original):
            deliveries.set_obligations([ObligationFacts(message_id, sender, "answered")])
        return [acked]

    def _record_effects(self, plan: Plan, now: int) -> None:
        effects, agents, processes = plan.effects, self._ledger.agents, self._ledger.processes
        if effects.asked is not None:
            processes.add_operation(effects.asked, now)
        if effects.closed_intents or effects.process is not None:
            processes.close_operations(effects.closed_intents, now)
            processes.put([effects.process] if effects.process is not None else [])
        if effects.incidents:
            fresh = self._counted.fresh(list(effects.incidents))
            agents.add_incidents(fresh, now, again=effects.may_repeat)
        if effects.key is not None:
            agents.set_public_keys([effects.key], now)
        if effects.status_note is not None:
            agents.set_note(plan.subject.agent, effects.status_note, now)
        if effects.status_change is not None:
            agents.set_status(*effects.status_change, now)


def _held(plan: Plan, missed: Missed, now: int) -> Iterator[DeliveryFacts]:
    """The deliveries of a plan that are tried later, as their inbox could not be written."""
    for file in plan.files:
        due = now + (file.pause_s or FIRST_PAUSE_S) * NS_PER_S
        for name in file.recipients:
            if (why := missed.get((file.message_id, name))) is not None:
                yield held_delivery(file.message_id, name, why, due)
