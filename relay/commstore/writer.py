"""The file of a library's store: when it is written, also while nobody makes a call; and the lock
under which one thread at a time has the store."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from relay.base.clock import NS_PER_S, Clock
from relay.base.errors import StoreClosed, StoreReadOnly
from relay.engine import events, transitions
from relay.engine.checkpoint import Flusher, FlushPolicy, InlineExecutor
from relay.engine.engine import Engine
from relay.engine.state import State

_Store = TypeVar("_Store")


def one_thread_at_a_time(store_class: type[_Store]) -> type[_Store]:
    """The class with the lock of its ``_writer`` around each public method but ``close``.

    ``close`` waits for the timer's thread, which may wait for the lock.
    """
    for name, method in inspect.getmembers(store_class, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            setattr(store_class, name, _locked(method))
    return store_class


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(store: Any, *arguments: Any, **named: Any) -> Any:
        with store._writer.lock():
            return method(store, *arguments, **named)

    return call


_BATCH = FlushPolicy()
_MANUAL = FlushPolicy(None, None)


class FileWriter:
    """Applies the events of a store that writes its own file, and writes it by its policies.

    The file is also written when no further call is made: by a timer thread, under the lock.
    ``refusal``: why no event may be applied, if so.
    """

    def __init__(self, state: State, clock: Clock, refusal: str = "") -> None:
        self.refusal = refusal
        self._state = state
        self._clock = clock
        self._flusher: Flusher | None = None
        self._is_gathering = False  # in ``single_flush``
        self._is_closed = False
        self._pid = os.getpid()  # the owner's: no fork writes
        self._lock = threading.RLock()  # around each command, and around each flush
        self._timer: threading.Timer | None = None  # of the next flush, or the last one
        self._is_timed = False

    def begin(self, store: Engine, path: str, policy: FlushPolicy, key: bytes | None) -> None:
        """Write the events of ``store`` into the file at ``path`` from now on."""
        self._flusher = Flusher(store, path, policy, InlineExecutor(), key=key)

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """The lock, for one command. In a fork none: a thread that is not there may hold it."""
        return contextlib.nullcontext() if self._is_fork() else self._lock

    def _is_fork(self) -> bool:
        return os.getpid() != self._pid

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
        self._refuse_fork()
        with self._lock:
            transitions.apply(self._state, event)
            if not self._is_gathering:
                self._commit(self._policy_of(event) if self._state.settings else None)

    def _refuse_fork(self) -> None:
        """A fork has the lock, too: of two that write, one would lose what the other wrote."""
        if self._flusher is not None and self._is_fork():
            raise StoreClosed(f"the store is process {self._pid}'s, from which this one was forked")

    def _commit(self, policy: FlushPolicy | None) -> None:
        """Flush if due, and set the timer for the next flush.

        It has a weak reference alone: a store that nobody has any more is not kept for it.
        """
        if self._flusher is None:
            return
        self._flusher.flush_if_due(policy)
        due_ns = self._flusher.next_ns
        if due_ns is not None and not self._is_timed:
            wait_s = max(0, due_ns - self._clock.monotonic_ns()) / NS_PER_S
            self._is_timed = True
            self._timer = threading.Timer(wait_s, _flush_when_due, (weakref.ref(self),))
            self._timer.daemon = True
            self._timer.start()

    def on_time(self) -> None:
        """Flush in the timer's thread: the time of a flush policy has passed."""
        with self._lock:
            self._is_timed = False
            self._commit(_MANUAL)

    @contextlib.contextmanager
    def single_flush(self, channel_id: int) -> Iterator[None]:
        """A block whose events go into the file with one flush, as the channel's policy says."""
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
            self._commit(self._policy_in(channel_id))

    def flush_if_due(self) -> None:
        """Write what a policy wants to be written by now."""
        self._commit(_MANUAL)

    def flush_if_immediate(self, channel_id: int) -> None:
        """Flush after a command in a channel with immediate flush. Errors: as ``flush``."""
        settings = self._state.settings.get(channel_id)
        if settings is not None and settings.flush == "immediate":
            self.flush()

    def flush(self) -> None:
        """Write everything now. Errors: OSError, StoreCapacity; the file is then unchanged."""
        self._refuse_fork()
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
        """Flush; later events are refused, as nothing would write them. Errors: as ``flush``.

        In a fork nothing is written.
        """
        try:
            if not self._is_fork():
                self.flush()
        finally:
            with self.lock():
                self._is_closed = self._is_closed or self._flusher is not None
                self._flusher = None
            # A flush that runs is waited for, so no lock that it needs is held here.
            if self._timer is not None and self._timer is not threading.current_thread():
                self._timer.cancel()
                self._timer.join()


def _flush_when_due(writer: weakref.ref[FileWriter]) -> None:
    """In the timer's thread."""
    known = writer()
    if known is not None:
        known.on_time()
