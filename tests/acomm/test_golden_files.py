"""Files made once and read forever: what they hold, and why the bad ones are refused."""

from __future__ import annotations

import json

import pytest

from relay.acomm import jsonl, store_file
from relay.acomm.check import check
from relay.base.errors import FormatError, IntegrityError
from relay.base.finding import Severity
from tests.acomm.support import BAD, FIXTURES, GOOD

pytestmark = pytest.mark.shows("engine 8.1", "engine 8.5", "engine 8.10")

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
    store = store_file.read(str(FIXTURES / f"{name}.acomm"), warn=warnings.append)

    lines = [json.loads(line) for line in jsonl.to_lines(store)]
    assert lines == (EXPECTED[:1] if name == "empty" else EXPECTED)
    assert [list(line) for line in lines] == [list(line) for line in EXPECTED[: len(lines)]]
    assert len(warnings) == {"unknown-section": 2, "version-2": 1}.get(name, 0)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("compress", [False, True])
def test_what_was_decoded_encodes_to_equal_values(name: str, compress: bool) -> None:
    store = store_file.read(str(FIXTURES / f"{name}.acomm"), warn=lambda _: None)
    data = store_file.encode(store, compress)

    assert store_file.decode(data) == store
    assert store_file.encode(store, compress) == data
    assert list(check(data, "it")) == []


def test_the_plain_file_is_written_byte_for_byte() -> None:
    data = (FIXTURES / "plain.acomm").read_bytes()
    assert store_file.encode(store_file.decode(data), compress=False) == data


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_wrong_with_a_good_file(name: str) -> None:
    data = (FIXTURES / f"{name}.acomm").read_bytes()
    assert [one for one in check(data, name) if one.severity is Severity.ERROR] == []


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
    assert found.sender is not None
    assert found.sender["alpha"] == tuple(
        sorted(message.id for message in store.messages if message.sender == "alpha")
    )
