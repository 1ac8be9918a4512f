"""What people call a message that the journal speaks of by the engine's number."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from relay.audit import journal_files
from relay.audit.journal_files import Segment
from relay.audit.journal_rows import Settings, read_segment
from relay.base.errors import RelayError

# Deliveries end minutes or days after their message; older than this is not worth the reading.
NEWEST_SEGMENTS = 8
_SCHEMA = pa.schema(
    [
        ("event", pa.string()),
        ("number", pa.decimal128(20)),
        ("relay_id", pa.string()),
    ]
)


def relay_ids(home: str, numbers: Iterable[int]) -> dict[int, str]:
    """The relay's ids of these messages, as far as the newest segments of a home's journal say.

    Nothing is fetched from an object store, and nothing that cannot be read is told of: the
    numbers are still true.
    """
    wanted = set(numbers)
    found: dict[int, str] = {}
    try:
        where = journal_files.home_settings(home)
        settings = Settings({}, where.key_file or None, True)
        for segment in _newest(home):
            if len(found) == len(wanted):
                break
            for batch in read_segment(segment, _SCHEMA, settings):
                found |= _named(batch, wanted)
    except (RelayError, OSError):
        pass
    return found


def _newest(home: str) -> Iterator[Segment]:
    for stream in journal_files.find_streams([glob.escape(home)]):
        segments = journal_files.plan(stream, strict=False).segments
        yield from reversed(segments[-NEWEST_SEGMENTS:])


def _named(batch: pa.RecordBatch, wanted: set[int]) -> dict[int, str]:
    sent = batch.filter(pc.equal(batch["event"], "MessageSent"))
    pairs = zip(sent["number"].to_pylist(), sent["relay_id"].to_pylist(), strict=True)
    return {int(number): name for number, name in pairs if name and int(number) in wanted}
