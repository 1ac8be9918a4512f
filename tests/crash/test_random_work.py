"""Random work of agents, ended at random calls: what was accepted arrives, and all agree.

The other tests of this folder interrupt a piece of work once. Here three agents send, read, answer,
cancel, join and wait, days pass, the clock is set, mailboxes go and come back, disks are full, and
again and again the relay is killed, in a start as well, or the power goes in one of the ways of
``tests.power``. Then nobody interrupts it any more.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base import fsio
from relay.base.config import Config, JournalSettings, StoreSettings
from relay.base.errors import RelayError
from relay.base.names import ORCHESTRATOR
from relay.delivery.eventlog import EventLog
from tests.box import Box
from tests.crash.test_power import Disk, PowerCut
from tests.fakes import FakeClock
from tests.power import Cut
from tests.sound import findings_of, unknown_moves

pytestmark = pytest.mark.shows("journal 5.3", "ready 1.1", "ready 1.4", "ready 6.3")

AGENTS = ("alice", "bob", "carol")
HEADERS = ("", "", "", "DELIVERY: at-least-once\n", "DELIVERY: exactly-once\n", "TTL: 40\n")
TARGETS = (*AGENTS, "*", "nobody", "#team", "#team", "#stick")
PAUSES_S = (0.5, 1, 5, 30, 61, 1_900, 100_000)
JUMPS_S = (-100_000, -3_600, -30, 30, 3_600, 100_000)
LEAVING = ("bob", "carol")  # retired, or their mailboxes are away for a while
CHANNEL_SETTINGS = (
    "retention: count 3",
    "retention: forever",
    "delivery: at-least-once",
    "delivery: at-most-once",
    "max_pending: 2",
    "max_pending: none",
    "echo: true",
)
OPEN = ("held", "staged")


class Work:
    """Some steps of it, from one seed."""

    def __init__(self, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._dice = dice = random.Random(seed)
        self._patch = monkeypatch
        self._names = 0
        self._homes = 0
        self._sent: list[str] = []
        self._taken: set[tuple[str, str]] = set()
        self._accepted: set[str] = set()
        self._away = ""  # whose mailbox
        self._ahead_s = 0  # the clock was set by as much in all
        self._refused = 0  # that many of the next calls of the relay find the disk full
        rolling = {
            "roll_after_s": dice.choice((60, 3_600)),
            "roll_messages": dice.choice((5, 1000)),
        }
        store = StoreSettings(encrypt=dice.random() < 0.2, **rolling)
        small = JournalSettings(segment_bytes=4_096, compress_after_s=0)
        journal = dice.choice((JournalSettings(), small))
        self._config = Config(store=store, journal=journal)
        self.box = Box(root / "home-0", *AGENTS, config=self._config)
        self.box.command("alice", "channel.create", "CHANNEL: builds", "TYPE: pubsub")
        self.box.command("bob", "channel.subscribe", "CHANNEL: builds", "PATTERN: build.#")
        self.box.join("team", *AGENTS)
        self.box.join("stick", "alice", "bob")
        self.box.command("alice", "channel.config", "CHANNEL: stick", "sticky_messages: true")
        self.box.flush()
        self._watch_commits()
        self._arm()

    def _watch_commits(self) -> None:
        commit = EventLog.commit

        def counted(log: EventLog) -> None:
            commit(log)
            if log is self.box.events:
                self._accepted.update(self.box.store.state.relay_ids)

        self._patch.setattr(EventLog, "commit", counted)

    # -- deaths --------------------------------------------------------------------------

    def _arm(self) -> None:
        """From here on the relay's disk counts its calls; at one of them the relay dies."""
        self._disk = Disk(self.box.root, self._root / f"ledger-{self._homes}")
        self._disk.falls_at = self._dice.choice(
            (0, self._dice.randint(1, 60), self._dice.randint(1, 400))
        )
        self._patch.setattr(fsio, "fault", self._fault)

    def _fault(self, call: str, name: str) -> None:
        if self._refused and call in ("create", "write", "truncate"):
            self._refused -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        self._disk(call, name)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except PowerCut:
            self._die()

    def _die(self) -> None:
        """The relay is killed, or the power goes; the next one starts, and may die in that."""
        self._patch.setattr(fsio, "fault", lambda *_: None)
        self._refused = 0
        self._put_back()
        was_killed = self._dice.random() < 0.3
        self.box.kill()
        if not was_killed:
            self._cut()
        self._disk.close()
        self._arm()
        self._run(self.box.open)

    def _cut(self) -> None:
        """The home as the next boot finds it."""
        self._homes += 1
        root = self._root / f"home-{self._homes}"
        self._disk.cut(root, self._dice.choice(list(Cut)), self._dice)
        passed_s = (self.box.clock.now_ns() - FakeClock().now_ns()) // 10**9 + 5
        self.box.home.close()
        boot = f"boot-{self._homes + 1}"
        self.box = Box(root, *AGENTS, config=self._config, boot=boot, seconds=passed_s)
        self.box.kill()

    # -- what the agents do ------------------------------------------------------------------

    def step(self) -> None:
        """One of them does something, and the loop runs."""
        actions = (
            (40, self._send),
            (15, self._wait),
            (20, self._read),
            (8, lambda: self._run(self.box.flush)),
            (5, self._cancel),
            (3, self._settle_dead_letter),
            (2, self._join),
            (7, self._die),
            (3, self._set_clock),
            (3, self._move_mailbox),
            (2, self._retire),
            (3, self._change_channel),
            (3, self._publish),
            (3, self._attach),
            (2, self._remove),
            (2, self._tidy),
            (3, self._fill_disk),
        )
        weights, acts = zip(*actions, strict=True)
        self._dice.choices(acts, weights)[0]()

    def _drop(self, agent: str, text: str) -> str:
        self._names += 1
        if agent == self._away:
            agent = "alice"
        return self.box.drop(agent, text, f"{1_000_000_000 + self._names}-{self._names:04x}.msg")

    def _order(self, agent: str, action: str, line: str) -> None:
        self._drop(agent, f"TO: {ORCHESTRATOR}\nKIND: command\n\nACTION: {action}\n{line}")
        self._run(self.box.tick)

    def _send(self) -> None:
        dice = self._dice
        kind = dice.choice(("message", "command", "query"))
        header = dice.choice((*HEADERS, "NOT-BEFORE: 20s\n"))
        text = f"TO: {dice.choice(TARGETS)}\nKIND: {kind}\n{header}\n{self._names}"
        self._sent.append(self._drop(dice.choice(AGENTS), text))
        if dice.random() < 0.8:
            self._run(self.box.tick)

    def _wait(self) -> None:
        pause_s = self._dice.choice(PAUSES_S)
        self._run(lambda: self.box.after(pause_s))

    def _oldest(self, agent: str) -> list[str]:
        """The ids of what stands in an inbox, some of the oldest."""
        inbox = self.box.path("agents", agent, "inbox")
        found = sorted(path.stem for path in inbox.glob("*.msg"))[: self._dice.randint(1, 3)]
        self._taken.update((message_id, agent) for message_id in found)
        return found

    def _read(self) -> None:
        agent = self._dice.choice(AGENTS)
        for message_id in self._oldest(agent):
            self.box.take(agent, message_id)
            if self._dice.random() < 0.4:
                word = self._dice.choice(("completed", "in_progress"))
                self._drop(agent, f"TO: alice\nKIND: ack\nRE: {message_id}\n\n{word}")
        self._run(self.box.tick)

    def _cancel(self) -> None:
        if self._sent:
            self._order("operator", "message.cancel", f"ID: {self._dice.choice(self._sent[-5:])}")

    def _settle_dead_letter(self) -> None:
        dead = self.box.sql("SELECT min(message_id) FROM deliveries WHERE state = 'dead'")[0][0]
        if dead is not None:
            action = self._dice.choice(("dead.replay", "dead.replay", "dead.discard"))
            self._order("operator", action, f"ID: {dead}")

    def _join(self) -> None:
        kind = self._dice.choice(("join", "leave"))
        self._drop(self._dice.choice(AGENTS), f"TO: {ORCHESTRATOR}\nKIND: {kind}\n\nCHANNEL: stick")
        self._run(self.box.tick)

    def _publish(self) -> None:
        topic = self._dice.choice("abc")
        text = f"TO: #builds\nTOPIC: build.{topic}\n\n{self._names}"
        self._sent.append(self._drop(self._dice.choice(AGENTS), text))
        self._run(self.box.tick)

    def _attach(self) -> None:
        content = self._dice.randbytes(8)
        self.box.attach(content)
        digest = hashlib.sha256(content).hexdigest()
        text = f"TO: {self._dice.choice(TARGETS)}\nATTACHMENT: sha256:{digest}\n\nwith it"
        self._sent.append(self._drop("alice", text))
        self._run(self.box.tick)

    def _remove(self) -> None:
        agent = self._dice.choice(AGENTS)
        for message_id in self._oldest(agent):
            self.box.remove(agent, message_id)
        self._run(self.box.tick)

    # -- what the operator and the machine do ------------------------------------------------

    def _set_clock(self) -> None:
        jump_s = self._dice.choice(JUMPS_S)
        self._ahead_s += jump_s
        self.box.clock.jump(jump_s)
        self._run(self.box.tick)

    def _move_mailbox(self) -> None:
        """Of somebody to elsewhere, or the one that is away back."""
        if not self._put_back():
            self._away = self._dice.choice(LEAVING)
            os.rename(self.box.path("agents", self._away), self._elsewhere())
        self._run(self.box.tick)

    def _elsewhere(self) -> Path:
        return self.box.path("tmp", f"away-{self._away}")

    def _put_back(self) -> bool:
        """Put back the mailbox that is away, if there is one."""
        was_away = self._away
        if was_away:
            os.rename(self._elsewhere(), self.box.path("agents", was_away))
            self._away = ""
            self._disk.sync_all()  # as whoever moves a mailbox does
        return was_away != ""

    def _retire(self) -> None:
        action = self._dice.choice(("agent.retire", "agent.revive", "agent.revive"))
        self._order("operator", action, f"NAME: {self._dice.choice(LEAVING)}")

    def _change_channel(self) -> None:
        actions = ("channel.pause", "channel.resume", "channel.drain", "channel.config")
        action = self._dice.choice(actions)
        setting = self._dice.choice(CHANNEL_SETTINGS) if action == "channel.config" else ""
        self._order("operator", action, f"CHANNEL: team\n{setting}")

    def _tidy(self) -> None:
        actions = ("prune", "archive.pack", "journal.seal", "journal.compress")
        self._order("operator", self._dice.choice(actions), "")

    def _fill_disk(self) -> None:
        self._refused = self._dice.choice((1, 2, 5, 30))
        self._run(self._work_on_full_disk)
        self._refused = 0

    def _work_on_full_disk(self) -> None:
        """A session that fails ends, and the daemon begins another one."""
        work = self.box.tick
        for _ in range(self._refused):
            try:
                return work()
            except (OSError, RelayError):
                self.box.kill()
                work = self.box.open
        work()

    # -- the end ---------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing happens any more: all that is due is done, and what is final rolls."""
        self._patch.setattr(fsio, "fault", lambda *_: None)
        self._put_back()
        self._disk.close()
        self.box.clock.jump(
            max(0, -self._ahead_s)
        )  # what is not before a time is not held for days
        self.box.tick(3)
        for agent in LEAVING:
            self.box.command("operator", "agent.revive", f"NAME: {agent}")
        self.box.command("operator", "channel.resume", "CHANNEL: team")
        for pause_s in (*[61] * 8, *[1_900] * 3, 100_000, 61, 61):
            self.box.after(pause_s)
        self.box.flush()
        self.box.tick(40)

    def faults(self) -> list[str]:
        """What is wrong in the end."""
        box = self.box
        known = {row[0] for row in box.sql("SELECT message_id FROM messages")}
        wrong = [f"{one} was accepted, and is not known" for one in self._accepted - known]
        for message_id, agent, state in box.sql(
            "SELECT message_id, recipient, state FROM deliveries"
        ):
            if agent != ORCHESTRATOR:
                wrong += self._faults_of(message_id, agent, state)
        wrong += [f"left: {path}" for path in box.path("agents").glob("*/inbox/.pending/*.msg")]
        wrong += [f"left: {path}" for path in box.path("agents").glob("*/outbox/*.msg")]
        box.stop()
        box.close()
        return wrong + findings_of(str(box.root)) + unknown_moves(str(box.root))

    def _faults_of(self, message_id: str, agent: str, state: str) -> list[str]:
        path = self.box.path("agents", agent, "inbox", f"{message_id}.msg")
        about = f"{message_id} of {agent} is {state}"
        is_there = path.exists()
        wrong = []
        if state in OPEN or (state == "written" and not is_there):
            wrong.append(f"{about}, and {'stands' if is_there else 'does not stand'} in the inbox")
        if state == "read" and (message_id, agent) not in self._taken:
            wrong.append(f"{about}, and nobody took it")
        # As "dead": the attempt after it ended so, since the agent or its mailbox was not there.
        may_stand = ("bounced", "expired") if agent in LEAVING else ()
        if is_there and state not in ("written", "acked", "dead", *may_stand):
            wrong.append(f"{about}, and stands in the inbox")
        if is_there and state != "acked" and b"\n\n" not in path.read_bytes():
            wrong.append(f"{about}, and its file is damaged")
        return wrong


def play(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work from a seed, healed, and looked at."""
    work = Work(root, seed, monkeypatch)
    for _ in range(50):
        work.step()
    work.heal()
    assert work.faults() == []


@pytest.mark.damages  # homes that were left behind by a cut
@pytest.mark.parametrize("seed", range(20))
def test_what_was_accepted_arrives_and_all_agree(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, seed, monkeypatch)


@pytest.mark.nightly
@pytest.mark.damages
@pytest.mark.parametrize("seed", range(20, 1_000))
def test_the_same_a_thousand_times(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, seed, monkeypatch)
