"""The life of a row: every move that is allowed, and that no other one happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import asdict

from relay.base.errors import LedgerError
from relay.ledger.ledger import Ledger
from tests.ledger.support import NOW, Look, facts, message_id, record, refusal
from tests.procs import no_room_above

STATES = ["pending", "processing", "completed", "failed", "archived"]
Move = Callable[[Ledger, str], object]

# What each call does with a row in each state; every state that is not named stays.
MOVES: dict[str, tuple[Move, dict[str, str]]] = {
    "claim": (lambda db, one: db.claim([one]), {"pending": "processing"}),
    "complete": (lambda db, one: db.complete([one], NOW), {"processing": "completed"}),
    "archive": (
        lambda db, one: db.archive([(one, "archive/x")], NOW),
        {"processing": "archived", "completed": "archived"},
    ),
    "fail": (
        lambda db, one: db.fail([(one, refusal("why"))], NOW),
        {"pending": "failed", "processing": "failed"},
    ),
    "postpone": (
        lambda db, one: db.postpone([(one, "why")]),
        {"pending": "pending", "processing": "pending"},
    ),
    "reset": (lambda db, one: db.reset([one]), {"processing": "pending"}),
    "record again": (lambda db, one: db.add([facts(1)]), {}),
    "set_path": (lambda db, one: db.set_path([(one, "elsewhere")]), {}),
    "update_facts": (lambda db, one: db.update_facts([facts(1)]), {}),
}


def bring(ledger: Ledger, state: str) -> str:
    """A row in this state, by the moves that lead there."""
    (one,) = record(ledger, 1)
    with ledger.transaction():
        if state == "failed":
            ledger.fail([(one, refusal("before"))], NOW)
        elif state != "pending":
            ledger.claim([one])
        if state in ("completed", "archived"):
            ledger.complete([one], NOW)
        if state == "archived":
            ledger.archive([(one, None)], NOW)
    return one


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", MOVES)
def test_a_call_moves_a_row_as_it_may(ledger: Ledger, look: Look, name: str, state: str) -> None:
    one = bring(ledger, state)
    assert look.status(one) == state
    call, moves = MOVES[name]
    with ledger.transaction():
        call(ledger, one)
    assert look.status(one) == moves.get(state, state)


@pytest.mark.parametrize("name", ["claim", "complete", "reset"])
def test_the_call_says_which_rows_it_moved(ledger: Ledger, name: str) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    call: dict[str, Callable[[list[str]], set[str]]] = {
        "claim": ledger.claim,
        "complete": lambda ids: ledger.complete(ids, NOW),
        "reset": ledger.reset,
    }
    if name != "claim":
        ledger.claim([one, two])
    else:
        ledger.claim([three])
    wanted = [one, two, three, message_id(99)]
    assert call[name](wanted) == {one, two}
    assert call[name](wanted) == set()
    assert call[name]([]) == set()


def test_of_two_daemons_one_gets_a_row(ledger: Ledger, ledger_path: str) -> None:
    ids = record(ledger, *range(20))
    other = Ledger.open(ledger_path)
    mine = ledger.claim(ids[:15])
    theirs = other.claim(ids)
    assert mine == set(ids[:15])
    assert theirs == set(ids[15:])
    assert ledger.claim(ids) == other.claim(ids) == set()
    other.close()


def test_a_batch_is_there_whole_or_not_at_all(ledger: Ledger, look: Look) -> None:
    record(ledger, *range(1, 257))
    assert look.one("SELECT count(*) FROM messages") == 256
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger.add([facts(300)])
        raise ZeroDivisionError
    assert look.one("SELECT count(*) FROM messages") == 256
    record(ledger, 300, 301)
    assert look.one("SELECT count(*) FROM messages") == 258


def test_rows_are_added_claimed_once_and_the_call_says_which(ledger: Ledger, look: Look) -> None:
    assert ledger.add([facts(2), facts(1)]) == {message_id(1), message_id(2)}
    assert ledger.add([facts(1, "mallory"), facts(3)]) == {message_id(3)}
    assert look.all("SELECT message_id, agent_name, status FROM messages ORDER BY id") == [
        (message_id(number), "alice", "processing") for number in (2, 1, 3)
    ]


def test_open_rows_are_those_not_at_their_end_in_order_of_discovery(ledger: Ledger) -> None:
    one, two, three, four, five = record(ledger, 9, 2, 5, 4, 1)
    ledger.claim([two, three, four])
    ledger.complete([three, four], NOW)
    ledger.archive([(four, None)], NOW)
    ledger.fail([(five, refusal("why"))], NOW)
    assert [(row.message_id, row.status) for (row,) in ledger.open_rows(1)] == [
        *((one, "pending"), (two, "processing"), (three, "completed"))
    ]
    many = record(ledger, *range(10, 3000))
    assert ledger.rows(many).keys() == ledger.claim(many) == set(many)


def test_a_row_reads_back_as_it_was_recorded(ledger: Ledger) -> None:
    one, _ = record(ledger, 1, 2)
    rows = ledger.rows([one, message_id(99)])
    assert list(rows) == [one]
    row = rows[one]
    assert {name: getattr(row, name) for name in asdict(facts(1))} == asdict(facts(1))
    assert (row.status, row.retry_count, row.last_error) == ("pending", 0, None)
    assert ledger.rows([]) == {}


def test_a_failure_counts_and_is_counted_once(ledger: Ledger, look: Look) -> None:
    """retry_count counts failures, the passing ones and the one that was the last."""
    one, two, three = record(ledger, 1, 2, 3)
    ledger.claim([one, two, three])
    ledger.postpone([(two, "disk full")])
    ledger.fail([(one, refusal("no such agent")), (two, refusal("no such agent"))], NOW + 6)
    ledger.fail([(one, refusal("no such agent"))], NOW + 7)
    ledger.complete([three], NOW + 5)
    columns = "retry_count, processed_at, last_error"
    assert look.all(f"SELECT {columns} FROM messages ORDER BY id") == [
        *((1, NOW + 6, "no such agent"), (2, NOW + 6, "no such agent"), (0, NOW + 5, None))
    ]


def test_postponed_again_and_again_it_is_counted(ledger: Ledger) -> None:
    ids = record(ledger, 1, 2)
    for attempt in (1, 2, 3):
        ledger.claim(ids)
        why = [(one, f"{one} {attempt}") for one in ids]
        assert ledger.postpone(why) == dict.fromkeys(ids, attempt)
    for one, row in ledger.rows(ids).items():
        assert (row.status, row.retry_count, row.last_error) == ("pending", 3, f"{one} 3")
    assert ledger.postpone([(message_id(99), "why")]) == {}


def test_a_pending_file_that_changed_is_read_again(ledger: Ledger, look: Look) -> None:
    (one,) = record(ledger, 1)
    changed = facts(
        1,
        file_size=7,
        file_mtime_ns=8,
        file_inode=9,
        checksum="c",
        message_type="query",
        target="*",
    )
    columns = "file_size, file_mtime_ns, file_inode, checksum, message_type, target"
    ledger.update_facts([changed])
    assert look.all(f"SELECT {columns} FROM messages") == [(7, 8, 9, "c", "query", "*")]
    ledger.claim([one])
    ledger.update_facts([facts(1)])
    assert look.all(f"SELECT {columns} FROM messages") == [(7, 8, 9, "c", "query", "*")]


def test_the_path_of_an_archive_is_noted(ledger: Ledger, look: Look) -> None:
    one, two, three = record(ledger, 1, 2, 3)
    ledger.claim([one, two])
    ledger.complete([one, two], NOW)
    ledger.fail([(three, refusal("refused"))], NOW)
    ledger.archive([(one, "archive/2026-01-31/alice/1.msg"), (two, None)], NOW)
    ledger.set_path([(three, "archive/2026-01-31/alice/rejected/1.msg")])
    assert look.all("SELECT status, file_path FROM messages ORDER BY id") == [
        ("archived", "archive/2026-01-31/alice/1.msg"),
        ("archived", facts(2).file_path),
        ("failed", "archive/2026-01-31/alice/rejected/1.msg"),
    ]


# -- a disk that takes nothing -------------------------------------------------------------


@pytest.mark.parametrize("rows", [500, 30_000], ids=["at the commit", "in the middle"])
def test_a_full_disk_takes_a_step_back(ledger: Ledger, ledger_path: str, rows: int) -> None:
    record(ledger, 1)
    size = Path(ledger_path + "-wal").stat().st_size
    with no_room_above(size + 5000):
        with pytest.raises(LedgerError, match=r"I/O error|full") as caught:
            record(ledger, *range(2, rows))
    assert "\n" not in str(caught.value)
    assert [row.message_id for (row,) in ledger.open_rows(9)] == [message_id(1)]
    record(ledger, 2)
    assert [len(rows) for rows in ledger.open_rows(9)] == [2]


def test_the_first_fault_is_the_one_that_is_told(ledger: Ledger) -> None:
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger._db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise ZeroDivisionError
    record(ledger, 1)
