"""``drain``: n files of 1 KiB waiting in k outboxes -> all in inboxes and archived.

Floor: the same system calls in one plain loop, without ledger or store: open, fstat, read,
close; create in inbox/.pending, write, close; rename into the inbox; rename into the archive.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from relay.base.clock import Clock, iso_date
from relay.base.config import Config
from relay.base.home import LEDGER, Home
from relay.daemon.session import Session
from relay.ledger.ledger import Ledger
from scripts.benchmarks.common import (
    fill,
    fresh_root,
    make_home,
    note,
    report,
    sync,
)

LEDGER_ROWS_BATCH = 20_000


def run(base: str | None, *, agents: int, files: int, ledger_rows: int = 0) -> float:
    """Run one case and print its line; the ratio."""
    root = fresh_root(base)
    note(f"drain: {files} files, {agents} agents, {ledger_rows} rows in {root}")
    floor_s = measure_floor(root / "floor", agents, files)
    ours_s = _ours(root / "ours", agents, files, ledger_rows)
    ratio = floor_s / ours_s
    report(
        case="drain",
        agents=agents,
        files=files,
        ledger_rows=ledger_rows,
        files_per_s=round(files / ours_s),
        floor_files_per_s=round(files / floor_s),
        ratio_to_floor=round(ratio, 3),
    )
    return ratio


def measure_floor(root: Path, agents: int, files: int) -> float:
    """Seconds of the plain loop over so many files."""
    root.mkdir()
    home, names = make_home(root, agents)
    made = fill(home, names, files)
    day = iso_date(time.time_ns())
    for name in names:
        os.makedirs(home.path("archive", day, name))
    sync()
    began = time.perf_counter()
    for number, (agent, name) in enumerate(made):
        to = names[(number + 1) % agents]
        source = home.path("agents", agent, "outbox", name)
        fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
        os.fstat(fd)
        data = os.read(fd, 1 << 20)
        os.close(fd)
        staged = home.path("agents", to, "inbox", ".pending", name)
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, data)
        os.close(fd)
        os.rename(staged, home.path("agents", to, "inbox", name))
        os.rename(source, home.path("archive", day, agent, name))
    return time.perf_counter() - began


def _ours(root: Path, agents: int, files: int, ledger_rows: int) -> float:
    root.mkdir()
    home, names = make_home(root, agents)
    _old_rows(home, ledger_rows)
    fill(home, names, files)
    sync()
    session = Session(home, Config(), Clock(), _silent)
    began = time.perf_counter()
    session.begin()
    while session.dispatcher.backlog:
        session.turn(is_waiting=False)
    session.dispatcher.drain()
    taken_s = time.perf_counter() - began
    session.close()
    _check(home, names, files)
    return taken_s


def _old_rows(home: Home, rows: int) -> None:
    """Fill a ledger with a history, in order of time."""
    ledger = Ledger.open(home.path(LEDGER))
    db = ledger._db
    for first in range(0, rows, LEDGER_ROWS_BATCH):
        numbers = range(first, min(first + LEDGER_ROWS_BATCH, rows))
        ids = [(f"{1_700_000_000_000_000_000 + n * 1_000_000}-{n:016x}", n) for n in numbers]
        with ledger.transaction():
            db.executemany(
                "INSERT INTO messages (message_id, agent_name, direction, file_path, file_size, "
                "file_mtime_ns, checksum, status, message_type, target, discovered_at) VALUES "
                "(?1, 'old', 'outbox', 'archive/2023-11-14/old/' || ?1 || '.msg', 1030, ?2, "
                "hex(randomblob(32)), 'archived', 'message', 'new', ?2)",
                ids,
            )
            db.executemany(
                "INSERT INTO deliveries (message_id, recipient, state, staged_at, written_at, "
                "read_at) VALUES (?1, 'new', 'read', ?2, ?2, ?2)",
                ids,
            )
    ledger.close()


def _check(home: Home, names: list[str], files: int) -> None:
    """Check that the measured work was really done."""
    inboxes = sum(len(os.listdir(home.path("agents", n, "inbox"))) - 2 for n in names)
    outboxes = sum(len(os.listdir(home.path("agents", n, "outbox"))) - 1 for n in names)
    if (inboxes, outboxes) != (files, 0):
        raise SystemExit(f"drain: {inboxes} of {files} in inboxes, {outboxes} left in outboxes")


def _silent(*_: object, **__: object) -> None:
    """Discard log lines, as the floor has none."""
