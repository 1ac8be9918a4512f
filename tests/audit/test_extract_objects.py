"""A lake in an object store, on a real S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
from pyarrow import BufferReader

from relay.audit import lake
from relay.audit.extract import extract
from relay.base.clock import Clock
from relay.base.errors import ArchivesUnreachable
from tests.audit.home_builder import HomeBuilder
from tests.audit.test_acomm_objects import environment
from tests.s3_server import BUCKET, s3_server

URL = f"s3://{BUCKET}/audits/lake"


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
