"""The fields of control messages, as headers and as lines of the body."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.errors import MessageError
from relay.base.message import CONTROL_FIELDS, command_fields, control_fields, parse

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
