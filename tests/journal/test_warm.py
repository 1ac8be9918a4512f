"""Tier 1: what is compressed is the segment again, and one record costs one frame."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.base import fsio
from relay.base.errors import FormatError, IntegrityError
from relay.journal import warm
from relay.journal.segment import warm_name
from relay.journal.warm import FRAME_BYTES, WarmSegment, compress
from tests.disk import killed_before
from tests.journal.payloads import Made, payload, segment, with_dictionary

Pack = Callable[..., Path]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Compress a segment into tmp_path/warm."""
    folder = tmp_path / "warm"
    folder.mkdir()

    def run(made: Made, number: int = 0) -> Path:
        source = made.write(tmp_path / f"{number}.seg")
        target = folder / warm_name(number)
        compress(str(source), str(target), made.check())
        return target

    return run


def test_inflated_it_is_the_segment_byte_for_byte(pack: Pack) -> None:
    made = segment([payload(n) for n in range(3000)])
    path = pack(made)
    with WarmSegment(str(path)) as opened:
        assert opened.size == len(made.data)
        assert b"".join(opened.pieces()) == made.data
        assert all(len(piece) <= FRAME_BYTES for piece in opened.pieces())
    assert path.stat().st_size < len(made.data) / 2
    assert not list(path.parent.glob("*.tmp"))


def test_any_range_reads_as_it_does_in_the_segment(pack: Pack) -> None:
    made = segment([payload(n, 1000) for n in range(400)])
    path = pack(made)
    rng = random.Random(5)
    edges = [0, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, len(made.data) - 1, len(made.data)]
    with WarmSegment(str(path)) as opened:
        for at in [*edges, *(rng.randrange(len(made.data)) for _ in range(200))]:
            for length in (0, 1, 28, 1028, FRAME_BYTES, 3 * FRAME_BYTES):
                assert opened.read_at(at, length) == made.data[at : at + length]


@pytest.mark.shows("journal 4.1")
def test_one_record_inflates_one_frame_or_two(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    made = segment([payload(n, 1000) for n in range(1000)])
    path = pack(made)
    inflated: list[int] = []
    whole = warm.zstd.decompress

    def counting(data: bytes, **options: object) -> bytes:
        out = whole(data, **options)
        inflated.append(len(out))
        return out

    monkeypatch.setattr(warm.zstd, "decompress", counting)
    with WarmSegment(str(path)) as opened:
        assert not inflated
        for at in made.positions[::97]:
            inflated.clear()
            opened.read_at(at, 1028)
            assert sum(inflated) <= 2 * FRAME_BYTES


@pytest.mark.shows("journal 4.2")
def test_a_file_of_an_earlier_version_is_read_with_its_dictionary(pack: Pack) -> None:
    made = segment([payload(n) for n in range(3000)])
    path = pack(made)
    number = with_dictionary(path)
    with WarmSegment(str(path)) as opened:
        assert opened.dictionary_id == number
        assert b"".join(opened.pieces()) == made.data
    kept = path.parent / warm.dictionary_name(number)
    kept.rename(path.parent / "away")
    with pytest.raises(FormatError, match=f"expected its dictionary {number} as") as caught:
        WarmSegment(str(path))
    assert str(path) in str(caught.value)
    kept.write_bytes(b"no dictionary")
    with pytest.raises(FormatError, match=rf"{kept.name} at 0: expected a zstd dict"):
        WarmSegment(str(path))


def test_a_damaged_segment_is_not_compressed(tmp_path: Path, pack: Pack) -> None:
    made = segment([payload(n) for n in range(500)])
    changes: dict[str, Callable[[bytes], bytes]] = {
        "a byte": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
        "cut": lambda data: data[:-1],
        "longer": lambda data: data + b"\0",
        "footer of another": lambda data: data[:-24] + bytes(8) + data[-16:],
        "not sealed": lambda data: data[:-8] + bytes(8),
    }
    for fault, change in changes.items():
        broken = Made(change(made.data), made.positions)
        broken.durable_bytes, broken.crc = made.durable_bytes, made.crc
        with pytest.raises(FormatError, match=r"^segment at "):
            pack(broken)
        assert not list((tmp_path / "warm").iterdir()), fault


def test_a_flipped_byte_and_a_cut_is_found(pack: Pack) -> None:
    made = segment([payload(n) for n in range(1200)])
    path = pack(made)
    data = path.read_bytes()
    assert warm.zstd.decompress(data) == made.data  # as zstd itself inflates it
    rng = random.Random(8)
    places = [0, 4, 5, *(rng.randrange(len(data)) for _ in range(60))]
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for damaged in (*flipped, *(data[:at] for at in (0, 1, 10, len(data) // 2, len(data) - 1))):
        path.write_bytes(damaged)
        with pytest.raises(FormatError) as caught:
            with WarmSegment(str(path)) as opened:
                check = made.check(str(path))
                for piece in opened.pieces():
                    check.feed(piece)
                check.done()
        assert str(path) in str(caught.value)


def test_a_frame_that_claims_too_much_is_not_inflated(tmp_path: Path) -> None:
    path = tmp_path / "bomb.seg.zst"
    path.write_bytes(warm.zstd.compress(bytes(100 << 20)))
    with pytest.raises(FormatError, match="expected a frame of 1 to 65536 bytes, found 104857600"):
        WarmSegment(str(path))


@pytest.mark.parametrize("step", range(12))
def test_a_kill_at_any_call_leaves_no_half_file(step: int, tmp_path: Path) -> None:
    made = segment([payload(n) for n in range(2000)])
    source = made.write(tmp_path / "0.seg")
    target = tmp_path / "0.seg.zst"
    with killed_before(step + 1):
        compress(str(source), str(target), made.check())
    assert source.read_bytes() == made.data
    if target.exists():  # its name means that it is whole
        assert warm.zstd.decompress(target.read_bytes()) == made.data
    compress(str(source), str(target), made.check())
    assert warm.zstd.decompress(target.read_bytes()) == made.data
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.shows("journal 4.3")
def test_what_is_wrong_never_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = segment([payload(n) for n in range(2000)])
    source = made.write(tmp_path / "0.seg")
    write = fsio.write_at

    def flipping(fd: int, data: bytes | memoryview, offset: int, name: str) -> None:
        data = bytes(data)
        write(fd, data[:100] + bytes([data[100] ^ 1]) + data[101:], offset, name)

    monkeypatch.setattr(fsio, "write_at", flipping)
    with pytest.raises(IntegrityError):
        compress(str(source), str(tmp_path / "0.seg.zst"), made.check())
    assert [path.name for path in tmp_path.iterdir()] == ["0.seg"]


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 70_000), max_size=12))
def test_records_of_any_size(sizes: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("warm")
    made = segment([payload(n, size).ljust(size, b".") for n, size in enumerate(sizes)])
    source = made.write(folder / "0.seg")
    compress(str(source), str(folder / "0.seg.zst"), made.check())
    with WarmSegment(str(folder / "0.seg.zst")) as opened:
        ends = [*made.positions[1:], made.durable_bytes]
        for at, end in zip(made.positions, ends, strict=False):
            assert opened.read_at(at, end - at) == made.data[at:end]
