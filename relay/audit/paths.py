"""Files of an object store, named as ``s3://bucket/key``: listed by the driver, read by workers.

Credentials, region and endpoint are those of the environment of whoever reads (``AWS_REGION``,
``AWS_ENDPOINT_URL``, a machine's role …), by obstore (extra ``[s3]``); none stands in an option,
an argument or a plan. A request that fails is made again; Hadoop has no part in it.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from relay.base.errors import ArchivesUnreachable, ObjectError, ObjectMissing, RelayError
from relay.journal.format import Reason
from relay.journal.objects import S3Objects

SCHEMES = ("s3://", "s3a://")
_GLOB = "*?["
RETRIES = 5  # of one request, within a minute: a store that asks to slow down is waited for
RETRY_S = 60


def is_remote(path: str) -> bool:
    """True for a path that is an object's, and no file's here."""
    return path.startswith(SCHEMES)


def list_files(path: str, suffix: str) -> list[str]:
    """The objects that a path stands for, in order: itself, where it ends with ``suffix``; those
    below a prefix that do; or those that match a glob, whose ``*`` goes over slashes.

    Errors: RelayError for an object or a glob that matches nothing, ArchivesUnreachable when the
    store cannot be listed. A prefix with nothing below it is an empty folder.
    """
    store, bucket, key = _open(path)
    literal = key[: min(map(key.find, filter(key.__contains__, _GLOB)), default=len(key))]
    is_folder = literal == key and not key.endswith(suffix)
    # ``a/b`` is a folder's name, and not the beginning of ``a/bc``; S3's own prefix is a string
    below = literal if not is_folder or not key else key.rstrip("/") + "/"
    # obstore lists whole folders: what is above the last slash
    with _told(path):
        names = [n for n in store.names(below.rpartition("/")[0]) if n.startswith(below)]
    if is_folder:
        names = [name for name in names if name.endswith(suffix)]
    elif literal == key:
        names = [name for name in names if name == key]
    else:
        names = [name for name in names if fnmatch.fnmatchcase(name, key)]
    if not names and not is_folder:
        raise RelayError(f"there is no file {path}")
    return [f"{bucket}/{name}" for name in sorted(names)]


def read_bytes(path: str, most: int) -> bytes:
    """All of an object, unless it has more than ``most`` bytes.

    Errors: ArchivesUnreachable; RelayError for one that is not there, or too large: nothing is
    read of it.
    """
    store, _, key = _open(path)
    with _told(path):
        found = store.get(key)
        if found.facts.size > most:
            raise RelayError(f"{path} has {found.facts.size} bytes, and {most} are the most")
        return b"".join(found.pieces)


def _open(path: str) -> tuple[S3Objects, str, str]:
    """(the bucket's store, ``s3://bucket``, the key)."""
    _, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise RelayError(f"{path} names no bucket: expected s3://bucket/key")
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
    return S3Objects(f"s3://{bucket}", retry_config=retry), f"s3://{bucket}", key


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What the object store does not do becomes one line that says what to mend."""
    try:
        yield
    except ObjectMissing as exc:
        raise RelayError(f"there is no file {path}") from exc
    except ObjectError as exc:
        said = str(exc)
        if "NoSuchBucket" in said:
            why = "there is no such bucket"
        elif exc.reason == Reason.AUTHENTICATION or "status code: 403" in said:
            why = "no credentials, or none that the object store takes"
        elif "error sending request" in said:
            why = f"nobody answers at {os.environ.get('AWS_ENDPOINT_URL') or 'the object store'}"
        else:
            # behind it is a document for programs
            why = said.partition(": ")[2].partition(" <?xml")[0].rstrip(":")
        raise ArchivesUnreachable(f"{path} cannot be read: {why}", exc.reason) from exc
