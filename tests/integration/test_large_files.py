"""One large file holds up nobody and fills no disk: what is refused is not read, and no room is
made for it; attachments are refused by size first, and read in turns between agents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from relay.base.config import Config, LimitSettings
from relay.ledger import attachments
from tests.box import Box
from tests.procs import until

MIB = 1 << 20


def segments(box: Box) -> list[Path]:
    return sorted(box.path("journal").glob("*/segments/*.seg"))


def on_disk(box: Box) -> int:
    """What the journal's segments take up."""
    return sum(path.stat().st_blocks * 512 for path in segments(box))


def test_a_large_file_is_refused_and_no_room_is_made_for_it(box: Box) -> None:
    before, name = on_disk(box), box.name()
    pending = box.path("agents", "alice", "outbox", ".pending", name)
    pending.touch()
    os.truncate(pending, 100 * MIB)
    pending.rename(box.path("agents", "alice", "outbox", name))
    box.tick()
    assert "too large" in box.nacks("alice")[0]
    assert on_disk(box) - before < 4 * MIB


@pytest.mark.shows("journal 1.5")
def test_surplus_zeros_are_cut_off_at_a_start(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.kill()
    path = segments(box)[-1]
    with path.open("r+b") as file:
        file.truncate(600 * MIB)
    box.open()
    assert path.stat().st_size <= 4 * MIB
    assert box.states(sent) == {"bob": "written"}
    other = box.send("alice", "TO: bob\n\nand on")
    box.restart()
    assert list(box.inbox("bob")) == [sent, other]


# -- attachments --------------------------------------------------------------------------


def sparse(box: Box, size: int, number: int = 0) -> str:
    """A sparse attachment under the name of its content."""
    total, left = hashlib.sha256(), size
    piece = bytes(MIB)
    while left:
        total.update(piece[: min(left, MIB)])
        left -= min(left, MIB)
    digest = total.hexdigest()
    path = box.path("attachments", digest[:2], digest)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return digest


def attach(box: Box, agent: str, digest: str) -> str:
    return box.send(agent, f"TO: bob\nATTACHMENT: sha256:{digest}\n\nsee there")


@pytest.mark.box("alice", "bob", config=Config(limits=LimitSettings(max_attachment_mib=2)))
def test_one_that_is_too_large_is_refused_by_its_size(box: Box) -> None:
    digest = "ab" * 32
    path = box.path("attachments", "ab", digest)
    path.parent.mkdir()
    path.touch()
    os.truncate(path, 20 << 30)
    attach(box, "alice", digest)
    (nack,) = box.nacks("alice")
    assert "is 20480 MiB, at most 2 (limits.max_attachment_mib)" in nack
    assert path.exists() and box.sql("SELECT * FROM security_events") == []
    right = sparse(box, 2 * MIB)
    sent = attach(box, "alice", right)
    until(lambda: advance(box) or sent in box.inbox("bob"))


def advance(box: Box) -> None:
    box.after(0.05, turns=1)


def test_agents_take_turns(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent's three megabytes are read while alice's many still are."""
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        if length == attachments.PIECE_BYTES:
            read.append(os.fstat(fd).st_size)
        return pread(fd, length, offset)

    large, small = sparse(box, 96 * MIB), sparse(box, 3 * MIB)
    monkeypatch.setattr(attachments.os, "pread", counted)
    first = attach(box, "alice", large)
    sent = attach(box, "carol", small)
    until(lambda: advance(box) or sent in box.inbox("bob"))
    assert first not in box.inbox("bob")
    assert read.count(96 * MIB) < 75
    until(lambda: advance(box) or first in box.inbox("bob"))
