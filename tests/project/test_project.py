"""The project keeps its word about itself: imports, documents, the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from relay.base.clock import Clock
from relay.base.config import Config
from relay.daemon.admin import Admin, status_of
from relay.daemon.status import SharedStatus, StatusPublisher
from tests.box import Box
from tests.procs import PROJECT, relay

pytestmark = pytest.mark.shows("ready 3.4")

CURL = re.compile(r"^    (curl .+)$", re.M)
SQL = re.compile(r'^    (?:\$ )?relay ledger query "(.+)"$', re.M)


def test_imports_go_down_the_list_only() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/runbook.md"])
def test_the_queries_run_as_printed(box: Box, document: str) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.send("alice", "TO: nobody\n\nhi")
    box.flush()
    queries = SQL.findall((PROJECT / document).read_text())
    assert queries
    for query in queries:
        done = relay("ledger", "query", query, home=box.root)
        assert done.returncode == 0, f"{query}: {done.stderr}"
    assert box.states(sent) == {"bob": "written"}


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize("document", ["docs/runbook.md", "docs/metrics.md"])
def test_the_curl_lines_answer_as_printed(document: str) -> None:
    lines = CURL.findall((PROJECT / document).read_text())
    assert lines
    with tempfile.TemporaryDirectory(prefix="relay-", dir="/tmp") as person:
        home = Path(person) / ".agent-relay"
        home.mkdir()
        status = SharedStatus(str(home), Config(), Clock())
        status.is_serving = True
        admin = Admin(status, lambda *_, **__: None)
        admin.begin("")
        for line in lines:
            done = subprocess.run(
                ["sh", "-c", line.replace("curl -s", "curl -s --fail")],
                env={**os.environ, "HOME": person},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0 and done.stdout, line
        admin.end()


def test_the_page_on_json_has_every_field_of_status(box: Box) -> None:
    status = SharedStatus(box.home.root, box.config, box.clock)
    status.snapshot = StatusPublisher(box.dispatcher, box.store, box.watcher).step()
    text = (PROJECT / "docs" / "cli-json.md").read_text().partition("## `/status`")[2]
    cells = re.findall(r"^\| ([a-z][a-z0-9_, ]+) \|", text, re.M)[1:]
    listed = [name for cell in cells for name in cell.split(", ")]
    assert sorted(listed) == sorted(status_of(status))


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_page_is_in_an_index() -> None:
    docs = PROJECT / "docs"
    listed = {docs / "index.md"}
    for index in (docs / "index.md", docs / "decisions" / "README.md"):
        targets = re.findall(r"\]\(([^)#:]+)\)", index.read_text())
        listed |= {(index.parent / target).resolve() for target in targets}
    assert set(docs.rglob("*.md")) - listed == set()


def test_the_wheel_holds_schema_shell_script_and_marks_of_types(tmp_path: Path) -> None:
    wheel_of = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel_of, "-q", "--wheel-dir", str(tmp_path), str(PROJECT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("relay/schema.sql") == (PROJECT / "schema.sql").read_bytes()
        assert archive.read("agent_sdk/relay.sh")
        assert {"agent_sdk/py.typed", "relay/py.typed"} <= set(archive.namelist())
        for name in ("report.css", "report.html.j2"):
            source = PROJECT / "relay" / "audit" / "report" / name
            assert archive.read(f"relay/audit/report/{name}") == source.read_bytes()
        for path in (PROJECT / "relay" / "web").glob("*/*.*"):
            if path.suffix != ".pyc":
                assert archive.read(str(path.relative_to(PROJECT))) == path.read_bytes()
        assert not [name for name in archive.namelist() if name.startswith(("tests", "scripts"))]


def test_a_word_has_one_line_in_the_glossary() -> None:
    text = (PROJECT / "docs" / "glossary.md").read_text()
    rows = [cell for cell in re.findall(r"^\| (.+?) \|", text, re.M) if cell != "word"]
    words = [word for cell in rows for word in cell.split(", ")]
    assert 30 < len(rows) <= 50 and sorted(words) == sorted(set(words))


def test_every_module_has_its_layer() -> None:
    with (PROJECT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layered = {name for layer in contracts[0]["layers"] for name in layer.split(" | ")}
    for path in (PROJECT / "relay").rglob("*.py"):
        if path.name == "__init__.py" or path == PROJECT / "relay" / "__main__.py":
            continue  # what a package shows is in its modules; the entry point chooses a room
        parts = path.relative_to(PROJECT).with_suffix("").parts
        names = {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
        assert names & layered, ".".join(parts)


def test_no_file_is_above_500_lines() -> None:
    for folder in ("relay", "agent_sdk", "scripts", "tests"):
        for path in (PROJECT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
