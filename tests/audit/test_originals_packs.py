"""Packs read fast: the same members as the library's reader gives."""

from __future__ import annotations

import contextlib
import io
import tarfile
from pathlib import Path

import pytest

from relay.audit.sources import originals
from relay.base import archive_pack
from relay.base.archive_pack import zstd
from relay.base.errors import FormatError

NAMES = (
    "archive/2026-01-31/alice/1769851800000000001-a1.msg",
    "archive/2026-01-31/alice/rejected/" + "long " * 30 + ".msg",
    "archive/2026-01-31/alice/rejected/" + "ü" * 60 + "\udcff.msg",
)


def written(path: Path, types: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """A pack of files of many sizes; what is in it."""
    members = {
        f"{name}{number}": b"x" * number for name in NAMES for number in (0, 1, 511, 512, 513)
    }
    members["archive/big"] = bytes(range(256)) * 10_000
    with zstd.ZstdFile(path, "w") as plain:
        with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name, data in members.items():
                facts = tarfile.TarInfo(name)
                facts.size = len(data)
                facts.type = (types or {}).get(name, tarfile.REGTYPE)
                tar.addfile(facts, io.BytesIO(data))
    return members


def read(path: Path) -> list[tuple[str, bytes]]:
    """Every member."""
    with path.open("rb") as file:
        return list(originals.pack_members(file, "a pack"))


def test_every_member_is_as_it_was_put_in(tmp_path: Path) -> None:
    members = written(tmp_path / "pack")
    assert read(tmp_path / "pack") == list(members.items())


def test_what_it_does_not_know_it_refuses(tmp_path: Path) -> None:
    written(tmp_path / "pack", {"archive/big": tarfile.SYMTYPE})
    with pytest.raises(FormatError, match=r"a pack at .*expected files alone"):
        read(tmp_path / "pack")


@pytest.mark.parametrize("at", [0, 100, 130, 150, 257])
def test_a_header_that_is_not_as_it_was_written_is_an_error(tmp_path: Path, at: int) -> None:
    written(tmp_path / "pack")
    plain = bytearray(zstd.decompress((tmp_path / "pack").read_bytes()))
    plain[at] ^= 1
    (tmp_path / "pack").write_bytes(zstd.compress(bytes(plain)))
    with pytest.raises(FormatError, match="a pack at 0: "):
        read(tmp_path / "pack")


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.99])
def test_one_that_is_cut_short_is_an_error(tmp_path: Path, keep: float) -> None:
    written(tmp_path / "pack")
    whole = (tmp_path / "pack").read_bytes()
    cut = int(keep * len(whole)) if keep < 1 else int(keep)
    (tmp_path / "pack").write_bytes(whole[:cut])
    with pytest.raises(FormatError, match="a pack at "):
        read(tmp_path / "pack")


def test_no_flipped_byte_gives_other_members(tmp_path: Path) -> None:
    """Also one behind which everything inflates: the pack has a checksum of the whole."""
    members = {f"archive/{number}.msg": b"TO: bob\n\nhi %d" % number for number in range(9)}
    with (tmp_path / "pack").open("wb") as raw, archive_pack.create(raw) as plain:
        with tarfile.open(fileobj=plain, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name, data in members.items():
                archive_pack.add(tar, name, data, 1769851800)
    whole, unseen = (tmp_path / "pack").read_bytes(), 0
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (tmp_path / "pack").write_bytes(damaged)
        for reader in (read, read_by_library):
            try:
                assert reader(tmp_path / "pack") == list(members.items()), at
                unseen += 1
            except FormatError:
                pass
    assert unseen < len(whole) // 10  # bits of the frame's header that have no meaning


def read_by_library(path: Path) -> list[tuple[str, bytes]]:
    with contextlib.ExitStack() as stack:
        return [(name, data) for name, data, _ in archive_pack.members(stack, str(path))]
