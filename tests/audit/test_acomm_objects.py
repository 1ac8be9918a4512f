"""Archives in an object store, on a real S3 server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from relay.acomm import store_file
from relay.acomm.container import MAX_FILE_BYTES
from relay.acomm.model import StoreFile
from relay.audit.formats import AcommSource
from relay.audit.sources import bucket_files
from relay.audit.sources.bucket_files import is_remote, list_objects, read_object
from relay.base.errors import ArchivesUnreachable, ObjectError, RelayError
from tests.audit.home_builder import DIRECT, START_S, stored_message
from tests.audit.source_rows import rows_of
from tests.s3_server import BUCKET, broken_server, s3_server

pytestmark = pytest.mark.shows("audit 1.9")

ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server, up for all tests here."""
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """Its bucket; who reads has the credentials from the environment alone."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    return S3Store(BUCKET, client_options={"allow_http": True})


def environment(server: str) -> dict[str, str]:
    """What names the server, and who asks."""
    return {
        "AWS_ENDPOINT_URL": server,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


def load(*where: str, **options: str) -> list[dict[str, Any]]:
    """The rows of a section of these paths, as Spark asks a source for them."""
    return rows_of(AcommSource, None, paths=json.dumps(where), **options)


def test_a_prefix_stands_for_the_files_below_it(bucket: S3Store) -> None:
    for name in ("r/a/1.acomm", "r/a/2.acomm", "r/b/3.acomm", "r/a/x.txt", "rr/4.acomm"):
        obstore.put(bucket, name, b"x")
    below = [f"{ROOT}/r/a/1.acomm", f"{ROOT}/r/a/2.acomm", f"{ROOT}/r/b/3.acomm"]
    assert list(list_objects(f"{ROOT}/r")) == below
    assert list(list_objects(f"{ROOT}/r/")) == below
    assert list(list_objects(f"{ROOT}/r/a/")) == below[:2]
    assert list(list_objects(f"{ROOT}/r/a/2.acomm")) == below[1:2]
    assert list(list_objects(f"{ROOT}/r/*/[13].acomm")) == [below[0], below[2]]
    assert list(list_objects(f"{ROOT}/r/a/?.acomm")) == below[:2]
    assert list(list_objects(f"s3a://{BUCKET}/r/b")) == below[2:]
    assert list(list_objects(f"{ROOT}/nothing/")) == []
    assert f"{ROOT}/rr/4.acomm" in list_objects(ROOT)


@pytest.mark.parametrize("name", ["r/no.acomm", "r/no*.acomm"])
def test_what_matches_nothing_is_told(bucket: S3Store, name: str) -> None:
    with pytest.raises(RelayError, match=r"s3://journal-bucket/r/no.*: no such file"):
        list_objects(f"{ROOT}/{name}")


def test_an_archive_is_read_from_there(bucket: S3Store, tmp_path: Path) -> None:
    store = StoreFile(
        START_S, START_S, channels=(DIRECT,), messages=(stored_message(1, "1-a", b"in a bucket"),)
    )
    obstore.put(bucket, "year/2026-01-31/000001.acomm", store_file.encode(store))
    ((found, size),) = list_objects(f"{ROOT}/year").items()
    data = read_object(found, MAX_FILE_BYTES)
    assert len(data) == size
    assert store_file.decode(data, found).messages == store.messages
    with pytest.raises(RelayError, match=rf"{found} has {len(data)} bytes, the limit is 10"):
        read_object(found, 10)
    with pytest.raises(RelayError, match="no such file"):
        read_object(f"{ROOT}/year/gone.acomm", MAX_FILE_BYTES)


def test_a_bucket_that_is_not_there_is_one_line(bucket: S3Store) -> None:
    with pytest.raises(ObjectError) as caught:
        list_objects("s3://no-such-bucket/a")
    assert str(caught.value) == "s3://no-such-bucket/a cannot be read: no such bucket"
    with pytest.raises(RelayError, match="names no bucket"):
        list_objects("s3:///a")


def test_the_format_reads_what_lies_in_a_bucket(bucket: S3Store, tmp_path: Path) -> None:
    """Prefix, object, glob, and files of this machine beside them; damage where it is permitted."""
    for number, place in enumerate(("all/a/1", "all/b/2", "all/b/3", "all/other/4"), 1):
        data = store_file.encode(_store(number))
        obstore.put(bucket, f"{place}.acomm", b"x" * len(data) if number == 4 else data)
    (tmp_path / "5.acomm").write_bytes(store_file.encode(_store(5)))

    def ids(*where: str, **options: str) -> list[str]:
        return sorted(row["relay_id"] for row in load(*where, **options))

    forms = (f"{ROOT}/all/b/", f"{ROOT}/all/a/1.acomm", f"s3a://{BUCKET}/all/[ab]/[13].acomm")
    assert ids(*forms, str(tmp_path)) == ["1-a", "2-a", "3-a", "5-a"]
    assert ids(f"{ROOT}/all", mode="permissive") == ["1-a", "2-a", "3-a"]
    channels = load(f"{ROOT}/all/a", section="channels")
    assert [row["file"] for row in channels] == [f"{ROOT}/all/a/1.acomm"]
    with pytest.raises(RelayError, match=r"all/other/4\.acomm"):
        ids(f"{ROOT}/all")


def test_what_cannot_be_read_there_is_one_line(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(bucket, "line/1.acomm", store_file.encode(_store(1)))

    def told(where: str, **options: str) -> str:
        with pytest.raises(RelayError) as caught:
            load(where, **options)
        assert "\n" not in str(caught.value)
        return f"{caught.value}; {caught.value.hint}"

    assert told(f"{ROOT}/line/2.acomm") == f"{ROOT}/line/2.acomm: no such file; "
    assert told("s3://no-such-bucket/a").startswith(
        "s3://no-such-bucket/a cannot be read: no such bucket; set these in the"
    )
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        patch.setattr(bucket_files, "ATTEMPTS", 1)
        said = told(ROOT, mode="permissive")  # not taken for damage
    assert "nothing answers at http://127.0.0.1:1; set these" in said
    source = AcommSource({"path": f"{ROOT}/line"})
    planned = source.reader(source.schema())
    (part,) = planned.partitions()
    obstore.delete(bucket, "line/1.acomm")  # the list of files is of this plan
    with pytest.raises(RelayError, match=f"{ROOT}/line/1.acomm: no such file"):
        list(planned.read(part))


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "no credentials, or none that the object store accepts"),
        (400, "HTTP status 400"),
    ],
)
def test_a_store_that_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    with broken_server(status, b"<?xml version='1.0'?><Error><Code>x</Code></Error>") as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        for ask in (
            lambda: list_objects(ROOT),
            lambda: read_object(f"{ROOT}/a.acomm", 10),
        ):
            with pytest.raises(ArchivesUnreachable) as caught:
                ask()
            assert said in str(caught.value) and "<" not in str(caught.value)
            assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def _store(number: int) -> StoreFile:
    message = stored_message(number, f"{number}-a", b"in a bucket")
    return StoreFile(START_S, START_S, channels=(DIRECT,), messages=(message,))


def test_paths_of_this_machine_are_none_of_its() -> None:
    assert not is_remote("/home/relay/store") and not is_remote("s3")
    assert is_remote("s3://b") and is_remote("s3a://b/c")
