"""Whose the home's directories are, and open to whom: repaired, refused or left out, and said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base import directory_guard
from relay.base.errors import ForeignOwner, UnsafePath
from tests.box import Box
from tests.procs import Relay, home_of, inbox_of, relay, until


def kinds(box: Box) -> list[tuple[str, str, str]]:
    return box.sql("SELECT kind, agent, path FROM security_events ORDER BY id")


def open_to_all(root: Path) -> list[Path]:
    """Every directory 755, every file 644; what they are."""
    paths = [Path(folder) / name for folder, dirs, files in os.walk(root) for name in dirs + files]
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return paths


def is_private(path: Path) -> bool:
    return path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


@pytest.mark.shows("ready 4.1")
def test_at_a_start_everything_is_narrowed_and_said(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.flush()
    box.path("agents", "alice", "meta.json").write_text("{}")
    box.path("logs", "relay.log").write_text("")
    box.path("attachments", "aa").mkdir()
    open_to_all(box.root)
    box.root.chmod(0o755)
    said = directory_guard.secure(box.home)
    assert {one.kind for one in said} == {"mode_repaired"}
    assert is_private(box.root)
    assert ("mode_repaired", ".", "the home itself was open to others") in [
        (one.kind, one.path, one.detail) for one in said
    ]
    for path in (
        *("config.json", "store", "store/relay.acomm", "logs/relay.log", "ledger.db"),
        *("agents/alice", "agents/alice/outbox/.pending", "agents/alice/inbox/.read"),
        *("agents/alice/meta.json", "attachments/aa"),
    ):
        assert is_private(box.path(path)), path
        assert [one.path for one in said].count(path) == 1, path
    assert all(is_private(path) for path in box.path("journal").rglob("*"))
    (text,) = (one.detail for one in said if one.path == "store/relay.acomm")
    assert text == "store/relay.acomm was open to others, its mode is 600 now"
    assert directory_guard.secure(box.home) == []


def test_a_link_in_the_place_of_the_store_refuses_a_start(box: Box, tmp_path: Path) -> None:
    os.rename(box.path("store"), tmp_path / "elsewhere")
    box.path("store").symlink_to(tmp_path / "elsewhere")
    before = sorted((p, p.stat().st_mode) for p in (tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(UnsafePath, match=r"^store is a link$"):
        directory_guard.secure(box.home)
    assert sorted((p, p.stat().st_mode) for p in (tmp_path / "elsewhere").rglob("*")) == before
    box.path("store").unlink()
    os.rename(tmp_path / "elsewhere", box.path("store"))
    box.path("journal", "x").symlink_to(tmp_path)
    with pytest.raises(UnsafePath, match=r"^journal/x is a link$"):
        directory_guard.secure(box.home)


def test_a_store_of_another_user_refuses_a_start(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ForeignOwner, match=f"belongs to user {owner}, not to {owner + 1}"):
        directory_guard.secure(box.home)


def test_a_hard_link_in_the_store_is_left_alone_and_said(box: Box, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    other.chmod(0o644)
    box.path("store", "copy").hardlink_to(other)
    (one,) = directory_guard.secure(box.home)
    assert (one.kind, one.path) == ("hard_link", "store/copy")
    assert other.stat().st_mode & 0o777 == 0o644


def test_the_relay_does_not_start_with_a_linked_store_and_says_so_in_a_line(tmp_path: Path) -> None:
    home = home_of(tmp_path / "home", "alice")
    shutil.rmtree(home / "store")
    (tmp_path / "elsewhere").mkdir()
    (home / "store").symlink_to(tmp_path / "elsewhere")
    done = relay("up", home=home)
    assert done.returncode != 0
    assert "store is a link" in done.stderr and "Traceback" not in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.home("alice", "bob", checkpoint_ms=10_000)
def test_a_store_that_becomes_a_link_while_it_runs_is_not_written_through(
    running: Relay, home: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rename(home / "store", tmp_path / "kept")
    (home / "store").symlink_to(elsewhere)
    relay("send", "bob", "hi", "--as", "alice", home=home)
    log = home / "logs" / "relay.log"
    until(lambda: "store is a link" in relay("status", home=home).stdout + log.read_text())
    assert list(elsewhere.iterdir()) == []
    (home / "store").unlink()
    os.rename(tmp_path / "kept", home / "store")
    until(lambda: inbox_of(home, "bob"))
    assert running.stop() == 0
    assert list(elsewhere.iterdir()) == []


def test_a_journal_that_is_replaced_ends_the_session(box: Box, tmp_path: Path) -> None:
    os.rename(box.path("journal"), tmp_path / "kept")
    box.path("journal").mkdir()
    with pytest.raises(UnsafePath, match="journal was removed or replaced while the relay ran"):
        box.tick()
    box.path("journal").rmdir()
    os.rename(tmp_path / "kept", box.path("journal"))


def linked(path: Path, elsewhere: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(elsewhere)


def widened(path: Path, elsewhere: Path) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("part", "spoil", "kind", "detail"),
    [
        ("outbox", linked, "linked_directory", "outbox is a link: not entered"),
        ("inbox/.read", linked, "linked_directory", ".read is a link: not entered"),
        ("outbox", widened, "mode_repaired", "{} was open to others, its mode is 700 now"),
    ],
)
def test_an_agents_directory_is_looked_at_with_each_scan_and_said_once(
    box: Box, tmp_path: Path, part: str, spoil: Callable[[Path, Path], None], kind: str, detail: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / box.name()).write_text("TO: bob\n\nnot alice's")
    spoil(box.path("agents", "alice", *part.split("/")), elsewhere)
    for _ in range(3):
        box.after(31)
    path = f"agents/alice/{part}"
    assert kinds(box) == [(kind, "alice", path)]
    assert box.sql("SELECT detail FROM security_events") == [(detail.format(path),)]
    assert box.bodies("bob") == []
    assert box.states(box.send("carol", "TO: bob\n\ngo on")) == {"bob": "written"}


def test_a_link_among_the_agents_is_nobody(box: Box, tmp_path: Path) -> None:
    other = tmp_path / "mallory"
    (other / "outbox").mkdir(parents=True)
    box.path("agents", "mallory").symlink_to(other)
    for _ in range(3):
        box.after(31, turns=1)
    assert kinds(box) == [("linked_directory", "mallory", "agents/mallory")]
    assert box.sql("SELECT name FROM agents WHERE name = 'mallory'") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(box: Box) -> None:
    name = box.name()
    pending = box.path("agents", "alice", "outbox", ".pending", name)
    pending.write_text("TO: bob\n\nnot alice's")
    os.chown(pending, 12345, 12345)
    os.rename(pending, box.path("agents", "alice", "outbox", name))
    box.path("agents", "mallory").mkdir()
    os.chown(box.path("agents", "mallory"), 12345, 12345)
    box.tick()
    box.after(31, turns=1)
    assert box.bodies("bob") == []
    assert box.nacks("alice") == [f"not delivered: {name} belongs to user 12345, not to 0\n"]
    assert kinds(box) == [
        ("foreign_owner", "alice", f"agents/alice/outbox/{name}"),
        ("foreign_owner", "mallory", "agents/mallory"),
    ]


def test_a_hard_link_is_refused_and_its_other_name_stays_as_it_is(box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TO: bob\n\nthe secret")
    secret.chmod(0o644)
    name = box.name()
    pending = box.path("agents", "alice", "outbox", ".pending", name)
    pending.hardlink_to(secret)
    os.rename(pending, box.path("agents", "alice", "outbox", name))
    box.tick()
    assert box.bodies("bob") == []
    assert box.nacks("alice") == [
        f"not delivered: {name} has 2 hard links: it is a file elsewhere, too; use a copy\n"
    ]
    box.flush()
    assert kinds(box) == [("hard_link", "alice", f"agents/alice/outbox/{name}")]
    assert box.outbox("alice") == []
    (kept,) = box.path("archive").glob(f"*/alice/rejected/{name}")
    assert kept.samefile(secret)
    assert secret.stat().st_mode & 0o777 == 0o644
    assert secret.read_text() == "TO: bob\n\nthe secret"


@pytest.mark.shows("ready 3.5")
def test_killed_before_a_refusal_is_archived_it_is_one_incident(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relay.delivery.record import LedgerWriter

    name = box.name()
    path = box.path("agents", "alice", "outbox", name)
    with monkeypatch.context() as patched:
        patched.setattr(LedgerWriter, "_archive_all", lambda *_: {})
        os.mkfifo(path.with_suffix(".tmp"))
        os.rename(path.with_suffix(".tmp"), path)
        box.tick()
    assert kinds(box) == [("not_a_regular_file", "alice", f"agents/alice/outbox/{name}")]
    box.restart()
    box.tick()
    assert not path.exists()
    assert len(kinds(box)) == 1
    assert len(box.nacks("alice")) == 1
