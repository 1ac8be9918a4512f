"""The format `acomm`: which messages are read, of which files, and what becomes of damaged ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from relay.acomm import columns, store_file
from relay.acomm.container import parse_header, parse_sections
from relay.acomm.model import Channel, ChannelType, Message, MessageStatus, MessageType, StoreFile
from relay.acomm.store_file import encrypt
from relay.audit.schemas import formats
from relay.audit.sources import acomm_source
from relay.audit.sources.acomm_query import MESSAGE_SECTIONS, option_conditions
from relay.audit.sources.acomm_source import FileQuery
from relay.base.errors import RelayError
from tests.acomm.support import patch, reseal
from tests.audit.home_builder import START_S, stored_message
from tests.audit.source_rows import rows_of
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
        for n in range(acomm_source.BATCH_ROWS + 5)
    ),
)


def arrow(path: Path, store: StoreFile, sections: str = "messages", **options: str) -> pa.Table:
    """All columns of a store's file, as Spark would be given them, with columns in it or not."""
    found = []
    for with_columns in (True, False):
        store_file.write(str(path), store, columns=with_columns)
        wanted = FileQuery(tuple(sections.split(",")), option_conditions(options))
        found.append(pa.Table.from_batches(acomm_source.batches(str(path), wanted, SCHEMA), SCHEMA))
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three days of messages, a file each; the second has no columns, as older archives."""
    folder = tmp_path / "archive"
    folder.mkdir()
    statuses = (MessageStatus.DELIVERED, MessageStatus.ACKNOWLEDGED)
    for day, sender in enumerate(("alice", "bob", "carol")):
        channel = Channel(1, f"dm/{sender}/zed", ChannelType.DIRECT, sender)
        messages = tuple(
            odd(
                10 * day + n,
                sender=sender,
                created_at=START_S + day * DAY_S + n,
                status=statuses[n % 2],
            )
            for n in range(4)
        )
        store_file.write(
            str(folder / f"{day}.acomm"), StoreFile(1, 1, (channel,), messages), columns=day != 1
        )
    return folder


def read(folder: Path, *columns: str, **options: str) -> list[dict[str, Any]]:
    return rows_of(acomm_source.AcommSource, str(folder), columns, **options)


def ids(rows: Iterable[Any]) -> list[int]:
    return sorted(int(row["id"]) for row in rows)


def break_messages(path: Path) -> None:
    """Make section 2 no gzip, in a file whose checksum is right."""
    data = path.read_bytes()
    entries = parse_sections(data, "it", parse_header(data, "it", len(data)))
    at = next(one.offset for one in entries if one.kind == 2)
    path.write_bytes(patch(data, at + 8, b"no gzip at all"))


CASES = [
    ({"sender": "bob, dan"}, "sender in ('bob', 'dan')", [10, 11, 12, 13]),
    ({"since": AT}, f"created_at >= timestamp '{AT}'", [*range(10, 14), *range(20, 24)]),
    (
        {"until": "2026-01-31T09:30:02+00:00"},
        "created_at < timestamp '2026-01-31 09:30:02'",
        [0, 1],
    ),
    (
        {"channel": "dm/alice/zed", "status": "Acknowledged"},
        "channel = 'dm/alice/zed' and status = 'Acknowledged'",
        [1, 3],
    ),
    ({"sender": "nobody"}, "sender = 'nobody'", []),
]


@pytest.mark.parametrize(("options", "_", "expected"), CASES)
def test_options_choose_messages(
    folder: Path, options: dict[str, str], _: str, expected: list[int]
) -> None:
    wanted = FileQuery(("messages",), option_conditions(options))
    tables = [acomm_source.batches(str(path), wanted, SCHEMA) for path in folder.iterdir()]
    found = [row["id"] for table in tables for batch in table for row in batch.to_pylist()]
    assert sorted(map(int, found)) == expected


@pytest.mark.shows("audit 1.3")
def test_conditions_of_a_query_choose_the_same_each_time_that_a_table_is_used(
    spark: SparkSession, folder: Path
) -> None:
    table = spark.read.format("acomm").load(str(folder))
    found = [
        table.where(condition).select("id", F.lit(condition).alias("case"))
        for _, condition, _ in CASES
    ]
    rows = functools.reduce(DataFrame.union, found).collect()
    for _, condition, expected in CASES:
        assert ids(row for row in rows if row["case"] == condition) == expected, condition


@pytest.mark.shows("audit 1.3")
def test_a_file_without_such_messages_is_not_decoded(folder: Path) -> None:
    break_messages(folder / "0.acomm")  # has columns
    break_messages(folder / "1.acomm")  # has indexes
    for options in (
        {"sender": "carol"},
        {"channel": "dm/carol/zed, all"},
        {"since": "2026-02-02T00:00:00Z"},
    ):
        assert len(read(folder, "id", "content", **options)) == 4
    for sender, name in (("alice", "0.acomm"), ("bob", "1.acomm")):
        with pytest.raises(RelayError, match=f"{name} at "):
            read(folder, "content", sender=sender)
    # what needs no record is read from the columns
    assert ids(read(folder / "0.acomm", "id")) == [0, 1, 2, 3]


@pytest.mark.shows("audit 1.4")
def test_a_file_without_such_messages_is_verified_all_the_same(folder: Path) -> None:
    data = bytearray((folder / "0.acomm").read_bytes())
    data[300] ^= 1
    (folder / "0.acomm").write_bytes(data)
    with pytest.raises(RelayError, match=r"0.acomm at .*SHA-256"):
        read(folder, sender="carol")


@pytest.mark.shows("audit 1.5")
def test_permissive_reads_what_is_whole_and_the_rest_is_a_table(
    spark: SparkSession, folder: Path
) -> None:
    bad = folder / "1.acomm"
    data = bad.read_bytes()[:-1]
    bad.write_bytes(data)
    os_refuses = folder / "3.acomm"
    os_refuses.symlink_to(folder / "gone")
    break_messages(folder / "2.acomm")
    assert len(read(folder, "content", mode="permissive")) == 4
    assert len(read(folder, mode="permissive", section="channels")) == 1
    reader = spark.read.format("acomm").options(mode="permissive", section="damaged")
    damaged = reader.load(str(folder))
    assert damaged.schema.names == ["file", "reason", "offset", "size"]
    found = {Path(row["file"]).name: row for row in damaged.collect()}
    assert sorted(found) == ["1.acomm", "2.acomm", "3.acomm"]
    first = found["1.acomm"]
    assert first["reason"].startswith("expected footer magic ACEND001, found ")
    assert (first["offset"], first["size"]) == (len(data) - 8, len(data))
    assert "gzip stream in section 2" in found["2.acomm"]["reason"]
    assert tuple(found["3.acomm"])[1:] == ("No such file or directory", None, None)
    with pytest.raises(RelayError, match=r"[123].acomm"):
        read(folder, "content")


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
        next(acomm_source.batches(str(path), FileQuery(("messages",), ()), SCHEMA))
    assert str(caught.value).startswith(f"{path} at ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"since": "yesterday"},
            "option since: expected a time such as 2026-01-31T09:30:00Z, got 'yesterday'",
        ),
        ({"status": "Gone"}, "status: expected one of Created, "),
        ({"sender": " , "}, "option sender: expected one or several names"),
        ({"mode": "lenient"}, "mode: expected one of failfast, permissive, got 'lenient'"),
        ({"section": "channels", "until": AT}, "option until is for messages, not for section ch"),
    ],
)
def test_a_wrong_condition_is_one_line(folder: Path, options: dict[str, str], line: str) -> None:
    with pytest.raises(RelayError) as caught:
        read(folder, **options)
    assert str(caught.value).startswith(line)
