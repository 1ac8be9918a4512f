"""Crash recovery, run before the first message is taken. States: docs/states.md.

| found | done |
|---|---|
| delivery staged in the journal, its file in inbox/.pending | renamed now |
| the same without the file, same boot | it was delivered, and may have been taken |
| accepted, but never staged | held, due now |
| file in inbox/.pending that no event staged | removed |
| the machine was restarted since | inboxes are compared: see ``inbox_repair`` |
| events after the ledger's position | their rows are restored from the events |
| row open, file in the outbox | pending again, processed first, in the order of discovery |
| row open, file in the archive, or nowhere and accepted | completed and archived |
| row open, file nowhere, never accepted | failed: file_disappeared |
| row open, and its folder cannot be read | pending; a scan or the next start finds the file |
| open intent in pending_operations | spawn, release: the supervisor's; any other: rolled back |

See docs/states.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from relay.acomm.model import Message
from relay.agents import status
from relay.base import fsio
from relay.base.clock import Clock, iso_date
from relay.base.errors import FormatError, MessageError, UnsafePath
from relay.base.home import REJECTED, Dirs, Home
from relay.base.incidents import Refusal, RefusalCode
from relay.base.logs import LogCall
from relay.base.message import (
    Kind,
    command_fields,
    render,
)
from relay.base.names import MSG_SUFFIX, ORCHESTRATOR, SHA256_PREFIX, answer_id, sha256_hex
from relay.daemon.agreement import relay_ids, unmatched_obligations
from relay.daemon.inbox_repair import InboxRepair
from relay.daemon.opening import OpenedStore
from relay.delivery import downtime, file_ops
from relay.delivery.downtime import Deadlines
from relay.delivery.file_ops import read_original, reconstruct
from relay.delivery.projection import Projection, deliveries_of, facts_of, log_skipped
from relay.delivery.retry import ACCEPTED
from relay.delivery.values import Resources
from relay.engine.engine import Engine
from relay.ledger.deliveries import DeliveryFacts, ObligationFacts
from relay.ledger.ledger import REBUILT, FileFacts, Ledger, MessageRow

DISAPPEARED = Refusal(RefusalCode.DISAPPEARED, "file_disappeared")
ROWS = 5_000  # looked up at once
SHOWN_IDS = 20


def recover(given: Resources, opened: OpenedStore, restorer: Restorer) -> list[tuple[str, str]]:
    """Recover from the last run; returns the files to process first, in order.

    ``restorer`` has written all pieces of the journal but the last.
    """
    _, home, ledger, store, events, clock, log = given
    projection = opened.projection
    may_lack_unsynced = opened.may_lack_unsynced
    if may_lack_unsynced:
        log("The machine was restarted since, or a file system mounted anew", action="power_cut")
    now = clock.now_ns()
    Deadlines(given).extend()
    with ledger.transaction():
        for operation in ledger.processes.roll_back(now):
            log(f"Rolled back an interrupted operation: {operation}", action="roll_back")
    with home.dirs() as dirs:
        open_ones = list(store.messages.incomplete().values())  # checked once: there may be many
        inboxes = InboxRepair(dirs, store, ledger, may_lack_unsynced=may_lack_unsynced)
        delivered = inboxes.finish_staged(open_ones)
        again = 0
        if may_lack_unsynced:
            again = inboxes.compare(projection.written)
            open_ones = list(store.messages.incomplete().values())
        removed = inboxes.remove_strays(home)
        for event, at_ns in store.fresh_events:
            projection.apply(event, at_ns)
        events.commit()
        restorer.write(store, projection, events.journal.durable)
        restored = restorer.restored + _restore_unfinished(ledger, store, open_ones, now)
        _reconcile(ledger, store, now)
        files = _Files(dirs)
        if may_lack_unsynced:
            inboxes.clear_ended(home, now)
            _restore_originals(files, ledger, store, projection.recent, log)
        settled, requeued = 0, list[tuple[str, str]]()
        for rows in ledger.open_rows(ROWS):
            requeued += _resolve_rows(files, ledger, store, rows, now)
            settled += len(rows)
    events.confirm_boot()
    files.log_faults(log)
    if settled or delivered or removed or again or restored:
        log(
            "Recovered unfinished work",
            action="recover",
            rows=settled,
            requeued=len(requeued),
            deliveries=delivered,
            again=again,
            restored=restored,
            strays=removed,
        )
    return requeued


class Restorer:
    """Writes rows from the journal's events where the ledger lacks them, a piece at a time.

    A piece is one transaction with its position: a start that is killed goes on there.
    """

    def __init__(self, home: Home, ledger: Ledger, clock: Clock, log: LogCall) -> None:
        self._home, self._ledger, self._clock, self._log = home, ledger, clock, log
        self._statuses: dict[str, tuple[status.StatusChange, int]] = {}
        self.restored = 0  # rows that were missing

    def write(self, store: Engine, projection: Projection, position: int) -> None:
        """Write the rows of a piece that ends at this offset of the journal."""
        ledger, now = self._ledger, self._clock.now_ns()
        with ledger.transaction():
            missing, skipped = projection.write(ledger, relay_ids(store, projection).get, now)
            self._restore_statuses(store, projection.rows.values())
            with self._home.dirs() as dirs:
                ledger.set_path(_refused_files(dirs, projection))
            if missing and not ledger.position():  # audit_log begins now
                ledger.set_state(REBUILT, str(now), now)
            if position > ledger.position():
                ledger.set_position(position, now)
        self.restored += missing
        log_skipped(skipped, self._log)

    def _restore_statuses(self, store: Engine, rows: Iterable[FileFacts]) -> None:
        """Restore status changes made by commands that the ledger has lost.

        ``rows``: messages after the ledger's position, in the journal's order. A message that an
        agent sent afterwards made it active again. Within the caller's transaction.
        """
        last = self._statuses
        for facts in rows:
            if facts.agent_name in last:
                active = status.StatusChange(facts.agent_name, status.AgentStatus.ACTIVE, None)
                last[facts.agent_name] = (active, facts.discovered_at)
            if facts.target == ORCHESTRATOR and facts.message_type == Kind.COMMAND:
                change = None
                with contextlib.suppress(FormatError, OSError):  # doctor names the archive
                    change = _status_asked(store, facts)
                if change is not None:
                    last[change.name] = (change, facts.discovered_at)
        for change, at in last.values():
            self._ledger.agents.register(change.name, at)
            self._ledger.agents.set_status(*change, at)


def _refused_files(dirs: Dirs, projection: Projection) -> list[tuple[str, str]]:
    """The files of refusals whose rows are restored: message id, path."""
    found: list[tuple[str, str]] = []
    for message_id, *_ in projection.failures:
        facts = projection.rows[message_id]
        *_, name = facts.file_path.split("/")
        folder = ("archive", iso_date(facts.discovered_at), facts.agent_name, REJECTED)
        with contextlib.suppress(OSError, UnsafePath):
            if fsio.exists(name, dirs.get(*folder)):
                found.append((message_id, "/".join([*folder, name])))
    return found


def _restore_unfinished(ledger: Ledger, store: Engine, among: Iterable[int], now: int) -> int:
    """Restore the rows of unfinished messages that the store alone knows; returns how many.

    Needed when the ledger is gone, or an old one, and the journal starts after those messages. What
    is held and was not tried, or whose attempt was lost, is due now.
    """
    open_ones = store.messages.incomplete(among)
    ids, restored = list(open_ones), 0
    with ledger.transaction():
        for first in range(0, len(ids), ROWS):
            slice_ = ids[first : first + ROWS]
            known, reached = ledger.rows(slice_), ledger.deliveries.rows(slice_)
            missing, lacking = list[FileFacts](), list[DeliveryFacts]()
            for relay_id in slice_:
                message = store.messages.get(open_ones[relay_id])
                if message is None:
                    continue
                facts = deliveries_of(message, relay_id, store.deliveries.of(message.id))
                if relay_id in known:  # a row of one that was tried would lack its times
                    facts = [one for one in facts if one.state == "held"]
                else:
                    missing.append(facts_of(message, relay_id))
                have = reached.get(relay_id, {})
                lacking += [one for one in facts if one.recipient not in have]
            ledger.add(missing)
            ledger.deliveries.upsert(lacking)
            restored += len(missing)
        ledger.deliveries.hold_rest(ACCEPTED, now)
    return restored


def _reconcile(ledger: Ledger, store: Engine, now: int) -> None:
    """Make ledger and store agree on owed answers and dead letters.

    A ledger of an earlier version may have more of both; it did not record discards.
    """
    kept = {letter.message.relay_id for letter in store.retries.dead_letters()}
    with ledger.transaction():
        open_ones = ledger.deliveries.open_obligations()
        for (relay_id, recipient, said), message in unmatched_obligations(store, open_ones):
            if message is None:
                over = ObligationFacts(relay_id, recipient, "given_up")
                ledger.deliveries.set_obligations([over])
            else:
                store.obligations.restore(message, recipient, said)
        ledger.deliveries.set_obligations(downtime.open_obligations(store))
        discarded = {
            relay_id
            for relay_id in ledger.deliveries.waiting_letters() - kept
            if store.messages.find_by_relay_id(relay_id) is None  # else it was replayed
        }
        ledger.deliveries.discard((relay_id, now) for relay_id in discarded)


class _Files:
    """Finds the files of rows. Only ENOENT counts as missing."""

    def __init__(self, dirs: Dirs) -> None:
        self.dirs = dirs
        self.faults: dict[str, OSError | UnsafePath] = {}  # by message id

    def log_faults(self, log: LogCall) -> None:
        """Log once that files could not be checked."""
        if self.faults:
            log(
                f"Could not check the files of {len(self.faults)} messages, a scan or the next "
                f"start will: {next(iter(self.faults.values()))}",
                action="read_failed",
                level="warning",
                first_ids=list(self.faults)[:SHOWN_IDS],
            )

    def in_outbox(self, row: MessageRow) -> bool | None:
        """True or False on evidence; None when the folder cannot be read."""
        return self._has(row, "agents", row.agent_name, "outbox")

    def in_archive(self, row: MessageRow) -> bool | None:
        """The same for the archive, in the folder of the day of discovery."""
        return self._has(row, *archive_folder(row))

    def _has(self, row: MessageRow, *folder: str) -> bool | None:
        try:
            return fsio.exists(row.message_id + MSG_SUFFIX, self.dirs.get(*folder))
        except FileNotFoundError:
            return False
        except (OSError, UnsafePath) as exc:
            self.faults[row.message_id] = exc
            return None


def archive_folder(row: MessageRow) -> tuple[str, ...]:
    """Archive folder of the original."""
    return ("archive", iso_date(row.discovered_at), row.agent_name)


def _resolve_rows(
    files: _Files, ledger: Ledger, store: Engine, rows: list[MessageRow], now: int
) -> list[tuple[str, str]]:
    """Settle every open row by where its file is; returns the files to process again."""
    requeued, archived = list[tuple[str, str]](), list[tuple[str, str | None]]()
    again, completed, disappeared = list[str](), list[str](), list[tuple[str, Refusal]]()
    reached = ledger.deliveries.rows(row.message_id for row in rows)
    for row in rows:
        message_id, name = row.message_id, row.message_id + MSG_SUFFIX
        is_reached = message_id in reached
        if row.agent_name == ORCHESTRATOR:
            # Delivered, it is at its end; what it answers makes it again where the store lacks it.
            if is_reached or store.messages.find_by_relay_id(message_id) is not None:
                archived.append((message_id, None))
            continue
        in_outbox, in_archive = files.in_outbox(row), files.in_archive(row)
        if in_outbox:
            if row.status != "completed":
                again.append(message_id)
            requeued.append((row.agent_name, name))
        elif in_archive or (in_outbox is False and (row.status == "completed" or is_reached)):
            completed.append(message_id)
            if in_archive is not None:
                path = "/".join([*archive_folder(row), name]) if in_archive else None
                archived.append((message_id, path))
        elif in_outbox is None or in_archive is None:  # no evidence: it may be there
            again.append(message_id)
        else:
            disappeared.append((message_id, DISAPPEARED))
    with ledger.transaction():
        ledger.reset(again)
        ledger.fail(disappeared, now)
        ledger.claim(completed)
        ledger.complete(completed, now)
        ledger.archive(archived, now)
    return requeued


def _restore_originals(
    files: _Files, ledger: Ledger, store: Engine, recent: list[str], log: LogCall
) -> None:
    """Put originals of accepted messages back that a power cut emptied, removed or moved."""
    slices = (recent[first : first + ROWS] for first in range(0, len(recent), ROWS))
    for row in (row for ids in slices for row in ledger.rows(ids).values()):
        stored = store.messages.find_by_relay_id(row.message_id)
        if row.agent_name != ORCHESTRATOR and row.status != "failed" and stored is not None:
            try:
                _restore_original(files, ledger, row, stored, log)
            except (OSError, UnsafePath) as exc:  # it may be whole: nothing is put in its place
                files.faults[row.message_id] = exc


def _restore_original(
    files: _Files, ledger: Ledger, row: MessageRow, stored: Message, log: LogCall
) -> None:
    """Put one original back: into the outbox while its row is open, else into the archive."""
    name = row.message_id + MSG_SUFFIX
    in_outbox = files.in_outbox(row)
    if in_outbox is None:
        return
    outbox = ("agents", row.agent_name, "outbox")
    place = outbox if in_outbox and row.status != "archived" else archive_folder(row)
    if in_outbox and place != outbox:
        source, target = files.dirs.get(*outbox), files.dirs.ensure(*place)
        if not files.in_archive(row):
            fsio.rename(name, source, name, target)
        elif file_ops.has_both_names(name, source, target):
            fsio.remove(name, source)
    with contextlib.suppress(FileNotFoundError):
        if read_original(files.dirs, row._replace(file_path="/".join([*place, name]))) is not None:
            return
    target = files.dirs.ensure(*place)
    fsio.remove(name, target)
    message = reconstruct(stored)
    data = render(message)
    if len(data) != row.file_size:  # the store does not keep whether its sender gave a checksum
        given = {"CHECKSUM": SHA256_PREFIX + sha256_hex(stored.content)}
        data = render(message._replace(headers=message.headers | given))
    if len(data) != row.file_size:  # first: a start that is killed here writes it again
        with ledger.transaction():
            ledger.set_path([(row.message_id, row.file_path)], is_rewritten=True)
    fsio.create(name, data, target)
    log(
        f"The file of an accepted message was damaged and has been rewritten: {row.file_path}",
        action="mend_original",
        level="warning",
        message_id=row.message_id,
    )


def _status_asked(store: Engine, facts: FileFacts) -> status.StatusChange | None:
    """The change requested by a command, if it was acknowledged.

    Errors: FormatError, OSError for an archive that is damaged or missing.
    """
    message_id, find = facts.message_id, store.messages.find_by_relay_id
    answer = answer_id(facts.discovered_at, facts.agent_name, message_id, Kind.ACK)
    message, given = find(message_id, include_archived=True), find(answer, include_archived=True)
    if message is None or given is None or given.sender != ORCHESTRATOR:
        return None
    try:
        fields = command_fields(reconstruct(message))
    except MessageError:
        return None
    return status.parse_status_command(fields.get("ACTION", "").lower(), fields, facts.agent_name)
