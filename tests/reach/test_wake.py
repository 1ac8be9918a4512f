"""``relay wake status`` and ``relay wake test``, with a relay that runs."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from relay.base.errors import RelayError
from relay.base.home import Home
from relay.cli import cli as group
from relay.cli import wake
from relay.doctor import examine
from relay.reach.session import BLOCKED, IDLE, WORKING
from tests.procs import Relay, until
from tests.reach.bells import Cli, Inbox, cli


@pytest.fixture
def bob(tmp_path: Path) -> Iterator[Cli]:
    """Bob is a session of claude, in a home whose relay runs."""
    with Home.create(str(tmp_path / "home"), b"{}"):
        pass
    with cli(tmp_path / "home") as made, Relay(made.root):
        yield made


def relay(of: Cli, *words: str) -> Result:
    return CliRunner().invoke(group, ["--home", str(of.root), *words])


class Told:
    """What ``relay wake test`` tells in this process, also where it prints JSON."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._monkeypatch = monkeypatch
        tell = wake.WakeTest._print

        def tells(test: wake.WakeTest, text: str) -> None:
            self.lines.append(text)
            tell(test, text)

        monkeypatch.setattr(wake.WakeTest, "_print", tells)

    def has(self, text: str) -> bool:
        """True when a line has that text."""
        return any(text in line for line in self.lines)

    def begins_at(self, text: str) -> None:
        """Its time begins when it has told this: until then the machine may be busy."""
        began: list[float] = []

        def now() -> float:
            if not began and self.has(text):
                began.append(time.monotonic())
            return time.monotonic() - began[0] if began else 0.0

        clock = SimpleNamespace(monotonic=now, time_ns=time.time_ns, sleep=time.sleep)
        self._monkeypatch.setattr(wake, "time", clock)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the tests of rungs tell."""
    return Told(monkeypatch)


class Hooks:
    """The hooks of a session that is rung: they show what waits, and see it in the next call."""

    def __init__(self, of: Cli, inbox: Inbox, told: Told) -> None:
        self.of, self.inbox, self.told, self.is_ended = of, inbox, told, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.is_ended = True
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self.is_ended:
            if len(self.inbox.texts) > seen:
                seen = len(self.inbox.texts)
                folder = self.of.root / "agents" / self.of.agent / "inbox"
                ids = [path.stem for path in folder.glob("*.msg")]
                self.of.shows(*ids)
                until(lambda: self.told.has("offered to"))
                for one in ids:
                    self.of.take(one)
                self.of.hook(IDLE, offered={})
            time.sleep(0.01)


def masked(text: str) -> list[str]:
    """Lines with their ids and times masked."""
    text = re.sub(r"\d{16,}-[0-9a-f]+", "ID", text)
    return re.sub(r" +[\d,.]+ (ms|s)\b", r" N \1", text).splitlines()


@pytest.mark.slow
def test_a_test_message_goes_through_each_rung_that_applies(
    bob: Cli, inbox: Inbox, told: Told
) -> None:
    bob.bell()
    hooks = Hooks(bob, inbox, told)
    result = relay(bob, "wake", "test", "bob", "--timeout", "60")
    hooks.end()
    assert result.exit_code == 0, result.output
    shown = masked(result.stdout)
    shown.remove(" N ms  rang: posted")  # when nothing came back from the socket for a while
    assert shown == [
        "claude-inbox",
        " N ms  message ID in the inbox",
        " N ms  rung by claude-inbox",
        " N ms  offered to claude:bob-1",
        " N ms  in context: the file is in .read",
        "claude-rewake  does not apply: no `relay bell --rewake` waits as a Stop hook with"
        " asyncRewake",
        "codex-queue  does not apply: expected a live session of codex",
        'resume  does not apply: only where wake.json has "rung": "resume"',
        "command  does not apply: wake.json has no argv",
    ]
    assert inbox.texts == ["agent-relay: 1 message waits; `relay inbox --take`"]
    assert not list((bob.root / "sessions").glob("*.ask"))


@pytest.mark.slow
def test_what_codex_queued_and_no_hook_answered_is_explained(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """Nothing tells from outside whether a thread is loaded: what is known is said."""
    (tmp_path / "codex").write_text("#!/bin/sh\necho Queued message 7")
    (tmp_path / "codex").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = "codex accepts a text for a thread that is not loaded, and keeps it until it is"
    with cli(bob.root, "eve", "codex") as eve:
        told.begins_at("rang: queued")
        shown = relay(bob, "wake", "test", "eve", "--timeout", "0.5").stdout
        assert "rang: queued: Queued message 7" in shown and f"ran; {said}" in shown
        last = f"last     no hook ran since that ring; {said}"
        until(lambda: last in relay(bob, "wake", "status", "eve").stdout)
        status = relay(bob, "wake", "status", "eve").stdout
        assert "`codex resume eve-1` loads it" in status
        eve.hook(IDLE)
        assert said not in relay(bob, "wake", "status", "eve").stdout


@pytest.mark.slow
def test_without_evidence_the_result_is_clear(bob: Cli, inbox: Inbox, told: Told) -> None:
    bob.bell()
    told.begins_at("rang: posted")
    result = relay(bob, "wake", "test", "bob", "--timeout", "0.5", "--json")
    assert result.exit_code == 1
    first, *others = map(json.loads, result.stdout.splitlines())
    assert first["rung"] == "claude-inbox" and first["result"] == "rang: posted"
    assert first["works"] is False and "offered_ms" not in first
    assert [one["applies"] for one in others] == [False] * 4
    assert isinstance(result.exception, RelayError)
    assert "no rung brought the test message to bob" in str(result.exception)
    assert result.exception.hint.endswith("; 1 test message is unread in its inbox")
    told.lines.clear()
    told.begins_at("rang: posted")
    shown = relay(bob, "wake", "test", "bob", "--timeout", "0.5").stdout
    assert "no evidence in 0.5 s: no hook printed the message" in shown


@pytest.mark.slow
def test_where_no_rung_applies_no_message_is_sent_and_that_is_said(bob: Cli) -> None:
    result = relay(bob, "wake", "test", "bob", "--timeout", "0.5")
    assert isinstance(result.exception, RelayError)
    assert str(result.exception) == "no rung applies to bob: no test message was sent"
    assert result.exception.hint == "`relay wake status bob` shows what each one needs"
    assert not list((bob.root / "agents/bob/inbox").glob("*.msg"))
    assert "does not apply" in result.stdout


@pytest.mark.slow
def test_a_session_that_is_blocked_is_not_rung_by_a_test(
    bob: Cli, inbox: Inbox, told: Told
) -> None:
    bob.bell()
    bob.hook(BLOCKED)
    told.begins_at("in the inbox")
    result = relay(bob, "wake", "test", "bob", "--timeout", "0.5")
    assert "no evidence in 0.5 s: it was not rung, the session is blocked" in result.stdout
    assert inbox.texts == []


@pytest.mark.slow
def test_an_agent_without_a_session_is_rung_by_the_command_itself(bob: Cli, tmp_path: Path) -> None:
    with Home(str(bob.root)) as home:
        home.make_agent("carol")
    inbox = bob.root / "agents" / "carol" / "inbox"
    script = f"sleep 0.1; mv {inbox}/*.msg {inbox}/.read/"
    argv = json.dumps({"argv": ["sh", "-c", script]})
    (bob.root / "agents" / "carol" / "wake.json").write_text(argv)
    result = relay(bob, "wake", "test", "carol", "--timeout", "60")
    assert result.exit_code == 0, result.output
    assert masked(result.stdout)[4:] == [
        "command",
        " N ms  message ID in the inbox",
        " N ms  rung by command",
        " N ms  in context: the file is in .read",
        " N ms  rang: exit 0",
    ]


@pytest.mark.slow
def test_the_status_has_rungs_and_rings(bob: Cli, inbox: Inbox) -> None:
    before = relay(bob, "wake", "status", "bob").stdout
    assert before.splitlines()[:3] == [
        "session  claude:bob-1, idle",
        "bell     not running: the session is not rung. The end of its next turn starts it: give it"
        " a prompt; until then `relay bell --as bob` runs the command of wake.json",
        "worked   none yet",
    ]
    process = bob.bell()
    bob.drop()
    until(lambda: inbox.texts)
    until(lambda: bob.memory and bob.memory.rings)
    facts: dict[str, Any] = json.loads(relay(bob, "wake", "status", "bob", "--json").stdout)
    assert facts["bell_pid"] == process.pid
    assert facts["worked"] == {"rung": "claude-inbox", "at": facts["rings"][0]["at"]}
    assert facts["worked"]["at"].endswith("Z")
    assert facts["rungs"]["claude-inbox"] == ""
    (ring,) = facts["rings"]
    assert (ring["rung"], ring["messages"], ring["result"]) == ("claude-inbox", 1, "rang: posted")
    shown = relay(bob, "wake", "status", "bob").stdout
    assert "  claude-inbox   applies\n" in shown
    assert masked(shown)[-1].endswith("ago      claude-inbox   1 message, rang: posted")
    # A bell that was killed, and its file, are not needed to know of them.
    process.kill()
    process.wait()
    until(lambda: not list((bob.root / "agents" / "bob" / "outbox").glob("*.report")))
    (bob.root / "sessions" / "claude-bob-1.json.bell").unlink()
    last = "claude-inbox   1 message, rang: posted"
    until(lambda: masked(relay(bob, "wake", "status", "bob").stdout)[-1].endswith(last))


def test_an_agent_that_does_not_exist_and_a_relay_that_does_not_run(tmp_path: Path) -> None:
    with cli(tmp_path / "home") as bob:
        assert "there is no agent 'bbo'" in str(relay(bob, "wake", "status", "bbo").exception)
        result = relay(bob, "wake", "test", "bob")
        assert "no relay is running" in str(result.exception)
        bob.wake('{"rung": "pigeon"}')
        shown = relay(bob, "wake", "status", "bob").stdout
        assert 'trouble  agents/bob/wake.json: expected "rung" as one of' in shown


def test_doctor_names_a_wake_json_that_cannot_be_used(tmp_path: Path) -> None:
    with cli(tmp_path / "home") as bob, Home(str(bob.root)) as home:
        path = bob.wake('{"argv": ["true"]}')
        bob.bell()
        found = {one.where: one.text for one in examine(home)}
        assert not [where for where in found if where.startswith(("agents", "sessions"))]
        path.write_text('{"argv": "true"}')
        found = {one.where: one.text for one in examine(home)}
        text = found["agents/bob/wake.json"]
        assert text.startswith('agents/bob/wake.json: expected "argv" as a list of texts')


def test_working_is_no_hindrance_to_the_status(tmp_path: Path) -> None:
    with cli(tmp_path / "home") as bob:
        bob.hook(WORKING)
        shown = relay(bob, "wake", "status", "bob").stdout
        assert shown.startswith("session  claude:bob-1, working\n")
        os.kill(bob.process.pid, 9)
        bob.process.wait()
        shown = relay(bob, "wake", "status", "bob").stdout
        assert shown.startswith("session  none is live\nworked   none yet\n")
