"""relay.sh uses the home that every other part of the project uses, under every shell here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.base.test_discovery import link_work_tree, make_home
from tests.shells import RELAY_SH, SHELLS

Lay = Callable[[Path, Path], Path | str | None]  # (project, elsewhere) -> the directory to work in


def nothing(project: Path, other: Path) -> None:
    """No home anywhere."""


def above(project: Path, other: Path) -> None:
    make_home(project)


def here(project: Path, other: Path) -> None:
    make_home(project)
    make_home(project / "src/deep")


def own_directory_only(project: Path, other: Path) -> None:
    make_home(project.parents[1])
    make_home(project.parents[2])


def empty_folder_between(project: Path, other: Path) -> None:
    make_home(project)
    (project / "src/.agent-relay").mkdir()


def work_tree(project: Path, other: Path) -> Path:
    make_home(project)
    link_work_tree(project, other / "tree")
    return other / "tree"


def work_tree_by_a_relative_path(project: Path, other: Path) -> Path:
    make_home(project)
    link_work_tree(project, project.parent / "tree", "../project/.git/worktrees/tree")
    return project.parent / "tree"


def work_tree_and_one_beside_it(project: Path, other: Path) -> Path:
    make_home(project.parent)
    make_home(other)
    link_work_tree(project, other / "tree")
    return other / "tree"


def submodule(project: Path, other: Path) -> None:
    make_home(project)
    (project / ".git/modules/src").mkdir(parents=True)
    (project / "src/.git").write_text("gitdir: ../.git/modules/src\n")


def broken_pointer(project: Path, other: Path) -> None:
    make_home(project)
    (project / "src/.git").write_text("gitdir: /nowhere\n")


def root(project: Path, other: Path) -> str:
    return "/"


def link(project: Path, other: Path) -> None:
    (project / ".agent-relay").symlink_to(make_home(other))


def open_to_others(project: Path, other: Path) -> None:
    make_home(project).chmod(0o755)


LAYOUTS: tuple[Lay, ...] = (
    nothing,
    above,
    here,
    own_directory_only,
    empty_folder_between,
    work_tree,
    work_tree_by_a_relative_path,
    work_tree_and_one_beside_it,
    submodule,
    broken_pointer,
    root,
    link,
    open_to_others,
)
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


@pytest.mark.parametrize("lay", LAYOUTS, ids=lambda lay: lay.__name__)
def test_a_shell_chooses_what_python_chooses(lay: Lay, person: Person) -> None:
    person.cwd = lay(person.project, person.folder / "elsewhere") or person.cwd
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
