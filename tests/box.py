"""A relay in a box: real home, ledger, inotify and store; only the clock is a fake.

box.drop("alice", "TO: bob\\n\\nhi")   rename a file into an outbox, as an agent does
box.tick()                             one turn of the loop
box.inbox("bob")                       what stands there
box.kill(); box.open()                 SIGKILL in place, and the next start
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from relay.acomm import store_file
from relay.agents.roster import Roster
from relay.agents.spawner import Spawner
from relay.base.config import Config, encode
from relay.base.home import LEDGER, STORE, Home
from relay.base.message import MessageFile, parse_delivered
from relay.base.metrics import Metrics
from relay.base.watcher import Watcher, WatchEvents, make_watcher
from relay.daemon import recovery
from relay.daemon.journal_commands import run_command
from relay.daemon.opening import open_store, store_key
from relay.daemon.recovery import Context
from relay.daemon.session import make_roller, make_supervisor, poll_supervisor
from relay.delivery.loop import Dispatcher
from relay.delivery.values import Pack, Prune
from relay.engine.checkpoint import Flusher, FlushPolicy, InlineExecutor
from relay.engine.commstore import CommStore
from relay.journal.plan import JournalCommand
from relay.ledger import Ledger
from tests.fakes import FakeClock, FakeSpawner

HOMES: list[Home] = []  # of every box, to be closed after its test: who is killed closes nothing


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
    ) -> None:
        self.spawner = spawner or FakeSpawner()  # the system's side: a kill leaves it as it is
        self.root = root
        self.config = config or Config()
        self.clock = FakeClock()
        self.clock.advance(seconds)
        self.boot = boot
        self.log: list[dict[str, Any]] = []
        self.asked: list[Prune | Pack] = []  # what a session's housekeeper would do
        self._names = 0
        self.home = Home.create(str(root), encode(self.config))
        HOMES.append(self.home)
        for agent in agents:
            self.home.make_agent(agent)
        self.open()

    def open(self) -> None:
        """What the daemon does at its start, up to the first turn."""
        context = self._open_store()
        feed = recovery.recover(context, self.opened.projection, power_cut=self.opened.power_cut)
        detection = self.config.detection
        self.watcher: Watcher = make_watcher(
            self.home, detection.watcher, detection.poll_interval_ms
        )
        self.roster = Roster(self.home, self.watcher, self.config.lead, self._log)
        self.flusher = Flusher(
            self.store,
            self.home.path(STORE),
            FlushPolicy(100, 5000, 0, self.config.store.compress),  # each five seconds
            self.clock,
            InlineExecutor(),
            key=self.key,
            journal=self.events,
        )
        roller = make_roller(self.store, self.config, self.clock, InlineExecutor())
        self.dispatcher = Dispatcher(
            config=context.config,
            home=context.home,
            ledger=context.ledger,
            store=context.store,
            events=context.events,
            flusher=self.flusher,
            roller=roller,
            roster=self.roster,
            metrics=context.tally,
            clock=context.clock,
            log=context.log,
        )
        self.supervisor = make_supervisor(context, self.dispatcher, InlineExecutor(), self.spawner)
        self.dispatcher.requeue(feed)
        self.deadline = self.dispatcher.tick(WatchEvents(agents_changed=True, scan=True))

    def _open_store(self) -> Context:
        """The ledger, and the store with its journal: what the parts work on."""
        self.ledger = Ledger.open(self.home.path(LEDGER))
        self.key = store_key(self.home, self.config, make=True)
        self.opened = open_store(
            self.home,
            self.clock,
            self.config,
            self.key,
            lambda text: self._log(text),
            ledger_position=self.ledger.position(),
            boot=self.boot,
        )
        self.store: CommStore = self.opened.store
        self.events = self.opened.log
        self.tiers = self.opened.tiers
        return Context(
            config=self.config,
            home=self.home,
            ledger=self.ledger,
            store=self.store,
            events=self.events,
            clock=self.clock,
            log=self._log,
            tally=Metrics(self.clock),
        )

    def kill(self) -> None:
        """Nothing is finished, nothing is written: the process is gone."""
        self.watcher.close()
        self.ledger.close()
        self.events.close()

    def close(self) -> None:
        """A clean end."""
        self.dispatcher.drain()
        self.kill()
        self.home.close()

    def tick(self, times: int = 1) -> None:
        """Let the loop run: what inotify has told, and what is due."""
        for _ in range(times):
            self.deadline = self.dispatcher.tick(self.watcher.wait(0))
            for order in self.dispatcher.pop_jobs():
                if isinstance(order, JournalCommand):
                    run_command(self.home, self.opened, self.clock, order)
                else:
                    self.asked.append(order)
            poll_supervisor(self.supervisor, self.dispatcher)

    def flush(self) -> None:
        """Five seconds later the store is written, and the originals go to the archive."""
        self.clock.advance(5)
        self.tick(2)

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

    def take(self, agent: str, message_id: str) -> None:
        """The agent reads: the file leaves its inbox."""
        inbox = self.path("agents", agent, "inbox")
        os.rename(inbox / f"{message_id}.msg", inbox / ".read" / f"{message_id}.msg")

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

    def outbox(self, agent: str) -> list[str]:
        """File names in an outbox, .pending left out."""
        return sorted(p.name for p in self.path("agents", agent, "outbox").glob("*.msg"))

    def path(self, *parts: str) -> Path:
        """A path below the home."""
        return self.root.joinpath(*parts)

    # -- what a person sees ------------------------------------------------------------

    def sql(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the ledger as ``sqlite3`` would, from another connection."""
        with sqlite3.connect(self.home.path(LEDGER)) as db:
            rows = db.execute(query, values).fetchall()
        db.close()
        return rows

    def row(self, message_id: str) -> dict[str, Any]:
        """One row of messages."""
        names = ("status", "last_error", "file_path", "retry_count", "target", "message_type")
        (found,) = self.sql(
            f"SELECT {', '.join(names)} FROM messages WHERE message_id = ?", message_id
        )
        return dict(zip(names, found, strict=True))

    def states(self, message_id: str) -> dict[str, str]:
        """Recipient -> state of its delivery."""
        return dict(
            self.sql("SELECT recipient, state FROM deliveries WHERE message_id = ?", message_id)
        )

    def stored(self) -> list[str]:
        """Relay ids of the messages in the store's file."""
        file = store_file.read(self.home.path(STORE))
        return [str((m.metadata or {}).get("relay_id")) for m in file.messages]

    def _log(self, event: str, **facts: object) -> None:
        self.log.append({"event": event, **facts})
