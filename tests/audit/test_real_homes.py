"""All jobs over homes that relays left in every shape there is: a sound one has no findings, its
numbers are those of what was sent, and what is planted in it is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.audit.jobs import JOBS
from relay.audit.run import Report, RunRequest, run_audit
from relay.base.clock import Clock
from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, EXIT_OK, LedgerError
from tests.audit import real_homes
from tests.procs import relay

pytestmark = [pytest.mark.timeout(500), pytest.mark.shows("audit 2.10")]
replace = msgspec.structs.replace
TALK = 16  # messages of real_homes.talk: 14 of agents', and the relay's answers to two of them


@pytest.mark.shows("audit 2.11")
def test_a_ledger_of_the_schema_before_is_one_line(tmp_path: Path) -> None:
    assert relay("init", home=tmp_path / "home").returncode == 0
    real_homes.to_schema_1(tmp_path / "home")
    with pytest.raises(LedgerError, match="user_version is 1, expected 5") as told:
        audited(tmp_path / "home")
    assert "relay up" in str(told.value.hint)


def audited(home: Path, *names: str) -> Report:
    """One run of these jobs, or all."""
    report, _ = run_audit(RunRequest(str(home), names, grace_s=0), Clock())
    return report


def require_clean(report: Report, *names: str) -> None:
    """Every job ran, or these did, and found nothing."""
    assert list(report.jobs) == list(names or JOBS)
    assert {name: job.error for name, job in report.jobs.items() if job.error} == {}
    assert {name: job.findings for name, job in report.jobs.items() if job.findings} == {}
    assert report.exit_code == EXIT_OK


def test_a_home_that_has_seen_nothing(spark: SparkSession, tmp_path: Path) -> None:
    assert relay("init", home=tmp_path / "home").returncode == 0
    report = audited(tmp_path / "home")
    require_clean(report)
    assert report.jobs["reconcile"].counts.get("delivered", 0) == 0


def test_sealed_signed_tiered_with_attachments(spark: SparkSession, tmp_path: Path) -> None:
    home = real_homes.sealed(tmp_path / "home")
    report = audited(home)
    require_clean(report)
    (sent,) = real_homes.rows(home, "SELECT count(*) FROM messages")[0]
    assert report.jobs["reconcile"].counts == {"unverified": sent}
    kept = report.jobs["integrity"].counts
    assert kept["attachments"] == 6  # three that messages name, three that none does
    assert kept["objects"] >= 1 and kept["archives"] >= 1
    assert report.jobs["security"].counts == {"event.key_registered": 4}

    archive = min(home.glob("store/archive/**/*.acomm"))
    kept = {path: path.read_bytes() for path in (archive, home / "store/relay.acomm")}
    lose(home, archive)
    report = audited(home, "integrity", "reconcile")
    assert make_findings(report) == ({"reconcile.missing": 1}, set())
    for path, data in kept.items():
        path.write_bytes(data)

    warm = min(home.glob("journal/*/warm/*.seg.zst"))
    warm.write_bytes(warm.read_bytes()[:-100])
    report = audited(home, "integrity", "reconcile", "traffic")
    assert make_findings(report) == ({"integrity.damaged": 1}, {"reconcile"})
    assert f"{warm} at 0: expected a whole zstd frame" in str(report.jobs["reconcile"].error)
    assert report.jobs["reconcile"].hint.endswith("or read the rest with --permissive")
    assert report.exit_code == EXIT_FAILED


def lose(home: Path, archive: Path) -> None:
    """One message less in an archive, with checksums that are right and a store that lists it."""
    one = store_file.read(str(archive))
    store_file.write(str(archive), replace(one, messages=one.messages[1:]), columns=True)
    live = home / "store/relay.acomm"
    store = store_file.read(str(live))
    state = EngineState.decode(store.engine_state)
    archives = tuple(
        replace(note, size=archive.stat().st_size) if archive.match(f"*/{note.name}") else note
        for note in state.archives
    )
    told = state._replace(archives=archives).encode()
    store_file.write(str(live), replace(store, engine_state=told))


def make_findings(report: Report) -> tuple[dict[str, int], set[str]]:
    """What was found, and the jobs that could not run."""
    checks = {name: count for job in report.jobs.values() for name, count in job.findings.items()}
    return checks, {name for name, job in report.jobs.items() if job.error}


def test_days_packed_and_pruned(spark: SparkSession, tmp_path: Path) -> None:
    home = real_homes.packed(tmp_path / "home")
    names = ("integrity", "reconcile", "duplicates", "capacity")
    report = audited(home, *names)
    require_clean(report, *names)
    assert report.jobs["reconcile"].counts == {"delivered": 7 * 5}
    assert report.jobs["integrity"].counts["originals"] == 6 * 5

    packs = sorted(home.glob("archive/*.tar.zst"))
    data = bytearray(packs[0].read_bytes())
    data[len(data) // 2] ^= 1
    packs[0].write_bytes(data)
    shutil.rmtree(sorted(home.glob("archive/2*-??"))[0] / "bob")
    report = audited(home, "integrity", "reconcile")
    assert report.jobs["integrity"].findings == {"integrity.unreadable": 1}
    assert report.jobs["reconcile"].findings == {"reconcile.original_missing": 1}
    assert report.exit_code == EXIT_FINDINGS


def test_migrated_restored_and_its_store_made_again(spark: SparkSession, tmp_path: Path) -> None:
    home = real_homes.mended(tmp_path / "home")
    names = ("reconcile", "acks", "threads", "ordering")
    report = audited(home, *names)
    require_clean(report, *names)
    assert report.jobs["reconcile"].counts == {"delivered": 4 * TALK}
    assert report.jobs["acks"].counts["acked"] == 4 * 2
    assert report.jobs["threads"].counts["answered"] == 4

    (home / "ledger.db").rename(home / "before.db")
    shutil.copyfile(tmp_path / "kept.db", home / "ledger.db")  # no start has told it the rest
    report = audited(home, "reconcile")
    assert report.jobs["reconcile"].counts["behind"] == 2 * TALK
    assert make_findings(report) == ({"reconcile.ledger_behind": 1}, set())
