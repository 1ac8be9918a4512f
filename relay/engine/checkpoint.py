"""A store's file: loading it, when it is written, and which events are durable.

``load_state`` reads the file, for the relay and the library. ``Flusher.flush_if_due`` decides when
it is written; ``FileWriter`` calls it for the library, with a timer and its channels' policies.

A flush takes a snapshot in the owner's thread and encodes and writes it in another, so the owner
waits only while pointers are copied. Event ``n`` is durable once a flush that began at sequence >=
n has been renamed into place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from relay.acomm import check, store_file
from relay.acomm.engine_state import JournalPosition, StoreSnapshot
from relay.acomm.model import StoreFile
from relay.base import fsio
from relay.base.clock import NS_PER_MS, NS_PER_S, Clock
from relay.base.errors import FormatError, RelayError, StoreClosed, StoreReadOnly
from relay.engine import events, transitions
from relay.engine.engine import Engine
from relay.engine.routing import derive_deliveries
from relay.engine.state import State, Warn, log_warning

RETRY_FIRST_NS = 1_000 * NS_PER_MS
RETRY_MOST_NS = 60_000 * NS_PER_MS


P = ParamSpec("P")
T = TypeVar("T")


def state_of(file: StoreFile) -> State:
    """The state that a file holds. Errors: FormatError."""
    state = State.load(file)
    derive_deliveries(state)
    return state


def load_state(
    path: str,
    key: bytes | None = None,
    warn: Warn | None = None,
    *,
    read_only: bool = False,
    accept: Callable[[State], object] = lambda state: None,
    outcome: str = store_file.LATER_EVENTS_LOST,
) -> State | None:
    """The state that the file at ``path`` holds; None if the file does not exist.

    A damaged file is renamed, or left as it is if ``read_only``, and the previous one is used;
    ``warn`` (default: the log) gets a warning that ends with ``outcome``, the fate of later
    events. ``accept`` checks a state before anything is renamed for it, and raises if it is
    unusable. Errors: FormatError when both files are unusable; LimitError, unless ``read_only``,
    for one that could not be written again; SealedStore for one that ``key`` does not decrypt;
    nothing was changed then.
    """

    def made(file: StoreFile, name: str) -> State:
        try:
            if not read_only:
                check.check_limits(file, name)
            state = state_of(store_file.decrypt(file, key, name))
        except FormatError as exc:
            if exc.path == name:
                raise
            raise FormatError(name, exc.offset, exc.expected, exc.found) from None
        accept(state)
        return state

    return store_file.load(path, made, warn or log_warning, read_only=read_only, outcome=outcome)


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


class Alarm:
    """Calls a method in a thread of its own when the time set has passed.

    At most one daemon thread, none while no alarm is set. It holds only a weak reference to the
    owner: after the owner is collected nothing is called.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = weakref.WeakMethod(call)
        self._timer: threading.Timer | None = None
        self.is_set = False  # the method called sets it again

    def set(self, wait_ns: int) -> None:
        """Call the method after ``wait_ns``."""
        self.is_set = True
        self._timer = threading.Timer(wait_ns / NS_PER_S, _call_back, (weakref.ref(self),))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Prevent further calls; waits for a running one, so hold no lock that it needs."""
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
        store: Engine,
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
        self._durable = store.sequence if journal is None else store.archives.file_sequence
        self._seen = store.state.messages_sent
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

    def flush_if_due(self, policy: FlushPolicy | None = None) -> int:
        """Start a flush when one is due, and say how far the store is durable.

        ``policy``: what holds for the event that came last; None: the store's own. Returns the
        sequence up to which every event is in the file.
        """
        if self._running is not None:
            self._collect()
        now = self._clock.monotonic_ns()
        if self._store.sequence == self._durable:
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
        self._seen = self._store.state.messages_sent
        self._dirty.clear()
        sent = self._store.state.bytes_sent
        future = self._executor.submit(self._write, snapshot)
        self._running = _RunningFlush(snapshot.state.sequence, sent, position, now, future)
        future.add_done_callback(lambda _: self._wake())

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
            self._durable = sequence
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


_BATCH = FlushPolicy()
_MANUAL = FlushPolicy(None, None)


class FileWriter:
    """Applies the events of a store that writes its own file, and writes it by its policies.

    The file is also written when the owner makes no further call: by a timer thread, under the
    lock that each event is applied under. ``refusal``: why no event may be applied, if so.
    """

    def __init__(self, state: State, clock: Clock, refusal: str = "") -> None:
        self.refusal = refusal
        self._state = state
        self._clock = clock
        self._flusher: Flusher | None = None
        self._is_gathering = False  # in ``single_flush``
        self._is_closed = False
        self._lock = threading.RLock()  # around each event, and around each flush
        self._alarm = Alarm(self._flush_when_due)

    def begin(self, store: Engine, path: str, policy: FlushPolicy, key: bytes | None) -> None:
        """Write the events of ``store`` into the file at ``path`` from now on."""
        self._flusher = Flusher(store, path, policy, self._clock, InlineExecutor(), key=key)

    def apply(self, event: events.Event) -> None:
        """Change the state as the event says, and write it when the policy says so.

        A flush that is due and fails is tried again with backoff; ``flush`` says why.
        Errors: StoreClosed, StoreReadOnly, and nothing has changed.
        """
        if self.refusal:
            raise StoreReadOnly(self.refusal)
        if self._is_closed:
            raise StoreClosed("the store is closed")
        if self._flusher is None:
            transitions.apply(self._state, event)
            return
        with self._lock:
            transitions.apply(self._state, event)
            if not self._is_gathering:
                self._commit(self._policy_of(event) if self._state.settings else None)

    def _commit(self, policy: FlushPolicy | None) -> None:
        """Flush if due, and set the alarm for the next flush."""
        if self._flusher is None:
            return
        self._flusher.flush_if_due(policy)
        due_ns = self._flusher.next_ns
        if due_ns is not None and not self._alarm.is_set:
            self._alarm.set(max(0, due_ns - self._clock.monotonic_ns()))

    def _flush_when_due(self) -> None:
        """Flush in the alarm's thread: the time of a flush policy has passed."""
        with self._lock:
            self._alarm.is_set = False
            self._commit(_MANUAL)

    @contextlib.contextmanager
    def single_flush(self, channel_id: int) -> Iterator[None]:
        """A block whose events go into the file with one flush, as the channel's policy says."""
        with self._lock:
            self._is_gathering = True
            try:
                yield
            finally:
                self._is_gathering = False
                self._commit(self._policy_in(channel_id))

    def flush_if_due(self) -> None:
        """Write what a policy wants to be written by now."""
        with self._lock:
            self._commit(_MANUAL)

    def flush_if_immediate(self, channel_id: int) -> None:
        """Flush after a command in a channel with immediate flush. Errors: as ``flush``."""
        settings = self._state.settings.get(channel_id)
        if settings is not None and settings.flush == "immediate":
            self.flush()

    def flush(self) -> None:
        """Write everything now. Errors: OSError, StoreCapacity; the file is then unchanged."""
        with self._lock:
            if self._flusher is not None:
                self._flusher.flush()

    def _policy_of(self, event: events.Event) -> FlushPolicy | None:
        """The flush policy of the event's channel."""
        if isinstance(event, events.MessageSent):
            channel_id = event.message.channel_id
        else:
            message = self._state.messages.get(getattr(event, "message_id", 0))
            channel_id = message.channel_id if message else getattr(event, "channel_id", 0)
        return self._policy_in(channel_id)

    def _policy_in(self, channel_id: int) -> FlushPolicy | None:
        """The flush policy of a channel; None: the store's."""
        settings = self._state.settings.get(channel_id) if type(channel_id) is int else None
        if settings is None or settings.flush in (None, "immediate"):
            return None  # immediate: ``flush_if_immediate``
        return _MANUAL if settings.flush == "manual" else _BATCH

    def close(self) -> None:
        """Flush; later events are refused, as nothing would write them. Errors: as ``flush``."""
        try:
            self.flush()
        finally:
            with self._lock:
                self._is_closed = self._is_closed or self._flusher is not None
                self._flusher = None
            self._alarm.cancel()
