"""Races of a send against the end of a turn: ``python -m tests.reach.races HOME NUMBER SEED``.

Each hook is a process with real stdin and stdout, forked from one that has loaded the modules.
While the Stop hook of a session runs, a message is renamed into its agent's inbox, at a random
moment of it. A turn that is not refused its end is over, and what waits then is rung for, as by the
bell.
Prints how often which way was taken, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from relay.base import discovery, message
from relay.reach import bell, context, evidence, hook, owed
from relay.reach.rungs import ring_text
from relay.reach.session import IDLE, Session, load_session
from tests.reach.hooks import text_of

LOADED = (bell, context, discovery, evidence, message, owed)  # a fork does not load them again


class Turns:
    """A session, turn by turn."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.transcript = root.parent / "transcript.jsonl"
        self.transcript.touch()
        self.seen: Counter[str] = Counter()  # id -> how often it was shown as new
        self.again: Counter[str] = Counter()  # and as shown before
        self.ways: Counter[str] = Counter()
        self.delay_s = 0.01  # found so that one way is taken as often as the other
        self.hook("SessionStart", source="startup")

    def hook(self, event: str, **facts: Any) -> str:
        """Run a hook; the text that it brought into the context."""
        facts |= {"session_id": "s-1", "transcript_path": str(self.transcript)}
        stdin, stdout = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(stdin[0], 0)
            os.dup2(stdout[1], 1)
            os.closerange(3, 64)
            os._exit(hook.main(["claude", event, "--home", str(self.root), "--as", "bob"]))
        os.close(stdin[0])
        os.close(stdout[1])
        with open(stdin[1], "wb") as file:
            file.write(json.dumps(facts).encode())
        with open(stdout[0], "rb") as file:
            out = file.read().decode()
        assert os.waitpid(pid, 0)[1] == 0
        text = text_of(out, event)
        for line in text.splitlines():
            if line.startswith("Message "):
                is_again = "shown before, perhaps not seen" in line
                (self.again if is_again else self.seen)[line.split()[1]] += 1
        if text:
            with open(self.transcript, "a") as file:
                file.write(json.dumps({"content": text}) + "\n")
        return text

    def race(self, number: int) -> None:
        """One turn, at the end of which a message comes."""
        self.hook("UserPromptSubmit", prompt="go on")
        message_id = f"{1700000000000000000 + number}-aa"
        delay = self.random.uniform(0.5, 1.5) * self.delay_s
        sender = threading.Thread(target=self._send, args=(message_id, delay))
        sender.start()
        is_refused = bool(self.hook("Stop"))
        sender.join()
        self.delay_s *= 1.1 if is_refused else 0.9
        if is_refused:
            assert self.session.state == "working"
            assert self.hook("Stop", stop_hook_active=True) == ""
            self.ways["at the stop"] += 1
        assert self.session.state == IDLE
        if waits := hook.waiting(str(self.root), self.session):
            # Who sent it finds an idle session from then on: the bell rings.
            assert self.sent_at > self.session.state_at, "it came before the turn was over"
            assert self.hook("UserPromptSubmit", prompt=ring_text(len(waits)))
            self.hook("Stop")
            self.ways["by the bell"] += 1

    @property
    def session(self) -> Session:
        """The session's file."""
        found = load_session(str(self.root), "claude", "s-1")
        assert found is not None
        return found

    def _send(self, message_id: str, delay: float) -> None:
        inbox = self.root / "agents/bob/inbox"
        pending = inbox / ".pending" / message_id
        pending.write_text(f"FROM: alice\nTO: bob\n\nnumber {message_id}")
        time.sleep(delay)
        os.rename(pending, inbox / f"{message_id}.msg")
        self.sent_at = time.time_ns()


def main(home: str, count: str, seed: str) -> None:
    """Run the races, and check them all."""
    turns = Turns(Path(home), int(seed))
    for number in range(int(count)):
        turns.race(number)
    turns.hook("PreToolUse")
    ids = [f"{1700000000000000000 + number}-aa" for number in range(int(count))]
    assert not hook.waiting(str(turns.root), turns.session) and not turns.session.offered
    read = {one[:-4] for one in os.listdir(turns.root / "agents/bob/inbox/.read")}
    print(
        json.dumps(
            {
                "unseen": len([one for one in ids if not turns.seen[one] + turns.again[one]]),
                "twice as new": len([one for one in ids if turns.seen[one] > 1]),
                "shown again": sum(turns.again.values()),
                "not read": len(set(ids) - read),
                **turns.ways,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
