"""docs/formats/ledger.md says what the schema says, and which moves the ledger makes."""

from __future__ import annotations

import re
import sqlite3
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.base.incidents import IncidentKind, RefusalCode
from relay.ledger.file import SCHEMA_VERSION
from relay.ledger.ledger import Ledger
from relay.ledger.schema import schema_sql
from tests.documents import read_page, tables
from tests.ledger import test_messages
from tests.sound import moves

pytestmark = pytest.mark.shows("ready 3.4")

DOCS = read_page("formats/ledger.md")
TABLES = re.findall(r"^CREATE TABLE (\w+)", schema_sql(), flags=re.M)


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.executescript(schema_sql())
    yield connection
    connection.close()


def test_every_table_and_view_has_its_section(db: sqlite3.Connection) -> None:
    found = [
        name
        for (name,) in db.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
            "AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        )
    ]
    headings = re.findall(r"^## (\w+)$", DOCS, flags=re.M)
    assert headings == [*found, "Indexes"]
    assert found == [*TABLES, "all_messages"]


@pytest.mark.parametrize("table", TABLES)
def test_every_column_has_its_row_in_order(db: sqlite3.Connection, table: str) -> None:
    columns = [
        [name, f"{kind} NOT NULL" if required else kind]
        for _, name, kind, required, _, _ in db.execute(f"PRAGMA table_info({table})")
    ]
    assert [row[:2] for row in tables(DOCS, table)[0]] == columns


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_explained(table: str) -> None:
    for name, _, meaning in tables(DOCS, table)[0]:
        assert meaning or (table, name) == ("pending_operations", "id")


def states(db: sqlite3.Connection, table: str) -> list[str]:
    """The words that the CHECK of a table allows."""
    (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return re.findall(r"'(\w+)'", re.findall(r"CHECK \(\w+ IN\s+\((.*?)\)", sql, flags=re.S)[0])


def test_the_states_are_those_that_the_schema_allows(db: sqlite3.Connection) -> None:
    named = list(dict.fromkeys(row[0] for row in tables(DOCS, "Life of a row")[0]))
    assert sorted(named) == sorted(states(db, "messages"))
    assert [row[0] for row in tables(DOCS, "Life of a delivery")[0]] == states(db, "deliveries")


def test_the_moves_are_those_that_the_ledger_makes() -> None:
    made = {
        (old, new)
        for _, allowed in test_messages.MOVES.values()
        for old, new in allowed.items()
        if old != new
    }
    assert moves("Life of a row") == made


def test_every_kind_of_incident_is_explained() -> None:
    assert [row[0] for row in tables(DOCS, "Kinds of incidents")[0]] == [
        str(one) for one in IncidentKind
    ]
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    told_of = {IncidentKind.AUDIT_PRUNED, IncidentKind.KEY_CONFIRMED, IncidentKind.KEY_REGISTERED}
    for kind in set(IncidentKind) - told_of:  # those are no bad input
        assert kind in page, kind


def test_every_code_of_a_refusal_is_explained() -> None:
    (found,) = tables(DOCS, "Codes of refusals")
    assert [row[0] for row in found] == [str(one) for one in RefusalCode]


def test_queries_for_an_incident_ask_for_a_kind_that_there_is() -> None:
    asked = [
        kind
        for page in (Path(__file__).parents[2] / "docs").rglob("*.md")
        for kind in re.findall(r"\bkind = '(\w+)'", page.read_text())
    ]
    assert asked and set(asked) <= set(IncidentKind)


def test_every_index_has_its_row(db: sqlite3.Connection) -> None:
    found = db.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql <> '' ORDER BY rowid"
    ).fetchall()
    assert [row[0] for row in tables(DOCS, "Indexes")[0]] == [name for name, _ in found]
    for (name, on, where), (_, sql) in zip(tables(DOCS, "Indexes")[0], found, strict=True):
        condition = f" WHERE {where.strip('`')}" if where else ""
        assert " ".join(sql.split()) == f"CREATE INDEX {name} ON {on}{condition}"


def test_the_version(db: sqlite3.Connection) -> None:
    assert f"now {SCHEMA_VERSION};" in " ".join(DOCS.split())
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_the_queries_run_as_printed(db: sqlite3.Connection) -> None:
    queries = re.findall(r'^    relay ledger query "(.+)"$', DOCS, flags=re.M)
    assert len(queries) == 2
    for query in queries:
        db.execute(query)


def test_the_python_lines_run_as_printed(
    ledger: Ledger, ledger_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"^    import sqlite3\n(?:(?:    .*)?\n)+", DOCS, flags=re.M)
    text = textwrap.dedent(block).replace("/home/me/.agent-relay/ledger.db", ledger_path)
    names: dict[str, Any] = {}
    exec(text, names)
    names["db"].close()
    assert capsys.readouterr().out.startswith("0 {'message_id': <class 'str'>")
