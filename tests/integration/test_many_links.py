"""Many names of one file in an outbox cost their number, and equal refusals are counted."""

from __future__ import annotations

import os
from pathlib import Path

from tests.box import Box


def link(box: Box, original: Path, count: int) -> list[str]:
    """So many names of one file, put into the outbox of alice."""
    names = [box.name() for _ in range(count)]
    for name in names:
        os.link(original, box.path("agents", "alice", "outbox", name))
    return names


def events(box: Box) -> list[tuple[str, str, str, str]]:
    return box.sql("SELECT kind, agent, path, detail FROM security_events ORDER BY id")


def settle(box: Box) -> None:
    for _ in range(60):
        box.after(1, turns=1)


def test_equal_refusals_of_an_agent_are_one_row_and_a_count(box: Box, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("TO: bob\n\nhi")
    names = link(box, original, 120)
    settle(box)
    assert box.outbox("alice") == []
    assert box.dispatcher.metrics.refused == 120 and len(box.nacks("alice")) == 120
    assert box.sql("SELECT count(*) FROM messages WHERE status = 'failed'") == [(120,)]
    kept = sorted(path.name for path in box.path("archive").glob("*/alice/rejected/*"))
    assert kept == names and original.stat().st_nlink == 121
    (one,) = [one for one in events(box) if one[2].endswith(".msg")]
    assert one[:3] == ("hard_link", "alice", f"agents/alice/outbox/{names[0]}")
    box.after(61, turns=1)
    assert [one[:3] for one in events(box)][1:] == [("hard_link", "alice", "agents/alice/outbox")]
    assert events(box)[1][3].startswith("119 more of the same within 60 s")
    link(box, original, 3)
    box.after(31)
    assert len(events(box)) == 3
    box.dispatcher.drain()  # a clean end writes the count down
    assert events(box)[-1][3].startswith("2 more of the same")


def test_other_agents_and_kinds_are_told_apart(box: Box, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("TO: bob\n\nhi")
    link(box, original, 2)
    box.path("agents", "bob", "outbox", box.name()).hardlink_to(original)
    box.path("agents", "alice", "outbox", box.name()).symlink_to(original)
    box.after(31)
    assert sorted((kind, agent) for kind, agent, _, _ in events(box)) == [
        ("hard_link", "alice"),
        ("hard_link", "bob"),
        ("not_a_regular_file", "alice"),
    ]


def test_a_link_made_to_a_file_in_hand_does_not_have_it_read_again(
    box: Box, tmp_path: Path
) -> None:
    """Accepted, and linked before it is archived: it is the same file."""
    writer = box.dispatcher._ledger_writer
    finish = writer.record

    def linked(*arguments: object) -> object:
        for path in box.path("agents", "alice", "outbox").glob("*.msg"):
            if not (tmp_path / path.name).exists():
                os.link(path, tmp_path / path.name)
        return finish(*arguments)  # type: ignore[arg-type]

    writer.record = linked  # type: ignore[assignment, method-assign]
    sent = box.send("alice", "TO: bob\n\nhi")
    box.tick(2)
    assert list(box.inbox("bob")) == [sent] and box.nacks("alice") == []
    assert box.row(sent)["status"] == "archived"
