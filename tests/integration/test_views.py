"""``relay tail`` and ``relay top`` as a person sees them: in a terminal, and through a pipe."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pexpect
import pytest

from relay.cli.top import COLUMNS
from tests.procs import PROJECT, Relay, environment, relay, rows_of, until

pytestmark = pytest.mark.timeout(60)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def send(home: Path, *words: str) -> str:
    done = relay("send", *words, home=home)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def terminal(home: Path, *words: str) -> pexpect.spawn[str]:
    """The command in a terminal of 100 columns."""
    return pexpect.spawn(
        sys.executable,
        ["-m", "relay.cli", "--home", str(home), *words],
        env=environment(TERM="xterm", COLUMNS="100", LINES="24"),  # type: ignore[arg-type]
        dimensions=(24, 100),
        encoding="utf-8",
        timeout=30,
    )


def events(home: Path, *words: str) -> list[dict[str, object]]:
    return rows_of("tail", "--no-follow", *words, home=home)


def test_tail_shows_each_event_as_it_comes(running: Relay, home: Path) -> None:
    view = terminal(home, "tail")
    first = send(home, "bob", "--as", "alice", "--kind", "command", "do it")
    view.expect(rf"new +{first} +command +alice -> bob\r\n")
    view.expect(rf"delivered +{first} +command +alice -> bob\r\n")
    relay("inbox", "--as", "bob", "--take", home=home)
    view.expect(rf"read +{first} +command +alice -> bob\r\n")
    relay("ack", "--as", "bob", first, "completed", home=home)
    view.expect(rf"acked +{first} +command +alice -> bob +\(completed\)\r\n")
    assert running.stop() == 0  # it goes on while no relay runs, and behind the next start
    running.start()
    bad = send(home, "nobody", "--as", "alice", "lost")
    view.expect(rf"refused +{bad} +message +alice -> nobody +\(.*there is no agent nobody")
    view.sendintr()
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0


def test_tail_of_the_past_ends_by_itself(running: Relay, home: Path) -> None:
    ids = [send(home, "bob", "--as", "alice", str(number)) for number in range(3)]
    until(lambda: len([e for e in events(home) if e["event"] == "delivered"]) == 3)
    found = events(home, "--since", "1h")
    assert [e["message_id"] for e in found if e["event"] == "new"] == ids
    assert all(set(e) == set(found[0]) for e in found)
    assert found[1]["recipients"] == ["bob"]
    assert {e["status"] for e in events(home, "--since", "1h", "--all")} >= {"processing"}
    assert not {e["status"] for e in found} & {"processing", "archived"}
    assert running.stop() == 0
    assert events(home, "--since", "1h") == found  # with the relay down
    assert events(home, "--since", "1s", "--agent", "carol") == []
    assert len(events(home, "--agent", "bob", "--since", "1d")) == len(found)


def test_tail_shows_what_should_not_be_there(running: Relay, home: Path) -> None:
    outbox = home / "agents" / "alice" / "outbox"
    os.symlink("/etc/passwd", outbox / ".pending" / "1000000001-01.msg")
    os.rename(outbox / ".pending" / "1000000001-01.msg", outbox / "1000000001-01.msg")
    until(lambda: [e for e in events(home) if e["event"] == "security"])
    (event,) = (e for e in events(home, "--agent", "alice") if e["event"] == "security")
    assert event["status"] == "not_a_regular_file"
    said = relay("tail", "--no-follow", home=home).stdout
    assert "(not_a_regular_file: agents/alice/outbox/1000000001-01.msg" in said


def test_text_of_others_reaches_no_terminal_raw(running: Relay, home: Path) -> None:
    outbox = home / "agents" / "alice" / "outbox"
    (outbox / ".pending" / "1000000001-01.msg").write_text("TO: \x1b[31mred\n\nhi")
    os.rename(outbox / ".pending" / "1000000001-01.msg", outbox / "1000000001-01.msg")
    until(lambda: [e for e in events(home) if e["event"] == "refused"])
    assert "\x1b" not in relay("tail", "--no-follow", home=home).stdout


@pytest.mark.parametrize("since", ["", "5", "5x", "-5m", "1h30m", "99999999999s"])
def test_a_time_that_is_none_is_named(home: Path, since: str) -> None:
    done = relay("tail", "--no-follow", f"--since={since}", home=home)
    assert done.returncode == 2
    assert "expected a number and s, m, h or d" in done.stderr
    assert "Traceback" not in done.stderr


def test_top_refreshes_in_place_and_leaves_the_terminal_as_it_was(
    running: Relay, home: Path
) -> None:
    relay_top = f"{shlex.quote(sys.executable)} -m relay.cli --home {home} top --every 0.2"
    before, behind = home.parent / "before", home.parent / "behind"
    view = pexpect.spawn(
        "sh",
        ["-c", f"stty -a > {before}; {relay_top}; code=$?; stty -a > {behind}; exit $code"],
        env=environment(TERM="xterm"),  # type: ignore[arg-type]
        dimensions=(24, 100),
        encoding="utf-8",
        timeout=30,
    )
    view.expect("relay ready, pid")
    for name in COLUMNS:
        view.expect_exact(name)
    send(home, "bob", "--as", "alice", "--kind", "command", "do it")
    view.expect(r"bob +active +0 +1 +1 ")  # unread, owed
    view.expect(r"accepted 1 \(\d+/s\)")
    view.send("q")
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0
    shown = view.before or ""
    assert "\x1b[?1049l" in shown and "\x1b[?25h" in shown  # the screen before, and a cursor
    assert "Traceback" not in shown
    assert behind.read_text() == before.read_text() and " echo " in before.read_text()


def test_top_ends_with_an_interrupt_as_well(running: Relay) -> None:
    view = terminal(running.home, "top")
    view.expect("relay ready")
    view.sendintr()
    view.expect(pexpect.EOF)
    view.close()
    assert view.exitstatus == 0
    assert "\x1b[?1049l" in (view.before or "")


def test_top_continues_when_the_relay_goes(running: Relay) -> None:
    view = terminal(running.home, "top", "--every", "0.2")
    view.expect("relay ready")
    assert running.stop() == 0
    view.expect("no relay is running")
    view.expect("from the ledger:")
    running.start()
    view.expect("relay ready")
    view.send("q")
    view.expect(pexpect.EOF)
    view.close()


def test_without_a_terminal_top_is_one_plain_look(running: Relay, home: Path) -> None:
    send(home, "bob", "--as", "alice", "hi")
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
    assert down.startswith("no relay is running; start one with `relay up`\nfrom the ledger:\n")
    assert re.search(r"^bob +active +0 +1 +- +", down, re.M)


def shape(text: str) -> list[str]:
    """Lines of a screen with everything that differs from day to day made the same."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", ESCAPES.sub("", text))
    text = re.sub(r"disk (ok|alert|low|floor)", "disk STATE", text)
    text = re.sub(r"^home .*$", "home HOME", text, flags=re.M)
    text = re.sub(r"\d{10,20}-[0-9a-f]+", "ID", text)
    text = re.sub(r"\d+(\.\d+)?( s| min| h)?\b|\bnever\b", "N", text)
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


def a_short_talk(home: Path) -> None:
    """What the screens show, a step after the other."""

    def saw(event: str, times: int = 1) -> bool:
        return len([e for e in events(home, "--since", "1h") if e["event"] == event]) == times

    asked = send(home, "bob", "--as", "alice", "--kind", "command", "build the docs")
    until(lambda: saw("delivered"))
    relay("inbox", "--as", "bob", "--take", home=home)
    until(lambda: saw("read"))
    send(home, "alice", "--as", "bob", "looking into it")
    until(lambda: saw("delivered", 2))
    relay("ack", "--as", "bob", asked, "completed", home=home)
    until(lambda: saw("delivered", 3))
    until(lambda: "accepted 3" in relay("top", home=home).stdout)


def test_the_screens_in_the_documents_are_todays(running: Relay, home: Path) -> None:
    a_short_talk(home)
    shown = screens()
    del shown["audit run --out audits/today"]  # tests/audit compares it
    assert set(shown) == {"status", "tail --since 1h --no-follow", "top"}
    for command, lines in shown.items():
        assert shape(relay(*command.split(), home=home).stdout) == lines, command


def test_what_the_relay_itself_was_sent_is_delivered_before_it_is_read(
    running: Relay, home: Path
) -> None:
    relay("channel", "create", "ci", home=home)
    told = [e["event"] for e in events(home, "--since", "1h") if e["to"] == "__orchestrator__"]
    assert told == ["new", "delivered", "read"]


def test_a_delivery_made_again_is_told_with_its_attempt(running: Relay, home: Path) -> None:
    relay("send", "bob", "--as", "alice", "--await", "1s", "anyone?", home=home)
    until(lambda: any(e["detail"] == "attempt 2" for e in events(home, "--since", "1h")))
    first = next(e for e in events(home, "--since", "1h") if e["event"] == "delivered")
    assert first["detail"] is None
