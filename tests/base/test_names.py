"""Names and ids: who may be called what, and ids that come out the same every time."""

from __future__ import annotations

import os
import re
import uuid
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relay.base.errors import EXIT_USAGE, InvalidName
from relay.base.names import (
    ATTACHMENT_NAMES,
    MESSAGE_ID,
    RESERVED_NAMES,
    attachments_of,
    check_agent_name,
    derived_id,
    direct_channel_name,
    file_name_of,
    is_agent_name,
    is_channel_name,
    message_id_of,
    new_message_id,
    sha256_hex,
    shown,
    uuid4_of,
)

AGENTS = st.from_regex(r"[a-zA-Z][a-zA-Z0-9_-]{0,62}", fullmatch=True)


@pytest.mark.parametrize("name", ["a", "Z", "bob", "Bob-9_x", "a" * 63, "lead", "operator"])
def test_a_name_that_an_agent_may_have(name: str) -> None:
    assert is_agent_name(name)
    assert check_agent_name(name) == name


@pytest.mark.shows("ready 4.2")
def test_a_name_outside_the_rule() -> None:
    for name in (
        *("", "9a", "_a", "-a", "a" * 64, "a b", "a/b", "..", ".a", "a.b", "é", "ａ", "bob\n", "*"),
    ):
        assert not is_agent_name(name)
        with pytest.raises(InvalidName, match="is not a valid name") as caught:
            check_agent_name(name)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.shows("ready 4.2")
def test_a_reserved_name_in_any_case_and_what_looks_like_the_operator() -> None:
    reserved = ("__orchestrator__", "system", "root", "admin", "dm", "all")
    like = ("Operator", "OPERATOR", "operator_", "Operator--", "operator-_")
    assert set(reserved) <= RESERVED_NAMES
    for name in (*reserved, *map(str.upper, reserved), *map(str.title, reserved), *like):
        assert not is_agent_name(name)
        with pytest.raises(InvalidName, match="is reserved"):
            check_agent_name(name)


@pytest.mark.parametrize("name", [None, 5, b"bob"])
def test_what_is_no_text_is_no_name(name: Any) -> None:
    with pytest.raises(InvalidName, match="expected an agent name as text"):
        check_agent_name(name)


def test_names_of_channels() -> None:
    assert all(map(is_channel_name, ("ops", "9", "team/backend/alerts", "a-b_c/D", "c" * 128)))
    for name in ("c" * 129, "", "/a", "a/", "a//b", "a.b", "../a", "é", "a\n"):
        assert not is_channel_name(name)


def test_the_message_id_is_the_stem_of_the_file_name() -> None:
    for stem in ("1706123456789012345-a1b2c3d4", "1234567890-", "1" * 20 + "-" + "f" * 32):
        assert message_id_of(f"{stem}.msg") == stem
        assert message_id_of(stem) is None
    for stem in (
        *("", "123456789-a", "1" * 21 + "-a", "1234567890-" + "f" * 33, "1234567890-A1"),
        *("1234567890-g", "1234567890", "1234567890-a1.msg", "../1234567890-a1"),
        "١٢٣٤٥٦٧٨٩٠-a1",
    ):
        assert message_id_of(f"{stem}.msg") is None
    assert message_id_of("1234567890-a1.msg\n") is message_id_of("") is None


def test_a_new_id_has_the_time_and_64_random_bits() -> None:
    at = 1706123456789012345
    ids = {new_message_id(at) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(rf"{at}-[0-9a-f]{{16}}", one) for one in ids)
    assert all(message_id_of(one + ".msg") == one for one in ids)


def test_a_derived_id_is_the_same_today_and_in_ten_years_and_keeps_its_parts_apart() -> None:
    at = 1706123456789012345
    assert derived_id(at, "answer", "alice", f"{at}-a1b2c3d4", "nack") == (
        "1706123456789012345-9cc1eff5b6d8510371ec1d0d36c6f4b0"
    )
    assert derived_id(10**18, "ab", "c") != derived_id(10**18, "a", "bc")
    assert derived_id(10**18, "a", 1) == derived_id(10**18, "a", "1")


@given(st.integers(-5, 10**20 - 1), st.lists(st.text(), max_size=4))
@example(999_999_999, [])
def test_a_derived_id_is_a_message_id(at_ns: int, parts: list[str]) -> None:
    one = derived_id(at_ns, *parts)
    assert MESSAGE_ID.fullmatch(one)
    assert at_ns >= 10**9 or one.startswith("1000000000-")  # of no sensible time
    assert derived_id(at_ns, *parts) == one
    assert derived_id(at_ns, *parts, "more") != one


def test_a_file_name_that_is_no_text_can_be_shown_and_be_a_part() -> None:
    name = os.fsdecode(b"caf\xc3\xa9-\xff.msg")
    assert shown(name) == "café-\\xff.msg"
    assert shown("1234567890-.msg") == "1234567890-.msg"
    assert shown("a b\x1b[31m\n\u2028.msg") == "a b\\x1b[31m\\n\\u2028.msg"
    assert MESSAGE_ID.fullmatch(derived_id(10**18, name))


@given(AGENTS, AGENTS)
def test_the_channel_of_two_is_one_whoever_asks(a: str, b: str) -> None:
    assert direct_channel_name("bob", "alice") == "dm/alice/bob"
    assert direct_channel_name("bob", "Zoe") == "dm/Zoe/bob"
    assert direct_channel_name(a, b) == direct_channel_name(b, a)
    assert is_channel_name(direct_channel_name(a, b))


def test_above_128_bytes_it_is_a_hash() -> None:
    a, b = "a" * 63, "b" * 61
    assert direct_channel_name(a, b) == f"dm/{a}/{b}"
    assert len(direct_channel_name(a, b)) == 128
    long = direct_channel_name(a, "b" * 62)
    assert re.fullmatch(r"dm/[0-9a-f]{32}", long)
    assert direct_channel_name(a, "b" * 63) != long


# -- checksums -----------------------------------------------------------------------------


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


HASH = "sha256:" + "6ca9" * 16


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("plan.txt/spec.bin", ["plan.txt", "spec.bin"]),
        (" Übersicht.pdf / ✂️.txt", ["Übersicht.pdf", "✂️.txt"]),
        ("a.tar.gz/a.tar.gz", ["a.tar.gz", "a.tar (2).gz"]),
        ("log.txt/log.txt", ["log.txt", "log (2).txt"]),
        (".env/.env", [".env", ".env (2)"]),
        ("plan.txt", ["6ca96ca9", "6ca96ca9 (2)"]),  # two names were expected
        ("../../etc/passwd", ["6ca96ca9", "6ca96ca9 (2)"]),
        ("../x", ["6ca96ca9", "x"]),
        ("./", ["6ca96ca9", "6ca96ca9 (2)"]),
        ("a\u202etxt.exe/a\u200bb", ["6ca96ca9", "6ca96ca9 (2)"]),  # cannot be seen
        ("a\x1b[2J/b", ["6ca96ca9", "b"]),
        (f"{'é' * 128}/{'é' * 127}", ["6ca96ca9", "é" * 127]),  # 256 bytes, 254 bytes
    ],
)
def test_the_names_of_attachments(header: str, names: list[str]) -> None:
    found = attachments_of({ATTACHMENT_NAMES: header}, [HASH, HASH])
    assert [one.name for one in found] == names
    assert found == (HASH, HASH)


def test_attachments_without_names_and_a_reference_that_is_none() -> None:
    assert attachments_of({}, []) == ()
    assert attachments_of({ATTACHMENT_NAMES: "a"}, []) == ()
    (one,) = attachments_of({}, [HASH])
    assert (one.name, one.path) == ("6ca96ca9", f"attachments/6c/{HASH[7:]}")
    (other,) = attachments_of({}, ["../../../etc"])  # in a file that no relay has checked
    assert (other.name, other.path) == ("file", "")


@given(st.lists(st.sampled_from(["a.b", "a (2).b", "", "x" * 255, "y." + "z" * 253, "é" * 127])))
def test_names_of_attachments_are_unique_and_fit_into_a_folder(given: list[str]) -> None:
    found = attachments_of({ATTACHMENT_NAMES: "/".join(given)}, [HASH] * len(given))
    names = [one.name for one in found]
    assert len(set(names)) == len(given)
    assert all(0 < len(name.encode()) <= 255 for name in names)


def test_the_name_that_a_file_is_sent_under() -> None:
    assert file_name_of("/tmp/plan.txt") == "plan.txt"
    assert file_name_of("/tmp/ a b ") == "a b"
    assert file_name_of(os.fsdecode(b"/tmp/\xff")) == "\\xff"
    assert file_name_of("/tmp/a\nTO: carol") == "a\\nTO: carol"
    assert file_name_of("/tmp/" + "\n" * 200) == ""  # 400 bytes when escaped
