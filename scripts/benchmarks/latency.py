"""``latency``: one message every 10 ms; rename in the outbox -> visible in the inbox.

Floors: a loop in a process of its own that waits on inotify, reads the file, creates one in the
recipient's .pending and renames it; and the same loop that also writes the journal's bytes and
syncs them before the rename. All are measured from outside by an inotify watch on the inbox.
``nack``: the same for a message to an unknown recipient, until its refusal.

``with tiers``: the same while a backlog of sealed segments is compressed and uploaded beside it,
to a run without one right before it: what the acknowledgment of a message pays for the tiers.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from watchdog.observers.inotify_c import InotifyConstants, InotifyFD

from relay.base import config
from relay.base.clock import Clock
from relay.base.discovery import CONFIG
from relay.base.home import Home
from relay.base.names import new_message_id
from relay.daemon.home_journal import stream_dir
from relay.daemon.opening import open_store
from relay.engine.events import VERSION, EventCodec, EventRecord, Start
from relay.journal.catalog import Residency
from relay.journal.journal import Append
from relay.journal.manifest_reader import read_manifest
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report, sync

PACE_S = 0.010
WARM_UP = 20
PATIENCE_MS = 5000
TIERED = config.Config(
    journal=config.JournalSettings(segment_bytes=1 << 20, compress_after_s=0, objects="objects")
)
BACKLOG = 250  # segments: the tiers compress them all, then upload; about as long as it takes
FRAME_BYTES = 16 << 10
JOURNAL_BYTES = 20 << 20  # a segment, allocated at once as the relay does
EVENT_BYTES = 384  # what the journal has of a message besides its content


def run(base: str | None, *, agents: int, messages: int) -> None:
    """Run one case and print its lines."""
    root = fresh_root(base)
    note(f"latency: {messages} messages, {agents} agents in {root}")
    bare = _measure_floor(root / "bare", messages, sync=False)
    synced = _measure_floor(root / "synced", messages, sync=True)
    (root / "ours").mkdir()
    home, names = make_home(root / "ours", agents)
    with Relay(home) as pid:
        cpu_s = sum(psutil.Process(pid).cpu_times()[:2])
        ours = measure(home, names[0], names[1], message(names[1]), messages)
        cpu_s = sum(psutil.Process(pid).cpu_times()[:2]) - cpu_s
        nacks = measure(home, names[0], names[0], message("nobody"), messages // 4)
    for case, taken in (("latency", ours), ("nack", nacks)):
        report(
            case=case,
            agents=agents,
            messages=len(taken),
            p50_ms=_ms(taken, 0.5),
            p99_ms=_ms(taken, 0.99),
            max_ms=_ms(taken, 1),
            bare_p50_ms=_ms(bare, 0.5),
            synced_p50_ms=_ms(synced, 0.5),
            synced_p99_ms=_ms(synced, 0.99),
            ratio_to_bare_p50=round(percentile(taken, 0.5) / percentile(bare, 0.5), 2),
            ratio_to_synced_p50=round(percentile(taken, 0.5) / percentile(synced, 0.5), 2),
            p99_to_p50=round(percentile(taken, 0.99) / percentile(taken, 0.5), 2),
        )
    report(case="cpu", agents=agents, ms_a_message=round(1000 * cpu_s / (messages + WARM_UP), 3))


def run_with_tiers(base: str | None, *, agents: int, messages: int) -> None:
    """Measure latency while the tiers work and while they are idle."""
    root = fresh_root(base)
    note(f"latency with tiers: {messages} messages, {agents} agents, {BACKLOG} MiB in {root}")
    taken: list[list[float]] = []
    moved = (0, 0)
    for name, backlog in (("without", 0), ("with", BACKLOG)):
        (root / name).mkdir()
        home, names = make_home(root / name, agents)
        with open(home.path(CONFIG), "wb", opener=_private) as file:
            file.write(msgspec.json.encode(TIERED))
        os.mkdir(home.path(TIERED.journal.objects))
        _prepare(home, backlog)
        with Relay(home):
            taken.append(measure(home, names[0], names[1], message(names[1]), messages))
            moved = _moved(home)
    without, beside = taken
    if not any(moved):  # on a slow machine it does not come to the uploads
        raise SystemExit("latency: the tiers have done nothing")
    report(
        case="latency with tiers",
        agents=agents,
        messages=len(beside),
        segments_compressed=moved[0],
        segments_uploaded=moved[1],
        p50_ms=_ms(beside, 0.5),
        p99_ms=_ms(beside, 0.99),
        max_ms=_ms(beside, 1),
        without_p50_ms=_ms(without, 0.5),
        without_p99_ms=_ms(without, 0.99),
        ratio_p50=round(percentile(beside, 0.5) / percentile(without, 0.5), 2),
        ratio_p99=round(percentile(beside, 0.99) / percentile(without, 0.99), 2),
    )


def _prepare(home: Home, segments: int) -> None:
    """Create sealed segments with meaningless records that compress to half."""
    log = open_store(home, TIERED, Clock(), note).events
    codec = EventCodec()
    for number in range(segments):
        frames = [
            EventRecord(VERSION, start=Start(os.urandom(FRAME_BYTES // 2).hex(), 0, number))
            for _ in range((TIERED.journal.segment_bytes - (64 << 10)) // FRAME_BYTES)
        ]
        log.journal.append([Append(codec.encode(frame, 0)) for frame in frames])
        log.journal.seal()
    log.begin(0)  # the machine's real start again: nothing was switched off
    log.close()


def _moved(home: Home) -> tuple[int, int]:
    """Number of compressed segments, and of uploaded ones."""
    entries = read_manifest(stream_dir(home), note).catalog.entries.values()
    compressed = sum(bool(one.residency & Residency.TIER1) for one in entries)
    return compressed, sum(bool(one.residency & Residency.TIER2) for one in entries)


def _ms(taken: list[float], share: float) -> float:
    return round(percentile(taken, share) * 1000, 3)


class Relay:
    """Run the daemon in a separate process during the block; gives its pid."""

    def __init__(self, home: Home) -> None:
        self._root = home.root

    def __enter__(self) -> int:
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "relay.daemon", "--home", self._root]
        self._process = subprocess.Popen(
            [*command, "--ready-fd", str(write_fd)], pass_fds=(write_fd,)
        )
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as answer:
            if answer.readline() != b"ready\n":
                raise SystemExit("the relay did not start")
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def _measure_floor(root: Path, messages: int, *, sync: bool) -> list[float]:
    root.mkdir()
    home, (sender, recipient) = make_home(root, 2)
    outbox = home.path("agents", sender, "outbox")
    inbox = home.path("agents", recipient, "inbox")
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.benchmarks.latency", outbox, inbox]
        + ([str(root / "journal")] if sync else []),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()  # it watches
    taken = measure(home, sender, recipient, message(recipient), messages)
    process.kill()
    process.wait()
    process.stdout.close()
    return taken


def measure(home: Home, sender: str, reader: str, data: bytes, messages: int) -> list[float]:
    """Seconds from the rename in ``sender``'s outbox to the event in ``reader``'s inbox."""
    sync()
    wait, close = watch_folder(home.path("agents", reader, "inbox"))
    outbox = home.path("agents", sender, "outbox")
    taken = []
    for _ in range(messages + WARM_UP):
        name = new_message_id(time.time_ns()) + ".msg"
        pending = os.path.join(outbox, ".pending", name)
        with open(pending, "wb", opener=_private) as file:
            file.write(data)
        began = time.perf_counter()
        os.rename(pending, os.path.join(outbox, name))
        wait()
        taken.append(time.perf_counter() - began)
        time.sleep(max(0.0, PACE_S - taken[-1]))
    close()
    return taken[WARM_UP:]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def watch_folder(folder: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Wait until a file is renamed into ``folder``; and end the watch."""
    inotify = InotifyFD()
    inotify.add_callback(os.fsencode(folder), InotifyConstants.IN_MOVED_TO, inotify, 0)  # type: ignore[arg-type]
    poll = select.poll()
    poll.register(inotify._inotify_fd, select.POLLIN)

    def wait() -> None:
        if not poll.poll(PATIENCE_MS):
            raise SystemExit(f"latency: nothing came within {PATIENCE_MS} ms")
        os.read(inotify._inotify_fd, 1 << 16)

    def close() -> None:
        inotify._watch_for_wd.clear()
        inotify.close()

    return wait, close


def _floor_loop(outbox: str, inbox: str, journal: str = "") -> None:
    """Process of a floor: inotify, read, create, rename; ``journal``: synced before the rename."""
    inotify = InotifyFD()
    inotify.add_callback(os.fsencode(outbox), InotifyConstants.IN_MOVED_TO, inotify, 0)  # type: ignore[arg-type]
    log, end = -1, 0
    if journal:
        log = os.open(journal, os.O_WRONLY | os.O_CREAT, 0o600)
        os.posix_fallocate(log, 0, JOURNAL_BYTES)
        os.fsync(log)
    print("ready", flush=True)
    while True:
        for event in inotify.read_events():
            name = os.fsdecode(event.name)
            with open(os.path.join(outbox, name), "rb", buffering=0) as source:
                data = source.read()
            if journal:
                end += os.pwrite(log, data + b"\0" * EVENT_BYTES, end)
                os.fdatasync(log)
            staged = os.path.join(inbox, ".pending", name)
            with open(staged, "wb", buffering=0, opener=_private) as target:
                target.write(data)
            os.rename(staged, os.path.join(inbox, name))


if __name__ == "__main__":
    _floor_loop(*sys.argv[1:])
