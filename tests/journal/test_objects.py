"""Tier 2's stores: one contract for both, and what each failure is called."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.base.errors import ObjectConflict, ObjectError, RelayError
from relay.journal.manifest_format import Reason
from relay.journal.objects import DirectoryObjects, ObjectStore, S3Objects, open_objects
from tests.disk import failing, killed_before
from tests.s3_server import broken_server, objects, s3_server

pytestmark = pytest.mark.shows("journal 4.4", "journal 4.5")

KEY = "00000000000000000001/00000000000000000007.seg.zst"
META = {"crc64": "0123456789abcdef", "records": "42"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A real S3 server for the module."""
    with s3_server() as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, endpoint: str) -> Iterator[ObjectStore]:
    """Each store, empty."""
    if request.param == "s3":
        yield objects(endpoint, tmp_path.name)
    else:
        (tmp_path / "tier2").mkdir()
        yield DirectoryObjects(str(tmp_path / "tier2"))


def test_what_was_put_is_there_with_its_metadata(store: ObjectStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * 12_000  # three pieces
    (tmp_path / "file").write_bytes(data)
    assert store.head(KEY) is None
    etag = store.put(KEY, str(tmp_path / "file"), META)
    facts = store.head(KEY)
    assert facts is not None and facts.size == len(data) and facts.etag == etag != ""
    assert len(etag) <= 64
    assert META.items() <= facts.metadata.items()
    facts, pieces = store.get(KEY)
    assert (facts.size, facts.etag) == (len(data), etag)
    assert META.items() <= facts.metadata.items()
    assert b"".join(pieces) == data


def test_an_object_is_never_overwritten(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "two").write_bytes(b"two")
    store.put(KEY, str(tmp_path / "one"), META)
    with pytest.raises(ObjectConflict) as caught:
        store.put(KEY, str(tmp_path / "two"), {"crc64": "another"})
    assert KEY in str(caught.value) and "\n" not in str(caught.value)
    assert b"".join(store.get(KEY)[1]) == b"one"
    assert META.items() <= store.get(KEY)[0].metadata.items()


def test_deleting_is_harmless_the_second_time(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    store.delete(KEY)
    store.put(KEY, str(tmp_path / "one"), META)
    store.delete(KEY)
    store.delete(KEY)
    assert store.head(KEY) is None
    store.put(KEY, str(tmp_path / "one"), META)


def test_an_object_that_is_missing_is_named(store: ObjectStore) -> None:
    with pytest.raises(ObjectError) as caught:
        b"".join(store.get(KEY)[1])
    assert caught.value.reason == Reason.MISSING
    assert f"{store.url}/{KEY}" in str(caught.value)


@pytest.mark.parametrize("key", ["../outside", "/etc/hosts", "a/../../b", "a//b", "", ".", "a\0b"])
def test_a_key_does_not_lead_out_of_the_directory(tmp_path: Path, key: str) -> None:
    """Keys come from the manifest; what is deleted by one is an object, whatever it says."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"not an object")
    (tmp_path / "objects").mkdir()
    store = DirectoryObjects(str(tmp_path / "objects"))
    for call in (
        lambda: store.head(key),
        lambda: store.put(key, str(outside), {}),
        lambda: b"".join(store.get(key)[1]),
        lambda: store.delete(key),
    ):
        with pytest.raises(ObjectError, match="is not a valid key") as caught:
            call()
        assert "\0" not in str(caught.value)
    assert outside.read_bytes() == b"not an object"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["objects", "outside"]


def _all_calls(store: ObjectStore, path: Path) -> dict[str, Reason]:
    """What each call fails with."""
    path.write_bytes(b"data")
    found: dict[str, Reason] = {}
    for name, call in {
        "head": lambda: store.head(KEY),
        "put": lambda: store.put(KEY, str(path), META),
        "get": lambda: b"".join(store.get(KEY)[1]),
        "delete": lambda: store.delete(KEY),
    }.items():
        with pytest.raises(ObjectError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert store.url in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert "Debug source" not in str(caught.value)
        found[name] = Reason(caught.value.reason)
    return found


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (503, Reason.TRANSIENT),
        (500, Reason.TRANSIENT),
        (429, Reason.TRANSIENT),
        (403, Reason.AUTHENTICATION),
        (401, Reason.AUTHENTICATION),
        (400, Reason.UNAVAILABLE),
        (301, Reason.UNAVAILABLE),
    ],
)
def test_what_a_status_is_called(status: int, reason: Reason, tmp_path: Path) -> None:
    with broken_server(status) as url:
        found = _all_calls(objects(url, "p"), tmp_path / "file")
    assert set(found.values()) == {reason}, found


def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: refused, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        found = _all_calls(objects(url, "p"), tmp_path / "file")
    assert set(found.values()) == {Reason.UNAVAILABLE}


def test_a_missing_bucket_is_unavailable(endpoint: str, tmp_path: Path) -> None:
    store = objects(endpoint, "p", bucket="no-such-bucket")
    (tmp_path / "file").write_bytes(b"data")
    for call in (lambda: store.put(KEY, str(tmp_path / "file"), META), lambda: store.get(KEY)):
        with pytest.raises(ObjectError, match="no-such-bucket") as caught:
            call()
        assert caught.value.reason == Reason.UNAVAILABLE


def test_a_body_cut_short_is_transient() -> None:
    with broken_server(200, b"x" * 5000, length=100_000) as url:
        with pytest.raises(ObjectError) as caught:
            b"".join(objects(url, "p").get(KEY)[1])
    assert caught.value.reason == Reason.TRANSIENT


def test_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(RelayError) as caught:
        open_objects("s3://bucket/prefix")
    assert str(caught.value) == "s3://bucket/prefix: obstore is not installed"
    assert caught.value.hint == "`pip install '.[s3]'` in the source of agent-relay"


def test_a_setting_names_its_store(tmp_path: Path) -> None:
    assert isinstance(open_objects("s3://bucket/prefix"), S3Objects)
    assert open_objects("s3://bucket/prefix/").url == "s3://bucket/prefix"
    assert isinstance(open_objects(str(tmp_path)), DirectoryObjects)
    assert open_objects(f"file://{tmp_path}").url == str(tmp_path)


def test_another_kind_of_store_is_no_directory_to_be_created() -> None:
    with pytest.raises(ObjectError) as caught:
        open_objects("gs://bucket/prefix").head(KEY)
    assert caught.value.hint == "an object store is a directory or s3://bucket/prefix"


def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    store = DirectoryObjects(str(tmp_path / "disk"))
    found = _all_calls(store, tmp_path / "file")
    assert set(found.values()) == {Reason.UNAVAILABLE}
    assert not (tmp_path / "disk").exists()


def test_a_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "file").write_bytes(b"x")
    store = DirectoryObjects(str(tmp_path / "link"))
    store.put("a/b", str(tmp_path / "file"), {})
    assert (tmp_path / "disk/a/b").read_bytes() == b"x"


def test_a_directory_that_may_not_be_written_waits_for_the_operator(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    store = DirectoryObjects(str(tmp_path))
    denied = pytest.raises(ObjectError, match="Permission denied")
    with failing("create", code=errno.EACCES), denied as caught:
        store.put(KEY, str(tmp_path / "file"), META)
    assert caught.value.reason == Reason.AUTHENTICATION


@pytest.mark.parametrize("step", range(16))
def test_a_kill_while_putting_leaves_no_object_or_all_of_it(step: int, tmp_path: Path) -> None:
    (tmp_path / "tier2").mkdir()
    (tmp_path / "file").write_bytes(b"data" * 1000)
    store = DirectoryObjects(str(tmp_path / "tier2"))
    with killed_before(step + 1):
        store.put(KEY, str(tmp_path / "file"), META)
    facts = store.head(KEY)
    if facts is None:
        store.put(KEY, str(tmp_path / "file"), META)
        facts = store.head(KEY)
    assert facts is not None and facts.metadata == META and facts.etag
    assert b"".join(store.get(KEY)[1]) == b"data" * 1000


def test_an_object_without_metadata_is_nobodys(tmp_path: Path) -> None:
    store = DirectoryObjects(str(tmp_path))
    path = tmp_path / KEY
    path.parent.mkdir()
    path.write_bytes(b"somebody put it there")
    facts = store.head(KEY)
    assert facts is not None and facts.metadata == {}
