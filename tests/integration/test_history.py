"""``relay list``, ``thread``, ``search``, ``channel``: a store read from its file."""

from __future__ import annotations

import pytest

from relay.acomm import store_file
from relay.acomm.model import Channel, ChannelType, Message, MessageStatus, MessageType, StoreFile
from relay.base.home import STORE
from tests.box import Box
from tests.procs import relay, rows_of
from tests.terminals import lines_in_a_terminal

pytestmark = pytest.mark.shows("engine 7.5")


@pytest.fixture
def told(box: Box) -> Box:
    """A command and its acknowledgment, a group with two, a topic, a refusal; all flushed."""
    box.join("team", "alice", "bob")
    box.send("carol", "TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: build.#")
    command = box.send("alice", "TO: bob\nKIND: command\nTHREAD: release-42\n\ndeploy to staging")
    box.send("bob", f"TO: alice\nKIND: ack\nRE: {command}\n\ncompleted\nshipped")
    box.clock.advance(2)
    box.send("bob", "TO: #team\n\nrelease is out\x1b[31m".replace("\x1b", "\u009b"))
    box.flush()
    return box


def lines(box: Box, *arguments: str) -> list[dict[str, object]]:
    """The JSON lines of a command."""
    return rows_of(*arguments, home=box.root)


def test_a_list_by_its_keys(told: Box) -> None:
    assert [row["content"] for row in lines(told, "list", "channel:dm/alice/bob")] == [
        "completed\nshipped",
        "deploy to staging",
    ]
    (command,) = lines(told, "list", "kind:command", "from:alice", "dep")
    assert (command["status"], command["recipients"]) == ("completed", ["bob"])
    assert lines(told, "list", "--limit", "1")[0]["channel"] == "team"
    oldest, *_ = lines(told, "list", "sort:oldest", "with:bob", "--limit", "1")
    assert oldest["type"] == "Command"
    senders = [row["from"] for row in lines(told, "list", "sort:sender")]
    assert senders == sorted(senders) and len(set(senders)) > 2
    for since in ("1h", "1d", "99999999d"):
        assert len(lines(told, "list", f"after:{since}")) == len(lines(told, "list"))

    shown = relay("list", "--limit", "1", home=told.root)
    assert "release is out\\x9b[31m" in shown.stdout  # no control character reaches a terminal
    assert shown.stderr == "1 shown, there are more; a larger --limit shows them\n"
    assert relay("list", "--limit", "1", "--json", home=told.root).stderr == shown.stderr


def test_a_thread_by_the_id_of_any_message_in_it(told: Box) -> None:
    command, ack = lines(told, "thread", "release-42")
    for message_id in (command["id"], ack["id"]):
        digits = str(message_id).partition("-")[2]
        assert lines(told, "thread", digits) == [command, ack]
        assert lines(told, "list", f"thread:{digits}") == [ack, command]
    (single,) = lines(told, "list", "channel:team", "--limit", "1")
    none = relay("thread", str(single["id"]), home=told.root)
    assert none.returncode == 1 and "no message in a thread has this id" in none.stderr


def test_a_thread_shows_whole_bodies_and_what_each_message_answers(told: Box) -> None:
    command, ack = (str(row["id"]).partition("-")[2] for row in lines(told, "thread", "release-42"))
    first, body, _, second, *others = relay(
        "thread", "release-42", home=told.root
    ).stdout.splitlines()
    assert first.startswith(f"{command}  ") and first.endswith("alice -> bob  command  completed")
    assert body == "    deploy to staging"
    assert second.startswith(f"{ack}  ")
    assert second.endswith(f"bob -> alice  ack re {command}  delivered")
    assert others == ["    completed", "    shipped", ""]


def test_search(told: Box) -> None:
    assert [row["from"] for row in lines(told, "search", "--regex", "deploy|shipped")] == [
        "bob",
        "alice",
    ]
    bad = relay("search", "--regex", "(", home=told.root)
    assert bad.returncode == 1
    assert "relay: --regex: " in bad.stderr and bad.stderr.count("\n") == 1


def test_search_shows_the_lines_that_match(told: Box) -> None:
    told.send("alice", "TO: bob\n\nintroduction\nship it, ship it\n\n" + "a ship\n" * 9)
    told.flush()
    newest, one, *rest = relay("search", "ship", home=told.root).stdout.splitlines()
    assert newest.endswith("alice -> bob  message  delivered")
    assert [one, *rest[:5]] == ["    ship it, ship it", *["    a ship"] * 4, ""]
    done = relay("search", "ship", "--limit", "1", home=told.root)
    assert done.stderr == "1 shown, there are more; a larger --limit shows them\n"
    assert relay("search", "ship", "--limit", "1", "--json", home=told.root).stderr == done.stderr


def test_the_table_says_to_whom_and_wide_in_which_thread(told: Box) -> None:
    header, *rows = relay("list", "kind:command", home=told.root).stdout.splitlines()
    assert header.split() == ["ID", "AT", "FROM", "TO", "KIND", "STATUS", "CONTENT"]
    (command,) = [row.split() for row in rows if "deploy" in row]
    assert command[2:6] == ["alice", "bob", "command", "completed"]
    header, *rows = relay("list", "--wide", home=told.root).stdout.splitlines()
    assert header.split()[5:7] == ["THREAD", "RE"]
    (ack,) = [row.split() for row in rows if command[0] in row and " ack " in row]
    assert ack[4:7] == ["ack", "release-42", command[0]]
    assert ack[-2:] == ["completed", "…"]  # of two lines
    group = relay("list", "channel:team", home=told.root).stdout.splitlines()[1]
    assert " #team " in group


def test_archived_messages_are_listed(box: Box) -> None:
    channel = Channel(1, "c", ChannelType.GROUP, "alice")
    live = Message(1, MessageType.TEXT, "alice", 1, b"live", created_at=1)
    old = Message(
        2, MessageType.TEXT, "alice", 1, b"old", created_at=2, status=MessageStatus.ARCHIVED
    )
    store_file.write(box.home.path(STORE), StoreFile(1, 1, (channel,), (live, old)))
    assert [row["content"] for row in lines(box, "list")] == ["old", "live"]


def test_tables_fit_the_terminal(told: Box) -> None:
    columns = 60
    long = "a long text " * 30
    told.send("alice", f"TO: bob\nKIND: command\n\n{long}")
    refused = told.send("alice", f"TO: {'b' * 40}\n\nhi").partition("-")[2]
    told.flush()
    cut = ("list", "search long", "open", "failed")
    for command in (*cut, "channel list", "tail --no-follow"):
        shown = lines_in_a_terminal(told.root, columns, command)
        assert len(shown) > 1
        assert max(map(len, shown)) <= columns, command
        assert command not in cut or any("…" in line for line in shown)
    assert any(refused in line for line in lines_in_a_terminal(told.root, columns, "failed"))
    assert long.strip() in "\n".join(lines_in_a_terminal(told.root, columns, "list --wide"))
