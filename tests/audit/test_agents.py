"""The agents job: who is stuck, failed, flapping or silent, and who is not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from relay.base.message import Kind
from relay.base.names import ORCHESTRATOR, answer_id
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import (
    DAY,
    END_NS,
    HOUR,
    MINUTE,
    agent,
    delivery,
    insert,
    message,
    process,
)
from tests.audit.second_engine import SecondEngine

pytestmark = pytest.mark.shows("audit 2.1")


def unread(home: HomeBuilder, name: str, since_ns: int) -> None:
    """Mail that stands in an inbox."""
    insert(home, "messages", [message(f"9-{name}", since_ns)])
    insert(home, "deliveries", [delivery(f"9-{name}", since_ns, 0, recipient=name)])


DAY_AGO, HOUR_AGO = END_NS - 25 * HOUR, END_NS - HOUR
LONG_AGO = END_NS - 20 * DAY
OFTEN = {"restarts": 4, "restarted_at": json.dumps([HOUR_AGO - MINUTE, HOUR_AGO - 1, HOUR_AGO])}
ENDED = {"status": "terminated", "changed_at": DAY_AGO}


class Actor(NamedTuple):
    """What there is of an agent, and what it is to be called."""

    judged: str
    agent: dict[str, object] | None
    process: dict[str, object] | None = None

    @property
    def name(self) -> object:
        return (self.agent or self.process or {})["name"]


CAST = [
    Actor("present", agent("alice", HOUR_AGO)),
    Actor("present", agent("fine", HOUR_AGO)),  # has old mail, and is at work
    Actor("present", agent("idle", LONG_AGO)),  # says nothing, and nobody asks it
    Actor("silent", agent("sleeper", DAY_AGO)),  # has old mail
    Actor("present", agent("operator", DAY_AGO)),  # has old mail, and is a person
    Actor("away", agent("gone", DAY_AGO, status="retired", reason="done", changed_at=DAY_AGO)),
    Actor("stuck", agent("stuck", HOUR_AGO), process("stuck", "stuck", END_NS - 2 * HOUR)),
    Actor(
        "failed",
        agent("broken", DAY_AGO, **ENDED),
        process("broken", "failed", DAY_AGO, last_error="is given up", exit_code=1),
    ),
    Actor(  # it is not news any more
        "away",
        agent("broken-once", LONG_AGO, **ENDED),
        process("broken-once", "failed", LONG_AGO),
    ),
    Actor(
        "flapping",
        agent("flapping", HOUR_AGO),
        process("flapping", "working", HOUR_AGO, **OFTEN),
    ),
    Actor(
        "present",
        agent("long-lived", HOUR_AGO),
        process("long-lived", "idle", END_NS - 3 * DAY, restarts=50, restarted_at="[1]"),
    ),
    Actor("present", None, process("unheard", "starting", HOUR_AGO)),  # not registered yet
]


def test_each_fault_is_found_and_nothing_else(home: HomeBuilder) -> None:
    insert(home, "agents", [one.agent for one in CAST if one.agent is not None])
    insert(home, "processes", [one.process for one in CAST if one.process is not None])
    for name in ("fine", "sleeper", "operator", "gone"):
        unread(home, name, DAY_AGO)
    said = home.says("agents")
    judged = {row["agent"]: row["class"] for row in said.tables["agents"]}
    assert judged == {one.name: one.judged for one in CAST}
    assert said.found == [
        ("agents.failed", "warning", None, "broken"),
        ("agents.flapping", "warning", None, "flapping"),
        ("agents.silent", "warning", None, "sleeper"),
        ("agents.stuck", "warning", None, "stuck"),
    ]
    detail = {row["check"]: row["detail"] for row in said.findings}
    assert detail["agents.stuck"]["stuck_s"] == 7200
    silent = detail["agents.silent"]
    assert (silent["unread"], silent["silent_s"]) == (1, 90000)
    counts = said.counts
    assert (counts["present"], counts["away"], counts["silent"]) == (6, 2, 1)
    shown = said.shown
    assert {row["class"] for row in shown[:4]} == {"stuck", "failed", "flapping", "silent"}


def test_what_each_agent_did_and_how_long_it_was_silent(home: HomeBuilder) -> None:
    begin = START_NS - 10 * HOUR
    retired = agent("alice", START_NS, status="retired", changed_at=START_NS)
    insert(home, "agents", [retired, agent("bob", begin)])
    times = [0, 10 * MINUTE, 5 * HOUR, 6 * HOUR]
    insert(home, "messages", [message(f"1-{n}", begin + at) for n, at in enumerate(times)])
    insert(home, "messages", [message("2-save", begin + 6 * HOUR, message_type="continuity")])
    read = begin + 6 * HOUR
    rows = [delivery(f"1-{n}", begin + at, 1) for n, at in enumerate(times)]
    rows[0] = {**rows[0], "state": "read", "read_at": begin + HOUR}
    rows[1] = {**rows[1], "state": "read", "read_at": read}
    rows[3] = {**rows[3], "state": "dead"}  # and still in the inbox
    insert(home, "deliveries", rows)
    by_name = {row["agent"]: row for row in home.says("agents").tables["agents"]}
    alice, bob = by_name["alice"], by_name["bob"]
    assert (alice["messages"], alice["saves"], alice["received"]) == (5, 1, 0)
    assert (bob["messages"], bob["received"], bob["unread"]) == (0, 4, 2)
    assert bob["unread_since"].hour == 4  # 04:30, the oldest that it has not read
    assert alice["longest_silence_s"] == (5 * 3600 - 600)
    assert bob["longest_silence_s"] == 5 * 3600
    assert bob["silent_s"] == (END_NS - read) // 10**9
    assert alice["lifetime_s"] == (START_NS - (END_NS - 30 * DAY)) // 10**9


def test_what_is_younger_than_the_relays_last_sign_is_not_silence(
    home: HomeBuilder, tmp_path: Path
) -> None:
    insert(home, "agents", [agent("alice", START_NS), agent("bob", START_NS - HOUR)])
    unread(home, "bob", START_NS - HOUR)
    snapshot = home.snapshot(tmp_path / "run")
    now, later = snapshot.observed_until_ns, START_NS + 30 * DAY
    # A month later: the same, had a relay gone on running.
    for until, found in ((now, []), (START_NS, []), (later, ["agents.silent"])):
        observed = snapshot._replace(observed_until_ns=until)
        with contextlib.closing(SecondEngine(observed, tmp_path / str(until))) as engine:
            assert [one[0] for one in engine.run("agents").found] == found


def test_requests_for_processes_and_what_was_said_to_them(home: HomeBuilder) -> None:
    to_relay = {"target": ORCHESTRATOR, "message_type": "spawn"}
    insert(
        home,
        "messages",
        [
            message("1-done", START_NS, **to_relay),
            message("1-refused", START_NS, **to_relay),
            message("1-unread", START_NS, **to_relay, status="failed", last_error="line 2"),
            message("1-open", START_NS, **to_relay, status="processing"),
            message("1-released", START_NS, target=ORCHESTRATOR, message_type="release"),
            message("1-text", START_NS),
        ],
    )
    obeyed = ("1-done", "1-refused", "1-released")
    insert(
        home, "deliveries", [delivery(one, START_NS, 0, recipient=ORCHESTRATOR) for one in obeyed]
    )
    nack, ack = (
        answer_id(START_NS, "alice", one, kind)
        for one, kind in (("1-refused", Kind.NACK), ("1-done", Kind.ACK))
    )
    own = {"agent_name": ORCHESTRATOR, "target": "alice"}
    insert(home, "messages", [message(nack, START_NS, **own, message_type="nack")])
    insert(home, "messages", [message(ack, START_NS, **own, message_type="ack")])
    insert(home, "processes", [process("worker", "working", START_NS, request_id="1-done")])
    said = home.says("agents")
    rows = {row["message_id"]: row for row in said.tables["agents_spawns"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "1-done": "done",
        "1-refused": "refused",
        "1-unread": "refused",
        "1-open": "open",
        "1-released": "done",
    }
    assert (rows["1-done"]["process"], rows["1-refused"]["answer_id"]) == ("worker", nack)
    assert rows["1-unread"]["reason"] == "line 2"
    assert said.counts["spawn_refused"] == 2
    assert said.found == []
