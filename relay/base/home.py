"""The home: paths and modes below it, and safe access to them; ``discovery`` finds it.

    ledger.db  config.json  .lock  search.db
    agents/{name}/outbox/.pending/    written here, renamed up: then it is sent
    agents/{name}/inbox/.pending/     staged here by the relay, renamed up: then it is delivered
    agents/{name}/inbox/.read/        messages that the agent has taken
    agents/{name}/meta.json           process (see agent_sdk.presence), role, public key
    agents/{name}/key                 the private one, where it signs
    attachments/{2 hex}/{sha256}      archive/{date}/{agent}/[rejected/]
    tmp/                              unused: temporary files are made next to their target, where
                                      the rename is atomic
    archive/{date}.tar.zst            a day that was packed
    store/relay.acomm                 journal/                            logs/
    continuity/{agent}/{version}-{message id}.state    saved states of agents, for their next run
    run/{name}.lock                   held by a process that the relay started
    run/{name}.{id}.json              the command and environment it was started with
    sessions/{harness}-{id}.json      sessions of agent CLIs, written by their hooks

Directories are 700, files 600. Agents' files are never opened by their paths: ``Home.dirs`` walks
from the home's descriptor, name by name, and follows no link. Ledger, store and log are opened by
path, and looked at first.

The lock file tells whether a relay runs, why it is not serving, and how the last one ended: its
first line is the pid, the second the reason why no session runs; a clean stop empties it. The
daemon writes it; commands read it without loading the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from relay.base import fsio, process_info
from relay.base.clock import NS_PER_S
from relay.base.discovery import CONFIG
from relay.base.errors import AlreadyRunning, ForeignOwner, HomeMissing, UnsafePath
from relay.base.names import OPERATOR, check_agent_name, is_agent_name

LEDGER = "ledger.db"
LOCK = ".lock"
LOG = "logs/relay.log"
LAST_WRITTEN = (LOCK, LOG, LEDGER + "-wal")  # only a running relay writes these
TROUBLE_CHARACTERS = 500
META = "meta.json"
CHANGE_LOCK_S = 1.0  # it is held for the time of a small file's write
KEY = "key"
PENDING = ".pending"
REJECTED = "rejected"  # folder of refused files below an agent's day in the archive
READ = ".read"
STORE = "store/relay.acomm"
ARCHIVES = "store/archive"
BASE = "store/base.acomm"
SEARCH = "search.db"  # the search index: derived, in no backup
JOURNAL = "journal"
CONTINUITY = "continuity"

RUN = "run"
SESSIONS = "sessions"

TOP_DIRS = (
    "agents",
    "attachments",
    "archive",
    "tmp",
    "store",
    "journal",
    "logs",
    CONTINUITY,
    RUN,
    SESSIONS,
)
TOP_FILES = (
    *(LEDGER, LEDGER + "-wal", LEDGER + "-shm", CONFIG, LOCK),
    *(SEARCH, SEARCH + "-wal", SEARCH + "-shm"),
)
AGENT_DIRS = ("outbox", f"outbox/{PENDING}", "inbox", f"inbox/{PENDING}", f"inbox/{READ}")


def tag_of(root: str) -> str:
    """A stable short name of a home for files outside of it; 12 hex digits."""
    return hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:12]


class Home:
    """One relay home that exists. Any process may have one; it holds one descriptor."""

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fd = fsio.open_dir(root)
        except FileNotFoundError as exc:
            raise HomeMissing(f"there is no relay home at {root}") from exc
        except UnsafePath as exc:
            raise UnsafePath(exc.message, hint="name a relay home with --home") from exc
        if not fsio.exists(CONFIG, self._fd) or not fsio.exists("agents", self._fd):
            self.close()
            text = f"{root} is not a relay home: config.json or agents/ is missing"
            can_be_made = not os.listdir(root) or looks_like_home(root)
            raise HomeMissing(text, hint="" if can_be_made else "name another home with --home")

    @classmethod
    def create(cls, root: str, config: bytes = b"{}\n") -> Home:
        """Create or complete the tree; an existing config.json is kept."""
        hint = "name a directory that is empty or does not exist"
        if os.path.lexists(root) and not os.path.isdir(root):
            raise UnsafePath(f"{root} exists and is not a directory", hint=hint)
        if os.path.isdir(root) and os.listdir(root) and not looks_like_home(root):
            raise UnsafePath(f"{root} has other files in it and is not a relay home", hint=hint)
        os.makedirs(os.path.dirname(root), exist_ok=True)
        fsio.ensure_dir(root)
        for name in TOP_DIRS:
            fsio.ensure_dir(os.path.join(root, name))
        path = os.path.join(root, CONFIG)
        if os.path.lexists(path):
            fsio.restrict(path, fsio.FILE_MODE)
        else:
            fsio.write_atomic(path, config)
        home = cls(root)
        try:
            home.make_agent(OPERATOR)
        except BaseException:
            home.close()
            raise
        return home

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_is_there(self) -> None:
        """Errors: HomeMissing when the directory was removed, but not when it was moved."""
        if os.fstat(self._fd).st_nlink == 0:
            raise HomeMissing(
                f"{self.root} was removed while the relay was running",
                hint="`relay init` makes a new one",
            )

    def check_place(self) -> None:
        """Errors: HomeMissing; UnsafePath when its path is gone or another directory, or when
        agents/ is gone, so that nothing is created in a home that is being removed."""
        self.check_is_there()
        if not fsio.exists(self.root) or not os.path.samestat(
            os.stat(self.root, follow_symlinks=False), os.fstat(self._fd)
        ):
            raise UnsafePath(
                f"{self.root} was moved away while the relay ran",
                hint="move it back, or stop this relay and start one at the new place",
            )
        if not fsio.exists("agents", self._fd):
            raise UnsafePath(
                f"{self.path('agents')} was moved away or removed while the relay ran",
                hint="put it back; the relay continues by itself",
            )

    def path(self, *parts: str) -> str:
        """The absolute path of something below the home, for messages and for SQLite."""
        return os.path.join(self.root, *parts)

    def dirs(self) -> Dirs:
        """Open directories below the home, to be closed after use."""
        return Dirs(self._fd)

    def read_config(self) -> bytes:
        """The bytes of config.json; ``secure`` checks its mode."""
        return fsio.read_regular(CONFIG, self._fd, 1 << 20, shared=True, narrow=False)[0]

    def agent_names(self) -> Iterator[str]:
        """Every directory under ``agents/`` with a valid name."""
        return iter(self.agent_inodes())

    def agent_inodes(self) -> dict[str, int]:
        """Every directory under ``agents/`` with a valid name, and its inode."""
        with self.dirs() as dirs, os.scandir(dirs.get("agents")) as entries:
            return {
                entry.name: entry.inode()
                for entry in entries
                if is_agent_name(entry.name) and entry.is_dir(follow_symlinks=False)
            }

    def make_agent(self, name: str) -> None:
        """Create or complete an agent's directories; idempotent.

        Errors: InvalidName; UnsafePath, OSError for the first that cannot be used; ForeignOwner in
        another user's home, where the relay could not use them.
        """
        for problem in self.complete_agent(name):
            raise problem

    def complete_agent(self, name: str) -> list[OSError | UnsafePath]:
        """Like ``make_agent``, but errors below the agent's own directory are returned.

        Errors: InvalidName, and UnsafePath, OSError when the agent's own directory cannot be used.
        """
        check_agent_name(name)
        problems: list[OSError | UnsafePath] = []
        with self.dirs() as dirs:
            owner = os.fstat(dirs.get("agents")).st_uid
            if owner != os.geteuid():
                raise ForeignOwner(self.root, owner)
            fsio.ensure_dir(name, dirs.get("agents"))
            dirs.get("agents", name)
            for part in AGENT_DIRS:
                *parents, last = part.split("/")
                try:
                    fsio.ensure_dir(last, dirs.get("agents", name, *parents))
                    dirs.get("agents", name, *parents, last)
                except (OSError, UnsafePath) as exc:
                    problems.append(exc)
        return problems

    def read_meta(self, name: str) -> bytes | None:
        """The bytes of an agent's meta.json; None when it has none, or a link in its place.

        Errors: OSError when it cannot be read, which does not mean that it has none.
        """
        with self.dirs() as dirs:
            try:
                return fsio.read_regular(META, dirs.get("agents", name), 1 << 16, shared=True)[0]
            except (FileNotFoundError, UnsafePath):
                return None

    @contextlib.contextmanager
    def changing(self, *path: str, within_s: float = CHANGE_LOCK_S) -> Iterator[None]:
        """Hold the lock of a folder for the change of a file: ``agents`` for config.json, an
        agent's own for its meta.json.

        A holder that is stopped by a signal is waited for ``within_s`` at most. Errors: OSError.
        """
        until = time.monotonic() + within_s
        with self.dirs() as dirs:  # which closes it, and so gives the lock back
            folder = dirs.get(*path)
            while time.monotonic() < until:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.002)
            yield

    def secure(self) -> list[str]:
        """Narrow the modes of the home and its top level; returns the names that were too wide.

        The home itself is ``.``. Errors: UnsafePath for a link or another user's file.
        """
        modes = dict.fromkeys(TOP_DIRS, fsio.DIR_MODE) | dict.fromkeys(TOP_FILES, fsio.FILE_MODE)
        try:
            repaired = ["."] if fsio.restrict(".", fsio.DIR_MODE, self._fd) else []
        except ForeignOwner as exc:
            raise ForeignOwner(self.root, exc.uid) from exc
        for name, mode in modes.items():
            with contextlib.suppress(FileNotFoundError):  # SQLite removes -wal and -shm
                if fsio.restrict(name, mode, self._fd):
                    repaired.append(name)
        return sorted(repaired)


def looks_like_home(root: str) -> bool:
    """True for a directory with config.json or agents/, complete or not."""
    return os.path.lexists(os.path.join(root, CONFIG)) or os.path.isdir(
        os.path.join(root, "agents")
    )


# Far more than one step has in hand, far fewer than any limit of descriptors.
MAX_OPEN_DIRS = 96
IN_HAND_DIRS = 12  # more than one step ever needs
FEW_DESCRIPTORS = 256  # with fewer, no more directories than that are kept open
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def most_open_dirs() -> int:
    """Number of directories that ``Dirs`` may keep open in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return IN_HAND_DIRS if 0 <= soft < FEW_DESCRIPTORS else MAX_OPEN_DIRS


# openat2(2): its number on every architecture, struct open_how, and what it must not follow.
_OPENAT2, _NO_SYMLINKS, _BENEATH = 437, 0x04, 0x08
_HOW = struct.pack("=QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, _NO_SYMLINKS | _BENEATH)
_openat2: Callable[..., int] | None = None


def use_openat2() -> None:
    """Open directories by one system call from now on, where the kernel has it and permits it.

    Worth it for a daemon: a command opens a few, and ctypes takes longer to load than that saves.
    """
    global _openat2
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    call = ctypes.PyDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    call.restype = ctypes.c_long
    fd = int(call(_OPENAT2, -100, b".", _HOW, len(_HOW)))  # AT_FDCWD
    if fd >= 0:
        os.close(fd)
        _openat2 = call


def _open_beneath(root_fd: int, parts: tuple[str, ...]) -> int:
    """Open a directory by one call that follows no link; -1 if it fails, for any reason."""
    path = "/".join(parts)
    is_plain = not {"", ".", ".."}.intersection(parts) and path.count("/") == len(parts) - 1
    if _openat2 is None or not is_plain or "\0" in path:
        return -1
    return int(_openat2(_OPENAT2, root_fd, os.fsencode(path), _HOW, len(_HOW)))


class Dirs:
    """Open directories of one batch, closed by ``close``.

    Not kept longer, so that a directory that was moved or replaced is not written to afterwards.
    """

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._open: dict[tuple[str, ...], int] = {}

    def get(self, *parts: str) -> int:
        """The descriptor of ``parts`` below the home; no component may be a link.

        By one call where the kernel has it; what that refuses is opened component by component,
        which tells why. Errors: UnsafePath for a link or a name with a slash or dots;
        FileNotFoundError.
        """
        fd = self._open.pop(parts, None)
        if fd is not None:
            self._open[parts] = fd  # the last one used is the last to be closed
            return fd
        if not parts:
            return self._root_fd
        fd = _open_beneath(self._root_fd, parts) if len(parts) > 1 else -1
        if fd < 0:
            fd = self._open_component(parts)
        self._open[parts] = fd
        if len(self._open) > IN_HAND_DIRS:
            self._close_oldest(most_open_dirs())
        return fd

    def _open_component(self, parts: tuple[str, ...]) -> int:
        name = parts[-1]
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise UnsafePath(f"{name!r} is not a valid directory name")
        try:
            return fsio.open_dir(name, self.get(*parts[:-1]))
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTOR or len(self._open) <= IN_HAND_DIRS:
                raise
            self._close_oldest(IN_HAND_DIRS)
            return fsio.open_dir(name, self.get(*parts[:-1]))

    def _close_oldest(self, most: int) -> None:
        """Keep ``most``: those that were used last."""
        while len(self._open) > most:
            os.close(self._open.pop(next(iter(self._open))))

    def ensure(self, *parts: str) -> int:
        """Like ``get``, but makes missing directories."""
        try:
            return self.get(*parts)
        except FileNotFoundError:
            fsio.ensure_dir(parts[-1], self.ensure(*parts[:-1]))
            return self.get(*parts)

    def close(self) -> None:
        """Give every descriptor back."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __len__(self) -> int:
        return len(self._open)

    def __enter__(self) -> Dirs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- the lock file: pid of the relay, and the reason why no session runs; empty after a stop ----


def write_trouble(lock_fd: int, trouble: str) -> None:
    """Write the pid of this process and its trouble in one line; ignored on a full disk."""
    data = f"{os.getpid()}\n{trouble}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        os.ftruncate(lock_fd, os.pwrite(lock_fd, data, 0))


@contextlib.contextmanager
def locked_home(root: str) -> Iterator[int]:
    """Hold the home for the block; yields the descriptor of its lock file.

    The directory is locked as well: who removes the lock file frees nothing by it.
    Errors: BlockingIOError when the home is held.
    """
    with fsio.locked(os.path.join(root, LOCK)) as lock_fd:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise
        except OSError:
            pass  # a file system that locks no directories
        try:
            yield lock_fd
        finally:
            os.close(folder)


@contextlib.contextmanager
def lock_home(root: str, text: str = "", hint: str = "") -> Iterator[None]:
    """Hold the lock that a running relay holds; ``text`` and ``hint`` replace the error's own.

    Errors: AlreadyRunning.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked_home(root))
        except BlockingIOError as exc:
            raise AlreadyRunning(text or f"a relay runs for {root}", hint=hint) from exc
        yield


def lock_holder(home: Home) -> int | None:
    """The pid of the relay running for this home, by the kernel's lock; None if there is none, 0
    if it is not visible from this container."""
    return fsio.lock_owner(home.path(LOCK))


def is_served(home: Home) -> bool:
    """True if a relay holds the lock, and not a command, which could not answer."""
    holder = lock_holder(home)
    if holder is None:
        return False
    with open(home.path(LOCK), encoding="utf-8", errors="replace") as file:
        word = file.readline().strip()
    return word.isdigit() and process_info.calls_itself(holder, int(word))


def running_trouble(home: Home) -> str:
    """The reason why the running relay is not serving; empty while it serves."""
    with contextlib.suppress(OSError):
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS, shared=True)
        return "".join(data.decode(errors="replace").splitlines()[1:2])
    return ""


class UncleanStop(NamedTuple):
    """A relay that did not stop cleanly: killed, crashed, or the machine went down."""

    pid: int
    last_sign_ns: int  # Unix time of the last that it is known to have written

    def __str__(self) -> str:
        at = time.localtime(self.last_sign_ns // NS_PER_S)
        seen_at = time.strftime("%Y-%m-%d %H:%M:%S", at)
        return f"pid {self.pid}, did not stop by itself; its last sign of life was at {seen_at}"


def unclean_stop(home: Home) -> UncleanStop | None:
    """The last relay if it did not stop cleanly; None if it did, or if one is running.

    Evidence: its pid in the lock's file, which a stop empties.
    """
    if lock_holder(home) is not None:
        return None
    try:
        data, _ = fsio.read_regular(home.path(LOCK), None, 4 * TROUBLE_CHARACTERS, shared=True)
    except (OSError, UnsafePath):
        return None
    word = data.partition(b"\n")[0]
    if not word.isdigit():
        return None
    seen = [0]
    for name in LAST_WRITTEN:
        with contextlib.suppress(OSError):
            seen.append(os.lstat(home.path(name)).st_mtime_ns)
    return UncleanStop(int(word), max(seen))
