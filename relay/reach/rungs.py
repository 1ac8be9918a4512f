"""Rungs: the ways in which an agent that waits at its prompt is rung.

Each rings with a fixed text (``ring_text``) that has no word of a sender; the messages themselves
come through a hook or a tool. ``RUNGS`` has them in the order in which they are tried. One that
``agents/{name}/wake.json`` names is the only one used:

    {"rung": "codex-queue"}
    {"argv": ["notify-send", "{text}"]}

A new rung is a class with the attributes and two functions of ``Rung``, and a line in RUNGS.
"""

from __future__ import annotations

import json
import os
import stat
import time

from relay.base.process_info import runs, words_of
from relay.base.text import visible
from relay.reach.mailbox import is_there
from relay.reach.session import Session, side_file
from relay.reach.vendors import SESSION_VARIABLES

TYPE_CHECKING = False  # as in typing, which would take half a megabyte
if TYPE_CHECKING:
    import socket
    import subprocess

WAKE = "wake.json"
NO_RUNG = "-"  # for a while, or while wake.json cannot be used
MAX_WAKE_BYTES = 1 << 16
SOCKET, TOKEN = "CLAUDE_CODE_MESSAGING_SOCKET", "CLAUDE_CODE_MESSAGING_TOKEN"
REFUSALS = ("held", "denied", "expired", "refused", "dropped")  # of Claude's inbox
SOCKET_S = 2.0  # for a socket to take the text
ANSWER_S = 0.3  # and to say that it does not: most say nothing
MOST_WOKEN = 3  # times in a row by a Stop hook that a session reads nothing
SIGNAL_S = 2.0  # for the process of asyncRewake to end
PROGRAM_S = 10.0
RESUME_S = 3600.0  # a whole turn of an agent
MAX_OUTPUT = 1 << 20
RESUME_AGAIN_S = 600.0  # after a run that has read nothing
CODEX_AGAIN_S = 120.0  # a text in codex's queue is not taken back: one at a time


class RingFailed(Exception):
    """A rung did not ring; the text says why."""


class BadWake(ValueError):
    """``wake.json`` cannot be used; the text says why."""


class Wake:
    """The content of an agent's ``wake.json``."""

    def __init__(self, argv: tuple[str, ...] = (), rung: str = "") -> None:
        self.argv = argv
        self.rung = rung  # the only one to use; empty: all that apply


class RungTarget:
    """The agent to ring, with its session if it has one."""

    def __init__(self, root: str, agent: str, session: Session | None, wake: Wake) -> None:
        self.root = root
        self.agent = agent
        self.session = session
        self.wake = wake

    @property
    def is_live(self) -> bool:
        """True while its session runs."""
        return self.session is not None and self.session.is_live

    def session_of(self, harness: str) -> Session | None:
        """Its session, if that is a live one of this agent CLI."""
        if self.session is None or self.session.harness != harness or not self.is_live:
            return None
        return self.session


def ring_text(messages: int) -> str:
    """The text that an agent is rung with, the same for every rung."""
    waits = "1 message waits" if messages == 1 else f"{messages} messages wait"
    return f"agent-relay: {waits}; `relay inbox --take`"


class Rung:
    """One way to ring."""

    name = ""
    mid_turn = False  # useful while the agent is working
    again_s = 0.0  # least time between two rings that were not answered
    silence = ""  # what may be so when it has rung, and no hook ran since

    def missing(self, target: RungTarget) -> str:
        """Why the rung does not apply; empty if it does."""
        raise NotImplementedError

    def ring(self, target: RungTarget, text: str) -> str:
        """Ring; what is known of it then. Errors: RingFailed."""
        raise NotImplementedError


class ClaudeInbox(Rung):
    """Post into the socket that Claude Code gives its hooks.

    The frame is not documented and may change: a text that is held or refused is a failure, and the
    next rung is tried.
    """

    name = "claude-inbox"
    mid_turn = True

    def missing(self, target: RungTarget) -> str:
        """Why it does not apply."""
        if target.session_of("claude") is None:
            return "expected a live session of claude"
        missing = [name for name in (SOCKET, TOKEN) if not os.environ.get(name)]
        return f"{missing[0]} is not set in the bell's environment" if missing else ""

    def ring(self, target: RungTarget, text: str) -> str:
        """Post the text; wait a moment for a refusal."""
        import socket
        from uuid import uuid4

        path, message_id = os.environ[SOCKET], str(uuid4())
        _check_socket(path)
        auth = {"type": "auth", "token": os.environ[TOKEN]}
        content = {"role": "user", "content": text}
        frame = {"type": "user", "msgV": 1, "msg_id": message_id, "priority": "next"}
        lines = "".join(json.dumps(part) + "\n" for part in (auth, frame | {"message": content}))
        with socket.socket(socket.AF_UNIX) as peer:
            try:
                _connect(peer, path)
                _check_peer(peer)
                peer.sendall(lines.encode())
            except OSError as exc:
                raise RingFailed(f"the socket does not take the text: {_reason(exc)}") from exc
            status = _answer(peer, message_id)
        if status in REFUSALS:
            raise RingFailed(status)
        return status or "posted"


class ClaudeRewake(Rung):
    """End the process that waits as Claude's Stop hook (``relay bell --rewake``), to wake it."""

    name = "claude-rewake"

    def missing(self, target: RungTarget) -> str:
        """Why it does not apply."""
        session = target.session_of("claude")
        if session is None:
            return "expected a live session of claude"
        if rewake_process(target.root, session) is None:
            return "no `relay bell --rewake` waits as a Stop hook with asyncRewake"
        return silence(target.root, session)

    def ring(self, target: RungTarget, text: str) -> str:
        """Signal it, and see it end."""
        import select
        import signal

        assert target.session is not None
        pid = rewake_process(target.root, target.session)
        if pid is None:
            raise RingFailed("the waiting process ended meanwhile")
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError) as exc:
            raise RingFailed(f"process {pid} cannot be signalled: {exc}") from exc
        try:
            signal.pidfd_send_signal(fd, signal.SIGUSR1)
            if not select.select([fd], [], [], SIGNAL_S)[0]:
                raise RingFailed(f"process {pid} did not end in {SIGNAL_S:g} s")
        except OSError as exc:
            raise RingFailed(f"process {pid} cannot be signalled: {exc}") from exc
        finally:
            os.close(fd)
        return f"process {pid} ended for it"


class CodexQueue(Rung):
    """``codex queue``: the text becomes the next words of the user in a thread of the TUI."""

    name = "codex-queue"
    mid_turn = True
    again_s = CODEX_AGAIN_S
    silence = (
        "codex accepts a text for a thread that is not loaded, and keeps it until it is; whether "
        "this one is loaded is not known: `codex resume {}` loads it"
    )

    def missing(self, target: RungTarget) -> str:
        """Why it does not apply."""
        session = target.session_of("codex")
        if session is None:
            return "expected a live session of codex"
        if "exec" in words_of(session.pid)[1:]:
            return "the session is a run of `codex exec`: what is queued for its thread is lost"
        return "" if _program("codex") else "codex is not in PATH"

    def ring(self, target: RungTarget, text: str) -> str:
        """Queue the text; exit 0 means queued, no more, also if the thread is not loaded."""
        assert target.session is not None
        argv = ["codex", "queue", "--thread", target.session.session_id, "--message", text]
        output = _run(argv, target, PROGRAM_S)
        return f"queued: {output.splitlines()[0]}" if output else "queued"


class Resume(Rung):
    """Start an ended session again with the text: a new process, which takes a whole turn.

    Only for agents whose ``wake.json`` names it: it costs a run.
    """

    name = "resume"
    again_s = RESUME_AGAIN_S

    def missing(self, target: RungTarget) -> str:
        """Why it does not apply."""
        if target.wake.rung != self.name:
            return f'only where {WAKE} has "rung": "{self.name}"'
        session = target.session
        if session is None or session.harness not in ("claude", "codex"):
            return "expected an ended session of claude or codex"
        if session.is_live:
            return "the session is live"
        return "" if _program(session.harness) else f"{session.harness} is not in PATH"

    def ring(self, target: RungTarget, text: str) -> str:
        """Run it to its end."""
        session = target.session
        assert session is not None
        if session.harness == "codex":
            _run(["codex", "exec", "resume", session.session_id, text], target, RESUME_S)
            return "the run ended with exit 0"
        argv = ["claude", "-p", text, "--resume", session.session_id, "--output-format", "json"]
        output = _run(argv, target, RESUME_S)
        try:
            answer = json.loads(output)
            is_error, session_id = answer.get("is_error"), answer.get("session_id")
        except (ValueError, AttributeError) as exc:
            raise RingFailed("claude exited 0, and its answer is not valid JSON") from exc
        if is_error:
            raise RingFailed("claude exited 0 and reported an error")
        if isinstance(session_id, str) and session_id:
            session.session_id = session_id  # the next run goes on from here
        return "the run ended with exit 0"


class CommandRung(Rung):
    """A command of the user's; ``{text}`` in its arguments is replaced."""

    name = "command"

    def missing(self, target: RungTarget) -> str:
        """Why it does not apply."""
        return "" if target.wake.argv else f"{WAKE} has no argv"

    def ring(self, target: RungTarget, text: str) -> str:
        """Run it; its exit status counts."""
        _run([word.replace("{text}", text) for word in target.wake.argv], target, PROGRAM_S)
        return "exit 0"


RUNGS: tuple[Rung, ...] = (ClaudeInbox(), ClaudeRewake(), CodexQueue(), Resume(), CommandRung())
NAMES = tuple(rung.name for rung in RUNGS)


def survey(target: RungTarget) -> dict[str, str]:
    """Each rung's name, in order, and why it does not apply; empty if it does.

    Where ``wake.json`` names one, it is the only one that may.
    """
    named = target.wake.rung
    other = f"{WAKE} cannot be used" if named == NO_RUNG else f"{WAKE} names {named}"
    return {
        rung.name: other if named not in ("", rung.name) else rung.missing(target) for rung in RUNGS
    }


def applying(target: RungTarget) -> list[Rung]:
    """The rungs to try, in order."""
    missing = survey(target)
    return [rung for rung in RUNGS if not missing[rung.name]]


def read_wake(root: str, agent: str) -> Wake:
    """``wake.json`` of an agent; empty if there is none. Errors: BadWake."""
    where = f"agents/{agent}/{WAKE}"
    try:
        fd = os.open(f"{root}/{where}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Wake()
    except OSError as exc:
        raise BadWake(f"{where}: {exc.strerror}") from exc
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise BadWake(f"{where}: expected a file of yours that only you can write")
        data = os.read(fd, MAX_WAKE_BYTES + 1)
    finally:
        os.close(fd)
    try:
        value = json.loads(data) if len(data) <= MAX_WAKE_BYTES else None
    except (ValueError, RecursionError) as exc:
        raise BadWake(f"{where}: not valid JSON: {exc}") from exc
    if not isinstance(value, dict) or value.keys() - {"argv", "rung"} or not value:
        raise BadWake(f'{where}: expected {{"argv": […]}}, {{"rung": "…"}} or both')
    argv, rung = value.get("argv", []), value.get("rung", "")
    if not isinstance(argv, list) or not all(isinstance(word, str) and word for word in argv):
        raise BadWake(f'{where}: expected "argv" as a list of texts')
    if "rung" in value and rung not in NAMES:
        raise BadWake(f'{where}: expected "rung" as one of {", ".join(NAMES)}, got {rung!r:.40}')
    odd = [c for c in "".join(argv) if c == "\0" or "\ud800" <= c <= "\udfff"]
    if odd or (rung == CommandRung.name and not argv):
        raise BadWake(f'{where}: expected "argv" with a program and its arguments')
    return Wake(tuple(argv), rung)


# -- the process of asyncRewake ------------------------------------------------------------


def rewake_file(root: str, session: Session) -> str:
    """The file with pid and start time of the process that waits as a Stop hook."""
    return side_file(root, session, ".rewake")


def silence(root: str, session: Session) -> str:
    """Why a session is not woken by its Stop hook any more; empty if it is.

    A session that is woken and reads nothing would be woken for ever, each time a run of its model.
    """
    if session.woken < MOST_WOKEN or has_read(root, session):
        return ""
    return f"woken {session.woken} times, and read nothing: it is not woken until it reads"


def has_read(root: str, session: Session) -> bool:
    """True if a message that the session was last woken for has left the inbox."""
    return not all(is_there(root, session.agent, message_id) for message_id in session.woken_for)


def rewake_process(root: str, session: Session) -> int | None:
    """The pid of the Stop hook that waits; None if none does."""
    try:
        with open(rewake_file(root, session), encoding="ascii") as file:
            pid, start = map(int, file.read(64).split())
    except (OSError, ValueError):
        return None
    return pid if runs(pid, start) else None


# -- Claude's socket -----------------------------------------------------------------------


def _check_socket(path: str) -> None:
    try:
        facts = os.lstat(path)
    except OSError as exc:
        raise RingFailed(f"the socket cannot be used: {_reason(exc)}") from exc
    if not stat.S_ISSOCK(facts.st_mode):
        raise RingFailed("expected a socket, got a link or another file")
    if facts.st_uid != os.geteuid():
        raise RingFailed("the socket belongs to another user")


def _connect(peer: socket.socket, path: str) -> None:
    """Connect; a queue that is full is tried again until the time is up."""
    peer.settimeout(SOCKET_S)
    until = time.monotonic() + SOCKET_S
    while True:
        try:
            return peer.connect(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _check_peer(peer: socket.socket) -> None:
    """The token goes to a process of the same user alone."""
    import socket
    import struct

    if not hasattr(socket, "SO_PEERCRED"):
        return
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.geteuid():
        raise RingFailed("a process of another user listens on the socket")


def _answer(peer: socket.socket, message_id: str) -> str:
    """The status of the text, if one comes in time; else empty."""
    data, until = b"", time.monotonic() + ANSWER_S
    while (left := until - time.monotonic()) > 0 and len(data) < 1 << 16:
        peer.settimeout(left)
        try:
            chunk = peer.recv(4096)
        except OSError:
            return ""
        data += chunk
        for line in data.split(b"\n")[:-1]:
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(fields, dict) and fields.get("orig_msg_id") == message_id:
                status = fields.get("status")
                if status in ("delivered", *REFUSALS):
                    return str(status)
        if not chunk:
            return ""
    return ""


# -- programs ------------------------------------------------------------------------------


def _program(name: str) -> str:
    """The path of a program in PATH; empty if there is none."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def _run(argv: list[str], target: RungTarget, seconds: float) -> str:
    """The output of a program that exits 0 in time, made visible. Errors: RingFailed.

    It is ended with all that it started when the time is up.
    """
    import subprocess

    env = {name: os.environ[name] for name in os.environ.keys() - SESSION_VARIABLES}
    env |= {"AGENT_RELAY_NAME": target.agent, "AGENT_RELAY_DIR": target.root}
    cwd = target.session.cwd if target.session is not None else ""
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd if os.path.isdir(cwd) else None,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as exc:
        raise RingFailed(f"{visible(argv[0])} cannot be started: {_reason(exc)}") from exc
    output = _read(process, time.monotonic() + seconds)
    text = visible(output.decode(errors="replace"), keep="\n").strip()
    if process.returncode is None:
        _kill(process)
        raise RingFailed(f"{visible(argv[0])} did not end in {seconds:g} s")
    if process.returncode:
        detail = f": {text.splitlines()[-1][:120]}" if text else ""
        raise RingFailed(f"{visible(argv[0])} ended with exit {process.returncode}{detail}")
    return text


def _read(process: subprocess.Popen[bytes], until: float) -> bytes:
    """The output of a process until it ends; what it started may write on, unread."""
    import select

    assert process.stdout is not None
    fd, output, is_open = process.stdout.fileno(), b"", True
    with process.stdout:
        while process.poll() is None and time.monotonic() < until:
            if not is_open:
                time.sleep(0.01)
            elif select.select([fd], [], [], 0.02)[0]:
                chunk = os.read(fd, 1 << 16)
                is_open = bool(chunk)
                output = (output + chunk)[:MAX_OUTPUT]
        while is_open and len(output) < MAX_OUTPUT and select.select([fd], [], [], 0)[0]:
            chunk = os.read(fd, 1 << 16)
            is_open = bool(chunk)
            output += chunk
    return output


def _kill(process: subprocess.Popen[bytes]) -> None:
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.wait()


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
