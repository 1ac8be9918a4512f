"""A home, or its ledger, that this user may not use: said is who may, and what to do.

Root may do everything, and the suite may be root: a child is another user then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_sdk import presence
from relay.base import errors, fsio
from relay.base.home import Home
from relay.ledger.file import open_readonly
from tests.procs import home_of, relay

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
SOMEBODY = 65534


def as_somebody(work: Callable[[], object]) -> str:
    """What ``work`` says, or the error that it ends with and what to do, of another user."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setegid(SOMEBODY)
        os.seteuid(SOMEBODY)
        try:
            said = str(work())
        except BaseException as exc:
            said = f"{exc}; {getattr(exc, 'hint', '')}"
        os.write(write_fd, said.encode())
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """One of that user's."""
    root = home_of(tmp_path / "home", "alice")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o755)  # pytest's are root's alone
    for path in (root, *root.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    yield root


def test_a_ledger_of_mode_000_is_no_damaged_one(home: Path) -> None:
    ledger = str(home / "ledger.db")
    assert as_somebody(lambda: open_readonly(ledger).close()) == "None"
    os.chmod(ledger, 0)
    said = as_somebody(lambda: open_readonly(ledger))
    assert said == f"{ledger}: permission denied; `chmod 600 {ledger}`"


def test_a_ledger_that_another_user_made_names_its_owner(home: Path) -> None:
    ledger = str(home / "ledger.db")
    os.chown(ledger, 0, 0)
    said = as_somebody(lambda: open_readonly(ledger))
    assert said.startswith(
        f"{ledger}: permission denied; run it as user root, or change the owner with `chown`"
    )


def test_root_in_another_users_home_is_told_to_be_that_user(home: Path) -> None:
    name = errors.run_as(SOMEBODY).split(",")[0].removeprefix("run it as user ")
    before = sorted(home.rglob("*"))
    for command in (("register", "bob"), ("send", "alice", "hi"), ("up",)):
        done = relay(*command, home=home)
        assert done.returncode == 1
        assert f"belongs to user {SOMEBODY}, not to 0; run it as user {name}" in done.stderr
        assert "move it away" not in done.stderr and done.stderr.count("\n") == 1
    assert [path for path in sorted(home.rglob("*")) if path not in before] == []


def test_a_meta_json_that_cannot_be_read_is_not_written_again(home: Path) -> None:
    """It holds the agent's role and key: an agent that begins does not know that it has none."""
    meta = home / "agents/alice/meta.json"
    meta.write_text('{"role": "lead"}')
    os.chown(meta, SOMEBODY, SOMEBODY)

    def register() -> None:
        with Home(str(home)) as opened:
            presence.register(opened, "alice", 1)

    assert as_somebody(register) == "None"
    meta.chmod(0)
    before = meta.read_text()
    assert '"role": "lead"' in before
    assert "Permission denied" in as_somebody(register)
    assert meta.read_text() == before


@pytest.mark.parametrize("mode", [0o000, 0o277])
def test_a_sent_file_whose_mode_keeps_its_owner_out_is_read(home: Path, mode: int) -> None:
    """As of an odd umask: it would wait for ever, and nobody would be told."""
    sent = home / "agents/alice/outbox/1706123456789012345-a1b2c3d4.msg"
    sent.write_bytes(b"TO: bob\n\nhi")
    os.chown(sent, SOMEBODY, SOMEBODY)
    sent.chmod(mode)

    def read() -> bytes:
        with Home(str(home)) as opened, opened.dirs() as dirs:
            outbox = dirs.get("agents", "alice", "outbox")
            return fsio.read_regular(sent.name, outbox, 100, narrow=False)[0]

    assert as_somebody(read) == str(b"TO: bob\n\nhi")
    assert sent.stat().st_mode & 0o777 == 0o600
    sent.unlink()


def test_the_home_itself_has_a_name_among_what_is_of_another_user(home: Path) -> None:
    done = relay("doctor", home=home)
    line = next(one for one in done.stdout.splitlines() if "another user" in one)
    assert line.startswith("files: owned by another user: ., ")
