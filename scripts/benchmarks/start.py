"""``start``: seconds until a relay serves, with much to recover or much waiting.

start journal    the relay was killed with so many messages since the last checkpoint, all
                 delivered and read. Floor: a plain loop over the same bytes that checks the crc of
                 each record and decodes it with msgpack
start outboxes   so many files wait in the outboxes. Floor: listing and sorting the same directories

A relay serves when its process has reported that it is ready, and a message sent then is in its
recipient's inbox. ``import_s``, the time that a process needs to import the relay, is part of it.
Each start is ended by a kill; the fastest of ``RUNS`` counts, for the floor as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from isal.isal_zlib import crc32

from relay.base import config
from relay.base.clock import Clock
from relay.base.discovery import CONFIG
from relay.base.home import Home
from relay.base.names import new_message_id
from relay.daemon.home_journal import stream_dir
from relay.daemon.session import Session
from relay.journal.format import RECORD
from relay.journal.segment import FIRST_RECORD, segment_ids, segment_path
from scripts.benchmarks.common import (
    fill,
    fresh_root,
    make_home,
    message,
    note,
    report,
    sync,
    timed,
)
from scripts.benchmarks.latency import watch_folder

AGENTS = 100  # that send; two more have nothing waiting
RUNS = 3
# No checkpoint and no archive in between.
KEEPING = config.Config(
    store=config.StoreSettings(
        checkpoint_messages=10**9, checkpoint_ms=10**9, active_messages=10**7
    )
)
IMPORT = [sys.executable, "-c", "import relay.daemon.process"]
DAEMON = [sys.executable, "-m", "relay.daemon"]


class Started(NamedTuple):
    """A start."""

    seconds: float
    cpu_s: float


def run(base: str | None, *, messages: int) -> None:
    """Run both cases and print their lines."""
    root = fresh_root(base)
    note(f"start: {messages} messages, {AGENTS} agents in {root}")
    home, names = _make(root / "journal", messages)
    _deliver(home, names, messages)
    _measure("start journal", home, names, messages, lambda: read_journal(home))
    home, names = _make(root / "outboxes", messages)
    _measure("start outboxes", home, names, messages, lambda: list_outboxes(home, names))


def _make(folder: Path, messages: int) -> tuple[Home, list[str]]:
    folder.mkdir()
    home, names = make_home(folder, AGENTS + 2)
    Path(home.path(CONFIG)).write_bytes(msgspec.json.encode(KEEPING))
    fill(home, names[:AGENTS], messages)
    return home, names


def _deliver(home: Home, names: list[str], messages: int) -> None:
    """Let a relay deliver everything and its recipients read it; then kill it."""
    child = os.fork()
    if not child:
        try:
            _deliver_and_read(home, names)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    read = sum(len(os.listdir(home.path("agents", name, "inbox", ".read"))) for name in names)
    if read != messages:
        raise SystemExit(f"start: {read} of {messages} messages were delivered and read")


def _deliver_and_read(home: Home, names: list[str]) -> None:
    session = Session(home, KEEPING, Clock(), _silent)
    session.begin()
    while session.dispatcher.backlog:
        session.turn(is_waiting=False)
    for name in names:
        inbox = Path(home.path("agents", name, "inbox"))
        for path in inbox.glob("*.msg"):
            path.rename(inbox / ".read" / path.name)
        session.turn(is_waiting=False)
    journal = session.opened.events.journal
    while journal.end > journal.durable or session.dispatcher.backlog:
        session.turn()
    session.dispatcher.tick(session.watcher.wait(0))  # the ledger follows the journal


def _measure(
    case: str, home: Home, names: list[str], messages: int, floor: Callable[[], None]
) -> None:
    sync()
    imports, floors, starts = [], [], []
    for _ in range(RUNS):
        imports.append(timed(lambda: subprocess.run(IMPORT, check=True)))
        floors.append(timed(floor))
        starts.append(_start(home, names[AGENTS], names[AGENTS + 1]))
    seconds, floor_s = min(starts).seconds, min(floors)
    report(
        case=case,
        agents=AGENTS,
        messages=messages,
        seconds=round(seconds, 3),
        cpu_s=round(min(one.cpu_s for one in starts), 3),
        import_s=round(min(imports), 3),
        floor_s=round(floor_s, 3),
        ratio_to_floor=round(seconds / floor_s, 2),
    )


def _start(home: Home, sender: str, recipient: str) -> Started:
    """Start a relay, send a message as soon as it is ready, and kill it when that has come."""
    name = new_message_id(time.time_ns()) + ".msg"
    outbox = Path(home.path("agents", sender, "outbox"))
    (outbox / ".pending" / name).write_bytes(message(recipient))
    wait, close = watch_folder(home.path("agents", recipient, "inbox"))
    read_fd, write_fd = os.pipe()
    began = time.perf_counter()
    process = subprocess.Popen(
        [*DAEMON, "--home", home.root, "--ready-fd", str(write_fd)], pass_fds=(write_fd,)
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd, "rb") as answer:
            if answer.readline() != b"ready\n":
                raise SystemExit("start: the relay did not start")
        (outbox / ".pending" / name).rename(outbox / name)
        wait()
        seconds = time.perf_counter() - began
        return Started(seconds, sum(psutil.Process(process.pid).cpu_times()[:2]))
    finally:
        process.kill()
        process.wait()
        close()


def read_journal(home: Home) -> None:
    """Floor: check and decode each record of the home's journal."""
    decode = msgspec.msgpack.Decoder().decode
    for number in segment_ids(stream_dir(home)):
        data = Path(segment_path(stream_dir(home), number)).read_bytes()
        view, at, last = memoryview(data), FIRST_RECORD, len(data) - RECORD.size
        while at <= last:
            length, crc, *_ = RECORD.unpack_from(data, at)
            after = at + RECORD.size + length
            head = crc32(length.to_bytes(8, "little"))
            if after > len(data) or crc32(view[at + 8 : after], head) != crc:
                break
            decode(view[at + RECORD.size : after])
            at = after


def list_outboxes(home: Home, names: list[str]) -> None:
    """Floor: list and sort each outbox."""
    for name in names:
        sorted(os.listdir(home.path("agents", name, "outbox")))


def _silent(*_: object, **__: object) -> None:
    """Discard log lines."""
