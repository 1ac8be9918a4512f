"""The ledger made again from the journal by `relay ledger rebuild`, whatever became of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent
from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import LEDGER, Home
from relay.daemon import ledger_backup
from relay.daemon.ledger_backup import Rebuilt
from relay.ledger import file as ledger_file
from tests.box import Box, MakeBox
from tests.disk import killed_at, steps_of
from tests.ledger.support import Look
from tests.procs import Relay, relay, until

PAGE = 4096
DELIVERIES = (
    "SELECT message_id, recipient, state, attempt, iif(state = 'held', 0, staged_at), written_at, "
    "read_at, read_how, acked_at, ack_status, answer_id, answer_text, obligation, reminders, "
    "discarded_at FROM deliveries ORDER BY 1, 2"
)
MESSAGES = (
    "SELECT message_id, agent_name, status, last_error, last_error_code, file_path "
    "FROM messages ORDER BY 1"
)
REJECTIONS = "SELECT file_name, reason, code, nack_id, at FROM rejections ORDER BY 1"
AGENTS = "SELECT name, status, note, public_key FROM agents ORDER BY 1"


def rebuild(root: Path) -> Rebuilt:
    with Home(str(root)) as home:
        return ledger_backup.rebuild(home, Config(), Clock(), lambda *_, **__: None)


def rows(path: Path | str, query: str) -> list[Any]:
    with Look(path) as look:
        found = look.all(query)
    return found


def a_home(root: Path) -> list[str]:
    """A home of a relay that has stopped: read, acknowledged, unread, refused, held; the ids.

    One more was dead and is discarded.
    """
    box = Box(root, "alice", "bob", "carol")
    dead = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\nnobody answers")
    box.until_dead()
    box.command("operator", "dead.discard", f"ID: {dead}")
    box.take("bob", dead)
    box.tick()
    read, acked = (
        box.send("alice", "TO: bob\n\none"),
        box.send("alice", "TO: bob\nKIND: command\n\ntwo"),
    )
    box.take("bob", read)
    box.tick()
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {acked}\nSTATUS: completed\n\ndone")
    sent = [read, acked, box.send("alice", "TO: *\n\nthree"), box.send("alice", "TO: nobody\n\nx")]
    box.send("alice", "TO: bob\n\nhi", "no name of a message.msg")
    os.rename(box.path("agents/carol/inbox"), box.path("agents/carol/away"))
    box.path("agents/carol/inbox").symlink_to(box.path("tmp"))
    sent.append(box.send("alice", "TO: carol\n\nheld"))
    box.ledger.agents.set_public_keys([("alice", "ab" * 32)], 1)
    box.ledger.agents.add_security_event("hard_link", "bob", "x", "two names", 7)
    box.flush()
    box.close()
    return sent


def test_it_is_made_again_as_it_was(make_box: MakeBox, tmp_path: Path) -> None:
    sent = a_home(tmp_path / "home")
    path = tmp_path / "home" / LEDGER
    before = {query: rows(path, query) for query in (MESSAGES, REJECTIONS, DELIVERIES, AGENTS)}
    incidents = rows(path, "SELECT at, kind, agent, path, detail FROM security_events")
    old = path.read_bytes()
    done = rebuild(tmp_path / "home")
    assert {query: rows(path, query) for query in before} == before
    assert rows(path, "SELECT at, kind, agent, path, detail FROM security_events") == incidents
    assert done.aside == f"{path}.before-rebuild" and Path(done.aside).read_bytes() == old
    assert done.lost == ("audit_log: changes before now are only in the previous ledger",)
    assert any(row[-1] for row in before[DELIVERIES])  # the discarded one
    assert ledger_file.verify(str(path)) == done.content
    box = make_box()
    assert box.states(sent[4]) == {"carol": "held"} and box.bodies("bob") == ["two", "three"]


def test_whichever_page_is_lost_all_that_the_journal_knows_is_there_again(
    tmp_path: Path,
) -> None:
    a_home(tmp_path / "kept")
    path = tmp_path / "home" / LEDGER
    asked = (MESSAGES, REJECTIONS, DELIVERIES)
    before = [rows(tmp_path / "kept" / LEDGER, query) for query in asked]
    assert ("no_recipient" in str(before[0])) and ("bad_name" in str(before[1]))
    for page in range((tmp_path / "kept" / LEDGER).stat().st_size // PAGE):
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "home", symlinks=True)
        with open(path, "r+b") as file:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))
        done = rebuild(tmp_path / "home")
        assert [rows(path, query) for query in asked] == before, page
        whole = set(done.kept.values()) - {0}
        assert whole or len(done.lost) > 1, page  # what could not be taken over is said


def test_a_ledger_that_is_gone_or_no_database(tmp_path: Path) -> None:
    a_home(tmp_path / "home")
    path = tmp_path / "home" / LEDGER
    before = rows(path, MESSAGES)
    path.write_bytes(b"no database" * 1000)
    done = rebuild(tmp_path / "home")
    assert rows(path, MESSAGES) == before
    assert Path(done.aside).read_bytes() == b"no database" * 1000
    assert any(line.startswith("agents and their keys; ") for line in done.lost)
    path.unlink()
    assert rebuild(tmp_path / "home").aside == "" and rows(path, MESSAGES) == before


@pytest.mark.damages
def test_what_the_journal_no_longer_has_is_said(tmp_path: Path) -> None:
    """The journal is gone altogether: rows of what is underway are made from the store."""
    sent = a_home(tmp_path / "home")
    shutil.rmtree(tmp_path / "home/journal")
    done = rebuild(tmp_path / "home")
    assert any("the journal" in line for line in done.lost), done.lost
    ids = {row[0] for row in rows(tmp_path / "home" / LEDGER, MESSAGES)}
    assert sent[4] in ids and sent[0] not in ids


def test_killed_at_any_step_it_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    a_home(tmp_path / "kept")
    path = tmp_path / "home" / LEDGER
    before = rows(tmp_path / "kept" / LEDGER, MESSAGES)

    def fresh() -> bytes:
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        shutil.copytree(tmp_path / "kept", tmp_path / "home", symlinks=True)
        with open(path, "r+b") as file:
            file.seek(4 * PAGE)
            file.write(bytes(PAGE))
        return path.read_bytes()

    damaged = fresh()
    steps = steps_of(lambda: rebuild(tmp_path / "home"))
    distinct = {step: number for number, step in enumerate(steps, 1)}  # each the last time
    assert len(distinct) > 8
    for number in distinct.values():
        fresh()
        killed_at(number, lambda: rebuild(tmp_path / "home"))
        if path.read_bytes() != damaged:
            ledger_file.verify(str(path))  # the new one, whole
        rebuild(tmp_path / "home")
        assert rows(path, MESSAGES) == before, steps[number - 1]
        assert not path.with_name("ledger.db.rebuilt").exists()


def test_a_real_relay_continues_after_it(running: Relay, home: Path) -> None:
    with Agent("alice", str(home)) as alice:
        sent = [alice.send("bob", f"number {number}") for number in range(20)]
    until(lambda: len(list((home / "agents/bob/inbox").glob("*.msg"))) == 20)
    refused = relay("ledger", "rebuild", home=home)
    assert refused.returncode == 5 and "a relay runs" in refused.stderr
    running.kill()
    with open(home / LEDGER, "r+b") as file:
        file.seek(PAGE)
        file.write(bytes(10 * PAGE))
    (home / "ledger.db-wal").unlink()
    assert f"`relay --home {home} ledger rebuild`" in relay("up", home=home).stderr
    done = relay("ledger", "rebuild", "--json", home=home)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["aside"] == f"{home}/ledger.db.before-rebuild"
    assert facts["rows"]["messages"] == 20
    running.start()
    assert relay("send", "--as", "alice", "bob", "after", home=home).returncode == 0
    inbox = home / "agents/bob/inbox"
    until(lambda: len(list(inbox.glob("*.msg"))) == 21)
    with Look(home / LEDGER) as look:
        until(lambda: look.one("SELECT count(*) FROM messages WHERE status = 'archived'") == 21)
    assert {path.stem for path in inbox.glob("*.msg")} > set(sent)
    doctor = relay("doctor", home=home)
    assert doctor.returncode == 0, doctor.stdout


def test_in_words(tmp_path: Path) -> None:
    a_home(tmp_path / "home")
    (tmp_path / "home" / LEDGER).write_bytes(b"no database")
    done = relay("ledger", "rebuild", home=tmp_path / "home")
    first, *more = done.stdout.splitlines()
    assert first.startswith("rebuilt from the journal, the previous ledger is ")
    assert all(line.startswith("not restored: ") for line in more) and len(more) == 6
    left = {path.name for path in (tmp_path / "home").glob("ledger.db*")}
    assert left == {"ledger.db", "ledger.db.before-rebuild"}
