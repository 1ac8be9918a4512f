"""Which command lines change a whole work tree, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.reach.git_words import tree_changes

WHOLE = r"""
git stash
git stash -u
git stash push -m 'my work'
git stash save before lunch
git stash pop
git stash apply stash@{1}
git stash branch later
/usr/bin/git stash
git -C . stash
git -c core.pager=cat stash
git --no-pager stash
A=1 B='2 3' git stash
env A=1 git stash
sudo git stash
git status && git stash
git status; git stash
git status | cat; git stash
false || git stash
(git stash)
echo $(git stash)
if true; then git stash; fi
! git stash
git stash > /dev/null
git stash 2>/dev/null
git stash >log 2>&1 -u
git stash &> log
git status\ngit stash
git stash  # all of it
git checkout main
git checkout -
git checkout HEAD~2
git checkout -b topic
git checkout -B topic origin/main
git checkout -q --detach v1.0
git checkout -f
git checkout main 2>/dev/null
git checkout :/
git checkout -- :/
git checkout HEAD -- :/
git switch main
git switch -c topic
git switch -
git reset
git reset --hard
git reset --hard HEAD~1
git reset --hard $SHA
git reset -q
git reset HEAD^
git reset --soft main
git clean -fd
git clean -f -d -x
git clean --force
git clean -xdf -e keep
git restore :/
git restore --source=main --staged --worktree :/
git restore -s main -- :/
cd sub && git stash
cd /elsewhere; git stash
""".strip().splitlines()
BELOW = """
git checkout .
git checkout -- .
git checkout HEAD -- .
git restore .
git restore --staged .
git restore '*'
git clean -fd .
git stash push -- .
git reset -- .
""".strip().splitlines()
NOT = r"""
git
git status
git log --oneline
git stash list
git stash show -p
git stash drop
git stash create
git stash -p
git stash push a.py
git stash push -m 'my work' -- a.py sub
git stash -- a.py
git checkout
git checkout a.py
git checkout sub
git checkout -- a.py
git checkout -- gone.py
git checkout HEAD a.py
git checkout main -- sub/b.py
git checkout HEAD~1 gone.py
git checkout -p
git checkout --pathspec-from-file=list
git checkout $BRANCH
git checkout "$(git rev-parse HEAD)"
git checkout --help
git switch
git switch -h
git reset a.py
git reset HEAD a.py
git reset -- a.py gone.py
git reset -p
git clean -n
git clean -fdn
git clean -d
git clean -fd sub
git clean -fd -- sub build
git restore a.py
git restore --staged a.py
git restore --source main -- a.py
git restore --pathspec-from-file=list
git restore
git --git-dir=/x/.git stash
git --work-tree /x stash
GIT_WORK_TREE=/x git stash
git -C $HOME/x stash
cd "$DIR" && git stash
cd - && git stash
git commit -m 'git stash'
git commit -m "x; git stash"
echo git stash
echo 'a && git stash'
# git stash
grep 'git reset --hard' notes
git grep stash
gits stash
git-stash
git log | grep stash
cat > x <<'EOF'\ngit stash\nEOF
git stash 'unclosed
git stash "also
relay send bob 'git stash'
sudo -u x git stash
""".strip().splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").touch()
    (tmp_path / "sub/b.py").touch()
    return tmp_path


def test_the_whole_tree(tree: Path) -> None:
    for line in WHOLE:
        found = tree_changes(line.replace("\\n", "\n"), str(tree))
        assert [one.is_below for one in found] == [False], line
        assert found[0].words.split()[1] in line


def test_all_below_a_directory(tree: Path) -> None:
    for line in BELOW:
        found = tree_changes(line, str(tree / "sub"))
        assert [(one.folder, one.is_below) for one in found] == [(str(tree / "sub"), True)], line


def test_nothing_or_some_files(tree: Path) -> None:
    for line in NOT:
        assert tree_changes(line.replace("\\n", "\n"), str(tree)) == [], line


def test_where_it_runs(tree: Path) -> None:
    def folders(line: str) -> list[str]:
        return [one.folder for one in tree_changes(line, "/a/b")]

    assert folders("git stash; cd c && git stash; cd .. && git -C ../x -C y stash") == [
        "/a/b",
        "/a/b/c",
        "/a/x/y",
    ]
    assert folders("git stash; cd $X; git stash") == ["/a/b"]


PIECES = [
    "git stash ",
    "git checkout .",
    "\ngit ",
    "; git stash",
    "cd /",
    *" -.;&|<>()'\"#$\n\\{}=@",
    "A=1 ",
    "é",
]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_no_line_is_an_error(line: str) -> None:
    tree_changes(line, "/")
