"""When the store file is written and which events are durable: ``Flusher.commit`` is the one call.

A flush takes a snapshot in the owner's thread and encodes and writes it in another, so the owner
waits only while pointers are copied. Event ``n`` is durable once a flush that began at sequence >=
n has been renamed into place. Source: message-engine.txt, "Persist".
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from relay.acomm import store_file
from relay.acomm.engine_state import JournalPosition, StoreSnapshot
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import RelayError

RETRY_FIRST_NS = 1_000 * NS_PER_MS
RETRY_MOST_NS = 60_000 * NS_PER_MS


P = ParamSpec("P")
T = TypeVar("T")


class FlushSource(Protocol):
    """The store that is written."""

    @property
    def sequence(self) -> int:
        """Events so far."""

    @property
    def file_sequence(self) -> int:
        """Events that its file covers."""

    @property
    def messages_sent(self) -> int:
        """Messages so far."""

    @property
    def bytes_sent(self) -> int:
        """Bytes of messages so far."""

    def file_written(self, size: int, sequence: int, bytes_sent: int) -> None:
        """The file was written; it covers so much."""

    def snapshot(self) -> StoreSnapshot:
        """Everything, as values."""


class Marks(Protocol):
    """The journal of what is written: an event log."""

    def mark(self) -> JournalPosition:
        """Where the store stands now; the journal holds everything before it durably."""

    def cover(self, position: JournalPosition) -> None:
        """The file was written; it covers everything before ``position``."""


class FlushPolicy(NamedTuple):
    """Whichever comes first; None never comes. Immediate: 1 message. Manual: both None."""

    messages: int | None = 100
    ms: int | None = 5000
    pause_factor: int = 0  # no flush sooner than this many times the last one's duration
    compress: bool = True


class InlineExecutor(Executor):
    """Runs the work when it is submitted: for an owner without a thread to spare."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:  # the future carries it to whoever asks
            future.set_exception(exc)
        return future


class Alarm:
    """Calls a method back in a thread of its own, once what is set is over.

    One daemon thread at most, and none while nothing is waited for. Its owner is not kept by it:
    of one that was let go nothing is called any more.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = weakref.WeakMethod(call)
        self._timer: threading.Timer | None = None
        self.is_set = False  # whoever is called says so again

    def set(self, wait_ns: int) -> None:
        """Call after so long."""
        self.is_set = True
        self._timer = threading.Timer(wait_ns / NS_PER_S, _call_back, (weakref.ref(self),))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """No call any more; waits for one that has begun, so no lock that it needs may be held."""
        self.is_set, timer = False, self._timer
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
            timer.join()


def _call_back(alarm: weakref.ref[Alarm]) -> None:
    """In the timer's thread."""
    known = alarm()
    call = None if known is None else known._call()
    if known is not None and call is not None:
        call()


class _Unwritten(NamedTuple):
    """Unwritten messages of one policy."""

    since: int  # monotonic ns
    messages: int


class _RunningFlush(NamedTuple):
    """A flush that has not ended."""

    sequence: int  # what it covers
    bytes_sent: int
    position: JournalPosition | None  # in the journal
    began: int  # monotonic ns
    result: Future[int]  # the file's size


class Flusher:
    """Owns the store's file. Called from the store's owner alone."""

    def __init__(
        self,
        store: FlushSource,
        path: str,
        policy: FlushPolicy,
        clock: Clock,
        executor: Executor,
        wake: Callable[[], None] = lambda: None,
        key: bytes | None = None,
        journal: Marks | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self._policy = policy
        self._clock = clock
        self._executor = executor
        self._wake = wake
        self._key = key  # seals the file; None: it is plain
        self._journal = journal
        # what was replayed from a journal is not in the file yet
        self._durable = store.sequence if journal is None else store.file_sequence
        self._seen = store.messages_sent
        self._dirty: dict[FlushPolicy, _Unwritten] = {}  # by what asks for it
        self._not_before = 0
        self._running: _RunningFlush | None = None
        self._retry_ns = RETRY_FIRST_NS
        self.next_ns: int | None = None  # ``due_ns`` as the last commit left it
        self.error = ""  # why the last flush failed; empty when it did not

    @property
    def durable(self) -> int:
        """The sequence up to which every event is in the file, as last seen."""
        return self._durable

    def commit(self, policy: FlushPolicy | None = None) -> int:
        """Start a flush when one is due, and say how far the store is durable.

        ``policy``: what holds for the event that came last; None: the store's own. Returns the
        sequence up to which every event is in the file.
        """
        self._collect()
        now = self._clock.monotonic_ns()
        if self._store.sequence == self._durable:
            self._dirty.clear()
        else:
            policy = policy or self._policy
            known = self._dirty.get(policy, _Unwritten(now, 0))
            fresh = self._store.messages_sent - self._seen
            self._dirty[policy] = known._replace(messages=known.messages + fresh)
        self._seen = self._store.messages_sent
        self.next_ns = self.due_ns()
        if self.next_ns is not None and self.next_ns <= now:
            self._start(now)
            self._collect()
            self.next_ns = self.due_ns()
        return self._durable

    def due_ns(self) -> int | None:
        """When the next flush is due (monotonic), or None when there is nothing to write."""
        if not self._dirty or self._running is not None:
            return None
        due: list[int] = []
        for policy, unwritten in self._dirty.items():
            if policy.messages is not None and unwritten.messages >= policy.messages:
                return self._not_before
            if policy.ms is not None:
                due.append(unwritten.since + policy.ms * NS_PER_MS)
        return max(min(due), self._not_before) if due else None

    def flush(self) -> int:
        """Write now and wait for it; returns the durable sequence.

        Errors: OSError or RelayError when the file cannot be written.
        """
        if self._running is not None:
            self._running.result.exception()  # wait; the outcome is collected below
        self._collect()
        if self._store.sequence != self._durable:
            self._start(self._clock.monotonic_ns())
            assert self._running is not None
            self._running.result.result()
            self._collect()
        return self._durable

    def _start(self, now: int) -> None:
        position = None if self._journal is None else self._journal.mark()
        snapshot = self._store.snapshot()
        snapshot = snapshot._replace(state=snapshot.state._replace(journal=position))
        self._seen = self._store.messages_sent
        self._dirty.clear()
        sent = self._store.bytes_sent
        future = self._executor.submit(self._write, snapshot)
        self._running = _RunningFlush(snapshot.state.sequence, sent, position, now, future)
        future.add_done_callback(lambda _: self._wake())

    def _write(self, snapshot: StoreSnapshot) -> int:
        """Beside the owner. With a journal: what it covers has been done to files, too.

        Renames and the ledger's pages are not synced one by one: all of them are, before the
        file says that nobody need look at the events behind them again.
        """
        if self._journal is not None:
            fsio.sync_filesystem(os.path.dirname(self._path))
        return store_file.save(self._path, snapshot, self._policy.compress, self._key)

    def _collect(self) -> None:
        """Take the result of a flush that has ended."""
        if self._running is None or not self._running.result.done():
            return
        sequence, sent, position, began, future = self._running
        self._running = None
        now = self._clock.monotonic_ns()
        error = future.exception()
        if error is None:
            self._durable = sequence
            self._store.file_written(future.result(), sequence, sent)
            if self._journal is not None and position is not None:
                self._journal.cover(position)
            self.error = ""
            self._retry_ns = RETRY_FIRST_NS
            self._not_before = now + self._policy.pause_factor * (now - began)
        elif isinstance(error, OSError | RelayError):
            self.error = f"{self._path}: {error}"
            self._dirty = {self._policy: _Unwritten(now, 1 << 62)}  # as soon as it may
            self._not_before = now + self._retry_ns
            self._retry_ns = min(2 * self._retry_ns, RETRY_MOST_NS)
        else:
            raise error
