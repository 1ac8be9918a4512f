"""docs/architecture.md names the rooms, layers, modules and functions that the code has."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "architecture.md").read_text()


def contract() -> list[tuple[int, str]]:
    """(layer, package) of the import contract, the highest layer first."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    (layers,) = (
        one["layers"] for one in project["tool"]["importlinter"]["contracts"] if "layers" in one
    )
    return [
        (len(layers) - place, package.strip())
        for place, layer in enumerate(layers)
        for package in layer.split("|")
    ]


def section(heading: str) -> str:
    return PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_the_rooms_are_those_of_the_import_contract_in_its_order() -> None:
    rows = re.findall(r"^\| (\d) \| `([a-z_/]+)/` \| .+ \|$", section("Rooms"), re.M)
    assert [(int(layer), room.replace("/", ".")) for layer, room in rows] == contract()


def test_every_folder_of_the_relay_is_a_room() -> None:
    folders = {f"relay.{path.parent.name}" for path in PROJECT.glob("relay/*/__init__.py")}
    assert folders | {"agent_sdk"} == {package for _, package in contract()}


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:relay|agent_sdk)/[a-z_/]*(?:\.py)?|\w+\.sql)`", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (PROJECT / path).exists()] == []


def test_every_function_of_the_loop_exists() -> None:
    named = re.findall(r"`(\w+)\.(\w+)`", section("One turn of the loop"))
    found: set[tuple[str, str]] = set()
    for path in (PROJECT / "relay").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for name in [path.stem, getattr(node, "name", path.stem)]:
                body = node.body if isinstance(node, ast.ClassDef) else [node]
                found |= {(name, one.name) for one in body if isinstance(one, ast.FunctionDef)}
    assert len(named) >= 9
    assert [pair for pair in named if pair not in found] == []
