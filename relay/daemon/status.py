"""Status shared with other threads, so that they can answer while the loop is busy.

    StatusSnapshot   frozen numbers of one instant, made by the loop at most once a second
    SharedStatus     the latest snapshot, and what the daemon knows outside of the loop

Attributes of ``SharedStatus`` are replaced whole and never changed in place, so any thread may read
them. While nothing happens the snapshot stays, and its age tells.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock
from relay.base.config import Config
from relay.base.disk import DiskState, DiskUsage
from relay.base.metrics import START, STOP, WAIT, Buckets, Metrics
from relay.base.watcher import Watcher
from relay.delivery.loop import Dispatcher
from relay.engine.commstore import CommStore

EVERY_NS = NS_PER_S
PAUSE_FACTOR = 100  # pause of this many times the last snapshot's cost: at most 1 % of the loop
MOST_TIMERS = 5_000  # acknowledgments counted one by one, which takes two milliseconds


class StatusSnapshot(NamedTuple):
    """The loop's numbers at one instant."""

    at_ns: int  # Unix time
    monotonic_ns: int
    watcher: str
    totals: dict[str, int]  # by the field names of Metrics
    stages: dict[str, Buckets]
    delivery_s: Buckets
    commit_s: Buckets
    batch_files: Buckets
    queue_files: int  # seen in outboxes, not taken yet
    oldest_ns: int | None  # monotonic: since when the first of them waits
    agents: int
    unwatched: int  # scanned instead: inotify has no watch left
    watches: int
    held_back: int  # messages that max_pending keeps back
    active: int  # messages of the live store
    dead_letters: int
    owed: dict[str, int]  # answers and acknowledgments, by agent; empty where they are many
    owed_acks: int  # all of them; where they are many, no fewer than there are
    journal_end: int  # bytes of the stream so far


TOTALS = (
    *("accepted", "refused", "postponed", "written", "again", "held", "bounced", "expired"),
    *("dead", "read", "acked", "overflows"),
)


class StatusPublisher:
    """Makes a snapshot when one is due. Owned by the loop."""

    def __init__(
        self, dispatcher: Dispatcher, store: CommStore, watcher: Watcher, clock: Clock
    ) -> None:
        self._dispatcher = dispatcher
        self._store = store
        self._watcher = watcher
        self._clock = clock
        self._not_before_ns = 0
        self._overflows = 0
        self._is_behind = True

    def due_ns(self) -> int | None:
        """Time of the next snapshot (monotonic ns); None if nothing has happened since."""
        return self._not_before_ns if self._is_behind else None

    def step(self, *, news: bool) -> StatusSnapshot | None:
        """A snapshot when one is due. ``news``: something happened since the last call."""
        self._is_behind |= news
        now = self._clock.monotonic_ns()
        if not self._is_behind or now < self._not_before_ns:
            return None
        snapshot = self._make(now)
        took_ns = self._clock.monotonic_ns() - now
        self._not_before_ns = now + max(EVERY_NS, PAUSE_FACTOR * took_ns)
        self._is_behind = False
        return snapshot

    def _make(self, now: int) -> StatusSnapshot:
        dispatcher, state = self._dispatcher, self._store.state
        tally, roster = dispatcher.tally, dispatcher.roster
        tally.overflows += self._watcher.overflows - self._overflows
        self._overflows = self._watcher.overflows
        owed, owed_acks = self._owed()
        return StatusSnapshot(
            at_ns=self._clock.now_ns(),
            monotonic_ns=now,
            watcher=self._watcher.name,
            totals={name: getattr(tally, name) for name in TOTALS},
            stages={name: times.read() for name, times in tally.stages.items()},
            delivery_s=tally.delivery_s.read(),
            commit_s=tally.commit_s.read(),
            batch_files=tally.batch_files.read(),
            queue_files=dispatcher.backlog,
            oldest_ns=dispatcher.oldest_ns(),
            agents=len(roster.agents),
            unwatched=len(roster.unwatched),
            watches=self._watcher.watches_held,
            held_back=len(state.pending.held),
            active=len(state.messages),
            dead_letters=len(state.dead),
            owed=owed,
            owed_acks=owed_acks,
            journal_end=dispatcher.journal_end,
        )

    def _owed(self) -> tuple[dict[str, int], int]:
        state = self._store.state
        if len(state.timers) + len(state.owed) > MOST_TIMERS:
            return {}, len(state.timers) + len(state.owed)
        current = {timer[1:] for timer in state.timers if state.is_current(timer)}
        current |= {(number, name) for number, known in state.owed.items() for name in known}
        owed: dict[str, int] = {}
        for _, recipient in current:
            owed[recipient] = owed.get(recipient, 0) + 1
        return owed, len(current)


class Health(NamedTuple):
    """Whether the relay is alive, and whether it takes messages."""

    is_healthy: bool  # the loop goes on: no step of it has lasted too long
    is_ready: bool  # a session serves, and takes what agents drop
    reasons: tuple[str, ...]  # why one of them is not so


class SharedStatus:
    """Status of a running relay. Written by the daemon's thread, read by any."""

    def __init__(self, home: str, config: Config, clock: Clock) -> None:
        self.home = home
        self.config = config
        self.clock = clock
        self.tally = Metrics(clock)
        self.started_at_ns = clock.now_ns()
        self.epoch = 0  # of the session; 0: none has begun
        self.snapshot: StatusSnapshot | None = None
        self.disk: DiskUsage | None = None
        self.pauses: dict[str, str] = {}  # who has nothing taken out of the outboxes -> why
        self.trouble = ""  # why no session serves
        self.config_error = ""  # config.json was read again, and is not what is followed
        self.tiers_waiting: tuple[str, ...] = ()  # steps of the journal's tiers that failed
        self.ledger_damage = ""  # what the last look through the ledger found
        self.is_serving = False

    @property
    def paused(self) -> str:
        """The reason why intake is paused, in one line; empty if it is not."""
        return "; ".join(self.pauses.values())

    def health(self) -> Health:
        """Current health, independent of the snapshot's age."""
        reasons: list[str] = []
        step, since_s = self.tally.stuck_s()
        is_healthy = since_s < self.config.admin.stall_after_s
        if not is_healthy:
            reasons.append(f"the loop is stuck: in step {step} for {since_s:.0f} s")
        if self.trouble:
            reasons.append(f"not serving, will retry: {self.trouble}")
        elif not self.is_serving:
            verbs = {START: "it is starting", STOP: "it is stopping", WAIT: "it is starting"}
            reasons.append(verbs.get(step, "it is starting"))
        reasons += self.pauses.values()
        is_ready = is_healthy and self.is_serving and not self.pauses
        return Health(is_healthy, is_ready, tuple(reasons))

    def snapshot_age_s(self) -> float | None:
        """Age of the snapshot; None before the first one."""
        if self.snapshot is None:
            return None
        return (self.clock.monotonic_ns() - self.snapshot.monotonic_ns) / NS_PER_S


def pause_reason(disk: DiskUsage | None) -> str:
    """The reason to pause intake because of the disk, or an empty string."""
    if disk is None or disk.state is not DiskState.FLOOR:
        return ""
    floor = disk.floor_bytes >> 20
    return (
        f"intake is paused: the disk has {disk.free_bytes >> 20} MiB free, "
        f"the floor is {floor} MiB; files wait in their outboxes, and intake resumes by itself"
    )
