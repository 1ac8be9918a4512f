"""``relay search``: with a relay and without, with an index and without."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from relay.base.config import Config, SearchSettings, StoreSettings
from relay.base.home import lock_home
from relay.search.index import Index
from tests.box import Box
from tests.procs import Relay, relay, relay_anew, send


def bodies(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [json.loads(line)["content"] for line in done.stdout.splitlines()]


def search(home: Path, *arguments: str) -> list[str]:
    """The texts found by the index, which has everything."""
    done = relay("search", "--json", *arguments, home=home)
    assert (done.returncode, done.stderr.replace("nothing found\n", "")) == (0, "")
    return bodies(done)


def indexed(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(home / "search.db")) as db:
        return int(db.execute("SELECT count(*) FROM messages").fetchone()[0])


def test_a_relay_that_runs_fills_the_index(home: Path) -> None:
    with Relay(home):
        for number in range(5):
            send(home, "bob", f"build {number} is green")
        send(home, "--kind", "command", "--thread", "r-42", "bob", "deploy to staging")
        assert len(search(home, "is green")) == 5
        assert search(home, "build 3 from:alice to:bob") == ["build 3 is green"]
        assert search(home, "kind:command is:unread") == ["deploy to staging"]
        assert search(home, "thread:r-42") == ["deploy to staging"]
        assert search(home, "--regex", "deploy|build [01]") == [
            *("deploy to staging", "build 1 is green", "build 0 is green")
        ]
        (row,) = relay("search", "deploy", "--json", home=home).stdout.splitlines()
        (other,) = relay("list", "deploy", "--json", home=home).stdout.splitlines()
        assert json.loads(row) == json.loads(other)
        assert indexed(home) == 6
    assert search(home, "is:unread deploy") == ["deploy to staging"]


def test_an_index_that_is_behind_says_so(box: Box) -> None:
    """A relay runs, and its index does not follow."""
    root = box.root
    box.send("alice", "TO: bob\n\nnumber 1")
    assert search(root, "number") == ["number 1"]
    box.send("alice", "TO: bob\n\nnumber 2")
    with lock_home(str(root)):  # others wait longer for the index
        done = relay_anew("search", "--json", "number", home=root)
    assert bodies(done) == ["number 1"]
    assert done.stderr.startswith("relay: 1 message since ")
    assert done.stderr.endswith(" not indexed yet\n")


def test_what_is_not_indexed_and_is_searched_is_found_in_the_store(box: Box) -> None:
    """As on a full disk, where the index does not follow."""
    box.send("alice", "TO: bob\n\nnumber 1")
    assert search(box.root, "number") == ["number 1"]
    box.send("alice", "TO: carol\nTHREAD: r-42\n\nnumber 2")
    with lock_home(str(box.root)):
        for words, found in (
            ("search number to:carol", 1),
            ("search number to:alice", 0),
            ("list thread:r-42", 1),
            ("unread", 2),
            ("unread --agent carol", 1),
            ("thread r-42", 1),
        ):
            done = relay_anew(*words.split(), home=box.root)
            assert done.stdout.count("number ") == found, words


@pytest.mark.damages
def test_a_damaged_index_is_named_and_made_again(box: Box) -> None:
    root = box.root
    box.send("alice", "TO: bob\n\nnumber 1")
    assert search(root, "number") == ["number 1"]
    box.stop()
    path = root / "search.db"
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 50_000)
    done = relay("doctor", home=root)
    assert "search.db" in done.stdout and "removes it; no message is lost" in done.stdout
    relay("doctor", "--repair", home=root)
    assert not path.exists()
    assert search(root, "number") == ["number 1"]
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 50_000)
    assert bodies(relay("search", "--json", "number", home=root)) == ["number 1"]
    assert search(root, "number") == ["number 1"]


SEALED = Config(store=StoreSettings(encrypt=True))
ASKED_FOR = Config(store=StoreSettings(encrypt=True), search=SearchSettings(sealed=True))


@pytest.mark.box("alice", "bob", config=SEALED)
def test_an_encrypted_store_has_no_index(box: Box) -> None:
    box.send("alice", "TO: bob\n\nswordfish")
    done = relay("search", "--json", "swordfish", home=box.root)
    assert bodies(done) == ["swordfish"]
    assert done.stderr.startswith("relay: searched the store itself: the store is encrypted")
    assert not (box.root / "search.db").exists()


@pytest.mark.box("alice", "bob", config=ASKED_FOR)
def test_unless_it_is_asked_for_and_until_it_is_not(box: Box) -> None:
    box.send("alice", "TO: bob\n\nswordfish")
    assert search(box.root, "swordfish") == ["swordfish"]
    assert (box.root / "search.db").exists()
    box.config = SEALED
    box.restart()
    assert not (box.root / "search.db").exists()


def test_a_backup_leaves_it_out(box: Box, tmp_path: Path) -> None:
    box.send("alice", "TO: bob\n\nnumber 1")
    assert search(box.root, "number") == ["number 1"]
    box.stop()
    copy, restored = tmp_path / "copy", tmp_path / "restored"
    assert relay("backup", str(copy), home=box.root).returncode == 0
    assert [path for path in copy.rglob("search*")] == []
    assert relay("restore", str(copy), home=restored).returncode == 0
    assert search(restored, "number") == ["number 1"]


def test_a_name_that_nobody_has_is_said_where_nothing_is_found(box: Box) -> None:
    done = relay("search", "from:bobb", home=box.root)
    assert done.stdout == "" and "there is no agent 'bobb'" in done.stderr
    assert "did you mean bob?" in done.stderr
    assert "there is no agent" not in relay("search", "from:bob", home=box.root).stderr


def test_an_index_that_another_search_reads_is_not_in_its_way(box: Box) -> None:
    box.send("alice", "TO: bob\n\nnumber 1")
    assert search(box.root, "number") == ["number 1"]
    with Index(str(box.root / "search.db")) as index:
        index.db.execute("BEGIN")
        index.count()
        box.send("alice", "TO: bob\n\nnumber 2")
        assert search(box.root, "number") == ["number 2", "number 1"]
        assert index.count() == 1
