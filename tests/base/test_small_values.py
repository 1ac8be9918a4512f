"""Time and errors: the small words that everything else is written in."""

from __future__ import annotations

import inspect
import time

import pytest

from relay.base import errors
from relay.base.clock import NS_PER_S, Clock, iso_date, iso_time
from relay.base.errors import EXIT_CODES, FormatError, MessageError, RelayError, ValidationFailed

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, RelayError) and cls.__module__ == errors.__name__
]

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


def test_a_message_error_says_where() -> None:
    said = {
        "given twice": MessageError("given twice"),
        "a.msg: given twice": MessageError("given twice", file="a.msg"),
        "line 3, header X: given twice": MessageError("given twice", line=3, header="X"),
    }
    assert all(str(error) == text and error.rule == "given twice" for text, error in said.items())
    error = MessageError("given twice", file="a.msg", line=3, header="X")
    assert str(error) == "a.msg, line 3, header X: given twice"


def test_the_facts_are_attributes() -> None:
    fault = FormatError("s.acomm", 4096, "crc 3c4d", "1a2b")
    assert str(fault) == "s.acomm at 4096: expected crc 3c4d, found 1a2b"
    assert (fault.path, fault.offset, fault.expected, fault.found) == (
        *("s.acomm", 4096, "crc 3c4d", "1a2b"),
    )
    refused = ValidationFailed("content", "the message is empty", 0)
    assert str(refused) == "content: the message is empty"
    assert (refused.field, refused.value_length) == ("content", 0)
