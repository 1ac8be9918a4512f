"""The values of ENV leave no trace in what is recorded of a spawn, however it is written."""

from __future__ import annotations

import pytest

from relay.base.message import MAX_HEADER_BYTES, control_fields, parse
from relay.base.redaction import mask, parse_env, redact

HEAD = "KIND: spawn\nNAME: w\nCLI: sh\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"{HEAD}ENV: A=hunter2\n\ngo", "ENV: A=***"),
        (f"{HEAD}env : A=hunter2, B=hunter2\n\ngo", "env : A=***,B=***"),
        (f"{HEAD}ENV: A=hunter2,hunter2,B=x=hunter2\r\n\r\ngo", "ENV: A=***,B=***"),
        ("KIND: spawn\n\nNAME: w\nENV: A=hunter2,B=1234\nCLI: sh", "ENV: A=***,B=***\nCLI: sh"),
        ("KIND: spawn\n\nNAME: w\nENV: A=hunter2\nB=hunter2\n\nhunter2\nCLI: sh", "ENV: A=***,"),
        ("kind:SPAWN\n\nNAME: w\nENV:hunter2", "ENV:***"),
        (f"{HEAD}ENV: EMPTY=,A=hunter2\n\ngo", "ENV: EMPTY=,A=***"),
    ],
)
def test_the_values_of_env_are_masked(text: str, kept: str) -> None:
    found = redact(text.encode())
    assert found is not None
    assert b"hunter2" not in found.data
    assert kept in found.data.decode()
    assert redact(found.data) is None  # nothing is left to be done


def test_everything_else_stays_byte_for_byte() -> None:
    text = f"{HEAD}ENV: A=hunter2\r\nTHREAD: t\n\nDo this:\nENVIRONMENT: x\n ENVoy\n\xe9".encode()
    found = redact(text)
    assert found is not None
    assert found.data == text.replace(b"hunter2", b"***").replace(b"***\r", b"***")


def test_what_is_said_of_the_text_as_it_was_goes() -> None:
    text = f"{HEAD}CHECKSUM: sha256:{'0' * 64}\nsignature: x\nENV: A=hunter2\n\ngo"
    found = redact(text.encode())
    assert found is not None and found.data.decode() == f"{HEAD}ENV: A=***\n\ngo"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}\ngo",
        f"{HEAD}ENV:\n\ngo",
        "KIND: message\nTO: bob\nENV: A=hunter2\n\ngo",
        "TO: bob\n\nENV: A=hunter2",
    ],
)
def test_what_has_no_secret_is_left_as_it_is(text: str) -> None:
    assert redact(text.encode()) is None


def test_the_message_without_them_is_a_message_like_before() -> None:
    many = ",".join(f"K{n}={n % 10}" for n in range(600))[: MAX_HEADER_BYTES // 2]
    text = f"{HEAD}ENV: {many}\nWORKING_DIR: /tmp\n\ngo"
    found = redact(text.encode())
    assert found is not None and len(found.data) <= len(text)
    fields = control_fields(parse(found.data))
    assert fields == control_fields(parse(text.encode())) | {"ENV": fields["ENV"]}


@pytest.mark.parametrize(
    "line", ["ENV A=hunter2", "ENV=A=hunter2", "  env:A=hunter2", "ENV hunter2"]
)
def test_a_file_that_is_no_message_is_masked_more_freely(line: str) -> None:
    found = redact(f"{HEAD}{line}\n\ngo".encode(), loose=True)
    assert found is not None and b"hunter2" not in found.data
    assert found.secrets
    assert "hunter2" not in found.clean(f"{line!r} is not a header line")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", []),
        ("A=1", [("A", "1")]),
        ("A=1,B=2", [("A", "1"), ("B", "2")]),
        ("A=1, B=2\nC=3", [("A", "1"), ("B", "2"), ("C", "3")]),
        ("A=x,y,B_2=a=b", [("A", "x,y"), ("B_2", "a=b")]),
        ("A", [("", "A")]),
        ("1A=x", [("", "1A=x")]),
        ("A=", [("A", "")]),
    ],
)
def test_a_comma_parts_two_settings_where_a_name_follows(
    text: str, settings: list[tuple[str, str]]
) -> None:
    assert parse_env(text) == settings


def test_a_secret_within_another_is_masked_with_it() -> None:
    assert mask("key abcdef and abcd, abc", ("abcd", "abcdef", "abc")) == "key *** and ***, abc"
