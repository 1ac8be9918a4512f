"""Sections 4 and 257: made from the messages, and told on when they are not true to them."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.acomm import columns, container, indexes, store_file
from relay.acomm.check import check
from relay.acomm.columns import FIRST_METADATA_BLOCK, ColumnBlock, Columns
from relay.acomm.container import parse_header, parse_sections
from relay.acomm.engine_state import EngineState, StoreSnapshot
from relay.acomm.fields import Reader
from relay.acomm.indexes import Indexes, IndexType
from relay.acomm.model import Message
from relay.acomm.records import encode_message
from relay.base.errors import FormatError
from relay.engine.archive_files import ArchiveFiles
from tests.acomm.support import (
    MESSAGES,
    STEADY,
    assemble,
    golden,
    message,
    messages_body,
    patch,
    small_store,
)


def section(*messages: Message) -> bytes:
    """Section 257 of these messages, no channel among them."""
    return columns.encode(messages, [len(encode_message(one)) for one in messages], ())


def opened(data: bytes) -> Columns:
    return Columns.open(Reader(data, "it"))


def swapped(data: bytes, tag: int, block: bytes) -> bytes:
    """The section with another block under a tag; without it for no bytes."""
    found, parts = opened(data), [data[:8]]
    for number in sorted(found.tags() | {tag}):
        reader = found.block(number) if number in found.tags() else Reader(b"", "it")
        raw = block if number == tag else reader.data[reader.pos : reader.end]
        if raw:
            packed = container.pack_envelope(raw)
            parts += (struct.pack("<IQ", number, len(packed)), packed)
    return b"".join(parts)


def problems(*messages: Message, body: bytes) -> tuple[str, ...]:
    """What check says of a file with these messages and this section 257."""
    has_metadata = 16 * any(one.metadata is not None for one in messages)
    sections = [(2, messages_body(*messages)), (257, body)]
    data = assemble(sections, counts=(0, len(messages), 0, 0), flags=has_metadata)
    return [one.text for one in check(data, "it")]


@pytest.mark.shows("audit 1.6")
def test_an_archive_has_its_columns_and_the_live_store_has_none(tmp_path: Path) -> None:
    file = golden()
    ArchiveFiles(str(tmp_path)).write("day/000001.acomm", StoreSnapshot(file, EngineState()))
    data = (tmp_path / "day" / "000001.acomm").read_bytes()
    kinds = [one.kind for one in parse_sections(data, "it", parse_header(data, "it", len(data)))]
    assert kinds == [1, 2, 3, 4, 5, 6, 256, 257]
    warnings: list[str] = []
    assert store_file.decode(data, "it", warn=warnings.append).messages == file.messages
    assert (warnings, list(check(data, "it"))) == ([], [])
    plain = store_file.encode(file)
    assert 257 not in [
        one.kind for one in parse_sections(plain, "it", parse_header(plain, "it", len(plain)))
    ]


@pytest.mark.shows("audit 1.6", "engine 8.4")
@STEADY
@given(st.lists(MESSAGES, max_size=6, unique_by=lambda one: one.id))
def test_columns_and_indexes_of_any_messages_are_true_to_them(messages: list[Message]) -> None:
    built = indexes.build(messages)
    reader = Reader(indexes.encode(built), "it")
    assert indexes.decode(reader) == built
    assert reader.pos == reader.end
    assert list(indexes.verify(built, messages)) == []
    ordered = sorted(messages, key=lambda one: (one.created_at, one.id))
    found = opened(section(*ordered))
    assert found.count == len(ordered)
    assert list(columns.verify(found, ordered, ())) == []
    records = struct.pack("<Q", len(ordered)) + b"".join(map(encode_message, ordered))
    for one in ordered:
        place = columns.locate(found, one.id)
        assert place is not None and records[slice(*place)] == encode_message(one)
    assert columns.locate(found, sum(one.id for one in ordered) + 1) is None
    if ordered:
        assert list(columns.verify(found, ordered[1:], ())) != []


@pytest.mark.shows("audit 1.6")
@pytest.mark.parametrize(
    ("field", "value", "block"),
    [
        ("id", 9, "1 (id)"),
        ("sender", "beta!", "3 (sender)"),
        ("channel_id", 2, "4 (channel)"),
        ("topic", "a.b", "6 (topic)"),
        ("correlation_id", "c", "7 (correlation_id)"),
        ("created_at", 5, "10 (created_at)"),
        ("delivered_at", 5, "11 (delivered_at)"),
        ("acknowledged_at", 5, "12 (acknowledged_at)"),
        ("ttl", 0, "13 (ttl)"),
        ("status", 3, "14 (status)"),
        ("retry_count", 1, "15 (retry_count)"),
        ("signature", b"", "16 (signature_size)"),
        ("metadata", {}, "9 (metadata)"),
        ("content", b"longer", "5 (content_size)"),
    ],
)
def test_columns_at_odds_with_messages_are_told(field: str, value: object, block: str) -> None:
    other = msgspec.structs.replace(message(1), **{field: value})
    lines = problems(message(1), body=section(other))
    assert any(
        line.startswith(f"it: column block {block}: expected the values of section 2")
        for line in lines
    ), lines


@pytest.mark.shows("audit 1.6")
def test_a_lane_at_odds_a_block_missing_and_another_count_are_reported() -> None:
    one = message(1, metadata={"n": 1, "to": "bob"})
    good = section(one)
    assert problems(one, body=good) == []
    (line,) = problems(one, body=swapped(good, FIRST_METADATA_BLOCK, struct.pack("<q", 2)))
    assert line == (
        "it: column block 32 (lane 0): expected the values of section 2, "
        "found others from byte 0 of 8 on"
    )
    (line,) = problems(one, body=swapped(good, ColumnBlock.STATUS, b""))
    assert line == (
        "it: column block 14 (status): expected column block 14 in section 257, found none"
    )
    (line,) = problems(one, body=section(one, one))
    assert line == "it: section 257: expected 1 messages as in section 2, found 2"


@pytest.mark.shows("audit 1.6")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"\0", "count of section 257 of 8 bytes"),
        (bytes(8) + b"\1\0\0\0", "length of a column block of 8 bytes"),
        (bytes(8) + struct.pack("<IQ", 1, 2**60), f"column block 1 of {2**60} bytes"),
        (bytes(8) + struct.pack("<IQ", 1, 0) * 2, "column block 1 once"),
    ],
)
def test_a_section_257_that_does_not_add_up_is_a_fault(body: bytes, expected: str) -> None:
    with pytest.raises(FormatError) as caught:
        opened(body)
    assert caught.value.expected == expected
    data = assemble([(257, body)])
    (problem,) = [one.text for one in check(data, "it")]
    assert problem.startswith(
        f"it: section 257 at {120 + caught.value.offset}: expected {expected}"
    )
    # columns are an aid: without them the store is read all the same
    assert store_file.decode(data, warn=pytest.fail).messages == ()


def index(kind: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(data)) + data


def section_4(data: bytes) -> int:
    """Where section 4 begins."""
    header = parse_header(data, "it", len(data))
    return next(one.offset for one in parse_sections(data, "it", header) if one.kind == 4)


@pytest.mark.shows("engine 8.4")
def test_an_index_lists_ids_by_key_in_order() -> None:
    messages = [
        message(9, created_at=1, sender="b", topic="é"),
        message(2, created_at=1, sender="a", correlation_id="c"),
        message(5, created_at=0, sender="b", topic="z"),
    ]
    built = indexes.build(messages)
    assert built == {
        IndexType.CHANNEL: {1: (2, 5, 9)},
        IndexType.TIMESTAMP: ((0, 5), (1, 2), (1, 9)),
        IndexType.TOPIC: {"z": (5,), "é": (9,)},
        IndexType.SENDER: {"a": (2,), "b": (5, 9)},
        IndexType.CORRELATION: {"c": (2,)},
    }
    assert list(built[IndexType.TOPIC]) == ["z", "é"]  # by bytes


@pytest.mark.shows("engine 8.4")
@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({IndexType.CHANNEL: {1: (1,)}}, "index 1 (channel) entry 0: expected "),
        ({IndexType.TIMESTAMP: ()}, "index 2 (timestamp) entry 0: expected (1, "),
        ({IndexType.TOPIC: {}}, "index 3 (topic) entry 0: expected ('a.b', "),
        ({IndexType.SENDER: {"zed": (1, 2)}}, "index 4 (sender) entry 0: expected "),
        (
            {IndexType.CORRELATION: {"c-1": (1,), "d": (2,)}},
            "index 5 (correlation) entry 1: expected ",
        ),
    ],
)
def test_an_index_at_odds_with_messages_is_told(change: Indexes, line: str) -> None:
    messages = small_store().messages
    ((where, expected, found),) = indexes.verify(indexes.build(messages) | change, messages)
    problem = f"{where}: expected {expected}, found {found}"
    assert problem.startswith(line)
    assert len(problem) < 200


@pytest.mark.shows("engine 8.4")
def test_an_index_that_is_missing_or_not_known_is_not_wrong() -> None:
    messages = small_store().messages
    assert list(indexes.verify({}, messages)) == []
    assert indexes.decode(Reader(b"", "it")) == {}
    assert indexes.encode({}) == bytes(4)
    data = struct.pack("<I", 2) + index(77, b"whatever") + index(3, bytes(8))
    assert indexes.decode(Reader(data, "it")) == {IndexType.TOPIC: {}}


@pytest.mark.shows("engine 8.4")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x01\0\0\0", "index count of at most 0, as many as can fit"),
        (b"\x01\0\0\0" + struct.pack("<IQ", 1, 2**60), f"index data of {2**60} bytes"),
        (b"\x02\0\0\0" + index(3, bytes(8)) * 2, "each index type once"),
        (b"\x01\0\0\0" + index(1, bytes(9)), "end of index 1"),
        (b"\x01\0\0\0" + index(2, struct.pack("<Q", 2**59)), "timestamp entries of at most 0"),
        (b"\x01\0\0\0" + index(1, struct.pack("<QQQ", 1, 5, 2**60)), "message ids of at most 0"),
        (b"\x01\0\0\0" + index(1, struct.pack("<5Q", 2, 5, 0, 5, 0)), "each index key once"),
        (b"\x01\0\0\0" + index(4, struct.pack("<QI4sQ", 1, 4, b"\xff", 0)), "index key in UTF-8"),
        (b"\0\0\0\0x", "end of section 4"),
    ],
)
def test_a_section_4_that_does_not_add_up_is_a_fault(data: bytes, expected: str) -> None:
    with pytest.raises(FormatError) as caught:
        indexes.decode(Reader(data, "it"))
    assert str(caught.value.expected).startswith(expected)


@pytest.mark.shows("engine 8.4")
def test_a_wrong_index_does_not_keep_a_store_from_being_read() -> None:
    good = store_file.encode(small_store())
    at = section_4(good)
    lie = patch(good, at + 4 + 12 + 8, struct.pack("<Q", 99))  # the channel's id
    broken = patch(good, at, b"\xff" * 4)
    for data in (lie, broken):
        assert store_file.decode(data) == small_store()
    assert "it: index 1 (channel) entry 0: expected " in next(check(lie, "it")).text
    (problem,) = [one.text for one in check(broken, "it")]
    assert problem.startswith(f"it: section 4 at {at}: expected index count of at most")
