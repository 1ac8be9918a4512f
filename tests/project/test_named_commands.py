"""Every command that a page, a hint or an example names is there, with its options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from relay.cli import cli

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [*sorted((ROOT / "relay").rglob("*.py")), *sorted((ROOT / "agent_sdk").rglob("*.py"))]
_LINE = re.compile(
    r"(?:`|^(?:  |    )(?:\$ )?|\$\(|&& )relay (?:--home [^\s`]+ )?([a-z][^`\n;|#)&]*)", re.M
)
_INTERNAL = "hook"  # run by agent CLIs, not by people


def wrong_in(text: str) -> Iterator[str]:
    """The commands and options in a text that are not there."""
    for match in _LINE.finditer(text):
        words = match[1].split()
        command, path = _command(words)
        if isinstance(command, str):
            yield f"relay {command}"
            continue
        options = {"--help", *(one for p in command.params for one in (*p.opts, *p.secondary_opts))}
        quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", match[1]).split()[path:]
        for word in quoted:
            name = re.match(r"\[?(--[a-z][a-z-]*)", word)
            if name and name[1] not in {*options, "--home"}:
                yield f"relay {' '.join(words[:path])} {name[1]}"


def _command(words: list[str]) -> tuple[click.Command | str, int]:
    """The command that words begin with and how many of them name it; or the name of none."""
    command: click.Command = cli
    for number, word in enumerate(words):
        if not isinstance(command, click.Group) or not re.fullmatch(r"[a-z][a-z-]*", word):
            return command, number
        below = command.get_command(click.Context(command), word)
        if below is None:
            return (command, number) if word == _INTERNAL else (" ".join(words[: number + 1]), 0)
        command = below
    return command, len(words)


def _texts(path: Path) -> Iterator[str]:
    """The texts of a source; what is computed in them is left out, and so is indented prose."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "relay " in text else ():
        if not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        found = [str(one.value) if isinstance(one, ast.Constant) else "…" for one in parts]
        yield "".join(found).replace("\n    ", "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_a_command(page: Path) -> None:
    assert list(wrong_in(page.read_text())) == []


def test_what_hints_and_examples_name_is_a_command() -> None:
    found = {path.name: [w for text in _texts(path) for w in wrong_in(text)] for path in SOURCES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_what_is_no_command_is_found() -> None:
    text = "`relay sned bob`, `relay channel make x`\n    relay send bob --loud x && relay up --now"
    assert list(wrong_in(text)) == [
        "relay sned", "relay channel make", "relay send --loud", "relay up --now",
    ]  # fmt: skip
