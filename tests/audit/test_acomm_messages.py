"""Messages of a store file as columns: the same with section 257 and without it, and damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from relay.acomm import columns, store_file
from relay.acomm.container import parse_header, parse_sections
from relay.acomm.model import Message, MessageType, StoreFile
from relay.acomm.store_file import encrypt
from relay.audit import formats
from relay.audit.sources import store_files
from relay.audit.sources.store_files import MESSAGE_SECTIONS
from relay.base.errors import RelayError
from tests.acomm.support import reseal
from tests.audit.home_builder import START_S, stored_message
from tests.audit.test_acomm_source import BARE, FULL, STORE

DAY_S = 86_400
SCHEMA = to_arrow_schema(formats.STORED_MESSAGE, timezone="UTC")
AT = "2026-02-01T09:30:00"  # a day behind START


def odd(number: int, **fields: object) -> Message:
    """A message whose metadata, times or texts are not what the relay writes."""
    values = {"sender": "eve", "content": b"\xff\x00", "created_at": START_S, **fields}
    return Message(number, MessageType.TEXT, channel_id=1, **values)  # type: ignore[arg-type]


ODD = StoreFile(
    START_S,
    START_S,
    channels=STORE.channels,
    messages=(
        FULL,
        BARE,
        odd(10, metadata={}),
        odd(11, metadata={"relay_id": 7, "to": None, "created_ns": "late", "b": False}),
        odd(12, metadata={"relay_id": "1-x", "share": float("inf"), "é": "é" * 300}),
        odd(13, metadata={"relay_id": None, "created_ns": True}, sender="", topic="", ttl=0),
        odd(14, signature=b"", created_at=START_S + 5, delivered_at=START_S),
        odd(15, sender="é", signature=b"s" * 64, acknowledged_at=2**64 - 1, content=b"x" * 5000),
    ),
    archive=(stored_message(6, "1-old"),),
)
MANY = StoreFile(
    1,
    1,
    messages=tuple(
        stored_message(n, f"1-{n}", b"%d" % n, sender=f"a{n % 300}", correlation_id=str(n // 3))
        for n in range(store_files.BATCH_ROWS + 5)
    ),
)


def arrow(path: Path, store: StoreFile, sections: str = "messages") -> pa.Table:
    """All columns of a store's file, as Spark would be given them, with columns in it or not."""
    found = []
    for with_columns in (True, False):
        store_file.write(str(path), store, columns=with_columns)
        batches = store_files.batches(str(path), sections.split(","), SCHEMA)
        found.append(pa.Table.from_batches(batches, SCHEMA))
        found[-1].validate(full=True)
    assert found[0].equals(found[1])
    return found[0]


@pytest.mark.shows("audit 1.6")
@pytest.mark.parametrize("store", [STORE, ODD, MANY, encrypt(ODD, bytes(32)), StoreFile(1, 1)])
def test_a_file_with_columns_gives_the_same_rows(tmp_path: Path, store: StoreFile) -> None:
    table = arrow(tmp_path / "a.acomm", store, ",".join(MESSAGE_SECTIONS))
    every = (*store.messages, *store.dead_letters, *store.archive)
    assert table.num_rows == len(every)
    by_id = {int(row["id"]): row for row in table.to_pylist()}
    for message in every:
        row = by_id[message.id]
        assert (row["sender"], row["content"]) == (message.sender, message.content)
        assert (row["signature"], row["topic"]) == (message.signature, message.topic)
        assert row["ttl_s"] == message.ttl
        assert (row["metadata"] is None) == (message.metadata is None)
        assert set(dict(row["metadata"] or ())) == set(message.metadata or ())


def test_metadata_that_is_no_text_is_json_and_only_what_fits_is_a_column(tmp_path: Path) -> None:
    rows = {int(row["id"]): row for row in arrow(tmp_path / "a.acomm", ODD).to_pylist()}
    assert dict(rows[11]["metadata"]) == {
        "relay_id": "7",
        "to": None,
        "created_ns": "late",
        "b": "false",
    }
    got = [(rows[n]["relay_id"], rows[n]["to"], rows[n]["created_ns"]) for n in (10, 11, 12, 13)]
    assert got == [
        (None, None, None),
        ("7", None, None),
        ("1-x", None, None),
        (None, None, None),
    ]
    assert dict(rows[12]["metadata"])["share"] == "Infinity"
    assert rows[15]["acknowledged_at"] is None


def with_section(path: Path, store: StoreFile, change: Callable[[bytes], bytes]) -> None:
    """Write a file whose section 257 says something else; its checksum is right."""
    data = store_file.encode(store, columns=True)
    entry = parse_sections(data, "it", parse_header(data, "it", len(data)))[-1]
    body = change(data[entry.offset : entry.offset + entry.length])
    table = data[: entry.offset]
    grown = len(body) - entry.length
    at = 96 + 24 * (int.from_bytes(data[14:16], "little") - 1) + 16
    table = table[:at] + len(body).to_bytes(8, "little") + table[at + 8 :]
    table = table[:64] + (len(data) + grown).to_bytes(8, "little") + table[72:]
    path.write_bytes(reseal(table + body + bytes(40)))


def lying(block: int, value: bytes) -> Callable[[bytes], bytes]:
    """A section with another block of the same messages."""
    sizes = [len(columns.encode_message(one)) for one in ODD.messages]
    blocks = columns.build(ODD.messages, sizes, ODD.channels) | {block: value}

    def change(body: bytes) -> bytes:
        parts = [body[:8]]
        for tag, data in blocks.items():
            packed = columns.container.pack_envelope(data)
            parts += (columns.U32.pack(tag), columns.U64.pack(len(packed)), packed)
        return b"".join(parts)

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda body: (9).to_bytes(8, "little") + body[8:], "9 messages in section 257"),
        (lambda body: body[:-1], "column block"),
        (lying(14, bytes([7] * 8)), "columns in section 257 that hold together"),
        (lying(14, bytes(7)), "8 values of 8 bytes"),
        (lying(3, b"\1\0\0\0" + b"\1\0\0\0" + b"\xff" + b"\1" + b"\1" * 8), "hold together"),
        (lying(5, bytes(32)), "records of "),
        (lying(9, bytes(8) + b"\1" + b"\3" * 8), "a shape of metadata for each message"),
    ],
)
def test_columns_that_do_not_hold_together_are_a_fault_before_the_first_row(
    tmp_path: Path, change: Callable[[bytes], bytes], line: str
) -> None:
    path = tmp_path / "lie.acomm"
    with_section(path, ODD, change)
    store_file.read(str(path))  # its messages are whole
    with pytest.raises(RelayError) as caught:
        next(store_files.batches(str(path), ("messages",), SCHEMA))
    assert str(caught.value).startswith(f"{path} at ") and line in str(caught.value)
    assert "\n" not in str(caught.value)
