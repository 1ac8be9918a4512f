"""What the drill of power cuts calls lost, doubled and falsely read."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from relay.base.names import sha256_hex
from scripts.powercutting.judging import Fault, Look, taken_twice
from scripts.powercutting.notes import Note
from tests.box import Box

pytestmark = [pytest.mark.box("carol", "grace"), pytest.mark.damages]

BODY = "hi"
CUT_NS = 1000


@pytest.fixture
def sent(box: Box) -> Note:
    """A message of carol to grace, delivered and acknowledged."""
    message_id = box.send("carol", f"TO: grace\n\n{BODY}")
    box.after(0.1)
    return Note("sent", "carol", message_id, "grace", sha256_hex(BODY.encode()), at_ns=500)


def taken(sent: Note, since_ns: int) -> Note:
    return Note("taken", sent.to, sent.id, since_ns=since_ns, at_ns=since_ns + 1)


def kinds(box: Box, *notes: Note) -> list[str]:
    return sorted({one.kind for one in Look(Path(box.root), notes, CUT_NS).faults()})


def file_of(box: Box, sent: Note) -> Path:
    return box.path("agents/grace/inbox", f"{sent.id}.msg")


def move_to_read(box: Box, sent: Note) -> None:
    read = box.path("agents/grace/inbox/.read")
    read.mkdir(exist_ok=True)
    file_of(box, sent).rename(read / f"{sent.id}.msg")


def test_a_message_that_is_with_its_recipient_is_no_fault(box: Box, sent: Note) -> None:
    assert kinds(box, sent) == []
    look = Look(Path(box.root), [sent], CUT_NS)
    assert (list(look.faults()), look.checks) == ([], 1)


def test_one_that_is_gone_is_lost(box: Box, sent: Note) -> None:
    file_of(box, sent).unlink()
    assert kinds(box, sent) == ["ledger", "lost"]


def test_one_without_its_content_is_lost(box: Box, sent: Note) -> None:
    file_of(box, sent).write_bytes(b"")
    assert kinds(box, sent) == ["lost"]


def test_one_that_no_ledger_knows_is_lost(box: Box, sent: Note) -> None:
    assert kinds(box, msgspec.structs.replace(sent, id="1000000099-99")) == ["ledger", "lost"]


def test_what_was_acknowledged_after_the_cut_is_promised_to_nobody(box: Box, sent: Note) -> None:
    file_of(box, sent).unlink()
    box.sql("DELETE FROM deliveries")
    assert kinds(box, msgspec.structs.replace(sent, at_ns=2000)) == []


def test_one_in_the_inbox_and_in_read_is_doubled(box: Box, sent: Note) -> None:
    shutil.copy(file_of(box, sent), box.path("copy"))
    move_to_read(box, sent)
    shutil.copy(box.path("copy"), file_of(box, sent))
    assert "doubled" in kinds(box, sent)


def test_one_that_nobody_took_and_that_is_among_those_read_is_falsely_read(
    box: Box, sent: Note
) -> None:
    move_to_read(box, sent)
    box.after(1.1)
    assert kinds(box, sent) == ["falsely read"]
    assert kinds(box, sent, taken(sent, since_ns=2000)) == ["falsely read"]
    assert kinds(box, sent, taken(sent, since_ns=900)) == []


def test_what_a_reader_got_twice_without_a_power_cut_is_doubled(sent: Note) -> None:
    assert taken_twice([sent, taken(sent, 600)]) == []
    (fault,) = taken_twice([sent, taken(sent, 600), taken(sent, 700)])
    assert fault == Fault("doubled", f"{sent.id}: grace got it 2 times, before any power cut")
