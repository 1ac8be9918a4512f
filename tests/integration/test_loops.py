"""Two agents that thank each other, and one that sends fast: what is too much waits in the outbox,
told once, and none is lost."""

from __future__ import annotations

import pytest

from relay.base.config import Config, LimitSettings, SecuritySettings
from relay.delivery import intake_queue
from tests.box import Box

pytestmark = pytest.mark.box("alice", "bob", "carol", config=Config(lead="carol"))

MOST = 64


def echo(box: Box, *agents: str) -> int:
    """Each of these reads what it has, and thanks for it; how many answers that made."""
    made = 0
    for agent in agents:
        for message_id, message in box.inbox(agent).items():
            if message.headers["FROM"] != "__orchestrator__":
                box.take(agent, message_id)
                box.drop(agent, f"TO: {message.headers['FROM']}\nRE: {message_id}\n\nthank you")
                made += 1
    box.tick(2)
    return made


def talk(box: Box) -> int:
    """They go on until nothing comes any more; how many answers that made."""
    made = 0
    for _ in range(4 * MOST):
        more = echo(box, "alice", "bob")
        if not more:
            break
        made += more
    return made


def notes(box: Box, agent: str) -> list[str]:
    return [m.body.decode() for m in box.inbox(agent).values() if m.kind == "notification"]


def test_two_that_thank_each_other_are_slowed_down_and_nothing_is_lost(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhello")
    assert talk(box) == MOST + 1  # the last one waits
    (waits,) = box.outbox("alice") + box.outbox("bob")
    row = box.row(waits.removesuffix(".msg"))
    assert row["status"] == "pending"
    assert "more than 64 answers of alice, bob along RE within a minute" in row["last_error"]
    other = box.send("alice", "TO: carol\n\nsomething else")  # nobody else is held up
    assert box.states(other) == {"carol": "written"}
    box.after(61)
    assert box.row(waits.removesuffix(".msg"))["status"] in ("completed", "archived")
    assert MOST <= talk(box) <= MOST + 2  # the next ones; 64 a minute
    for agent in ("carol", "operator"):
        (note,) = notes(box, agent)
        assert note.startswith("a loop of answers: more than 64 answers of alice, bob along RE")
    assert box.sql("SELECT count(*) FROM security_events WHERE kind = 'reply_loop'") == [(1,)]
    assert box.sql("SELECT count(*) FROM messages WHERE status = 'failed'") == [(0,)]


def test_after_a_crash_it_still_waits_and_is_not_told_twice(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhello")
    talk(box)
    waits = box.outbox("alice") + box.outbox("bob")
    box.restart()
    box.tick(2)
    assert box.outbox("alice") + box.outbox("bob") == waits
    assert len(notes(box, "operator")) == len(notes(box, "carol")) == 1
    assert box.sql("SELECT count(*) FROM security_events WHERE kind = 'reply_loop'") == [(1,)]


def test_a_talk_that_takes_its_time_is_never_held(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhello")
    for _ in range(MOST + 10):
        box.clock.advance(1)
        assert echo(box, "alice", "bob") == 1
    assert notes(box, "operator") == []


def test_a_clock_that_is_set_back_makes_no_loop_of_a_slow_talk(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhello")
    for _ in range(MOST + 1):
        box.clock.advance(2)
        assert echo(box, "alice", "bob") == 1
    box.clock.jump(-3600)
    assert echo(box, "alice", "bob") == 1
    assert box.outbox("alice") + box.outbox("bob") == []
    assert notes(box, "operator") == []


@pytest.mark.box("alice", "bob", config=Config(limits=LimitSettings(reply_depth=3)))
def test_the_limit_is_a_setting(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhello")
    assert talk(box) == 4
    assert len(notes(box, "operator")) == 1


# -- the rate of an agent ------------------------------------------------------------------


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
