"""Tier 2 in S3, or what speaks its protocol, by obstore (extra ``[s3]``).

Credentials, region and endpoint are those of the environment (``AWS_ACCESS_KEY_ID``,
``AWS_REGION``, ``AWS_ENDPOINT_URL`` …): none stands in a setting. Each request is made once:
when to try again is the tiers' decision, by the reason given here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relay.aof2.files import PIECE_BYTES
from relay.aof2.format import Reason
from relay.aof2.objects import Download, ObjectFacts
from relay.errors import ObjectConflict, ObjectError, ObjectMissing, RelayError

if TYPE_CHECKING:
    import obstore

TIMEOUT_S = 300  # of one request: 64 MiB at 2 Mbit/s
CONNECT_TIMEOUT_S = 10
_STATUS = re.compile(r"status code: (\d{3})")
_INSTANCE_METADATA = "169.254.169.254"  # asked for credentials where the environment has none


class S3Objects:
    """A bucket, or what lies below a prefix in it. ``options``: of obstore's S3Store, for those
    that do not come from the environment."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
        except ImportError:
            raise RelayError(
                f"{url}: obstore is not installed", hint="pip install agent-relay[s3]"
            ) from None
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = prefix.strip("/")
        self._obstore: Any = obstore
        self._store = _open(bucket, options)

    def head(self, key: str) -> ObjectFacts | None:
        """By a HEAD request; a bucket that is missing looks the same as an object that is."""
        try:
            with self._failing(key):
                return _facts(self._obstore.get(self._store, self._at(key), options={"head": True}))
        except ObjectError as exc:
            if exc.reason == Reason.MISSING:
                return None
            raise

    def put(self, key: str, path: str, metadata: dict[str, str]) -> str:
        """One PUT that fails where there is an object; the store checks the body's CRC-64/NVME."""
        with self._failing(key, putting=True):
            answer = self._obstore.put(
                self._store, self._at(key), Path(path), attributes=metadata, mode="create"
            )
        return str(answer["e_tag"] or "").strip('"')

    def get(self, key: str) -> Download:
        """By a GET request; the bytes come as they are read."""
        with self._failing(key):
            answer = self._obstore.get(self._store, self._at(key))
            return Download(_facts(answer), self._read(key, answer))

    def delete(self, key: str) -> None:
        """By a DELETE request."""
        try:
            with self._failing(key):
                self._obstore.delete(self._store, self._at(key))
        except ObjectError as exc:
            if exc.reason != Reason.MISSING:
                raise

    def names(self, below: str = "") -> Iterator[str]:
        """The keys that begin with ``below``, in order, by LIST requests. Errors: ObjectError."""
        with self._failing(below):
            skipped = len(self._at(""))
            for page in self._obstore.list(self._store, prefix=self._at(below) or None):
                yield from (str(one["path"])[skipped:] for one in page)

    def _read(self, key: str, answer: Any) -> Iterator[bytes]:
        with self._failing(key):
            for piece in answer.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    @contextmanager
    def _failing(self, key: str, *, putting: bool = False) -> Iterator[None]:
        """What obstore raises becomes an ObjectError with its reason, in one line."""
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.BaseError, OSError, ValueError) as exc:
            said = " ".join(str(exc).split("Debug source")[0].split())
            text = f"{self.url}/{key}: {said}"
            if isinstance(exc, errors.AlreadyExistsError) and putting:
                raise ObjectConflict(text, Reason.AUTHENTICATION) from exc
            reason = _reason(exc, said, putting, errors)
            if reason is Reason.MISSING:
                raise ObjectMissing(text, reason) from exc
            raise ObjectError(text, reason, hint=_HINTS.get(reason, "")) from exc


# Without s3:ListBucket a HEAD of what is not there is answered 403, not 404.
_HINTS = {
    Reason.AUTHENTICATION: "mend the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or"
    " the bucket's policy (s3:ListBucket, too), and start the relay anew or run"
    " `relay journal upload`",
    Reason.UNAVAILABLE: "is the bucket there, and AWS_ENDPOINT_URL right? It is tried again",
}


def _reason(exc: Exception, said: str, putting: bool, errors: Any) -> Reason:
    """The class of a failure: what decides whether it is tried again, and when."""
    if isinstance(exc, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
        return Reason.AUTHENTICATION
    if _INSTANCE_METADATA in said:
        return Reason.AUTHENTICATION
    if isinstance(exc, FileNotFoundError):
        return Reason.UNAVAILABLE if putting or "NoSuchBucket" in said else Reason.MISSING
    status = _STATUS.search(said)
    if status is not None:
        code = int(status[1])
        # 4xx: the request itself is wrong (region, bucket name): no use in hurrying it again.
        return Reason.TRANSIENT if code >= 500 or code in (408, 429) else Reason.UNAVAILABLE
    if "error sending request" in said or "redirect" in said:
        return Reason.UNAVAILABLE  # nobody listens there, or no such host
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
        "disable_bulk_delete": True,  # not every server has it
    }
    return S3Store(bucket, **{**settings, **options})
