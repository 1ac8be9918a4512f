"""Old files that decayed without a trace are found: an eighth of them is read again each day."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from relay.audit import extract, home_files, lake_columns
from relay.audit.extract import AGAIN, extracted, update
from relay.audit.lake import Lake, LakeManifest, open_lake, read_rows
from relay.audit.snapshot import HomeSnapshot, snapshot_home
from relay.base import archive_pack
from relay.base.clock import NS_PER_S
from relay.base.config import Config, JournalSettings, RetentionSettings, StoreSettings
from relay.base.errors import RelayError
from relay.base.home import LEDGER
from relay.daemon.housekeeper import packable
from tests.audit.home_builder import FILE_SIZE, START_NS, HomeBuilder, stored_message
from tests.audit.printed import relay_audit
from tests.box import Box
from tests.fakes import FakeClock
from tests.kills import Axe, Effect, Killed, firsts, killed_on_a_copy, lasts

DAY_S = 86_400


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written in place has the times of before, as where a disk decays.

    And what is small has a part of its own, as what is large.
    """
    monkeypatch.setattr(extract, "PART_BYTES", 1)

    def stamp(path: str) -> tuple[str, int]:
        try:
            status = os.stat(path)
        except OSError:
            return "", 0
        return f"{status.st_ino} {status.st_size}", status.st_size

    monkeypatch.setattr(home_files, "_stamp", stamp)


def flip(path: Path) -> None:
    """A bit of a file is another one."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def with_archives(home: HomeBuilder, months: int) -> list[Path]:
    """The home has an archive a month, of one message each."""
    paths = []
    for number in range(1, months + 1):
        home.sent(f"1-{number}", at_ns=START_NS)
        home.stored = [stored_message(number, f"1-{number}")]
        name = f"store/archive/{2000 + number}-01-31/{number:06}.acomm"
        paths.append(Path(home.write_store(name)))
    home.stored = []
    home.write_store()
    return paths


def days(home: HomeBuilder, tmp_path: Path) -> Iterator[tuple[LakeManifest, HomeSnapshot]]:
    """What a run makes of the home, on one day after the other."""
    clock = FakeClock(START_NS + 3600 * NS_PER_S)
    for day in range(100):
        snapshot = home.snapshot(tmp_path / f"{day}", clock)
        yield extracted(snapshot, str(tmp_path / "lake"))[1], snapshot
        clock.advance(DAY_S)


def problems(made: LakeManifest) -> list[str]:
    """The faults that an extract knows."""
    return [line for part in made.parts for line in part.problems]


@pytest.mark.shows("audit 1.7")
@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("which", (0, 16))
def test_a_flipped_byte_is_found_by_the_rota_and_at_once_by_full(
    which: int, home: HomeBuilder, tmp_path: Path
) -> None:
    archives = with_archives(home, 17)
    every_day = days(home, tmp_path)
    first, _ = next(every_day)
    assert (problems(first), first.unread) == ([], [])
    whole = sum(part.bytes for part in first.parts)
    flip(archives[which])
    said = f"store/archive/{2001 + which}-01-31/"
    found = 0
    line = ""
    for day, (made, snapshot) in zip(range(1, AGAIN + 1), every_day, strict=False):
        if not line:
            full = extracted(snapshot, str(tmp_path / "full"), full=True)[1]
            (line,) = problems(full)
            assert line.startswith(said) and full.unread == []
        read_again = whole - sum(part.bytes for part in made.unread)
        assert whole // AGAIN <= read_again <= whole // 4
        assert all(first.at_ns <= part.at_ns < made.at_ns for part in made.unread)
        if lines := problems(made):
            found = found or day
            assert lines == [line]
        else:
            assert not found
            assert said in "".join(path for part in made.unread for path in part.sources)
    assert found


@pytest.mark.usefixtures("unseen")
def test_on_one_day_nothing_is_read_twice(home: HomeBuilder, tmp_path: Path) -> None:
    with_archives(home, 10)
    unread = {0: 0, 12: 11, 24: 9, 25: 9, 26: 9, 27: 9, 28: 9, 29: 10, 30: 11, -12: 9}
    for hour, parts in unread.items():
        clock = FakeClock(START_NS + hour * 3600 * NS_PER_S)
        made = extracted(home.snapshot(tmp_path / f"{hour}", clock), str(tmp_path / "lake"))[1]
        assert len(made.unread) == parts, hour


@pytest.mark.usefixtures("unseen")
def test_killed_at_any_write_the_rota_is_where_it_was(home: HomeBuilder, tmp_path: Path) -> None:
    kept, where = tmp_path / "kept", tmp_path / "lake"
    archives = with_archives(home, 3)
    extracted(home.snapshot(tmp_path / "one", FakeClock(START_NS)), str(kept))
    flip(archives[0])
    later = home.snapshot(tmp_path / "two", FakeClock(START_NS + 2 * DAY_S * NS_PER_S))

    def killed_at(number: int) -> list[Effect]:
        """Extract into a copy of the old lake; the effects until then."""
        return killed_on_a_copy(kept, where, number, lambda: extracted(later, str(where)))

    effects = killed_at(0)
    for number in sorted({*firsts(effects), *lasts(effects)}):
        killed_at(number)
        (line,) = problems(extracted(later, str(where))[1])
        assert line.startswith("store/archive/2001-01-31/"), number


@pytest.mark.usefixtures("unseen")
def test_a_run_says_what_it_did_not_read_again(
    spark: SparkSession, home: HomeBuilder, tmp_path: Path
) -> None:
    (archive,) = with_archives(home, 1)
    out = tmp_path / "out"
    words = ("run", "integrity", "--lake", str(tmp_path / "lake"), "--out", str(out))
    first = relay_audit(*words, home=home.path)
    assert (first.exit_code, "not read again" in first.stdout) == (0, False)
    flip(archive)
    again = relay_audit(*words, home=home.path)
    assert again.exit_code == 0
    (line,) = [line for line in again.stdout.splitlines() if line.startswith("old files: ")]
    size = archive.stat().st_size + FILE_SIZE
    assert line.startswith(f"old files: {size:,} bytes not read again, some since 20")
    assert line.endswith("; --full reads all")
    assert "<dt>Old files</dt><dd>" in (out / "report.html").read_text()
    full = relay_audit(*words, "--full", home=home.path)
    assert (full.exit_code, "not read again" in full.stdout) == (1, False)
    assert "integrity: 1 finding (1 error)" in full.stdout


def test_a_file_of_the_lake_that_decayed_is_not_judged(home: HomeBuilder, tmp_path: Path) -> None:
    with_archives(home, 1)
    extracted(home.snapshot(tmp_path / "one"), str(tmp_path / "lake"))
    lake = open_lake(str(tmp_path / "lake"))
    (path,) = (tmp_path / "lake" / "store_messages").rglob("archive-*.parquet")
    flip(path)
    below = str(path.relative_to(tmp_path / "lake"))
    with pytest.raises(RelayError, match=f"{path} is damaged: its SHA-256 is not that of its name"):
        lake.fetch(below, "")
    path.unlink()
    extracted(home.snapshot(tmp_path / "two"), str(tmp_path / "lake"))
    assert lake.fetch(below, "") == str(path)


# -- days as they come ---------------------------------------------------------------------

CONFIG = Config(
    store=StoreSettings(roll_after_s=1, roll_messages=1),
    journal=JournalSettings(compress_after_s=1),
    retention=RetentionSettings(archive_days=5),
)


def _runs(box: Box) -> None:
    """The relay runs for some minutes: what is final is rolled, sealed or pruned."""
    box.after(5, turns=2)
    for _ in range(3):
        box.after(100, turns=8)


def _sent(box: Box) -> None:
    box.open()
    for to in ("alice", "bob", "carol"):
        box.send("alice", f"TO: {to}\n\nhello")
    box.send("bob", "TO: carol\nKIND: command\n\ndeploy")
    _runs(box)
    box.stop()


def _packed(box: Box) -> None:
    for day in packable(box.home, box.clock)[:1]:
        list(archive_pack.pack(box.home, day))


def _pruned(box: Box) -> None:
    """Days pass, and retention takes what is older."""
    box.clock.advance(3 * DAY_S)
    box.open()
    _runs(box)
    box.stop()


def _rolled_back(box: Box) -> None:
    """The ledger is that of the first days."""
    shutil.copyfile(box.root.parent / "first.db", box.root / LEDGER)


def _decayed(box: Box) -> None:
    """A file of each kind decays; and the next time it is as it was."""
    for pattern in ("store/archive/*/*.acomm", "journal/*/warm/*.zst", "archive/*.zst"):
        for path in sorted(box.root.glob(pattern))[:1]:
            flip(path)


EVENTS: dict[str, Callable[[Box], object]] = {
    "messages": _sent,
    "nothing": lambda box: None,
    "a pack": _packed,
    "pruning": _pruned,
    "decay": _decayed,
    "a ledger of before": _rolled_back,
}


@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 60)), min_size=2, max_size=4)
)
@pytest.mark.damages
@pytest.mark.usefixtures("unseen")
def test_a_run_says_what_a_full_one_says_but_for_what_it_did_not_read_again(
    make_box: Callable[..., Box], tmp_path: Path, days: list[tuple[str, int]]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    box = make_box("alice", "bob", "carol", name=f"{root.name}/home", config=CONFIG)
    box.stop()
    for _ in range(4):
        _sent(box)
        box.clock.advance(DAY_S)
    _packed(box)
    shutil.copyfile(box.root / LEDGER, root / "first.db")
    for event, killed_at in (("messages", 0), *days):
        EVENTS[event](box)
        snapshot = _next_day(box)
        _kill(snapshot, root / "lake", killed_at)
        _compare(snapshot, root)
    for _ in range(AGAIN - 1):
        update(open_lake(str(root / "lake")), "home", _next_day(box))
    assert not _compare(_next_day(box), root)


def _next_day(box: Box) -> HomeSnapshot:
    box.clock.advance(DAY_S)
    return snapshot_home(str(box.root), tempfile.mkdtemp(dir=box.root.parent), box.clock)


def _kill(snapshot: HomeSnapshot, lake: Path, at: int) -> None:
    """An extract ends before an effect; 0: there is none."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        axe = Axe(patch, lake.parent)
        axe.falls_at = at
        if at:
            update(open_lake(str(lake)), "home", snapshot)


def _compare(snapshot: HomeSnapshot, root: Path) -> set[str]:
    """A run, and a full one: jobs read the same rows; else the sources whose decay it missed."""
    lakes = [open_lake(str(root / name)) for name in ("lake", "full")]
    made = [update(lake, "home", snapshot, full=lake is lakes[1])[0] for lake in lakes]
    unread = {path for part in made[0].unread for path in part.sources}
    unknown = _damaged(made[1]) - _damaged(made[0])
    assert unknown <= unread
    for table in lake_columns.TABLES if not unknown else ():
        ours, theirs = (_rows(*each, table) for each in zip(lakes, made, strict=True))
        assert ours == theirs, table
    return unknown


def _rows(lake: Lake, made: LakeManifest, table: str) -> list[str]:
    """The rows of a table but for when they were read, and what else is on the disk."""
    rows = read_rows(lake, made, table)
    apart = {"read_at", "free_bytes"} & set(rows.column_names)
    return sorted(map(repr, rows.drop_columns(sorted(apart)).to_pylist()))


def _damaged(made: LakeManifest) -> set[str]:
    """The sources that are damaged."""
    return {path for part in made.parts if part.problems or part.lost for path in part.sources}
