"""Sending with the relay's word, waiting, opening, answering, sending again, and lists of these."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.cli.ids import short_ids
from tests.procs import Relay, relay, rows_of, until


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send as people do."""
    monkeypatch.delenv("RELAY_NO_WAIT")


def short(message_id: str) -> str:
    return short_ids([message_id])[message_id]


def send(home: Path, *words: str) -> str:
    done = relay("send", "--as", "alice", *words, home=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("running")
def test_send_says_what_became_of_it(home: Path) -> None:
    """The id alone is on stdout."""
    done = relay("send", "--as", "alice", "bob", "hi", home=home)
    assert (done.returncode, done.stderr) == (0, "relay: delivered to bob, not read yet\n")
    assert (home / "agents/bob/inbox" / f"{done.stdout.strip()}.msg").exists()

    refused = relay("send", "--as", "alice", "bbo", "hi", home=home)
    assert refused.returncode == 6 and "there is no agent bbo: did you mean bob?" in refused.stderr
    assert len(refused.stdout.split()) == 1

    quiet = relay("send", "--as", "alice", "--no-wait", "bob", "hi", home=home)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_without_a_relay_it_waits_in_the_outbox(home: Path) -> None:
    """It is sent: a script must not send it again."""
    done = relay("send", "--as", "alice", "bob", "hi", home=home)
    assert done.returncode == 5
    assert done.stderr.startswith("relay: it waits in the outbox: no relay is running; start one")
    assert (home / "agents/alice/outbox" / f"{done.stdout.strip()}.msg").exists()


def test_a_relay_that_hangs_is_waited_for_two_seconds(running: Relay, home: Path) -> None:
    """The message is durable by then, and delivered when the relay goes on."""
    os.kill(running.pid, signal.SIGSTOP)
    try:
        done = relay("send", "--as", "alice", "bob", "hi", home=home)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert (done.returncode, done.stderr) == (
        0,
        "relay: the relay has not picked it up yet, it waits in the outbox\n",
    )
    until(lambda: (home / "agents/bob/inbox" / f"{done.stdout.strip()}.msg").exists())


@pytest.mark.usefixtures("running")
def test_wait_until_it_is_read_and_done(home: Path) -> None:
    """Each step, its failure, and a time that is too short."""
    sent = send(home, "--until", "delivered", "--kind", "command", "bob", "deploy")
    late = relay("wait", short(sent), "--for", "read", "--timeout", "50ms", home=home)
    assert (late.returncode, late.stderr) == (4, "relay: delivered to bob, not read yet\n")
    assert relay("inbox", "--as", "bob", "--take", home=home).returncode == 0
    read = relay("wait", sent, "--for", "read", home=home)
    assert (read.returncode, read.stderr) == (0, "relay: read by bob, not answered yet\n")
    relay("ack", "--as", "bob", short(sent), "completed", "took 12 s", home=home)
    done = relay("wait", sent, home=home)
    assert done.returncode == 0 and "completed by bob: took 12 s" in done.stderr

    other = send(home, "--kind", "command", "bob", "again")
    relay("nack", "--as", "bob", other, "no such branch", home=home)
    failed = relay("wait", other, home=home)
    assert failed.returncode == 6 and "failed by bob: no such branch" in failed.stderr


@pytest.mark.usefixtures("running")
def test_a_message_with_its_attachment_and_answer_on_one_page(home: Path, tmp_path: Path) -> None:
    """``show`` does not mark it as read; ``attachment get`` prints the file."""
    log = tmp_path / "build.log"
    log.write_text("error: 3 tests failed\n")
    sent = send(home, "--kind", "query", "--thread", "r-1", "--attach", str(log), "bob", "why?\x1b")
    page = relay("show", short(sent), home=home).stdout.splitlines()
    assert page[0] == sent and page[1].startswith("query from alice to bob, ")
    assert "thread r-1" in page and "delivered, not read yet" in page
    assert any(line.startswith("attachment build.log, 22 bytes (sha256:") for line in page)
    assert relay("attachment", "get", short(sent), home=home).stdout == log.read_text()
    copy = tmp_path / "copy"
    assert relay("attachment", "get", sent, "-o", str(copy), home=home).returncode == 0
    assert copy.read_text() == log.read_text()
    raw = relay("show", "--raw", sent, home=home).stdout
    assert raw.startswith("TO: bob\n") and raw.endswith("\n\nwhy?\x1b")

    answer = relay("reply", "--as", "bob", short(sent), "a typo", home=home).stdout.strip()
    until(lambda: "completed" in relay("show", sent, home=home).stdout)
    assert f"bob answered, {answer}:\na typo\n" in relay("show", sent, home=home).stdout
    (facts,) = rows_of("show", answer, home=home)
    assert (facts["kind"], facts["headers"]["RE"], facts["headers"]["THREAD"]) == (
        *("response", sent, "r-1"),
    )


@pytest.mark.usefixtures("running")
def test_a_refused_message_is_sent_again_to_another(home: Path) -> None:
    """Its content and thread are those of the original."""
    refused = relay("send", "--as", "alice", "--thread", "r-1", "bbo", "hello", home=home)
    again = relay("resend", short(refused.stdout.strip()), "--to", "bob", home=home)
    assert (again.returncode, again.stderr) == (
        0,
        "relay: sending it again, from alice to bob\nrelay: delivered to bob, not read yet\n",
    )
    with Agent("bob", home) as bob:
        message = bob.receive(0)
    assert message is not None
    assert (message.sender, message.body, message.thread) == ("alice", "hello", "r-1")


def test_what_waits_in_an_outbox_is_not_sent_twice(home: Path) -> None:
    """It is sent already."""
    sent = relay("send", "--as", "alice", "bob", "hi", home=home).stdout.strip()
    done = relay("resend", sent, home=home)
    assert done.returncode == 1
    assert f"message {sent} is still in agents/alice/outbox" in done.stderr
    assert len(list((home / "agents/alice/outbox").glob("*.msg"))) == 1


@pytest.mark.usefixtures("running")
def test_unread_and_failed_across_agents(home: Path) -> None:
    """Oldest unread first; failures newest first, with their reasons."""
    first, second = send(home, "bob", "one\nmore"), send(home, "--kind", "command", "bob", "two")
    rows = rows_of("unread", home=home)
    assert [(row["id"], row["agent"], row["from"], row["first_line"]) for row in rows] == [
        (first, "bob", "alice", "one"),
        (second, "bob", "alice", "two"),
    ]
    assert relay("unread", "--agent", "alice", home=home).stderr == "nothing is unread\n"
    assert relay("unread", "--limit", "1", home=home).stderr == "1 of 2; --limit 2 shows all\n"

    relay("send", "--as", "alice", "bbo", "hi", home=home)
    relay("nack", "--as", "bob", second, "no such branch", home=home)
    until(lambda: len(rows_of("failed", home=home)) == 2)
    found = {(row["from"], row["to"], row["outcome"]): row["reason"] for row in rows_of(
        "failed", "--since", "1d", home=home)}  # fmt: skip
    assert found["alice", "bob", "failed"] == "no such branch"
    assert found["alice", "bbo", "refused"].startswith("there is no agent bbo")
    assert "there is no agent 'carol'" in relay("failed", "--agent", "carol", home=home).stderr


@pytest.mark.usefixtures("running")
def test_the_inbox_is_taken_whole_or_looked_at_in_part(home: Path) -> None:
    """--from and --limit only list; --take --all takes by priority."""
    send(home, "bob", "one")
    send(home, "--priority", "0", "bob", "urgent")
    relay("send", "--as", "carol", "bob", "from carol", home=home)
    listed = relay("inbox", "--as", "bob", "--from", "carol", home=home).stdout
    assert "from carol" in listed and "urgent" not in listed
    assert relay("inbox", "--as", "bob", "--limit", "1", home=home).stderr.startswith("1 of 3; ")
    taken = relay("inbox", "--as", "bob", "--take", "--all", "--json", home=home).stdout
    bodies = [json.loads(line)["body"] for line in taken.splitlines()]
    assert bodies == ["urgent", "one", "from carol"]
    wrong = relay("inbox", "--as", "bob", "--take", "--from", "carol", home=home)
    assert wrong.returncode == 2 and "--from cannot be used with --take" in wrong.stderr


@pytest.mark.usefixtures("running")
def test_a_thread_has_bodies_and_a_search_the_lines_that_match(home: Path) -> None:
    """What an agent wrote is escaped."""
    sent = send(
        home, "--kind", "query", "--thread", "r-1", "bob", "first\nthe real\x1b content\nlast"
    )
    until(lambda: relay("thread", "r-1", home=home).returncode == 0)
    thread = relay("thread", "r-1", home=home).stdout.splitlines()
    assert thread[0].startswith(short(sent)) and "alice -> bob  query  delivered" in thread[0]
    assert thread[1:] == ["    first", "    the real\\x1b content", "    last", ""]
    found = relay("search", "--regex", "real.*content|last", home=home).stdout.splitlines()
    assert found[1:] == ["    the real\\x1b content", "    last", ""]


@pytest.mark.usefixtures("running")
def test_cancel_takes_an_unread_message_back(home: Path) -> None:
    sent = send(home, "bob", "deploy", "--kind", "command")
    done = relay("cancel", short(sent), "--as", "alice", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"message {sent} is cancelled: bob did not read it\n"
    assert not (home / "agents/bob/inbox" / f"{sent}.msg").exists()
    (fact,) = rows_of("show", sent, home=home)
    assert fact["recipients"] == {"bob": "cancelled for bob: by alice"}
    trace = relay("trace", sent, home=home).stdout
    assert "cancelled by alice" in trace
    again = relay("cancel", sent, "--as", "alice", home=home)
    assert again.returncode == 6
    assert (
        f"message {sent} is not cancelled: bob did not get it: cancelled by alice" in again.stderr
    )
    assert rows_of("open", home=home) == []


@pytest.mark.usefixtures("running")
def test_completed_is_no_answer_to_a_query(home: Path) -> None:
    asked = send(home, "bob", "which branch?", "--kind", "query")
    done = relay("ack", "--as", "bob", short(asked), "completed", home=home)
    assert done.returncode == 6
    assert f"message {asked} is a query" in done.stderr
    assert f"`relay --home {home} reply {asked} TEXT` answers it" in done.stderr
    assert (home / "agents/bob/inbox" / f"{asked}.msg").exists()


def test_an_ack_that_waits_for_a_relay_says_so_by_its_exit_code(home: Path) -> None:
    asked = relay("send", "--as", "alice", "bob", "do", "--kind", "command", home=home)
    with Relay(home):
        until(lambda: (home / "agents/bob/inbox" / f"{asked.stdout.strip()}.msg").exists())
    done = relay("ack", "--as", "bob", asked.stdout.strip(), "completed", home=home)
    assert done.returncode == 5 and "no relay is running" in done.stderr
