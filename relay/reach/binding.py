"""Bindings: which agent a session is.

    its own name, when it is resumed and no other live session has it
    $AGENT_RELAY_NAME, else --as of the hook's command, else the name of the vendor
    name-2, name-3 … where a live session has that name already, and the context says so

A session that is cleared keeps its name under its new id. A fork is another agent. A name whose
session has died is taken over: what that session was shown and has not seen is offered again.

    sessions/.runs    {agent: [[number, Unix ns of its begin], …]}, the last ``RUNS_KEPT``
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from relay.base.process_info import pid_namespace, program_of
from relay.reach.session import (
    FOLDER,
    Session,
    changing,
    load_session,
    load_sessions,
    read_facts,
    remove_session,
    replace_file,
    save_session,
    session_lock,
)

if TYPE_CHECKING:
    from relay.base.home import Home

RUNS = ".runs"
RUNS_KEPT = 32
KEPT_NS = 30 * 86_400 * 10**9  # sessions that ended longer ago are forgotten
SHELLS = frozenset(
    "sh bash dash zsh ksh fish busybox ash env nice timeout setsid stdbuf npx".split()
)
CLEARED = "the context was cleared"
DIED = "its session ended"


def bind(
    root: str, harness: str, session_id: str, *, source: str, wanted: str, cwd: str, transcript: str
) -> str:
    """Bind a session to an agent, whose mailbox is made if needed; the text that greets it.

    source: why it starts: startup, resume, clear, compact, fork; empty at a later event.
    Errors: OSError, RelayError.
    """
    pid, pid_start = agent_process()
    with session_lock(root):
        others = [session for session in load_sessions(root) if session.session_id != session_id]
        session = Session(harness, session_id)
        with session_lock(root, session.file):
            known = load_session(root, harness, session_id)
            session = known or session
            is_same = known is not None and (session.pid, session.pid_start) == (pid, pid_start)
            if not source and not is_same and _is_older(pid_start, session):
                raise ProcessLookupError(f"the agent CLI of session {session_id} has ended")
            before = None
            if source == "clear":
                own = (other for other in others if other.harness == harness)
                before = last_of_process(own, pid, pid_start)
            name, asked = _choose(session, others, before, source, wanted or harness)
            if known is None or name != session.agent:
                _open_mailbox(root, name)
            if session.agent and name != session.agent:
                _give_back(root, session, DIED)
            session.agent, session.cwd = name, cwd
            if transcript:
                session.transcript = transcript
            session.blind |= harness == "agy"  # what its hooks print is for one call of its model
            if not is_same or source in ("startup", "clear"):
                _begin(root, session, pid, pid_start, source, known is None)
            save_session(root, session)
        for other in others:
            is_dead = not other.is_live and time.time_ns() - other.seen_at > KEPT_NS
            if other is before or is_dead or (other.agent == name and not other.is_live):
                _take_over(root, session, other, CLEARED if other is before else DIED)
                if other is before or is_dead:
                    with session_lock(root, other.file):
                        remove_session(root, other)
    _tell_shells(name, root)
    return _greeting(root, session, asked, source, others)


def _is_older(pid_start: int | None, session: Session) -> bool:
    """True for a process that began before the session's: it adopted a hook whose parent died."""
    began = session.pid_start
    return pid_start is not None and began is not None and pid_start < began


def _begin(
    root: str, session: Session, pid: int, pid_start: int | None, source: str, is_new: bool
) -> None:
    """A process begins with a session: what the last one has not seen is offered again."""
    if not is_new:
        _give_back(root, session, CLEARED if source == "clear" else DIED)
    session.pid, session.pid_start, session.pid_namespace = pid, pid_start, pid_namespace()
    session.bound_at = time.time_ns()
    session.state, session.listed = "", []
    session.begin_turn()
    if is_new or not session.run or source == "clear":
        session.run = _count_run(root, session.agent, session.bound_at)
        with contextlib.suppress(
            OSError, ValueError
        ):  # what was written before has none of our messages
            session.transcript_offset = os.stat(session.transcript).st_size
            session.transcript_line = -1 if session.transcript_offset else 0


def _choose(
    session: Session, others: list[Session], before: Session | None, source: str, wanted: str
) -> tuple[str, str]:
    """The name of a session, and the one it asked for. Errors: InvalidName."""
    from relay.base.names import NAME_VARIABLE, check_agent_name

    asked = check_agent_name(os.environ.get(NAME_VARIABLE) or wanted)
    is_fork = source == "fork"
    taken = {
        other.agent
        for other in others
        if other is not before and (other.is_live or (is_fork and other.agent))
    }
    for own in (session.agent, before.agent if before is not None else ""):
        stem, dash, number = own.rpartition("-")
        is_ours = own == asked or (stem == asked and dash and number.isdecimal())
        if is_ours and own not in taken and not is_fork:
            return own, own
    name, count = asked, 1
    while name in taken:
        count += 1
        name = check_agent_name(f"{asked}-{count}")
    return name, asked


def last_of_process(sessions: Iterable[Session], pid: int, pid_start: int | None) -> Session | None:
    """The session that was bound last for an agent CLI's process; None without one."""
    found = [
        session
        for session in sessions
        if (session.pid, session.pid_start) == (pid, pid_start) and session.agent and pid
    ]
    return found[-1] if found else None


def _take_over(root: str, session: Session, old: Session, why: str) -> None:
    """Take the name of a session that is over, and what it has not seen."""
    with changing(root, old) as left:
        if left.agent:
            _give_back(root, left, why)
        taken, left.agent, left.again = left.again, "", {}
    with changing(root, session) as now:  # another hook of the session may have changed it
        now.expect(taken)
    session.again = now.again


def _give_back(root: str, session: Session, why: str) -> None:
    if session.offered:
        from relay.reach.evidence import settle

        settle(root, session, "", "", why)


def _open_mailbox(root: str, name: str) -> None:
    from relay.base.home import Home

    with Home(root) as home:
        home.make_agent(name)
        revive(home, name)


def revive(home: Home, name: str) -> None:
    """Ask the relay, running now or later, to make a terminated or retired agent active."""
    from relay.base.errors import LedgerError
    from relay.base.home import LEDGER
    from relay.base.names import OPERATOR, ORCHESTRATOR
    from relay.ledger.file import open_readonly

    try:
        db = open_readonly(home.path(LEDGER))
    except LedgerError:  # no relay has ever run here
        return
    away = "SELECT 1 FROM agents WHERE name = ? AND status IN ('terminated', 'retired')"
    is_away = db.execute(away, (name,)).fetchone() is not None
    db.close()
    if is_away:
        from agent_sdk import Agent, Kind

        with Agent(OPERATOR, home.root, registers=False) as operator:
            body = f"ACTION: agent.revive\nNAME: {name}"
            operator.send(ORCHESTRATOR, body, kind=Kind.COMMAND)


def _tell_shells(name: str, root: str) -> None:
    """Name agent and home for the commands of Claude Code's session, where it takes variables."""
    path = os.environ.get("CLAUDE_ENV_FILE")
    if path:
        from shlex import quote

        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"export AGENT_RELAY_NAME={quote(name)} AGENT_RELAY_DIR={quote(root)}\n")


def _greeting(root: str, session: Session, asked: str, source: str, others: list[Session]) -> str:
    """The text that tells a session of itself, of its neighbours, and of what it owes."""
    name = session.agent
    text = f"agent-relay: this session is the agent {name} (run {session.run}) of {root}."
    if name != asked:
        why = "a fork is another agent" if source == "fork" else f"a live session is {asked}"
        text += f" It is not {asked}: {why}."
    text += (
        f" Messages for {name} are shown here as they come; `relay send --as {name} NAME TEXT` "
        "sends one, `relay guide` tells more."
    )
    from relay.reach.checkout import who_else
    from relay.reach.owed import owed_answers, owed_text

    if line := who_else(root, session, others):
        text += f"\n{line}"
    owed = owed_answers(root, name)
    return f"{text}\n{owed_text(name, owed, time.time_ns())}" if owed else text


# -- runs ---------------------------------------------------------------------------------------


def _count_run(root: str, agent: str, at: int) -> int:
    """Number the next run of an agent. Called under the lock of all bindings."""
    runs: dict[str, list[list[int]]] = read_facts(os.path.join(root, FOLDER, RUNS))
    try:
        number = runs[agent][-1][0] + 1
    except (LookupError, TypeError):
        number, runs[agent] = 1, []
    runs[agent] = [*runs[agent], [number, at]][-RUNS_KEPT:]
    replace_file(os.path.join(root, FOLDER, RUNS), json.dumps(runs))
    return number


def run_at(root: str, agent: str, at: int) -> int:
    """Number of the run of an agent at a time, Unix ns; 0 if unknown."""
    runs: list[list[int]] = read_facts(os.path.join(root, FOLDER, RUNS)).get(agent, [])
    try:
        return max((run for run, began_at in runs if began_at <= at), default=0)
    except (TypeError, ValueError):
        return 0


# -- the process --------------------------------------------------------------------------------


def agent_process() -> tuple[int, int | None]:
    """Pid and start time of the agent CLI: the nearest ancestor that is not a shell; (0, None)."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # it has ended
        while pid > 0:
            name, parent, start = program_of(pid)
            if name not in SHELLS:
                return pid, start
            pid = parent
    return 0, None
