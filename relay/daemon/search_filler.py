"""Fills the search index in a thread beside the loop.

The loop tells how far the journal is durable; nothing waits for the index, and no fault of it is
one of the relay. The thread works in slices of some milliseconds and pauses after each for four
times as long, so that it takes a fifth of a core while there is something to do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future

from relay.acomm.model import ArchiveInfo
from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.errors import RelayError
from relay.base.home import SEARCH, Home
from relay.base.logs import LogCall
from relay.daemon.home_journal import stream_dir
from relay.daemon.opening import load_checkpoint
from relay.engine.archive_files import Archived
from relay.engine.events import EventCodec
from relay.engine.messages import KIND_OF
from relay.engine.state import State
from relay.search.follow import Follower, Source
from relay.search.index import (
    Index,
    SearchIndexBusy,
    SearchIndexDamaged,
    remove_index,
    why_no_index,
)

LINGER_NS = NS_PER_S // 5  # after a commit: several share a batch
FIRST_NS = NS_PER_S // 2  # after the start, which has other work
BUSY_NS = NS_PER_S  # another process fills it
AFTER_FAILURE_NS = 60 * NS_PER_S  # a full disk, a damaged archive
NEVER_NS = 3600 * NS_PER_S
PAUSE_S = 0.01
PAUSE_FACTOR = 4

KINDS = {kind: str(word) for kind, word in KIND_OF.items()}


def source_of(home: Home, config: Config, clock: Clock, key: bytes | None) -> Source:
    """The places that the index of a home is filled from."""
    files = None

    def load() -> State:
        nonlocal files
        state, files = load_checkpoint(home, clock, config, key)
        return state

    def archived(note: ArchiveInfo) -> Iterator[Archived]:
        assert files is not None  # load comes first
        return files.all_of(note)

    return Source(stream_dir(home), EventCodec(key, stream_dir(home)), load, archived, KINDS)


class SearchFiller:
    """Owned by the loop; ``executor`` is a thread of its own, None: no index is kept."""

    def __init__(
        self,
        home: Home,
        config: Config,
        clock: Clock,
        key: bytes | None,
        executor: Executor | None,
        log: LogCall,
    ) -> None:
        self._path = home.path(SEARCH)
        self._source = source_of(home, config, clock, key)
        self._clock = clock
        self._executor = None if why_no_index(config) else executor
        self._log = log
        self._stopping = threading.Event()
        self._durable = 0  # offset of the journal
        self._reached = -1  # that the index has
        self._next_ns = clock.monotonic_ns() + FIRST_NS
        self._job: Future[int] | None = None
        self._failure = ""
        self._is_low = False
        self._index: Index | None = None  # of the thread alone
        self._follower: Follower | None = None
        if why_no_index(config):
            with contextlib.suppress(RelayError, OSError):
                remove_index(self._path)  # of a time when it was allowed

    def poll(self, durable: int, *, is_low: bool = False) -> int:
        """Start work where the journal has more; returns when to poll next (monotonic ns).

        ``is_low``: the disk is nearly full, and the rest is not for an index.
        """
        now = self._clock.monotonic_ns()
        self._is_low = is_low
        if self._executor is None:
            return now + NEVER_NS
        if durable != self._durable:
            self._durable = durable
            if self._job is None:
                self._next_ns = max(self._next_ns, now + LINGER_NS)
        if self._job is not None and self._job.done():
            self._take_result(self._job, now)
        if self._job is None and self._durable > self._reached and not is_low:
            if now < self._next_ns:
                return self._next_ns
            try:
                self._job = self._executor.submit(self._fill)
            except RuntimeError as exc:  # no thread can be started
                self._note_failure(str(exc))
                self._next_ns = now + AFTER_FAILURE_NS
                return self._next_ns
        return now + NEVER_NS

    def stop(self) -> None:
        """End the thread after its current slice, and close the index."""
        self._stopping.set()
        if self._executor is not None:
            with contextlib.suppress(RuntimeError):  # without a thread nothing is open
                self._executor.submit(self._close)

    def _take_result(self, job: Future[int], now: int) -> None:
        self._job, pause_ns = None, LINGER_NS
        try:
            self._reached = job.result()
            self._failure = ""
        except SearchIndexBusy:
            pause_ns = BUSY_NS
        except Exception as exc:  # whatever it is: the relay works without an index
            pause_ns = AFTER_FAILURE_NS
            is_expected = isinstance(exc, (RelayError, OSError))
            self._note_failure(str(exc) if is_expected else f"{type(exc).__name__}: {exc}")
        self._next_ns = now + pause_ns

    def _note_failure(self, why: str) -> None:
        """Log a failure once."""
        if why != self._failure:
            self._failure = why
            text = f"Could not fill the search index: {why}"
            self._log(text, action="search_index", level="warning")

    # -- in the thread -----------------------------------------------------------------

    def _fill(self) -> int:
        """Fill the index up to the durable end of the journal; returns where that was."""
        try:
            if self._index is None:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
                self._index = Index(self._path, writable=True)
            if self._follower is None:
                self._follower = Follower(self._index, self._source)
            while not (self._stopping.is_set() or self._is_low):
                until, began = self._durable, time.monotonic()
                if self._follower.step(until).is_done:
                    return until
                self._stopping.wait(max(PAUSE_S, PAUSE_FACTOR * (time.monotonic() - began)))
            return -1
        except SearchIndexDamaged:
            self._close()
            remove_index(self._path)
            return -1
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """Close the index; a slice in progress is rolled back."""
        self._follower = None
        index, self._index = self._index, None
        if index is not None:
            index.close()
