"""How files are found: renames, files written in place, new agents, overflow, scans."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from relay.base.clock import NS_PER_S
from relay.base.home import Dirs
from relay.base.watcher import WatchEvents
from relay.delivery import event_source
from relay.delivery.intake import Intake
from tests.box import Box
from tests.procs import until

PENDING_ACTIONS = ("left_in_pending", "remove_orphan")


@pytest.mark.shows("ready 2.1")
def test_a_message_is_delivered_read_and_archived(any_box: Box) -> None:
    sent = any_box.drop("alice", text := "TO: bob\nX-Ticket: 42\n\nhi")
    any_box.tick()
    any_box.after(0.2)
    (delivered,) = any_box.inbox("bob").values()
    assert delivered.body == b"hi"
    said = {"FROM": "alice", "ID": sent, "X-TICKET": "42", "ATTEMPT": "1"}
    assert said.items() <= delivered.headers.items()
    assert list(any_box.inbox("bob")) == [sent]  # the same name as the file that was sent
    assert any_box.states(sent) == {"bob": "written"}

    any_box.flush()
    assert any_box.row(sent)["status"] == "archived"
    assert any_box.stored() == [sent] and any_box.outbox("alice") == []
    assert any_box.path(any_box.row(sent)["file_path"]).read_text() == text

    any_box.take("bob", sent)
    any_box.tick()
    assert any_box.states(sent) == {"bob": "read"}


def test_a_new_agent_is_picked_up_with_what_it_brought(any_box: Box) -> None:
    outbox = any_box.path("agents", "dora", "outbox")
    outbox.mkdir(parents=True)  # as `mkdir -p` does: no inbox, no .pending
    (outbox / any_box.name()).write_text("TO: bob\n\nfrom dora")
    any_box.tick()
    any_box.after(0.2)
    any_box.tick()

    assert any_box.bodies("bob") == ["from dora"]
    sent = any_box.drop("alice", "TO: dora\n\nwelcome")
    any_box.tick()
    any_box.after(0.2)
    assert any_box.bodies("dora") == ["welcome"]
    assert any_box.states(sent) == {"dora": "written"}
    assert outbox.stat().st_mode & 0o777 == 0o700


def left(box: Box, name: str, text: str = "TO: bob\n\na long report") -> Path:
    """Write a file into .pending of alice, and do not rename it."""
    path = box.path("agents", "alice", "outbox", ".pending", name)
    path.write_text(text)
    return path


def actions(box: Box) -> list[str]:
    """What the log says was done about files in .pending."""
    return [line["action"] for line in box.log if line.get("action") in PENDING_ACTIONS]


def test_a_message_left_in_pending_is_kept_and_its_writer_notified(box: Box) -> None:
    name = box.name()
    pending = left(box, name)
    box.after(29)
    assert actions(box) == []
    box.after(31)
    box.after(31)
    assert pending.exists() and actions(box) == ["left_in_pending"]  # once a file

    box.after(3600)
    assert not pending.exists() and not box.bodies("bob")
    (kept,) = box.path("archive").glob(f"*/alice/rejected/{name}")
    assert kept.read_text() == "TO: bob\n\na long report"
    (nack,) = box.nacks("alice")
    assert f"{name}: found in .pending, untouched for an hour" in nack
    assert f"{kept.parent.relative_to(box.root)}/" in nack
    (refused,) = box.sql("SELECT agent, file_name, reason FROM rejections")
    assert refused[:2] == ("alice", name) and "untouched for an hour" in refused[2]
    assert box.sql("SELECT count(*) FROM messages WHERE agent_name = 'alice'") == [(0,)]

    kept.rename(box.path("agents", "alice", "outbox", name))  # as the nack says
    box.tick()
    assert box.bodies("bob") == ["a long report"]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_copy_of_what_was_sent_is_no_message_left_in_pending(
    box: Box, *, is_refused: bool
) -> None:
    """Its writer could only copy it into the outbox, and was killed before it removed this one."""
    name, text = "1700000000000000001-a.msg", f"TO: {'nobody' if is_refused else 'bob'}\n\nhi"
    box.drop("alice", text, name)
    copy = box.path("agents", "alice", "outbox", ".pending", name)
    copy.write_text(text)
    for _ in range(3):
        box.after(1801, turns=3)
    assert not copy.exists() and len(box.inbox("alice")) == is_refused  # of the refusal alone
    assert list(box.inbox("bob")) == [] if is_refused else [name.removesuffix(".msg")]
    assert len(list(box.path("archive").rglob(f"alice/duplicates/{name}"))) == 1


def test_a_name_that_is_none_and_a_link_are_kept_too(box: Box) -> None:
    left(box, "report.msg")
    link = box.path("agents", "alice", "outbox", ".pending", "link.msg")
    link.symlink_to(box.path("config.json"))
    box.after(3700)
    kept = sorted(path.name for path in box.path("archive").glob("*/alice/rejected/*"))
    assert kept == ["link.msg", "report.msg"] and len(box.nacks("alice")) == 2
    assert box.path("config.json").exists()


@pytest.mark.box("alice", "bob")
def test_many_of_them_hold_up_nobody(box: Box) -> None:
    for number in range(300):
        left(box, f"1700000000{number:09d}-.msg")
    box.clock.advance(3700)
    box.drop("bob", "TO: alice\n\nhi")
    box.tick()
    assert "hi" in box.bodies("alice") and box.deadline == 0
    box.tick(2)
    assert len(box.nacks("alice")) == 300 and len(box.sql("SELECT 1 FROM rejections")) == 300


def test_what_inotify_missed_the_next_scan_finds(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nmissed")
    box.watcher.wait(0)  # the kernel told, and nobody listened
    box.tick()
    assert box.bodies("bob") == []

    box.after(30)
    assert box.bodies("bob") == ["missed"]
    box.take("bob", sent)
    box.watcher.wait(0)
    box.after(30)
    assert box.states(sent) == {"bob": "read"}


@pytest.mark.box("alice", "bob")
def test_a_scan_skips_unchanged_agents(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = scans_of_quiet_agents(box, monkeypatch)
    box.after(30, turns=1)
    assert listed == []


CHANGES = {
    "a file": lambda box: box.drop("alice", "TO: bob\n\nmissed"),
    "a file in .pending": lambda box: (outbox(box) / ".pending" / "x.msg").write_text("x"),
    "a mode": lambda box: outbox(box).chmod(0o755),
    "another outbox": lambda box: (outbox(box).rename(box.root / "x"), outbox(box).mkdir()),
    "meta.json": lambda box: (outbox(box).parent / "meta.json").write_text("{}"),
}


@pytest.mark.box("alice", "bob")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.damages
def test_a_scan_lists_an_agent_after_any_change(
    box: Box, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    listed = scans_of_quiet_agents(box, monkeypatch)
    CHANGES[change](box)
    box.watcher.wait(0)
    box.after(30, turns=1)
    assert listed == ["alice"]


@pytest.mark.box("alice", "bob")
def test_a_scan_lists_an_agent_whose_directories_have_just_changed(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change could have the same time."""
    listed: list[str] = []
    record_scans(listed, monkeypatch)
    for _ in range(3):
        box.after(30, turns=1)
    assert listed == ["alice", "bob", "operator"] * 3


def scans_of_quiet_agents(box: Box, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agents whose outboxes are listed from now on; all were, and nothing waits there."""
    listed: list[str] = []
    record_scans(listed, monkeypatch)
    monkeypatch.setattr(event_source, "RACY_NS", -NS_PER_S)  # whatever has just changed is known
    box.after(30)
    assert listed == ["alice", "bob", "operator"]
    listed.clear()
    probe, changed_ns = box.root / "probe", time.time_ns()
    probe.touch()
    until(lambda: probe.touch() or probe.stat().st_ctime_ns > changed_ns)  # the kernel's next tick
    probe.unlink()
    return listed


def outbox(box: Box) -> Path:
    return box.path("agents", "alice", "outbox")


def record_scans(listed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Intake.scan

    def recorded(self: Intake, dirs: Dirs, agent: str, on_report: object) -> bool:
        listed.append(agent)
        return scan(self, dirs, agent, on_report)

    monkeypatch.setattr(Intake, "scan", recorded)


def test_after_an_overflow_everything_is_listed(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nmissed")
    box.watcher.wait(0)
    box.clock.advance(10)  # no scan is due
    box.dispatcher.tick(
        WatchEvents(agents_changed=True, scan=True)
    )  # what wait says of an overflow
    assert box.states(sent) == {"bob": "written"}


def test_an_overflow_is_seen_as_one(box: Box) -> None:
    """The kernel's own: more events than its queue holds, none of them read."""
    with open("/proc/sys/fs/inotify/max_queued_events") as limit:
        events = int(limit.read())
    outbox = box.path("agents", "alice", "outbox")
    a, b = outbox / "a.txt", outbox / "b.txt"
    a.touch()
    for _ in range(events // 2 + 10):
        os.rename(a, b)
        os.rename(b, a)
    seen = [box.watcher.wait(0) for _ in range(20)]
    assert any(wake.scan for wake in seen)


def test_an_outbox_that_was_removed_and_made_again_is_watched_again(box: Box) -> None:
    outbox = box.path("agents", "alice", "outbox")
    os.rename(outbox, box.path("tmp", "old"))
    outbox.mkdir()
    box.after(31)
    sent = box.send("alice", "TO: bob\n\nstill here")
    assert box.states(sent) == {"bob": "written"}


@pytest.mark.shows("ready 2.2")
@pytest.mark.box("alice", "bob")
def test_the_backlog_goes_in_batches_in_order_of_discovery(box: Box) -> None:
    sent = [box.drop("alice", f"TO: bob\n\n{number}") for number in range(600)]
    box.tick()
    assert len(box.inbox("bob")) == 256
    box.tick(2)
    assert list(box.inbox("bob")) == sent
    assert box.sql("SELECT message_id FROM messages ORDER BY id") == [(m,) for m in sent]
