"""When a printed message counts as seen: transcripts of all kinds, and later actions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reach.hooks import Cli, put, reports, told

Start = Callable[..., Cli]
HELLO = "FROM: alice\nTO: bob\n\nhello"
ID = "1700000000000000001-aa"


def is_read(root: Path) -> bool:
    """The file was moved to .read."""
    waits = (root / "agents/bob/inbox" / f"{ID}.msg").exists()
    assert waits != (root / "agents/bob/inbox/.read" / f"{ID}.msg").exists()
    return not waits


def test_a_parallel_hook_of_the_same_step_is_no_evidence(root: Path, blind: Cli) -> None:
    put(root, "bob", HELLO, ID)
    assert blind.hook("PostToolUse")
    for event in ("PostToolUse", "PreToolUse", "PostToolUseFailure", "PermissionRequest"):
        blind.hook(event)  # other tool calls of the same answer of the model
    blind.hook("PostToolBatch")
    assert not is_read(root)
    blind.hook("PreToolUse")  # the next step
    assert is_read(root)
    assert told(reports(root, "bob"))[1] == ("in_context", "action", "tool call 3", ID)


def test_without_batches_a_stop_is_evidence_and_another_tool_call_is_not(
    root: Path, start_cli: Start
) -> None:
    for vendor in ("codex", "gemini"):
        cli = start_cli("s-1", vendor, AGENT_RELAY_NAME="bob")
        put(root, "bob", HELLO, ID)
        assert cli.tool()
        cli.tool()
        assert not is_read(root)
        cli.stop()
        assert is_read(root)
        (root / "agents/bob/inbox/.read" / f"{ID}.msg").unlink()
        cli.die()


def test_a_prompt_is_no_action_of_the_model(root: Path, blind: Cli) -> None:
    put(root, "bob", HELLO, ID)
    assert blind.prompt()
    blind.hook("Notification", notification_type="idle_prompt")
    blind.prompt()
    assert not is_read(root)
    blind.tool()
    assert is_read(root)


def test_what_was_shown_at_a_stop_that_ended_the_turn_is_shown_again(
    root: Path, blind: Cli
) -> None:
    put(root, "bob", HELLO, ID)
    assert blind.stop()
    assert "offer 2" in blind.prompt()  # the vendor did not go on: its limit, or an interrupt
    assert told(reports(root, "bob"))[1] == ("returned", "the turn ended without it", ID)


def test_a_message_that_the_agent_took_itself_was_seen(root: Path, blind: Cli) -> None:
    put(root, "bob", HELLO, ID)
    blind.tool()
    os.rename(
        root / "agents/bob/inbox" / f"{ID}.msg", root / "agents/bob/inbox/.read" / f"{ID}.msg"
    )
    blind.hook("Notification")
    assert told(reports(root, "bob"))[1] == ("in_context", "taken", "by a command", ID)


def test_a_transcript_that_does_not_show_it_is_believed_once(root: Path, claude: Cli) -> None:
    claude.answers = lambda: None  # type: ignore[method-assign]
    put(root, "bob", HELLO, ID)
    claude.tool()
    assert "offer 2" in claude.tool()
    claude.tool()
    assert is_read(root) and claude.session.blind
    put(root, "bob", HELLO, other := "1700000000000000002-aa")
    assert claude.tool() and not claude.tool()
    assert told(reports(root, "bob")) == [
        ("offered", "tool call 1", 1, ID),
        ("returned", "the transcript does not show it", ID),
        ("offered", "tool call 2", 2, ID),
        ("in_context", "action", "tool call 3", ID),
        ("offered", "tool call 4", 1, other),
        ("in_context", "action", "tool call 5", other),
    ]


@pytest.mark.parametrize(
    "body",
    [
        f"Message {ID} from alice (message):\n| hello",
        f"as she wrote: Message {ID} from alice",
        f'"Message {ID} from alice"',
        f"$ relay inbox\n{ID} alice",
        f"\\nMessage {ID} from alice",
        f"\\\\nMessage {ID} from alice\\",
    ],
)
def test_a_body_that_quotes_a_message_is_no_evidence_of_it(
    root: Path, claude: Cli, body: str
) -> None:
    put(root, "bob", HELLO, ID)
    assert claude.hook("PostToolUse")
    claude._printed.clear()  # it is lost on the way to the model
    put(root, "bob", f"FROM: mallory\nTO: bob\n\n{body}", "1700000000000000002-aa")
    assert "from mallory" in claude.hook("PostToolUse")
    claude.answers()
    claude.hook("PostToolUse")
    assert not is_read(root)
    assert [one[:2] for one in told(reports(root, "bob"))][2:] == [("in_context", "transcript")]


def test_a_message_behind_another_one_is_found(root: Path, claude: Cli) -> None:
    """It begins a line, whatever the line before ends with."""
    put(root, "bob", HELLO + " \\", ID)
    put(root, "bob", HELLO, other := "1700000000000000002-aa")
    claude.tool()
    claude.tool()
    assert told(reports(root, "bob"))[1:] == [("in_context", "transcript", "line 2", ID, other)]


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "unreadable name", "device"])
def test_without_a_transcript_actions_count(root: Path, start_cli: Start, kind: str) -> None:
    cli = start_cli(AGENT_RELAY_NAME="bob")
    path = {"device": "/dev/zero", "unreadable name": "a\0b"}.get(kind, str(root.parent / "t"))
    if kind == "folder":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    cli.hook("SessionStart", transcript_path=path)
    put(root, "bob", HELLO, ID)
    assert cli.hook("PostToolUse", transcript_path=path)
    cli.hook("PostToolBatch", transcript_path=path)
    cli.hook("PostToolUse", transcript_path=path)
    assert is_read(root)


def test_a_transcript_that_was_truncated_is_read_from_its_begin(root: Path, claude: Cli) -> None:
    claude.says("x" * 10_000)
    put(root, "bob", HELLO, ID)
    claude.hook("PostToolUse")
    claude.transcript.write_text("{}\n")
    claude.hook("PostToolBatch")
    claude.answers()
    claude.hook("PostToolUse")
    assert told(reports(root, "bob"))[-1][:2] == ("in_context", "transcript")


def test_an_unfinished_line_is_read_again(root: Path, claude: Cli) -> None:
    put(root, "bob", HELLO, ID)
    text = claude.hook("PostToolUse")
    line = json.dumps({"content": text}).encode() + b"\n"
    half = line.index(ID.encode()) + 10
    with open(claude.transcript, "ab", buffering=0) as file:
        file.write(line[:half])
        claude.hook("PostToolUse")
        assert not is_read(root)
        file.write(line[half:])
    claude.hook("PostToolUse")
    assert is_read(root)


def test_a_transcript_of_gigabytes_is_read_from_the_remembered_place(
    root: Path, start_cli: Start
) -> None:
    cli = start_cli(AGENT_RELAY_NAME="bob")
    with open(cli.transcript, "wb") as file:
        file.truncate(5 << 30)
    cli.start("resume")
    put(root, "bob", HELLO, ID)
    cli.hook("PostToolUse")
    cli.answers()
    cli.hook("PostToolUse")
    with open(cli.transcript, "rb") as file:
        file.seek(5 << 30)
        place = f"byte {(5 << 30) + file.read().index(b'Message ' + ID.encode())}"
    assert told(reports(root, "bob"))[-1][:3] == ("in_context", "transcript", place)


def test_much_that_was_added_is_read_in_parts(root: Path, claude: Cli) -> None:
    put(root, "bob", HELLO, ID)
    claude.hook("PostToolUse")
    with open(claude.transcript, "ab") as file:
        for _ in range(20):
            file.write(b"x" * ((1 << 20) - 1) + b"\n")
    claude.hook("PostToolBatch")
    claude.answers()
    for _ in range(3):
        assert claude.hook("PostToolUse") == ""  # it is not offered again meanwhile
    assert told(reports(root, "bob"))[-1][:3] == ("in_context", "transcript", "line 22")


def test_a_line_of_many_megabytes_hides_nothing(root: Path, claude: Cli) -> None:
    put(root, "bob", HELLO, ID)
    text = claude.hook("PostToolUse")
    claude.says("x" * ((1 << 20) - 60) + "\n" + text + "y" * (3 << 20))
    claude.hook("PostToolUse")
    assert is_read(root)


def test_the_clock_set_back_changes_nothing(root: Path, claude: Cli) -> None:
    put(root, "bob", HELLO, ID)
    claude.tool()
    path = root / "sessions/claude-s-1.json"
    facts = json.loads(path.read_text())
    facts["offered"][ID]["at"] = facts["seen_at"] = facts["bound_at"] = 2 * 10**18
    path.write_text(json.dumps(facts))
    claude.tool()
    assert is_read(root)
