"""``relay bell --rewake``: the process that waits as Claude's Stop hook until the bell ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.reach import rungs
from relay.reach.rungs import ClaudeRewake, RingFailed, RungTarget, Wake, ring_text
from relay.reach.session import IDLE
from tests.reach.bells import PACKAGE, Cli, cli, until


@pytest.fixture
def bob(tmp_path: Path) -> Iterator[Cli]:
    """Bob is a session of claude that waits at its prompt."""
    with cli(tmp_path / "home") as made:
        yield made


def rewake(of: Cli) -> subprocess.Popen[str]:
    """The Stop hook of ``asyncRewake``, as Claude Code starts it."""
    code = (
        f"import sys; sys.path.insert(0, {PACKAGE!r}); from relay.reach import bell;"
        f" sys.exit(bell.main(['--home', {str(of.root)!r}, '--rewake']))"
    )
    hook = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hook.stdin is not None
    hook.stdin.write(json.dumps({"session_id": of.session.session_id, "hook_event_name": "Stop"}))
    hook.stdin.close()
    hook.stdin = None
    return hook


def waits(of: Cli, hook: subprocess.Popen[str]) -> bool:
    file = Path(rungs.rewake_file(str(of.root), of.session))
    return file.exists() and file.read_text().startswith(f"{hook.pid} ")


def test_the_waiting_hook_ends_with_exit_2_and_the_text(bob: Cli) -> None:
    bob.hook(IDLE)
    hook = rewake(bob)
    until(lambda: waits(bob, hook))
    bob.bell()
    bob.drop()
    output, errors = hook.communicate(timeout=10)
    assert (hook.returncode, output) == (2, "")
    assert errors == "agent-relay: 1 message waits; `relay inbox --take`\n"
    (result,) = until(bob.results)
    assert result == f"claude-rewake: rang: process {hook.pid} ended for it"


def test_the_newest_hook_ends_the_older(bob: Cli) -> None:
    older = rewake(bob)
    until(lambda: waits(bob, older))
    newer = rewake(bob)
    assert older.wait(10) == 0
    assert waits(bob, newer)
    bob.process.kill()
    bob.process.wait()
    assert newer.wait(10) == 0
    assert newer.communicate() == ("", "") and older.communicate() == ("", "")


def test_a_hook_of_a_subagent_or_with_bad_input_ends_at_once(bob: Cli) -> None:
    argv = [sys.executable, "-c", "from relay.reach import bell; import sys; sys.exit(bell.main("]
    argv[-1] += f"['--home', {str(bob.root)!r}, '--rewake']))"
    for given in ('{"session_id": "bob-1", "agent_id": "x"}', "", "{", "[]", '{"session_id": "?"}'):
        done = subprocess.run(argv, input=given, capture_output=True, text=True, cwd=PACKAGE)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_waiting_hook_starts_a_bell_that_was_killed(bob: Cli) -> None:
    hook = rewake(bob)
    until(lambda: waits(bob, hook))
    first = until(lambda: bob.memory)
    os.kill(first.pid, 9)
    until(lambda: (one := bob.memory) and one.pid != first.pid, 15)
    bob.drop()
    assert hook.wait(10) == 2
    hook.communicate()


def test_a_process_that_took_the_pid_of_the_hook_is_not_signalled(bob: Cli) -> None:
    other = subprocess.Popen(["sleep", "100"])
    Path(rungs.rewake_file(str(bob.root), bob.session)).write_text(f"{other.pid} 1")
    target = RungTarget(str(bob.root), "bob", bob.session, Wake())
    assert ClaudeRewake().missing(target)
    with pytest.raises(RingFailed, match="the waiting process ended meanwhile"):
        ClaudeRewake().ring(target, ring_text(1))
    assert other.poll() is None
    other.kill()
    other.wait()
