"""Archived files as rows, packed or not, damaged ones told."""

from __future__ import annotations

import os
from pathlib import Path

from relay.audit.sources import originals
from relay.audit.sources.originals import ArchiveUnit, Original, read_unit
from relay.base import archive_pack
from relay.base.home import Home
from relay.base.names import sha256_hex

DAY = "2026-01-31"
TEXT = b"TO: bob\n\nhello\n"
ID = "1769851800000000001-a1"


def put(home: Path, path: str, data: bytes = TEXT) -> Path:
    """A file of the archive."""
    target = home / "archive" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target


def pack(home: Path, day: str = DAY) -> None:
    """Pack a day as the relay does."""
    with Home(str(home)) as opened:
        assert list(archive_pack.pack(opened, day))[-1] is not None


def made(tmp_path: Path) -> Path:
    """A home with an empty archive."""
    Home.create(str(tmp_path / "home")).close()
    return tmp_path / "home"


def rows(home: Path) -> dict[str, Original]:
    """Every row, read without Spark."""
    units = (unit for of_day in originals.plan(str(home)).values() for unit in of_day)
    found = [row for unit in units for row in read_unit(str(home), unit)]
    assert len({row.path for row in found}) == len(found)
    return {row.path: row for row in found}


def test_folders_and_packs_give_the_same_rows(tmp_path: Path) -> None:
    home = made(tmp_path)
    put(home, f"{DAY}/alice/{ID}.msg")
    put(
        home,
        f"{DAY}/alice/1769851800000000002-a2.msg",
        b"TO: bob\nKIND: ack\nRE: 1769851800000000009-b1\n\n",
    )
    put(home, f"{DAY}/alice/rejected/no message.msg.1", b"\xff")
    put(home, f"{DAY}/bob/duplicates/{ID}.msg.2")
    put(home, "2026-01-30/carol/1769765400000000003-a3.msg", b"TO: bob\r\n\r\nhello\n")
    before = rows(home)
    assert {(row.kind, row.agent, row.message_id, row.checksum) for row in before.values()} == {
        ("original", "alice", ID, sha256_hex(b"hello\n")),
        ("original", "alice", "1769851800000000002-a2", sha256_hex(b"received")),
        ("rejected", "alice", "no message", None),
        ("duplicate", "bob", ID, sha256_hex(b"hello\n")),
        ("original", "carol", "1769765400000000003-a3", sha256_hex(b"hello\n")),
    }
    pack(home)
    after = rows(home)
    assert after == {
        path: row._replace(pack=f"archive/{DAY}.tar.zst", changed_at=None)
        if row.day == DAY
        else row
        for path, row in before.items()
    }


def test_a_file_that_is_too_large_is_a_row_without_its_content(tmp_path: Path) -> None:
    home = made(tmp_path)
    put(home, f"{DAY}/alice/rejected/large.msg", b"x" * (originals.MOST_BYTES + 1))
    (row,) = rows(home).values()
    assert (row.size, row.checksum) == (originals.MOST_BYTES + 1, None)


def test_what_is_no_regular_file_is_a_row_and_stops_no_other(tmp_path: Path) -> None:
    home = made(tmp_path)
    put(home, f"{DAY}/alice/{ID}.msg")
    folder = home / "archive" / DAY / "alice" / "rejected"
    folder.mkdir()
    (folder / "link.msg").symlink_to("/etc/passwd")
    (folder / "folder.msg").mkdir()
    os.mkfifo(folder / "fifo.msg")
    (folder / os.fsdecode(b"no\xfftext\n.msg")).write_bytes(b"")
    found = rows(home)
    problems = {path.rpartition("/")[2]: row.problem for path, row in found.items()}
    assert problems == {
        f"{ID}.msg": None,
        "link.msg": "not a regular file",
        "folder.msg": "not a regular file",
        "fifo.msg": "not a regular file",
        "no\\xfftext\\n.msg": None,
    }
    assert found[f"archive/{DAY}/alice/{ID}.msg"].checksum == sha256_hex(b"hello\n")


def test_a_day_that_is_packed_while_it_is_read_is_seen(tmp_path: Path) -> None:
    home = made(tmp_path)
    paths = {f"archive/{DAY}/{agent}/{ID}.msg" for agent in ("alice", "bob")}
    for path in paths:
        put(home, path.removeprefix("archive/"))
    (units,) = originals.plan(str(home)).values()
    assert units == [ArchiveUnit(DAY, "alice", ""), ArchiveUnit(DAY, "bob", "")]
    first = list(read_unit(str(home), units[0]))
    pack(home)
    second = list(read_unit(str(home), units[1]))
    assert {row.path for row in first + second} == paths
    assert [row.pack for row in second] == [f"archive/{DAY}.tar.zst"]


def test_a_damaged_pack_is_a_row_with_its_name(tmp_path: Path) -> None:
    home = made(tmp_path)
    put(home, f"{DAY}/alice/{ID}.msg", b"TO: bob\n\n" + os.urandom(5000).hex().encode())
    put(home, f"2026-02-01/alice/{ID[:-1]}2.msg")
    pack(home)
    path = home / "archive" / f"{DAY}.tar.zst"
    path.write_bytes(path.read_bytes()[:-200])
    found = rows(home)
    damaged = found[f"archive/{DAY}.tar.zst"]
    assert (damaged.kind, damaged.message_id) == ("pack", None)
    assert f"archive/{DAY}.tar.zst at " in str(damaged.problem)
    assert len(found) >= 2 and f"archive/2026-02-01/alice/{ID[:-1]}2.msg" in found
