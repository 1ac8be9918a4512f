"""Every test that a document names is there, in the file that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
_NAMED = re.compile(r"`(?P<file>test_\w+\.py)?(?:::(?P<test>test_\w+))?`")
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.M)


def names_in(files: list[Path]) -> set[str]:
    return {name for path in files for name in _TEST.findall(path.read_text())}


def wrong_in(text: str, files: dict[str, list[Path]]) -> list[str]:
    """What a document names that is not there. ``::test`` alone is of the file named before it."""
    wrong: list[str] = []
    last = ""
    for match in _NAMED.finditer(text):
        last = match["file"] or last
        if match["file"] and match["file"] not in files:
            wrong.append(f"{match['file']}: no such file")
        elif match["test"] and match["test"] not in names_in(files.get(last, [])):
            wrong.append(f"{last}::{match['test']}: no such test")
    return wrong


@pytest.fixture(scope="module")
def files() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        found.setdefault(path.name, []).append(path)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(path: Path, files: dict[str, list[Path]]) -> None:
    assert wrong_in(path.read_text(), files) == []


def test_what_is_not_there_is_found(files: dict[str, list[Path]]) -> None:
    here = "`test_docs_name_tests.py::test_what_is_not_there_is_found`"
    text = f"{here}, `::test_what_a_document_names_is_there`, `::test_gone`, `test_gone.py`"
    assert wrong_in(text, files) == [
        "test_docs_name_tests.py::test_gone: no such test",
        "test_gone.py: no such file",
    ]
