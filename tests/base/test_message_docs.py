"""docs/formats/msg.md says what relay.base.message does."""

from __future__ import annotations

import re

import pytest

from relay.acomm.model import MessageType, Priority
from relay.base import message as rules
from relay.base import names
from relay.base.clock import duration_ms
from relay.base.errors import MessageError
from relay.base.message import Kind, MessageFile, parse
from relay.base.names import ORCHESTRATOR, sha256_hex
from relay.delivery.file_ops import render_delivered
from relay.delivery.router import MESSAGE_TYPES
from tests.documents import read_page, tables

DOCS = read_page("formats/msg.md")
RE = "1769851800000000000-a1b2c3d4"


def examples() -> list[str]:
    """The indented blocks, as they would stand in a file."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", DOCS, flags=re.M)
    found = [re.sub(r"^    ", "", block, flags=re.M).strip("\n") for block in blocks]
    return [block for block in found if block]


KINDS = tables(DOCS, "Kinds")[0]
SENT = [row for row in KINDS if row[0] in rules.SENT_KINDS]  # the others are the relay's


def test_the_limits() -> None:
    said = {
        name: int(value.split()[0].replace(",", "")) for name, value in tables(DOCS, "The file")[0]
    }
    assert said == {
        "header lines": rules.MAX_HEADER_LINES,
        "header": rules.MAX_HEADER_BYTES,
        "value of a header": rules.MAX_VALUE_BYTES,
        "name of a header": longest(rules.HEADER_NAME, "A"),
        "body": rules.DEFAULT_MAX_BODY_BYTES,
        "TOPIC": rules.MAX_TOPIC_BYTES,
        "THREAD": longest(rules.THREAD, "A"),
        "name of a channel": names.MAX_CHANNEL_NAME_BYTES,
        "name of an agent": longest(names.AGENT_NAME, "A"),
    }


def longest(pattern: re.Pattern[str], character: str) -> int:
    """How often a character may be repeated before the pattern no longer matches."""
    return max(n for n in range(1, 300) if pattern.fullmatch(character * n))


def test_the_name_of_a_file() -> None:
    low, high, most = re.findall(r"(\d+) to (\d+) digits, `-`, 0 to (\d+)", DOCS)[0]
    assert names.MESSAGE_ID.pattern == f"[0-9]{{{low},{high}}}-[0-9a-f]{{0,{most}}}"


def test_every_header_has_its_row() -> None:
    given, relays, fields, body = ([row[0] for row in table] for table in tables(DOCS, "Headers"))
    assert sorted(given) == sorted(
        ["TO", "KIND", "ATTACHMENT", names.ATTACHMENT_NAMES, *rules._RULES]
    )
    assert sorted(relays) == sorted(rules.RELAY_HEADERS)
    assert fields == list(rules.CONTROL_FIELDS)
    assert body == list(rules.BODY_FIELDS)
    assert all(all(row) for table in tables(DOCS, "Headers") for row in table)


def test_the_values_that_are_listed_are_the_ones_there_are() -> None:
    rows = {row[0]: row for row in tables(DOCS, "Headers")[0]}
    assert re.findall("`(.*?)`", rows["DELIVERY"][1]) == list(rules.DELIVERY_MODES)
    for value in re.findall("`(.*?)`", rows["AWAIT"][1]):
        assert duration_ms(value, "ms") > 0
    priorities = ", ".join(f"{p.value} {p.label.lower()}" for p in Priority)
    assert rows["PRIORITY"][2].startswith(priorities)
    for value in re.findall("`(.*?)`", rows["TO"][1]):
        assert parse(f"TO: {value}\n\nhi".encode()).to == value


def test_every_kind_has_its_row() -> None:
    assert [row[0] for row in KINDS] == [kind.value for kind in Kind]


@pytest.mark.parametrize("row", SENT, ids=lambda row: row[0])
def test_parse_does_what_the_row_says(row: list[str]) -> None:
    kind, kinds_type, to, answers, empty = row
    assert kinds_type.split(",")[0] == MESSAGE_TYPES.get(Kind(kind), MessageType.COMMAND).label
    assert to in ("required", f"`{ORCHESTRATOR}`")
    word = rules.EMPTY_BODY_CONTENT.get(Kind(kind))
    assert empty.split(",")[0] == (f"`{word.decode()}`" if word else "no")
    lines = {"KIND": kind, "TO": "bob", "RE": RE, "NAME": "w", "ACTION": "x"}
    assert accepted(lines, "hi")
    assert accepted({k: v for k, v in lines.items() if k != "TO"}, "hi") is (to != "required")
    assert accepted({k: v for k, v in lines.items() if k != "RE"}, "hi") is not bool(answers)
    assert accepted(lines, "") is (empty != "no")
    for field in ("NAME", "ACTION"):
        without = {k: v for k, v in lines.items() if k != field}
        assert accepted(without, "") is (empty != "no" and field not in empty)


def accepted(headers: dict[str, str], body: str) -> bool:
    text = "".join(f"{name}: {value}\n" for name, value in headers.items())
    try:
        parse(f"{text}\n{body}".encode())
    except MessageError:
        return False
    return True


def test_the_delivered_example_is_what_is_delivered() -> None:
    sent, _, delivered = examples()
    message = parse(sent.encode())
    assert message == MessageFile(
        "bob", Kind.QUERY, {"THREAD": "release-7", "PRIORITY": "1"}, b"How many tests are red?"
    )
    assert delivered.encode() == render_delivered(
        message._replace(to="#team"),
        RE,
        "alice",
        1_769_851_800 * 10**9,
        sha256_hex(message.body),
        "team",
    )


def test_the_refusal_is_what_is_said() -> None:
    sent, refusal, _ = examples()
    bad = sent.replace("PRIORITY: 1", "PRIORITY: 9").encode()
    with pytest.raises(MessageError) as caught:
        parse(bad, file=f"{RE}.msg")
    assert str(caught.value) == refusal
