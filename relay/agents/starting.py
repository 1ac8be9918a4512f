"""Starting a process: its mailbox, its lock, its log, then the process; or finding it.

The lock is taken before the fork and inherited: whatever is killed when, the kernel knows whether
a process of that name lives. One whose pid was not noted is found by its environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from relay.agents import runfiles
from relay.agents.child import Child
from relay.agents.requests import Spec, check_dir, dir_refusal
from relay.agents.spawner import CannotStart, Pid, Spawner
from relay.base.clock import Clock, boot_id
from relay.base.config import SpawnSettings
from relay.base.errors import RelayError
from relay.base.home import Home
from relay.base.logs import LogCall
from relay.ledger.processes import STARTING


class _Registered(msgspec.Struct):
    """Who says in meta.json to be an agent."""

    pid: int | None = None
    pid_start_ticks: int | None = None


class Starter:
    """Starts processes. Used from the loop's thread.

    ``before_start`` is called right before a process is started, for the first time or again, with
    its name and what tells this start from every other: so its first message is there when it is.
    """

    def __init__(
        self,
        settings: SpawnSettings,
        home: Home,
        spawner: Spawner,
        clock: Clock,
        log: LogCall,
        before_start: Callable[[str, str], object],
    ) -> None:
        self._settings = settings
        self._home = home
        self._spawner = spawner
        self._clock = clock
        self._log = log
        self._before_start = before_start

    def start(self, child: Child, *, resumed: bool = False, is_done: bool = False) -> bool:
        """Start it, or find what was started for this request; its row says so then.

        ``resumed``: the request is of before a crash. ``is_done``: it was answered, so it is not
        started once more. False: it has ended since; or something of it still holds the lock.
        Errors: CannotStart.
        """
        spec = child.spec
        assert spec is not None
        try:
            self._home.make_agent(spec.name)
            pid = self.find(spec) if resumed else None
            if pid is None:
                pid = self._start(child, spec, is_done=is_done)
        except (OSError, RelayError) as exc:
            raise CannotStart(f"its mailbox, lock or log cannot be used: {exc}") from exc
        if pid is None:
            return False
        self.note(child, pid)
        return True

    def find(self, spec: Spec) -> Pid | None:
        """What was started for the request of this spec, when it still runs."""
        return self._spawner.find(spec.request_id, self._home.root)

    def note(self, child: Child, pid: Pid) -> None:
        """The row of a process that runs from now on."""
        now = self._clock.now_ns()
        child.check_at, child.cpu_s, child.busy_at = 0, None, now
        child.is_finished = False
        child.row = child.row.moved(
            STARTING,
            now,
            pid=pid.number,
            pid_start=pid.start,
            started_at=now,
            ended_at=None,
            exit_code=None,
            last_error=None,
        )

    def check_free(self, name: str) -> None:
        """Errors: CannotStart while somebody who was started by hand is this agent, or nobody can
        look whether one is."""
        try:
            said = msgspec.json.decode(self._home.read_meta(name) or b"{}", type=_Registered)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, RelayError):
            return
        except OSError as exc:
            raise CannotStart(f"meta.json of {name} cannot be read: {exc.strerror}") from exc
        if said.pid is None or said.pid_start_ticks is None or said.pid <= 0:
            return
        if self._spawner.exit_status(Pid(said.pid, f"{boot_id()} {said.pid_start_ticks}")) is None:
            raise CannotStart(
                f"{name} runs already, pid {said.pid}, and the relay did not start it: end it first"
            )

    def _start(self, child: Child, spec: Spec, *, is_done: bool) -> Pid | None:
        with self._home.dirs() as dirs:
            lock_fd = runfiles.lock(dirs, spec.name)
            if lock_fd is None:
                return self._holder(child, spec)
            if is_done:
                os.close(lock_fd)
                return None
            try:
                child.output_from = runfiles.output_size(dirs, spec.name)
                output_fd = runfiles.open_output(dirs, spec.name)
                try:
                    return self._fork(child, spec, lock_fd, output_fd)
                finally:
                    os.close(output_fd)
            finally:
                os.close(lock_fd)

    def _fork(self, child: Child, spec: Spec, lock_fd: int, output_fd: int) -> Pid:
        if check_dir(spec.cwd, self._settings.roots) != spec.cwd:  # it may be another by now
            raise CannotStart(dir_refusal(spec.cwd, self._settings.roots))
        self._before_start(spec.name, f"{spec.request_id} {child.row.restarts}")
        pid = self._spawner.start(spec, self._home.root, lock_fd, output_fd)
        self._log(
            f"Started {spec.name}, pid {pid.number}",
            action="start_process",
            agent=spec.name,
            cli=spec.cli,
            message_id=spec.request_id,
        )
        return pid

    def _holder(self, child: Child, spec: Spec) -> Pid | None:
        """Who holds the lock: ours, whose pid a crash kept from being noted, or somebody."""
        pid = self.find(spec)
        if pid is None and child.row.started_at is None:
            raise CannotStart(lock_held_text(spec.name))
        return pid

    def left_over(self, name: str) -> str:
        """What is to be said when something still holds the lock of a process that ended."""
        try:
            with self._home.dirs() as dirs:
                lock_fd = runfiles.lock(dirs, name)
        except (OSError, RelayError):
            return ""
        if lock_fd is None:
            return "; " + lock_held_text(name)
        os.close(lock_fd)
        return ""


def lock_held_text(name: str) -> str:
    """What a person is told of a lock whose holder the relay cannot name."""
    return (
        f"something holds run/{name}.lock, and the relay does not know what: "
        "`fuser` or `lsof` of that file names it; end it, then ask again"
    )
