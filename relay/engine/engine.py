"""The engine: one state, changed by events alone, and the parts that decide on them.

    channels      channels, participants, subscriptions
    messages      accepting, finding and querying messages
    deliveries    their deliveries, receiving and acknowledgments
    obligations   the answers that recipients owe
    retries       overdue deliveries and dead letters
    archives      retention, the room of the store, archive files

A command of a part validates, makes its events and applies each by ``Core.apply``; a refusal is
an error that names the field, and leaves the store unchanged. The owner of an engine delivers: a
relay writes files and reports them, ``CommStore`` puts messages into queues. Not thread-safe: it
has one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from relay.acomm import check, store_file
from relay.acomm.engine_state import StoreSnapshot
from relay.acomm.model import MessageStatus, StoreFile
from relay.base.clock import NS_PER_S, Clock
from relay.base.errors import FormatError
from relay.engine import events, rules, transitions
from relay.engine.archive_files import ArchiveFiles
from relay.engine.archives import Archives
from relay.engine.channels import Channels
from relay.engine.deliveries import Deliveries, Obligations
from relay.engine.messages import Messages
from relay.engine.retries import Retries
from relay.engine.routing import derive_deliveries
from relay.engine.rules import DEFAULT_LIMITS, Limits
from relay.engine.state import IN_QUEUES, Core, DeliveryRules, State, Warn, log_warning


class StoreStats(NamedTuple):
    """A store in numbers."""

    channels: int
    messages: dict[MessageStatus, int]  # live ones and dead letters; statuses that occur
    subscriptions: int
    dead_letters: int  # given up for at least one recipient
    archived: int
    pending: int  # delivered, and not received or not acknowledged
    held: int  # accepted, and held by max_pending
    duplicates: int  # entries of the exactly-once set
    file_bytes: int  # when it was last written; 0: never
    used_bytes: int  # estimate of its present size
    file_sequence: int  # the events that the file covers
    sequence: int  # the events so far


class Engine(Core):
    """A store in memory.

    ``transition``: applies an event to the state in the place of ``transitions.apply``, for an
    owner that has to do more. ``keeps_events``: ``fresh_events`` collects them for the owner's
    journal.
    """

    def __init__(
        self,
        clock: Clock,
        state: State | None = None,
        limits: Limits = DEFAULT_LIMITS,
        rules: DeliveryRules = IN_QUEUES,
        *,
        archive_files: ArchiveFiles | None = None,
        warn: Warn | None = None,
        transition: Callable[[events.Event], None] | None = None,
        keeps_events: bool = False,
    ) -> None:
        state = state or State(clock.now_ns() // NS_PER_S)
        transition = transition or partial(transitions.apply, state)
        super().__init__(clock, state, limits, rules, warn or log_warning, transition, keeps_events)
        self.archives = Archives(self, archive_files)
        self.channels = Channels(self, self.archives)
        self.messages = Messages(self, self.channels, self.archives)
        self.obligations = Obligations(self)
        self.deliveries = Deliveries(self, self.obligations)
        self.retries = Retries(self, self.deliveries, self.obligations)

    @property
    def sequence(self) -> int:
        """The number of events since the store was created."""
        return self.state.sequence

    def snapshot(self) -> StoreSnapshot:
        """Everything in the store as immutable values, for any thread to read."""
        return self.state.snapshot()

    def stats(self) -> StoreStats:
        """The store in numbers. Scans every live message."""
        state = self.state
        pending = sum(
            message.id not in state.pending.held
            and rules.is_pending(
                state.channels[message.channel_id],
                message,
                state.deliveries.get(message.id, {}).values(),
                state.owed.get(message.id, {}),
            )
            for message in state.messages.values()
        )
        known = [*state.messages.values(), *state.dead_letters.values()]
        return StoreStats(
            len(state.channels),
            dict(sorted(Counter(message.status for message in known).items())),
            len(state.subscriptions),
            len(state.dead),
            len(state.archive),
            pending,
            len(state.pending.held),
            len(state.duplicates),
            self.archives.file_bytes,
            self.archives.used_bytes(),
            self.archives.file_sequence,
            state.sequence,
        )


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
