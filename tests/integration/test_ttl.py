"""TTL counts from when a message was sent: its id's time or its mtime, whichever is earlier."""

from __future__ import annotations

import os

import pytest

from relay.base.clock import NS_PER_S
from tests.box import Box


def drop_at(box: Box, text: str, name: str, mtime_ns: int) -> str:
    """Send a file that was written then."""
    sent = box.drop("alice", text, name)
    os.utime(box.path("agents", "alice", "outbox", name), ns=(mtime_ns, mtime_ns))
    return sent


@pytest.mark.parametrize(("id_s", "mtime_s"), [(0, 5), (5, 0)])
def test_the_earlier_of_the_two_counts(box: Box, id_s: int, mtime_s: int) -> None:
    begin = box.clock.now_ns()
    box.clock.advance(max(id_s, mtime_s) + 1)
    name = f"{begin + id_s * NS_PER_S}-aa.msg"
    drop_at(box, "TO: bob\nTTL: 3\n\nquick", name, begin + mtime_s * NS_PER_S)
    box.tick()
    assert box.inbox("bob") == {} and "its TTL of 3 s" in box.nacks("alice")[0]


@pytest.mark.parametrize("name", ["1706123456789012345-a1b2c3d4.msg", "1000000001-01.msg"])
def test_an_id_from_an_example_says_nothing(box: Box, name: str) -> None:
    sent = drop_at(box, "TO: bob\nTTL: 3\n\nquick", name, box.clock.now_ns())
    box.tick()
    assert list(box.inbox("bob")) == [sent]


def test_times_to_come_give_nobody_more_time(box: Box) -> None:
    later = box.clock.now_ns() + 900 * NS_PER_S
    text = "TO: bob\nDELIVERY: at-least-once\nTTL: 50\n\nquick"
    sent = drop_at(box, text, f"{later}-aa.msg", later)
    box.tick()
    box.after(61)
    assert box.states(sent) == {"bob": "expired"}


def test_a_ttl_counts_while_no_relay_runs_and_may_have_a_unit(box: Box) -> None:
    """The file is delivered as it was written, or refused: no relay ran meanwhile."""
    now = box.clock.now_ns()
    sent = drop_at(box, "TO: bob\nTTL: 2min\n\nhi", f"{now}-aa.msg", now)
    late = drop_at(
        box, "TO: bob\nTTL: 1.5m\nDELIVERY: at-least-once\n\nquick", f"{now}-bb.msg", now
    )
    box.kill()
    box.clock.advance(100)
    box.open()
    box.tick()
    assert list(box.inbox("bob")) == [sent]
    assert box.inbox("bob")[sent].headers["TTL"] == "2min"
    assert "its TTL of 90 s passed before it could be delivered" in box.nacks("alice")[0]
    assert box.row(late)["status"] == "failed"
