"""Rate and quota: what is over waits in the outbox, its agent hears it once, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relay.base.config import Config, SecuritySettings
from tests.box import Box

MakeBox = Callable[..., Box]


@pytest.fixture
def make_box(tmp_path: Path) -> Iterator[MakeBox]:
    made: list[Box] = []

    def make(**settings: int) -> Box:
        config = Config(security=SecuritySettings(**settings))  # type: ignore[arg-type]
        made.append(Box(tmp_path / "home", "alice", "bob", "carol", config=config))
        return made[-1]

    yield make
    for box in made:
        assert box.sql("PRAGMA integrity_check") == [("ok",)]
        box.close()


def notices(box: Box, agent: str) -> list[str]:
    return [m.body.decode() for m in box.inbox(agent).values() if m.kind == "notification"]


@pytest.mark.shows("ready 4.5")
def test_over_its_rate_messages_wait_in_the_outbox_and_go_at_that_rate(make_box: MakeBox) -> None:
    box = make_box(rate_per_s=10, rate_burst=5)
    for number in range(12):
        box.drop("alice", f"TO: bob\n\n{number}")
    box.drop("carol", "TO: bob\n\ncarol's")
    box.tick()
    assert box.bodies("bob") == ["0", "1", "2", "3", "4", "carol's"]
    assert len(box.outbox("alice")) == 7
    assert notices(box, "alice") == [
        "alice sends faster than 10 messages a second (security.rate_per_s): excess messages wait "
        "in the outbox, nothing is lost\n"
    ]
    assert notices(box, "carol") == []
    assert box.dispatcher.throttled == (["alice"], 1, [], 0)

    for _ in range(20):
        box.after(0.1, turns=1)
    assert sorted(box.bodies("bob")) == sorted([*map(str, range(12)), "carol's"])
    assert len(notices(box, "alice")) == 1
    assert box.sql("SELECT kind, agent, path FROM security_events") == [
        ("rate_limited", "alice", "agents/alice/outbox")
    ]


@pytest.mark.shows("ready 4.5")
def test_it_is_told_again_after_a_calm_minute(make_box: MakeBox) -> None:
    box = make_box(rate_per_s=10, rate_burst=1)
    for _ in range(2):
        for number in range(3):
            box.drop("alice", f"TO: bob\n\n{number}")
        for _ in range(5):
            box.tick()
            box.clock.advance(0.2)
        box.after(70, turns=1)
    assert len(box.bodies("bob")) == 6
    assert len(notices(box, "alice")) == 2


def test_killed_while_messages_wait_for_their_turn_each_is_delivered_once(
    make_box: MakeBox,
) -> None:
    box = make_box(rate_per_s=10, rate_burst=2)
    for number in range(6):
        box.drop("alice", f"TO: bob\n\n{number}")
    box.tick()
    box.restart()
    for _ in range(10):
        box.after(0.2, turns=1)
    assert box.bodies("bob") == [str(number) for number in range(6)]


def test_over_the_quota_of_files_each_is_taken_in_its_turn(make_box: MakeBox) -> None:
    box = make_box(outbox_files=4)
    box.kill()
    for number in range(20):
        box.drop("alice", f"TO: bob\n\n{number}")
    box.clock.advance(10)
    box.open()
    box.tick(10)
    assert box.bodies("bob") == [str(number) for number in range(20)]
    assert notices(box, "alice") == [
        "20 files wait in the outbox of alice, more than 4 (security.outbox_files): each is taken "
        "in its turn, nothing is lost\n"
    ]
    assert box.sql("SELECT kind, agent FROM security_events") == [("quota_exceeded", "alice")]
    assert box.dispatcher.throttled == ([], 0, ["alice"], 1)
    box.after(31, turns=1)
    assert box.dispatcher.throttled == ([], 0, [], 1)


def test_over_the_quota_of_bytes_it_is_told_once(make_box: MakeBox) -> None:
    box = make_box(outbox_mib=1)
    box.kill()
    for number in range(3):
        box.drop("alice", f"TO: bob\n\n{number}" + "x" * 700_000)
    box.clock.advance(10)
    box.open()
    box.tick(3)
    assert len(box.bodies("bob")) == 3
    assert notices(box, "alice") == [
        "2 MiB wait in the outbox of alice, more than 1 MiB (security.outbox_mib): each is taken "
        "in its turn, nothing is lost\n"
    ]
    assert box.sql("SELECT kind, agent FROM security_events") == [("quota_exceeded", "alice")]
