"""Final messages leave the live store for an archive, once, and are found there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from relay.acomm import store_file
from relay.acomm.model import (
    ChannelConfig,
    ChannelType,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Retention,
    RetentionKind,
    SortField,
    SortOrder,
)
from relay.base.config import StoreSettings
from relay.base.errors import FormatError
from relay.engine import archives
from relay.engine.archive_files import ArchiveFiles
from relay.engine.archives import Roller
from relay.engine.checkpoint import InlineExecutor
from relay.engine.engine import Engine, state_of
from relay.engine.state import State
from tests.engine.support import BY_FILES, accept
from tests.fakes import FakeClock

SETTINGS = StoreSettings(roll_after_s=60, roll_messages=4, active_messages=2000)
KEY = bytes(range(32))


class Scene:
    """A store whose owner delivers, and what rolls it; a clock to turn."""

    def __init__(
        self, folder: Path, settings: StoreSettings = SETTINGS, key: bytes | None = None
    ) -> None:
        self.clock = FakeClock()
        self.folder = folder
        self.key = key
        self.settings = settings
        self.open()
        self.channel = self.store.channels.create("c", ChannelType.GROUP, "a")
        self.store.channels.join(self.channel.id, "b")

    def open(self, state: State | None = None) -> None:
        files = ArchiveFiles(str(self.folder), self.key)
        self.store = Engine(
            self.clock, state, rules=BY_FILES, archive_files=files, keeps_events=True
        )
        self.roller = Roller(self.store.archives, self.settings, InlineExecutor())

    def reopened(self) -> None:
        """Written, and loaded again."""
        self.open(state_of(self.store.snapshot().file()))

    def send(self, text: str, kind: MessageType = MessageType.TEXT, **fields: object) -> Message:
        """A message from a, delivered to b; a second later than the one before."""
        self.clock.advance(1)
        message = accept(self.store, self.channel.id, "a", kind, text, **fields)
        self.store.deliveries.deliver(message.id, ["b"])
        return message

    def roll(self, seconds: float = 0) -> None:
        """Time goes on, and everything that is due is done."""
        self.clock.advance(seconds)
        for _ in range(100):
            self.roller.step()
            due = self.roller.due_ns()
            if due is not None and due > self.clock.monotonic_ns():
                return
        raise AssertionError("it does not come to an end")

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "archive")


def bodies(messages: list[Message]) -> list[str]:
    return [message.content.decode() for message in messages]


def test_what_is_final_and_old_enough_is_rolled_and_numbers_continue(scene: Scene) -> None:
    sent = [scene.send(f"message {n}") for n in range(5)]
    scene.roll(30)
    assert len(scene.store.state.messages) == 5  # too young
    scene.roll(61)
    assert len(scene.store.state.messages) == 0
    (note,) = scene.store.state.archives
    assert (note.messages, note.first_id, note.last_id) == (5, sent[0].id, sent[-1].id)
    assert (note.first_at, note.last_at) == (sent[0].created_at, sent[-1].created_at)
    assert scene.files() == [note.name]
    assert note.name.endswith("/000001.acomm")
    file = store_file.read(str(scene.folder / note.name))
    assert [m.status for m in file.messages] == [MessageStatus.DELIVERED] * 5
    assert os.path.getsize(scene.folder / note.name) == note.size
    scene.reopened()
    assert scene.store.channels.get(scene.channel.id).message_count == 5
    assert scene.send("next").id == 6
    assert scene.store.state.next_archive == 2


def test_what_still_waits_for_something_stays(scene: Scene) -> None:
    for n in range(4):
        scene.send(f"text {n}")
    command = scene.send("deploy", MessageType.COMMAND)
    held = accept(scene.store, scene.channel.id, "a", MessageType.TEXT, "not written yet")
    scene.roll(200)
    assert set(scene.store.state.messages) == {command.id, held.id}
    scene.store.deliveries.record_answer(command, "b", "completed", ends=True)
    scene.store.deliveries.deliver(held.id, ["b"])
    for n in range(4):
        scene.send(f"more {n}")
    scene.roll(200)
    assert command.id not in scene.store.state.messages
    assert len(scene.store.state.archives) == 2


def test_few_wait_for_more_and_a_day_at_most(scene: Scene) -> None:
    scene.send("alone")
    scene.roll(3600)
    assert scene.files() == []
    scene.roll(86_400)
    assert len(scene.files()) == 1
    assert len(scene.store.state.messages) == 0


def test_under_pressure_age_does_not_matter(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "archive", replace(SETTINGS, active_messages=20))
    for n in range(10):
        scene.send(str(n))
    scene.roll()
    assert len(scene.store.state.messages) == 10
    scene.send("one too many")
    scene.roll(61)
    assert len(scene.store.state.messages) == 0


def test_one_sent_while_the_clock_was_ahead_holds_up_no_other(tmp_path: Path) -> None:
    scene = Scene(tmp_path, replace(SETTINGS, active_messages=20))
    scene.clock.jump(864_000)
    scene.send("its time is in ten days")
    scene.clock.jump(-864_000)
    for number in range(4):
        scene.send(f"message {number}")
    scene.roll(61)
    assert bodies([*scene.store.state.messages.values()]) == ["its time is in ten days"]
    for number in range(11):
        scene.send(f"message {number}")
    scene.roll()  # under pressure its age does not matter either
    assert list(scene.store.state.messages) == []


def test_so_many_in_one_archive(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_ROLLED", 4)
    for n in range(10):
        scene.send(str(n))
    for _ in range(3):
        scene.roll(100)
    assert [note.messages for note in scene.store.state.archives] == [4, 4]
    assert len(scene.store.state.messages) == 2


def test_in_slices(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "SCAN_BATCH", 3)
    monkeypatch.setattr(archives, "EVICT_BATCH", 2)
    for n in range(7):
        scene.send(str(n))
    scene.clock.advance(100)
    left = []
    for _ in range(9):
        scene.roller.step()
        left.append(len(scene.store.state.messages))
    assert left == [7, 7, 7, 7, 7, 5, 3, 1, 0]  # begin, look three times, count, take out


def test_killed_midway_the_rest_leaves_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "EVICT_BATCH", 2)
    for n in range(5):
        scene.send(str(n))
    scene.clock.advance(100)
    while not scene.store.state.evicting:
        scene.roller.step()
    scene.roller.step()
    assert len(scene.store.state.evicting) == 3
    scene.reopened()
    assert len(scene.store.state.messages) == 3
    assert scene.store.messages.query().total_count == 5  # nothing twice
    assert len(scene.store.messages.search("")) == 5
    scene.roll()
    assert len(scene.store.state.messages) == 0
    assert len(scene.store.state.archives) == 1


def test_what_is_archived_by_retention_is_rolled_too(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "archive")
    keep = ChannelConfig(retention=Retention(RetentionKind.COUNT, 2))
    scene.channel = scene.store.channels.create("short", ChannelType.GROUP, "a", keep)
    scene.store.channels.join(scene.channel.id, "b")
    for n in range(8):
        scene.send(str(n))
    assert len(scene.store.state.archive) == 6
    scene.roll(100)
    assert scene.store.state.archive == {}
    assert scene.store.messages.query().total_count == 2
    everything = MessageFilter(include_archived=True)
    assert scene.store.messages.query(everything).total_count == 8


def test_what_is_past_its_retention_by_time_goes_though_nobody_sends(scene: Scene) -> None:
    scene.store.channels.configure(
        scene.channel.id, retention=Retention(RetentionKind.DURATION, 300)
    )
    scene.send("old")
    scene.roll(61)
    assert scene.store.state.archive == {}
    scene.roll(301)
    assert len(scene.store.state.messages) == 0
    assert [m.content for m in scene.store.state.archive.values()] == [b"old"]


def test_an_archive_that_cannot_be_written_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    for n in range(5):
        scene.send(str(n))
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveFiles, "write", full)
        scene.roll(100)
    assert "No space left" in scene.roller.error
    assert len(scene.store.state.messages) == 5
    scene.roll(61)
    assert scene.roller.error == ""
    assert len(scene.store.state.messages) == 0


# -- what is asked for later ---------------------------------------------------------------


@pytest.fixture
def history(scene: Scene) -> Scene:
    """Three archives of five, and three live ones."""
    thread = "7b0e4f6a-1d2c-4a3b-8c4d-5e6f70819203"
    for archive in range(3):
        for n in range(5):
            fields = {"metadata": {"relay_id": f"{archive}-{n}", "to": "#c"}}
            if n == 2:
                fields["correlation_id"] = thread  # type: ignore[assignment]
            scene.send(f"archive {archive} message {n}", **fields)
        scene.roll(100)
    for n in range(3):
        scene.send(f"live {n}", correlation_id=thread if n == 1 else None)
    assert len(scene.store.state.archives) == 3
    return scene


def test_queries_look_into_archives(history: Scene) -> None:
    store = history.store
    newest = store.messages.query(MessageFilter(limit=4))
    assert bodies(newest.messages) == ["live 2", "live 1", "live 0", "archive 2 message 4"]
    assert (newest.total_count, newest.has_more) == (18, True)
    oldest = store.messages.query(MessageFilter(limit=6, sort_order=SortOrder.ASCENDING))
    assert bodies(oldest.messages)[-1] == "archive 1 message 0"
    second = store.messages.query(MessageFilter(limit=5, offset=5))
    assert bodies(second.messages)[0] == "archive 2 message 2"
    by_type = store.messages.query(MessageFilter(sort_by=SortField.MESSAGE_TYPE, limit=100))
    assert len(by_type.messages) == 18
    assert len(store.messages.search("message 3")) == 3
    assert store.messages.query(MessageFilter(sender="nobody")).total_count == 0


def watched(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The ends of the paths that a function of store_file is called with."""
    paths: list[str] = []
    real = getattr(store_file, name)

    def call(path: str) -> object:
        paths.append(path[-12:])
        return real(path)

    monkeypatch.setattr(store_file, name, call)
    return paths


def test_only_what_is_needed_is_read(history: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    read, aids = watched(monkeypatch, "read"), watched(monkeypatch, "read_indexes")
    store = history.store
    middle = store.state.archives[1]
    wanted = MessageFilter(after=middle.first_at - 1, before=middle.last_at + 1)
    assert store.messages.query(wanted).total_count == 5
    assert (read, aids) == (["000002.acomm"], [])
    assert store.messages.thread("00000000-0000-4000-8000-000000000000") == []
    assert read == ["000002.acomm"]  # the indexes said no
    assert len(aids) == 3


def test_a_message_and_a_thread_are_found(history: Scene) -> None:
    messages = history.store.messages
    found = messages.find_by_relay_id("1-3", include_archived=True)
    assert found is not None and found.content == b"archive 1 message 3"
    assert messages.find_by_relay_id("1-3") is None
    assert messages.recipients(found.id) == ("b",)
    assert messages.find_by_relay_id("9-9", include_archived=True) is None
    assert bodies(messages.thread("7b0e4f6a-1d2c-4a3b-8c4d-5e6f70819203")) == [
        *(f"archive {number} message 2" for number in range(3)),
        "live 1",
    ]


def test_looking_one_up_reads_its_archive_alone_and_decodes_no_other_message(
    history: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = watched(monkeypatch, "read_bytes")
    monkeypatch.setattr(store_file, "decode", None)
    store = history.store
    for _ in range(2):
        assert store.messages.find_by_relay_id("nobody-knows", include_archived=True) is None
    assert read == []
    for _ in range(2):
        found = store.messages.find_by_relay_id("0-3", include_archived=True)
        assert found is not None and store.messages.recipients(found.id) == ("b",)
    assert read == ["000001.acomm"]


def test_a_damaged_archive_is_named(history: Scene) -> None:
    name = history.store.state.archives[0].name
    path = history.folder / name
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"000001\.acomm at .*SHA-256"):
        history.store.messages.search("message 0")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        history.store.messages.search("message 0")
    after = MessageFilter(after=history.store.state.archives[0].last_at)
    assert history.store.messages.query(after).messages  # needs none of it


def test_what_a_crash_left_is_set_aside(history: Scene) -> None:
    archives = history.store.archives.files
    assert archives is not None
    folder = history.folder / "2026-01-31"
    folder.mkdir(exist_ok=True)
    (folder / "000004.acomm").write_bytes(b"never listed")
    (folder / "000002.acomm").write_bytes(b"of another time")
    state = history.store.state
    (aside,) = archives.rename_strays(state.archives, state.next_archive)
    assert aside.endswith("2026-01-31/000004.acomm.stray")
    assert archives.rename_strays(state.archives, state.next_archive) == []
    assert len(history.store.messages.search("")) == 18


def test_sealed_like_the_store(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "archive", key=KEY)
    for n in range(5):
        scene.send(f"secret {n}")
    scene.roll(100)
    (note,) = scene.store.state.archives
    assert b"secret" not in store_file.read(str(scene.folder / note.name)).messages[0].content
    assert len(scene.store.messages.search("secret")) == 5
