"""``relay failed``: what was refused, bounced, given up or answered with a nack, in one list."""

from __future__ import annotations

from subprocess import CompletedProcess
from typing import Any

from tests.box import Box
from tests.procs import relay, rows_of


def run(box: Box, *args: str) -> CompletedProcess[str]:
    return relay("failed", *args, home=box.root)


def rows(box: Box, *args: str) -> list[dict[str, Any]]:
    """The list as programs get it, newest first."""
    return rows_of("failed", *args, home=box.root)


def facts(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of a row all but id, time and reason."""
    return (row["from"], row["to"], row["kind"], row["outcome"])


def test_a_message_that_was_handled_is_not_in_the_list(box: Box) -> None:
    """Delivered, read, acknowledged, begun: nothing of it failed."""
    box.send("alice", "TO: bob\n\nhi")
    done = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    begun = box.send("alice", "TO: bob\nKIND: command\n\ntest")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {done}\n\ncompleted")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {begun}\n\nin_progress")
    shown = run(box)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "nothing failed\n")


def test_what_the_relay_refused_with_its_reason(box: Box) -> None:
    """Messages, and files that never became one: no message name, an id that is taken."""
    sent = box.send("alice", "TO: bbo\n\ntypo?")
    taken = box.send("alice", "TO: bob\n\nhi")
    box.send("bob", "TO: alice\n\nanother", f"{taken}.msg")
    box.send("carol", "no header at all")
    found = {row["reason"].partition(":")[0].rpartition(".msg, ")[2]: row for row in rows(box)}
    assert facts(found["there is no agent bbo"]) == ("alice", "bbo", "message", "refused")
    assert found["there is no agent bbo"]["id"] == sent
    assert facts(found["line 1"]) == ("carol", None, None, "refused")
    (same,) = [row for row in found.values() if row["id"] == taken]
    assert facts(same) == ("bob", None, None, "refused")
    assert len(found) == 3
    table = run(box, "--wide").stdout
    assert "refused: line 1: " in table and ".msg" not in table  # the file's name is the ID


def test_what_its_recipient_did_not_do(box: Box) -> None:
    """A nack with its text, an answer that nobody waits for any more, and no acknowledgment."""
    refused = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("bob", f"TO: alice\nKIND: nack\nRE: {refused}\n\nno such branch\nand more")
    asked = box.send("alice", "TO: carol\nKIND: query\n\nwhich?")
    lost = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\nplease")
    box.until_dead()
    assert {row["id"]: (*facts(row), row["reason"]) for row in rows(box)} == {
        refused: ("alice", "bob", "command", "failed", "no such branch"),
        asked: ("alice", "carol", "query", "unanswered", "not read, reminded twice"),
        lost: ("alice", "bob", "command", "dead", "no acknowledgment within 60 s, 4 attempts"),
    }


def test_the_newest_is_first_and_options_choose(box: Box) -> None:
    """By agent, as sender or recipient; by time; by number, and it is said what is left out."""
    for number in range(3):
        box.send("alice", f"TO: nobody{number}\n\nhi")
        box.clock.advance(60)
    box.send("carol", "TO: bbo\n\nhi")
    found = rows(box)
    assert [row["to"] for row in found] == ["bbo", "nobody2", "nobody1", "nobody0"]
    assert rows(box, "--agent", "alice") == found[1:]
    assert rows(box, "--agent", "nobody1") == found[2:3]
    assert rows(box, "--limit", "1") == found[:1]
    assert rows(box, "--since", found[1]["at"][:19] + "Z") == found[:2]
    shown = run(box, "--limit", "2")
    assert shown.stdout.splitlines()[0].split() == [
        *("ID", "AT", "FROM", "TO", "KIND", "STATUS", "CONTENT")
    ]
    assert found[0]["id"].partition("-")[2] in shown.stdout.splitlines()[1]
    assert shown.stderr == "2 shown, there are more; a larger --limit shows them\n"
    assert run(box, "--limit", "2", "--json").stderr == shown.stderr
