"""Agents' lives and saves as a person has them: the command line, a real relay, real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sdk import Agent
from tests.procs import agents_of, environment, relay, rows_of, until

# a relay that scans every second, for which a process is dead after one
EAGER = {"detection": {"scan_interval_s": 1}, "agents": {"dead_after_s": 1}}

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.home("alice", "bob", **EAGER),
    pytest.mark.usefixtures("running"),
]


def test_retire_and_revive(home: Path) -> None:
    done = relay("agents", "retire", "bob", "--reason", "its work\tis done", home=home)
    assert (done.returncode, done.stdout) == (0, "bob is retired\n"), done.stderr
    row = agents_of(home)["bob"]
    assert (row["status"], row["reason"]) == ("retired", "its work\tis done")
    assert row["status_since"] is not None
    table = relay("agents", home=home).stdout.splitlines()
    assert table[0].split() == ["NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE"]
    (line,) = [line for line in table if line.startswith("bob")]
    assert "retired" in line and "its work\\tis done" in line
    with Agent("alice", home) as alice:
        sent = alice.send("bob", "hi")
        nack = alice.receive(30)
        assert nack is not None and nack.re == sent and "bob is retired since" in nack.body
    done = relay("agents", "revive", "bob", "--json", home=home)
    assert json.loads(done.stdout)["answer"] == "bob is active"
    assert agents_of(home)["bob"]["reason"] is None


def test_register_says_who_gets_mail_to_lead(home: Path) -> None:
    named = relay("register", "lead", home=home)
    assert "`TO: lead` means this agent; another spelling of Lead means the agent" in named.stderr
    role = relay("register", "bob", "--role", "lead", home=home)
    assert "`TO: lead` means the agent of that name; bob gets what is sent TO: Lead" in role.stderr


def test_all_of_one_agent_is_on_a_page(home: Path) -> None:
    relay("register", "bob", "--role", "lead", home=home)
    relay("channel", "create", "ci", home=home)
    relay("channel", "join", "ci", "--as", "bob", home=home)
    asked = relay("send", "bob", "--kind", "command", "deploy", home=home).stdout.strip()
    with Agent("bob", home, registers=False) as bob:
        sent = bob.send("alice", "hi")
        until(lambda: rows_of("agents", "show", "alice", home=home)[0]["unread"] == 1)
        until(lambda: rows_of("agents", "show", "bob", home=home)[0]["channels"] == ["ci"])
        page = rows_of("agents", "show", "bob", home=home)[0]
        (row,) = [row for row in rows_of("agents", home=home) if row["name"] == "bob"]
        assert page | row == page
        names = ("role", "unread", "owed", "overdue", "dead", "outbox", "channels", "process")
        assert [page[name] for name in names] == ["lead", 1, 1, 0, 0, 0, ["ci"], None]
        latest = {one["id"]: one for one in page["latest"]}
        assert latest[sent]["outcome"] == latest[asked]["outcome"] == "delivered"
        assert bob.receive(5) is not None
    until(lambda: rows_of("agents", "show", "bob", home=home)[0]["unread"] == 0)
    shown = relay("agents", "show", "bob", home=home).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[:2] == ["bob", "status active, lead"]
    assert lines[2].startswith("seen ") and lines[2].endswith(" ago")
    assert "inbox 0 unread" in lines and "channels ci" in lines
    assert any(line.startswith("owes 1 answer, the oldest for ") for line in lines)
    short = asked.partition("-")[2][:8]
    assert any(re.fullmatch(f"{short} .* operator bob command read", line) for line in lines)
    wrong = relay("agents", "show", "bbo", home=home)
    assert wrong.returncode == 1 and "did you mean bob?" in wrong.stderr


def test_a_program_that_is_killed_is_told_of_and_a_short_call_is_not_a_death(home: Path) -> None:
    program = (
        "import sys\nfrom agent_sdk import Agent\n"
        "bob = Agent('bob', sys.argv[1])\nprint('here', flush=True)\nbob.receive()"
    )
    command = [sys.executable, "-c", program, str(home)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    until(lambda: agents_of(home)["bob"]["pid"] == process.pid)
    assert relay("send", "--as", "alice", "operator", "hi", home=home).returncode == 0
    process.kill()
    process.communicate()
    until(lambda: agents_of(home)["bob"]["status"] == "terminated")
    rows = agents_of(home)
    assert f"its process {process.pid} ended" in rows["bob"]["reason"]
    assert rows["alice"]["status"] == "active"  # a command line is nobody's process
    with Agent("alice", home) as alice:
        alice.send("bob", "hi")
        nack = alice.receive(30)
        assert nack is not None and "bob is terminated since" in nack.body
        with Agent("bob", home) as bob:
            alice.send("bob", "are you back?")
            message = bob.receive(30)
            assert message is not None
            while message is not None and message.sender != "alice":  # the welcome may come first
                message = bob.receive(30)
            assert message is not None and message.body == "are you back?"


def test_continuity_on_the_command_line(home: Path) -> None:
    done = relay("continuity", "load", "--as", "bob", home=home)
    assert done.returncode == 1
    assert done.stderr.startswith("relay: bob has no saved state") and done.stderr.count("\n") == 1
    done = relay("continuity", "list", "--as", "bob", home=home)
    assert (done.returncode, done.stderr) == (0, "bob has no saved state\n")
    done = relay("continuity", "save", "--as", "bob", "-", home=home, stdin="half\nway")
    assert (done.returncode, done.stdout) == (0, "saved as version 1 (8 bytes)\n"), done.stderr
    done = relay("continuity", "save", "--as", "bob", "--json", "more", home=home)
    assert json.loads(done.stdout) == {"agent": "bob", "version": 2, "bytes": 4}
    load = ("continuity", "load", "--version", "1")
    assert relay(*load, "--as", "bob", home=home).stdout == "half\nway"
    assert relay(*load, "--of", "bob", home=home).stdout == "half\nway"  # the operator may
    done = relay(*load, "--of", "bob", "--as", "alice", home=home)
    assert done.returncode == 6 and "load of NAME 'bob' is not for alice" in done.stderr
    rows = rows_of("continuity", "list", "--as", "bob", home=home)
    assert [(row["agent"], row["version"], row["bytes"]) for row in rows] == [
        ("bob", 1, 8),
        ("bob", 2, 4),
    ]
    table = relay("continuity", "list", "--as", "bob", home=home).stdout.splitlines()
    assert len(table) == 3 and rows[0]["message_id"].partition("-")[2][:8] in table[1]
