"""What waits for a person is one list, and each line names the command that settles it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent
from relay.base.config import Config, StoreSettings
from relay.base.finding import Finding
from relay.base.home import Home
from relay.views import attention as views
from relay.views.attention import attention, hush, tell_new
from tests.box import Box
from tests.ledger.support import Look
from tests.procs import Relay, relay, rows_of, until

QUESTION = "Deploy to production now?"


pytestmark = pytest.mark.usefixtures("waits")


def ask(home: Path, options: str = "yes, no, later") -> str:
    """A question of alice to the operator, by a file, as any program sends it."""
    with Agent("alice", home) as alice:
        headers = {"OPTIONS": options} if options else {}
        return alice.send("operator", QUESTION, kind="query", headers=headers, wait="delivered")


def waiting(home: Path) -> list[dict[str, Any]]:
    done = relay("attention", "--json", home=home)
    assert done.returncode in (0, 3), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("running")
def test_a_question_waits_until_it_is_answered_by_one_of_its_options(home: Path) -> None:
    done = relay("attention", home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "nothing waits for you\n")
    asked = ask(home)
    done = relay("attention", home=home)
    assert done.returncode == 3
    assert "question  alice  Deploy to production now? (yes, no, later)" in done.stdout
    digits = asked.partition("-")[2][:8]
    assert done.stdout.rstrip().endswith(f"relay --home {home} approve {digits}")
    assert relay("attention", "--count", home=home).stdout == "1\n"

    wrong = relay("reply", digits, "maybe", home=home)
    assert wrong.returncode == 6
    assert "'maybe' is not an answer: expected one of yes, no, later" in wrong.stderr
    until(lambda: relay("attention", "--count", home=home).stdout == "1\n")
    with Look(home / "ledger.db") as look:
        (code,) = look.all("SELECT last_error_code FROM messages WHERE status = 'failed'")
    assert code == ("malformed",)

    done = relay("approve", digits, "go ahead", home=home)
    assert done.returncode == 0, done.stderr
    until(lambda: relay("attention", "--count", home=home).stdout == "0\n")
    (answer,) = rows_of("inbox", "--as", "alice", "--take", "--all", home=home)
    said = (answer["kind"], answer["headers"]["RE"], answer["body"])
    assert said == ("response", asked, "yes\n\ngo ahead")


def test_the_first_answer_counts_and_the_other_one_hears_of_it(box: Box) -> None:
    """Two people, or a terminal and a page, answer at the same time."""
    asked = box.send("alice", f"TO: operator\nKIND: query\nOPTIONS: yes, no\n\n{QUESTION}")
    for said in ("yes", "no"):
        box.drop("operator", f"TO: alice\nKIND: response\nRE: {asked}\n\n{said}")
    box.tick()
    (nack,) = box.nacks("operator")
    assert f"{asked} was answered by operator at " in nack and nack.endswith(": yes\n")
    assert box.bodies("alice") == ["yes"]


@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(roll_messages=1)))
def test_it_counts_when_the_question_is_in_an_archive_too(box: Box) -> None:
    asked = box.send("alice", f"TO: bob\nKIND: query\nOPTIONS: yes, no\n\n{QUESTION}")
    box.take("bob", asked)
    box.send("bob", f"TO: alice\nKIND: response\nRE: {asked}\n\nno")
    for _ in range(8):
        box.after(1800)
    assert box.store.messages.find_by_relay_id(asked) is None
    box.send("bob", f"TO: alice\nKIND: response\nRE: {asked}\n\nyes")
    (nack,) = box.nacks("bob")
    assert f"{asked} was answered by bob at " in nack and nack.endswith(": no\n")


@pytest.mark.parametrize(
    ("option", "words"),
    [("$(id)", "'$(id)'"), ("ja gerne", "'ja gerne'"), ("-h", "-- {} -h"), ("now", "now")],
)
def test_the_command_of_an_answer_runs_nothing_that_an_agent_wrote(
    box: Box, option: str, words: str
) -> None:
    asked = box.send("alice", f"TO: operator\nKIND: query\nOPTIONS: {option}, no\n\n{QUESTION}")
    (row,) = attention(box.home)
    said = words.format(asked) if "{}" in words else f"{asked} {words}"
    assert row.command == f"relay reply {said}"


@pytest.mark.usefixtures("running")
def test_what_is_no_question_is_not_approved(home: Path) -> None:
    sent = relay("send", "--as", "alice", "operator", "deploy", "--kind", "command", home=home)
    number = sent.stdout.strip()
    done = relay("approve", number, home=home)
    assert done.returncode == 6
    assert f"message {number} is a command, not a question; `relay --home" in done.stderr
    (row,) = waiting(home)
    command = f"relay --home {home} ack {number} completed"
    assert (row["kind"], row["command"]) == ("request", command)
    odd = ask(home, "today, tomorrow")
    done = relay("deny", odd, home=home)
    assert done.returncode == 6
    assert "are today, tomorrow: none of them means no; `relay --home" in done.stderr
    plain = ask(home, "")
    assert relay("deny", plain, "not now", home=home).returncode == 0


def test_options_of_what_asks_nothing_are_refused(box: Box) -> None:
    box.send("alice", "TO: operator\nOPTIONS: yes, no\n\nso?")
    rule = "header OPTIONS: only KIND query asks something"
    (row,) = attention(box.home)  # its sender has not read that, so a person is told
    assert (row.kind, row.who) == ("refused", "alice") and rule in row.what
    (nack,) = box.inbox("alice")
    assert rule in box.nacks("alice")[0]
    box.take("alice", nack)
    box.tick()
    assert attention(box.home) == []


def test_what_is_hushed_stays_out_until_it_begins_anew(home: Path, running: Relay) -> None:
    asked = ask(home)
    relay("send", "--as", "alice", "operator", "news", home=home)
    done = relay("attention", "hush", asked, home=home)
    assert done.stdout.startswith("hushed question: Deploy to production now?")
    assert [row["kind"] for row in waiting(home)] == ["mail"]
    assert relay("attention", "hush", "mail", "--for", "1h", home=home).returncode == 0
    assert waiting(home) == []
    known = json.loads((home / "attention.json").read_text())
    (key,) = (one for one in known["hushed"] if one.startswith("mail"))
    known["hushed"][key][1] = 1  # its hour is over
    (home / "attention.json").write_text(json.dumps(known))
    assert [row["kind"] for row in waiting(home)] == ["mail"]
    assert relay("attention", "hush", "mail", home=home).returncode == 0
    relay("send", "--as", "alice", "operator", "more news", home=home)
    assert [row["kind"] for row in waiting(home)] == ["mail"]  # it began anew
    wrong = relay("attention", "hush", "nobody", home=home)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("relay: nothing waits about 'nobody'; see `relay ")
    # nothing of it is the relay's: a damaged file hushes nothing
    (home / "attention.json").write_text("[1, {")
    assert len(waiting(home)) == 2
    running.stop()


def test_messages_wait_for_a_relay_that_does_not_run(home: Path) -> None:
    with Agent("alice", home) as alice:
        alice.send("bob", "hi", wait=0)
    row = next(one for one in waiting(home) if one["kind"] == "relay")
    assert row["what"] == "no relay is running; 1 message in outboxes"
    assert row["command"] == f"relay --home {home} up"


def test_a_command_hears_once_that_something_new_waits(home: Path, tmp_path: Path) -> None:
    """Of kind and name, never of what a message says; a restart does not repeat it."""
    told = tmp_path / "told"
    script = 'echo "$AGENT_RELAY_ATTENTION_NEW of $AGENT_RELAY_ATTENTION_COUNT:'
    script += f' $AGENT_RELAY_ATTENTION_KIND $AGENT_RELAY_ATTENTION_WHO" >> {told}'
    config = home / "config.json"
    words = {"attention": {"command": ["sh", "-c", script]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | words))
    with Relay(home):
        ask(home)
        until(lambda: told.exists() and told.read_text())
        assert told.read_text() == "1 of 1: question alice\n"
        assert relay("attention", "--notify", home=home).returncode == 0
    with Relay(home):
        assert relay("attention", "--notify", home=home).returncode == 0
        assert told.read_text() == "1 of 1: question alice\n"
        relay("send", "--as", "bob", "operator", "news", home=home)
        assert relay("attention", "--notify", home=home).returncode == 0
        assert told.read_text() == "1 of 1: question alice\n1 of 2: mail \n"


@pytest.mark.usefixtures("running")
@pytest.mark.home("alice", "bob", attention={"command": ["/nowhere/notify"]})
def test_a_command_that_fails_is_named_and_tried_again(home: Path) -> None:
    ask(home)
    for _ in range(2):
        done = relay("attention", "--notify", home=home)
        assert done.returncode == 1
        assert "/nowhere/notify: [Errno 2]" in done.stderr and "attention.command" in done.stderr
    log = home / "logs/relay.log"
    until(lambda: "The operator was not told that something waits" in log.read_text())


@pytest.mark.usefixtures("running")
def test_headers_of_a_message_are_given_by_option_and_what_is_held_is_listed(home: Path) -> None:
    options = ("-H", "OPTIONS: red, green", "-H", "NOT-BEFORE: 1h")
    sent = relay("send", "--kind", "query", *options, "bob", "which?", home=home)
    assert sent.returncode == 0, sent.stderr
    assert "held" in sent.stderr
    (row,) = rows_of("list", "is:held", home=home)
    assert row["id"] == sent.stdout.strip()
    assert row["status"].startswith("held: not before 20")
    assert waiting(home) == []  # it is as its sender wants it
    assert relay("cancel", row["id"], home=home).returncode == 0
    until(lambda: rows_of("list", "is:held", home=home) == [])
    wrong = relay("send", "-H", "NOT-BEFORE 1h", "bob", "x", home=home)
    assert wrong.returncode == 2
    assert "--header 'NOT-BEFORE 1h': expected NAME: VALUE" in wrong.stderr


@pytest.mark.usefixtures("running")
def test_many_are_not_told_without_a_word(home: Path) -> None:
    for number in range(6):
        relay("register", f"agent{number}", home=home)
    until(lambda: len(rows_of("agents", home=home)) == 9)
    done = relay("send", "--as", "agent0", "*", "stand up", home=home)
    assert done.returncode == 2
    assert "'*' is 8 agents, and wakes 0 of them; with --yes it is sent" in done.stderr
    assert "--yes " in relay("send", "--help", home=home).stdout  # to which that points
    assert rows_of("list", home=home) == []
    assert relay("send", "--as", "agent0", "--yes", "*", "stand up", home=home).returncode == 0


def test_many_questions_of_one_hide_nobody_elses(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST", 4)
    mine = box.send("alice", "TO: operator\nKIND: query\n\nmay I?")
    for number in range(6):
        name = f"9999999999999999999{number}-0{number}.msg"  # ids are the senders'
        box.send("carol", "TO: operator\nKIND: query\n\nq", name)
    rows = [row for row in attention(box.home) if row.kind == "question"]
    assert [row.who for row in rows].count("carol") == 4 and mine in [row.id for row in rows]
    (more,) = [row for row in rows if row.id is None]
    assert (more.who, more.what) == ("carol", "3 more, older ones")
    assert more.command == "relay list is:open from:carol to:operator"


@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(active_messages=2)))
def test_what_waits_in_an_outbox_although_a_relay_runs(box: Box) -> None:
    first, *_ = [box.send("alice", "TO: bob\nKIND: command\n\ngo") for _ in range(4)][2:]
    now_ns = box.clock.now_ns()
    assert [row for row in attention(box.home, now_ns=now_ns) if row.kind == "waits"] == []
    (row,) = [row for row in attention(box.home, now_ns=now_ns + 10**12) if row.kind == "waits"]
    assert (row.who, row.command) == ("alice", f"relay trace {first}")
    why = "the store has 2 active messages, its limit is 2"
    assert row.what == f"2 messages in its outbox: {why}"
    for path in box.path("agents", "alice", "outbox").glob("*.msg"):
        path.unlink()  # taken back
    assert [row for row in attention(box.home, now_ns=now_ns + 10**12) if row.kind == "waits"] == []


def test_several_refusals_of_a_sender_are_one_line(box: Box) -> None:
    for number in range(3):
        box.send("alice", f"TO: nobody\n\nlost {number}")
    (row,) = attention(box.home)
    assert (row.kind, row.who, row.command) == ("refused", "alice", "relay inbox --as alice")
    assert row.what.startswith("3 messages of it were refused, the last one not delivered: ")


def test_a_mailbox_that_is_gone_with_unread_messages_needs_a_person(box: Box) -> None:
    for _ in range(2):
        box.send("alice", "TO: bob\n\nhi")
    shutil.rmtree(box.path("agents", "bob"))
    box.after(1.1)
    (row,) = attention(box.home)
    said = "its mailbox is gone, and 2 unread messages with it"
    assert (row.kind, row.who, row.what) == ("gone", "bob", said)
    assert row.command == "relay register bob"
    box.home.make_agent("bob")
    box.after(1.1)
    assert attention(box.home) == []


def test_an_agent_that_was_retired_and_owes_an_answer_is_called_retired(box: Box) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    command = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: bob"
    box.send("operator", command)
    (row,) = (row for row in attention(box.home) if row.kind != "mail")  # the relay's answer
    assert (row.kind, row.who, row.what) == ("gone", "bob", "retired, and owes 1 answer")
    assert row.command == "relay open --agent bob"


def test_a_process_that_is_given_up_needs_a_person(home: Path) -> None:
    why = "given up after 5 restarts: worker exited with code 1"
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:  # as the supervisor has it
        db.execute(
            "INSERT INTO processes (name, state, cli, cwd, restart, requested_by, request_id, "
            "started_at, changed_at, last_error) VALUES ('worker', 'failed', 'x', '/', 'always', "
            "'alice', '1-a', 1690000000000000000, 1700000000000000000, ?)",
            (why,),
        )
        db.commit()
    (row,) = waiting(home)
    said = (row["kind"], row["who"], row["what"], row["command"])
    logs = f"relay --home {home} logs worker"
    assert said == ("process", "worker", f"its process has failed: {why}", logs)
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:  # a spawn that was refused
        db.execute("UPDATE processes SET started_at = NULL")
        db.commit()
    assert waiting(home) == []


def test_a_finding_of_doctor_is_one_line_and_can_be_hushed(home: Path) -> None:
    with Home(str(home)) as opened:
        found = [Finding("limits", "sqlite3", "SQLite is old", "use another Python")]
        told: list[int] = []
        for second in range(3):
            items = attention(opened, found, 1_800_000_000_000_000_000 + second * 10**9)
            assert [(one.kind, one.what) for one in items] == [("doctor", "SQLite is old")]
            tell_new(opened, items, lambda new: told.append(len(new)))
        assert told == [1]
        hush(opened, items[0])
        assert attention(opened, found) == []


def test_a_dead_letter_waits_until_it_is_replayed_or_discarded(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nDELIVERY: at-least-once\n\nhi")
    box.until_dead()
    box.flush()
    (row,) = attention(box.home)  # its sender has not read that it died: that is no refusal
    assert (row.kind, row.who, row.id) == ("dead", "bob", sent)
    assert row.what == "from alice: no acknowledgment within 60 s, 4 attempts"
    assert row.command == f"relay dead replay {sent}"
    box.command("operator", "dead.discard", f"ID: {sent}")
    (row,) = attention(box.home)
    assert (row.kind, row.what) == ("mail", "1 unread message for the operator, from the relay")
    box.send("alice", "TO: operator\n\nnews")
    (row,) = attention(box.home)
    assert row.what == "2 unread messages for the operator, 1 of them from the relay"


def test_a_dead_letter_to_several_is_one_matter(box: Box) -> None:
    sent = box.send("alice", "TO: *\nDELIVERY: at-least-once\n\nhi")
    box.until_dead()
    (row,) = (one for one in attention(box.home) if one.kind == "dead")
    assert (row.who, row.command) == (None, f"relay dead replay {sent}")
    assert row.what == "from alice to 3 recipients: no acknowledgment within 60 s, 4 attempts"


@pytest.mark.damages  # its ledger is one that an earlier version wrote
def test_a_discard_that_an_earlier_version_did_not_record_waits_for_nobody(box: Box) -> None:
    gone, kept = (
        box.send("alice", f"TO: bob\nDELIVERY: at-least-once\n\n{text}") for text in ("a", "b")
    )
    box.until_dead()
    box.command("operator", "dead.discard", f"ID: {gone}")
    box.flush()
    box.sql("UPDATE deliveries SET discarded_at = NULL")
    assert [one.id for one in attention(box.home) if one.kind == "dead"] == [gone, kept]
    box.restart()
    assert [one.id for one in attention(box.home) if one.kind == "dead"] == [kept]


def test_what_an_agent_puts_in_the_place_of_a_refusal_holds_up_nobody(box: Box) -> None:
    box.send("alice", "TO: nobody\n\nlost")
    (nack,) = box.inbox("alice")
    path = box.path("agents", "alice", "inbox", f"{nack}.msg")
    path.unlink()
    os.mkfifo(path)
    (row,) = [one for one in attention(box.home) if one.kind == "refused"]
    assert row.what == "a message of it was refused"


def test_a_refusal_that_its_sender_rewrote_is_no_command_to_be_pasted(box: Box) -> None:
    box.send("alice", "TO: nobody\n\nlost")
    (nack,) = box.inbox("alice")
    path = box.path("agents", "alice", "inbox", f"{nack}.msg")
    text = re.sub(r"(?m)^RE: .*$", "RE: x; touch /tmp/y #", path.read_text())
    path.write_text(text)
    (row,) = [one for one in attention(box.home) if one.kind == "refused"]
    assert (row.command, row.id) == (f"relay trace {nack}", nack)


# -- a request for permission is a question with a time, and no other time applies to it ---


ASKED = "TO: operator\nKIND: query\nOPTIONS: yes, no\nPERMISSION: {} Bash\n\nBash make?"


def test_nobody_is_reminded_its_end_is_silent_and_a_late_answer_refused(box: Box) -> None:
    sent = box.send("alice", ASKED.format("120s"))
    box.take("operator", sent)
    for _ in range(12):
        box.after(30)
    assert box.bodies("alice") == [] and box.bodies("operator") == []
    assert box.sql("SELECT obligation, reminders FROM deliveries") == [("given_up", 0)]
    assert box.sql("SELECT count(*) FROM audit_log WHERE new_status = 'reminded'") == [(0,)]
    box.send("operator", f"TO: alice\nKIND: response\nRE: {sent}\n\nyes")
    assert "no longer waits: the agent's own dialog asks now" in box.nacks("operator")[0]
    assert box.bodies("alice") == []


def test_an_answer_to_a_withdrawn_one_is_refused(box: Box) -> None:
    sent = box.send("alice", ASKED.format("600s"))
    box.command("alice", "message.cancel", f"ID: {sent}")
    before = box.bodies("alice")
    box.send("operator", f"TO: alice\nKIND: response\nRE: {sent}\n\nyes")
    assert "was withdrawn, or is over: nobody waits" in box.nacks("operator")[0]
    assert box.bodies("alice") == before
