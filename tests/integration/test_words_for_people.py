"""What `trace`, `list`, `thread`, `search`, `agents`, `status` and `top` say of a message: the
same words, whatever the ledger calls it; what stands in an inbox is unread in any case."""

from __future__ import annotations

import json
import re
import shutil

from tests.box import Box
from tests.procs import agents_of, relay, rows_of

COMMAND = "TO: bob\nKIND: command\nTHREAD: t-1\n\ndeploy"


def shown(box: Box, *args: str) -> str:
    return relay(*args, home=box.root).stdout


def short(message_id: str) -> str:
    """An id as tables and texts show it."""
    return message_id.partition("-")[2]


def headline(box: Box, message_id: str) -> str:
    return shown(box, "trace", message_id).splitlines()[1].strip()


def lines(box: Box, message_id: str) -> list[str]:
    """The hops, without their times."""
    return [line[16:] for line in shown(box, "trace", message_id).splitlines()[3:]]


def rows(box: Box, *args: str) -> list[list[str]]:
    """A table's cells, without the time of each row."""
    table = shown(box, *args).splitlines()
    return [re.split(r"  +", line)[2:] for line in table[1:]]


def unread(box: Box) -> list[str]:
    """The ids that the list has of bob."""
    return [row["id"] for row in rows_of("unread", "--agent", "bob", home=box.root)]


def counts(box: Box) -> tuple[int, int]:
    """Of bob's messages: unread ones, dead ones."""
    bob = agents_of(box.root)["bob"]
    return bob["unread"], bob["dead"]


def test_the_headline_says_how_it_stands(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    assert headline(box, sent) == "command alice -> bob: delivered, not read yet"
    box.take("bob", sent)
    box.tick()
    assert headline(box, sent) == "command alice -> bob: read, not answered yet"
    begun = box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\nin_progress half way")
    assert headline(box, sent).startswith("command alice -> bob: in progress by bob for ")
    assert headline(box, sent).endswith(f": half way (answer {short(begun)})")
    assert lines(box, sent)[-1] == "completed by bob"  # not yet
    done = box.send("bob", f"TO: alice\nKIND: ack\nRE: {sent}\n\ncompleted\nall green\nand more")
    assert headline(box, sent) == (
        f"command alice -> bob: completed by bob: all green (answer {short(done)})"
    )
    assert f"acknowledged by bob: completed, all green (answer {short(done)})" in lines(box, sent)


def test_a_refusal_is_no_acceptance(box: Box) -> None:
    sent = box.send("alice", COMMAND)
    box.take("bob", sent)
    nack = box.send("bob", f"TO: alice\nKIND: nack\nRE: {sent}\n\nno such branch")
    ack = "TO: alice\nKIND: ack\nRE: {}\n\ncompleted"
    other = box.send("alice", COMMAND)
    box.send("bob", ack.format(other))
    box.flush()
    assert (
        headline(box, sent)
        == f"command alice -> bob: failed by bob: no such branch (answer {short(nack)})"
    )
    facts = json.loads(shown(box, "trace", sent, "--json"))
    assert facts["deliveries"][0]["answer"] == nack
    assert facts["deliveries"][0]["answer_text"] == "no such branch"
    expected = [
        ["alice", "bob", "command", "failed: no such branch", "deploy"],
        ["bob", "alice", "nack", "delivered", "no such branch"],
        ["alice", "bob", "command", "completed", "deploy"],
        ["bob", "alice", "ack", "delivered", "completed"],
    ]
    assert rows(box, "list", "sort:oldest") == expected
    assert rows(box, "list", "kind:NACK") == [expected[1]]
    assert rows(box, "thread", "t-1", "--short") == expected
    found = shown(box, "search", "no such").splitlines()
    assert found[0].startswith(short(nack))
    assert found[0].endswith(f"bob -> alice  nack re {short(sent)}  delivered")
    assert found[1:] == ["    no such branch", ""]
    (found,) = map(json.loads, shown(box, "search", "no such", "--json").splitlines())
    assert (found["type"], found["kind"], found["outcome"]) == (
        *("Acknowledgment", "nack", "delivered"),
    )


def test_what_was_refused_says_why_once(box: Box) -> None:
    sent = box.send("alice", "TO: bbo\n\ntypo?")
    assert headline(box, sent).startswith("message alice -> bbo: refused: there is no agent bbo")
    assert sum("there is no agent" in line for line in lines(box, sent)) == 0
    sent = box.send("alice", "no header at all")  # which has neither kind nor address
    assert headline(box, sent).startswith(f"a file of alice: refused: {sent}.msg, line 1")


def test_trace_says_that_nobody_was_seen_to_read_it(box: Box) -> None:
    taken, removed = (box.send("alice", "TO: bob\n\nhi") for _ in range(2))
    box.take("bob", taken)
    box.path("agents", "bob", "inbox", f"{removed}.msg").unlink()
    box.tick()
    box.after(1, turns=1)
    assert headline(box, taken) == "message alice -> bob: read"
    assert lines(box, taken)[-1] == "read by bob"
    unseen = "removed from the inbox of bob, not seen in .read"
    assert headline(box, removed) == f"message alice -> bob: {unseen}"
    assert lines(box, removed)[-1] == unseen


def test_what_was_taken_back_is_cancelled_and_not_expired(box: Box) -> None:
    """In every text; programs get the state of the ledger as well."""
    sent = box.send("alice", COMMAND)
    box.command("alice", "message.cancel", f"ID: {sent}")
    assert headline(box, sent) == "command alice -> bob: cancelled: by alice"
    assert "cancelled for bob: by alice" in lines(box, sent)
    tail = ("tail", "--since", "1h", "--no-follow", "--agent", "bob")
    assert [line.split()[1:] for line in shown(box, *tail).splitlines()][-1] == [
        *("cancelled", short(sent), "command", "alice", "->", "bob", "(by", "alice)"),
    ]
    event = json.loads(shown(box, *tail, "--json").splitlines()[-1])
    assert (event["event"], event["status"]) == ("cancelled", "expired")
    assert event["detail"] == "cancelled by alice"
    whats = [hop["what"] for hop in json.loads(shown(box, "trace", sent, "--json"))["hops"]]
    assert "expired" in whats


def test_what_stands_in_an_inbox_is_unread_whatever_became_of_it(box: Box) -> None:
    sent = box.send("alice", "TO: bob\nKIND: command\nDELIVERY: at-least-once\n\ndeploy")
    assert counts(box) == (1, 0)
    box.until_dead()
    assert box.states(sent) == {"bob": "dead"}
    assert counts(box) == (1, 1)
    header, _, bob, _ = (line.split() for line in shown(box, "agents").splitlines()[:4])
    assert header == ["NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE"]
    assert bob[:2] == ["bob", "active"] and bob[-3:-1] == ["1", "1"]
    assert json.loads(shown(box, "status", "--json"))["unread"] == 2  # alice has its nack
    assert "bob       active       0       1" in shown(box, "top")
    assert unread(box) == [sent]
    assert json.loads(shown(box, "audit", "digest", "--json"))["unread"] == 2
    headline_ = headline(box, sent)
    assert headline_.startswith("command alice -> bob: dead: no acknowledgment within 60 s")

    box.take("bob", sent)
    box.tick()
    assert counts(box) == (0, 1)
    assert unread(box) == []
    assert json.loads(shown(box, "audit", "digest", "--json"))["unread"] == 1
    assert headline(box, sent) == headline_ + "; it was read"
    assert "read by bob, attempt 4" in lines(box, sent)
    tail = shown(box, "tail", "--since", "1h", "--no-follow", "--agent", "bob").splitlines()
    assert [line.split()[1] for line in tail][-1] == "read"


def test_the_doctor_says_what_vanished_with_a_mailbox(box: Box) -> None:
    for number in range(2):
        box.send("alice", f"TO: bob\n\n{number}")
    box.flush()
    shutil.rmtree(box.path("agents", "bob"))
    box.kill()
    found = [json.loads(line) for line in shown(box, "doctor", "--json").splitlines()]
    (one,) = [line for line in found if "mailbox" in line.get("finding", "")]
    assert one["finding"] == "2 unread messages vanished with the mailbox of bob"
    assert "delivers them again after" in one["remedy"]
    box.home.make_agent("bob")
    assert "2 unread messages vanished" in shown(box, "doctor")
    box.open()
    box.tick(2)
    assert box.bodies("bob") == ["0", "1"]
    box.flush()
    assert shown(box, "doctor") == "OK\n"
