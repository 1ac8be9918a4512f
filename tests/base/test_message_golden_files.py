"""Golden `.msg` files: what each says, and the fault of each bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.base.errors import EXIT_USAGE, MessageError
from relay.base.message import parse, parse_delivered, render

FIXTURES = Path(__file__).parent.parent / "fixtures" / "msg"
OK = json.loads((FIXTURES / "ok" / "expected.json").read_text())
BAD = json.loads((FIXTURES / "bad" / "expected.json").read_text())


def read(kind: str, name: str) -> bytes:
    return (FIXTURES / kind / f"{name}.msg").read_bytes()


def test_every_file_is_expected() -> None:
    assert {path.stem for path in (FIXTURES / "ok").glob("*.msg")} == OK.keys()
    assert {path.stem for path in (FIXTURES / "bad").glob("*.msg")} == BAD.keys()


@pytest.mark.parametrize("name", OK)
def test_a_good_file_says_what_is_expected(name: str) -> None:
    message = parse(read("ok", name), file=f"{name}.msg")
    assert {
        "to": message.to,
        "kind": str(message.kind),
        "headers": message.headers,
        "body": message.body.decode(),
    } == OK[name]
    assert message.attachments == ()


@pytest.mark.parametrize("name", OK)
def test_a_good_file_written_again_says_the_same(name: str) -> None:
    message = parse(read("ok", name))
    assert parse(render(message)) == message
    assert parse_delivered(render(message)) == message


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_that_names_it_and_the_fault(name: str) -> None:
    file = f"{name}.msg"
    with pytest.raises(MessageError) as caught:
        parse(read("bad", name), file=file)
    text = str(caught.value)
    assert text.startswith(f"{file}")
    assert BAD[name] in text
    assert "\n" not in text and len(text) < 400
    assert caught.value.file == file
    assert caught.value.exit_code == EXIT_USAGE


def test_without_a_file_name_the_rule_alone_is_said() -> None:
    with pytest.raises(MessageError) as caught:
        parse(b"")
    assert str(caught.value) == "the file is empty"
