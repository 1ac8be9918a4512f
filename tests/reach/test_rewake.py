"""``relay bell --rewake``: the process that waits as Claude's Stop hook until the bell ends it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relay.cli import hooks, run
from relay.reach import rungs, settings_file
from relay.reach.bell import WOKEN
from relay.reach.rungs import ClaudeRewake, RingFailed, RungTarget, Wake, ring_text
from relay.reach.session import IDLE
from tests.procs import PATIENCE_S, until
from tests.reach.bells import PACKAGE, Cli


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
    try:
        text = Path(rungs.rewake_file(str(of.root), of.session)).read_text()
    except FileNotFoundError:
        return False
    return text.startswith(f"{hook.pid} ")


def test_the_waiting_hook_ends_with_77_and_the_text(bob: Cli) -> None:
    bob.hook(IDLE)
    hook = rewake(bob)
    until(lambda: waits(bob, hook))
    bob.bell()
    bob.drop()
    output, errors = hook.communicate(timeout=PATIENCE_S)
    assert (hook.returncode, output) == (WOKEN, "")
    assert errors == "agent-relay: 1 message waits; `relay inbox --take`\n"
    (result,) = until(bob.results)
    assert result == f"claude-rewake: rang: process {hook.pid} ended for it"


def test_the_newest_hook_ends_the_older(bob: Cli) -> None:
    older = rewake(bob)
    until(lambda: waits(bob, older))
    newer = rewake(bob)
    assert older.wait(PATIENCE_S) == 0
    assert waits(bob, newer)
    bob.process.kill()
    bob.process.wait()
    assert newer.wait(PATIENCE_S) == 0
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
    until(lambda: (one := bob.memory) and one.pid != first.pid)
    bob.drop()
    assert hook.wait(PATIENCE_S) == WOKEN
    hook.communicate()


def woken(bob: Cli) -> int:
    """Ring a hook that waits; its exit status."""
    hook = rewake(bob)
    until(lambda: waits(bob, hook) or hook.poll() is not None)  # its bell may have been quicker
    hook.send_signal(signal.SIGUSR1)
    hook.communicate(timeout=PATIENCE_S)
    return hook.returncode


def test_three_times_a_session_is_woken_that_reads_nothing(
    bob: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    bob.hook(IDLE)
    first = bob.drop()
    assert [woken(bob) for _ in range(5)] == [WOKEN, WOKEN, WOKEN, 0, 0]
    bob.drop()
    assert woken(bob) == 0  # a new message, and it has not read any
    said = "claude-rewake  woken 3 times, and read nothing: it is not woken until it reads"
    hook = rewake(bob)
    until(lambda: waits(bob, hook))
    status = ["--home", str(bob.root), "wake", "status", "bob"]  # what the bell has noted by now
    until(lambda: run(status) == 0 and said in capsys.readouterr().out)
    bob.take(first)
    os.kill(hook.pid, signal.SIGUSR1)
    assert hook.wait(PATIENCE_S) == WOKEN
    hook.communicate()
    assert [woken(bob) for _ in range(3)] == [WOKEN, WOKEN, 0]


def test_a_ring_in_a_callback_of_pythons_own_wakes(bob: Cli) -> None:
    """There an exception is lost, as at the end of an import."""
    bob.drop()
    code = f"""
import os, signal, sys, weakref
sys.path.insert(0, {PACKAGE!r})
from relay.reach import bell
class Gone: pass
def start(root, session):
    gone = Gone()
    there = weakref.ref(gone, lambda _: (os.kill(os.getpid(), signal.SIGUSR1), list(map(str, "x"))))
    del gone
bell.start = start
sys.exit(bell.main(["--home", {str(bob.root)!r}, "--rewake"]))
"""
    facts = json.dumps({"session_id": bob.session.session_id})
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=facts,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (
        WOKEN,
        "agent-relay: 1 message waits; `relay inbox --take`\n",
    )


def test_killed_between_the_count_and_the_exit_it_is_not_woken(bob: Cli) -> None:
    """As the installed command runs it: the wake counts, and the exit status is 0."""
    bob.hook(IDLE)
    bob.drop()
    code = (
        f"import os, sys; sys.path.insert(0, {PACKAGE!r}); from relay.reach import bell;"
        " save = bell.save_session; bell.save_session ="
        " lambda *args: (save(*args), os.kill(os.getpid(), 9));"
        f" sys.exit(bell.main(['--home', {str(bob.root)!r}, '--rewake']))"
    )
    facts = json.dumps({"session_id": bob.session.session_id})
    line = f"printf %s {shlex.quote(facts)} | {shlex.join([sys.executable, '-c', code])}"
    hook = subprocess.Popen(
        line + settings_file.WAKES, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    file = Path(rungs.rewake_file(str(bob.root), bob.session))
    until(file.exists)
    with contextlib.suppress(ProcessLookupError):  # it has found the message by itself
        os.kill(int(file.read_text().split()[0]), signal.SIGUSR1)
    hook.communicate(timeout=PATIENCE_S)
    assert hook.returncode == 0
    found = bob.reload()
    assert found is not None and found.woken == 1
    assert [woken(bob) for _ in range(3)] == [WOKEN, WOKEN, 0]


def test_the_status_of_hooks_says_who_is_not_woken(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(bob.root)
    monkeypatch.setattr(hooks, "relay_command", lambda: ["relay"])
    run(["hooks", "install", "claude"])
    message = bob.drop()
    bob.hook(IDLE, woken=3, woken_for=[message])
    capsys.readouterr()
    run(["--home", str(bob.root), "hooks", "status", "claude"])
    assert "bob: woken 3 times, and read nothing" in capsys.readouterr().out
    bob.take(message)
    run(["--home", str(bob.root), "hooks", "status", "claude"])
    assert "read nothing" not in capsys.readouterr().out


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
