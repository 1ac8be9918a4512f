"""A ledger.db that SQLite cannot read any more: named, with what to do, wherever it is met."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base import config as configuration
from relay.base.clock import Clock
from relay.base.errors import LedgerDamaged, LedgerError, RelayError
from relay.base.home import LEDGER, Home
from relay.daemon.admin import status_of
from relay.daemon.session import CHECKED_BYTES, Session
from relay.ledger.file import open_readonly
from relay.ledger.ledger import Ledger
from relay.ledger.wal import fold
from tests.box import Box
from tests.ledger.support import Look
from tests.procs import Relay, log_of, relay, until

pytestmark = pytest.mark.damages

PAGE = 4096
SAYS = "is damaged ("


@pytest.fixture
def stopped(home: Path) -> Path:
    """A home with some mail in it, whose relay was stopped."""
    box = Box(home)
    for number in range(3):
        box.send("alice", f"TO: bob\n\nnumber {number}")
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    box.send("alice", "TO: nobody\n\nhi")
    box.close()
    return home


def zero(path: Path, page: int) -> None:
    """Overwrite one page, the first is 1, as a disk that lost it does."""
    with open(path, "r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(bytes(PAGE))


def pages(path: Path) -> range:
    return range(1, path.stat().st_size // PAGE + 1)


def begin(home: Path) -> str:
    """Start a session and let it deliver a message; what it refuses to begin with, or nothing."""
    lines: list[str] = []
    with Home(str(home)) as opened:
        config = configuration.decode(opened.read_config())
        try:
            with Session(opened, config, Clock(), lambda text, **_: lines.append(text)) as session:
                name = f"{time.time_ns()}-aa.msg"
                pending = home / "agents/alice/outbox/.pending" / name
                pending.write_text("TO: bob\n\nafter the damage")
                os.rename(pending, home / "agents/alice/outbox" / name)
                inbox = home / "agents/bob/inbox" / name
                ends = time.monotonic() + 5
                session.serve(lambda: inbox.exists() or time.monotonic() > ends)
                assert inbox.exists()
        except RelayError as exc:
            return f"{exc}; {exc.hint}"
    return ""


def test_whichever_page_is_lost_a_start_serves_or_names_the_ledger(
    stopped: Path, tmp_path: Path
) -> None:
    """Each page of ledger.db is zeroed in turn."""
    kept = tmp_path / "kept"
    shutil.copytree(stopped, kept)
    refused = 0
    for page in pages(kept / LEDGER):
        shutil.rmtree(stopped)
        shutil.copytree(kept, stopped)
        zero(stopped / LEDGER, page)
        before = (stopped / LEDGER).read_bytes()
        said = begin(stopped)
        if said:
            refused += 1
            assert said.startswith(f"{stopped}/{LEDGER} {SAYS}"), (page, said)
            assert "`relay ledger rebuild` rebuilds it from the journal" in said
            assert (stopped / LEDGER).read_bytes() == before, page  # left as it is
    assert refused >= 20


def test_relay_up_says_it_in_one_line_and_the_log_keeps_it(stopped: Path) -> None:
    zero(stopped / LEDGER, 5)
    done = relay("up", home=stopped)
    line = f"relay: {stopped}/{LEDGER} {SAYS}"
    assert done.returncode == 1
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert (
        f"`relay --home {stopped} ledger rebuild`" in done.stderr and "Traceback" not in done.stderr
    )
    assert (stopped / "logs/relay.err").read_text() == ""
    last = log_of(stopped)[-1]
    assert last["event"].startswith(f"Did not start: {stopped}/{LEDGER} {SAYS}")
    assert "exception" not in last


def test_while_it_runs_the_session_begins_again_with_a_line(stopped: Path) -> None:
    with Relay(stopped) as running:
        other = Look(stopped / LEDGER)  # a writer beside it: what the relay has in memory is stale
        other.db.execute("UPDATE orchestrator_state SET updated_at = 0")
        other.all("PRAGMA wal_checkpoint(TRUNCATE)")
        for page in pages(stopped / LEDGER)[1:]:
            zero(stopped / LEDGER, page)
        other.close()
        relay("send", "--as", "alice", "bob", "hi", home=stopped)
        until(lambda: len(log_of(stopped, "begin_again")) >= 2)
        status = relay("status", "--json", home=stopped)
        running.kill()
    for one in log_of(stopped, "begin_again"):
        assert f"{LEDGER} {SAYS}" in one["event"] and "exception" not in one
    assert SAYS in status.stderr and "Traceback" not in status.stderr


# -- every read and write ------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger that is open, and whose pages are then lost."""
    box = Box(tmp_path / "home", "alice", "bob")
    box.send("alice", "TO: bob\n\nhi")
    box.close()
    path = tmp_path / "home" / LEDGER
    opened = Ledger.open(str(path))
    for page in pages(path):
        if page > 1:
            zero(path, page)
    yield opened
    opened.close()


def test_every_read_of_a_damaged_ledger_says_so(ledger: Ledger) -> None:
    for read in (
        lambda: list(ledger.open_rows(9)),
        lambda: ledger.deliveries.next_due(),
        lambda: ledger.deliveries.due(0, 1),
        lambda: ledger.deliveries.unread("bob"),
        lambda: ledger.rows(["1"]),
        lambda: ledger.deliveries.rows(["1"]),
        lambda: ledger.get_state("epoch"),
        lambda: ledger.agents.rows(),
        lambda: ledger.agents.public_keys(),
        lambda: ledger.agents.references("", 10),
        lambda: ledger.processes.rows(),
        lambda: ledger.processes.supervised(),
        lambda: ledger.processes.open_operations(),
        lambda: ledger.claim(["1"]),
        lambda: ledger.check(most_bytes=1 << 30),
    ):
        with pytest.raises(LedgerDamaged) as caught:
            read()
        assert SAYS in str(caught.value) and "rebuild" in caught.value.hint


def test_a_reader_beside_it_says_so_row_by_row(tmp_path: Path) -> None:
    """The first rows are fetched, a later page is gone: whoever iterates hears it."""
    path = tmp_path / LEDGER
    with contextlib.closing(Ledger.open(str(path))) as made:
        with made.transaction():
            made._db.executemany(
                "INSERT INTO security_events (at, kind, detail) VALUES (?, 'x', ?)",
                [(number, "d" * 500) for number in range(2000)],
            )
    zero(path, pages(path)[-1])
    with contextlib.closing(open_readonly(str(path))) as db, pytest.raises(LedgerDamaged):
        assert len(list(db.execute("SELECT * FROM security_events"))) == 2000


def test_a_large_ledger_is_not_looked_through_at_a_start(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    with contextlib.closing(Ledger.open(str(path))) as made:
        made._db.execute("CREATE TABLE filler AS SELECT zeroblob(6000000) AS b")
    assert path.stat().st_size > CHECKED_BYTES
    zero(path, pages(path)[-2])
    with contextlib.closing(Ledger.open(str(path))) as opened:
        opened.check(most_bytes=CHECKED_BYTES)
        with pytest.raises(LedgerError, match="is damaged"):
            opened.check(most_bytes=32 << 20)


# -- once a day ----------------------------------------------------------------------------


@pytest.mark.box("alice", "bob")
def test_the_keeper_looks_through_the_ledger_once_a_day(box: Box, tmp_path: Path) -> None:
    """A page that nobody reads is lost while the relay runs: it is said within a day, and again
    the day after; once the ledger is sound, no more."""
    for number in range(40):
        box.send("alice", f"TO: bob\n\n{number}")

    def said() -> list[str]:
        return [one["event"] for one in box.log if one.get("action") == "ledger_damaged"]

    def days(number: int) -> None:
        for _ in range(number):
            box.clock.advance(86_400)
            box.tick(3)  # retention comes first, both are due

    days(1)
    assert said() == [] and box.session.status.ledger_damage == ""
    fold(box.home.path(LEDGER))
    path = tmp_path / "home" / LEDGER
    sound = path.read_bytes()
    root = box.sql("SELECT rootpage FROM sqlite_master WHERE name = 'messages_failed'")[0][0]
    zero(path, root)
    days(2)
    (line, again) = said()
    assert line == again == status_of(box.session.status)["ledger_damage"]
    assert f"{path} {SAYS}" in line and "rebuild" in line
    path.write_bytes(sound)
    days(1)
    assert box.session.status.ledger_damage == "" and len(said()) == 2
