"""What reaches nobody, or is meant for the relay, is answered at once: a publication that nobody
subscribes to, joining a channel by its address, a control message to another agent."""

from __future__ import annotations

from tests.box import Box

# -- the channel is the address ------------------------------------------------------------


def test_a_channel_is_joined_and_left_by_its_address(box: Box) -> None:
    for agent in ("alice", "bob"):
        box.send(agent, "TO: #build\nKIND: join\n\n")
    assert box.acks("bob") == ["completed bob is a member of build, a Group channel\n"]
    box.send("alice", "TO: #build\n\nhi")
    assert "hi" in box.bodies("bob")
    box.send("bob", "TO: #build\nKIND: leave")
    box.send("alice", "TO: #build\n\nagain")
    assert "again" not in box.bodies("bob")
    assert "no recipients: build has no other members" in box.nacks("alice")[0]


def test_topics_are_subscribed_to_and_left_by_the_address(box: Box) -> None:
    box.send("bob", "TO: #ci\nKIND: subscribe\n\nPATTERN: test.*")
    box.send("carol", "TO: #ci\nKIND: subscribe\n\n")
    box.send("alice", "TO: #ci\nKIND: join")
    box.send("alice", "TO: #ci\nTOPIC: test.red\n\none")
    box.send("alice", "TO: #ci\nTOPIC: lint\n\ntwo")
    assert [body for body in box.bodies("bob") if body in ("one", "two")] == ["one"]
    assert [body for body in box.bodies("carol") if body in ("one", "two")] == ["one", "two"]
    box.send("bob", "TO: #ci\nKIND: unsubscribe")
    box.send("alice", "TO: #ci\nTOPIC: test.red\n\nthree")
    assert "three" in box.bodies("carol") and "three" not in box.bodies("bob")


def test_two_channels_in_one_message_are_not_guessed_between(box: Box) -> None:
    box.send("alice", "TO: #build\nKIND: join\n\nCHANNEL: other")
    assert "TO says #build and CHANNEL says other" in box.nacks("alice")[0]
    assert box.store.channels.find_by_name("build") is None


# -- control messages to somebody else -----------------------------------------------------


def test_what_is_for_the_relay_reaches_nobody_else(box: Box) -> None:
    box.send("alice", "TO: #build\nKIND: join\n\n")
    for kind in ("spawn", "release", "continuity"):
        for to in ("bob", "*", "#build", "Lead"):
            text = f"TO: {to}\nKIND: {kind}\nNAME: x\nACTION: load\n\nCLI: sh"
            sent = box.send("alice", text)
            said = f"{sent}.msg: KIND {kind} is for the relay itself: send it TO: __orchestrator__"
            assert sum(said in nack for nack in box.nacks("alice")) == 1, text
            assert box.inbox("bob") == {} and box.row(sent)["status"] == "failed", text


def test_to_join_an_agent_is_refused(box: Box) -> None:
    for kind in ("join", "leave", "subscribe", "unsubscribe"):
        sent = box.send("alice", f"TO: bob\nKIND: {kind}\n\nCHANNEL: build")
        said = f"{sent}.msg: KIND {kind} is for the relay itself: send it TO: #channel, or "
        assert sum(said in nack for nack in box.nacks("alice")) == 1, kind
        assert box.inbox("bob") == {}, kind
