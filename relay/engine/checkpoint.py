"""A store's file: when it is written, and which events are durable.

A flush takes a snapshot in the owner's thread and encodes and writes it in another, so the owner
waits only while pointers are copied. Event ``n`` is durable once a flush that began at sequence >=
n has been renamed into place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from relay.acomm import store_file
from relay.acomm.engine_state import JournalPosition, StoreSnapshot
from relay.base import fsio
from relay.base.clock import NS_PER_MS
from relay.base.errors import RelayError
from relay.engine.engine import Engine

RETRY_FIRST_NS = 1_000 * NS_PER_MS
RETRY_MOST_NS = 60_000 * NS_PER_MS


P = ParamSpec("P")
T = TypeVar("T")


class Marks(Protocol):
    """The journal of what is written: an event log."""

    def mark(self) -> JournalPosition:
        """The store's current position; everything before it is durable in the journal."""

    def cover(self, position: JournalPosition) -> None:
        """Note that the file was written and covers everything before ``position``."""


class FlushPolicy(NamedTuple):
    """Flush at the first limit reached; None: no limit. Immediate: 1 message. Manual: both None."""

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
        except Exception as exc:  # raised by ``Future.result``
            future.set_exception(exc)
        return future


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
        store: Engine,
        path: str,
        policy: FlushPolicy,
        executor: Executor,
        key: bytes | None = None,
        journal: Marks | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self._policy = policy
        self._clock = store.clock
        self._executor = executor
        self._key = key  # seals the file; None: it is plain
        self._journal = journal
        # The sequence up to which every event is in the file, as last seen. What was replayed from
        # a journal is not in it yet.
        self.durable = store.sequence if journal is None else store.archives.file_sequence
        self._seen = store.state.messages_sent
        self._dirty: dict[FlushPolicy, _Unwritten] = {}  # by what asks for it
        self._not_before = 0
        self._running: _RunningFlush | None = None
        self._retry_ns = RETRY_FIRST_NS
        self.next_ns: int | None = None  # ``due_ns`` as the last commit left it
        self.error = ""  # why the last flush failed; empty when it did not

    def flush_if_due(self, policy: FlushPolicy | None = None) -> int:
        """Start a flush when one is due, and say how far the store is durable.

        ``policy``: what holds for the event that came last; None: the store's own. Returns the
        sequence up to which every event is in the file.
        """
        if self._running is not None:
            self._collect()
        now = self._clock.monotonic_ns()
        if self._store.sequence == self.durable:
            self._dirty.clear()
        else:
            policy = policy or self._policy
            known = self._dirty.get(policy, _Unwritten(now, 0))
            fresh = self._store.state.messages_sent - self._seen
            self._dirty[policy] = known._replace(messages=known.messages + fresh)
        self._seen = self._store.state.messages_sent
        self.next_ns = self.due_ns()
        if self.next_ns is not None and self.next_ns <= now:
            self._start(now)
            self._collect()
            self.next_ns = self.due_ns()
        return self.durable

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
        if self._store.sequence != self.durable:
            self._start(self._clock.monotonic_ns())
            assert self._running is not None
            self._running.result.result()
            self._collect()
        return self.durable

    def _start(self, now: int) -> None:
        position = None if self._journal is None else self._journal.mark()
        snapshot = self._store.snapshot()
        snapshot = snapshot._replace(state=snapshot.state._replace(journal=position))
        self._seen = self._store.state.messages_sent
        self._dirty.clear()
        sent = self._store.state.bytes_sent
        future = self._executor.submit(self._write, snapshot)
        self._running = _RunningFlush(snapshot.state.sequence, sent, position, now, future)

    def _write(self, snapshot: StoreSnapshot) -> int:
        """Write the file, in the executor. With a journal: sync the owner's files first.

        Renames and ledger pages are not synced one by one. All of them must be durable before the
        checkpoint declares the events before it done.
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
            self.durable = sequence
            self._store.archives.file_written(future.result(), sequence, sent)
            if self._journal is not None and position is not None:
                self._journal.cover(position)
            self.error = ""
            self._retry_ns = RETRY_FIRST_NS
            self._not_before = now + self._policy.pause_factor * (now - began)
        elif isinstance(error, OSError | RelayError):
            self.error = f"{self._path}: {error}"
            self._dirty = {self._policy: _Unwritten(now, 1 << 62)}  # as soon as possible
            self._not_before = now + self._retry_ns
            self._retry_ns = min(2 * self._retry_ns, RETRY_MOST_NS)
        else:
            raise error
