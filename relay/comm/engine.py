"""CommStore: the message engine. Channels, messages, subscriptions, and what became of each.

    with CommStore.open("project.acomm") as store:
        channel = store.create_channel("planner-executor", ChannelType.DIRECT, "planner")
        store.join_channel(channel.id, "executor")
        store.send_message(channel.id, "planner", MessageType.COMMAND, "deploy to staging")
        store.receive_messages(channel.id, "executor")

A store is changed by events alone (``relay.comm.state``). The commands validate, make the event,
apply it and return the new value; a refusal is an error that names the field, and leaves the
store as it was. Not thread-safe: one owner. Source: message-engine.txt, data-structures.txt.
"""

from __future__ import annotations

import contextlib
import os
from types import TracebackType

from relay.clock import NS_PER_S, Clock
from relay.comm import acomm, events, lock
from relay.comm.acks import DueCommands
from relay.comm.flush import Flusher, FlushPolicy, Inline
from relay.comm.model import StoreFile
from relay.comm.seal import seal, unseal
from relay.comm.state import State
from relay.errors import RelayError


class CommStore(DueCommands):
    """One live store. Opened from a path it writes itself; else a Flusher of its owner's does."""

    def __init__(self, clock: Clock | None = None, state: State | None = None) -> None:
        super().__init__(clock or Clock(), state)
        self._flusher: Flusher | None = None
        self._held = contextlib.ExitStack()

    @classmethod
    def load(cls, clock: Clock, file: StoreFile) -> CommStore:
        """The store that a file holds, in memory. Errors: FormatError."""
        return cls(clock, State.load(file))

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
        if os.path.lexists(path):
            raise RelayError(f"{path} exists already", hint="open it, or choose another path")
        return cls.open(path, policy, clock, key=key)

    @classmethod
    def open(
        cls,
        path: str,
        policy: FlushPolicy | None = None,
        clock: Clock | None = None,
        *,
        key: bytes | None = None,
    ) -> CommStore:
        """The store at ``path`` for writing, a new one when there is no file; ``close`` it.

        It is flushed as ``policy`` says (a batch of 100 messages or 5 s), looked at with each
        change, and by ``close``. A temp file that a killed writer left is removed. With a
        ``key`` of 32 bytes every content is sealed in the file; a plain one is from the next
        flush on.
        Errors: StoreLocked; FormatError for a damaged file, SealedStore for an encrypted one
        that is not this key's; either is left as it is.
        """
        clock = clock or Clock()
        held = contextlib.ExitStack()
        held.enter_context(lock.locked(path, clock.now_ns() // NS_PER_S))
        try:
            is_new = not os.path.exists(path)
            store = cls(clock) if is_new else cls.load(clock, unseal(acomm.read(path), key, path))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + ".tmp")
            if is_new:
                acomm.write(path, seal(store.snapshot().file(), key))
        except BaseException:
            held.close()
            raise
        store._held = held
        store._flusher = Flusher(store, path, policy or FlushPolicy(), clock, Inline(), key=key)
        return store

    def apply(self, event: events.Event) -> None:
        """Change the store as the event says, and write it when the policy says so.

        A flush that is due and fails is tried again with backoff; ``flush`` says why.
        """
        super().apply(event)
        if self._flusher is not None:
            self._flusher.commit()

    def flush(self) -> None:
        """Write everything now. Errors: OSError, StoreCapacity; the file is as it was then."""
        if self._flusher is not None:
            self._flusher.flush()

    def close(self) -> None:
        """Flush, and let the lock go."""
        try:
            self.flush()
        finally:
            self._flusher = None
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
