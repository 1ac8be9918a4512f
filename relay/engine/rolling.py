"""Rolling: final messages move out of the live store into an archive, once, a slice at a time.

    look      a few thousand messages a step: which are final, and old enough?
    write     the archive, beside the loop
    Rolled    the event: the archive counts, its messages are leaving
    TakenOut  a few thousand of them a step

A message is final when every delivery is: written, where no acknowledgment is owed; else acked;
or expired, bounced. What is dead for somebody stays until that is settled. Killed before the
event is committed, the file is a stray, and the messages are where they were.
Source: DESIGN, "Bounded whatever the history".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import msgspec

from relay.acomm.engine_state import EngineState, Snapshot
from relay.acomm.model import ArchiveNote, Message, MessageStatus, StoreFile
from relay.base.clock import NS_PER_S, Clock, iso_date
from relay.base.errors import RelayError
from relay.engine import events
from relay.engine.archives import Archives
from relay.engine.retention import RetentionCommands

LOOKS = 2_000  # messages in one step: about 2 ms
TAKES = 2_000
PAUSE_S = 60  # between one look at everything and the next
RECORD_BYTES = 128  # of a message, beside its content
DAY_S = 86_400


class RollPolicy(NamedTuple):
    """When messages are rolled, and how many into one archive."""

    after_s: int = 3_600  # since they were sent: most answers have come by then
    messages: int = 10_000  # fewer wait, up to a day: small archives are many files
    most_messages: int = 100_000
    most_bytes: int = 64 << 20  # of content and records, uncompressed
    live_messages: int = 50_000  # above this what is final goes, however young


class _Rolled(NamedTuple):
    note: ArchiveNote
    ids: tuple[int, ...]  # of the messages in it


class Roller:
    """Rolls one store. Called from its owner's thread; the writing is the executor's."""

    def __init__(
        self,
        store: RetentionCommands,
        archives: Archives,
        policy: RollPolicy,
        clock: Clock,
        executor: Executor,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._archives = archives
        self._policy = policy
        self._clock = clock
        self._executor = executor
        self._wake = wake
        self._look: list[int] = []  # message ids still to be looked at, the next one last
        self._final: list[int] = []
        self._bytes = 0
        self._pressed = False
        self._writing: Future[_Rolled] | None = None
        self._next_look_ns = 0  # monotonic
        self.error = ""  # why the last archive could not be written; empty when it could

    def due_ns(self) -> int | None:
        """When there is something to do next (monotonic); None while an archive is written."""
        if self._store.state.leaving or self._look:
            return 0
        if self._writing is not None:
            return None  # its end wakes the owner
        return self._next_look_ns

    def step(self) -> None:
        """One slice of what is to be done. Takes a few milliseconds at most."""
        state = self._store.state
        if state.leaving:
            count = min(TAKES, len(state.leaving))
            self._store.apply(events.TakenOut(count, self._clock.now_ns() // NS_PER_S))
        elif self._writing is not None:
            self._collect(self._writing)
        elif self._look:
            self._look_on()
        elif self._clock.monotonic_ns() >= self._next_look_ns or self._is_pressed():
            self._begin()

    def _is_pressed(self) -> bool:
        pressed = len(self._store.state.messages) > self._policy.live_messages
        return pressed and not self._pressed  # once a pause: what is not final stays

    def _begin(self) -> None:
        self._pressed = self._is_pressed()
        self._next_look_ns = self._clock.monotonic_ns() + PAUSE_S * NS_PER_S
        self._store.retain()  # what nobody sends to grows old, too
        state = self._store.state
        self._look = [*reversed(state.messages), *reversed(state.archive)]
        self._final, self._bytes = [], 0

    def _look_on(self) -> None:
        state = self._store.state
        limit_s = self._clock.now_ns() // NS_PER_S - (0 if self._pressed else self._policy.after_s)
        for _ in range(min(LOOKS, len(self._look))):
            number = self._look.pop()
            message = state.messages.get(number)
            if message is None:
                message = state.archive.get(number)
            elif message.created_at > limit_s:
                self._look = []  # those behind it are younger still
                break
            if message is None or not self._store.is_final(message):
                continue
            self._final.append(message.id)
            self._bytes += len(message.content) + RECORD_BYTES
            if (
                len(self._final) >= self._policy.most_messages
                or self._bytes >= self._policy.most_bytes
            ):
                self._look = []
                break
        if not self._look and self._is_enough():
            self._write()

    def _is_enough(self) -> bool:
        first = next(self._messages(self._final), None)
        if first is None:
            return False
        is_old = first.created_at <= self._clock.now_ns() // NS_PER_S - DAY_S
        return self._pressed or is_old or len(self._final) >= self._policy.messages

    def _messages(self, numbers: Iterable[int]) -> Iterator[Message]:
        """What was found final; what has gone meanwhile is left out."""
        state = self._store.state
        for number in numbers:
            message = state.messages.get(number) or state.archive.get(number)
            if message is not None:
                yield message

    def _write(self) -> None:
        now_ns, state = self._clock.now_ns(), self._store.state
        name = f"{iso_date(now_ns)}/{state.next_archive:06d}.acomm"
        self._writing = self._executor.submit(self._make, name, tuple(self._final), now_ns)
        self._writing.add_done_callback(lambda _: self._wake())

    def _make(self, name: str, numbers: tuple[int, ...], now_ns: int) -> _Rolled:
        """Write the archive. Beside the owner: what is final changes no more, it only goes."""
        messages = sorted(self._messages(numbers), key=lambda m: (m.created_at, m.id))
        ids = tuple(message.id for message in messages)
        size = self._archives.write(name, self._snapshot(messages, now_ns // NS_PER_S))
        note = ArchiveNote(
            name,
            len(messages),
            min(ids),
            max(ids),
            messages[0].created_at,
            messages[-1].created_at,
            sum(message.status is MessageStatus.ARCHIVED for message in messages),
            size,
        )
        return _Rolled(note, ids)

    def _snapshot(self, messages: Sequence[Message], now_s: int) -> Snapshot:
        """What the archive holds: the messages, their channels, who received them."""
        state = self._store.state
        counts = Counter(message.channel_id for message in messages)
        channels = tuple(
            msgspec.structs.replace(state.channels[number], message_count=count)
            for number, count in sorted(counts.items())
        )
        deliveries = {m.id: state.deliveries.get(m.id, {}) for m in messages}
        return Snapshot(
            StoreFile(messages[0].created_at, now_s, channels, tuple(messages)),
            EngineState(deliveries=deliveries),
        )

    def _collect(self, writing: Future[_Rolled]) -> None:
        if not writing.done():
            return
        self._writing = None
        error = writing.exception()
        if isinstance(error, OSError | RelayError):
            self.error = str(error)  # they stay, and are rolled later
            return
        rolled = writing.result()
        self.error = ""
        self._pressed = False  # there may be more of it
        now_s = self._clock.now_ns() // NS_PER_S
        self._store.apply(events.Rolled(rolled.note, rolled.ids, now_s))
