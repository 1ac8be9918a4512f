"""Sessions with real bells: a process stands for the agent CLI, a thread for Claude's inbox."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relay.base.home import Home
from relay.base.process_info import started_at
from relay.reach import ringing, rungs
from relay.reach.ringing import Memory
from relay.reach.rungs import SOCKET, TOKEN
from relay.reach.session import IDLE, Session, load_session, save_session, side_file
from tests import forks
from tests.procs import PATIENCE_S, until
from tests.reach.hooks import put, reports_of

BELL = "tests.reach.a_bell"
Bell = forks.Fork | subprocess.Popen[bytes]
PACKAGE = str(Path(__file__).parents[2])


class Inbox:
    """The inbox socket of a session of Claude Code: it keeps what is posted."""

    def __init__(self, path: Path, status: str = "", deaf: bool = False):
        self.path, self.status = str(path), status
        self.frames: list[dict[str, Any]] = []
        self.times: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(0 if deaf else 50)
        if not deaf:
            threading.Thread(target=self._serve, daemon=True).start()

    @property
    def texts(self) -> list[str]:
        return [one["message"]["content"] for one in self.frames if one["type"] == "user"]

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, peer.makefile("rb") as lines:
                for line in lines:
                    frame = json.loads(line)
                    self.times.append(time.time_ns())
                    self.frames.append(frame)
                    if frame["type"] == "user" and self.status:
                        said = {"type": "control", "action": "peer_message_status"}
                        said |= {"orig_msg_id": frame["msg_id"], "status": self.status}
                        peer.sendall(json.dumps(said).encode() + b"\n")


class Cli:
    """An agent CLI that is a process and a session; its hooks are called by the test."""

    def __init__(self, root: Path, agent: str = "bob", harness: str = "claude") -> None:
        self.root, self.agent, self.harness = root, agent, harness
        if not (root / "config.json").exists():
            Home.create(str(root), b"{}").close()
        with Home(str(root)) as home:
            home.make_agent(agent)
        (root / "sessions").mkdir(exist_ok=True)
        self.process = subprocess.Popen(["sleep", "1000"])
        self.session = session = Session(harness, f"{agent}-1")
        session.agent, session.pid = agent, self.process.pid
        session.pid_start = started_at(self.process.pid)
        session.bound_at = session.seen_at = session.state_at = time.time_ns()
        session.state, session.cwd = IDLE, str(root)
        self.env: dict[str, str] = {}
        self.answer_s = rungs.ANSWER_S  # its bell waits so long for the word of Claude's socket
        self.look_s = ringing.LOOK_S  # and so long for any event
        self.bells: list[Bell] = []
        self._sent = 0
        save_session(str(root), session)

    def hook(self, state: str, **facts: Any) -> None:
        """A hook was here."""
        self.session.state, self.session.seen_at = state, time.time_ns()
        for name, value in facts.items():
            setattr(self.session, name, value)
        save_session(str(self.root), self.session)

    def shows(self, *ids: str) -> None:
        """A hook has printed these messages; the agent works on them."""
        offer = {"at": time.time_ns(), "after": "", "offer": 1, "printed": True}
        self.hook("working", offered=self.session.offered | dict.fromkeys(ids, offer))

    def drop(self, text: str = "KIND: message\n\nhello", **headers: object) -> str:
        """A message is delivered; its id."""
        self._sent += 1
        name = f"{time.time_ns()}-{self._sent:08x}"
        more = "".join(f"{key}: {value}\n" for key, value in headers.items())
        return put(self.root, self.agent, f"FROM: alice\nTO: {self.agent}\n{more}{text}", name)

    def take(self, message_id: str) -> None:
        """The message is read."""
        inbox = self.root / "agents" / self.agent / "inbox"
        os.rename(inbox / f"{message_id}.msg", inbox / ".read" / f"{message_id}.msg")

    def wake(self, text: str) -> Path:
        """Write wake.json."""
        path = self.root / "agents" / self.agent / "wake.json"
        path.write_text(text)
        path.chmod(0o600)
        return path

    def bell(self, path: str = "", *, is_anew: bool = False) -> Bell:
        """Its bell, as the SessionStart hook starts it; in a fork, but for one anew."""
        env = os.environ | self.env | ({"PATH": path} if path else {})
        # A ring that nobody answers comes again in an hour, not in 5 s: the machine may be busy.
        words = self.bell_words(3600, self.answer_s)
        if is_anew:
            argv = [sys.executable, "-S", "-m", BELL, *words]
            self.bells.append(subprocess.Popen(argv, env=env, cwd=PACKAGE))
        else:
            self.bells.append(forks.start(BELL, words, env, 0, 1, 2))
        until(lambda: (memory := self.memory) and memory.rungs)
        return self.bells[-1]

    def bell_words(self, pause_s: float, answer_s: float, kill_at: int = 0) -> list[str]:
        """The words of a bell with these waits, which is killed before that call."""
        waits = [str(pause_s), str(answer_s), str(self.look_s), str(kill_at)]
        return [*waits, str(self.root), self.harness, self.session.session_id]

    @property
    def memory(self) -> Memory | None:
        return Memory.load(side_file(str(self.root), self.session, ".bell"))

    def reports(self, what: str = "ring") -> list[dict[str, Any]]:
        """What was reported to the relay, oldest first."""
        return [one for one in reports_of(self.root, self.agent) if one["what"] == what]

    def results(self) -> list[str]:
        return [f"{one['rung']}: {one['result']}" for one in self.reports()]

    def log(self) -> list[str]:
        """What the bell wrote into the log of hooks."""
        path = self.root / "logs" / "hooks.log"
        if not path.exists():
            return []
        return [json.loads(line)["text"] for line in path.read_text().splitlines()]

    def inbox(self, path: Path, **options: Any) -> Inbox:
        """Claude's socket, made known to bells that start from now on."""
        self.env = {SOCKET: str(path), TOKEN: "s3cret-t0ken"}
        if options.get("status"):  # it says something, but when its thread has its turn
            self.answer_s = PATIENCE_S
        return Inbox(path, **options)

    def reload(self) -> Session | None:
        return load_session(str(self.root), self.harness, self.session.session_id)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for one in self.bells:
            one.kill()
            one.wait()


@contextmanager
def cli(root: Path, *args: str) -> Iterator[Cli]:
    """A session that ends with the block, and its bells with it."""
    made = Cli(root, *args)
    try:
        yield made
    finally:
        made.end()
