"""Checksums, time and errors: the small words that everything else is written in."""

from __future__ import annotations

import inspect
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.base import errors
from relay.base.checksums import sha256_hex, uuid4_of
from relay.base.clock import NS_PER_S, Clock, iso_date, iso_time
from relay.base.errors import EXIT_CODES, FormatError, MessageError, RelayError, ValidationFailed

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, RelayError) and cls.__module__ == errors.__name__
]

# -- checksums -----------------------------------------------------------------------------


def test_a_checksum_is_what_sha256sum_prints() -> None:
    assert sha256_hex(b"hi\n") == (
        "98ea6e4f216f2fb4b69fff9b3a44842c38686ca685f3f55dc48c5d3fb1107be4"
    )


def test_a_text_has_always_the_same_uuid() -> None:
    # SHA-256 of "t-1" is f23ef2f9 4b41 c0e0 ...; version and variant are set over it
    raw = bytes.fromhex(sha256_hex(b"t-1"))[:16]
    made = uuid.UUID(uuid4_of("t-1"))
    assert (made.version, made.variant) == (4, uuid.RFC_4122)
    assert made.bytes[:6] == raw[:6]
    assert made.bytes[7] == raw[7] and made.bytes[9:] == raw[9:]
    assert made.bytes[6] & 0x0F == raw[6] & 0x0F and made.bytes[8] & 0x3F == raw[8] & 0x3F


@given(st.text(max_size=60))
def test_every_text_has_a_uuid_4(text: str) -> None:
    made = uuid4_of(text)
    assert uuid.UUID(made).version == 4
    assert str(uuid.UUID(made)) == made
    assert uuid4_of(made) == made


@given(st.uuids(version=4))
def test_a_uuid_4_stays_as_it_is(given: uuid.UUID) -> None:
    assert uuid4_of(str(given)) == str(given)
    assert uuid4_of(str(given).upper()) == str(given)


@pytest.mark.parametrize(
    "text",
    [
        "6ba7b810-9dad-11d1-80b4-00c04fd430c8",  # version 1
        "f81d4fae-7dec-4cd0-c765-00a0c91e6bf6",  # another variant
        "f81d4fae7dec4cd0a76500a0c91e6bf6",
        "f81d4fae-7dec-4cd0-a765-00a0c91e6bfg",
        "f81d4fae7-dec-4cd0-a765-00a0c91e6bf6",
    ],
)
def test_what_only_looks_like_one_is_a_text(text: str) -> None:
    assert uuid4_of(text) != text
    assert uuid.UUID(uuid4_of(text)).version == 4


# -- clock ---------------------------------------------------------------------------------


def test_time_is_utc_with_microseconds() -> None:
    assert iso_time(0) == "1970-01-01T00:00:00.000000Z"
    assert iso_time(1_769_851_800_000_001_999) == "2026-01-31T09:30:00.000001Z"
    assert iso_date(1_769_851_800_000_001_999) == "2026-01-31"
    assert iso_date(86_400 * NS_PER_S - 1) == "1970-01-01"
    assert iso_date(86_400 * NS_PER_S) == "1970-01-02"


def test_the_machines_clock() -> None:
    clock = Clock()
    assert abs(clock.now_ns() - time.time_ns()) < 5 * NS_PER_S
    assert clock.monotonic_ns() <= clock.monotonic_ns() <= time.monotonic_ns()


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_says_what_it_is_and_how_to_exit(cls: type[RelayError]) -> None:
    assert cls.__doc__ and cls.__doc__.endswith(".")
    assert cls.exit_code in EXIT_CODES and cls.exit_code != errors.EXIT_OK
    assert cls.hint == " ".join(cls.hint.split())


def test_every_exit_code_is_explained() -> None:
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert {code for code in codes if isinstance(code, int)} == EXIT_CODES.keys()


def test_an_error_is_one_line_whatever_it_is_given() -> None:
    error = RelayError("a\nb\r\n  c\t", hint="do this")
    assert str(error) == "a b c"
    assert error.hint == "do this"
    assert RelayError.hint == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MessageError("given twice"), "given twice"),
        (MessageError("given twice", file="a.msg"), "a.msg: given twice"),
        (MessageError("given twice", line=3, header="X"), "line 3, header X: given twice"),
        (
            MessageError("given twice", file="a.msg", line=3, header="X"),
            "a.msg, line 3, header X: given twice",
        ),
    ],
)
def test_a_message_error_says_where(error: MessageError, text: str) -> None:
    assert str(error) == text
    assert error.rule == "given twice"


def test_the_facts_are_attributes() -> None:
    fault = FormatError("s.acomm", 4096, "crc 3c4d", "1a2b")
    assert str(fault) == "s.acomm at 4096: expected crc 3c4d, found 1a2b"
    assert (fault.path, fault.offset, fault.expected, fault.found) == (
        "s.acomm",
        4096,
        "crc 3c4d",
        "1a2b",
    )
    refused = ValidationFailed("content", "the message is empty", 0)
    assert str(refused) == "content: the message is empty"
    assert (refused.field, refused.reason, refused.value_length) == (
        "content",
        "the message is empty",
        0,
    )
