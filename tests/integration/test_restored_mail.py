"""What was read, answered, owed and given up, after the ledger was made again or the home put back:
nothing that was read comes again, and what stands in an inbox, or is owed, is as it was."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from relay.base.clock import Clock
from relay.base.config import Config
from relay.base.home import LEDGER, Home
from relay.daemon import home_backup, ledger_backup
from relay.daemon.home_restore import restore
from tests.box import Box
from tests.ledger.support import Look

AGENTS = ("alice", "bob", "carol")
# Times as far as the journal tells them; what is due is later by the time that no relay ran.
COLUMNS = (
    "message_id, recipient, state, attempt, staged_at / 1000000000, written_at / 1000000000, "
    "read_at / 1000000000, acked_at / 1000000000, ack_status, read_how, answer_id, answer_text, "
    "obligation, reminders, due_at IS NULL"
)


def a_home(root: Path) -> tuple[Box, dict[str, str]]:
    """Bob's mail in every state that there is; body -> message id."""
    box = Box(root, *AGENTS)
    sent: dict[str, str] = {}

    def send(body: str, headers: str = "KIND: command") -> None:
        sent[body] = box.send("alice", f"TO: bob\n{headers}\n\n{body}")

    def answer(body: str, kind: str, text: str) -> None:
        box.send("bob", f"TO: alice\nKIND: {kind}\nRE: {sent[body]}\n\n{text}")

    for body in ("taken", "removed", "unread"):
        send(body, "KIND: message")
    for body in ("done", "begun", "failed", "silent", "answered unread"):
        send(body)
    send("question", "KIND: query")
    for body in ("dead", "dead and read", "dead and begun"):
        send(body, "DELIVERY: at-least-once\nKIND: command")
    box.after(1.1)
    for body in ("taken", "done", "begun", "failed"):
        box.take("bob", sent[body])
    box.remove("bob", sent["removed"])
    box.tick()
    box.after(1.1)
    answer("done", "ack", "completed all of it")
    answer("begun", "ack", "in_progress half of it")
    answer("failed", "nack", "no such branch")
    answer("answered unread", "ack", "completed")
    answer("question", "response", "the second")
    box.after(1.1)
    answer("done", "ack", "received")  # once more, behind the answer: its last word
    for _ in range(13):
        box.after(61)
    box.take("bob", sent["dead and read"])
    answer("dead and begun", "ack", "in_progress late")
    box.after(1500)  # reminded
    return box, sent


def table(root: Path) -> list[tuple[object, ...]]:
    with Look(root / LEDGER) as look:
        rows = look.all(f"SELECT {COLUMNS} FROM deliveries ORDER BY 1, 2")
    return rows


def dues(root: Path) -> list[tuple[object, ...]]:
    with Look(root / LEDGER) as look:
        rows = look.all("SELECT message_id, recipient, due_at FROM deliveries ORDER BY 1, 2")
    return rows


def standing(box: Box) -> dict[str, dict[str, str]]:
    """Agent -> message id -> ATTEMPT of what stands in its inbox."""
    return {
        agent: {one: m.headers.get("ATTEMPT", "") for one, m in box.inbox(agent).items()}
        for agent in AGENTS
    }


def rebuild(root: Path, clock: Clock) -> None:
    with Home(str(root)) as home:
        ledger_backup.rebuild(home, Config(), clock, lambda *_, **__: None)


@pytest.mark.parametrize(("is_clean", "is_gone"), [(True, True), (False, False)])
def test_a_ledger_made_again_says_what_was_read_answered_and_is_owed(
    tmp_path: Path, is_clean: bool, is_gone: bool
) -> None:
    box, sent = a_home(tmp_path / "home")
    before = table(tmp_path / "home")
    said = {row[0]: row for row in before if row[1] == "bob"}
    owed = {
        "done": "answered",
        "begun": "open",
        "silent": "open",
        "dead": "given_up",
        "dead and begun": "open",
    }
    assert {body: said[sent[body]][12] for body in owed} == owed
    assert said[sent["silent"]][13] == 1
    due = dues(tmp_path / "home")
    (box.close if is_clean else box.kill)()
    if is_gone:
        os.unlink(tmp_path / "home" / LEDGER)
    rebuild(tmp_path / "home", box.clock)
    assert table(tmp_path / "home") == before
    assert dues(tmp_path / "home") == due  # no time went by


@pytest.mark.damages
def test_without_a_journal_it_says_what_was_begun_as_the_store_has_it(tmp_path: Path) -> None:
    box, sent = a_home(tmp_path / "home")
    box.close()
    shutil.rmtree(tmp_path / "home/journal")
    os.unlink(tmp_path / "home" / LEDGER)
    rebuild(tmp_path / "home", box.clock)
    rows = {row[0]: row for row in table(tmp_path / "home") if row[1] == "bob"}
    begun = rows[sent["begun"]]
    assert (begun[2], begun[8], begun[12]) == ("acked", "in_progress", "open")
    assert rows[sent["silent"]][12:14] == ("open", 1)


@pytest.mark.parametrize("is_running", [True, False])
def test_put_back_nothing_that_was_read_comes_again(tmp_path: Path, is_running: bool) -> None:
    """The inboxes are other directories than those that the ledger knows."""
    root = tmp_path / "home"
    box, sent = a_home(root)
    before, stood = table(root), standing(box)
    assert {sent["unread"], sent["silent"], sent["dead"]} <= stood["bob"].keys()
    if not is_running:
        box.close()
    with Home(str(root)) as home:
        home_backup.backup(home, Config(), Clock(), str(tmp_path / "kept"))
    if is_running:
        box.kill()
    os.rename(root, tmp_path / "lost")
    restore(str(tmp_path / "kept"), str(root))

    again = Box(root, seconds=2400)
    for seconds in (1, 1, 31, 31):
        again.after(seconds)
    assert standing(again) == stood
    assert table(root) == before
    assert [line for line in again.log if line.get("level") == "warning"] == []

    again.remove("bob", sent["unread"])  # without .read: it was read, in this inbox
    again.take("bob", sent["dead"])
    for seconds in (1, 1, 31):
        again.after(seconds)
    how = "SELECT state, read_how FROM deliveries WHERE message_id = ?"
    assert again.sql(how, sent["unread"]) == [("read", "removed")]
    assert again.sql(how, sent["dead"]) == [("dead", "taken")]
    again.close()


@pytest.mark.parametrize("how", ["gone", "made again", "by one"])
def test_what_vanished_before_the_copy_was_read_by_nobody(tmp_path: Path, how: str) -> None:
    """The inbox that is copied is not the one that was delivered to; one that is says the truth."""
    root = tmp_path / "home"
    box = Box(root, *AGENTS)
    sent = box.send("alice", "TO: bob\n\nhi")
    box.after(1.1)
    box.close()
    if how == "by one":  # with rm, while no relay ran
        box.remove("bob", sent)
    else:
        shutil.rmtree(root / "agents/bob")
    with Home(str(root)) as home:
        if how == "made again":
            home.make_agent("bob")
        home_backup.backup(home, Config(), Clock(), str(tmp_path / "kept"))
    os.rename(root, tmp_path / "lost")
    restore(str(tmp_path / "kept"), str(root))
    again = Box(root, seconds=60)
    if how == "gone":
        again.home.make_agent("bob")
    for seconds in (1, 1, 31, 31):
        again.after(seconds)
    attempts = {m.headers["ATTEMPT"] for m in again.inbox("bob").values()}
    assert attempts == (set() if how == "by one" else {"2"})
    again.close()
