"""Fake agent CLIs: the documented part of Claude Code, Codex and Gemini; the model is a script.

In a test, in its own process:

    with Harness("claude", cwd=project, env={"AGENT_RELAY_NAME": "bob"}) as cli:
        cli.start()                                   # SessionStart
        cli.prompt("go", {"run": "make"}, {"stop": 1}) # a turn; then Stop hooks; goes on if refused
        cli.idle(5, until=lambda: cli.saw("1706…-ab"))  # at the prompt; bells begin turns
        cli.saw("1706…-ab")                            # what entered the model's context, and when
        cli.errors()                                  # outputs that do not fit the vendor's schema
        cli.end()

It runs the hooks of ``cwd/.claude/settings.json`` (``.codex/hooks.json``, ``.gemini/…``) and of the
same below ``user``, with their real commands, time-outs (times ``time_scale``) and exit status.
As a process (it has a pid, and can be killed), without a terminal or in one:

    python -m tests.fakes.harness claude --script FILE --log FILE [--cwd DIR] [--transcript none] …
    python -m tests.fakes.harness claude --tui [--turns FILE]

A script is a JSON list: of the person {"prompt": "go"}, {"idle": 5},
{"until": "text", "within": 5}, {"clear": 1}, {"compact": 1}, {"end": "other"}; after a prompt
the model's steps {"think": 0.1},
{"say": "…"}, {"run": "shell command"}, {"tool": "Read", "response": "…", "fail": true},
{"batch": [steps in parallel]}, {"run": …, "ask": true, "answer": "deny"},
{"notify": "idle_prompt"}, {"interrupt": 1}, {"rotate": 1}, {"die": 1}, {"stop": 1}; the next
steps run if the stop is refused.
The log has a JSON line for every hook, tool call and text of the context (kind ``context``).

A text printed by a hook enters the context at the model's next call; a session that is killed,
interrupted or stopped before it has ``dropped`` it. ``programs(folder)`` makes ``claude``,
``codex`` and ``gemini`` for $PATH, ``codex queue`` and ``claude -p`` among their verbs; the
environment variable ``FAKE_CODEX_QUEUE`` makes the queue hang, refuse or lose.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.fakes.harness.hooks import Ran, schema_problem
from tests.fakes.harness.inbox import THREADS
from tests.fakes.harness.session import Harness, Prompt, Seen, Step

__all__ = ["THREADS", "Harness", "Prompt", "Ran", "Seen", "Step", "programs", "schema_problem"]
PROJECT = Path(__file__).resolve().parents[3]


def programs(folder: Path) -> Path:
    """Make the programs ``claude``, ``codex`` and ``gemini`` in a folder for $PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for vendor in ("claude", "codex", "gemini"):
        command = f"exec {shlex.quote(sys.executable)} -m tests.fakes.harness {vendor}"
        path = folder / vendor
        path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(PROJECT))} {command} "$@"\n')
        path.chmod(0o755)
    return folder
