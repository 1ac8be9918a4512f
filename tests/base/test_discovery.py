"""Which home a process uses: --home, the environment, the search upwards, the default."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relay.base import discovery
from relay.base.discovery import (
    HOME_VARIABLE,
    SPAWN_VARIABLE,
    choose,
    default_root,
    main_work_tree,
    other_home,
    search,
)
from relay.base.errors import HomeMissing, UnsafePath
from tests.procs import environment

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def make_home(folder: Path) -> Path:
    """A home in ``folder``, as far as the search looks at it."""
    home = folder / ".agent-relay"
    home.mkdir(mode=0o700, parents=True)
    (home / "config.json").write_text("{}")
    return home


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which a person works, two folders deep."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    project = tmp_path / "me/work/project"
    (project / "src/deep").mkdir(parents=True)
    monkeypatch.chdir(project / "src/deep")
    return project


def found() -> tuple[str, str]:
    one = search()
    assert one is not None
    return one.root, one.how


# -- upwards -------------------------------------------------------------------------------


def test_without_any_home_the_default_is_chosen(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert search() is None
    choice = choose()
    assert (choice.root, choice.rule) == (str(tmp_path / "me/.agent-relay"), "default")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))  # which is not there
    assert search() is None


def test_a_user_without_a_home_directory_names_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as a number: nothing is written into a folder named ~."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    for choose_one in (choose, discovery.user_home):
        with pytest.raises(HomeMissing, match="home directory of this user is not known") as told:
            choose_one()
        assert told.value.hint.startswith("set HOME, or name a relay home with --home or $AGENT_")
    assert choose(str(tmp_path / "named")).root == str(tmp_path / "named")


def test_the_nearest_home_above_is_found(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(project)
    assert found() == (str(home), f"above {project}/src/deep")
    assert default_root() == str(home)
    assert choose().rule == "search"
    nearest = make_home(project / "src")
    assert found()[0] == str(nearest)
    monkeypatch.chdir(project / "src")
    assert found() == (str(nearest), "in the working directory")


def test_argument_and_environment_win(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(project)
    monkeypatch.setenv(HOME_VARIABLE, "from/env")
    assert default_root() == f"{project}/src/deep/from/env"
    assert choose().rule == "$AGENT_RELAY_DIR"
    assert default_root("given") == f"{project}/src/deep/given"
    monkeypatch.setenv(HOME_VARIABLE, "")
    assert default_root() == str(home)


def test_a_persons_own_directory_and_what_is_above_are_not_searched(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_home(tmp_path)
    make_home(tmp_path / "me")
    assert search() is None
    assert choose().rule == "default"
    (tmp_path / "also-me").symlink_to("me")
    monkeypatch.setenv("HOME", str(tmp_path / "also-me"))
    assert search() is None


def test_the_search_ends_with_a_file_system(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_home(project)
    real = os.stat

    def stat(path: str, **more: object) -> os.stat_result:
        """As if src/ were another file system."""
        seen = real(path, **more)  # type: ignore[arg-type]
        if not str(path).startswith(f"{project}/src"):
            return seen
        return os.stat_result([*seen[:2], seen.st_dev + 1, *seen[3:]])

    monkeypatch.setattr(discovery.os, "stat", stat)
    assert search() is None


@pytest.mark.parametrize("rest", ["empty", "a file", "a link to nowhere"])
def test_what_is_not_a_home_is_passed_over(project: Path, rest: str) -> None:
    home = make_home(project)
    other = project / "src/.agent-relay"
    if rest == "empty":
        other.mkdir()
    elif rest == "a file":
        other.write_text("")
    else:
        other.symlink_to("nowhere")
    assert found()[0] == str(home)


def test_a_working_directory_that_was_removed(project: Path) -> None:
    (project / "src/deep").rmdir()
    assert search() is None


# -- refused -------------------------------------------------------------------------------


def test_a_link_is_refused(project: Path, tmp_path: Path) -> None:
    (project / ".agent-relay").symlink_to(make_home(tmp_path / "elsewhere"))
    with pytest.raises(UnsafePath) as caught:
        default_root()
    assert str(caught.value) == (
        f"{project}/.agent-relay, above {project}/src/deep, is a symbolic link: it is not used"
    )
    assert caught.value.hint == "name the home with --home or $AGENT_RELAY_DIR"
    assert default_root("given")


def test_the_home_of_another_user_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_home(project)
    owner = os.geteuid()
    monkeypatch.setattr(discovery.os, "geteuid", lambda: owner + 1)
    with pytest.raises(UnsafePath, match=f"belongs to user {owner}: it is not used"):
        default_root()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter it")
def test_one_that_cannot_be_entered_is_refused(project: Path) -> None:
    home = make_home(project)
    home.chmod(0)
    try:
        assert found()[0] == str(home)  # and not the default instead, where nothing waits
    finally:
        home.chmod(0o700)


def test_a_checked_out_directory_is_refused(project: Path) -> None:
    home = make_home(project)
    home.chmod(0o755)
    with pytest.raises(UnsafePath, match="is open to other users, mode 755") as caught:
        default_root()
    assert caught.value.hint.startswith(f"`chmod 700 {home}` if you made it")


# -- two homes -----------------------------------------------------------------------------


def test_two_homes_are_told(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, home = make_home(tmp_path / "mine"), make_home(project)
    assert other_home() is None  # nothing names another one
    monkeypatch.setenv(HOME_VARIABLE, str(mine))
    other = other_home()
    assert other is not None and other.root == str(home)
    error = discovery.two_homes()
    assert str(error) == (
        f"$AGENT_RELAY_DIR names {mine}, but {home} is above {project}/src/deep:"
        " messages may wait in either"
    )


def test_one_home_is_one(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_home(tmp_path / "me")
    mine = make_home(tmp_path / "mine")
    monkeypatch.setenv(HOME_VARIABLE, str(mine))
    assert other_home() is None  # the default home is not searched for
    home = make_home(project)
    assert other_home() is not None
    home.chmod(0o755)
    assert other_home() is None  # one that is refused disturbs nobody who has another
    home.chmod(0o700)
    (tmp_path / "link").symlink_to(project)
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "link/.agent-relay"))
    assert other_home() is None  # two names of it
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "nothing"))
    assert other_home() is None  # opening it says that it does not exist
    monkeypatch.setenv(HOME_VARIABLE, str(mine))
    monkeypatch.setenv(SPAWN_VARIABLE, "1706123456789012345-a1b2c3d4")
    assert other_home() is None  # what a relay started has its home from it


# -- work trees of git ---------------------------------------------------------------------


def link_work_tree(main: Path, tree: Path, pointer: str = "{}") -> None:
    """Make ``tree`` a linked work tree of ``main``, as `git worktree add` does."""
    folder = main / ".git/worktrees" / tree.name
    folder.mkdir(parents=True)
    tree.mkdir(parents=True)
    (folder / "commondir").write_text("../..\n")
    (tree / ".git").write_text(f"gitdir: {pointer.format(folder)}\n")


@pytest.mark.parametrize("pointer", ["{}", "../../me/work/project/.git/worktrees/fix"])
def test_a_linked_work_tree_has_the_home_of_the_main_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pointer: str
) -> None:
    tree = tmp_path / "trees/fix"
    link_work_tree(project, tree, pointer)  # as of git 2.48 it may be relative
    (tree / "src").mkdir()
    monkeypatch.chdir(tree / "src")
    assert main_work_tree(str(tree)) == str(project)
    make_home(tmp_path / "trees")  # nearer, but not for the main work tree
    above = make_home(project.parent)
    assert found() == (str(above), f"above the main work tree of {tree}")
    home = make_home(project)
    assert found() == (str(home), f"in the main work tree of {tree}")
    own = make_home(tree)
    assert found()[0] == str(own)


def test_a_submodule_is_a_plain_folder(project: Path) -> None:
    home = make_home(project)
    (project / ".git/modules/src").mkdir(parents=True)
    (project / "src/.git").write_text("gitdir: ../.git/modules/src\n")
    assert main_work_tree(str(project / "src")) is None
    assert found() == (str(home), f"above {project}/src/deep")


@pytest.mark.parametrize(
    "text", ["", "gitdir:", "gitdir: ", "gitdir: /nowhere\n", "gitdir: a\nb", "\0", "gitdir: \0"]
)
def test_a_git_file_that_points_nowhere_is_ignored(project: Path, text: str) -> None:
    home = make_home(project)
    (project / "src/.git").write_text(text)
    assert found()[0] == str(home)


def test_work_trees_in_a_circle_end(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for tree, main in ((one, two), (two, one)):
        folder = tmp_path / f"{tree.name}-pointer"
        folder.mkdir()
        tree.mkdir()
        (folder / "commondir").write_text(f"{main}/.git\n")
        (tree / ".git").write_text(f"gitdir: {folder}\n")
    monkeypatch.chdir(one)
    assert search() is None


@needs_git
@pytest.mark.parametrize("kind", ["work tree", "bare"])
def test_by_git(project: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_home(project)

    def git(*words: str) -> None:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", "-C", project, *who, *words], check=True, capture_output=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "begin")
    if kind == "work tree":
        git("worktree", "add", "--quiet", str(tmp_path / "tree"))
        monkeypatch.chdir(tmp_path / "tree")
        assert found() == (str(home), f"in the main work tree of {tmp_path}/tree")
        return
    git("clone", "--quiet", "--bare", ".", str(tmp_path / "bare.git"))
    project = tmp_path / "bare.git"
    git("worktree", "add", "--quiet", str(tmp_path / "tree"))
    monkeypatch.chdir(tmp_path / "tree")
    assert search() is None  # a bare repository has no main work tree


# -- its cost ------------------------------------------------------------------------------


def test_it_loads_nothing_that_python_has_not_loaded_already() -> None:
    code = (
        "import sys, os, stat, relay.base; before = set(sys.modules);"
        "from relay.base.discovery import default_root, other_home; default_root(); other_home();"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["__future__", "relay.base.discovery"]
