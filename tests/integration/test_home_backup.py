"""A whole home copied by `relay backup`, beside a relay that runs or none, and put back."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base import fsio
from relay.base.clock import Clock
from relay.base.config import Config, StoreSettings
from relay.base.errors import AlreadyRunning, FormatError, IntegrityError, RelayError, UnsafePath
from relay.base.home import LEDGER, LOCK, Home
from relay.daemon import home_backup
from relay.daemon.home_restore import restore
from tests.box import Box
from tests.disk import failing, flip, hooked, killed_at, steps_of
from tests.ledger.support import Look
from tests.procs import PATIENCE_S, Relay, inbox_of, meanwhile, relay, until


def backup(box: Box, target: Path) -> tuple[str, ...]:
    """Back the box up; what was left out."""
    return home_backup.backup(box.home, box.config, Clock(), str(target))[1]


def whole(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a home, and when it was last written."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in (LOCK, "backup.json")
    }


def a_home(root: Path) -> Box:
    """A home with everything in it that a copy has to have."""
    box = Box(root, "alice", "bob", "carol")
    read = box.send("alice", "TO: bob\n\nread")
    box.send("alice", "TO: bob\n\nunread")
    box.take("bob", read)
    box.tick()
    box.send("alice", "TO: nobody\n\nrefused")
    box.send("bob", "TO: __orchestrator__\nKIND: continuity\n\nACTION: save\n\nwhat bob knows")
    box.path("agents/alice/key").write_bytes(b"k" * 32)
    box.attach(b"attached")
    box.flush()
    return box


# -- what is in it -------------------------------------------------------------------------


def test_a_stopped_home_is_there_again_to_the_byte(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    box.drop("alice", "TO: carol\n\nsent while no relay ran")
    box.close()
    os.utime(tmp_path / "home/agents/bob/inbox", ns=(5 * 10**9, 5 * 10**9))
    done = relay("backup", str(tmp_path / "kept"), home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    _, aside = restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    before, after = whole(tmp_path / "home"), whole(tmp_path / "again")
    skipped = {name for name in before if name.split("/")[0] in ("logs", "run", "tmp")}
    for name in (LEDGER, LEDGER + "-wal", LEDGER + "-shm"):  # rows are compared below
        before.pop(name, None), after.pop(name, None)
    assert after == {name: file for name, file in before.items() if name not in skipped}
    looks = [Look(tmp_path / name / LEDGER) for name in ("home", "again")]
    for table in ("messages", "deliveries", "audit_log", "orchestrator_state"):
        one, other = (look.all(f"SELECT * FROM {table}") for look in looks)
        assert one == other
    agents = "SELECT name, status, note, public_key, last_seen_at FROM agents"  # not the inodes
    assert looks[0].all(agents) == looks[1].all(agents)
    for look in looks:
        look.close()
    assert os.stat(tmp_path / "again/agents/bob/inbox").st_mtime_ns == 5 * 10**9
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "again").rglob("*")} | {
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("again", "kept")
    }
    assert modes == {0o700, 0o600}
    assert aside == ""
    again = Box(tmp_path / "again")
    again.tick()
    assert again.bodies("carol") == ["sent while no relay ran"]
    assert again.bodies("bob")[:1] == ["unread"]
    again.close()


def test_what_is_no_regular_file_is_left_out_and_said(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    box.path("agents/alice/outbox/link.msg").symlink_to("/etc/passwd")
    os.mkfifo(box.path("agents/alice/pipe"))
    os.rename(box.path("agents/carol/inbox"), box.path("agents/carol/away"))
    box.path("agents/carol/inbox").symlink_to("/etc")
    alice = os.fsencode(box.path("agents/alice"))
    with open(alice + b"/\xff\n", "w"):  # as the relay archives a refused file of that name
        pass
    lines = backup(box, tmp_path / "kept")
    assert "agents/alice/\\udcff\\n: its name is not UTF-8" in lines
    assert len(set(lines)) == len(lines)
    said = "\n".join(lines)
    for name in ("agents/alice/outbox/link.msg", "agents/alice/pipe", "agents/carol/inbox"):
        assert name in said and not (tmp_path / "kept" / name).exists()


def test_an_encrypted_home_opens_again_with_its_key(tmp_path: Path) -> None:
    box = Box(tmp_path / "home", "alice", "bob", config=Config(store=StoreSettings(encrypt=True)))
    box.send("alice", "TO: bob\n\nsecret")
    box.flush()
    backup(box, tmp_path / "kept")
    box.close()
    restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    assert stat.S_IMODE((tmp_path / "again" / box.config.store.key_file).stat().st_mode) == 0o600
    again = Box(tmp_path / "again", config=box.config)
    assert [m.content for m in again.store.state.messages.values()] == [b"secret"]
    again.close()


# -- under traffic -------------------------------------------------------------------------

# Where the copy is, and what the relay and its agents do just then.
MOMENTS = ["/config.json", "/agents/bob", "archive/", "relay.acomm", "ledger.db", "/journal/"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_happens_while_it_is_copied_is_whole_or_not_there(moment: str, tmp_path: Path) -> None:
    """Messages are sent, delivered, read, acknowledged and archived at one moment of the copy: a
    start of it neither loses what was accepted before it began, nor gives anybody twice what he
    has taken."""
    box = Box(tmp_path / "home", "alice", "bob", "carol")
    first = [box.send("alice", f"TO: *\n\n{number}") for number in range(4)]
    box.take("bob", first[0])
    os.unlink(box.path("agents/carol/inbox", f"{first[0]}.msg"))
    box.flush()
    happened: list[str] = []

    def during(operation: str, name: str) -> None:
        if operation == "create" and "kept.unfinished" in name and moment in name and not happened:
            happened.append(box.send("alice", "TO: *\n\nmeanwhile"))
            box.take("bob", first[1])
            box.take("bob", happened[0])
            os.unlink(box.path("agents/carol/inbox", f"{first[1]}.msg"))
            box.flush()
            happened.append(box.drop("alice", "TO: bob\n\nnot accepted yet"))

    with hooked(during):
        backup(box, tmp_path / "kept")
    assert len(happened) == 2
    box.close()
    restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    again = Box(tmp_path / "again")
    again.tick(3)
    again.flush()
    for agent in ("bob", "carol"):
        inbox = set(again.inbox(agent))
        taken = {path.stem for path in again.path("agents", agent, "inbox/.read").glob("*.msg")}
        assert not inbox & taken, "twice"
        assert {first[2], first[3]} <= inbox and first[0] not in inbox
        assert inbox <= {*first, *happened}
    numbers = [str(message.relay_id) for message in again.store.state.messages.values()]
    assert sorted(numbers) == sorted(set(numbers))
    assert set(first) <= set(numbers)
    for path in again.path("agents").rglob("*.msg"):
        assert b"\nATTEMPT: 2\n" not in path.read_bytes()
    again.close()


@pytest.mark.damages
def test_what_was_delivered_and_rolled_meanwhile_is_there(tmp_path: Path) -> None:
    """A message leaves the live store while the home is copied; its reader has not taken it yet."""
    config = Config(store=StoreSettings(roll_after_s=1, roll_messages=1))
    box = Box(tmp_path / "home", "alice", "bob", config=config)
    sent: list[str] = []

    def during(operation: str, name: str) -> None:
        if name.endswith(LEDGER + ".tmp") and not sent:
            sent.append(box.send("alice", "TO: bob\n\nmeanwhile"))
            for _ in range(20):
                box.after(60, turns=1)
            assert box.store.messages.find_by_relay_id(sent[0]) is None  # it is in an archive alone

    with hooked(during):
        backup(box, tmp_path / "kept")
    box.close()
    restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    again = Box(tmp_path / "again", config=config)
    again.tick()
    assert set(again.inbox("bob")) == set(sent) and len(sent) == 1
    again.close()


def test_under_traffic_nothing_accepted_is_lost_and_nothing_doubled(home: Path) -> None:
    """Real processes: one writes as fast as it can, one takes, the relay runs, a copy is made."""
    inbox = home / "agents/bob/inbox"
    sent: list[str] = []

    def step() -> None:
        sent.append(alice.send("bob", f"number {len(sent)}"))
        if len(sent) % 3 == 0:
            for path in sorted(inbox.glob("*.msg"))[:2]:
                os.rename(path, inbox / ".read" / path.name)

    kept = home.parent / "kept"
    with Relay(home), Agent("alice", str(home)) as alice, meanwhile(step):
        until(lambda: len(sent) > 100)
        with Look(home / LEDGER) as look:
            accepted = {row[0] for row in look.all("SELECT message_id FROM messages")}
        done = relay("backup", str(kept), "--json", home=home)
        assert done.returncode == 0, done.stderr
        more = len(sent) + 50
        until(lambda: len(sent) > more)
    again = home.parent / "again"
    done = relay("restore", str(kept), home=again)
    assert done.returncode == 0, done.stderr
    before = _mail(again)
    with Relay(again), Look(again / LEDGER) as look:
        open_rows = "SELECT count(*) FROM messages WHERE status NOT IN ('archived', 'failed')"
        until(lambda: look.one(open_rows) == 0)
        doctor = relay("doctor", home=again)
    after = _mail(again)
    assert accepted <= set(after) <= set(sent)
    assert all(after[one] == where for one, where in before.items() if where != ".pending")
    for path in (again / "agents/bob/inbox").rglob("*.msg"):
        assert b"\nATTEMPT: 1\n" in path.read_bytes()
    assert doctor.returncode == 0, doctor.stdout


def _mail(root: Path) -> dict[str, str]:
    """Where each message of bob's is; none is in two places."""
    paths = list((root / "agents/bob/inbox").rglob("*.msg"))
    found = {path.stem: path.parent.name for path in paths}
    assert len(found) == len(paths)
    return found


# -- what is refused -----------------------------------------------------------------------


def test_an_agent_that_goes_on_uses_the_home_that_was_put_back(
    running: Relay, home: Path, tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept")
    with Agent("alice", home) as alice:
        assert relay("backup", kept, home=home).returncode == 0
        running.stop()
        assert relay("restore", kept, "--force", home=home).returncode == 0
        running.start()
        sent = alice.send("bob", "after the restore", wait="delivered")
        assert [path.stem for path in inbox_of(home, "bob")] == [sent]
        with Agent("bob", home) as bob:
            bob.send("alice", "before alice waits")
            assert alice.receive(PATIENCE_S) is not None
            later = threading.Timer(0.1, bob.send, ("alice", "while alice waits"))
            later.start()
            received = alice.receive(PATIENCE_S)
            later.join()
            assert received is not None and received.body == "while alice waits"
        assert json.loads((home / "agents/alice/meta.json").read_text())["pid"] == os.getpid()


def test_a_damaged_backup_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    backup(box, tmp_path / "kept")
    box.close()
    before = whole(tmp_path / "home")
    (segment,) = (tmp_path / "kept/journal").rglob("*.seg")
    ledger, listed = tmp_path / "kept" / LEDGER, tmp_path / "kept/backup.json"

    spoils: list[tuple[type[RelayError], Callable[[], object]]] = [
        (IntegrityError, lambda: flip(segment, 150)),
        (IntegrityError, lambda: os.truncate(ledger, 4096)),
        (IntegrityError, ledger.unlink),
        (FormatError, lambda: listed.write_text("{")),
        (UnsafePath, lambda: listed.write_text(text.replace("config.json", "../x"))),
        (UnsafePath, lambda: listed.write_text(text.replace("config.json", "a\\u0000b"))),
        (UnsafePath, lambda: listed.write_text(text.replace('"agents"', '"a\\u0000b"'))),
        (FormatError, lambda: listed.write_text(text.replace('"version":1', '"version":9'))),
        (FormatError, lambda: listed.write_text(late("files"))),
        (FormatError, lambda: listed.write_text(late("dirs"))),
        (RelayError, listed.unlink),
    ]
    text = listed.read_text()

    def late(where: str) -> str:
        """The list with a time above 64 bits."""
        facts = json.loads(text)
        if where == "files":
            facts["files"][0]["mtime_ns"] = 10**40
        else:
            facts["dirs"]["agents"] = 10**40
        return json.dumps(facts)

    shutil.copytree(tmp_path / "kept", tmp_path / "sound")
    for error, spoil in spoils:
        shutil.rmtree(tmp_path / "kept")
        shutil.copytree(tmp_path / "sound", tmp_path / "kept")
        spoil()
        with pytest.raises(error) as caught:
            restore(str(tmp_path / "kept"), str(tmp_path / "home"), force=True)
        assert "\n" not in str(caught.value)
        assert "let the relay rebuild" not in caught.value.hint
        if error in (IntegrityError, UnsafePath):
            assert caught.value.hint.startswith("the backup is damaged, and nothing was changed")
        assert whole(tmp_path / "home") == before
        assert sorted(os.listdir(tmp_path)) == ["home", "kept", "sound"]


def test_a_home_that_is_there_stays_unless_forced(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    backup(box, tmp_path / "kept")
    box.send("alice", "TO: bob\n\nafter the copy")
    box.close()
    before = whole(tmp_path / "home")
    root, kept = str(tmp_path / "home"), str(tmp_path / "kept")
    with pytest.raises(RelayError, match="there is a relay home at"):
        restore(kept, root)
    with fsio.locked(os.path.join(root, LOCK)), pytest.raises(AlreadyRunning):
        restore(kept, root, force=True)
    assert whole(tmp_path / "home") == before
    for number in range(2):
        _, aside = restore(kept, root, force=True)
        assert aside == f"{root}.before-restore" + (f".{number}" if number else "")
    assert whole(tmp_path / "home.before-restore") == before
    (tmp_path / "others").mkdir()
    (tmp_path / "others/things").write_text("mine")
    with pytest.raises(UnsafePath, match="is not a relay home"):
        restore(kept, str(tmp_path / "others"), force=True)
    (tmp_path / "empty").mkdir()
    assert restore(kept, str(tmp_path / "empty"))[1] == ""


def test_a_backup_has_a_new_name_outside_of_the_home(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    (tmp_path / "kept").mkdir()
    with pytest.raises(RelayError, match="exists already"):
        backup(box, tmp_path / "kept")
    with pytest.raises(RelayError, match="is in the home itself"):
        backup(box, tmp_path / "home/kept")
    box.close()


def test_through_a_link_it_says_what_it_did(tmp_path: Path) -> None:
    """It was done, and ended with "Not a directory"."""
    box = a_home(tmp_path / "home")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    backup(box, tmp_path / "link/kept")
    (tmp_path / "none").symlink_to("not-mounted")
    with pytest.raises(RelayError, match="none exists already"):
        backup(box, tmp_path / "none")
    box.close()
    for aside in ("", f"{tmp_path}/disk/new.before-restore"):
        assert restore(str(tmp_path / "link/kept"), f"{tmp_path}/link/new", force=True)[1] == aside
    assert whole(tmp_path / "disk/new") == whole(tmp_path / "disk/kept")


def test_no_relay_runs_in_a_backup(tmp_path: Path) -> None:
    """It did, and its restore was refused from then on."""
    box, kept = a_home(tmp_path / "home"), tmp_path / "kept"
    backup(box, kept)
    box.close()
    done = relay("up", home=kept)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"relay: {kept} is a backup, which a relay would change; " in done.stderr
    restore(str(kept), str(tmp_path / "new"))  # every file is compared


def test_two_at_once_to_one_name_do_not_write_into_each_other(tmp_path: Path) -> None:
    """The first one would be complete by its word, and without the files that the other removed."""
    box = a_home(tmp_path / "home")
    taken = []

    def second(operation: str, name: str) -> None:
        if operation == "create" and name.endswith("config.json") and not taken:
            taken.append(name)
            with pytest.raises(RelayError, match="another process writes"):
                backup(box, tmp_path / "kept")

    with hooked(second):
        backup(box, tmp_path / "kept")
    assert taken
    restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    box.close()


def test_what_is_no_interrupted_copy_is_not_removed_for_one(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    backup(box, tmp_path / "kept")
    for name in ("other.unfinished", "again.restoring"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    with pytest.raises(RelayError, match=r"other\.unfinished is in the way"):
        backup(box, tmp_path / "other")
    with pytest.raises(RelayError, match=r"again\.restoring is in the way"):
        restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    for name in ("other.unfinished", "again.restoring"):
        assert (tmp_path / name / "mine").read_text() == "x"
    with pytest.raises(RelayError, match="until it is complete"):  # a backup of that name would be
        backup(box, tmp_path / "kept.unfinished")
    box.close()


@pytest.mark.parametrize("name", ["kept", "kept/agents/new"])
def test_a_backup_stays_one_when_it_is_restored(tmp_path: Path, name: str) -> None:
    box = a_home(tmp_path / "home")
    backup(box, tmp_path / "kept")
    box.close()
    before = whole(tmp_path / "kept")
    with pytest.raises(RelayError, match="is in the backup itself"):
        restore(str(tmp_path / "kept"), str(tmp_path / name), force=True)
    assert whole(tmp_path / "kept") == before


def test_on_a_full_disk_nothing_is_left(tmp_path: Path) -> None:
    box = a_home(tmp_path / "home")
    backup(box, tmp_path / "kept")
    before = whole(tmp_path / "home")
    with failing("write", ".seg"):
        with pytest.raises(OSError, match="No space"):
            backup(box, tmp_path / "more")
        with pytest.raises(OSError, match="No space"):
            restore(str(tmp_path / "kept"), str(tmp_path / "again"))
    assert sorted(os.listdir(tmp_path)) == ["home", "kept"]
    assert whole(tmp_path / "home").keys() == before.keys()
    box.close()


# -- killed --------------------------------------------------------------------------------


@pytest.mark.box("alice")
def test_killed_at_any_step_of_a_backup_it_has_no_name_or_is_whole(
    box: Box, tmp_path: Path
) -> None:
    box.restart()
    home, kept = str(tmp_path / "home"), tmp_path / "kept"
    number = len(steps_of(lambda: backup(box, kept)))
    box.close()
    for step in range(1, number + 1, 2):
        shutil.rmtree(kept, ignore_errors=True)
        killed_at(step, lambda: home_backup.backup(Home(home), Config(), Clock(), str(kept)))
        if kept.exists():
            restore(str(kept), str(tmp_path / "again"))
            shutil.rmtree(tmp_path / "again")
    assert relay("backup", str(tmp_path / "kept2"), home=tmp_path / "home").returncode == 0
    assert relay("backup", str(kept), home=tmp_path / "home").returncode == 0
    assert not (tmp_path / "kept.unfinished").exists()


@pytest.mark.box("alice", "bob")
def test_killed_at_any_step_of_a_restore_it_is_the_home_before_or_the_restored_one(
    box: Box, tmp_path: Path
) -> None:
    box.send("alice", "TO: bob\n\nbefore")
    backup(box, tmp_path / "kept")
    box.send("alice", "TO: bob\n\nafter")
    box.close()
    kept, root = str(tmp_path / "kept"), str(tmp_path / "home")
    shutil.copytree(root, tmp_path / "former")
    number = len(steps_of(lambda: restore(kept, root, force=True)))
    restored, former = whole(tmp_path / "home"), whole(tmp_path / "former")
    assert restored != former
    for step in range(1, number + 1):
        for name in os.listdir(tmp_path):
            if name not in ("kept", "former"):
                shutil.rmtree(tmp_path / name)
        shutil.copytree(tmp_path / "former", root)
        killed_at(step, lambda: restore(kept, root, force=True))
        assert whole(tmp_path / "home") in (former, restored), step
        restore(kept, root, force=True)  # the next one finds nothing in its way
        assert whole(tmp_path / "home") == restored
        assert former in [whole(path) for path in tmp_path.glob("home.before-restore*")]


def test_in_words(tmp_path: Path) -> None:
    a_home(tmp_path / "home").close()
    done = relay("backup", str(tmp_path / "kept"), "--json", home=tmp_path / "home")
    facts = json.loads(done.stdout)
    assert facts["files"] == len(json.loads((tmp_path / "kept/backup.json").read_text())["files"])
    refused = relay("restore", str(tmp_path / "kept"), home=tmp_path / "home")
    assert refused.returncode == 1 and "--force" in refused.stderr
    done = relay("restore", "--force", str(tmp_path / "kept"), home=tmp_path / "home")
    assert done.stdout.startswith(f"restored {tmp_path}/home as it was at {facts['at']}: ")
    assert done.stdout.endswith(f"; the previous home is now {tmp_path}/home.before-restore\n")
    assert relay("restore", str(tmp_path / "none"), home=tmp_path / "x").returncode == 1
    assert not (tmp_path / "x").exists()
