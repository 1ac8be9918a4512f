"""The roster: every directory under ``agents/`` with a valid name is an agent.

`mkdir -p` is enough to become an agent: the watch is added first, then the directory is listed, so
no file dropped in between is missed; the ledger recognizes files seen twice. See docs/states.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from relay.base import fsio
from relay.base.errors import UnsafePath
from relay.base.home import META, Dirs, Home
from relay.base.names import LEAD, lead_by_name
from relay.base.watcher import Watcher

LONG_LOOK_S = 0.005  # of CPU: some 200 agents
LOOK_FACTOR = 20  # nobody has the role of the lead: believed for so many times a look at all
LIMIT_ADVICE = "raise fs.inotify.max_user_watches (two watches an agent)"


class Meta(msgspec.Struct, frozen=True):
    """Fields of an agent's meta.json that the relay reads; other keys belong to the agent."""

    pid: int | None = None
    role: str | None = None
    public_key: str | None = None
    # Written by agents' own scripts: of any type; ignored unless an integer.
    pid_start_ticks: Any = None
    pid_namespace: Any = None
    started_at: Any = None
    unregisters: Any = None  # False: it cannot take itself out when it ends


class Changes:
    """The result of a refresh."""

    def __init__(self) -> None:
        self.appeared: list[str] = []  # to be registered and scanned
        self.gone: list[str] = []
        self.incomplete = False  # an agent is not watched: refresh again soon


class Roster:
    """The agents of a home. Owned by the loop."""

    def __init__(self, home: Home, watcher: Watcher, lead: str, log: Callable[..., object]) -> None:
        self._home = home
        self.home_root = home.root
        self._watcher = watcher
        self._lead = lead
        self._log = log
        self._metas: dict[str, tuple[tuple[int, int], Meta]] = {}  # by (inode, mtime)
        self._inodes: dict[str, int] = {}
        self._known_lead: str | None = None
        self._no_lead_until = 0.0  # nobody has the role, as far as it was looked (monotonic)
        self.agents: set[str] = set()
        self._warned: set[str] = set()
        self.unwatched: set[str] = set()  # scanned instead: inotify has no watch left

    def refresh(self, *, complete: bool = True) -> Changes:
        """List ``agents/``, watch new and replaced directories, and drop removed ones.

        ``complete`` False: a known agent whose directories are missing is left alone for now, so
        that they are not created again while they are being removed.
        """
        changes = Changes()
        present = self._home.agent_inodes()
        for name in sorted(self.agents - present.keys()):
            self._forget(name)
            changes.gone.append(name)
        for name, inode in sorted(present.items()):
            if name in self.agents and self._inodes[name] != inode:
                self._forget(name)  # another directory in the place of the one that was watched
            if name not in self.agents or (complete and not self._watcher.watches(name)):
                if self._admit(name):
                    self._inodes[name] = inode
                    changes.appeared.append(name)
        changes.incomplete = any(not self._watcher.watches(name) for name in self.agents)
        return changes

    def _forget(self, name: str) -> None:
        self._watcher.remove_agent(name)
        self.agents.discard(name)
        self.unwatched.discard(name)
        self._warned.discard(name)
        self._metas.pop(name, None)
        self._inodes.pop(name, None)

    def _admit(self, name: str) -> bool:
        """Complete an agent's directories and watch them; False if it is not an agent.

        An agent with an unreadable directory or a broken inbox is still an agent: its messages
        wait.
        """
        problems: list[OSError | UnsafePath]
        try:
            problems = self._home.complete_agent(name)
        except (FileNotFoundError, UnsafePath) as exc:
            self._warn(name, f"Ignored agent {name}: {exc}", "refuse_agent")
            self.agents.discard(name)
            return False
        except OSError as exc:
            problems = [exc]
        if problems:
            self._warn(name, f"Agent {name} is incomplete: {problems[0]}", "broken_agent")
        self.agents.add(name)
        if self._watcher.add_agent(name):
            self.unwatched.discard(name)
            self._warned.discard(name)
        else:
            self.unwatched.add(name)
            self._warn(
                name,
                f"Scanning agent {name} every 100 ms: inotify has no watches left; {LIMIT_ADVICE}",
                "scan_instead",
            )
        return True

    def _warn(self, name: str, text: str, action: str) -> None:
        """Log once for an agent, until it is complete again."""
        if name not in self._warned:
            self._warned.add(name)
            self._log(text, action=action, agent=name, level="warning")

    def lead(self) -> str | None:
        """The agent addressed as ``Lead``: by configuration, else by its role in meta.json."""
        if self._lead:
            return self._lead if self._lead in self.agents else None
        with self._home.dirs() as dirs:
            known = self._known_lead
            if known in self.agents and self.meta(dirs, known or "").role == LEAD:
                return known  # asked again for each message: one look, not one an agent
            if time.monotonic() < self._no_lead_until:
                return None
            begin = time.thread_time()  # a busy machine makes no look longer
            leads = [name for name in self.agents if self.meta(dirs, name).role == LEAD]
        self._known_lead = min(leads, default=None)
        cost_s = time.thread_time() - begin
        if not leads and cost_s > LONG_LOOK_S:
            self._no_lead_until = time.monotonic() + LOOK_FACTOR * cost_s
        return self._known_lead

    def trusted_lead(self) -> str | None:
        """The agent with the lead's permissions: the lead, or without one an agent named so.

        A lead named in config.json that is missing has no substitute.
        """
        return self.lead() or (None if self._lead else lead_by_name(self.agents))

    def meta(self, dirs: Dirs, name: str) -> Meta:
        """An agent's meta.json, read again when it changed; empty if it is missing or invalid.

        If it cannot be read now, the previous content is returned.
        """
        known = self._metas.get(name)
        try:
            folder = dirs.get("agents", name)
            status = os.stat(META, dir_fd=folder, follow_symlinks=False)
            version = (status.st_ino, status.st_mtime_ns)
            if known is None or known[0] != version:
                data, _ = fsio.read_regular(META, folder, 1 << 16, shared=True)
                known = (version, msgspec.json.decode(data, type=Meta))
                self._metas[name] = known
            return known[1]
        except (FileNotFoundError, UnsafePath, ValueError, RecursionError, msgspec.MsgspecError):
            return Meta()
        except OSError:
            return Meta() if known is None else known[1]
