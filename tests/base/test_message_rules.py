"""Every rule of a `.msg` file that an agent writes, and the fields of control messages."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

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


def test_the_body_is_every_byte_behind_the_first_blank_line() -> None:
    body = b"\n\r\n TO: eve\n\n\ttwo\n\n"
    assert parse(TO + b"\n" + body).body == body


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"TO: bob\r\n\r\nhi", b"hi"),
        (b"TO: bob\r\n\nhi", b"hi"),
        (b"TO: bob\n\r\nhi", b"hi"),
        (b"TO: bob\n\nhi\n\r\nho", b"hi\n\r\nho"),
        (b"TO: bob\n\r\n\nhi", b"\nhi"),
        (b"TO: bob\r\nX: 1\n\r\nhi\n\nho", b"hi\n\nho"),
    ],
)
def test_lines_end_in_lf_or_crlf_and_the_first_blank_one_counts(data: bytes, body: bytes) -> None:
    message = parse(data)
    assert (message.to, message.body) == ("bob", body)


def test_a_header_without_a_blank_line_has_an_empty_body() -> None:
    for data in (b"TO: bob\nKIND: leave", b"TO: bob\nKIND: leave\n", b"TO: bob\nKIND: leave\n\n"):
        assert parse(data) == MessageFile("bob", Kind.LEAVE, {}, b"")


def test_a_byte_order_mark_is_named() -> None:
    error = refused(b"\xef\xbb\xbfTO: bob\n\nhi")
    assert error.line == 1 and "a byte order mark before the first header" in str(error)


def test_names_are_of_any_case_values_are_trimmed_and_unknown_ones_kept_in_order() -> None:
    message = parse(b"x-Ticket:  a: b \t\r\ntO:\tbob\nKind: QUERY\nEMPTY:\nALPHA: 1\n\nhi")
    headers = {"X-TICKET": "a: b", "EMPTY": "", "ALPHA": "1"}
    assert message == MessageFile("bob", Kind.QUERY, headers, b"hi")
    assert list(message.headers) == list(headers)


@pytest.mark.parametrize("line", [b"nonsense", b" ", b": value", b"1X: v", b"\xc3\xa9: v"])
def test_a_line_that_is_no_header_is_named(line: bytes) -> None:
    error = refused(TO + line + b"\n\nhi")
    assert error.line == 2


def test_a_header_that_is_not_utf8_is_named_by_its_line() -> None:
    error = refused(TO + b"A: 1\nX: \xff\n\nhi")
    assert (error.line, error.rule) == (3, "the header is not UTF-8")


def test_a_body_that_is_not_utf8_says_at_which_byte() -> None:
    assert "byte 3" in refused(TO + b"\nabc\xff").rule


def test_a_header_name_of_64_characters_is_the_longest() -> None:
    assert "A" * 64 in parse(TO + b"A" * 64 + b": v\n\nhi").headers
    assert refused(TO + b"A" * 65 + b": v\n\nhi").line == 2


@pytest.mark.parametrize(
    "character", ["\0", "\x01", "\x0b", "\x1b", "\r", "\x7f", "\x85", "\u2028"]
)
def test_a_control_character_in_a_value_is_refused(character: str) -> None:
    error = refused(f"TO: bob\nX: a{character}FROM: eve\n\nhi".encode())
    assert (error.line, error.header) == (2, "X")
    assert "control character" in error.rule


def test_a_tab_in_a_value_and_anything_in_the_body_is_taken() -> None:
    message = parse("TO: bob\nX: a\tb\n\n\0\x1b[0m\u2028".encode())
    assert message.headers == {"X": "a\tb"}
    assert message.body == "\0\x1b[0m\u2028".encode()


# -- limits --------------------------------------------------------------------------------


def test_48_header_lines_and_no_more() -> None:
    lines = [b"TO: bob", *(b"X-%d: v" % number for number in range(MAX_HEADER_LINES - 1))]
    assert len(parse(b"\n".join(lines) + b"\n\nhi").headers) == 47
    error = refused(b"\n".join([*lines, b"ONE: more"]) + b"\n\nhi")
    assert error.line == 49
    assert "49 header lines, at most 48" in error.rule


def test_6_kib_of_header_and_no_more() -> None:
    lines = b"".join([TO, b"X: %s\n" % (b"x" * 4000), b"Y: "])
    head = lines + b"y" * (MAX_HEADER_BYTES - len(lines))
    assert len(head) == 6144
    assert parse(head + b"\n\nhi").body == b"hi"
    assert "6145 bytes, at most 6144" in refused(head + b"y\n\nhi").rule


def test_4096_bytes_a_value_and_no_more() -> None:
    value = "é" * (MAX_VALUE_BYTES // 2)
    assert parse(f"TO: bob\nX: {value}\n\nhi".encode()).headers["X"] == value
    error = refused(f"TO: bob\nX: {value}x\n\nhi".encode())
    assert (error.line, error.header) == (2, "X")
    assert "4097 bytes, at most 4096" in error.rule


@pytest.mark.shows("ready 2.3", "ready 4.6")
def test_the_body_has_the_limit_it_is_given_and_else_a_mebibyte() -> None:
    assert parse(TO + b"\n" + b"x" * 10, max_body_bytes=10).body == b"x" * 10
    assert "11 bytes, at most 10" in refused(TO + b"\n" + b"x" * 11, max_body_bytes=10).rule
    assert len(parse(TO + b"\n" + b"x" * 1_048_576).body) == 1_048_576
    assert "attachment" in refused(TO + b"\n" + b"x" * 1_048_577).rule


# -- given twice, dropped, kept ------------------------------------------------------------


@pytest.mark.parametrize("name", ["TO", "to", "KIND", "X", "FROM", "Checksum"])
def test_a_header_given_twice_is_refused(name: str) -> None:
    error = refused(f"{name}: a\nOTHER: b\n{name.upper()}: a\n\nhi".encode())
    assert (error.line, error.header, error.rule) == (3, name.upper(), "given twice")


def test_attachments_may_be_many() -> None:
    other = "sha256:" + "cd" * 32
    message = parse(f"TO: bob\nATTACHMENT: {SHA}\nattachment: {other}\n\nhi".encode())
    assert message.attachments == (SHA, other)
    assert message.headers == {}


@pytest.mark.parametrize("name", ["FROM", "ID", "SENT", "ATTEMPT", "CHANNEL"])
def test_what_the_relay_alone_writes_is_dropped_from_a_sender(name: str) -> None:
    assert name in RELAY_HEADERS
    data = f"{name.lower()}: __orchestrator__\nTO: bob\n\nhi".encode()
    assert parse(data).headers == {}
    assert parse_delivered(data).headers == {name: "__orchestrator__"}


def test_a_delivered_file_may_have_the_lines_that_the_relay_adds() -> None:
    lines = [b"TO: bob", *(b"X-%d: v" % number for number in range(MAX_HEADER_LINES + 5))]
    assert len(parse_delivered(b"\n".join(lines) + b"\n\nhi").headers) == 53


def test_a_delivered_header_has_a_limit_of_its_own() -> None:
    lines = [b"X-%d: %s" % (number, b"v" * 4000) for number in range(3)]
    head = b"\n".join([b"TO: bob", *lines, b"Y: "])
    head += b"v" * (2 * MAX_HEADER_BYTES - len(head))
    assert parse_delivered(head + b"\n\nhi").body == b"hi"
    with pytest.raises(MessageError, match="12289 bytes, at most 12288"):
        parse_delivered(head + b"v\n\nhi", file="f.msg")


# -- TO ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to",
    ["bob", "B-o_b9", "a" * 63, "*", "#ops", "#team/backend", "Lead", "LEAD", "__orchestrator__"],
)
def test_an_address_is_kept_as_written(to: str) -> None:
    assert parse(f"TO: {to}\n\nhi".encode()).to == to


@pytest.mark.parametrize(
    "to",
    ["", "9lives", "a" * 64, "**", "#", "#a//b", "#../x", "../bob", "bob/alice", "b b", "_bob"],
)
def test_what_is_no_address_is_refused(to: str) -> None:
    assert refused(f"TO: {to}\n\nhi".encode()).header == "TO"


def test_a_channel_of_128_bytes_is_the_longest() -> None:
    assert parse(b"TO: #%s\n\nhi" % (b"c" * 128)).to == "#" + "c" * 128
    assert refused(b"TO: #%s\n\nhi" % (b"c" * 129)).header == "TO"


def test_what_a_kind_needs_is_named() -> None:
    """Which kind needs what is a table of docs/formats/msg.md, and compared with that."""
    assert "TO is missing" in refused(b"KIND: command\n\nhi").rule
    assert "body is empty" in refused(b"TO: bob\nKIND: command\n\n").rule
    assert "NAME" in refused(b"KIND: spawn\nCLI: claude\n").rule
    error = refused(b"TO: bob\nKIND: ack\n\nhi")
    assert (error.line, error.header) == (0, "RE")
    assert parse(b"TO: bob\nKIND: ack\nTHREAD: t\n\nhi").headers == {"THREAD": "t"}
    empty = parse(f"TO: bob\nKIND: ack\nRE: {ID}\n".encode())
    assert (empty.body, empty.content) == (b"", b"received")
    assert empty._replace(body=b"more").content == b"more"


# -- KIND ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SENT_KINDS))
def test_every_kind_is_taken_in_any_case(kind: Kind) -> None:
    for word in (kind.value, kind.value.upper(), kind.value.title()):
        assert parse(f"TO: bob\nKIND: {word}\nRE: {ID}\n\nhi".encode()).kind is kind


def test_without_a_kind_it_is_a_message() -> None:
    assert parse(b"TO: bob\n\nhi").kind is Kind.MESSAGE


@pytest.mark.parametrize("word", ["shout", "", "message x", "ack,nack", "reminder"])
def test_another_kind_is_refused_with_the_ones_there_are(word: str) -> None:
    error = refused(f"TO: bob\nKIND: {word}\n\nhi".encode())
    assert (error.line, error.header) == (2, "KIND")
    assert all(kind in error.rule for kind in SENT_KINDS)


# -- the other headers ---------------------------------------------------------------------

GOOD = {
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


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in GOOD.items() for v in values])
def test_a_value_within_its_rule_is_taken(name: str, value: str) -> None:
    message = parse(f"TO: bob\n{name}: {value}\n\nhi".encode())
    assert message.headers.get(name, *message.attachments) == value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_value_outside_its_rule_is_refused_by_name_and_line(name: str, value: str) -> None:
    error = refused(f"TO: bob\n{name}: {value}\n\nhi".encode())
    assert (error.line, error.header) == (2, name)
    assert len(str(error)) < 200


@pytest.mark.parametrize("body", ["héllo\r\n".encode(), b""])
def test_a_checksum_is_of_the_body_bytes(body: bytes) -> None:
    right = "sha256:" + hashlib.sha256(body).hexdigest()
    data = f"TO: bob\nKIND: leave\nCHECKSUM: {right}\n\n".encode() + body
    assert parse(data).headers["CHECKSUM"] == right
    error = refused(data + b"\n")
    assert (error.line, error.header) == (3, "CHECKSUM")
    assert right in error.rule


def test_priority_ttl_and_await_as_numbers() -> None:
    bare = parse(b"TO: bob\n\nhi")
    assert (bare.priority, bare.ttl_s, bare.await_ms) == (2, None, None)
    given = parse(b"TO: bob\nPRIORITY: 0\nTTL: 60\nAWAIT: 1m\n\nhi")
    assert (given.priority, given.ttl_s, given.await_ms) == (0, 60, 60_000)


def test_a_bare_await_is_milliseconds_and_a_bare_ttl_seconds() -> None:
    given = {"60000": 60_000, "500ms": 500, "30s": 30_000, "10min": 600_000, "1d": 86_400_000}
    found = {text: parse(f"TO: bob\nAWAIT: {text}\n\nhi".encode()).await_ms for text in given}
    assert found == given
    given = {"1": 1, "10m": 600, "1500ms": 1, "9" * 18: 10**18 - 1}
    assert {text: parse(f"TO: bob\nTTL: {text}\n\nhi".encode()).ttl_s for text in given} == given


FIXTURES = Path(__file__).parent.parent / "fixtures" / "msg" / "ok"


def fields(text: str) -> dict[str, str]:
    return control_fields(parse(text.encode()))


def test_a_spawn_given_by_lines_of_the_body() -> None:
    assert control_fields(parse((FIXTURES / "spawn-in-body.msg").read_bytes())) == {
        "NAME": "WorkerAgent",
        "CLI": "claude",
        "PROMPT": "You are a worker agent. Complete the assigned task.",
        "WORKING_DIR": "/path/to/project",
        "ENV": "KEY1=value1,KEY2=value2",
    }


def test_a_spawn_given_by_headers_has_its_prompt_as_the_body() -> None:
    assert control_fields(parse((FIXTURES / "spawn-in-headers.msg").read_bytes())) == {
        "NAME": "WorkerAgent",
        "CLI": "claude",
        "PROMPT": "Complete the assigned task.",
    }


@pytest.mark.parametrize("name", CONTROL_FIELDS)
def test_a_field_in_either_form_says_the_same(name: str) -> None:
    assert fields(f"KIND: continuity\n\n{name}: a: b \n")[name] == "a: b"
    assert fields(f"KIND: continuity\n{name}: a: b \n\n.")[name] == "a: b"


def test_a_header_wins_over_the_body() -> None:
    assert fields("KIND: release\nNAME: one\n\nNAME: two\nREASON: done") == {
        "NAME": "one",
        "REASON": "done",
    }


def test_a_prompt_of_many_lines_is_kept_with_everything_in_it() -> None:
    prompt = "Do this:\n\n  1. build\nTODO: the rest\nName: is not a field\n\fend"
    given = f"KIND: spawn\n\nNAME: w\nPROMPT: {prompt}\nCLI: claude\n"
    assert fields(given) == {"NAME": "w", "PROMPT": prompt, "CLI": "claude"}


def test_a_prompt_in_the_body_behind_a_name_in_the_header() -> None:
    assert fields("KIND: spawn\nNAME: w\n\nCLI: claude\nPROMPT: go\non\n") == {
        "NAME": "w",
        "CLI": "claude",
        "PROMPT": "go\non",
    }


def test_only_a_spawn_has_its_body_as_the_prompt() -> None:
    assert fields("KIND: release\nNAME: w\n\nbye\n") == {"NAME": "w"}


def test_lines_before_the_first_field_are_nobodys() -> None:
    body = "hello\nCHANNEL: team\r\nPATTERN: build.#\r\n"
    assert fields(f"TO: __orchestrator__\nKIND: subscribe\n\n{body}") == {
        "CHANNEL": "team",
        "PATTERN": "build.#",
    }


def test_channel_as_a_header_is_the_relays_and_dropped() -> None:
    assert fields("TO: __orchestrator__\nKIND: join\nCHANNEL: team\n") == {}


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
