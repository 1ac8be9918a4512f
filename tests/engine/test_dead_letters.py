"""Dead letters beside everything else: notices, restarts, order, relay ids."""

from __future__ import annotations

from typing import Any

import pytest

from relay.acomm.model import (
    Channel,
    ChannelState,
    ChannelType,
    DeliveryState,
    MessageStatus,
    MessageType,
)
from relay.base.errors import MessageNotFound, ValidationFailed
from relay.engine.commstore import CommStore
from relay.engine.retries import SYSTEM
from tests.engine.support import AT_LEAST_ONCE, channel_of, reopened, send, standing
from tests.fakes import FakeClock


def one_attempt(store: CommStore, *others: str) -> Channel:
    """A channel where the first overdue acknowledgment, after 10 s, is the last."""
    fields: dict[str, Any] = {"delivery": AT_LEAST_ONCE, "ack_timeout": 10, "max_retries": 0}
    return channel_of(store, ChannelType.GROUP, "lead", "worker", *others, **fields)


def overdue(store: CommStore, clock: FakeClock) -> list[tuple[int, tuple[str, ...]]]:
    """Ten seconds and more go by; (message, recipients) of each dead letter."""
    clock.advance(10.1)
    assert store.tick() == []
    return [(letter.message.id, letter.recipients) for letter in store.dead_letters()]


@pytest.mark.parametrize("state", [s for s in ChannelState if s is not ChannelState.ACTIVE])
def test_a_refused_notice_stops_nothing(
    store: CommStore, clock: FakeClock, state: ChannelState
) -> None:
    system = store.create_channel(SYSTEM, ChannelType.PUB_SUB, SYSTEM)
    store.set_channel_state(system.id, state)
    channel = one_attempt(store)
    first, second = send(store, channel, "lead").id, send(store, channel, "lead").id
    assert overdue(store, clock) == [(first, ("worker",)), (second, ("worker",))]
    assert store.receive_messages(None, "lead") == []


def test_anothers_system_channel_stops_no_dead_letter(store: CommStore, clock: FakeClock) -> None:
    channel_of(store, ChannelType.DIRECT, "eve", name=SYSTEM)
    number = send(store, one_attempt(store), "lead").id
    assert overdue(store, clock) == [(number, ("worker",))]


def test_a_sender_hears_the_time_that_it_gave(store: CommStore, clock: FakeClock) -> None:
    channel = one_attempt(store)
    store.send_query(channel.id, "lead", "how many?", timeout_s=5)
    send(store, channel, "lead", MessageType.COMMAND, "go", metadata={"await_ms": 1500})
    overdue(store, clock)
    assert [letter.last_error for letter in store.dead_letters()] == [
        "no acknowledgment within 5 s, 1 attempts",
        "no acknowledgment within 1.5 s, 1 attempts",
    ]


def test_dead_for_one_it_stays_with_the_others(store: CommStore, clock: FakeClock) -> None:
    number = send(store, one_attempt(store, "other"), "lead").id
    store.acknowledge_message(number, "other", "completed")
    assert overdue(store, clock) == [(number, ("worker",))]
    opened = reopened(store, clock)
    for one in (store, opened):
        assert one.replay_dead_letter(number).id == number
        assert standing(one, number) == {
            "worker": DeliveryState.DELIVERED,
            "other": DeliveryState.ACKNOWLEDGED,
        }
        assert [m.id for m in one.receive_messages(None, "worker")] == [number]
        assert one.receive_messages(None, "other") == []
    assert opened.snapshot() == store.snapshot()


def test_dead_letters_are_in_order(store: CommStore, clock: FakeClock) -> None:
    channel = one_attempt(store)
    slow = send(store, channel, "lead", metadata={"await_ms": 20_000}).id
    quick = send(store, channel, "lead").id
    assert overdue(store, clock) == [(quick, ("worker",))]
    assert overdue(store, clock) == [(slow, ("worker",)), (quick, ("worker",))]
    reopened(store, clock)


def test_discarded_it_takes_nobody_elses_relay_id_along(store: CommStore, clock: FakeClock) -> None:
    channel = one_attempt(store)
    gone = [send(store, channel, "lead", metadata={"relay_id": 7}).id]
    gone.append(send(store, channel, "lead", metadata={"relay_id": "r-1"}).id)
    overdue(store, clock)
    kept = send(store, channel, "lead", metadata={"relay_id": "7"})
    for number in gone:
        store.discard_dead_letter(number)
    assert (
        store.engine.messages.find_by_relay_id("7")
        == kept
        == reopened(store, clock).engine.messages.find_by_relay_id("7")
    )
    assert store.engine.messages.find_by_relay_id("r-1") is None


@pytest.mark.shows("engine 1.9", "engine 3.7")
def test_replayed_discarded_and_purged(store: CommStore, clock: FakeClock) -> None:
    channel = one_attempt(store)
    for _ in range(3):
        send(store, channel, "lead")
    assert len(overdue(store, clock)) == 3
    opened = reopened(store, clock)
    clock.advance(100)
    for one in (store, opened):
        assert one.replay_dead_letter(2).status is MessageStatus.DELIVERED
        one.discard_dead_letter(1)
        assert one.purge_dead_letters(older_than_s=200) == 0
        with pytest.raises(ValidationFailed, match="expected 0 s or more, got -1"):
            one.purge_dead_letters(older_than_s=-1)
        assert one.purge_dead_letters(older_than_s=50) == 1
        assert one.dead_letters() == []
        with pytest.raises(MessageNotFound, match="dead letter 1 does not exist"):
            one.replay_dead_letter(1)
    assert opened.snapshot() == store.snapshot()
    last = max(message.id for message in opened.state.messages.values())
    assert send(reopened(opened, clock), channel, "lead").id > last > 3  # none is used twice


@pytest.mark.parametrize("first", ["acknowledged", "dead"])
def test_one_has_answered_the_other_is_dead(store: CommStore, clock: FakeClock, first: str) -> None:
    number = send(store, one_attempt(store, "other"), "lead").id
    if first == "acknowledged":
        store.acknowledge_message(number, "other", "completed")
    store.engine.retries.dead_letter(number, ["worker"], "it is gone")
    if first == "dead":
        store.acknowledge_message(number, "other", "completed")
    message = store.get_message(number)
    assert message is not None and message.status is MessageStatus.DELIVERED
    assert [letter.recipients for letter in store.dead_letters()] == [("worker",)]
    store.acknowledge_message(number, "worker", "completed")  # late
    message = store.get_message(number)
    assert message is not None and message.status is MessageStatus.ACKNOWLEDGED
    reopened(store, clock)


@pytest.mark.parametrize("first", ["bounced", "dead"])
def test_nobody_is_left_it_is_a_dead_letter(store: CommStore, clock: FakeClock, first: str) -> None:
    number = send(store, one_attempt(store, "other"), "lead").id
    if first == "bounced":
        store.engine.deliveries.move(number, ["other"], DeliveryState.BOUNCED)
    store.engine.retries.dead_letter(number, ["worker"], "it is gone")
    if first == "dead":
        store.engine.deliveries.move(number, ["other"], DeliveryState.BOUNCED)
    message = store.get_message(number)
    assert message is not None and message.status is MessageStatus.DEAD_LETTER
    assert len(store) == 0
    reopened(store, clock)


def test_who_received_it_in_time_may_say_so_later(store: CommStore, clock: FakeClock) -> None:
    number = send(store, one_attempt(store), "lead", ttl=5).id
    assert len(store.receive_messages(None, "worker")) == 1
    assert overdue(store, clock) == []
    assert standing(store, number) == {"worker": DeliveryState.EXPIRED}
    store.acknowledge_message(number, "worker", "completed")
    assert standing(store, number) == {"worker": DeliveryState.ACKNOWLEDGED}
    message = store.get_message(number)
    assert message is not None and message.status is MessageStatus.ACKNOWLEDGED
    reopened(store, clock)
