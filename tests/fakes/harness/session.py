"""One session of a fake agent CLI: turns, tool calls, its context and its transcript."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.fakes.harness.hooks import Ran, Runner, in_parallel, matching, read_settings

Step = dict[str, Any]
MOST_BLOCKS = 8  # stops in a row that Claude Code lets hooks refuse
VERSION = "2.1.240"
# what the events of one agent CLI are called by the others; "": there is no such event
GEMINI = {
    "UserPromptSubmit": "BeforeAgent",
    "PreToolUse": "BeforeTool",
    "PostToolUse": "AfterTool",
    "Stop": "AfterAgent",
    "PostToolBatch": "",
}
CODEX = {"PostToolBatch": ""}
AGY = dict.fromkeys(("SessionStart", "UserPromptSubmit", "PreToolUse", "PostToolUse"), "")
AGY |= {"PostToolBatch": ""}


class Seen(NamedTuple):
    """A text in the model's context."""

    text: str
    through: str  # the event of the hook; prompt, or refused


class Harness:
    """A session; see the package's docstring."""

    def __init__(self, vendor: str, cwd: str | os.PathLike[str]) -> None:
        self.vendor, self.cwd = vendor, Path(cwd)
        self.session_id = str(uuid.uuid4())
        self.context: list[Seen] = []
        self.asked: list[str] = []  # why hooks let its person be asked; the answer is yes
        self._turn_number = 0
        self._pending: list[Seen] = []  # the model has not got it yet
        self._results: list[dict[str, Any]] = []
        self.transcript = self.cwd / f".{vendor}" / "projects" / f"{self.session_id}.jsonl"
        self.transcript.parent.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, "HOME": str(self.cwd)}
        self.env[f"{vendor.upper()}_PROJECT_DIR"] = str(self.cwd)
        folder = self.cwd
        if vendor == "agy":  # hooks run in the directory of their file
            del self.env["AGY_PROJECT_DIR"]
            folder = self.cwd / ".agents"
            folder.mkdir(exist_ok=True)
        self._runner = Runner(vendor, folder, self.env)
        self._model_calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs for the session, without SessionEnd."""
        self._runner.close()

    def saw(self, text: str) -> list[Seen]:
        """What the model saw with that text in it, for example a message's id; empty: never."""
        return [one for one in self.context if text in one.text]

    def errors(self) -> list[str]:
        """Why outputs of hooks had no effect."""
        return [one.error for one in list(self._runner.ran) if one.error]

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line of the transcript, as Claude Code's or Codex's looks like."""
        if self.vendor == "codex":
            line = {"timestamp": _now(), "type": "response_item", "payload": line}
        else:
            more = {"sessionId": self.session_id, "timestamp": _now(), "version": VERSION}
            line = {**line, **more, "uuid": str(uuid.uuid4()), "cwd": str(self.cwd)}
        with open(self.transcript, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _enter(self, seen: Seen) -> None:
        self.context.append(seen)
        text, through = seen
        if through == "PreInvocation":  # ephemeral: for this call of the model alone
            return
        if through == "prompt":
            role = {"role": "user", "content": text}
            self._write(
                {"type": "message", **role}
                if self.vendor == "codex"
                else {"type": "user", "message": role}
            )
        elif self.vendor == "codex":
            self._write({"type": "message", "role": "developer", "content": text})
        else:
            facts = {"type": "hook_additional_context", "content": [text], "hookEvent": through}
            self._write({"type": "attachment", "attachment": facts})

    def _call_model(self) -> None:
        """The model gets all that has come since its last call."""
        if self.vendor == "agy":
            self.fire("PreInvocation", invocationNum=self._model_calls, initialNumSteps=1)
            self._model_calls += 1
        for result in self._results:
            self._write(result)
        self._results.clear()
        pending, self._pending = self._pending, []
        for seen in pending:
            self._enter(seen)

    # -- hooks ------------------------------------------------------------------------------

    def fire(self, event: str, **facts: Any) -> list[Ran]:
        """Run the hooks of an event, named as Claude Code names it; their context waits."""
        own = {"gemini": GEMINI, "codex": CODEX, "agy": AGY}.get(self.vendor, {}).get(event, event)
        hooks = (
            matching(self.vendor, read_settings(self.vendor, self.cwd), own, facts) if own else []
        )
        if not hooks:
            return []
        common: dict[str, Any] = {
            "session_id": self.session_id,
            "transcript_path": str(self.transcript),
            "cwd": str(self.cwd),
            "hook_event_name": own,
        }
        if self.vendor == "agy":
            common = {
                "conversationId": self.session_id,
                "transcriptPath": str(self.transcript),
                "artifactDirectoryPath": str(self.cwd),
                "workspacePaths": [str(self.cwd)],
                "modelName": "fake",
            }
        if self.vendor == "claude":
            common |= {"permission_mode": "default", "prompt_id": f"p-{self._turn_number}"}
        elif self.vendor == "codex":
            more = {"model": "fake", "permission_mode": "default"}
            common |= {"turn_id": f"t-{self._turn_number}", **more}
        elif self.vendor == "gemini":
            common |= {"timestamp": _now()}
        ran = self._runner.run(hooks, own, common | facts)
        self._pending += [Seen(one.context, own) for one in ran if one.context]
        return ran

    # -- a session and its turns --------------------------------------------------------------

    def start(self) -> None:
        """SessionStart."""
        self.fire("SessionStart", source="startup")

    def prompt(self, text: str, *steps: Step) -> None:
        """One turn: a person types a prompt, the model takes these steps, until the stop that is
        not refused."""
        self._turn_number += 1
        self._model_calls = 0
        if _refusals(self.fire("UserPromptSubmit", prompt=text)):
            self._pending.clear()
            return
        self._pending.insert(0, Seen(text, "prompt"))
        left, blocks = list(steps), 0
        while True:
            self._call_model()
            while left:
                step = left.pop(0)
                if "interrupt" in step:  # no hook tells it
                    return
                if "fail" in step:
                    self.fire("Stop", **_agy_stop(blocks, step["fail"]))
                    return
                self._do(step)
            facts: dict[str, Any] = {"stop_hook_active": blocks > 0}
            if self.vendor == "gemini":
                facts |= {"prompt": text, "prompt_response": "noted"}
            elif self.vendor == "agy":
                facts = _agy_stop(blocks)
            else:
                facts |= {"last_assistant_message": "noted"}
            ran = self.fire("Stop", **facts)
            reasons = _refusals(ran)
            self._pending += [Seen(one, "refused") for one in reasons]
            if not reasons and not any(one.context for one in ran):
                return
            blocks += 1
            if self.vendor == "claude" and blocks >= MOST_BLOCKS:
                self._pending.clear()
                return

    def ask(self, command: str) -> str:
        """A tool call that needs a permission: what the hooks decide, or that its dialog asks."""
        ran = self.fire("PermissionRequest", tool_name="Bash", tool_input={"command": command})
        for one in ran:
            decision = (one.output.get("hookSpecificOutput") or {}).get("decision")
            if decision:
                return ": ".join(filter(None, (decision["behavior"], decision.get("message"))))
        return "dialog"

    def _do(self, step: Step) -> None:
        if "die" in step:
            os.kill(os.getpid(), 9)
        self._batch(step.get("batch", [step]))

    def _batch(self, steps: list[Step]) -> None:
        """Tool calls of one step of the model; several run in parallel."""
        calls = [(one["run"], f"toolu_{uuid.uuid4().hex[:24]}") for one in steps]
        for call in calls:
            self._write(self._call_of(*call))
        in_parallel(lambda call: self._tool(*call), calls)
        self.fire("PostToolBatch", tool_calls=[{"tool_use_id": number} for _, number in calls])
        self._call_model()

    def _call_of(self, command: str, number: str) -> dict[str, Any]:
        """The line of the transcript with a tool call of the model."""
        if self.vendor == "codex":
            told = json.dumps({"command": ["bash", "-lc", command]})
            return {"type": "function_call", "name": "shell", "arguments": told, "call_id": number}
        use = {"type": "tool_use", "id": number, "name": "Bash", "input": {"command": command}}
        return {"type": "assistant", "message": {"role": "assistant", "content": [use]}}

    def _tool(self, command: str, number: str) -> None:
        began = time.monotonic()
        is_gemini = self.vendor == "gemini"
        use: dict[str, Any] = {
            "tool_name": "run_shell_command" if is_gemini else "Bash",
            "tool_input": {"command": command},
        }
        if not is_gemini:
            use["tool_use_id"] = number
        for one in self.fire("PreToolUse", **use):
            said = one.output.get("hookSpecificOutput") or {}
            if said.get("permissionDecision") == "ask":
                self.asked.append(said["permissionDecisionReason"])
        done = subprocess.run(
            command, shell=True, cwd=self.cwd, env=self.env, capture_output=True, text=True
        )
        self._results.append({"type": "tool_result", "content": done.stdout, **use})
        ms = round((time.monotonic() - began) * 1000)
        ran = self.fire("PostToolUse", **use, tool_response=done.stdout, duration_ms=ms)
        self._pending += [Seen(one, "refused") for one in _refusals(ran)]


def _agy_stop(number: int, error: str = "") -> dict[str, Any]:
    reason = "ERROR" if error else "NO_TOOL_CALL"
    facts = {"executionNum": number, "terminationReason": reason, "error": error}
    return facts | {"fullyIdle": True}


def _refusals(ran: list[Ran]) -> list[str]:
    return [one.refusal for one in ran if one.refusal is not None]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
