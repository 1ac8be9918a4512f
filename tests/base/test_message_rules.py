"""Every rule of a `.msg` file that an agent writes, and the fields of control messages."""

from __future__ import annotations

import base64
import hashlib

import pytest

from relay.base.errors import MessageError
from relay.base.message import (
    CONTROL_FIELDS,
    DELIVERY_MODES,
    MAX_HEADER_BYTES,
    MAX_HEADER_LINES,
    MAX_VALUE_BYTES,
    RELAY_HEADERS,
    SENT_KINDS,
    Kind,
    MessageFile,
    command_fields,
    control_fields,
    parse,
    parse_delivered,
)
from tests.costs import cpu_s

pytestmark = pytest.mark.shows("ready 1.5")

ID = "1706123456789012345-a1b2c3d4"
SHA = "sha256:" + "ab" * 32
SIGNATURE = "ed25519:" + base64.b64encode(bytes(64)).decode()
TO = b"TO: bob\n"


def refused(data: bytes, **options: int) -> MessageError:
    with pytest.raises(MessageError) as caught:
        parse(data, file="f.msg", **options)
    text = str(caught.value)
    assert text.startswith("f.msg") and "\n" not in text
    return caught.value


# -- the shape -----------------------------------------------------------------------------

SHAPES = [  # what follows TO: bob, and the body that it has
    (b"\r\n\r\nhi", b"hi"),
    (b"\r\n\nhi", b"hi"),
    (b"\n\r\nhi", b"hi"),
    (b"\n\nhi\n\r\nho", b"hi\n\r\nho"),
    (b"\n\r\n\nhi", b"\nhi"),
    (b"\r\nX: 1\n\r\nhi\n\nho", b"hi\n\nho"),
    (b"\n\n\n\r\n TO: eve\n\n\ttwo\n\n", b"\n\r\n TO: eve\n\n\ttwo\n\n"),
    (b"\n\n\0\x1b[0m\xe2\x80\xa8", b"\0\x1b[0m\xe2\x80\xa8"),  # anything but what is not UTF-8
    (b"\nKIND: leave", b""),
    (b"\nKIND: leave\n", b""),
    (b"\nKIND: leave\n\n", b""),
]


@pytest.mark.parametrize(("data", "body"), SHAPES)
def test_the_body_is_every_byte_behind_the_first_blank_line(data: bytes, body: bytes) -> None:
    message = parse(b"TO: bob" + data)
    assert (message.to, message.body) == ("bob", body)


def test_names_are_of_any_case_values_are_trimmed_and_unknown_ones_kept_in_order() -> None:
    message = parse(b"x-Ticket:  a:\tb \t\r\ntO:\tbob\nKind: QUERY\nEMPTY:\nALPHA: 1\n\nhi")
    headers = {"X-TICKET": "a:\tb", "EMPTY": "", "ALPHA": "1"}
    assert message == MessageFile("bob", Kind.QUERY, headers, b"hi")
    assert list(message.headers) == list(headers)


NO_MESSAGES = [  # line, header, data, and what is said of it
    (1, "", b"\xef\xbb\xbfTO: bob\n\nhi", "a byte order mark before the first header"),
    (2, "", TO + b"nonsense\n\nhi", "not a header line"),
    (2, "", TO + b" \n\nhi", "not a header line"),
    (2, "", TO + b": value\n\nhi", "is not a valid header name"),
    (2, "", TO + b"1X: v\n\nhi", "is not a valid header name"),
    (2, "", TO + b"\xc3\xa9: v\n\nhi", "is not a valid header name"),
    (3, "", TO + b"A: 1\nX: \xff\n\nhi", "the header is not UTF-8"),
    (0, "", TO + b"\nabc\xff", "byte 3"),
    (0, "", b"KIND: command\n\nhi", "TO is missing"),
    (0, "", TO + b"KIND: command\n\n", "body is empty"),
    (0, "", b"KIND: spawn\nCLI: claude\n", "NAME"),
    (0, "RE", TO + b"KIND: ack\n\nhi", ""),
    *((2, "X", f"TO: bob\nX: a{c}b\n\nhi".encode(), "control character")
      for c in "\0\x01\x0b\x1b\r\x7f\x85\u2028"),
    *((3, name.upper(), f"{name}: a\nOTHER: b\n{name.upper()}: a\n\nhi".encode(), "given twice")
      for name in ("TO", "to", "KIND", "X", "FROM", "Checksum")),
    *((2, "KIND", f"TO: bob\nKIND: {word}\n\nhi".encode(), ", ".join(SENT_KINDS))
      for word in ("shout", "", "message x", "ack,nack", "reminder")),
]  # fmt: skip


@pytest.mark.parametrize(("line", "header", "data", "says"), NO_MESSAGES)
def test_what_is_no_message_is_named_by_its_line(
    line: int, header: str, data: bytes, says: str
) -> None:
    """Which kind needs what is a table of docs/formats/msg.md, and compared with that."""
    error = refused(data)
    assert (error.line, error.header) == (line, header)
    assert says in error.rule


# -- limits --------------------------------------------------------------------------------


def test_48_header_lines_and_no_more() -> None:
    lines = [b"TO: bob", *(b"X-%d: v" % number for number in range(MAX_HEADER_LINES - 1))]
    assert len(parse(b"\n".join(lines) + b"\n\nhi").headers) == 47
    more = b"\n".join([*lines, b"ONE: more"]) + b"\n\nhi"
    assert refused(more).line == 49 and "49 header lines, at most 48" in refused(more).rule
    assert len(parse_delivered(more).headers) == 48  # the relay adds some


def test_6_kib_of_header_and_no_more() -> None:
    lines = b"".join([TO, b"X: %s\n" % (b"x" * 4000), b"Y: "])
    head = lines + b"y" * (MAX_HEADER_BYTES - len(lines))
    assert len(head) == 6144
    assert parse(head + b"\n\nhi").body == b"hi"
    assert "6145 bytes, at most 6144" in refused(head + b"y\n\nhi").rule
    delivered = head + b"\nZ: " + b"z" * 4000 + b"\nA: "
    delivered += b"a" * (2 * MAX_HEADER_BYTES - len(delivered))
    assert parse_delivered(delivered + b"\n\nhi").body == b"hi"
    with pytest.raises(MessageError, match="12289 bytes, at most 12288"):
        parse_delivered(delivered + b"a\n\nhi", file="f.msg")


def test_4096_bytes_a_value_64_a_name_and_no_more() -> None:
    value = "é" * (MAX_VALUE_BYTES // 2)
    assert parse(f"TO: bob\nX: {value}\n\nhi".encode()).headers["X"] == value
    error = refused(f"TO: bob\nX: {value}x\n\nhi".encode())
    assert (error.line, error.header) == (2, "X")
    assert "4097 bytes, at most 4096" in error.rule
    assert "A" * 64 in parse(TO + b"A" * 64 + b": v\n\nhi").headers
    assert refused(TO + b"A" * 65 + b": v\n\nhi").line == 2


@pytest.mark.shows("ready 2.3", "ready 4.6")
def test_the_body_has_the_limit_it_is_given_and_else_a_mebibyte() -> None:
    assert parse(TO + b"\n" + b"x" * 10, max_body_bytes=10).body == b"x" * 10
    assert "11 bytes, at most 10" in refused(TO + b"\n" + b"x" * 11, max_body_bytes=10).rule
    assert len(parse(TO + b"\n" + b"x" * 1_048_576).body) == 1_048_576
    assert "attachment" in refused(TO + b"\n" + b"x" * 1_048_577).rule


# -- dropped, kept, as content ---------------------------------------------------------------


def test_attachments_may_be_many() -> None:
    other = "sha256:" + "cd" * 32
    message = parse(f"TO: bob\nATTACHMENT: {SHA}\nattachment: {other}\n\nhi".encode())
    assert message.attachments == (SHA, other)
    assert message.headers == {}


def test_what_the_relay_alone_writes_is_dropped_from_a_sender() -> None:
    assert {"FROM", "ID", "SENT", "ATTEMPT", "CHANNEL"} <= set(RELAY_HEADERS)
    for name in RELAY_HEADERS:
        data = f"{name.lower()}: __orchestrator__\nTO: bob\n\nhi".encode()
        assert parse(data).headers == {}
        assert parse_delivered(data).headers == {name: "__orchestrator__"}


def test_an_empty_answer_says_received() -> None:
    empty = parse(f"TO: bob\nKIND: ack\nRE: {ID}\n".encode())
    assert (empty.body, empty.content) == (b"", b"received")
    assert empty._replace(body=b"more").content == b"more"
    assert parse(b"TO: bob\nKIND: ack\nTHREAD: t\n\nhi").headers == {"THREAD": "t"}


@pytest.mark.parametrize("kind", list(SENT_KINDS))
def test_every_kind_is_taken_in_any_case(kind: Kind) -> None:
    for word in (kind.value, kind.value.upper(), kind.value.title()):
        assert parse(f"TO: bob\nKIND: {word}\nRE: {ID}\n\nhi".encode()).kind is kind
    assert parse(b"TO: bob\n\nhi").kind is Kind.MESSAGE


# -- the other headers ---------------------------------------------------------------------

GOOD = {
    "TO": [
        *("bob", "B-o_b9", "a" * 63, "*", "#ops", "#team/backend", "Lead", "LEAD"),
        *("__orchestrator__", "#" + "c" * 128),
    ],
    "THREAD": ["t", "a.b:c_d-9", "x" * 128],
    "RE": [ID, "1234567890-", "1" * 20 + "-" + "f" * 32],
    "PRIORITY": ["0", "1", "2", "3", "4"],
    "TOPIC": ["build", "build.front.ok", "a-b_c.*.#", "t" * 256],
    "TTL": ["1", "007", "9" * 18],
    "ATTACHMENT": [SHA],
    "DELIVERY": list(DELIVERY_MODES),
    "SIGNATURE": [SIGNATURE],
    "AWAIT": ["30s", "1m", "2h", "500ms", "60000", "1000000000s"],
}
BAD = {
    "TO": [
        *("", "9lives", "a" * 64, "**", "#", "#a//b", "#../x", "../bob", "bob/alice", "b b"),
        *("_bob", "#" + "c" * 129),
    ],
    "THREAD": ["", "a b", "é", "x" * 129, "a/b"],
    "RE": ["", "123456789-", "1" * 21 + "-", ID + ".msg", "1706123456789012345-A1", "../x"],
    "PRIORITY": ["", "5", "-1", "00", "high", "٣"],
    "TOPIC": ["", ".a", "a.", "*.a", "a b", "t" * 257, "é"],
    "TTL": ["", "0", "000", "-1", "1.5h30", "1w", "999ms", "٣", "9" * 19],
    "CHECKSUM": ["", "ab" * 32, SHA.upper(), SHA + "0", "sha256:" + "g" * 64],
    "ATTACHMENT": ["", "ab" * 32, SHA + "0", "sha256:" + "AB" * 32, "../../etc/passwd"],
    "DELIVERY": ["", "at least once", "AtLeastOnce", "exactly-twice"],
    "SIGNATURE": ["", "ed25519:", "ed25519:!", "rsa:" + SIGNATURE[8:], SIGNATURE[:-4], "ed25519:é"],
    "AWAIT": ["", "0", "0s", "-1s", "1w", "soon", "1  s", "9" * 13, "٣s", "277778h"],
    "OPTIONS": ["yes", "yes, Yes", "a,b,c,d,e,f,g,h,i,j"],
}


def with_header(name: str, value: str) -> bytes:
    to = "" if name == "TO" else "TO: bob\n"
    return f"{to}{name}: {value}\n\nhi".encode()


@pytest.mark.parametrize("name", GOOD)
def test_a_value_within_its_rule_is_taken(name: str) -> None:
    for value in GOOD[name]:
        message = parse(with_header(name, value))
        kept = message.to if name == "TO" else message.headers.get(name, *message.attachments)
        assert kept == value


@pytest.mark.parametrize("name", BAD)
def test_a_value_outside_its_rule_is_refused_by_name_and_line(name: str) -> None:
    for value in BAD[name]:
        error = refused(with_header(name, value))
        assert (error.line, error.header) == (1 if name == "TO" else 2, name), value
        assert len(str(error)) < 200


@pytest.mark.parametrize("body", ["héllo\r\n".encode(), b""])
def test_a_checksum_is_of_the_body_bytes(body: bytes) -> None:
    right = "sha256:" + hashlib.sha256(body).hexdigest()
    data = f"TO: bob\nKIND: leave\nCHECKSUM: {right}\n\n".encode() + body
    assert parse(data).headers["CHECKSUM"] == right
    error = refused(data + b"\n")
    assert (error.line, error.header) == (3, "CHECKSUM")
    assert right in error.rule


def test_a_bare_await_is_milliseconds_and_a_bare_ttl_seconds() -> None:
    bare = parse(b"TO: bob\n\nhi")
    assert (bare.priority, bare.ttl_s, bare.await_ms) == (2, None, None)
    assert parse(b"TO: bob\nPRIORITY: 0\n\nhi").priority == 0
    given = {"60000": 60_000, "500ms": 500, "30s": 30_000, "10min": 600_000, "1d": 86_400_000}
    found = {text: parse(f"TO: bob\nAWAIT: {text}\n\nhi".encode()).await_ms for text in given}
    assert found == given
    given = {"1": 1, "10m": 600, "1500ms": 1, "9" * 18: 10**18 - 1}
    assert {text: parse(f"TO: bob\nTTL: {text}\n\nhi".encode()).ttl_s for text in given} == given


# -- the fields of control messages ----------------------------------------------------------

PROMPT = "Do this:\n\n  1. build\nTODO: the rest\nName: is not a field\n\fend"
FIELDS: list[tuple[str, dict[str, str]]] = [
    (  # a header wins over the body
        "KIND: release\nNAME: one\n\nNAME: two\nREASON: done",
        {"NAME": "one", "REASON": "done"},
    ),
    (  # a prompt of many lines is kept with everything in it
        f"KIND: spawn\n\nNAME: w\nPROMPT: {PROMPT}\nCLI: claude\n",
        {"NAME": "w", "PROMPT": PROMPT, "CLI": "claude"},
    ),
    (
        "KIND: spawn\nNAME: w\n\nCLI: claude\nPROMPT: go\non\n",
        {"NAME": "w", "CLI": "claude", "PROMPT": "go\non"},
    ),
    (  # though FILTER is a field elsewhere
        "KIND: spawn\n\nNAME: w\nPROMPT: keep\nFILTER: every line\nof this",
        {"NAME": "w", "PROMPT": "keep\nFILTER: every line\nof this"},
    ),
    ("KIND: spawn\nNAME: w\n\ngo\non\n", {"NAME": "w", "PROMPT": "go\non"}),
    ("KIND: release\nNAME: w\n\nbye\n", {"NAME": "w"}),  # only a spawn has its body as the prompt
    (  # lines before the first field are nobody's
        "TO: __orchestrator__\nKIND: subscribe\n\nhello\nCHANNEL: team\r\nPATTERN: build.#\r\n",
        {"CHANNEL": "team", "PATTERN": "build.#"},
    ),
    ("TO: __orchestrator__\nKIND: join\nCHANNEL: team\n", {}),  # as a header it is the relay's
]


@pytest.mark.parametrize(("text", "found"), FIELDS)
def test_the_fields_of_a_control_message(text: str, found: dict[str, str]) -> None:
    assert control_fields(parse(text.encode())) == found


@pytest.mark.parametrize("name", CONTROL_FIELDS)
def test_a_field_in_either_form_says_the_same(name: str) -> None:
    for text in (f"\n{name}: a: b \n", f"{name}: a: b \n\n."):
        assert control_fields(parse(f"KIND: continuity\n{text}".encode()))[name] == "a: b"


def test_a_field_of_a_million_lines_costs_little_more_than_its_lines() -> None:
    message = parse(b"TO: __orchestrator__\nKIND: join\n\nCHANNEL: x\n" + b"\n" * 1_000_000)
    floor = cpu_s(lambda: [line.partition(":") for line in message.body.decode().split("\n")])
    assert cpu_s(lambda: control_fields(message)) < 20 * floor


def test_a_command_is_fields_whatever_their_names() -> None:
    body = "ACTION: channel.config\r\n\n channel : ci\nflush: a: b\n"
    assert command_fields(parse(f"TO: x\nKIND: command\nTHREAD: t\n\n{body}".encode())) == {
        "ACTION": "channel.config",
        "CHANNEL": "ci",
        "FLUSH": "a: b",
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ACTION: x\nhello", "the body, line 2: 'hello' is not a line `NAME: value`"),
        (": x", "the body, line 1: ': x' is not a line"),
        ("a b: x", "the body, line 1: 'a b: x' is not a line"),
        ("a: 1\n\nA: 2", "the body, line 3: A is given twice"),
    ],
)
def test_a_command_with_a_line_that_is_none(body: str, said: str) -> None:
    with pytest.raises(MessageError) as error:
        command_fields(parse(f"TO: x\nKIND: command\n\n{body}".encode()))
    assert str(error.value).startswith(said)
