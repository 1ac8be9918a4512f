"""JSON lines: what they look like, and what is said about a line that is wrong."""

from __future__ import annotations

import json

import pytest

from relay.acomm import jsonl, model
from relay.base.errors import MessageError
from tests.acomm.support import golden, message, small_store

HEADER = '{"section": "header", "created_at": 1, "modified_at": 2}'
MESSAGE = {
    "section": "messages",
    "id": 1,
    "message_type": "Text",
    "sender": "alpha",
    "channel_id": 1,
    "content": "hi",
}


def test_lines_come_section_by_section() -> None:
    names = [json.loads(line)["section"] for line in jsonl.to_lines(small_store())]
    assert names == [
        "header",
        "channels",
        *["messages"] * 2,
        "subscriptions",
        "dead_letters",
        "archive",
        "engine_state",
    ]
    assert jsonl.from_lines(jsonl.to_lines(small_store())) == small_store()
    assert sorted(set(names)) == sorted(jsonl.SECTIONS)


def test_one_section_alone() -> None:
    lines = list(jsonl.to_lines(small_store(), "engine_state"))
    assert lines == ['{"section": "engine_state", "tag": 99, "data_hex": "626c6f636b"}']
    assert len(list(jsonl.to_lines(golden(), "archive"))) == 6


def test_content_that_is_no_text_is_hex() -> None:
    store = model.StoreFile(1, 2, messages=(message(content=b"\xff\0"),), encrypted=True)
    header, line = jsonl.to_lines(store)
    assert json.loads(header) == {**json.loads(HEADER), "encrypted": True}
    row = json.loads(line)
    assert row["content_hex"] == "ff00"
    assert "content" not in row
    assert list(row)[5] == "content_hex"
    assert jsonl.from_lines([header, line]) == store


def test_floats_that_json_cannot_write_are_named() -> None:
    infinite = message(metadata={"a": float("inf"), "b": float("-inf"), "c": 1e300})
    store = model.StoreFile(1, 2, messages=(infinite,))
    lines = list(jsonl.to_lines(store))
    assert json.loads(lines[1])["metadata"] == {
        "a": {"Float": "Infinity"},
        "b": {"Float": "-Infinity"},
        "c": 1e300,
    }
    assert jsonl.from_lines(lines) == store


def test_what_has_a_default_may_be_left_out() -> None:
    store = jsonl.from_lines([HEADER, "", "  \n", json.dumps(MESSAGE)])
    (one,) = store.messages
    assert one == model.Message(1, model.MessageType.TEXT, "alpha", 1, b"hi")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON, Expecting property name"),
        ("[]", "line 2: expected an object"),
        ("[" * 100_000, "line 2: not JSON that can be read"),
        ("9" * 5000, "line 2: not JSON that can be read"),
        ('"\udcff"', "line 2: not UTF-8"),
        ("{}", "line 2: section: expected one of header, channels, messages"),
        ('{"section": ["messages"]}', "line 2: section: expected one of"),
        (HEADER, "line 2: section: the header must be the first line"),
        ({"extra": 1}, "line 2: extra: is not a known field"),
        ({"id": None}, "line 2: id: expected an integer from 0 to 18446744073709551615, got nu"),
        ({"id": True}, "line 2: id: expected an integer"),
        ({"id": 1.0}, "line 2: id: expected an integer"),
        ({"id": 2**64}, "line 2: id: expected an integer"),
        ({"message_type": "Txt"}, "line 2: message_type: expected one of Text, Command"),
        ({"message_type": 0}, "line 2: message_type: expected one of"),
        ({"sender": 5}, "line 2: sender: expected a text, got 5"),
        ({"sender": "\ud800"}, "line 2: sender: expected a text without unpaired surrogates"),
        ({"sender": ["x" * 99]}, "line 2: sender: expected a text, got"),
        ({"metadata": []}, "line 2: metadata: expected an object, got []"),
        ({"metadata": {"k": [1]}}, "line 2: metadata.k: expected a text, number, true, false"),
        ({"metadata": {"k": {"Float": "x"}}}, "line 2: metadata.k: expected a text, number"),
        ({"metadata": {"k": 2**63}}, "line 2: metadata.k: expected an integer from -9223372036"),
        ({"signature": "abc"}, "line 2: signature: expected hex digits, two a byte"),
        ({"signature": 5}, "line 2: signature: expected hex digits, two a byte"),
        ({"content_hex": "00"}, "line 2: content_hex: cannot be combined with content"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line: str | dict[str, object], said: str) -> None:
    text = line if isinstance(line, str) else json.dumps({**MESSAGE, **line})
    with pytest.raises(MessageError) as caught:
        jsonl.from_lines([HEADER, text])
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 250
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"config": {"echo": 1}}, "config.echo: expected true or false, got 1"),
        ({"config": {"retention": "Never"}}, 'config.retention: expected "Forever" or an object'),
        ({"config": {"retention": {"Days": 1}}}, "config.retention: expected one of Forever"),
        ({"config": {"retention": {"Count": -1}}}, "config.retention: expected an integer"),
        ({"config": {"retention": {"Forever": 1}}}, 'config.retention: expected "Forever"'),
        ({"participants": {}}, "participants: expected a list, got {}"),
        ({"participants": [{"id": "a"}, {}]}, "participants[1].id: is missing"),
        ({"participants": [7]}, "participants[0]: expected an object, got 7"),
        ({"tags": ["a", 3]}, "tags[1]: expected a text, got 3"),
    ],
)
def test_a_wrong_channel_is_named_down_to_the_field(row: dict[str, object], said: str) -> None:
    channel = {
        "section": "channels",
        "id": 1,
        "name": "team",
        "channel_type": "Group",
        "owner": "alpha",
    }
    with pytest.raises(MessageError) as caught:
        jsonl.from_lines([HEADER, json.dumps({**channel, **row})])
    assert str(caught.value).startswith(f"line 2: {said}")


def test_the_header_comes_first_and_blocks_once() -> None:
    with pytest.raises(MessageError, match="line 1: section: the header must be the first line"):
        jsonl.from_lines([json.dumps(MESSAGE), HEADER])
    with pytest.raises(MessageError, match="the input is empty: the first line must be the header"):
        jsonl.from_lines([])
    block = '{"section": "engine_state", "tag": 1, "data_hex": ""}'
    with pytest.raises(MessageError, match="line 3: tag: 1 is given twice"):
        jsonl.from_lines([HEADER, block, block])
    with pytest.raises(MessageError, match="line 2: content_hex: expected hex digits"):
        row = {name: value for name, value in MESSAGE.items() if name != "content"}
        jsonl.from_lines([HEADER, json.dumps({**row, "content_hex": "zz"})])
    with pytest.raises(MessageError, match="line 2: content: is missing"):
        jsonl.from_lines([HEADER, json.dumps(row)])
