"""Fake agent CLIs: the documented part of Claude Code, Codex, Gemini, agy; the model is a script.

    with Harness("claude", project) as cli:
        cli.start()                                     # SessionStart
        cli.prompt("go", {"run": "make"})               # a turn; then Stop hooks; on if refused
        cli.prompt("go", {"batch": [{"run": "true"}, {"run": "true"}]})  # two calls in parallel
        cli.saw("1706…-ab")                             # what entered the model's context
        cli.errors()                                    # outputs outside of the vendor's schema

It runs the hooks of ``project/.claude/settings.json`` (``.codex/hooks.json``, …) with
their real commands, time-outs and exit status. A text printed by a hook enters the context at the
model's next call.

As a process, which has a pid and can be killed: ``python -m tests.fakes.harness claude FOLDER``
reads a JSON list of what the person does, {"prompt": "go", "steps": […]}. The step {"die": 1} kills
it; {"fail": "quota"} ends agy's turn with that error, {"interrupt": 1} a turn without a hook.
"""

from __future__ import annotations

from tests.fakes.harness.session import Harness

__all__ = ["Harness"]
