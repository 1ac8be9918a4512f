"""Asking for processes in a box, and looking at what became of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from relay.agents.roster import META
from relay.base.config import Config, SpawnSettings
from relay.base.process_info import started_at
from relay.ledger.agents import ProcessRow
from tests.box import Box
from tests.fakes import FakeProcess, FakeSpawner

QUICK = SpawnSettings(
    restart_times=3,
    restart_window_s=100,
    grace_s=5,
    idle_after_s=60,
    stuck_after_s=900,
)


def registered(box: Box, agent: str) -> subprocess.Popen[bytes]:
    """A process that has registered as an agent, as the SDK does; what else meta.json says stays.

    It is nobody's child but the test's, who ends it.
    """
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    path = box.path("agents", agent, META)
    meta = json.loads(path.read_text()) if path.exists() else {}
    meta |= {
        "pid": process.pid,
        "pid_start_ticks": started_at(process.pid),
        "started_at": box.clock.now_ns(),
    }
    new = path.with_name("new")
    new.write_text(json.dumps(meta))
    new.rename(path)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL."""
    process.kill()
    process.communicate()


class ProcessBox(Box):
    """A box whose processes are fakes; ``operator`` asks for them."""

    spawner: FakeSpawner

    def __init__(self, root: Path, *agents: str, settings: SpawnSettings = QUICK) -> None:
        (root.parent / "work").mkdir(exist_ok=True)
        self.cwd = root.parent / "work"
        super().__init__(root, *agents, config=Config(spawn=settings))

    def spawn(self, name: str = "w", *lines: str, asker: str = "operator") -> str:
        """Ask for a process, and let the relay do it; the message id."""
        more = "".join(f"{line}\n" for line in lines)
        text = f"KIND: spawn\nNAME: {name}\nCLI: sh\nCWD: {self.cwd}\n{more}\ngo"
        sent = self.send(asker, text)
        self.tick(2)
        return sent

    def release(self, name: str = "w", asker: str = "operator", reason: str = "") -> str:
        """Ask for its end."""
        sent = self.send(asker, f"KIND: release\nNAME: {name}\nREASON: {reason}\n\n")
        self.tick(2)
        return sent

    def said(self, agent: str = "operator", about: str = "") -> list[str]:
        """What the relay told, oldest first, as `kind first line`; all of it RE ``about``."""
        return [
            f"{m.kind} {m.body.decode().splitlines()[0]}"
            for m in self.inbox(agent).values()
            if not about or m.headers.get("RE") == about
        ]

    def process(self, name: str = "w") -> ProcessRow:
        """Its row."""
        return self.rows()[name]

    def rows(self) -> dict[str, ProcessRow]:
        """The table, as another connection sees it."""
        columns = ", ".join(ProcessRow._fields)
        found = self.sql(f"SELECT {columns} FROM processes")
        return {row[0]: ProcessRow(*row) for row in found}

    @property
    def running(self) -> FakeProcess:
        """The one that runs."""
        (process,) = self.spawner.running()
        return process

    def open_intents(self) -> list[Any]:
        """What is still to be done."""
        return self.sql("SELECT payload FROM pending_operations WHERE completed_at IS NULL")

    def specs(self) -> list[str]:
        """The names of the agents that something is kept for."""
        return [path.name.partition(".")[0] for path in self.path("run").glob("*.json")]
