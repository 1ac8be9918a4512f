"""The rungs, one by one: what they do, and what they say when they cannot."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from relay.base.process_info import started_at, words_of
from relay.reach import rungs
from relay.reach.rungs import (
    SOCKET,
    TOKEN,
    BadWake,
    ClaudeInbox,
    CodexQueue,
    CommandRung,
    Resume,
    RingFailed,
    Rung,
    RungTarget,
    Wake,
    applying,
    read_wake,
    ring_text,
    survey,
)
from relay.reach.session import IDLE
from tests.procs import PATIENCE_S, until
from tests.reach.bells import PACKAGE, Cli, Inbox, cli

TEXT = ring_text(2)


@pytest.fixture
def eve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Eve is a session of codex; the program ``codex`` is a script of the test."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with cli(tmp_path / "home", "eve", "codex") as made:
        yield made


def program(folder: Path, name: str, script: str) -> None:
    """A program in the PATH of the test."""
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


def target(of: Cli, *argv: str, rung: str = "") -> RungTarget:
    return RungTarget(str(of.root), of.agent, of.session, Wake(argv, rung))


def failure(rung: Rung, of: RungTarget) -> str:
    with pytest.raises(RingFailed) as failed:
        rung.ring(of, TEXT)
    return str(failed.value)


def has(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a hook of claude."""
    monkeypatch.setenv(SOCKET, path)
    monkeypatch.setenv(TOKEN, "secret")


# -- the text and the table ----------------------------------------------------------------


def test_the_ladder_is_tried_in_its_order(bob: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    assert applying(target(bob)) == []
    assert survey(target(bob)) == {
        "claude-inbox": "CLAUDE_CODE_MESSAGING_SOCKET is not set in the bell's environment",
        "claude-rewake": "no `relay bell --rewake` waits as a Stop hook with asyncRewake",
        "codex-queue": "expected a live session of codex",
        "resume": 'only where wake.json has "rung": "resume"',
        "command": "wake.json has no argv",
    }
    has("/nowhere", monkeypatch)
    assert [one.name for one in applying(target(bob, "true"))] == ["claude-inbox", "command"]


def test_a_rung_that_was_asked_for_has_no_stand_in(bob: Cli) -> None:
    asked = target(bob, "true", rung="claude-rewake")
    assert applying(asked) == []
    assert survey(asked)["command"] == "wake.json names claude-rewake"


# -- wake.json -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("[]", 'expected {"argv": […]}, {"rung": "…"} or both'),
        ("{}", 'expected {"argv": […]}, {"rung": "…"} or both'),
        ('{"argv": "ring me"}', 'expected "argv" as a list of texts'),
        ('{"argv": ["a\\u0000b"]}', 'expected "argv" with a program'),
        ('{"argv": ["\\ud800"]}', 'expected "argv" with a program'),
        ('{"argv": [1]}', 'expected "argv" as a list of texts'),
        ('{"rung": "command"}', 'expected "argv" with a program and its arguments'),
        ('{"rung": "tmux"}', 'expected "rung" as one of claude-inbox, claude-rewake'),
        ('{"rung": 7}', 'expected "rung" as one of'),
        ('{"argv": ["x"], "shell": true}', "or both"),
    ],
)
def test_a_wake_json_that_cannot_be_used_is_one_line(bob: Cli, text: str, says: str) -> None:
    bob.wake(text)
    with pytest.raises(BadWake) as bad:
        read_wake(str(bob.root), "bob")
    line = str(bad.value)
    assert line.startswith("agents/bob/wake.json: ") and "\n" not in line
    assert any(one in line for one in says.split("|")), line


def test_a_wake_json_of_others_or_behind_a_link_is_not_read(bob: Cli, tmp_path: Path) -> None:
    path = bob.wake('{"argv": ["true"]}')
    path.chmod(0o622)
    with pytest.raises(BadWake, match="only you can write"):
        read_wake(str(bob.root), "bob")
    path.chmod(0o600)
    assert read_wake(str(bob.root), "bob").argv == ("true",)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadWake):
        read_wake(str(bob.root), "bob")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadWake):
        read_wake(str(bob.root), "bob")
    path.unlink()
    path.mkdir(0o700)
    with pytest.raises(BadWake):
        read_wake(str(bob.root), "bob")


def test_with_a_bad_wake_json_nothing_rings_and_the_log_says_it(bob: Cli, inbox: Inbox) -> None:
    path = bob.wake('{"rung": "pigeon"}')
    bob.bell()
    bob.drop()
    time.sleep(0.3)
    assert inbox.texts == []
    (line,) = bob.log()
    assert line.startswith('agents/bob/wake.json: expected "rung" as one of')
    memory = bob.memory
    assert memory is not None and memory.trouble == line
    path.unlink()
    bob.hook(IDLE)
    bob.drop()
    until(lambda: inbox.texts)


# -- claude-inbox --------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["held", "denied", "expired", "refused", "dropped"])
def test_a_text_that_is_held_or_refused_did_not_ring(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    inbox = Inbox(tmp_path / "inbox.sock", status=status)
    has(inbox.path, monkeypatch)
    monkeypatch.setattr(rungs, "ANSWER_S", PATIENCE_S)
    assert failure(ClaudeInbox(), target(bob)) == status


def test_a_socket_that_is_not_ours_gets_no_token(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(tmp_path / "inbox.sock")
    link = tmp_path / "link.sock"
    link.symlink_to(inbox.path)
    has(str(link), monkeypatch)
    assert failure(ClaudeInbox(), target(bob)) == "expected a socket, got a link or another file"
    has(str(tmp_path), monkeypatch)
    assert failure(ClaudeInbox(), target(bob)) == "expected a socket, got a link or another file"
    has(inbox.path, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert failure(ClaudeInbox(), target(bob)) == "the socket belongs to another user"
    facts = list(os.lstat(inbox.path))
    facts[stat.ST_UID] += 1
    monkeypatch.setattr(os, "lstat", lambda _: os.stat_result(facts))
    says = "a process of another user listens on the socket"
    assert failure(ClaudeInbox(), target(bob)) == says
    assert inbox.frames == []


def test_a_socket_that_is_gone_or_closed(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(str(tmp_path / "none.sock"), monkeypatch)
    assert failure(ClaudeInbox(), target(bob)) == (
        "the socket cannot be used: No such file or directory"
    )
    inbox = Inbox(tmp_path / "inbox.sock", deaf=True)
    inbox.close()
    has(inbox.path, monkeypatch)
    assert failure(ClaudeInbox(), target(bob)) == (
        "the socket does not take the text: Connection refused"
    )


def test_a_socket_that_is_full_is_given_up_in_time(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox(tmp_path / "inbox.sock", deaf=True)
    has(inbox.path, monkeypatch)
    monkeypatch.setattr(rungs, "SOCKET_S", 0.2)
    waiting = []
    while True:  # fill its queue
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        waiting.append(peer)
        try:
            peer.connect(inbox.path)
        except BlockingIOError:
            break
    assert failure(ClaudeInbox(), target(bob)).startswith("the socket does not take the text")
    for peer in (*waiting, inbox):
        peer.close()


def test_answers_that_are_not_understood_are_passed_over(
    bob: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "inbox.sock"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def talk() -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(1 << 16)
            peer.sendall(b'garbage\n[1]\n{"orig_msg_id": "other", "status": "denied"}\n\xff\xfe\n')

    thread = threading.Thread(target=talk)
    thread.start()
    has(str(path), monkeypatch)
    assert ClaudeInbox().ring(target(bob), TEXT) == "posted"
    thread.join()
    server.close()


# -- codex-queue ---------------------------------------------------------------------------


def test_codex_queues_the_text_for_the_thread(eve: Cli, tmp_path: Path) -> None:
    program(tmp_path, "codex", f'printf "%s\\n" "$@" > {tmp_path}/said; echo queued as q-7')
    assert CodexQueue().ring(target(eve), TEXT) == "queued: queued as q-7"
    words = (tmp_path / "said").read_text().splitlines()
    assert words == ["queue", "--thread", "eve-1", "--message", TEXT]


def test_a_run_of_codex_exec_is_not_rung_by_its_queue(eve: Cli, tmp_path: Path) -> None:
    program(tmp_path, "codex", "exit 0")
    assert CodexQueue().missing(target(eve)) == ""
    words = ["sh", "-c", "read line", "exec", "do it"]  # `codex exec "do it"`
    with subprocess.Popen(words, stdin=subprocess.PIPE) as run:
        until(lambda: words_of(run.pid)[:1] == ["sh"])
        eve.session.pid, eve.session.pid_start = run.pid, started_at(run.pid)
        lost = "what is queued for its thread is lost"
        until(lambda: lost in CodexQueue().missing(target(eve)))  # the kernel shows its words soon


def test_codex_that_hangs_is_ended_with_what_it_started(
    eve: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    program(tmp_path, "codex", f"sleep 1000 & echo $! > {file}.new; mv {file}.new {file}; wait")
    # Its time begins at 0, however late, and is over when it has started what it starts.
    begins = iter([0.0])
    now = SimpleNamespace(monotonic=lambda: next(begins, 10.0 * file.exists()), sleep=time.sleep)
    monkeypatch.setattr(rungs, "time", now)
    assert failure(CodexQueue(), target(eve)) == "codex did not end in 10 s"
    child = int(file.read_text())
    until(lambda: not rungs.runs(child, None))


def test_codex_that_leaves_a_child_with_its_output_is_not_waited_for(
    eve: Cli, tmp_path: Path
) -> None:
    program(tmp_path, "codex", f"sleep 1000 & echo $! > {tmp_path}/pid; echo q-8")
    assert CodexQueue().ring(target(eve), TEXT) == "queued: q-8"
    child = int((tmp_path / "pid").read_text())
    assert rungs.runs(child, None)
    os.kill(child, signal.SIGKILL)


def test_without_codex_the_rung_does_not_apply(
    eve: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert CodexQueue().missing(target(eve)) == "codex is not in PATH"
    assert failure(CodexQueue(), target(eve)).startswith("codex cannot be started")


def test_codex_that_loses_the_text_is_asked_again_later_and_the_message_stays(
    eve: Cli, tmp_path: Path
) -> None:
    """Exit 0 is no evidence; another text is queued after two minutes at the earliest."""
    program(tmp_path, "codex", f"echo x >> {tmp_path}/calls")
    eve.bell()
    message = eve.drop()
    until(lambda: (one := eve.memory) and one.again_s)  # that ring is over
    eve.drop(PRIORITY=0)
    time.sleep(0.5)
    assert (tmp_path / "calls").read_text() == "x\n"
    assert (eve.root / "agents" / "eve" / "inbox" / f"{message}.msg").exists()
    memory = eve.memory
    assert memory is not None and (memory.again_s, memory.count) == (120, 1)


# -- resume --------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Bob was a headless claude, and has ended."""
    program(tmp_path, "claude", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with cli(tmp_path / "home") as made:
        made.process.kill()
        made.process.wait()
        yield made


def test_an_ended_claude_goes_on_with_the_text(
    ended: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDECODE", "1")  # the bell was started by another session
    said = '"$@" "$AGENT_RELAY_NAME" "${CLAUDECODE-no session}"'
    script = f'printf "%s\\n" {said} > {tmp_path}/said'
    program(tmp_path, "claude", script + """; echo '{"is_error": false, "session_id": "bob-2"}'""")
    asked = target(ended, rung="resume")
    assert Resume().missing(asked) == ""
    assert Resume().ring(asked, TEXT) == "the run ended with exit 0"
    words = (tmp_path / "said").read_text().splitlines()
    form = ["--output-format", "json"]
    assert words == ["-p", TEXT, "--resume", "bob-1", *form, "bob", "no session"]
    assert ended.session.session_id == "bob-2"


def test_a_claude_that_reports_an_error(ended: Cli, tmp_path: Path) -> None:
    program(tmp_path, "claude", """echo '{"is_error": true}'""")
    asked = target(ended, rung="resume")
    assert failure(Resume(), asked) == "claude exited 0 and reported an error"
    program(tmp_path, "claude", "echo hello")
    assert failure(Resume(), asked) == "claude exited 0, and its answer is not valid JSON"


def test_an_ended_codex_goes_on_with_the_text(ended: Cli, tmp_path: Path) -> None:
    program(tmp_path, "codex", f'printf "%s\\n" "$@" > {tmp_path}/said')
    ended.session.harness = "codex"
    assert Resume().ring(target(ended, rung="resume"), TEXT) == "the run ended with exit 0"
    assert (tmp_path / "said").read_text().splitlines() == ["exec", "resume", "bob-1", TEXT]


def test_a_bell_stays_for_resume_when_its_session_has_ended(bob: Cli, tmp_path: Path) -> None:
    program(tmp_path, "claude", "echo '{}'")
    bob.wake('{"rung": "resume"}')
    bell = bob.bell(f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    bob.process.kill()
    bob.process.wait()
    bob.drop()
    (result,) = until(bob.results)
    assert result == "resume: rang: the run ended with exit 0"
    assert bell.poll() is None


# -- command -------------------------------------------------------------------------------


def test_a_command_that_fails_says_so(bob: Cli) -> None:
    command = target(bob, "sh", "-c", r"printf 'nothing \033[31m to ring' >&2; exit 9")
    says = r"sh ended with exit 9: nothing \x1b[31m to ring"
    assert failure(CommandRung(), command) == says
    assert failure(CommandRung(), target(bob, "/no/such")) == (
        "/no/such cannot be started: No such file or directory"
    )


def test_a_bell_for_an_agent_without_a_session(bob: Cli, tmp_path: Path) -> None:
    """``relay bell --as NAME`` rings until it is ended; a message that was taken is an answer."""
    bob.wake(f'{{"argv": ["sh", "-c", "echo x >> {tmp_path}/rung"]}}')
    code = f"import sys; sys.path.insert(0, {PACKAGE!r}); from relay.reach import bell, ringing;"
    code += " ringing.PAUSES_S = (3600,);"  # without an answer it would ring in an hour
    code += f" sys.exit(bell.main(['--home', {str(bob.root)!r}, '--as', 'bob']))"
    bell = subprocess.Popen([sys.executable, "-c", code])
    first = bob.drop()
    until(lambda: (tmp_path / "rung").exists())
    bob.take(first)
    bob.drop()
    until(lambda: (tmp_path / "rung").read_text() == "x\nx\n")
    bell.kill()
    bell.wait()
