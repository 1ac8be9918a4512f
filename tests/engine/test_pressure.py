"""Too much is refused and said; a long run leaves nothing behind and walks through nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relay.acomm import store_file
from relay.acomm.model import (
    Channel,
    ChannelType,
    DeliveryState,
    MessageFilter,
    MessageStatus,
    MessageType,
)
from relay.base.errors import CommError, StoreCapacity, StoreFull
from relay.base.names import ORCHESTRATOR
from relay.commstore.queues import CAPACITY_TOPIC
from relay.commstore.store import CommStore
from relay.engine import tables, transitions
from relay.engine.engine import Engine
from relay.engine.events import DuplicatesForgotten, Event
from relay.engine.retries import FORGET_PER_MS
from relay.engine.rules import Limits
from relay.engine.state import State
from tests.engine import support
from tests.engine.support import (
    AT_LEAST_ONCE,
    BY_FILES,
    EXACTLY_ONCE,
    after,
    channel_of,
    group_of,
    receive,
    reopened,
    send,
    standing,
)
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 1.7", "engine 5.6")


def limited(
    clock: FakeClock, warn: Callable[[str], object] | None = None, **limits: int
) -> CommStore:
    return CommStore(clock, limits=Limits()._replace(**limits), warn=warn)


def refused(store: CommStore, call: Callable[[], object], kind: type[CommError]) -> str:
    """What is said of a call that is refused; there is always something to be done."""
    error = support.refused(store, call, kind)
    assert error.hint
    return str(error)


# -- memory --------------------------------------------------------------------------------


@pytest.mark.shows("engine 5.1")
def test_at_the_threshold_what_is_done_makes_room(clock: FakeClock) -> None:
    store = limited(clock, active_messages=3)
    channel = group_of(store, "a", "b")
    for _ in range(10):
        send(store, channel, "a")
        store.receive_messages(None, "b")
    assert len(store) == 1 + 9 % 3 and store.stats().archived == 9 // 3 * 3


@pytest.mark.shows("engine 5.1")
def test_where_nothing_is_done_the_store_is_full_until_something_is(clock: FakeClock) -> None:
    store = limited(clock, active_messages=3)
    channel = group_of(store, "a", "b")
    sent = [send(store, channel, "a") for _ in range(3)]
    text = refused(store, lambda: send(store, channel, "a"), StoreFull)
    assert text == "the store has 3 active messages, its limit is 3"
    receive(store, sent[1].id, "b")
    assert send(store, channel, "a").status is MessageStatus.DELIVERED
    assert len(store) == 3 and list(store.state.archive) == [sent[1].id]
    refused(store, lambda: send(store, channel, "a"), StoreFull)


def test_one_sender_has_half_of_the_active_messages_at_most(clock: FakeClock) -> None:
    limits = Limits()._replace(active_messages=8)
    engine = Engine(clock, limits=limits, rules=BY_FILES)
    group = group_of(engine, "a", "b", "c", ORCHESTRATOR)
    sent = [support.send(engine, group, "a") for _ in range(6)]  # while there is room for others
    text = support.refused(engine, lambda: support.send(engine, group, "a"), StoreFull)
    assert "the store has 6 active messages of a, half of its limit of 8" in str(text)
    support.send(engine, group, "a", metadata={"to": ORCHESTRATOR})  # a cancel, say
    assert support.send(engine, group, "c").id == 8
    for one in sent:
        engine.deliveries.deliver(one.id, ["b", "c", ORCHESTRATOR])
    assert engine.archives.evict() >= 6
    assert support.send(engine, group, "a").id == 9


def test_a_full_store_takes_the_acknowledgments_that_empty_it(clock: FakeClock) -> None:
    store = limited(clock, active_messages=2)
    channel = group_of(store, "a", "b")
    command = send(store, channel, "a", MessageType.COMMAND)
    query = store.send_query(channel.id, "a", "how many?")
    refused(store, lambda: send(store, channel, "a"), StoreFull)
    store.acknowledge_message(command.id, "b", "completed")
    store.send_response(channel.id, "b", str(query.correlation_id), "seven")
    store.receive_messages(None, "a")
    assert send(store, channel, "a").id == 5
    assert len(store) == 1


def test_a_store_that_is_full_does_not_look_at_everything_each_time(clock: FakeClock) -> None:
    store = limited(clock, active_messages=1000)
    channel = group_of(store, "a", "b")
    for _ in range(1000):
        send(store, channel, "a")
    looks: list[int] = []
    archives = store.engine.archives
    is_final = archives.is_final
    archives.is_final = lambda m: looks.append(m.id) or is_final(m)  # type: ignore[method-assign,func-returns-value]
    for _ in range(50):
        refused(store, lambda: send(store, channel, "a"), StoreFull)
    assert len(looks) == 1000
    receive(store, 1, "b")
    store.tick()
    assert send(store, channel, "a").id == 1001


# -- the file ------------------------------------------------------------------------------

SMALL = {"file_bytes": 10_000, "warn_bytes": 8_000, "reserve_bytes": 1_000}


@pytest.mark.shows("engine 5.2")
def test_near_the_limit_it_is_said_once_and_again_after_room_was_made(clock: FakeClock) -> None:
    said: list[str] = []
    store = limited(clock, said.append, **SMALL)
    channel = group_of(store, "a", "b")
    system = store.create_channel("_system", ChannelType.PUB_SUB, "_system")
    store.subscribe(system.id, "watcher", CAPACITY_TOPIC)
    for _ in range(2):
        while not said:
            send(store, channel, "a", content="x" * 840)
        send(store, channel, "a", content="x")
        assert len(said) == 1 and "of 10000 bytes" in said[0]
        notice = store.receive_messages(system.id, "watcher")
        assert [(m.message_type, m.topic) for m in notice] == [
            (MessageType.NOTIFICATION, CAPACITY_TOPIC)
        ]
        store.receive_messages(None, "b")
        store.evict()
        assert store.compact().archived > 7
        said.clear()


@pytest.mark.shows("engine 5.3")
def test_within_the_reserve_only_answers_are_taken(clock: FakeClock) -> None:
    store = limited(clock, lambda _: None, **SMALL)
    channel = group_of(store, "a", "b")
    command = send(store, channel, "a", MessageType.COMMAND)
    refused(store, lambda: send(store, channel, "a", content="x" * 9_000), StoreCapacity)
    with pytest.raises(StoreCapacity) as caught:
        while True:
            send(store, channel, "a", content="x" * 500)
    assert "of 10000 bytes, and the last 1000 are reserved for answers" in str(caught.value)
    refused(store, lambda: send(store, channel, "a", content="x" * 500), StoreCapacity)
    assert "compact" in caught.value.hint
    store.acknowledge_message(command.id, "b", "completed")
    with pytest.raises(StoreCapacity):
        while True:
            store.acknowledge_message(command.id, "b", "completed", "x" * 300)
    store.receive_messages(None, "b")
    store.evict()
    store.compact()
    assert send(store, channel, "a", content="x" * 500)


def test_metadata_counts_as_what_it_takes(clock: FakeClock) -> None:
    store = limited(clock, lambda _: None, **SMALL)
    channel = group_of(store, "a", "b")
    with pytest.raises(StoreCapacity):
        while True:
            send(store, channel, "a", metadata={"k" * 100: "é" * 200})
    assert 8_000 < len(store_file.encode(store.snapshot().file(), compress=False)) < 10_000
    store.receive_messages(None, "b")
    assert reopened(store, clock).stats().used_bytes == store.state.record_bytes
    store.evict()
    store.compact()
    assert store.state.record_bytes == 0


# -- counts --------------------------------------------------------------------------------


@pytest.mark.shows("engine 5.5")
def test_no_more_messages_than_a_file_holds(clock: FakeClock) -> None:
    store = limited(clock, messages=3)
    channel = group_of(store, "a", "b")
    for _ in range(3):
        send(store, channel, "a")
        store.receive_messages(None, "b")
    assert store.archive(1) == 1
    text = refused(store, lambda: send(store, channel, "a"), StoreCapacity)
    assert text == "the store has 3 messages, its limit is 3"
    store.compact()
    assert send(store, channel, "a").id == 4
    refused(store, lambda: send(store, channel, "a"), StoreCapacity)


@pytest.mark.shows("engine 5.5")
def test_no_more_channels_and_subscriptions_than_a_file_holds(clock: FakeClock) -> None:
    store = limited(clock, channels=2, subscriptions=1)
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    group_of(store, "a", name="two")
    text = refused(
        store, lambda: store.create_channel("three", ChannelType.GROUP, "a"), StoreCapacity
    )
    assert text == "the store has 2 channels, its limit is 2"
    store.subscribe(channel.id, "b", "#")
    store.subscribe(channel.id, "b", "#")
    text = refused(store, lambda: store.subscribe(channel.id, "c", "#"), StoreCapacity)
    assert text == "the store has 1 subscriptions, its limit is 1"
    assert not store.is_participant(channel.id, "c")


# -- a channel's words ---------------------------------------------------------------------


@pytest.mark.shows("engine 4.4")
def test_description_and_tags_are_kept_and_changed(store: CommStore, clock: FakeClock) -> None:
    channel = store.create_channel(
        "c", ChannelType.GROUP, "a", description="é" * 1024, tags=["t" * 64] * 100
    )
    assert reopened(store, clock).get_channel(channel.id) == channel
    assert (channel.description, len(channel.tags)) == ("é" * 1024, 100)
    changed = store.configure_channel(channel.id, description="", tags=("x", "y"), echo=True)
    assert (changed.description, changed.tags, changed.config.echo) == (None, ("x", "y"), True)
    assert store.configure_channel(channel.id, echo=False).tags == ("x", "y")
    assert reopened(store, clock).get_channel(channel.id).tags == ("x", "y")


# -- fan-out -------------------------------------------------------------------------------


@pytest.mark.shows("engine 1.12")
def test_a_large_fan_out_goes_in_batches(store: CommStore, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = channel_of(store, ChannelType.BROADCAST, "a", *(f"r{n}" for n in range(2500)))
    statuses: list[MessageStatus] = []
    apply = transitions.apply

    def watching(state: State, event: Event) -> None:
        apply(state, event)
        statuses.append(store.state.messages[1].status)

    monkeypatch.setattr(transitions, "apply", watching)
    message = store.broadcast(channel.id, "a", "to all")
    sent, delivered = MessageStatus.SENT, MessageStatus.DELIVERED
    assert statuses == [sent, sent, sent, delivered]
    assert set(standing(store, message.id).values()) == {DeliveryState.DELIVERED}
    assert len(standing(store, message.id)) == 2500


@pytest.mark.shows("engine 1.13")
def test_one_who_is_not_there_holds_up_nobody(clock: FakeClock) -> None:
    said: list[str] = []
    store = CommStore(clock, warn=said.append)
    channel = group_of(store, "a", *(f"r{n}" for n in range(1500)))
    people = [f"r{n}" for n in range(1500)]
    message = send(store, channel, "a", recipients=[*people[:700], "ghost", *people[700:]])
    states = standing(store, message.id)
    assert states.pop("ghost") is DeliveryState.BOUNCED
    assert set(states.values()) == {DeliveryState.DELIVERED}
    assert said == [f"message {message.id}: 1 recipients have left the channel, ghost first"]
    assert message.status is MessageStatus.DELIVERED


def given_up(store: CommStore, many: int) -> tuple[Channel, list[int]]:
    """A channel with so many dead letters."""
    channel = group_of(store, "lead", "worker")
    numbers = [send(store, channel, "lead", MessageType.COMMAND).id for _ in range(many)]
    for number in numbers:
        store.engine.retries.dead_letter(number, ["worker"], "it is gone")
    return channel, numbers


class Unwalked(dict[int, object]):
    """A table that is looked up, and never gone through."""

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("somebody goes through the whole table")

    values = items = keys = __iter__  # type: ignore[assignment]


@pytest.mark.damages
@pytest.mark.parametrize("call", ["late", "replay", "discard", "other"])
def test_no_call_goes_through_all_dead_letters(store: CommStore, call: str) -> None:
    channel, numbers = given_up(store, 3)
    other = send(store, channel, "lead", MessageType.COMMAND).id
    state = store.state
    state.dead_letters, state.messages = Unwalked(state.dead_letters), Unwalked(state.messages)  # type: ignore[assignment]
    if call == "late":
        store.acknowledge_message(numbers[0], "worker", "completed")
    elif call == "replay":
        store.replay_dead_letter(numbers[0])
    elif call == "discard":
        store.discard_dead_letter(numbers[0])
    else:
        store.acknowledge_message(other, "worker", "completed")
    assert (numbers[0] in store.state.dead_letters) == (call == "other")


def test_dead_letters_are_found_like_others(store: CommStore, clock: FakeClock) -> None:
    _, numbers = given_up(store, 4)
    store.acknowledge_message(numbers[0], "worker", "completed")
    store.discard_dead_letter(numbers[1])
    store.replay_dead_letter(numbers[2])
    opened = reopened(store, clock)
    for one in (store, opened):
        dead = MessageFilter(status=(MessageStatus.DEAD_LETTER,))
        (left,) = one.query_messages(dead).messages
        assert left.id == numbers[3]
        assert one.get_thread(str(left.correlation_id)) == [left]
        assert [m.id for m in one.snapshot().values.messages][:2] == [numbers[0], numbers[2]]


def test_a_large_exactly_once_set_is_gone_through_rarely(
    store: CommStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = group_of(store, "lead", "worker", delivery=EXACTLY_ONCE, ack_timeout=10)
    many = 100 * FORGET_PER_MS
    for _ in range(many):
        store.acknowledge_message(send(store, channel, "lead").id, "worker", "completed")
        clock.advance(0.001)
    walks: list[int] = []
    apply = transitions.apply

    def counted(state: State, event: Event) -> None:
        walks.append(isinstance(event, DuplicatesForgotten))
        apply(state, event)

    monkeypatch.setattr(transitions, "apply", counted)
    clock.advance(20 - many / 1000)
    for _ in range(many + 200):
        after(store, 0.001)
    assert store.state.duplicates == {}
    assert sum(walks) < many / 16


def test_a_long_run_leaves_no_timer_behind(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MANY_TIMERS", 100)
    store = CommStore(clock)
    channel = group_of(store, "lead", "worker", ack_timeout=50_000, delivery=AT_LEAST_ONCE)
    waits = send(store, channel, "lead", MessageType.COMMAND).id
    for _ in range(300):
        number = send(store, channel, "lead", MessageType.COMMAND).id
        store.acknowledge_message(number, "worker", "completed")
    assert len(store.state.timers) <= 100
    after(store, 50_001)
    clock.advance(1)
    assert [again.message.id for again in store.tick()] == [waits]
