"""An outbox, an Intake and a clock, for tests that look file by file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from relay.base.clock import NS_PER_S
from relay.base.config import Config, DetectionSettings, LimitSettings
from relay.base.home import Home
from relay.base.incidents import Refusal
from relay.delivery.intake import Intake
from relay.delivery.values import Inbound, Resources
from tests.fakes import FakeClock

START_NS = 1_769_851_800 * NS_PER_S
NAME = "1769851800000000000-a1b2c3d4.msg"
GOOD = b"TO: bob\n\nhi"


class Desk:
    """alice's outbox, and the Intake that looks into it. Every mtime is the fake clock's."""

    def __init__(self, root: Path, detection: DetectionSettings, limits: LimitSettings) -> None:
        self.clock = FakeClock(START_NS)
        self.log: list[dict[str, Any]] = []
        self.home = Home.create(str(root))
        self.home.make_agent("alice")
        self.outbox = root / "agents" / "alice" / "outbox"
        config, nothing = Config(detection=detection, limits=limits), cast(Any, None)
        given = Resources(config, self.home, *[nothing] * 3, self.clock, self._note)
        self.intake = Intake(given)

    def _note(self, event: str, **facts: Any) -> None:
        self.log.append({"event": event, **facts})

    def write(self, data: bytes, name: str = NAME, *, mtime_s: float | None = None) -> Path:
        """Write a file in place; its mtime is now, or ``mtime_s`` from now."""
        path = self.outbox / name
        path.write_bytes(data)
        return self.touch(path, mtime_s or 0)

    def touch(self, path: Path, offset_s: float = 0) -> Path:
        at = self.clock.now_ns() + int(offset_s * NS_PER_S)
        os.utime(path, ns=(at, at))
        return path

    def rename(self, data: bytes, name: str = NAME) -> Path:
        """Write a file in .pending and rename it into place, as the protocol has it."""
        temp = self.outbox / ".pending" / name
        temp.write_bytes(data)
        self.touch(temp)
        return temp.rename(self.outbox / name)

    def hint(self, name: str = NAME, *, renamed: bool) -> None:
        self.intake.add("alice", name, renamed=renamed)

    def written(self, data: bytes, name: str = NAME, *, mtime_s: float | None = None) -> Path:
        """Written in place, and told of."""
        path = self.write(data, name, mtime_s=mtime_s)
        self.hint(name, renamed=False)
        return path

    def renamed(self, data: bytes, name: str = NAME) -> Path:
        """Renamed into place, and told of."""
        path = self.rename(data, name)
        self.hint(name, renamed=True)
        return path

    def scan(self) -> None:
        with self.home.dirs() as dirs:
            self.intake.scan(dirs, "alice")

    def take(self, limit: int = 256) -> list[Inbound]:
        with self.home.dirs() as dirs:
            return self.intake.read_batch(dirs, limit)

    def due_in_s(self) -> float | None:
        """When something is to be looked at, from now; 0 for now, None for never."""
        due = self.intake.due_ns()
        return None if due is None else max(0, due - self.clock.monotonic_ns()) / NS_PER_S


def bodies(looks: list[Inbound]) -> list[bytes]:
    """The bodies of looks that are all accepted."""
    assert all(look.message and not look.refusal for look in looks), looks
    return [look.message.body for look in looks if look.message is not None]


def reason(looks: list[Inbound]) -> str:
    """Why the one file that was looked at is malformed."""
    (look,) = looks
    assert look.message is None and look.refusal is not None, look
    assert "\n" not in look.refusal.reason
    return look.refusal.reason


def bounce(result: object) -> str:
    """Why the router found no recipient."""
    assert isinstance(result, Refusal), result
    assert "\n" not in result.reason
    return result.reason
