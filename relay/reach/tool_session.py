"""Sessions of tools: which agent calls ``relay mcp``, and what it was shown and has not seen yet.

    the session that hooks have bound for the agent CLI above     its hooks decide what it saw
    else a session of its own: $AGENT_RELAY_NAME, or --as         its next call shows that it saw

A message that a call returns stays in the inbox, noted in the session as offered. When the next
call arrives after that answer was written, or the client ends the connection, the message moves to
``.read``. If the server or its client dies first, the next one offers it again, and says so.
"""

from __future__ import annotations

import os
import time

from relay.base.errors import RelayError
from relay.base.names import NAME_VARIABLE, check_agent_name
from relay.base.process_info import pid_namespace, runs, started_at
from relay.reach.binding import DIED, agent_process, last_of_process
from relay.reach.evidence import begin_offer, end_offer, settle
from relay.reach.mailbox import is_there
from relay.reach.session import (
    TOOLS,
    Session,
    changing,
    load_session,
    load_sessions,
    remove_session,
    save_session,
    session_lock,
)
from relay.reach.vendors import ACT, END

SHOWN_BY = "mcp inbox"  # in traces, also what an answer to `send` shows
CLIENT_ENDS_S = 0.1  # a process that is killed closes its pipes before it has ended
UNWRITTEN_NS = 5 * 10**9  # an answer not written by then was cancelled, and never is
CallId = int | str | None  # of JSON-RPC, where 7 and "7" are two calls; None in one process


class NoName(RelayError):
    """A server of tools does not know whose calls these are."""


class ToolSession:
    """The session of the calls of one server. For one thread.

    fallback: the agent where hooks have bound no session and no variable names one.
    """

    def __init__(self, root: str, fallback: str = "") -> None:
        self.root = root
        self._fallback = fallback
        self._own: Session | None = None
        self._unwritten: dict[CallId, set[str]] = {}  # ids in the answer of each call
        self._client = os.getppid(), started_at(os.getppid())

    def find(self) -> Session:
        """Return the session of whoever calls now. Errors: NoName, RelayError, OSError."""
        if (bound := last_of_process(load_sessions(self.root), *agent_process())) is not None:
            return bound  # by the hooks of the agent CLI that started this server
        name = os.environ.get(NAME_VARIABLE) or self._fallback
        if not name:
            raise NoName(
                f"this server of tools has no agent name: set {NAME_VARIABLE} in its environment, "
                "in the client's settings of MCP servers"
            )
        check_agent_name(name)
        if self._own is None:
            self._own = self._open(name)
        return load_session(self.root, TOOLS, self._own.session_id) or self._own

    def _open(self, name: str) -> Session:
        """Begin a session, which takes over what dead ones of that agent have not seen."""
        from relay.base.home import Home

        with Home(self.root) as home:
            home.make_agent(name)
        session = Session(TOOLS, f"{os.getpid()}-{time.time_ns()}")
        session.agent, session.bound_at = name, time.time_ns()
        session.pid, session.pid_start = os.getpid(), started_at(os.getpid())
        session.pid_namespace = pid_namespace()
        with session_lock(self.root):
            for old in load_sessions(self.root, TOOLS):
                if old.agent == name and not old.is_live:
                    settle(self.root, old, END, "", DIED)
                    session.expect(old.again)
                    save_session(self.root, session)
                    remove_session(self.root, old)
            save_session(self.root, session)
        return session

    def act(self, after: str) -> None:
        """Note that a call has come: what earlier answers showed was seen. Errors: OSError."""
        if self._own is None:
            return
        pending = set().union(*self._unwritten.values())
        latest = time.time_ns() - UNWRITTEN_NS
        with changing(self.root, self._own) as own:
            own.step, own.seen_at = own.step + 1, time.time_ns()
            held = {
                message_id: own.offered.pop(message_id)
                for message_id in pending & own.offered.keys()
                if own.offered[message_id]["at"] > latest
            }
            settle(self.root, own, ACT, after)
            own.offered |= held

    def hidden(self, session: Session) -> set[str]:
        """The ids that this session, or a live one of the agent's tools, was shown."""
        shown = set(session.offered)
        for other in load_sessions(self.root, TOOLS):
            if other.agent == session.agent and other.is_live:
                shown |= other.offered.keys()
        return shown

    def offer(self, session: Session, call: CallId, ids: list[str]) -> list[str]:
        """Note that an answer is about to show these; returns those that it may show.

        Not what another session, a hook or a command has shown or taken since they were listed.
        Errors: OSError.
        """
        one_of_the_agent = session_lock(self.root, f"tools-{session.agent}")
        with one_of_the_agent, changing(self.root, session) as changed:
            hidden = self.hidden(changed)
            ids = [
                message_id
                for message_id in ids
                if message_id not in hidden and is_there(self.root, session.agent, message_id)
            ]
            begin_offer(changed, ids, SHOWN_BY)
        self._unwritten.setdefault(call, set()).update(ids)
        return ids

    def written(self, call: CallId) -> None:
        """Note that the answer of a call was written. Errors: OSError."""
        ids = self._unwritten.pop(call, None)
        if not ids:
            return
        with changing(self.root, self.find()) as changed:
            here = sorted(message_id for message_id in ids if message_id in changed.offered)
            end_offer(self.root, changed, here, SHOWN_BY, ACT)

    def end(self) -> None:
        """End with the connection: in good order if the client lives, as one that was killed else.

        Whoever closes a connection waits for its server. What a client that is gone was shown is
        offered to the next one.
        """
        if self._own is None:
            return
        self._unwritten.clear()
        if self._client_lives():
            self.act("the end of the connection")
            left = load_session(self.root, TOOLS, self._own.session_id)
            if left is not None and not left.again:
                remove_session(self.root, left)
        self._own = None

    def _client_lives(self) -> bool:
        """True if the process that started this one is there a moment after its end would show."""
        pid, started = self._client
        until = time.monotonic() + CLIENT_ENDS_S
        while os.getppid() == pid and runs(pid, started):
            if time.monotonic() > until:
                return True
            time.sleep(0.01)
        return False
