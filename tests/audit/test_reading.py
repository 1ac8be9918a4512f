"""A small home is read where the run is planned: the same rows as by workers, the same one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from relay.audit import acomm_source, files_source, ledger_source, reading, schemas
from relay.clock import Clock
from relay.errors import RelayError
from tests.audit.homes import HomeBuilder


def test_here_and_by_workers_the_rows_are_the_same(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a", b"hello", recipients=("bob", "carol"))
    home.sent("1-b", b"again")
    store = home.write_store()
    ledger = str(tmp_path / "ledger.db")
    ledger_source.take_snapshot(str(home.root / "ledger.db"), ledger, Clock())
    for here in (True, False):
        rows = ledger_source.load(
            spark, ledger, "deliveries", ["message_id", "recipient", "written_at"], here=here
        )
        assert {row[:2] for row in rows.collect()} == {
            ("1-a", "bob"),
            ("1-a", "carol"),
            ("1-b", "bob"),
        }
    columns = schemas.STORED_MESSAGE.names
    here_rows, worker_rows = (
        acomm_source.load(spark, [store], "messages", columns, here=here).collect()
        for here in (True, False)
    )
    assert len(here_rows) == 2
    assert sorted(map(str, here_rows)) == sorted(map(str, worker_rows))


def test_a_table_without_rows(spark: SparkSession, home: HomeBuilder, tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger.db")
    ledger_source.take_snapshot(str(home.root / "ledger.db"), ledger, Clock())
    empty = ledger_source.load(spark, ledger, "rejections", ["agent", "at"], here=True)
    assert (empty.columns, empty.collect()) == (["agent", "at"], [])


def test_attachments_that_went_since_they_were_listed_are_no_fault(
    spark: SparkSession, tmp_path: Path
) -> None:
    gone = files_source.Unit("attachment", str(tmp_path / "0c"), "attachments/0c")
    rows = files_source.load(spark, str(tmp_path), [gone], ["path", "problems"], here=True)
    assert rows.collect() == []
    (tmp_path / "0d").write_text("no folder")
    odd = files_source.Unit("attachment", str(tmp_path / "0d"), "attachments/0d")
    rows = files_source.load(spark, str(tmp_path), [odd], ["path", "problems"], here=True)
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


def test_what_cannot_be_read_here_is_one_line(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=f"^{tmp_path}: Is a directory$"):
        reading.read(spark, Unreadable, schemas.COUNT, {"path": str(tmp_path)}, here=True)
