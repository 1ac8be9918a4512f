"""What hooks and bells report: from a file in the outbox into journal, ledger and trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from relay.base import fsio
from relay.base.config import Config, SecuritySettings
from relay.cli import run
from relay.delivery import event_source
from relay.engine import events
from relay.reach.report import IN_CONTEXT, MAX_BYTES, OFFERED, RETURNED, RING, write_report
from tests.box import Box, MakeBox
from tests.procs import relay, rows_of

SESSION = "claude:0089"
HUGE = (1 << 63) - 1


def report(box: Box, *entries: dict[str, object], agent: str = "bob") -> None:
    """The hook of an agent reports, and the relay takes a turn."""
    at = box.clock.now_ns()
    write_report(str(box.root), agent, [{"session": SESSION, "at": at, **one} for one in entries])
    box.tick()


def offered(*ids: str, offer: int = 1) -> dict[str, object]:
    return {"what": OFFERED, "ids": ids, "after": "PostToolUse", "offer": offer}


def seen(*ids: str) -> dict[str, object]:
    return {"what": IN_CONTEXT, "ids": ids, "how": "transcript", "where": "line 412"}


def offers(box: Box) -> list[tuple[object, ...]]:
    return box.sql("SELECT offer, session, state, after, evidence FROM offers ORDER BY offer")


def logged(box: Box) -> str:
    return "\n".join(one["event"] for one in box.log)


def left(box: Box) -> list[str]:
    return sorted(one.name for one in box.path("agents/bob/outbox").iterdir() if one.is_file())


def rejected(box: Box) -> list[str]:
    return sorted(one.name for one in box.path("archive").glob("*/bob/rejected/*"))


def send(box: Box) -> str:
    sent = box.send("alice", "TO: bob\nKIND: message\n\nhi")
    assert sent in box.inbox("bob")
    return sent


def test_shown_is_not_read_until_it_is_seen(box: Box) -> None:
    """Two rows of one offer; the delivery is read when the hook moves the file."""
    sent = send(box)
    report(box, offered(sent))
    assert offers(box) == [(1, SESSION, "offered", "PostToolUse", None)]
    assert box.sql("SELECT state FROM deliveries") == [("written",)]
    report(box, seen(sent))
    assert offers(box) == [(1, SESSION, "in_context", "PostToolUse", "transcript, line 412")]
    box.take("bob", sent)
    box.tick()
    assert box.sql("SELECT state FROM deliveries") == [("read",)]
    assert left(box) == []


def test_shown_and_not_seen_it_is_shown_again(box: Box) -> None:
    """The second session numbers its offer after the first one's."""
    sent = send(box)
    report(box, offered(sent))
    report(box, {"what": RETURNED, "ids": [sent], "why": "its session ended"})
    report(box, offered(sent) | {"session": "claude:0090"})
    assert offers(box) == [
        (1, SESSION, "returned", "PostToolUse", "its session ended"),
        (2, "claude:0090", "offered", "PostToolUse", None),
    ]


def test_the_same_report_twice_is_one(box: Box) -> None:
    sent, at = send(box), box.clock.now_ns()
    for _ in range(2):
        report(box, offered(sent) | {"at": at}, seen(sent) | {"at": at + 1})
        report(box, {"what": RETURNED, "ids": [sent], "why": "late", "at": at + 2})
        ring = {"what": RING, "rung": "command", "messages": 1, "result": "ok", "at": at}
        report(box, ring)
    assert offers(box) == [(1, SESSION, "in_context", "PostToolUse", "transcript, line 412")]
    assert box.sql("SELECT agent, rung, messages, result FROM rings") == [
        ("bob", "command", 1, "ok")
    ]


def test_a_ring_counts_from_when_the_file_is_in_the_inbox(box: Box) -> None:
    """One a moment before it was for other messages."""
    sent = send(box)
    ((written_at,),) = box.sql("SELECT written_at FROM deliveries")
    for rung, at in (("claude-inbox", written_at - 1), ("codex-queue", written_at + 1)):
        report(box, {"what": RING, "rung": rung, "messages": 1, "result": "ok", "at": at})
    trace = relay("trace", sent, home=box.root).stdout
    assert "codex-queue" in trace and "claude-inbox" not in trace


def test_all_of_it_twice_ends_no_later_offer(box: Box) -> None:
    """Files that were recorded and not removed are read again, the first offer's end, too."""
    sent, at = send(box), box.clock.now_ns()
    lines = [
        offered(sent) | {"at": at},
        {"what": RETURNED, "ids": [sent], "why": "its session ended", "at": at + 1},
        offered(sent, offer=2) | {"at": at + 2},
    ]
    report(box, *lines)
    report(box, *lines)
    assert [one[:3] for one in offers(box)] == [(1, SESSION, "returned"), (2, SESSION, "offered")]


def test_an_end_without_its_offer_makes_the_row(box: Box) -> None:
    """A report is not synced: a power failure may have taken the first one."""
    sent = send(box)
    report(box, seen(sent))
    assert offers(box) == [(1, SESSION, "in_context", None, "transcript, line 412")]


def test_a_message_that_the_agent_did_not_get_is_not_recorded(box: Box) -> None:
    report(box, offered("1700000000000000009-09"))
    assert offers(box) == []
    assert "names messages that it did not get: 1700000000000000009-09" in logged(box)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "expected 16 brackets at most"),
        ('{"what": "offered", "at": 1}', "expected ids as a list of message ids, got None"),
        ('{"what": "offered", "at": 1, "ids": ["../x"]}', "expected ids as a list of message"),
        ('{"what": "offered", "at": -1, "ids": []}', "expected at as a number, got -1"),
        (
            f'{{"what": "offered", "at": 1, "ids": [], "offer": {HUGE}}}',
            "expected offer as a number",
        ),
        ('{"what": "read", "at": 1, "ids": []}', "expected what as offered, in_context"),
    ],
)
def test_a_line_that_is_not_valid_is_one_warning_and_the_rest_counts(
    box: Box, line: str, says: str
) -> None:
    sent, name = send(box), "1700000000000000007-07.report"
    good = json.dumps({"session": SESSION, "at": 5, **offered(sent)})
    pending = box.path(f"agents/bob/outbox/.pending/{name}")
    pending.write_text(f"{line}\n{good}\n")
    pending.rename(box.path(f"agents/bob/outbox/{name}"))
    box.tick()
    assert offers(box) == [(1, SESSION, "offered", "PostToolUse", None)]
    assert left(box) == [] and rejected(box) == [name]
    assert f"agents/bob/outbox/{name} has a line that is not valid: {says}" in logged(box)


def test_other_files_named_report_are_left_alone(box: Box) -> None:
    box.path("agents/bob/outbox/weekly.report").write_text("mine")
    box.clock.advance(31)
    box.tick()
    assert left(box) == ["weekly.report"]


def test_a_lost_ledger_has_the_offers_of_the_journal(box: Box) -> None:
    sent = send(box)
    report(box, offered(sent), seen(sent))
    report(box, {"what": RING, "rung": "command", "messages": 1, "result": "ok"})
    before = offers(box), box.sql("SELECT * FROM rings")
    box.kill()
    for one in Path(box.root).glob("ledger.db*"):
        one.unlink()
    box.open()
    assert (offers(box), box.sql("SELECT * FROM rings")) == before


@pytest.mark.parametrize("kind", ["fifo", "link", "hard link", "directory", "large"])
def test_what_is_not_a_report_of_its_own_is_refused(box: Box, kind: str) -> None:
    path = box.path("agents/bob/outbox/1700000000000000007-07.report")
    other = box.path("tmp/other")
    other.write_text("{}")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "hard link":
        os.link(other, path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b" " * (MAX_BYTES + 1))
    box.after(31)
    assert not os.path.lexists(path) and rejected(box) == [path.name]
    incident = {"hard link": "hard_link", "large": None}.get(kind, "not_a_regular_file")
    found = box.sql("SELECT kind, agent, path FROM security_events")
    where = f"agents/bob/outbox/{path.name}"
    assert found == ([(incident, "bob", where)] if incident else [])


def test_tail_tells_what_was_shown_and_seen(box: Box) -> None:
    sent = send(box)
    report(box, offered(sent))
    report(box, {"what": RETURNED, "ids": [sent], "why": "its session ended"})
    box.clock.advance(1)  # another offer is one of another time
    report(box, offered(sent, offer=2))
    report(box, seen(sent))
    events = rows_of("tail", "--no-follow", "--since", "1h", home=box.root)
    assert [
        (one["event"], one["status"], one["to"], one["detail"])
        for one in events
        if one["message_id"] == sent and one["status"] in ("offered", "in_context", "returned")
    ] == [
        ("shown", "offered", "bob", f"{SESSION}, after PostToolUse"),
        ("returned", "returned", "bob", f"{SESSION}: its session ended"),
        ("shown", "offered", "bob", f"{SESSION}, after PostToolUse"),
        ("seen", "in_context", "bob", f"{SESSION}: transcript, line 412"),
    ]
    assert [one["event"] for one in events if one["message_id"] == sent].count("new") == 1
    assert "seen in the context of bob" in relay("trace", sent, home=box.root).stdout


def test_an_outbox_that_became_a_link_stops_nothing(box: Box) -> None:
    """The report that waits in it is recorded when it is a directory again."""
    sent, outbox, away = send(box), box.path("agents/bob/outbox"), box.path("tmp/away")
    write_report(str(box.root), "bob", [{"session": SESSION, "at": 7, **offered(sent)}])
    (name,) = left(box)
    outbox.rename(away)
    outbox.symlink_to(away)
    box.dispatcher._reports.add("bob", name)
    box.tick()
    assert offers(box) == [] and "cannot be read, the next scan tries again" in logged(box)
    outbox.unlink()
    away.rename(outbox)
    box.after(31)
    assert len(offers(box)) == 1 and left(box) == []


def test_one_that_cannot_be_removed_stops_nothing_and_is_one(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_source, "RACY_NS", 0)  # nothing is told by a fresh outbox
    sent = send(box)
    with monkeypatch.context() as patch:
        patch.setattr(fsio, "remove", denied)
        report(box, offered(sent))
        box.after(31)
    assert len(left(box)) == 1 and "is recorded, the next scan removes it" in logged(box)
    box.after(31)
    assert len(offers(box)) == 1 and left(box) == []


def test_while_the_relay_is_paused_reports_wait(box: Box) -> None:
    sent = send(box)
    box.dispatcher.pause("disk", "the disk is nearly full")
    report(box, offered(sent))
    assert len(left(box)) == 1 and box.deadline > box.clock.monotonic_ns()
    box.dispatcher.pause("disk", "")
    box.after(31)
    assert len(offers(box)) == 1 and left(box) == []


def test_a_read_of_the_same_turn_is_not_passed_over(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its row, the read comes from the journal: no report moves the position."""
    sent = send(box)
    report(box, offered(sent))
    write_report(str(box.root), "bob", [{"session": SESSION, "at": 9, **seen(sent)}])
    box.take("bob", sent)
    monkeypatch.setattr(box.ledger.deliveries, "upsert", denied)
    with pytest.raises(PermissionError):
        box.tick()
    box.path(f"agents/bob/inbox/.read/{sent}.msg").unlink()  # and so the inbox does not tell it
    box.restart()
    box.after(31)
    assert box.sql("SELECT state, read_how FROM deliveries") == [("read", "taken")]
    assert [one[2] for one in offers(box)] == ["in_context"]


def denied(*_: object, **__: object) -> NoReturn:
    raise PermissionError(13, "Permission denied")


def test_commands_say_that_it_was_shown(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """Until it is seen; a message that waits unshown is delivered."""
    sent, other = send(box), send(box)
    report(box, offered(sent))
    box.stop()
    home = ["--home", str(box.root)]
    assert run([*home, "list", "--json"]) == 0
    found = {
        one["id"]: one["outcome"] for one in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert found == {sent: "shown", other: "delivered"}
    for command in ("trace", "show"):
        assert run([*home, command, sent]) == 0
        assert "not seen yet" in capsys.readouterr().out


def test_a_journal_with_huge_offers_is_projected_and_starts(box: Box) -> None:
    """Written by an earlier version, which took any number."""
    sent = send(box)
    for at in (1, 2, 3):
        change = (sent, "bob", SESSION, HUGE, OFFERED, "PostToolUse", at, 1)
        box.store.apply(events.OfferChanged(*change))
    box.events.commit()
    box.restart()
    assert [(one[0], one[2]) for one in offers(box)] == [(n, "offered") for n in (1, 2, 3)]


@pytest.mark.damages
def test_a_fact_that_no_row_can_hold_is_skipped_counted_and_reported(box: Box) -> None:
    """The others of the same start are recorded; a rebuild skips and counts it, too."""
    sent = send(box)
    for at in (1, HUGE + 1, 2):
        change = (sent, "bob", SESSION, at, OFFERED, "Stop", at, 1)
        box.store.apply(events.OfferChanged(*change))
    box.events.commit()
    box.restart()
    assert [one[0] for one in offers(box)] == [1, 2]
    assert "1 fact of the journal is not in the ledger" in logged(box)
    box.stop()
    for _ in range(2):
        done = relay("doctor", home=box.root)
        assert "1 fact of the journal is not in the ledger" in done.stdout
        assert relay("ledger", "rebuild", home=box.root).returncode == 0


def test_reports_of_an_agent_over_its_rate_wait_and_go_at_that_rate(make_box: MakeBox) -> None:
    limited = SecuritySettings(rate_per_s=10, rate_burst=20)
    box = make_box("alice", "bob", config=Config(security=limited))
    sent, at = send(box), box.clock.now_ns()
    for number in range(60):
        line = {"what": RING, "rung": "command", "messages": 1, "result": "ok"}
        write_report(str(box.root), "bob", [{"session": SESSION, "at": at + number, **line}])
    box.tick(3)
    assert len(left(box)) == 40
    assert box.deadline > box.clock.monotonic_ns()
    other = box.send("alice", "TO: bob\n\nnobody else waits")
    assert {sent, other} <= box.inbox("bob").keys()
    box.after(2)
    assert len(left(box)) == 20
    box.after(2)
    assert left(box) == [] and len(box.sql("SELECT * FROM rings")) == 60


def test_offers_are_limited_in_a_report_and_of_a_delivery(box: Box) -> None:
    sent, at = send(box), box.clock.now_ns()
    report(box, *(offered(sent) | {"at": at + number} for number in range(600)))
    assert len(offers(box)) == 500
    assert "expected 500 messages, rings and states at most" in logged(box)
    for part in (1, 2):
        box.after(5)
        report(box, *(offered(sent) | {"at": at + part * 600 + one} for one in range(500)))
    box.after(5)
    assert len(offers(box)) == 1000
