"""How files are found: renames, files written in place, new agents, overflow, scans."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.config import Config, Detection
from relay.flow.watcher import InotifyWatcher, Wake
from tests.box import Box


@pytest.fixture(params=["inotify", "scan"])
def any_box(request: pytest.FixtureRequest, tmp_path: Path) -> Box:
    """The same rules hold whether the kernel tells or a scan finds."""
    config = Config(detection=Detection(watcher=request.param))
    return Box(tmp_path / "home", "alice", "bob", config=config)


def settle(box: Box, seconds: float = 0.2) -> None:
    """Time goes on, and the loop turns."""
    box.clock.advance(seconds)
    box.tick(2)


def test_a_message_is_delivered_read_and_archived(any_box: Box) -> None:
    sent = any_box.drop("alice", "TO: bob\n\nhi")
    any_box.tick()
    settle(any_box)
    assert any_box.bodies("bob") == ["hi"]
    any_box.flush()
    assert any_box.row(sent)["status"] == "archived"
    any_box.take("bob", sent)
    any_box.tick()
    assert any_box.states(sent) == {"bob": "read"}
    any_box.close()


def test_a_new_agent_is_picked_up_with_what_it_brought(any_box: Box) -> None:
    outbox = any_box.path("agents", "dora", "outbox")
    outbox.mkdir(parents=True)  # as `mkdir -p` does: no inbox, no .pending
    (outbox / any_box.name()).write_text("TO: bob\n\nfrom dora")
    any_box.tick()
    settle(any_box)
    any_box.tick()

    assert any_box.bodies("bob") == ["from dora"]
    sent = any_box.drop("alice", "TO: dora\n\nwelcome")
    any_box.tick()
    settle(any_box)
    assert any_box.bodies("dora") == ["welcome"]
    assert any_box.states(sent) == {"dora": "written"}
    assert outbox.stat().st_mode & 0o777 == 0o700
    any_box.close()


def test_a_file_written_in_place_waits_until_it_is_still(any_box: Box) -> None:
    path = any_box.path("agents", "alice", "outbox", any_box.name())
    path.write_text("TO: bob\n\nhal")
    any_box.tick()
    assert any_box.bodies("bob") == []
    with path.open("a") as file:
        file.write("f and half")
    os.utime(path, ns=(any_box.clock.now_ns(), any_box.clock.now_ns()))
    any_box.tick()
    assert any_box.bodies("bob") == []

    settle(any_box)
    assert any_box.bodies("bob") == ["half and half"]
    any_box.close()


def test_one_that_does_not_parse_has_five_seconds(any_box: Box) -> None:
    path = any_box.path("agents", "alice", "outbox", any_box.name())
    path.write_text("TO: bo")
    any_box.tick()
    settle(any_box, 1)
    assert any_box.inbox("alice") == {}

    settle(any_box, 5)
    assert "the body is empty" in any_box.nacks("alice")[0]
    any_box.close()


def test_an_empty_file_has_five_seconds(any_box: Box) -> None:
    path = any_box.path("agents", "alice", "outbox", any_box.name())
    path.touch()
    any_box.tick()
    settle(any_box, 2)
    assert any_box.inbox("alice") == {}

    settle(any_box, 5)
    assert "the file is empty" in any_box.nacks("alice")[0]
    any_box.close()


def test_a_file_still_in_pending_under_the_same_name_is_not_taken(box: Box) -> None:
    name = box.name()
    pending = box.path("agents", "alice", "outbox", ".pending", name)
    pending.write_text("TO: bob\n\nnot yet")
    box.path("agents", "alice", "outbox", name).write_text("TO: bob\n\nhi")
    box.tick()
    settle(box)
    assert box.bodies("bob") == []

    pending.unlink()
    settle(box)
    assert box.bodies("bob") == ["hi"]


def test_a_file_its_writer_left_in_pending_is_removed_after_30_s(box: Box) -> None:
    pending = box.path("agents", "alice", "outbox", ".pending", box.name())
    pending.write_text("TO: bob\n\nhalf a mess")
    settle(box, 29)
    assert pending.exists()
    settle(box, 31)
    assert not pending.exists()
    assert [line["action"] for line in box.log if line["action"] == "remove_orphan"]


def test_what_inotify_missed_the_next_scan_finds(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nmissed")
    box.watcher.wait(0)  # the kernel told, and nobody listened
    box.tick()
    assert box.bodies("bob") == []

    settle(box, 30)
    assert box.bodies("bob") == ["missed"]
    box.take("bob", sent)
    box.watcher.wait(0)
    settle(box, 30)
    assert box.states(sent) == {"bob": "read"}


def test_after_an_overflow_everything_is_listed(box: Box) -> None:
    sent = box.drop("alice", "TO: bob\n\nmissed")
    box.watcher.wait(0)
    box.clock.advance(0.2)
    box.dispatcher.tick(Wake(agents_changed=True, scan=True))  # what wait says of an overflow
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
    settle(box, 31)
    sent = box.send("alice", "TO: bob\n\nstill here")
    assert box.states(sent) == {"bob": "written"}


def test_where_inotify_has_no_watch_left_the_agent_is_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InotifyWatcher, "add_agent", lambda self, agent: agent != "alice")
    box = Box(tmp_path / "home", "alice", "bob")
    sent = box.drop("alice", "TO: bob\n\nhi")
    settle(box, 0.2)
    settle(box, 0.2)
    assert box.states(sent) == {"bob": "written"}
    assert any("fs.inotify.max_user_watches" in line["event"] for line in box.log)
    box.close()


def test_an_agent_whose_directory_is_a_link_is_none(box: Box, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "outbox").mkdir(parents=True)
    box.path("agents", "mallory").symlink_to(elsewhere)
    settle(box, 31)
    assert "mallory" not in box.roster.agents
    assert sorted(p.name for p in elsewhere.iterdir()) == ["outbox"]


def test_the_backlog_goes_in_batches_in_order_of_discovery(tmp_path: Path) -> None:
    box = Box(tmp_path / "home", "alice", "bob")
    sent = [box.drop("alice", f"TO: bob\n\n{number}") for number in range(600)]
    box.tick()
    assert len(box.inbox("bob")) == 256
    box.tick(2)
    assert list(box.inbox("bob")) == sent
    assert box.sql("SELECT message_id FROM messages ORDER BY id") == [(m,) for m in sent]
    box.close()
