"""CommStore: the message engine with channels, messages, subscriptions and deliveries.

    with CommStore.open("project.acomm") as store:
        channel = store.create_channel("planner-executor", ChannelType.DIRECT, "planner")
        store.join_channel(channel.id, "executor")
        store.send_message(channel.id, "planner", MessageType.COMMAND, "deploy to staging")
        store.receive_messages(channel.id, "executor")

A store is changed by events alone (``relay.engine.state``). The commands validate, make the event,
apply it and return the new value; a refusal is an error that names the field, and leaves the store
as it was. Not thread-safe: one owner, beside whom a thread writes the file when its time is up and
nothing more happens. It takes a snapshot between two events, under the lock under which each is
applied. Source: message-engine.txt, data-structures.txt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from relay.acomm import check, store_file
from relay.acomm.model import DeliveryState, StoreFile
from relay.acomm.store_file import decrypt
from relay.base.clock import NS_PER_S, Clock
from relay.base.errors import FormatError, RelayError, StoreClosed, StoreReadOnly
from relay.engine import events
from relay.engine.checkpoint import Alarm, Flusher, FlushPolicy, InlineExecutor
from relay.engine.retries import Redelivery, RetryCommands
from relay.engine.routing import derive_deliveries
from relay.engine.state import State
from relay.engine.validation import DEFAULT_LIMITS, Limits

_BATCH = FlushPolicy()
_MANUAL = FlushPolicy(None, None)


class CommStore(RetryCommands):
    """One live store. Opened from a path it writes itself; else a Flusher of its owner's does."""

    def __init__(
        self,
        clock: Clock | None = None,
        state: State | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(clock or Clock(), state, limits)
        self._flusher: Flusher | None = None
        self._policy = FlushPolicy()
        self._path: str | None = None
        self._is_gathering = False  # in ``single_flush``
        self._is_closed = False
        self._read_only_reason = ""  # why nothing is changed: its file would lose something
        self._held = contextlib.ExitStack()
        self._lock = threading.RLock()  # around each event, and around each flush
        self._alarm = Alarm(self._flush_when_due)

    @property
    def path(self) -> str | None:
        """The file that it was opened from; None for a store in memory."""
        return self._path

    @classmethod
    def load(cls, clock: Clock, file: StoreFile, limits: Limits = DEFAULT_LIMITS) -> CommStore:
        """The store that a file holds, in memory. Errors: FormatError, SealedStore."""
        store = cls(clock, State.load(file), limits)
        derive_deliveries(store.state)
        return store

    @classmethod
    def load_path(
        cls,
        path: str,
        clock: Clock,
        limits: Limits = DEFAULT_LIMITS,
        warn: Callable[[str], object] | None = None,
        key: bytes | None = None,
        *,
        read_only: bool = False,
        accept: Callable[[CommStore], object] = lambda store: None,
        outcome: str = store_file.LATER_EVENTS_LOST,
    ) -> CommStore | None:
        """The store in the file at ``path``, in memory; None if the file does not exist.

        A damaged file is renamed, or left as it is if ``read_only``, and the previous one is used;
        ``warn`` (default: the log) gets a warning that ends with ``outcome``, the fate of later
        events. ``accept`` checks a store before anything is renamed for it, and raises if it is
        unusable. Errors: FormatError when both files are unusable; LimitError, unless
        ``read_only``, for one that could not be written again; SealedStore for one that ``key``
        does not decrypt; nothing was changed then.
        """
        warn = warn or logging.getLogger("relay.engine").warning

        def made(file: StoreFile, name: str) -> CommStore:
            try:
                if not read_only:
                    check.check_limits(file, name)
                store = cls.load(clock, decrypt(file, key, name), limits)
            except FormatError as exc:
                if exc.path == name:
                    raise
                raise FormatError(name, exc.offset, exc.expected, exc.found) from None
            accept(store)
            return store

        store = store_file.load(path, made, warn, read_only=read_only, outcome=outcome)
        if store is not None:
            store.warn = warn
            with contextlib.suppress(FileNotFoundError):
                store.file_written(os.path.getsize(path), store.sequence, 0)
        return store

    @classmethod
    def create(
        cls,
        path: str,
        policy: FlushPolicy | None = None,
        clock: Clock | None = None,
        *,
        key: bytes | None = None,
    ) -> CommStore:
        """A new store at ``path``, written at once. Errors: RelayError when there is a file."""
        for name in (path, path + store_file.PREVIOUS):
            if os.path.lexists(name):
                raise RelayError(f"{name} exists already", hint="open it, or choose another path")
        return cls.open(path, policy, clock, key=key)

    @classmethod
    def open(
        cls,
        path: str,
        policy: FlushPolicy | None = None,
        clock: Clock | None = None,
        *,
        key: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
        warn: Callable[[str], object] | None = None,
    ) -> CommStore:
        """The store at ``path`` for writing, created if it does not exist; ``close`` it.

        It is flushed as ``policy`` says (a batch of 100 messages or 5 s), whether or not anything
        more happens, and by ``close``. A temp file that a killed writer left is removed,
        and what it had accepted and not delivered is delivered. With a ``key`` of 32 bytes every
        content is sealed in the file; a plain one is from the next flush on. A damaged file:
        ``load_path``.
        A file of a later version, or with sections that are not known here, is for reading
        alone, which ``warn`` hears: whatever would change it is StoreReadOnly.
        Errors: StoreLocked; FormatError for a damaged file, LimitError for one that could not be
        written again, SealedStore for an encrypted one that is not this key's; each names the
        file, which is left as it is.
        """
        clock = clock or Clock()
        with contextlib.ExitStack() as held:
            held.enter_context(store_file.locked(path, clock.now_ns() // NS_PER_S))
            store = cls._of_file(path, clock, limits, warn, key)
            store._held, store._path = held.pop_all(), path
        if store._read_only_reason:
            return store
        store._policy = policy or FlushPolicy()
        store._flusher = Flusher(store, path, store._policy, clock, InlineExecutor(), key=key)
        store._enqueue_undelivered()
        return store

    @classmethod
    def _of_file(
        cls,
        path: str,
        clock: Clock,
        limits: Limits,
        warn: Callable[[str], object] | None,
        key: bytes | None,
    ) -> CommStore:
        """The store at ``path``, whose lock is held; there is a file now, if there was none."""
        store = cls.load_path(path, clock, limits, warn, key)
        if store is not None:
            read = path if os.path.lexists(path) else path + store_file.PREVIOUS
            if lost := store_file.lost_on_rewrite(read):
                store._read_only_reason = (
                    f"{path} is opened for reading only: a flush would lose {lost}"
                )
                store.warn(store._read_only_reason)
                return store
        for name in (path, path + store_file.PREVIOUS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + ".tmp")
        if store is None:
            store = cls(clock, None, limits)
            store.warn = warn or store.warn
        if not os.path.lexists(path):
            size = store_file.save(path, store.snapshot(), key=key)
            store.file_written(size, store.sequence, 0)
        return store

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says, and write it when the policy says so.

        A flush that is due and fails is tried again with backoff; ``flush`` says why.
        Errors: StoreClosed, StoreReadOnly, and nothing has changed.
        """
        if self._read_only_reason:
            raise StoreReadOnly(self._read_only_reason)
        if self._is_closed:
            raise StoreClosed("the store is closed")
        if self._flusher is None:
            super().apply(event)
            return
        with self._lock:
            super().apply(event)
            if not self._is_gathering:
                self._commit(self._policy_of(event) if self.state.settings else None)

    def _commit(self, policy: FlushPolicy | None) -> None:
        """Flush where that is due, and have it looked at again when it will be."""
        if self._flusher is None:
            return
        self._flusher.commit(policy)
        due_ns = self._flusher.next_ns
        if due_ns is not None and not self._alarm.is_set:
            self._alarm.set(max(0, due_ns - self._clock.monotonic_ns()))

    def _flush_when_due(self) -> None:
        """In the alarm's thread: the time that some policy gives is up."""
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

    def tick(self, now_ns: int | None = None) -> list[Redelivery]:
        """Do what is due: retries (see RetryCommands), retention, deferred messages, the flush."""
        if self._read_only_reason:
            return []
        again = super().tick(now_ns)
        self.retain()
        self.resume()
        self._next_relief = 0
        with self._lock:
            self._commit(_MANUAL)
        return again

    def flush(self) -> None:
        """Write everything now. Errors: OSError, StoreCapacity; the file is as it was then."""
        with self._lock:
            if self._flusher is not None:
                self._flusher.flush()

    def _enqueue_undelivered(self) -> None:
        """Deliver messages that were accepted before the store was opened."""
        held = self.state.pending.held
        for number, deliveries in list(self.state.deliveries.items()):
            message = self.state.messages.get(number)
            if message is None or number in held:
                continue
            if any(one.state is DeliveryState.SENT for one in deliveries.values()):
                self.enqueue(message)
        self.resume()

    def _policy_of(self, event: events.Event) -> FlushPolicy | None:
        """The flush policy of the event's channel."""
        if isinstance(event, events.MessageSent):
            channel_id = event.message.channel_id
        else:
            message = self.state.messages.get(getattr(event, "message_id", 0))
            channel_id = message.channel_id if message else getattr(event, "channel_id", 0)
        return self._policy_in(channel_id)

    def _policy_in(self, channel_id: int) -> FlushPolicy | None:
        """The flush policy of a channel; None: the store's."""
        settings = self.state.settings.get(channel_id) if type(channel_id) is int else None
        if settings is None or settings.flush in (None, "immediate"):  # ``settle`` sees to that
            return None
        return _MANUAL if settings.flush == "manual" else _BATCH

    def close(self) -> None:
        """Flush and release the lock; later commands are refused, as nothing would write them."""
        try:
            self.flush()
        finally:
            with self._lock:
                self._is_closed = self._is_closed or self._flusher is not None
                self._flusher = None
            self._alarm.cancel()
            self._held.close()

    def __enter__(self) -> CommStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()
