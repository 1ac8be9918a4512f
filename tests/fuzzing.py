"""Arbitrary files in outboxes, and what must hold whatever they are.

    never a fault of ours  no line of the log at level error
    always an answer      each file is delivered, or refused by one line, or stands in its outbox
    nothing is lost       every file that was put there is in the archive, or still there
    nobody else waits     a plain message of another agent arrives with the same turn

Used by a short run in the suite, and by scripts/fuzz for as long as one likes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.box import Box

HEADERS = (
    b"TO: bob", b"TO: *", b"TO: #team", b"TO: Lead", b"TO: __orchestrator__", b"TO: alice", b"TO:",
    b"KIND: command", b"KIND: ack", b"KIND: query", b"KIND: response", b"KIND: spawn",
    b"KIND: join", b"KIND: subscribe", b"KIND: status", b"KIND: nonsense", b"THREAD: t-1",
    b"RE: 1700000000000000001-00000001", b"RE: x", b"PRIORITY: 0", b"PRIORITY: 9", b"TTL: 1",
    b"TTL: -1", b"TOPIC: build.front", b"TOPIC: ##", b"DELIVERY: exactly-once", b"AWAIT: 30s",
    b"AWAIT: 0", b"ATTACHMENT: sha256:" + b"a" * 64, b"ATTACHMENT: x", b"CHECKSUM: x",
    b"SIGNATURE: ed25519:" + b"A" * 86 + b"==", b"SIGNATURE: x", b"FROM: operator", b"ID: 1",
    b"SENT: never", b"CHANNEL: team", b"ACTION: dead.purge", b"NAME: x", b"X-Own: \xc3\xa9",
    b"X: \x00", b"X: \xff", b"x:y:z", b"no colon", b": no name", b" TO: bob", b"TO : bob",
    b"TO: bob\r", b"X: " + b"v" * 5000, b"X\xe2\x80\xa8TO: carol",
)  # fmt: skip
GOOD_TO = (
    b"TO: bob",
    b"TO: *",
    b"TO: dave",
    b"to: operator",
    b"TO: __orchestrator__\nKIND: status",
)
GOOD = (
    b"THREAD: t-1", b"PRIORITY: 0", b"TTL: 60", b"DELIVERY: at-least-once", b"X-Own: \xc3\xa9",
    b"FROM: operator", b"ID: 1", b"KIND: query", b"KIND: notification", b"AWAIT: 30s",
)  # fmt: skip
BODIES = (
    b"", b"hi", b"completed\nx", b"CHANNEL: team", b"CHANNEL: team\nPATTERN: build.#",
    b"ACTION: channel.create\nCHANNEL: team\nTYPE: group",
    b"ACTION: agent.key\nNAME: bob\nKEY: none",
    b"\xff\xfe", b"\x00" * 10, b"\n\n\n", b"x" * 2000, "naïve — ☃".encode(),
)  # fmt: skip
NAMES = (
    "{n}.msg", "{n}-.msg", "{n}-0a.msg", "{n}-zz.msg", "hello-{n}.msg", "{n}.MSG", ".{n}.msg",
    "{n}-0a.msg.msg", "{n} 0a.msg", "-{n}.msg", "{n}-\u2028.msg", "é{n}.msg", "{n}\n.msg",
)  # fmt: skip


def any_bytes(rng: random.Random) -> bytes:
    """A file: made of header lines that mean something, or mutated, or noise."""
    shape = rng.random()
    if shape < 0.15:
        return rng.randbytes(rng.randrange(0, 400))
    if shape < 0.5:
        lines = [rng.choice(GOOD_TO), *rng.sample(GOOD, rng.randrange(0, 3))]
        return b"\n".join(lines) + b"\n\n" + rng.choice((b"hi", b"x\n\ny: z", "☃".encode()))
    lines = [rng.choice(HEADERS) for _ in range(rng.randrange(0, 6))]
    end = rng.choice((b"\n", b"\n", b"\n", b"\r\n"))
    data = end.join([b"TO: bob"] * (rng.random() < 0.5) + lines) + end + end + rng.choice(BODIES)
    if shape < 0.7:
        return data
    spoiled = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        if not spoiled:
            break
        at = rng.randrange(len(spoiled))
        match rng.randrange(4):
            case 0:
                spoiled[at] = rng.randrange(256)
            case 1:
                del spoiled[at:]
            case 2:
                spoiled[at:at] = spoiled[: rng.randrange(len(spoiled))]
            case _:
                spoiled[at:at] = rng.choice((b"\n", b"\n\n", b": ", b"\x00", b"\r"))
    return bytes(spoiled)


def any_name(rng: random.Random, number: int) -> str:
    """A file name: mostly a good one."""
    n = str(1_700_000_000_000_000_000 + number)
    if rng.random() < 0.7:
        return f"{n}-{number:08x}.msg"
    if rng.random() < 0.2:
        return os.fsdecode(rng.randbytes(12).replace(b"/", b"_").replace(b"\0", b"_") + b".msg")
    return rng.choice(NAMES).format(n=n)


class Fuzz:
    """One box that is fed; ``step`` puts a handful of files in and checks all of it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.box = Box(root, "alice", "bob", "carol", "dave")
        self._number = 0
        self._put: list[tuple[str, str, bytes]] = []
        self._plain = 0
        self.refused = self.taken = 0  # files, so far

    def step(self, files: int = 8) -> None:
        """Files of alice's, in one go, and a plain one of carol's."""
        new: list[tuple[str, str, bytes]] = []
        for _ in range(files):
            self._number += 1
            name, data = any_name(self.rng, self._number), any_bytes(self.rng)
            if not os.path.lexists(self._outbox("alice") / name):
                self._put_file("alice", name, data)
                new.append(("alice", name, data))
        self._plain += 1
        self._number += 1
        plain = f"{1_800_000_000_000_000_000 + self._number}-{self._number:08x}.msg"
        self._put_file("carol", plain, f"TO: dave\n\nplain {self._plain}".encode())
        self.box.tick()
        assert (self._inbox("dave") / plain).exists(), "another agent's message did not arrive"
        self.box.after(6)
        for agent, name, data in new:
            self._check(agent, name, data)
        errors = [line for line in self.box.log if line.get("level") == "error"]
        assert not errors, errors
        self._clear()

    def _check(self, agent: str, name: str, data: bytes) -> None:
        if not name.endswith(".msg") or name.startswith("."):
            assert (self._outbox(agent) / name).read_bytes() == data, "not ours, and touched"
            os.unlink(self._outbox(agent) / name)
            return
        assert not os.path.lexists(self._outbox(agent) / name), f"{name!r} still waits"
        kept = [p for p in self.box.path("archive").rglob("*") if p.name == name]
        assert [p.read_bytes() for p in kept] == [data], f"{name!r} is not in the archive"
        is_refused = kept[0].parent.name == "rejected"
        self.refused += is_refused
        self.taken += not is_refused
        for nack in self.box.nacks(agent):
            assert nack.endswith("\n"), nack
        if is_refused:
            reasons = self.box.sql(
                "SELECT last_error FROM messages WHERE message_id = ? AND status = 'failed' "
                "UNION ALL SELECT reason FROM rejections WHERE agent = ?",
                name.removesuffix(".msg").encode(errors="replace").decode(errors="replace"),
                agent,
            )
            assert reasons
            for (reason,) in reasons:
                assert reason and "\n" not in reason and "Traceback" not in reason, reason

        else:
            row = self.box.row(name.removesuffix(".msg"))
            assert row["status"] == "archived", row

    def _clear(self) -> None:
        """Inboxes and archive are emptied: what is looked at stays small."""
        for folder in (self._inbox(agent) for agent in ("alice", "bob", "dave")):
            for path in folder.glob("*.msg"):
                path.unlink()
        for path in self.box.path("archive").rglob("*"):
            if path.is_file():
                path.unlink()
        self.box.tick()
        self.box.log.clear()

    def _put_file(self, agent: str, name: str, data: bytes) -> None:
        pending = self._outbox(agent) / ".pending" / name
        pending.write_bytes(data)
        os.rename(pending, self._outbox(agent) / name)

    def _outbox(self, agent: str) -> Path:
        return self.box.path("agents", agent, "outbox")

    def _inbox(self, agent: str) -> Path:
        return self.box.path("agents", agent, "inbox")
