"""What a section table may say, and what a file may be read with and is wrong all the same."""

from __future__ import annotations

import struct

import pytest

from relay.acomm import store_file
from relay.acomm.check import check
from relay.acomm.container import SectionEntry
from relay.acomm.model import Message, StoreFile
from relay.acomm.records import CHANNEL, SUBSCRIPTION
from relay.base.errors import VersionError
from relay.base.finding import Severity
from tests.acomm.support import assemble, message, messages_body, patch, refuse, small_store

pytestmark = pytest.mark.shows("engine 8.2", "engine 8.3", "engine 8.10")

EMPTY = bytes(8)


def read(data: bytes) -> tuple[StoreFile, list[str]]:
    warnings: list[str] = []
    return store_file.decode(data, "it", warn=warnings.append), warnings


def test_a_file_without_sections_holds_nothing() -> None:
    assert read(assemble([])) == (StoreFile(10, 20), [])


def test_sections_may_be_empty_missing_and_in_any_order() -> None:
    (channel,) = small_store().channels
    channels = b"\1" + bytes(7) + CHANNEL.encode("", channel)
    bodies = [(6, EMPTY), (5, b""), (2, messages_body(message(3))), (1, channels)]
    store, warnings = read(assemble(bodies, counts=(1, 1, 0, 0)))
    assert store == StoreFile(10, 20, (channel,), (message(3),))
    assert warnings == []


def test_a_gap_between_sections_and_an_empty_one_anywhere_are_fine() -> None:
    body = messages_body(message(1))
    at = 96 + 2 * 24 + 7
    table = [SectionEntry(2, 0, at, len(body)), SectionEntry(5, 0, 0, 0)]
    data = assemble([(2, bytes(7) + body), (5, b"")], counts=(0, 1, 0, 0), table=table)
    assert read(data)[0].messages == (message(1),)


def test_dead_letters_in_section_2_are_taken() -> None:
    dead = message(1, status=5)
    data = assemble([(2, messages_body(dead))], counts=(0, 1, 0, 0), flags=4)
    assert read(data)[0].messages[0].status.label == "DeadLetter"
    assert list(check(data, "it")) == []


@pytest.mark.shows("audit 1.8")
def test_what_is_not_known_is_skipped_and_spoken_of() -> None:
    store, warnings = read(assemble([(7, b"abc"), (999, b"")], flags=0x8000_0000))
    assert store == StoreFile(10, 20)
    assert warnings == [
        "it: flags 0x80000000 are not known and were ignored",
        "it: section 7, 3 bytes, is not known: skipped",
        "it: section 999, 0 bytes, is not known: skipped",
    ]
    _, warnings = read(assemble([(2, b"")], table=[SectionEntry(2, 9, 120, 0)]))
    assert warnings == ["it: flags 0x9 of section 2 were ignored"]


def test_warnings_go_to_the_log_when_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    store_file.decode(assemble([(7, b"")]), "it")
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("relay.acomm.store_file", "WARNING")
    ]


def test_reserved_bytes_are_ignored() -> None:
    data = patch(store_file.encode(small_store()), 72, b"\xff" * 24)
    assert read(data) == (small_store(), [])


@pytest.mark.parametrize(
    ("offset", "length", "expected", "found"),
    [
        (119, 8, "section 2 at 120 or later", "119"),
        (0, 8, "section 2 at 120 or later", "0"),
        (121, 8, "section 2 to end by 128", "its end at 129"),
        (120, 2**64 - 1, "section 2 to end by 128", f"its end at {2**64 + 119}"),
        (2**64 - 1, 8, "section 2 to end by 128", f"its end at {2**64 + 7}"),
        (129, 0, "section 2 to end by 128", "its end at 129"),
    ],
)
def test_sections_lie_behind_the_table(offset: int, length: int, expected: str, found: str) -> None:
    fault = refuse(assemble([(2, EMPTY)], table=[SectionEntry(2, 0, offset, length)]))
    assert (fault.expected, str(fault.found)) == (expected, found)


def test_the_table_must_fit_and_name_no_type_twice() -> None:
    data = assemble([(2, EMPTY)])
    fault = refuse(patch(data, 14, struct.pack("<H", 2)))
    assert (fault.offset, fault.found) == (14, 2)
    fault = refuse(assemble([(999, b""), (999, b"")]))
    assert fault.expected == "section type 999 once"


def test_the_headers_counts_must_be_true() -> None:
    data = store_file.encode(small_store())
    for number, name in enumerate(("channel", "message", "subscription", "dead_letter")):
        at = 16 + 8 * number
        true = int.from_bytes(data[at : at + 8], "little")
        fault = refuse(patch(data, at, struct.pack("<Q", true + 1)))
        assert (fault.offset, fault.found) == (at, true + 1)
        assert fault.expected == f"{name}_count {true}, as the sections hold"


def test_bytes_left_over_are_a_fault() -> None:
    for kind, name in ((1, "section 1"), (2, "section 2"), (3, "section 3"), (5, "section 5")):
        fault = refuse(assemble([(kind, EMPTY + b"x")]))
        assert (fault.expected, fault.found) == (f"end of {name}", "1 more bytes")


@pytest.mark.parametrize("most", [2**60, 11])
@pytest.mark.parametrize("kind", [1, 2, 3, 5, 6])
def test_a_count_is_not_believed(kind: int, most: int) -> None:
    body = struct.pack("<Q", most) + bytes(100)
    fault = refuse(assemble([(kind, body)]))
    assert fault.found == most
    assert "as many as can fit" in str(fault.expected)


def test_a_later_version_is_read_when_it_reads_as_this_one() -> None:
    store, warnings = read(patch(store_file.encode(small_store()), 8, b"\x02\0"))
    assert store == small_store()
    assert warnings == ["it: version 2 is read as version 1"]


@pytest.mark.parametrize(
    ("at", "piece"),
    [
        (64, struct.pack("<Q", 5)),  # total_size
        (14, struct.pack("<H", 60000)),  # section_count
        (96 + 8, struct.pack("<Q", 1)),  # offset of section 1
        (16, struct.pack("<Q", 77)),  # channel_count
        (96 + 7 * 24 + 16, b"\xff" * 4),  # length of a channel's name
    ],
)
def test_a_later_version_that_does_not_is_a_version_error(at: int, piece: bytes) -> None:
    data = patch(patch(store_file.encode(small_store()), 8, b"\x09\0"), at, piece)
    with pytest.raises(VersionError, match=r"version 9, read as 1") as caught:
        store_file.decode(data, "it", warn=lambda _: None)
    assert "newer agent-relay" in caught.value.hint


def test_version_0_is_refused() -> None:
    fault = refuse(patch(store_file.encode(small_store()), 8, b"\0\0"))
    assert isinstance(fault, VersionError)
    assert (fault.offset, fault.expected, fault.found) == (8, "version 1", 0)


def test_engine_state_is_written_by_tag_and_only_when_there_is_any() -> None:
    data = store_file.encode(StoreFile(0, 0, engine_state={7: b"b", 2: b"aa"}))
    assert data[14] == 7
    tail = struct.pack("<IQ", 2, 2) + b"aa" + struct.pack("<IQ", 7, 1) + b"b"
    assert data[:-40].endswith(tail)
    assert list(store_file.decode(data).engine_state.items()) == [(2, b"aa"), (7, b"b")]
    assert store_file.encode(StoreFile(0, 0))[14] == 6


def test_damaged_engine_state_is_a_fault() -> None:
    block = struct.pack("<IQ", 1, 1) + b"x"
    assert refuse(assemble([(256, block + block)])).expected == "engine_state block 1 once"
    assert refuse(assemble([(256, block[:-1])])).found == "0 bytes left"
    assert refuse(assemble([(256, block + b"\1")])).found == "1 bytes left"


@pytest.mark.parametrize(
    ("at", "piece", "expected"),
    [
        (8 + 8, b"\x08", "message_type 0-7"),
        (8 + 35, b"\x02", "tag of topic 0 or 1"),
        (8 + 36, b"\x02", "tag of correlation_id 0 or 1"),
        (8 + 37, b"\x05", "priority 0-4"),
        (8 + 38, b"\x02", "tag of metadata 0 or 1"),
        (8 + 47, b"\x09", "tag of delivered_at 0 or 1"),
        (8 + 48, b"\x09", "tag of acknowledged_at 0 or 1"),
        (8 + 49, b"\x09", "tag of ttl 0 or 1"),
        (8 + 50, b"\x07", "status 0-6"),
        (8 + 55, b"\x03", "tag of signature 0 or 1"),
        (8 + 9, b"\xff\xff\xff\xff", "sender of 4294967295 bytes"),
        (8 + 26, b"\xff\xff\xff\xff", "content of 4294967295 bytes"),
        (8 + 13, b"\xc3(", "sender in UTF-8"),
    ],
)
def test_each_field_of_a_message_is_checked(at: int, piece: bytes, expected: str) -> None:
    body = messages_body(message(1))
    assert len(body) == 8 + 56
    body = body[:at] + piece + body[at + len(piece) :]
    fault = refuse(assemble([(2, body)], counts=(0, 1, 0, 0)))
    assert fault.expected == expected
    assert at <= fault.offset - 120 <= at + 4


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (b"\1\0\0\0" + b"\1\0\0\0k\x05", "metadata tag 0-4"),
        (b"\1\0\0\0" + b"\1\0\0\0k\x03\x02", "metadata value 0 or 1"),
        (b"\2\0\0\0" + b"\1\0\0\0k\x04" * 2, "each metadata key once"),
        (b"\xff\xff\xff\xff" + b"\1\0\0\0k\x04", "metadata entries of at most"),
        (b"\1\0\0\0" + b"\1\0\0\0\xff\x04", "metadata key in UTF-8"),
    ],
)
def test_metadata_is_checked(entries: bytes, expected: str) -> None:
    whole = messages_body(message(1, metadata={}))
    body = whole[: 8 + 39] + entries + whole[8 + 43 :]
    fault = refuse(assemble([(2, body)], counts=(0, 1, 0, 0)))
    assert str(fault.expected).startswith(expected)


def test_a_message_that_runs_over_its_sections_end_is_a_fault() -> None:
    # The bytes are there, but they are the next section's.
    body = messages_body(message(1))
    cut = SectionEntry(2, 0, 144, len(body) - 1)
    rest = SectionEntry(7, 0, 144 + len(body) - 1, 1)
    fault = refuse(assemble([(2, body), (7, b"")], counts=(0, 1, 0, 0), table=[cut, rest]))
    assert (fault.expected, fault.found) == ("tag of signature of 1 bytes", "0 bytes left")


def test_a_stored_response_without_a_correlation_id_is_data() -> None:
    stored = Message(1, 3, "", 999, b"", topic="", created_at=1)  # type: ignore[arg-type]
    data = assemble([(2, messages_body(stored))], counts=(0, 1, 0, 0))
    assert read(data)[0].messages == (stored,)


def problems(data: bytes) -> tuple[str, ...]:
    return tuple(one.text for one in check(data, "it") if one.severity is Severity.ERROR)


def test_order_is_checked_in_every_section() -> None:
    two = messages_body(message(2), message(1))
    (channel,) = small_store().channels
    (subscription,) = small_store().subscriptions
    channels = struct.pack("<Q", 2) + CHANNEL.encode("", channel) * 2
    subscriptions = struct.pack("<Q", 2) + SUBSCRIPTION.encode("", subscription) * 2
    sections = [(1, channels), (2, two), (3, subscriptions), (5, two), (6, two)]
    assert problems(assemble(sections, counts=(2, 4, 2, 2), flags=4)) == (
        "it: section 1: expected ascending ids, found 1 after 1",
        "it: section 3: expected ascending ids, found 1 after 1",
        *(
            f"it: section {number}: expected ascending created_at and id, "
            "found message 1 of 1 after message 2 of 2"
            for number in (2, 5, 6)
        ),
    )


def test_an_id_given_twice_and_keys_out_of_order_are_reported() -> None:
    twice = messages_body(message(1, created_at=1), message(1, created_at=2))
    assert problems(assemble([(2, twice)], counts=(0, 2, 0, 0))) == (
        "it: section 2: expected message 1 once, found it 2 times",
    )
    body = messages_body(message(1, metadata={"a": None, "b": None}))
    body = body.replace(b"\1\0\0\0a\4\1\0\0\0b\4", b"\1\0\0\0b\4\1\0\0\0a\4")
    assert problems(assemble([(2, body)], counts=(0, 1, 0, 0), flags=16)) == (
        "it: section 2: expected the metadata of message 1 in key order, found ['b', 'a']",
    )


@pytest.mark.parametrize(
    ("bit", "name"),
    [(2, "INDEXED"), (4, "HAS_DEAD_LETTERS"), (8, "HAS_SIGNATURES"), (16, "HAS_METADATA")],
)
def test_flags_must_tell_the_truth(bit: int, name: str) -> None:
    full = store_file.encode(small_store(), compress=False)
    assert full[10] == 30
    assert problems(patch(full, 10, bytes([30 - bit]))) == (
        f"it: flag {name}: expected 1, found 0",
    )
    assert problems(assemble([], flags=bit)) == (f"it: flag {name}: expected 0, found 1",)


def test_a_damaged_file_gives_its_fault_and_nothing_else() -> None:
    (damaged,) = check(b"ACOM", "it")
    assert damaged.text == (
        "it at 0: expected magic ACOMM001, found magic ACOM of another format, "
        "AgenticComm's own (ACOM)"
    )
    (skipped,) = check(assemble([(7, b"")]), "it")
    assert skipped.text == "it: section 7, 0 bytes, is not known: skipped"
    assert (damaged.severity, skipped.severity) == (Severity.ERROR, Severity.WARNING)
