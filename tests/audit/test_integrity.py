"""The integrity job: each damaged file is named, the rest is verified, and days are compared."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from relay.base.clock import NS_PER_S
from relay.base.config import Config, RetentionSettings
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.home_journal import write_journal
from tests.audit.journal_builder import JournalBuilder, delivered, sent
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")

DAY = "archive/2026-01-31/alice"


def flip(path: Path, at: int) -> None:
    """One bit of a file is another."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def attach(
    home: HomeBuilder, data: bytes, message_id: str | None = None, at_ns: int = START_NS
) -> Path:
    """An attachment, and a message that names it."""
    digest = hashlib.sha256(data).hexdigest()
    path = home.root / "attachments" / digest[:2] / digest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if message_id is not None:
        with home.ledger.transaction():
            home.ledger.agents.add_references([(f"sha256:{digest}", message_id, at_ns)])
    return path


def filled(home: HomeBuilder) -> JournalBuilder:
    """A home with something of every kind, all of it sound."""
    for name in ("a", "b", "c"):
        home.sent(f"1-{name}")
    home.write_store("store/archive/2026-01-30/000001.acomm")
    home.write_store("store/archive/2026-01-31/000002.acomm")
    home.stored = []
    home.write_store()
    attach(home, b"a picture", "1-a")
    attach(home, b"nobody's")
    journal = JournalBuilder(home.root)
    journal.segment(sent(1), delivered(1))
    journal.segment(sent(2), delivered(2))
    journal.say(sent(3))
    return journal


@pytest.mark.shows("audit 2.9")
def test_what_is_sound_is_said_to_be_so_and_a_day_that_changed_is_found(home: HomeBuilder) -> None:
    filled(home).close()
    said = home.says("integrity")
    assert said.checks == {}
    kinds = sorted((row["kind"], row["class"]) for row in said.tables["integrity"])
    assert kinds == [
        ("archive", "sound"),
        ("archive", "sound"),
        ("attachment", "sound"),
        ("attachment", "unreferenced"),
        ("journal", "sound"),
        *[("original", "sound")] * 3,
        *[("segment", "sound")] * 3,
        ("store", "sound"),
    ]
    days = {(row["day"], row["kind"]): row["files"] for row in said.tables["integrity_days"]}
    assert days == {
        ("2026-01-30", "archive"): 1,
        ("2026-01-31", "archive"): 1,
        ("2026-01-31", "original"): 3,
        ("2026-01-31", "segment"): 2,
    }

    (home.root / DAY / "1-b.msg").write_bytes(b"TO: bob\n\nforged")
    (home.root / "store/archive/2026-01-31/000002.acomm").unlink()
    later = home.says("integrity", before=said)
    assert later.checks == {"day_changed": {"2026-01-31"}, "day_shrunk": {"2026-01-31"}}
    classes = {(row["day"], row["kind"]): row["class"] for row in later.tables["integrity_days"]}
    assert classes == {
        ("2026-01-30", "archive"): "same",
        ("2026-01-31", "archive"): "shrunk",
        ("2026-01-31", "original"): "changed",
        ("2026-01-31", "segment"): "same",
    }


def cut_its_log(home: HomeBuilder) -> None:
    """Rows are taken out of the ledger's own log; retention takes the first ones alone."""
    for number in range(4):
        with home.ledger.transaction():
            home.ledger.agents.add_security_event("unsigned", "alice", None, "", START_NS + number)
    with home.ledger.transaction():
        gone = home.ledger.agents.prune_log(START_NS + 1, START_NS + 10, 100)
    assert gone["security_events"] == 1
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        for table in ("audit_log", "security_events"):
            db.execute(f"DROP TRIGGER {table}_keeps_rows")
        db.execute("DELETE FROM audit_log WHERE message_id LIKE '1-b%'")
        db.execute("DELETE FROM security_events WHERE id = 3")


def test_each_damaged_file_is_named_and_stops_no_other(home: HomeBuilder) -> None:
    journal = filled(home)
    journal.close()
    flip(home.root / "store/archive/2026-01-30/000001.acomm", 200)
    flip(journal.dir / "segments" / f"{0:020d}.seg", 100)
    flip(attach(home, b"altered", "1-b"), 0)
    wanted = attach(home, b"missing", "1-c")
    wanted.unlink()
    (home.root / DAY / "1-a.msg").unlink()
    (home.root / DAY / "1-a.msg").symlink_to("/etc/passwd")
    (home.root / "archive" / "2026-01-29.tar.zst").write_bytes(b"no pack")
    with home.ledger.transaction():  # the journal ends before what the ledger has heard of it
        home.ledger.set_position(10**9, START_NS)
    cut_its_log(home)
    outcome = home.says("integrity")
    altered = hashlib.sha256(b"altered").hexdigest()
    assert outcome.checks == {
        "damaged": {
            "store/archive/2026-01-30/000001.acomm",
            f"journal/{1:020d}/segments/{0:020d}.seg",
            f"attachments/{altered[:2]}/{altered}",
            "journal",
            "ledger.db",
        },
        "missing": {f"attachments/{wanted.parent.name}/{wanted.name}"},
        "unreadable": {f"{DAY}/1-a.msg", "archive/2026-01-29.tar.zst"},
    }
    said = {row["path"]: row["problems"] for row in outcome.tables["integrity"]}
    assert all(home.path not in line for lines in said.values() for line in lines)
    assert said["ledger.db"] == [
        "audit_log lacks 6 of its rows 1 to 18",
        "security_events lacks 1 of its rows 2 to 4",
        "its trigger audit_log_keeps_rows is missing",
        "its trigger security_events_keeps_rows is missing",
    ]


def test_attachments_that_retention_cannot_have_removed(home: HomeBuilder) -> None:
    """Their messages were read; the snapshot is of 2026-01-31."""
    paths = {}
    for name, days in (("today", 0), ("yesterday", 1), ("kept", 29), ("old", 30)):
        home.sent(f"1-{name}")
        at_ns = START_NS - days * 86_400 * NS_PER_S
        paths[name] = attach(home, name.encode(), f"1-{name}", at_ns)
        with home.ledger.transaction():
            put(home.ledger, f"1-{name}", "bob", "read", read_at=START_NS)
    home.write_store()
    write_journal(home)
    shutil.rmtree(home.root / "journal")  # of which the ledger has heard
    for path in paths.values():
        path.unlink()

    def gone(retention: RetentionSettings) -> set[str]:
        (home.root / "config.json").write_bytes(msgspec.json.encode(Config(retention=retention)))
        outcome = home.says("integrity")
        checks = outcome.checks
        assert set(checks) == {"missing"}
        checks["missing"].remove("journal")
        named = {path.relative_to(home.root).as_posix(): name for name, path in paths.items()}
        for row in outcome.tables["integrity"]:
            if row["class"] == "missing" and row["kind"] == "attachment":
                expected = f"missing, but not for its age: named by 1-{named[row['path']]}"
                assert row["problems"] == [expected]
        return {named[path] for path in checks["missing"]}

    assert gone(RetentionSettings()) == {"today", "yesterday", "kept"}
    assert gone(RetentionSettings(attachments_mib=1)) == {"today"}
    assert gone(RetentionSettings(attachments_days=0)) == set(paths)
