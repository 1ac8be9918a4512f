"""``relay dead`` and ``relay open``: what was given up, as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.box import Box
from tests.procs import Relay, agents_of, home_of, relay, rows_of, until

pytestmark = pytest.mark.shows("engine 7.8")


@pytest.fixture
def letters(box: Box) -> tuple[str, ...]:
    """Three letters, dead for bob: the second in colours; and a question that bob owes."""
    head = "TO: bob\nDELIVERY: at-least-once\n\n"
    texts = ("deploy\nnow", "test\x1b[31m", "clean up")
    dead = [box.send("alice", head + text) for text in texts]
    box.until_dead()
    fresh = box.send("alice", "TO: bob\nKIND: query\n\nwho?")
    box.flush()
    return *dead, fresh


def test_dead_letters_are_listed_like_all_messages(box: Box, letters: tuple[str, ...]) -> None:
    rows = rows_of("dead", "list", home=box.root)
    assert [(row["id"], row["to"], row["outcome"]) for row in rows] == [
        (one, "bob", "dead") for one in letters[:3]
    ]
    assert all(row["reason"] == "no acknowledgment within 60 s, 4 attempts" for row in rows)
    assert rows == rows_of("list", "is:dead", "sort:oldest", home=box.root)
    table = relay("dead", "list", home=box.root).stdout
    assert "dead: no acknowledgment within 60 s" in table and "deploy" in table


def test_a_dead_letter_is_shown_like_any_message(box: Box, letters: tuple[str, ...]) -> None:
    shown = relay("dead", "show", letters[0], home=box.root).stdout
    assert shown == relay("show", letters[0], home=box.root).stdout
    assert shown.endswith("\n\ndeploy\nnow\n")


def test_a_home_without_any(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    done = relay("dead", "list", home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no dead letters\n")
    done = relay("open", home=home)
    assert (done.returncode, done.stderr) == (0, "no open answers\n")
    done = relay("open", "--overdue", home=home)
    assert (done.returncode, done.stderr) == (0, "nothing is overdue\n")


def test_discard_replay_and_purge(box: Box, letters: tuple[str, ...]) -> None:
    first, second, third, fresh = letters
    home = box.root
    box.stop()
    with Relay(home):
        done = relay("dead", "discard", first, home=home)
        assert done.stdout == f"dead letter {first} is discarded\n"
        until(lambda: rows_of("trace", first, home=home)[0]["deliveries"][0]["discarded_at"])
        (one,) = rows_of("trace", first, home=home)[0]["deliveries"]
        assert one["state"] == "dead"
        assert agents_of(home)["bob"]["dead"] == 2
        again = relay("dead", "discard", first, home=home)
        assert again.returncode == 6 and "does not exist" in again.stderr
        not_dead = relay("dead", "replay", fresh, home=home)
        assert not_dead.returncode == 6
        listing = f"`relay --home {home} dead list`"
        assert f"dead letter '{fresh}' does not exist: {listing}" in not_dead.stderr
        for verb in (["replay", second], ["discard", second], ["purge", "--older-than", "0s"]):
            other = relay("dead", *verb, "--as", "bob", home=home)
            assert other.returncode == 6
            assert "is for operator and the lead alone, not for bob" in other.stderr

        done = relay("dead", "replay", second, home=home)
        assert done.stdout == f"dead letter {second} is sent again to bob\n"
        until(lambda: [row["id"] for row in rows_of("dead", "list", home=home)] == [third])
        done = relay("dead", "purge", "--older-than", "30m", home=home)
        assert done.stdout == "0 dead letters discarded\n"  # the other one is younger
