"""Step 11: what is delivered becomes completed and archived, once the store's file covers it.

Until then a crash feeds the original again, and the ledger's deliveries say who has it already.
See docs/decisions/0001.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from relay import delivery
from relay.clock import Clock
from relay.comm.flush import Flusher, FlushPolicy
from relay.errors import UnsafePath
from relay.found import FileKey, Found
from relay.home import Dirs
from relay.ledger import Ledger
from relay.work import Work

IMMEDIATE = FlushPolicy(1, 0)


class Finisher:
    """The works that are delivered and not yet archived. Owned by the loop."""

    def __init__(
        self, ledger: Ledger, flusher: Flusher, clock: Clock, log: Callable[..., object]
    ) -> None:
        self._ledger = ledger
        self._flusher = flusher
        self._clock = clock
        self._log = log
        self.hand: set[FileKey] = set()  # files that nobody may look at again before they go
        self._waiting: deque[Work] = deque()  # in the order of their sequence
        self._last_error = ""
        self._in_hurry = False

    @property
    def is_idle(self) -> bool:
        """True when nothing waits."""
        return not self._waiting

    def take(self, works: Iterable[Work], sequence: int) -> None:
        """These are delivered; the store's events up to ``sequence`` hold what they caused."""
        for work in works:
            work.sequence = sequence
            self.hand.add(work.found.key)
            self._waiting.append(work)

    def hurry(self) -> None:
        """A channel wants to be written at once: ``configure_channel(flush="immediate")``."""
        self._in_hurry = True

    def is_due(self) -> bool:
        """True when something can be finished now."""
        return bool(self._waiting) and self._waiting[0].sequence <= self._flusher.durable

    def finish(self, dirs: Dirs, limit: int) -> list[Found]:
        """Complete and archive what the store's file holds by now, ``limit`` at most.

        Returns the files in whose place another was put meanwhile: they are to be looked at.
        """
        durable = self._flusher.commit(IMMEDIATE if self._in_hurry else None)
        self._in_hurry = False
        self._report_flush()
        done: list[Work] = []
        while self._waiting and self._waiting[0].sequence <= durable and len(done) < limit:
            done.append(self._waiting.popleft())
        if not done:
            return []
        now = self._clock.now_ns()
        own = [message_id for work in done for message_id in work.own_ids()]
        good = [work for work in done if not work.failure and not work.notice]
        with self._ledger.transaction():
            self._ledger.complete([work.message_id for work in good] + own, now)
        archived: list[tuple[str, str | None]] = []
        refused: list[tuple[str, str]] = []
        replaced: list[Found] = []
        for work in done:
            if work.notice:
                continue  # there is no file
            moved, path = self._archive(dirs, work, replaced)
            if moved and not work.failure:
                archived.append((work.message_id, path))
            elif path and work.has_row:
                refused.append((work.message_id, path))
        with self._ledger.transaction():
            self._ledger.archive(archived)
            self._ledger.archive_own(own)
            self._ledger.set_path(refused)
        for work in done:
            self.hand.discard(work.found.key)
        return replaced

    def _archive(self, dirs: Dirs, work: Work, replaced: list[Found]) -> tuple[bool, str | None]:
        """(is it out of the outbox?, its path in the archive: None when it is gone)."""
        found = work.found
        kind = delivery.REJECTED if work.failure else ""
        try:
            if delivery.is_same_file(dirs, found):
                day = work.archive_day_ns
                return True, delivery.archive(dirs, found.agent, found.file_name, day, kind)
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

    def _report_flush(self) -> None:
        """Say once that the store cannot be written, and once that it can again."""
        error = self._flusher.error
        if error != self._last_error:
            self._last_error = error
            text = f"cannot be written, trying again: {error}" if error else "is written again"
            level = "error" if error else "info"
            self._log(f"The store {text}", action="flush_failed", level=level)
