"""Ends and starts that come at a bad time: a backlog, a start that was cut short."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.logs import make_log
from relay.daemon import recovery
from relay.ledger.ledger import Ledger
from tests.box import Box
from tests.disk import hooked
from tests.kills import killed_in
from tests.procs import environment, home_of

pytestmark = pytest.mark.shows("journal 5.10", "ready 1.4")


@pytest.mark.box("alice", "bob")
def test_after_a_power_cut_a_start_that_was_cut_short_is_made_good(box: Box) -> None:
    lost = box.send("alice", "TO: bob\n\nlost")
    box.kill()
    box.path("agents", "bob", "inbox", f"{lost}.msg").unlink()
    box.boot = "boot-2"
    for where, step in (
        (recovery.Restorer, "write"),
        (recovery, "_restore_originals"),
        (Ledger, "open_rows"),
    ):
        with killed_in(where, step):
            box.open()
        box.events.close()
        box.ledger.close()
    box.open()
    box.tick(3)
    assert {m.body.decode(): m.headers["ATTEMPT"] for m in box.inbox("bob").values()} == {
        "lost": "2"
    }


@pytest.mark.parametrize("mode", ["at-most-once", "exactly-once"])
@pytest.mark.box("alice", "bob")
def test_what_a_power_cut_took_from_an_inbox_comes_again_whatever_was_promised(
    box: Box, mode: str
) -> None:
    lost = box.send("alice", f"TO: bob\nKIND: command\nDELIVERY: {mode}\n\nlost")
    box.kill()
    box.path("agents", "bob", "inbox", f"{lost}.msg").unlink()
    box.boot = "boot-2"
    box.open()
    assert [m.headers["ATTEMPT"] for m in box.inbox("bob").values()] == ["2"]
    assert box.states(lost) == {"bob": "written"}


@pytest.mark.damages
def test_a_held_message_that_the_store_has_lost_stops_nobody(box: Box) -> None:
    with box.broken_inbox("bob"):
        held = box.send("alice", "TO: bob\n\nheld")
        ended = box.ledger.position()
        box.kill()
        shutil.rmtree(box.path("journal"))  # and no checkpoint is there yet
        box.open()
        assert any(f"and was {ended} long" in line["event"] for line in box.log)
        box.after(5, turns=1)
        assert box.states(held) == {"bob": "held"}
        box.send("alice", "TO: carol\n\non")
        assert box.bodies("carol") == ["on"]
    box.after(60)
    assert box.bodies("bob") == ["held"]
    assert box.states(held) == {"bob": "written"}


def test_what_was_answered_stays_so_when_its_inbox_fails(box: Box) -> None:
    asked = box.drop("alice", "TO: bob\nKIND: command\n\ndo it")
    box.drop("bob", f"TO: alice\nKIND: ack\nRE: {asked}\n\ncompleted")

    def full(operation: str, name: str) -> None:
        if operation == "rename" and name == f"{asked}.msg" and "agents" not in name:
            raise PermissionError(errno.EACCES, "Permission denied")

    with hooked(full):
        box.tick()
    box.after(60)
    stored = box.store.messages.find_by_relay_id(asked)
    assert stored is not None
    assert box.states(asked) == {"bob": "acked"}
    assert box.store.deliveries.is_answered(stored.id, "bob")


@pytest.mark.damages
def test_what_is_underway_continues_though_ledger_and_journal_are_gone(box: Box) -> None:
    asks = "DELIVERY: at-least-once"
    asked = box.send("alice", f"TO: carol\nKIND: command\n{asks}\n\ndo it")
    with box.broken_inbox("bob"):
        held = box.send("alice", "TO: bob\n\nheld")
        box.flush()
        box.kill()
    shutil.rmtree(box.path("journal"))
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        box.path(name).unlink(missing_ok=True)
    box.open()
    box.tick(2)
    assert box.bodies("bob") == ["held"]
    assert box.states(held) == {"bob": "written"}
    assert box.row(held)["status"] == "archived"
    assert "archive/" in box.row(held)["file_path"]
    for seconds in (65, 1):  # until when it ran before, only the ledger knew
        box.after(seconds)
    assert box.inbox("carol")[asked].headers["ATTEMPT"] == "2"
    assert box.states(asked) == {"carol": "written"}


@pytest.mark.damages
def test_the_folder_of_the_store_is_made_again(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.flush()
    box.kill()
    shutil.rmtree(box.path("store"))
    box.open()
    box.send("alice", "TO: bob\n\nmore")
    box.flush()
    assert len(box.stored()) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_log_that_the_disk_does_not_take_stops_nothing() -> None:
    make_log("info", "/dev/full")("Retrying", action="begin_again", level="error")


def test_behind_a_line_cut_short_the_next_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "relay.log"
    log = make_log("info", str(path))
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        log("cut")
    log("whole")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines[1:]] == ["whole"]


def test_a_start_that_the_disk_refuses_says_so_in_a_line(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    argv = shlex.join([sys.executable, "-m", "relay", "--home", str(home), "up"])
    command = f"ulimit -f 500; {argv}"  # 250 KiB a file
    up = subprocess.run(
        ["sh", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )
    assert up.returncode == 1
    assert "File too large" in up.stderr
    assert len(up.stderr.splitlines()) == 1
    assert (home / "logs" / "relay.err").read_text() == ""


def test_an_ack_whose_file_is_away_at_the_restart_counted(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ngo")
    ack = box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted")
    box.kill()
    os.rename(box.path("agents", "bob"), box.path("tmp", "bob"))
    box.open()
    box.tick()
    assert (box.row(ack)["status"], box.states(sent)) == ("archived", {"bob": "acked"})
    assert box.nacks("bob") == box.nacks("alice") == []
