"""How long the ledger's WAL is, who keeps it long, and what is done about it.

SQLite begins the WAL anew once all of it is in the database and nobody reads an older state. A
reader that never ends its transaction keeps it growing: it is named, and before the disk is full
nothing more is taken in. When he ends, the WAL is folded into the database and cut.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from enum import StrEnum
from typing import NamedTuple

from relay.base.clock import NS_PER_S, Clock
from relay.base.config import LedgerSettings as Settings
from relay.base.errors import LedgerError
from relay.ledger import WAL_KEPT_BYTES, Ledger
from relay.ledger import file as ledger_file

CHECK_NS = NS_PER_S  # one stat
AGAIN_NS = 30 * NS_PER_S  # who holds it is asked again so often: it may be another one by then
UNSEEN = 0  # in the place of a pid: it was looked for, and nobody was found
_MIB = 1 << 20


class State(StrEnum):
    """What the length means."""

    OK = "ok"
    ALERT = "alert"  # longer than ledger.wal_alert_mib: somebody reads, and does not end
    FULL = "full"  # longer than ledger.wal_most_mib: nothing is taken in


class Length(NamedTuple):
    """The WAL at one moment."""

    state: State
    n_bytes: int

    def sentence(self, holders: dict[int, str]) -> str:
        """What is wrong and whom to end, in a line; empty when nothing is."""
        if self.state is State.OK:
            return ""
        seen = {pid: name for pid, name in holders.items() if pid != UNSEEN}
        who = ", ".join(f"pid {pid} ({name})" for pid, name in sorted(seen.items()))
        return (
            f"ledger.db-wal has {self.n_bytes // _MIB} MiB, for somebody reads the ledger and does "
            f"not end: {who or 'a process that we cannot see'}"
        )


def look(path: str, settings: Settings) -> Length:
    """How long the WAL of the ledger at ``path`` is; for anybody, it is one stat."""
    size = n_bytes(path)
    if size >= settings.wal_most_mib * _MIB:
        return Length(State.FULL, size)
    return Length(State.ALERT if size >= settings.wal_alert_mib * _MIB else State.OK, size)


def n_bytes(path: str) -> int:
    """The size of the WAL of the ledger at ``path``; 0 where there is none."""
    try:
        return os.stat(path + "-wal").st_size
    except FileNotFoundError:
        return 0


def others(path: str) -> dict[int, str]:
    """Who else has the ledger open: pid -> program."""
    mine = os.getpid()
    return {pid: name for pid, name in ledger_file.holders(path).items() if pid != mine}


class WalWatch:
    """Looks once a second. Owned by the loop; what takes long is done in ``executor``."""

    def __init__(
        self,
        ledger: Ledger,
        path: str,
        settings: Settings,
        clock: Clock,
        executor: Executor,
        log: Callable[..., object],
    ) -> None:
        self._ledger = ledger
        self._path = path
        self._settings = settings
        self._clock = clock
        self._executor = executor
        self._log = log
        self.length = Length(State.OK, 0)
        self.holders: dict[int, str] = {}
        self.paused = ""  # why nothing is taken in
        self._told = State.OK
        self._asked_ns = 0
        self._job: Future[tuple[bool, dict[int, str] | None]] | None = None
        self._next_ns = 0

    def poll(self, *, idle: bool) -> int:
        """Look, when it is time; when to look again (monotonic ns).

        ``idle``: no batch waits, so that a fold may take its time.
        """
        now = self._clock.monotonic_ns()
        if now < self._next_ns:
            return self._next_ns
        self._next_ns = now + CHECK_NS
        self._take_result()
        self.length = look(self._path, self._settings)
        state = self.length.state
        if state is State.OK:
            self._end_episode()
        elif state is not self._told and self.holders:
            self._tell()
        long = self.length.n_bytes > WAL_KEPT_BYTES
        if self._job is None and (state is not State.OK or (long and idle)):
            ask = state is not State.OK and (not self.holders or now - self._asked_ns >= AGAIN_NS)
            if ask:
                self._asked_ns = now
            self._job = self._executor.submit(_fold, self._path, ask)
        self.paused = self._pause_reason() if state is State.FULL else ""
        return self._next_ns

    def _pause_reason(self) -> str:
        return (
            f"intake is paused: {self.length.sentence(self.holders)}; end it: files wait in their "
            "outboxes, and it goes on by itself"
        )

    def _take_result(self) -> None:
        """The job that is done: who holds it; and where all is in the database, the WAL is cut."""
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        try:
            complete, holders = job.result()
        except (OSError, LedgerError):
            return  # the next look tries again
        if holders is not None:
            self.holders = holders or {UNSEEN: ""}
        if complete:
            with contextlib.suppress(LedgerError):  # somebody began to read just now
                self._ledger.fold()

    def _tell(self) -> None:
        """Once for each worse state of an episode."""
        text = self.length.sentence(self.holders)
        if self.length.state is State.FULL:
            text += "; nothing is taken in until it does"
        elif self._told is State.FULL:
            text += "; messages are taken in again"
        self._log(
            text, action="wal_long", level="warning", pids=sorted(self.holders.keys() - {UNSEEN})
        )
        self._told = self.length.state

    def _end_episode(self) -> None:
        self.holders, self._asked_ns = {}, 0
        if self._told is not State.OK:
            self._told = State.OK
            self._log("ledger.db-wal is short again", action="wal_short")


def _fold(path: str, ask: bool) -> tuple[bool, dict[int, str] | None]:
    """Copy what may be copied into the database; (all of it?, who has it open where asked).

    A passive checkpoint waits for nobody and holds nobody up, the writer neither.
    """
    with contextlib.closing(ledger_file.connect(path, timeout_s=0)) as db:
        busy, frames, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return not busy and frames == copied, others(path) if ask else None
