"""``relay dead`` and ``relay open``: what was given up, as a person sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.box import Box
from tests.procs import Relay, agents_of, home_of, relay, rows_of, until

pytestmark = pytest.mark.shows("engine 7.8")


@pytest.fixture
def letters(box: Box) -> tuple[str, ...]:
    """Three letters, dead for bob: the second in colours."""
    head = "TO: bob\nDELIVERY: at-least-once\n\n"
    texts = ("deploy\nnow", "test\x1b[31m", "clean up")
    dead = [box.send("alice", head + text) for text in texts]
    box.until_dead()
    box.flush()
    return tuple(dead)


def test_dead_letters_are_listed_like_all_messages(box: Box, letters: tuple[str, ...]) -> None:
    rows = rows_of("dead", "list", home=box.root)
    assert [(row["id"], row["to"], row["outcome"]) for row in rows] == [
        (one, "bob", "dead") for one in letters
    ]
    assert all(row["reason"] == "no acknowledgment within 60 s, 4 attempts" for row in rows)
    assert rows == rows_of("list", "is:dead", "sort:oldest", home=box.root)
    table = relay("dead", "list", home=box.root).stdout
    assert "dead: no acknowledgment within 60 s" in table and "deploy" in table


def test_a_home_without_any(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home")
    done = relay("dead", "list", home=home)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no dead letters\n")
    done = relay("open", home=home)
    assert (done.returncode, done.stderr) == (0, "no open answers\n")
    done = relay("open", "--overdue", home=home)
    assert (done.returncode, done.stderr) == (0, "nothing is overdue\n")


def test_discard_replay_and_purge(box: Box, letters: tuple[str, ...]) -> None:
    first, second, third = letters
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
        listing = f"`relay --home {home} dead list`"
        assert again.returncode == 6
        assert f"dead letter '{first}' does not exist: {listing}" in again.stderr
        done = relay("dead", "replay", second, home=home)
        assert done.stdout == f"dead letter {second} is sent again to bob\n"
        until(lambda: [row["id"] for row in rows_of("dead", "list", home=home)] == [third])
        done = relay("dead", "purge", "--older-than", "30m", home=home)
        assert done.stdout == "0 dead letters discarded\n"  # the other one is younger
