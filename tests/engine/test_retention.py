"""What leaves the live messages for the archive, and what is dropped from that."""

from __future__ import annotations

import pytest

from relay.acomm.model import (
    Channel,
    ChannelType,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Retention,
    RetentionKind,
)
from relay.base.errors import MessageNotFound, ValidationFailed
from relay.commstore.store import CommStore
from tests.engine.support import AT_LEAST_ONCE, after, channel_of, group_of, receive, reopened, send
from tests.fakes import FakeClock

FOREVER = Retention()


def kept(kind: RetentionKind, amount: int) -> Retention:
    return Retention(kind, amount)


def live(store: CommStore) -> list[int]:
    return [m.id for m in store.query_messages(MessageFilter(limit=10**6)).messages][::-1]


def with_archived(store: CommStore) -> list[Message]:
    wanted = MessageFilter(include_archived=True, limit=10**6)
    return store.query_messages(wanted).messages[::-1]


def send_received(store: CommStore, channel_id: int, times: int, content: str = "x") -> None:
    for _ in range(times):
        store.send_message(channel_id, "a", MessageType.TEXT, content)
        store.receive_messages(channel_id, "b")


@pytest.mark.shows("engine 2.8", "engine 4.9")
@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (FOREVER, [1, 2, 3, 4, 5, 6]),
        (kept(RetentionKind.COUNT, 2), [5, 6]),
        (kept(RetentionKind.COUNT, 6), [1, 2, 3, 4, 5, 6]),
        (kept(RetentionKind.SIZE, 35), [4, 5, 6]),
        (kept(RetentionKind.SIZE, 60), [1, 2, 3, 4, 5, 6]),
        (kept(RetentionKind.DURATION, 25), [4, 5, 6]),
    ],
)
def test_each_policy_when_sending(
    store: CommStore, clock: FakeClock, retention: Retention, left: list[int]
) -> None:
    channel = group_of(store, "a", "b", retention=retention)
    for _ in range(6):
        send_received(store, channel.id, 1, "ten bytes!")
        clock.advance(10)
    clock.advance(-10)
    for one in (store, reopened(store, clock)):
        assert live(one) == left
        everything = with_archived(one)
        assert [m.id for m in everything] == [1, 2, 3, 4, 5, 6]
        gone = [m for m in everything if m.id not in left]
        assert {m.status for m in gone} <= {MessageStatus.ARCHIVED}
        assert {m.content for m in everything} == {b"ten bytes!"}
        assert one.engine.channels.get(channel.id).message_count == 6
    assert [m.id for m in store.snapshot().values.archive] == [
        n for n in range(1, 7) if n not in left
    ]


def test_time_alone_archives_with_tick(store: CommStore) -> None:
    channel = group_of(store, "a", "b", retention=kept(RetentionKind.DURATION, 60))
    send_received(store, channel.id, 2)
    after(store, 59)
    assert live(store) == [1, 2]
    after(store, 1)
    assert live(store) == []


def test_time_archives_what_follows_one_sent_while_the_clock_was_ahead(
    store: CommStore, clock: FakeClock
) -> None:
    channel = group_of(store, "a", "b", retention=kept(RetentionKind.DURATION, 60))
    clock.jump(3600)
    send_received(store, channel.id, 1)
    clock.jump(-3600)
    send_received(store, channel.id, 2)
    after(store, 60)
    assert live(store) == [1]


def test_a_later_policy_holds_for_what_is_there(store: CommStore, group: Channel) -> None:
    send_received(store, group.id, 5, "ten bytes!")
    store.configure_channel(group.id, retention=kept(RetentionKind.SIZE, 20))
    store.tick()
    assert live(store) == [4, 5]


@pytest.mark.shows("engine 4.9")
def test_what_is_open_stays_and_the_next_that_is_not_goes(store: CommStore) -> None:
    channel = group_of(store, "a", "b", retention=kept(RetentionKind.COUNT, 2))
    unread = send(store, channel, "a")
    command = send(store, channel, "a", MessageType.COMMAND, metadata={"delivery": "at-least-once"})
    receive(store, command.id, "b")
    send_received_after = send(store, channel, "a")
    receive(store, send_received_after.id, "b")
    store.tick()
    assert live(store) == [unread.id, command.id]
    store.acknowledge_message(command.id, "b", "completed")
    store.tick()
    assert command.id not in live(store) and unread.id in live(store)


def test_a_dead_letter_of_somebody_is_not_archived(store: CommStore) -> None:
    channel = group_of(store, "a", "b", "c", max_retries=0, ack_timeout=5, delivery=AT_LEAST_ONCE)
    command = send(store, channel, "a", MessageType.COMMAND)
    store.acknowledge_message(command.id, "b", "completed")
    after(store, 5)
    assert [letter.recipients for letter in store.dead_letters()] == [("c",)]
    with pytest.raises(ValidationFailed, match="an open or dead delivery"):
        store.archive(command.id)
    store.replay_dead_letter(command.id)
    store.acknowledge_message(command.id, "c", "completed")
    assert store.archive(command.id) == 1


def test_what_is_stuck_does_not_make_each_send_dear(store: CommStore) -> None:
    channel = group_of(store, "a", "b", retention=kept(RetentionKind.COUNT, 1))
    looked = 0
    archives = store.engine.archives
    is_final = archives.is_final

    def counting(message: Message) -> bool:
        nonlocal looked
        looked += 1
        return is_final(message)

    archives.is_final = counting  # type: ignore[method-assign]
    for _ in range(2000):
        send(store, channel, "a")
    assert looked < 2000 * 32
    store.receive_messages(None, "b")
    for _ in range(200):
        store.tick()
    assert live(store) == [2000]


# -- archive -------------------------------------------------------------------------------


def test_archiving_one_by_its_number(store: CommStore, clock: FakeClock) -> None:
    channel = group_of(store, "a", "b", delivery=AT_LEAST_ONCE)
    first, second = send(store, channel, "a"), send(store, channel, "a")
    store.acknowledge_message(first.id, "b", "received")
    with pytest.raises(ValidationFailed, match="message 2 has an open or dead delivery"):
        store.archive(second.id)
    assert store.archive(first.id) == 1
    with pytest.raises(MessageNotFound):
        store.archive(first.id)
    # who has said "received" may still say "completed"
    for one in (reopened(store, clock), store):
        said = one.acknowledge_message(first.id, "b", "completed")
        assert one.recipients(said.id) == ("a",)
        assert one.get_thread(str(first.correlation_id))[0].id == first.id


def test_archiving_all_before_a_time(store: CommStore, clock: FakeClock, group: Channel) -> None:
    send(store, group, "a", content="unread")
    clock.advance(10)
    at = clock.now_ns() // 10**9
    for number in range(3):
        clock.advance(1)
        send(store, group, "a", content=f"{number}")
    for number in (2, 3, 4):
        receive(store, number, "b")
    assert store.archive(before=at + 3) == 2
    assert live(store) == [1, 4]
    assert store.archive(before=at + 3) == 0


def test_the_archive_is_in_order(store: CommStore, clock: FakeClock, group: Channel) -> None:
    send_received(store, group.id, 4)
    for number in (3, 1, 4, 2):
        store.archive(number)
        reopened(store, clock)
    assert [m.id for m in store.snapshot().values.archive] == [1, 2, 3, 4]


@pytest.mark.parametrize("arguments", [{}, {"message_id": 1, "before": 5}])
def test_one_of_the_two_is_needed(store: CommStore, arguments: dict[str, int]) -> None:
    with pytest.raises(ValidationFailed, match="not both"):
        store.archive(**arguments)


# -- compact and stats ---------------------------------------------------------------------


@pytest.mark.shows("engine 5.4")
def test_compact_drops_archive_and_dead_letters_alone(store: CommStore, clock: FakeClock) -> None:
    channel = group_of(store, "a", "b", max_retries=0, ack_timeout=5)
    dead = send(
        store,
        channel,
        "a",
        MessageType.COMMAND,
        content="dead",
        metadata={"relay_id": "d", "delivery": "at-least-once"},
    )
    after(store, 5)
    store.receive_messages(None, "a")
    send_received(store, channel.id, 3, "done")
    unread = send(store, channel, "a", content="unread")
    assert store.archive(before=clock.now_ns() // 10**9 + 1) == 4  # the notice, too
    freed = store.compact()
    assert freed[:2] == (4, 1) and freed.content_bytes > 16 and freed.file_bytes == 0
    assert store.dead_letters() == [] and with_archived(store) == [unread]
    assert store.state.deliveries.keys() == {unread.id}
    assert (
        store.engine.messages.find_by_relay_id("d") is None
        and store.get_thread(str(dead.correlation_id)) == []
    )
    assert store.compact()[:3] == (0, 0, 0)
    assert [m.content for m in reopened(store, clock).receive_messages(None, "b")] == [b"unread"]


def test_compact_leaves_a_message_that_others_have_open(store: CommStore, clock: FakeClock) -> None:
    channel = group_of(store, "a", "b", max_retries=0, ack_timeout=5, delivery=AT_LEAST_ONCE)
    command = send(store, channel, "a", MessageType.COMMAND)
    clock.advance(4)
    store.configure_channel(channel.id, sticky_messages=True)
    store.join_channel(channel.id, "late")
    after(store, 1)
    assert [letter.recipients for letter in store.dead_letters()] == [("b",)]
    assert store.compact().dead_letters == 1
    assert store.acknowledge_message(command.id, "late", "completed")


@pytest.mark.shows("engine 5.7")
def test_the_store_in_numbers(store: CommStore, clock: FakeClock, group: Channel) -> None:
    topics = channel_of(store, ChannelType.PUB_SUB, "a", name="topics")
    store.subscribe(topics.id, "b", "#")
    store.configure_channel(group.id, max_pending=2)
    for number in range(4):
        send(store, group, "a", content=f"{number}")
    receive(store, 1, "b")
    store.archive(1)
    stats = store.stats()
    assert stats.messages == {MessageStatus.SENT: 1, MessageStatus.DELIVERED: 2}
    assert (stats.channels, stats.subscriptions, stats.dead_letters) == (2, 1, 0)
    assert (stats.archived, stats.pending, stats.held, stats.duplicates) == (1, 2, 1, 0)
    assert (stats.file_bytes, stats.file_sequence, stats.sequence) == (0, 0, store.sequence)
    assert stats.used_bytes > 4 * 100
    again = reopened(store, clock).stats()
    assert again._replace(used_bytes=0) == stats._replace(used_bytes=0)


def test_after_many_at_once_the_indexes_are_right(store: CommStore, group: Channel) -> None:
    for number in range(200):
        send(store, group, "a", content=f"{number}")
        if number % 2:
            receive(store, number + 1, "b")
    assert store.evict() == 100
    assert live(store) == list(range(1, 201, 2))
    assert [m.id for m in with_archived(store)] == list(range(1, 201))
    assert store.query_messages(MessageFilter(sender="a", limit=1)).total_count == 100
