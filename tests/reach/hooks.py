"""Sessions of agent CLIs that run hooks, and nothing else.

A ``Cli`` is a process of its own, so that it has a pid, and dies. It runs hooks as the vendors do:
with JSON on stdin, and what they print counts only if they exit with 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from relay.reach.session import Session, load_session

RELAY = [sys.executable, "-m", "relay"]
# The agent CLI: it runs commands, and hooks in forks of itself, which has loaded what a hook loads.
LOOP = """
import json, os, subprocess, sys, tempfile, traceback
from relay.base import discovery
from relay.reach import bell, binding, context, evidence, hook, owed, report, session

def fork(words, killed_at, given):
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(given)
    files[0].seek(0)
    pid = os.fork()
    if pid == 0:
        try:
            for number, file in enumerate(files):
                os.dup2(file.fileno(), number)
            hook.step = lambda name: name == killed_at and os.kill(os.getpid(), 9)
            os._exit(hook.main(words))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = []
    for file in files[1:]:
        file.seek(0)
        printed.append(file.read())
    return code, *printed

def run(argv, given):
    done = subprocess.run(argv, input=given, capture_output=True)
    return done.returncode, done.stdout, done.stderr

for line in sys.stdin:
    call = json.loads(line)
    given = call.pop("stdin").encode("latin-1")
    code, out, err = (run if "argv" in call else fork)(*call.values(), given)
    print(json.dumps([code, out.decode(), err.decode()]), flush=True)
"""


class Cli:
    """One process of an agent CLI, with a session in it."""

    def __init__(
        self, root: Path, session_id: str = "s-1", vendor: str = "claude", **env: str
    ) -> None:
        self.root, self.session_id, self.vendor = root, session_id, vendor
        self.transcript = root.parent / f"{session_id}.jsonl"
        self.options = ["--home", str(root)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | env,
            cwd=root.parent,
        )
        self.texts: list[str] = []  # what hooks printed
        self._printed: list[str] = []  # of these, what the model has not got yet

    def run(self, argv: list[str], stdin: str) -> tuple[int, str, str]:
        """Run a command in this process; exit status, stdout and stderr."""
        self.ask(argv=argv, stdin=stdin)
        return self.answer()

    def ask(self, **call: Any) -> None:
        """Begin to run a command (``argv``) or a hook (``words``)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[int, str, str]:
        """Wait for its end; exit status, stdout and stderr."""
        assert self.process.stdout is not None
        code, out, err = json.loads(self.process.stdout.readline())
        return code, out, err

    def hook(self, event: str, killed_at: str = "", **facts: Any) -> str:
        """Run a hook; the text that it brings into the context, or with which it refuses."""
        facts = {"session_id": self.session_id, "hook_event_name": event} | facts
        if self.transcript.exists():
            facts.setdefault("transcript_path", str(self.transcript))
        words = [self.vendor, event, *self.options]
        self.ask(words=words, killed_at=killed_at, stdin=json.dumps(facts))
        code, out, err = self.answer()
        assert err == ""
        if killed_at:
            assert code == -9
            return ""
        assert code == 0
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

    def tool(self, killed_at: str = "", **facts: Any) -> str:
        """One tool call that is a step of its own."""
        self.answers()
        event = "AfterTool" if self.vendor == "gemini" else "PostToolUse"
        text = self.hook(event, killed_at, tool_name="Bash", **facts)
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
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def text_of(out: str, event: str) -> str:
    """The text in what a hook has printed, of which the form is checked."""
    if not out:
        return ""
    printed = json.loads(out)
    assert len(out) < 11_000
    if "decision" in printed:
        assert printed.keys() == {"decision", "reason"} and printed["reason"]
        return str(printed["reason"])
    (context,) = printed.values()
    assert printed.keys() == {"hookSpecificOutput"}
    assert context.keys() == {"hookEventName", "additionalContext"}
    assert context["hookEventName"] == event
    assert len(context["additionalContext"]) < 10_000
    return str(context["additionalContext"])


def reports(root: Path, agent: str) -> list[dict[str, Any]]:
    """Take the agent's reports, as the relay does; without those of its state."""
    found = []
    for path in sorted((root / "agents" / agent / "outbox").glob("*.report")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
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
