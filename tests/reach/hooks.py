"""Sessions of agent CLIs that run hooks, and nothing else.

A ``Cli`` is a process of its own, so that it has a pid, and dies. It runs hooks as the vendors do:
with JSON on stdin, and what they print counts only if they exit with 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relay.reach.session import BELL, Session, changing, is_ringing, load_session, side_file
from tests import forks
from tests.procs import until

RELAY = [sys.executable, "-m", "relay"]
LOOP = "tests.reach.agent_loop"
KILL = "kill -9 $PPID"
GEMINIS = ("BeforeAgent", "AfterAgent")  # its events that may be refused


class Cli:
    """One process of an agent CLI, with a session in it."""

    def __init__(
        self, root: Path, session_id: str = "s-1", vendor: str = "claude", **env: str
    ) -> None:
        self.root, self.session_id, self.vendor = root, session_id, vendor
        self.transcript = root.parent / f"{session_id}.jsonl"
        self.options = ["--home", str(root)]
        calls, theirs = os.pipe(), os.pipe()
        words, streams = [str(root.parent)], (calls[0], theirs[1], 2)
        self.process = forks.start(LOOP, words, os.environ | env, *streams)
        os.close(calls[0])
        os.close(theirs[1])
        self._calls, self._answers = os.fdopen(calls[1], "wb"), os.fdopen(theirs[0], "rb")
        self.texts: list[str] = []  # what hooks printed
        self._printed: list[str] = []  # of these, what the model has not got yet

    def run(self, argv: list[str], stdin: str) -> tuple[int, str, str]:
        """Run a command in this process; exit status, stdout and stderr."""
        self.ask(argv=argv, stdin=stdin)
        return self.answer()

    def ask(self, **call: Any) -> None:
        """Begin to run a command (``argv``) or a hook (``words``)."""
        self._calls.write(json.dumps(call).encode() + b"\n")
        self._calls.flush()

    def answer(self) -> tuple[int, str, str]:
        """Wait for its end; exit status, stdout and stderr."""
        code, out, err = json.loads(self._answers.readline())
        return code, out, err

    def hook(self, event: str, at: str = "", does: str = KILL, **facts: Any) -> str:
        """Run a hook; the text that it brings into the context, or with which it refuses.

        At the step ``at`` a command of a shell is run, or the hook is killed.
        """
        facts = {"session_id": self.session_id, "hook_event_name": event} | facts
        if self.transcript.exists():
            facts.setdefault("transcript_path", str(self.transcript))
        words = [self.vendor, event, *self.options]
        self.ask(words=words, at=at, command=does, stdin=json.dumps(facts))
        code, out, err = self.answer()
        assert (code, err) == (-9 if at and does == KILL else 0, "")
        if code:
            return ""
        text = text_of(out, event)
        if text:
            self.texts.append(text)
            self._printed.append(text)
        return text

    def answers(self) -> None:
        """The model gets what was printed, and answers: a step begins."""
        while self._printed:
            text = self._printed.pop(0)
            if self.transcript.exists():
                self.says(text)

    def start(self, source: str = "startup", **facts: Any) -> str:
        """SessionStart."""
        return self.hook("SessionStart", source=source, cwd=str(self.root.parent), **facts)

    def tool(self) -> str:
        """One tool call that is a step of its own."""
        self.answers()
        event = "AfterTool" if self.vendor == "gemini" else "PostToolUse"
        text = self.hook(event, tool_name="Bash")
        return text + (self.hook("PostToolBatch") if self.vendor == "claude" else "")

    def stop(self, **facts: Any) -> str:
        """The end of a turn."""
        self.answers()
        return self.hook("AfterAgent" if self.vendor == "gemini" else "Stop", **facts)

    def prompt(self, prompt: str = "go on") -> str:
        """A person gives a prompt."""
        event = "BeforeAgent" if self.vendor == "gemini" else "UserPromptSubmit"
        return self.hook(event, prompt=prompt)

    def says(self, text: str) -> None:
        """A line of the transcript."""
        with open(self.transcript, "a") as file:
            file.write(json.dumps({"type": "attachment", "content": text}) + "\n")

    @property
    def session(self) -> Session:
        """The facts in its file."""
        found = load_session(str(self.root), self.vendor, self.session_id)
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """The agent that it is."""
        return self.session.agent

    def die(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._calls, self._answers):
            pipe.close()


def text_of(out: str, event: str) -> str:
    """The text in what a hook has printed, of which the form is checked."""
    if not out:
        return ""
    printed = json.loads(out)
    assert len(out) < 11_000
    if "decision" in printed:
        assert printed["decision"] == ("deny" if event in GEMINIS else "block")
        assert printed.keys() == {"decision", "reason"} and printed["reason"]
        return str(printed["reason"])
    (context,) = printed.values()
    assert printed.keys() == {"hookSpecificOutput"}
    assert context.keys() == {"hookEventName", "additionalContext"}
    assert context["hookEventName"] == event
    assert len(context["additionalContext"]) < 10_000
    return str(context["additionalContext"])


def reports_of(root: Path, agent: str) -> list[dict[str, Any]]:
    """What its hooks and bells have reported to the relay, oldest first."""
    files = sorted((root / "agents" / agent / "outbox").glob("*.report"))
    return [json.loads(line) for one in files for line in one.read_text().splitlines()]


def reports(root: Path, agent: str) -> list[dict[str, Any]]:
    """Take the agent's reports, as the relay does; without those of its state."""
    found = reports_of(root, agent)
    for path in (root / "agents" / agent / "outbox").glob("*.report"):
        path.unlink()
    return [one for one in found if one["what"] != "state"]


def told(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Reports in short."""
    more = {"offered": ("after", "offer"), "in_context": ("how", "where"), "returned": ("why",)}
    return [
        (one["what"], *(one[name] for name in more[one["what"]]), *one["ids"]) for one in entries
    ]


def put(root: Path, agent: str, text: str, stem: str) -> str:
    """A message in an inbox, as the relay writes it; its id."""
    inbox = root / "agents" / agent / "inbox"
    (inbox / ".pending" / stem).write_text(text)
    os.rename(inbox / ".pending" / stem, inbox / f"{stem}.msg")
    return stem


@contextlib.contextmanager
def in_another_container(cli: Cli) -> Iterator[None]:
    """A session that has begun is one of another container; its bell runs there in the block."""
    until(lambda: is_ringing(str(cli.root), cli.session))  # else its own may begin in the block
    cli.die()
    with changing(str(cli.root), cli.session) as session:
        session.pid_namespace = 1
    with open(side_file(str(cli.root), session, BELL), "a") as bell:
        fcntl.flock(bell, fcntl.LOCK_EX)  # once the bell that it has here has ended
        yield
        fcntl.flock(bell, fcntl.LOCK_UN)  # a process that began in the block has the file, too
