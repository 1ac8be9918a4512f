"""Agents' lives and saves as a person has them: the command line, a real relay, real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agent_sdk import Agent, Refused
from tests.procs import PATIENCE_S, Relay, agents_of, relay, rows_of, until

# a relay that scans every second, for which a process is dead after one
EAGER = {"detection": {"scan_interval_s": 1}, "agents": {"dead_after_s": 1}}

pytestmark = [
    pytest.mark.home("alice", "bob", **EAGER),
    pytest.mark.usefixtures("running"),
]


# its ledger is on a slow disk
SLOW = """
import sys, time
from relay.daemon import process
from relay.delivery.record import LedgerWriter

record = LedgerWriter.record
LedgerWriter.record = lambda *given: (time.sleep(0.5), record(*given))[1]
sys.argv[1:] = sys.argv[4:]
sys.exit(process.main())
"""


def test_what_a_command_did_is_what_the_next_one_shows(running: Relay, home: Path) -> None:
    running.stop()
    running.start(sys.executable, "-c", SLOW)
    for verb, status in (("retire", "retired"), ("revive", "active")):
        done = relay("agents", verb, "bob", home=home)
        assert done.returncode == 0, done.stderr
        assert agents_of(home)["bob"]["status"] == status


def test_retire_revive_and_register(home: Path) -> None:
    done = relay("agents", "retire", "bob", "--reason", "its work\tis done", home=home)
    assert (done.returncode, done.stdout) == (0, "bob is retired\n"), done.stderr
    until(lambda: agents_of(home)["bob"]["status"] == "retired")
    row = agents_of(home)["bob"]
    assert row["reason"] == "its work\tis done"
    assert row["status_since"] is not None
    table = relay("agents", home=home).stdout.splitlines()
    assert table[0].split() == ["NAME", "STATUS", "SINCE", "ROLE", "SEEN", "UNREAD", "DEAD", "NOTE"]
    (line,) = [line for line in table if line.startswith("bob")]
    assert "retired" in line and "its work\\tis done" in line
    with Agent("alice", home) as alice:
        sent = alice.send("bob", "hi")
        nack = alice.receive(PATIENCE_S)
        assert nack is not None and nack.re == sent and "bob is retired since" in nack.body
    done = relay("agents", "revive", "bob", "--json", home=home)
    assert json.loads(done.stdout)["answer"] == "bob is active"
    until(lambda: agents_of(home)["bob"]["reason"] is None)
    named = relay("register", "lead", home=home)
    assert "`TO: lead` means this agent; another spelling of Lead means the agent" in named.stderr
    role = relay("register", "bob", "--role", "lead", home=home)
    assert "`TO: lead` means the agent of that name; bob gets what is sent TO: Lead" in role.stderr


def test_an_agent_is_listed_before_a_relay_has_seen_it(running: Relay, home: Path) -> None:
    running.stop()
    assert relay("register", "carol", home=home).returncode == 0
    assert agents_of(home)["carol"]["status"] == "new"
    said = relay("agents", "show", "carol", home=home).stdout
    assert "no relay has run since its mailbox was made" in said
    running.start()
    assert agents_of(home)["carol"]["status"] == "active"


def test_what_the_sdk_saves_the_sdk_loads(home: Path) -> None:
    with Agent("bob", home) as bob:
        assert (bob.load_state(), bob.saved_states()) == (None, [])
        assert bob.save_state("one\n") == 1
        assert bob.save_state("zw\u00f6lf\r\n\n".encode()) == 2
        assert bob.load_state() == "zw\u00f6lf\r\n\n"
        assert bob.load_state(1) == "one\n"
        first, second = bob.saved_states()
        assert (first.version, first.size, second.version, second.size) == (1, 4, 2, 9)
        with pytest.raises(Refused, match="bob has no version 3: there are 1, 2"):
            bob.load_state(3)


def test_continuity_on_the_command_line(home: Path) -> None:
    done = relay("continuity", "load", "--as", "bob", home=home)
    assert done.returncode == 1
    saves = f"`relay --home {home} continuity save --as bob STATE` saves one"
    assert done.stderr == f"relay: bob has no saved state; {saves}\n"
    for words in ("continuity load --of bobb", "continuity list --of bobb"):
        done = relay(*words.split(), home=home)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"relay: there is no agent 'bobb' in {home}; did you mean bob?\n"
    done = relay("continuity", "list", "--as", "bob", home=home)
    assert (done.returncode, done.stderr) == (0, "bob has no saved state\n")
    done = relay("continuity", "save", "--as", "bob", "-", home=home, stdin="half\nway")
    assert (done.returncode, done.stdout) == (0, "saved as version 1 (8 bytes)\n"), done.stderr
    done = relay("continuity", "save", "--as", "bob", "--json", "more", home=home)
    assert json.loads(done.stdout) == {"agent": "bob", "version": 2, "bytes": 4}
    load = ("continuity", "load", "--version", "1")
    assert relay(*load, "--as", "bob", home=home).stdout == "half\nway"
    assert relay(*load, "--of", "bob", home=home).stdout == "half\nway"  # the operator may
    rows = rows_of("continuity", "list", "--as", "bob", home=home)
    assert [(row["agent"], row["version"], row["bytes"]) for row in rows] == [
        ("bob", 1, 8),
        ("bob", 2, 4),
    ]
    table = relay("continuity", "list", "--as", "bob", home=home).stdout.splitlines()
    assert len(table) == 3 and rows[0]["message_id"].partition("-")[2][:8] in table[1]
