"""``relay history``, ``thread``, ``search``, ``channel``: a store read from its file."""

from __future__ import annotations

import pytest

from relay.acomm import store_file
from relay.acomm.model import Channel, ChannelType, Message, MessageStatus, MessageType, StoreFile
from relay.base.home import STORE
from tests.box import Box
from tests.procs import relay, rows_of

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


def test_history_by_its_options(told: Box) -> None:
    assert [row["content"] for row in lines(told, "history", "--channel", "dm/alice/bob")] == [
        "completed\nshipped",
        "deploy to staging",
    ]
    (command,) = lines(told, "history", "--type", "Command", "--sender", "alice", "--match", "dep")
    assert (command["status"], command["recipients"]) == ("Acknowledged", ["bob"])
    assert lines(told, "history", "--limit", "1")[0]["channel"] == "team"
    assert lines(told, "history", "--oldest-first", "--limit", "1")[0]["type"] == "Command"
    assert len(lines(told, "history", "--since", "1h")) == len(lines(told, "history"))

    shown = relay("history", "--limit", "1", home=told.root)
    assert "release is out\\x9b[31m" in shown.stdout  # no control character reaches a terminal
    assert "--offset 1 shows more" in shown.stderr


def test_a_thread_by_its_name(told: Box) -> None:
    assert [row["type"] for row in lines(told, "thread", "release-42")] == [
        "Command",
        "Acknowledgment",
    ]
    none = relay("thread", "nothing", home=told.root)
    assert none.returncode == 1
    assert "thread nothing does not exist" in none.stderr


def test_search(told: Box) -> None:
    assert [row["from"] for row in lines(told, "search", "deploy|shipped")] == ["bob", "alice"]
    bad = relay("search", "(", home=told.root)
    assert bad.returncode == 1
    assert "content_pattern" in bad.stderr and bad.stderr.count("\n") == 1


def test_channels(told: Box) -> None:
    assert {row["name"]: row["type"] for row in lines(told, "channel", "list")} == {
        "team": "Group",
        "ci": "PubSub",
    }
    (team,) = lines(told, "channel", "show", "#team")
    assert team["participants"] == {"alice": "Owner", "bob": "Member"}
    (ci,) = lines(told, "channel", "show", "ci")
    assert ci["subscriptions"] == [{"subscriber": "carol", "pattern": "build.#", "filter": None}]
    assert relay("channel", "show", "nowhere", home=told.root).returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--after", "yesterday"],
        ["--before", "60s1"],
        ["--channel", "nowhere"],
        ["--topic", "a.#.b"],
    ],
)
def test_an_option_that_is_none_is_named(told: Box, arguments: list[str]) -> None:
    done = relay("history", *arguments, home=told.root)
    assert done.returncode in (1, 2)
    assert arguments[0].removeprefix("--") in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_every_criterion_of_a_filter_is_an_option(told: Box) -> None:
    both = lines(told, "history", "--channel", "dm/alice/bob", "--channel", "#team")
    assert [row["channel"] for row in both] == ["team", "dm/alice/bob", "dm/alice/bob"]
    assert {row["type"] for row in lines(told, "history", "--thread", "release-42")} == {
        "Command",
        "Acknowledgment",
    }
    senders = [row["from"] for row in lines(told, "history", "--sort", "sender", "--oldest-first")]
    assert senders == sorted(senders) and len(set(senders)) > 2
    everything = lines(told, "history")
    assert lines(told, "history", "--offset", "2", "--limit", "1") == everything[2:3]


def test_history_between_two_times(told: Box) -> None:
    everything = lines(told, "history")
    first, last = str(everything[-1]["at"]), str(everything[0]["at"])
    assert first < last  # the group's message came two seconds later
    before = lines(told, "history", "--before", last)
    after = lines(told, "history", "--after", first)
    assert after + before == everything and before and after
    assert lines(told, "history", "--after", last) == []
    assert lines(told, "history", "--before", "1h") == []
    assert lines(
        told, "history", "--after", "2020-01-01", "--before", "2100-01-01T00:00+01:00"
    ) == (everything)
    assert lines(told, "history", "--after", "0001-01-01") == everything


def test_archived_messages_may_be_left_out(box: Box) -> None:
    channel = Channel(1, "c", ChannelType.GROUP, "alice")
    live = Message(1, MessageType.TEXT, "alice", 1, b"live", created_at=1)
    old = Message(
        2, MessageType.TEXT, "alice", 1, b"old", created_at=2, status=MessageStatus.ARCHIVED
    )
    store_file.write(box.home.path(STORE), StoreFile(1, 1, (channel,), (live, old)))
    assert [row["content"] for row in lines(box, "history")] == ["old", "live"]
    assert [row["content"] for row in lines(box, "history", "--no-archived")] == ["live"]
