"""The disk fills up before any effect, for a moment or for long: messages wait, and go on.

Every call that needs space, and every transaction of the ledger, is recorded; from each distinct
one of them on (``tests.kills``) there is none: the first of those that are the same when the disk
is full for long, the last of them otherwise. The relay goes on as its daemon does: what ends a
session is closed, and opened anew, which may fail again. Once there is space the end is what it
always is.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.errors import LedgerError, RelayError
from relay.ledger.ledger import Ledger
from tests.box import Box
from tests.crash import test_every_step as steps
from tests.kills import Effect, effect, firsts, lasts

pytestmark = pytest.mark.shows("journal 5.6")

NEEDS_SPACE = ("create", "write", "truncate")
ENDS_A_SESSION = (OSError, RelayError)  # as the daemon sees it
LONG = 1 << 30
READ_ONLY = (*NEEDS_SPACE, "rename", "remove", "keep")
# What quotas, a mount and the table of descriptors answer; then a disk that is full, in whose kinds
# with syncs space is looked for late. What is answered, for how many calls, and by which.
WAYS = {
    "quota": (errno.EDQUOT, LONG, (*NEEDS_SPACE, "sync")),
    "read-only": (errno.EROFS, LONG, READ_ONLY),
    "read-only for a while": (errno.EROFS, 3, READ_ONLY),
    "no descriptors": (errno.EMFILE, 3, ("create", "open", "sync")),
    "no descriptors of all": (errno.ENFILE, LONG, ("create", "open")),
    "long": (errno.ENOSPC, LONG, NEEDS_SPACE),
    "a moment": (errno.ENOSPC, 1, (*NEEDS_SPACE, "sync")),
    "a while": (errno.ENOSPC, 3, (*NEEDS_SPACE, "sync")),
    "long, and syncs fail": (errno.ENOSPC, LONG, (*NEEDS_SPACE, "sync")),
}


EVERY = 3  # of the distinct calls, for all but "long", which tries each of them


class FullDisk:
    """Full from the n-th call that needs space on, for so many calls; never when n is 0.

    Bytes that a file has already are written over: that needs none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self._root = root
        self.calls: list[Effect] = []
        self.fills_at = 0
        self.for_calls, self.fails = LONG, NEEDS_SPACE
        self.errno = errno.ENOSPC
        self._is_there = False  # what is being written has its place
        write_at, transaction = fsio.write_at, Ledger.transaction
        monkeypatch.setattr(fsio, "fault", self._call)

        def placed(fd: int, data: bytes, offset: int, name: str) -> None:
            self._is_there = offset + len(data) <= os.fstat(fd).st_size
            try:
                write_at(fd, data, offset, name)
            finally:
                self._is_there = False

        @contextlib.contextmanager
        def full(ledger: Ledger) -> Iterator[None]:
            if self._is_full("begin"):
                raise LedgerError("ledger.db: database or disk is full")
            with transaction(ledger):
                yield
                if self._is_full("commit"):
                    raise LedgerError("ledger.db: database or disk is full")

        monkeypatch.setattr(fsio, "write_at", placed)
        monkeypatch.setattr(Ledger, "transaction", full)

    def free(self) -> None:
        """Somebody removes what nobody needs."""
        self.fills_at = 0

    def _call(self, operation: str, name: str) -> None:
        has_place = self._is_there and self.errno != errno.EROFS
        if operation in self.fails and not has_place and self._is_full(operation, name):
            raise OSError(self.errno, os.strerror(self.errno), name)

    def _is_full(self, operation: str, name: str = "") -> bool:
        self.calls.append(effect(operation, name, self._root))
        return bool(self.fills_at) and 0 <= len(self.calls) - self.fills_at < self.for_calls


class SteadyBox(Box):
    """Begins again where the daemon does."""

    sessions = 0
    runs = False

    def open(self) -> None:
        """A session, unless the disk refuses it: the next turn tries again."""
        with contextlib.suppress(*ENDS_A_SESSION):
            super().open()
            self.runs = True
            self.sessions += 1

    def tick(self, times: int = 1) -> None:
        """A turn of the loop, or a try to begin again."""
        for _ in range(times):
            if not self.runs:
                self.clock.advance(1)
                self.open()
                continue
            try:
                super().tick()
            except ENDS_A_SESSION:
                self.runs = False
                self.kill()


COMMAND = "1000000003-03"


def batch(box: Box) -> None:
    """Everything a batch can hold; who is to answer does once it has what it answers."""
    box.drop("alice", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", "1000000001-01.msg")
    box.drop("bob", "TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", "1000000002-02.msg")
    box.drop("alice", "TO: bob\nKIND: command\n\ndeploy", f"{COMMAND}.msg")
    box.drop("alice", "TO: *\n\nto all", "1000000004-04.msg")
    box.drop("bob", "TO: #team\n\nto the team", "1000000005-05.msg")
    box.drop("alice", "TO: nobody\n\nlost?", "1000000007-07.msg")
    box.drop("carol", "no message at all", "1000000008-08.msg")
    box.drop("carol", "TO: alice\n\na name of no use", "hello.msg")
    box.tick()
    answer(box)
    box.tick()
    box.flush()


def answer(box: Box) -> None:
    """Bob answers the command, if it stands in his inbox and he has not yet."""
    name = "1000000006-06.msg"
    sent = [*box.path("agents", "bob", "outbox").glob(name), *box.path("archive").rglob(name)]
    if COMMAND in box.inbox("bob") and not sent:
        box.drop("bob", f"TO: alice\nKIND: ack\nRE: {COMMAND}\n\ncompleted", name)


def check_batch(box: Box) -> None:
    """The same, whoever had to wait."""
    answer(box)
    box.tick()
    box.flush()
    steps.check(box)


def check_vanished(box: Box) -> None:
    """Each is read, stands in the inbox, or went back to its sender: bob had no mailbox then."""
    box.home.make_agent("bob")
    for _ in range(2):
        box.after(1, turns=2)
    states = dict(box.sql("SELECT message_id, state FROM deliveries WHERE recipient = 'bob'"))
    told = [path.read_text() for path in box.path("agents", "alice", "inbox").rglob("*.msg")]
    back = {one for one in VANISHING if any(f"RE: {one}\n" in text for text in told)}
    assert {one for one, state in states.items() if state == "written"} == set(box.inbox("bob"))
    assert {
        one for one, state in states.items() if state in ("written", "read")
    } | back == VANISHING
    assert not list(box.path("agents").glob("*/inbox/.pending/*"))


VANISHING = {"1000000001-01", "1000000002-02", "1000000003-03"}
SCENARIOS = {
    **steps.SCENARIOS,
    "batch": (batch, check_batch),
    "vanished": (steps.vanished, check_vanished),
}


def calls(tmp_path: Path, name: str, fails: tuple[str, ...]) -> list[Effect]:
    """The calls that need space, made while there is; at the end everything is well."""
    with pytest.MonkeyPatch.context() as patch:
        box = SteadyBox(tmp_path / "whole", "alice", "bob", "carol")
        disk = FullDisk(patch, box.root)
        disk.fails = fails
        act, check_end = SCENARIOS[name]
        act(box)
        made = list(disk.calls)
        check_end(box)
        assert box.sessions == 1
        box.close()
    return made


def survive(root: Path, name: str, fills_at: int, way: str) -> int:
    """Fill the disk before this call, and go on; how often a session began."""
    with pytest.MonkeyPatch.context() as patch:
        box = SteadyBox(root, "alice", "bob", "carol")
        disk = FullDisk(patch, box.root)
        disk.errno, disk.for_calls, disk.fails = WAYS[way]
        disk.fills_at = fills_at
        act, check_end = SCENARIOS[name]
        act(box)
        box.tick(3)
        disk.free()
        box.tick()
        for _ in range(3):  # longer than any pause
            box.after(61, turns=2)
        box.flush()
        assert box.runs
        check_end(box)
        assert box.sql("PRAGMA integrity_check") == [("ok",)]
        box.close()
    return box.sessions


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("way", WAYS)
def test_refused_before_any_effect_it_ends_the_same(tmp_path: Path, name: str, way: str) -> None:
    number, _, fails = WAYS[way]
    made = calls(tmp_path, name, fails)
    assert len(made) > (20 if number == errno.ENOSPC else 10)
    # three kinds with syncs, and those for another reason: together they try every distinct call
    part = list(WAYS).index(way) % EVERY
    chosen = firsts(made) if way == "long" else lasts(made)[part::EVERY]
    sessions = [survive(tmp_path / f"at-{at:03d}", name, at, way) for at in chosen]
    assert max(sessions) > 1  # it was felt
