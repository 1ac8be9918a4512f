"""The capacity job: growth, the day when the disk is full, and what the tiers save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relay.audit.disk_usage import HomeUsage, PartUsage, RetentionLimit, TierSavings, measure
from relay.audit.jobs import capacity
from relay.audit.lake_columns import FINDING
from relay.audit.snapshot import HomeSnapshot
from relay.base.config import Config, DiskSettings, RetentionSettings
from relay.base.errors import ConfigError
from tests.audit.home_builder import FILE_SIZE, START_NS, HomeBuilder
from tests.audit.ledger_rows import DAY, insert, message
from tests.box import Box

pytestmark = pytest.mark.shows("audit 2.1")

UNTIL = date(2026, 1, 31)
MIB = 1 << 20
GIB = 1 << 30


def day(before: int) -> date:
    """So many days before the last."""
    return UNTIL - timedelta(days=before)


def sizes(
    *measured: PartUsage,
    free: int = 100 * GIB,
    limits: tuple[RetentionLimit, ...] = (),
    **of: object,
) -> HomeUsage:
    """A disk of 200 GiB with a floor of 64 MiB."""
    return HomeUsage(200 * GIB, free, 64 * MIB, UNTIL, measured, limits, **of)  # type: ignore[arg-type]


Rows = dict[str, list[dict[str, Any]]]


def tables(snapshot: HomeSnapshot, known: HomeUsage) -> Rows:
    """The job's tables over a ledger and a disk that is told, and its findings."""
    made = capacity.tables(snapshot, known)
    assert {name: made[name].schema.names for name in made} == {
        **{name: schema.names for name, schema in capacity.JOB.tables.items()},
        "findings": FINDING.names,
    }
    return {name: table.to_pylist() for name, table in made.items()}


def found(made: Rows) -> list[tuple[str, str]]:
    """(check, severity) of each finding."""
    return [(row["check"], row["severity"]) for row in made["findings"]]


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomeSnapshot]:
    """Ten days with a hundred messages each, and the last with ten so far."""
    root = tmp_path_factory.mktemp("days")
    home = HomeBuilder(root / "home")
    for before in range(11):
        at = START_NS - before * DAY
        insert(
            home, "messages", [message(f"{before}-{n}", at) for n in range(100 if before else 10)]
        )
    yield home.snapshot(root / "run")
    home.close()


def test_growth_is_that_of_the_last_seven_whole_days(days: HomeSnapshot) -> None:
    journal = [PartUsage("journal", day(n), 1, 70 * MIB if n <= 7 else GIB) for n in range(1, 11)]
    made = tables(
        days,
        sizes(
            *journal,
            PartUsage("journal", day(0), 1, GIB),  # today has only begun
            PartUsage("ledger", None, 1, 1010 * MIB),
            PartUsage("archive", day(3), 5, 14 * MIB),  # nothing on the other six
            PartUsage("other", None, 2, MIB),
        ),
    )
    parts = {row["part"]: row for row in made["capacity_parts"]}
    assert parts["journal"]["bytes_per_day"] == 70 * MIB
    assert parts["ledger"]["bytes_per_day"] == 100 * MIB  # a hundred of 1,010 rows a day
    assert parts["archive"]["bytes_per_day"] == 2 * MIB
    assert (parts["other"]["bytes_per_day"], parts["other"]["files"]) == (0.0, 2)
    by_day = {row["day"]: row for row in made["capacity"]}
    assert len(by_day) == 11
    third = by_day[day(3)]
    assert (third["messages"], third["message_bytes"]) == (100, 100 * FILE_SIZE)
    assert (third["ledger_bytes"], third["journal_bytes"]) == (100 * MIB, 70 * MIB)
    assert third["total_bytes"] == (100 + 70 + 14) * MIB
    (row,) = made["capacity_forecast"]
    assert row["bytes_per_day"] == 172 * MIB
    room = 100 * GIB - 64 * MIB
    assert row["full_in_days"] == row["full_in_days_kept"] == room // (172 * MIB) + 1
    assert found(made) == []


def test_a_disk_that_is_soon_full_is_found_unless_retention_keeps_it_free(
    days: HomeSnapshot,
) -> None:
    archive = [PartUsage("archive", day(n), 1, GIB // 2) for n in range(1, 11)]
    inbox = [PartUsage("inbox", day(n), 1, GIB // 2) for n in range(1, 11)]
    # Retention that comes too late is none.
    late = RetentionLimit("archive", 90, None)
    soon = tables(days, sizes(*archive, *inbox, free=20 * GIB, limits=(late,)))
    assert found(soon) == [("capacity.full_soon", "warning")]
    assert dict(soon["findings"][0]["detail"])["full_in_days_kept"] == "20"

    limits = (RetentionLimit("archive", 25, None), RetentionLimit("inbox", 90, 25 * GIB // 2))
    kept = tables(days, sizes(*archive, *inbox, free=20 * GIB, limits=limits))
    (row,) = kept["capacity_forecast"]
    assert (row["full_in_days"], row["full_in_days_kept"]) == (20, None)
    assert found(kept) == []
    # The 31st day is not soon.
    month = tables(days, sizes(*archive, *inbox, free=31 * GIB))
    (row,) = month["capacity_forecast"]
    assert (row["full_in_days"], found(month)) == (31, [])


def test_below_the_floor_is_an_error(days: HomeSnapshot) -> None:
    below = tables(days, sizes(PartUsage("ledger", None, 1, MIB), free=63 * MIB))
    assert found(below) == [("capacity.below_floor", "error")]


def test_what_the_tiers_save(days: HomeSnapshot) -> None:
    known = sizes(
        PartUsage("archive", day(2), 1, 4096, 4096),
        PartUsage("archive", day(3), 1, 4096, 4096),
        free=64 * MIB,  # at the floor is not below it
        tiers=TierSavings(10 * MIB, 3 * MIB, 2 * MIB),
        limits=(RetentionLimit("archive", None, MIB),),
    )
    made = tables(days, known)
    (row,) = made["capacity_forecast"]
    names = ("warm_raw_bytes", "warm_bytes", "evicted_bytes", "packed_raw_bytes", "packed_bytes")
    assert [row[name] for name in names] == [
        10 * MIB,
        3 * MIB,
        2 * MIB,
        200 * FILE_SIZE,
        2 * 4096,
    ]
    assert ("capacity.below_floor", "error") not in found(made)


def test_of_a_home_without_a_whole_day_nothing_is_foreseen(
    home: HomeBuilder, tmp_path: Path
) -> None:
    empty = home.snapshot(tmp_path / "empty")
    nothing = tables(empty, sizes(PartUsage("ledger", None, 1, MIB)))
    (row,) = nothing["capacity_forecast"]
    assert (row["bytes_per_day"], row["full_in_days"], row["home_bytes"]) == (None, None, MIB)
    assert nothing["capacity"] == [] == found(nothing)
    insert(home, "messages", [message("1-a", START_NS - DAY)])
    known = sizes(*[PartUsage("journal", day(n), 1, 10 * GIB) for n in range(2)])
    young = tables(home.snapshot(tmp_path / "young"), known)
    (row,) = young["capacity_forecast"]
    assert (row["bytes_per_day"], row["full_in_days"]) == (None, None)
    assert found(young) == []
    insert(home, "messages", [message("1-b", START_NS - 2 * DAY)])
    (row,) = tables(home.snapshot(tmp_path / "run"), known)["capacity_forecast"]
    assert (row["bytes_per_day"], row["full_in_days"]) == (10 * GIB, 10)


def test_a_home_is_measured_by_part_and_day(box: Box) -> None:
    box.send("alice", "TO: bob\n\nhi")
    box.flush()
    attached = box.path("attachments", "aa", "a" * 64)
    attached.parent.mkdir()
    attached.write_bytes(b"x" * 10_000)
    os.utime(attached, (0, 0))
    attached.with_name(".aaaa.0a0a0a0a.tmp").write_bytes(b"x" * 10_000)  # never finished
    pack = box.path("archive", "2026-01-30.tar.zst")
    pack.write_bytes(b"x" * 5_000)
    box.path("archive", "of-mine").mkdir()
    (box.path("archive", "of-mine") / "file").write_text("x")
    box.path("logs", "link").symlink_to("/etc/passwd")
    found = measure(str(box.root), START_NS)
    assert found.until == UNTIL
    packs = [(one.part, one.day, one.pack_bytes) for one in found.measured if one.pack_bytes]
    assert packs == [("archive", date(2026, 1, 30), os.stat(pack).st_blocks * 512)]
    assert found.floor_bytes == 64 * MIB and 0 < found.free_bytes < found.disk_bytes
    parts: dict[str, set[date | None]] = {}
    for one in found.measured:
        parts.setdefault(one.part, set()).add(one.day)
    today = date.fromtimestamp(box.clock.now_ns() // 10**9)
    days = {today, today - timedelta(days=1), today + timedelta(days=1)}  # whatever the zone
    assert parts["attachment"] == {date(1970, 1, 1)}
    assert parts["ledger"] == {None}
    assert parts["journal"] & days and parts["inbox"] & days
    assert parts["archive"] - days == {date(2026, 1, 30), None}
    total = sum(one.n_bytes for one in found.measured)
    files = [path for path in box.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(one.files for one in found.measured) == len(files)
    assert total == sum(os.stat(path).st_blocks * 512 for path in files)


def test_limits_and_floor_are_those_of_config_json(tmp_path: Path) -> None:
    kept = RetentionSettings(archive_days=10, archive_mib=0, read_days=0, read_mib=5)
    config = Config(disk=DiskSettings(floor_mib=3), retention=kept)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    found = measure(str(tmp_path), START_NS)
    limits = {one.part: (one.days, one.n_bytes) for one in found.limits}
    assert found.floor_bytes == 3 * MIB
    assert limits["archive"] == (10, None)
    assert limits["inbox"] == (None, 5 * MIB)
    assert limits["journal"] == (None, None)  # without an object store it stays
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        measure(str(tmp_path), START_NS)
