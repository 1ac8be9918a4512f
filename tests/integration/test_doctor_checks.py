"""`relay doctor` on files, processes, limits, ledger and attachments; and what `--repair` does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base import archive_pack, crypto, fsio
from relay.base.config import Config, DiskSettings
from relay.base.home import LEDGER
from relay.doctor import Finding, Severity, Target, examine, files, repair, system
from tests.box import Box
from tests.disk import killed_at
from tests.integration.test_wal import reader
from tests.procs import meanwhile, relay, until

QUIET = Config(disk=DiskSettings(floor_mib=0, alert_percent=100))

pytestmark = [
    pytest.mark.damages,
    pytest.mark.box("alice", "bob", config=QUIET),
    pytest.mark.usefixtures("private_files"),
]


@pytest.fixture
def box(box: Box) -> Box:
    """A relay that was stopped after a delivered message, a read one and a refused one."""
    box.send("alice", "TO: bob\n\nwaits")
    box.take("bob", box.send("alice", "TO: bob\n\nread"))
    box.send("alice", "no message")
    box.flush()
    box.stop()
    return box


def found(box: Box, *, deep: bool = False) -> list[Finding]:
    return list(examine(box.home, deep=deep))


def one(box: Box, *, deep: bool = False) -> Finding:
    (finding,) = found(box, deep=deep)
    assert finding.advice and "\n" not in str(finding)
    return finding


def mend(box: Box) -> list[str]:
    return [
        f"{what.action} {what.path} {error}".strip() for what, error in repair(box.home, found(box))
    ]


# -- files ---------------------------------------------------------------------------------


def test_modes_that_are_too_wide_are_named_and_narrowed(box: Box) -> None:
    os.chmod(box.root, 0o755)
    os.chmod(box.path("store"), 0o755)
    os.chmod(box.path("store/relay.acomm"), 0o644)
    finding = one(box)
    assert "accessible to other users: ., store, store/relay.acomm" in str(finding)
    assert finding.repairs and finding.severity is Severity.WARNING
    assert mend(box) == ["chmod 700 .", "chmod 700 store", "chmod 600 store/relay.acomm"]
    assert found(box) == []


def test_what_agents_or_the_next_start_have_in_hand_and_what_was_refused_is_no_alarm(
    box: Box, tmp_path: Path
) -> None:
    pending = box.path("agents/alice/outbox/.pending/1700000000000000099-99.msg")
    pending.write_text("TO: bob\n\nhal")
    os.chmod(pending, 0o644)
    staged = box.path("agents/bob/inbox/.pending/1700000000000000099-99.msg")
    staged.write_text("staged")
    os.utime(staged, (0, 0))
    (folder,) = box.path("archive").glob("*/alice/rejected")
    (folder / "1700000000000000098-98.msg").symlink_to(tmp_path)
    (folder / "1700000000000000099-99.msg").mkdir(mode=0o755)
    assert found(box) == [] and mend(box) == [] and staged.exists()


def test_links_are_named_and_left(box: Box, tmp_path: Path) -> None:
    box.path("agents/bob/elsewhere").symlink_to(tmp_path)
    finding = one(box)
    assert "links, which the relay does not follow: agents/bob/elsewhere" in str(finding)
    assert not finding.repairs


def test_a_file_that_lost_its_writer(box: Box) -> None:
    pending = box.path("agents/alice/outbox/.pending/draft.tmp")
    pending.write_text("TO: bob\n\nhal")
    os.utime(pending, (time.time() - 40, time.time() - 40))
    assert found(box) == []
    os.utime(pending, (time.time() - 4000, time.time() - 4000))
    assert "untouched for more than 3600 s" in str(one(box))
    assert mend(box) == [f"remove agents/alice/outbox/.pending/{pending.name}"]
    assert found(box) == [] and not pending.exists()


def test_an_agent_that_is_not_whole_is_named(box: Box) -> None:
    outbox = box.path("agents/alice/outbox")
    shutil.rmtree(outbox)
    outbox.write_text("no directory")
    outbox.chmod(0o600)
    finding = one(box)
    assert "agents/alice/outbox is not a directory" in str(finding)
    outbox.unlink()  # as its remedy says
    assert found(box) == []  # the next start makes it
    box.path("agents/bob/meta.json").write_text("{")
    assert "agents/bob/meta.json cannot be read, so bob has no role" in str(one(box))
    box.path("agents/bob/meta.json").unlink()
    done = relay("register", "bob", "--role", "lead", home=box.root)
    assert (done.returncode, found(box)) == (0, [])


def test_settings_that_are_no_file_are_a_finding(box: Box) -> None:
    box.path("config.json").unlink()
    box.path("config.json").mkdir(mode=0o700)
    assert str(one(box)).startswith("config: config.json is not a regular file; fix it")


def test_what_a_crash_left_over_is_removed_once_it_is_old(box: Box) -> None:
    names = ["ledger.db.v1.bak.tmp", "store/relay.acomm.tmp", "archive/2020-01-01.tar.zst.tmp"]
    for name in names:
        box.path(name).write_bytes(b"half")
    assert found(box) == []  # somebody may be at it
    for name in names:
        os.utime(box.path(name), (0, 0))
    assert "left over by a crash: ledger.db.v1.bak.tmp" in str(one(box))
    assert sorted(mend(box)) == sorted(f"remove {name}" for name in names)
    assert found(box) == []


def test_what_a_killed_hook_or_key_make_left_is_named_and_removed(box: Box) -> None:
    alice = box.path("agents/alice")
    there = set(os.listdir(alice))
    for operation in ("write", "rename", "sync"):
        killed_at(1, lambda: crypto.create_key(str(alice / "key")), operation)
    left = [f"agents/alice/{name}" for name in set(os.listdir(alice)) - there]
    left.append("sessions/claude-1.json.4711.tmp")
    box.path(left[-1]).write_bytes(b"half")
    assert len(left) == 4 and found(box) == []
    for name in left:
        os.utime(box.path(name), (0, 0))
    assert sorted(mend(box)) == sorted(f"remove {name}" for name in left)
    assert found(box) == []


def test_a_damaged_pack_is_found_with_deep(box: Box) -> None:
    (day,) = archive_pack.days(box.home)
    list(archive_pack.pack(box.home, day))
    assert found(box, deep=True) == []
    path = box.path("archive", f"{day}.tar.zst")
    path.write_bytes(path.read_bytes()[:-9])
    assert found(box) == []
    assert str(path.relative_to(box.root)) in str(one(box, deep=True))


def test_mail_of_a_name_that_nobody_may_have(box: Box) -> None:
    box.path("agents/Root/outbox").mkdir(parents=True, mode=0o700)
    box.path("agents/Root").chmod(0o700)
    assert found(box) == []  # nothing waits there
    box.path("agents/Root/outbox/1700000000000000099-99.msg").write_text("TO: bob\n\nhello")
    finding = one(box)
    assert "'Root' is reserved: 1 message in agents/Root/outbox cannot be sent" in str(finding)
    assert finding.severity is Severity.WARNING


def test_a_lead_that_nobody_is_is_said(box: Box) -> None:
    config = box.path("config.json")
    config.write_text(
        json.dumps({"lead": "nobody", "disk": {"floor_mib": 0, "alert_percent": 100}})
    )
    finding = one(box)
    assert str(finding) == (
        "config: the lead nobody is not an agent: mail to Lead bounces; choose an existing agent "
        "(`relay agents`), or `relay register nobody`"
    )
    assert (finding.severity, finding.where) == (Severity.WARNING, "config.json")
    config.write_text(config.read_text().replace("nobody", "bob"))
    assert found(box) == []


def test_a_file_in_an_outbox_that_no_relay_takes(box: Box) -> None:
    path = box.path("agents/alice/outbox/1700000000000000099-AA.MSG")
    path.write_text("TO: bob\n\nhello")
    assert found(box) == []  # perhaps it is renamed in a moment
    os.utime(path, (0, 0))
    finding = one(box)
    assert "ignored, because their names are not message names: agents/alice/outbox/17" in str(
        finding
    )
    path.rename(path.with_name("1700000000000000099-aa.msg"))  # as its remedy says
    assert found(box) == []


def test_what_cannot_be_read_ends_no_other_check(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path("store/relay.acomm").write_bytes(b"damaged")

    def denied(target: Target) -> Iterator[Finding]:
        raise PermissionError(errno.EACCES, "Permission denied", box.root)
        yield

    monkeypatch.setattr(files, "check_files", denied)
    first, second = found(box)
    assert str(first).startswith(f"files: not checked: {box.root}: Permission denied; ")
    assert second.what == "store"


# -- process and limits --------------------------------------------------------------------


def test_a_socket_that_nobody_listens_on(box: Box) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(box.path("admin.sock")))
    assert "admin.sock: left over; no relay is running" in str(one(box))
    assert mend(box) == ["remove admin.sock"]
    assert found(box) == []


def test_a_process_that_is_gone_and_files_of_one_that_is_not_known(box: Box) -> None:
    box.sql(
        "INSERT INTO processes (name, state, pid, cli, cwd, restart, requested_by, request_id, "
        "changed_at) VALUES ('bob', 'ready', ?, 'sh', '/', 'never', 'alice', 'x', 0)",
        2**22 + 7,
    )
    box.path("run").mkdir(exist_ok=True)
    box.path("run/bob.lock").touch()
    assert f"bob is ready as pid {2**22 + 7}, but there is no such process" in str(one(box))
    box.sql("UPDATE processes SET pid = ?", os.getpid())
    assert found(box) == []
    box.path("run/dave.lock").touch()
    assert "run/dave.lock: belongs to a process that is not in the ledger" in str(one(box))


def test_logs_that_are_too_large_or_tell_of_a_fault(box: Box) -> None:
    with open(box.path("logs/relay.log"), "wb") as file:
        file.truncate(33 << 20)
    box.path("logs/relay.err").write_text("Traceback\n")
    err, log = found(box)
    assert "logs/relay.err has 10 bytes" in str(err)
    assert "logs/relay.log has 33 MiB, more than twice log.max_mib" in str(log)


def test_a_service_unit_whose_program_is_gone(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ["HOME"]) / ".config/systemd/user"
    folder.mkdir(parents=True)
    unit = folder / "agent-relay.service"
    unit.write_text(f"[Service]\nExecStart=/nowhere/relay --home {box.root} up --foreground\n")
    assert "starts /nowhere/relay, which does not exist" in str(one(box))
    unit.write_text(f"[Service]\nExecStart=/bin/sh {box.root}\n")
    assert found(box) == []


def test_limits_of_inotify_and_the_disk(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "read_limit", lambda name: 5)
    queued, _, watches = sorted(found(box), key=lambda finding: finding.where)
    assert "fs.inotify.max_user_watches is 5, expected at least 7: two for each of 3 agents" in str(
        watches
    )
    assert "sysctl fs.inotify.max_queued_events=" in str(queued)
    monkeypatch.setattr(system, "read_limit", lambda name: None)
    box.path("config.json").write_text('{"disk": {"alert_percent": 90, "floor_mib": 64}}')
    gib = 1 << 30
    monkeypatch.setattr(system.disk, "measure_disk", lambda path: (9 * gib, 585 << 20, 65 << 20))
    assert "the disk is 90 % full, 65 MiB are free" in str(one(box))
    monkeypatch.setattr(system.disk, "measure_disk", lambda path: (9 * gib, 8 * gib, 63 << 20))
    assert "only 63 MiB are free on the disk; below 64 MiB (disk.floor_mib) no" in str(one(box))
    monkeypatch.setattr(system.disk, "measure_disk", lambda path: (1000 << 20, 100 << 20, 63 << 20))
    assert found(box) == []  # the floor of a small disk is a twentieth of it
    monkeypatch.setattr(system.disk, "measure_disk", lambda path: (4 << 20, 4 << 20, 9 << 10))
    assert "only 9 KiB are free on the disk; below 204.8 KiB (disk.floor_mib) no" in str(one(box))


def test_a_long_wal_and_who_keeps_it(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path("config.json").write_text('{"ledger": {"wal_alert_mib": 1}}')
    box.open()
    with reader(box.path(LEDGER)) as pid:
        while box.path(LEDGER + "-wal").stat().st_size < 1 << 20:
            with box.ledger.transaction():
                box.ledger.set_state("filler", os.urandom(50_000).hex(), 0)
        box.dispatcher.drain()
        lines = [str(finding) for finding in found(box) if finding.where == "ledger.db-wal"]
        assert len(lines) == 1 and f"pid {pid} (" in lines[0]
        # beside a relay in a process of its own that one is not said to be ended
        monkeypatch.setattr(system, "lock_holder", lambda home: pid)
        lines = [str(finding) for finding in found(box) if finding.where == "ledger.db-wal"]
        assert f"pid {pid}" not in lines[0] and "fuser -v ledger.db" in lines[0]
    box.kill()


# -- ledger --------------------------------------------------------------------------------


def test_a_damaged_ledger(box: Box) -> None:
    ((root,),) = box.sql("SELECT rootpage FROM sqlite_master WHERE name = 'deliveries_unread'")
    data = bytearray(box.path(LEDGER).read_bytes())
    data[(root - 1) * 4096 + 8 : (root - 1) * 4096 + 200] = bytes(192)
    data[root * 4096 - 60 : root * 4096] = b"x" * 60
    box.path(LEDGER).write_bytes(data)
    lines = [finding for finding in found(box) if finding.what == "ledger"]
    assert lines and all("relay ledger restore FILE" in line.advice for line in lines)


def test_an_older_schema_is_a_note_alone(box: Box) -> None:
    box.sql("PRAGMA user_version = 5")
    finding = one(box)
    assert finding.severity is Severity.NOTE and "its schema is 5" in str(finding)
    done = relay("doctor", home=box.root)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "OK"


def test_a_ledger_that_lost_its_triggers(box: Box) -> None:
    box.sql("DROP TRIGGER audit_log_keeps_rows")
    box.sql("DROP INDEX deliveries_unread")
    finding = one(box)
    assert "lacks index deliveries_unread, trigger audit_log_keeps_rows" in str(finding)
    assert "relay ledger restore FILE" in finding.advice


def test_archived_rows_without_a_file_and_files_without_a_row(box: Box) -> None:
    paths = sorted(box.path("archive").glob("*/alice/*.msg"))
    paths[0].rename(paths[0].with_name("1600000000000000001-01.msg"))
    gone, unknown = found(box)
    path = paths[0].relative_to(box.root)
    assert str(gone).startswith(f"ledger: archived messages whose file is missing: {path};")
    assert "files in the archive without a row: " in str(unknown)


def test_days_that_were_pruned_or_packed_are_no_finding(box: Box) -> None:
    (day,) = archive_pack.days(box.home)
    list(archive_pack.pack(box.home, day))
    assert found(box) == []
    past = box.path("archive/2020-01-01")
    box.sql("UPDATE messages SET file_path = replace(file_path, ?, '2020-01-01')", day)
    assert found(box) == []
    past.mkdir()
    assert "whose file is missing" in str(one(box))


def test_a_pack_that_is_gone_is_no_pruned_one(box: Box) -> None:
    (day,) = archive_pack.days(box.home)
    box.sql("UPDATE messages SET file_path = replace(file_path, ?, '2026-01-02')", day)
    os.rename(box.path("archive", day), box.path("archive/2026-01-02"))
    list(archive_pack.pack(box.home, "2026-01-02"))
    assert found(box) == []
    box.path("archive/2026-01-01.tar.zst").write_bytes(b"older")  # retention goes oldest first
    box.path("archive/2026-01-02.tar.zst").unlink()
    box.path("config.json").write_text('{"retention": {"archive_days": 30000}}')
    assert "archived messages whose file is missing: archive/2026-01-02/alice/" in str(one(box))
    box.path("archive/2026-01-01.tar.zst").unlink()
    assert found(box) == []  # it may have been the oldest


def test_a_ledger_that_does_not_agree_with_the_store(box: Box) -> None:
    waits, read = sorted(
        box.sql("SELECT message_id FROM deliveries WHERE recipient = 'bob' ORDER BY 1")
    )[:2]
    box.sql("UPDATE deliveries SET state = 'acked' WHERE message_id = ?", waits[0])
    finding = one(box)
    assert str(finding).startswith(
        f"ledger: {waits[0]}: for bob the store says written, the ledger acked; "
    )
    box.sql("UPDATE deliveries SET state = 'written' WHERE message_id = ?", waits[0])
    box.sql("DELETE FROM messages WHERE message_id = ?", read[0])
    lines = [str(finding) for finding in found(box)]
    assert any(f"{read[0]}: in the store, but not in the ledger" in line for line in lines)


def test_a_ledger_that_is_behind_is_the_next_starts_business(box: Box) -> None:
    kept = box.path(LEDGER).read_bytes()
    box.open()
    box.send("alice", "TO: bob\n\nmore")
    box.stop()
    for name in (LEDGER, LEDGER + "-wal", LEDGER + "-shm"):
        box.path(name).unlink(missing_ok=True)
    box.path(LEDGER).write_bytes(kept)
    assert [str(f) for f in found(box) if "without a row" not in str(f)] == []
    box.open()
    box.flush()
    box.stop()
    assert found(box) == []


def test_what_a_killed_relay_had_not_synced_is_the_next_starts_business(box: Box) -> None:
    box.open()
    box.send("alice", "TO: bob\nKIND: command\n\ndeploy")
    box.kill()  # the journal has it staged, the ledger written
    assert found(box) == []


# -- attachments ---------------------------------------------------------------------------


def test_attachments_missing_unnamed_and_spoiled(box: Box) -> None:
    digests = [hashlib.sha256(text).hexdigest() for text in (b"one", b"two", b"three")]
    for text in (b"one", b"two"):
        box.attach(text)
    ((waits,),) = box.sql(
        "SELECT message_id FROM deliveries WHERE state = 'written' AND recipient = 'bob'"
    )
    box.sql("INSERT INTO attachment_refs VALUES (?, ?, 0)", digests[0], waits)
    assert found(box, deep=True) == []
    box.sql("INSERT INTO attachment_refs VALUES (?, ?, 0)", digests[2], waits)
    assert f"missing, but referenced by unread messages: {digests[2]}" in str(one(box))
    box.sql("DELETE FROM attachment_refs WHERE sha256 = ?", digests[2])
    path = box.path("attachments", digests[1][:2], digests[1])
    os.utime(path, (0, 0))
    assert one(box).severity is Severity.NOTE and "not referenced by any message" in str(one(box))
    path.write_bytes(b"spoiled")
    assert f"{path}: expected SHA-256 {digests[1]}, found" in str(one(box, deep=True))


# -- beside a relay that runs --------------------------------------------------------------


@pytest.mark.home("alice", "bob", "carol")
@pytest.mark.usefixtures("running")
def test_no_false_alarms_beside_a_busy_relay_and_repair_leaves_it_alone(home: Path) -> None:
    inbox = home / "agents/bob/inbox"

    def talk() -> None:
        alice.send("*", "to all")
        alice.send("bob", "to bob")
        for message in inbox.glob("*.msg"):
            os.rename(message, inbox / ".read" / message.name)

    with Agent("alice", str(home)) as alice, Agent("carol", str(home)) as carol:
        sent = alice.send("carol", "deploy", kind="command")
        until((home / "agents/carol/inbox" / f"{sent}.msg").exists)
        carol.ack(sent, "completed")  # where it stands
        until(lambda: "acknowledged by carol" in relay("trace", sent, home=home).stdout)
        with meanwhile(talk):
            until(lambda: len(list((home / "agents/carol/inbox").glob("*.msg"))) > 20)
            done = relay("doctor", "--json", home=home)
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    alarms = [f for f in findings if f["check"] != "limits"]
    assert alarms == [], done.stdout + done.stderr
    old = home / "agents/alice/outbox/.pending/1700000000000000099-99.msg"
    old.write_text("half")
    os.utime(old, (time.time() - 50, time.time() - 50))
    done = relay("doctor", "--repair", home=home)
    assert done.returncode in (0, 3) and old.exists()
    old.unlink()
    stray = home / "agents/carol/inbox/1700000000000000099-99.msg"
    stray.write_text("put there by hand")
    os.chmod(stray, 0o600)
    done = relay("doctor", home=home)
    assert done.returncode == 3
    assert "1700000000000000099-99 in carol's inbox was not delivered by the relay" in done.stdout


def test_repair_removes_nothing_while_the_home_is_locked(box: Box) -> None:
    leftover = box.path("ledger.db.v1.bak.tmp")
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    findings = found(box)
    with fsio.locked(str(box.path(".lock"))):
        (done,) = repair(box.home, findings)
    assert "a running relay" in done[1] and leftover.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "UPDATE orchestrator_state SET value = 'zzz' WHERE key = 'journal'",
        "UPDATE messages SET discovered_at = 'abc'",
    ],
)
def test_a_value_of_another_type_in_the_ledger_is_a_finding(box: Box, wrong: str) -> None:
    """It was a traceback."""
    box.sql(wrong)
    texts = [finding.text for finding in found(box) if finding.what == "ledger"]
    assert any("a value is not of its column's type" in text for text in texts), texts
