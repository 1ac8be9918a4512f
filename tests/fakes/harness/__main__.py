"""``python -m tests.fakes.harness claude|codex|gemini``: see the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.fakes.harness.inbox import THREADS, queue_message
from tests.fakes.harness.session import Harness, Step

PERSON = ("prompt", "idle", "until", "clear", "compact", "end", "start")


def main(words: list[str]) -> int:
    """Run one of the programs."""
    vendor, *rest = words
    if vendor == "codex" and rest[:1] == ["queue"]:
        return codex_queue(rest[1:])
    if vendor == "codex" and rest[:2] == ["exec", "resume"]:
        return one_turn(vendor, rest[2], rest[3])
    options = parser().parse_args(rest)
    if options.print is not None:
        return one_turn(vendor, options.resume, options.print)
    turns = json.loads(Path(options.turns).read_text()) if options.turns else []
    cli = Harness(
        vendor,
        options.cwd,
        user=os.path.expanduser("~"),
        session_id=options.resume,
        log=options.log,
        transcript=options.transcript,
        time_scale=options.time_scale,
        inbox=options.inbox,
        reviewed=not options.not_reviewed,
        turns=turns,
    )
    if options.tui:
        from tests.fakes.harness.terminal import Terminal

        return Terminal(cli, "resume" if options.resume else "startup").run()
    text = sys.stdin.read() if options.script == "-" else Path(options.script).read_text()
    with cli:
        cli.start("resume" if options.resume else "startup")
        play(cli, json.loads(text))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser()
    made.add_argument("--cwd", default=".")
    made.add_argument("--script", default="-")
    made.add_argument("--turns")
    made.add_argument("--log", default=os.environ.get("FAKE_HARNESS_LOG"))
    made.add_argument("--transcript", choices=("on", "none"), default="on")
    made.add_argument("--time-scale", type=float, default=1.0)
    made.add_argument("--inbox", default="deliver")
    made.add_argument("--not-reviewed", action="store_true")
    made.add_argument("--tui", action="store_true")
    made.add_argument("--resume", default="")
    made.add_argument("-p", "--print")
    made.add_argument("--output-format")
    return made


def play(cli: Harness, script: list[Step]) -> None:
    """Do what the person does, and the model."""
    at = 0
    while at < len(script):
        step = script[at]
        at += 1
        if "prompt" in step:
            first = at
            while at < len(script) and not any(one in script[at] for one in PERSON):
                at += 1
            cli.prompt(step["prompt"], *script[first:at])
        elif "idle" in step:
            cli.idle(step["idle"])
        elif "until" in step:
            wanted = step["until"]
            cli.idle(step.get("within", 10), until=lambda text=wanted: cli.saw(text))  # type: ignore[misc]
        elif "end" in step:
            cli.end(step["end"])
        elif "clear" in step:
            cli.clear()
        elif "compact" in step:
            cli.compact()
        else:
            raise ValueError(f"expected a step of a person, got {step}")


def one_turn(vendor: str, session_id: str, text: str) -> int:
    """``claude -p TEXT --resume ID``, ``codex exec resume ID TEXT``: a process for one turn."""
    options: dict[str, Any] = {"session_id": session_id, "inbox": "off"}
    log = os.environ.get("FAKE_HARNESS_LOG")
    with Harness(vendor, ".", user=os.path.expanduser("~"), log=log, **options) as cli:
        cli.start("resume" if session_id else "startup")
        cli.prompt(text)
        cli.end()
    result = {"type": "result", "is_error": False, "session_id": cli.session_id}
    print(json.dumps(result | {"result": cli.said[-1] if cli.said else ""}))
    return 0


def codex_queue(words: list[str]) -> int:
    """``codex queue --thread ID --message TEXT``; exit 0 means queued, no more."""
    made = argparse.ArgumentParser()
    made.add_argument("--thread", required=True)
    made.add_argument("--message", required=True)
    options = made.parse_args(words)
    mode = os.environ.get("FAKE_CODEX_QUEUE", "")
    if mode == "hang":
        time.sleep(3600)
    if mode == "refuse":
        print("error: the app-server does not take messages", file=sys.stderr)
        return 1
    if mode == "lose":
        print("queued fake-lost")
        return 0
    try:
        print("queued", queue_message(os.environ[THREADS], options.thread, options.message))
    except (KeyError, OSError):
        print(f"error: thread {options.thread} is not loaded", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
