"""``meta.json``: the process that currently acts as an agent, safe against reused pids.

    pid              the process
    pid_start_ticks  when it started, clock ticks after boot (field 22 of /proc/PID/stat);
                     null where there is no /proc
    pid_namespace    number of the PID namespace in which pid is valid: the processes of another
                     one, a container's, cannot be seen, and are never taken to have ended
    started_at       Unix nanoseconds at which it became this agent
    unregisters      false: it cannot unregister when it ends (a shell with relay.sh)

On a normal exit the first three are removed: a registered process that is gone has died, unless it
cannot unregister, and mail to it bounces. Other keys (``role``, ``public_key``) are kept.
This module also reads the settings of the relay that a sender needs.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from time import monotonic
from typing import Any

from agent_sdk.disk import install
from relay.base import fsio, process_info
from relay.base.discovery import default_root, two_homes
from relay.base.errors import HomeMissing, RelayError
from relay.base.home import META, PENDING, Dirs, Home
from relay.base.message import DEFAULT_MAX_BODY_BYTES
from relay.base.names import DEFAULT_MAX_ATTACHMENT_MIB

NO_LEAVING = "unregisters"
CHECK_S = 5.0  # between two looks at the registration
_LIMIT = rb'"%s"\s*:\s*(\d{1,12})\b'


class Closed:
    """Stands in for the parts of a closed agent."""

    def __getattr__(self, name: str) -> Any:
        raise RelayError("this Agent is closed")


def with_remedy(error: RelayError) -> RelayError:
    """Show the hint below a traceback, too."""
    error.add_note(error.hint)
    return error


class AgentHome(Home):
    """The home of an agent: whatever directory has its path, as for the relay.

    ``relay restore`` puts another one in its place. The agent enters that when it is seen.
    """

    def __init__(self, root: str, agent: str, started_at: int | None) -> None:
        """Open it. ``started_at``: the process registers, and began at this time (Unix ns)."""
        super().__init__(root)
        self._agent = agent
        self._started_at = started_at
        self._checked_at = monotonic()
        self.replaced: Callable[[], object] = lambda: None  # called when another one was entered

    def enter(self) -> None:
        """Make the agent's mailbox, and register the process. Errors: as ``make_agent``."""
        self.make_agent(self._agent)
        if self._started_at is not None:
            register(self, self._agent, self._started_at)

    def dirs(self) -> Dirs:
        """Open directories below the home. Errors: HomeMissing; UnsafePath; those of ``enter``."""
        is_other = False
        with contextlib.suppress(OSError):  # gone: what it was is used until there is another one
            there = os.stat(self.root, follow_symlinks=False)
            is_other = not os.path.samestat(there, os.fstat(self._fd))
        if is_other:
            with Home(self.root) as other:
                before = os.dup(self._fd)
                try:  # the number stays: another thread may be using it
                    os.dup2(other._fd, self._fd, inheritable=False)
                    self.enter()
                except BaseException:  # the next call tries it again
                    os.dup2(before, self._fd, inheritable=False)
                    raise
                finally:
                    os.close(before)
            self.replaced()
        elif self._started_at is not None and monotonic() > self._checked_at + CHECK_S:
            self._checked_at = monotonic()
            self._register_again(self._started_at)
        return super().dirs()

    def _register_again(self, started_at: int) -> None:
        """Take the place of a registered process that has ended: mail would bounce."""
        with contextlib.suppress(OSError, RelayError, ValueError, TypeError):
            known = _meta_of(self, self._agent) or {}
            pid = known.get("pid")
            if pid is None or process_info.is_elsewhere(known.get("pid_namespace")):
                return
            if not process_info.runs(pid, known.get("pid_start_ticks")):
                register(self, self._agent, started_at)


def open_home(
    given: str | os.PathLike[str] | None, agent: str, started_at: int | None
) -> tuple[AgentHome, RelayError | None]:
    """Open the home of this process, and return it with the error for taking messages from it.

    Errors: HomeMissing, also for an empty path, as of an unset variable; UnsafePath for a home
    that is refused.
    """
    path = os.fspath(given) if given is not None else None
    doubt = None if path else two_homes()
    try:
        if path == "":
            raise HomeMissing("home is empty: expected the path of a directory, or None")
        return AgentHome(default_root(path), agent, started_at), doubt and with_remedy(doubt)
    except HomeMissing as exc:
        raise with_remedy(exc) from None


def leave(root: str, name: str, pid: int) -> bool:
    """Unregister an agent, unless called in a forked child of the process ``pid``."""
    if os.getpid() == pid:
        with contextlib.suppress(RelayError, OSError), Home(root) as home:
            unregister(home, name)
    return True


def register(home: Home, agent: str, now_ns: int) -> None:
    """Register this process in the agent's meta.json, replacing an earlier one.

    A file that is not a JSON object is renamed to ``meta.json.bad``.
    """
    with home.changing("agents", agent), home.dirs() as dirs:
        folder = dirs.get("agents", agent)
        meta = _meta_of(home, agent)
        if meta is None:
            fsio.rename(META, folder, META + ".bad", folder)
            meta = {}
        meta.pop(NO_LEAVING, None)
        meta |= _this_process() | {"started_at": now_ns}
        _replace(meta, dirs, agent)


def unregister(home: Home, agent: str) -> None:
    """Remove this process from the agent's meta.json, unless another one is registered by now.

    On an error it stays registered, and the relay finds out that the process has ended.
    """
    suppressed = contextlib.suppress(OSError, RelayError)
    with suppressed, home.changing("agents", agent), home.dirs() as dirs:
        meta = _meta_of(home, agent) or {}
        mine = _this_process()
        if mine.items() <= meta.items():
            left = {name: value for name, value in meta.items() if name not in mine}
            _replace(left, dirs, agent)


def _this_process() -> dict[str, object]:
    pid = os.getpid()
    ticks, namespace = process_info.started_at(pid), process_info.pid_namespace()
    return {"pid": pid, "pid_start_ticks": ticks, "pid_namespace": namespace}


def _meta_of(home: Home, agent: str) -> dict[str, Any] | None:
    """The content of an agent's meta.json; None if it is not a JSON object. Errors: OSError."""
    import json  # a tenth of the SDK's import time

    data = home.read_meta(agent)
    try:
        meta = json.loads(data) if data is not None else {}
    except (ValueError, RecursionError):
        return None
    return meta if isinstance(meta, dict) else None


def _replace(meta: dict[str, object], dirs: Dirs, agent: str) -> None:
    import json

    folder = dirs.get("agents", agent)
    pending = dirs.ensure("agents", agent, "outbox", PENDING)
    temp = f"{META}.{os.urandom(4).hex()}.tmp"  # left there by a kill it is removed like any orphan
    install(json.dumps(meta, indent=2).encode() + b"\n", temp, pending, META, folder)
    fsio.sync_file(folder)


def max_body_bytes(home: Home) -> int:
    """Return the relay's limit for a body by config.json, or the default.

    An invalid value is reported by the relay.
    """
    return _limit(home, b"max_body_bytes", DEFAULT_MAX_BODY_BYTES)


def max_attachment_mib(home: Home) -> int:
    """Return the relay's limit for an attachment, as ``max_body_bytes``."""
    return _limit(home, b"max_attachment_mib", DEFAULT_MAX_ATTACHMENT_MIB)


def _limit(home: Home, name: bytes, default: int) -> int:
    try:
        # importing json takes longer than sending
        found = re.search(_LIMIT % name, home.read_config())
    except OSError:
        return default
    return int(found[1]) if found else default
