"""`relay doctor` on a home that is too large to be looked at whole, or newer than the clock."""

from __future__ import annotations

import contextlib
import re
import sqlite3

import pytest
from click.testing import CliRunner

from relay.base.config import Config, DiskSettings
from relay.base.home import LEDGER
from relay.cli import cli
from relay.doctor import Severity, examine, files, stores
from tests.box import Box

QUIET = Config(disk=DiskSettings(floor_mib=0, alert_percent=100))

pytestmark = [
    pytest.mark.box("alice", "bob", config=QUIET),
    pytest.mark.usefixtures("private_files"),
]


@pytest.fixture
def box(box: Box) -> Box:
    """A relay that was stopped after two messages, and nothing is wrong with its home."""
    box.send("alice", "TO: bob\n\none")
    box.send("alice", "TO: bob\n\ntwo")
    box.flush()
    box.stop()
    return box


def test_of_a_big_tree_a_part_is_looked_at_and_that_is_no_plain_ok(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor(box)[-1] == "OK"
    monkeypatch.setattr(files, "MAX_ENTRIES", 10)
    (finding,) = examine(box.home)
    assert finding.severity is Severity.NOTE
    said = re.search(r"checked 10 of (\d+) entries of the home, at modes and owners", str(finding))
    assert said is not None and int(said[1]) >= sum(1 for _ in box.root.rglob("*"))
    assert doctor(box)[-1] == "OK, as far as checked"


def test_of_many_rows_the_newest_are_compared_and_that_is_said(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_ROWS", 1)
    ((total,),) = box.sql("SELECT count(*) FROM messages")
    assert f"ledger: checked 1 of {total} rows of messages" in doctor(box)[0]
    assert doctor(box)[-1] == "OK, as far as checked"


@pytest.mark.damages
def test_a_clock_that_was_set_back(box: Box) -> None:
    with contextlib.closing(sqlite3.connect(box.path(LEDGER))) as db, db:
        db.execute("UPDATE messages SET discovered_at = discovered_at + ?", (50 * 3600 * 10**9,))
    (finding,) = examine(box.home)
    assert finding.severity is Severity.WARNING
    assert finding.found.startswith("the clock was set back: the ledger has a message from ")


def doctor(box: Box) -> list[str]:
    """What a person sees."""
    shown = CliRunner().invoke(cli, ["doctor", "--home", str(box.root)], standalone_mode=False)
    return shown.output.splitlines()
