"""Which home a process uses, and the search for one upwards from the working directory.

    --home, or the argument of the library
    $AGENT_RELAY_DIR
    the nearest .agent-relay/config.json in the working directory or above it
    ~/.agent-relay

The search ends below the user's home directory and at the border of a file system. From the top of
a linked git work tree it goes on in the main work tree, so that all work trees of a repository have
one home. A home that was found so is used only if it is a directory of this user that others cannot
enter: a checked-out or unpacked ``.agent-relay`` usually is not.

Hooks do this for each tool call of an agent: it imports only ``os`` and ``stat``, starts no
process, and makes about three system calls for a directory.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # typing is not loaded for it
if TYPE_CHECKING:
    from relay.base.errors import TwoHomes

HOME_VARIABLE = "AGENT_RELAY_DIR"
SPAWN_VARIABLE = "AGENT_RELAY_SPAWN"  # only in processes that a relay started
FOLDER = ".agent-relay"
DEFAULT_HOME = f"~/{FOLDER}"
CONFIG = "config.json"
IGNORED = ".gitignore"  # of everything, in a home inside a project
MOST_POINTER_BYTES = 4096  # of a .git file, and of a commondir

GIVEN = "--home"
PINNED = f"${HOME_VARIABLE}"
FOUND = "search"
DEFAULT = "default"


class Found:
    """A home that the search found, used or refused."""

    __slots__ = ("how", "problem", "root")

    def __init__(self, root: str, how: str) -> None:
        self.root = root
        self.how = how  # where it was, in words
        self.problem = ""  # why it is refused
        try:
            seen = os.lstat(root)
        except OSError as exc:
            self.problem = f"cannot be examined: {exc.strerror}"
            return
        if stat.S_ISLNK(seen.st_mode):
            self.problem = "is a symbolic link"
        elif seen.st_uid != os.geteuid():
            self.problem = f"belongs to user {seen.st_uid}"
        elif seen.st_mode & 0o077:
            self.problem = f"is open to other users, mode {stat.S_IMODE(seen.st_mode):o}"


class Choice:
    """The home of this process, and the rule that chose it."""

    __slots__ = ("found", "root", "rule")

    def __init__(self, root: str, rule: str, found: Found | None = None) -> None:
        self.root = os.path.abspath(root)
        self.rule = rule
        self.found = found  # what the search found, where it decides


def choose(given: str | None = None) -> Choice:
    """Choose the home by the rules above; a refused one is chosen, but not opened.

    Errors: those of ``user_home`` where its home is the default.
    """
    if given:
        return Choice(given, GIVEN)
    if pin := os.environ.get(HOME_VARIABLE):
        return Choice(pin, PINNED)
    if found := search():
        return Choice(found.root, FOUND, found)
    return Choice(os.path.join(user_home(), FOLDER), DEFAULT)


def default_home() -> str:
    """The path of ``~/.agent-relay``."""
    return os.path.abspath(os.path.expanduser(DEFAULT_HOME))


def user_home() -> str:
    """The user's home directory. Errors: HomeMissing where neither $HOME nor the system has it."""
    path = os.path.expanduser("~")
    if not os.path.isabs(path):
        from relay.base.errors import HomeMissing

        text = "the home directory of this user is not known"
        raise HomeMissing(text, hint=f"set HOME, or name a relay home with --home or {PINNED}")
    return path


def default_root(given: str | None = None) -> str:
    """The path of the home of this process.

    Errors: those of ``choose``; UnsafePath when the search decides, and what it found is refused.
    """
    choice = choose(given)
    if choice.found and choice.found.problem:
        from relay.base.errors import UnsafePath

        hint = f"`chmod 700 {choice.root}` if you made it; --home or {PINNED} names another home"
        if "open to" not in choice.found.problem:
            hint = f"name the home with --home or {PINNED}"
        text = f"{choice.root}, {choice.found.how}, {choice.found.problem}: it is not used"
        raise UnsafePath(text, hint=hint)
    return choice.root


def other_home() -> Found | None:
    """The home that the search finds where ``$AGENT_RELAY_DIR`` names a different one.

    None unless both exist. None in a process that a relay started: it was given that relay's home.
    """
    pin = os.environ.get(HOME_VARIABLE)
    if not pin or SPAWN_VARIABLE in os.environ or not has_config(pin):
        return None
    found = search()
    if found is None or found.problem or _is_same(pin, found.root):
        return None
    return found


def two_homes() -> TwoHomes | None:
    """The error for a process that would take messages, but has two homes to take them from."""
    other = other_home()
    if other is None:
        return None
    from relay.base.errors import TwoHomes

    pin = os.path.abspath(os.environ[HOME_VARIABLE])
    return TwoHomes(
        f"{PINNED} names {pin}, but {other.root} is {other.how}: messages may wait in either",
        hint=f"name one with --home (in Python: home=…), or unset {HOME_VARIABLE}",
    )


def search(start: str | None = None) -> Found | None:
    """Find the nearest home in ``start``, the working directory by default, or above it.

    The user's home directory is not looked at: its home is the default.
    """
    try:
        top = start = os.path.abspath(start or os.getcwd())
        device = os.stat(top).st_dev
    except OSError:  # the working directory was removed
        return None
    limit = os.path.expanduser("~")
    linked = main = ""
    while True:
        try:
            seen = os.stat(top)
        except OSError:
            return None
        if seen.st_dev != device or _is_same(top, limit):
            return None
        root = os.path.join(top, FOLDER)
        if has_config(root):
            return Found(root, _describe(top, start, linked, main))
        if not linked and (main := main_work_tree(top) or ""):
            linked, top, device = top, main, _device_of(main)
            continue
        parent = os.path.dirname(top)
        if parent == top:
            return None
        top = parent


def main_work_tree(top: str) -> str | None:
    """The main work tree of the linked git work tree at ``top``; None for any other directory.

    Also None where the repository is bare, and for a submodule: it has no ``commondir``.
    """
    folder = _pointer(os.path.join(top, ".git"), "gitdir: ")
    if folder is None:
        return None
    folder = os.path.join(top, folder)
    common = _pointer(os.path.join(folder, "commondir"))
    if common is None:
        return None
    main, name = os.path.split(os.path.normpath(os.path.join(folder, common)))
    return main if name == ".git" and os.path.isdir(main) else None


def _pointer(path: str, prefix: str = "") -> str | None:
    """Read the path in a file of git; None without such a file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, "rb") as file:
            text = os.fsdecode(file.read(MOST_POINTER_BYTES)).rstrip("\r\n")
    except OSError:
        return None
    is_valid = text.startswith(prefix) and "\0" not in text and "\n" not in text
    return text[len(prefix) :] or None if is_valid else None


def has_config(root: str) -> bool:
    """Test for a home; a directory that cannot be entered counts as one."""
    try:
        os.lstat(os.path.join(root, CONFIG))
    except PermissionError:
        return os.path.lexists(root)
    except OSError:
        return False
    return True


def _is_same(first: str, second: str) -> bool:
    try:
        return os.path.samestat(os.stat(first), os.stat(second))
    except OSError:
        return False


def _device_of(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def _describe(top: str, start: str, linked: str, main: str) -> str:
    """Tell in words where a home was found; ``linked``: the work tree that led to ``main``."""
    if linked:
        return f"{'in' if top == main else 'above'} the main work tree of {linked}"
    return "in the working directory" if top == start else f"above {start}"


def with_home(text: str, root: str) -> str:
    """Add --home to the commands in a text: those in backticks, or one that is the whole text."""
    import re
    import shlex

    command = r"(^|`)relay (?=[a-z])(?!dump\b|sh\b|help\b|[a-z ]+ --help)"
    named = f"relay --home {shlex.quote(root)} "
    return re.sub(command, lambda found: found[1] + named, text)
