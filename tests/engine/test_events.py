"""A store is its events: replayed on an empty one they give the same store, in every order of
operations; and what a file holds, opened again, is the same store, too."""

from __future__ import annotations

import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.acomm import store_file
from relay.acomm.model import (
    ArchiveInfo,
    Channel,
    ChannelState,
    ChannelType,
    DeliveryMode,
    DeliveryState,
    Message,
    MessageType,
    Metadata,
    Origin,
    Participant,
    ParticipantRole,
    Retention,
    RetentionKind,
    StoreFile,
    Subscription,
)
from relay.base.errors import CommError, FormatError
from relay.commstore.store import CommStore
from relay.engine import events
from relay.engine.events import Event
from relay.engine.rules import match_mode
from relay.engine.state import IN_QUEUES
from tests.engine.support import BY_FILES, NOW_S, UUID, accept, after, channel_of, new_store, send
from tests.fakes import FakeClock
from tests.procs import environment

CHANNELS = ["PubSub", "Group", "Direct", "Broadcast", "new"]
PATTERNS = ["build.#", "build.*", "build.ok", "#", "bad..pattern"]
ORIGIN = Origin("a", "agents/a/outbox/x", 1, 2, 3, None, None, None, 4)
Operation = Callable[[CommStore], object]


def numbered(store: CommStore, name: str) -> int:
    channel = store.get_channel_by_name(name)
    return channel.id if channel else 99


def later(store: CommStore) -> object:
    """A quarter of an hour goes by; what falls due is done as it does."""
    for _ in range(15):
        after(store, 61)
    return len(store.dead_letters())


def once(store: CommStore) -> object:
    """What is to be delivered once is received, and nobody ever acknowledges it."""
    number = numbered(store, "Group")
    store.configure_channel(number, delivery=DeliveryMode(2))
    sent = store.send_message(number, "a", MessageType.TEXT, "hi")
    return sent.id, later(store)


def identify(store: CommStore, identities: dict[str, str]) -> None:
    """Of those who are there; who joins later has none, for a store does not keep the names."""
    store.set_identities(identities)
    store.engine.channels._identities = {}


def owed(store: CommStore) -> object:
    """As in a relay: a command is begun, reminded of, and answered or not; time is lost."""
    core = store.engine
    core.rules = BY_FILES
    try:
        message = store.send_message(numbered(store, "Group"), "a", MessageType.COMMAND, "do")
        store.engine.deliveries.record_answer(message, "b", "received", ends=False)
        clock = store.engine.clock
        assert isinstance(clock, FakeClock)
        clock.advance(3600)
        for one in store.engine.obligations.overdue(9):
            count = one.obligation.reminders + 1
            store.engine.obligations.record_reminder(
                one.message.id, one.recipient, one.next_due_ms, count
            )
        store.engine.deliveries.add_downtime(60_000)
        if message.id % 2:
            store.engine.deliveries.record_answer(message, "b", "completed", ends=True)
    finally:
        core.rules = IN_QUEUES
    return message.id


def all_join(store: CommStore, number: int) -> object:
    """The channel becomes sticky, and everybody comes."""
    store.configure_channel(number, sticky_messages=True, tags=["x"], description="what for")
    return [store.join_channel(number, one).id for one in "dcba"]


def replay_all(store: CommStore) -> object:
    """A quarter of an hour goes by, and what was given up is sent again."""
    later(store)
    return [store.replay_dead_letter(letter.message.id).id for letter in store.dead_letters()]


def take_all(store: CommStore) -> object:
    """Every file leaves its inbox, of what was given up, too."""
    every = [(number, who) for number, known in store.state.deliveries.items() for who in known]
    return [store.engine.deliveries.receive(number, who, "taken") for number, who in every]


def tidy(store: CommStore) -> object:
    """What waits is received, and what nobody waits for is archived."""
    received = [len(store.receive_messages(None, one)) for one in "abcd"]
    return received, store.archive(before=NOW_S + 30), store.evict()


def roll(store: CommStore) -> object:
    """What is leaving has left; what nobody waits for begins to leave, and one has left."""
    state = store.state
    store.engine.apply(events.MessagesEvicted(len(state.evicting), NOW_S))
    final = [
        m.id
        for m in (*state.messages.values(), *state.archive.values())
        if store.engine.archives.is_final(m)
    ]
    if not final:
        return 0
    name = f"2026-01-31/{state.next_archive:06d}.acomm"
    note = ArchiveInfo(name, len(final), min(final), max(final), NOW_S, NOW_S, 0, 1)
    store.engine.apply(events.Rolled(note, tuple(final), NOW_S))
    store.engine.apply(events.MessagesEvicted(1, NOW_S))
    return len(final)


class Drawn(NamedTuple):
    """What the calls of one operation are made with."""

    name: str  # of a channel
    who: str
    pattern: str
    kind: ChannelType
    message_type: MessageType
    channel_state: ChannelState
    limit: int | None
    thread: str | None
    number: int  # of a message
    state: DeliveryState
    relay_id: Metadata | None

    def channel(self, store: CommStore) -> int:
        return numbered(store, self.name)


def operation_of(drawn: bytes) -> Operation:
    """Any call that changes a store, or is refused; every other one sends.

    One draw for all of it: a dozen take ten times as long as what is done with them.
    """
    left = int.from_bytes(drawn)

    def choose(options: Sequence[Any]) -> Any:
        nonlocal left
        left, place = divmod(left, len(options))
        return options[place]

    sends = choose([True, False])
    given = Drawn(
        choose(CHANNELS),
        choose("abcd"),
        choose(PATTERNS),
        choose([*ChannelType]),
        choose([*MessageType]),
        choose([*ChannelState, ChannelState.ACTIVE]),
        choose([None, 1, 2, 3]),
        choose([None, UUID]),
        choose(range(1, 9)),
        choose([*DeliveryState]),
        choose([None, {"relay_id": "r-1"}, {"relay_id": "r-2"}]),
    )
    if sends:
        return sending(given)
    return choose(
        [*on_channels(given), *on_messages(given), *on_deliveries(given), *AS_TIME_GOES_BY]
    )


def sending(drawn: Drawn) -> Operation:
    """The whole pipeline."""
    fields = {"correlation_id": drawn.thread, "metadata": drawn.relay_id}
    if drawn.name == "PubSub" and drawn.message_type is MessageType.TEXT:
        return lambda store: store.publish(
            drawn.channel(store), drawn.who, "build.ok", "hi", **fields
        )
    return lambda store: store.send_message(
        drawn.channel(store), drawn.who, drawn.message_type, "hi", topic="build.ok", **fields
    )


def on_channels(drawn: Drawn) -> list[Operation]:
    """Who takes part, who subscribes, and what is set."""
    _, who, pattern, *_ = drawn
    channel = drawn.channel
    retention = Retention(RetentionKind(drawn.limit or 0), 2)
    return [
        lambda store: store.create_channel(drawn.name, drawn.kind, who),
        lambda store: store.join_channel(channel(store), who),
        lambda store: store.leave_channel(channel(store), who),
        lambda store: store.subscribe(channel(store), who, pattern),
        lambda store: store.subscribe(numbered(store, "PubSub"), who, pattern),
        lambda store: store.unsubscribe(numbered(store, "PubSub"), "b", pattern),
        lambda store: store.unsubscribe(numbered(store, "PubSub"), who),
        lambda store: identify(store, {who: "aid_1"} if drawn.limit else {}),
        lambda store: store.set_subscription_active(
            min(store.state.subscriptions, default=0), bool(drawn.limit)
        ),
        lambda store: store.configure_channel(
            channel(store), delivery=DeliveryMode(1), ack_timeout=5
        ),
        lambda store: store.configure_channel(
            channel(store), max_pending=drawn.limit, flush="manual"
        ),
        lambda store: store.configure_channel(channel(store), retention=retention),
        lambda store: store.set_channel_state(channel(store), drawn.channel_state),
        lambda store: all_join(store, channel(store)),
        lambda store: all_join(store, numbered(store, "Group")),
    ]


def on_messages(drawn: Drawn) -> list[Operation]:
    """Asked, answered, archived and compacted; and those whose delivery was given up."""
    number, who = drawn.number, drawn.who
    return [
        lambda store: accept(
            store, drawn.channel(store), who, drawn.message_type, "hi", topic="build.ok"
        ),
        lambda store: store.send_query(drawn.channel(store), who, "?", 5),
        lambda store: store.send_response(drawn.channel(store), who, UUID, "!"),
        lambda store: store.acknowledge_message(number, who, "received"),
        lambda store: store.archive(number),
        lambda store: (tidy(store), roll(store)),
        lambda store: (tidy(store), store.compact()),
        lambda store: store.replay_dead_letter(number),
        lambda store: store.discard_dead_letter(number),
        lambda store: store.purge_dead_letters(100),
    ]


def on_deliveries(drawn: Drawn) -> list[Operation]:
    """Staged, made, received, moved; and what is only for the record."""
    number, refused = drawn.number, events.FileRefused("", ORIGIN, "why", "", False, False, NOW_S)
    offered = events.OfferChanged("1-a", "a", "claude:1", 1, "offered", "Stop", NOW_S, NOW_S)
    rung = events.AgentRung("a", "claude:1", "command", 2, "ok", NOW_S, NOW_S)
    return [
        lambda store: store.engine.deliveries.move(number, ["a", "b"], drawn.state),
        lambda store: store.engine.deliveries.deliver(number, store.recipients(number)),
        lambda store: store.engine.deliveries.stage(
            (number, one, 2) for one in store.recipients(number)
        ),
        lambda store: [store.receive_messages(None, one) for one in "abcd"],
        lambda store: take_all(store),
        lambda store: [store.engine.apply(one) for one in (refused, offered, rung)],
    ]


# Rare enough among the others, and what much follows from.
AS_TIME_GOES_BY: list[Operation] = [once, later, later, replay_all, replay_all, owed]


def channels_of_every_type(store: CommStore) -> None:
    """Where every sequence of operations begins: four channels, a and b in each."""
    for kind in ChannelType:
        channel = channel_of(store, kind, "a", "b", name=kind.label)
    store.subscribe(channel.id, "b", "build.*")


def played(steps: list[Operation]) -> tuple[CommStore, list[Event]]:
    """A store after these operations, and its events."""
    clock = FakeClock(NOW_S * 10**9)
    store = CommStore(clock)
    store.engine.keeps_events = True
    for step in [channels_of_every_type, *steps]:
        clock.advance(1)
        try:
            step(store)
        except CommError:
            pass
    return store, [event for event, _ in store.engine.fresh_events]


STEPS = st.lists(st.binary(min_size=8, max_size=8).map(operation_of), min_size=12, max_size=30)


@pytest.mark.shows("engine 6.13", "engine 1.14")
def test_a_store_is_its_events_and_is_its_file() -> None:
    """After any operations: replayed from a journal, and opened from a file, it is the same; that
    one continues alike, and a snapshot stays as it is."""
    kinds: Counter[str] = Counter()

    @settings(max_examples=400)
    @given(STEPS, STEPS)
    def look(steps: list[Operation], more: list[Operation]) -> None:
        store, recorded = played(steps)
        kinds.update(type(event).__name__ for event in recorded)
        snapshot = store.snapshot()

        again = new_store()
        for event in msgspec.msgpack.decode(msgspec.msgpack.encode(recorded), type=list[Event]):
            again.engine.apply(event)
        assert again.snapshot() == snapshot
        assert again.sequence == store.sequence == len(recorded)

        data = store_file.encode(snapshot.file())
        assert isinstance(store.engine.clock, FakeClock)
        opened = CommStore.load(FakeClock(store.engine.clock.now_ns()), store_file.decode(data))
        assert opened.snapshot() == snapshot
        assert store_file.encode(opened.snapshot().file()) == data
        for step in more:
            assert outcome(step, opened) == outcome(step, store)
        assert opened.snapshot() == store.snapshot()
        assert store_file.encode(snapshot.file()) == data

    look()
    assert kinds.keys() == {cls.__name__ for cls in typing.get_args(Event)}
    assert kinds["MessageSent"] > 100


def outcome(step: Operation, store: CommStore) -> str:
    """What a call said, without the time of it."""
    try:
        result = step(store)
    except CommError as exc:
        return f"{type(exc).__name__} {exc}"
    return str(getattr(result, "id", result))


# -- events one by one ---------------------------------------------------------------------


def test_an_event_of_a_message_that_has_left_the_store_is_nothing() -> None:
    store = new_store()
    before = store.snapshot().values
    store.engine.apply(events.DeliveriesMoved(7, ("b",), DeliveryState.DELIVERED, NOW_S))
    assert store.snapshot().values == before
    assert store.sequence == 1


# -- opening -------------------------------------------------------------------------------


def test_counters_that_a_file_lacks_are_derived() -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.PUB_SUB, "a", name="one")
    store.subscribe(channel.id, "b", "#")
    send(store, channel, "a", topic="t")
    values = store.snapshot().values
    dead = Message(9, MessageType.TEXT, "a", 1, b"x")
    foreign = msgspec.structs.replace(values, dead_letters=(dead,), engine_state={})
    opened = CommStore.load(FakeClock(NOW_S * 10**9), foreign)
    assert opened.sequence == 0
    assert send(opened, channel, "a", topic="t").id == 10
    assert opened.create_channel("two", ChannelType.GROUP, "a").id == 2
    assert opened.subscribe(channel.id, "c", "#").id == 2
    assert opened.engine.channels.get(1).message_count == 2
    assert opened.snapshot().values.dead_letters == (dead,)


def test_no_number_comes_twice_even_when_the_highest_has_left() -> None:
    store = new_store()
    channel = channel_of(store, ChannelType.PUB_SUB, "a")
    store.subscribe(channel.id, "b", "#")
    store.unsubscribe(channel.id, "b")
    file = store.snapshot().file()
    opened = CommStore.load(FakeClock(0), file)
    assert opened.subscribe(channel.id, "b", "#").id == 2


MEMBER = (Participant("a"),)
GROUP = Channel(1, "one", ChannelType.GROUP, "a", MEMBER)
TEXT = Message(1, MessageType.TEXT, "a", 1, b"x")
INTEREST = Subscription(1, 1, "a", "#", match_mode("#"))
PUBSUB = Channel(1, "one", ChannelType.PUB_SUB, "a", MEMBER)


THREE = Channel(
    1, "one", ChannelType.GROUP, "a", tuple(Participant(n, ParticipantRole.OWNER) for n in "abc")
)
changed = msgspec.structs.replace


@pytest.mark.shows("engine 6.12")
@pytest.mark.parametrize(
    ("file", "says"),
    [
        (StoreFile(0, 0, (GROUP, msgspec.structs.replace(GROUP, name="two"))), "channel 1 once"),
        (StoreFile(0, 0, (GROUP, msgspec.structs.replace(GROUP, id=2))), "channel one once"),
        (StoreFile(0, 0, (GROUP,), (TEXT, TEXT)), "message 1 once"),
        (StoreFile(0, 0, (GROUP,), (TEXT,), dead_letters=(TEXT,)), "message 1 once"),
        (StoreFile(0, 0, (GROUP,), archive=(TEXT, TEXT)), "message 1 once"),
        (StoreFile(0, 0, (GROUP,), (TEXT,), archive=(TEXT,)), "message 1 once"),
        (StoreFile(0, 0, (), (TEXT,)), "a channel for message 1"),
        (StoreFile(0, 0, (), archive=(TEXT,)), "a channel for message 1"),
        (StoreFile(0, 0, (PUBSUB,), (), (INTEREST, INTEREST)), "subscription 1 once"),
        (StoreFile(0, 0, (GROUP,), (), (INTEREST,)), "a PubSub channel for subscription 1"),
        (StoreFile(0, 0, (), (), (INTEREST,)), "a PubSub channel for subscription 1"),
        (StoreFile(0, 0, (changed(GROUP, participants=MEMBER * 2),)), "participant a once"),
        (StoreFile(0, 0, (changed(THREE, channel_type=ChannelType.DIRECT),)), "2 in direct"),
        (StoreFile(0, 0, (changed(THREE, channel_type=ChannelType.BROADCAST),)), "one owner in"),
        (StoreFile(0, 0, (changed(GROUP, message_count=2**64 - 1),)), "message_count of channel"),
        (StoreFile(0, 0, (GROUP,), (changed(TEXT, id=2**64 - 1),)), "highest message id to be"),
    ],
)
def test_a_file_that_breaks_an_invariant_is_refused(file: StoreFile, says: str) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        CommStore.load(FakeClock(0), file)
    assert "\n" not in str(caught.value)


def test_what_no_rule_of_sending_allows_is_still_data() -> None:
    response = Message(1, MessageType.RESPONSE, "stranger", 1, b"", correlation_id="no uuid")
    opened = CommStore.load(FakeClock(0), StoreFile(5, 6, (GROUP,), (response,)))
    assert opened.get_thread("no uuid") == [response]
    assert (opened.state.created_at, opened.state.modified_at) == (5, 6)


FIRST_DECODED_IN_FOUR_THREADS = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from relay.engine.events import DeadLetterDiscarded, EventCodec, EventRecord

data = msgspec.msgpack.encode(EventRecord(1, 1, DeadLetterDiscarded(1, 2, "x")))
together = threading.Barrier(4)

def decode():
    together.wait()
    for _ in range(50):
        EventCodec().decode(data, 0)

threads = [threading.Thread(target=decode) for _ in range(4)]
for one in threads:
    one.start()
for one in threads:
    one.join()
"""


def test_events_are_decoded_by_several_threads_from_the_first_on() -> None:
    """Two requests of a page at once; made by each, a decoder ended two processes of three."""
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_DECODED_IN_FOUR_THREADS], env=environment(), check=False
        )
        assert done.returncode == 0
