"""A table is read when it is used, or kept first, by workers or here: the rows are the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from relay.audit.schemas import formats, results
from relay.audit.session import explained
from relay.audit.sources import (
    acomm_source,
    files_source,
    journal_source,
    ledger_source,
    parquet_cache,
)
from relay.audit.sources.parquet_cache import ParquetCache
from relay.base.clock import Clock
from relay.base.errors import RelayError
from tests.audit.home_builder import HomeBuilder

pytestmark = pytest.mark.shows("audit 1.7")


def made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


@pytest.fixture
def ways(tmp_path: Path) -> list[ParquetCache | None]:
    """Not kept; kept by workers; kept by this process."""
    return [
        None,
        ParquetCache(made(tmp_path / "theirs"), False),
        ParquetCache(made(tmp_path / "ours"), True),
    ]


def test_whoever_reads_it_and_when_the_rows_are_the_same(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path, ways: list[ParquetCache | None]
) -> None:
    home.sent("1-a", b"hello", recipients=("bob", "carol"))
    home.sent("1-b", b"again")
    ledger = str(tmp_path / "ledger.db")
    ledger_source.take_snapshot(str(home.root / "ledger.db"), ledger, Clock())
    columns = ["message_id", "recipient", "written_at"]
    for cache in ways:
        rows = ledger_source.load(spark, ledger, "deliveries", columns, cache=cache)
        assert {row[:2] for row in rows.collect()} == {
            ("1-a", "bob"),
            ("1-a", "carol"),
            ("1-b", "bob"),
        }


def test_maps_bytes_times_and_large_numbers_come_back_as_they_were(
    spark: SparkSession, home: HomeBuilder, ways: list[ParquetCache | None]
) -> None:
    home.sent("1-a", b"hello", recipients=("bob", "carol"))
    home.sent("1-b", b"again")
    store = home.write_store()
    columns = formats.STORED_MESSAGE.names
    found = [
        sorted(
            map(str, acomm_source.load(spark, [store], "messages", columns, cache=cache).collect())
        )
        for cache in ways
    ]
    assert len(found[0]) == 2
    assert found[0] == found[1] == found[2]


def test_a_table_without_rows(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path, ways: list[ParquetCache | None]
) -> None:
    ledger = str(tmp_path / "ledger.db")
    ledger_source.take_snapshot(str(home.root / "ledger.db"), ledger, Clock())
    for cache in ways:
        empty = ledger_source.load(spark, ledger, "rejections", ["agent", "at"], cache=cache)
        assert (empty.columns, empty.collect()) == (["agent", "at"], [])
    nothing = journal_source.load(
        spark, [], ["at"], cache=ParquetCache(made(tmp_path / "none"), False)
    )
    assert (nothing.columns, nothing.collect()) == (["at"], [])


def test_only_some_rows_of_a_ledgers_table(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    for name in ("1-a", "1-b", "1-it's"):
        home.sent(name)
    ledger = str(tmp_path / "ledger.db")
    ledger_source.take_snapshot(str(home.root / "ledger.db"), ledger, Clock())
    only = {"message_id": ("1-a", "1-it's", "1-none")}
    rows = ledger_source.load(spark, ledger, "messages", ["message_id"], only=only)
    assert {row.message_id for row in rows.collect()} == {"1-a", "1-it's"}


def test_attachments_that_went_since_they_were_listed_are_no_fault(
    spark: SparkSession, tmp_path: Path
) -> None:
    gone = files_source.FileUnit("attachment", str(tmp_path / "0c"), "attachments/0c")
    rows = files_source.load(spark, str(tmp_path), [gone], ["path", "problems"])
    assert rows.collect() == []
    (tmp_path / "0d").write_text("no folder")
    odd = files_source.FileUnit("attachment", str(tmp_path / "0d"), "attachments/0d")
    rows = files_source.load(spark, str(tmp_path), [odd], ["path", "problems"])
    assert [tuple(row) for row in rows.collect()] == [("attachments/0d", ["Not a directory"])]


class Unreadable(DataSource):
    """A source whose file is a folder."""

    def reader(self, schema: StructType) -> DataSourceReader:
        path = self.options["path"]

        class Reader(DataSourceReader):
            def partitions(self) -> list[InputPartition]:
                return [InputPartition(0)]

            def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
                with open(path, "rb"):
                    yield from ()

        return Reader()


@pytest.mark.parametrize("here", [True, False])
def test_what_cannot_be_read_is_one_line_and_no_file_that_is_taken_for_whole(
    spark: SparkSession, tmp_path: Path, here: bool
) -> None:
    cache = ParquetCache(made(tmp_path / "kept"), here)
    with pytest.raises(RelayError, match=f"^{tmp_path}: Is a directory$"), explained():
        parquet_cache.read(spark, Unreadable, results.FINDING, {"path": str(tmp_path)}, cache)
    assert [name for name in os.listdir(cache.folder) if not name.startswith("_")] == []
