"""Hooks as the agent CLIs run them: from settings files, in parallel, each with its time-out.

What a hook prints is checked against ``outputs.json``, written from the vendors' published
tables. A hook whose output does not fit is an error here, and its output has no effect.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")

SETTINGS = {
    "claude": (".claude/settings.json", ".claude/settings.local.json"),
    "codex": (".codex/hooks.json",),
    "gemini": (".gemini/settings.json",),
    "agy": (".gemini/config/hooks.json", ".agents/hooks.json"),
}
UNIT = {"claude": 1.0, "codex": 1.0, "gemini": 0.001, "agy": 1.0}  # of `timeout`, in seconds
# the fact of an event that its matcher is compared with
MATCHED = {
    "SessionStart": "source",
    "PreToolUse": "tool_name",
    "PostToolUse": "tool_name",
    "BeforeTool": "tool_name",
    "AfterTool": "tool_name",
}
BLOCKED = 2  # exit status


class Hook(NamedTuple):
    """One entry of a settings file."""

    command: str
    timeout_s: float
    is_async: bool = False


class Ran(NamedTuple):
    """What became of one hook."""

    hook: Hook
    code: int | None  # None: it was ended because its time was over
    out: str
    err: str
    error: str = ""  # why its output has no effect
    output: dict[str, Any] = {}  # noqa: RUF012  what it printed

    @property
    def context(self) -> str:
        """The text for the model; empty: none."""
        steps = self.output.get("injectSteps", ())
        if steps:
            return "\n".join(one["ephemeralMessage"] for one in steps)
        return str((self.output.get("hookSpecificOutput") or {}).get("additionalContext") or "")

    @property
    def refusal(self) -> str | None:
        """The reason of a hook that refuses the event; None if it does not."""
        if self.code == BLOCKED:
            return self.err.strip()
        if self.output.get("decision") in ("block", "deny", "continue"):
            return str(self.output["reason"])
        return None


def read_settings(vendor: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The groups of hooks of each event."""
    events: dict[str, list[dict[str, Any]]] = {}
    for path in (folder / name for name in SETTINGS[vendor]):
        if path.exists():
            found = json.loads(path.read_text())
            if vendor == "agy":
                found = {"hooks": _of_sets(found)}
            for event, groups in found.get("hooks", {}).items():
                events.setdefault(event, []).extend(groups)
    return events


def _of_sets(sets: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The hooks of named sets, in groups; agy drops the whole file for a key that is no set."""
    events: dict[str, list[dict[str, Any]]] = {}
    for one in sets.values():
        for event, handlers in one.items():
            if event != "enabled" and one.get("enabled", True):
                assert event in ("PreInvocation", "PostInvocation", "Stop", "SessionStart"), event
                assert all(type(entry["timeout"]) is int for entry in handlers)
                events.setdefault(event, []).append({"hooks": handlers})
    return events


def matching(
    vendor: str, settings: dict[str, list[dict[str, Any]]], event: str, facts: dict[str, Any]
) -> list[Hook]:
    """The hooks for an event; of equal commands only one, as documented for Claude Code."""
    found: dict[str, Hook] = {}
    for group in settings.get(event, []):
        if not _matches(group.get("matcher"), str(facts.get(MATCHED.get(event, ""), ""))):
            continue
        for entry in group["hooks"]:
            if entry.get("type", "command") != "command":
                continue
            command, seconds = entry["command"], entry["timeout"] * UNIT[vendor]
            is_async = vendor == "claude" and bool(entry.get("asyncRewake"))
            found.setdefault(command, Hook(command, seconds, is_async))
    return list(found.values())


def _matches(matcher: str | None, value: str) -> bool:
    return matcher in (None, "", "*") or re.fullmatch(str(matcher), value) is not None


def in_parallel(work: Callable[[T], R], given: list[T]) -> list[R]:
    """Each in a thread of its own; one alone, as most are, in this one."""
    if len(given) == 1:
        return [work(given[0])]
    with ThreadPoolExecutor() as threads:
        return list(threads.map(work, given))


class Runner:
    """Runs hooks of one vendor, in the directory and environment of a session."""

    def __init__(self, vendor: str, cwd: Path, env: dict[str, str]) -> None:
        self.vendor, self.cwd, self.env = vendor, cwd, env
        self.ran: list[Ran] = []
        self.background: list[threading.Thread] = []
        self._processes: set[subprocess.Popen[bytes]] = set()

    def run(self, hooks: list[Hook], event: str, facts: dict[str, Any]) -> list[Ran]:
        """Run hooks of an event in parallel; those of the background go on behind it."""
        stdin = json.dumps(facts).encode()
        for hook in hooks:
            if hook.is_async:
                one = threading.Thread(target=self._run, args=(hook, event, stdin), daemon=True)
                self.background = [t for t in self.background if t.is_alive()] + [one]
                one.start()
        return in_parallel(
            lambda hook: self._run(hook, event, stdin), [one for one in hooks if not one.is_async]
        )

    def _run(self, hook: Hook, event: str, stdin: bytes) -> Ran:
        process = subprocess.Popen(
            hook.command,
            shell=True,
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.add(process)
        code: int | None = None
        try:
            out, err = process.communicate(stdin, hook.timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
        finally:
            self._processes.discard(process)
        ran = Ran(hook, code, out.decode(errors="replace"), err.decode(errors="replace"))
        self.ran.append(ran := _understood(self.vendor, event, ran))
        return ran

    def close(self) -> None:
        """End the hooks that still run."""
        for process in list(self._processes):
            _kill(process)
        for one in self.background:
            one.join(5)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _understood(vendor: str, event: str, ran: Ran) -> Ran:
    """What a hook printed, if it counts: exit status first, then JSON or text."""
    if ran.code is None:
        return ran._replace(out="", error="timed out; its output is discarded")
    if ran.code == BLOCKED:
        return ran
    if ran.code != 0:
        first = (ran.err.strip().splitlines() or [""])[0]
        return ran._replace(error=f"exit status {ran.code}: {first}")
    text = ran.out.strip()
    if not text:
        return ran._replace(error="expected JSON, got nothing") if vendor == "agy" else ran
    try:
        output = json.loads(text)
    except ValueError as exc:
        return ran._replace(error=f"not valid JSON: {exc}")
    if problem := schema_problem(vendor, event, output):
        return ran._replace(error=problem)
    return ran._replace(output=output)


@functools.cache
def _validator(vendor: str, event: str) -> Any:
    """Of the output of an event; None: the vendor has no such event."""
    from jsonschema import Draft202012Validator

    outputs = json.loads((Path(__file__).parent / "outputs.json").read_text())
    parts = outputs["events"][vendor].get(event)
    if parts is None:
        return None
    schema = {"allOf": [{"$ref": f"#/$defs/{one}"} for one in parts], "$defs": outputs["$defs"]}
    return Draft202012Validator(schema | {"type": "object", "unevaluatedProperties": False})


def schema_problem(vendor: str, event: str, output: dict[str, Any]) -> str:
    """Why a hook may not print this; empty if it may."""
    validator = _validator(vendor, event)
    if validator is None:
        return f"{vendor} has no event {event}"
    for error in validator.iter_errors(output):
        return f"{'.'.join(map(str, error.absolute_path)) or 'output'}: {error.message}"
    if "hookSpecificOutput" in output and output["hookSpecificOutput"]["hookEventName"] != event:
        return f"hookSpecificOutput: it is not of {event}"
    return ""
