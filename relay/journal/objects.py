"""Tier 2: object stores, in a directory or in S3 (by obstore).

An object is written once and never changed: ``put`` fails if it exists. Its metadata (checksum,
record count) verify it without reading it.

    ROOT/{key}             the object, as it was uploaded
    ROOT/{key}.meta.json   its metadata and ETag; written first, so every object has one
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from relay.base import fsio
from relay.base.errors import ObjectConflict, ObjectError, ObjectMissing, RelayError
from relay.journal.files import PIECE_BYTES, NewFile, crc_of, pieces, remove, size_of
from relay.journal.format import crc64
from relay.journal.manifest_format import Reason

if TYPE_CHECKING:
    import obstore

_META = ".meta.json"
TIMEOUT_S = 300  # of one request: 64 MiB at 2 Mbit/s
CONNECT_TIMEOUT_S = 10
_STATUS = re.compile(r"status code: (\d{3})")
_INSTANCE_METADATA = "169.254.169.254"  # queried for credentials if the environment has none


class ObjectFacts(NamedTuple):
    """The facts of an object that a HEAD request returns."""

    size: int
    etag: str
    metadata: dict[str, str]


class ObjectStore(Protocol):
    """A store for Tier 2. Every error is an ObjectError with a Reason; calls do not retry."""

    url: str  # for messages, without credentials

    def head(self, key: str) -> ObjectFacts | None:
        """The facts of an object; None if it does not exist."""

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Store the file ``path``, durably; its ETag. Errors: ObjectConflict when the object
        exists, ObjectError."""

    def get(self, key: str) -> tuple[ObjectFacts, Iterator[bytes]]:
        """Read an object: its facts, and its bytes in pieces.

        Errors, also while reading: ObjectError; Reason.MISSING if it does not exist.
        """

    def delete(self, key: str) -> None:
        """Delete an object, durably; a missing one is ignored."""


def open_objects(url: str) -> ObjectStore:
    """Open the store at a directory's path or ``s3://bucket/prefix``.

    Errors: RelayError when S3 support is needed and not installed.
    """
    if url.startswith("s3://"):
        return S3Objects(url)
    return DirectoryObjects(url.removeprefix("file://"))


class DirectoryObjects:
    """Objects as synced files below a directory, which must exist: nothing is written below the
    mount point of a disk that is not mounted."""

    def __init__(self, root: str) -> None:
        self.url = os.path.realpath(root)
        self._hint = "mount it, or create the directory"
        if "://" in root:
            self._hint = "an object store is a directory or s3://bucket/prefix"

    def head(self, key: str) -> ObjectFacts | None:
        """The size of the file, with ETag and metadata from the file beside it."""
        path = self._path(key)
        with self._failing(key):
            size = size_of(path)
            return None if size is None else self._facts(path, size)

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Copy the file; the ETag is the crc64 of the bytes read back."""
        target = self._path(key)
        with self._failing(key):
            self._make_folders(key)
            if size_of(target) is not None:
                raise ObjectConflict(f"{target} exists already", Reason.AUTHENTICATION)
            with NewFile(target) as file:
                sent = 0
                for piece in pieces(path):
                    file.write(piece)
                    sent = crc64(piece, sent)
                file.sync()
                if (found := crc_of(file.temp)) != sent:
                    text = f"{target}: wrote crc64 {sent:016x}, read back {found:016x}"
                    raise ObjectError(text, Reason.TRANSIENT)
                etag = f"{sent:016x}"
                meta = json.dumps({"etag": etag, "metadata": metadata}, sort_keys=True)
                fsio.write_atomic(target + _META, meta.encode())
                file.commit()
            return etag

    def get(self, key: str) -> tuple[ObjectFacts, Iterator[bytes]]:
        """Read the file; the caller verifies it."""
        facts = self.head(key)
        if facts is None:
            raise ObjectMissing(f"{self.url}/{key}: no such object", Reason.MISSING)
        return facts, self._read(key)

    def delete(self, key: str) -> None:
        """Delete the object before its metadata, which alone do not count."""
        path = self._path(key)
        with self._failing(key):
            if os.path.isdir(os.path.dirname(path)):
                remove(path)
                remove(path + _META)

    def _path(self, key: str) -> str:
        """The path of an object. Errors: ObjectError for a key that leads outside."""
        parts = key.split("/")
        if "\0" in key or not {"", ".", ".."}.isdisjoint(parts):
            raise ObjectError(f"{self.url}: {key!r} is not a valid key", Reason.AUTHENTICATION)
        return os.path.join(self.url, *parts)

    def _read(self, key: str) -> Iterator[bytes]:
        with self._failing(key):
            yield from pieces(self._path(key))

    def _facts(self, path: str, size: int) -> ObjectFacts:
        try:
            meta = json.loads(b"".join(pieces(path + _META)))
            return ObjectFacts(size, str(meta["etag"]), dict(meta["metadata"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ObjectFacts(size, "", {})  # so that it does not match any expected object

    def _make_folders(self, key: str) -> None:
        folder = self.url
        for name in os.path.dirname(key).split("/"):
            above, folder = folder, os.path.join(folder, name)
            if not os.path.isdir(folder):
                fsio.ensure_dir(folder)
                fsio.sync_dir(above)

    @contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        """Translate OSError into ObjectError with its reason."""
        if not os.path.isdir(self.url):
            text = f"{self.url}: no such directory"
            raise ObjectError(text, Reason.UNAVAILABLE, hint=self._hint)
        try:
            yield
        except OSError as exc:
            denied = exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            reason = Reason.AUTHENTICATION if denied else Reason.TRANSIENT
            raise ObjectError(f"{self.url}/{key}: {exc.strerror or exc}", reason) from exc


class S3Objects:
    """A bucket, or a prefix in it (extra ``[s3]``). ``options``: those of obstore's S3Store, in
    addition to the environment.

    Credentials, region and endpoint come from the environment (``AWS_ACCESS_KEY_ID``,
    ``AWS_REGION``, ``AWS_ENDPOINT_URL`` ...), never from a setting. Each request is made once: the
    tiers retry, by the reason of the error.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
        except ImportError:
            raise RelayError(
                f"{url}: obstore is not installed",
                hint="`pip install '.[s3]'` in the source of agent-relay",
            ) from None
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = prefix.strip("/")
        self._obstore: Any = obstore
        self._store = _open(bucket, options)

    def head(self, key: str) -> ObjectFacts | None:
        """Send a HEAD request; a missing bucket looks like a missing object."""
        try:
            with self._failing(key):
                return _facts(self._obstore.get(self._store, self._at(key), options={"head": True}))
        except ObjectError as exc:
            if exc.reason == Reason.MISSING:
                return None
            raise

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """Send one PUT, which fails if the object exists; the store verifies the CRC-64/NVME."""
        with self._failing(key, putting=True):
            answer = self._obstore.put(
                self._store, self._at(key), Path(path), attributes=metadata, mode="create"
            )
        return str(answer["e_tag"] or "").strip('"')

    def get(self, key: str) -> tuple[ObjectFacts, Iterator[bytes]]:
        """Send a GET request, and stream the bytes."""
        with self._failing(key):
            answer = self._obstore.get(self._store, self._at(key))
            return _facts(answer), self._read(key, answer)

    def delete(self, key: str) -> None:
        """Send a DELETE request."""
        try:
            with self._failing(key):
                self._obstore.delete(self._store, self._at(key))
        except ObjectError as exc:
            if exc.reason != Reason.MISSING:
                raise

    def _read(self, key: str, answer: Any) -> Iterator[bytes]:
        with self._failing(key):
            for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _failing(self, key: str, *, putting: bool = False) -> Iterator[None]:
        """Translate obstore's errors into ObjectError with its reason, in one line."""
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.BaseError, OSError, ValueError) as exc:
            error = " ".join(str(exc).split("Debug source")[0].split())
            text = f"{self.url}/{key}: {error}"
            if isinstance(exc, errors.AlreadyExistsError) and putting:
                raise ObjectConflict(text, Reason.AUTHENTICATION) from exc
            reason = _reason(exc, error, putting, errors)
            if reason is Reason.MISSING:
                raise ObjectMissing(text, reason) from exc
            raise ObjectError(text, reason, hint=_HINTS.get(reason, "")) from exc


# Without s3:ListBucket a HEAD of a missing object is answered 403, not 404.
_HINTS = {
    Reason.AUTHENTICATION: "correct the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or"
    " the bucket's policy (s3:ListBucket, too), then restart the relay or run"
    " `relay journal move --to 2 --copy`",
    Reason.UNAVAILABLE: "check that the bucket exists and AWS_ENDPOINT_URL is right; it is retried",
}


def _reason(exc: Exception, error: str, putting: bool, errors: Any) -> Reason:
    """The reason of a failure, which decides about retries."""
    if isinstance(exc, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        return Reason.AUTHENTICATION
    if _INSTANCE_METADATA in error:
        return Reason.AUTHENTICATION
    if isinstance(exc, FileNotFoundError):
        return Reason.UNAVAILABLE if putting or "NoSuchBucket" in error else Reason.MISSING
    status = _STATUS.search(error)
    if status is not None:
        code = int(status[1])
        # 4xx: a wrong request (region, bucket name): retry later.
        return Reason.TRANSIENT if code >= 500 or code in (408, 429) else Reason.UNAVAILABLE
    if "error sending request" in error or "redirect" in error:
        return Reason.UNAVAILABLE  # connection refused, or no such host
    return Reason.TRANSIENT


def _facts(answer: Any) -> ObjectFacts:
    meta = answer.meta
    metadata = {str(name): str(value) for name, value in answer.attributes.items()}
    return ObjectFacts(int(meta["size"]), str(meta["e_tag"] or "").strip('"'), metadata)


def _open(bucket: str, options: dict[str, Any]) -> obstore.store.S3Store:
    from obstore.store import S3Store

    endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    settings: dict[str, Any] = {
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=TIMEOUT_S),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=TIMEOUT_S)},
        "checksum_algorithm": "CRC64NVME",
        "disable_bulk_delete": True,  # not every server supports it
    }
    return S3Store(bucket, **{**settings, **options})
