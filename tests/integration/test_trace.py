"""``relay trace``: every hop of every attempt with its time, and unknown where nobody knows it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.base.clock import iso_time
from relay.base.home import LEDGER, Home
from relay.cli import run
from relay.ledger.ledger import Ledger
from relay.views.trace import delivery_hops
from tests.box import Box
from tests.ledger.support import facts, put
from tests.procs import relay, relay_anew, rows_of


class Life:
    """One message in a ledger, and when each thing happened to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with Home.create(str(root)) as home:
            self.ledger = Ledger.open(home.path(LEDGER))
        one = facts(1, discovered_at=self.now())
        self.id = one.message_id
        with self.ledger.transaction():
            self.ledger.add([one])
            self.ledger.claim([self.id])

    def now(self) -> int:
        """The time, one that no other hop has."""
        time.sleep(0.003)  # audit_log has milliseconds
        return time.time_ns()

    def write(self, attempt: int) -> tuple[str, str]:
        """Accept and write an attempt; both times."""
        staged, written = self.now(), self.now()
        with self.ledger.transaction():
            times = {"staged_at": staged, "written_at": written}
            put(self.ledger, self.id, "bob", "written", attempt, **times)
        return iso_time(staged), iso_time(written)

    def read(self, attempt: int) -> None:
        with self.ledger.transaction():
            put(self.ledger, self.id, "bob", "read", attempt, read_at=self.now())

    def hold(self, attempt: int, why: str) -> None:
        with self.ledger.transaction():
            later = {"last_error": why, "due_at": self.now()}
            put(self.ledger, self.id, "bob", "held", attempt, **later)

    def end(self, state: str, why: str) -> None:
        self.now()
        with self.ledger.transaction():
            put(self.ledger, self.id, "bob", state, last_error=why)

    def trace(self) -> dict[str, Any]:
        found = rows_of("trace", self.id, home=self.root)[0]
        return dict(found)

    def lines(self) -> list[str]:
        """What a person sees, without the times."""
        shown = relay("trace", self.id, home=self.root).stdout.splitlines()[3:]
        return [line[16:] for line in shown]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path / "home")
    yield made
    made.ledger.close()


def test_every_hop_of_every_attempt_has_its_time(life: Life) -> None:
    first = life.write(1)
    life.read(1)
    second = life.write(2)
    life.end("dead", "no acknowledgment within 60 s, 2 attempts")
    third = life.write(3)
    life.read(3)
    hops = life.trace()["hops"]
    assert [(hop["what"], hop["attempt"]) for hop in hops] == [
        ("discovered", None),
        ("accepted", 1),
        ("written", 1),
        ("read", 1),
        ("written", 2),
        ("dead", 2),
        ("replayed", 3),
        ("written", 3),
        ("read", 3),
    ]
    times = [hop["at"] for hop in hops]
    assert (times[1], times[2], times[4], times[7]) == (*first, second[1], third[1])
    assert times == sorted(times) and None not in times
    assert life.lines() == [
        "discovered in the outbox of alice",
        "accepted for bob",
        "written to the inbox of bob",
        "read by bob",
        "written to the inbox of bob, attempt 2",
        "dead for bob, attempt 2",
        "replayed for bob, attempt 3",
        "written to the inbox of bob, attempt 3",
        "read by bob, attempt 3",
    ]


def test_one_that_ended_while_it_was_held_has_the_time_of_its_acceptance(life: Life) -> None:
    accepted = life.now()
    with life.ledger.transaction():
        put(life.ledger, life.id, "bob", "held", 1, staged_at=accepted, last_error="not before")
    life.end("expired", "cancelled by alice")
    hops = {hop["what"]: hop["at"] for hop in life.trace()["hops"]}
    assert hops["accepted"] == iso_time(accepted)


def test_one_that_was_held_was_accepted_before_and_nobody_knows_when(life: Life) -> None:
    life.hold(1, "not before tomorrow")
    life.write(1)
    shown = relay("trace", life.id, home=life.root).stdout.splitlines()[3:]
    assert [line.split(maxsplit=1)[1] for line in shown[:-1]] == [
        "discovered in the outbox of alice",
        "accepted for bob",
        "held for bob",
        "written to the inbox of bob",
    ]
    assert [line.split()[0] for line in shown[1:3]] == ["unknown", "unknown"]


def test_what_is_unknown_of_one_stands_behind_nothing_of_another(life: Life) -> None:
    """The beginning of carol's delivery stood behind the end of bob's, however late that was."""
    for state in ("held", "written", "dead"):
        for name in ("bob", "carol"):
            with life.ledger.transaction():
                at = life.now()
                put(life.ledger, life.id, name, state, 1, staged_at=at, written_at=at)
    hops = [(hop["what"], hop["recipient"]) for hop in life.trace()["hops"][1:]]
    assert hops == [
        ("accepted", "bob"),
        ("held", "bob"),
        ("accepted", "carol"),
        ("held", "carol"),
        ("written", "bob"),
        ("written", "carol"),
        ("dead", "bob"),
        ("dead", "carol"),
    ]


def test_the_relays_own_message_was_in_no_outbox_and_has_no_file(box: Box) -> None:
    box.send("alice", "TO: nobody\n\nhi")
    (nack,) = box.inbox("alice")
    shown = relay("trace", nack, home=box.root).stdout.splitlines()[3:]
    said = [line.split(maxsplit=1)[1] for line in shown]
    assert said[0] == "made by the relay" and "archived" in said
    assert not any("__orchestrator__" in line for line in said)


@pytest.mark.damages
def test_an_attempt_that_was_never_written_has_no_such_hop(life: Life) -> None:
    life.write(1)
    life.hold(2, "inbox is not a directory")
    life.hold(3, "inbox is not a directory")
    life.write(3)
    life.hold(4, "the disk is full")
    hops = life.trace()["hops"]
    assert [(hop["what"], hop["attempt"], hop["detail"]) for hop in hops[2:]] == [
        ("written", 1, None),
        ("held", 2, None),
        ("held", 3, None),
        ("written", 3, None),
        ("held", 4, "the disk is full"),
    ]
    said = life.lines()[-1]
    assert re.fullmatch(r"held for bob: the disk is full, tried again at [\w: ]+", said)


def test_what_nobody_noted_is_unknown(life: Life) -> None:
    """So it is of a ledger made again from the journal, and of attempts under schema 1."""
    life.write(3)
    hops = life.trace()["hops"]
    assert [(hop["what"], hop["attempt"], hop["at"] is None) for hop in hops] == [
        ("discovered", None, False),
        ("accepted", 1, True),
        ("written", 1, True),
        ("written", 2, True),
        ("written", 3, False),
    ]
    shown = relay("trace", life.id, home=life.root).stdout.splitlines()
    assert [line.split()[0] for line in shown[4:7]] == ["unknown"] * 3
    assert shown[-1].split() == ["not", "yet", "read", "by", "bob"]


def test_of_two_with_one_beginning_each_has_its_own(life: Life) -> None:
    life.write(1)
    with life.ledger.transaction():
        other = facts(1, message_id=life.id + "0", discovered_at=life.now())
        life.ledger.add([other])
        life.ledger.claim([other.message_id])
        put(life.ledger, other.message_id, "bob", "written", staged_at=5, written_at=6)
        put(life.ledger, other.message_id, "bob", "read", read_at=life.now())
    assert "read" not in [hop["what"] for hop in life.trace()["hops"]]


def test_within_a_millisecond_nothing_is_read_before_it_was_written(life: Life) -> None:
    """audit_log has milliseconds, and an agent may be quicker than that."""
    staged = life.now() // 10**6 * 10**6 + 100_000
    row: dict[str, Any] = {
        "recipient": "bob",
        "state": "read",
        "attempt": 1,
        "staged_at": staged,
        "written_at": staged + 200_000,
        "read_at": staged + 300_000,
        "acked_at": None,
        "last_error": None,
        "read_how": "taken",
        "discarded_at": None,
    }
    noted = row | {"at": staged - 100_000, "old_status": "written", "new_status": "read"}
    exactly = [("accepted", staged), ("written", staged + 200_000), ("read", staged + 300_000)]
    assert [(hop.what, hop.at) for hop in delivery_hops(row, [noted])] == exactly  # type: ignore[arg-type]
    over = row | {"state": "dead", "read_at": None}
    noted = noted | {"new_status": "dead"}
    ended = [*exactly[:2], ("dead", staged + 200_000)]
    assert [(hop.what, hop.at) for hop in delivery_hops(over, [noted])] == ended  # type: ignore[arg-type,list-item]


def test_a_replay_stands_before_the_file_that_it_led_to(life: Life) -> None:
    """It is noted with that file, a little later."""
    written = life.now()
    row: dict[str, Any] = dict.fromkeys(
        ("staged_at", "read_at", "read_how", "acked_at", "last_error", "discarded_at")
    )
    row |= {"recipient": "bob", "state": "written", "attempt": 2, "written_at": written}
    for noted_at in (written - 10**6, written, written + 10**6):
        noted = row | {"at": noted_at, "old_status": "dead", "new_status": "written"}
        noted["written_at"] = None  # the attempt before was never written
        hops = delivery_hops(row, [noted])  # type: ignore[arg-type]
        assert [hop.what for hop in hops[-2:]] == ["replayed", "written"]


def test_what_no_relay_has_seen_lies_in_the_outbox_and_is_said_to(life: Life) -> None:
    sent = relay("send", "bob", "hello", "--as", "carol", home=life.root).stdout.strip()
    shown = relay("trace", sent, home=life.root)
    assert shown.returncode == 0
    assert shown.stdout.splitlines() == [
        sent,
        "  is in the outbox of carol, not seen by a relay yet:"
        f" no relay is running; start one with `relay --home {life.root} up`",
    ]
    facts = rows_of("trace", sent[:25] + ".msg", home=life.root)[0]
    (by_digits,) = rows_of("trace", sent.partition("-")[2][:8], home=life.root)
    assert by_digits["message_id"] == facts["message_id"] == sent
    assert (facts["status"], facts["from"]) == ("waiting", "carol")
    status = relay("status", home=life.root).stdout
    assert "messages waiting in outboxes: 1" in status.splitlines()

    outbox = life.root / "agents" / "carol" / "outbox"
    (outbox / f"{sent}.msg").rename(outbox / ".pending" / f"{sent}.msg")
    assert "not sent yet: rename it into the outbox" in relay("trace", sent, home=life.root).stdout
    (outbox / ".pending" / f"{sent}.msg").unlink()
    gone = relay("trace", sent, home=life.root)
    assert gone.returncode == 1 and f"no message {sent}, in the ledger or any outbox" in gone.stderr


def test_times_are_local_under_a_line_for_each_day(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For programs they are ISO 8601 in UTC."""
    life.write(1)
    evening = 1_795_374_062_007_000_000  # 2026-11-22T19:01:02.007Z
    with life.ledger.transaction():
        life.ledger._db.execute("UPDATE messages SET discovered_at = ?", (evening,))
        later = evening + 5 * 3600 * 10**9
        life.ledger._db.execute("UPDATE deliveries SET staged_at = ?", (evening,))
        life.ledger._db.execute("UPDATE deliveries SET written_at = ?", (later,))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    shown = relay_anew("trace", life.id, home=life.root).stdout.splitlines()
    assert shown[2:8] == [
        "  2026-11-22 CET",
        "  20:01:02.007  discovered in the outbox of alice",
        "  20:01:02.007  accepted for bob",
        "  2026-11-23 CET",
        "  01:01:02.007  written to the inbox of bob",
        "  not yet       read by bob",
    ]
    hops = life.trace()["hops"]
    assert hops[0]["at"] == "2026-11-22T19:01:02.007000Z"


COMMAND = "TO: bob\nKIND: command\n\ncount the rows"


def steps(box: Box, message_id: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `relay trace` prints, without the times."""
    assert run(["--home", str(box.root), "trace", message_id]) == 0
    return [line[16:] for line in capsys.readouterr().out.splitlines()[2:]]


def test_reminders_and_the_end_of_waiting_are_steps(
    box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = box.send("alice", COMMAND)
    box.take("bob", sent)
    for _ in range(3):
        box.after(1801)
    found = [line for line in steps(box, sent, capsys) if "reminded" in line or "told" in line]
    assert [line.partition(":")[0] for line in found] == [
        "bob was reminded",
        "alice was told",
        "bob was reminded",
        "alice was told",
        "alice was told",
    ]
    assert "its answer is no longer awaited: it was reminded twice" in found[-1]


def test_an_answer_in_the_wrong_form_is_seen(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """The commonest mistake of a model: a message with RE where an ack is owed."""
    sent = box.send("alice", COMMAND)
    wrong = box.send("bob", f"TO: alice\nRE: {sent}\n\nthe table has 17 rows")
    text = f"bob sent a message about it: {wrong}: the table has 17 rows"
    assert text in steps(box, sent, capsys)
    box.stop()
    assert run(["--home", str(box.root), "show", sent]) == 0
    shown = capsys.readouterr().out
    assert f"bob sent a message about it, {wrong}:\n| the table has 17 rows" in shown
    assert run(["--home", str(box.root), "search", f"re:{sent[-8:]}", "--json"]) == 0
    assert f'"id":"{wrong}"' in capsys.readouterr().out.replace(" ", "")
