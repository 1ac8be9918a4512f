"""Homes that relays have left in every shape there is: sealed, signed, packed, moved, mended."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_sdk import Agent
from relay.base import archive_pack
from relay.base.config import Config, RetentionSettings
from relay.base.home import LEDGER
from relay.daemon.housekeeper import packable, run_retention
from tests.box import Box
from tests.procs import PATIENCE_S, Relay, relay, until

AGENTS = ("alice", "bob", "carol")
DAY_S = 86_400
UNREAD = f"SELECT 1 FROM deliveries WHERE state = 'written' AND recipient IN {AGENTS}"
SCHEMA_5 = Path(__file__).parents[1] / "fixtures" / "ledger" / "schema-v5.sql"


def new_home(root: Path, **settings: dict[str, object]) -> Path:
    """As `relay init` makes it, with these settings; the machine's own disk does not matter."""
    done = relay("init", home=root)
    assert done.returncode == 0, done.stderr
    disk = {"alert_percent": 100, "low_percent": 100, "floor_mib": 0}
    store = {"checkpoint_ms": 50, **settings.pop("store", {})}
    (root / "config.json").write_text(json.dumps({"disk": disk, "store": store, **settings}))
    return root


@contextmanager
def running(home: Path) -> Iterator[None]:
    """A relay in a process of its own for the block."""
    process = Relay(home)
    process.start()
    try:
        yield
    finally:
        assert process.stop() == 0


@contextmanager
def people(home: Path) -> Iterator[tuple[Agent, Agent, Agent]]:
    """alice, bob and carol, known to the relay that runs."""
    with (
        Agent("alice", str(home)) as alice,
        Agent("bob", str(home)) as bob,
        Agent("carol", str(home)) as carol,
    ):
        known = {name for (name,) in rows(home, "SELECT name FROM agents")}
        for name in AGENTS:
            if name not in known:
                done = relay("register", name, home=home)
                assert done.returncode == 0, done.stderr
        yield alice, bob, carol


def rows(home: Path, query: str) -> list[tuple[object, ...]]:
    """Ask the ledger as `sqlite3` would."""
    db = sqlite3.connect(home / LEDGER)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def at_rest(home: Path) -> bool:
    """Nothing in an outbox, every row final."""
    left = list(home.glob("agents/*/outbox/*.msg"))
    return not left and not rows(home, "SELECT 1 FROM messages WHERE status <> 'archived'")


def talk(home: Path, about: str = "main") -> None:
    """Messages, a broadcast, a channel, a query with its answer, a command and its ack; read."""
    with people(home) as (alice, bob, carol):
        for number in range(6):
            alice.send("bob", f"number {number}")
        bob.send("*", "to all")
        alice.join("team", timeout_s=PATIENCE_S)
        carol.join("team", timeout_s=PATIENCE_S)
        carol.send("#team", "to the team")
        query = alice.send("carol", f"which branch of {about}?", kind="query")
        command = bob.send("carol", f"deploy {about}", kind="command")
        answered = 0
        while answered < 2:
            got = carol.receive(20)
            assert got is not None
            if got.id == query:
                carol.reply(got, "main")
                answered += 1
            if got.id == command:
                carol.ack(got, "completed", "shipped")
                answered += 1
        until(lambda: at_rest(home))
        for one in (alice, bob, carol):
            while one.receive(0) is not None:
                pass
        until(lambda: not rows(home, UNREAD))


# -- homes of all kinds --------------------------------------------------------------------


def sealed(root: Path) -> Path:
    """Encrypted with a key that lies elsewhere, signed, with attachments and archives of the
    store; the oldest segment of its journal in the object store alone, the next one warm."""
    objects = root.parent / "objects"
    objects.mkdir()
    home = new_home(
        root,
        store={
            "encrypt": True,
            "key_file": str(root.parent / "store.key"),
            "active_messages": 20,  # of half as many those that are final go to an archive
        },
        journal={"objects": str(objects), "compress_after_s": 0},
        security={"require_signatures": True},
    )
    for name in (*AGENTS, "operator"):
        assert relay("key", "make", name, home=home).returncode == 0
    with running(home):
        for number in range(3):
            talk(home, f"{number}")
            attach(home, f"file {number}".encode())
            asked(home, "seal")
            until(functools.partial(has_more_than, home, number + 1))
        until(lambda: list(home.glob("store/archive/**/*.acomm")), "an archive")
        move(home, 0, "1", wanted=[1, 2])
        move(home, 1, "1", wanted=[1, 2])
        move(home, 0, "2", wanted=[2])
    return home


def attach(home: Path, content: bytes) -> None:
    """One attachment in two messages, which are read; and one that no message names."""
    with people(home) as (alice, bob, carol):
        reference = alice.attach(content)
        for sender in (alice, carol):
            sender.send("bob", "see there", attachments=[reference])
        alice.attach(content + b", not sent")
        for _ in range(2):
            got = bob.receive(20)
            assert got is not None and bob.open_attachment(reference) == content
        until(lambda: at_rest(home) and not rows(home, UNREAD))


def has_more_than(home: Path, segments: int) -> bool:
    """Whether its journal has gone on to another segment."""
    return len(tiers(home)) > segments


def asked(home: Path, *order: str) -> None:
    """Ask the relay that runs for something to do with its journal."""
    done = relay("journal", *order, home=home)
    assert done.returncode == 0, done.stderr


def tiers(home: Path) -> list[list[int]]:
    """Of each segment of the journal, the tiers that have it."""
    done = relay("journal", "status", "--json", home=home)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["tiers"] for line in done.stdout.splitlines()]


def move(home: Path, segment: int, tier: str, wanted: list[int]) -> None:
    """Ask until it is there: not before two checkpoints cover it, and Tier 2 has it."""

    def is_there() -> bool:
        with people(home) as (alice, bob, _):
            alice.send("bob", "something more for a checkpoint")
            assert bob.receive(20) is not None
        asked(home, "move", "--to", tier, str(segment))
        return tiers(home)[segment] == wanted

    until(is_there, f"segment {segment} in {wanted}")


def packed(root: Path) -> Path:
    """Seven days of a relay, by a clock that is put on: the first pruned, the next two packed."""
    box = Box(root, *AGENTS, seconds=-6 * DAY_S)
    for _ in range(6):
        day_of(box)
        box.clock.advance(DAY_S - 5)
    day_of(box)
    for day in packable(box.home, box.clock)[:3]:
        for _ in archive_pack.pack(box.home, day):
            pass
    nothing = {name: 0 for name in RetentionSettings.__struct_fields__ if name != "every_s"}
    retention = RetentionSettings(**{**nothing, "archive_days": 5, "read_days": 3})
    run_retention(box.home, Config(retention=retention), box.clock, dry_run=False)
    box.close()
    return root


def day_of(box: Box) -> None:
    """Four messages and a broadcast, all read; written at the time of the box's clock."""
    for sender, to in (*(("alice", "bob"),) * 4, ("bob", "*")):
        name = box.name()
        pending = box.path("agents", sender, "outbox", ".pending", name)
        pending.write_text(f"TO: {to}\n\nhello\n")
        os.utime(pending, ns=(box.clock.now_ns(), box.clock.now_ns()))
        os.rename(pending, pending.parent.parent / name)
        box.tick(2)
        sent = name.removesuffix(".msg")
        for reader in box.states(sent):
            box.take(reader, sent)
    box.tick(2)
    box.flush()


def mended(root: Path) -> Path:
    """Of a relay of the schema before, then restored from a backup, then without its store."""
    home = new_home(root)
    with running(home):
        talk(home, "first")
    to_schema_5(home)
    kept = root.parent / "kept.db"
    with running(home):
        talk(home, "second")
        assert relay("ledger", "backup", str(kept), home=home).returncode == 0
        talk(home, "third")
    done = relay("ledger", "restore", str(kept), home=home)
    assert done.returncode == 0, done.stderr
    with running(home):
        until(lambda: at_rest(home))
    shutil.rmtree(home / "store")
    with running(home):
        talk(home, "fourth")
    return home


def to_schema_5(home: Path) -> None:
    """The same rows in a ledger as the version before wrote it."""
    path, old = home / LEDGER, home / "old.db"
    db = sqlite3.connect(old, isolation_level=None)
    db.executescript("PRAGMA journal_mode = WAL;" + SCHEMA_5.read_text())
    kinds = "SELECT name, sql FROM main.sqlite_master WHERE name NOT LIKE 'sqlite_%' AND type = ?"
    triggers = db.execute(kinds, ("trigger",)).fetchall()
    for name, _ in triggers:
        db.execute(f"DROP TRIGGER {name}")
    db.execute("ATTACH ? AS new", (str(path),))
    for table, _ in db.execute(kinds, ("table",)).fetchall():
        columns = ", ".join(row[1] for row in db.execute(f"PRAGMA main.table_info({table})"))
        db.execute(f"DELETE FROM main.{table}")
        db.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
    db.execute("DETACH new")
    for _, statement in triggers:
        db.execute(statement)
    db.close()
    for name in (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm"):
        (home / name).unlink(missing_ok=True)
    old.chmod(0o600)
    old.rename(path)
