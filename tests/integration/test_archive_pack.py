"""Days of the archive in one file each: nothing goes that is not proved to be packed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from backports import zstd

from relay.base import archive_pack
from relay.base.archive_pack import PackedDay
from relay.base.errors import FormatError
from relay.base.home import Home
from relay.delivery.file_ops import render_retry
from tests.box import Box
from tests.disk import flip, killed_before, steps_of

pytestmark = pytest.mark.shows("ready 2.4")

DAY = "2026-01-02"
FILES = {
    f"archive/{DAY}/alice/1767312000000000001-01.msg": b"TO: bob\n\none",
    f"archive/{DAY}/alice/rejected/hello.msg": b"no message",
    f"archive/{DAY}/bob/1767312000000000002-02.msg": b"TO: alice\n\n" + b"two" * 9000,
    f"archive/{DAY}/bob/rejected/" + os.fsdecode(b"\xff\n odd name"): b"odd",
}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home.create(str(tmp_path / "home"), b"{}")
    plant(made)
    return made


def plant(home: Home) -> None:
    shutil.rmtree(home.path("archive"))
    for path, data in FILES.items():
        target = Path(home.path(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def pack(home: Home, day: str = DAY) -> PackedDay:
    *_, packed = archive_pack.pack(home, day)
    assert packed is not None
    return packed


def everything(home: Home) -> dict[str, bytes | None]:
    """Every file by its path, wherever it is; both places must agree where both have it."""
    found: dict[str, bytes | None] = {}
    with home.dirs() as dirs:
        for path in FILES:
            packed = archive_pack.read(dirs, path)
            plain = Path(home.path(path))
            if plain.exists() and packed is not None:
                assert plain.read_bytes() == packed
            found[path] = plain.read_bytes() if plain.exists() else packed
    return found


def test_a_day_becomes_one_file_and_all_of_it_is_found(home: Home) -> None:
    packed = pack(home)
    assert packed.files == len(FILES) and packed.n_bytes == sum(map(len, FILES.values()))
    assert os.listdir(home.path("archive")) == [f"{DAY}.tar.zst"]
    assert everything(home) == FILES
    assert os.stat(home.path("archive", f"{DAY}.tar.zst")).st_mode & 0o777 == 0o600
    for path in FILES:
        assert archive_pack.locate(home, path) == f"archive/{DAY}.tar.zst"
    assert archive_pack.locate(home, f"archive/{DAY}/alice/other.msg") == "pruned"


def test_any_tar_reads_it(home: Home, tmp_path: Path) -> None:
    pack(home)
    plain = zstd.decompress(Path(home.path("archive", f"{DAY}.tar.zst")).read_bytes())
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", tmp_path / "out"], input=plain, check=True)
    for path, data in FILES.items():
        assert (tmp_path / "out" / path).read_bytes() == data


def test_what_comes_later_is_packed_with_the_rest(home: Home) -> None:
    pack(home)
    late = Path(home.path("archive", DAY, "carol", "1767312000000000003-03.msg"))
    late.parent.mkdir(parents=True)
    late.write_bytes(b"late")
    assert pack(home).files == 1
    with home.dirs() as dirs:
        assert archive_pack.read(dirs, f"archive/{DAY}/carol/{late.name}") == b"late"
    assert everything(home) == FILES and not late.exists()


def test_links_and_large_files_stay_where_they_are(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_pack, "_MOST_FILE", 10_000)
    link = Path(home.path("archive", DAY, "alice", "link"))
    link.symlink_to("/etc/passwd")
    assert pack(home).files == 3
    left = [path.name for path in Path(home.path("archive", DAY)).rglob("*") if not path.is_dir()]
    assert sorted(left) == ["1767312000000000002-02.msg", "link"]


def test_a_pack_that_cannot_be_read_back_removes_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = archive_pack._verify_pack

    def spoiled(dirs, temp, files):  # type: ignore[no-untyped-def]
        flip(Path(temp), os.stat(temp).st_size // 2, 0xFF)
        return compare(dirs, temp, files)

    monkeypatch.setattr(archive_pack, "_verify_pack", spoiled)
    with pytest.raises(FormatError):
        pack(home)
    assert os.listdir(home.path("archive")) == [DAY]
    assert everything(home) == FILES


def test_a_damaged_pack_is_not_written_over(home: Home) -> None:
    target = Path(home.path("archive", f"{DAY}.tar.zst"))
    target.write_bytes(b"no pack")
    with pytest.raises(FormatError):
        pack(home)
    assert target.read_bytes() == b"no pack"
    assert {path: Path(home.path(path)).read_bytes() for path in FILES} == FILES
    assert archive_pack.locate(home, f"archive/{DAY}/x/y.msg").endswith("damaged")


def test_killed_at_any_step_every_file_is_in_one_place_at_least(home: Home) -> None:
    steps = steps_of(lambda: pack(home))
    for number in range(1, len(steps) + 1):
        plant(home)
        with killed_before(number) as calls:
            pack(home)
        assert len(calls) == number
        assert everything(home) == FILES, steps[number - 1]
        pack(home)  # the next run
        assert os.listdir(home.path("archive")) == [f"{DAY}.tar.zst"]
        assert everything(home) == FILES
    assert len(steps) > 8


def test_a_message_is_delivered_again_from_its_pack(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\nhi")
    box.flush()
    path = str(box.row(sent)["file_path"])
    (row,) = box.ledger.rows([sent]).values()
    with box.home.dirs() as dirs:
        plain = render_retry(dirs, box.store, row, 2)
        pack(box.home, path.split("/")[1])
        assert not box.path(path).exists()
        box.store.messages.find_by_relay_id = lambda *_, **__: None  # type: ignore[method-assign]
        again = render_retry(dirs, box.store, row, 2)
    assert b"hi" in again and plain.split(b"\n\n", 1)[1] == again.split(b"\n\n", 1)[1]
