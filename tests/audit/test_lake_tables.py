"""A lake, and the results of many homes, as people query them: with DuckDB, Arrow and Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import SparkSession

from relay.audit import lake_columns, tables
from relay.audit.extract import extract
from relay.audit.lake import default_name, home_id
from relay.base.clock import Clock
from relay.base.errors import RelayError
from tests.audit.home_builder import HomeBuilder, stored_message
from tests.audit.printed import relay_audit

PAGES = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def views_go(spark: SparkSession) -> Iterator[None]:
    """The session is also that of other tests, which have views of the same names."""
    yield
    for table in lake_columns.TABLES:
        spark.catalog.dropTempView(table)


@pytest.fixture
def where(home: HomeBuilder, tmp_path: Path) -> Path:
    """A lake with two homes: three messages, and one of them."""
    home.sent("1-a", b"a")
    home.sent("1-b", b"bb", sender="carol")
    home.seen("1-c")
    home.write_store()
    extract(home.path, str(tmp_path / "lake"), Clock())
    home.finish("1-c")
    extract(home.path, str(tmp_path / "lake"), Clock(), name="copy")
    return tmp_path / "lake"


def lines_of(page: str, title: str) -> list[str]:
    """The Python of a section."""
    section = (PAGES / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_lines_of_the_page(
    spark: SparkSession,
    where: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(where.parent)
    arrow, in_spark = lines_of("audit.md", "A lake")
    exec(arrow, {})
    exec(in_spark, {})
    said = capsys.readouterr().out
    assert "sender" in said
    assert said.count("archived") == 2  # a line a home
    assert "1-a" in said


def test_the_results_of_many_homes_are_one_table(
    spark: SparkSession,
    home: HomeBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    home.sent("1-a")
    home.write_store()
    for name, code in (("web1", 0), ("web2", 3)):
        out = f"audits/home={name}"
        done = relay_audit("run", "duplicates", "traffic", "--out", out, home=home.path)
        assert (done.exit_code, done.stderr) == (code, "")
        home.stored = [*home.stored, stored_message(9, "1-a")]
        home.write_store()
    (look,) = lines_of("cluster.md", "Many homes")
    exec(look, {})
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "error" in line]
    assert [row[1::2] for row in rows] == [["web2", "duplicates", "error", "1"]]
    pairs = duckdb.sql("SELECT home, messages FROM 'audits/*/traffic/*.parquet' ORDER BY home")
    assert pairs.fetchall() == [("web1", 1), ("web2", 1)]


def test_every_table_is_a_view(spark: SparkSession, where: Path, home: HomeBuilder) -> None:
    found = tables(spark, str(where))
    assert list(found) == list(lake_columns.TABLES)
    for table, columns in lake_columns.TABLES.items():
        assert spark.table(table).columns == [*columns.names, "home"], table
        files = f"{where}/{table}/*/*.parquet"
        rows = duckdb.sql(f"SELECT * FROM read_parquet('{files}')")
        assert rows.columns == [*columns.names, "home"], table
    per_home = {
        row["home"]: row["count"]
        for row in found["ledger_messages"].groupBy("home").count().collect()
    }
    one = home_id(default_name(home.path))
    assert per_home == {one: 3, home_id("copy"): 3}
    assert tables(spark, str(where), "copy")["home"].count() == 1
    assert found["ledger_rings"].count() == 0
    comment = found["store_messages"].schema["bucket"].metadata["comment"]
    assert comment == lake_columns.comment_of(lake_columns.TABLES["store_messages"].field("bucket"))
    with pytest.raises(RelayError, match=r"no home another$"):
        tables(spark, str(where), "copy", "another")
    with pytest.raises(RelayError, match="no lake"):
        tables(spark, str(where.parent / "none"))


def test_jobs_read_the_lake_and_the_next_run_reads_what_is_new(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store("store/archive/2026-01-31/000001.acomm")
    where = tmp_path / "a lake, not [a] glob? #1 {of,*} %41"

    def stored(run: str) -> list[str]:
        inputs = home.inputs(spark, tmp_path / run, lake=str(where))
        return sorted(row["relay_id"] for row in inputs.table("store_messages").collect())

    assert stored("first") == ["1-a"]
    (archived,) = (where / "store_messages").rglob("archive-*.parquet")
    written = archived.stat().st_mtime_ns
    home.sent("1-b")
    home.write_store("store/archive/2026-01-31/000002.acomm")
    assert stored("second") == ["1-a", "1-a", "1-b"]
    assert archived.stat().st_mtime_ns == written
    assert tables(spark, str(where))["store_messages"].count() == 3
