"""What is no message: odd files, names and sizes; and what a scan finds and removes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.base.config import DetectionSettings, LimitSettings
from relay.base.message import MAX_HEADER_BYTES, max_file_bytes
from relay.delivery.values import LATEST_NS, outbox_file_of
from tests.box import Box
from tests.delivery.support import GOOD, NAME, Desk, bodies, reason

# -- not a regular file -------------------------------------------------------------------


@pytest.mark.parametrize("renamed", [True, False])
def test_what_is_no_regular_file_is_refused_at_once(desk: Desk, renamed: bool) -> None:
    (desk.outbox / NAME).symlink_to("/dev/zero")
    desk.hint(renamed=renamed)
    (look,) = desk.take()
    assert look.message is None and look.is_unsafe
    assert "regular file" in reason([look])
    assert look.file.inode == (desk.outbox / NAME).lstat().st_ino
    assert look.file.message_id == NAME.removesuffix(".msg")
    (desk.outbox / NAME).unlink()
    desk.renamed(b"nonsense")
    (look,) = desk.take()
    assert look.message is None and not look.is_unsafe  # malformed alone


@pytest.mark.parametrize("part", ["agents/alice", "agents/alice/outbox"])
def test_an_outbox_behind_a_link_is_not_looked_into(desk: Desk, tmp_path: Path, part: str) -> None:
    desk.rename(GOOD)
    place = Path(desk.home.path(part))
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    desk.hint(renamed=True)
    assert desk.take() == []
    assert (desk.log[-1]["action"], desk.log[-1]["agent"]) == ("read_failed", "alice")
    assert desk.due_in_s() == 1  # it is looked at again: nothing is lost

    place.unlink()
    (tmp_path / "moved").rename(place)
    desk.clock.advance(1)
    assert bodies(desk.take()) == [b"hi"]


def test_one_that_cannot_be_opened_is_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    other = NAME.replace("a1", "b2")
    for name in (NAME, other):
        desk.renamed(GOOD, name)
    real = os.open

    def forbidden(path: str, *args: int, **options: int) -> int:
        if path == NAME:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", forbidden)
        assert [look.file.file_name for look in desk.take()] == [other]
    assert desk.due_in_s() == 1
    desk.clock.advance(1)
    assert bodies(desk.take()) == [b"hi"]


@pytest.mark.parametrize(
    ("mtime_ns", "kept"), [(-(10**18), 0), (2**63 - 1, LATEST_NS), (10**18, 10**18)]
)
def test_a_time_that_the_ledger_cannot_hold_is_cut_to_one_it_can(mtime_ns: int, kept: int) -> None:
    status = os.stat_result((0o100600, 7, 1, 1, 0, 0, 11, 0, 0, 0), {"st_mtime_ns": mtime_ns})
    found = outbox_file_of("alice", NAME, status)
    assert (found.mtime_ns, found.size, found.inode) == (kept, 11, 7)


# -- names ---------------------------------------------------------------------------------


def test_other_files_are_nobodys_business(desk: Desk) -> None:
    for name in ("x", "notes.txt", ".hidden.msg", f"{NAME}.tmp", NAME[:-4], ".msg"):
        desk.write(GOOD, name, mtime_s=-3600)
        desk.hint(name, renamed=True)
        desk.scan()
        assert desk.intake.backlog == 0, name


def test_a_name_that_carries_no_id_is_refused(desk: Desk) -> None:
    for name in ("hello.msg", "123-a.msg", "1769851800000000000-XYZ.msg", "é.msg"):
        desk.renamed(GOOD, name)
        (look,) = desk.take()
        assert look.message is None
        assert look.file.message_id == ""
        assert reason([look]).startswith(f"{name} is not a valid message name")
        (desk.outbox / name).unlink()


def test_a_name_that_is_no_text_ends_nothing(box: Box) -> None:
    outbox = os.fsencode(box.home.path("agents", "alice", "outbox"))
    for name in (b"\xff.msg", b"ok\xfe.msg"):
        with open(outbox + b"/.pending/x", "wb") as writer:
            writer.write(GOOD)
        os.rename(outbox + b"/.pending/x", outbox + b"/" + name)
    os.symlink("/dev/zero", outbox + b"/\xfd.msg")
    box.after(31, turns=1)
    box.flush()
    refused = box.sql("SELECT file_name FROM rejections ORDER BY 1")
    assert refused == [("\\xfd.msg",), ("\\xff.msg",), ("ok\\xfe.msg",)]
    assert box.sql("SELECT path FROM security_events") == [("agents/alice/outbox/\\xfd.msg",)]
    told = b"".join(path.read_bytes() for path in inbox_files(box))
    assert b"\\xff.msg is not a valid message name" in told
    assert os.listdir(outbox) == [b".pending"]


def inbox_files(box: Box) -> list[Path]:
    return sorted(Path(box.home.path("agents", "alice", "inbox")).glob("*.msg"))


# -- sizes ---------------------------------------------------------------------------------


def header(size: int) -> bytes:
    """A header of exactly so many bytes."""
    first = b"TO: bob\nX: " + b"x" * 4000 + b"\nY: "
    return first + b"y" * (size - len(first))


@pytest.mark.parametrize("blank", [b"\n\n", b"\n\r\n"])
def test_the_largest_header_with_the_largest_body_is_taken(desk: Desk, blank: bytes) -> None:
    data = header(MAX_HEADER_BYTES) + blank + b"b" * 1_048_576
    desk.renamed(data)
    (body,) = bodies(desk.take())
    assert len(body) == 1_048_576


def test_one_byte_more_is_too_large(desk: Desk) -> None:
    assert max_file_bytes(1_048_576) == MAX_HEADER_BYTES + 3 + 1_048_576
    desk.renamed(b"TO: bob\n\n" + b"b" * (max_file_bytes(1_048_576) + 1))
    text = reason(desk.take())
    assert "too large: the body may be 1048576" in text and "attachment" in text


@pytest.mark.parametrize("size", [11, 5000, 6157])
def test_a_body_above_its_limit_is_refused(tmp_path: Path, size: int) -> None:
    desk = Desk(tmp_path / "home", DetectionSettings(), LimitSettings(max_body_bytes=10))
    desk.renamed(b"TO: bob\n\n" + b"b" * size)
    assert "10" in reason(desk.take())
    desk.renamed(b"TO: bob\n\n" + b"b" * 10)
    assert bodies(desk.take()) == [b"b" * 10]
    desk.home.close()


def test_a_large_file_is_refused_unread(desk: Desk) -> None:
    path = desk.outbox / NAME
    with open(path, "wb") as writer:
        writer.truncate(1 << 40)
    desk.touch(path, -3600)
    desk.hint(renamed=False)
    assert f"{1 << 40} bytes, too large" in reason(desk.take())


# -- scans ---------------------------------------------------------------------------------


def test_a_scan_finds_what_no_event_announced(desk: Desk) -> None:
    desk.write(GOOD, mtime_s=-1.5)
    fresh = NAME.replace("a1", "b2")
    desk.write(b"TO: bob\n\nfresh", fresh)
    desk.scan()
    assert bodies(desk.take()) == [b"hi"]
    desk.clock.advance(0.1)
    assert bodies(desk.take()) == [b"fresh"]


def test_a_scan_does_not_take_back_that_a_file_was_renamed(desk: Desk) -> None:
    desk.renamed(GOOD)
    desk.scan()
    assert bodies(desk.take()) == [b"hi"]


def test_what_its_writer_left_in_pending_is_removed_after_an_hour(desk: Desk) -> None:
    pending = desk.outbox / ".pending"
    ages = (("new", 0), ("young", -29.9), ("warned", -31), ("just", -3600), ("old", -3600.1))
    for name, age_s in (*ages, ("x", -9999), ("1000000001-01.msg", -9999)):
        desk.write(b"half", f".pending/{name}", mtime_s=age_s)
    (pending / "folder").mkdir()
    os.utime(pending / "folder", (0, 0))
    (pending / "link").symlink_to(desk.outbox)
    os.utime(pending / "link", (0, 0), follow_symlinks=False)
    desk.scan()
    kept = ["1000000001-01.msg", "folder", "just", "new", "warned", "young"]
    assert sorted(os.listdir(pending)) == kept
    said = {(entry["file"], entry["action"], entry["level"]) for entry in desk.log}
    assert said == {
        ("link", "remove_orphan", "warning"),
        ("old", "remove_orphan", "warning"),
        ("x", "remove_orphan", "warning"),
        ("just", "left_in_pending", "warning"),
        ("warned", "left_in_pending", "warning"),
    }
    assert desk.outbox.is_dir()


def test_an_orphan_that_its_writer_renames_meanwhile_is_no_fault(desk: Desk) -> None:
    pending = desk.outbox / ".pending"
    for name in ("one", "two"):
        desk.write(b"half", f".pending/{name}", mtime_s=-4000)

    removed: list[object] = []

    def renamed(event: str, **facts: object) -> None:
        removed.append(facts["file"])
        for name in os.listdir(pending):
            (pending / name).rename(desk.outbox / name)

    desk.intake._pending_files._log = renamed
    desk.scan()
    assert os.listdir(pending) == []
    assert len(removed) == 1
    assert {"one", "two"} & set(os.listdir(desk.outbox)) == {"one", "two"} - set(removed)


def test_an_outbox_without_pending_is_no_fault(desk: Desk) -> None:
    (desk.outbox / ".pending").rmdir()
    desk.written(GOOD, mtime_s=-1.5)
    assert bodies(desk.take()) == [b"hi"]
    desk.scan()
    assert (desk.outbox / ".pending").is_dir()


def test_the_orphans_age_is_configured(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "home", DetectionSettings(orphan_after_s=5), LimitSettings())
    desk.write(b"half", ".pending/x", mtime_s=-6)
    desk.scan()
    assert os.listdir(desk.outbox / ".pending") == []
    desk.home.close()
