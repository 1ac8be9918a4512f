"""Back up a whole home, while its relay runs or not: `relay backup`.

    1  agents/, archive/, keys, config.json     one after another
    2  store/, ledger.db                        a snapshot of each
    3  journal/                                 last: it covers all of the above
    4  files delivered, read or archived meanwhile, as far as that journal has them

The copy is like a home after a crash, and its next start recovers it: everything accepted before
the backup began is in it; what came later is there completely or not at all. The backup is complete
once it has its name: a crash leaves ``DIR.unfinished``. Reasons: docs/decisions/0020.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec

from relay import __version__
from relay.base import fsio
from relay.base.clock import Clock, iso_time
from relay.base.config import Config
from relay.base.discovery import CONFIG, IGNORED
from relay.base.errors import FormatError, RelayError, UnsafePath
from relay.base.home import (
    ARCHIVES,
    CONTINUITY,
    JOURNAL,
    LEDGER,
    PENDING,
    READ,
    Dirs,
    Home,
    looks_like_home,
)
from relay.base.names import message_id_of
from relay.daemon import ledger_backup
from relay.daemon.home_journal import stream_dir
from relay.daemon.opening import open_store_readonly, store_key
from relay.delivery import reads
from relay.delivery.projection import Projection
from relay.engine.engine import Engine
from relay.journal.manifest_reader import read_manifest
from relay.ledger import file as ledger_file
from relay.ledger.ledger import Ledger

MANIFEST = "backup.json"
VERSION = 1
UNFINISHED = ".unfinished"
DAMAGED = "the backup is damaged, and nothing was changed; restore another one"
TRIES = 5  # the journal's segments change tiers once in minutes
CHUNK_BYTES = 1 << 20
# A file that was written later may have changed within one tick of mtime.
MTIME_SLACK_NS = 2_000_000_000
INBOX_FOLDERS = (PENDING, "", READ)  # of an inbox, in the order in which a message goes through it
UnixNs = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """A file of the copy; its path is relative to the home."""

    path: str
    size: int
    sha256: str
    mtime_ns: UnixNs


class BackupManifest(msgspec.Struct, frozen=True):
    """The contents of ``backup.json``, by which a restore verifies the copy."""

    version: int
    made_by: str  # the version of agent-relay
    home_id: str  # empty: of a home that was never started
    at: str
    files: tuple[Entry, ...]
    dirs: dict[str, UnixNs]  # path -> mtime in ns: an inbox' own says when a file last left it


def backup(
    home: Home, config: Config, clock: Clock, target: str
) -> tuple[BackupManifest, tuple[str, ...]]:
    """Copy the home to the new directory ``target``, durably; the relay may be running.

    Private keys are in it, and every file has mode 600. Returns also what was left out: links and
    the like, and a key outside of the home. Errors: RelayError when the name is taken, or the
    journal does not hold still; LedgerError, FormatError for a damaged home; OSError.
    """
    target = resolve_parent(target)
    if os.path.lexists(target):
        raise RelayError(f"{target} exists already", hint="name another directory")
    if target.startswith(os.path.realpath(home.root) + os.sep):
        raise RelayError(f"{target} is in the home itself", hint="name a directory elsewhere")
    if target.endswith(UNFINISHED):
        raise RelayError(f"{UNFINISHED} is the end of a backup's name until it is complete")
    temp = target + UNFINISHED
    with new_tree(temp):
        made = _make(home, config, clock, temp)
        fsio.sync_filesystem(temp)
        fsio.fault("rename", target)
        os.rename(temp, target)
    fsio.sync_dir(os.path.dirname(target))
    return made


def resolve_parent(path: str) -> str:
    """The absolute path; links above its last part are followed, the last part itself is not."""
    above, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(above), name)


@contextlib.contextmanager
def new_tree(temp: str) -> Iterator[None]:
    """Make a directory in which this process alone writes; an error removes it.

    What a killed process has left there is removed. Errors: RelayError if another process writes
    it, or it has something else than parts of a home; OSError.
    """
    os.makedirs(os.path.dirname(temp), exist_ok=True)
    fsio.fault("create", temp)
    with contextlib.suppress(FileExistsError):
        os.mkdir(temp, fsio.DIR_MODE)
    fd = fsio.open_dir(temp)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = os.path.samestat(os.fstat(fd), os.stat(temp))
        except (BlockingIOError, FileNotFoundError):  # the other one has completed it
            is_alone = False
        if not is_alone:
            raise RelayError(f"another process writes {temp}", hint="wait until it has ended")
        if (left := os.listdir(fd)) and not looks_like_home(temp):
            raise RelayError(f"{temp} is in the way", hint="move it away, and try again")
        try:
            for name in left:
                _remove(os.path.join(temp, name))
            yield
        except Exception:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _make(
    home: Home, config: Config, clock: Clock, root: str
) -> tuple[BackupManifest, tuple[str, ...]]:
    at = iso_time(clock.now_ns())
    copy = _Copy(home, root)
    copy.file((), CONFIG)
    copy.file((), IGNORED)  # of a home in a project
    left_out = _copy_key(copy, config)
    copy.tree("agents")
    copy.tree("archive")
    for name in ("relay.acomm.prev", "relay.acomm", "base.acomm"):
        copy.file(("store",), name)
    home_id = _copy_ledger(copy, home)
    _copy_journal(copy, home)
    if config.journal.objects and "/" not in config.journal.objects.strip("./"):
        copy.tree(config.journal.objects)
    projection = Projection()
    key = store_key(home, config, make=False)
    with Home(root) as made:  # verifies that the copy opens
        store = open_store_readonly(made, clock, config, key, on_event=projection.apply)
    known = _file_filter(store, projection, os.path.join(root, LEDGER))
    for note in store.state.archives:
        *folders, name = f"{ARCHIVES}/{note.name}".split("/")
        copy.file(tuple(folders), name)
    copy.tree("archive", is_wanted=known)
    copy.tree("attachments")
    copy.tree(CONTINUITY)
    for agent in home.agent_names():
        _InboxCopy(copy, store, known, agent).sync()
    _clear_mailbox_ids(copy, home)
    manifest = BackupManifest(
        VERSION, __version__, home_id, at, tuple(copy.files.values()), copy.dirs
    )
    copy.set_dir_times()
    fsio.write_atomic(os.path.join(root, MANIFEST), msgspec.json.encode(manifest))
    return manifest, tuple(dict.fromkeys(left_out + copy.left_out))


class _Copy:
    """The copy in progress. Reads through the home's descriptors, and follows no link."""

    def __init__(self, home: Home, root: str) -> None:
        self.home = home
        self.root = root
        self.files: dict[str, Entry] = {}
        self.names: dict[str, set[str]] = {}  # of the files in each directory
        self.dirs: dict[str, int] = {}
        self.left_out: list[str] = []

    def tree(self, *parts: str, is_wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Copy a directory tree; unchanged files are kept, and files that vanish are skipped.

        ``is_wanted`` decides about new files.
        """
        with self.home.dirs() as dirs:
            self._tree(dirs, parts, is_wanted)

    def _tree(self, dirs: Dirs, parts: tuple[str, ...], is_wanted: Callable[[str], bool]) -> None:
        path = "/".join(parts)
        try:
            names = sorted(os.listdir(dirs.get(*parts)))
            self.make_dir(path, os.fstat(dirs.get(*parts)).st_mtime_ns)
        except FileNotFoundError:
            return
        except UnsafePath as exc:
            self.left_out.append(f"{path}: {exc}")
            return
        for name in names:
            try:
                name.encode()
                mode = os.stat(name, dir_fd=dirs.get(*parts), follow_symlinks=False).st_mode
            except UnicodeEncodeError:  # backup.json cannot have it
                self.left_out.append(f"{path}/{ascii(name)[1:-1]}: its name is not UTF-8")
                continue
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(mode):
                self._tree(dirs, (*parts, name), is_wanted)
            elif not stat.S_ISREG(mode):
                self.left_out.append(f"{path}/{name}: not a regular file")
            elif f"{path}/{name}" in self.files or is_wanted(name):
                self.file_in(dirs, parts, name)

    def file(self, parts: tuple[str, ...], name: str) -> bool:
        """Copy one file; False if it does not exist."""
        with self.home.dirs() as dirs:
            return self.file_in(dirs, parts, name)

    def file_in(self, dirs: Dirs, parts: tuple[str, ...], name: str) -> bool:
        """Copy one file, using the open directories of a walk."""
        path = "/".join((*parts, name))
        try:
            fd, _ = fsio.open_regular(name, dirs.get(*parts), shared=True, narrow=False)
        except FileNotFoundError:
            return False
        except UnsafePath as exc:
            self.left_out.append(f"{path}: {exc}")
            return False
        try:
            status = os.fstat(fd)
            known = self.files.get(path)
            is_same = known and (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns)
            if not is_same or time.time_ns() - status.st_mtime_ns < MTIME_SLACK_NS:
                if parts:
                    self.make_dir("/".join(parts))
                target = os.path.join(self.root, path)
                size, digest = copy_bytes(fd, target, status.st_mtime_ns)
                self.files[path] = Entry(path, size, digest, status.st_mtime_ns)
                self.names.setdefault("/".join(parts), set()).add(name)
        finally:
            os.close(fd)
        return True

    def make_dir(self, path: str, mtime_ns: int | None = None) -> None:
        """Create a directory of the copy, and its parents."""
        os.makedirs(os.path.join(self.root, path), fsio.DIR_MODE, exist_ok=True)
        if mtime_ns is not None:
            self.dirs[path] = mtime_ns

    def drop(self, path: str) -> None:
        """Remove a file from the copy."""
        if self.files.pop(path, None) is not None:
            folder, _, name = path.rpartition("/")
            self.names[folder].discard(name)
            os.unlink(os.path.join(self.root, path))

    def set_dir_times(self) -> None:
        """Set the directories' times, once all files are written."""
        for path, mtime_ns in self.dirs.items():
            os.utime(os.path.join(self.root, path), ns=(mtime_ns, mtime_ns))


def copy_bytes(source: int, target: str, mtime_ns: int) -> tuple[int, str]:
    """Copy a descriptor to a file of mode 600; returns size and SHA-256. Chunks of zeros, which
    preallocated segments have, become holes."""
    fsio.fault("create", target)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, fsio.FILE_MODE)
    digest, size = hashlib.sha256(), 0
    try:
        while chunk := os.read(source, CHUNK_BYTES):
            digest.update(chunk)
            if chunk.count(0) < len(chunk):
                fsio.write_at(fd, chunk, size, target)
            size += len(chunk)
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    os.utime(target, ns=(mtime_ns, mtime_ns))
    return size, digest.hexdigest()


def _copy_key(copy: _Copy, config: Config) -> list[str]:
    """Copy the store's key file; one outside of the home is only reported."""
    name = config.store.key_file
    if os.path.isabs(name):
        return [f"{name}: it lies outside of the home"] if config.store.encrypt else []
    *parts, last = name.split("/")
    copy.file(tuple(parts), last)
    return []


def _copy_ledger(copy: _Copy, home: Home) -> str:
    """Copy a snapshot of the ledger; returns the home's id."""
    if not os.path.exists(home.path(LEDGER)):
        return ""
    target = os.path.join(copy.root, LEDGER)
    ledger_backup.home_id(home.path(LEDGER))  # an error names it, and not the copy
    ledger_backup.backup(home, target)
    _add_ledger_entry(copy)
    return ledger_backup.home_id(target)


def _add_ledger_entry(copy: _Copy) -> None:
    with open(os.path.join(copy.root, LEDGER), "rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    copy.files[LEDGER] = Entry(LEDGER, status.st_size, digest, status.st_mtime_ns)


def _clear_mailbox_ids(copy: _Copy, home: Home) -> None:
    """Clear the recorded inodes of unchanged inboxes: restored ones have other inodes and are the
    same inboxes. An inbox that the ledger does not know keeps its entry."""
    if LEDGER not in copy.files:
        return
    with contextlib.closing(Ledger.open(os.path.join(copy.root, LEDGER))) as ledger:
        same: list[tuple[str, None]] = []
        for agent, known in ledger.agents.mailboxes().items():
            with contextlib.suppress(OSError, UnsafePath), home.dirs() as dirs:
                if reads.mailbox_identity(dirs, agent) == known:
                    # unknown: the first scan of the next start records it
                    same.append((agent, None))
        with ledger.transaction():
            ledger.agents.set_mailboxes(same)
    _add_ledger_entry(copy)


def _copy_journal(copy: _Copy, home: Home) -> None:
    """Copy the manifest before the segments, which are then at least as new; opening the journal
    finds the rest. Repeated if a segment changed its tier meanwhile."""
    for _ in range(TRIES):
        before = _segments(home)
        for path in [path for path in copy.files if path.startswith(JOURNAL + "/")]:
            if not os.path.exists(home.path(path)):
                copy.drop(path)
        copy.tree(JOURNAL)
        if _segments(home) == before:
            return
    raise RelayError(
        f"the journal's segments changed their tiers {TRIES} times while they were copied",
        hint="try again: `relay journal status` shows what is done with them",
    )


def _segments(home: Home) -> list[object]:
    folder = stream_dir(home)
    if not os.path.isdir(folder):
        return []
    entries = read_manifest(folder, lambda _: None).catalog.entries.values()
    found: list[object] = [(entry.segment_id, entry.sealed, entry.residency) for entry in entries]
    with contextlib.suppress(FileNotFoundError):
        found += sorted(os.listdir(os.path.join(folder, "snapshot")))
    return found


def _file_filter(store: Engine, projection: Projection, ledger: str) -> Callable[[str], bool]:
    """A predicate for archive files: true if the copy knows the message."""
    rows: set[str] = set(projection.rows)
    rows |= {str(name) for _, name, *_ in projection.rejections}
    if os.path.exists(ledger):
        with contextlib.closing(ledger_file.connect_readonly(ledger)) as db:
            rows |= {row[0] for row in db.execute("SELECT message_id FROM messages")}

    def is_known_file(name: str) -> bool:
        message_id = message_id_of(name)
        if message_id is None:
            return name in rows  # a refused file of another name
        return message_id in rows or store.messages.find_by_relay_id(message_id) is not None

    return is_known_file


class _InboxCopy:
    """Updates an inbox of the copy after the journal was copied.

    Files that this journal does not know are left out: they were accepted later. A file that has
    moved since is moved here, and one that was taken is removed, so that no agent finds it twice.
    """

    def __init__(
        self, copy: _Copy, store: Engine, known: Callable[[str], bool], agent: str
    ) -> None:
        self._copy = copy
        self._store = store
        self._is_known_file = known
        self._agent = agent
        self._base = ("agents", agent, "inbox")

    def sync(self) -> None:
        """Copy each folder once, in the order in which a message moves through them."""
        copy, locations = self._copy, dict[str, str]()  # name -> the folder where it was seen last
        with copy.home.dirs() as dirs:
            for folder in INBOX_FOLDERS:
                self._copy_folder(dirs, folder, locations)
        for folder in INBOX_FOLDERS:
            path = self._path(folder)
            for name in list(copy.names.get(path, ())):
                if locations.get(name) != folder:
                    copy.drop(f"{path}/{name}")
        outbox = f"agents/{self._agent}/outbox"
        sent = copy.names.get(outbox, set())
        for name in sent & copy.names.get(f"{outbox}/{PENDING}", set()):
            copy.drop(f"{outbox}/{PENDING}/{name}")  # renamed during the copy

    def _copy_folder(self, dirs: Dirs, folder: str, locations: dict[str, str]) -> None:
        parts = (*self._base, folder) if folder else self._base
        try:
            descriptor = dirs.get(*parts)
        except (FileNotFoundError, UnsafePath):
            return
        # taken first, so that later changes are noticed
        mtime_ns = os.fstat(descriptor).st_mtime_ns
        for name in sorted(os.listdir(descriptor)):
            is_known = any(
                name in self._copy.names.get(self._path(folder), ()) for folder in INBOX_FOLDERS
            )
            if name in (PENDING, READ) or not (is_known or self._has(name)):
                continue
            if self._copy.file_in(dirs, parts, name):
                locations[name] = folder
        self._copy.make_dir("/".join(parts), mtime_ns)

    def _has(self, name: str) -> bool:
        """True if the copy's journal has a delivery of this file to this agent."""
        message = self._store.messages.find_by_relay_id(message_id_of(name) or "")
        if message is None:  # rolled into an archive: only the message is known
            return self._is_known_file(name)
        return self._agent in self._store.state.deliveries.get(message.id, {})

    def _path(self, folder: str) -> str:
        return "/".join((*self._base, folder) if folder else self._base)


def read_backup(source: str) -> BackupManifest:
    """Read a backup's manifest. Errors: RelayError if it is missing, FormatError."""
    path = os.path.join(source, MANIFEST)
    if not os.path.isfile(path):
        raise RelayError(
            f"{source} is not a backup: {MANIFEST} is missing",
            hint="name a directory that a backup made",
        )
    with open(path, "rb") as file:
        data = file.read()
    try:
        manifest = msgspec.json.decode(data, type=BackupManifest)
    except msgspec.MsgspecError as exc:
        error = FormatError(path, 0, "the list of a backup", exc)
        error.hint = DAMAGED
        raise error from exc
    if manifest.version > VERSION:
        error = FormatError(path, 0, f"version {VERSION} at most", manifest.version)
        error.hint = f"a later version made it than this one, {__version__}; restore it with that"
        raise error
    return manifest
