"""Inboxes taken whole or looked at in part, messages taken back, answers that are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from relay.views.ids import short_ids
from tests.procs import relay, rows_of, send, until

pytestmark = pytest.mark.usefixtures("waits")


def short(message_id: str) -> str:
    return short_ids([message_id])[message_id]


@pytest.mark.usefixtures("running")
def test_the_inbox_is_taken_whole_or_looked_at_in_part(home: Path) -> None:
    """--from and --limit only list; --take --all takes by priority."""
    send(home, "bob", "one")
    send(home, "--priority", "0", "bob", "urgent")
    relay("send", "--as", "carol", "bob", "from carol", home=home)
    listed = relay("inbox", "--as", "bob", "--from", "carol", home=home).stdout
    assert "from carol" in listed and "urgent" not in listed
    for more in ((), ("--json",)):  # which programs hear as well
        done = relay("inbox", "--as", "bob", "--limit", "1", *more, home=home)
        assert done.stderr == "1 of 3; --limit 3 shows all\n"
    taken = relay("inbox", "--as", "bob", "--take", "--all", "--json", home=home).stdout
    bodies = [json.loads(line)["body"] for line in taken.splitlines()]
    assert bodies == ["urgent", "one", "from carol"]
    wrong = relay("inbox", "--as", "bob", "--take", "--from", "carol", home=home)
    assert wrong.returncode == 2 and "--from cannot be used with --take" in wrong.stderr


@pytest.mark.usefixtures("running")
def test_cancel_takes_an_unread_message_back(home: Path) -> None:
    sent = send(home, "bob", "deploy", "--kind", "command")
    done = relay("cancel", short(sent), "--as", "alice", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"message {sent} is cancelled: bob did not read it\n"
    assert not (home / "agents/bob/inbox" / f"{sent}.msg").exists()
    (fact,) = rows_of("show", sent, home=home)
    assert fact["recipients"] == {"bob": "cancelled for bob: by alice"}
    trace = relay("trace", sent, home=home).stdout
    assert "cancelled for bob: by alice" in trace
    again = relay("cancel", sent, "--as", "alice", home=home)
    assert again.returncode == 6
    assert (
        f"message {sent} is not cancelled: bob did not get it: cancelled by alice" in again.stderr
    )
    assert rows_of("open", home=home) == []


@pytest.mark.usefixtures("running")
def test_what_is_no_answer_and_which_of_several_decides(home: Path) -> None:
    """The last one does, and hides none in the trace."""
    asked = send(home, "bob", "which branch?", "--kind", "query")
    done = relay("ack", "--as", "bob", short(asked), "completed", home=home)
    assert done.returncode == 6
    assert f"message {asked} is a query" in done.stderr
    assert f"`relay --home {home} reply {asked} TEXT` does" in done.stderr
    assert (home / "agents/bob/inbox" / f"{asked}.msg").exists()

    assert relay("reply", "--as", "bob", asked, "main", home=home).returncode == 0
    assert relay("wait", asked, "done", home=home).returncode == 0  # the ledger has it
    again = relay("reply", "--as", "bob", asked, "dev", home=home)
    before = "relay: bob has answered it before, completed: {}: the last answer decides\n"
    assert again.returncode == 0 and again.stderr.endswith(before.format("main"))

    sent = send(home, "bob", "deploy", "--kind", "command")
    relay("ack", "--as", "bob", sent, "in_progress", home=home)
    relay("ack", "--as", "bob", sent, "completed", "shipped", home=home)
    assert relay("wait", sent, "done", home=home).returncode == 0
    again = relay("nack", "--as", "bob", sent, "it broke after that", home=home)
    assert (again.returncode, again.stderr) == (0, before.format("shipped"))
    until(lambda: "failed by bob" in relay("trace", sent, home=home).stdout)
    lines = relay("trace", sent, home=home).stdout.splitlines()
    said = [line[16:] for line in lines if "answered" in line or "acknowledged" in line]
    assert [re.sub(r" \(answer \w{8}\)$", "", one) for one in said] == [
        "answered by bob: ack, in_progress",
        "answered by bob: ack, completed shipped",
        "acknowledged by bob: failed, it broke after that",
    ]
