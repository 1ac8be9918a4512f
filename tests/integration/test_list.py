"""``relay list``: one list for every question about messages, whatever the source of the answer."""

from __future__ import annotations

import time

import pytest

from relay.base.clock import iso_time
from relay.base.config import Config, StoreSettings
from tests.box import Box
from tests.procs import relay, rows_of

QUERY = "TO: *\nKIND: query\n\nwhich branch?"
TAILS = ("tail --no-follow --agent", "tail --follow --agent", "tail --no-follow --json --agent")


def asked(box: Box, *words: str) -> list[tuple[object, ...]]:
    """The rows: who it is from and to, and how it stands."""
    rows = rows_of("list", *words, home=box.root)
    return [(row["from"], row["to"], row["outcome"]) for row in rows]


def test_a_message_is_one_row_and_with_is_one_for_each_recipient_for_whom_it_is_so(
    box: Box,
) -> None:
    sent = box.send("alice", QUERY)
    box.take("bob", sent)
    box.tick()
    assert asked(box, "kind:query") == [("alice", "*", "1 of 3 read")]
    unread = [("alice", name, "delivered") for name in ("carol", "operator")]
    assert asked(box, "is:open") == [("alice", "bob", "read"), *unread]
    assert asked(box, "is:unread") == unread
    assert asked(box, "is:open", "to:bob") == [("alice", "bob", "read")]
    (row,) = rows_of("list", "is:unread", "to:carol", home=box.root)
    assert row["recipients"] == ["carol"] and row["status"].startswith("not read, due in ")


def test_what_was_refused_stands_beside_what_was_accepted(box: Box) -> None:
    box.send("alice", "TO: bbo\n\nlost")
    box.send("alice", "TO: bob\n\nkept")
    assert asked(box, "from:alice", "sort:oldest") == [
        ("alice", "bbo", "refused"),
        ("alice", "bob", "delivered"),
    ]
    assert asked(box, "with:bbo") == asked(box, "is:refused") == [("alice", "bbo", "refused")]
    (row,) = rows_of("list", "is:refused", "lost", home=box.root)
    assert row["content"] == "lost" and row["reason"].startswith("there is no agent bbo")
    assert asked(box, "is:refused", "kept") == []


def test_a_channel_has_what_was_refused_there_too(box: Box) -> None:
    box.join("builds", "alice", "bob")
    box.send("alice", "TO: #builds\n\nkept")
    box.send("carol", "TO: #builds\n\nfrom outside")
    assert sorted(asked(box, "channel:builds")) == [
        ("alice", "#builds", "delivered"),
        ("carol", "#builds", "refused"),
    ]
    told = relay("list", "to:#builds", home=box.root)
    assert (told.returncode, told.stdout) == (2, "")
    assert "to:#builds is no agent (expected channel:builds)" in told.stderr


def test_what_no_relay_has_seen_is_told(box: Box) -> None:
    box.drop("alice", "TO: bob\n\nqueued")
    for words in ("list queued", "unread", "list"):
        line = relay(*words.split(), home=box.root).stderr.splitlines()[0]
        assert line.startswith("relay: 1 message in outboxes, not seen by a relay yet: `relay"), (
            words
        )
    box.tick()
    assert "outboxes" not in relay("list", "queued", home=box.root).stderr


def test_since_is_when_something_last_happened_to_it_not_when_it_was_sent(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    time.sleep(1.1)  # the log of changes has the machine's clock
    now = iso_time(time.time_ns())[:19] + "Z"
    box.send("bob", f"TO: alice\nKIND: nack\nRE: {sent}\n\nno such branch")
    (row,) = rows_of("failed", "--since", now, home=box.root)
    assert (row["id"], row["status"]) == (sent, "failed: no such branch")
    assert asked(box, "is:failed", f"after:{now}") == []


def test_unread_with_another_state_is_either(box: Box) -> None:
    """Of what was not unread nothing was shown; of a message without TO it was a traceback."""
    owed = box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.take("bob", owed)
    box.tick()
    box.send("alice", "TO: bob\n\nhi")
    box.send("alice", "no header")
    found = asked(box, "is:unread", "is:open", "to:bob")
    assert sorted(found) == [("alice", "bob", "delivered"), ("alice", "bob", "read")]
    found = asked(box, "is:unread", "is:refused", "from:alice")
    assert {*found} == {("alice", None, "refused"), ("alice", "bob", "delivered")}


def test_what_was_taken_while_no_relay_ran_takes_no_place_of_the_rest(box: Box) -> None:
    """`unread --limit 2` said that nothing is unread."""
    sent = [box.send("alice", f"TO: bob\n\nnumber {number}") for number in range(4)]
    for message_id in sent[:2]:
        box.take("bob", message_id)
    for limit in ("1", "2"):
        found = rows_of("unread", "--agent", "bob", "--limit", limit, home=box.root)
        assert [row["id"] for row in found] == sent[2:][: int(limit)]


def test_a_file_that_was_taken_while_no_relay_ran_is_not_unread(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    assert asked(box, "is:unread") == [("alice", "bob", "delivered")]
    box.take("bob", sent)
    assert asked(box, "is:unread") == []


def test_an_inbox_has_the_rows_of_the_list_in_the_order_in_which_they_are_taken(box: Box) -> None:
    late = box.send("alice", "TO: bob\nKIND: command\n\ndeploy\nnow")
    first = box.send("alice", "TO: bob\nPRIORITY: 0\nTOPIC: build\n\nstop")
    rows = rows_of("inbox", "--as", "bob", home=box.root)
    assert [row["id"] for row in rows] == [first, late]
    listed = {row["id"]: row for row in rows_of("list", "is:unread", "to:bob", home=box.root)}
    of_the_store = ("number", "type", "channel", "thread", "status")  # the last ages by a second
    for row in rows:
        assert row.pop("delivered") is True
        same = listed[row["id"]]
        assert row.keys() == same.keys()
        assert {k: v for k, v in row.items() if k not in of_the_store} == {
            k: v for k, v in same.items() if k not in of_the_store
        }
    assert rows[1]["status"].startswith("not read, due in ")


@pytest.mark.box("alice", "bob", config=Config(store=StoreSettings(encrypt=True)))
def test_an_encrypted_home_answers_the_same(box: Box) -> None:
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.send("alice", "TO: bbo\n\nlost")
    assert asked(box, "is:open") == [("alice", "bob", "delivered")]
    assert asked(box, "is:failed") == [("alice", "bbo", "refused")]
    done = relay("list", "is:open", home=box.root)
    assert done.stderr == "" and "not read, due in " in done.stdout


@pytest.mark.damages
def test_messages_are_found_without_a_ledger_and_it_is_said(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.stop()
    box.path("ledger.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
    done = relay("list", home=box.root)
    assert done.returncode == 0 and "hi" in done.stdout
    assert done.stderr.startswith("relay: what became of them is not known: ")
    assert f"`relay --home {box.root} ledger rebuild`" in done.stderr
    assert relay("list", "is:unread", home=box.root).returncode == 1
    (row,) = rows_of(
        "inbox", "--as", "bob", home=box.root
    )  # what is there can be read all the same
    assert (row["content"], row["outcome"], row["delivered"]) == ("hi", None, None)


def test_words_that_are_not_utf8_are_one_line(box: Box) -> None:
    for words in ("list \udcff", "list thread:\udcff", "thread \udcff", "list from:\udcff"):
        done = relay(*words.split(), home=box.root)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) in [(2, "", 1), (1, "", 1)]
        assert "\\udcff" in done.stderr


def test_a_name_that_nobody_has_is_no_good_news(box: Box) -> None:
    """Nor is that of an unset variable everybody."""
    for words in ("open --agent", "open --from", "unread --agent", "failed --agent", *TAILS):
        for name, more in (("bobb", " in "), ("", "")):
            done = relay(*words.split(), name, home=box.root)
            assert (done.returncode, done.stdout) == (1, ""), words
            assert done.stderr.startswith(f"relay: there is no agent {name!r}{more}"), words
