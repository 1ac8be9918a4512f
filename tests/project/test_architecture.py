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


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:relay|agent_sdk)/[a-z_/]*(?:\.py)?|\w+\.sql)`", PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (PROJECT / path).exists()] == []


def test_every_class_and_function_of_the_loop_exists() -> None:
    """Named as module.function, module.Class, Class.method or module.Class.method."""
    named = re.findall(
        r"`([a-z_]\w*(?:\.\w+){1,2}|[A-Z]\w+\.\w+)`", section("One turn of the loop")
    )
    found: set[str] = set()
    for path in (PROJECT / "relay").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(f"{path.stem}.{node.name}")
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                found |= {f"{node.name}.{name}" for name in methods}
                found |= {f"{path.stem}.{node.name}.{name}" for name in methods}
    assert len(named) >= 25
    assert [name for name in named if name not in found and not name.endswith(".py")] == []
