"""The router's table row by row: who gets a message, and why one goes to nobody."""

from __future__ import annotations

import pytest

from relay.acomm.model import ChannelType
from relay.agents.status import Directory
from relay.base.message import Kind, MessageFile
from relay.base.names import RESERVED_NAMES
from relay.delivery.router import route, route_again
from relay.delivery.values import Route
from relay.engine.engine import Engine
from tests.delivery.support import bounce
from tests.engine.support import channel_of, group_of

EVERYBODY = Directory(frozenset({"alice", "bob", "carol", "operator"}))
DIRECT, GROUP = ChannelType.DIRECT, ChannelType.GROUP


def to(address: str, kind: Kind = Kind.MESSAGE) -> MessageFile:
    return MessageFile(address, kind, {}, b"hi")


# -- a name --------------------------------------------------------------------------------


def test_a_name_is_that_agent_through_the_channel_of_two(store: Engine) -> None:
    assert route(to("bob"), "alice", EVERYBODY, store) == Route(
        "dm/alice/bob", DIRECT, ("alice", "bob"), ("bob",)
    )
    assert route(to("alice"), "bob", EVERYBODY, store) == Route(
        "dm/alice/bob", DIRECT, ("bob", "alice"), ("alice",)
    )


@pytest.mark.parametrize("name", ["dave", "Bob", "BOB"])
def test_a_name_that_nobody_has_bounces_with_what_to_do(store: Engine, name: str) -> None:
    text = bounce(route(to(name), "alice", EVERYBODY, store))
    assert text.startswith(f"there is no agent {name}:")
    assert text.endswith(f"`relay register {name}` creates it")
    assert ("did you mean bob?" in text) == (name.lower() == "bob")


def test_of_very_many_agents_none_is_suggested(store: Engine) -> None:
    """Comparing them would hold up the loop."""
    many = EVERYBODY._replace(agents=EVERYBODY.agents | {f"x{number}" for number in range(50)})
    text = bounce(route(to("bobb"), "alice", many, store))
    assert "did you mean" not in text


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES - {"__orchestrator__", "operator"}))
def test_a_reserved_name_is_nobody(store: Engine, name: str) -> None:
    assert bounce(route(to(name), "alice", EVERYBODY, store)) == (
        f"{name} is a reserved name, not an agent"
    )


def test_nobody_writes_to_itself(store: Engine) -> None:
    text = bounce(route(to("alice"), "alice", EVERYBODY, store))
    assert text == "an agent cannot send a message to itself"


def test_where_a_name_is_not_found_the_home_is_named(store: Engine) -> None:
    text = bounce(route(to("dave"), "alice", EVERYBODY._replace(home="/h/relay"), store))
    assert text.endswith("`relay register dave` creates it in /h/relay")


# -- Lead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["Lead", "lead", "LEAD", "lEaD"])
def test_lead_in_any_case_is_who_has_the_role(store: Engine, word: str) -> None:
    directory = EVERYBODY._replace(lead="bob")
    found = route(to(word), "alice", directory, store)
    assert isinstance(found, Route)
    assert (found.channel, found.recipients) == ("dm/alice/bob", ("bob",))


def test_an_agent_of_exactly_that_name_wins_over_the_role(store: Engine) -> None:
    directory = Directory(EVERYBODY.agents | {"lead"}, "bob")
    for word, who in (("lead", "lead"), ("Lead", "bob"), ("LEAD", "bob")):
        found = route(to(word), "alice", directory, store)
        assert isinstance(found, Route) and found.recipients == (who,)


@pytest.mark.parametrize(
    ("agents", "word", "who"),
    [
        ({"lead"}, "Lead", "lead"),
        ({"LEAD", "Lead", "lead"}, "Lead", "Lead"),
        ({"LEAD", "Lead", "lead"}, "lead", "lead"),
        ({"LEAD", "Lead"}, "lead", "LEAD"),
    ],
)
def test_without_the_role_an_agent_of_that_name_the_very_spelling_first(
    store: Engine, agents: set[str], word: str, who: str
) -> None:
    found = route(to(word), "alice", Directory(EVERYBODY.agents | agents), store)
    assert isinstance(found, Route) and found.recipients == (who,)


def test_where_nobody_is_lead_it_bounces_with_what_to_do(store: Engine) -> None:
    text = bounce(route(to("Lead"), "alice", EVERYBODY, store))
    assert text.startswith("no lead is set")
    assert "--role lead" in text and "config.json" in text


def test_a_lead_that_has_left_bounces_by_its_name(store: Engine) -> None:
    text = bounce(route(to("Lead"), "alice", EVERYBODY._replace(lead="dave"), store))
    assert text.startswith("there is no agent dave")


def test_the_lead_does_not_write_to_itself(store: Engine) -> None:
    assert "cannot send a message to itself" in bounce(
        route(to("Lead"), "bob", EVERYBODY._replace(lead="bob"), store)
    )


# -- everybody -----------------------------------------------------------------------------


def test_a_star_is_every_active_agent_but_the_sender(store: Engine) -> None:
    assert route(to("*"), "bob", EVERYBODY, store) == Route(
        "all",
        GROUP,
        ("alice", "bob", "carol", "operator"),
        ("alice", "carol", "operator"),
        shown_channel="all",
    )


def test_a_star_of_one_who_has_left_meanwhile(store: Engine) -> None:
    found = route(to("*"), "dave", EVERYBODY, store)
    assert isinstance(found, Route)
    assert found.recipients == ("alice", "bob", "carol", "operator")
    assert "dave" in found.members


def test_a_star_where_there_is_nobody_else(store: Engine) -> None:
    found = route(to("*"), "alice", Directory(frozenset({"alice"})), store)
    assert isinstance(found, Route) and found.recipients == ()


# -- channels ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GROUP, ChannelType.BROADCAST, ChannelType.PUB_SUB])
def test_a_channel_says_itself_who_gets_it(store: Engine, kind: ChannelType) -> None:
    channel_of(store, kind, "alice", name="team/backend")
    assert route(to("#team/backend"), "bob", EVERYBODY, store) == Route(
        "team/backend", kind, shown_channel="team/backend"
    )


def test_a_channel_that_is_not_there_bounces_with_what_to_do(store: Engine) -> None:
    text = bounce(route(to("#team"), "alice", EVERYBODY, store))
    assert text.startswith("channel team does not exist:")
    assert "`relay channel create team`" in text and "KIND join or subscribe" in text


@pytest.mark.parametrize("name", ["dm/alice/bob", "dm/x"])
def test_a_channel_of_two_is_nobodys_address(store: Engine, name: str) -> None:
    channel_of(store, DIRECT, "alice", "bob", name=name)
    assert "write to the agent by its name" in bounce(
        route(to(f"#{name}"), "alice", EVERYBODY, store)
    )


def test_the_channel_of_all_is_written_with_a_star(store: Engine) -> None:
    group_of(store, "alice", name="all")
    assert "write TO: *" in bounce(route(to("#all"), "alice", EVERYBODY, store))


# -- the orchestrator ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.JOIN, Kind.STATUS, Kind.SPAWN, Kind.MESSAGE])
def test_the_orchestrator_is_reached_through_a_channel_of_two(store: Engine, kind: Kind) -> None:
    assert route(to("__orchestrator__", kind), "alice", EVERYBODY, store) == Route(
        "dm/__orchestrator__/alice", DIRECT, ("alice", "__orchestrator__"), ("__orchestrator__",)
    )


# -- decided before a crash ----------------------------------------------------------------


def test_what_was_decided_goes_the_same_way_again() -> None:
    assert route_again("alice", ["bob"]) == Route(
        "dm/alice/bob", DIRECT, ("alice", "bob"), ("bob",)
    )
    assert route_again("alice", ["bob", "carol"]) == Route(
        "all", GROUP, ("alice", "bob", "carol"), ("bob", "carol")
    )
