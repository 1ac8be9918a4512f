"""Command lines of a shell in which git changes a whole work tree.

    cd sub && GIT_PAGER=cat git -C .. stash -u    is "git stash", in the directory above sub

Words are read as a POSIX shell reads them, and nothing is run. A line that is not understood, or
whose directory only the shell knows, changes nothing as far as this module knows: a question that
is not asked costs less than one that is asked each time.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from relay.base.discovery import FOLDER

PUNCTUATION = "();<>|&\n"
KEYWORDS = frozenset("if then elif else do while until ! { time".split())
WRAPPERS = frozenset("command env exec nice nohup sudo".split())
GLOBAL_VALUES = ("-c", "--namespace", "--config-env")  # options of git before its verb
GLOBAL_FLAGS = (
    "-p",
    "-P",
    "--paginate",
    "--no-pager",
    "--no-optional-locks",
    "--literal-pathspecs",
)
ELSEWHERE = ("--git-dir", "--work-tree", "GIT_DIR", "GIT_WORK_TREE")  # the tree is another one
VALUES = {  # options of a verb that take the next word
    "checkout": ("-b", "-B", "--orphan", "--conflict"),
    "switch": ("-c", "-C", "--create", "--force-create", "--orphan", "--conflict"),
    "stash": ("-m", "--message"),
    "reset": (),
    "clean": ("-e", "--exclude"),
    "restore": ("-s", "--source", "--conflict"),
}
BRANCHES = ("-b", "-B", "--orphan", "--detach", "-d")  # of checkout: no path can follow
STASHES = ("push", "save", "pop", "apply", "branch")  # others leave the work tree as it is
ALL_FROM_TOP = (":/", ":/.", ":/*", ":(top)", ":(top).")
ALL_BELOW = (".", "./", "*", "./*")


class TreeChange(NamedTuple):
    """A git command that changes a whole work tree."""

    words: str  # git and its verb
    folder: str  # where it runs
    is_below: bool = False  # what is in that directory: the whole tree if it is its top
    has_ignored: bool = False  # and removes what git ignores, a home of a relay for example


def tree_changes(line: str, folder: str) -> list[TreeChange]:
    """The commands of a line, begun in that directory, that change a whole work tree."""
    found = []
    try:
        for words in _commands(line):
            if words[0] == "cd":
                folder = _into(folder, words[1] if len(words) > 1 else "~")
            elif (change := _change(words, folder)) is not None:
                found.append(change)
    except ValueError:
        pass
    return found


def _commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command, without keywords and redirections. Errors: ValueError."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    is_target = is_data = False  # of a redirection; a here-document follows the line
    for word in [*lexer, "\n"]:
        if not word or not set(word) <= set(PUNCTUATION):
            if not is_target and (words or word not in KEYWORDS):
                words.append(word)
            is_target = False
        elif set(word) & set("<>") and "(" not in word:
            if words and words[-1].isdecimal():  # 2>
                words.pop()
            is_target = True
            is_data |= word.startswith("<<") and not word.startswith("<<<")
        else:
            if words:
                yield words
            words = []
            if is_data and "\n" in word:
                return


def _into(folder: str, path: str) -> str:
    """The directory after a change into another one. Errors: ValueError if only a shell knows."""
    path = os.path.expanduser(path)
    if path.startswith("-") or set(path) & set("$`*?[~"):
        raise ValueError(path)
    return os.path.normpath(os.path.join(folder, path))


def _change(words: list[str], folder: str) -> TreeChange | None:
    """The change by one command; None if it makes none. Errors: ValueError."""
    left = list(words)
    while left and (
        left[0] in WRAPPERS or (left[0].partition("=")[0].isidentifier() and "=" in left[0])
    ):
        if left.pop(0).startswith(ELSEWHERE):
            return None
    if not left or os.path.basename(left.pop(0)) != "git":
        return None
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option == "-C" and left:
            folder = _into(folder, left.pop(0))
        elif option in GLOBAL_VALUES and left:
            left.pop(0)
        elif option not in GLOBAL_FLAGS:
            return None
    verb = left.pop(0) if left else ""
    if verb not in VALUES:
        return None
    comment = next((at for at, word in enumerate(left) if word.startswith("#")), len(left))
    return _of_verb(verb, left[:comment], folder)


def _of_verb(verb: str, words: list[str], folder: str) -> TreeChange | None:
    options, plain, paths = _split(verb, words)
    flags = {letter for option in options if not option.startswith("--") for letter in option[1:]}
    name = f"git {verb}"
    if {"-h", "--help", "-p", "--patch", "--pathspec-from-file", "-i"} & options or "p" in flags:
        return None
    if verb == "stash":
        if plain and plain[0] not in STASHES:
            return None
        subverb = plain.pop(0) if plain else "push"
        if subverb != "push":
            return TreeChange(name, folder)
        change = _by_paths(name, folder, plain + paths)
        has_ignored = "a" in flags or "--all" in options
        return change and change._replace(has_ignored=has_ignored)
    if verb == "clean":
        is_done = ("f" in flags or "--force" in options) and not (
            "n" in flags or "--dry-run" in options
        )
        change = _by_paths(name, folder, plain + paths) if is_done else None
        has_ignored = bool(flags & {"x", "X"}) and not any(FOLDER in word for word in words)
        return change and change._replace(has_ignored=has_ignored)
    if verb == "restore":
        return _by_paths(name, folder, plain + paths) if plain or paths else None
    if verb == "switch":
        return TreeChange(name, folder) if plain or options else None
    return _checkout_or_reset(name, folder, options, plain, paths)


def _checkout_or_reset(
    name: str, folder: str, options: set[str], plain: list[str], paths: list[str]
) -> TreeChange | None:
    """Commit and paths stand side by side: of one word, a file of that name is a path."""
    if options & {*BRANCHES, "--hard", "--merge", "--keep", "--soft"}:
        return TreeChange(name, folder)
    if paths or len(plain) > 1:
        return _by_paths(name, folder, paths or plain[1:])
    if not plain:
        is_all = name == "git reset" or bool({"-f", "--force"} & options)
        return TreeChange(name, folder) if is_all else None
    (word,) = plain
    if "$" in word or "`" in word:
        return None
    if word in (*ALL_FROM_TOP, *ALL_BELOW):
        return _by_paths(name, folder, plain)
    return None if os.path.lexists(os.path.join(folder, word)) else TreeChange(name, folder)


def _by_paths(name: str, folder: str, paths: list[str]) -> TreeChange | None:
    """Without paths it is the whole tree; with some, only if one of them is everything."""
    if not paths or any(path in ALL_FROM_TOP for path in paths):
        return TreeChange(name, folder)
    return TreeChange(name, folder, True) if any(path in ALL_BELOW for path in paths) else None


def _split(verb: str, words: list[str]) -> tuple[set[str], list[str], list[str]]:
    """Options without their values, other words, and those behind ``--``."""
    options, plain, left = set[str](), list[str](), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return options, plain, left
        if word == "-" or not word.startswith("-"):
            plain.append(word)
            continue
        options.add(word.partition("=")[0] if word.startswith("--") else word)
        if word in VALUES[verb] and left:
            left.pop(0)
    return options, plain, []
