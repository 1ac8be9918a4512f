"""Real processes, started, found, watched and ended; never one that is not ours."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.agents.requests import Spec
from relay.agents.spawner import CannotStart, ExitStatus, Pid, SystemSpawner, describe_exit
from relay.base import fsio
from tests.box import open_descriptors
from tests.procs import until

REQUEST = "1769851800000000000-01"


class Starts:
    """Processes of a test, ended with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spawner = SystemSpawner()
        self.pids: list[Pid] = []

    def start(self, *argv: str, cwd: str = "/", **env: str) -> Pid:
        folder = os.open(self.root, os.O_RDONLY)
        lock_fd = fsio.take_lock("w.lock", folder)
        output_fd = fsio.open_append("w.log", folder)
        assert lock_fd is not None
        spec = Spec(REQUEST, "operator", "w", "x", argv, env, cwd, "never")
        try:
            pid = self.spawner.start(spec, str(self.root), lock_fd, output_fd)
        finally:
            for fd in (lock_fd, output_fd, folder):
                os.close(fd)
        self.pids.append(pid)
        return pid

    def sh(self, script: str, **env: str) -> Pid:
        return self.start("sh", "-c", script, **env)

    def wait(self, pid: Pid) -> ExitStatus:
        until(lambda: self.spawner.exit_status(pid))
        found = self.spawner.exit_status(pid)
        assert found is not None
        return found

    @property
    def is_locked(self) -> bool:
        folder = os.open(self.root, os.O_RDONLY)
        fd = fsio.take_lock("w.lock", folder)
        os.close(folder)
        if fd is not None:
            os.close(fd)
        return fd is None

    @property
    def output(self) -> str:
        return (self.root / "w.log").read_text()


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    made = Starts(tmp_path)
    yield made
    for pid in made.pids:
        made.spawner.signal(pid, signal.SIGKILL)
        until(lambda pid=pid: made.spawner.exit_status(pid) and not made.spawner.others(pid))  # type: ignore[misc]
        made.spawner.reap(pid)


def test_it_knows_who_it_is_and_has_nothing_to_read(starts: Starts, tmp_path: Path) -> None:
    script = (
        "import os, sys; print(sys.stdin.read() == '', os.getsid(0) == os.getpid(), "
        "os.environ['AGENT_RELAY_NAME'], os.environ['AGENT_RELAY_DIR'], os.environ['A'], "
        "os.getcwd(), sys.argv[1:]); print('to stderr', file=sys.stderr)"
    )
    pid = starts.start(sys.executable, "-c", script, "$HOME; x", cwd=str(tmp_path), A="1")
    assert starts.wait(pid) == ExitStatus(0)
    said = sorted(starts.output.splitlines())
    assert said == [f"True True w {tmp_path} 1 {tmp_path} ['$HOME; x']", "to stderr"]


def test_it_finds_relay_whatever_the_path_of_the_relay_itself(starts: Starts) -> None:
    """A service starts with a PATH that has no virtual environment."""
    starts.spawner = SystemSpawner({"PATH": "/usr/bin:/bin"})
    starts.wait(starts.sh("command -v relay; echo $PATH"))
    program = Path(sys.executable).with_name("relay")
    assert starts.output.splitlines() == [str(program), f"/usr/bin:/bin:{program.parent}"]


def test_it_is_no_part_of_the_session_in_which_the_relay_was_started(starts: Starts) -> None:
    marks = {"CLAUDECODE": "1", "CLAUDE_CODE_CHILD_SESSION": "1", "CODEX_THREAD_ID": "t"}
    settings = {"CLAUDE_CODE_USE_BEDROCK": "1", "CODEX_HOME": "/codex"}
    starts.spawner = SystemSpawner({"PATH": os.environ["PATH"], **marks, **settings})
    starts.wait(starts.sh("env | grep -E 'CLAUDE|CODEX' | sort", CLAUDE_EFFORT="high"))
    assert starts.output.splitlines() == [
        "CLAUDE_CODE_USE_BEDROCK=1", "CLAUDE_EFFORT=high", "CODEX_HOME=/codex",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("exit 0", 0, "exited with code 0"),
        ("exit 3", 3, "exited with code 3"),
        ("kill -KILL $$", -9, "was ended by SIGKILL"),
    ],
)
def test_its_code_is_known_and_asked_for_again(
    starts: Starts, script: str, code: int, words: str
) -> None:
    pid = starts.sh(script)
    assert starts.wait(pid) == ExitStatus(code)
    assert starts.spawner.exit_status(pid) == ExitStatus(code)
    assert starts.spawner.is_own(pid)
    starts.spawner.reap(pid)
    assert not starts.spawner.is_own(pid)
    assert starts.spawner.exit_status(pid) == ExitStatus(None)  # nobody knows any more
    assert describe_exit(code) == words
    assert describe_exit(None) == "ended, its exit code is not known"


def test_it_holds_the_lock_as_long_as_it_lives(starts: Starts) -> None:
    pid = starts.sh("sleep 60")
    assert starts.is_locked
    starts.spawner.signal(pid, signal.SIGTERM)
    assert starts.wait(pid) == ExitStatus(-signal.SIGTERM)
    until(lambda: not starts.is_locked)  # its child, which ends by itself, holds it, too


def test_it_is_found_by_its_request_alone(starts: Starts, tmp_path: Path) -> None:
    pid = starts.sh("sleep 60 & sleep 60")
    # the kernel shows the new environment an instant after it says that the program began
    until(lambda: starts.spawner.find(REQUEST, str(tmp_path)) == pid)
    assert starts.spawner.find(REQUEST + "0", str(tmp_path)) is None
    assert starts.spawner.find(REQUEST, str(tmp_path / "other")) is None
    starts.spawner.signal(pid, signal.SIGKILL)
    starts.wait(pid)
    assert starts.spawner.find(REQUEST, str(tmp_path)) is None


def test_a_signal_reaches_all_of_its_session(starts: Starts) -> None:
    script = "import os, sys, time; os.setpgid(0, 0); print('up', flush=True); time.sleep(60)"
    pid = starts.sh(f'{shlex.quote(sys.executable)} -c "{script}" & sleep 60')
    until(lambda: starts.output == "up\n")  # in a group of its own, in the same session
    until(lambda: len(starts.spawner.others(pid)) == 2)
    assert starts.spawner.usage([pid])[pid].rss_bytes > 1 << 20
    starts.spawner.signal(pid, signal.SIGTERM)
    starts.wait(pid)
    until(lambda: not starts.spawner.others(pid))
    assert starts.spawner.usage([pid]) == {}


def test_what_it_leaves_behind_is_found_and_ended(starts: Starts) -> None:
    pid = starts.sh("sleep 60 & exit 0")
    assert starts.wait(pid) == ExitStatus(0)
    assert len(starts.spawner.others(pid)) == 1
    starts.spawner.signal(pid, signal.SIGTERM)
    until(lambda: not starts.spawner.others(pid))


def test_a_number_that_was_given_again_belongs_to_another(starts: Starts) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        try:
            taken = Pid(other.pid, "another boot 1")
            starts.spawner.signal(taken, signal.SIGKILL)
            assert starts.spawner.others(taken) == []
            assert starts.spawner.usage([taken]) == {}
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (("no-such-program", "hunter2"), "/", "there is no program no-such-program: add it to"),
        (("/etc/passwd", "hunter2"), "/", "/etc/passwd cannot be run: Permission denied: `chmod"),
        (("/", "hunter2"), "/", "/ cannot be run: Permission denied"),
        (("sh", "hunter2"), "/nowhere", "WORKING_DIR /nowhere cannot be entered: No such file"),
        (("sh", "hunter2" * 100_000), "/", "sh cannot be run: Argument list too long, an a"),
    ],
)
def test_what_cannot_be_started_says_why(
    starts: Starts, argv: tuple[str, ...], cwd: str, said: str
) -> None:
    with pytest.raises(CannotStart) as caught:
        starts.start(*argv, cwd=cwd, A="hunter2")
    assert str(caught.value).startswith(said)
    assert "hunter2" not in str(caught.value)
    assert not starts.is_locked


@pytest.mark.parametrize(
    ("first_line", "said"),
    [
        ("echo hi", "Exec format error: a script begins with a line that names its program"),
        ("#!/no/such/program", "the interpreter in its first line (#!…) is missing"),
    ],
)
@pytest.mark.parametrize("by", ["its path", "a path in the directory"])
def test_a_script_that_does_not_begin_as_one_is_named(
    starts: Starts, tmp_path: Path, first_line: str, said: str, by: str
) -> None:
    script = tmp_path / "script"
    script.write_text(f"{first_line}\n")
    script.chmod(0o755)
    program = str(script) if by == "its path" else "./script"
    with pytest.raises(CannotStart) as caught:
        starts.start(program, cwd=str(tmp_path))
    assert str(caught.value).startswith(f"{program} cannot be run: {said}")


def test_who_cannot_be_looked_at_has_not_ended() -> None:
    """One that a relay before this one started: taken for ended, it would be started twice."""
    spawner, parent = SystemSpawner(), os.getppid()
    pid = Pid(parent, spawner._start_of(parent) or "")
    assert spawner.exit_status(pid) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_descriptors()  # nothing is closed meanwhile
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        with pytest.raises(OSError) as caught:
            spawner.exit_status(pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
    assert spawner.exit_status(pid) is None
