"""plan() as a table: message x directory x store -> plan; nothing is written."""

from __future__ import annotations

import pytest

from relay.acomm.model import ChannelType, DeliveryState, MessageType, Obligation
from relay.agents.status import Directory
from relay.base.incidents import Incident, IncidentKind, Refusal, RefusalCode
from relay.base.message import Kind
from relay.base.names import answer_id
from relay.delivery.notifications import remind
from relay.delivery.plan import end_delivery
from relay.delivery.values import Effects, OutboxFile, Row
from relay.engine.deliveries import OverdueAnswer
from relay.engine.retries import OverdueDelivery
from relay.ledger.ledger import MessageRow
from tests.delivery.planning import AGENTS, AT_NS, Table, read
from tests.engine.support import NOW_S, channel_of, group_of

ORCHESTRATED = ("join", "leave", "subscribe", "unsubscribe", "spawn", "release", "continuity")


@pytest.fixture
def talk(table: Table) -> Table:
    """A group of three, a channel with topics, and three messages from alice to bob."""
    group_of(table.store, "alice", "bob", "carol", name="team")
    ci = channel_of(table.store, ChannelType.PUB_SUB, "alice", "bob", "carol", name="ci")
    table.store.channels.subscribe(ci.id, "bob", "build.#")
    for number, kind in ((1, "message"), (2, "command"), (3, "query")):
        table.decide(f"TO: bob\nKIND: {kind}\n\ngo", number=number)
    table.number = 20
    return table


def sent(number: int) -> str:
    return f"{AT_NS + number}-{number:08x}"


MESSAGES = [
    ("TO: bob", "alice", ("bob",), MessageType.TEXT),
    ("TO: bob\nKIND: command", "alice", ("bob",), MessageType.COMMAND),
    ("TO: bob\nKIND: query", "alice", ("bob",), MessageType.QUERY),
    ("TO: bob\nKIND: error", "alice", ("bob",), MessageType.ERROR),
    ("TO: bob\nKIND: status", "alice", ("bob",), MessageType.NOTIFICATION),
    ("TO: bob\nKIND: notification", "alice", ("bob",), MessageType.NOTIFICATION),
    ("TO: *", "alice", ("bob", "carol", "operator"), MessageType.BROADCAST),
    ("TO: #team", "bob", ("alice", "carol"), MessageType.TEXT),
    ("TO: #ci\nTOPIC: build.ok", "alice", ("bob",), MessageType.TEXT),
    (f"TO: alice\nKIND: ack\nRE: {sent(2)}", "bob", ("alice",), MessageType.ACKNOWLEDGMENT),
    (f"TO: alice\nKIND: nack\nRE: {sent(2)}", "bob", ("alice",), MessageType.ACKNOWLEDGMENT),
    (f"TO: alice\nKIND: response\nRE: {sent(3)}", "bob", ("alice",), MessageType.RESPONSE),
]


@pytest.mark.parametrize(("head", "sender", "recipients", "message_type"), MESSAGES)
def test_a_plan_stores_a_message_and_writes_its_files(
    talk: Table, head: str, sender: str, recipients: tuple[str, ...], message_type: MessageType
) -> None:
    before = talk.store.snapshot()
    made = talk.plan(f"{head}\n\nhi", sender, number=9)
    assert made.draft is not None and made.draft.route.recipients is not None
    assert set(made.draft.route.recipients) == set(recipients)
    assert made.draft.message.message_type is message_type
    (file,) = made.files
    assert (file.message_id, file.number, set(file.recipients)) == (sent(9), 0, set(recipients))
    assert (made.refusal, made.messages, made.command) == (None, (), None)
    assert (made.answer is not None) is ("RE:" in head)
    assert talk.store.snapshot() == before


@pytest.mark.parametrize("kind", [*ORCHESTRATED, "command", "status", "message"])
def test_a_plan_for_the_orchestrator_is_a_command(talk: Table, kind: str) -> None:
    text = f"TO: __orchestrator__\nKIND: {kind}\nNAME: worker\nACTION: list\n\nCHANNEL: new"
    before = talk.store.snapshot()
    made = talk.plan(text)
    assert made.command is not None and not made.is_carried_out
    assert (made.files, made.messages, made.refusal) == ((), (), None)
    assert talk.store.snapshot() == before


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ("TO: dave", "there is no agent dave"),
        ("TO: gone", "gone is retired"),
        ("TO: bob\nKIND: join", "is for the relay itself"),
        ("TO: bob\nKIND: spawn\nNAME: x", "is for the relay itself"),
    ],
)
def test_a_plan_refuses(talk: Table, head: str, says: str) -> None:
    directory = Directory(AGENTS | {"gone"}, None, {"gone": "gone is retired"})
    made = talk.plan(f"{head}\n\nhi", directory=directory)
    assert made.refusal is not None and says in made.refusal.reason
    assert (made.draft, made.files, made.command) == (None, (), None)
    (nack,) = made.messages
    assert (nack.message.kind, nack.message.to, nack.recipients) == (Kind.NACK, "alice", ("alice",))


def test_an_answer_counts_though_its_sender_is_gone(talk: Table) -> None:
    text = f"TO: alice\nKIND: ack\nRE: {sent(2)}\n\ncompleted"
    made = talk.plan(text, "bob", AGENTS - {"alice"})
    assert made.refusal is not None and "recorded as answered" in made.refusal.reason
    assert made.answer is not None
    assert (made.answer.status, made.answer.ends) == ("completed", True)


def test_refused_before_it_was_planned(talk: Table) -> None:
    incident = Incident(IncidentKind.UNSIGNED, "alice", "x", "not signed")
    unsigned = Refusal(RefusalCode.UNSIGNED, "not signed")
    made = talk.plan("TO: bob\n\nhi", refusal=unsigned, incidents=(incident,), row=Row.REPEATED)
    assert (made.refusal, made.draft) == (unsigned, None)
    assert made.effects == Effects((incident,), may_repeat=True)


def test_unavailable_and_inactive_agents_get_no_broadcast(talk: Table) -> None:
    directory = Directory(AGENTS, None, {"bob": "bob is retired"}, {"carol"})
    made = talk.plan("TO: *\n\nhi", directory=directory)
    assert made.draft is not None and made.draft.route.recipients == ("operator",)
    made = talk.plan("TO: #team\n\nhi", directory=directory)
    assert {one.recipient: one.reason for one in made.changes.ended} == {"bob": "bob is retired"}
    assert made.files[0].recipients == ("carol",)  # inactive: its mail waits


def test_a_sticky_channel_keeps_what_nobody_gets(talk: Table) -> None:
    for name, nacks in (("plain", 1), ("sticky", 0)):
        channel_of(
            talk.store, ChannelType.PUB_SUB, "alice", name=name, sticky_messages=name == "sticky"
        )
        made = talk.plan(f"TO: #{name}\nTOPIC: t\n\nhi")
        assert made.draft is not None and made.draft.route.recipients == ()
        assert (len(made.messages), made.refusal) == (nacks, None)


def test_a_message_beyond_max_pending_is_stored_and_held(talk: Table) -> None:
    channel = talk.store.channels.find_by_name("team")
    assert channel is not None
    talk.store.channels.configure(channel.id, max_pending=1)
    assert talk.decide("TO: #team\n\nfirst").changes.held == ()
    second = talk.decide("TO: #team\nTTL: 5\n\nsecond")
    assert second.files == ()
    assert [(one.recipient, one.due_at - AT_NS) for one in second.changes.held] == [
        ("bob", 5 * 10**9 + 1),
        ("carol", 5 * 10**9 + 1),
    ]


def test_a_repeated_message_is_not_stored_again(talk: Table) -> None:
    first = talk.decide("TO: bob\n\nhi", number=9)
    again = talk.plan("TO: bob\n\nhi", number=9, row=Row.REPEATED)
    assert again.draft is None
    assert again.files == first.files  # those already delivered are left out when they are staged
    assert again.effects.may_repeat


def test_a_command_carried_out_before_is_answered_as_then(talk: Table) -> None:
    text = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: bob"
    first = talk.decide(text, "operator", number=9)
    again = talk.plan(text, "operator", number=9, row=Row.REPEATED)
    assert again.command is not None and again.is_carried_out
    (reply,) = again.messages
    assert (reply.message.kind, reply.message_id) == (Kind.ACK, first.files[0].message_id)
    assert again.effects.status_change == first.effects.status_change is not None


def test_a_message_under_the_id_of_an_answer_carries_nothing_out(talk: Table) -> None:
    command = "TO: __orchestrator__\nKIND: command\n\nACTION: agent.retire\nNAME: carol"
    asked = read(command, "bob", 50).file.message_id
    taken = answer_id(AT_NS, "bob", asked, "ack")
    facts = {"file": OutboxFile("bob", f"{taken}.msg", taken, 9, AT_NS, 51)}
    talk.writer.apply(talk.plan("TO: alice\n\ncompleted", "bob", **facts))
    done = talk.decide(command, "bob", number=50)
    assert not done.is_carried_out and done.effects.status_change is None
    (said,) = done.files
    assert said.message_id != taken and b"is for operator and the lead" in said.data


def row_of(number: int) -> MessageRow:
    return MessageRow(
        sent(number), "alice", "", None, "archived", AT_NS, 0, None, 0, 0, 0, "", "bob"
    )


@pytest.mark.parametrize(
    "state", [DeliveryState.EXPIRED, DeliveryState.BOUNCED, DeliveryState.DEAD]
)
def test_a_delivery_that_ended_is_told(talk: Table, state: DeliveryState) -> None:
    channel_of(talk.store, ChannelType.PUB_SUB, "operator", "carol", name="_system")
    system = talk.store.channels.find_by_name("_system")
    assert system is not None
    talk.store.channels.subscribe(system.id, "carol", "#")
    ended = OverdueDelivery(1, sent(1), "bob", 1, state, "too late")
    store = talk.store
    made = end_delivery(ended, row_of(1), Directory(AGENTS), store)
    assert made.changes.ended == (ended,)
    nack, *published = made.messages
    assert nack.recipients == ("alice",) and b"not delivered to bob: too late" in nack.message.body
    assert [one.recipients for one in published] == [("carol",)] * (state is DeliveryState.DEAD)
    for one in published:
        assert one.message.headers["TOPIC"] == "_system.message.deadletter"
        assert one.message.headers["RE"] == sent(1)
        assert b"from alice to bob is dead" in one.message.body
    assert end_delivery(ended, row_of(1), Directory(AGENTS), store) == made
    without_sender = end_delivery(ended, row_of(1), Directory(AGENTS - {"alice"}), store)
    assert without_sender.messages == tuple(published)
    assert end_delivery(ended, None, Directory(AGENTS), store).messages == ()


@pytest.mark.parametrize(("reminders", "is_last"), [(0, False), (1, False), (2, True)])
def test_an_overdue_answer_is_reminded_of(talk: Table, reminders: int, is_last: bool) -> None:
    message = talk.store.messages.find_by_relay_id(sent(2))
    assert message is not None
    owed = Obligation(due_ms=1, since=NOW_S, reminders=reminders)
    talk.store.state.owed[message.id] = {"bob": owed}
    overdue = [OverdueAnswer(message, "bob", owed, next_due_ms=7)]
    made = remind(overdue, Directory(AGENTS), talk.store, AT_NS)
    (change,) = made.changes.reminders
    assert (change.recipient, change.due_ms) == ("bob", 0 if is_last else 7)
    to = [(one.message.to, one.message.kind) for one in made.messages]
    assert to == [("bob", Kind.REMINDER)] * (not is_last) + [("alice", Kind.NOTIFICATION)]
    gone = remind(overdue, Directory(AGENTS - {"bob"}), talk.store, AT_NS)
    assert gone.changes.reminders[0].due_ms == 0  # given up
    assert b"no longer awaited: bob is no longer an agent" in gone.messages[0].message.body
