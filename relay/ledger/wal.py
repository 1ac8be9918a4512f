"""Monitoring of the ledger's WAL: its size, the readers that hold it, checkpoints, and pauses.

SQLite reuses the WAL once all of it is in the database and no reader needs an older state. A
reader that never ends its transaction lets it grow: the reader is named in the log, and intake
pauses before the disk is full. When the reader ends, the WAL is checkpointed and truncated.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Executor, Future
from enum import StrEnum

from relay.base.clock import NS_PER_S, Clock
from relay.base.config import LedgerSettings as Settings
from relay.base.errors import LedgerError
from relay.base.logs import LogCall
from relay.ledger import file as ledger_file
from relay.ledger.schema import WAL_KEPT_BYTES

CHECK_NS = NS_PER_S  # one stat
NEVER_NS = 1 << 62
AGAIN_NS = 30 * NS_PER_S  # how often the readers are looked up again
_MIB = 1 << 20


class WalState(StrEnum):
    """The size of the WAL, compared with the limits in the settings."""

    OK = "ok"
    ALERT = "alert"  # larger than ledger.wal_alert_mib: a reader does not end
    FULL = "full"  # larger than ledger.wal_most_mib: intake pauses


def describe_wal(n_bytes: int, holders: dict[int, str]) -> str:
    """The problem of a long WAL, and the processes to end, in one line."""
    who = ", ".join(f"pid {pid} ({name})" for pid, name in sorted(holders.items()))
    return (
        f"ledger.db-wal has {n_bytes // _MIB} MiB, because a reader keeps its transaction "
        f"open: {who or 'a process of another user'}"
    )


def measure_wal(path: str, settings: Settings) -> tuple[WalState, int]:
    """Measure the WAL of the ledger at ``path``, in bytes; one stat, from any thread."""
    size = wal_bytes(path)
    if size >= settings.wal_most_mib * _MIB:
        return WalState.FULL, size
    return WalState.ALERT if size >= settings.wal_alert_mib * _MIB else WalState.OK, size


def wal_bytes(path: str) -> int:
    """The size of the WAL of the ledger at ``path``; 0 if it does not exist."""
    try:
        return os.stat(path + "-wal").st_size
    except FileNotFoundError:
        return 0


def wal_readers(path: str) -> dict[int, str]:
    """The other processes that have the ledger open: pid -> program name."""
    mine = os.getpid()
    return {pid: name for pid, name in ledger_file.holders(path).items() if pid != mine}


class WalWatch:
    """Checks the WAL after turns that may have written to it, and each second while it is long.

    Owned by the loop; slow work runs in ``executor``.
    """

    def __init__(
        self,
        path: str,
        settings: Settings,
        clock: Clock,
        executor: Executor,
        log: LogCall,
    ) -> None:
        self._path = path
        self._settings = settings
        self._clock = clock
        self._executor = executor
        self._log = log
        self.state = WalState.OK
        self.paused = ""  # why intake is paused; empty if it is not
        self._n_bytes = 0
        self._holders: dict[int, str] | None = None  # None: not looked up while it is long
        self._reported = WalState.OK
        self._asked_ns = 0
        self._job: Future[dict[int, str] | None] | None = None
        self._next_ns = 0

    def poll(self, *, idle: bool) -> int:
        """Check the WAL when it is due; the time of the next check (monotonic ns).

        ``idle``: no batch waits, so that a checkpoint may take its time.
        """
        now = self._clock.monotonic_ns()
        if now < self._next_ns:
            return self._next_ns
        self._next_ns = now + CHECK_NS
        self._take_result()
        self.state, self._n_bytes = measure_wal(self._path, self._settings)
        if self.state is WalState.OK:
            self._end_episode()
        elif self.state is not self._reported and self._holders is not None:
            self._report()
        is_long = self._n_bytes > WAL_KEPT_BYTES
        if self._job is None and (self.state is not WalState.OK or (is_long and idle)):
            find_readers = self.state is not WalState.OK and (
                self._holders is None or now - self._asked_ns >= AGAIN_NS
            )
            if find_readers:
                self._asked_ns = now
            self._job = self._executor.submit(_fold_and_look, self._path, find_readers)
        self.paused = self._pause_reason() if self.state is WalState.FULL else ""
        if self.state is WalState.OK and not is_long and self._job is None:
            return now + NEVER_NS  # it grows by what the loop writes, which then looks again
        return self._next_ns

    def _pause_reason(self) -> str:
        return (
            f"intake is paused: {describe_wal(self._n_bytes, self._holders or {})}; end that "
            "process: files wait in their outboxes until then"
        )

    def _take_result(self) -> None:
        """Take the readers from a finished job."""
        if self._job is None or not self._job.done():
            return
        job, self._job = self._job, None
        with contextlib.suppress(OSError, LedgerError):  # the next check tries again
            found = job.result()
            self._holders = self._holders if found is None else found

    def _report(self) -> None:
        """Log each change of state of an episode once."""
        holders = self._holders or {}
        text = describe_wal(self._n_bytes, holders)
        if self.state is WalState.FULL:
            text += "; intake is paused until it ends"
        elif self._reported is WalState.FULL:
            text += "; intake continues"
        self._log(text, action="wal_long", level="warning", pids=sorted(holders))
        self._reported = self.state

    def _end_episode(self) -> None:
        self._holders, self._asked_ns = None, 0
        if self._reported is not WalState.OK:
            self._reported = WalState.OK
            self._log("ledger.db-wal is short again", action="wal_short")


def fold(path: str) -> bool:
    """Copy the WAL into the database and truncate it; False while a reader needs it.

    Waits for nobody, and blocks no reader, and the writer for a moment. Errors: LedgerError.
    """
    with contextlib.closing(ledger_file.connect(path, timeout_s=0)) as db:
        busy, frames, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not busy and frames == copied:
            (busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy and frames == copied


def _fold_and_look(path: str, find_readers: bool) -> dict[int, str] | None:
    """Fold the WAL as far as possible; the readers if requested."""
    fold(path)
    return wal_readers(path) if find_readers else None
