"""Retention: what is old or too much goes, what somebody still needs stays."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relay.audit.sources.ledger_rows import log_problems
from relay.base.clock import iso_date
from relay.base.config import Config, RetentionSettings
from relay.daemon import prune
from relay.daemon.housekeeper import packable, run_retention
from relay.daemon.prune import Pruned
from relay.ledger.ledger import Ledger
from tests.box import INLINE, Box, MakeBox
from tests.disk import failing, killed_before
from tests.fakes import IdleExecutor
from tests.kills import killed_in
from tests.procs import PATIENCE_S, Relay, home_of, relay, rows_of

BY_HAND = INLINE._replace(keeper=IdleExecutor())  # only ``run`` prunes
ONCE = Config(retention=RetentionSettings(every_s=1000 * 86_400))  # a minute after the start

pytestmark = pytest.mark.box("alice", "bob", executors=BY_HAND)

DAY_S = 86_400
DAY_NS = DAY_S * 10**9


def run(box: Box, *, dry_run: bool = False, **settings: int) -> dict[str, Pruned]:
    """A whole run with these settings and no others; what went, by kind."""
    quiet = {name: 0 for name in RetentionSettings.__struct_fields__ if name != "every_s"}
    config = Config(retention=RetentionSettings(**{**quiet, **settings}))
    return {g.kind: g for g in run_retention(box.home, config, box.clock, dry_run=dry_run)}


def files(box: Box) -> set[str]:
    """Every file of the home but those of SQLite, store and journal."""
    top = ("agents", "archive", "logs", "attachments")
    found = (path for name in top for path in box.path(name).rglob("*") if path.is_file())
    return {str(path.relative_to(box.root)) for path in found}


def archived(box: Box, *texts: str) -> list[str]:
    """Messages that are delivered, read and archived on the clock's day; their paths."""
    sent = [box.send("alice", f"TO: bob\n\n{text}") for text in texts]
    for one in sent:
        box.take("bob", one)
    box.flush()
    return [str(box.row(one)["file_path"]) for one in sent]


@pytest.mark.shows("ready 2.4")
def test_days_of_the_archive_go_by_age_oldest_first(box: Box) -> None:
    (old,) = archived(box, "old")
    box.clock.advance(5 * DAY_S)
    (young,) = archived(box, "young")
    box.clock.advance(5 * DAY_S)
    gone = run(box, archive_days=7)
    assert gone["archive"].number == 1 and gone["archive"].n_bytes > 0
    assert not box.path(old).exists() and not box.path(old).parent.parent.exists()
    assert box.path(young).exists()
    assert box.row(box.path(old).stem)["file_path"] == old  # the row still says where it was
    done = relay("trace", box.path(old).stem, home=box.root)
    assert f"file in {old} (pruned)" in done.stdout
    (facts,) = rows_of("trace", box.path(young).stem, home=box.root)
    assert facts["file_at"] == young


@pytest.mark.shows("ready 2.4")
@pytest.mark.parametrize("hour", [0.5, 23.5])
def test_and_by_size_but_nothing_of_the_last_day(box: Box, hour: float) -> None:
    box.clock.advance(DAY_S - (box.clock.now_ns() - int(hour * 3600e9)) % DAY_NS / 1e9)
    large = "x" * 700_000
    paths = []
    for _ in range(3):
        paths += archived(box, large)
        box.clock.advance(2 * DAY_S)
    box.clock.advance(-2 * DAY_S + 3600)
    assert run(box, archive_mib=1)["archive"].number == 2
    assert [box.path(path).exists() for path in paths] == [False, False, True]
    for _ in range(3):
        paths += archived(box, large)
    run(box, archive_mib=1)
    assert [box.path(path).exists() for path in paths[2:]] == [True] * 4  # a day is underway


def test_what_agents_have_read_goes_and_is_no_read_of_another(box: Box) -> None:
    archived(box, "one", "two")
    waits = box.send("alice", "TO: bob\n\nwaits")
    box.clock.advance(31 * DAY_S)
    before = box.sql("SELECT message_id, state, read_at FROM deliveries")
    assert run(box, read_days=30)["read"].number == 2
    assert not list(box.path("agents/bob/inbox/.read").iterdir())
    box.tick(3)
    assert box.sql("SELECT message_id, state, read_at FROM deliveries") == before
    assert list(box.inbox("bob")) == [waits]  # unread is no business of retention


def test_refused_files_go_before_the_rest_of_their_day(box: Box) -> None:
    (kept,) = archived(box, "fine")
    box.send("alice", "no message")
    box.flush()
    refused = list(box.path("archive").rglob("rejected/*.msg"))
    box.clock.advance(40 * DAY_S)
    gone = run(box, rejected_days=30, archive_days=90)
    assert (gone["rejected"].number, gone["archive"].number) == (1, 0)
    assert len(refused) == 1 and not refused[0].exists() and box.path(kept).exists()


def test_output_of_agents_that_are_no_more(box: Box) -> None:
    for name in ("bob.log", "gone.log", "gone.log.1", "relay.log", "relay.log.1", "relay.err"):
        box.path("logs", name).write_text("said")
    box.clock.advance(31 * DAY_S)
    assert run(box, output_days=30)["output"].number == 2
    assert sorted(os.listdir(box.path("logs"))) == [
        "bob.log",
        "relay.err",
        "relay.log",
        "relay.log.1",
    ]


@pytest.mark.damages
def test_what_an_open_row_or_delivery_needs_stays(box: Box) -> None:
    needed, other = archived(box, "needed", "other")
    (held,) = archived(box, "held")
    for statement in (
        f"UPDATE messages SET status = 'completed' WHERE file_path = '{needed}'",
        f"UPDATE deliveries SET state = 'held' WHERE message_id = '{box.path(held).stem}'",
    ):
        box.ledger._db.execute(statement)
    box.clock.advance(100 * DAY_S)
    run(box, archive_days=1, read_days=1)
    assert [box.path(path).exists() for path in (needed, other, held)] == [True, False, True]
    assert len(list(box.path("agents/bob/inbox/.read").iterdir())) == 2


def test_what_may_lie_in_the_archive_without_a_note_stays(box: Box) -> None:
    """Killed between the rename into the archive and its note, the row still names the outbox."""
    (path,) = archived(box, "needed")
    name = box.path(path).name
    box.ledger._db.execute(
        "UPDATE messages SET status = 'completed', file_path = ?", (f"agents/alice/outbox/{name}",)
    )
    box.clock.advance(100 * DAY_S)
    assert packable(box.home, box.clock) == []
    run(box, archive_days=1)
    assert box.path(path).exists()
    box.restart()
    assert (box.row(box.path(path).stem)["status"]) == "archived"
    assert box.row(box.path(path).stem)["file_path"] == path
    assert packable(box.home, box.clock) != []


def attached(box: Box, content: bytes) -> Path:
    """An attachment of the clock's day."""
    path = box.attach(content)
    os.utime(path, ns=(0, box.clock.now_ns()))
    return path


def test_attachments_stay_while_somebody_is_to_read_their_message(box: Box) -> None:
    unread, read, nobodys = (attached(box, name) for name in (b"unread", b"read", b"nobody's"))
    (box.path("attachments") / nobodys.parent.name / "a directory").mkdir()
    first = box.send("alice", f"TO: bob\nATTACHMENT: sha256:{unread.name}\n\nwaits")
    second = box.send("alice", f"TO: bob\nATTACHMENT: sha256:{read.name}\n\nread")
    box.take("bob", second)
    box.flush()
    box.clock.advance(40 * DAY_S)
    would = run(box, attachments_days=30, dry_run=True)["attachments"]
    assert (would.number, would.n_bytes) == (2, len(b"readnobody's")) and read.exists()
    assert run(box, attachments_days=30)["attachments"] == would
    assert unread.exists() and not read.exists() and not nobodys.exists()
    assert box.sql("SELECT sha256 FROM attachment_refs") == [(unread.name,)]
    box.take("bob", first)
    box.tick()
    assert run(box, attachments_days=30)["attachments"].number == 1 and not unread.exists()
    assert box.sql("SELECT sha256 FROM attachment_refs") == []
    assert run(box, attachments_days=30)["attachments"].number == 0


@pytest.mark.box("alice", "bob", executors=INLINE)
def test_a_clock_that_is_ahead_for_a_while_deletes_nothing(box: Box) -> None:
    """A machine whose clock is wrong at its start has it set by the network minutes later."""
    path = attached(box, b"read")
    sent = box.send("alice", f"TO: bob\nATTACHMENT: sha256:{path.name}\n\nread")
    box.take("bob", sent)
    box.tick()
    original, rows = box.path(box.row(sent)["file_path"]), box.sql("SELECT * FROM audit_log")
    box.clock.jump(400 * DAY_S)
    for _ in range(10):
        box.after(61)
    assert original.exists() and path.exists()
    assert box.path("agents/bob/inbox/.read", f"{sent}.msg").exists()
    assert box.sql("SELECT * FROM audit_log")[: len(rows)] == rows
    box.after(3600)  # it is right: the machine was off for a year
    for _ in range(20):
        box.after(1)
    assert not original.exists()


def test_the_thread_of_retention_writes_nothing_into_the_ledger(
    make_box: MakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is the only writer: a transaction elsewhere would hold up every message."""
    retention = RetentionSettings(every_s=1000 * 86_400, attachments_days=30)
    box = make_box("alice", "bob", name="other", config=Config(retention=retention))
    path = attached(box, b"read")
    os.utime(path, ns=(0, box.clock.now_ns() - 40 * DAY_NS))
    box.take("bob", box.send("alice", f"TO: bob\nATTACHMENT: sha256:{path.name}\n\nread"))
    box.tick()
    with box.ledger.transaction():
        box.ledger._db.execute("UPDATE attachment_refs SET at = 0")

    def opened(*_: object, **__: object) -> Ledger:
        raise AssertionError("a second connection that may write")

    monkeypatch.setattr(Ledger, "open", opened)
    for _ in range(2):
        box.command("operator", "prune")
        box.after(3, turns=20)
    assert not path.exists() and box.sql("SELECT * FROM attachment_refs") == []


def test_attachments_go_by_size_the_oldest_days_first(box: Box) -> None:
    paths = []
    for content in (b"a" * 700_000, b"b" * 700_000, b"c" * 700_000):
        paths.append(attached(box, content))
        box.clock.advance(2 * DAY_S)
    assert run(box)["attachments"].number == 0  # 0: for ever
    assert run(box, attachments_mib=1)["attachments"].number == 2
    assert [path.exists() for path in paths] == [False, False, True]


def test_a_dry_run_changes_nothing_and_says_what_the_run_then_does(box: Box) -> None:
    archived(box, "a", "b")
    box.path("logs/gone.log").write_text("said")
    box.clock.advance(400 * DAY_S)
    settings = {"archive_days": 1, "read_days": 1, "output_days": 1, "audit_days": 1}
    before, rows = files(box), box.sql("SELECT * FROM audit_log")
    would = run(box, dry_run=True, **settings)
    assert files(box) == before and box.sql("SELECT * FROM audit_log") == rows
    assert run(box, **settings) == would
    assert {kind: gone.number for kind, gone in would.items()} == {
        "archive": 2, "rejected": 0, "read": 2, "output": 1, "attachments": 0, "unfinished": 0,
        "audit": len(rows),
    }  # fmt: skip
    assert not [
        gone for gone in run(box, **settings).values() if gone.kind != "audit" and gone.number
    ]


def test_a_dry_run_says_what_goes_next_and_when(box: Box) -> None:
    archived(box, "a", "b")
    day = iso_date(box.clock.now_ns())
    box.clock.advance(DAY_S)
    archived(box, "c")
    would = run(box, dry_run=True, archive_days=90, audit_days=365)
    assert (would["archive"].number, would["archive"].next_number) == (0, 2)
    due_ns = would["archive"].next_ns
    assert due_ns is not None and iso_date(due_ns - 91 * DAY_NS) == day
    (logged,) = box.sql("SELECT min(at) FROM audit_log")
    assert would["audit"].next_ns == logged[0] + 365 * DAY_NS and would["audit"].next_number > 2
    assert would["read"].next_ns is None  # 0: for ever
    just_before = due_ns - box.clock.now_ns() - 10**9
    box.clock.advance(just_before / 1e9)
    assert run(box, archive_days=90)["archive"].number == 0
    box.clock.advance(2)
    assert run(box, archive_days=90)["archive"].number == 2


def test_what_interrupted_senders_left_of_attachments_goes_after_an_hour(box: Box) -> None:
    kept = attached(box, b"whole")
    dead, held, young = (
        kept.with_name(f".{kept.name[:16]}.{name}.tmp") for name in ("dead", "held", "young")
    )
    for path in (dead, held, young):
        path.write_bytes(b"half")
    for path in (dead, held):
        os.utime(path, ns=(0, box.clock.now_ns() - 3601 * 10**9))
    os.utime(young, ns=(0, box.clock.now_ns() - 3500 * 10**9))
    with held.open("ab"):  # its sender was suspended
        would = run(box, dry_run=True)["unfinished"]
        assert (would.number, would.n_bytes) == (1, 4) and dead.exists()
        said = relay("doctor", home=box.root).stdout
        assert f"interrupted: {dead.relative_to(box.root)}; " in said
        assert run(box)["unfinished"] == would
        assert sorted(kept.parent.iterdir()) == sorted([held, young, kept])
    assert run(box)["unfinished"].number == 1
    assert sorted(kept.parent.iterdir()) == sorted([young, kept])


def test_links_are_not_followed(box: Box, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "2020-01-01").mkdir(parents=True)
    (outside / "2020-01-01" / "mine").write_text("mine")
    box.path("archive/2020-01-01").symlink_to(outside / "2020-01-01")
    box.path("archive/2020-01-02").mkdir()
    box.path("archive/2020-01-02/alice").symlink_to(outside)
    run(box, archive_days=1)
    assert (outside / "2020-01-01" / "mine").read_text() == "mine"


def test_killed_at_any_removal_the_next_run_continues(box: Box) -> None:
    archived(box, *"abc")
    box.clock.advance(100 * DAY_S)
    for _ in range(20):
        with killed_before(2) as calls:
            run(box, archive_days=1, read_days=1)
        if len(calls) < 2:
            break
    assert not list(box.path("archive").iterdir())
    assert not list(box.path("agents/bob/inbox/.read").iterdir())


# -- rows of the ledger --------------------------------------------------------------------


def test_audit_rows_go_in_slices_and_each_says_so(box: Box) -> None:
    archived(box, "a")
    box.ledger._db.executemany(
        "INSERT INTO audit_log (at, message_id, new_status) VALUES (?, ?, 'x')",
        [(box.clock.now_ns() + n, str(n)) for n in range(1200)],
    )
    (count,) = box.sql("SELECT count(*) FROM audit_log")[0]
    box.clock.advance(400 * DAY_S)
    young = box.send("alice", "TO: bob\n\nyoung")
    settings, now = RetentionSettings(audit_days=365), box.clock.now_ns()
    assert prune.prune_audit(box.ledger, settings, now) == prune.SLICE_ROWS
    while prune.prune_audit(box.ledger, settings, now):
        pass
    # SQLite's own clock wrote the rows of the young one: they are as old as the others
    assert not box.sql("SELECT 1 FROM audit_log WHERE message_id = ? AND at > ?", young, now)
    said = box.sql("SELECT detail FROM security_events WHERE kind = 'audit_pruned'")
    assert sum(int(line.split()[1]) for (line,) in said) >= count
    assert len(said) == 3


def test_a_folder_that_is_named_like_a_day_and_is_none_is_left_alone(box: Box) -> None:
    folder = box.path("archive/2026-02-30")
    folder.mkdir()
    assert run(box, archive_days=1)["archive"].number == 0 and folder.exists()


def test_a_row_of_a_clock_that_was_ahead_holds_up_no_others(box: Box) -> None:
    old = box.clock.now_ns()
    insert = "INSERT INTO audit_log (at, message_id, new_status) VALUES (?, ?, 'x')"
    ahead = [(old + 4000 * DAY_NS, "ahead"), *((old, str(n)) for n in range(3))]
    box.ledger._db.executemany(insert, ahead)
    now = old + 400 * DAY_NS
    box.ledger._db.execute(insert, (now, "young"))
    assert prune.prune_audit(box.ledger, RetentionSettings(audit_days=365), now)
    left = box.sql("SELECT message_id FROM audit_log WHERE new_status = 'x'")
    assert left == [("ahead",), ("young",)]
    assert log_problems(str(box.root / "ledger.db")) == []


def test_a_slice_that_fails_removes_nothing(box: Box) -> None:
    archived(box, "a")
    box.clock.advance(400 * DAY_S)
    before = box.sql("SELECT * FROM audit_log")
    with killed_in(box.ledger.agents, "add_security_event"):
        prune.prune_audit(box.ledger, RetentionSettings(audit_days=365), box.clock.now_ns())
    assert box.sql("SELECT * FROM audit_log") == before
    assert not box.sql("SELECT 1 FROM orchestrator_state WHERE key = 'audit_kept_from'")


# -- beside the loop -----------------------------------------------------------------------


@pytest.mark.box("alice", "bob", config=ONCE)
def test_it_runs_by_itself_and_when_asked(box: Box) -> None:
    (old,) = archived(box, "old")
    box.clock.advance(100 * DAY_S)
    box.restart()
    box.tick()
    assert box.path(old).exists()
    box.after(60, turns=2)
    assert box.path(old).exists()  # no relay ran for 100 days, or the clock is wrong
    box.after(3600, turns=2)
    assert not box.path(old).exists()
    assert [e["kind"] for e in box.log if e.get("action") == "prune"] == ["archive", "read"]

    (again,) = archived(box, "again")
    box.clock.advance(100 * DAY_S)
    box.command("alice", "prune")
    box.tick()
    assert "for operator and the lead alone" in box.nacks("alice")[0] and box.path(again).exists()
    box.command("operator", "prune")
    box.tick(2)
    assert not box.path(again).exists()
    assert "Removed 1 file of archive" in box.acks("operator")[0]
    box.command("operator", "prune")
    box.after(1)
    assert "completed nothing has expired\n" in box.acks("operator")


@pytest.mark.box("alice", "bob", config=ONCE)
def test_a_run_that_fails_is_answered_with_a_nack(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(prune, "prune_files", fail)
    box.command("operator", "prune")
    box.tick(2)
    assert "Could not prune, pack or check: [Errno 5]" in box.nacks("operator")[0]


@pytest.mark.box("alice", "bob", config=ONCE)
def test_the_answer_waits_until_the_disk_has_room(box: Box) -> None:
    with failing("create"):
        box.command("operator", "archive.pack")
        box.tick(3)
        assert not box.acks("operator")
    box.tick(2)
    assert box.acks("operator") == ["completed nothing to pack\n"]


@pytest.mark.box("alice", "bob", config=ONCE)
def test_it_packs_when_the_disk_is_low(box: Box) -> None:
    (old,) = archived(box, "old")
    day = box.path("archive", old.split("/")[1])
    box.clock.advance(5 * DAY_S)
    box.tick(2)
    assert day.exists()
    box.disk.used_mib = 96_000
    for _ in range(2):
        box.after(5, turns=2)
    assert not day.exists() and box.path(f"{day}.tar.zst").exists()
    assert any(entry.get("action") == "pack" for entry in box.log)


@pytest.mark.box("alice", "bob", config=ONCE)
def test_a_command_names_the_days(box: Box) -> None:
    box.command("operator", "archive.pack", "BEFORE: yesterday")
    assert "expected a day such as 2026-01-31, got 'yesterday'" in box.nacks("operator")[0]
    (old,) = archived(box, "old")
    day = old.split("/")[1]
    box.clock.advance(5 * DAY_S)
    for before, is_packed in ((day, False), (iso_date(box.clock.now_ns()), True)):
        box.command("operator", "archive.pack", f"BEFORE: {before}")
        box.tick(2)
        assert box.path("archive", f"{day}.tar.zst").exists() is is_packed
        said = f"packed 2 files of {day}" if is_packed else "nothing to pack"
        assert said in box.acks("operator")[-1]


def test_a_real_relay_is_asked_and_without_one_it_is_done_here(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home", "alice", "bob")
    settings = Config(retention=RetentionSettings(archive_days=2))
    (home / "config.json").write_bytes(msgspec.json.encode(settings))

    def plant() -> Path:
        folder = home / "archive/2020-01-01/alice"
        folder.mkdir(parents=True)
        (folder / "1577836800000000000-01.msg").write_text("TO: bob\n\nold")
        return folder

    folder = plant()
    rows = {row["kind"]: row for row in rows_of("prune", "--dry-run", home=home)}
    assert list(rows) == list(prune.KINDS)
    assert rows["archive"]["count"] == 1 and rows["archive"]["oldest"].startswith("2020-01-01")
    assert folder.exists()
    today = iso_date(time.time_ns())
    (home / "archive" / today).mkdir()
    (home / "archive" / today / "1-02.msg").write_text("TO: bob\n\nnew")
    shown = relay("prune", "--dry-run", home=home).stdout.splitlines()
    assert shown[0].split()[-1] == "NEXT" and re.match(r"archive +1 .* 1 on \w", shown[1])
    done = relay("prune", home=home)
    assert done.returncode == 0 and "archive      1" in done.stdout
    assert not folder.parent.exists()
    plant()
    with Relay(home) as running:
        done = relay("prune", home=home)
        assert done.stdout.startswith("Removed 1 file of archive"), done.stderr
        assert not folder.parent.exists()
        plant()
        os.kill(running.pid, signal.SIGSTOP)
        done = relay("prune", "--timeout", "0.2", home=home)
        os.kill(running.pid, signal.SIGCONT)
        assert done.returncode == 4
        assert "; the result comes as a message, `relay" in done.stderr
        taken = relay("inbox", "--take", "--timeout", str(PATIENCE_S), home=home)
        assert "completed Removed 1 file of archive" in taken.stdout
