"""A lake in an object store, on a real S3 server on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import BufferReader
from pyspark.sql import SparkSession

from relay.audit import lake
from relay.audit.extract import extract
from relay.audit.lake import default_name, home_id
from relay.audit.lake_tables import tables
from relay.base.clock import Clock
from relay.base.errors import ArchivesUnreachable
from tests.audit.home_builder import HomeBuilder, stored_message
from tests.audit.printed import parquet, relay_audit
from tests.audit.test_acomm_objects import environment
from tests.s3_server import BUCKET, s3_server

URL = f"s3://{BUCKET}/audits/lake"
THREE = f"s3://{BUCKET}/audits/three"  # servers of one process have one state


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server; who writes has its credentials from the environment alone."""
    with s3_server() as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        yield url


def ids(name: str) -> list[str]:
    """The messages of a home in the lake, by its manifest."""
    opened = lake.open_lake(URL)
    made = lake.read_manifest(opened, lake.home_id(name))
    assert made is not None
    found = []
    for file in made.files():
        if file.table == "store_messages":
            data = opened.read(file.path)
            assert data is not None
            found += pq.read_table(BufferReader(data)).column("relay_id").to_pylist()
    return sorted(found)


def test_homes_share_a_lake_in_a_bucket_and_a_run_reads_it(
    spark: SparkSession, server: str, tmp_path: Path
) -> None:
    names = ("web", "db", "ci")
    for number, name in enumerate(names):
        with contextlib.closing(HomeBuilder(tmp_path / name)) as home:
            for letter in "abc"[: number + 1]:
                home.sent(f"1-{letter}")
            # The last one is in the store twice.
            home.stored = [*home.stored, stored_message(9, f"1-{letter}")]
            home.write_store()
            extract(home.path, THREE, Clock())
    out = tmp_path / "out"
    words = ("run", "duplicates", "--lake", THREE, "--out", str(out))
    done = relay_audit(*words, home=str(tmp_path / "ci"))
    assert (done.exit_code, done.stderr) == (3, "")
    found = [f"{row['check']} {row['message_id']}" for row in parquet(out / "findings")]
    assert found == ["duplicates.numbered_twice 1-c"]
    tables(spark, THREE)
    rows = spark.sql("""SELECT m.home, count(*), count(s.relay_id) FROM ledger_messages AS m
        LEFT JOIN store_messages AS s ON s.home = m.home AND s.relay_id = m.message_id
        GROUP BY ROLLUP (m.home)""").collect()
    ids = [home_id(default_name(str(tmp_path / name))) for name in names]
    per_home = {home: (number + 2, number + 2) for number, home in enumerate(ids)}
    assert {row[0]: (row[1], row[2]) for row in rows} == {**per_home, None: (9, 9)}


def test_a_lake_in_a_bucket(
    server: str, home: HomeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.sent("1-a")
    home.write_store()
    first = extract(home.path, URL, Clock(), name="one")
    assert (first.problems, ids("one")) == ([], ["1-a"])
    home.sent("1-b")
    home.write_store()
    extract(home.path, URL, Clock(), name="one")
    extract(home.path, URL, Clock(), name="two")
    assert ids("one") == ids("two") == ["1-a", "1-b"]
    opened = lake.open_lake(URL)
    assert lake.homes_of(opened) == sorted(map(lake.home_id, ("one", "two")))
    # What the second extract replaced is gone.
    folder = lake.folder_of("store_messages", lake.home_id("one"))
    assert len(opened.sizes(folder)) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("relay.audit.sources.bucket_files.ATTEMPTS", 1)
    with pytest.raises(ArchivesUnreachable, match="nothing answers at"):
        extract(home.path, URL, Clock(), name="one")
