"""The Spark format ``acomm``: store files as tables; small files share a partition.

    spark.read.format("acomm").option("section", "messages").load("store/relay.acomm")

Options:
- ``path``: a file, a folder (every ``*.acomm`` below it) or a glob; ``load`` takes several.
  ``s3://bucket/key`` names an object, or a prefix or glob of objects, in the same way.
- ``section``: messages (the default), dead_letters, archive, channels, subscriptions or
  deliveries. The first three may be read together, divided by commas.
- ``mode``: failfast (the default), or permissive: of a damaged file nothing is read, and the
  rest is.

A schema given to ``read.schema`` chooses columns, and only those are built. Every file is read
whole and its checksum verified; who filters often makes a lake. A file gives all of its rows, or
none, and a damaged one fails the job with its name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from relay.audit.schemas import formats
from relay.audit.schemas.formats import check_columns
from relay.audit.sources import is_permissive, paths_of
from relay.audit.sources.bucket_files import find_files
from relay.audit.sources.store_files import MESSAGE_SECTIONS, batches
from relay.base.errors import FormatError, ObjectError, RelayError

FORMAT = "acomm"
SECTIONS: dict[str, StructType] = {
    **dict.fromkeys(MESSAGE_SECTIONS, formats.STORED_MESSAGE),
    "channels": formats.STORED_CHANNEL,
    "subscriptions": formats.STORED_SUBSCRIPTION,
    "deliveries": formats.STORED_DELIVERY,
}
PARTITION_BYTES = 32 << 20  # some 100,000 messages
LEAST_PARTITIONS = 16  # of as many files: each core has some
FILE_COST = 64 << 10  # in bytes: to open one takes as long as to read these


def sections_of(text: str) -> tuple[str, ...]:
    """Parse the sections of an option, divided by commas; all must have the same columns.

    Errors: RelayError for an unknown name, and for a mixture.
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in SECTIONS:
            raise RelayError(f"section: expected one of {', '.join(SECTIONS)}, got {name!r}")
    if len({id(SECTIONS[name]) for name in names}) > 1:
        raise RelayError(f"sections {text} have different columns: read them one by one")
    return names


class AcommSource(DataSource):  # type: ignore[misc]
    """A data source; Spark makes one for each plan."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Every column of the section."""
        return SECTIONS[self._sections()[0]]

    def reader(self, schema: StructType) -> AcommReader:
        """A reader of the columns of ``schema``. Errors: RelayError for unknown columns."""
        sections = self._sections()
        check_columns(schema, self.schema(), f"section {sections[0]}")
        return AcommReader(
            find_files(paths_of(self.options, "a file, a folder or a glob")),
            sections,
            schema,
            is_permissive(self.options),
        )

    def _sections(self) -> tuple[str, ...]:
        return sections_of(self.options.get("section", MESSAGE_SECTIONS[0]))


class FilesPartition(InputPartition):  # type: ignore[misc]
    """A large file, or small ones."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths


class AcommReader(DataSourceReader):  # type: ignore[misc]
    """Reads files in workers. The list of files is made when the query is planned."""

    def __init__(
        self, files: dict[str, int], sections: tuple[str, ...], schema: StructType, permissive: bool
    ) -> None:
        self._files = files
        self._sections = sections
        self._schema = schema
        self._permissive = permissive

    def partitions(self) -> list[FilesPartition]:
        """Gather files, in order, to partitions of as many bytes: a task costs some 10 ms."""
        sizes = {path: max(size, FILE_COST) for path, size in self._files.items()}
        most = min(PARTITION_BYTES, sum(sizes.values()) // LEAST_PARTITIONS)
        parts: list[list[str]] = []
        room = 0
        for path, size in sizes.items():
            room -= size
            if room < 0:
                parts.append([])
                room = most - size
            parts[-1].append(path)
        return [FilesPartition(paths) for paths in parts]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The files' rows; none of a damaged one when that is permitted.

        Errors: RelayError that names the file.
        """
        schema = to_arrow_schema(self._schema, timezone="UTC")
        # Without files Spark asks for one partition nevertheless.
        for path in partition.paths if isinstance(partition, FilesPartition) else ():
            try:
                yield from batches(path, self._sections, schema)
            except ObjectError:
                raise  # the object store is at fault: nothing is known of the file
            except (OSError, RelayError) as exc:
                if not self._permissive:
                    raise _with_name(path, exc) from exc


def _with_name(path: str, exc: OSError | RelayError) -> Exception:
    """Give an error the file's name where it lacks it: a fault inside of a section knows none."""
    if isinstance(exc, OSError):
        return RelayError(f"{path}: {exc.strerror}")
    is_inside = isinstance(exc, FormatError) and exc.path != path
    return RelayError(f"{path}: {exc}") if is_inside else exc
