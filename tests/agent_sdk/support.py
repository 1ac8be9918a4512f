"""What the tests of the SDK share: a relay made by hand, and a wait made by hand.

``HandRelay`` is no relay: it moves files from outbox to inbox when a test says so, knows no
channel, no ledger and no crash. What it delivers has the form of what the relay delivers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relay.base import fsio
from relay.base.clock import iso_time
from relay.base.errors import RelayWarning
from relay.base.home import Home
from relay.base.message import Kind, MessageFile, parse, render
from relay.base.names import SHA256_PREFIX, sha256_hex

FIRST_NS = 1_706_123_456_789_012_345


class HandRelay:
    """Carries messages by hand between the agents of one home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        Home.create(str(root), b"{}\n").close()
        self._next_ns = FIRST_NS
        self.for_orchestrator: list[tuple[str, MessageFile]] = []

    def box(self, agent: str, part: str) -> Path:
        """A directory of an agent: outbox, inbox, inbox/.read, outbox/.pending."""
        return self.root / "agents" / agent / part

    def waiting(self, agent: str, part: str) -> list[str]:
        """The names in such a directory, hidden ones apart."""
        return sorted(name for name in os.listdir(self.box(agent, part)) if name[0] != ".")

    def carry(self) -> list[str]:
        """Take every message out of every outbox into the inbox of its TO; returns the ids."""
        carried = []
        for path in sorted(self.root.glob("agents/*/outbox/*.msg"), key=lambda path: path.name):
            message = parse(path.read_bytes())
            sender = path.parent.parent.name
            path.unlink()
            carried.append(path.stem)
            if message.to == "__orchestrator__":
                self.for_orchestrator.append((path.stem, message))
            else:
                self._put(message.to, path.stem, sender, message)
        return carried

    def deliver(
        self,
        to: str,
        body: str,
        *,
        sender: str = "bob",
        kind: Kind = Kind.MESSAGE,
        message_id: str = "",
        **headers: str,
    ) -> str:
        """Put a message into an inbox as if ``sender`` had sent it; returns its id."""
        self._next_ns += 1
        message_id = message_id or f"{self._next_ns}-00000000"
        self._put(to, message_id, sender, MessageFile(to, kind, headers, body.encode()))
        return message_id

    def _put(self, to: str, message_id: str, sender: str, message: MessageFile) -> None:
        added = [
            ("ID", message_id),
            ("FROM", sender),
            ("SENT", iso_time(FIRST_NS)),
            ("ATTEMPT", "1"),
            ("CHECKSUM", SHA256_PREFIX + sha256_hex(message.content)),
        ]
        self.put_bytes(to, f"{message_id}.msg", render(message, added))

    def put_bytes(self, to: str, name: str, data: bytes) -> None:
        """Put a file with any content into an inbox, by rename as the relay does."""
        staged = self.box(to, "inbox/.pending") / name
        staged.write_bytes(data)
        staged.rename(self.box(to, "inbox") / name)


class ScriptedWake:
    """Stands where inotify would: each wait does the next step of a test, and returns."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def wait(self, timeout_s: float) -> None:
        """Do the next step; a wait that the test did not expect fails it."""
        assert self._steps, "it waits once more than there are steps"
        self._steps.pop(0)()

    def is_inherited(self) -> bool:
        """It is of this process."""
        return False

    def close(self) -> None:
        """Nothing to give back."""


def script(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """From now on agents wait by doing ``steps``."""
    monkeypatch.setattr("agent_sdk.inbox.open_waiter", lambda path: ScriptedWake(*steps))


def fail_at(monkeypatch: pytest.MonkeyPatch, operation: str, count: int, *codes: int) -> list[str]:
    """Let calls of ``operation`` fail from the ``count``th on; returns the operations called."""
    called: list[str] = []
    left = list(codes)

    def fault(name: str, _: str) -> None:
        called.append(name)
        if name == operation and called.count(operation) >= count and left:
            code = left.pop(0)
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fsio, "fault", fault)
    return called


def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody sleeps; the list holds how long they would have."""
    slept: list[float] = []
    monkeypatch.setattr("agent_sdk.disk._sleep", slept.append)
    return slept


def relay_runs(monkeypatch: pytest.MonkeyPatch, *turns: Any) -> None:
    """Pretend that a relay holds the home's lock; while the sender waits, it does its turns."""
    left = list(turns)
    monkeypatch.setattr("agent_sdk.agent.lock_holder", lambda home: 1)
    monkeypatch.setattr("agent_sdk.outbox.time.sleep", lambda s: left and left.pop(0)())


def says_the_disk_is_full(seconds: int = 30) -> pytest.WarningsRecorder:
    """Expect the line that comes before a full disk is waited for."""
    return pytest.warns(RelayWarning, match=f"^disk full, trying for {seconds} s$")
