"""``hook``: what a hook costs an agent CLI, and how soon it shows a message.

hook idle     a tool call's hook with nothing waiting. Floor: ``python -c "import json,sys"``,
              started the same way, in turn
hook message  from the rename of a message into the inbox to the end of the hook that prints it,
              started at that moment by a busy agent's tool call
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.common import fresh_root, make_home, note, percentile, report

FLOOR = [sys.executable, "-c", "import json,sys"]
RELAY = str(Path(sys.executable).with_name("relay"))
TOOL = {"session_id": "bench", "tool_name": "Bash", "tool_input": {}, "tool_response": "x" * 1000}
BODY = "x" * 1024


def run(base: str | None, *, calls: int) -> None:
    """Run both cases and print their lines."""
    root = fresh_root(base)
    note(f"hook: {calls} calls in {root}")
    home, (agent,) = make_home(root, 1)
    inbox = Path(home.path("agents", agent, "inbox"))
    hook = [RELAY, "hook", "claude", "PostToolUse", "--home", home.root, "--as", agent]
    stdin = json.dumps(TOOL).encode()
    _timed(hook, stdin)  # binds the session
    floor, idle, shown = [], [], []
    for _ in range(calls):
        floor.append(_timed(FLOOR, stdin)[0])
        idle.append(_timed(hook, stdin)[0])
    for number in range(calls):
        message_id = f"{time.time_ns()}-{number:08x}"
        pending = inbox / ".pending" / message_id
        pending.write_text(f"FROM: alice\nTO: {agent}\n\n{BODY}")
        began = time.perf_counter()
        os.rename(pending, inbox / f"{message_id}.msg")
        _, out = _timed(hook, stdin)
        shown.append(time.perf_counter() - began)
        assert message_id.encode() in out
        (inbox / f"{message_id}.msg").unlink()
    home.close()
    bare, quick, slow = percentile(floor, 0.5), percentile(idle, 0.5), percentile(shown, 0.5)
    report(
        case="hook idle",
        calls=calls,
        floor_ms=round(bare * 1000, 1),
        p50_ms=round(quick * 1000, 1),
        p95_ms=round(percentile(idle, 0.95) * 1000, 1),
        ratio=round(quick / bare, 2),
    )
    report(
        case="hook message",
        calls=calls,
        p50_ms=round(slow * 1000, 1),
        p95_ms=round(percentile(shown, 0.95) * 1000, 1),
    )


def _timed(argv: list[str], stdin: bytes) -> tuple[float, bytes]:
    began = time.perf_counter()
    done = subprocess.run(argv, input=stdin, capture_output=True, check=True)
    return time.perf_counter() - began, done.stdout
