"""Options of the format ``acomm``: files, sections and conditions.

A condition decides twice: whether a file has any such message (by the texts that its columns or
indexes name, once its checksum was verified), and which rows are sent to Spark.

Objects are named ``s3://bucket/key``: listed by the driver, read by workers. Credentials, region
and endpoint are those of the reader's environment (``AWS_REGION``, ``AWS_ENDPOINT_URL``, a
machine's role …); none appears in an option, an argument or a plan.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
from pyspark.sql.types import StructType

from relay.acomm.engine_state import EngineState
from relay.acomm.indexes import Indexes
from relay.acomm.model import (
    Channel,
    Message,
    MessageStatus,
    MetadataValue,
    StoreFile,
    Subscription,
)
from relay.audit.schemas import formats
from relay.audit.sources.acomm_messages import LAST_SECOND, MICROS, TIME, MessageTable
from relay.base.errors import ArchivesUnreachable, RelayError
from relay.journal.manifest_format import Reason

ColumnMakers = Mapping[str, Callable[[Any], object]]

SUFFIX = ".acomm"
DAMAGED = "damaged"  # a table beside the sections
SCHEMES = ("s3://", "s3a://")
ATTEMPTS = 6  # of one request: a store that asks to slow down is waited for
CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 10, 60
NO_BUCKET = "no such bucket"
_GLOB = "*?["

MESSAGE_SECTIONS = ("messages", "dead_letters", "archive")
SECTIONS: dict[str, StructType] = {
    **dict.fromkeys(MESSAGE_SECTIONS, formats.STORED_MESSAGE),
    "channels": formats.STORED_CHANNEL,
    "subscriptions": formats.STORED_SUBSCRIPTION,
    "deliveries": formats.STORED_DELIVERY,
}


class StoredDelivery(NamedTuple):
    """One recipient of one live message."""

    id: int
    relay_id: str | None
    recipient: str
    state: str


class SectionRows(NamedTuple):
    """One section of one file."""

    values: Sequence[Any]
    columns: ColumnMakers


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


def section_rows(store: StoreFile, section: str, path: str) -> SectionRows:
    """Return the rows of a section without messages, of the store that was read from ``path``."""
    file: ColumnMakers = {"file": lambda _: path}
    if section == "channels":
        return SectionRows(store.channels, {**file, **_CHANNEL})
    if section == "subscriptions":
        return SectionRows(store.subscriptions, {**file, **_SUBSCRIPTION})
    return SectionRows(_deliveries(store), {**file, **_DELIVERY})


def _deliveries(store: StoreFile) -> list[StoredDelivery]:
    kept = (*store.messages, *store.dead_letters, *store.archive)
    relay_ids = {message.id: _relay_id(message) for message in kept}
    return [
        StoredDelivery(number, relay_ids.get(number), recipient, delivery.state.label)
        for number, deliveries in EngineState.decode(store.engine_state).deliveries.items()
        for recipient, delivery in deliveries.items()
    ]


def _at(seconds: int | None) -> int | None:
    """Convert to microseconds; NULL after the last time that Spark has."""
    return seconds * MICROS if seconds is not None and seconds <= LAST_SECOND else None


def _as_text(value: MetadataValue) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _relay_id(message: Message) -> str | None:
    return _as_text((message.metadata or {}).get("relay_id"))


_DELIVERY: dict[str, Callable[[StoredDelivery], object]] = {
    "id": lambda d: d.id,
    "relay_id": lambda d: d.relay_id,
    "recipient": lambda d: d.recipient,
    "state": lambda d: d.state,
}

_CHANNEL: dict[str, Callable[[Channel], object]] = {
    "id": lambda c: c.id,
    "name": lambda c: c.name,
    "channel_type": lambda c: c.channel_type.label,
    "owner": lambda c: c.owner,
    "participants": lambda c: [participant.id for participant in c.participants],
    "delivery": lambda c: c.config.delivery.label,
    "ack_timeout_s": lambda c: c.config.ack_timeout,
    "max_retries": lambda c: c.config.max_retries,
    "state": lambda c: c.state.label,
    "created_at": lambda c: _at(c.created_at),
    "modified_at": lambda c: _at(c.modified_at),
    "message_count": lambda c: c.message_count,
    "description": lambda c: c.description,
    "tags": lambda c: list(c.tags),
}

_SUBSCRIPTION: dict[str, Callable[[Subscription], object]] = {
    "id": lambda s: s.id,
    "channel_id": lambda s: s.channel_id,
    "subscriber": lambda s: s.subscriber,
    "topic_pattern": lambda s: s.topic_pattern,
    "match_mode": lambda s: s.match_mode.label,
    "created_at": lambda s: _at(s.created_at),
    "active": lambda s: s.active,
}


TEXT_COLUMNS = ("sender", "channel", "status")
OPTIONS = ("since", "until", *TEXT_COLUMNS)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
}


class Condition(NamedTuple):
    """A condition on one column; a message must meet all conditions."""

    column: str  # created_at or one of TEXT_COLUMNS
    operator: str  # in, >, >=, <, <=
    values: tuple[str, ...] | tuple[int]  # texts; of created_at, Unix microseconds

    def mask(self, array: pa.Array) -> pa.Array:
        """Return True where a value of the column meets it; never for NULL."""
        kind = TIME if self.column == "created_at" else pa.string()
        if self.operator == "in":
            return pc.is_in(array, pa.array(self.values, kind), skip_nulls=True)
        found = _COMPARISONS[self.operator](array, pa.scalar(self.values[0], kind))
        return pc.fill_null(found, False)

    def meets_any(self, values: Iterable[Any]) -> bool:
        """Return True when one of these values meets it."""
        kind = TIME if self.column == "created_at" else pa.string()
        return bool(pc.any(self.mask(pa.array(values, kind)), min_count=0).as_py())


def option_conditions(options: Mapping[str, str]) -> tuple[Condition, ...]:
    """Make the conditions of the options. Errors: RelayError for an invalid time or status."""
    found = []
    for name, operator in (("since", ">="), ("until", "<")):
        if name in options:
            found.append(Condition("created_at", operator, (_micros_of(name, options[name]),)))
    for name in TEXT_COLUMNS:
        if name in options:
            found.append(Condition(name, "in", _words(name, options[name])))
    return tuple(found)


def matching_rows(table: MessageTable, conditions: Iterable[Condition]) -> pa.Array | None:
    """Return the numbers of the messages that meet all conditions; None when all do."""
    wanted = list(conditions)
    for one in wanted:
        known = table.distinct(one.column)
        if known is not None and not pc.any(one.mask(known), min_count=0).as_py():
            return pa.array([], pa.uint64())
    mask = None
    for one in wanted:
        more = one.mask(table.column(one.column))
        mask = more if mask is None else pc.and_(mask, more)
        if not pc.any(mask, min_count=0).as_py():
            return pa.array([], pa.uint64())
    return None if mask is None or pc.all(mask).as_py() else pc.indices_nonzero(mask)


def may_match(found: Indexes, channels: Iterable[Channel], conditions: Iterable[Condition]) -> bool:
    """Return False when these indexes rule out every message of a file.

    A missing index rules out nothing.
    """
    names = {channel.id: channel.name for channel in channels}
    for one in conditions:
        values: Iterable[Any] | None = None
        if one.column == "sender" and found.sender is not None:
            values = list(found.sender)
        elif one.column == "channel" and found.channel is not None:
            values = [names.get(ident) for ident in found.channel]
        elif one.column == "created_at" and found.timestamp is not None:
            seconds = [at for at, _ in found.timestamp]
            values = [at * MICROS for at in seconds if at <= LAST_SECOND]
        if values is not None and not one.meets_any(values):
            return False
    return True


def _words(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    labels = [status.label for status in MessageStatus]
    for word in words:
        if name == "status" and word not in labels:
            raise RelayError(f"status: expected one of {', '.join(labels)}, got {word!r}")
    if not words:
        raise RelayError(f"option {name}: expected one or several names, divided by commas")
    return words


def _micros_of(name: str, text: str) -> int:
    try:
        return _micros(datetime.fromisoformat(text.strip()))
    except ValueError:
        raise RelayError(
            f"option {name}: expected a time such as 2026-01-31T09:30:00Z, got {text!r}"
        ) from None


def _micros(at: datetime) -> int:
    """Convert to Unix microseconds; a time without a zone is UTC."""
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * MICROS + since.microseconds


def schema_of(section: str) -> StructType:
    """Return the columns of a section, or of the table of damaged files."""
    return formats.DAMAGED_FILE if section == DAMAGED else SECTIONS[section]


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
    store, bucket, key = _open_bucket(path)
    literal = key[: min(map(key.find, filter(key.__contains__, _GLOB)), default=len(key))]
    is_folder = literal == key and not key.endswith(SUFFIX)
    folder = key if is_folder else literal.rpartition("/")[0]
    selector = fs.FileSelector(f"{bucket}/{folder}", recursive=True, allow_not_found=True)
    with _explained(path):
        infos = store.get_file_info(selector)
        sizes = {one.path: one.size for one in infos if one.type == fs.FileType.File}
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
    store, bucket, key = _open_bucket(path)
    with _explained(path), store.open_input_file(f"{bucket}/{key}") as file:
        if file.size() > max_bytes:
            raise RelayError(f"{path} has {file.size()} bytes, the limit is {max_bytes}")
        return bytes(file.read())


def _open_bucket(path: str) -> tuple[fs.S3FileSystem, str, str]:
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
def _explained(path: str) -> Iterator[None]:
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
        raise ArchivesUnreachable(f"{path} cannot be read: {text}", reason) from exc
