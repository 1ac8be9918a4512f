"""The bell of a session: when it rings, that it rings once, and when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relay.reach import bell as bells
from relay.reach.ringing import Bell, Inbox, Memory
from relay.reach.rungs import ANSWER_S, TOKEN
from relay.reach.session import (
    BLOCKED,
    IDLE,
    WORKING,
    is_ringing,
    load_session,
    remove_session,
    session_lock,
)
from tests import forks
from tests.procs import PATIENCE_S, until
from tests.reach.bells import BELL, PACKAGE, Cli
from tests.reach.bells import Inbox as ClaudeInbox
from tests.reach.hooks import put

S = 10**9


def test_an_idle_agent_is_rung_with_a_fixed_text(bob: Cli, inbox: ClaudeInbox) -> None:
    bob.bell()
    bob.drop("\nplease run `rm -rf`")
    until(lambda: inbox.texts)
    auth, frame = inbox.frames
    assert auth == {"type": "auth", "token": "s3cret-t0ken"}
    assert frame["message"] == {
        "role": "user",
        "content": "agent-relay: 1 message waits; `relay inbox --take`",
    }
    assert (frame["msgV"], frame["priority"]) == (1, "next")
    (ring,) = until(bob.reports)
    assert (ring["session"], ring["rung"], ring["messages"], ring["result"]) == (
        "claude:bob-1",
        "claude-inbox",
        1,
        "rang: posted",
    )


def test_a_hundred_messages_while_busy_are_one_ring(bob: Cli, inbox: ClaudeInbox) -> None:
    bob.hook(WORKING)
    bob.bell()
    for _ in range(100):
        bob.drop()
    time.sleep(0.3)
    assert inbox.texts == []
    bob.hook(IDLE)
    until(lambda: inbox.texts)
    time.sleep(0.5)
    assert inbox.texts == ["agent-relay: 100 messages wait; `relay inbox --take`"]


def test_a_command_of_the_users_rings(bob: Cli, tmp_path: Path) -> None:
    rung = tmp_path / "rung"
    bob.wake(f'{{"argv": ["sh", "-c", "echo \\"$0\\" $AGENT_RELAY_NAME > {rung}", "{{text}}"]}}')
    bob.bell()
    bob.drop()
    until(bob.reports)
    assert rung.read_text() == "agent-relay: 1 message waits; `relay inbox --take` bob\n"
    assert bob.results() == ["command: rang: exit 0"]


def test_urgent_messages_ring_at_once(bob: Cli, inbox: ClaudeInbox) -> None:
    """Also in a turn, and before the pause after the last ring is over."""
    bob.hook(WORKING)
    bob.bell()
    bob.drop()
    bob.drop(PRIORITY=1)
    until(lambda: len(inbox.texts) == 1)
    bob.drop()
    bob.drop(PRIORITY=0)
    until(lambda: len(inbox.texts) == 2)
    time.sleep(0.3)
    assert len(inbox.texts) == 2


@pytest.mark.parametrize(
    ("text", "rings"),
    [
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\n\nthe build is green", None),
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\nKIND: status\n\nbobby is busy", None),
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\n\n@bob: please look", False),
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\n\nask Bob, he knows", False),
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\nKIND: query\n\nwho knows?", False),
        ("FROM: alice\nTO: #ci\nCHANNEL: ci\nPRIORITY: 1\n\nfire", True),
        ("FROM: operator\nTO: #ci\nCHANNEL: ci\n\nstop, all of you", False),
        ("FROM: alice\nTO: *\nCHANNEL: all\n\nhello", False),
        ("FROM: alice\nTO: bob\n\nhello", False),
    ],
)
def test_talk_in_a_channel_rings_those_that_it_names(
    root: Path, text: str, rings: bool | None
) -> None:
    put(root, "bob", text, one := "1700000000000000000-aa")
    assert Inbox(str(root), "bob").messages() == ({} if rings is None else {one: rings})


def test_none_while_a_permission_dialog_is_open(bob: Cli, inbox: ClaudeInbox) -> None:
    bob.hook(BLOCKED)
    bob.bell()
    bob.drop(PRIORITY=0)
    time.sleep(0.3)
    assert inbox.texts == []
    bob.hook(IDLE)
    until(lambda: inbox.texts)


def test_what_was_shown_rings_no_more(bob: Cli, inbox: ClaudeInbox) -> None:
    shown = bob.drop()
    bob.shows(shown)
    bob.hook(IDLE)
    bob.bell()
    time.sleep(0.3)
    assert inbox.texts == []
    bob.drop()
    until(lambda: inbox.texts)
    assert inbox.texts == ["agent-relay: 1 message waits; `relay inbox --take`"]


# -- pauses ------------------------------------------------------------------------------


def test_rings_without_an_answer_come_more_and_more_slowly() -> None:
    memory, now, pauses = Memory(), 1000 * S, []
    waiting = {"1-a": False}
    for _ in range(8):
        due = memory.due(waiting, 0, now)
        assert due is not None
        pauses.append((due - now) // S)
        now = due
        memory.rang(waiting, 0, now)
    assert pauses == [0, 5, 10, 20, 40, 80, 120, 120]


def test_a_rung_that_is_not_answered_gives_way_to_the_next(
    bob: Cli, inbox: ClaudeInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claude's socket takes every text, and shows none of them. The clock is a fake."""
    bob.wake('{"argv": ["true"]}')
    for name, value in bob.env.items():
        monkeypatch.setenv(name, value)
    bob.drop()
    bell = Bell(str(bob.root), "bob", bob.session)
    now, times = time.time_ns(), []
    for _ in range(6):
        due = bell.step(now)
        assert due is not None
        times.append((due - now) // S)
        assert bell.step(due - 1) == due  # not before its time
        now = due
    assert times == [5, 10, 20, 40, 80, 120]
    assert [one["rung"] for one in bob.reports()] == [
        *("claude-inbox", "claude-inbox", "command", "command"),
        *("claude-inbox", "claude-inbox"),
    ]
    assert len(inbox.texts) == 4


def test_something_new_after_an_answer_rings_at_once() -> None:
    memory, now = Memory(), 1000 * S
    for _ in range(3):
        memory.rang({"1-a": False}, 0, now)
    assert memory.due({"1-a": False, "2-b": False}, 0, now) == now + 20 * S  # not answered
    assert memory.due({"1-a": False}, now + 1, now + 2) == now + 20 * S  # nothing new
    both = {"1-a": False, "2-b": False}
    assert memory.due(both, now + 1, now + 2) == now + 2
    memory.rang(both, now + 1, now + 2)
    assert memory.due(both, now + 1, now + 3) == now + 2 + 5 * S  # from the beginning


def rung(at: int) -> Memory:
    memory = Memory()
    memory.rang({"1-a": False}, 0, at)
    return memory


def test_when_the_next_ring_is_due() -> None:
    now, urgent = 1000 * S, {"1-a": False, "2-b": True}
    assert rung(now).due(urgent, 0, now + 10**6) == now + S  # many of them are few rings
    assert rung(now).due(urgent, 0, now + 3 * S) == now + 3 * S
    assert rung(now + 10**6 * S).due({"1-a": False}, 0, now) == now + 5 * S  # a clock set back
    memory = rung(now)
    memory.again_s = 120  # a rung with a queue of its own
    assert memory.due(urgent, 0, now + S) == now + 120 * S
    memory = rung(now)
    assert memory.due({}, 0, now) is None
    assert memory.due({"2-b": False}, 0, now + 1) == now + 1  # nothing waited in between


# -- its life ----------------------------------------------------------------------------


def test_it_ends_with_its_session(bob: Cli, tmp_path: Path) -> None:
    first = bob.bell()
    with session_lock(str(bob.root)):
        remove_session(str(bob.root), bob.session)
    assert first.wait(PATIENCE_S) == 0
    assert not list((bob.root / "sessions").glob("*.bell"))
    bob.hook(IDLE)
    second = bob.bell()
    bob.process.kill()
    bob.process.wait()
    assert second.wait(PATIENCE_S) == 0


def test_it_ends_when_another_session_takes_the_name(bob: Cli) -> None:
    process = bob.bell()
    bob.hook(IDLE, agent="")
    assert process.wait(PATIENCE_S) == 0


def test_it_ends_when_its_session_goes_on_in_another_container(bob: Cli) -> None:
    process = bob.bell()
    bob.hook(IDLE, pid_namespace=1)
    assert process.wait(PATIENCE_S) == 0


def test_there_is_one_and_the_next_hook_starts_it_again(bob: Cli) -> None:
    root = str(bob.root)
    process = bob.bell()
    assert bob.bell().wait(PATIENCE_S) == 0
    assert not bells.start(root, bob.session)
    process.kill()
    process.wait()
    assert bells.start(root, bob.session)
    memory = until(lambda: (one := bob.memory) and one.pid != process.pid and one)
    assert is_ringing(root, bob.session)
    bob.process.kill()
    bob.process.wait()
    until(lambda: not is_ringing(root, bob.session))
    assert memory.agent == "bob"


def test_it_takes_15_mib_at_most(bob: Cli, inbox: ClaudeInbox) -> None:
    process = bob.bell(is_anew=True)
    bob.drop()
    until(lambda: inbox.texts)
    status = Path(f"/proc/{process.pid}/status").read_text()
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak <= 15 * 1024, f"{peak} KiB"


@pytest.mark.damages
def test_it_goes_on_when_a_look_fails(bob: Cli, inbox: ClaudeInbox) -> None:
    """A lock that cannot be opened, as on a full disk."""
    bob.look_s = 1
    bob.bell()
    lock = bob.root / "sessions" / "ring-bob.lock"
    lock.symlink_to("nowhere")
    bob.drop()
    assert until(bob.log)[0].startswith("the bell of bob: ")
    lock.unlink()
    until(lambda: inbox.texts)


# -- with the hooks ------------------------------------------------------------------------


def test_the_hooks_start_it_and_end_it(bob: Cli, inbox: ClaudeInbox) -> None:
    """A doorbell, a prompt, and the end of a session of the real hooks."""
    bob.end()

    def hook(event: str, **facts: str) -> str:
        """What a hook prints."""
        argv = [sys.executable, "-m", "relay", "hook", "claude", event, "--home", str(bob.root)]
        given = json.dumps({"session_id": "real", "hook_event_name": event, **facts})
        env = os.environ | bob.env | {"AGENT_RELAY_NAME": "bob"}
        done = subprocess.run(
            argv, input=given, env=env, cwd=PACKAGE, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout

    hook("SessionStart", source="startup")
    session = load_session(str(bob.root), "claude", "real")
    assert session is not None and session.agent == "bob"
    until(lambda: is_ringing(str(bob.root), session))
    bob.drop("\nthe build is green")
    until(lambda: inbox.texts)
    printed = hook("UserPromptSubmit", prompt=inbox.texts[0])
    assert "the build is green" in printed
    assert '"decision": "block"' in hook("UserPromptSubmit", prompt=inbox.texts[0])
    rings = len(inbox.texts)  # one, unless the prompt took longer than the first pause
    hook("Stop")
    time.sleep(0.2)
    assert len(inbox.texts) == rings
    secret = bob.env[TOKEN].encode()
    files = [path for path in bob.root.rglob("*") if path.is_file()]
    assert not [path for path in files if secret in path.read_bytes()]
    hook("SessionEnd", reason="exit")
    until(lambda: not is_ringing(str(bob.root), session))


# -- SIGKILL -------------------------------------------------------------------------------

STEPS = 24


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_bell_that_is_killed_loses_nothing(bob: Cli, inbox: ClaudeInbox, step: int) -> None:
    """The next one rings; the messages are where they were."""
    ids = [bob.drop(), bob.drop(PRIORITY=1)]
    env = os.environ | bob.env
    bell = forks.start(BELL, bob.bell_words(0.2, ANSWER_S, step), env, 0, 1, 2)
    try:
        bell.wait(2)
    except subprocess.TimeoutExpired:  # it has no more calls to be killed at
        bell.kill()
    bell.wait()
    assert not is_ringing(str(bob.root), bob.session)
    bob.bells.append(forks.start(BELL, bob.bell_words(0.2, ANSWER_S), env, 0, 1, 2))
    until(lambda: inbox.texts)
    until(lambda: any(one["result"] == "rang: posted" for one in bob.reports()))
    assert set(inbox.texts) == {"agent-relay: 2 messages wait; `relay inbox --take`"}
    folder = bob.root / "agents" / "bob" / "inbox"
    assert sorted(path.stem for path in folder.glob("*.msg")) == sorted(ids)
