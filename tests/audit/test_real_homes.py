"""All jobs over homes that relays left in every shape there is: a sound one has no findings, its
numbers are those of what was sent, and what is planted in it is found."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec
import pytest

from relay.acomm import store_file
from relay.acomm.engine_state import EngineState
from relay.audit.jobs import JOBS
from relay.audit.run import Report, RunRequest, run_audit
from relay.audit.snapshot import snapshot_home
from relay.base.clock import Clock
from relay.base.errors import EXIT_OK, LedgerError
from tests.audit import real_homes
from tests.audit.second_engine import SQL_NAMES, Said, SecondEngine
from tests.procs import relay

pytestmark = pytest.mark.shows("audit 2.10")
replace = msgspec.structs.replace
TALK = 16  # messages of real_homes.talk: 14 of agents', and the relay's answers to two of them


@pytest.mark.shows("audit 2.11")
def test_a_ledger_of_the_schema_before_is_one_line(tmp_path: Path) -> None:
    assert relay("init", home=tmp_path / "home").returncode == 0
    real_homes.to_schema_5(tmp_path / "home")
    with pytest.raises(LedgerError, match="its schema is 5, expected 7") as told:
        audited(tmp_path / "home")
    assert "relay up" in str(told.value.hint)


def audited(home: Path, *names: str) -> Report:
    """One run of these jobs, or all."""
    report, _ = run_audit(RunRequest(str(home), names, grace_s=0), Clock())
    return report


def said(home: Path, folder: Path, *names: str) -> dict[str, Said]:
    """What these jobs say, or all that are SQL."""
    folder.mkdir()
    snapshot = snapshot_home(str(home), str(folder), Clock(), 0)
    with contextlib.closing(SecondEngine(snapshot, folder / "lake")) as engine:
        return {name: engine.run(name) for name in names or SQL_NAMES}


def found(of: dict[str, Said]) -> dict[str, set[str]]:
    """The findings of each job that has any."""
    return {name: job.checks for name, job in of.items() if job.checks}


def test_a_home_that_has_seen_nothing(tmp_path: Path) -> None:
    assert relay("init", home=tmp_path / "home").returncode == 0
    report = audited(tmp_path / "home")
    assert list(report.jobs) == list(JOBS)
    assert [name for name, job in report.jobs.items() if job.error or job.findings] == []
    assert report.exit_code == EXIT_OK
    assert report.jobs["reconcile"].counts.get("delivered", 0) == 0


def test_sealed_signed_tiered_with_attachments(tmp_path: Path) -> None:
    home = real_homes.sealed(tmp_path / "home")
    jobs = said(home, tmp_path / "sound")
    assert found(jobs) == {}
    (sent,) = real_homes.rows(home, "SELECT count(*) FROM messages")[0]
    assert jobs["reconcile"].counts == {"unverified": sent}
    kept = jobs["integrity"].counts
    assert kept["attachments"] == 6  # three that messages name, three that none does
    assert kept["objects"] >= 1 and kept["archives"] >= 1
    assert jobs["security"].counts == {"event.key_registered": 4}

    archive = min(home.glob("store/archive/**/*.acomm"))
    kept = {path: path.read_bytes() for path in (archive, home / "store/relay.acomm")}
    lose(home, archive)
    (missing,) = found(said(home, tmp_path / "lost", "integrity", "reconcile"))["reconcile"]
    assert missing == "missing"
    for path, data in kept.items():
        path.write_bytes(data)

    warm = min(home.glob("journal/*/warm/*.seg.zst"))
    warm.write_bytes(warm.read_bytes()[:-100])
    jobs = found(said(home, tmp_path / "damaged", "integrity", "reconcile"))
    assert jobs == {"integrity": {"damaged": {str(warm.relative_to(home))}}}


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


def test_days_packed_and_pruned(tmp_path: Path) -> None:
    home = real_homes.packed(tmp_path / "home")
    jobs = said(home, tmp_path / "sound", "integrity", "reconcile", "duplicates")
    assert found(jobs) == {}
    assert jobs["reconcile"].counts == {"delivered": 7 * 5}
    assert jobs["integrity"].counts["originals"] == 6 * 5
    capacity = audited(home, "capacity")
    assert (capacity.exit_code, capacity.findings) == (EXIT_OK, 0)

    packs = sorted(home.glob("archive/*.tar.zst"))
    data = bytearray(packs[0].read_bytes())
    data[len(data) // 2] ^= 1
    packs[0].write_bytes(data)
    shutil.rmtree(sorted(home.glob("archive/2*-??"))[0] / "bob")
    jobs = said(home, tmp_path / "faulty", "integrity", "reconcile")
    names = {name: set(checks) for name, checks in found(jobs).items()}
    assert names == {"integrity": {"unreadable"}, "reconcile": {"original_missing"}}
    assert len(jobs["reconcile"].findings) == 1


def test_migrated_restored_and_its_store_made_again(tmp_path: Path) -> None:
    home = real_homes.mended(tmp_path / "home")
    jobs = said(home, tmp_path / "sound", "reconcile", "acks", "threads", "ordering")
    assert found(jobs) == {}
    assert jobs["reconcile"].counts == {"delivered": 4 * TALK}
    assert jobs["acks"].counts["acked"] == 4 * 2
    assert jobs["threads"].counts["answered"] == 4

    (home / "ledger.db").rename(home / "before.db")
    shutil.copyfile(tmp_path / "kept.db", home / "ledger.db")  # no start has told it the rest
    (behind,) = said(home, tmp_path / "behind", "reconcile").values()
    assert behind.counts["behind"] == 2 * TALK
    assert [row["check"] for row in behind.findings] == ["reconcile.ledger_behind"]
