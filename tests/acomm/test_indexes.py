"""Section 4: made from the messages, and told on when it is not true to them."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.acomm import indexes, store_file
from relay.acomm.check import check
from relay.acomm.container import parse_header, parse_sections
from relay.acomm.fields import Reader
from relay.acomm.indexes import Indexes
from relay.acomm.model import Message
from relay.base.errors import FormatError
from tests.acomm.support import MESSAGES, STEADY, message, patch, small_store

pytestmark = pytest.mark.shows("engine 8.4")


def index(kind: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(data)) + data


def section_4(data: bytes) -> int:
    """Where section 4 begins."""
    header = parse_header(data, "it", len(data))
    return next(one.offset for one in parse_sections(data, "it", header) if one.kind == 4)


def test_an_index_lists_ids_by_key_in_order() -> None:
    messages = [
        message(9, created_at=1, sender="b", topic="é"),
        message(2, created_at=1, sender="a", correlation_id="c"),
        message(5, created_at=0, sender="b", topic="z"),
    ]
    built = indexes.build(messages)
    assert built == Indexes(
        channel={1: (2, 5, 9)},
        timestamp=((0, 5), (1, 2), (1, 9)),
        topic={"z": (5,), "é": (9,)},
        sender={"a": (2,), "b": (5, 9)},
        correlation={"c": (2,)},
    )
    assert list(built.topic or ()) == ["z", "é"]  # by bytes


@STEADY
@given(st.lists(MESSAGES, max_size=8))
def test_indexes_come_back_equal(messages: list[Message]) -> None:
    built = indexes.build(messages)
    reader = Reader(indexes.encode(built), "it")
    found = indexes.decode(reader)
    assert found == built
    assert reader.pos == reader.end
    assert list(indexes.verify(found, messages)) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"channel": {1: (1,)}}, "index 1 (channel) entry 0: expected "),
        ({"timestamp": ()}, "index 2 (timestamp) entry 0: expected (1, "),
        ({"topic": {}}, "index 3 (topic) entry 0: expected ('a.b', "),
        ({"sender": {"zed": (1, 2)}}, "index 4 (sender) entry 0: expected "),
        ({"correlation": {"c-1": (1,), "d": (2,)}}, "index 5 (correlation) entry 1: expected "),
    ],
)
def test_an_index_at_odds_with_the_messages_is_reported(
    change: dict[str, object], line: str
) -> None:
    messages = small_store().messages
    ((where, expected, found),) = indexes.verify(
        msgspec.structs.replace(indexes.build(messages), **change), messages
    )
    problem = f"{where}: expected {expected}, found {found}"
    assert problem.startswith(line)
    assert len(problem) < 200


def test_an_index_that_is_missing_or_not_known_is_not_wrong() -> None:
    messages = small_store().messages
    assert list(indexes.verify(Indexes(), messages)) == []
    assert indexes.decode(Reader(b"", "it")) == Indexes()
    assert indexes.encode(Indexes()) == bytes(4)
    data = struct.pack("<I", 2) + index(77, b"whatever") + index(3, bytes(8))
    assert indexes.decode(Reader(data, "it")) == Indexes(topic={})


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
