"""A reader that does not end: the WAL grows, he is named, and before the disk is full we wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base.config import Config
from relay.base.config import LedgerSettings as Settings
from relay.base.home import LEDGER
from relay.engine.checkpoint import InlineExecutor
from relay.ledger import wal
from relay.ledger.schema import WAL_KEPT_BYTES
from relay.ledger.wal import WalState, WalWatch, fold
from tests.box import Box
from tests.procs import Relay, home_of, relay, until

SMALL = Config(ledger=Settings(wal_alert_mib=5, wal_most_mib=10))
READ = """
import sqlite3, sys
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True, isolation_level=None)
db.execute("BEGIN")
db.execute("SELECT count(*) FROM messages").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.box("alice", "bob", config=SMALL)


@contextmanager
def reader(path: Path) -> Iterator[int]:
    """A process that reads the ledger for the block, in one transaction; its pid."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", READ, str(path)], stdin=pipe, stdout=pipe)
    assert process.stdout is not None and process.stdout.readline() == b"reading\n"
    try:
        yield process.pid
    finally:
        process.communicate()


def watch_of(box: Box) -> WalWatch:
    path = box.home.path(LEDGER)
    return WalWatch(path, box.config.ledger, box.clock, InlineExecutor(), box._log)


def grow(box: Box, mib: int) -> None:
    """Let the WAL have so many MiB, with rows of the ledger's own."""
    wal = box.path(LEDGER + "-wal")
    while wal.stat().st_size < mib << 20:
        with box.ledger.transaction():
            box.ledger.set_state("filler", os.urandom(100_000).hex(), 0)


def look(box: Box, watch: WalWatch) -> WalState:
    box.clock.advance(1)
    watch.poll(idle=True)
    return watch.state


def said(box: Box) -> list[str]:
    return [entry["action"] for entry in box.log if str(entry.get("action")).startswith("wal_")]


def test_without_a_reader_it_stays_short(box: Box) -> None:
    grow_to, wal = 3 * WAL_KEPT_BYTES, box.path(LEDGER + "-wal")
    written = 0
    while written < grow_to:
        with box.ledger.transaction():
            box.ledger.set_state("filler", os.urandom(100_000).hex(), 0)
        written += 200_000
        assert wal.stat().st_size < 2 * WAL_KEPT_BYTES


def test_a_reader_is_named_once_and_the_wal_is_cut_when_he_ends(box: Box) -> None:
    watch, wal = watch_of(box), box.path(LEDGER + "-wal")
    with reader(box.path(LEDGER)) as pid:
        grow(box, 6)
        states = [look(box, watch) for _ in range(5)]
        assert states == [WalState.ALERT] * 5
        (entry,) = [entry for entry in box.log if entry.get("action") == "wal_long"]
        assert f"pid {pid} (" in entry["event"] and entry["pids"] == [pid]
        assert watch.paused == ""
    look(box, watch)
    assert look(box, watch) is WalState.OK
    assert wal.stat().st_size == 0
    assert said(box) == ["wal_long", "wal_short"]
    with reader(box.path(LEDGER)):  # another episode is said again
        grow(box, 6)
        for _ in range(3):
            look(box, watch)
    assert said(box) == ["wal_long", "wal_short", "wal_long"]


def test_when_it_is_full_files_wait_in_their_outboxes(box: Box) -> None:
    watch = watch_of(box)
    with reader(box.path(LEDGER)) as pid:
        grow(box, 11)
        for _ in range(3):
            assert look(box, watch) is WalState.FULL
        assert f"pid {pid} (" in watch.paused
        with pytest.MonkeyPatch.context() as patch:  # nor is one that nobody can see called pid 0
            patch.setattr(wal, "wal_readers", lambda path: {})
            box.clock.advance(40)
            assert [look(box, watch) for _ in range(2)] == [WalState.FULL] * 2
        assert "transaction open: a process of another user; end that process" in watch.paused
        box.tick()  # from now on
        box.drop("alice", "TO: bob\n\nwaits")
        box.tick(3)
        assert box.inbox("bob") == {} and len(box.outbox("alice")) == 1
        assert box.deadline > box.clock.monotonic_ns()  # the loop does not spin meanwhile
    look(box, watch)
    assert look(box, watch) is WalState.OK
    box.tick(2)
    assert box.bodies("bob") == ["waits"]


def test_a_fold_waits_for_no_reader(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    with reader(box.path(LEDGER)):
        box.send("alice", "TO: bob\n\nmore")
        assert not fold(box.home.path(LEDGER))
    assert fold(box.home.path(LEDGER))
    assert box.path(LEDGER + "-wal").stat().st_size == 0


def test_a_real_relay_waits_says_who_and_continues_by_itself(tmp_path: Path) -> None:
    settings = {"wal_alert_mib": 1, "wal_most_mib": 2}
    home = home_of(tmp_path / "home", "alice", "bob", ledger=settings)
    wal, inbox = home / (LEDGER + "-wal"), home / "agents/bob/inbox"
    with Relay(home), Agent("alice", str(home)) as alice:
        with reader(home / LEDGER) as pid:
            sent = []

            def is_full() -> bool:
                sent.append(alice.send("bob", "x" * 100))
                return wal.stat().st_size >= 2 << 20

            until(is_full)

            def status() -> str:
                return relay("status", home=home).stdout

            until(lambda: "intake is paused: ledger.db-wal has 2 MiB" in status())
            until(lambda: f"pid {pid} (" in status())
            until(lambda: f"pid {pid} (" in (home / "logs/relay.log").read_text())
            late = [alice.send("bob", "late") for _ in range(20)]
            until(lambda: any((home / "agents/alice/outbox").glob("*.msg")))
        until(lambda: len(list(inbox.glob("*.msg"))) == len(sent) + len(late))
        until(lambda: wal.stat().st_size < 2 << 20)
