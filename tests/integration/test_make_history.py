"""A history that was made is a home like any other: the relay starts on it and goes on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from scripts.history.make import Given, History
from tests.procs import PROJECT, Relay, environment, relay, until

pytestmark = pytest.mark.shows("audit 2.6")
NOVEMBER_NS = 1_793_556_000 * 10**9  # 2026-11-01T18:00:00Z


def made(root: Path, seed: int = 0, messages: int = 300) -> Path:
    """A history of three days that ended long ago."""
    History(str(root), Given(messages, 6, 3, NOVEMBER_NS, seed)).make()
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Every file of a home, by its path below it."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.*")
            if path.is_file()}  # fmt: skip


def test_the_relay_starts_on_it_and_continues(tmp_path: Path) -> None:
    home = made(tmp_path / "home")
    assert relay("doctor", home=home).stdout == "OK\n"
    stream = home / "journal" / f"{1:020d}"
    assert relay("check", str(stream), home=home).returncode == 0
    with Relay(home):
        sent = relay("send", "lead", "are you there?", home=home)
        assert sent.returncode == 0, sent.stderr
        inbox = home / "agents" / "lead" / "inbox" / f"{sent.stdout.strip()}.msg"
        until(inbox.exists)
        until(lambda: "are you there?" in relay("list", home=home).stdout)
    with closing(sqlite3.connect(home / "ledger.db")) as db:
        assert db.execute("SELECT count(*), max(id) FROM messages").fetchone() == (301, 301)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_the_same_seed_gives_the_same_home(tmp_path: Path) -> None:
    first = contents(made(tmp_path / "a", seed=5, messages=100))
    again = contents(made(tmp_path / "b", seed=5, messages=100))
    assert first.keys() == again.keys()
    assert [name for name, data in first.items() if again[name] != data] == []
    other = contents(made(tmp_path / "c", seed=6, messages=100))
    assert other["ledger.db"] != first["ledger.db"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--agents", "1", "X"), "needs a message, four agents"),
        (("--faults", "lsot", "X"), "there is no fault 'lsot'"),
        (("EXISTS",), "is there already"),
    ],
)
def test_bad_arguments_give_one_line_and_no_home(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "EXISTS").mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "scripts.history", *arguments],
        env=environment(PYTHONPATH=str(PROJECT)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert said in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "X").exists()
