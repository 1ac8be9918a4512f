"""The traffic job: who wrote to whom, and how long it took."""

from __future__ import annotations

import pytest

from tests.audit.home_builder import FILE_SIZE, START_NS, HomeBuilder
from tests.audit.ledger_rows import HOUR, MINUTE, delivery, insert, message

pytestmark = pytest.mark.shows("audit 2.1")


def test_pairs_are_counted_with_their_latencies(
    home: HomeBuilder,
) -> None:
    for number in range(1, 101):
        home.sent(f"1-{number}", written_after_ms=number)
    home.sent("2-all", sender="bob", to="*", recipients=("alice", "carol"), written_after_ms=2.5)
    home.seen("3-waits", sender="carol")
    home.deliver("3-waits", written_after_ms=None)
    said = home.says("traffic")
    assert sorted(tuple(row.values()) for row in said.tables["traffic"]) == [
        ("alice", "bob", 100, 100 * FILE_SIZE, 50.0, 99.0, 100.0),
        ("bob", "alice", 1, FILE_SIZE, 2.5, 2.5, 2.5),
        ("bob", "carol", 1, FILE_SIZE, 2.5, 2.5, 2.5),
    ]
    assert said.counts == {"pairs": 3, "messages": 102, "bytes": 102 * FILE_SIZE}
    assert [row["sender"] for row in said.shown] == ["alice", "bob", "bob"]


def test_nothing_written_is_nothing(home: HomeBuilder) -> None:
    home.seen("1-a", at_ns=START_NS)
    said = home.says("traffic")
    assert said.tables["traffic"] == []
    assert said.counts == {"pairs": 0, "messages": 0, "bytes": 0}


def test_the_graph_by_its_nodes_and_what_each_hour_carried(
    home: HomeBuilder,
) -> None:
    home.sent("1-a", to="*", recipients=("bob", "carol"))
    home.sent("1-b", sender="bob", to="carol", recipients=("carol",), at_ns=START_NS + HOUR)
    insert(home, "messages", [message("2-dead", START_NS), message("2-late", START_NS)])
    dead = delivery("2-dead", START_NS, 1, state="dead")  # written, and never acknowledged
    late = delivery("2-late", START_NS + 2 * HOUR, 1)
    insert(home, "deliveries", [dead, late])
    tables = home.says("traffic").tables
    agents = {row["agent"]: row for row in tables["traffic_agents"]}
    ends = ("recipients", "senders", "sent", "received", "bytes_sent", "bytes_received")
    assert [agents["alice"][name] for name in ends] == [2, 0, 4, 0, 4 * FILE_SIZE, 0]
    assert [agents["bob"][name] for name in ends] == [1, 1, 1, 3, FILE_SIZE, 3 * FILE_SIZE]
    assert [agents["carol"][name] for name in ends] == [0, 2, 0, 2, 0, 2 * FILE_SIZE]
    hours = {row["hour"].hour: row for row in tables["traffic_hours"]}
    names = ("messages", "bytes", "deliveries", "dead")
    assert {hour: [row[name] for name in names] for hour, row in hours.items()} == {
        9: [3, 3 * FILE_SIZE, 2, 1],
        10: [1, FILE_SIZE, 1, 0],
        11: [0, 0, 1, 0],
    }


def test_minutes_far_above_the_median_are_bursts(
    home: HomeBuilder,
) -> None:
    usual = [message(f"1-{n}", START_NS + n * MINUTE) for n in range(20)]
    lesser = [message(f"2-{n}", START_NS + 30 * MINUTE) for n in range(599)]
    loud = [message(f"3-{n}", START_NS + 40 * MINUTE, agent_name="bob") for n in range(500)]
    besides = [message(f"4-{n}", START_NS + 40 * MINUTE) for n in range(150)]
    insert(home, "messages", usual + lesser + loud + besides)
    tables = home.says("traffic").tables
    (row,) = tables["traffic_bursts"]
    assert (row["minute"].minute, row["messages"], row["times_median"]) == (10, 650, 650.0)
    assert (row["busiest"], row["busiest_messages"]) == ("bob", 500)
