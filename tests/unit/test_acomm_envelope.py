"""The gzip envelope: members back to back, streams that lie, streams that would fill memory."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib

import pytest

from relay.comm import acomm
from relay.errors import FormatError
from tests.unit.acomm_support import assemble, message, messages_body

AT = 96 + 24  # where section 2 lies in these files
MIB = 1024 * 1024
WHERE = " in section 2, offset in its uncompressed bytes"


def compressed(size: int, stream: bytes, count: int = 2) -> bytes:
    """A file whose section 2 is this envelope."""
    body = struct.pack("<Q", size) + stream
    return assemble([(2, body)], counts=(0, count, 0, 0), flags=1)


def refuse(data: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        acomm.decode(data, "it")
    return caught.value


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
    store = acomm.decode(compressed(len(RAW), stream), "it")
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
)
def test_a_stream_gives_what_its_envelope_says(
    size: int, stream: bytes, expected: str, found: str
) -> None:
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


def test_a_bomb_that_says_its_size_holds_no_records() -> None:
    # 4 MiB of zeros are a count of 0 and bytes left over, not a hundred thousand messages.
    data = compressed(4 * MIB, gzip.compress(bytes(4 * MIB)), count=0)
    assert refuse_within(data, 16 * MIB).found == f"{4 * MIB - 8} more bytes"


def test_three_hundred_thousand_empty_members_end_soon() -> None:
    stream = gzip.compress(b"", mtime=0) * 300_000 + STREAM
    assert len(acomm.decode(compressed(len(RAW), stream), "it").messages) == 2
