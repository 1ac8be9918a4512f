"""Steps 3 and 4: what a file means beside what the ledger knows of its id.

    no row                            a new one, claimed
    pending                           the row again; facts of the file as read last
    same agent, same checksum         a duplicate: archived, not delivered again
    another agent, or other content   refused: the id is taken
    failed, its file still here       a crash came before the answer: answered now

Source: FORMATS 4, DESIGN "How a message flows".
"""

from __future__ import annotations

from collections.abc import Callable

from relay.acomm.model import Origin
from relay.base.clock import Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.incidents import Incident
from relay.base.names import shown
from relay.base.outbox_file import OUTBOX
from relay.delivery import file_ops
from relay.delivery.intake import Malformed, Parsed, ParseResult
from relay.delivery.work import WorkItem
from relay.ledger import FileFacts, Ledger, MessageRow


class Recorder:
    """Records and claims. Owned by the loop."""

    def __init__(self, ledger: Ledger, clock: Clock, log: Callable[..., object]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._log = log

    def claim(self, dirs: Dirs, looks: list[ParseResult]) -> list[tuple[WorkItem, ParseResult]]:
        """Rows for what is new, works for what is to be done, in order of discovery.

        Every work that has a row is claimed when this returns.
        """
        now = self._clock.now_ns()
        ids = [look.file.message_id for look in looks if look.file.message_id]
        admitted: list[tuple[WorkItem, ParseResult]] = []
        fresh: dict[str, FileFacts] = {}
        changed: list[FileFacts] = []
        with self._ledger.transaction():
            rows = self._ledger.rows(ids)
            for order, look in enumerate(looks):  # a nanosecond apart: in order of discovery
                work, facts = self._classify(dirs, look, rows, fresh, now + order)
                if work is None:
                    continue
                admitted.append((work, look))
                if facts is not None and work.is_repeat:
                    changed.append(facts)
                elif facts is not None:
                    fresh[facts.message_id] = facts
            self._ledger.add(list(fresh.values()))
            self._ledger.update_facts(changed)
            mine = self._ledger.claim(work.message_id for work, _ in admitted if work.has_row)
        return [
            (work, look)
            for work, look in admitted
            if work.message_id in mine or not work.has_row or work.failure
        ]

    def _classify(
        self,
        dirs: Dirs,
        look: ParseResult,
        rows: dict[str, MessageRow],
        fresh: dict[str, FileFacts],
        now: int,
    ) -> tuple[WorkItem | None, FileFacts | None]:
        """What one look means beside what the ledger knows of its id."""
        found = look.file
        message_id = found.message_id or ""
        work = WorkItem(found, message_id, now)
        work.redacted = look.redacted
        if isinstance(look, Malformed):
            work.failure, work.is_unsafe = look.reason, look.unsafe
            if look.incident is not None:
                one = Incident(look.incident, found.agent, found.path, look.reason)
                work.incidents.append(one)
        row = rows.get(message_id)
        facts = _facts(look, message_id, row.discovered_at if row else now)
        # A name that is no message's may be no text, either; what an event says is.
        path = found.path if message_id else shown(found.path)
        work.origin = Origin(facts.agent_name, path, *facts[3:])
        if found.place != OUTBOX:  # never sent: its id stays free
            work.has_row = False
            work.discovered_at = found.mtime_ns
            return work, None
        if not message_id or message_id in fresh or (row and row.agent_name != found.agent):
            work.has_row = False
            work.failure = work.failure or "its id is taken: every message needs a name of its own"
            work.discovered_at = found.mtime_ns
            return work, None
        if row is None:
            return work, facts
        work.discovered_at = row.discovered_at
        work.is_repeat = True
        if row.status == "pending":
            return work, facts
        return self._classify_known(dirs, look, row, work), None

    def _classify_known(
        self, dirs: Dirs, look: ParseResult, row: MessageRow, work: WorkItem
    ) -> WorkItem | None:
        """A file whose id the ledger has seen to its end."""
        if row.status == "processing":
            return None  # another file was put in its place meanwhile: seen again once it is done
        found = look.file
        known = (row.file_path, row.file_size, row.file_mtime_ns, row.file_inode)
        is_its_file = known == (found.path, found.size, found.mtime_ns, found.inode)
        if row.status == "failed" and is_its_file:
            work.failure = row.last_error or "it failed before"  # a crash came before the nack
            return work
        if isinstance(look, Parsed) and row.status != "failed" and _says_the_same(look, row):
            self._archive_duplicate(dirs, look, row)
            return None
        work.has_row = False
        work.failure = (
            f"its id is taken by a message that is {row.status}: "
            "every message needs a name of its own"
        )
        work.discovered_at = look.file.mtime_ns
        return work

    def _archive_duplicate(self, dirs: Dirs, look: ParseResult, row: MessageRow) -> None:
        """The same message again: archived, not delivered again."""
        found = look.file
        # A crash, or a fault, came before its archive; or recovery found the outbox out of reach.
        is_late = row.status == "completed" or row.file_path == found.path
        day_ns = row.discovered_at if is_late else self._clock.now_ns()
        kind = "" if is_late else file_ops.DUPLICATES
        try:
            path = file_ops.archive(
                dirs, found.agent, found.file_name, day_ns, kind, redacted=look.redacted
            )
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {found.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=row.message_id,
            )
            return
        if is_late:
            self._ledger.archive([(row.message_id, path)])
            self._ledger.set_path([(row.message_id, path)] if path else [])
            return
        self._log(
            "Put a duplicate away, not delivered again",
            action="put_away_duplicate",
            message_id=row.message_id,
            agent=found.agent,
        )


def _says_the_same(look: Parsed, row: MessageRow) -> bool:
    """The same content for the same recipient: the message again, not another one."""
    message = look.message
    return (look.checksum, str(message.kind), message.to) == (
        row.checksum,
        row.message_type,
        row.target,
    )


def _facts(look: ParseResult, message_id: str, now: int) -> FileFacts:
    found = look.file
    accepted = look if isinstance(look, Parsed) else None
    return FileFacts(
        message_id,
        found.agent,
        shown(found.path),
        found.size,
        found.mtime_ns,
        found.inode,
        accepted.checksum if accepted else None,
        str(accepted.message.kind) if accepted else None,
        accepted.message.to if accepted else None,
        now,
    )
