"""When the store's file is written, and what is durable: ``commit`` is the one call.

A flush takes a snapshot in the owner's thread and encodes and writes it beside it, so that
the owner waits for pointers to be copied and for nothing else. Event ``n`` is durable once
a flush that began at sequence >= n is renamed into place. Source: message-engine.txt, "Persist".
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from relay.clock import NS_PER_MS, Clock
from relay.comm import acomm
from relay.comm.engine_state import Snapshot
from relay.comm.seal import seal
from relay.errors import RelayError

RETRY_FIRST_NS = 1_000 * NS_PER_MS
RETRY_MOST_NS = 60_000 * NS_PER_MS


P = ParamSpec("P")
T = TypeVar("T")


class Source(Protocol):
    """What is written: a store."""

    @property
    def sequence(self) -> int:
        """Events so far."""

    @property
    def messages_sent(self) -> int:
        """Messages so far."""

    def snapshot(self) -> Snapshot:
        """Everything, as values."""


class FlushPolicy(NamedTuple):
    """Whichever comes first; None never comes. Immediate: 1 message. Manual: both None."""

    messages: int | None = 100
    ms: int | None = 5000
    pause_factor: int = 0  # no flush sooner than this many times the last one's duration
    compress: bool = True


class Inline(Executor):
    """Runs the work when it is submitted: for an owner without a thread to spare."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The finished future."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:  # the future carries it to whoever asks
            future.set_exception(exc)
        return future


class Flusher:
    """Owns the store's file. Called from the store's owner alone."""

    def __init__(
        self,
        store: Source,
        path: str,
        policy: FlushPolicy,
        clock: Clock,
        executor: Executor,
        wake: Callable[[], None] = lambda: None,
        key: bytes | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self._policy = policy
        self._clock = clock
        self._executor = executor
        self._wake = wake
        self._key = key  # seals the file; None: it is plain
        self._durable = store.sequence
        self._sent_at_flush = store.messages_sent
        self._dirty_since: int | None = None  # monotonic ns
        self._not_before = 0
        self._running: tuple[int, int, Future[None]] | None = None  # sequence, began, result
        self._retry_ns = RETRY_FIRST_NS
        self.error = ""  # why the last flush failed; empty when it did not

    @property
    def durable(self) -> int:
        """The sequence up to which every event is in the file, as last seen."""
        return self._durable

    def commit(self) -> int:
        """Start a flush when one is due, and say how far the store is durable.

        Returns the sequence up to which every event is
        in the file.
        """
        self._collect()
        now = self._clock.monotonic_ns()
        if self._store.sequence == self._durable:
            self._dirty_since = None
        elif self._dirty_since is None:
            self._dirty_since = now
        due = self.due_ns()
        if due is not None and due <= now:
            self._start(now)
            self._collect()
        return self._durable

    def due_ns(self) -> int | None:
        """When the next flush is due (monotonic), or None when there is nothing to write."""
        if self._dirty_since is None or self._running is not None:
            return None
        unwritten = self._store.messages_sent - self._sent_at_flush
        if self._policy.messages is not None and unwritten >= self._policy.messages:
            return self._not_before
        if self._policy.ms is None:
            return None
        return max(self._dirty_since + self._policy.ms * NS_PER_MS, self._not_before)

    def flush(self) -> int:
        """Write now and wait for it; returns the durable sequence.

        Errors: OSError or RelayError when the file cannot be written.
        """
        if self._running is not None:
            self._running[2].exception()  # wait; the outcome is collected below
        self._collect()
        if self._store.sequence != self._durable:
            self._start(self._clock.monotonic_ns())
            assert self._running is not None
            self._running[2].result()
            self._collect()
        return self._durable

    def _start(self, now: int) -> None:
        snapshot = self._store.snapshot()
        self._sent_at_flush = self._store.messages_sent
        self._dirty_since = None
        future = self._executor.submit(
            _write, self._path, snapshot, self._policy.compress, self._key
        )
        self._running = (snapshot.state.sequence, now, future)
        future.add_done_callback(lambda _: self._wake())

    def _collect(self) -> None:
        """Take the result of a flush that has ended."""
        if self._running is None or not self._running[2].done():
            return
        sequence, began, future = self._running
        self._running = None
        now = self._clock.monotonic_ns()
        error = future.exception()
        if error is None:
            self._durable = sequence
            self.error = ""
            self._retry_ns = RETRY_FIRST_NS
            self._not_before = now + self._policy.pause_factor * (now - began)
        elif isinstance(error, OSError | RelayError):
            self.error = f"{self._path}: {error}"
            self._sent_at_flush = -(1 << 62)  # as soon as it may
            self._dirty_since = now
            self._not_before = now + self._retry_ns
            self._retry_ns = min(2 * self._retry_ns, RETRY_MOST_NS)
        else:
            raise error


def _write(path: str, snapshot: Snapshot, compress: bool, key: bytes | None) -> None:
    acomm.write(path, seal(snapshot.file(), key), compress=compress)
