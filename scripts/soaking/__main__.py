"""Run the soak test: random failures, then the check."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from agent_sdk import Agent, Kind
from relay.base.config import Config, SpawnSettings
from relay.base.errors import EXIT_FINDINGS
from relay.base.home import Home
from relay.base.names import ORCHESTRATOR
from scripts.soaking import check

WORKER = Path(__file__).with_name("worker.py")
STEP_S = 0.5
PATIENCE_S = 60
OPEN = "status IN ('pending', 'processing', 'completed')"


class Soak:
    """One relay with its agents, and the failures injected."""

    def __init__(self, root: Path, agents: int, seed: int) -> None:
        self.home, self.books = root / "home", root / "books"
        self.books.mkdir(parents=True)
        self.names = [f"agent{number:02d}" for number in range(agents)]
        self._rng = random.Random(seed)
        self.did: Counter[str] = Counter()
        argv = (sys.executable, str(WORKER), "{name}", str(self.books), *self.names)
        spawn = SpawnSettings(
            clis={"worker": argv}, restart="on-failure", restart_times=1000, grace_s=5
        )
        config = Config(spawn=spawn)
        with Home.create(str(self.home), msgspec.json.encode(config)) as made:
            for name in self.names:
                made.make_agent(name)
        self._daemon: subprocess.Popen[bytes] | None = None
        self.rss: list[int] = []

    # -- the relay -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the relay, and wait until it is ready."""
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "relay.daemon", "--home", str(self.home)]
        self._daemon = subprocess.Popen(
            [*command, "--ready-fd", str(write_fd)], pass_fds=[write_fd]
        )
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as answer:
            said = answer.read()
        if said != b"ready\n":
            raise SystemExit(f"soak: the relay did not start: {said.decode()}")

    def end(self, number: int) -> None:
        """End the relay with a signal."""
        assert self._daemon is not None
        self.rss.append(psutil.Process(self._daemon.pid).memory_info().rss)
        self._daemon.send_signal(number)
        self._daemon.wait(PATIENCE_S)

    def end_all(self) -> None:
        """Kill whatever still runs."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        for name in self.names:
            self.kill(name)

    # -- the agents ------------------------------------------------------------------------

    def ask(self, me: Agent, kind: Kind, name: str) -> None:
        """Request a process or its end; the results are counted at the end."""
        lines = [f"NAME: {name}"]
        if kind is Kind.SPAWN:
            lines += ["CLI: worker", f"WORKING_DIR: {self.books}"]
        me.send(ORCHESTRATOR, "\n".join(lines), kind=kind, wait=0)  # a refusal is an answer, too
        self.did[f"asked_{kind}"] += 1

    def harm(self, me: Agent) -> None:
        """Inject one random failure."""
        name = self._rng.choice(self.names)
        what = self._rng.choice(["kill", "kill", "kill", "release", "spawn", "spawn"])
        if what == "kill":
            self.did["killed_agents"] += self.kill(name)
        else:
            self.ask(me, Kind.SPAWN if what == "spawn" else Kind.RELEASE, name)

    def kill(self, name: str) -> int:
        """Kill the processes of an agent; the number of those that had not ended by themselves."""
        killed = 0
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed += 1
        return killed

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of an agent by command line; more than one is recorded as a fault."""
        found = [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and [str(WORKER), name, str(self.books)] == (process.info["cmdline"] or [])[1:4]
        ]
        if len(found) > 1:
            pids = [process.pid for process in found]
            (self.books / f"{name}.twice").write_text(f"{pids}\n")
        return found

    # -- the whole -------------------------------------------------------------------------

    def run(self, seconds: float, kill_every_s: float) -> None:
        """Inject failures for so long, then wait until everything is finished."""
        self.start()
        with Agent("operator", self.home) as me:
            for name in self.names:
                self.ask(me, Kind.SPAWN, name)
            ends = time.monotonic() + seconds
            next_kill = time.monotonic() + kill_every_s
            while time.monotonic() < ends:
                self.harm(me)
                if time.monotonic() >= next_kill:
                    self.end(signal.SIGKILL)
                    self.did["killed_relays"] += 1
                    self.start()
                    next_kill += kill_every_s
                time.sleep(STEP_S)
            for name in self.names:
                self.ask(me, Kind.RELEASE, name)
            self._until(lambda: not any(map(self.processes, self.names)), "agents end")
            self._until(self._is_settled, "every row is at its end")
            while (answer := me.receive(0)) is not None:
                self.did[f"heard_{answer.kind}_{_gist(answer.body)}"] += 1
        self._until(lambda: not self._unread("operator"), "what was read is noted")
        self._until(self._is_settled, "every row is at its end")
        self.end(signal.SIGTERM)

    def _is_settled(self) -> bool:
        if any(self.home.glob("agents/*/outbox/*.msg")):
            return False
        with contextlib.closing(sqlite3.connect(self.home / "ledger.db")) as db:
            (left,) = db.execute(f"SELECT count(*) FROM messages WHERE {OPEN}").fetchone()
            (intents,) = db.execute(
                "SELECT count(*) FROM pending_operations WHERE completed_at IS NULL"
            ).fetchone()
        return not left and not intents

    def _unread(self, agent: str) -> int:
        with contextlib.closing(sqlite3.connect(self.home / "ledger.db")) as db:
            query = "SELECT count(*) FROM deliveries WHERE recipient = ? AND state = 'written'"
            return int(db.execute(query, (agent,)).fetchone()[0])

    def _until(self, what: Callable[[], object], why: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > deadline:
                raise SystemExit(f"soak: not within {PATIENCE_S} s: {why}; home {self.home}")
            time.sleep(0.1)


def _gist(text: str) -> str:
    """Two words of the relay's message about an agent: `was_started`, `does_not`, `ended_with`."""
    words = [word for word in text.split() if not word.startswith(("agent", "completed"))]
    return "_".join(words[:2]).strip(":,;")


def _ailments(home: Path) -> list[str]:
    """Findings of the doctor, except messages that a killed agent had not sent yet."""
    done = subprocess.run(
        [sys.executable, "-m", "relay", "--home", str(home), "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    findings = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    said = [f"relay doctor: {one['finding']}" for one in findings if one["severity"] != "note"]
    if done.returncode and not said:
        said = [f"relay doctor: {done.stderr.strip()}"]
    return [text for text in said if "not sent, in .pending" not in text]


def soak(
    root: Path, *, seconds: float, agents: int, kill_every_s: float, seed: int
) -> dict[str, object]:
    """Run one soak test in ``root``; returns counts and every fault found."""
    one = Soak(root, agents, seed)
    try:
        one.run(seconds, kill_every_s)
    finally:
        one.end_all()
    found = [*check.faults(one.home, one.books), *_ailments(one.home)]
    return {
        "case": "soak",
        "seconds": seconds,
        "agents": agents,
        "seed": seed,
        "messages": len(check.sent(one.books)),
        **dict(sorted(one.did.items())),
        "rss_mb_first_last": [round(one.rss[0] / 1e6, 1), round(one.rss[-1] / 1e6, 1)],
        "faults": found,
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--agents", type=int, default=50)
    parser.add_argument("--kill-every", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", help="parent of the temporary directory [the system's]")
    given = parser.parse_args()
    if given.dir is not None and not Path(given.dir).is_dir():
        parser.error(f"--dir: {given.dir} is not a directory; make it first")
    root = Path(tempfile.mkdtemp(prefix="agent-relay-soak-", dir=given.dir))
    result = soak(
        root,
        seconds=given.seconds,
        agents=given.agents,
        kill_every_s=given.kill_every,
        seed=given.seed,
    )
    print(msgspec.json.encode(result).decode(), flush=True)
    if result["faults"]:
        print(f"the home is kept: {root}", file=sys.stderr)
        return EXIT_FINDINGS
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
