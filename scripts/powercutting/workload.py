"""Work of a relay and its agents on a disk that writes down all that it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from relay.base.config import Config, JournalSettings, StoreSettings
from relay.base.home import Home
from scripts.powercutting import kernel
from scripts.powercutting.disk import recorded
from scripts.powercutting.images import copy
from scripts.powercutting.notes import AGENTS, READERS, SENDERS

IMAGE_MIB = 320  # XFS wants 300 at least
MIB = 1 << 20
NO_SYNC = Path(__file__).with_name("no_sync.c")
PATIENCE_S = 60

# Messages roll into archives and the store's file is written each second; segments are sealed.
ROLLING = Config(
    store=StoreSettings(
        checkpoint_ms=1000, checkpoint_pause_factor=0, roll_after_s=1, roll_messages=10
    ),
    journal=JournalSettings(segment_bytes=64 << 10, compress_after_s=1),
)
VARIANTS = {"default": Config(), "rolling": ROLLING}


class FileSystem(NamedTuple):
    """A kind of file system, and how it is made and mounted."""

    kind: str
    make: str
    options: str


_EXT4 = "mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=1,lazy_journal_init=1"
FILE_SYSTEMS = {
    "ext4": FileSystem("ext4", _EXT4, "data=ordered"),
    "ext4-writeback": FileSystem("ext4", _EXT4, "data=writeback"),
    "xfs": FileSystem("xfs", "mkfs.xfs -q -f -K", "nouuid"),  # two copies are mounted at once
    "btrfs": FileSystem("btrfs", "mkfs.btrfs -q -f -K", ""),
}


class Round(NamedTuple):
    """What was recorded, in files of a folder."""

    folder: Path
    mounts: Path  # where file systems are mounted; not in a file system that holds their images
    system: FileSystem
    since_ns: int  # the home is complete from then on

    @property
    def base(self) -> Path:
        return self.folder / "base.img"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def books(self) -> Path:
        return self.folder / "books"


def record(
    folder: Path,
    mounts: Path,
    file_system: str,
    variant: str,
    *,
    seconds: float,
    seed: int,
    syncs: bool,
) -> Round:
    """Record so many seconds of work. Without ``syncs`` nobody's fsync does anything."""
    system = FILE_SYSTEMS[file_system]
    image, disk, target = folder / "image", folder / "disk", mounts / "recorded"
    for one in (folder, target):
        one.mkdir(parents=True, exist_ok=True)
    image.touch()
    os.truncate(image, IMAGE_MIB * MIB)
    make = subprocess.run(
        [*system.make.split(), str(image)], capture_output=True, text=True, check=False
    )
    if make.returncode:
        raise SystemExit(f"powercut: {system.make.split()[0]} failed: {make.stderr.strip()}")
    subprocess.run(["fallocate", "--dig-holes", str(image)], check=True)
    made = Round(folder, mounts, system, 0)
    copy(image, made.base)
    work = _Work(target / "home", made.books, seed, _environment(folder, syncs))
    with recorded(image, made.log, disk):
        with kernel.mounted(disk, target, system.kind, system.options):
            with Home.create(str(work.home), msgspec.json.encode(VARIANTS[variant])) as home:
                for agent in AGENTS:
                    home.make_agent(agent)
            os.sync()
            since_ns = time.monotonic_ns()
            work.run(seconds)
    image.unlink()
    return made._replace(since_ns=since_ns)


def _environment(folder: Path, syncs: bool) -> dict[str, str]:
    added = {} if syncs else {"LD_PRELOAD": str(no_sync_library(folder))}
    return {**os.environ, "RELAY_NO_WAIT": "1", **added}


def no_sync_library(folder: Path) -> Path:
    """A library in which every sync does nothing. Compiled now: the control alone needs it."""
    library = folder / "no_sync.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(NO_SYNC)], check=True)
    return library


class _Work:
    """A relay and its agents: work, a SIGKILL of the relay half way, work."""

    def __init__(self, home: Path, books: Path, seed: int, environment: dict[str, str]) -> None:
        self.home, self._books, self._seed = home, books, seed
        self._environment = environment
        books.mkdir()

    def run(self, seconds: float) -> None:
        """Messages wait when a relay starts, the first time and after it was killed."""
        everybody = [one for one in (*SENDERS, *READERS) if one != "dave"]
        self._dave(1)
        relay = self._start_relay()
        agents = [self._start(one) for one in everybody]
        try:
            time.sleep(seconds / 2)
            _end(relay, signal.SIGKILL)
            self._dave(2)
            relay = self._start_relay()
            time.sleep(seconds / 2)
        finally:
            ended = [one.args for one in agents if one.poll() is not None]
            for one in agents:
                _end(one, signal.SIGTERM)
            _end(relay, signal.SIGKILL)
        if ended:
            raise SystemExit(f"powercut: an agent of the drill has ended by itself: {ended}")

    def _dave(self, seed: int) -> None:
        done = self._start("dave", "3", seed=self._seed + seed)
        if done.wait(PATIENCE_S):
            raise SystemExit("powercut: messages could not be sent while no relay ran")

    def _start(self, role: str, *more: str, seed: int = 0) -> subprocess.Popen[bytes]:
        words = [role, str(self.home), str(self._books), str(seed or self._seed), *more]
        return self._python("scripts.powercutting.agents", *words)

    def _python(self, *words: str, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *words], env=self._environment, pass_fds=fds)

    def _start_relay(self) -> subprocess.Popen[bytes]:
        read_fd, write_fd = os.pipe()
        words = ("relay.daemon", "--home", str(self.home), "--ready-fd", str(write_fd))
        relay = self._python(*words, fds=(write_fd,))
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as answer:
            said = answer.read()
        if said != b"ready\n":
            raise SystemExit(f"powercut: the relay did not start: {said.decode()}")
        return relay


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
        process.wait(PATIENCE_S)


@contextmanager
def state_mounted(image: Path, target: Path, system: FileSystem) -> Iterator[Path]:
    """The home in an image, after its file system's own recovery. Errors: OSError."""
    target.mkdir(parents=True, exist_ok=True)
    with kernel.mounted(image, target, system.kind, system.options):
        yield target / "home"
