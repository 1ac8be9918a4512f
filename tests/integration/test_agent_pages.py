"""The pages on agent CLIs, pasted line by line, and the demo; stand-ins take the CLIs' places."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_pages import Person, blocks, check_output, expected_code
from tests.integration.test_pages import person as person
from tests.procs import PROJECT

FAKES = PROJECT / "scripts" / "agents"
NOTHING = re.compile("$.")  # no line is left out
SESSION = re.compile(r"AGENT_RELAY_NAME=(\w+) (claude|codex|gemini|agy)$")
STARTED = """AGENT_RELAY_NAME={0} python "{2}" {1} <> fifo-{0} > "$HOME/screen-{0}" 2>&1 &
until grep -q '> ' "$HOME/screen-{0}"; do sleep 0.05; done
until relay agents --json | grep -q '"name": "{0}"'; do sleep 0.05; done"""


ANSWERED = """for i in $(seq 1000); do
relay tail --since 5m --no-follow | grep 'no remarks' && break; sleep 0.1; done; """


def typed(line: str) -> str:
    """A line as it is pasted: a session of an agent CLI is started beside the shell."""
    session = SESSION.match(line)
    if session is None:
        return line
    name, cli = session.groups()
    hello = f"echo hello > fifo-{name} & " if cli == "agy" else ""  # known from its first prompt
    return f"mkfifo fifo-{name}; {hello}" + STARTED.format(name, cli, FAKES / "fake_cli.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["claude-code.md", "codex.md", "gemini.md", "agy.md"])
def test_from_nothing_to_two_agents_that_talk(name: str, person: Person) -> None:
    page = blocks(PROJECT / "docs" / name, NOTHING)
    sockets = Path(person.env["HOME"], "sockets")
    sockets.mkdir()
    more = {"PATH": f"{FAKES}:{person.env['PATH']}", "FAKE_SOCKETS": str(sockets)}
    lines = [(i, line) for i, one in enumerate(page) for line in one.lines]
    if name not in ("gemini.md", "agy.md"):  # they are not woken
        lines = [
            (i, ANSWERED + line if line.startswith("relay tail") else line) for i, line in lines
        ]
    script = "\n".join(f"{typed(line)}\nprintf '\\001%s\\001\\n' $?" for _, line in lines)
    text = person.paste(f"{script}\nkill $(jobs -p)", **more)
    *parts, _ = re.split("\001\n", text)
    shown: dict[int, list[str]] = {}
    for (i, line), part in zip(lines, parts, strict=True):
        printed, _, code = part.rpartition("\001")
        assert int(code) == expected_code(line), f"{line}\n{printed}"
        shown.setdefault(i, []).extend(printed.splitlines())
        if line.startswith(ANSWERED):
            assert re.search(r"acked .* operator -> bob +\(completed: no remarks\)", printed)
        if "wake test" in line:
            assert "in context" in printed, printed
    assert "Traceback" not in text
    check_output(page, shown, person.env["HOME"])


@pytest.mark.slow
def test_the_demo_of_two_agents(tmp_path: Path) -> None:
    """The command wakes the worker, the question comes in the middle of its work."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CI": "true"}
    environment.pop("RELAY_NO_WAIT")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [PROJECT / "scripts" / "demo", "--agents"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    steps = [
        r"^\$ relay hooks install claude",
        r"delivered +\w+ +command +lead -> worker\n +test build 7",
        r"delivered +\w+ +query +lead -> worker\n +how far is it\?",
        r"completed\n +12 tests of build 7 passed",
        r"== the lead's terminal",
        r"\[posted\] agent-relay: 1 message waits",
        r"worker \(ack\): completed 12 tests of build 7 passed",
        r"== the worker's terminal",
        r"\[queued\] agent-relay: 1 message waits",
        r"lead \(command\): test build 7",
        r"lead \(query\): how far is it\?\s+\$ sleep 1.2",  # there is more of its work to do
        r"worker was rung: codex-queue",
        r"shown to worker: session codex:",
        r"seen in the context of worker: transcript, line \d+",
        r"lead +active .* idle$",
        r"worker +active .* idle$",
        r"in context: ",
    ]
    at = 0
    for step in steps:
        found = re.compile(step, re.MULTILINE).search(done.stdout, at)
        assert found, f"{step}\nis not in\n{done.stdout[at:]}"
        at = found.end()
