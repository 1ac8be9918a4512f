"""Sending: what stands in the outbox, when, and what a fault leaves there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_sdk import Agent, MessageError
from relay.base import fsio
from relay.base.clock import Clock
from relay.base.errors import HomeMissing, InvalidName, LedgerError, NotFound, RelayError
from relay.base.home import Home
from relay.base.message import parse
from relay.base.names import sha256_hex
from relay.base.process_info import pid_namespace, started_at
from tests.agent_sdk.support import (
    FIRST_NS,
    HandRelay,
    fail_at,
    pauses,
    says_the_disk_is_full,
)
from tests.disk import failing, killed_at

pytestmark = pytest.mark.shows("ready 1.1")

ROOT = Path(__file__).parents[2]


class StillClock(Clock):
    """Shows what the test sets."""

    def __init__(self) -> None:
        self.at_ns = FIRST_NS

    def now_ns(self) -> int:
        return self.at_ns


def test_a_message_is_a_file_in_the_outbox(relay: HandRelay, alice: Agent) -> None:
    body = "line one\n\nline two\n"
    sent = alice.send(
        "bob", body, kind="command", thread="t-1", priority=0,
        topic="build.ok", ttl_s=60, delivery="at-least-once", due_s=30,
        headers={"x-tool": "make"},
    )  # fmt: skip
    (name,) = relay.waiting("alice", "outbox")
    assert name == f"{sent}.msg"
    path = relay.box("alice", "outbox") / name
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == (
        "TO: bob\nKIND: command\nTHREAD: t-1\nPRIORITY: 0\nTOPIC: build.ok\nTTL: 60\n"
        "DELIVERY: at-least-once\nAWAIT: 30s\nX-TOOL: make\n"
        f"CHECKSUM: sha256:{sha256_hex(body.encode())}\n\n{body}"
    )
    assert relay.waiting("alice", "outbox/.pending") == []


def test_ids_grow_although_the_clock_goes_back(relay: HandRelay) -> None:
    clock = StillClock()
    with Agent("alice", relay.root, clock=clock) as alice:
        sent = [alice.send("bob", "1"), alice.send("bob", "2")]
        clock.at_ns -= 10**12
        sent.append(alice.send("bob", "3"))
        clock.at_ns = FIRST_NS + 10
        sent.append(alice.send("bob", "4"))
    assert [int(one.split("-")[0]) - FIRST_NS for one in sent] == [0, 1, 2, 10]
    assert relay.waiting("alice", "outbox") == [f"{one}.msg" for one in sent]


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("b ob", "x", {}, "is not an address"),
    ("bob", "", {}, "the body is empty"),
    ("bob", b"\xff", {}, "not UTF-8"),
    ("bob", "\ud800", {}, "not valid UTF-8"),
    ("bob", "x" * 1_048_577, {}, "put it into an attachment"),
    ("bob", "x", {"kind": "shout"}, "'shout' is not one of message, command"),
    ("bob", "x", {"ttl_s": 0}, "of 1 s at least"),
    ("bob", "x", {"headers": {"A": "1\n2"}}, "line break"),
    ("bob", "x", {"headers": {"A": "\ud800"}}, "not valid UTF-8"),
    ("bob", "x", {"headers": {"From": "carol"}}, "written by the relay only"),
    ("bob", "x", {"headers": {"KIND": "query"}}, "has its own argument"),
    ("bob", "x", {"thread": "t", "headers": {"Thread": "u"}}, "has its own argument"),
    ("bob", "x", {"attachments": ["/etc/hosts"]}, "attach() first"),
    (None, "x", {}, "to is None, expected str"),
    ("bob", 5, {}, "body is 5, expected str or bytes"),
    *(
        ("bob", "x", {"due_s": due}, f"due_s is {due!r}, expected a number of seconds from 0.001")
        for due in (-1, 0, 0.0004, float("nan"), float("inf"), "soon")
    ),
]


def test_a_bad_message_is_an_error_here_and_never_sent(relay: HandRelay, alice: Agent) -> None:
    for to, body, options, says in BAD:
        with pytest.raises(MessageError) as error:
            alice.send(to, body, **options)
        assert says in str(error.value)
    assert relay.waiting("alice", "outbox") == []
    assert relay.waiting("alice", "outbox/.pending") == []


def test_the_limit_for_a_body_is_the_relays_own(relay: HandRelay) -> None:
    (relay.root / "config.json").write_text('{"limits": {"max_body_bytes": 4}}')
    with Agent("alice", relay.root) as alice:
        alice.send("bob", "1234")
        with pytest.raises(MessageError, match="5 bytes, at most 4"):
            alice.send("bob", "12345")


def test_an_attachment_must_be_there(relay: HandRelay, alice: Agent) -> None:
    with pytest.raises(NotFound):
        alice.send("bob", "see there", attachments=["sha256:" + "0" * 64])
    reference = alice.attach(b"\0\1")
    sent = alice.send("bob", "see there", attachments=[reference])
    data = (relay.box("alice", "outbox") / f"{sent}.msg").read_bytes()
    assert parse(data).attachments == (reference,)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_full_disk_is_waited_for(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent, operation: str
) -> None:
    slept = pauses(monkeypatch)
    fail_at(monkeypatch, operation, 1, *[errno.ENOSPC] * 3)
    with says_the_disk_is_full():
        sent = alice.send("bob", "hello")
    assert slept == [0.1, 0.2, 0.4]
    assert relay.waiting("alice", "outbox") == [f"{sent}.msg"]
    assert relay.waiting("alice", "outbox/.pending") == []


def test_a_disk_that_stays_full_is_an_error_and_leaves_nothing(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Agent("alice", relay.root, disk_full_retry_s=2) as alice:
        slept = pauses(monkeypatch)
        fail_at(monkeypatch, "sync", 1, *[errno.ENOSPC] * 99)
        with pytest.raises(OSError, match="No space left"), says_the_disk_is_full(2):
            alice.send("bob", "hello")
        assert sum(slept) == pytest.approx(2)
        assert relay.waiting("alice", "outbox") == []
        assert relay.waiting("alice", "outbox/.pending") == []
        monkeypatch.undo()
        alice.send("bob", "hello again")


def test_a_full_disk_is_waited_for_at_the_start_too(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = pauses(monkeypatch)
    fail_at(monkeypatch, "create", 1, errno.ENOSPC)
    with says_the_disk_is_full():
        alice = Agent("alice", relay.root)
    with alice:
        alice.send("bob", "hello")
    assert slept == [0.1]


def test_a_file_that_was_taken_for_an_orphan_meanwhile_is_written_once_more(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    pending = relay.box("alice", "outbox") / ".pending"
    held_up = ["rename"]

    def fault(name: str, _: str) -> None:
        if held_up == [name]:  # for 30 s, after which the relay removes it
            held_up.clear()
            for left in pending.iterdir():
                left.unlink()

    monkeypatch.setattr(fsio, "fault", fault)
    sent = alice.send("bob", "hello")
    assert held_up == []
    assert relay.waiting("alice", "outbox") == [f"{sent}.msg"]
    assert relay.waiting("alice", "outbox/.pending") == []


def test_other_errors_come_out_at_once(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    slept = pauses(monkeypatch)
    fail_at(monkeypatch, "rename", 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        alice.send("bob", "hello")
    assert slept == []
    assert relay.waiting("alice", "outbox/.pending") == []


def test_after_the_rename_it_is_sent_even_if_the_directory_cannot_be_synced(
    relay: HandRelay, monkeypatch: pytest.MonkeyPatch, alice: Agent
) -> None:
    fail_at(monkeypatch, "sync_dir", 1, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as error:
        alice.send("bob", "hello")
    (name,) = relay.waiting("alice", "outbox")
    assert error.value.__notes__ == [
        f"message {name.removesuffix('.msg')} has been sent: do not send it again"
    ]


def test_killed_before_the_rename_nothing_is_sent(relay: HandRelay, alice: Agent) -> None:
    killed_at(1, lambda: alice.send("bob", "hello"), "rename")
    assert relay.waiting("alice", "outbox") == []
    assert len(relay.waiting("alice", "outbox/.pending")) == 1  # the relay removes it after 30 s


def test_a_mailbox_that_is_gone_is_said_so(relay: HandRelay, alice: Agent) -> None:
    (relay.root / "agents" / "alice").rename(relay.root / "gone")
    with pytest.raises(RelayError, match="the outbox of agent alice no longer exists"):
        alice.send("bob", "hello")
    with pytest.raises(RelayError, match="the inbox of agent alice no longer exists"):
        alice.receive(timeout_s=0)


def test_who_it_is_stands_in_meta_json_beside_what_others_put_there(relay: HandRelay) -> None:
    Agent("alice", relay.root, clock=StillClock()).close()
    meta = relay.root / "agents" / "alice" / "meta.json"
    meta.write_text('{"pid": 1, "role": "lead", "public_key": "k"}')
    others = {"role": "lead", "public_key": "k", "started_at": FIRST_NS}
    with Agent("alice", relay.root, clock=StillClock()):
        own = {"pid": os.getpid(), "pid_start_ticks": started_at(os.getpid())}
        own["pid_namespace"] = pid_namespace()
        assert json.loads(meta.read_text()) == others | own
        assert meta.stat().st_mode & 0o777 == 0o600
    assert json.loads(meta.read_text()) == others


def test_who_leaves_takes_nobody_else_out(relay: HandRelay) -> None:
    meta = relay.root / "agents" / "alice" / "meta.json"
    alice = Agent("alice", relay.root)
    meta.write_text('{"pid": 1, "pid_start_ticks": 7}')  # another process is alice now
    alice.close()
    assert json.loads(meta.read_text()) == {"pid": 1, "pid_start_ticks": 7}
    alice = Agent("alice", relay.root)
    meta.write_text("[no object]")
    alice.close()
    assert meta.read_text() == "[no object]"


@pytest.mark.parametrize(
    ("end", "is_registered"),
    [("raise SystemExit(3)", False), ("os.kill(os.getpid(), 9)", True)],
)
def test_a_program_that_ends_leaves_though_it_closes_nothing(
    relay: HandRelay, end: str, is_registered: bool
) -> None:
    program = f"import os\nfrom agent_sdk import Agent\nbob = Agent('bob', {str(relay.root)!r})\n"
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program + end], cwd=root, check=False)
    meta = json.loads((relay.root / "agents" / "bob" / "meta.json").read_text())
    assert ("pid" in meta) is is_registered


@pytest.mark.parametrize("damaged", ["{", "[1]"])
def test_a_damaged_meta_json_is_set_aside(relay: HandRelay, damaged: str) -> None:
    Agent("alice", relay.root).close()
    folder = relay.root / "agents" / "alice"
    (folder / "meta.json").write_text(damaged)
    with Agent("alice", relay.root):
        assert (folder / "meta.json.bad").read_text() == damaged
        assert json.loads((folder / "meta.json").read_text())["pid"] == os.getpid()


def test_no_home_and_no_name_are_errors(relay: HandRelay, tmp_path: Path) -> None:
    with pytest.raises(HomeMissing):
        Agent("alice", tmp_path / "elsewhere")
    with pytest.raises(InvalidName):
        Agent("../alice", relay.root)
    assert relay.root.joinpath("agents").exists()


def test_who_acts_for_another_process_leaves_meta_json_alone(
    relay: HandRelay, alice: Agent
) -> None:
    meta = relay.root / "agents" / "alice" / "meta.json"
    before = meta.read_bytes()
    with Agent("alice", relay.root, registers=False) as other:
        other.send("bob", "hi")
    assert meta.read_bytes() == before
    alice.send("bob", "hi")


def test_a_closed_agent_says_so(relay: HandRelay) -> None:
    alice = Agent("alice", relay.root)
    alice.close()
    alice.close()
    for call in (
        lambda: alice.send("bob", "hi"),
        lambda: alice.send_many([{"to": "bob", "body": "hi"}]),
        lambda: alice.receive(0),
        lambda: alice.attach(b"data"),
        lambda: alice.query("bob", "hi", 1),
        lambda: alice.join("team"),
    ):
        with pytest.raises(RelayError, match=r"^this Agent is closed$"):
            call()


def test_a_program_that_begins_loses_no_change_of_meta_json(alice: Agent) -> None:
    """As of `relay key make`, which prints the key that it has written."""
    meta = Path(alice.home, "agents/bob/meta.json")
    with Home(alice.home) as home:
        home.make_agent("bob")
        with home.changing("agents", "bob"):
            begins = threading.Thread(target=lambda: agents.append(Agent("bob", alice.home)))
            agents: list[Agent] = []
            begins.start()
            begins.join(0.2)
            meta.write_text('{"public_key": "k"}')
        begins.join()
    with agents[0]:
        assert json.loads(meta.read_text()).keys() >= {"public_key", "pid"}


@pytest.mark.parametrize(
    "text",
    ["[1]", '{"pid": "x"}', '{"pid": [1]}', pytest.param("[" * 60_000, id="deep"), "\xff"],
)
def test_a_meta_json_that_says_nothing_stops_no_call(
    alice: Agent, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    meta = Path(alice.home, "agents/alice/meta.json")
    meta.write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(alice._home, "_checked_at", -10.0)
    assert alice.receive(0) is None
    assert meta.read_bytes() == text.encode("latin-1")


def test_a_home_that_cannot_be_entered_is_entered_by_the_next_call(tmp_path: Path) -> None:
    for name in ("home", "restored"):
        Home.create(str(tmp_path / name)).close()
    with Agent("alice", tmp_path / "home") as alice, alice._home.dirs() as of_another_thread:
        (tmp_path / "home").rename(tmp_path / "aside")
        (tmp_path / "restored").rename(tmp_path / "home")
        with failing("create", "meta.json"), pytest.raises(OSError, match="No space left"):
            alice.receive(0)
        assert alice.receive(0) is None
        assert os.listdir(of_another_thread.get("agents", "alice", "inbox"))  # not closed under it
        meta = json.loads((tmp_path / "home/agents/alice/meta.json").read_text())
        assert meta["pid"] == os.getpid()


def test_an_uncaught_error_shows_its_remedy(tmp_path: Path) -> None:
    program = f"from agent_sdk import Agent\nAgent('alice', {str(tmp_path / 'none')!r})\n"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-2:] == [
        f"relay.base.errors.HomeMissing: there is no relay home at {tmp_path}/none",
        "run `relay init`, or name another home with --home",
    ]


def test_an_empty_path_is_no_home() -> None:
    """It comes from an unset variable; the usual home would be another one than was meant."""
    with pytest.raises(HomeMissing, match="home is empty: expected the path of a directory"):
        Agent("alice", home="")


@pytest.mark.damages
def test_waiting_with_a_damaged_ledger_is_a_ledger_error(alice: Agent) -> None:
    Path(alice.home, "ledger.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
    with pytest.raises(LedgerError, match=r"ledger\.db: "):
        alice.wait("1706123456789012345-a1b2c3d4", "read=1s")


def test_killed_while_it_registers_it_leaves_what_the_relay_removes(relay: HandRelay) -> None:
    program = (
        "import os\nfrom agent_sdk import Agent\nfrom relay.base import fsio\n"
        "fsio.rename = lambda *names: os.kill(os.getpid(), 9)\n"
        f"Agent('bob', {str(relay.root)!r})\n"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], cwd=root, check=False)
    (left,) = relay.box("bob", "outbox/.pending").iterdir()
    assert left.name.startswith("meta.json.")
    assert sorted(os.listdir(relay.root / "agents/bob")) == ["inbox", "outbox"]
