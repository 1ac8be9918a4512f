"""``relay tail`` and ``relay top`` as a person sees them: in a terminal, and through a pipe."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from pathlib import Path

import pexpect
import pytest

from relay.base.errors import EXIT_INTERRUPTED
from relay.cli.top import COLUMNS
from tests.box import Box
from tests.procs import (
    PATIENCE_S,
    PROJECT,
    Relay,
    environment,
    relay,
    relay_anew,
    rows_of,
    send,
    until,
)
from tests.terminals import lines_in_a_terminal, terminal

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def short(message_id: str) -> str:
    """An id as tables show it."""
    return message_id.partition("-")[2][:8]


def events(home: Path, *words: str) -> list[dict[str, object]]:
    return rows_of("tail", "--no-follow", *words, home=home)


def test_tail_shows_each_event_as_it_comes(running: Relay, home: Path) -> None:
    view = terminal(home, "tail")
    sent = send(home, "bob", "--kind", "command", "do it")
    first = short(sent)
    view.expect(rf"new +{first} +command +alice -> bob\r\n")
    view.expect(rf"delivered +{first} +command +alice -> bob\r\n")
    relay("inbox", "--as", "bob", "--take", home=home)
    view.expect(rf"read +{first} +command +alice -> bob\r\n")
    relay("ack", "--as", "bob", sent, "completed", home=home)
    view.expect(rf"acked +{first} +command +alice -> bob +\(completed\)\r\n")
    assert running.stop() == 0  # it goes on while no relay runs, and behind the next start
    running.start()
    bad = short(send(home, "nobody", "lost"))
    view.expect(rf"refused +{bad} +message +alice -> nobody +\(.*there is no agent nobody")
    view.sendintr()
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == EXIT_INTERRUPTED


def test_tail_shows_what_messages_say(running: Relay, home: Path) -> None:
    first = send(home, "bob", "one\n\x1b[31mtwo")
    send(home, "nobody", "lost")
    until(lambda: "  lost\n" in relay("tail", "--no-follow", "--body", home=home).stdout)
    found = events(home, "--body")
    assert [e["body"] for e in found if e["message_id"] == first] == [None, "one\n\x1b[31mtwo"]
    nack = next(e for e in found if e["kind"] == "nack" and e["event"] == "delivered")
    assert str(nack["body"]).startswith("not delivered: ")  # of the relay, from the inbox
    shown = relay("tail", "--no-follow", "--body", home=home).stdout
    assert "-> bob\n              one\n              \\x1b[31mtwo\n" in shown
    for kept in (home / "archive").rglob(f"{first}.msg"):
        kept.unlink()
    (home / "agents" / "bob" / "inbox" / f"{first}.msg").rename(
        home / "agents" / "bob" / "inbox" / ".read" / f"{first}.msg"
    )
    found = [e["body"] for e in events(home, "--body") if e["message_id"] == first]
    assert found[1] == "one\n\x1b[31mtwo"  # bob's copy


def test_lines_of_tail_fit_the_terminal_unless_they_are_wide(running: Relay, home: Path) -> None:
    send(home, "nobody", "lost")
    until(lambda: [e for e in events(home) if e["event"] == "refused"])
    for words, is_cut in ((), True), (("--wide",), False):
        shown = lines_in_a_terminal(home, 100, " ".join(("tail", "--no-follow", *words)))
        (refused,) = (line for line in shown if " refused " in line)
        assert refused.endswith("…") is is_cut
        assert (len(refused) == 100) is is_cut


def test_tail_of_the_past_ends_by_itself(running: Relay, home: Path) -> None:
    ids = [send(home, "bob", str(number)) for number in range(3)]
    until(lambda: len([e for e in events(home) if e["event"] == "delivered"]) == 3)
    found = events(home, "--since", "1h")
    assert [e["message_id"] for e in found if e["event"] == "new"] == ids
    assert all(set(e) == set(found[0]) for e in found)
    assert found[1]["recipients"] == ["bob"]
    assert {e["status"] for e in events(home, "--since", "1h", "--all")} >= {"processing"}
    assert {e["who"] for e in found} == {"daemon 1"} and events(home, "--limit", "1") == found[-1:]
    assert not {e["event"] for e in found} & {"processing", "archived"}
    assert running.stop() == 0
    assert events(home, "--since", "1h") == found  # with the relay down
    assert events(home, "--since", "1s", "--agent", "operator") == []
    assert len(events(home, "--agent", "bob", "--since", "1d")) == len(found)


def test_a_time_that_was_printed_can_be_pasted(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a zone that is hours away from UTC, as times are shown."""
    monkeypatch.setenv("TZ", "Australia/Lord_Howe")
    for number in range(3):
        send(home, "bob", str(number))
        time.sleep(0.005)
    until(lambda: len([e for e in events(home) if e["event"] == "delivered"]) == 3)
    shown = relay_anew("tail", "--no-follow", home=home).stdout.splitlines()
    times = [line.split()[0] for line in shown]
    assert len(set(times)) > 1
    at = max(times)
    done = relay_anew("tail", "--no-follow", "--since", at, home=home)
    assert done.stdout.splitlines() == shown[times.index(at) :], at


def test_tail_shows_what_should_not_be_there(running: Relay, home: Path) -> None:
    outbox = home / "agents" / "alice" / "outbox"
    os.symlink("/etc/passwd", outbox / ".pending" / "1000000001-01.msg")
    os.rename(outbox / ".pending" / "1000000001-01.msg", outbox / "1000000001-01.msg")
    until(lambda: [e for e in events(home) if e["event"] == "security"])
    (event,) = (e for e in events(home, "--agent", "alice") if e["event"] == "security")
    assert event["status"] == "not_a_regular_file"
    said = relay("tail", "--no-follow", home=home).stdout
    assert "(not_a_regular_file: agents/alice/outbox/1000000001-01.msg" in said
    assert events(home, "--security") == [event]


def test_top_refreshes_in_place_and_leaves_the_terminal_as_it_was(
    running: Relay, home: Path
) -> None:
    relay_top = f"{shlex.quote(sys.executable)} -m relay --home {home} top --every 0.2"
    before, behind = home.parent / "before", home.parent / "behind"
    view = pexpect.spawn(
        "sh",
        ["-c", f"stty -a > {before}; {relay_top}; code=$?; stty -a > {behind}; exit $code"],
        env=environment(TERM="xterm", NO_COLOR="1"),  # type: ignore[arg-type]
        dimensions=(24, 100),
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
    view.expect("relay ready, pid")
    for name in COLUMNS:
        view.expect_exact(name)
    send(home, "bob", "--kind", "command", "do it")
    view.expect(r"bob +active +0 +1 +1 ")  # unread, owed
    view.expect(r"accepted 1 \(\d+/s\)")
    assert running.stop() == 0  # it goes on when the relay goes
    view.expect("no relay is running")
    view.expect("from the ledger:")
    running.start()
    view.expect("relay ready")
    view.send("q")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0
    shown = view.before or ""
    assert "\x1b[?1049l" in shown and "\x1b[?25h" in shown  # the screen before, and a cursor
    assert "Traceback" not in shown
    assert behind.read_text() == before.read_text() and " echo " in before.read_text()


MANY = [f"agent-with-a-rather-long-name-{number:02}-of-them" for number in range(30)]


@pytest.mark.home(*MANY)
def test_top_scrolls_and_says_what_is_cut(running: Relay) -> None:
    """31 agents with the operator, on 24 lines; names differ though they are cut."""
    view = terminal(running.home, "top")
    view.expect(r"31 active of 31 agents")
    view.expect(r"agent-with-a-rat…-name-00-of-them ")
    view.expect(r"q quit  \? help  j/k scroll: 0 more above, (\d+) more below")
    assert view.match is not None
    below = int(view.match[1])
    assert below == 31 - 24 + 7  # a head of four lines, a blank one, the titles, the keys
    view.send("j")
    view.expect(f"1 more above, {below - 1} more below")
    view.send("\x1b[B\x1b[B")  # arrows
    view.expect(f"3 more above, {below - 3} more below")
    view.send("k")
    view.expect(f"2 more above, {below - 2} more below")
    view.send("G")
    view.expect(f"{below} more above, 0 more below")
    view.send("jg")
    view.expect(f"0 more above, {below} more below")
    view.send("?")
    view.expect_exact("space, b    a page down and up")
    view.send("x")
    view.expect("0 more above")
    view.setwinsize(50, 100)
    view.expect(r"operator +active[^/]*q quit  \? help\r\n")  # all of them, within a second
    view.send("q")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0


def test_without_a_terminal_top_is_one_plain_look(running: Relay, home: Path) -> None:
    send(home, "bob", "hi")
    until(lambda: "accepted 1" in relay("top", home=home).stdout)
    done = relay("top", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    head, table = done.stdout.split("\n\n")
    assert head.startswith("relay ready, pid ")
    assert re.split(r"\s+", table.splitlines()[0].strip()) == list(COLUMNS)
    assert re.search(r"^bob +active +0 +1 +0 +", table, re.M)
    assert running.stop() == 0
    down = relay("top", home=home).stdout
    up = f"`relay --home {home} up`"
    assert down.startswith(f"no relay is running; start one with {up}\nfrom the ledger:\n")
    assert re.search(r"^bob +active +0 +1 +- +", down, re.M)


def shape(text: str) -> list[str]:
    """Lines of a screen with everything that differs from day to day made the same."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", ESCAPES.sub("", text))
    text = re.sub(r"disk (ok|alert|low|floor)", "disk STATE", text)
    text = re.sub(r"^(home|  mailbox) .*$", r"\1 PATH", text, flags=re.M)
    text = re.sub(r"^  \d{4}-\d\d-\d\d \S+$", "DAY", text, flags=re.M)
    text = re.sub(r"archive/\d{4}-\d\d-\d\d/", "archive/DAY/", text)
    text = re.sub(r"\d{10,20}-[0-9a-f]+|\b[0-9a-f]{8}\b", "ID", text)
    text = re.sub(r"\d\d:\d\d:\d\d(\.\d{3})?", "CLOCK", text)
    text = re.sub(r"\d+(\.\d+)?( s| min| h| [MG]iB)?\b|\bnever\b", "N", text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines()]


def screens() -> dict[str, list[str]]:
    """Command -> what docs/screens.md shows of it."""
    found: dict[str, list[str]] = {}
    text = (PROJECT / "docs" / "screens.md").read_text()
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.M):
        lines = [line[4:] for line in block.strip("\n").splitlines()]
        if lines[0].startswith("$ relay "):
            found[lines[0].removeprefix("$ relay ")] = shape("\n".join(lines[1:]))
    return found


def a_short_talk(home: Path) -> str:
    """What the screens show, a step after the other; the id of the first message."""

    def saw(event: str, times: int = 1) -> bool:
        return len([e for e in events(home, "--since", "1h") if e["event"] == event]) == times

    asked = send(home, "bob", "--kind", "command", "build the docs")
    until(lambda: saw("delivered"))
    relay("inbox", "--as", "bob", "--take", home=home)
    until(lambda: saw("read"))
    send(home, "alice", "looking into it", sender="bob")
    until(lambda: saw("delivered", 2))
    relay("ack", "--as", "bob", asked, "completed", home=home)
    until(lambda: saw("delivered", 3))
    until(lambda: "accepted 3" in relay("top", home=home).stdout)
    return asked


def test_the_screens_in_the_documents_are_todays(running: Relay, home: Path) -> None:
    asked = short(a_short_talk(home))
    shown = screens()
    del shown["audit run --out audits/today"]  # tests/audit compares it
    commands = {"status", "tail --since 1h --no-follow", "top", "agents show bob", "trace b7b5d219"}
    assert set(shown) == commands
    for command, lines in shown.items():
        words = command.replace("b7b5d219", asked).split()
        assert shape(relay(*words, home=home).stdout) == lines, command


def test_tail_tells_what_the_relay_was_sent_in_order_and_the_attempt_of_a_delivery(
    running: Relay, home: Path
) -> None:
    relay("channel", "create", "ci", home=home)

    def told() -> list[object]:
        rows = events(home, "--since", "1h")
        return [e["event"] for e in rows if e["to"] == "__orchestrator__"]

    until(lambda: told() == ["new", "delivered"])
    relay("send", "bob", "--as", "alice", "--due", "1s", "anyone?", home=home)
    until(lambda: any(e["detail"] == "attempt 2" for e in events(home, "--since", "1h")))
    found = events(home, "--since", "1h", "--agent", "bob")
    assert [e["detail"] for e in found if e["event"] == "delivered"][:2] == [None, "attempt 2"]


def test_a_terminal_is_told_of_unread_messages(
    running: Relay, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a command that says nothing of them; never a pipe or a program."""

    def shown(*words: str) -> str:
        return "\n".join(lines_in_a_terminal(home, 100, " ".join(words)))

    for number in range(2):
        send(home, "bob", str(number))
    until(lambda: len(list((home / "agents" / "bob" / "inbox").glob("*.msg"))) == 2)
    advice = "2 unread for bob; see `relay"
    assert advice not in shown("agents")  # they are not operator's
    monkeypatch.setenv("AGENT_RELAY_NAME", "bob")
    os.utime(home / "tmp", (0, 0))
    assert shown("agents").splitlines()[-1].startswith(advice)
    assert advice not in shown("agents")  # once a minute
    os.utime(home / "tmp", (0, 0))
    assert advice not in shown("agents", "--json")
    assert advice not in shown("inbox")
    done = relay("agents", home=home)
    assert (done.returncode, done.stderr) == (0, "")


def test_tail_says_who_got_a_message_and_who_did_not(box: Box) -> None:
    def said() -> list[tuple[object, ...]]:
        return [
            (row["event"], row["message_id"], row["recipients"] or row["to"], row["detail"])
            for row in events(box.root)
            if row["event"] != "new"
        ]

    with box.broken_inbox("bob"):
        sent = box.send("alice", "TO: *\n\nhi")
        later = box.send("alice", "TO: carol\nNOT-BEFORE: 10m\n\nlater")
        delivered, held, waits = said()
    assert delivered == ("delivered", sent, ["carol", "operator"], None)
    assert held == ("held", sent, ["bob"], "inbox is a link or not a directory")
    assert waits[:3] == ("held", later, ["carol"]) and str(waits[3]).startswith("not before ")
    box.after(2)
    assert said()[3:] == [("delivered", sent, "bob", None)]


def test_tail_shows_the_text_of_a_message_that_was_held(box: Box) -> None:
    box.send("alice", "TO: bob\nNOT-BEFORE: 10m\n\nthe text")
    box.after(601)
    bodies = [row["body"] for row in events(box.root, "--body") if row["event"] == "delivered"]
    assert bodies == ["the text"]
