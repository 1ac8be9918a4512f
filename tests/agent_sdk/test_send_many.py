"""Sending many messages with one sync, and sending with the relay's sync."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import pytest

from agent_sdk import Agent, MessageError
from relay.base import fsio
from relay.base.errors import NotRunning, Timeout
from relay.base.message import parse
from tests.agent_sdk.support import HandRelay, fail_at, pauses, relay_runs, says_the_disk_is_full
from tests.disk import killed_at

THREE = [{"to": "bob", "body": word} for word in ("one", "two", "three")]


def in_outbox(relay: HandRelay) -> list[str]:
    return [
        parse((relay.box("alice", "outbox") / name).read_bytes()).body.decode()
        for name in relay.waiting("alice", "outbox")
    ]


def test_all_are_sent_in_order_with_one_sync_of_files_and_one_of_the_directory(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    called = fail_at(monkeypatch, "none", 1)
    assert alice.send_many([]) == [] == called
    sent = alice.send_many([*THREE, {"to": "carol", "body": "4", "kind": "query", "ttl_s": 9}])
    assert called == ["create", "write"] * 4 + ["syncfs"] + ["rename"] * 4 + ["sync_dir"]
    assert relay.waiting("alice", "outbox") == [f"{one}.msg" for one in sent]
    assert in_outbox(relay) == ["one", "two", "three", "4"]
    last = parse((relay.box("alice", "outbox") / f"{sent[-1]}.msg").read_bytes())
    assert (last.to, str(last.kind), last.ttl_s) == ("carol", "query", 9)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"to": "b ob", "body": "x"}, "message 1 of the list: 'b ob' is not an address"),
        (
            {"to": "bob", "body": "x", "tll_s": 5},
            "list: unknown option 'tll_s': did you mean ttl_s",
        ),
        (
            {"to": "bob", "body": "x", 5: 6},
            "message 1 of the list: unknown option '5': expected att",
        ),
        (("bob", "x"), "message 1 of the list: expected a dictionary with to and body, got"),
    ],
)
def test_one_bad_message_is_an_error_and_none_is_sent(
    relay: HandRelay, alice: Agent, wrong: Any, says: str
) -> None:
    with pytest.raises(MessageError, match=says):
        alice.send_many([THREE[0], wrong, THREE[1]])
    assert relay.waiting("alice", "outbox") == relay.waiting("alice", "outbox/.pending") == []


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("ttl", "did you mean ttl_s[?]$"),
        ("retries", "expected attachments, body, delivery, due_s, "),
    ],
)
def test_an_unknown_option_of_send_is_an_error(
    relay: HandRelay, alice: Agent, option: str, says: str
) -> None:
    for call in (alice.send, partial(alice.query, timeout_s=1)):
        with pytest.raises(TypeError, match=f"^unknown option '{option}': {says}"):
            call("bob", "x", **{option: 5})  # type: ignore[arg-type]
    assert relay.waiting("alice", "outbox") == []


@pytest.mark.parametrize("operation", ["create", "write", "syncfs"])
def test_a_full_disk_is_waited_for_without_writing_any_file_twice(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent, operation: str
) -> None:
    slept = pauses(monkeypatch)
    called = fail_at(monkeypatch, operation, 1, errno.ENOSPC, errno.EDQUOT)
    with says_the_disk_is_full():
        alice.send_many(THREE)
    assert called.count("rename") == 3
    assert slept == [0.1, 0.2]
    assert in_outbox(relay) == ["one", "two", "three"]


@pytest.mark.parametrize("operation", ["create", "write", "syncfs", "rename"])
def test_an_error_before_the_first_rename_leaves_none(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent, operation: str
) -> None:
    fail_at(monkeypatch, operation, 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output") as error:
        alice.send_many(THREE)
    assert relay.waiting("alice", "outbox") == relay.waiting("alice", "outbox/.pending") == []
    assert not hasattr(error.value, "__notes__")


def test_an_error_between_the_renames_names_those_that_were_sent(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    fail_at(monkeypatch, "rename", 3, errno.EIO)
    with pytest.raises(OSError, match="Input/output") as error:
        alice.send_many(THREE)
    first, second = (name.removesuffix(".msg") for name in relay.waiting("alice", "outbox"))
    assert in_outbox(relay) == ["one", "two"]
    assert relay.waiting("alice", "outbox/.pending") == []
    assert error.value.__notes__ == [
        f"2 messages, {first} to {second}, have been sent: do not send them again"
    ]


def test_a_file_that_was_taken_for_an_orphan_meanwhile_is_written_once_more(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    pending = relay.box("alice", "outbox") / ".pending"

    def fault(name: str, _: str) -> None:
        if name == "syncfs":
            for left in pending.iterdir():
                left.unlink()

    monkeypatch.setattr(fsio, "fault", fault)
    alice.send_many(THREE)
    assert in_outbox(relay) == ["one", "two", "three"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_the_renames_the_first_are_sent_and_no_other(
    relay: HandRelay, alice: Agent, renames: int
) -> None:
    killed_at(renames + 1, lambda: alice.send_many(THREE), "rename")
    assert in_outbox(relay) == ["one", "two", "three"][:renames]


# -- committed: the relay's sync counts -----------------------------------------------------


def test_without_a_relay_nothing_is_sent(relay: HandRelay, alice: Agent) -> None:
    with pytest.raises(NotRunning, match="no relay is running"):
        alice.send("bob", "hello", wait="taken")
    assert relay.waiting("alice", "outbox") == []


def test_what_the_relay_does_not_take_in_time_waits_durably(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    relay_runs(monkeypatch)
    called = fail_at(monkeypatch, "none", 1)
    with pytest.raises(Timeout, match=r"has not taken message .* over within 0.001 s") as error:
        alice.send("bob", "hello", wait="taken=1ms")
    assert called == ["create", "write", "rename", "sync", "sync_dir"]
    assert relay.waiting("alice", "outbox") == [f"{error.value.message_id}.msg"]
    assert error.value.hint == "it waits in the outbox: do not send it again"
