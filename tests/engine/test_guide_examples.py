"""The worked examples of the message engine guide, translated one to one."""

from __future__ import annotations

import pytest

from relay.acomm.model import (
    ChannelType,
    MessageFilter,
    MessageStatus,
    MessageType,
    SortField,
    SortOrder,
)
from relay.commstore.store import CommStore
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 6.16")


@pytest.mark.shows("engine 3.1")
def test_one_to_one_task_delegation(store: CommStore) -> None:
    channel = store.create_channel("planner-executor", ChannelType.DIRECT, "agent-planner")
    store.join_channel(channel.id, "agent-executor")
    store.send_message(
        channel.id,
        "agent-planner",
        MessageType.COMMAND,
        "Deploy the authentication service to staging",
    )

    messages = store.receive_messages(channel.id, "agent-executor")
    assert len(messages) == 1
    store.acknowledge_message(messages[0].id, "agent-executor", "received")
    store.acknowledge_message(
        messages[0].id,
        "agent-executor",
        "completed",
        "Deployed successfully. Health check passing.",
    )

    original = store.get_message(messages[0].id)
    assert original is not None
    assert original.status is MessageStatus.ACKNOWLEDGED
    assert original.acknowledged_at is not None
    acks = store.receive_messages(channel.id, "agent-planner")
    assert [ack.content for ack in acks] == [
        b"received",
        b"completed\nDeployed successfully. Health check passing.",
    ]
    assert {ack.correlation_id for ack in acks} == {original.correlation_id}


def test_pub_sub_event_notification(store: CommStore) -> None:
    channel = store.create_channel("ci-events", ChannelType.PUB_SUB, "ci-agent")
    store.subscribe(channel.id, "deploy-agent", "build.*.success")
    store.subscribe(channel.id, "monitor-agent", "deploy.#")
    store.subscribe(channel.id, "alert-agent", "*.failure")
    store.publish(
        channel.id,
        "ci-agent",
        "build.frontend.success",
        "Frontend build completed: 847 tests passed, bundle size 2.1 MB",
    )

    assert len(store.receive_messages(channel.id, "deploy-agent")) == 1
    assert len(store.receive_messages(channel.id, "alert-agent")) == 0
    assert len(store.receive_messages(channel.id, "monitor-agent")) == 0


@pytest.mark.shows("engine 2.9")
def test_threaded_conversation(store: CommStore) -> None:
    channel = store.create_channel("discussion", ChannelType.GROUP, "agent-lead")
    store.join_channel(channel.id, "agent-researcher")
    store.join_channel(channel.id, "agent-reviewer")
    query = store.send_query(
        channel.id,
        "agent-lead",
        "What is the recommended connection pool size for 10K concurrent users?",
        30,
    )
    assert query.correlation_id is not None
    store.send_response(
        channel.id, "agent-researcher", query.correlation_id, "20 connections for your setup."
    )
    store.send_response(
        channel.id, "agent-reviewer", query.correlation_id, "Agreed, but consider PgBouncer."
    )

    assert len(store.get_thread(query.correlation_id)) == 3
    assert len(store.receive_messages(channel.id, "agent-lead")) == 2
    answered = store.get_message(query.id)
    assert answered is not None and answered.status is MessageStatus.ACKNOWLEDGED


@pytest.mark.shows("engine 2.9")
def test_querying_message_history(store: CommStore) -> None:
    channel = store.create_channel("project", ChannelType.GROUP, "lead")
    store.join_channel(channel.id, "worker")
    clock = store.engine.clock
    assert isinstance(clock, FakeClock)
    store.send_message(channel.id, "lead", MessageType.COMMAND, "an old one")
    clock.advance(7200)
    for number in range(60):
        store.send_message(channel.id, "lead", MessageType.COMMAND, f"command {number}")
        clock.advance(1)
    store.send_message(channel.id, "lead", MessageType.TEXT, "no command")

    results = store.query_messages(
        MessageFilter(
            message_types=(MessageType.COMMAND,),
            after=clock.now_ns() // 10**9 - 3600,
            sort_by=SortField.CREATED_AT,
            sort_order=SortOrder.DESCENDING,
            limit=50,
        )
    )
    assert results.total_count == 60
    assert len(results.messages) == 50
    assert results.has_more
    assert results.messages[0].content == b"command 59"
    dead = store.query_messages(MessageFilter(status=(MessageStatus.DEAD_LETTER,)))
    assert dead.total_count == 0
