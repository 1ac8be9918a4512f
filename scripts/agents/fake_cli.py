"""A stand-in for an agent CLI, for the demo: its hooks are real, its model is a list of rules.

    python fake_cli.py claude|codex|gemini|agy   in a terminal; its hooks are in the directory

It does what the vendors document of their programs: it runs the hooks of its settings file with the
event's facts on stdin, takes their context into its transcript, goes on when a Stop hook refuses
the stop, and starts a turn for text that is typed, posted into Claude Code's inbox socket, or
queued with `codex queue`. What a model would decide is in ``RULES``.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS = {
    "claude": Path(".claude/settings.local.json"),
    "codex": Path(".codex/hooks.json"),
    "gemini": Path(".gemini/settings.json"),
    "agy": Path(".agents/hooks.json"),
}
GEMINI = {"UserPromptSubmit": "BeforeAgent", "PostToolUse": "AfterTool", "Stop": "AfterAgent"}
AGY = {"UserPromptSubmit": "PreInvocation", "PostToolUse": "PreInvocation", "Stop": "Stop"}
REFUSED = ("block", "deny", "continue")
MESSAGE = re.compile(r"^Message (\S+) from (\w+) \((\w+).*:\n((?:\| .*\n?)*)", re.MULTILINE)
NAME = re.compile(r"this session is the agent (\S+)")

# (kind and text of a message, or the person's words) -> the commands that the model runs for it.
RULES = (
    (r"person: have (\w+) (.*)", ["relay send --as {name} --kind command {0} '{1}'"]),
    (
        r"command: test (.*)",
        [
            "relay ack --as {name} {id} in_progress",
            "sleep 1.2",
            "sleep 1.2",
            "sleep 1.2",
            "relay ack --as {name} {id} completed '12 tests of {0} passed'",
        ],
    ),
    (r"command: review", ["relay ack --as {name} {id} completed 'no remarks'"]),
    (r"ack: in_progress", ["relay send --as {name} --kind query {sender} 'how far is it?'"]),
    (r"query: how far", ["relay reply --as {name} {id} 'two suites of three are done'"]),
)


class FakeCli:
    """One session."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.session_id = str(uuid.uuid4())
        self.name = ""
        settings = json.loads(SETTINGS[vendor].read_text())
        self.hooks = settings["agent-relay" if vendor == "agy" else "hooks"]
        self.transcript = Path(f"transcript-{self.session_id}.jsonl").absolute()
        self.todo: list[str] = []
        folder = Path(os.environ["FAKE_SOCKETS"])
        self.token = uuid.uuid4().hex
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / f"{self.session_id}.sock"))
        self.socket.listen()
        self.environment = dict(os.environ)
        if vendor == "claude":
            self.environment["CLAUDE_CODE_MESSAGING_SOCKET"] = self.socket.getsockname()
            self.environment["CLAUDE_CODE_MESSAGING_TOKEN"] = self.token
            self.environment["CLAUDE_PROJECT_DIR"] = os.getcwd()

    def run(self) -> None:
        """Wait for text at the prompt until the terminal is closed."""
        self.take_in(self.fire("SessionStart", source="startup"))
        while True:
            print("> ", end="", flush=True)
            text, origin = self.next_text()
            if not text:
                break
            print(f"{'' if origin == 'typed' else f'[{origin}] '}{text}", flush=True)
            self.turn(text)
        self.fire("SessionEnd", reason="other")

    def next_text(self) -> tuple[str, str]:
        """What is typed, posted or queued next; empty at the end."""
        ready = select.select([sys.stdin, self.socket], [], [])[0]
        if sys.stdin in ready:
            return sys.stdin.readline().strip(), "typed"
        peer, _ = self.socket.accept()
        with peer, peer.makefile() as lines:
            if self.vendor == "codex":
                return lines.read().strip(), "queued"
            auth, frame = json.loads(lines.readline()), json.loads(lines.readline())
            if auth != {"type": "auth", "token": self.token}:
                return "nothing", "refused"
            return frame["message"]["content"], "posted"

    def turn(self, prompt: str) -> None:
        """One turn: the prompt, tool calls with their hooks, and the stop."""
        answer = self.fire("UserPromptSubmit", prompt=prompt)
        if answer and answer[0].get("decision") in REFUSED:
            print(f"  ({answer[0]['reason']})", flush=True)
            return
        self.note("user", prompt)
        self.think(f"person: {prompt}", {})
        self.take_in(answer)
        is_second = False
        while True:
            while self.todo:
                command = self.todo.pop(0)
                print(f"  $ {command}", flush=True)
                done = subprocess.run(command, shell=True, capture_output=True, text=True)
                self.note("tool", command + "\n" + done.stdout)
                tool = {"tool_name": "Bash", "tool_input": {"command": command}}
                self.take_in(self.fire("PostToolUse", **tool, tool_response=done.stdout))
            answer = self.fire("Stop", stop_hook_active=is_second)
            if not answer or answer[0].get("decision") not in REFUSED:
                return
            is_second = True
            self.take_in(answer)

    def take_in(self, answers: list[dict[str, object]]) -> None:
        """Take what hooks printed into the context, and think of the messages in it."""
        for answer in answers:
            steps: Any = answer.get("injectSteps") or [{}]
            inner: Any = answer.get("hookSpecificOutput") or {}
            said = steps[0].get("ephemeralMessage") or inner.get("additionalContext")
            text = str(said or answer.get("reason"))
            self.note("context", text)
            if found := NAME.search(text):
                self.name = found[1]
            for message_id, sender, kind, body in MESSAGE.findall(text):
                words = " ".join(line[2:] for line in body.splitlines())
                print(f"  {sender} ({kind}): {words}", flush=True)
                self.think(f"{kind}: {words}", {"id": message_id, "sender": sender})

    def think(self, text: str, facts: dict[str, str]) -> None:
        """Decide what to do about a text, by the rules."""
        for pattern, commands in RULES:
            if found := re.match(pattern, text):
                values = {"name": self.name, **facts}
                self.todo += [one.format(*found.groups(), **values) for one in commands]

    def fire(self, event: str, **facts: object) -> list[dict[str, object]]:
        """Run the event's hooks; what they printed."""
        event = {"gemini": GEMINI, "agy": AGY}.get(self.vendor, {}).get(event, event)
        common: dict[str, object] = {
            "session_id": self.session_id,
            "transcript_path": str(self.transcript),
            "cwd": os.getcwd(),
            "hook_event_name": event,
        }
        if self.vendor == "agy":
            common = {"conversationId": self.session_id, "workspacePaths": [os.getcwd()]}
            common["transcriptPath"] = str(self.transcript)
        answers = []
        folder = ".agents" if self.vendor == "agy" else "."
        for hook in self.hooks_of(event):
            done = subprocess.run(
                hook,
                shell=True,
                input=json.dumps(common | facts),
                env=self.environment,
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if done.returncode == 0 and done.stdout.strip() not in ("", "{}"):
                answers.append(json.loads(done.stdout))
        return answers

    def hooks_of(self, event: str) -> Iterator[str]:
        """The commands of an event that run in the foreground."""
        for group in self.hooks.get(event, []):
            for hook in group.get("hooks", [group]):
                if not hook.get("async") and not hook.get("asyncRewake"):
                    yield " ".join([hook["command"], *hook.get("args", [])])

    def note(self, kind: str, text: str) -> None:
        """Write a line of the transcript."""
        with self.transcript.open("a") as file:
            file.write(json.dumps({"type": kind, "text": text}) + "\n")


if __name__ == "__main__":
    FakeCli(sys.argv[1]).run()
