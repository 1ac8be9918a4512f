"""Plans applied to the store: files, replies with ids of their own, the same when repeated."""

from __future__ import annotations

import base64

import pytest
from msgspec.structs import replace

from relay.acomm.model import DeliveryState, MessageStatus, MessageType
from relay.base.incidents import Refusal, RefusalCode
from relay.base.message import Kind, parse, parse_delivered
from relay.base.names import ORCHESTRATOR, sha256_hex, uuid4_of
from relay.delivery.control import MAX_NOTE
from relay.delivery.file_ops import reconstruct
from relay.delivery.plan import outcome, refuse
from relay.delivery.values import Answer, Inbound, OutboxFile, Plan, Row
from tests.delivery.planning import AGENTS, AT_NS, Table, read
from tests.engine.support import standing


def said(work: Plan) -> str:
    """The body of the one answer of the orchestrator's."""
    (answer,) = [posting for posting in work.files if posting.message_id != work.message_id]
    return parse_delivered(answer.data).body.decode()


def refused(work: Plan) -> str:
    """Why the file was refused."""
    assert work.refusal is not None
    return work.refusal.reason


def given(work: Plan) -> Answer:
    assert work.answer is not None
    return work.answer


# -- messages ------------------------------------------------------------------------------


def test_a_group_without_its_former_members(table: Table) -> None:
    for who in ("alice", "bob", "carol"):
        table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", who)
    work = table.decide("TO: #team\n\nhi", agents=AGENTS - {"carol"})
    message, answer = sorted(work.files, key=lambda posting: posting.message_id != work.message_id)
    assert message.recipients == ("bob",)
    assert [one.recipient for one in work.changes.ended] == ["carol"]
    assert answer.recipients == ("alice",)
    assert said(work).startswith("carol: no longer an agent, did not get")
    stored = table.store.messages.find_by_relay_id(work.message_id)
    assert stored
    states = standing(table.store, stored.id)
    assert states == {"bob": DeliveryState.SENT, "carol": DeliveryState.SENT}  # until it is done


@pytest.mark.parametrize(
    "head",
    [
        *("KIND: command", "KIND: query", "AWAIT: 30s"),
        *("DELIVERY: at-least-once", "DELIVERY: exactly-once"),
    ],
)
def test_what_expects_an_answer_is_a_thread_of_its_own(table: Table, head: str) -> None:
    work = table.decide(f"TO: bob\n{head}\n\nhi")
    stored = table.store.messages.find_by_relay_id(work.message_id)
    assert stored is not None and stored.correlation_id == uuid4_of(work.message_id)


def test_the_channel_of_all_belongs_to_nobody_also_if_all_are_two(table: Table) -> None:
    table.decide("TO: *\n\nhi", agents={"alice", "bob"})
    channel = table.store.channels.find_by_name("all")
    assert channel is not None and channel.owner == ORCHESTRATOR


def test_what_the_engine_refuses_is_answered(table: Table) -> None:
    table.decide("TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: #", "bob")
    work = table.decide("TO: #ci\nTOPIC: t\n\nhi")
    assert "alice is not a participant of channel ci: join it" in refused(work)
    assert len(work.files) == 1


def test_what_goes_to_nobody_is_answered_and_the_answer_is_kept(table: Table) -> None:
    work = table.decide("TO: dave\n\nhi", number=7)
    assert "there is no agent dave" in refused(work)
    assert table.store.messages.find_by_relay_id(work.message_id) is None
    (posting,) = work.files
    assert posting.recipients == ("alice",)
    answer = parse_delivered(posting.data)
    assert (answer.kind, answer.headers["FROM"]) == (Kind.NACK, ORCHESTRATOR)
    assert answer.headers["RE"] == work.message_id
    assert answer.body.decode().startswith(f"not delivered: {work.message_id}.msg: there is")
    assert answer.headers["CHECKSUM"] == f"sha256:{sha256_hex(answer.body)}"
    assert posting.message_id == work.messages[0].message_id
    stored = table.store.messages.get(posting.number)
    assert stored and stored.metadata
    assert (stored.sender, stored.message_type) == (ORCHESTRATOR, MessageType.ERROR)
    assert reconstruct(stored) == answer._replace(headers={"RE": work.message_id})
    again = Table().decide("TO: dave\n\nhi", number=7)  # nothing of it was written before a crash
    assert [p.data for p in again.files] == [posting.data]


def test_the_answers_id_comes_from_the_message_not_from_the_file() -> None:
    first = read("TO: dave\n\nhi", "alice", 7)
    again = replace(first, file=replace(first.file, inode=99, mtime_ns=1, size=5))
    ids = [
        refuse(one, Refusal(RefusalCode.NO_RECIPIENT, "no")).messages[0].message_id
        for one in (first, again)
    ]
    assert ids[0] == ids[1]


def test_a_file_without_an_id_is_answered_by_what_the_file_is(table: Table) -> None:
    answers = []
    unnamed = Refusal(RefusalCode.BAD_NAME, "hello.msg is not a valid message name")
    for inode in (1, 1, 2):
        found = OutboxFile("alice", "hello.msg", None, 5, AT_NS, inode)
        inbound = Inbound(found, None, unnamed, row=Row.NONE)
        work = table.writer.apply(refuse(replace(inbound, discovered_at=AT_NS), unnamed))
        (posting,) = work.files
        message = parse_delivered(posting.data)
        assert "RE" not in message.headers
        assert message.body == b"not delivered: hello.msg is not a valid message name\n"
        stored = table.store.messages.get(posting.number)
        assert stored and stored.metadata and "re" not in stored.metadata
        assert reconstruct(stored).headers == {}
        answers.append(posting.message_id)
    assert answers[0] == answers[1] != answers[2]
    assert len(table.store.state.messages) == 2


def test_what_the_engine_keeps_is_the_whole_message(table: Table) -> None:
    table.decide("TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: #", "bob")
    table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: ci")
    signature = base64.b64encode(bytes(range(64))).decode()
    for text in (
        "TO: bob\n\nhi",
        "TO: bob\nKIND: error\n\nhi",
        "TO: *\nPRIORITY: 0\n\nhi",
        "TO: bob\nKIND: status\n\nbusy",
        "TO: __orchestrator__\nKIND: spawn\nNAME: w\n\nhi",
        "TO: #ci\nTOPIC: build.ok\nTTL: 60\nTHREAD: t\nX-Ticket: 42\n\nhi",
        "TO: bob\nDELIVERY: exactly-once\nAWAIT: 60000\nRE: 1769851800000000000-\n\nhi",
        f"TO: bob\nATTACHMENT: sha256:{'a' * 64}\nATTACHMENT: sha256:{'b' * 64}\n\nhi",
        f"TO: bob\nSIGNATURE: ed25519:{signature}\n\nhi",
    ):
        work = table.decide(text)
        stored = table.store.messages.find_by_relay_id(work.message_id)
        assert stored, work.refusal
        assert reconstruct(stored) == parse(text.encode())


def test_too_late_it_is_refused_and_said_so(table: Table) -> None:
    text = "TO: bob\nTTL: 30\n\nquick"
    assert table.decide(text, late_s=30, number=7).refusal is None
    work = table.decide(text, late_s=31)
    assert refused(work) == "its TTL of 30 s passed before it could be delivered"
    assert refused(work) in said(work)
    again = table.decide(text, late_s=31, number=7)
    assert (again.refusal, again.draft) == (None, None)  # it was accepted in time


def test_a_group_of_one_and_topics_that_nobody_wants_are_said(table: Table) -> None:
    table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: team")
    work = table.decide("TO: #team\n\nhi")
    assert said(work) == "no recipients: team has no other members\n"
    assert work.refusal is None
    table.decide("TO: __orchestrator__\nKIND: subscribe\n\nCHANNEL: ci\nPATTERN: test.#")
    said_of_topic = said(table.decide("TO: #ci\nTOPIC: build.ok\n\nhi"))
    assert "there are no other subscribers to topic build.ok of #ci" in said_of_topic
    filtered = "CHANNEL: ci\nPATTERN: build.#\nFILTER: priority=0"
    table.decide(f"TO: __orchestrator__\nKIND: subscribe\n\n{filtered}", sender="bob")
    said_of_filter = said(table.decide("TO: #ci\nTOPIC: build.ok\n\nhi"))
    assert "a filter excludes it for 1 subscriber to topic build.ok of #ci" in said_of_filter


def test_a_sender_is_notified_once_of_what_became_of_its_message(table: Table) -> None:
    sent = table.decide("TO: bob\n\nhi")
    told = [
        table.writer.apply(outcome(sent.subject, "alice", "bob: too late", key))
        for key in ("bob expired", "bob expired", "carol expired")
    ]
    ids = [one.files[0].message_id for one in told]
    assert ids[0] == ids[1] != ids[2]
    answer = parse_delivered(told[0].files[0].data)
    assert (answer.kind, answer.body) == (Kind.NACK, b"bob: too late\n")
    assert answer.headers["RE"] == sent.message_id


# -- again after a crash -------------------------------------------------------------------


def test_a_nack_is_stored_once(table: Table) -> None:
    planned = table.plan("TO: dave\n\nhi", number=7)
    (file,) = table.writer.apply(planned).files
    assert table.store.messages.find_by_relay_id(file.message_id)
    sequence = table.store.sequence
    assert table.writer.apply(planned).files == (file,)
    assert table.store.sequence == sequence


def test_what_was_accepted_goes_to_those_it_was_accepted_for(table: Table) -> None:
    first = table.decide("TO: *\n\nhi", number=7)
    again = table.decide("TO: *\n\nhi", number=7, agents=AGENTS | {"newcomer"})
    assert again.files == first.files
    stored = table.store.messages.find_by_relay_id(again.message_id)
    assert stored and table.store.messages.recipients(stored.id) == first.files[0].recipients


def test_a_way_that_is_gone_since_bounces_for_those_alone_who_have_not_got_it(table: Table) -> None:
    first = table.decide("TO: dave\n\nhi", number=7, agents=AGENTS | {"dave"})
    again = table.decide("TO: dave\n\nhi", number=7)
    assert (again.refusal, [one.recipient for one in again.changes.ended]) == (None, ["dave"])
    stored = table.store.messages.find_by_relay_id(first.message_id)
    assert stored
    table.store.deliveries.deliver(stored.id, ["dave"])
    assert table.decide("TO: dave\n\nhi", number=7).changes.ended == ()


# -- answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "status", "said"),
    [
        ("ack", "", "received", ""),
        ("ack", "\n", "received", ""),
        ("ack", " \t\r\n", "received", ""),
        ("ack", "received", "received", ""),
        ("ack", "in_progress half way", "in_progress", "half way"),
        ("ack", "completed\nall green", "completed", "all green"),
        ("ack", "  completed: all green", "completed", "all green"),
        ("ack", "completedly", "received", "completedly"),
        ("ack", "Done!", "received", "Done!"),
        ("nack", "", "failed", ""),
        ("nack", "completed nothing", "failed", "completed nothing"),
    ],
)
def test_what_an_ack_says(table: Table, kind: str, body: str, status: str, said: str) -> None:
    asked = table.decide("TO: bob\nKIND: command\n\ngo")
    work = table.decide(f"TO: alice\nKIND: {kind}\nRE: {asked.message_id}\n\n{body}", "bob")
    assert work.refusal is None
    assert (given(work).status, given(work).text) == (status, said)
    assert given(work).original.relay_id == asked.message_id
    (posting,) = work.files
    assert posting.recipients == ("alice",)
    stored = table.store.messages.find_by_relay_id(asked.message_id)
    assert stored and stored.status is MessageStatus.ACKNOWLEDGED


def test_a_response_completes_its_query(table: Table) -> None:
    asked = table.decide("TO: bob\nKIND: query\n\nhow many?")
    work = table.decide(f"TO: *\nKIND: response\nRE: {asked.message_id}\n\n20", "bob")
    assert given(work) == Answer(given(work).original, "completed", "20", ends=True)
    assert given(work).original.relay_id == asked.message_id
    assert work.files[0].recipients == ("alice",)


# -- for the orchestrator ------------------------------------------------------------------


def test_what_the_orchestrator_did_it_says_with_an_ack(table: Table) -> None:
    work = table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: team")
    assert work.command
    (posting,) = work.files
    answer = parse_delivered(posting.data)
    assert (answer.kind, answer.headers["RE"]) == (Kind.ACK, work.message_id)
    assert said(work) == "completed created the group team, its owner is alice\n"
    asked, reply = (
        table.store.messages.find_by_relay_id(work.message_id),
        table.store.messages.get(posting.number),
    )
    assert asked and reply
    assert asked.status is MessageStatus.ACKNOWLEDGED
    assert reply.message_type is MessageType.ACKNOWLEDGMENT
    assert reply.correlation_id == asked.correlation_id is not None


def test_what_it_refuses_it_says_with_a_nack(table: Table) -> None:
    work = table.decide("TO: __orchestrator__\nKIND: leave\n\nCHANNEL: team")
    assert (work.command is not None, work.refusal) == (True, None)
    assert parse_delivered(work.files[0].data).kind is Kind.NACK
    assert said(work) == "channel team does not exist: `relay channel create team` makes one\n"


def test_obeyed_again_after_a_crash_the_answer_is_the_same_file(table: Table) -> None:
    table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: team", "bob")
    table.decide("TO: __orchestrator__\nKIND: join\n\nCHANNEL: team")
    text = "TO: __orchestrator__\nKIND: leave\n\nCHANNEL: team"
    first = table.decide(text, number=50)
    sequence = table.store.sequence
    again = table.decide(text, number=50)
    assert [p.message_id for p in again.files] == [p.message_id for p in first.files]
    assert table.store.sequence == sequence


def test_what_expects_no_ack_is_delivered_and_no_more(table: Table) -> None:
    work = table.decide("TO: __orchestrator__\n\nhello")
    asked = table.store.messages.find_by_relay_id(work.message_id)
    assert asked and asked.status is MessageStatus.DELIVERED
    reply = table.store.messages.get(work.files[0].number)
    assert reply and (reply.message_type, reply.correlation_id) == (MessageType.ERROR, None)


def test_a_status_is_noted_and_not_answered(table: Table) -> None:
    work = table.decide("TO: __orchestrator__\nKIND: status\n\n" + "x" * 600)
    assert work.files == ()
    assert work.effects.status_note == "x" * MAX_NOTE
    assert work.command
