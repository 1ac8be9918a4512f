"""Store files by their paths, and objects of an object store.

Objects are named ``s3://bucket/key``: listed by the driver, read by workers. Credentials, region
and endpoint are those of the reader's environment (``AWS_REGION``, ``AWS_ENDPOINT_URL``, a
machine's role …); none appears in an option, an argument or a plan.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pyarrow.fs as fs

from relay.base.errors import ArchivesUnreachable, RelayError
from relay.journal.manifest_format import Reason

SUFFIX = ".acomm"
SCHEMES = ("s3://", "s3a://")
ATTEMPTS = 6  # of one request: a store that asks to slow down is waited for
CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 10, 60
NO_BUCKET = "no such bucket"
_GLOB = "*?["


def find_files(paths: Iterable[str]) -> dict[str, int]:
    """List the store files that the paths name, each once, in order, with their bytes.

    A folder means every ``*.acomm`` below it. Errors: RelayError for a path or glob that
    matches nothing; an empty folder is allowed.
    """
    found: dict[str, int] = {}
    for path in paths:
        if is_remote(path):
            found |= list_objects(path)
            continue
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise RelayError(f"{path}: no such file")
        for match in matches:
            names = _below(match) if os.path.isdir(match) else [match]
            found |= {name: _size(name) for name in names}
    return found


def _size(path: str) -> int:
    """Return the bytes of a file; of one that is gone 0, whoever reads it says so."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _below(folder: str) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(SUFFIX)
    )


def is_remote(path: str) -> bool:
    """Return True for the path of an object, False for that of a file."""
    return path.startswith(SCHEMES)


def list_objects(path: str) -> dict[str, int]:
    """List the store files of an object store that a path names, in order, with their bytes.

    It names an object, ``….acomm``; or a folder, for those below it; or a glob, whose ``*`` goes
    over slashes. Errors: RelayError for an object or a glob that matches nothing,
    ArchivesUnreachable when the store cannot be listed. An empty folder is allowed.
    """
    store, bucket, key = open_bucket(path)
    literal = key[: min(map(key.find, filter(key.__contains__, _GLOB)), default=len(key))]
    is_folder = literal == key and not key.endswith(SUFFIX)
    folder = key if is_folder else literal.rpartition("/")[0]
    selector = fs.FileSelector(f"{bucket}/{folder}", recursive=True, allow_not_found=True)
    with explained(path):
        infos = store.get_file_info(selector)
        sizes = {info.path: info.size for info in infos if info.type == fs.FileType.File}
        if not sizes and store.get_file_info(bucket).type == fs.FileType.NotFound:
            raise OSError(NO_BUCKET)
    if is_folder:
        names = [name for name in sizes if name.endswith(SUFFIX)]
    else:
        pattern = f"{bucket}/{key if literal != key else glob.escape(key)}"
        names = [name for name in sizes if fnmatch.fnmatchcase(name, pattern)]
    if not names and not is_folder:
        raise RelayError(f"{path}: no such file")
    return {f"s3://{name}": sizes[name] for name in sorted(names)}


def read_object(path: str, max_bytes: int) -> bytes:
    """Read an object whole. Errors: ArchivesUnreachable; RelayError for one that is missing, or
    has more than ``max_bytes``."""
    store, bucket, key = open_bucket(path)
    with explained(path), store.open_input_file(f"{bucket}/{key}") as file:
        if file.size() > max_bytes:
            raise RelayError(f"{path} has {file.size()} bytes, the limit is {max_bytes}")
        return bytes(file.read())


def open_bucket(path: str) -> tuple[fs.S3FileSystem, str, str]:
    """Return (file system, bucket, key) of a path."""
    bucket, _, key = path.partition("://")[2].partition("/")
    if not bucket:
        raise RelayError(f"{path} names no bucket: expected s3://bucket/key")
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or None
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    store = fs.S3FileSystem(
        endpoint_override=endpoint,
        region=region,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )
    return store, bucket, key


@contextmanager
def explained(path: str, done: str = "read") -> Iterator[None]:
    """Turn an error of the object store into one line that says what to fix."""
    try:
        yield
    except FileNotFoundError as exc:
        raise RelayError(f"{path}: no such file") from exc
    except OSError as exc:
        text = str(exc)
        reason = Reason.UNAVAILABLE
        if "ACCESS_DENIED" in text or "HTTP status 403" in text:
            reason = Reason.AUTHENTICATION
            text = "no credentials, or none that the object store accepts"
        elif "NETWORK_CONNECTION" in text:
            where = os.environ.get("AWS_ENDPOINT_URL") or "the object store"
            text = f"nothing answers at {where}"
        else:
            text = text.partition("AWS Error ")[2] or text
        raise ArchivesUnreachable(f"{path} cannot be {done}: {text}", reason) from exc
