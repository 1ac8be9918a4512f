"""The agents of a drill; each runs in a process of its own until it is killed.

python -m scripts.powercutting.agents ROLE HOME BOOKS SEED [NUMBER]

| role | |
|---|---|
| alice | `relay send --wait taken` |
| bob | `Agent.send(wait="taken")` |
| carol | `Agent.send_many` |
| dave | while no relay runs, NUMBER times: `relay.sh`, `Agent.send`, `Agent.send_many` |
| erin | takes messages with `Agent.receive`, which moves them to `.read` |
| frank | removes them |
| grace | moves them to `.read` by hand |
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Event

from agent_sdk import Agent, NotRunning, RelayWarning
from scripts.powercutting.notes import EVERYONE, RECIPIENTS, Book

LEFT = 0.4  # the share of messages that readers leave


class One:
    """An agent at work."""

    def __init__(self, name: str, home: Path, books: Path, seed: int) -> None:
        self.name, self.home = name, home
        self.dice = random.Random(seed)
        self.book = Book(books, name)
        self._number = 0
        # Not registered: mail for an agent whose process has died goes back to its sender.
        self._me = Agent(name, home, registers=False)

    def body(self) -> str:
        """A text like no other; a few are longer than some blocks."""
        self._number += 1
        size = self.dice.choice([20, 200, 200, 900, 3_000, 20_000])
        text = f"{self.name} {os.getpid()} {self._number} "
        return text + self.dice.choice("abcdefgh") * (size if self._number % 7 == 0 else 50)

    def to(self) -> str:
        return EVERYONE if self.dice.random() < 0.05 else self.dice.choice(RECIPIENTS)

    # -- senders ---------------------------------------------------------------------------

    def alice(self) -> None:
        to, body = self.to(), self.body()
        command = [sys.executable, "-m", "relay", "send", "--home", str(self.home)]
        done = subprocess.run(
            [*command, "--as", self.name, "--wait", "taken", to, body],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            self.book.sent(done.stdout.strip(), to, body)

    def bob(self) -> None:
        to, body = self.to(), self.body()
        try:
            self.book.sent(self._me.send(to, body, wait="taken"), to, body)
        except NotRunning:
            time.sleep(0.05)
        time.sleep(self.dice.uniform(0, 0.03))

    def carol(self) -> None:
        self._send_many(self.dice.randint(2, 12))
        time.sleep(self.dice.uniform(0.05, 0.3))

    def _send_many(self, number: int) -> None:
        texts = [(self.to(), self.body()) for _ in range(number)]
        ids = self._me.send_many({"to": to, "body": body} for to, body in texts)
        for one, (to, body) in zip(ids, texts, strict=True):
            self.book.sent(one, to, body)

    def dave(self) -> None:
        to, body = self.to(), self.body()
        script = Path(__file__).parents[2] / "agent_sdk/relay.sh"
        done = subprocess.run(
            ["sh", str(script), "send", to, body],
            env={**os.environ, "AGENT_RELAY_DIR": str(self.home), "AGENT_RELAY_NAME": self.name},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 5):
            raise SystemExit(f"relay.sh: {done.stderr}")
        self.book.sent(done.stdout.strip(), to, body)
        to, body = self.to(), self.body()
        self.book.sent(self._me.send(to, body, wait=0), to, body)
        self._send_many(3)

    # -- readers ---------------------------------------------------------------------------

    def erin(self) -> None:
        time.sleep(self.dice.uniform(0, 0.05))
        waiting = len(list((self.home / "agents" / self.name / "inbox").glob("*.msg")))
        if waiting > self.dice.randint(3, 12):  # so that some always wait
            since_ns = time.monotonic_ns()
            message = self._me.receive(0)
            if message is not None:
                self.book.taken(message.id, since_ns)

    def frank(self) -> None:
        self._take(lambda path: path.unlink())

    def grace(self) -> None:
        self._take(lambda path: path.rename(path.parent / ".read" / path.name))

    def _take(self, take: Callable[[Path], object]) -> None:
        inbox = self.home / "agents" / self.name / "inbox"
        (inbox / ".read").mkdir(exist_ok=True)
        names = sorted(inbox.glob("*.msg"))
        for path in names:
            if self.dice.random() < LEFT:
                continue
            since_ns = time.monotonic_ns()
            take(path)
            self.book.taken(path.stem, since_ns)
        time.sleep(self.dice.uniform(0.05, 0.3))


def main() -> None:
    """Do it again and again, or so often; SIGTERM ends it after the step in hand, so that what was
    taken is noted."""
    role, home, books, seed, *number = sys.argv[1:]
    warnings.simplefilter("ignore", RelayWarning)  # no relay runs, or not yet
    one = One(role, Path(home), Path(books), int(seed))
    turns = int(number[0]) if number else sys.maxsize
    ended = Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    for _ in range(turns):
        if ended.is_set():
            break
        getattr(one, role)()


if __name__ == "__main__":
    main()
