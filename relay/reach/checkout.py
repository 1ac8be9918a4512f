"""Several agents in one git work tree: what their sessions are told of each other.

    at its start      who else lives in this work tree, working or idle, and since when
    after a write     that another live session wrote the same file within ``CLASH_NS``: this one in
                      its context, the other and the operator by a message
    before a command  that changes all of the tree (``git_words``): the agent CLI asks its person

Nothing is locked and nothing denied. ``agents.shared_checkout`` in the configuration ends it. Only
before git removes the home of the relay itself, which is ignored by it, a person is always asked.

    sessions/.written   {"written": {agent and path: Unix ns}, "told": {pair and path: Unix ns}}

Killed between the message and this file, the next write tells it again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator

from relay.base.clock import NS_PER_S, elapsed, local_time
from relay.base.discovery import CONFIG
from relay.base.discovery import FOLDER as HOME_FOLDER
from relay.base.errors import RelayError
from relay.base.process_info import words_of
from relay.base.text import visible
from relay.reach.git_words import TreeChange, tree_changes
from relay.reach.report import log
from relay.reach.session import (
    FOLDER,
    IDLE,
    Session,
    load_sessions,
    read_facts,
    replace_file,
    session_lock,
)

MOST_COMMAND = 50_000  # characters; longer ones take too long to read
WRITTEN = ".written"
CLASH_NS = 600 * NS_PER_S
TOLD_NS = 3600 * NS_PER_S
MOST_FILES = 500  # of all agents; the oldest are forgotten
PATCHED = ("*** Update File: ", "*** Add File: ", "*** Delete File: ", "*** Move to: ")
KEEPS_HOME = {"git clean": f"`-e {HOME_FOLDER}`", "git stash": "`-u` in place of `-a`"}
UNATTENDED = ("-p", "--print")  # claude runs without a person: a question would be a refusal


def is_on(root: str) -> bool:
    """False if the configuration ends it; the relay itself tells of one that is damaged."""
    try:
        with open(os.path.join(root, CONFIG), encoding="utf-8") as file:
            return json.load(file)["agents"]["shared_checkout"] is not False
    except (OSError, ValueError, LookupError, TypeError):
        return True


def worktree_of(folder: str) -> str:
    """The top of the git work tree that a directory is in; empty if it is in none."""
    folder = os.path.realpath(folder) if folder else ""
    while folder and not os.path.lexists(os.path.join(folder, ".git")):
        folder = os.path.dirname(folder) if folder != os.path.dirname(folder) else ""
    return folder


def neighbours(sessions: Iterable[Session], tree: str, agent: str) -> list[Session]:
    """The live sessions of other agents in a work tree."""
    others = [session for session in _of_others(sessions, agent) if tree]
    return [session for session in others if worktree_of(session.cwd) == tree]


def _of_others(sessions: Iterable[Session], agent: str) -> Iterator[Session]:
    """Those that run here: a path of another container may be another file."""
    for session in sessions:
        if session.agent not in ("", agent) and session.is_live and not session.is_elsewhere:
            yield session


def who_else(root: str, session: Session, sessions: Iterable[Session]) -> str:
    """The line at a session's start; empty if nobody else lives in its work tree."""
    tree = worktree_of(session.cwd)
    found = neighbours(sessions, tree, session.agent) if is_on(root) else []
    return f"In this checkout, {visible(tree)}, live also {_named(found)}." if found else ""


def question(root: str, session: Session, facts: dict[str, object]) -> str:
    """The reason to ask before a tool call; empty if there is none, or nobody could answer."""
    given = facts.get("tool_input")
    command = given.get("command") if isinstance(given, dict) else None
    if not isinstance(command, str) or len(command) > MOST_COMMAND:
        return ""
    changes = tree_changes(command, str(facts.get("cwd") or session.cwd))
    for change in changes:
        if change.has_ignored and _is_below(root, change):
            return (
                f"agent-relay: `{change.words}` with these options removes the relay's home "
                f"{visible(root)} with all messages; {KEEPS_HOME[change.words]} keeps it"
            )
    if not is_on(root):
        return ""
    is_alone = set(UNATTENDED) & set(words_of(session.pid))
    if not changes or is_alone or facts.get("permission_mode") == "dontAsk":
        return ""
    sessions = load_sessions(root)
    for change in changes:
        tree = worktree_of(change.folder)
        is_all = not change.is_below or os.path.realpath(change.folder) == tree
        if is_all and (others := neighbours(sessions, tree, session.agent)):
            return (
                f"agent-relay: `{change.words}` changes the whole checkout {visible(tree)}, "
                f"in which live also {_named(others)}"
            )
    return ""


def _is_below(root: str, change: TreeChange) -> bool:
    """True if what a command removes is above a home: of the directory, or of the whole tree."""
    folder = os.path.realpath(change.folder)
    top = folder if change.words == "git clean" else worktree_of(folder)
    return bool(top) and os.path.realpath(root).startswith(os.path.join(top, ""))


def _named(sessions: list[Session]) -> str:
    now = time.time_ns()
    return ", ".join(
        f"{one.agent} ({one.state or IDLE} since {local_time(one.state_at or one.bound_at, now)})"
        for one in sessions
    )


# -- files that two have written ----------------------------------------------------------------


def paths_in(tool_input: object, folder: str) -> list[str]:
    """The files that a tool call writes: Claude Code, Gemini CLI, and patches of Codex."""
    if not isinstance(tool_input, dict):
        return []
    named = [tool_input.get("file_path"), tool_input.get("notebook_path")]
    for text in (tool_input.get("command"), tool_input.get("input")):
        for line in text.splitlines() if isinstance(text, str) else ():
            named += [line[len(mark) :].strip() for mark in PATCHED if line.startswith(mark)]
    paths = [name for name in named if isinstance(name, str) and name and "\0" not in name]
    return [os.path.realpath(os.path.join(folder, path)) for path in dict.fromkeys(paths)]


def wrote(root: str, session: Session, facts: dict[str, object]) -> str:
    """Note the files that a tool call wrote; what is told of others that did. Errors: OSError.

    The others and the operator get a message, once an hour for a pair and a file.
    """
    paths = paths_in(facts.get("tool_input"), str(facts.get("cwd") or session.cwd))
    if not paths or not is_on(root):
        return ""
    now, own, lines = time.time_ns(), session.agent, []
    others = {session.agent for session in _of_others(load_sessions(root), own)}
    with session_lock(root, WRITTEN):
        written, told = _read(root, now)
        for path in paths:
            for other in sorted(others):
                key = "\n".join((*sorted((own, other)), path))
                if (at := written.get(f"{other}\n{path}")) is None or key in told:
                    continue
                try:
                    _tell(root, (own, other), path, at, now)
                except (OSError, RelayError) as exc:  # what waits is shown all the same
                    log(root, f"{other} was not told of {path}: {exc}", event="PostToolUse")
                    continue
                told[key] = now
                lines.append(f"{other} wrote {visible(path)}, too, {elapsed(now - at)} ago.")
            written[f"{own}\n{path}"] = now
        _write(root, written, told)
    return f"agent-relay: {' '.join(lines)}" if lines else ""


def _tell(root: str, pair: tuple[str, str], path: str, at: int, now: int) -> None:
    from agent_sdk import Agent
    from relay.base.names import OPERATOR

    own, other = pair
    times = f"{other} at {local_time(at, now)}, {own} at {local_time(now, now)}"
    body = f"{own} and {other} have both written {visible(path)}: {times}. A hook of {own} says so."
    with Agent(own, root, registers=False) as sender:
        for name in (other, OPERATOR):
            sender.send(name, body, wait=0)


def _read(root: str, now: int) -> tuple[dict[str, int], dict[str, int]]:
    """When agents wrote files, and when pairs were told, as far as it still matters."""
    known = read_facts(os.path.join(root, FOLDER, WRITTEN))
    try:
        spans = {"written": CLASH_NS, "told": TOLD_NS}
        written, told = (
            {str(key): int(at) for key, at in known[name].items() if 0 <= now - at < span}
            for name, span in spans.items()
        )
    except (ValueError, LookupError, TypeError, AttributeError):  # none, or damaged
        return {}, {}
    return written, told


def _write(root: str, written: dict[str, int], told: dict[str, int]) -> None:
    written = dict(sorted(written.items(), key=lambda pair: pair[1])[-MOST_FILES:])
    facts = {"written": written, "told": told}
    replace_file(os.path.join(root, FOLDER, WRITTEN), json.dumps(facts))
