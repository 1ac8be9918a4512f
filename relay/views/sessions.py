"""The states of agents, as the sessions of their CLIs tell: working, idle, blocked, failing …"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from relay.base.clock import NS_PER_S, local_time
from relay.base.errors import RelayError
from relay.base.home import LEDGER
from relay.reach.session import ENDED

if TYPE_CHECKING:
    from relay.base.home import Home

UNSEEN = "unseen"
RINGS = 10  # in the status
UNSEEN_NS = 10 * 60 * NS_PER_S  # without a hook while it works: longer than most tool calls

_RINGS = """SELECT at, rung, messages, result FROM rings WHERE agent = ?
ORDER BY at DESC LIMIT ?"""


class AgentState(NamedTuple):
    """The state of the session that has an agent's name."""

    state: str  # working, idle, blocked, failing, ended, or unseen
    since: int  # Unix ns
    session: str  # harness and session id
    seen_at: int  # its last hook
    error: str = ""  # of a failing one

    def text(self, owed: int, now_ns: int) -> str:
        """The state in words; ``owed``: how many answers it owes."""
        if self.state in (UNSEEN, ENDED):
            return f"not seen since {local_time(self.seen_at, now_ns)}"
        if self.state == "blocked":
            return f"blocked on a person since {local_time(self.since, now_ns)}"
        if self.state == "failing":
            return f"failing: {self.error}, since {local_time(self.since, now_ns)}"
        return f"{self.state} and owes {owed}" if self.state == "idle" and owed else self.state


def agent_states(home: Home, now_ns: int) -> dict[str, AgentState]:
    """The states by agent; the session that runs counts, or the one that was seen last."""
    from relay.reach.session import IDLE, WORKING, load_sessions

    found: dict[str, tuple[bool, int, AgentState]] = {}
    for session in load_sessions(home.root):
        is_live = session.is_live
        state, since = session.state or IDLE, session.state_at  # empty: bound just now
        is_silent = state == WORKING and now_ns - session.seen_at >= UNSEEN_NS
        if state != ENDED and (is_silent or not is_live):
            state, since = UNSEEN, session.seen_at
        rank = (
            is_live,
            session.seen_at,
            AgentState(state, since, session.key, session.seen_at, session.error),
        )
        if session.agent and rank[:2] >= found.get(session.agent, (False, -1))[:2]:
            found[session.agent] = rank
    return {name: rank[2] for name, rank in found.items()}


def latest_calls(home: Home) -> dict[str, int]:
    """When the running servers of tools were last called (Unix ns), by agent."""
    from relay.reach.session import TOOLS, load_sessions

    found: dict[str, int] = {}
    for session in load_sessions(home.root, TOOLS):
        if session.is_live:
            found[session.agent] = max(session.seen_at, found.get(session.agent, 0))
    return found


def last_rings(home: Home, agent: str) -> list[dict[str, Any]]:
    """The last rings of an agent by the ledger, newest first; none if it cannot be read."""
    from relay.ledger.file import open_current

    try:
        with contextlib.closing(open_current(home.path(LEDGER))) as db:
            rows = db.execute(_RINGS, (agent, RINGS)).fetchall()
    except (RelayError, OSError):
        return []
    return [dict(zip(("at", "rung", "messages", "result"), row, strict=True)) for row in rows]
