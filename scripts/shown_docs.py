"""Print the statements of docs/shown.toml, and the tests that are marked as showing each.

.venv/bin/python -m scripts.shown_docs
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parent.parent
HEAD = """# Requirements and the tests that show them

A file is named where all of its tests show a statement. States and crashes: docs/states.md;
invalid input: docs/security.md.
"""


def statements() -> dict[str, dict[str, str]]:
    """Heading -> id of a statement, such as `engine 1.2` -> its text."""
    found: dict[str, dict[str, str]] = {}
    for name, document in tomllib.loads((PROJECT / "docs" / "shown.toml").read_text()).items():
        for number, section in document.items():
            if number != "title":
                heading = f"{document['title']}: {section['title']}"
                texts = {n: text for n, text in section.items() if n != "title"}
                found[heading] = {f"{name} {number}.{n}": text for n, text in texts.items()}
    return found


@functools.cache
def marked() -> dict[str, list[str]]:
    """Id of a statement -> the tests and files that are marked with it, in the order of paths."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((PROJECT / "tests").rglob("test_*.py")):
        name, text = str(path.relative_to(PROJECT / "tests")), path.read_text()
        for test, one in _marks(ast.parse(text)) if ".shows(" in text else ():
            found[one].append(f"{name}::{test}" if test else name)
    return found


def _marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(Test, id) of each mark in a file; the mark of a whole file has no test."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from (("", one) for one in _ids(node.value))
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in each.decorator_list:
                yield from ((each.name, one) for one in _ids(decorator))


def _ids(node: ast.expr) -> Iterator[str]:
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "shows":
            continue
        if ast.unparse(call.func) == "pytest.mark.shows":
            yield from (ast.literal_eval(argument) for argument in call.args)


def page() -> str:
    """The whole page."""
    tests = marked()
    parts = [HEAD]
    for heading, texts in statements().items():
        parts.append(f"## {heading}\n\n| id | statement | tests |\n|---|---|---|")
        for one, text in texts.items():
            shown = ", ".join(f"`{test}`" for test in tests.get(one, []))
            parts.append(f"| {one} | {text} | {shown} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
