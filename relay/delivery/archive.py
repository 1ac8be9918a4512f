"""Step 11: what is completed leaves its outbox for the archive; the ledger hears where it is.

Killed before the rename, the next start finds a completed row whose file is in the outbox, and
archives it silently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from relay.base.clock import Clock
from relay.base.errors import UnsafePath
from relay.base.home import Dirs
from relay.base.outbox_file import OUTBOX, FileKey, OutboxFile
from relay.delivery import file_ops
from relay.delivery.work import WorkItem
from relay.ledger import Ledger


class Archiver:
    """The works that are done and not yet archived. Owned by the loop."""

    def __init__(self, ledger: Ledger, clock: Clock, log: Callable[..., object]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._log = log
        self.in_progress: set[FileKey] = set()  # files that nobody may look at again before they go
        self._waiting: deque[WorkItem] = deque()
        self._archived: list[tuple[str, str | None]] = []  # moved, not yet noted
        self._refused: list[tuple[str, str]] = []

    @property
    def is_idle(self) -> bool:
        """True when nothing waits."""
        return not (self._waiting or self._archived or self._refused)

    def add(self, works: Iterable[WorkItem]) -> None:
        """These are delivered, and their rows are at their end."""
        for work in works:
            if not work.notice_key:  # it has a file
                self.in_progress.add(work.file.key)
                self._waiting.append(work)

    def archive(self, dirs: Dirs, limit: int) -> list[OutboxFile]:
        """Archive what is done, ``limit`` at most.

        Returns the files in whose place another was put meanwhile: they are to be looked at.
        """
        replaced: list[OutboxFile] = []
        for _ in range(min(limit, len(self._waiting))):
            work = self._waiting.popleft()
            moved, path = self._archive(dirs, work, replaced)
            if moved and not work.failure:
                self._archived.append((work.message_id, path))
            elif path and work.has_row:
                self._refused.append((work.message_id, path))
            self.in_progress.discard(work.file.key)
        return replaced

    def flush(self) -> None:
        """Tell the ledger where the originals are, where no batch takes it along."""
        if self._archived or self._refused:
            with self._ledger.transaction():
                self.record()

    def record(self) -> None:
        """The same, in the caller's transaction: a batch notes what the one before archived."""
        if self._archived:
            self._ledger.archive(self._archived)
        if self._refused:
            self._ledger.set_path(self._refused)
        self._archived, self._refused = [], []

    def _archive(
        self, dirs: Dirs, work: WorkItem, replaced: list[OutboxFile]
    ) -> tuple[bool, str | None]:
        """(is it out of the outbox?, its path in the archive: None when it is gone)."""
        found = work.file
        kind = file_ops.REJECTED if work.failure else ""
        try:
            if file_ops.is_same_file(dirs, found):
                day = work.archive_day_ns
                return True, file_ops.archive(
                    dirs,
                    found.agent,
                    found.file_name,
                    day,
                    kind,
                    redacted=work.redacted,
                    place=found.place,
                )
            if found.place == OUTBOX:
                replaced.append(found)
        except (OSError, UnsafePath) as exc:
            self._log(
                f"Could not archive {found.path}, the next scan tries again: {exc}",
                action="archive_failed",
                level="warning",
                message_id=work.message_id,
            )
            return False, None
        return True, None
