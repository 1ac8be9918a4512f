"""``ring``: rename into the inbox of an idle agent -> the bell's frame in Claude's inbox socket.

Floor: the same frame from this process, without a bell.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from relay.base.home import Home
from relay.base.process_info import started_at
from relay.reach.bell import start
from relay.reach.rungs import SOCKET, TOKEN
from relay.reach.session import Session, is_ringing, save_session
from scripts.benchmarks.common import fresh_root, make_home, message, note, percentile, report

WARM_UP = 3
PATIENCE_S = 10
PAUSE_S = 0.35  # the bell waits so long for a refusal


def run(base: str | None, *, rings: int) -> None:
    """Run the case and print its line."""
    root = fresh_root(base)
    note(f"ring: {rings} rings in {root}")
    home, (agent,) = make_home(root, 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "inbox.sock"))
        server.listen(50)
        server.settimeout(PATIENCE_S)
        bare = [_bare(server, root / "inbox.sock") for _ in range(rings)]
        os.environ |= {SOCKET: str(root / "inbox.sock"), TOKEN: "token"}
        cli = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            session = _bind(home, agent, cli.pid)
            start(home.root, session)
            while not is_ringing(home.root, session):
                time.sleep(0.01)
            taken = [_ring(home, agent, server) for _ in range(WARM_UP + rings)][WARM_UP:]
        finally:
            cli.communicate(b"\n")
    report(
        case="ring",
        rings=rings,
        p50_ms=_ms(taken, 0.5),
        p99_ms=_ms(taken, 0.99),
        bare_p50_ms=_ms(bare, 0.5),
    )
    home.close()


def _bind(home: Home, agent: str, pid: int) -> Session:
    """A session of claude that waits at its prompt."""
    os.makedirs(home.path("sessions"), 0o700, exist_ok=True)
    session = Session("claude", "bench")
    session.agent, session.pid, session.pid_start = agent, pid, started_at(pid)
    save_session(home.root, session)
    return session


def _ring(home: Home, agent: str, server: socket.socket) -> float:
    """Seconds from the rename of a message to the frame; the message is taken afterwards."""
    name = f"{time.time_ns()}-00000000.msg"
    inbox = Path(home.path("agents", agent, "inbox"))
    (inbox / ".pending" / name).write_bytes(message(agent))
    began = time.perf_counter()
    os.rename(inbox / ".pending" / name, inbox / name)
    taken = _frame(server) - began
    os.rename(inbox / name, inbox / ".read" / name)
    time.sleep(PAUSE_S)
    return taken


def _frame(server: socket.socket) -> float:
    """When the user's frame of the next connection is there."""
    peer, _ = server.accept()
    with peer, peer.makefile("rb") as lines:
        for line in lines:
            if json.loads(line)["type"] == "user":
                return time.perf_counter()
    raise RuntimeError("a connection without a frame")


def _bare(server: socket.socket, path: Path) -> float:
    began = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(b'{"type":"auth"}\n{"type":"user"}\n')
        return _frame(server) - began


def _ms(values: list[float], share: float) -> float:
    return round(1000 * percentile(values, share), 2)
