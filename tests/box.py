"""A relay in a box: real home, ledger, inotify and store; only the clock is a fake.

box.drop("alice", "TO: bob\\n\\nhi")   rename a file into an outbox, as an agent does
box.tick()                             one turn of the loop
box.after(60)                          a minute later: the loop has done what was due
box.inbox("bob")                       the messages in an inbox
box.restart()                          SIGKILL in place, and the next start
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from relay.acomm import store_file
from relay.agents.roster import Roster
from relay.agents.spawner import Spawner
from relay.agents.supervisor import Supervisor
from relay.base.config import Config
from relay.base.home import LEDGER, STORE, Home
from relay.base.message import MessageFile, parse_delivered
from relay.base.watcher import InotifyWatcher, Watcher
from relay.daemon.session import Executors, Session
from relay.delivery.eventlog import EventLog
from relay.delivery.loop import Dispatcher
from relay.engine.checkpoint import Flusher, InlineExecutor
from relay.engine.engine import Engine
from relay.journal.segment import SegmentPolicy
from relay.journal.tiers import Tiers
from relay.ledger.ledger import Ledger
from tests.fakes import FakeClock, FakeDisk, FakeSpawner

# Zeros that the journal is filled with ahead: a mebibyte is a quarter of the time of a box.
SegmentPolicy.__new__.__defaults__ = SegmentPolicy(slice_bytes=1 << 16)

# The kernel takes its time to close an inotify descriptor, half of a box's: nobody waits for it.
_closing = ThreadPoolExecutor(1, "close-inotify")


def _close_later(watcher: InotifyWatcher) -> None:
    _closing.submit(close_watcher, watcher)


def open_descriptors() -> list[str]:
    """The descriptors of this process, when those of watchers that were closed are closed, and
    those of what tests before it left."""
    gc.collect()
    _closing.submit(int).result()
    return sorted(os.listdir("/proc/self/fd"))


def descriptors_below(folder: Path) -> list[str]:
    """The paths below a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(f"{folder}"))


close_watcher = InotifyWatcher.close
InotifyWatcher.close = _close_later  # type: ignore[method-assign]

# No threads: the loop does all work itself, at once.
INLINE = Executors(InlineExecutor(), InlineExecutor(), InlineExecutor(), pause_s=0)
BOXES: list[Box] = []  # to be given back after their test: who is killed closes nothing


class Box:
    """One home and the daemon's parts for it, turned by hand."""

    def __init__(
        self,
        root: Path,
        *agents: str,
        config: Config | None = None,
        boot: str = "boot-1",
        seconds: int = 0,
        spawner: Spawner | None = None,
        executors: Executors | None = None,
    ) -> None:
        self.spawner = spawner or FakeSpawner()  # the system's side: a kill leaves it as it is
        self.executors = executors or INLINE
        self.root = root
        self.config = _flushing_often(config or Config())
        self.disk = FakeDisk()
        self.clock = FakeClock()
        self.clock.jump(seconds)  # the other clock begins again with each boot
        self.boot = boot
        self.log: list[dict[str, Any]] = []
        self._names = 0
        self.is_open = False
        self.home = Home.create(str(root), msgspec.json.encode(self.config))
        BOXES.append(self)
        for agent in agents:
            self.home.make_agent(agent)
        self.open()

    def open(self) -> None:
        """What the daemon does at its start, up to the first turn."""
        self.session = Session(
            self.home,
            self.config,
            self.clock,
            self._log,
            executors=self.executors,
            spawner=self.spawner,
            measure_disk=self.disk,
            boot=self.boot,
        )
        opened = self.session.opened
        self.ledger: Ledger = self.session.ledger
        self.store: Engine = opened.store
        self.events: EventLog = opened.events
        self.tiers: Tiers = opened.tiers
        self.watcher: Watcher = self.session.watcher
        self.flusher: Flusher = self.session.flusher
        self.dispatcher: Dispatcher = self.session.dispatcher
        self.supervisor: Supervisor = self.session.supervisor
        self.session.begin()
        self.is_open = True

    @property
    def roster(self) -> Roster:
        """The agents."""
        return self.dispatcher.roster

    @property
    def deadline(self) -> int:
        """When the dispatcher has something to do (monotonic ns)."""
        return self.dispatcher.due_ns

    def kill(self) -> None:
        """Nothing is finished, nothing is written: the process is gone."""
        self.session.close()
        self.is_open = False

    def restart(self) -> None:
        """Kill it, and start the next one."""
        self.kill()
        self.open()

    def stop(self) -> None:
        """End it cleanly; its home stays open."""
        self.dispatcher.drain()
        self.kill()

    def close(self) -> None:
        """End it cleanly if it has not ended yet, and give its home back."""
        if self.is_open:
            self.stop()
        self.home.close()

    def give_back(self) -> None:
        """Close what it still has open, as the system does with a process that has ended."""
        if "session" in vars(self):
            self.session.close()
        self.home.close()

    def tick(self, times: int = 1) -> None:
        """Let the loop run: what inotify has told, and what is due."""
        for _ in range(times):
            self.session.turn(is_waiting=False)

    def after(self, seconds: float, turns: int = 3) -> None:
        """Advance the clock, and let the loop run: by default until nothing is due now."""
        self.clock.advance(seconds)
        self.tick(turns)

    def until_dead(self) -> None:
        """Wait for four attempts of a minute each; 1, 2 and 4 s are between them."""
        for pause_s in (1, 2, 4):
            self.after(60)
            self.after(pause_s)
        self.after(60)

    @contextmanager
    def broken_inbox(self, agent: str) -> Iterator[None]:
        """The agent's inbox cannot be written as long as the block lasts."""
        inbox, aside = self.path("agents", agent, "inbox"), self.path("tmp", f"inbox-{agent}")
        inbox.rename(aside)
        inbox.write_text("a file where a directory must be")
        yield
        inbox.unlink()
        aside.rename(inbox)

    def flush(self) -> None:
        """Five seconds later the store is written, and the originals go to the archive."""
        self.after(5, turns=2)

    # -- the agents' side --------------------------------------------------------------

    def name(self) -> str:
        """A file name as the shell script makes it, in order."""
        self._names += 1
        return f"{1_700_000_000_000_000_000 + self._names}-{self._names:08x}.msg"

    def drop(self, agent: str, text: str | bytes, name: str | None = None) -> str:
        """Write into .pending and rename into the outbox; the message id."""
        name = name or self.name()
        data = text.encode() if isinstance(text, str) else text
        pending = self.path("agents", agent, "outbox", ".pending", name)
        pending.write_bytes(data)
        os.rename(pending, self.path("agents", agent, "outbox", name))
        return name.removesuffix(".msg")

    def send(self, agent: str, text: str | bytes, name: str | None = None) -> str:
        """``drop``, and a turn of the loop."""
        message_id = self.drop(agent, text, name)
        self.tick()
        return message_id

    def send_many(self, count: int, flush_every: int) -> None:
        """Send numbered messages from alice to bob, and flush after each so many."""
        for number in range(count):
            self.send("alice", f"TO: bob\n\nnumber {number}")
            if number % flush_every == flush_every - 1:
                self.flush()

    def command(self, agent: str, action: str, *lines: str) -> str:
        """Send a command to the orchestrator, with these lines of its body; the message id."""
        body = "\n".join([f"ACTION: {action}", *lines])
        return self.send(agent, f"TO: __orchestrator__\nKIND: command\n\n{body}")

    def join(self, channel: str, *agents: str) -> None:
        """Let these agents join a channel; the first of them creates it."""
        for agent in agents:
            self.send(agent, f"TO: __orchestrator__\nKIND: join\n\nCHANNEL: {channel}")

    def take(self, agent: str, message_id: str) -> None:
        """The agent reads: the file leaves its inbox."""
        inbox = self.path("agents", agent, "inbox")
        os.rename(inbox / f"{message_id}.msg", inbox / ".read" / f"{message_id}.msg")

    def remove(self, agent: str, message_id: str) -> None:
        """The agent reads as a shell script does: the file is gone, at the time of the box."""
        inbox = self.path("agents", agent, "inbox")
        (inbox / f"{message_id}.msg").unlink()
        os.utime(inbox, ns=(self.clock.now_ns(), self.clock.now_ns()))

    def attach(self, content: bytes, digest: str = "") -> Path:
        """Content in the store of attachments, under its own name or another."""
        name = digest or hashlib.sha256(content).hexdigest()
        path = self.path("attachments", name[:2], name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    def inbox(self, agent: str) -> dict[str, MessageFile]:
        """Message id -> message, oldest first."""
        folder = self.path("agents", agent, "inbox")
        return {
            path.stem: parse_delivered(path.read_bytes(), file=path.name)
            for path in sorted(folder.glob("*.msg"))
        }

    def bodies(self, agent: str) -> list[str]:
        """The bodies in an inbox, oldest first."""
        return [message.body.decode() for message in self.inbox(agent).values()]

    def nacks(self, agent: str) -> list[str]:
        """What the orchestrator refused, in its words."""
        return [m.body.decode() for m in self.inbox(agent).values() if m.kind == "nack"]

    def acks(self, agent: str) -> list[str]:
        """What the orchestrator and others did, in their words."""
        return [m.body.decode() for m in self.inbox(agent).values() if m.kind == "ack"]

    def outbox(self, agent: str) -> list[str]:
        """File names in an outbox, .pending left out."""
        return sorted(p.name for p in self.path("agents", agent, "outbox").glob("*.msg"))

    def path(self, *parts: str) -> Path:
        """A path below the home."""
        return self.root.joinpath(*parts)

    # -- what a person sees ------------------------------------------------------------

    def sql(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the ledger as ``sqlite3`` would, from another connection."""
        with contextlib.closing(sqlite3.connect(self.home.path(LEDGER))) as db, db:
            rows = db.execute(query, values).fetchall()
        db.close()
        return rows

    def row(self, message_id: str) -> dict[str, Any]:
        """One row of messages."""
        names = (
            *("status", "last_error", "last_error_code", "file_path", "retry_count", "target"),
            "message_type",
        )
        (found,) = self.sql(
            f"SELECT {', '.join(names)} FROM messages WHERE message_id = ?", message_id
        )
        return dict(zip(names, found, strict=True))

    def states(self, message_id: str) -> dict[str, str]:
        """Recipient -> state of its delivery."""
        return dict(
            self.sql("SELECT recipient, state FROM deliveries WHERE message_id = ?", message_id)
        )

    def life(self, agent: str) -> tuple[str, str | None]:
        """Status of an agent, and its reason."""
        ((status, reason),) = self.sql("SELECT status, reason FROM agents WHERE name = ?", agent)
        return status, reason

    def stored(self) -> list[str]:
        """Relay ids of the messages in the store's file."""
        file = store_file.read(self.home.path(STORE))
        return [str((m.metadata or {}).get("relay_id")) for m in file.messages]

    def _log(self, event: str, **facts: object) -> None:
        self.log.append({"event": event, **facts})


MakeBox = Callable[..., Box]  # the fixture `make_box`


def _flushing_often(config: Config) -> Config:
    """The store is written each five seconds, or hundred messages."""
    store = replace(
        config.store, checkpoint_messages=100, checkpoint_ms=5000, checkpoint_pause_factor=0
    )
    return replace(config, store=store)
