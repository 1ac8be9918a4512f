"""The order of one sender: by priority, then by name, and nothing overtakes a file of its own that
is still being written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.base.config import Config, DetectionSettings
from relay.base.watcher import InotifyWatcher
from relay.delivery import loop
from relay.delivery.apply import PlanApplier
from relay.delivery.values import Plan
from tests.box import Box


def decided(box: Box, *agents: str) -> list[str]:
    """The message ids of these agents, in the order in which they were taken."""
    rows = box.sql("SELECT agent_name, message_id FROM messages ORDER BY id")
    return [message_id for agent, message_id in rows if agent in agents]


def in_place(box: Box, agent: str, text: str = "TO: bob\n\nin place") -> Path:
    """Write straight into an outbox, as no agent should."""
    path = box.path("agents", agent, "outbox", box.name())
    path.write_text(text)
    at = box.clock.now_ns()
    os.utime(path, ns=(at, at))
    return path


def set_clock(box: Box, at_ns: int) -> None:
    """A little later than a time that a file has."""
    box.clock.jump((at_ns - box.clock.now_ns()) / 1e9 + 0.01)


@pytest.mark.box("alice", "bob")
def test_a_new_agents_first_burst_is_in_order(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are renamed in before the watch stands, and some behind it."""
    outbox = box.path("agents", "dora", "outbox")
    sent: list[str] = []

    def burst(count: int) -> None:
        for _ in range(count):
            sent.append(box.drop("dora", f"TO: bob\n\n{len(sent)}"))

    add_agent = InotifyWatcher.add_agent

    def watched(watcher: InotifyWatcher, agent: str) -> bool:
        done = add_agent(watcher, agent)
        if agent == "dora":
            burst(20)
        return done

    monkeypatch.setattr(InotifyWatcher, "add_agent", watched)
    (outbox / ".pending").mkdir(parents=True)
    burst(20)
    for _ in range(4):
        box.tick()
    box.clock.advance(10)  # the real one went on meanwhile
    box.tick(3)
    assert decided(box, "dora") == sent and len(sent) == 40


@pytest.mark.box("alice", "bob", config=Config(detection=DetectionSettings(watcher="scan")))
def test_what_was_renamed_after_its_last_write_is_complete(box: Box) -> None:
    path = box.path("agents", "alice", "outbox", box.name())
    path.write_text("TO: bob\n\nhi")
    while path.stat().st_ctime_ns <= path.stat().st_mtime_ns:  # the kernel's clock has ticks
        path.rename(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    set_clock(box, path.stat().st_ctime_ns)
    box.tick()
    assert box.bodies("bob") == ["hi"]


def test_that_the_relay_narrows_a_mode_makes_nothing_complete(box: Box) -> None:
    path = box.path("agents", "alice", "outbox", box.name())
    with path.open("w") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write("TO: bob\n\nhalf")
        file.flush()
        status = os.fstat(file.fileno())
        assert status.st_ctime_ns == status.st_mtime_ns
        set_clock(box, status.st_ctime_ns)
        box.dispatcher._intake.add("alice", path.name, renamed=False)
        box.tick(3)
        assert box.bodies("bob") == []
        file.write(" and half")
    box.after(0.3)
    assert box.bodies("bob") == ["half and half"]
    (kept,) = box.path("archive").glob("*/alice/*.msg")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_one_that_is_being_written_holds_its_sender_up_for_five_seconds(box: Box) -> None:
    growing = in_place(box, "alice")
    sent = box.drop("alice", "TO: bob\n\nrenamed")
    other = box.send("carol", "TO: bob\n\nof another")
    for number in range(60):
        assert decided(box, "alice", "carol") == [other] or number > 50
        box.tick()
        box.clock.advance(0.09)
        with growing.open("a") as file:
            file.write("more")
        at = box.clock.now_ns()
        os.utime(growing, ns=(at, at))
    assert decided(box, "alice") == [sent]
    box.after(0.2)
    assert decided(box, "alice") == [sent, growing.stem]
    quick = in_place(box, "alice")
    last = box.send("alice", "TO: bob\n\nrenamed")
    assert last not in decided(box, "alice")
    box.after(0.11)
    assert decided(box, "alice")[2:] == [quick.stem, last]


def test_what_waits_is_decided_by_priority_then_by_name(box: Box) -> None:
    sent = [
        box.drop("alice", f"TO: bob\n{header}\nhi")
        for header in ("PRIORITY: 4\n", "", "PRIORITY: 0\n", "PRIORITY: 2\n", "PRIORITY: 0\n")
    ]
    other = box.drop("carol", "TO: bob\n\nof another")
    box.tick()
    assert decided(box, "alice") == [sent[number] for number in (2, 4, 1, 3, 0)]
    assert decided(box, "alice", "carol")[-1] == other  # whose turn it is, is as it was


@pytest.mark.parametrize("part_bytes", [loop.PART_BYTES, 1], ids=["one part", "each a part"])
@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.box("alice", "bob", "carol")
def test_what_takes_long_gives_way_to_another_agent(
    box: Box, monkeypatch: pytest.MonkeyPatch, is_killed: bool, part_bytes: int
) -> None:
    monkeypatch.setattr(loop, "PART_BYTES", part_bytes)
    apply = PlanApplier.apply

    def slow(applier: PlanApplier, plan: Plan) -> Plan:
        box.clock.advance(0.2)  # of the 0.25 s of a batch
        return apply(applier, plan)

    monkeypatch.setattr(PlanApplier, "apply", slow)
    many = [box.drop("alice", f"TO: bob\n\n{number}") for number in range(6)]
    box.tick()
    assert [*box.inbox("bob")] == many[:2] and len(box.outbox("alice")) == 4
    last = box.drop("alice", "TO: bob\n\nlast")
    other = box.drop("carol", "TO: bob\n\nmeanwhile")
    assert box.deadline == 0
    if is_killed:
        box.restart()
    else:
        box.tick()
        assert {*box.inbox("bob")} == {*many[:3], other}
        second = box.drop("carol", "TO: bob\n\nnot behind all of alice's")
        box.tick()
        assert {*box.inbox("bob")} == {*many[:4], other, second}
        box.take("bob", second)
    box.tick(6)
    assert box.outbox("alice") == [] and {*box.inbox("bob")} == {*many, last, other}
    written = [row[0] for row in box.sql("SELECT message_id FROM deliveries ORDER BY written_at")]
    assert [one for one in written if one in {*many, last}] == [*many, last]
