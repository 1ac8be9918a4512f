"""relay.sh uses the home that every other part of the project uses, under every shell here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.base.test_discovery import link_work_tree, make_home
from tests.shells import RELAY_SH, SHELLS


class Layout(NamedTuple):
    """Where there are homes, below the person's directory, and what else there is."""

    homes: str = ""  # folders with one
    tree: str = ""  # another work tree of the project, in which the person works
    pointer: str = "{}"  # how it names the project
    folder: str = ""  # one of the project
    git: str = ""  # what src/.git points to
    link: str = ""  # the folder whose home the project's own is a link to
    mode: int = 0  # of the project's home

    def lay(self, me: Path, project: Path) -> None:
        """Make all of it."""
        for folder in self.homes.split():
            make_home(me / folder)
        if self.tree:
            link_work_tree(project, me / self.tree, self.pointer)
        if self.folder:
            (project / self.folder).mkdir(parents=True)
        if self.git:
            (project / "src/.git").write_text(f"gitdir: {self.git}\n")
        if self.link:
            (project / ".agent-relay").symlink_to(me / self.link / ".agent-relay")
        if self.mode:
            (project / ".agent-relay").chmod(self.mode)


OWN = "work/project"
LAYOUTS = {
    "nothing": Layout(),
    "above": Layout(OWN),
    "here": Layout(f"{OWN} {OWN}/src/deep"),
    "own directory only": Layout(". .."),
    "empty folder between": Layout(OWN, folder="src/.agent-relay"),
    "work tree": Layout(OWN, "../other/tree"),
    "work tree by a relative path": Layout(OWN, "work/tree", "../project/.git/worktrees/tree"),
    "work tree and one beside it": Layout("work ../other", "../other/tree"),
    "submodule": Layout(OWN, folder=".git/modules/src", git="../.git/modules/src"),
    "broken pointer": Layout(OWN, git="/nowhere"),
    "root": Layout(),
    "link": Layout("../other", link="../other"),
    "open to others": Layout(OWN, mode=0o755),
}
SHOWN = '. "$RELAY_SH"; (_relay_settle; _relay_home ""; printf "%s\\n" "$home")'
BY_PYTHON = "from relay.base.discovery import default_root; print(default_root())"


class Person:
    """Somebody with a project, who works in one directory of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "me/work/project"
        (self.project / "src/deep").mkdir(parents=True)
        self.cwd: Path | str = self.project / "src/deep"

    def run(self, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the directory, as the agent bob."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "me"),
            "PYTHONPATH": str(RELAY_SH.parents[1]),
            "RELAY_SH": str(RELAY_SH),
            "AGENT_RELAY_NAME": "bob",
            "RELAY_NO_WAIT": "1",
            **more,
        }
        return subprocess.run(command, cwd=self.cwd, env=env, capture_output=True, text=True)


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    return [*SHELLS[request.param], "-c"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shell_chooses_what_python_chooses(name: str, person: Person) -> None:
    layout, me = LAYOUTS[name], person.folder / "me"
    layout.lay(me, person.project)
    if layout.tree:
        person.cwd = (me / layout.tree).resolve()
    elif name == "root":
        person.cwd = "/"
    wanted = person.run([sys.executable, "-c", BY_PYTHON])
    for shell in SHELLS.values():
        done = person.run([*shell, "-c", SHOWN])
        assert done.stdout == wanted.stdout, shell
        if wanted.returncode:  # refused
            link = f"relay: {person.project}/.agent-relay is a link, another"
            assert (done.returncode, done.stderr.count("\n")) == (1, 1), shell
            assert done.stderr.startswith(link), shell
        else:
            assert (done.returncode, done.stderr) == (0, ""), shell


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_home_of_another_user_is_refused(person: Person, shell: list[str]) -> None:
    os.chown(make_home(person.project), 12345, 12345)
    done = person.run([*shell, '. "$RELAY_SH"; relay_send alice hi'])
    assert (done.returncode, done.stdout) == (1, "")
    assert "another user's" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_named_home_of_another_user_is_left_as_it_is(person: Person, shell: list[str]) -> None:
    """Its relay would ignore an agent of this user, and what is taken counts as read."""
    home = make_home(person.folder / "other")
    os.chown(home, 12345, 12345)
    for call in ("relay_send alice hi", "relay_recv"):
        done = person.run([*shell, f'. "$RELAY_SH"; {call}'], AGENT_RELAY_DIR=str(home))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"relay: {home} belongs to another user: be that user\n"
    assert [path.name for path in home.iterdir()] == ["config.json"]


def test_without_a_home_directory_no_home_is_guessed(person: Person, shell: list[str]) -> None:
    done = person.run([*shell, '. "$RELAY_SH"; cd /; unset HOME; relay_send alice hi'])
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == "relay: HOME is not set: set it, or AGENT_RELAY_DIR\n"


def test_nothing_is_taken_while_two_homes_are_meant(person: Person, shell: list[str]) -> None:
    found, mine = make_home(person.project), make_home(person.folder / "mine")
    inbox = mine / "agents/bob/inbox"
    inbox.mkdir(parents=True)
    (inbox / "1706123456789012345-a1b2c3d4.msg").write_text("FROM: alice\n\nhello\n")
    script, pin = '. "$RELAY_SH"; relay_recv', {"AGENT_RELAY_DIR": str(mine)}
    done = person.run([*shell, script], **pin)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"relay: AGENT_RELAY_DIR is {mine}, but there is {found}: unset it, or work elsewhere\n"
    )
    assert list(inbox.glob("*.msg"))
    sent = person.run([*shell, '. "$RELAY_SH"; relay_send alice hi'], **pin)
    assert (sent.returncode, sent.stderr) == (0, "")  # a message that is sent is not lost
    started = person.run([*shell, script], **pin, AGENT_RELAY_SPAWN="1706123456789012345-b2")
    assert (started.returncode, "hello" in started.stdout) == (0, True)


def test_a_shell_on_another_file_system_does_not_search_this_one(
    person: Person, shell: list[str]
) -> None:
    make_home(person.project)
    fake = person.folder / "bin/stat"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 1\necho 2\n")
    fake.chmod(0o755)
    path = f"{fake.parent}:{os.environ['PATH']}"
    script = SHOWN if shell[0] != shutil.which("busybox") else f'stat() {{ "{fake}"; }}; {SHOWN}'
    done = person.run([*shell, script], PATH=path)
    assert done.stdout == f"{person.folder}/me/.agent-relay\n"
