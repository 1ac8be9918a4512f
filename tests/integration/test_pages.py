"""README and docs/tasks.md, pasted line by line into a shell, as a newcomer would."""

from __future__ import annotations

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
