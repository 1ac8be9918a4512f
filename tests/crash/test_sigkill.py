"""SIGKILL at random instants while agents write: every message delivered once, or nacked."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.base.home import Home
from relay.base.message import parse_delivered
from tests.procs import PATIENCE_S, Relay, environment, until

pytestmark = pytest.mark.shows("ready 1.2")

WRITERS = ("alice", "bob", "carol", "dave")
MESSAGES_EACH = 500
KILLS = 20
WRITER = Path(__file__).with_name("writer.py")


@pytest.mark.shows("ready 6.2")
def test_two_thousand_messages_and_twenty_kills(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    with Home.create(str(home)) as made:
        for name in WRITERS:  # or the first to write finds the others not yet there
            made.make_agent(name)
    relay = Relay(home)
    relay.start()
    writers = [start_writer(home, name, tmp_path / f"{name}.sent") for name in WRITERS]
    rng = random.Random(20)
    for _ in range(KILLS):
        time.sleep(rng.uniform(0.0, 0.5))  # the instant is what is drilled
        relay.kill()
        relay.start(wait=rng.random() < 0.7)  # killed while it recovers, too
    for writer in writers:
        assert writer.wait(5 * PATIENCE_S) == 0
    relay.kill()
    relay.start()
    until(lambda: finished(home), "every outbox is empty and every row at its end")
    assert relay.stop() == 0
    check(home, sent_by(tmp_path))


def start_writer(home: Path, name: str, log: Path) -> subprocess.Popen[bytes]:
    others = [other for other in WRITERS if other != name]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, WRITER, home, name, str(MESSAGES_EACH), "0.02", *others],
            env=environment(),
            stdout=out,
        )


def sent_by(folder: Path) -> dict[str, tuple[str, str]]:
    """Message id -> (sender, recipient), as the writers say."""
    sent = {}
    for name in WRITERS:
        for line in (folder / f"{name}.sent").read_text().splitlines():
            message_id, to = line.split()
            sent[message_id] = (name, to)
    assert len(sent) == len(WRITERS) * MESSAGES_EACH
    return sent


def finished(home: Path) -> bool:
    if any(home.glob("agents/*/outbox/*.msg")):
        return False
    db = sqlite3.connect(home / "ledger.db")
    (left,) = db.execute(
        "SELECT count(*) FROM messages WHERE status IN ('pending', 'processing', 'completed')"
    ).fetchone()
    db.close()
    return left == 0


def check(home: Path, sent: dict[str, tuple[str, str]]) -> None:
    """Writers, inboxes, ledger, store and archive tell one story."""
    good = {m: [to] for m, (_, to) in sent.items() if to != "nobody"}
    bad = {m: [sender] for m, (sender, to) in sent.items() if to == "nobody"}
    assert in_inboxes(home) == (good, bad)
    statuses, answers = in_ledger(home)
    assert statuses == {m: "archived" for m in good} | {m: "failed" for m in bad}
    file = store_file.read(str(home / "store" / "relay.acomm"))
    stored = [str((message.metadata or {})["relay_id"]) for message in file.messages]
    assert len(stored) == len(set(stored))
    assert set(stored) == set(good) | answers
    assert len(list(home.glob("archive/*/*/*.msg"))) == len(good)
    assert len(list(home.glob("archive/*/*/rejected/*.msg"))) == len(bad)


def in_inboxes(home: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Message id -> in whose inboxes it is; and the same of nacks, by what they answer."""
    delivered: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for path in home.glob("agents/*/inbox/*.msg"):
        message = parse_delivered(path.read_bytes(), file=path.name)
        if message.headers["FROM"] == "__orchestrator__":
            assert message.kind == "nack"
            refused.setdefault(message.headers["RE"], []).append(path.parts[-3])
        else:
            delivered.setdefault(path.stem, []).append(path.parts[-3])
    return delivered, refused


def in_ledger(home: Path) -> tuple[dict[str, str], set[str]]:
    """The agents' messages and their statuses, and the relay's own; all were delivered."""
    db = sqlite3.connect(home / "ledger.db")
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    rows = dict(
        db.execute("SELECT message_id, status FROM messages WHERE agent_name <> '__orchestrator__'")
    )
    answers = {
        row[0]
        for row in db.execute(
            "SELECT message_id FROM messages WHERE agent_name = '__orchestrator__'"
        )
    }
    states = db.execute("SELECT DISTINCT state FROM deliveries").fetchall()
    db.close()
    assert states == [("written",)]
    return rows, answers
