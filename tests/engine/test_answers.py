"""Answers: to whom they go, what they acknowledge, and what they leave alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.acomm.model import DeliveryState, MessageStatus, MessageType
from relay.commstore import CommStore, FlushPolicy
from tests.engine.support import UUID, group_of, refused, reopened, send, standing
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 3.2")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (MessageType.COMMAND, MessageType.ACKNOWLEDGMENT),
        (MessageType.QUERY, MessageType.RESPONSE),
        (MessageType.QUERY, MessageType.ACKNOWLEDGMENT),
    ],
)
def test_an_answer_sent_as_any_message_goes_to_who_asked_and_acknowledges(
    store: CommStore, question: MessageType, answer: MessageType
) -> None:
    channel = group_of(store, "lead", "worker", "other")
    asked = send(store, channel, "lead", question)
    sent = send(store, channel, "worker", answer, "done", correlation_id=asked.correlation_id)
    assert store.recipients(sent.id) == ("lead",)
    assert standing(store, asked.id) == {
        "worker": DeliveryState.ACKNOWLEDGED,
        "other": DeliveryState.DELIVERED,
    }
    assert [m.id for m in store.receive_messages(None, "lead")] == [sent.id]


def test_an_answer_belongs_in_the_channel_of_what_it_answers(store: CommStore) -> None:
    asked_in = group_of(store, "lead", "worker")
    elsewhere = group_of(store, "worker", "other", name="d")
    query = store.send_query(asked_in.id, "lead", "how many?")
    thread = str(query.correlation_id)
    call = partial(store.send_response, elsewhere.id, "worker", thread, "seven")
    assert "no message in channel d expects this answer" in str(refused(store, call))


def test_a_thread_with_two_queries_is_answered_to_both(store: CommStore) -> None:
    channel = group_of(store, "a", "b", "worker")
    queries = [
        send(store, channel, who, MessageType.QUERY, correlation_id=UUID) for who in ("a", "b")
    ]
    for _ in range(2):  # a second answer goes to both again, and changes nothing
        answer = store.send_response(channel.id, "worker", UUID, "seven")
        assert store.recipients(answer.id) == ("a", "b")
        assert [standing(store, one.id)["worker"] for one in queries] == [
            DeliveryState.ACKNOWLEDGED,
            DeliveryState.ACKNOWLEDGED,
        ]


def test_who_acknowledges_what_is_kept_back_answers_alone(
    store: CommStore, clock: FakeClock
) -> None:
    channel = group_of(store, "lead", "w", "x")
    store.configure_channel(channel.id, max_pending=1)
    first = send(store, channel, "lead", MessageType.COMMAND)
    kept_back = send(store, channel, "lead", MessageType.COMMAND)
    store.acknowledge_message(kept_back.id, "w", "completed")
    assert store.engine.deliveries.is_held(kept_back.id)
    reopened(store, clock)
    for who in ("w", "x"):
        store.acknowledge_message(first.id, who, "completed")
    assert not store.engine.deliveries.is_held(kept_back.id)
    assert standing(store, kept_back.id) == {
        "w": DeliveryState.ACKNOWLEDGED,
        "x": DeliveryState.DELIVERED,
    }


def test_what_all_have_acknowledged_is_kept_back_no_more(store: CommStore) -> None:
    channel = group_of(store, "lead", "w", "x")
    store.configure_channel(channel.id, max_pending=1)
    for _ in range(2):
        kept_back = send(store, channel, "lead", MessageType.COMMAND)
    for who in ("w", "x"):
        store.acknowledge_message(kept_back.id, who, "completed")
    assert not store.engine.deliveries.is_held(kept_back.id)


@pytest.mark.parametrize("kind", [MessageType.COMMAND, MessageType.QUERY])
def test_an_answer_is_flushed_with_what_it_acknowledges(tmp_path: Path, kind: MessageType) -> None:
    path = str(tmp_path / "s.acomm")
    with CommStore.open(path, FlushPolicy(1, None), FakeClock()) as store:
        channel = group_of(store, "lead", "worker")
        asked = send(store, channel, "lead", kind, correlation_id=UUID)
        if kind is MessageType.COMMAND:
            answer = store.acknowledge_message(asked.id, "worker", "completed")
        else:
            answer = store.send_response(channel.id, "worker", UUID, "seven")
        file = store_file.read(path)  # what a kill -9 would leave
    assert {m.id: m.status for m in file.messages} == {
        asked.id: MessageStatus.ACKNOWLEDGED,
        answer.id: MessageStatus.DELIVERED,
    }
