"""``relay send`` and ``relay wait`` as transcripts: id on stdout, outcome on stderr, exit code."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_sdk import Agent, Refused, Timeout
from agent_sdk.outbox import Outbox
from relay.base import fsio
from relay.base.errors import EXIT_OK, EXIT_PIPE_CLOSED
from relay.cli import run
from tests.procs import Relay, drop, environment, inbox_of, relay, relay_anew, until

pytestmark = pytest.mark.usefixtures("waits")


def send(home: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Send as alice; the id and what is said of it."""
    done = relay("send", "--as", "alice", *words, home=home)
    assert done.returncode == code, done.stderr
    return done.stdout.strip(), done.stderr.removeprefix("relay: ").strip()


def test_a_name_that_does_not_exist_is_exit_code_6(running: Relay, home: Path) -> None:
    sent, said = send(home, "bbo", "hi", code=6)
    assert "there is no agent bbo" in said
    assert inbox_of(home, "alice") == []  # its nack is what was said
    waited = relay("wait", sent, home=home)
    assert (waited.returncode, "refused: there is no agent bbo" in waited.stderr) == (6, True)


def test_without_a_relay_it_waits_in_the_outbox(home: Path) -> None:
    sent, said = send(home, "bob", "hi", code=5)
    assert said.startswith("it waits in the outbox: no relay is running; start one with ")
    other, said = send(home, "bob", "hi", "--wait", "answer", code=5)
    assert "it waits in the outbox: no relay is running" in said
    _, said = send(home, "bob", "hi", "--wait", "taken", code=5)  # that one is not sent
    assert "no relay is running" in said
    waiting = {path.stem for path in (home / "agents/alice/outbox").glob("*.msg")}
    assert waiting == {sent, other}
    acked = relay("ack", "1706123456-ab", "--as", "alice", home=home)
    line = f"relay: no relay is running for {home}: the message waits in the outbox\n"
    assert (acked.returncode, acked.stderr) == (5, line)


def test_without_waiting_nothing_is_said(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert send(home, "bbo", "hi", "--wait=none")[1] == ""
    monkeypatch.setenv("RELAY_NO_WAIT", "1")
    assert send(home, "bbo", "hi")[1] == ""
    until(lambda: len(inbox_of(home, "alice")) == 2, "the nacks come as messages")


def test_a_relay_that_hangs_is_waited_for_two_seconds(stopped: int, home: Path) -> None:
    done = relay_anew("send", "--as", "alice", "bob", "hi", home=home)  # others are more patient
    said = "relay: the relay has not picked it up yet, it waits in the outbox\n"
    assert (done.returncode, done.stderr) == (5, said)
    _, said = send(home, "bob", "hi", "--wait", "taken=200ms", code=4)
    assert "it waits in the outbox: do not send it again" in said


def test_a_full_disk_is_said_before_it_is_waited_for(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [errno.ENOSPC]

    def fault(operation: str, _: str) -> None:
        if operation == "create" and left:
            raise OSError(left.pop(), "No space left on device")

    def sleep(_: float) -> None:
        assert capsys.readouterr().err == "relay: disk full, trying for 30 s\n"

    monkeypatch.setattr(fsio, "fault", fault)
    monkeypatch.setattr("agent_sdk.disk._sleep", sleep)
    words = ["--home", str(home), "send", "bob", "hi", "--as", "alice", "--wait", "none"]
    assert run(words) == EXIT_OK
    assert capsys.readouterr().err == ""
    assert len(list((home / "agents/alice/outbox").glob("*.msg"))) == 1


def test_a_step_that_is_waited_for(running: Relay, home: Path) -> None:
    """Timeout with how far it came; a failure is told apart from it."""
    done, _ = send(home, "bob", "do it", "--kind", "command")
    relay("ack", "--as", "bob", done, "completed", home=home)
    said = relay("wait", done, "done", home=home)
    assert (said.returncode, said.stderr.startswith("relay: completed by bob")) == (0, True)
    _, said = send(home, "bob", "hi", "--wait", "read=3s", code=4)
    assert said == "delivered to bob, not read yet"
    command, _ = send(home, "bob", "do it", "--kind", "command")
    assert relay("wait", command[20:28], "done=300ms", home=home).returncode == 4
    relay("nack", "--as", "bob", command[20:28], "no such branch", home=home)
    until(lambda: relay("wait", command, "done=300ms", home=home).returncode == 6)
    done = relay("wait", command, home=home)
    assert done.stderr.startswith("relay: failed by bob: no such branch (answer ")
    assert relay("wait", command, "read", home=home).returncode == 0
    assert relay("wait", command, "taken", home=home).returncode == 0
    assert relay("wait", command, "answer", home=home).returncode == 6


def test_an_answer_is_waited_for_after_the_message_was_sent(running: Relay, home: Path) -> None:
    """It is printed whether it came before or comes while one waits, and leaves the inbox."""
    asked, _ = send(home, "bob", "which branch?", "--kind", "query")
    late = relay("wait", asked, "answer=200ms", home=home)
    assert late.returncode == 4 and "within 0.2 s: delivered to bob, not read yet" in late.stderr
    relay("reply", "--as", "bob", asked, "main", home=home)
    done = relay("wait", asked, "answer", home=home)
    assert (done.returncode, done.stdout) == (0, "main\n"), done
    assert inbox_of(home, "alice") == []
    assert relay("wait", asked, "answer", home=home).stdout == "main\n"

    note, _ = send(home, "bob", "no answer is expected")
    helper = threading.Thread(target=lambda: relay("reply", "--as", "bob", note, "ok", home=home))
    helper.start()
    assert relay("wait", note, "answer", home=home).stdout == "ok\n"
    helper.join()
    with ThreadPoolExecutor() as threads:
        words = ("reply", "--as", "bob", note, "sure?", "--wait", "answer")
        asked_again = threads.submit(relay, *words, home=home)
        until(lambda: inbox_of(home, "alice"))
        (path,) = inbox_of(home, "alice")
        relay("reply", "--as", "alice", path.stem, "yes", home=home)
        assert asked_again.result().stdout == "yes\n"


def test_wait_finds_a_message_in_an_outbox_and_none_that_does_not_exist(home: Path) -> None:
    sent = drop(home, "alice", "TO: bob\n\nhi\n", "1795417885267455484-d9d097575ec4b647.msg")
    done = relay("wait", "d9d09757", "done=100ms", home=home)
    assert done.returncode == 5
    text = (
        "relay: the relay has not picked it up yet, it waits in the outbox; no relay is running; "
    )
    assert done.stderr.startswith(text)
    missing = relay("wait", sent.replace("d9d0", "ffff"), home=home)
    assert (missing.returncode, "relay: no message 17954178852" in missing.stderr) == (1, True)


def test_the_library_does_not_wait_for_what_was_never_sent(running: Relay, home: Path) -> None:
    with Agent("alice", home) as alice:
        for step in ("taken", "read", "answer"):
            with pytest.raises(Refused, match="it is in no outbox, and the relay has never had it"):
                alice.wait("1795417885267455484-d9d097575ec4b647", step)


def test_the_library_says_at_once_that_no_answer_can_come(running: Relay, home: Path) -> None:
    """And of one that was taken before, which."""
    with Agent("alice", home) as alice, Agent("bob", home) as bob:
        sent = alice.send("bob", "deploy", kind="command")
        relay("cancel", "--as", "alice", sent, home=home)
        with pytest.raises(Refused, match="cancelled for bob"):
            alice.wait(sent, "answer=20s")
        sent = alice.send("bob", "deploy", kind="command")
        bob.ack(sent, "completed", "done")
        assert alice.receive(0)
        with pytest.raises(Timeout, match="s: completed by bob: done"):
            alice.wait(sent, "answer=50ms")


def test_a_refusal_is_told_though_another_process_has_taken_its_nack(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_taken = Outbox.wait_taken

    def and_another_takes_the_nack(outbox: Outbox, sent: str, wait_s: float) -> bool:
        is_taken = wait_taken(outbox, sent, wait_s)
        with Agent("alice", home, registers=False) as other:
            assert other.receive(0)
        return is_taken

    monkeypatch.setattr(Outbox, "wait_taken", and_another_takes_the_nack)
    with Agent("alice", home) as alice:
        with pytest.raises(Refused, match="there is no agent bbo"):
            alice.send("bbo", "hi")
        with pytest.raises(Refused, match="there is no agent bbo"):
            alice.query("bbo", "which?", 0.1)


def test_a_wait_without_a_time_is_refused(home: Path) -> None:
    _, said = send(home, "bob", "hi", "--wait", "read=soon", code=2)
    assert "'--wait': 'soon' is not a duration such as 500ms" in said
    assert list((home / "agents/alice/outbox").glob("*.msg")) == []


def test_an_id_that_cannot_be_printed_is_said_on_stderr(running: Relay, home: Path) -> None:
    """The message is sent, so nothing suggests to try again."""
    program = shlex.join([sys.executable, "-m", "relay", "--home", str(home)])
    for words in ("send --as alice bob hi", "ack --as alice {id}", "reply --as alice {id} hi"):
        asked = relay("send", "--as", "bob", "alice", "which?", "--kind", "query", home=home)
        line = f"exec {program} {words.format(id=asked.stdout.strip())} > /dev/full"
        done = subprocess.run(["sh", "-c", line], env=environment(), capture_output=True, text=True)
        assert done.returncode == 1, words
        assert "again" not in done.stderr
        (sent,) = inbox_of(home, "bob")
        assert f"; sent as {sent.stem}" in done.stderr, words
        relay("inbox", "--as", "bob", "--take", home=home)


def test_a_reader_that_has_closed_the_pipe(running: Relay, home: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "relay", "--home", str(home), "send", "bob", "hi"],
            env=environment(),
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    (sent,) = inbox_of(home, "bob")
    assert done.returncode == EXIT_PIPE_CLOSED
    assert done.stderr.endswith(f"relay: sent as {sent.stem}\n")


def test_a_sticky_channel_without_members_keeps_it_and_says_so(running: Relay, home: Path) -> None:
    assert relay("channel", "create", "news", "--as", "alice", home=home).returncode == 0
    settings = ("sticky_messages=true", "--as", "alice")
    assert relay("channel", "config", "news", *settings, home=home).returncode == 0
    _, said = send(home, "#news", "welcome")
    assert said == "no recipients yet, #news keeps it for those who come later"
