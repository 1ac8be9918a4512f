"""The pages of the documents, pasted line by line into a shell as a newcomer would, and the scripts
that show a day with agents."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from starlette.testclient import TestClient

from relay.web.app import Web
from tests import forks
from tests.procs import PROJECT

# Commands that take minutes, change the machine, or need programs that may not be there.
LEFT_OUT = re.compile(
    r"\./scripts/|relay audit run|relay service |relay top|curl |pip |rm -r |AGENT_RELAY_NAME=\w+ "
    r"claude|relay spawn reviewer|relay logs .*-f|relay wake test |\w+ mcp add "
)
VARYING = (
    (r"\d{19}-[0-9a-f]{16,}|\b(?=[a-f]*\d)[0-9a-f]{8}\b", "ID"),
    (r"\d{4}-\d\d-\d\d", "DATE"),
    (r"\d\d:\d\d(:\d\d)?(\.\d+)?Z?", "TIME"),
    (r"[\d.]+ (s|min|h|MB|MiB|%)(?!\w)", r"N \1"),
    (r"(pid|process) \d+", r"\1 N"),
    (r"\d+ files", "N files"),
    (r"\s+", " "),
)


class Block(NamedTuple):
    """Indented lines of a page, and the output printed below them."""

    lines: list[str]
    output: list[str]


def blocks(page: Path, left_out: re.Pattern[str] = LEFT_OUT) -> list[Block]:
    """The commands of a page; a fence without a language below them is their output."""
    found: list[Block] = []
    fence: str | None = None
    previous = ""
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```":
            found[-1].output.append(line)
        elif fence is None and line.startswith("    "):
            if not previous.startswith("    "):
                found.append(Block([], []))
            found[-1].lines.append(line[4:])
        previous = line
    return [block for block in found if not all(map(left_out.match, block.lines))]


def expected_code(line: str) -> int:
    """The exit code that a line's comment names, else 0."""
    named = re.search(r"# exit code (\d+)", line)
    return int(named[1]) if named else 0


def comparable(text: str, root: str) -> str:
    """A line without what differs in each run."""
    text = text.replace(root, "/home/me")
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text.strip()


def check_output(page: list[Block], shown: dict[int, list[str]], root: str) -> None:
    """What the page has below each block is among the lines shown, in this order."""
    for i, block in enumerate(page):
        output = iter([comparable(line, root) for line in shown.get(i, [])])
        for wanted in block.output:
            found = wanted == "…" or any(comparable(wanted, root) == line for line in output)
            assert found, f"{block.lines}\nprints no line\n{wanted}\nbut\n" + "\n".join(shown[i])


class Person(NamedTuple):
    """A person's environment, and a descriptor that their shell inherits (``tests.forks``)."""

    env: dict[str, str]
    fd: int

    def paste(self, script: str, **more: str) -> str:
        """What a shell prints of these lines."""
        done = subprocess.run(
            ["bash"], input=script, env=self.env | more, cwd=self.env["HOME"], text=True,
            pass_fds=[self.fd], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.stdout


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """A person with an empty home directory, whose relays are stopped."""
    root = tempfile.mkdtemp(prefix="relay-")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"HOME": root, "PATH": path, "PYTHONPATH": str(PROJECT), "TERM": "dumb"}
    fd = forks.command(tmp_path)
    yield Person(variables, fd)
    for ledger in Path(root).rglob("ledger.db"):
        down = ["relay", "--home", ledger.parent, "down"]
        subprocess.run(down, env=variables, pass_fds=[fd], check=False, capture_output=True)
    while os.path.exists(root):  # a bell writes its log until it sees that its session has ended
        shutil.rmtree(root, ignore_errors=True)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/tasks.md"])
def test_the_commands_of_a_page_do_what_it_says(name: str, person: Person) -> None:
    """Each ends with the exit code of its comment, else 0, and prints what is below it."""
    page = blocks(PROJECT / name)
    lines = [(i, line) for i, one in enumerate(page) for line in one.lines]
    pasted = [(i, line) for i, line in lines if not LEFT_OUT.match(line)]
    script = "\n".join(f"{line}\nprintf '\\001%s\\001\\n' $?" for _, line in pasted)
    text = person.paste(script)
    *parts, _ = re.split("\001\n", text)
    shown: dict[int, list[str]] = {}
    codes = []
    for (i, line), part in zip(pasted, parts, strict=True):
        printed, _, code = part.rpartition("\001")
        codes.append((line, int(code), printed))
        shown.setdefault(i, []).extend(printed.splitlines())
    for line, code, printed in codes:
        assert code == expected_code(line), f"{line}\n{printed}"
    assert "Traceback" not in text
    check_output(page, shown, person.env["HOME"])


# -- the pages of the agent CLIs -----------------------------------------------------------


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


# -- scripts/scenario: what an operator asks after a day with crashes ----------------------


ANSWERS = {
    "Did the worker get this message?": "completed by worker: deployed, health check passed",
    "Did it get the one about the branch, whose id I do not have?": (
        r"failed: no such branch +delete the branch release-41"
    ),
    "Who has not read something?": r"filer +active .* 6 +1 ",
    "Which messages, and since when?": r"\d\d:\d\d:\d\d +operator +filer .*are you still there\?",
    "Who has not read the broadcast?": "delivered to filer, not read yet",
    "Who owes an answer?": r"filer .*please hand in|filer +command",
    "What was begun and never finished?": r"worker .*in.progress",
    "What was refused, and why?": r"filer .*there is no agent bbo",
    "What failed at the worker, and why?": r"worker .*no such branch",
    "What was given up?": r"filer .*no acknowledgment within 1 s, 2 attempts",
    "Who crashed?": r"worker .*process \d+ has exited",
    "What did the crash of the relay cost?": r"^OK$",
}

# In the page: an address, and what is there.
IN_THE_PAGE = {
    "/search?q=is:unread": "are you still there\\?",
    "/search?q=is:open": "in progress",
    "/failed": "no acknowledgment within 1 s, 2 attempts",
    "/agents": r"process \d+ has exited",
    "/health": "OK|nothing|no relay is running",
}


@pytest.mark.slow
def test_every_question_has_one_command_and_a_clear_answer(tmp_path: Path) -> None:
    """Three agents, one killed in the middle of a command, and a relay killed with SIGKILL."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CI": "true"}
    environment.pop("RELAY_NO_WAIT")
    done = subprocess.run(
        [PROJECT / "scripts" / "scenario"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    asked = dict(re.findall(r"^== (.*\?)\n((?:.+\n)+)", done.stdout, re.MULTILINE))
    assert set(asked) == set(ANSWERS)
    for question, answer in ANSWERS.items():
        command, _, shown = asked[question].partition("\n")
        assert re.search(answer, shown, re.MULTILINE), f"{command}\n{shown}"
        assert "(exit code" not in shown, command
    (folder,) = tmp_path.glob("relay-scenario-*")
    try:
        check_page(folder / "home")
    finally:
        shutil.rmtree(folder)


def check_page(home: Path) -> None:
    """The page answers questions of each of its parts."""
    host, key = "127.0.0.1:8377", "a key"
    headers = {"authorization": f"Bearer {key}"}
    app = Web(str(home)).app(host, key)
    client = TestClient(app, base_url=f"http://{host}", headers=headers)
    for address, answer in IN_THE_PAGE.items():
        page = client.get(address)
        assert page.status_code == 200, (address, page.text)
        text = html.unescape(re.sub(r"<[^>]*>", " ", page.text))
        assert re.search(answer, " ".join(text.split())), f"{address}\n{text}"
