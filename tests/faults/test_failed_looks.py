"""A look that fails is no evidence that a file is gone.

A relay is killed with three messages of bob in hand; the next one cannot look into his outbox, or
at its files. It must neither give them up nor tell bob so: whoever looks next delivers them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from tests import procs
from tests.faults.tracing import Tracing
from tests.procs import PATIENCE_S, Relay, inbox_of, until

NAMES = [f"100000000{number}-0{number}.msg" for number in range(1, 4)]
# the names that are opened relative to a directory, or the directory whose files are asked for
SICK = {
    "EMFILE": ("outbox", "openat:error=EMFILE"),
    "EIO": ("outbox", "openat:error=EIO"),
    "EACCES": ("outbox", "openat:error=EACCES"),
    "EIO of stat": ("{home}/agents/bob/outbox", "newfstatat:error=EIO"),
}


def drop(home: Path, agent: str, *names: str, text: str = "hi") -> None:
    """All of them at one time, as far as the relay can see."""
    outbox = home / "agents" / agent / "outbox"
    for name in names:
        (outbox / ".pending" / name).write_text(f"TO: alice\n\n{text}")
    for name in names:
        os.rename(outbox / ".pending" / name, outbox / name)


def statuses(home: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(home / "ledger.db")) as db:
        found = db.execute("SELECT status FROM messages WHERE agent_name = 'bob' ORDER BY id")
        return [row[0] for row in found]


def inbox(home: Path, agent: str) -> list[str]:
    return [path.name for path in inbox_of(home, agent)]


def killed_with_three_in_hand(relay: Relay, folder: Path) -> None:
    """Their rows are there, and the journal knows nothing of them."""
    relay.start()
    assert relay.process is not None
    (segment,) = relay.home.glob("journal/*/segments/*.seg")
    killing = Tracing(folder, [segment], "pwrite64:signal=SIGKILL:when=1")
    with killing.attached(relay.pid):
        drop(relay.home, "bob", *NAMES)
        assert relay.process.wait(PATIENCE_S) == -9
    relay.process = None
    assert set(statuses(relay.home)) <= {"pending", "processing"} and statuses(relay.home)


@pytest.mark.parametrize("how", SICK)
def test_a_start_that_cannot_look_gives_up_nothing(relay: Relay, tmp_path: Path, how: str) -> None:
    home = relay.home
    killed_with_three_in_hand(relay, tmp_path)
    where, injection = SICK[how]
    sick = Tracing(tmp_path, [where.format(home=home)], injection)

    relay.start(*sick.command)
    assert set(statuses(home)) <= {"pending", "processing"}
    relay.kill()
    assert sick.injected()

    relay.start()
    until(lambda: inbox(home, "alice") == NAMES, "three messages")
    relay.stop()
    assert statuses(home) == ["archived"] * 3
    assert inbox(home, "bob") == []  # nobody told it that they are gone
    assert not list(home.glob("archive/*/bob/rejected/*"))


def test_the_same_relay_goes_on_by_itself_once_it_can_look(relay: Relay, tmp_path: Path) -> None:
    home = relay.home
    (home / "config.json").write_text('{"detection": {"scan_interval_s": 1}}')
    killed_with_three_in_hand(relay, tmp_path)

    sick = Tracing(tmp_path, [home / "agents/bob/outbox"], "newfstatat:error=EIO:when=1..12")
    relay.start(*sick.command)
    until(lambda: inbox(home, "alice") == NAMES, "three messages")
    relay.stop()
    assert statuses(home) == ["archived"] * 3 and inbox(home, "bob") == []
    assert len(sick.injected()) == 12


def test_an_agent_whose_directory_cannot_be_opened_is_one_and_its_mail_waits(
    relay: Relay, tmp_path: Path
) -> None:
    home = relay.home
    sick = Tracing(tmp_path, ["bob"], "openat:error=EIO")
    relay.start(*sick.command)
    sent = procs.drop(home, "alice", "TO: bob\n\nhi", NAMES[0])
    until(lambda: not (home / f"agents/alice/outbox/{sent}.msg").exists(), "it is accepted")
    relay.kill()
    assert sick.injected() and inbox(home, "alice") == []  # no word that there is no such agent

    relay.start()
    until(lambda: inbox(home, "bob") == NAMES[:1], "its mail")
    relay.stop()


def test_a_start_that_cannot_look_into_an_inbox_doubles_nothing(
    relay: Relay, tmp_path: Path
) -> None:
    """Delivered and taken, and the journal has it as staged: that its inbox cannot be opened for
    want of descriptors does not mean that it is still to be delivered."""
    home = relay.home
    relay.start()
    killing = Tracing(tmp_path, [home / "agents/bob/outbox"], "renameat:signal=SIGKILL:when=1")
    with killing.attached(relay.pid):
        drop(home, "bob", NAMES[0])
        assert relay.process.wait(PATIENCE_S) == -9
    relay.process = None
    folder = home / "agents/alice/inbox"
    os.rename(folder / NAMES[0], folder / ".read" / NAMES[0])

    sick = Tracing(tmp_path, ["inbox"], "openat:error=EMFILE")
    relay.start(*sick.command, wait=False)
    assert (
        relay.process.wait(PATIENCE_S) == 1
    )  # it says why, and whoever looks after it starts it again
    relay.process = None
    assert sick.injected()

    relay.start()
    until(lambda: statuses(home) == ["archived"], "the end of the message")
    drop(home, "bob", NAMES[1])
    until(lambda: inbox(home, "alice"), "the next one")
    relay.stop()
    assert inbox(home, "alice") == NAMES[1:2]
