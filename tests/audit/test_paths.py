"""Archives in an object store, on a real S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from relay.audit import paths
from relay.comm import acomm
from relay.comm.container import MAX_FILE_BYTES
from relay.comm.model import StoreFile
from relay.errors import ObjectError, RelayError
from tests.audit.homes import DIRECT, START_S, stored_message
from tests.s3_server import BUCKET, s3_server

ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server, up for all tests here."""
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """Its bucket; who reads has the credentials from the environment alone."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ):
        monkeypatch.setenv(name, value)
    return S3Store(BUCKET, client_options={"allow_http": True})


def test_a_prefix_stands_for_the_files_below_it(bucket: S3Store) -> None:
    for name in ("r/a/1.acomm", "r/a/2.acomm", "r/b/3.acomm", "r/a/x.txt", "rr/4.acomm"):
        obstore.put(bucket, name, b"x")
    below = [f"{ROOT}/r/a/1.acomm", f"{ROOT}/r/a/2.acomm", f"{ROOT}/r/b/3.acomm"]
    assert paths.list_files(f"{ROOT}/r", ".acomm") == below
    assert paths.list_files(f"{ROOT}/r/", ".acomm") == below
    assert paths.list_files(f"{ROOT}/r/a/", ".acomm") == below[:2]
    assert paths.list_files(f"{ROOT}/r/a/2.acomm", ".acomm") == below[1:2]
    assert paths.list_files(f"{ROOT}/r/*/[13].acomm", ".acomm") == [below[0], below[2]]
    assert paths.list_files(f"{ROOT}/r/a/?.acomm", ".acomm") == below[:2]
    assert paths.list_files(f"s3a://{BUCKET}/r/b", ".acomm") == below[2:]
    assert paths.list_files(f"{ROOT}/nothing/", ".acomm") == []
    assert f"{ROOT}/rr/4.acomm" in paths.list_files(ROOT, ".acomm")


@pytest.mark.parametrize("name", ["r/no.acomm", "r/no*.acomm"])
def test_what_matches_nothing_is_told(bucket: S3Store, name: str) -> None:
    with pytest.raises(RelayError, match=r"there is no file s3://journal-bucket/r/no"):
        paths.list_files(f"{ROOT}/{name}", ".acomm")


def test_an_archive_is_read_from_there(bucket: S3Store, tmp_path: Path) -> None:
    store = StoreFile(
        START_S, START_S, channels=(DIRECT,), messages=(stored_message(1, "1-a", b"in a bucket"),)
    )
    obstore.put(bucket, "year/2026-01-31/000001.acomm", acomm.encode(store))
    (found,) = paths.list_files(f"{ROOT}/year", ".acomm")
    data = paths.read_bytes(found, MAX_FILE_BYTES)
    assert acomm.decode(data, found).messages == store.messages
    with pytest.raises(RelayError, match=rf"{found} has {len(data)} bytes, and 10 are the most"):
        paths.read_bytes(found, 10)
    with pytest.raises(RelayError, match="there is no file"):
        paths.read_bytes(f"{ROOT}/year/gone.acomm", MAX_FILE_BYTES)


def test_a_bucket_that_is_not_there_is_one_line(bucket: S3Store) -> None:
    with pytest.raises(ObjectError) as caught:
        paths.list_files("s3://no-such-bucket/a", ".acomm")
    assert "s3://no-such-bucket" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RelayError, match="names no bucket"):
        paths.list_files("s3:///a", ".acomm")


def test_paths_of_this_machine_are_none_of_its() -> None:
    assert not paths.is_remote("/home/relay/store") and not paths.is_remote("s3")
    assert paths.is_remote("s3://b") and paths.is_remote("s3a://b/c")
