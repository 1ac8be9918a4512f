"""Sessions: which agent a session of an agent CLI is, and what it was shown so far.

    sessions/{harness}-{session id}.json    one session, written by its hooks under a lock
    sessions/.lock                          held while a name is given to a session

A session is bound to an agent by its first hook and ends with SessionEnd, with its process, or when
another session takes the name over. The file is the hooks' memory from one call to the next; what
the relay needs to know of it goes into reports (``relay.reach.report``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator

from relay.base.process_info import is_elsewhere, runs

TYPE_CHECKING = False  # typing is not loaded for it
if TYPE_CHECKING:
    from typing import Any

FOLDER = "sessions"
TOOLS = "mcp"  # the harness of sessions that `relay mcp` has where no hook has bound one
BELL = ".bell"  # suffix of the file that the session's bell holds by flock while it runs
MAX_BYTES = 4 << 20
WORKING, IDLE = "working", "idle"  # state
BLOCKED = "blocked"  # on a person: a dialog is open in it
FAILING = "failing"  # its last turn was ended by an error
ENDED = "ended"
NO_SESSION = "{} has no running session whose hooks report to the relay: `relay agents` shows them"
_PLAIN = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.-")


class Session:
    """The facts of one session, as its file has them. Times are Unix nanoseconds."""

    def __init__(self, harness: str, session_id: str) -> None:
        self.harness = harness  # claude, codex, gemini, agy
        self.session_id = session_id
        self.agent = ""  # the name it is bound to; empty: none
        self.run = 0  # the agent's n-th session
        self.pid = 0  # of the agent CLI
        self.pid_start: int | None = None  # clock ticks after boot
        self.pid_namespace = 0  # of both; 0: unknown
        self.bell_file = ""  # a path, where the session was read from a file; it is not saved
        self.cwd = ""
        self.transcript = ""  # path; empty: none
        self.transcript_offset = 0  # bytes that were searched
        self.transcript_line = 0  # lines in them
        self.bound_at = 0
        self.state = IDLE
        self.state_at = 0
        self.error = ""  # while it fails: which
        self.seen_at = 0  # its last hook
        self.event = ""  # and which that was
        self.calls = 0  # tool calls
        self.step = 0  # a later one: the model has answered to what hooks printed in an earlier one
        # message id -> {"at", "after", "offer", "printed", "step"}: shown, and not yet seen in its
        # context. printed False: the hook was killed around the print.
        self.offered: dict[str, dict[str, Any]] = {}
        self.again: dict[
            str, int
        ] = {}  # message id -> number of its last offer, which was not seen
        self.listed: list[str] = []  # ids of messages too large to print, which it was told of
        self.unshown: list[str] = []  # ids that were in no context by its transcript; shown again
        self.blind = False  # its transcript never shows what hooks print
        self.told: dict[str, int] = {}  # message id -> how often it heard at a stop that it owes it
        self.woken = 0  # times in a row by its Stop hook without that it read a message, and
        self.woken_for: list[str] = []  # ids of these messages
        self.blocks = 0  # stops in a row that were refused
        self.owed: list[str] = []  # what it owed at the last of these

    @property
    def key(self) -> str:
        """The name of the session in reports and ledger: ``claude:0089…``."""
        return f"{self.harness}:{self.session_id}"

    @property
    def file(self) -> str:
        """The name of its file."""
        return session_file(self.harness, self.session_id)

    def begin_turn(self) -> None:
        """A new prompt begins a new row of stops."""
        self.blocks, self.owed = 0, []

    def expect(self, offers: dict[str, int]) -> None:
        """Take over what another session was shown and has not seen."""
        for message_id, number in offers.items():
            self.again[message_id] = max(number, self.again.get(message_id, 0))

    @property
    def is_elsewhere(self) -> bool:
        """True for a session in another container: its process is not visible from here."""
        return is_elsewhere(self.pid_namespace)

    @property
    def is_live(self) -> bool:
        """True while its process runs; where that is not visible, while its bell does."""
        if self.is_elsewhere:
            with contextlib.suppress(OSError):  # a link in its place, or no descriptor is left
                return bool(self.bell_file) and self.state != ENDED and _is_held(self.bell_file)
            return False
        return bool(self.pid) and runs(self.pid, self.pid_start)


def acting_as(agent: str) -> str:
    """The option that a command of this agent's session needs; empty if its environment says it."""
    return "" if os.environ.get("AGENT_RELAY_NAME") == agent else f" --as {agent}"


def session_file(harness: str, session_id: str) -> str:
    """The file name of a session; ids with other characters are hashed."""
    if not session_id or len(session_id) > 128 or not _PLAIN.issuperset(session_id):
        from hashlib import sha256  # loads OpenSSL, 3 MB

        session_id = sha256(session_id.encode(errors="surrogateescape")).hexdigest()
    return f"{harness}-{session_id}.json"


def side_file(root: str, session: Session, suffix: str) -> str:
    """The path of another file of the session, beside its own: of its bell, for example."""
    return os.path.join(root, FOLDER, session.file + suffix)


def is_ringing(root: str, session: Session) -> bool:
    """True while the session has a bell. Errors: OSError."""
    return _is_held(side_file(root, session, BELL))


def _is_held(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def load_session(root: str, harness: str, session_id: str) -> Session | None:
    """The session of that id; None if there is none, or its file is damaged."""
    return _load(os.path.join(root, FOLDER, session_file(harness, session_id)))


def load_sessions(root: str, harness: str = "") -> list[Session]:
    """All sessions of a home, live or not, by the time of their binding.

    Those of ``TOOLS`` only if these are asked for: they have no state and no bell.
    """
    try:
        names = os.listdir(os.path.join(root, FOLDER))
    except OSError:  # none yet, or not a folder
        return []
    found = [
        _load(os.path.join(root, FOLDER, name))
        for name in names
        if name.endswith(".json") and name.startswith(f"{TOOLS}-") == (harness == TOOLS)
    ]
    return sorted(
        (session for session in found if session is not None), key=lambda session: session.bound_at
    )


def live_session(root: str, agent: str) -> Session | None:
    """The running session that has an agent's name; None if there is none."""
    found = [
        session for session in load_sessions(root) if session.agent == agent and session.is_live
    ]
    return found[-1] if found else None


def save_session(root: str, session: Session) -> None:
    """Replace the session's file. Call it under ``session_lock``. Errors: OSError."""
    facts = {name: value for name, value in vars(session).items() if name != "bell_file"}
    replace_file(side_file(root, session, ""), json.dumps(facts))


def replace_file(path: str, text: str) -> None:
    """Replace a file of ``sessions/``: readers see the old one or the new one. Errors: OSError."""
    temp = f"{path}.{os.getpid()}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(temp, path)
    except OSError:  # a full disk
        os.unlink(temp)
        raise


def read_facts(path: str) -> dict[str, Any]:
    """The object in the first line of a file of ``sessions/``; empty without one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, encoding="utf-8") as file:
            facts = json.loads(file.readline(MAX_BYTES))
    except (OSError, ValueError, RecursionError):  # none, or damaged
        return {}
    return facts if isinstance(facts, dict) else {}


def remove_session(root: str, session: Session) -> None:
    """Remove the session's file and lock; ended sessions are no longer listed."""
    for suffix in ("", ".lock", BELL, ".ask", ".rewake"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(side_file(root, session, suffix))


@contextlib.contextmanager
def session_lock(root: str, name: str = "") -> Iterator[None]:
    """Hold the lock of a session's file ``name``; without it the one of all bindings.

    Hooks of one event run at the same time. Errors: OSError.
    """
    folder = os.path.join(root, FOLDER)
    os.makedirs(folder, 0o700, exist_ok=True)
    path = os.path.join(folder, f"{name}.lock" if name else ".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def changing(root: str, session: Session) -> Iterator[Session]:
    """Read a session again under its lock, and save it at the end. Errors: OSError."""
    with session_lock(root, session.file):
        found = load_session(root, session.harness, session.session_id) or session
        yield found
        save_session(root, found)


def adopt(thing: object, facts: dict[str, object]) -> None:
    """Set the attributes that a file has; values of another type than the default's are ignored."""
    known = vars(thing)
    for name, value in facts.items():
        if name in known and type(value) is type(0 if name == "pid_start" else known[name]):
            setattr(thing, name, value)


def _load(path: str) -> Session | None:
    """Read a session's file."""
    facts = read_facts(path)
    if not {"harness", "session_id"} <= facts.keys():
        return None
    session = Session(facts["harness"], facts["session_id"])
    adopt(session, facts)
    session.bell_file = path + BELL
    return session
