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


# -- to somebody ---------------------------------------------------------------------------

LED = EVERYBODY._replace(lead="bob")
LEADS = EVERYBODY.agents | {"LEAD", "Lead", "lead"}
FOUND: list[tuple[str, str, Directory, str, tuple[str, ...]]] = [
    ("bob", "alice", EVERYBODY, "dm/alice/bob", ("bob",)),
    ("alice", "bob", EVERYBODY, "dm/alice/bob", ("alice",)),
    ("__orchestrator__", "alice", EVERYBODY, "dm/__orchestrator__/alice", ("__orchestrator__",)),
    # Lead, in any case, is who has the role; an agent of exactly that name wins over it
    *((word, "alice", LED, "dm/alice/bob", ("bob",)) for word in ("Lead", "lead", "LEAD", "lEaD")),
    ("lead", "alice", Directory(EVERYBODY.agents | {"lead"}, "bob"), "dm/alice/lead", ("lead",)),
    ("LEAD", "alice", Directory(EVERYBODY.agents | {"lead"}, "bob"), "dm/alice/bob", ("bob",)),
    # without the role it is an agent of that name, the very spelling first
    ("Lead", "alice", Directory(EVERYBODY.agents | {"lead"}), "dm/alice/lead", ("lead",)),
    ("Lead", "alice", Directory(LEADS), "dm/Lead/alice", ("Lead",)),
    ("lead", "alice", Directory(LEADS), "dm/alice/lead", ("lead",)),
    ("lead", "alice", Directory(LEADS - {"lead"}), "dm/LEAD/alice", ("LEAD",)),
    # a star is every active agent but the sender
    ("*", "bob", EVERYBODY, "all", ("alice", "carol", "operator")),
    ("*", "dave", EVERYBODY, "all", ("alice", "bob", "carol", "operator")),  # who has left
    ("*", "alice", Directory(frozenset({"alice"})), "all", ()),
]


@pytest.mark.parametrize(("address", "sender", "directory", "channel", "recipients"), FOUND)
def test_who_gets_it_and_through_which_channel(
    store: Engine,
    address: str,
    sender: str,
    directory: Directory,
    channel: str,
    recipients: tuple[str, ...],
) -> None:
    found = route(to(address), sender, directory, store)
    if channel == "all":
        members = tuple(sorted({sender, *directory.agents}))
        expected = Route("all", GROUP, members, recipients, shown_channel="all")
    else:
        expected = Route(channel, DIRECT, (sender, *recipients), recipients)
    assert found == expected


# -- to nobody: the words say what to do ---------------------------------------------------

CREATE = "there is no agent {0}:{1} `relay register {0}` creates it"
MANY = EVERYBODY._replace(agents=EVERYBODY.agents | {f"x{number}" for number in range(50)})
NOBODY: list[tuple[str, str, Directory, str]] = [
    ("dave", "alice", EVERYBODY, CREATE.format("dave", "")),
    ("Bob", "alice", EVERYBODY, CREATE.format("Bob", " did you mean bob?")),
    ("BOB", "alice", EVERYBODY, CREATE.format("BOB", " did you mean bob?")),
    ("bobb", "alice", MANY, CREATE.format("bobb", "")),  # to compare so many would hold up the loop
    ("dave", "alice", EVERYBODY._replace(home="/h/r"), CREATE.format("dave", "") + " in /h/r"),
    ("alice", "alice", EVERYBODY, "an agent cannot send a message to itself"),
    ("Lead", "bob", LED, "an agent cannot send a message to itself"),
    ("Lead", "alice", EVERYBODY._replace(lead="dave"), CREATE.format("dave", "")),
    (
        "Lead",
        "alice",
        EVERYBODY,
        "no lead is set; choose one with `relay register NAME --role lead`, or the setting `lead` "
        "in config.json",
    ),
    *(
        (name, "alice", EVERYBODY, f"{name} is a reserved name, not an agent")
        for name in sorted(RESERVED_NAMES - {"__orchestrator__", "operator"})
    ),
    (
        "#team",
        "alice",
        EVERYBODY,
        "channel team does not exist: `relay channel create team` creates it (or a message of KIND "
        "join or subscribe to it)",
    ),
]


@pytest.mark.parametrize(("address", "sender", "directory", "says"), NOBODY)
def test_where_nobody_gets_it_it_bounces_with_what_to_do(
    store: Engine, address: str, sender: str, directory: Directory, says: str
) -> None:
    assert bounce(route(to(address), sender, directory, store)) == says


# -- channels ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GROUP, ChannelType.BROADCAST, ChannelType.PUB_SUB])
def test_a_channel_says_itself_who_gets_it(store: Engine, kind: ChannelType) -> None:
    channel_of(store, kind, "alice", name="team/backend")
    assert route(to("#team/backend"), "bob", EVERYBODY, store) == Route(
        "team/backend", kind, shown_channel="team/backend"
    )


def test_the_channels_of_two_and_of_all_are_nobodys_address(store: Engine) -> None:
    group_of(store, "alice", name="all")
    assert "write TO: *" in bounce(route(to("#all"), "alice", EVERYBODY, store))
    for name in ("dm/alice/bob", "dm/x"):
        channel_of(store, DIRECT, "alice", "bob", name=name)
        text = bounce(route(to(f"#{name}"), "alice", EVERYBODY, store))
        assert "write to the agent by its name" in text


# -- decided before a crash ----------------------------------------------------------------


def test_what_was_decided_goes_the_same_way_again() -> None:
    assert route_again("alice", ["bob"]) == Route(
        "dm/alice/bob", DIRECT, ("alice", "bob"), ("bob",)
    )
    assert route_again("alice", ["bob", "carol"]) == Route(
        "all", GROUP, ("alice", "bob", "carol"), ("bob", "carol")
    )
