"""The format `acomm`: every section and option, and what it does with a file that is damaged."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelType,
    Delivery,
    DeliveryMode,
    DeliveryState,
    MatchMode,
    Message,
    MessageStatus,
    MessageType,
    Participant,
    Priority,
    StoreFile,
    Subscription,
)
from relay.acomm.records import ENCRYPTION_BYTES
from relay.acomm.store_file import encrypt
from relay.audit import formats
from relay.audit.formats import SECTIONS
from relay.audit.session import explained
from relay.audit.sources import store_files
from relay.base.errors import RelayError
from relay.base.names import sha256_hex
from tests.audit.home_builder import START_NS, START_S, stored_message
from tests.audit.source_rows import rows_of

U64_MAX = 2**64 - 1
START = datetime(2026, 1, 31, 9, 30)

FULL = Message(
    U64_MAX,
    MessageType.COMMAND,
    "alice",
    1,
    b"deploy",
    topic="build.done",
    correlation_id="7f8b0b6e-0000-4000-8000-000000000000",
    priority=Priority.HIGH,
    metadata={
        "relay_id": "1-full",
        "to": "bob",
        "created_ns": START_NS,
        "h.Note": "hi",
        "share": 0.5,
        "urgent": True,
        "nothing": None,
    },
    created_at=START_S,
    delivered_at=START_S + 1,
    acknowledged_at=START_S + 2,
    ttl=U64_MAX,
    status=MessageStatus.ACKNOWLEDGED,
    retry_count=2**32 - 1,
    signature=b"\x01\x02",
)
BARE = Message(2, MessageType.TEXT, "bob", 77, b"", created_at=U64_MAX)
STORE = StoreFile(
    START_S,
    START_S,
    channels=(
        Channel(
            1,
            "dm/alice/bob",
            ChannelType.DIRECT,
            "alice",
            (Participant("alice"), Participant("bob")),
            ChannelConfig(DeliveryMode.AT_LEAST_ONCE, ack_timeout=60),
            created_at=START_S,
            modified_at=START_S,
            message_count=2,
            tags=("a", "b"),
        ),
    ),
    messages=(FULL, BARE),
    subscriptions=(
        Subscription(3, 1, "bob", "build.#", MatchMode.MULTI_LEVEL, START_S, active=False),
    ),
    dead_letters=(stored_message(5, "1-dead"),),
    archive=(stored_message(6, "1-old"), stored_message(7, "1-older")),
    engine_state=EngineState(
        deliveries={
            U64_MAX: {
                "bob": Delivery(DeliveryState.ACKNOWLEDGED),
                "carol": Delivery(DeliveryState.BOUNCED),
            },
            2: {"alice": Delivery()},
        }
    ).encode(),
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A store file with something in every section."""
    path = str(tmp_path / "a.acomm")
    store_file.write(path, STORE)
    return path


Rows = list[dict[str, Any]]


def read(path: str | None, *columns: str, **options: str) -> Rows:
    return rows_of(formats.AcommSource, path, columns, **options)


def one(rows: Rows, **where: object) -> dict[str, Any]:
    """The one row where these columns have these values."""
    found = [r for r in rows if all(r[name] == value for name, value in where.items())]
    assert len(found) == 1
    return found[0]


def test_messages_with_every_column(spark: SparkSession, path: str) -> None:
    frame = spark.read.format("acomm").load(path)
    assert frame.schema.names == formats.STORED_MESSAGE.names
    row = one([row.asDict() for row in frame.collect()], sender="alice")
    assert row == {
        "file": path,
        "section": "messages",
        "id": Decimal(U64_MAX),
        "message_type": "Command",
        "sender": "alice",
        "channel_id": Decimal(1),
        "channel": "dm/alice/bob",
        "content": b"deploy",
        "content_size": 6,
        "checksum": sha256_hex(b"deploy"),
        "sealed": False,
        "topic": "build.done",
        "correlation_id": "7f8b0b6e-0000-4000-8000-000000000000",
        "priority": "High",
        "metadata": {
            "relay_id": "1-full",
            "to": "bob",
            "created_ns": str(START_NS),
            "h.Note": "hi",
            "share": "0.5",
            "urgent": "true",
            "nothing": None,
        },
        "relay_id": "1-full",
        "to": "bob",
        "kind": "command",
        "created_ns": START_NS,
        "created_at": START,
        "delivered_at": START.replace(second=1),
        "acknowledged_at": START.replace(second=2),
        "ttl_s": Decimal(U64_MAX),
        "status": "Acknowledged",
        "retry_count": 2**32 - 1,
        "signature": b"\x01\x02",
    }


def test_an_encrypted_file_is_read_with_its_contents_sealed(path: str) -> None:
    store_file.write(path, encrypt(STORE, bytes(32)))
    row = one(read(path), sender="alice")
    assert (row["sealed"], row["content_size"], row["checksum"]) == (True, 6, None)
    assert (len(row["content"]), row["relay_id"]) == (6 + ENCRYPTION_BYTES, "1-full")


def test_what_a_message_lacks_is_null_and_so_is_a_time_without_end(path: str) -> None:
    row = one(read(path), sender="bob")
    for name in ("channel", "topic", "metadata", "relay_id", "to", "created_ns", "created_at"):
        assert row[name] is None, name
    assert (row["content_size"], row["checksum"]) == (0, sha256_hex(b""))


@pytest.mark.shows("audit 1.1")
def test_the_other_sections(path: str) -> None:
    dead = one(read(path, section="dead_letters"))
    assert (dead["section"], dead["relay_id"]) == ("dead_letters", "1-dead")
    assert len(read(path, section="archive")) == 2
    both = read(path, section="messages, dead_letters,archive")
    assert sorted(row["section"] for row in both) == [
        "archive",
        "archive",
        "dead_letters",
        "messages",
        "messages",
    ]
    names = SECTIONS["deliveries"].names[1:]
    deliveries = read(path, *names, section="deliveries")
    assert sorted(tuple(row.values()) for row in deliveries) == [
        (Decimal(2), None, "alice", "Sent", None),
        (Decimal(U64_MAX), "1-full", "bob", "Acknowledged", None),
        (Decimal(U64_MAX), "1-full", "carol", "Bounced", None),
    ]
    channel = one(read(path, section="channels"))
    assert channel["participants"] == ["alice", "bob"]
    assert (channel["delivery"], channel["ack_timeout_s"]) == ("AtLeastOnce", Decimal(60))
    assert (channel["description"], channel["tags"]) == (None, ["a", "b"])
    subscription = one(read(path, section="subscriptions"))
    assert (subscription["match_mode"], subscription["active"]) == ("MultiLevel", False)


@pytest.mark.shows("audit 1.2")
def test_a_schema_chooses_columns(spark: SparkSession, path: str) -> None:
    reader = spark.read.format("acomm").schema("to string, id decimal(20,0) not null")
    assert sorted(map(tuple, reader.load(path).collect()), key=str) == [
        ("bob", Decimal(U64_MAX)),
        (None, Decimal(2)),
    ]


@pytest.mark.shows("audit 1.1")
def test_file_folder_glob_and_list(tmp_path: Path, path: str) -> None:
    other = tmp_path / "archive" / "2026-01-31" / "000001.acomm"
    other.parent.mkdir(parents=True)
    store_file.write(str(other), STORE)
    (tmp_path / "archive" / "000001.acomm.tmp").write_bytes(b"half written")
    both = {path, str(other)}
    listed = json.dumps([path, str(other), path])  # as Spark gives several
    for rows in (
        read(str(tmp_path)),
        read(str(tmp_path / "**" / "*.acomm")),
        read(None, paths=listed),
    ):
        assert {row["file"] for row in rows} == both
        assert len(rows) == 4
    assert len(read(str(tmp_path / "arch*"))) == 2
    (tmp_path / "empty").mkdir()
    assert read(str(tmp_path / "empty")) == []


@pytest.mark.shows("audit 1.5")
def test_small_files_share_a_partition(tmp_path: Path) -> None:
    for number in range(100):
        name = tmp_path / f"{number:06}.acomm"
        store_file.write(
            str(name), StoreFile(1, 1, messages=(stored_message(number, f"1-{number}"),))
        )
    source = formats.AcommSource({"path": str(tmp_path)})
    partitions = source.reader(source.schema()).partitions()
    assert formats.LEAST_PARTITIONS <= len(partitions) < 20
    assert {row["relay_id"] for row in read(str(tmp_path))} == {f"1-{n}" for n in range(100)}
    name.write_bytes(b"damaged")
    rest = read(str(tmp_path), mode="permissive")
    assert {row["relay_id"] for row in rest} == {f"1-{n}" for n in range(99)}


def test_more_rows_than_a_batch(tmp_path: Path) -> None:
    many = tuple(stored_message(n, f"1-{n}") for n in range(store_files.BATCH_ROWS + 1))
    path = str(tmp_path / "many.acomm")
    store_file.write(path, StoreFile(1, 1, messages=many))
    assert len({row["relay_id"] for row in read(path, "relay_id")}) == len(many)


@pytest.mark.parametrize(
    ("options", "columns", "line"),
    [
        ({"section": "letters"}, {}, "section: expected one of messages, "),
        ({"section": "messages,channels"}, {}, "sections messages,channels have different"),
        (
            {},
            {"sender": StringType(), "colour": StringType()},
            "unknown column colour of section messages: expected one of file",
        ),
        (
            {},
            {"sender": LongType()},
            "column sender of section messages: expected string, got bigint",
        ),
    ],
)
def test_a_wrong_option_is_one_line(
    path: str, options: dict[str, str], columns: dict[str, DataType], line: str
) -> None:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    with pytest.raises(RelayError) as caught:
        formats.AcommSource({"path": path, **options}).reader(schema)
    assert str(caught.value).startswith(line)


@pytest.mark.shows("audit 1.5")
def test_a_damaged_file_fails_the_job_with_its_name(
    spark: SparkSession, tmp_path: Path, path: str
) -> None:
    data = bytearray(Path(path).read_bytes())
    data[200] ^= 1
    bad = tmp_path / "bad.acomm"
    bad.write_bytes(data)
    with pytest.raises(RelayError) as caught, explained():
        spark.read.format("acomm").load(str(tmp_path)).count()
    line = str(caught.value)
    assert line.startswith(f"{bad} at ") and "SHA-256" in line
    assert "\n" not in line and "Traceback" not in line and "java" not in line
    assert caught.value.hint


def test_damaged_engine_state_names_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "b.acomm")
    store_file.write(path, StoreFile(1, 1, engine_state={2: b"\x01"}))
    with pytest.raises(RelayError, match=f"^{path}: section 256 at 0"):
        read(path, section="deliveries")


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.acomm")
    with pytest.raises(RelayError, match=f"^{gone}: no such file$"):
        read(gone)
    with pytest.raises(RelayError, match="needs a path"):
        read(None)
