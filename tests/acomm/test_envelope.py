"""The gzip envelope: members back to back, streams that lie, streams that would fill memory."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib

import psutil
import pytest

from relay.acomm import container, store_file
from relay.base.errors import FormatError
from tests.acomm.support import assemble, message, messages_body, refuse

pytestmark = pytest.mark.shows("engine 8.5")

AT = 96 + 24  # where section 2 lies in these files
MIB = 1024 * 1024
WHERE = " in section 2, offset in its uncompressed bytes"


def compressed(size: int, stream: bytes, count: int = 2) -> bytes:
    """A file whose section 2 is this envelope."""
    body = struct.pack("<Q", size) + stream
    return assemble([(2, body)], counts=(0, count, 0, 0), flags=1)


def refuse_within(data: bytes, most: int) -> FormatError:
    """The fault, found without ever holding more than ``most`` bytes beside the file's."""
    tracemalloc.start()
    try:
        fault = refuse(data)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    return fault


RAW = messages_body(message(1), message(2))
STREAM = gzip.compress(RAW, mtime=0)


@pytest.mark.parametrize(
    "stream",
    [
        STREAM,
        gzip.compress(RAW[:10]) + gzip.compress(RAW[10:]),
        gzip.compress(b"") + STREAM + gzip.compress(b"") * 3,
        b"".join(gzip.compress(RAW[at : at + 1]) for at in range(len(RAW))),
        gzip.compress(RAW, compresslevel=0),
    ],
    ids=["one", "two", "empty ones", "a member a byte", "stored"],
)
def test_members_back_to_back_are_one_stream(stream: bytes) -> None:
    store = store_file.decode(compressed(len(RAW), stream), "it")
    assert store.messages == (message(1), message(2))


@pytest.mark.parametrize(
    ("size", "stream", "expected", "found"),
    [
        (
            len(RAW) + 1,
            STREAM,
            f"uncompressed_size {len(RAW) + 1} of section 2",
            "120 bytes come out",
        ),
        (len(RAW) - 1, STREAM, f"uncompressed_size {len(RAW) - 1} of section 2", "more bytes"),
        (0, STREAM, "uncompressed_size 0 of section 2", "more bytes come out"),
        (len(RAW), STREAM * 2, "uncompressed_size 120 of section 2", "more bytes come out"),
        (len(RAW), STREAM[:-1], "the end of the gzip stream in section 2", "nothing"),
        (len(RAW), STREAM[:5], "the end of the gzip stream in section 2", "nothing"),
        (0, b"", f"count of section 2 of 8 bytes{WHERE}", "0 bytes left"),
        (4, gzip.compress(bytes(4)), f"count of section 2 of 8 bytes{WHERE}", "4 bytes left"),
        (len(RAW), STREAM + bytes(4), "the end of the gzip stream in section 2", "nothing"),
        (len(RAW), STREAM + bytes(40), "a gzip stream in section 2", "Error"),
        (len(RAW), b"no gzip" * 3, "a gzip stream in section 2", "Error"),
        (len(RAW), zlib.compress(RAW), "a gzip stream in section 2", "Error"),
        (len(RAW), STREAM[:-8] + bytes(8), "a gzip stream in section 2", "Error"),
    ],
    ids=lambda value: None if isinstance(value, int) else "",
)
def test_a_stream_is_as_its_envelope(size: int, stream: bytes, expected: str, found: str) -> None:
    fault = refuse(compressed(size, stream))
    assert str(fault.expected) == expected
    assert str(fault.found).startswith(found)
    assert fault.offset >= AT or WHERE in expected


def test_faults_in_it_count_uncompressed_bytes_and_say_so() -> None:
    raw = RAW[:16] + b"\x09" + RAW[17:]
    fault = refuse(compressed(len(raw), gzip.compress(raw)))
    assert str(fault) == f"it at 16: expected message_type 0-7{WHERE}, found 9"


@pytest.mark.parametrize("size", [2**63, 2_147_483_649, 100_000_000])
def test_an_absurd_size_is_refused_before_anything_is_allocated(size: int) -> None:
    data = compressed(size, STREAM)
    fault = refuse_within(data, MIB)
    assert (fault.offset, fault.found) == (AT, size)
    assert str(fault.expected).startswith("uncompressed_size of at most")


def test_a_bomb_is_cut_off_where_its_envelope_ends() -> None:
    stream = gzip.compress(bytes(100 * MIB), compresslevel=1)
    data = compressed(10, stream)
    fault = refuse_within(data, MIB)
    assert fault.found == "more bytes come out"


@pytest.mark.parametrize("records", [0, 1000])
def test_a_large_bomb_is_refused_before_there_is_room_made_for_it(records: int) -> None:
    """Behind so many messages nothing but zeros: 100 MiB of them in 100 KB."""
    raw = messages_body(*(message(number) for number in range(1, records + 1)))
    stream = gzip.compress(raw, 1) + gzip.compress(bytes(100 * MIB), 1)
    fault = refuse_within(compressed(len(raw) + 100 * MIB, stream, count=records), 6 * MIB)
    assert fault.expected == f"end of section 2{WHERE}" and fault.offset == len(raw)


def test_no_record_of_a_bomb_is_waited_for_without_end() -> None:
    """Its first message claims a content of 200 MiB, and they come."""
    head = messages_body(message(1, content=b"x"))
    at = head.index(b"\x01\x00\x00\x00x")
    raw = head[:at] + struct.pack("<I", 200 * MIB)
    stream = gzip.compress(raw, 1) + gzip.compress(bytes(100 * MIB), 1)
    fault = refuse_within(compressed(len(raw) + 100 * MIB, stream, count=1), 64 * MIB)
    assert f"of {200 * MIB} bytes" in str(fault.expected)


def test_what_is_large_and_says_the_same_again_and_again_is_read() -> None:
    most = [message(number, content=b"x" * MIB) for number in range(1, 67)]
    raw = messages_body(*most)
    data = compressed(len(raw), gzip.compress(raw, 1), count=len(most))
    assert len(raw) > container.LARGE_BYTES > container.LARGE_RATIO * len(data)
    assert store_file.decode(data, "it").messages == tuple(most)


def test_what_the_memory_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=60 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    size = 100 * MIB
    fault = refuse(compressed(size, gzip.compress(bytes(size), 1)))
    assert str(fault) == (
        f"it at {AT}: expected uncompressed_size of at most {60 * MIB} in section 2, which memory "
        f"has room for, found {size}"
    )


def test_three_hundred_thousand_empty_members_end_soon() -> None:
    stream = gzip.compress(b"", mtime=0) * 300_000 + STREAM
    assert len(store_file.decode(compressed(len(RAW), stream), "it").messages) == 2


@pytest.mark.parametrize("count", [70, 69])
def test_the_same_message_again_and_again_is_refused_as_it_comes(count: int) -> None:
    """Out of order, or more of them than the header counts: nothing of it is kept."""
    ids = [1] * 70 if count == 70 else range(1, 71)
    raw = messages_body(*(message(number, content=b"x" * MIB) for number in ids))
    data = compressed(len(raw), gzip.compress(raw, 1), count=count)
    fault = refuse_within(data, 12 * MIB)
    wanted = "by created_at and id, ascending" if count == 70 else "of at most 69"
    assert wanted in str(fault.expected)
