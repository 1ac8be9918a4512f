"""Which agent a session is: names, runs, and what the next one gets of a dead one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.reach import binding
from relay.reach.session import Session, live_session, load_session, save_session
from tests.box import Box
from tests.reach.hooks import Cli, in_another_container, put, reports, told

Start = Callable[..., Cli]
HELLO = "FROM: alice\nTO: claude\nSENT: 2026-11-23T12:03:04.5Z\n\nhello"
ID = "1700000000000000001-aa"


@pytest.mark.parametrize(
    ("env", "words", "name"),
    [
        ({}, [], "claude"),
        ({}, ["--as", "bob"], "bob"),
        ({"AGENT_RELAY_NAME": "alice"}, ["--as", "bob"], "alice"),
    ],
)
def test_the_name_is_the_environments_the_commands_or_the_vendors(
    root: Path, start_cli: Start, env: dict[str, str], words: list[str], name: str
) -> None:
    cli = start_cli(**env)
    cli.options += words
    text = cli.start()
    assert text.startswith(f"agent-relay: this session is the agent {name} (run 1) of {root}.")
    assert cli.name == name
    assert {one.name for one in (root / "agents" / name).iterdir()} == {"inbox", "outbox"}
    assert (root / "agents" / name / "inbox/.read").is_dir()


def test_a_name_that_is_not_valid_binds_nothing(root: Path, start_cli: Start) -> None:
    cli = start_cli(AGENT_RELAY_NAME="../x")
    assert cli.start() == cli.tool() == ""
    assert "'../x' is not a valid name" in (root / "logs/hooks.log").read_text()


def test_the_process_is_the_nearest_one_that_is_not_a_shell(root: Path, start_cli: Start) -> None:
    cli = start_cli()
    cli.start()
    assert cli.session.pid == cli.process.pid and cli.session.is_live
    cli.die()
    assert not cli.session.is_live


def test_any_hook_binds_a_session_that_began_without_one(root: Path, start_cli: Start) -> None:
    cli = start_cli()
    assert "the agent claude" not in cli.hook("PreToolUse")
    assert cli.name == "claude"


def test_the_holder_keeps_its_name_and_the_second_is_told(root: Path, start_cli: Start) -> None:
    one, two, three = start_cli("s-1"), start_cli("s-2"), start_cli("s-3")
    one.start()
    assert "It is not claude: a live session is claude." in two.start()
    three.start()
    assert [cli.name for cli in (one, two, three)] == ["claude", "claude-2", "claude-3"]
    put(root, "claude-2", HELLO, ID)
    assert one.tool() == three.tool() == ""
    assert f"Message {ID}" in two.tool()

    two.die()
    four = start_cli("s-4")
    four.start()
    assert four.name == "claude-2"  # the first that is free


def test_the_holder_in_another_container_keeps_its_name_while_its_bell_runs(
    start_cli: Start,
) -> None:
    """Its process is not visible from here; what its bell has locked is."""
    one, two, three = start_cli("s-1"), start_cli("s-2"), start_cli("s-3")
    one.start()
    with in_another_container(one):
        assert "It is not claude: a live session is claude." in two.start()
    three.start()
    assert (two.name, three.name) == ("claude-2", "claude")


def test_a_bell_that_cannot_be_looked_at_is_no_sign_of_life(start_cli: Start) -> None:
    """The relay asks it in its loop, which such a file must not end."""
    one = start_cli()
    one.start()
    with in_another_container(one):
        assert one.session.is_live
        bell = Path(one.session.bell_file)
        bell.unlink()
        bell.symlink_to("nowhere")
        assert not one.session.is_live


def test_many_sessions_that_begin_at_once_have_different_names(
    root: Path, start_cli: Start
) -> None:
    found = [start_cli(f"s-{number}") for number in range(8)]
    facts = {"hook_event_name": "SessionStart", "source": "startup"}
    for cli in found:  # all are asked before any has answered
        stdin = json.dumps(facts | {"session_id": cli.session_id})
        cli.ask(words=["claude", "SessionStart", *cli.options], at="", command="", stdin=stdin)
    assert [cli.answer()[0] for cli in found] == [0] * 8
    assert len({cli.name for cli in found}) == 8


def test_who_is_resumed_has_its_name_again(root: Path, start_cli: Start) -> None:
    one, two = start_cli("s-1"), start_cli("s-2")
    one.start()
    two.start()
    for cli in (one, two):
        cli.hook("SessionEnd", reason="exit")
        cli.die()
    again = start_cli("s-2")
    again.start("resume")
    assert (again.name, again.session.run) == ("claude-2", 1)

    third = start_cli("s-3")
    third.start()
    assert third.name == "claude"
    late = start_cli("s-1")  # its name has another session by now
    late.start("resume")
    assert late.name == "claude-3"


def test_clear_and_compact_keep_the_name_and_a_fork_does_not(root: Path, start_cli: Start) -> None:
    other, cli = start_cli("s-0"), start_cli("s-1")
    other.start()
    cli.start()
    assert cli.name == "claude-2"

    cli.hook("SessionEnd", reason="clear")
    cli.session_id = "s-2"
    cli.start("clear")
    assert (cli.name, cli.session.run) == ("claude-2", 2)
    assert sorted(os.listdir(root / "sessions"))  # the cleared one is gone
    assert not (root / "sessions/claude-s-1.json").exists()

    cli.start("compact")
    assert (cli.name, cli.session.run) == ("claude-2", 2)

    cli.session_id = "s-3"
    assert "a fork is another agent" in cli.start("fork")
    assert cli.name == "claude-3"


def test_what_a_dead_session_was_shown_is_shown_to_the_next_one(
    root: Path, start_cli: Start
) -> None:
    cli = start_cli("s-1")
    cli.start()
    put(root, "claude", HELLO, ID)
    assert f"Message {ID}" in cli.tool()
    cli.die()

    heir = start_cli("s-2")
    assert "shown before, perhaps not seen: offer 2" in heir.start()
    assert (heir.name, heir.session.run) == ("claude", 2)
    assert told(reports(root, "claude")) == [
        ("offered", "tool call 1", 1, ID),
        ("returned", "its session ended", ID),
        ("offered", "session start", 2, ID),
    ]
    found = live_session(str(root), "claude")
    assert found is not None and found.session_id == "s-2"


def test_what_another_hook_of_the_session_noted_meanwhile_stays(
    root: Path, start_cli: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = start_cli("s-1")
    cli.start()
    cli.die()
    give_back = binding._give_back

    def beside(root: str, old: Session, why: str) -> None:
        new = load_session(root, "claude", "s-2")
        assert new is not None
        new.calls = 7
        save_session(root, new)
        give_back(root, old, why)

    monkeypatch.setattr(binding, "_give_back", beside)
    monkeypatch.setattr(binding, "agent_process", lambda: (os.getpid(), None))
    given = {"source": "startup", "wanted": "claude", "cwd": "/", "transcript": ""}
    binding.bind(str(root), "claude", "s-2", **given)
    heir = load_session(str(root), "claude", "s-2")
    assert heir is not None and (heir.agent, heir.calls) == ("claude", 7)


def test_what_a_session_was_shown_at_its_end_is_returned(root: Path, start_cli: Start) -> None:
    cli = start_cli("s-1")
    cli.start()
    put(root, "claude", HELLO, ID)
    cli.tool()
    cli.hook("SessionEnd")
    cli.die()
    again = start_cli("s-1")
    assert "offer 2" in again.start("resume")
    assert told(reports(root, "claude"))[1] == ("returned", "the session ended", ID)


def test_an_answer_to_an_earlier_run_says_so(root: Path, start_cli: Start) -> None:
    old = start_cli("s-1")
    old.start()
    asked = f"{time.time_ns()}-aa"
    old.die()
    new = start_cli("s-2")
    new.start()
    mine = f"{time.time_ns()}-bb"
    put(root, "claude", f"FROM: bob\nTO: claude\nRE: {asked}\n\nyes", ID)
    assert f"answers {asked}, which run 1 of claude sent; this is run 2" in new.tool()
    put(root, "claude", f"FROM: bob\nTO: claude\nRE: {mine}\n\nyes", ID.replace("aa", "bb"))
    assert f"answers {mine})" in new.tool()


def test_what_is_owed_and_what_waits_is_told_at_the_start(box: Box, start_cli: Start) -> None:
    asked = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.take("bob", asked)
    box.tick()
    waits = box.send("alice", "TO: bob\n\nhello")
    cli = start_cli(AGENT_RELAY_NAME="bob")
    text = cli.start()
    assert f"for an answer to command {asked}" in text
    assert f"Message {waits} from alice" in text


def test_a_retired_agent_is_active_again(box: Box, start_cli: Start) -> None:
    box.command("operator", "agent.retire", "NAME: bob")
    box.tick()
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("retired",)]
    start_cli(AGENT_RELAY_NAME="bob").start()
    box.tick(2)
    assert box.sql("SELECT status FROM agents WHERE name = 'bob'") == [("active",)]


def test_commands_of_claude_act_as_the_agent(root: Path, start_cli: Start) -> None:
    env_file = root.parent / "env"
    start_cli("s-0").start()
    start_cli("s-1", CLAUDE_ENV_FILE=str(env_file)).start()
    line = f"export AGENT_RELAY_NAME=claude-2 AGENT_RELAY_DIR={root}\n"
    assert env_file.read_text() == line


def test_sessions_of_long_ago_are_forgotten(root: Path, start_cli: Start) -> None:
    old = start_cli("s-1")
    old.start()
    old.die()
    path = root / "sessions/claude-s-1.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"seen_at": 1}))
    start_cli("s-2").start()
    assert not path.exists()
