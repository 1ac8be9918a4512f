"""Nothing that others wrote does anything to the terminal of who looks, in any command.

A home with control characters, C1 among them, and characters that turn text around, in every field
that takes them: bodies, statuses, reasons, descriptions, states, names of files, the output of
processes, and, as if somebody had been at the ledger with sqlite3, in its columns. Every command
that there is runs in a terminal over it; one that is not named here fails the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pexpect.fdpexpect import fdspawn

from agent_sdk import Agent
from relay.base.home import tag_of
from relay.base.text import UNSEEN
from relay.cli import cli
from tests.box import Box
from tests.procs import PATIENCE_S, Relay, home_of, relay, until
from tests.terminals import in_a_terminal

pytestmark = pytest.mark.xdist_group("hostile")  # one home for all

EVIL = "pwned\x1b]0;title\x07\x1b[2J\x9b31m\u202eright\u2066\u200b\x7f\x08"  # in one line
EVIL += "\ufe00\U000e0141\u3164\u2800end"  # printable, by Python, and not seen
CSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # what rich writes itself, to move and to colour
OWN_COLOURS = re.compile(r"\x1b\[(?:0|1|2|3[1-6])m")  # EVIL has others

# Command -> command lines; in this order, for the last ones end what the others need.
# {id}: a command with a hostile body; {dead}: a dead letter; {journal}, {store}: files of the home.
LINES: dict[str, tuple[list[str], ...]] = {
    "init": ([],),
    "up": ([],),
    "status": ([], ["--json"]),
    "agents": ([], ["--json"]),
    "agents show": (["bob"], ["bob", "--json"], [EVIL]),
    "agents retire": (["alice", "--reason", EVIL],),
    "agents revive": (["alice"],),
    "register": (["alice"], [EVIL]),
    "spawn": (["worker2", "--cli", EVIL, "--prompt", "x"],),
    "release": (["worker", "--reason", EVIL],),
    "ps": (["--all"], ["--all", "--json"]),
    "logs": (["worker"], [], [EVIL]),
    "send": (["bob", EVIL], ["bob" + EVIL, "hi"], ["bob", "hi", "--thread", EVIL]),
    "inbox": (["--as", "bob"], ["--as", "bob", "--json"], ["--as", "bob", "--take"], ["--take"]),
    "show": (["{dead}"], ["{id}"], ["{id}", "--json"], ["{bad}"], [EVIL]),
    "reply": (["--as", "bob", "{id}", EVIL], ["--as", "bob", EVIL, "x"]),
    "resend": (["{id}", "--to", "bob"], ["{id}", "--to", EVIL], [EVIL]),
    "wait": (["{id}", "read=1s"], ["{id}", "answer=1s"], [EVIL]),
    "attachment get": (["{id}"], ["sha256:" + EVIL], [EVIL]),
    "guide": (["--as", "bob"], ["--as", EVIL]),
    "mcp": (["--as", EVIL],),
    "ack": (["--as", "bob", EVIL],),
    "nack": (["--as", "bob", "{id}", EVIL],),
    "continuity save": (["--as", "bob", EVIL],),
    "continuity load": (["--of", "bob"], ["--of", "bob", "--json"]),
    "continuity list": (["--of", "bob"],),
    "trace": (["{id}"], ["{id}", "--json"], ["{bad}"], [EVIL]),
    "attention": ([], ["--json"], ["--count"]),
    "attention hush": ([EVIL], ["bob"]),
    "approve": (["--as", "bob", "{id}"], ["--as", "bob", EVIL], ["--as", "bob", "{id}", EVIL]),
    "deny": (["--as", "bob", "{id}"], ["--as", "bob", EVIL]),
    "tail": tuple(["--no-follow", "--since", "1h", *more] for more in ([], ["--json"], ["--body"])),
    "top": ([],),
    "watch": (["bob", "--no-follow"], ["bob", "--no-follow", "--json"], [EVIL]),
    "web": (["--uds", EVIL], ["--port", EVIL]),
    "list": ([], ["--json"], ["is:failed"], ["from:" + EVIL]),
    "thread": (["a-thread"], ["a-thread", "--json"], [EVIL]),
    "search": (["pwned"], ["pwned", "--json"], ["(" + EVIL]),
    "channel list": (["--all"], ["--json"]),
    "channel show": (["ci"], ["ci", "--json"], [EVIL]),
    "channel create": ([EVIL], ["cd", "description=" + EVIL]),
    "channel config": (["ci", "description=" + EVIL],),
    "channel join": (["ci"],),
    "channel leave": (["ci", "--agent", EVIL],),
    "channel subscribe": (["ci", EVIL],),
    "channel unsubscribe": (["ci", EVIL],),
    "channel pause": (["ci"],),
    "channel resume": ([EVIL],),
    "channel drain": (["cd"],),
    "channel close": (["cd"],),
    "open": ([], ["--json"]),
    "unread": ([], ["--json"], ["--agent", EVIL]),
    "failed": ([], ["--json"], ["--agent", EVIL], ["--since", EVIL]),
    "cancel": ([EVIL],),
    "dead list": ([], ["--json"]),
    "dead replay": ([EVIL],),
    "dead discard": ([EVIL],),
    "dead purge": (["--older-than", "7d"],),
    "check": ([], ["{store}", "{home}", EVIL], ["{journal}", "{home}", "--json"]),
    "build": (["{store}", "--from", "/dev/null"],),
    "dump": (["{store}"], ["{journal}"], ["{journal}/manifest"], ["{home}/ledger.db"], [EVIL]),
    "journal status": ([], ["--json"]),
    "journal seal": ([],),
    "journal move": (["--to", "1"], ["--to", "0", "1"], ["--to", EVIL], ["--to", "2"]),
    "journal prune": (["--dry-run"],),
    "config show": ([], ["--json"], ["lead"], [EVIL]),
    "config check": ([], ["--json"], ["/dev/null"]),
    "config set": (["lead", EVIL], ["store.key_file", EVIL], ["--unset", "store.key_file"], [EVIL]),
    "where": ([], ["--json"]),
    "service install": (["--print"],),
    "service uninstall": ([],),
    "ledger query": tuple(
        ["select * from messages", how] for how in ("--json", "--csv", "--table")
    ),
    "ledger backup": (["{home}/copy.db"],),
    "backup": (["{home}.copy"],),
    "prune": (["--dry-run"],),
    "hooks install": (["claude", "--dry-run"], ["--as", EVIL], [EVIL]),
    "hooks remove": (["--dry-run"], [EVIL]),
    "hooks status": ([], ["--json"], [EVIL]),
    "wake status": (["bob"], ["bob", "--json"], [EVIL]),
    "wake test": ([EVIL],),
    "bell": (["--as", EVIL],),
    "key make": (["alice"],),
    "key show": (["bob"], ["bob", "--json"]),
    "key trust": (["bob", "0" * 64],),
    "doctor": (["--deep"], ["--json"]),
    "audit digest": ([], ["--json"], ["--since", EVIL]),
    "audit list": ([],),
    "audit report": (["{home}/nothing"],),
    "audit extract": (["--lake", EVIL],),
    "sh": ([],),
    "completion": (["bash"], ["zsh"], [EVIL]),
    "help": ([], ["send"], [EVIL]),
    "down": ([],),
    "ledger restore": (["{home}/copy.db"],),
    "ledger rebuild": ([],),
    "restore": (["--force", "{home}.copy"],),
}
SHOWN_ELSEWHERE = {  # these begin Spark
    "audit run": "tests/audit/test_temp_folders.py and test_report.py",
    "audit watch": "tests/audit/test_watch.py",
}
# What is hostile is in their output, so that it was looked at.
SHOW_IT = (
    *("agents", "inbox", "continuity load", "trace", "top", "list", "thread", "search"),
    *("show", "unread", "open", "channel show", "dump", "check"),
    *("ledger query", "doctor", "key show", "agents show", "logs", "tail", "ps"),
    "status",
)


def commands() -> Iterator[str]:
    """Every command that there is, by its words."""

    def walk(command: click.Command, ctx: click.Context, words: list[str]) -> Iterator[str]:
        if isinstance(command, click.Group):
            if words and command.invoke_without_command:
                yield " ".join(words)
            for name in command.list_commands(ctx):
                found = command.get_command(ctx, name)
                assert found is not None
                yield from walk(found, click.Context(found, parent=ctx), [*words, name])
        else:
            yield " ".join(words)

    return walk(cli, click.Context(cli), [])


def tamper(path: Path) -> None:
    """As somebody with sqlite3 at hand: hostile words where the relay's own stand."""
    now = time.time_ns()
    with contextlib.closing(sqlite3.connect(path, timeout=30)) as db, db:
        db.execute(
            "UPDATE messages SET last_error = ?, last_error_code = ?, message_type = ?", [EVIL] * 3
        )
        db.execute(
            "INSERT INTO messages (message_id, agent_name, direction, file_path, file_size, "
            "file_mtime_ns, status, discovered_at, last_error) "
            "VALUES (?, 'alice', 'outbox', ?, 1, 1, 'pending', 1, ?)",
            (f"waits {EVIL}", EVIL, EVIL),
        )
        db.execute("UPDATE deliveries SET last_error = ?, answer_text = ?", (EVIL, EVIL))
        db.execute("UPDATE agents SET note = ?, reason = ?", (EVIL, EVIL))
        db.execute("UPDATE processes SET last_error = ?, cwd = ?, cli = ?", (EVIL, EVIL, EVIL))
        db.execute(
            "INSERT INTO security_events (at, kind, agent, path, detail) VALUES (?, ?, ?, ?, ?)",
            (now, *[EVIL] * 4),
        )
        db.execute(
            "INSERT INTO rejections VALUES (?, ?, 1, 1, ?, ?, 1, ?)",
            (EVIL, "1-a.msg", *[EVIL] * 3),
        )
        db.execute(
            "INSERT INTO audit_log (at, message_id, new_status, who) VALUES (?, ?, ?, ?)",
            (now, *[EVIL] * 3),
        )
    db.close()


@pytest.fixture(scope="module")
def hostile() -> Iterator[dict[str, str]]:
    """The home, and what command lines name of it."""
    root = Path(tempfile.mkdtemp(prefix="relay-"))
    before = dict(os.environ)
    os.environ |= {"HOME": str(root), "XDG_CONFIG_HOME": str(root / "config")}
    home = home_of(root / "home", "alice", "bob")
    dead = given_up(home)
    running = Relay(home)
    running.start()
    try:
        yield {"dead": dead, **fill(home, root)}
    finally:
        running.kill()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(root)


def given_up(home: Path) -> str:
    """A dead letter, made while no other relay runs; its id."""
    box = Box(home)
    dead = box.send("alice", f"TO: bob\nKIND: command\nDELIVERY: at-least-once\n\n{EVIL}")
    box.until_dead()
    box.close()
    return dead


def fill(home: Path, root: Path) -> dict[str, str]:
    """Everything hostile that agents and operators can say, through the ways that they have."""
    relay("channel", "create", "ci", "--type", "pubsub", f"description={EVIL}", home=home)
    prompt = f"printf '%s\\n' '{EVIL}'; exit 3"
    relay("spawn", "worker", "--cli", "sh", "--prompt", prompt, home=home)
    (root / f"file {EVIL}").write_text("x")
    with Agent("alice", home) as alice, Agent("bob", home) as bob:
        sent = alice.send("bob", EVIL, kind="command", thread="a-thread")
        alice.send("bob", EVIL, kind="command", ttl_s=1, headers={"X-NOTE": "\u202ex"})
        alice.status(EVIL)
        bob.send("nobody", EVIL)
        bob.save_state(EVIL, PATIENCE_S)
        alice.send("operator", EVIL, attachments=[alice.attach(root / f"file {EVIL}")])
        alice.send("*", EVIL)
        alice.wait(sent, f"delivered={PATIENCE_S}s")
    outbox = home / "agents" / "alice" / "outbox"
    (outbox / f"bad {EVIL}.msg").write_text("TO: bob\n\nhi")
    (outbox / "1700000000000000000-bad.msg").write_text(f"TO: bob\nTHREAD: {EVIL}\n\nhi")
    (outbox / "1700000000000000000-bae.msg").write_text(f"{EVIL}\n\nhi")
    (outbox / f"no message {EVIL}").write_text("x")
    os.utime(outbox / f"no message {EVIL}", (1, 1))
    (home / "agents" / f"agent {EVIL}" / "outbox").mkdir(parents=True)
    (home / "agents" / f"agent {EVIL}" / "outbox" / "1-a.msg").write_text("x")
    forged = f"ID: 1700000000000000001-aa\nFROM: {EVIL}\nTO: bob\nKIND: {EVIL}\n\n{EVIL}"
    (home / "agents" / "bob" / "inbox" / "1700000000000000001-aa.msg").write_text(forged)
    until(lambda: "worker" in relay("inbox", "--json", home=home).stdout)
    until(lambda: not (outbox / "1700000000000000000-bae.msg").exists())
    meta = {"role": EVIL, "public_key": EVIL, "pid": 4_194_304, "pid_start_ticks": 1}
    (home / "agents" / "bob" / "meta.json").write_text(json.dumps(meta, ensure_ascii=False))
    unit = root / "config/systemd/user" / f"agent-relay-{tag_of(str(home))}.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f"# {EVIL}\n")
    tamper(home / "ledger.db")
    return {
        "home": str(home),
        "id": sent,
        "bad": "1700000000000000000-bad",
        "store": str(home / "store" / "relay.acomm"),
        "journal": str(home / "journal" / f"{1:020}"),
    }


def quit_top(view: fdspawn[bytes]) -> None:
    view.expect("AGENT")
    view.expect("worker")
    view.send("q")


def test_no_command_is_forgotten() -> None:
    assert sorted(commands()) == sorted([*LINES, *SHOWN_ELSEWHERE])
    assert set(SHOW_IT) <= set(LINES)


@pytest.mark.parametrize("command", LINES)
def test_nothing_of_others_reaches_a_terminal_as_it_is(
    command: str, hostile: dict[str, str]
) -> None:
    shown = ""
    for line in LINES[command]:
        words = [word.format(**hostile) if word[:1] == "{" else word for word in line]
        more = {"meanwhile": quit_top} if command == "top" else {}
        _, text = in_a_terminal(hostile["home"], *command.split(), *words, size=(50, 200), **more)
        assert "Traceback" not in text
        own = CSI if command == "top" else OWN_COLOURS
        seen = own.sub("", text.replace("\r\n", "\n"))
        raw = {c for c in seen if (not c.isprintable() or c in UNSEEN) and c not in "\n\t"}
        assert raw - ({"\r", "\n"} if command == "top" else set()) == set(), (words, text)
        shown += text
    assert "pwned" in shown or command not in SHOW_IT
