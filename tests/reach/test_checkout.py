"""Two agents in one git work tree: real hooks of sessions, in a checkout and a linked one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base.clock import NS_PER_S, local_time
from relay.base.process_info import words_of
from relay.cli import run
from relay.reach import checkout
from relay.reach.checkout import WRITTEN, worktree_of
from tests.fakes.harness import Harness
from tests.procs import until
from tests.reach.hooks import RELAY, Cli, in_another_container
from tests.reach.projects import install

Start = Callable[..., Cli]


@pytest.fixture
def tree(root: Path) -> Path:
    """The work tree that the sessions of these tests live in: the home is in it."""
    (root.parent / ".git").mkdir()
    (root.parent / "a.py").touch()
    return root.parent


def two(start_cli: Start, **facts: str) -> tuple[Cli, Cli]:
    """Alice works, then bob begins."""
    alice = start_cli("s-a", AGENT_RELAY_NAME="alice")
    alice.start()
    alice.prompt()
    bob = start_cli("s-b", **facts, AGENT_RELAY_NAME="bob")
    bob.start()
    return alice, bob


def test_a_session_hears_at_its_start_who_else_lives_in_the_checkout(
    tree: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    assert "checkout" not in alice.texts[0]
    since = local_time(alice.session.state_at)
    line = f"In this checkout, {tree}, live also alice (working since {since})."
    assert line in bob.texts[0].splitlines()
    alice.die()
    carol = start_cli("s-c", AGENT_RELAY_NAME="carol")
    assert "live also bob (idle since " in carol.start() and "alice" not in carol.texts[0]
    bob.hook("SessionEnd")
    elsewhere = tree / "linked"
    elsewhere.mkdir()
    (elsewhere / ".git").write_text("gitdir: elsewhere")  # a linked work tree is another one
    dave = start_cli("s-d", AGENT_RELAY_NAME="dave")
    assert "checkout" not in dave.hook("SessionStart", source="startup", cwd=str(elsewhere))


def test_outside_of_git_nothing_is_said(root: Path, start_cli: Start) -> None:
    assert not worktree_of(str(root)) and not worktree_of("") and not worktree_of("/")
    assert "checkout" not in two(start_cli)[1].texts[0]


# -- the same file ------------------------------------------------------------------------------


def writes(cli: Cli, path: Path, event: str = "PostToolUse", name: str = "Edit") -> str:
    """A tool call that writes a file; what its hook says."""
    return cli.hook(
        event, tool_name=name, tool_input={"file_path": str(path)}, cwd=str(path.parent)
    )


def sent(root: Path, agent: str) -> list[tuple[str, str]]:
    """Recipient and body of the messages in an agent's outbox."""
    found = []
    for file in sorted((root / "agents" / agent / "outbox").glob("*.msg")):
        head, _, body = file.read_text().partition("\n\n")
        found.append((next(one[4:] for one in head.splitlines() if one[:4] == "TO: "), body))
    return found


def test_two_that_wrote_one_file_and_the_operator_hear_it_once(
    tree: Path, root: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    path = tree / "a.py"
    assert writes(alice, path) == "" and writes(alice, path) == ""
    assert writes(bob, tree / "b.py") == ""
    assert writes(bob, path, event="PostToolUseFailure") == ""
    assert writes(bob, path, name="Read") == ""
    said = writes(bob, path)
    assert said.startswith(f"agent-relay: alice wrote {path}, too, ") and said.endswith(" s ago.")
    (to_alice, to_operator) = sent(root, "bob")
    assert (to_alice[0], to_operator[0]) == ("alice", "operator")
    assert to_alice[1] == to_operator[1]
    assert to_alice[1].startswith(f"bob and alice have both written {path}: alice at ")
    assert writes(alice, path) == "" and writes(bob, path) == ""
    assert sent(root, "alice") == [] and len(sent(root, "bob")) == 2
    assert writes(alice, tree / "b.py").startswith("agent-relay: bob wrote")  # another file


def moved(root: Path, name: str, seconds: int) -> None:
    """Make the times in the file older."""
    path = root / "sessions" / WRITTEN
    facts = json.loads(path.read_text())
    facts[name] = {key: at - seconds * NS_PER_S for key, at in facts[name].items()}
    path.write_text(json.dumps(facts))


def test_after_ten_minutes_it_is_no_news_and_after_an_hour_it_is_again(
    tree: Path, root: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    path = tree / "a.py"
    writes(alice, path)
    moved(root, "written", 601)
    assert writes(bob, path) == ""
    assert writes(alice, path) != ""
    assert writes(bob, path) == ""
    moved(root, "told", 3601)
    assert writes(bob, path) != ""


def test_who_has_ended_is_not_named(tree: Path, root: Path, start_cli: Start) -> None:
    alice, bob = two(start_cli)
    writes(alice, tree / "a.py")
    alice.die()
    assert writes(bob, tree / "a.py") == "" and sent(root, "bob") == []


def test_a_path_of_another_container_is_another_file(
    tree: Path, root: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    writes(alice, tree / "a.py")
    with in_another_container(alice):
        assert "live also" not in bob.start()
        assert writes(bob, tree / "a.py") == "" and sent(root, "bob") == []


def test_the_file_is_known_through_links_notebooks_and_patches(
    tree: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    (tree / "link").symlink_to(tree / "a.py")
    writes(alice, tree / "a.py")
    writes(alice, tree / "c.ipynb")
    writes(alice, tree / "new name.py")
    codex = start_cli("s-x", "codex", AGENT_RELAY_NAME="carol")
    patch = "*** Begin Patch\n*** Update File: link\n*** Move to: new name.py\n@@\n-a\n"
    patch += "+*** Add File: c.ipynb\n"
    facts = {"tool_name": "apply_patch", "tool_input": {"command": patch}, "cwd": str(tree)}
    said = codex.hook("PostToolUse", **facts)
    assert f"alice wrote {tree / 'a.py'}, too" in said and "new name.py, too" in said
    assert "ipynb" not in said  # a line of the patched file
    gemini = start_cli("s-g", "gemini", AGENT_RELAY_NAME="dave")
    assert "alice wrote" in writes(gemini, tree / "a.py", "AfterTool", "write_file")
    given = {"tool_input": {"notebook_path": str(tree / "c.ipynb")}}
    assert "alice wrote" in checkout.wrote(str(tree / "home"), bob.session, given)
    for bad in (
        {},
        {"tool_input": 7},
        {"tool_input": {"file_path": 7}},
        {"tool_input": {"command": [1]}},
    ):
        assert checkout.wrote(str(tree / "home"), bob.session, bad) == ""


def test_a_damaged_file_is_begun_again(tree: Path, root: Path, start_cli: Start) -> None:
    alice, bob = two(start_cli)
    for damaged in ("", "[]", '{"written": 1, "told": {}}', '{"written": {"a": "x"}, "told": {}}'):
        (root / "sessions" / WRITTEN).write_text(damaged)
        assert writes(alice, tree / damaged[:4]) == ""
    assert "alice wrote" in writes(bob, tree / damaged[:4])


@pytest.mark.parametrize(
    ("step", "error", "told"),
    [
        ("_write", KeyboardInterrupt(), 2),  # killed before it is noted: told twice, and not never
        ("_tell", OSError(28, "No space left on device"), 1),
    ],
)
def test_what_was_not_told_and_noted_is_told_with_the_next_write(
    tree: Path,
    root: Path,
    start_cli: Start,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    told: int,
) -> None:
    alice, bob = two(start_cli)
    writes(alice, tree / "a.py")

    def fails(*_: object) -> None:
        raise error

    given: dict[str, object] = {"tool_input": {"file_path": str(tree / "a.py")}}
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(checkout, step, fails)
        assert checkout.wrote(str(root), bob.session, given) == ""
        assert "alice was not told of" in (root / "logs/hooks.log").read_text()
    assert "alice wrote" in checkout.wrote(str(root), bob.session, given)
    assert [to for to, _ in sent(root, "bob")] == ["alice", "operator"] * told
    assert checkout.wrote(str(root), bob.session, given) == ""


# -- a command over all of it -------------------------------------------------------------------


def asks(cli: Cli, command: object, cwd: Path, **facts: str) -> str:
    """The reason for which Claude Code asks before a command; empty: it does not."""
    given = {"session_id": cli.session_id, "tool_name": "Bash", "cwd": str(cwd), **facts}
    stdin = json.dumps(given | {"tool_input": {"command": command}})
    argv = [*RELAY, "hook", cli.vendor, "PreToolUse", *cli.options]
    code, out, err = cli.run(argv, stdin)
    assert (code, err) == (0, "")
    if not out:
        return ""
    (output,) = json.loads(out).values()
    assert (output["hookEventName"], output["permissionDecision"]) == ("PreToolUse", "ask")
    return str(output["permissionDecisionReason"])


def test_before_git_changes_a_checkout_in_which_another_lives_a_person_is_asked(
    tree: Path, start_cli: Start
) -> None:
    alice, bob = two(start_cli)
    since = local_time(alice.session.state_at)
    assert asks(bob, "cd sub; git -C .. stash -u", tree) == (
        f"agent-relay: `git stash` changes the whole checkout {tree}, "
        f"in which live also alice (working since {since})"
    )
    assert bob.session.state == "working"
    assert "`git restore`" in asks(bob, "git restore .", tree)
    for command in ("git stash list", "git checkout -- a.py", "make", "echo git stash", 7, None):
        assert asks(bob, command, tree) == ""
    (tree / "sub").mkdir()
    assert asks(bob, "git restore .", tree / "sub") == ""
    assert asks(bob, "git stash", tree.parent) == ""  # no work tree
    assert asks(bob, "git stash", tree, permission_mode="dontAsk") == ""
    codex = start_cli("s-x", "codex", AGENT_RELAY_NAME="carol")
    assert asks(codex, "git stash", tree) == ""  # it takes a question for an error
    alice.die()
    codex.die()
    assert asks(bob, "git stash", tree) == ""


@pytest.mark.parametrize(
    ("command", "where", "keeps"),
    [
        ("git clean -fdx", ".", "-e .agent-relay"),
        ("git clean -ffdX .", ".", "-e .agent-relay"),
        ("cd sub && git -C .. clean --force -d -x", ".", "-e .agent-relay"),
        ("git stash -a", "sub", "-u"),
        ("git stash push --all", ".", "-u"),
        ("git clean -fdx -e .agent-relay", ".", ""),
        ("git clean -fdx", "sub", ""),
        ("git clean -ndx", ".", ""),
        ("git clean -fd", ".", ""),
        ("git clean -fdx build", ".", ""),
        ("git stash -u", ".", ""),
    ],
)
def test_before_git_removes_the_home_in_a_project_a_person_is_asked(
    tmp_path: Path, start_cli: Start, command: str, where: str, keeps: str
) -> None:
    """Though no other session lives there, and whatever the setting says."""
    tree = tmp_path / "project"
    (tree / "sub").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    assert run(["--home", str(tree / ".agent-relay"), "init"]) == 0
    (tree / ".agent-relay/config.json").write_text('{"agents": {"shared_checkout": false}}')
    alice = start_cli("s-a", root=tree / ".agent-relay")
    alice.start()
    reason = asks(alice, command, tree / where, permission_mode="dontAsk")
    assert bool(reason) == bool(keeps)
    if keeps:
        assert f"removes the relay's home {tree}/.agent-relay with all messages; `{keeps}" in reason


def test_where_nobody_could_answer_nothing_is_asked(
    tree: Path, root: Path, start_cli: Start
) -> None:
    bob = two(start_cli)[1].session
    facts: dict[str, object] = {"tool_input": {"command": "git stash"}, "cwd": str(tree)}
    assert checkout.question(str(root), bob, facts)
    with subprocess.Popen(["sh", "-c", "read line", "-p", "do it"], stdin=subprocess.PIPE) as run_:
        bob.pid = run_.pid
        until(lambda: words_of(bob.pid)[:1] == ["sh"])
        until(lambda: checkout.question(str(root), bob, facts) == "")  # the kernel shows all soon


def test_a_setting_ends_all_of_it(tree: Path, root: Path, start_cli: Start) -> None:
    (root / "config.json").write_text('{"agents": {"shared_checkout": false}}')
    assert run(["--home", str(root), "config", "check"]) == 0
    alice, bob = two(start_cli)
    assert "checkout" not in bob.texts[0]
    writes(alice, tree / "a.py")
    assert writes(bob, tree / "a.py") == ""
    assert asks(bob, "git stash", tree) == ""
    assert not (root / "sessions" / WRITTEN).exists()


@pytest.mark.slow
def test_as_claude_runs_the_installed_hooks(root: Path, start_cli: Start) -> None:
    """The command runs after the person's yes, and another tool is not looked at."""
    project = install(root, "claude")
    subprocess.run(["git", "init", "-q", project], check=True)
    alice = start_cli("s-a", AGENT_RELAY_NAME="alice")
    alice.hook("SessionStart", source="startup", cwd=str(project))
    with Harness("claude", project) as cli:
        cli.start()
        cli.prompt("go", {"run": "git stash list"}, {"run": "git reset -q; touch done"})
        assert cli.saw(
            f"In this checkout, {os.path.realpath(project)}, live also alice (idle since"
        )
        assert cli.errors() == []
        (asked,) = cli.asked
        assert "`git reset` changes the whole checkout" in asked
        until((project / "done").exists)
