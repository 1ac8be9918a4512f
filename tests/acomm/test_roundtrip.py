"""Any store comes out of its file as it was, golden files hold what they must, bad are refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.acomm import jsonl, model, sections, store_file
from relay.acomm.check import check
from relay.acomm.indexes import IndexType
from relay.acomm.records import (
    CHANNEL,
    MESSAGE,
    PARTICIPANT,
    SUBSCRIPTION,
    encode_message,
)
from relay.base.errors import (
    FormatError,
    IntegrityError,
    StoreCapacity,
    UnsafePath,
    ValidationFailed,
)
from relay.base.finding import Severity
from tests.acomm.support import (
    BAD,
    FIXTURES,
    GOOD,
    STEADY,
    STORES,
    golden,
    message,
    small_store,
)
from tests.disk import failing

pytestmark = pytest.mark.shows("engine 8.1", "engine 8.5", "engine 8.9", "engine 8.10")


@pytest.mark.shows("engine 6.14")
@STEADY
@given(STORES, st.booleans())
def test_a_store_comes_back_equal(store: model.StoreFile, compress: bool) -> None:
    """From its file, from lines of JSON, and, sealed, with its key."""
    data = store_file.encode(store, compress)
    assert store_file.decode(data) == store
    assert store_file.encode(store, compress) == data
    assert jsonl.from_lines(jsonl.to_lines(store)) == store
    plain, key = msgspec.structs.replace(store, encrypted=False), bytes(range(32))
    sealed = store_file.encrypt(plain, key)
    assert sealed.encrypted
    assert store_file.decrypt(store_file.decode(store_file.encode(sealed)), key, "it") == plain
    assert store_file.encode(store_file.encrypt(plain, key)) == store_file.encode(sealed)


def test_long_texts_are_read_as_short_ones() -> None:
    long = "é" * 3000
    whole = message(correlation_id=long, metadata={long: long, "k" * 256: 1, "short": long})
    store = model.StoreFile(0, 0, messages=(whole, message(2)))
    assert store_file.decode(store_file.encode(store)) == store


@pytest.mark.shows("engine 8.4")
def test_records_are_put_in_order() -> None:
    one, two, three = message(7, created_at=1), message(2, created_at=2), message(3, created_at=2)
    store = model.StoreFile(0, 0, messages=(three, one, two), archive=(two, one))
    assert store_file.decode(store_file.encode(store)).messages == (one, two, three)
    assert store_file.decode(store_file.encode(store)).archive == (one, two)
    metadata = message(metadata={"z": 1, "a": 2, "é": 3})
    assert encode_message(metadata) == encode_message(message(metadata={"é": 3, "a": 2, "z": 1}))


def test_a_float_that_is_no_number_survives() -> None:
    store = model.StoreFile(0, 0, messages=(message(metadata={"x": math.nan}),))
    for back in (
        store_file.decode(store_file.encode(store)),
        jsonl.from_lines(jsonl.to_lines(store)),
    ):
        metadata = back.messages[0].metadata
        assert metadata is not None
        assert isinstance(metadata["x"], float)
        assert math.isnan(metadata["x"])


def test_an_encrypted_store_says_so_and_has_room_for_the_seal() -> None:
    sealed = message(content=bytes(1_048_576 + 28))
    store = model.StoreFile(0, 0, messages=(sealed,), encrypted=True)
    data = store_file.encode(store)
    assert store_file.decode(data) == store
    assert data[10] & 32
    with pytest.raises(ValidationFailed):
        store_file.encode(msgspec.structs.replace(store, encrypted=False))


def test_the_gzip_header_holds_no_clock_and_no_system() -> None:
    data = store_file.encode(small_store())
    at = data.index(b"\x1f\x8b\x08")
    assert data[at : at + 10] == b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


def test_the_smallest_records_are_as_small_as_the_readers_think() -> None:
    kind = model.ChannelType.GROUP
    channel = model.Channel(0, "", kind, "")
    member = msgspec.structs.replace(channel, participants=(model.Participant(""),))
    exact = model.MatchMode.EXACT
    assert (
        len(encode_message(model.Message(0, model.MessageType.TEXT, "", 0, b""))) == MESSAGE.least
    )
    assert len(CHANNEL.encode("", channel)) == CHANNEL.least
    assert len(CHANNEL.encode("", member)) == CHANNEL.least + PARTICIPANT.least
    assert (
        len(SUBSCRIPTION.encode("", model.Subscription(0, 0, "", "", exact))) == SUBSCRIPTION.least
    )


def test_what_a_record_cannot_hold_is_refused_by_name() -> None:
    for field, values in {
        "content": (bytes(1_048_577),),
        "sender": ("x" * 129, "\ud800"),
        "topic": ("é" * 129,),
        "correlation_id": ("\ud800",),
        "id": (2**64,),
        "channel_id": (-1,),
        "created_at": (-1,),
        "delivered_at": (2**64,),
        "acknowledged_at": (-1,),
        "ttl": (2**64,),
        "retry_count": (2**32,),
        "metadata": ({"k": 2**63}, {"k": "\ud800"}, {"\ud800": 1}),
    }.items():
        for value in values:
            bad = msgspec.structs.replace(message(), **{field: value})
            with pytest.raises(ValidationFailed, match=field):
                store_file.encode(model.StoreFile(0, 0, messages=(bad,)))
    (channel,) = small_store().channels
    for change in (
        {"name": "x" * 129},
        {"owner": "x" * 129},
        {"participants": (model.Participant("x" * 129),)},
        {"config": model.ChannelConfig(max_participants=2**32)},
        {"message_count": -1},
        {"tags": ("\ud800",)},
    ):
        wrong = msgspec.structs.replace(channel, **change)
        with pytest.raises(ValidationFailed):
            store_file.encode(model.StoreFile(0, 0, channels=(wrong,)))


def test_what_stands_at_a_limit_is_written() -> None:
    full = message(content=bytes(1_048_576), sender="x" * 128, topic="t" * 256)
    store = model.StoreFile(0, 0, messages=(full,))
    assert store_file.decode(store_file.encode(store)) == store
    with pytest.raises(ValidationFailed, match="modified_at"):
        store_file.encode(model.StoreFile(0, -1))


@pytest.mark.parametrize("limit", ["MAX_MESSAGES", "MAX_CHANNELS", "MAX_SUBSCRIPTIONS"])
def test_a_count_above_its_limit_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_store()
    monkeypatch.setattr(sections, limit, 0)
    with pytest.raises(StoreCapacity, match=f"{limit[4:].lower()}, a store file can hold 0"):
        store_file.encode(store)


def test_a_file_above_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_FILE_BYTES", 400)
    with pytest.raises(StoreCapacity, match="bytes, a store file can hold 400"):
        store_file.encode(small_store())
    # What is small when it is compressed, and too large for any reader to inflate.
    monkeypatch.setattr(sections, "MAX_FILE_BYTES", 5000)
    with pytest.raises(StoreCapacity):
        store_file.encode(model.StoreFile(0, 0, messages=(message(content=bytes(5000)),)))


@pytest.mark.shows("engine 8.7")
def test_a_write_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "relay.acomm"
    store_file.write(str(path), golden())
    assert store_file.read(str(path)) == golden()
    assert os.listdir(tmp_path) == ["relay.acomm"]

    with failing("rename"), pytest.raises(OSError, match="No space"):
        store_file.write(str(path), small_store())
    assert store_file.read(str(path)) == golden()
    store_file.write(str(path), small_store(), compress=False)
    assert store_file.read(str(path)) == small_store()
    assert os.listdir(tmp_path) == ["relay.acomm"]
    assert list(check(path.read_bytes(), str(path))) == []


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UnsafePath, match="not a regular file"):
            store_file.read(str(tmp_path / name))
    with pytest.raises(FileNotFoundError):
        store_file.read(str(tmp_path / "gone"))


EXPECTED = [json.loads(line) for line in (FIXTURES / "expected.jsonl").read_text().splitlines()]
REASONS: dict[str, str] = json.loads((FIXTURES / "bad" / "expected.json").read_text())

# What the one line about each bad file says: offset, expected, found.
FAULTS = {
    "agentic-comm-v3": (0, "magic ACOMM001", "magic ACOM of another format, AgenticComm's own"),
    "bit-flip-in-messages": (20804, "SHA-256 d8a7a2e1f39b", "3a0cb8a577b9604f"),
    "bomb-size-lies": (1480, "uncompressed_size 10 of section 2", "more bytes come out"),
    "empty-file": (0, "at least 136 bytes", "0 bytes"),
    "footer-magic": (20836, "footer magic ACEND001", "ACEND002"),
    "magic": (0, "magic ACOMM001", "ACOMM002"),
    "message-count-too-high": (1480, "count of section 2 of at most 602", "1152921504606846976"),
    "message-type-9": (1496, "message_type 0-7", "9"),
    "not-utf8-sender": (1501, "sender in UTF-8", "0xff"),
    "section-past-end": (136, "section 2 to end by 20804", "its end at 1099511629256"),
    "section-twice": (120, "section type 1 once", "it twice"),
    "sections-overlap": (152, "section 3 at 10345 or later", "1480: sections 2 and 3 overlap"),
    "total-size": (64, "total_size 20844", "20845"),
    "truncated": (20736, "footer magic ACEND001", "0x40f4322936caa4e0"),
}


@pytest.mark.shows("engine 8.3")
@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_holds_what_stands_beside_it(name: str) -> None:
    warnings: list[str] = []
    path = FIXTURES / f"{name}.acomm"
    store = store_file.read(str(path), warn=warnings.append)
    found = check(path.read_bytes(), name)
    assert [one for one in found if one.severity is Severity.ERROR] == []

    lines = [json.loads(line) for line in jsonl.to_lines(store)]
    assert lines == (EXPECTED[:1] if name == "empty" else EXPECTED)
    assert [list(line) for line in lines] == [list(line) for line in EXPECTED[: len(lines)]]
    assert len(warnings) == {"unknown-section": 2, "version-2": 1}.get(name, 0)


def test_the_plain_file_is_written_byte_for_byte() -> None:
    data = (FIXTURES / "plain.acomm").read_bytes()
    assert store_file.encode(store_file.decode(data), compress=False) == data


def test_every_bad_file_is_spoken_of() -> None:
    assert BAD == sorted(REASONS) == sorted(FAULTS)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_and_left_alone(name: str) -> None:
    path = FIXTURES / "bad" / f"{name}.acomm"
    before, status = path.read_bytes(), path.stat()
    offset, expected, found = FAULTS[name]

    with pytest.raises(FormatError) as caught:
        store_file.read(str(path))

    line = str(caught.value)
    assert line.startswith(f"{path} at {offset}: expected {expected}")
    assert f", found {found}" in line
    assert "\n" not in line
    assert caught.value.offset == offset
    assert isinstance(caught.value, IntegrityError) is (name == "bit-flip-in-messages")
    assert path.read_bytes() == before
    assert (path.stat().st_mtime_ns, path.stat().st_mode) == (status.st_mtime_ns, status.st_mode)


def test_a_peek_reads_the_header_alone() -> None:
    header = store_file.peek_header(str(FIXTURES / "version-2.acomm"))
    assert (header.version, header.section_count, header.flags) == (2, 6, 31)
    assert (header.channel_count, header.message_count) == (6, 126)
    assert (header.subscription_count, header.dead_letter_count) == (3, 6)
    assert (header.created_at, header.modified_at) == (1780000000, 1780000009)
    # A flipped bit in a section does not show, a file of another length does.
    assert store_file.peek_header(str(FIXTURES / "bad" / "bit-flip-in-messages.acomm"))
    for name in ("agentic-comm-v3", "empty-file", "magic", "total-size", "truncated"):
        with pytest.raises(FormatError):
            store_file.peek_header(str(FIXTURES / "bad" / f"{name}.acomm"))


def test_the_indexes_are_read_without_the_messages_and_verified() -> None:
    found, _ = store_file.read_indexes(str(FIXTURES / "compressed.acomm"))
    with pytest.raises(FormatError, match="SHA-256"):
        store_file.read_indexes(str(FIXTURES / "bad" / "bit-flip-in-messages.acomm"))
    store = store_file.read(str(FIXTURES / "compressed.acomm"))
    assert found[IndexType.SENDER]["alpha"] == tuple(
        sorted(message.id for message in store.messages if message.sender == "alpha")
    )
