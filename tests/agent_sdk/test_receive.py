"""Receiving: which message, to whom, and what a call waits on."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from agent_sdk import Agent, Kind, MessageError
from agent_sdk.inbox import InboxWaiter, InotifyWaiter, PollWaiter, open_waiter
from relay.base import fsio
from tests.agent_sdk.support import HandRelay, script
from tests.box import open_descriptors


@pytest.fixture
def relay(relay: HandRelay) -> HandRelay:
    """Alice and bob have their folders."""
    for name in ("alice", "bob"):
        Agent(name, relay.root).close()
    return relay


def test_a_message_as_its_recipient_has_it(relay: HandRelay, alice: Agent) -> None:
    with Agent("bob", relay.root) as bob:
        reference = bob.attach(b"data")
        sent = bob.send("alice", "hi\n\nthere ✓", kind="query", thread="t-1", re="1706123456-ab",
                        headers={"X-Tool": "make"}, attachments=[reference])  # fmt: skip
    relay.carry()
    message = alice.receive(timeout_s=0)
    assert message is not None
    path = relay.box("alice", "inbox/.read") / f"{sent}.msg"
    assert message._replace(headers={}) == (
        sent, "bob", "alice", Kind.QUERY, "hi\n\nthere ✓", {}, "2024-01-24T19:10:56.789012Z",
        "t-1", "1706123456-ab", None, 1, (reference,), str(path),
    )  # fmt: skip
    assert message.headers["X-TOOL"] == "make"
    assert path.exists()


def test_a_time_that_is_no_number_is_not_waited_for(relay: HandRelay, alice: Agent) -> None:
    nan = float("nan")
    for wait in (
        lambda: alice.receive(nan),
        lambda: alice.query("bob", "which branch?", nan),
        lambda: alice.send("bob", "hi", wait=nan),
    ):
        with pytest.raises(ValueError, match="nan is not a number of seconds"):
            wait()
    assert relay.waiting("alice", "outbox") == []


def test_what_the_relay_stages_is_not_seen(relay: HandRelay, alice: Agent) -> None:
    (relay.box("alice", "inbox/.pending") / "1706123456-ab.msg").write_text("TO: alice\n\nx")
    (relay.box("alice", "inbox") / "notes.txt").write_text("not a message")
    assert alice.receive(timeout_s=0) is None
    assert relay.waiting("alice", "inbox") == ["notes.txt"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "TO is missing"),
        (b"TO: alice\nATTEMPT: two\n\nx", "expected a number, got 'two'"),
        (b"TO: alice\nCHECKSUM: sha256:" + b"0" * 64 + b"\n\nx", "does not match"),
    ],
)
def test_a_file_that_is_no_message_is_said_so_once(
    relay: HandRelay, alice: Agent, data: bytes, says: str
) -> None:
    relay.put_bytes("alice", "1706123456-ab.msg", data)
    relay.deliver("alice", "after it")
    with pytest.raises(MessageError, match=r"1706123456-ab\.msg") as error:
        alice.receive(timeout_s=0)
    assert says in str(error.value)
    assert relay.waiting("alice", "inbox/.read") == ["1706123456-ab.msg"]
    assert alice.receive(timeout_s=0).body == "after it"


def test_a_link_in_the_inbox_is_not_followed(
    relay: HandRelay, alice: Agent, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("TO: alice\n\nsecret")
    (relay.box("alice", "inbox") / "1706123456-ab.msg").symlink_to(tmp_path / "secret")
    with pytest.raises(MessageError, match="not a regular file"):
        alice.receive(timeout_s=0)
    assert alice.receive(timeout_s=0) is None


def test_what_no_descriptor_is_left_for_stays_in_the_inbox(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = relay.deliver("alice", "x")
    with monkeypatch.context() as few:
        few.setattr(fsio, "read_regular", full)
        with pytest.raises(OSError, match="limit reached"):
            alice.receive(timeout_s=0)
    assert relay.waiting("alice", "inbox") == [f"{sent}.msg"]
    assert alice.receive(timeout_s=0).id == sent


def test_two_processes_of_one_agent_never_get_the_same_message(relay: HandRelay) -> None:
    sent = [relay.deliver("alice", "x") for _ in range(300)]
    got: list[list[str]] = [[], []]
    together = threading.Barrier(2)

    def take(mine: list[str]) -> None:
        with Agent("alice", relay.root) as one:
            together.wait()
            mine.extend(message.id for message in one.messages(timeout_s=0))

    threads = [threading.Thread(target=take, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got[0] + got[1]) == sent


def full(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "inotify instance limit reached")


def unreadable(*_: object) -> int:
    return -1  # what watchdog answers, silently


@pytest.mark.parametrize("kind", [InotifyWaiter, PollWaiter])
def test_what_comes_between_watch_and_listing_is_not_slept_through(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    def watch_and_deliver(path: str) -> InboxWaiter:
        wake = open_waiter(path)
        assert isinstance(wake, kind)
        relay.deliver("alice", "in between")
        return wake

    if kind is PollWaiter:
        monkeypatch.setattr(inotify_c.InotifyFD, "add_callback", unreadable)
    monkeypatch.setattr("agent_sdk.inbox.open_waiter", watch_and_deliver)
    assert alice.receive().body == "in between"


def test_what_comes_between_listing_and_sleep_ends_the_sleep(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateWake(InotifyWaiter):
        def wait(self, timeout_s: float) -> None:
            relay.deliver("alice", "late")
            super().wait(timeout_s)

    monkeypatch.setattr("agent_sdk.inbox.open_waiter", LateWake)
    assert alice.receive().body == "late"


def test_a_message_that_another_process_takes_is_waited_on(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken_by_another() -> None:
        relay.deliver("alice", "not for me")
        with Agent("alice", relay.root) as other:
            other.receive(timeout_s=0)

    script(monkeypatch, taken_by_another, lambda: relay.deliver("alice", "for me"))
    assert alice.receive().body == "for me"


@pytest.mark.parametrize(
    ("name", "what"),
    [("_create_inotify_fd", full), ("add_callback", full), ("add_callback", unreadable)],
)
def test_where_inotify_gives_nothing_the_inbox_is_polled(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, name: str, what: object
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(inotify_c.InotifyFD, name, what)
    assert isinstance(open_waiter(str(relay.box("alice", "inbox"))), PollWaiter)
    assert open_descriptors() == before
    with Agent("alice", relay.root) as alice:
        thread = threading.Timer(0.02, lambda: relay.deliver("alice", "polled"))
        thread.start()
        assert alice.receive(timeout_s=9).body == "polled"
        thread.join()


def test_no_descriptor_is_left_whether_the_watch_was_read_or_not(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    with Agent("alice", relay.root) as alice:
        assert alice.receive(timeout_s=0.01) is None
    assert open_descriptors() == before
    with Agent("alice", relay.root) as alice:
        assert alice.receive(timeout_s=0.01) is None
        relay.deliver("alice", "read")
        alice.receive(timeout_s=0)
        assert alice.receive(timeout_s=0.01) is None
    assert open_descriptors() == before


def test_children_do_not_inherit_the_watch(relay: HandRelay) -> None:
    wake = InotifyWaiter(str(relay.box("alice", "inbox")))
    try:
        assert not os.get_inheritable(wake._inotify._inotify_fd)
    finally:
        wake.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_that_waits_takes_no_event_of_its_parent(relay: HandRelay, alice: Agent) -> None:
    """It shared the parent's queue of events: the parent slept on beside a message."""
    inbox = alice._inbox
    assert inbox.until(lambda: None, 0.01) is None
    waiter = inbox._waiter
    assert isinstance(waiter, InotifyWaiter)
    relay.deliver("alice", "one")
    if (pid := os.fork()) == 0:
        try:
            inbox.until(lambda: None, 0.01)
            alice.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    for body in ("two", "three"):
        assert select.select([waiter.fileno()], [], [], 0)[0]
        waiter.wait(0)
        relay.deliver("alice", body)
    assert select.select([waiter.fileno()], [], [], 0)[0]


@pytest.mark.parametrize("twice", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_agent_is_not_copied(alice: Agent, twice: Callable[[Agent], object]) -> None:
    """In another process its descriptors are other files, which it would close and replace."""
    with pytest.raises(TypeError, match="an Agent has descriptors of its process"):
        twice(alice)
