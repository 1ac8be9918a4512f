"""One session of a fake agent CLI: turns, tool calls, its context and its transcript."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tests.fakes.harness.hooks import MOST_CONTEXT, PREVIEW, Ran, Runner, matching, read_settings
from tests.fakes.harness.inbox import Inbox, QueueSocket, as_hooks_see_it

Step = dict[str, Any]
MOST_BLOCKS = 8  # stops in a row that Claude Code lets hooks refuse
VERSION = "2.1.240"
# what the events of one agent CLI are called by the others; "": there is no such event
GEMINI = {
    "UserPromptSubmit": "BeforeAgent",
    "PreToolUse": "BeforeTool",
    "PostToolUse": "AfterTool",
    "PostToolUseFailure": "AfterTool",
    "Stop": "AfterAgent",
    "PermissionRequest": "",
    "PostToolBatch": "",
}
CODEX = {
    "PostToolUseFailure": "PostToolUse",
    "PostToolBatch": "",
    "Notification": "",
    "SessionEnd": "",
}
REPLY: tuple[Step, ...] = ({"say": "noted"},)  # of the model to what it has no steps for


class Prompt(NamedTuple):
    """Text that begins a turn, or comes between two tool calls."""

    text: str
    origin: str  # typed, inbox, rewake, queue, refused


class Seen(NamedTuple):
    """A text in the model's context."""

    text: str
    through: str  # the event of the hook, or the origin of a prompt
    at: int  # Unix ns
    model: int  # the model's n-th call is the first that had it
    turn: int


class Harness:
    """A session; see the package's docstring."""

    def __init__(
        self,
        vendor: str,
        cwd: str | os.PathLike[str],
        *,
        user: str | os.PathLike[str] | None = None,
        session_id: str = "",
        log: str | os.PathLike[str] | None = None,
        env: dict[str, str] | None = None,
        transcript: str = "on",
        time_scale: float = 1.0,
        inbox: str = "deliver",
        reviewed: bool = True,
        inbox_runs_prompt_hooks: bool = True,
        turns: Iterable[list[Step]] = (),
    ) -> None:
        self.vendor, self.cwd = vendor, Path(cwd)
        self.user = Path(user) if user is not None else self.cwd
        self.session_id = session_id or str(uuid.uuid4())
        self.turns = deque(turns)  # the model's steps, turn by turn
        self.time_scale, self.reviewed = time_scale, reviewed
        self.inbox_runs_prompt_hooks = inbox_runs_prompt_hooks
        self.entries: list[dict[str, Any]] = []
        self.context: list[Seen] = []
        self.said: list[str] = []
        self.prompts: queue.Queue[Prompt] = queue.Queue()
        self.approve: Callable[[str, dict[str, Any]], bool] = lambda tool, given: True
        self.is_asking = self.is_busy = False
        self.turn_number = self.model_calls = 0
        self._pending: list[tuple[str, str]] = []  # text and event: the model has not got it yet
        self._results: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._file = open(log, "a", encoding="utf-8") if log is not None else None
        self._kind = transcript
        self.transcript = self.user / f".{vendor}" / "projects" / f"{self.session_id}.jsonl"
        if transcript != "none":
            self.transcript.parent.mkdir(parents=True, exist_ok=True)
        self.env = {**os.environ, "HOME": str(self.user), **(env or {})}
        self.env[f"{vendor.upper()}_PROJECT_DIR"] = str(self.cwd)
        self.inbox: Inbox | None = None
        self.queue: QueueSocket | None = None
        if vendor == "claude" and inbox != "off":
            self.inbox = Inbox(self, inbox)
            self.env["CLAUDE_CODE_MESSAGING_SOCKET"] = self.inbox.path
            self.env["CLAUDE_CODE_MESSAGING_TOKEN"] = self.inbox.token
        if vendor == "codex":
            self.queue = QueueSocket(self)
        self.runner = Runner(vendor, self.cwd, self.env, time_scale, self.note)

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs for the session, without SessionEnd."""
        self.runner.close()
        for one in (self.inbox, self.queue):
            if one is not None:
                one.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- the log ----------------------------------------------------------------------------

    def note(self, kind: str, **facts: Any) -> None:
        """Add an entry to the log."""
        entry = {"at": time.time_ns(), "kind": kind, "turn": self.turn_number, **facts}
        with self._lock:
            self.entries.append(entry)
            if self._file is not None:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()

    def saw(self, text: str) -> list[Seen]:
        """When the model saw that text, for example a message's id; empty: never."""
        return [one for one in self.context if text in one.text]

    def ran(self, event: str = "") -> list[dict[str, Any]]:
        """The hooks that were run, or those of an event."""
        return [
            one
            for one in list(self.entries)
            if one["kind"] == "hook" and event in ("", one["event"])
        ]

    def errors(self) -> list[str]:
        """Why outputs of hooks had no effect."""
        return [one["error"] for one in self.ran() if one["error"]]

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line of the transcript, as Claude Code's or Codex's looks like."""
        if self._kind == "none":
            return
        if self.vendor == "codex":
            line = {"timestamp": _now(), "type": "response_item", "payload": line}
        else:
            more = {"sessionId": self.session_id, "timestamp": _now(), "version": VERSION}
            line = {**line, **more, "uuid": str(uuid.uuid4()), "cwd": str(self.cwd)}
        with open(self.transcript, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rotate(self) -> None:
        """Go on in a new transcript of the same name, as after a rotation."""
        if self.transcript.exists():
            os.rename(self.transcript, f"{self.transcript}.{time.time_ns()}")

    # -- the context ------------------------------------------------------------------------

    def _enter(self, text: str, through: str) -> None:
        seen = Seen(text, through, time.time_ns(), self.model_calls, self.turn_number)
        self.context.append(seen)
        self.note("context", text=text, through=through, model=self.model_calls)
        if through in ("typed", "inbox", "queue"):
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
        self.model_calls += 1
        while not self.prompts.empty() and self.vendor == "claude":  # between tool calls
            prompt = self.prompts.get()
            self._pending.append((prompt.text, prompt.origin))
        for result in self._results:
            self._write(result)
        self._results.clear()
        pending, self._pending = self._pending, []
        for text, through in pending:
            self._enter(text, through)

    def _spilled(self, text: str, event: str) -> str:
        """The text, or above 10,000 characters a file with it and a preview."""
        if self.vendor != "claude" or len(text) <= MOST_CONTEXT:
            return text
        path = self.user / f".{self.vendor}" / "spilled" / f"{uuid.uuid4()}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.note("spilled", event=event, path=str(path), size=len(text))
        return f"{text[:PREVIEW]}\n[{len(text)} characters; the full text is in {path}]"

    # -- hooks ------------------------------------------------------------------------------

    def fire(self, event: str, **facts: Any) -> list[Ran]:
        """Run the hooks of an event, named as Claude Code names it; their context waits."""
        own = {"gemini": GEMINI, "codex": CODEX}.get(self.vendor, {}).get(event, event)
        if not own or (self.vendor == "codex" and not self.reviewed):
            return []
        hooks = matching(self.vendor, read_settings(self.vendor, (self.user, self.cwd)), own, facts)
        if not hooks:
            return []
        is_there = self._kind != "none"
        common: dict[str, Any] = {
            "session_id": self.session_id,
            "transcript_path": str(self.transcript) if is_there else None,
            "cwd": str(self.cwd),
            "hook_event_name": own,
        }
        if self.vendor == "claude":
            common |= {"permission_mode": "default", "prompt_id": f"p-{self.turn_number}"}
            if not is_there:
                del common["transcript_path"]
        elif self.vendor == "codex":
            common |= {
                "turn_id": f"t-{self.turn_number}",
                "model": "fake",
                "permission_mode": "default",
            }
        else:
            common |= {"timestamp": _now(), "transcript_path": common["transcript_path"] or ""}
        ran = self.runner.run(hooks, own, common | facts, lambda one: self._late(one, own))
        for one in ran:
            if one.context:
                self._pending.append((self._spilled(one.context, own), own))
        return ran

    def _late(self, ran: Ran, event: str) -> None:
        """A hook of the background has ended: exit 2 of asyncRewake wakes the session."""
        if ran.hook.rewakes and ran.code == 2:
            self.prompts.put(Prompt(ran.err.strip(), "rewake"))
        elif ran.context:
            self._pending.append((self._spilled(ran.context, event), event))

    # -- a session from its start to its end --------------------------------------------------

    def start(self, source: str = "startup") -> None:
        """SessionStart: startup, resume, clear, compact, fork."""
        self.note("start", source=source, session=self.session_id, pid=os.getpid())
        self.fire("SessionStart", source=source)

    def end(self, reason: str = "other") -> None:
        """SessionEnd; the session is over."""
        self.fire("SessionEnd", reason=reason)
        self._drop("the session ended")
        self.note("end", reason=reason)
        self.close()

    def clear(self) -> None:
        """``/clear``: a new session id, an empty context."""
        self.fire("SessionEnd", reason="clear")
        self._drop("cleared")
        self.session_id = str(uuid.uuid4())
        self.transcript = self.transcript.with_name(f"{self.session_id}.jsonl")
        self.start("clear")

    def compact(self) -> None:
        """``/compact``: the same session goes on with a summary."""
        self._drop("compacted")
        self.start("compact")

    def _drop(self, why: str) -> None:
        for text, through in self._pending:
            self.note("dropped", text=text, through=through, why=why)
        self._pending.clear()

    def prompt(self, text: str, *steps: Step) -> None:
        """A person types a prompt, for which the model takes these steps: one turn."""
        if steps:
            self.turns.appendleft(list(steps))
        self.turn(Prompt(text, "typed"))

    def idle(self, seconds: float, until: Callable[[], Any] | None = None) -> int:
        """Wait at the prompt; turns that are begun by a bell meanwhile. Ends early by ``until``."""
        end, turns = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0 and not (until and until()):
            with contextlib.suppress(queue.Empty):
                self.turn(self.prompts.get(timeout=min(left, 0.02)))
                turns += 1
        return turns

    def turn(self, prompt: Prompt) -> None:
        """One turn, from its prompt to the stop that is not refused."""
        self.is_busy = True
        self.turn_number += 1
        self.note("turn", text=prompt.text, origin=prompt.origin)
        try:
            self._turn(prompt)
        finally:
            self.is_busy = False
            self.note("idle")

    def _turn(self, prompt: Prompt) -> None:
        is_submitted = prompt.origin in ("typed", "queue") or (
            prompt.origin == "inbox" and self.inbox_runs_prompt_hooks
        )
        if is_submitted:
            refusals = _refusals(self.fire("UserPromptSubmit", prompt=as_hooks_see_it(*prompt)))
            if refusals:
                self.note("erased", text=prompt.text, why=refusals[0])
                self._drop("the prompt was refused")
                return
        self._pending.insert(0, (prompt.text, prompt.origin))
        steps = deque(self.turns.popleft() if self.turns else REPLY)
        blocks = 0
        while True:
            self._call_model()
            if not self._work(steps):
                self.note("interrupted")
                return
            said = self.said[-1] if self.said else ""
            facts: dict[str, Any] = {"stop_hook_active": blocks > 0}
            if self.vendor == "gemini":
                facts |= {"prompt": prompt.text, "prompt_response": said}
            else:
                facts |= {"last_assistant_message": said}
            ran = self.fire("Stop", **facts)
            reasons = _refusals(ran)
            self._pending += [(one, "refused") for one in reasons]
            if not reasons and not any(one.context for one in ran):
                return
            blocks += 1
            if self.vendor == "claude" and blocks >= MOST_BLOCKS:
                self._drop("the turn ended after 8 refused stops")
                return

    # -- what the model does --------------------------------------------------------------------

    def _work(self, steps: deque[Step]) -> bool:
        """Take steps up to the next ``stop``; False after an interrupt."""
        while steps:
            step = steps.popleft()
            if "stop" in step:
                return True
            if "interrupt" in step:
                return False
            self._do(step)
        return True

    def _do(self, step: Step) -> None:
        if "think" in step:
            time.sleep(step["think"])
        elif "say" in step:
            self._say(step["say"])
        elif "notify" in step:
            kind = step["notify"]
            self.fire("Notification", message=kind, notification_type=kind)
        elif "rotate" in step:
            self.rotate()
        elif "die" in step:
            os.kill(os.getpid(), 9)
        elif "batch" in step:
            self._batch(step["batch"])
        elif "run" in step or "tool" in step:
            self._batch([step])
        else:
            raise ValueError(f"not a step of a model: {step}")

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.note("say", text=text)
        content = [{"type": "text", "text": text}]
        message = {"role": "assistant", "content": content}
        self._write(
            {"type": "message", **message}
            if self.vendor == "codex"
            else {"type": "assistant", "message": message}
        )

    def _batch(self, steps: list[Step]) -> None:
        """Tool calls of one step of the model; several run in parallel."""
        calls = [self._call(step) for step in steps]
        work = [threading.Thread(target=self._tool, args=call) for call in calls]
        if len(work) == 1:
            work[0].run()
        else:
            for one in work:
                one.start()
            for one in work:
                one.join()
        ids = [{"tool_use_id": call[1]["tool_use_id"]} for call in calls]
        self.fire("PostToolBatch", tool_calls=ids)
        self._call_model()

    def _call(self, step: Step) -> tuple[Step, dict[str, Any]]:
        name = step.get("tool", "run_shell_command" if self.vendor == "gemini" else "Bash")
        given = step.get("input", {"command": step["run"]} if "run" in step else {})
        use = {"tool_name": name, "tool_input": given}
        if self.vendor != "gemini":
            use["tool_use_id"] = f"toolu_{uuid.uuid4().hex[:24]}"
        else:
            use["tool_use_id"] = ""
        return step, use

    def _tool(self, step: Step, use: dict[str, Any]) -> None:
        began = time.monotonic()
        if self.vendor == "gemini":
            use = {name: value for name, value in use.items() if name != "tool_use_id"}
        if why := self._forbidden(step, use):
            self.note("denied", tool=use["tool_name"], why=why)
            return
        is_failed, response = bool(step.get("fail")), step.get("response", "")
        if "run" in step:
            done = subprocess.run(
                step["run"],
                shell=True,
                cwd=self.cwd,
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            is_failed, response = is_failed or done.returncode != 0, done.stdout + done.stderr
        self.note(
            "tool",
            tool=use["tool_name"],
            input=use["tool_input"],
            response=response,
            failed=is_failed,
        )
        self._results.append({"type": "tool_result", "content": response, **use})
        ms = round((time.monotonic() - began) * 1000)
        if is_failed:
            self.fire("PostToolUseFailure", **use, error=response or "failed", duration_ms=ms)
            return
        for why in _refusals(
            self.fire("PostToolUse", **use, tool_response=response, duration_ms=ms)
        ):
            self._pending.append((why, "refused"))

    def _forbidden(self, step: Step, use: dict[str, Any]) -> str:
        """Why a tool may not run: its hooks, or the person at the dialog; empty if it may."""
        ran = self.fire("PreToolUse", **use)
        if reasons := _refusals(ran):
            return reasons[0]
        verdicts = [
            str((one.output.get("hookSpecificOutput") or {}).get("permissionDecision"))
            for one in ran
        ]
        if "deny" in verdicts:
            return "a hook denied it"
        if not step.get("ask") and "ask" not in verdicts:
            return ""
        for one in self.fire("PermissionRequest", **use, permission_suggestions=[]):
            decision = (one.output.get("hookSpecificOutput") or {}).get("decision") or {}
            if decision:
                self.note("decided", by="hook", behavior=decision["behavior"])
                return "" if decision["behavior"] == "allow" else "a hook denied it"
        self.is_asking = True
        self.note("dialog", tool=use["tool_name"], input=use["tool_input"])
        try:
            if step.get("notify", self.vendor != "codex"):
                self.fire(
                    "Notification", message="permission", notification_type="permission_prompt"
                )
            time.sleep(step.get("asks_for", 0))
            is_allowed = (
                step["answer"] == "allow"
                if "answer" in step
                else self.approve(use["tool_name"], use["tool_input"])
            )
        finally:
            self.is_asking = False
        self.note("decided", by="person", behavior="allow" if is_allowed else "deny")
        return "" if is_allowed else "the person denied it"


def _refusals(ran: list[Ran]) -> list[str]:
    return [one.refusal for one in ran if one.refusal is not None]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
