"""An audit lake: Parquet files of one or many homes, and a manifest for each home.

    LAKE/homes/{home}.json                            what of the home is in the lake
    LAKE/{table}/home={home}/{part}.{sha256}.parquet  rows of a table; see lake_columns

A file is named by its content and never altered. The manifest is replaced last, by a rename or a
PUT: until then the lake is what it was. What no manifest names was never part of it, and is
removed by the next writer of the home; a home has one at a time. A lake is a folder, or a prefix
``s3://bucket/prefix`` with credentials from the environment.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import socket
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq

from relay.audit.lake_columns import TABLES
from relay.audit.sources.bucket_files import explained, is_remote, open_bucket
from relay.base import fsio
from relay.base.discovery import has_config
from relay.base.errors import NoRoom, RelayError
from relay.base.names import sha256_hex

EXTRACTOR = 3  # another version makes everything again
HOMES = "homes"
SUFFIX = ".parquet"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAME_DIGITS = 32  # of a file's SHA-256


class LakeFile(msgspec.Struct, frozen=True):
    """A file of a table."""

    table: str
    path: str  # below the lake
    rows: int
    size: int  # bytes


class LakePart(msgspec.Struct, frozen=True):
    """The files of rows read from some sources of a kind, all at once."""

    kind: str
    sources: dict[str, str]  # path below the home -> identity; empty: it is read by each extract
    files: list[LakeFile]
    problems: list[str] = []  # of files that are not sound, a line each
    lost: list[str] = []  # of rows that could not be read, a line each
    bytes: int = 0  # of the sources
    at_ns: int = 0  # of the extract that read them


class LakeManifest(msgspec.Struct, frozen=True):
    """The parts of a home that are in the lake."""

    version: str
    name: str  # of the home, for people
    at_ns: int  # of the ledger's snapshot
    parts: list[LakePart] = []
    ledger: str = ""  # the home_id in the ledger; empty: of a home that was never started

    def files(self) -> Iterator[LakeFile]:
        """All files."""
        for part in self.parts:
            yield from part.files

    @property
    def unread(self) -> list[LakePart]:
        """The parts whose sources were in the lake, and were not read again."""
        return [part for part in self.parts if part.sources and part.at_ns != self.at_ns]

    def lost(self, home: str, *kinds: str) -> list[str]:
        """List what of a home could not be read, a line each: of all sources, or these kinds."""
        lines = [
            line
            for part in self.parts
            if part.kind in (kinds or (part.kind,))
            for line in part.lost
        ]
        below = os.path.join(home, "")
        is_whole = re.compile(rf"(key file )?/|\w+://|.*{re.escape(below)}", re.DOTALL)
        return [line if is_whole.match(line) else f"{below}{line}" for line in lines]


def version() -> str:
    """Identify the extractor and its columns: rows of another version are made again."""
    text = repr([(table, str(columns)) for table, columns in TABLES.items()])
    return f"{EXTRACTOR}-{sha256_hex(text.encode())[:16]}"


def home_id(name: str) -> str:
    """Identify a home by its name, 16 hex digits."""
    return sha256_hex(name.encode(errors="surrogateescape"))[:16]


def default_name(home: str) -> str:
    """Name a home by its machine and path."""
    return f"{socket.gethostname()}:{os.path.realpath(home)}"


class FolderLake:
    """A lake in a folder, readable by its owner alone. Errors of all calls: RelayError, OSError."""

    def __init__(self, url: str) -> None:
        self.url = os.path.realpath(url) if os.path.exists(url) else os.path.abspath(url)

    def read(self, path: str) -> bytes | None:
        """Read a file; None without it."""
        with contextlib.suppress(FileNotFoundError):
            with open(os.path.join(self.url, path), "rb") as file:
                return file.read()
        return None

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole, or not at all."""
        target = os.path.join(self.url, path)
        try:
            _make_folder(os.path.dirname(target))
            fsio.write_atomic(target, data)
        except OSError as exc:
            kind = NoRoom if exc.errno in _FULL else RelayError
            raise kind(f"{target} cannot be written: {exc.strerror or exc}") from exc

    def sizes(self, folder: str) -> dict[str, int]:
        """List the files below a folder, with their bytes."""
        root = os.path.join(self.url, folder)
        with contextlib.suppress(FileNotFoundError):
            with os.scandir(root) as entries:
                return {f"{folder}/{entry.name}": entry.stat().st_size for entry in entries}
        return {}

    def fetch(self, path: str, folder: str) -> str:
        """Return where Spark reads a whole file: of an object store, a copy in ``folder``."""
        read_file(self, path)  # it is whole
        return f"{self.url}/{path}"

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        fsio.fault("unlink", path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.url, path))

    @contextlib.contextmanager
    def locked(self, home: str) -> Iterator[None]:
        """Be the one that writes a home's files."""
        folder = os.path.join(self.url, HOMES)
        if has_config(self.url):
            raise RelayError(f"{self.url} is a relay home", hint="name a folder of the lake's own")
        try:
            os.makedirs(self.url, mode=fsio.DIR_MODE, exist_ok=True)
            os.makedirs(folder, mode=fsio.DIR_MODE, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as exc:
            text = f"{exc.filename}: expected a directory, or a place for a new one"
            raise RelayError(text) from None
        try:
            with fsio.locked(os.path.join(folder, f".{home}.lock")):
                yield
        except BlockingIOError:
            raise RelayError(f"another process writes this home into {self.url}") from None


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, durably."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with contextlib.suppress(FileExistsError):  # a file, too: who writes below it says so
        os.mkdir(folder, fsio.DIR_MODE)
    fsio.sync_dir(parent)


class BucketLake:
    """The same in an object store. A home's files are written by its own machine alone: no lock."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, bucket, key = open_bucket(self.url)
        self._root = f"{bucket}/{key}" if key else bucket

    def read(self, path: str) -> bytes | None:
        with explained(f"{self.url}/{path}"):
            with contextlib.suppress(FileNotFoundError):
                with self._store.open_input_file(f"{self._root}/{path}") as file:
                    return bytes(file.read())
        return None

    def write(self, path: str, data: bytes) -> None:
        with explained(f"{self.url}/{path}", "written"):
            with self._store.open_output_stream(f"{self._root}/{path}") as file:
                file.write(data)

    def sizes(self, folder: str) -> dict[str, int]:
        with explained(f"{self.url}/{folder}"):
            selector = fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True)
            found = self._store.get_file_info(selector)
        return {f"{folder}/{info.base_name}": info.size for info in found}

    def fetch(self, path: str, folder: str) -> str:
        copies = FolderLake(folder)
        copies.write(path, read_file(self, path))
        return f"{copies.url}/{path}"

    def remove(self, path: str) -> None:
        with explained(f"{self.url}/{path}", "removed"), contextlib.suppress(FileNotFoundError):
            self._store.delete_file(f"{self._root}/{path}")

    def locked(self, home: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Lake = FolderLake | BucketLake


def open_lake(url: str) -> Lake:
    """Open a folder, or a prefix of an object store. Errors: RelayError."""
    if is_remote(url):
        return BucketLake(url)
    if "://" in url:
        raise RelayError(f"{url}: expected a directory or s3://bucket/prefix")
    return FolderLake(url)


def manifest_path(home: str) -> str:
    """Return the path of a home's manifest below the lake."""
    return f"{HOMES}/{home}.json"


def read_manifest(lake: Lake, home: str) -> LakeManifest | None:
    """Read a home's manifest; None without one. Errors: RelayError when it is damaged."""
    data = lake.read(manifest_path(home))
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=LakeManifest)
    except msgspec.DecodeError as exc:
        path = f"{lake.url}/{manifest_path(home)}"
        raise RelayError(f"{path}: {exc}", hint="remove it: the next extract makes it") from exc


def content_name(data: bytes) -> str:
    """Identify content: the beginning of its SHA-256."""
    return hashlib.sha256(data).hexdigest()[:_NAME_DIGITS]


def read_file(lake: Lake, path: str) -> bytes:
    """Read a file that is named by its content. Errors: RelayError."""
    data = lake.read(path)
    if data is None:
        raise RelayError(f"{lake.url}/{path} was removed meanwhile", hint="run again")
    if f".{content_name(data)}." not in path:
        why = f"{lake.url}/{path} is damaged: its SHA-256 is not that of its name"
        raise RelayError(why, hint="remove it, and run again")
    return data


def read_rows(lake: Lake, made: LakeManifest, table: str) -> pa.Table:
    """Read a home's rows of a table. Errors: RelayError."""
    paths = [file.path for file in made.files() if file.table == table]
    read = [pa.BufferReader(read_file(lake, path)) for path in paths]
    return pa.concat_tables(map(pq.read_table, read))


def homes_of(lake: Lake) -> list[str]:
    """List the ids of the homes in a lake."""
    names = (os.path.basename(path) for path in lake.sizes(HOMES))
    return sorted(name.removesuffix(".json") for name in names if re.match(r"\w+\.json$", name))


def folder_of(table: str, home: str) -> str:
    """Return the folder of a home's files of a table, below the lake."""
    return f"{table}/home={home}"


def write_rows(
    lake: Lake, home: str, part: str, table: str, batches: Iterable[pa.RecordBatch]
) -> list[LakeFile]:
    """Write rows of a table as one file, named by its content; no rows, no file."""
    rows = pa.Table.from_batches(batches, TABLES[table])
    return [write_table(lake, home, part, table, rows)] if rows.num_rows else []


def write_table(lake: Lake, home: str, part: str, table: str, rows: pa.Table) -> LakeFile:
    """The same, also without rows: who reads a folder needs a file for the columns."""
    sink = pa.BufferOutputStream()
    kept = [name for name in ("bucket", "number") if name in rows.column_names]
    pq.write_table(
        rows, sink, compression="zstd", compression_level=1, store_schema=False,
        write_statistics=kept,
    )  # fmt: skip
    data = sink.getvalue().to_pybytes()
    name = f"{part}.{content_name(data)}{SUFFIX}"
    file = LakeFile(table, f"{folder_of(table, home)}/{name}", rows.num_rows, len(data))
    lake.write(file.path, data)
    return file
