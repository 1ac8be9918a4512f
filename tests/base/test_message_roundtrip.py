"""What is rendered parses back, golden files say what they must, and no bytes break parse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay.base.errors import MessageError
from relay.base.message import (
    ANSWERS,
    CONTROL_CHARACTER,
    EMPTY_BODY_CONTENT,
    RELAY_HEADERS,
    SENT_KINDS,
    Kind,
    MessageFile,
    parse,
    parse_delivered,
    render,
)

pytestmark = pytest.mark.shows("ready 6.4")

FIXTURES = Path(__file__).parent.parent / "fixtures" / "msg"
FILES = sorted(path.read_bytes() for path in FIXTURES.glob("*/*.msg"))
RULED = {"TO", "KIND", "ATTACHMENT", "THREAD", "RE", "PRIORITY", "TOPIC", "TTL"}
RULED |= {"CHECKSUM", "DELIVERY", "SIGNATURE", "AWAIT", *RELAY_HEADERS}

NAMES = st.from_regex(r"[A-Z][A-Z0-9_-]{0,20}", fullmatch=True)
VALUES = st.text(max_size=40).filter(lambda v: v == v.strip() and not CONTROL_CHARACTER.search(v))
ADDRESSES = st.sampled_from(["bob", "*", "#team/backend", "Lead", "__orchestrator__"])
BODIES = st.text(max_size=60).map(str.encode)


@st.composite
def messages(draw: st.DrawFn) -> MessageFile:
    """Any message that an agent may write."""
    kind = draw(st.sampled_from(SENT_KINDS))
    headers = draw(st.dictionaries(NAMES.filter(lambda n: n not in RULED), VALUES, max_size=6))
    optional = {
        "THREAD": st.from_regex(r"[A-Za-z0-9._:-]{1,40}", fullmatch=True),
        "RE": st.from_regex(r"[0-9]{10,20}-[0-9a-f]{0,32}", fullmatch=True),
        "PRIORITY": st.sampled_from("01234"),
        "TTL": st.integers(1, 10**18 - 1).map(str),
        "AWAIT": st.sampled_from(["30s", "1m", "60000"]),
    }
    headers |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind in ANSWERS and not headers.keys() & {"RE", "THREAD"}:
        headers["RE"] = "1706123456789012345-"
    body = draw(BODIES)
    if not body and (kind not in EMPTY_BODY_CONTENT or "NAME" not in headers):
        body = b"."
    attachments = draw(st.lists(st.just("sha256:" + "0" * 64), max_size=2).map(tuple))
    return MessageFile(draw(ADDRESSES), kind, headers, body, attachments)


@given(messages())
def test_what_is_rendered_parses_back_and_delivered_with_what_was_added(
    message: MessageFile,
) -> None:
    assert parse(render(message)) == message
    added = {"ID": "1706123456789012345-", "FROM": "alice", "ATTEMPT": "1", "RE": "1234567890-"}
    data = render(message, added.items())
    assert data.startswith(b"ID: 1706123456789012345-\nFROM: alice\nATTEMPT: 1\nRE: 1234567890-\n")
    delivered = parse_delivered(data)
    assert delivered == message._replace(headers=message.headers | added)


def test_the_delivered_file_byte_by_byte() -> None:
    message = MessageFile(
        "#ops", Kind.COMMAND, {"PRIORITY": "0", "X": "1"}, b"go\n", ("sha256:" + "0" * 64,)
    )
    assert render(message, [("FROM", "alice"), ("X", "2")]) == (
        b"FROM: alice\nX: 2\nTO: #ops\nKIND: command\nPRIORITY: 0\n"
        b"ATTACHMENT: sha256:" + b"0" * 64 + b"\n\ngo\n"
    )
    assert render(MessageFile("bob", Kind.MESSAGE, {}, b"hi")) == b"TO: bob\n\nhi"


# What some reader takes for the end of a line, what ends a header, what begins one of the relay's.
BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\n\n"]
PIECES = st.sampled_from([*BREAKS, *RELAY_HEADERS, "FROM: boss", ": ", "X", " ", "\t", "\ud800"])
ANY_TEXT = st.lists(PIECES, max_size=5).map("".join) | st.text(max_size=12)


@settings(max_examples=400)
@given(
    ADDRESSES | ANY_TEXT,
    st.dictionaries(NAMES | st.just("FROM") | ANY_TEXT, VALUES | ANY_TEXT, max_size=2),
    VALUES | ANY_TEXT,
    BODIES,
)
@example("bob", {"FROM: BOSS": "1"}, "", b"x")
@example("bob", {"from": "boss"}, "", b"x")
def test_no_value_can_stand_as_a_header_of_its_own(
    to: str, headers: dict[str, str], attachment: str, body: bytes
) -> None:
    message = MessageFile(to, Kind.MESSAGE, headers, body, (attachment,))
    try:
        data = render(message, [("FROM", "alice")])
    except MessageError:
        return
    head, _, rest = data.partition(b"\n\n")
    assert rest == body
    lines = head.decode().splitlines()  # as a careless reader would split them
    names = [line.partition(":")[0] for line in lines]
    expected = ["FROM", "TO", *(name for name in headers if name != "FROM"), "ATTACHMENT"]
    assert names == expected
    assert lines[0] == "FROM: alice"


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"X": "1\n2"}, "line break"),
        ({"X": "1\x002"}, "control character"),
        ({"x": "1"}, "'x' is not a header name in upper case"),
        ({"": "1"}, "'' is not a header name in upper case"),
        ({"X": "\udcff"}, "not valid UTF-8"),
    ],
)
def test_what_cannot_be_rendered_is_said(header: dict[str, str], says: str) -> None:
    with pytest.raises(MessageError, match=says):
        render(MessageFile("bob", Kind.MESSAGE, header, b"x"))


# -- fuzz ----------------------------------------------------------------------------------


def never_breaks(data: bytes) -> None:
    """parse and parse_delivered give a message or a MessageError of one line, nothing else."""
    for read in (parse, parse_delivered):
        try:
            message = read(data, file="f.msg")
        except MessageError as exc:
            assert "\n" not in str(exc) and len(str(exc)) < 8192
            continue
        assert data.endswith(message.body)
        assert isinstance(message.kind, Kind)
        if read is parse:
            assert not message.headers.keys() & set(RELAY_HEADERS)
            assert message.priority in range(5)
            assert message.content
            assert message.ttl_s is None or message.ttl_s > 0
            assert message.await_ms is None or message.await_ms > 0
            render(message)


@settings(max_examples=500)
@given(st.text("TOKINDREACXS:*# \t\r\n\0-0a1é", max_size=120))
def test_anything_like_a_header_breaks_nothing(text: str) -> None:
    never_breaks(text.encode())
    never_breaks(b"TO: bob\n" + text.encode())


@settings(max_examples=500)
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3), st.binary(max_size=4)), max_size=6),
)
def test_a_changed_file_breaks_nothing(data: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    for at, length, piece in changes:
        at %= len(data) + 1
        data = data[:at] + piece + data[at + length :]
    never_breaks(data)


OK = json.loads((FIXTURES / "ok" / "expected.json").read_text())


@pytest.mark.parametrize("name", OK)
def test_a_good_file_says_what_is_expected_and_so_it_does_written_again(name: str) -> None:
    message = parse((FIXTURES / "ok" / f"{name}.msg").read_bytes())
    assert {
        "to": message.to,
        "kind": str(message.kind),
        "headers": message.headers,
        "body": message.body.decode(),
    } == OK[name]
    assert message.attachments == ()
    assert parse(render(message)) == parse_delivered(render(message)) == message


def test_without_a_file_name_the_rule_alone_is_said() -> None:
    with pytest.raises(MessageError) as caught:
        parse(b"")
    assert str(caught.value) == "the file is empty"
