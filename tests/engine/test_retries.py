"""Overdue answers, retries, exactly once and dead letters: the guide's rules by the clock."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    MessageStatus,
    MessageType,
)
from relay.base.errors import MessageNotFound, ValidationFailed
from relay.commstore.store import CommStore
from relay.engine import events
from relay.engine.retries import DEAD_LETTER_TOPIC, SYSTEM
from tests.engine.support import (
    AT_LEAST_ONCE,
    after,
    channel_of,
    group_of,
    reopened,
    send,
    standing,
    status_of,
)
from tests.fakes import FakeClock

SURE = ChannelConfig(delivery=DeliveryMode.AT_LEAST_ONCE, ack_timeout=10)
ONCE = ChannelConfig(delivery=DeliveryMode.EXACTLY_ONCE, ack_timeout=10)


class Scene:
    """A lead and a worker in a group, and a clock to turn."""

    def __init__(self, config: ChannelConfig) -> None:
        self.clock = FakeClock()
        self.store = CommStore(self.clock)
        self.channel = self.store.create_channel("c", ChannelType.GROUP, "lead", config)
        self.store.join_channel(self.channel.id, "worker")

    def send(self, text: str = "work", **fields: object) -> int:
        """A text from the lead; its number."""
        return self.store.send_message(self.channel.id, "lead", MessageType.TEXT, text, **fields).id

    def after(self, seconds: float) -> list[tuple[str, int]]:
        """Time goes on; (recipient, attempt) of what was delivered again."""
        self.clock.advance(seconds)
        return [(again.recipient, again.attempt) for again in self.store.tick()]

    def die(self) -> None:
        """Time goes on until what is not acknowledged is dead."""
        for _ in range(8):
            self.after(15)

    def state(self, message_id: int, recipient: str = "worker") -> DeliveryState:
        """Where a delivery stands."""
        return self.store.state.deliveries[message_id][recipient].state

    def reopened(self) -> None:
        """Written, and loaded again."""
        self.store = CommStore.load(self.clock, self.store.snapshot().file())


@pytest.fixture
def scene() -> Scene:
    """At least once, ack timeout 10 s, three retries from 1 s on."""
    return Scene(SURE)


def test_a_later_message_that_is_due_sooner_is_so_in_a_store_opened_again(scene: Scene) -> None:
    late = [scene.send(metadata={"await_ms": 60_000 - number}) for number in range(5)]
    soon = scene.send()
    scene.reopened()
    assert scene.after(10.1) == []
    assert scene.state(soon) is DeliveryState.WAITING
    assert {scene.state(number) for number in late} == {DeliveryState.DELIVERED}


@pytest.mark.shows("engine 3.4")
def test_the_backoff_schedule_of_the_guide(scene: Scene) -> None:
    sent = scene.send()
    assert scene.after(9.9) == []
    assert scene.after(0.2) == []  # overdue: waits 1 s
    assert scene.state(sent) is DeliveryState.WAITING
    assert scene.after(0.9) == []
    assert scene.after(0.2) == [("worker", 2)]
    assert scene.after(10.1) == []  # overdue: waits 2 s
    assert scene.after(1.9) == []
    assert scene.after(0.2) == [("worker", 3)]
    assert scene.after(10.1) == []  # overdue: waits 4 s
    assert scene.after(3.8) == []
    assert scene.after(0.3) == [("worker", 4)]
    assert scene.store.dead_letters() == []
    assert scene.after(10.1) == []  # dead after the next ack timeout
    (letter,) = scene.store.dead_letters()
    assert letter.message.id == sent
    assert letter.message.status is MessageStatus.DEAD_LETTER
    assert letter.message.retry_count == 3
    assert letter.recipients == ("worker",)
    assert letter.last_error == "no acknowledgment within 10 s, 4 attempts"
    assert letter.dead_lettered_at == scene.clock.now_ns() // 10**9
    assert scene.after(1000) == []


def test_one_waiting_for_its_next_attempt_can_be_received_and_acked(scene: Scene) -> None:
    sent = scene.send()
    scene.after(10.1)
    assert scene.state(sent) is DeliveryState.WAITING
    assert [m.id for m in scene.store.receive_messages(None, "worker")] == [sent]
    assert scene.store.receive_messages(None, "worker") == []
    scene.store.acknowledge_message(sent, "worker", "completed")
    assert scene.after(100) == []


@pytest.mark.shows("engine 3.4")
def test_timers_are_kept_per_recipient(scene: Scene) -> None:
    scene.store.join_channel(scene.channel.id, "other")
    sent = scene.send()
    scene.store.acknowledge_message(sent, "worker", "received")
    scene.after(10.1)
    assert scene.after(1.1) == [("other", 2)]
    for _ in range(6):
        scene.after(15)
    (letter,) = scene.store.dead_letters()
    assert letter.recipients == ("other",)
    assert status_of(scene.store, sent) is not MessageStatus.DEAD_LETTER  # worker has it


@pytest.mark.shows("engine 3.8")
def test_the_sender_and_subscribers_hear_of_a_dead_letter(scene: Scene) -> None:
    system = scene.store.create_channel(SYSTEM, ChannelType.PUB_SUB, SYSTEM)
    scene.store.subscribe(system.id, "watcher", "_system.message.#")
    scene.send()
    scene.die()
    for listener in ("lead", "watcher"):
        (notice,) = scene.store.receive_messages(None, listener)
        assert notice.topic == DEAD_LETTER_TOPIC
        assert b"is dead: no acknowledgment within 10 s" in notice.content


@pytest.mark.shows("engine 3.7")
def test_a_replayed_dead_letter_begins_again(scene: Scene) -> None:
    sent = scene.send()
    scene.die()
    scene.store.receive_messages(None, "worker")
    replayed = scene.store.replay_dead_letter(sent)
    assert replayed.status is MessageStatus.DELIVERED
    assert replayed.retry_count == 0
    assert scene.store.dead_letters() == []
    assert [m.id for m in scene.store.receive_messages(None, "worker")] == [sent]
    for attempt in (6, 7, 8):  # as many again; the numbers go on
        scene.after(10.1)
        assert scene.after(5) == [("worker", attempt)]
    scene.after(10.1)
    (letter,) = scene.store.dead_letters()
    assert letter.message.retry_count == 3
    assert letter.last_error == "no acknowledgment within 10 s, 4 attempts since its replay"


@pytest.mark.shows("engine 3.9")
def test_a_late_ack_takes_a_dead_letter_back(scene: Scene) -> None:
    sent = scene.send()
    scene.die()
    scene.store.receive_messages(None, "lead")  # hears that it is dead
    scene.store.acknowledge_message(sent, "worker", "completed", "was at lunch")
    assert scene.store.dead_letters() == []
    assert status_of(scene.store, sent) is MessageStatus.ACKNOWLEDGED
    (ack,) = scene.store.receive_messages(None, "lead")
    assert ack.content == b"completed\nwas at lunch"
    scene.reopened()
    assert scene.state(sent) is DeliveryState.ACKNOWLEDGED
    assert scene.after(1000) == []


@pytest.mark.shows("engine 3.10")
def test_what_is_a_day_old_is_not_tried_again() -> None:
    config = ChannelConfig(delivery=DeliveryMode.AT_LEAST_ONCE, ack_timeout=40_000)
    scene = Scene(config)
    scene.send()
    assert scene.after(40_000) == []
    assert scene.after(1) == [("worker", 2)]
    assert scene.after(40_000) == []
    assert scene.after(2) == [("worker", 3)]
    assert scene.after(40_000) == []
    (letter,) = scene.store.dead_letters()
    assert letter.last_error == "no acknowledgment for 120003 s, 3 attempts"


def test_an_owner_that_delivers_by_itself_is_told_what_is_due(scene: Scene) -> None:
    sent = scene.send()
    scene.clock.advance(10.1)
    assert scene.store.engine.retries.due() == []  # it waits from now on
    scene.clock.advance(1.1)
    (one,) = scene.store.engine.retries.due()
    assert (one.recipient, one.state, one.attempt) == ("worker", DeliveryState.WAITING, 2)
    assert scene.store.engine.retries.due() == [one]  # until it is done
    scene.store.engine.deliveries.schedule_retry(
        sent, "worker", scene.clock.now_ns() // 10**6 + 500
    )
    assert scene.store.engine.retries.due() == []
    scene.clock.advance(0.5)
    assert scene.store.engine.retries.due() == [one]
    scene.store.engine.deliveries.postpone(sent, "worker", one.attempt)
    assert scene.store.next_due_ms() is None
    scene.store.engine.deliveries.deliver(sent, ["worker"], one.attempt)
    assert scene.store.state.deliveries[sent]["worker"].attempt == 2
    scene.clock.advance(10)
    assert scene.store.engine.retries.due() == []
    assert scene.state(sent) is DeliveryState.WAITING


def test_so_many_at_a_time(scene: Scene) -> None:
    for _ in range(10):
        scene.send()
    scene.clock.advance(10.1)
    waiting = []
    for _ in range(4):
        scene.store.engine.retries.due(limit=3)
        waiting.append(
            sum(
                d["worker"].state is DeliveryState.WAITING
                for d in scene.store.state.deliveries.values()
            )
        )
    assert waiting == [3, 6, 9, 10]
    assert len(scene.after(1.1)) == 10


@pytest.mark.shows("engine 3.11")
def test_exactly_once_is_not_delivered_again(scene: Scene) -> None:
    scene = Scene(ONCE)
    sent = scene.send()
    assert len(scene.store.receive_messages(None, "worker")) == 1
    scene.after(10.1)
    assert scene.after(1.1) == []  # the attempt counts, and delivers nothing
    assert scene.store.receive_messages(None, "worker") == []
    assert scene.state(sent) is DeliveryState.RECEIVED
    scene.reopened()  # the set survives
    assert len(scene.store.state.duplicates) == 1
    scene.store.acknowledge_message(sent, "worker", "completed")
    scene.after(9)  # 20 s after the delivery, 10 s after the attempt that it has stopped
    assert len(scene.store.state.duplicates) == 1
    scene.after(12)
    assert scene.store.state.duplicates == {}


@pytest.mark.shows("engine 3.11")
@pytest.mark.parametrize("ack_timeout", [1, 10, 60])
def test_exactly_once_no_retry_delivers_it_again(ack_timeout: int) -> None:
    mode = DeliveryMode.EXACTLY_ONCE
    scene = Scene(ChannelConfig(delivery=mode, ack_timeout=ack_timeout))
    sent = scene.send()
    assert len(scene.store.receive_messages(None, "worker")) == 1
    while not scene.store.dead_letters():
        assert scene.after(0.5) == []
        assert scene.store.receive_messages(None, "worker") == []
        scene.reopened()
    (letter,) = scene.store.dead_letters()
    assert (letter.message.id, letter.message.retry_count) == (sent, 3)


@pytest.mark.shows("engine 3.11")
def test_a_replay_is_not_stopped_by_exactly_once() -> None:
    scene = Scene(ONCE)
    sent = scene.send()
    scene.store.receive_messages(None, "worker")
    scene.die()
    scene.store.replay_dead_letter(sent)
    assert [m.id for m in scene.store.receive_messages(None, "worker")] == [sent]


@pytest.mark.shows("engine 3.6")
@pytest.mark.parametrize("kind", [MessageType.COMMAND, MessageType.QUERY])
def test_at_most_once_nothing_is_delivered_again_and_nothing_dies(kind: MessageType) -> None:
    scene = Scene(ChannelConfig())
    sent = scene.store.send_message(scene.channel.id, "lead", kind, "do it").id
    assert scene.store.next_due_ms() is None
    for _ in range(8):
        assert scene.after(61) == []  # past the default ack timeout
    assert scene.state(sent) is DeliveryState.DELIVERED
    assert scene.store.dead_letters() == []
    scene.store.receive_messages(None, "worker")
    message = scene.store.get_message(sent)
    assert (
        message is not None
        and message.retry_count == 0
        and scene.store.engine.archives.is_final(message)
    )
    scene.store.acknowledge_message(sent, "worker", "completed")
    assert scene.state(sent) is DeliveryState.ACKNOWLEDGED


@pytest.mark.shows("engine 3.6")
def test_what_asks_for_it_comes_again_in_any_channel() -> None:
    scene = Scene(ChannelConfig())
    asks = {"delivery": "at-least-once"}
    number = scene.channel.id
    scene.store.send_message(number, "lead", MessageType.COMMAND, "do it", metadata=asks)
    scene.store.send_query(number, "lead", "which?", 5)  # its sender waits
    scene.after(5.1)
    assert scene.after(1.1) == [("worker", 2)]
    scene.after(53.9)  # the default ack timeout
    assert scene.after(1.1) == [("worker", 2)]


def test_a_timer_of_an_earlier_version_stops_where_nothing_asked_for_it() -> None:
    scene = Scene(ChannelConfig())
    sent = scene.store.send_message(scene.channel.id, "lead", MessageType.COMMAND, "do it").id
    state = scene.store.state
    due = msgspec.structs.replace(state.deliveries[sent]["worker"], due_ms=1)
    scene.store.engine.apply(events.DeliveryTimed(sent, "worker", due, 0))
    assert scene.after(1) == []
    assert scene.store.next_due_ms() is None
    assert scene.state(sent) is DeliveryState.DELIVERED


def one_attempt(store: CommStore, *others: str) -> Channel:
    """A channel where the first overdue acknowledgment, after 10 s, is the last."""
    fields: dict[str, Any] = {"delivery": AT_LEAST_ONCE, "ack_timeout": 10, "max_retries": 0}
    return group_of(store, "lead", "worker", *others, **fields)


def overdue(store: CommStore, clock: FakeClock) -> list[tuple[int, tuple[str, ...]]]:
    """Ten seconds and more go by; (message, recipients) of each dead letter."""
    assert after(store, 10.1) == []
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
        "no acknowledgment within 5 s, 1 attempt",
        "no acknowledgment within 1.5 s, 1 attempt",
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
    assert status_of(store, number) is MessageStatus.DELIVERED
    assert [letter.recipients for letter in store.dead_letters()] == [("worker",)]
    store.acknowledge_message(number, "worker", "completed")  # late
    assert status_of(store, number) is MessageStatus.ACKNOWLEDGED
    reopened(store, clock)


@pytest.mark.parametrize("first", ["bounced", "dead"])
def test_nobody_is_left_it_is_a_dead_letter(store: CommStore, clock: FakeClock, first: str) -> None:
    number = send(store, one_attempt(store, "other"), "lead").id
    if first == "bounced":
        store.engine.deliveries.move(number, ["other"], DeliveryState.BOUNCED)
    store.engine.retries.dead_letter(number, ["worker"], "it is gone")
    if first == "dead":
        store.engine.deliveries.move(number, ["other"], DeliveryState.BOUNCED)
    assert status_of(store, number) is MessageStatus.DEAD_LETTER
    assert len(store) == 0
    reopened(store, clock)


def test_who_received_it_in_time_may_say_so_later(store: CommStore, clock: FakeClock) -> None:
    number = send(store, one_attempt(store), "lead", ttl=5).id
    assert len(store.receive_messages(None, "worker")) == 1
    assert overdue(store, clock) == []
    assert standing(store, number) == {"worker": DeliveryState.EXPIRED}
    store.acknowledge_message(number, "worker", "completed")
    assert standing(store, number) == {"worker": DeliveryState.ACKNOWLEDGED}
    assert status_of(store, number) is MessageStatus.ACKNOWLEDGED
    reopened(store, clock)
