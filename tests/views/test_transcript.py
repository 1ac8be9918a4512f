"""What a session did is read from the lines that agent CLIs write, and nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.views import transcript
from relay.views.transcript import Transcript, steps

AT = "2026-11-26T12:00:00.500Z"


def claude(role: str, content: Any) -> dict[str, Any]:
    return {"type": role, "timestamp": AT, "message": {"role": role, "content": content}}


def says(kind: str, **fields: Any) -> dict[str, Any]:
    """A line of Claude Code with one part of what the model says."""
    return claude("assistant", [{"type": kind, **fields}])


def codex(kind: str, **fields: Any) -> dict[str, Any]:
    payload = {"type": kind, **fields}
    return {"type": "response_item", "timestamp": AT, "payload": payload}


FAILED = [{"type": "tool_result", "is_error": True, "content": [{"text": "exit code 2"}]}]
HI = [{"type": "output_text", "text": "hi"}]
LS = '{"command": ["ls", "-la"]}'
LINES = [
    (claude("user", "fix the\n  build"), "prompt", "fix the build"),
    (says("text", text="I look."), "says", "I look."),
    (says("tool_use", name="Bash", input={"command": "make all"}), "tool", "Bash: make all"),
    (says("tool_use", name="Odd", input={"depth": 3}), "tool", 'Odd: {"depth": 3}'),
    (claude("user", FAILED), "failed", "exit code 2"),
    (codex("message", role="user", content="hello"), "prompt", "hello"),
    (codex("message", role="assistant", content=HI), "says", "hi"),
    (codex("function_call", name="shell", arguments=LS), "tool", "shell: ls -la"),
    (codex("custom_tool_call", name="patch", input="*** Begin"), "tool", "patch: *** Begin"),
    (codex("local_shell_call", action={"command": ["make"]}), "tool", "shell: make"),
]


@pytest.mark.parametrize(
    ("line", "what", "text"), LINES, ids=[f"{a}-{b}"[:40] for _, a, b in LINES]
)
def test_a_step_is_one_line_with_its_time(line: dict[str, Any], what: str, text: str) -> None:
    (step,) = steps(json.dumps(line).encode())
    assert (step.what, step.text) == (what, text)
    assert step.at == 1795694400500000000


@pytest.mark.parametrize(
    "line",
    [
        claude("user", [{"type": "tool_result", "content": "fine"}]),
        says("thinking", thinking="hm"),
        codex("function_call_output", output="fine"),
        codex("message", role="developer", content="rules"),
        {"type": "summary", "summary": "x"},
        {"type": "attachment", "attachment": {"content": ["x"]}},
    ],
)
def test_what_is_no_step_is_left_out(line: dict[str, Any]) -> None:
    assert list(steps(json.dumps(line).encode())) == []


ODD = (None, True, 7, 1e400, "", "a\nb\x85c", [], [3, ["x"], {"text": {}}], {}, {"type": []})


def spoiled(value: Any) -> Iterator[Any]:
    """The same with one value of another kind, in each place of it."""
    yield from ODD
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in spoiled(inner))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in spoiled(inner))


def test_no_line_is_an_error() -> None:
    found = [
        step.text
        for line, _, _ in LINES
        for value in spoiled(line)
        for step in steps(json.dumps(value).encode())
    ]
    assert len(found) > 300
    assert not [text for text in found if not text or len(text.splitlines()) > 1]


@pytest.mark.parametrize("line", [b"", b"{", b"7", b"\xff{}", b"[" * 100_000, b'{"type": "user"'])
def test_what_is_no_object_of_json_is_no_step(line: bytes) -> None:
    assert list(steps(line)) == []


def test_a_transcript_is_followed_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    followed = Transcript(str(path))
    assert followed.read() == []  # not there yet
    one, two = (json.dumps(claude("user", text)) + "\n" for text in ("one", "two"))
    path.write_text(one + two[:10])
    assert [step.text for step in followed.read()] == ["one"]
    with open(path, "a") as file:
        file.write(two[10:])
    assert [step.text for step in followed.read()] == ["two"]
    path.write_text(one)  # a new file of the same name
    assert [step.text for step in followed.read()] == ["one"]


def test_only_the_end_of_a_long_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcript, "MOST_BEFORE", 1000)
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(claude("user", str(n))) + "\n" for n in range(100)))
    found = [step.text for step in Transcript(str(path)).read()]
    assert found and found == [str(n) for n in range(100)][-len(found) :] and len(found) < 20
