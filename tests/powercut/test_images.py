"""From the log of a disk to the images that a power cut may leave. The drill: test_drill.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts.powercutting import images
from scripts.powercutting.__main__ import main
from scripts.powercutting.disk import FLUSH, RECORD, WRITE
from scripts.powercutting.images import Cut, Keep

SIZE = 1 << 16


def write(at: int, offset: int, data: bytes) -> bytes:
    return RECORD.pack(WRITE, at, offset, len(data)) + data


def flush(at: int) -> bytes:
    return RECORD.pack(FLUSH, at, 0, 0)


OLD, NEW = b"o" * 8192, b"n" * 8192
LOG = write(10, 0, OLD) + flush(20) + write(30, 0, NEW) + write(40, 8192, NEW) + flush(50)


def image(folder: Path, log: bytes, *cuts: Cut) -> list[bytes]:
    """What each of these cuts leaves."""
    base, target = folder / "base", folder / "target"
    base.write_bytes(bytes(SIZE))
    (folder / "log").write_bytes(log)
    builder = images.Builder(base, folder / "log", folder / "own")
    found = []
    for cut in cuts:
        builder.build(cut, target)
        found.append(target.read_bytes())
    builder.close()
    return found


def test_what_was_flushed_is_there_and_the_rest_is_or_is_not(tmp_path: Path) -> None:
    cuts = [Cut(4, Keep.NONE, 0), Cut(4, Keep.ALL, 0), Cut(5, Keep.NONE, 0)]
    nothing, everything, flushed = image(tmp_path, LOG, *cuts)
    assert nothing == OLD.ljust(SIZE, b"\0")
    assert everything == flushed == (NEW + NEW).ljust(SIZE, b"\0")


def test_a_share_of_the_writes_is_kept_each_of_them_whole(tmp_path: Path) -> None:
    states = image(tmp_path, LOG, *(Cut(4, Keep.HALF, seed) for seed in range(20)))
    parts = {(state[:8192][:1], state[8192:16384][:1]) for state in states}
    assert parts == {(b"o", b"\0"), (b"o", b"n"), (b"n", b"\0"), (b"n", b"n")}
    assert all(len(set(state[at : at + 8192])) == 1 for state in states for at in (0, 8192))


@pytest.mark.parametrize(("keep", "sector"), [(Keep.TORN_512, 512), (Keep.TORN_4096, 4096)])
def test_a_torn_write_is_old_and_new_by_sectors(tmp_path: Path, keep: Keep, sector: int) -> None:
    states = image(tmp_path, LOG, *(Cut(4, keep, seed) for seed in range(20)))
    for state in states:
        sectors = [state[at : at + sector] for at in range(0, 8192, sector)]
        assert all(one in (OLD[:sector], NEW[:sector]) for one in sectors)
    assert any(0 < state[:8192].count(b"n") < 8192 for state in states)


def test_the_last_writes_are_missing(tmp_path: Path) -> None:
    log = flush(1) + b"".join(write(2, 512 * one, b"n" * 512) for one in range(9))
    for state in image(tmp_path, log, *(Cut(10, Keep.NOT_LAST, seed) for seed in range(9))):
        assert state.count(b"n") // 512 in (6, 7, 8)
        assert state == (b"n" * state.count(b"n")).ljust(SIZE, b"\0")


def test_zeros_that_are_written_replace_what_was_there(tmp_path: Path) -> None:
    log = write(1, 0, b"x" * SIZE) + flush(2) + write(3, 0, bytes(SIZE)) + flush(4)
    assert image(tmp_path, log, Cut(4, Keep.NONE, 0)) == [bytes(SIZE)]


def test_cuts_are_spread_over_the_flushes_and_keep_in_every_way() -> None:
    log = b"".join(write(10 * one, 0, b"x") + flush(10 * one + 5) for one in range(100))
    events = images.read_log(log)
    cuts = images.choose(events, 500, 40, random.Random(1))
    assert len(cuts) == 40 and cuts == sorted(cuts)
    assert all(events[images.last_flush(events, cut.end) - 1].at_ns >= 500 for cut in cuts)
    assert {cut.keep for cut in cuts} == set(Keep)
    assert images.choose(events, 10_000, 40, random.Random(1)) == []


def test_an_event_that_is_cut_short_did_not_happen() -> None:
    assert len(images.read_log(LOG)) == 5
    assert len(images.read_log(LOG[:-1])) == 4
    assert len(images.read_log(LOG[: RECORD.size + 5])) == 0


def test_a_file_system_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("sys.argv", ["powercut", "--fs", "xfs"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--fs: xfs needs mkfs.xfs: install xfsprogs" in capsys.readouterr().err
