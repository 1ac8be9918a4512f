"""The rate of an agent: what is over it waits in the outbox, told once; nothing is lost."""

from __future__ import annotations

import pytest

from relay.base.config import Config, SecuritySettings
from relay.delivery import intake_queue
from tests.box import Box


def limits(**settings: int) -> pytest.MarkDecorator:
    config = Config(security=SecuritySettings(**settings))  # type: ignore[arg-type]
    return pytest.mark.box("alice", "bob", "carol", config=config)


def notices(box: Box, agent: str) -> list[str]:
    return [m.body.decode() for m in box.inbox(agent).values() if m.kind == "notification"]


@pytest.mark.shows("ready 4.5")
@limits(rate_per_s=10, rate_burst=5)
def test_over_its_rate_messages_wait_in_the_outbox_and_go_at_that_rate(box: Box) -> None:
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

    for _ in range(20):
        box.after(0.1, turns=1)
    assert sorted(box.bodies("bob")) == sorted([*map(str, range(12)), "carol's"])
    assert len(notices(box, "alice")) == 1
    assert box.sql("SELECT kind, agent, path FROM security_events") == [
        ("rate_limited", "alice", "agents/alice/outbox")
    ]


@limits(rate_per_s=10, rate_burst=2)
def test_killed_while_messages_wait_for_their_turn_each_is_delivered_once(box: Box) -> None:
    for number in range(6):
        box.drop("alice", f"TO: bob\n\n{number}")
    box.tick()
    box.restart()
    for _ in range(10):
        box.after(0.2, turns=1)
    assert box.bodies("bob") == [str(number) for number in range(6)]


def test_of_more_files_than_the_relay_remembers_each_is_taken_in_its_turn(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_queue, "MOST_FILES", 4)
    box.kill()
    for number in range(20):
        box.drop("alice", f"TO: bob\n\n{number}")
    box.clock.advance(10)
    box.open()
    box.tick(10)
    assert box.bodies("bob") == [str(number) for number in range(20)]
