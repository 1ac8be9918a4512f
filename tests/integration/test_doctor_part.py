"""`relay doctor` on what waits in .pending, on surplus zeros, on a home that is too large to be
looked at whole, or newer than the clock, and on the relay's own process."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from relay.base.home import Home
from relay.doctor import Severity, examine, files, stores
from tests.box import Box
from tests.integration.test_doctor_checks import box, found, mend, one, pytestmark
from tests.procs import Relay, relay

__all__ = ["box", "pytestmark"]  # a home of the same kind


def test_a_message_left_in_pending_is_named_and_not_removed(box: Box) -> None:
    pending = box.path("agents/alice/outbox/.pending/1700000000000000099-99.msg")
    pending.write_text("TO: bob\n\nhal")
    os.utime(pending, (time.time() - 40, time.time() - 40))
    assert f"not sent, in .pending for more than 30 s: {pending.relative_to(box.root)}; " in str(
        one(box)
    )
    os.utime(pending, (time.time() - 4000, time.time() - 4000))
    assert "rename it into the outbox" in str(one(box)) and not one(box).repairs
    assert mend(box) == [] and pending.exists()


def test_a_segment_with_surplus_zeros_is_named(box: Box) -> None:
    segment = sorted(box.path("journal").glob("*/segments/*.seg"))[-1]
    os.truncate(segment, 150 << 20)
    finding = one(box)
    assert f"{segment} has 149 MiB of zeros after its last record" in str(finding)
    assert not finding.repairs
    box.open()
    box.stop()
    assert found(box) == []


def doctor(box: Box) -> list[str]:
    """What a person sees."""
    return relay("doctor", home=box.root).stdout.splitlines()


def test_of_a_big_tree_a_part_is_looked_at_and_that_is_no_plain_ok(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor(box)[-1] == "OK"
    monkeypatch.setattr(files, "MAX_ENTRIES", 10)
    finding = one(box)
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


def test_a_clock_that_was_set_back(box: Box) -> None:
    box.sql("UPDATE messages SET discovered_at = discovered_at + ?", 50 * 3600 * 10**9)
    finding = one(box)
    assert finding.severity is Severity.WARNING
    assert finding.found.startswith("the clock was set back: the ledger has a message from ")


def test_a_relay_that_does_not_answer(stopped: int, home: Path) -> None:
    with Home(str(home)) as opened:
        (finding,) = examine(opened)
    assert (finding.what, finding.severity.value, finding.where) == ("process", "error", ".lock")
    assert finding.found == f"the relay, pid {stopped}, does not answer within 3 s: it is stopped"
    assert finding.advice == f"`kill -CONT {stopped}` lets it continue"


def test_a_relay_that_did_not_stop_by_itself_is_a_note(running: Relay, home: Path) -> None:
    pid = running.pid
    running.kill()
    with Home(str(home)) as opened:
        (finding,) = [one for one in examine(opened) if one.where == ".lock"]
    assert finding.severity.value == "note"
    assert finding.found.startswith(f"the last relay, pid {pid}, did not stop by itself; its last")
    assert "the next start recovers its unfinished work" in finding.advice
