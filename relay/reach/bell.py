"""The bell: one small process a session, which rings the agent when messages wait and it is idle.

The SessionStart hook starts it (``start``), so it has Claude's socket and token in its environment,
where they are never written to disk. It watches the agent's inbox and ``sessions/``, and ends with
its session: SessionEnd, the death of the agent CLI, or another session that takes the name. A bell
that was killed loses nothing, since the messages are in the inbox: the next hook starts it again.

    sessions/{session}.json.bell    held by flock while the bell runs; its first line is ``Memory``
    sessions/{session}.json.ask     for a while only this rung: ``{"rung": …, "until": Unix ns}``
    sessions/{session}.json.rewake  pid and start time of the Stop hook that waits (asyncRewake)
    sessions/ring-{agent}.lock      held while a rung rings: never two at a time

The program ``relay bell`` is here, too: ``--as NAME`` for an agent without a session, until it is
ended; ``--rewake`` as that Stop hook. Its command in the settings turns ``WOKEN`` into the exit 2
that wakes an idle session with what is on stderr, and everything else into 0.

All this imports little: a session costs 12 MB of memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time

from relay.base.process_info import started_at
from relay.reach.mailbox import inbox_dir
from relay.reach.session import (
    BELL,
    Session,
    is_ringing,
    load_session,
    replace_file,
    save_session,
    session_lock,
    side_file,
)

WOKEN = 77  # a number that no shell and no usage error ends with
MOST_IDS = 64
USAGE = "usage: relay bell [--home DIR] (--as NAME | --rewake)"


def start(root: str, session: Session) -> bool:
    """Start the session's bell unless it runs; True if it was started. Never raises OSError.

    Called by SessionStart, and cheap enough for every other hook: two calls of the system.
    """
    try:
        if not session.agent or not session.is_live or is_ringing(root, session):
            return False
        _spawn([root, session.harness, session.session_id])
    except OSError as exc:
        from relay.reach.report import log

        log(root, f"the bell of {session.agent} was not started: {exc}")
        return False
    return True


def _spawn(arguments: list[str]) -> None:
    """Run this module as a process of its own session, without site-packages."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = f"import sys; sys.path.insert(0, {package!r})\n"
    code += "from relay.reach.bell import serve; serve(*sys.argv[1:])"
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    argv = [sys.executable, "-P", "-S", "-c", code, *arguments]
    options = {"setsid": True} if sys.platform == "linux" else {"setpgroup": 0}
    os.posix_spawn(sys.executable, argv, dict(os.environ), file_actions=null, **options)


def serve(root: str, harness: str, session_id: str) -> None:
    """Be the bell of a session, unless there is one."""
    from relay.reach.report import log
    from relay.reach.ringing import Bell

    session = load_session(root, harness, session_id)
    if session is None:
        return
    path = side_file(root, session, BELL)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(fd):
            return
        Bell(root, session.agent, session, fd).run()
        if load_session(root, harness, session_id) is None:
            os.unlink(path)
    except Exception as exc:  # nobody sees what a process without a terminal prints
        log(root, f"the bell of {session.agent} ended: {type(exc).__name__}: {exc}")
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Lock a bell's file; False if another bell has it, or has ended and removed it."""
    for _ in range(5):  # `start` may be looking at it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(fd).st_nlink > 0
        except BlockingIOError:
            time.sleep(0.02)
    return False


# -- asyncRewake ---------------------------------------------------------------------------


def rewake(root: str, session_id: str) -> int:
    """Wait as Claude's Stop hook until the bell rings; the exit status, ``WOKEN`` to wake it.

    The newest of a session ends the older one.
    """
    import select
    import signal

    from relay.reach.rungs import rewake_file, rewake_process

    session = load_session(root, "claude", session_id)
    if session is None or not session.agent:
        return 0
    path, mine = rewake_file(root, session), f"{os.getpid()} {started_at(os.getpid()) or 0}"
    # An exception of a handler is lost in a callback of Python's own, as at the end of an import.
    came, signals = b"", os.pipe()
    os.set_blocking(signals[1], False)
    signal.set_wakeup_fd(signals[1])
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # replaced by a newer one, or rung
            signal.signal(number, lambda *_: None)
        older = rewake_process(root, session)
        replace_file(path, mine)
        if older is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(older, signal.SIGTERM)
        while not came and _read_line(path) == mine:
            found = load_session(root, "claude", session_id)
            if found is None or not found.is_live or found.is_elsewhere or not found.agent:
                break
            start(root, found)
            if select.select(signals[:1], [], [], 5)[0]:
                came = os.read(signals[0], 64)
        return _wake(root, session) if signal.SIGUSR1 in came else 0
    finally:
        if _read_line(path) == mine:
            os.unlink(path)


def _wake(root: str, session: Session) -> int:
    """Say what waits, and count it; the exit status."""
    from relay.reach.ringing import Bell
    from relay.reach.rungs import has_read, ring_text, silence

    with session_lock(root, session.file):
        found = load_session(root, session.harness, session.session_id)
        if found is None or silence(root, found):
            return 0
        waits = sorted(Bell(root, found.agent, found).waiting())
        if not waits:
            return 0
        found.woken = 1 if has_read(root, found) else found.woken + 1
        found.woken_for = waits[:MOST_IDS]
        save_session(root, found)
    sys.stderr.write(ring_text(len(waits)) + "\n")
    return WOKEN


def _read_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline(64)
    except (OSError, ValueError):
        return ""


# -- the program ---------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """``relay bell [--home DIR] (--as NAME | --rewake)``; the exit status."""
    if arguments in (["--help"], ["-h"]):
        sys.stdout.write(f"{USAGE}\n")
        return 0
    options = dict.fromkeys(("--home", "--as"), "")
    is_rewake, left = False, list(arguments)
    while left:
        option = left.pop(0)
        if option == "--rewake":
            is_rewake = True
        elif option in options and left:
            options[option] = left.pop(0)
        else:
            sys.stderr.write(f"relay: {USAGE}\n")
            return 2
    from relay.base.discovery import default_root

    folder = os.environ.get("CLAUDE_PROJECT_DIR", "") if is_rewake and not options["--home"] else ""
    if os.path.isdir(folder):  # a tool may have changed the working directory
        os.chdir(folder)
    root = default_root(os.path.expanduser(options["--home"]) or None)
    return rewake_hook(root) if is_rewake else ring_for(root, options["--as"])


def ring_for(root: str, agent: str) -> int:
    """Ring an agent until the process is ended; the exit status.

    agent: empty for the one of the environment.
    """
    agent = agent or os.environ.get("AGENT_RELAY_NAME", "")
    if not agent:
        sys.stderr.write("relay: expected --as NAME, or $AGENT_RELAY_NAME\n")
        return 2
    if not os.path.isdir(inbox_dir(root, agent)):
        text = f"there is no agent {agent!a} in {root!a}; `relay agents` lists all agents"
        sys.stderr.write(f"relay: {text}\n")
        return 1
    from relay.reach.ringing import Bell

    try:
        Bell(root, agent, None).run()
    except KeyboardInterrupt:
        return 130
    return 0


def rewake_hook(root: str) -> int:
    """Read the hook's input, and wait; a session is never disturbed, whatever is wrong."""
    try:
        facts = json.loads(sys.stdin.buffer.read(1 << 24))
        if facts.get("agent_id"):  # a subagent's stop
            return 0
        return rewake(root, str(facts["session_id"]))
    except Exception as exc:
        from relay.reach.report import log

        log(root, f"relay bell --rewake: {type(exc).__name__}: {exc}")
        return 0
