"""Commands to the orchestrator: each ACTION, who may, what is refused, and doing it again."""

from __future__ import annotations

from typing import Any

import pytest

from relay.acomm.model import (
    Channel,
    ChannelConfig,
    ChannelState,
    ChannelType,
    DeliveryMode,
    Retention,
    RetentionKind,
)
from relay.base.message import parse
from relay.delivery.actions import ACTIONS
from relay.delivery.channel_fields import SETTINGS, settings_of
from relay.delivery.control import handle
from relay.delivery.values import ControlReply, Subject
from relay.engine.engine import Engine
from relay.journal.tier_plan import JournalCommand
from tests.engine.support import AT_LEAST_ONCE, channel_of, group_of, send
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 7.6")


def ask(
    store: Engine, body: str, sender: str = "operator", lead: str | None = None, head: str = ""
) -> ControlReply:
    text = f"TO: __orchestrator__\nKIND: command\n{head}\n{body}"
    answer = handle(parse(text.encode()), Subject(agent=sender), store, lead)
    assert answer.text and "\n" not in answer.text
    return answer


def done(store: Engine, body: str, sender: str = "operator", lead: str | None = None) -> str:
    """It is done; the second time changes nothing, and is fine as well."""
    first = ask(store, body, sender, lead)
    assert first.ok is True, first.text
    before = store.snapshot().values
    again = ask(store, body, sender, lead)
    assert again.ok is True, again.text
    assert before.channels == store.snapshot().values.channels
    assert before.subscriptions == store.snapshot().values.subscriptions
    return first.text


def refused(store: Engine, body: str, sender: str = "operator", lead: str | None = None) -> str:
    """It is answered with a nack, and nothing is changed."""
    before = store.snapshot()
    answer = ask(store, body, sender, lead)
    assert answer.ok is False, answer.text
    assert store.snapshot() == before
    return answer.text


def channel(store: Engine, name: str = "ci") -> Channel:
    found = store.channels.find_by_name(name)
    assert found is not None
    return found


def members(store: Engine, name: str = "ci") -> list[str]:
    return [one.id for one in channel(store, name).participants]


@pytest.fixture
def ci(store: Engine) -> Engine:
    """The PubSub channel ci, owned by alice."""
    channel_of(store, ChannelType.PUB_SUB, "alice", name="ci")
    return store


# -- any command ---------------------------------------------------------------------------


def test_a_command_without_its_action_is_answered_which_there_are(store: Engine) -> None:
    for body, said in (("deploy: now", "ACTION is missing"), ("ACTION: x.y", "no ACTION 'x.y'")):
        text = refused(store, body)
        assert said in text and all(name in text for name in ACTIONS)


def test_names_of_fields_in_any_case_and_the_action_as_a_header(store: Engine) -> None:
    assert ask(store, "channel: #ci\ntype: Group\n\n", head="ACTION: Channel.Create\n").ok
    assert channel(store).channel_type is ChannelType.GROUP


def test_what_is_missing_is_named(store: Engine) -> None:
    for name in [n for n in ACTIONS if ACTIONS[n].needs]:
        needed = ACTIONS[name].needs[0]
        for body in ("", f"\n{needed}:"):
            text = refused(store, f"ACTION: {name}{body}")
            assert text == f"{needed} is missing: {name} needs a body line `{needed}: …`"


def test_a_line_that_it_does_not_know_is_named(store: Engine) -> None:
    for name in [n for n in ACTIONS if not ACTIONS[n].has_settings]:
        needs = "\n".join(f"{field}: 1" for field in ACTIONS[name].needs)
        text = refused(store, f"ACTION: {name}\n{needs}\nVOLUME: 11")
        first = (*ACTIONS[name].needs, *ACTIONS[name].takes, "ACTION alone")[0]
        assert text.startswith(f"{name} does not accept VOLUME: expected {first}")


def test_a_channel_that_is_not_there(store: Engine) -> None:
    for name in [n for n in ACTIONS if n.startswith("channel.") and n != "channel.create"]:
        text = refused(store, f"ACTION: {name}\nCHANNEL: ci" + _more(name))
        assert text == "channel ci does not exist: `relay channel create ci` makes one", name
        assert "is no" in refused(store, f"ACTION: {name}\nCHANNEL: a b" + _more(name)), name


def _more(name: str) -> str:
    """The lines that an action needs besides its channel."""
    also = {"channel.subscribe": "\nPATTERN: #", "channel.config": "\necho: true"}
    return also.get(name, "")


CREATE = "ACTION: channel.create\nCHANNEL: cd\nTYPE: group\n"
CONFIG = "ACTION: channel.config\nCHANNEL: ci\n"
PURGE, EVICT = "ACTION: dead.purge\nOLDER_THAN: ", "ACTION: journal.evict\nSEGMENTS: "
REFUSED = [
    ("ACTION: channel.join\nhello", "the body, line 2: 'hello' is not a line"),
    ("ACTION: channel.join\nCHANNEL: a\nchannel: b", "line 3: CHANNEL is given twice"),
    (CREATE.replace("cd", "a b"), "'a b' is not a valid channel name for channel.create"),
    (CREATE.replace("cd", "all"), "neither all nor dm/"),
    ("ACTION: channel.create\nCHANNEL: dm/a/b\nTYPE: direct", "neither all nor dm/"),
    (
        CREATE.replace("group", "crowd"),
        "'crowd' is not one of group, broadcast, pubsub, direct",
    ),
    (CREATE + "OWNER: a b", "OWNER 'a b' is not a valid agent name"),
    (CREATE + "OWNER: __orchestrator__", "is not a valid agent name"),
    (CREATE + "volume: 11", "setting volume does not exist"),
    (CREATE + "ack_timeout: 0", "ack_timeout: 0 is not a number from 1"),
    *(
        (f"ACTION: channel.join\nCHANNEL: ci\nAGENT: {name}", "is not a valid agent name")
        for name in ("a b", "__orchestrator__", "system")
    ),
    ("ACTION: channel.subscribe\nCHANNEL: ci\nPATTERN: a.#.b", "topic_pattern: "),
    ("ACTION: channel.unsubscribe\nCHANNEL: ci\nPATTERN: a.#.b", "topic_pattern: "),
    (CONFIG, "no setting is given: expected any of delivery"),
    (
        CONFIG + "volume: 11",
        f"does not exist: expected one of {', '.join(SETTINGS)}",
    ),
    (CONFIG + "self: 1", "setting self does not exist"),
    (CONFIG + "channel_id: 1", "setting channel_id does not exist"),
    (CONFIG + "delivery: maybe", "delivery 'maybe' is not one of at-most-once"),
    (CONFIG + "delivery: 1", "delivery '1' is not one of at-most-once"),
    (CONFIG + "retention: 3600", "retention '3600' is not one of forever, duration SECONDS"),
    (CONFIG + "retention: duration", "is not one of forever"),
    (CONFIG + "retention: duration 0", "is not one of forever"),
    (CONFIG + "retention: duration soon", "is not one of forever"),
    (CONFIG + "retention: forever 1", "is not one of forever"),
    (CONFIG + "ack_timeout: soon", "expected seconds or a duration such as 30s, or none, got 'so"),
    (CONFIG + "max_pending: " + "9" * 19, "expected a whole number of at most 18 digits, or none"),
    (CONFIG + "echo: maybe", "echo: expected true or false, got 'maybe'"),
    (CONFIG + "ack_timeout:", "ack_timeout: expected"),
    (CONFIG + "ack_timeout: -1", "got '-1'"),
    (CONFIG + "max_retries: none", "max_retries: expected a whole number of at most 18 digits"),
    (CONFIG + "max_message_size: none", "expected a whole number of at most 18 digits, got 'none'"),
    (CONFIG + "max_pending: true", "max_pending: expected a whole number of at most 18 digits, or"),
    (CONFIG + "echo: none", "echo: expected true or false, got 'none'"),
    (CONFIG + "max_message_size: 0", "max_message_size: 0 is not a number from 1"),
    (CONFIG + "echo: 1", "echo: expected true or false, got '1'"),
    (CONFIG + "echo: true\nack_timeout: 0", "ack_timeout: 0 is not a number"),
    *((PURGE + age, "expected seconds, got") for age in ("soon", "-1", "1.5", "7d")),
    *((EVICT + text, "expected an integer, got") for text in ("x", "1,2", "-1", "1.5", "9" * 16)),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(ci: Engine, body: str, said: str) -> None:
    assert said in refused(ci, body)


# -- making channels -----------------------------------------------------------------------


@pytest.mark.parametrize("word", ["group", "broadcast", "pubsub", "direct"])
def test_a_channel_of_each_type_is_made_once(store: Engine, word: str) -> None:
    text = done(store, f"ACTION: channel.create\nCHANNEL: ci\nTYPE: {word}", "alice")
    made = channel(store)
    assert (made.channel_type.label.lower(), made.owner) == (word, "alice")
    assert text == f"created the {made.channel_type.label} channel ci, its owner is alice"
    assert len(store.channels.list_all()) == 1


def test_a_channel_for_another_agent_with_settings(store: Engine) -> None:
    body = (
        "ACTION: channel.create\nCHANNEL: ci\nTYPE: pubsub\nOWNER: alice\n"
        "ack_timeout: 30\ndelivery: At-Least-Once\nretention: count 7"
    )
    done(store, body)
    assert channel(store).owner == "alice"
    assert channel(store).config == ChannelConfig(
        AT_LEAST_ONCE, ack_timeout=30, retention=Retention(RetentionKind.COUNT, 7)
    )
    assert "only operator and the lead" in refused(store, body.replace("ci", "cd"), "bob")
    done(store, body.replace("ci", "cd"), "bob", lead="bob")


def test_the_same_channel_with_the_settings_it_got_later_is_the_same(store: Engine) -> None:
    create = "ACTION: channel.create\nCHANNEL: ci\nTYPE: group"
    done(store, create)
    done(store, "ACTION: channel.config\nCHANNEL: ci\necho: true")
    assert ask(store, create).text == "the Group channel ci already exists with these settings"


@pytest.mark.parametrize(
    "also", ["alice\nTYPE: group", "bob\nTYPE: pubsub", "alice\nTYPE: pubsub\necho: true"]
)
def test_another_channel_of_that_name_is_not_made(ci: Engine, also: str) -> None:
    text = refused(ci, f"ACTION: channel.create\nCHANNEL: ci\nOWNER: {also}", "operator")
    assert text == "channel ci already exists: PubSub, Active, its owner is alice"


def test_a_closed_channel_is_not_made_again(ci: Engine) -> None:
    ci.channels.set_state(channel(ci).id, ChannelState.CLOSED)
    text = refused(ci, "ACTION: channel.create\nCHANNEL: ci\nTYPE: pubsub", "alice")
    assert text == "channel ci was closed, which is permanent: choose another name"


# -- taking part ---------------------------------------------------------------------------


def test_taking_part_and_leaving(ci: Engine) -> None:
    assert done(ci, "ACTION: channel.join\nCHANNEL: #ci", "bob") == (
        "bob is a member of ci, a PubSub channel"
    )
    assert members(ci) == ["alice", "bob"]
    assert done(ci, "ACTION: channel.leave\nCHANNEL: ci", "bob") == "bob is not a member of ci"
    assert members(ci) == ["alice"]


def test_subscribing_and_ending_it(ci: Engine) -> None:
    subscribe = "ACTION: channel.subscribe\nCHANNEL: ci\nPATTERN: "
    assert done(ci, f"{subscribe}build.#", "bob") == "bob receives build.# from ci"
    done(ci, f"{subscribe}test.*", "bob")
    unsubscribe = "ACTION: channel.unsubscribe\nCHANNEL: ci"
    assert done(ci, f"{unsubscribe}\nPATTERN: test.*", "bob") == (
        "1 subscription of bob to ci ended"
    )
    assert done(ci, unsubscribe, "bob") == "1 subscription of bob to ci ended"
    assert ci.state.subscriptions == {}


@pytest.mark.parametrize("verb", ["join", "leave", "subscribe", "unsubscribe"])
def test_for_another_it_is_done_by_operator_owner_and_lead(ci: Engine, verb: str) -> None:
    body = f"ACTION: channel.{verb}\nCHANNEL: ci\nAGENT: carol{_more(f'channel.{verb}')}"
    text = refused(ci, body, "bob")
    assert text == (
        f"channel.{verb} of carol is for carol itself, alice who owns ci, operator and the lead, "
        "not for bob"
    )
    for sender, lead in (("operator", None), ("alice", None), ("bob", "bob"), ("carol", None)):
        assert "carol" in done(ci, body, sender, lead)


def test_nobody_joins_what_is_not_to_be_joined(store: Engine) -> None:
    for name in ("all", "dm/alice/bob"):
        channel_of(store, ChannelType.PUB_SUB, "alice", name=name)
        for verb in ("join", "leave", "subscribe", "unsubscribe"):
            lines = f"ACTION: channel.{verb}\nCHANNEL: {name}{_more(f'channel.{verb}')}"
            said = f"{name!r} is not a valid channel name for channel.{verb}"
            assert said in refused(store, lines)


# -- settings and states -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("delivery: exactly-once", "delivery", DeliveryMode.EXACTLY_ONCE),
        ("max_message_size: 10", "max_message_size", 10),
        ("max_participants: 2", "max_participants", 2),
        ("retention: duration 3600", "retention", Retention(RetentionKind.DURATION, 3600)),
        ("retention: SIZE 5", "retention", Retention(RetentionKind.SIZE, 5)),
        ("retention: forever", "retention", Retention()),
        ("ACK_TIMEOUT: 30", "ack_timeout", 30),
        ("max_retries: 0", "max_retries", 0),
        ("retry_backoff_ms: 50", "retry_backoff_ms", 50),
        ("echo: true", "echo", True),
        ("sticky_messages: True", "sticky_messages", True),
        ("priority_ordering: false", "priority_ordering", False),
    ],
)
def test_every_setting(ci: Engine, line: str, field: str, value: object) -> None:
    text = done(ci, f"ACTION: channel.config\nCHANNEL: ci\n{line}", "alice")
    assert getattr(channel(ci).config, field) == value
    assert field in text


@pytest.mark.parametrize("name", ["ack_timeout", "max_participants"])
def test_none_takes_an_optional_setting_back(ci: Engine, name: str) -> None:
    done(ci, f"ACTION: channel.config\nCHANNEL: ci\n{name}: 9\necho: true")
    done(ci, f"ACTION: channel.config\nCHANNEL: ci\n{name}: none")
    assert channel(ci).config == ChannelConfig(echo=True)


def test_pause_drain_resume_close(ci: Engine) -> None:
    for verb, state in (("pause", "Paused"), ("drain", "Draining"), ("resume", "Active")):
        assert done(ci, f"ACTION: channel.{verb}\nCHANNEL: ci") == f"channel ci is {state}"
        assert channel(ci).state.label == state
    assert done(ci, "ACTION: channel.close\nCHANNEL: ci") == "channel ci is Closed"
    joined = done(ci, "ACTION: channel.join\nCHANNEL: ci", "bob")
    assert joined == "bob is a member of ci, a PubSub channel, which is Closed"
    heard = done(ci, "ACTION: channel.subscribe\nCHANNEL: ci\nPATTERN: build.#", "bob")
    assert heard == "bob receives build.# from ci, which is Closed"
    for verb in ("pause", "drain", "resume"):
        assert refused(ci, f"ACTION: channel.{verb}\nCHANNEL: ci") == (
            "channel ci was closed, which is permanent"
        )


CHANGES = ["config", "pause", "resume", "drain", "close"]


@pytest.mark.parametrize("verb", CHANGES)
def test_a_channel_is_changed_by_operator_owner_and_lead(ci: Engine, verb: str) -> None:
    body = f"ACTION: channel.{verb}\nCHANNEL: ci{_more(f'channel.{verb}')}"
    assert refused(ci, body, "bob", lead="carol") == (
        f"channel.{verb} of ci is for its owner alice, operator and the lead, not for bob"
    )
    for sender in ("operator", "alice", "carol"):
        done(ci, body, sender, lead="carol")


@pytest.mark.parametrize("verb", CHANGES)
def test_the_relays_own_channels_stay_as_they_are(store: Engine, verb: str) -> None:
    group_of(store, "operator", "bob", name="all")
    channel_of(
        store,
        ChannelType.DIRECT,
        "operator",
        "__orchestrator__",
        name="dm/__orchestrator__/operator",
    )
    for name in ("all", "dm/__orchestrator__/operator"):
        body = f"ACTION: channel.{verb}\nCHANNEL: {name}{_more(f'channel.{verb}')}"
        assert refused(store, body) == f"{name} belongs to the relay and cannot be changed"


def test_the_way_between_two_is_paused_by_the_operator_and_never_closed(store: Engine) -> None:
    channel_of(store, ChannelType.DIRECT, "alice", "bob", name="dm/alice/bob")
    done(store, "ACTION: channel.pause\nCHANNEL: dm/alice/bob")
    text = refused(store, "ACTION: channel.resume\nCHANNEL: dm/alice/bob", "alice")
    assert text == "channel.resume of dm/alice/bob is for operator and the lead, not for alice"
    assert "closing is final: pause it" in refused(
        store, "ACTION: channel.close\nCHANNEL: dm/alice/bob"
    )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("description", "what CI says: a, b", "what CI says: a, b"),
        ("description", "None", None),
        ("tags", "ci, build", ("ci", "build")),
        ("tags", "none", ()),
        ("max_pending", "7", 7),
        ("max_pending", "none", None),
    ],
)
def test_settings_that_are_kept_elsewhere(name: str, text: str, value: object) -> None:
    assert settings_of({name: text}) == {name: value}


# -- dead letters --------------------------------------------------------------------------


@pytest.fixture
def dead(store: Engine) -> Engine:
    """Messages 1 (relay id r-1) and 2 of lead are dead for worker, 3 is not."""
    once: dict[str, Any] = {"delivery": AT_LEAST_ONCE, "ack_timeout": 10, "max_retries": 0}
    made = group_of(store, "lead", "worker", **once)
    for one in (send(store, made, "lead", metadata={"relay_id": "r-1"}), send(store, made, "lead")):
        store.retries.dead_letter(one.id, ["worker"], "no acknowledgment")
    send(store, made, "lead", metadata={"relay_id": "r-3"})
    assert [letter.message.id for letter in store.retries.dead_letters()] == [1, 2]
    return store


@pytest.mark.parametrize(("wanted", "number"), [("r-1", 1), ("1", 1), ("2", 2)])
def test_a_dead_letter_is_sent_again(dead: Engine, wanted: str, number: int) -> None:
    text = ask(dead, f"ACTION: dead.replay\nID: {wanted}").text
    assert text == f"dead letter {wanted} is sent again to worker"
    (again,) = dead.retries.due()
    assert (again.number, again.recipient, again.attempt) == (number, "worker", 2)
    assert len(dead.retries.dead_letters()) == 1


def test_a_dead_letter_is_discarded(dead: Engine) -> None:
    assert ask(dead, "ACTION: dead.discard\nID: r-1").text == "dead letter r-1 is discarded"
    assert [letter.message.id for letter in dead.retries.dead_letters()] == [2]


def test_a_replay_waits_for_a_paused_channel_and_a_closed_one_refuses_it(dead: Engine) -> None:
    dead.channels.set_state(1, ChannelState.PAUSED)
    assert ask(dead, "ACTION: dead.replay\nID: 1").text == (
        "dead letter 1 is held: channel c is Paused; "
        "it is sent again to worker when the channel is resumed"
    )
    dead.channels.set_state(1, ChannelState.CLOSED)
    assert "channel c is Closed" in refused(dead, "ACTION: dead.replay\nID: 2")


def test_old_dead_letters_are_purged(dead: Engine, clock: FakeClock) -> None:
    assert done(dead, "ACTION: dead.purge\nOLDER_THAN: 60") == "0 dead letters discarded"
    clock.advance(61)
    assert done(dead, "ACTION: dead.purge\nOLDER_THAN: 60") == "2 dead letters discarded"
    assert dead.retries.dead_letters() == []


def test_what_is_not_dead_stays_as_it_is(dead: Engine) -> None:
    for verb in ("replay", "discard"):
        for wanted in ("r-3", "3", "r-9", "0", "-1", "é"):
            text = refused(dead, f"ACTION: dead.{verb}\nID: {wanted}")
            assert text == f"dead letter {wanted!r} does not exist: `relay dead list` lists them"


@pytest.mark.parametrize(
    "line", ["dead.replay\nID: 1", "dead.discard\nID: 1", "dead.purge\nOLDER_THAN: 0"]
)
def test_dead_letters_are_for_operator_and_lead(dead: Engine, line: str) -> None:
    for sender in ("lead", "worker"):  # an agent of that name has not the role
        text = refused(dead, f"ACTION: {line}", sender)
        assert f"is for operator and the lead alone, not for {sender}" in text
    assert ask(dead, f"ACTION: {line}", "worker", lead="worker").ok


# -- the journal ---------------------------------------------------------------------------


def test_an_order_for_the_journal_is_handed_out(store: Engine) -> None:
    before = store.snapshot()
    answer = ask(store, "ACTION: journal.compress\nSEGMENTS: 1 20")
    assert answer.effects.job == JournalCommand("compress", (1, 20))
    assert ask(store, "ACTION: journal.seal", "lena", "lena").effects.job == JournalCommand("seal")
    pruned = ask(store, "ACTION: journal.prune\nKEEP_AGE: 60\nKEEP_BYTES: 7").effects.job
    assert pruned == JournalCommand("prune", (), 60, 7)
    assert store.snapshot() == before
