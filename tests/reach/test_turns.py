"""Turns of the agent CLIs, as they run the hooks that ``relay hooks install`` wrote."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relay.reach.hook import unshown_ids
from relay.reach.session import live_session
from tests.fakes.harness import Harness
from tests.procs import until
from tests.reach.hooks import put
from tests.reach.projects import install

TURNS = int(os.environ.get("RELAY_TURNS", "6"))
CLAUDE = (sys.executable, "-m", "tests.fakes.harness", "claude")


@pytest.mark.slow
@pytest.mark.timeout(900 + 10 * TURNS)
@pytest.mark.parametrize("vendor", ["claude", "codex", "gemini", "agy"])
def test_a_message_at_any_moment_of_a_turn_is_in_the_context_once(root: Path, vendor: str) -> None:
    project = install(root, vendor)
    chance = random.Random(vendor)
    ids = [f"{1700000000000000000 + number}-aa" for number in range(TURNS)]
    with Harness(vendor, project) as cli:
        cli.start()
        for one in ids:
            sender = threading.Thread(target=_send, args=(root, one, chance.uniform(0, 0.5)))
            sender.start()
            cli.prompt("go", {"run": "true"}, {"batch": [{"run": "true"}, {"run": "true"}]})
            sender.join()
        cli.prompt("what has come", {"run": "true"})
        assert cli.errors() == []
        seen = [(one, len(cli.saw(f"Message {one} from alice (message):"))) for one in ids]
        assert seen == [(one, 1) for one in ids]
        session = live_session(str(root), "bob")
        assert session is not None and session.state == "idle"
        assert not unshown_ids(str(root), session) and not session.offered
    assert len(os.listdir(root / "agents/bob/inbox/.read")) == TURNS


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fail", "interrupt"])
def test_what_agy_forgets_with_a_call_of_its_model_is_shown_again(root: Path, end: str) -> None:
    with Harness("agy", install(root, "agy")) as cli:
        put(root, "bob", "FROM: alice\nTO: bob\n\nhello", one := "1700000000000000000-aa")
        cli.prompt("go", {end: "quota"})
        session = live_session(str(root), "bob")
        assert session is not None and session.state == ("failing" if end == "fail" else "working")
        assert (root / f"agents/bob/inbox/{one}.msg").exists()
        cli.prompt("again", {"run": "true"})
        is_again = ["shown before" in seen.text for seen in cli.saw(f"Message {one} from alice")]
        assert is_again == [False, True]
        assert (root / f"agents/bob/inbox/.read/{one}.msg").exists()
        assert cli.errors() == []


@pytest.mark.slow
def test_agy_goes_on_at_its_stop_and_prints_an_object_always(root: Path) -> None:
    with Harness("agy", install(root, "agy")) as cli:
        cli.prompt("go", {"run": f"mv {_later(root)} {root}/agents/bob/inbox/1700000000-aa.msg"})
        (seen,) = cli.saw("Message 1700000000-aa from alice")
        assert seen.through == "PreInvocation"
        (greeting,) = cli.saw("this session is the agent bob")
        assert greeting.through == "PreInvocation"
        (root / "config.json").rename(root / "config.gone")  # no home any more
        cli.prompt("go")
        assert cli.errors() == []


def _later(root: Path) -> Path:
    path = root / "agents/bob/inbox/.pending/1700000000-aa"
    path.write_text("FROM: alice\nTO: bob\n\nhello")
    return path


# Hooks of a prompt, whose parent is the agent CLI.
KILLS = {
    "its hook runs": "input=$(cat); kill -9 $PPID; while kill -0 $PPID; do :; done 2>/dev/null; "
    'printf %s "$input" | HOOK',
    "its hook has printed": "HOOK; kill -9 $PPID",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*KILLS, "the transcript shows it"])
def test_a_session_that_is_killed_leaves_the_message_to_the_next(root: Path, moment: str) -> None:
    project, one = install(root, "claude"), "1700000000000000000-aa"
    settings = project / ".claude/settings.local.json"
    text = settings.read_text()
    facts = json.loads(text)
    (entry,) = facts["hooks"]["UserPromptSubmit"][0]["hooks"]
    command = KILLS.get(moment, "HOOK").replace("HOOK", entry["command"])
    inbox = root / "agents/bob/inbox"
    # The message comes after the session's start.
    entry["command"] = f"mv {inbox}/.pending/{one} {inbox}/{one}.msg; {command}; touch {root}/done"
    settings.write_text(json.dumps(facts))
    (inbox / ".pending" / one).write_text("FROM: alice\nTO: bob\n\nhello")
    steps, env = (
        json.dumps([{"prompt": "go", "steps": [{"die": 1}]}]),
        os.environ | {"HOME": str(project)},
    )
    assert subprocess.run([*CLAUDE, project], input=steps.encode(), env=env).returncode == -9
    until((root / "done").exists)
    settings.write_text(text)
    assert live_session(str(root), "bob") is None
    with Harness("claude", project) as cli:
        cli.start()
        cli.prompt("go", {"run": "true"})
        assert cli.errors() == []
        shown = [seen.text for seen in cli.saw(f"Message {one} from alice")]
        bob = live_session(str(root), "bob")
        assert bob is not None and bob.session_id == cli.session_id
    is_again = ["shown before, perhaps not seen" in text for text in shown]
    # The hook of a dead session shows nothing; one that ended before has offered the message.
    expected = {"its hook has printed": [True], "the transcript shows it": []}
    assert is_again == expected.get(moment, [False])
    assert os.listdir(root / "agents/bob/inbox/.read") == [f"{one}.msg"]


def _send(root: Path, message_id: str, delay: float) -> None:
    time.sleep(delay)
    put(root, "bob", "FROM: alice\nTO: bob\n\nhello", message_id)
