"""A batch is flushed when its time is up, although nothing more happens to the store."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.acomm.model import DeliveryState
from relay.commstore import ChannelType, CommStore, FlushPolicy, MessageType
from tests.procs import until

pytestmark = pytest.mark.shows("engine 6.2")

SOON = FlushPolicy(1000, 20)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "it.acomm")


def in_file(path: str) -> list[bytes]:
    return [message.content for message in store_file.read(path).messages]


def test_it_is_in_the_file_when_the_time_is_up(path: str) -> None:
    with CommStore.open(path, SOON) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        for text in (b"one", b"two"):
            store.send_message(channel.id, "a", MessageType.TEXT, text)
            until(lambda wanted=text: wanted in in_file(path))
    assert in_file(path) == [b"one", b"two"]


def test_a_manual_store_has_no_timer_and_a_closed_one_has_none_left(path: str) -> None:
    before = threading.active_count()
    with CommStore.open(path, FlushPolicy(None, None)) as store:
        store.create_channel("c", ChannelType.GROUP, "a")
        assert threading.active_count() == before
    with CommStore.open(path, FlushPolicy(1000, 60_000)) as store:
        store.create_channel("d", ChannelType.GROUP, "a")
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert len(store_file.read(path).channels) == 2


def test_a_store_that_is_let_go_is_not_written_any_more(path: str) -> None:
    store = CommStore.open(path, FlushPolicy(1000, 3_600_000))
    before = set(threading.enumerate())
    store.create_channel("c", ChannelType.GROUP, "a")
    (timer,) = set(threading.enumerate()) - before
    del store
    gc.collect()  # as the end of a process: whoever opens it next is its writer
    with CommStore.open(path, FlushPolicy(None, None)) as other:
        other.create_channel("d", ChannelType.GROUP, "a")
        other.flush()
        assert isinstance(timer, threading.Timer)
        timer.function(*timer.args)  # its time is up
        assert [channel.name for channel in store_file.read(path).channels] == ["d"]
    timer.cancel()


def test_an_answer_and_what_it_answers_are_in_each_file_together(path: str) -> None:
    """Flushed all the time from the timer's thread, while the owner goes on."""
    with CommStore.open(path, FlushPolicy(10**9, 1)) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        files: dict[int, tuple[int, int]] = {}
        for number in range(200):
            query = store.send_query(channel.id, "a", f"query {number}")
            assert query.correlation_id is not None
            store.send_response(channel.id, "b", query.correlation_id, "yes")
            if number % 10 == 0:
                file = store_file.read(path)
                answers = sum(m.message_type is MessageType.RESPONSE for m in file.messages)
                opened = CommStore.load(store.engine.clock, file)
                acked = sum(
                    one.state is DeliveryState.ACKNOWLEDGED
                    for message in file.messages
                    for one in opened.state.deliveries[message.id].values()
                )
                files[number] = (answers, acked)
    assert len({answers for answers, _ in files.values()}) > 3  # it was written in between
    assert all(answers == acked for answers, acked in files.values())
    assert len(in_file(path)) == 400
