"""``relay dead`` and ``relay open``: a store's file as a person looks into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.base.home import STORE
from relay.engine import ChannelConfig, ChannelType, CommStore, DeliveryMode, MessageType
from tests.fakes import FakeClock
from tests.procs import Relay, home_of, relay, rows_of

pytestmark = [pytest.mark.damages, pytest.mark.timeout(60), pytest.mark.shows("engine 7.8")]
FIRST, SECOND, FRESH = (f"170000000000000000{n}-aa" for n in range(3))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """FIRST is dead for bob and acknowledged by carol, SECOND is dead for both; FRESH is owed.

    The store's clock stands an hour back, so what it calls overdue is.
    """
    root = home_of(tmp_path / "home", "alice", "bob", "carol", checkpoint_ms=700)
    clock = FakeClock()
    clock.advance(-3600)
    with CommStore.open(str(root / STORE), clock=clock) as store:
        jobs = store.create_channel(
            "jobs",
            ChannelType.GROUP,
            "alice",
            ChannelConfig(
                DeliveryMode.AT_LEAST_ONCE, ack_timeout=10, max_retries=1, retry_backoff_ms=0
            ),
        )
        for agent in ("bob", "carol"):
            store.join_channel(jobs.id, agent)
        for relay_id, body in ((FIRST, "deploy\nnow"), (SECOND, "test\x1b[31m")):
            metadata = {"relay_id": relay_id, "to": "#jobs", "created_ns": clock.now_ns()}
            store.send_message(jobs.id, "alice", MessageType.COMMAND, body, metadata=metadata)
        store.acknowledge_message(1, "carol", "completed")
        for _ in range(3):
            clock.advance(11)
            store.tick()
        assert [letter.recipients for letter in store.dead_letters()] == [
            ("bob",), ("bob", "carol"),
        ]  # fmt: skip
        metadata = {"relay_id": FRESH, "to": "#jobs", "created_ns": clock.now_ns()}
        store.send_message(jobs.id, "alice", MessageType.QUERY, "who?", metadata=metadata)
        late = {"await_ms": 7_200_000}  # due in two hours of the store, an hour of ours
        store.send_message(jobs.id, "bob", MessageType.TEXT, "later", metadata=late)
    return root


def test_dead_letters_with_everything_known_of_them(home: Path) -> None:
    first, second = rows_of("dead", "list", home=home)
    assert (first["id"], first["from"], first["dead_for"]) == (FIRST, "alice", ["bob"])
    assert (second["id"], second["dead_for"]) == (SECOND, ["bob", "carol"])
    for letter in (first, second):
        assert letter["attempts"] == 2
        assert letter["reason"] == "no acknowledgment within 10 s, 2 attempts"
        assert letter["channel"] == "jobs" and letter["type"] == "Command"
        assert letter["sent_at"] < letter["dead_at"]
    table = relay("dead", "list", home=home).stdout
    assert table.splitlines()[0].split() == [
        "ID", "AT", "FROM", "DEAD", "FOR", "ATTEMPTS", "REASON",
    ]  # fmt: skip
    assert "bob, carol" in table


def test_one_dead_letter_with_its_content(home: Path) -> None:
    (letter,) = rows_of("dead", "show", SECOND, home=home)
    assert letter["content"] == "test\x1b[31m"
    assert rows_of("dead", "show", str(letter["number"]), home=home) == [letter]
    shown = relay("dead", "show", SECOND, home=home).stdout
    assert "\x1b" not in shown and "test\\x1b[31m" in shown
    assert "dead for  bob, carol" in shown
    assert relay("dead", "show", FIRST, home=home).stdout.endswith("\n\ndeploy\nnow\n")


def test_what_is_not_dead_is_not_shown(home: Path) -> None:
    for wanted in (FRESH, "1700", "99", "é\n"):
        done = relay("dead", "show", wanted, home=home)
        assert done.returncode == 1
        assert "does not exist" in done.stderr or "several dead letters match" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_store_without_any(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    done = relay("dead", "list", home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no dead letters\n")
    done = relay("open", home=home)
    assert (done.returncode, done.stderr) == (0, "no open answers\n")
    done = relay("open", "--overdue", home=home)
    assert (done.returncode, done.stderr) == (0, "nothing is overdue\n")


def test_discard_and_purge(home: Path) -> None:
    with Relay(home):
        done = relay("dead", "discard", FIRST, home=home)
        assert done.stdout == f"dead letter {FIRST} is discarded\n"
        assert [letter["id"] for letter in rows_of("dead", "list", home=home)] == [SECOND]
        again = relay("dead", "discard", FIRST, home=home)
        assert again.returncode == 6 and "does not exist" in again.stderr
        not_dead = relay("dead", "replay", FRESH, home=home)
        assert not_dead.returncode == 6
        listing = f"`relay --home {home} dead list`"
        assert f"dead letter '{FRESH}' does not exist: {listing}" in not_dead.stderr
        for verb in (["replay", SECOND], ["discard", SECOND], ["purge", "--older-than", "0s"]):
            other = relay("dead", *verb, "--as", "bob", home=home)
            assert other.returncode == 6
            assert "is for operator and the lead alone, not for bob" in other.stderr

        assert relay("dead", "purge", "--older-than", "2h", home=home).stdout == (
            "0 dead letters discarded\n"
        )
        (purged,) = rows_of("dead", "purge", "--older-than", "30m", home=home)
        assert purged["answer"] == "1 dead letter discarded"
        left = [letter["id"] for letter in rows_of("dead", "list", home=home)]
        assert left in ([], [FRESH])  # that one dies by itself, 20 s after the start


def test_a_replayed_letter_is_dead_no_longer(home: Path) -> None:
    with Relay(home):
        done = relay("dead", "replay", SECOND, home=home)
        assert done.stdout == f"dead letter {SECOND} is sent again to bob, carol\n"
        assert [letter["id"] for letter in rows_of("dead", "list", home=home)] == [FIRST]


def test_an_age_that_is_none(home: Path) -> None:
    for age in ("7", "d", "1w", "-1d", "²d", "1234567890d", ""):
        done = relay("dead", "purge", "--older-than", age, home=home)
        assert done.returncode == 2 and "is not a duration" in done.stderr, age
