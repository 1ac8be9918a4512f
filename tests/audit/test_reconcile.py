"""The reconcile job: each fault is planted, and it finds that one and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from relay.audit.lake_columns import FINDING, RESULTS
from relay.base.clock import NS_PER_S
from relay.base.incidents import Refusal, RefusalCode
from relay.base.names import sha256_hex
from tests.audit.home_builder import START_NS, START_S, HomeBuilder, stored_message
from tests.audit.printed import parquet, relay_audit
from tests.ledger.support import put

pytestmark = pytest.mark.shows("audit 2.1")


def plant_every_fault(home: HomeBuilder) -> None:
    """One message of each class."""
    home.sent("1-good")
    home.sent("1-different", b"what the sender wrote")
    home.stored[-1] = stored_message(2, "1-different", b"what the store holds")
    home.sent("1-missing")
    home.stored.pop()
    home.keep("1-extra", sender="mallory", to="bob")
    home.seen("1-held")
    home.deliver("1-held", ("bob", "carol"), written_after_ms=None)
    why = "inbox cannot be written"
    put(home.ledger, "1-held", "carol", "held", last_error=why, due_at=START_NS)
    put(home.ledger, "1-held", "bob", "written", written_at=START_NS)
    home.finish("1-held")
    home.keep("1-held")
    home.seen("1-scheduled")
    home.deliver("1-scheduled", written_after_ms=None)
    later = "not before 2026-02-28T09:30:00Z, as its sender asked"
    put(home.ledger, "1-scheduled", "bob", "held", last_error=later, due_at=START_NS)
    home.finish("1-scheduled")
    home.keep("1-scheduled")
    home.seen("1-staged")
    home.deliver("1-staged", written_after_ms=None)
    home.finish("1-staged")
    home.keep("1-staged")
    home.seen("1-pending")
    home.seen("1-processing")
    home.deliver("1-processing")
    home.keep("1-processing")
    home.seen("1-failed")
    home.ledger.fail(
        [("1-failed", Refusal(RefusalCode.NO_RECIPIENT, "there is no agent zed"))], START_NS
    )
    home.seen("1-returned", to="#team")
    home.ledger.claim(["1-returned"])
    why, at = "no longer an agent", START_NS
    put(home.ledger, "1-returned", "zed", "bounced", staged_at=at, last_error=why)
    put(home.ledger, "1-returned", "bob", "written", staged_at=at, written_at=at)
    home.finish("1-returned")
    home.keep("1-returned", to="#team")
    home.keep(None)  # sent through the engine alone: nobody's business here
    home.write_store()


EXPECTED = {
    "1-good": "delivered",
    "1-different": "checksum_differs",
    "1-missing": "missing",
    "1-extra": "orphan",
    "1-held": "undelivered",
    "1-scheduled": "scheduled",
    "1-staged": "undelivered",
    "1-pending": "in_flight",
    "1-processing": "in_flight",
    "1-failed": "failed",
    "1-returned": "returned",
}


class Judged(NamedTuple):
    """A run over one message of each class: what was printed and written."""

    home: str
    out: Path
    result: Result

    def rows(self, table: str) -> list[dict[str, Any]]:
        """A table of its OUT, read without Spark."""
        return parquet(self.out / table)


@pytest.fixture(scope="module")
def judged(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    root = tmp_path_factory.mktemp("judged")
    home = HomeBuilder(root / "home")
    plant_every_fault(home)
    out = root / "new" / "out"
    run = ("run", "reconcile", "traffic", "--home", home.path, "--out", str(out))
    yield Judged(home.path, out, relay_audit(*run))
    home.close()


def test_each_planted_fault_is_found_and_nothing_else(judged: Judged) -> None:
    rows = judged.rows("reconcile")
    assert set(rows[0]) == set(RESULTS["reconcile"].names)
    assert {row["message_id"]: row["class"] for row in rows} == EXPECTED


def test_findings_name_what_is_wrong_and_what_is_known(judged: Judged) -> None:
    found = judged.rows("findings")
    assert set(found[0]) == {*FINDING.names, "job"}
    rows = {row["message_id"]: row for row in found}
    assert {name: (row["check"], row["severity"]) for name, row in rows.items()} == {
        "1-different": ("reconcile.checksum_differs", "error"),
        "1-missing": ("reconcile.missing", "error"),
        "1-extra": ("reconcile.orphan", "error"),
        "1-held": ("reconcile.undelivered", "warning"),
        "1-staged": ("reconcile.undelivered", "warning"),
    }
    assert dict(rows["1-different"]["detail"]) == {
        "status": "archived",
        "ledger_checksum": sha256_hex(b"what the sender wrote"),
        "store_checksum": sha256_hex(b"what the store holds"),
        "original_checksum": sha256_hex(b"what the sender wrote"),
        "store_file": "store/relay.acomm",
        "original": "archive/2026-01-31/alice/1-different.msg",
    }
    assert dict(rows["1-held"]["detail"])["waiting_for"] == "carol"
    assert (rows["1-extra"]["agent"], rows["1-extra"]["route"]) == ("mallory", "bob")
    assert len({row["observed_at"] for row in found}) == 1


@pytest.mark.shows("audit 2.8")
def test_findings_are_printed_kept_and_exit_3(judged: Judged) -> None:
    result, out = judged.result, judged.out
    assert result.exit_code == 3, result.output
    lines = result.stdout.splitlines()
    assert "reconcile: 5 findings (3 errors, 2 warnings)" in lines
    assert any(line.startswith("traffic: OK (pairs ") for line in lines)
    assert any(
        line.split() == ["error", "missing", "1-missing", "alice", ">", "bob"] for line in lines
    )
    assert result.stderr == ""
    assert set(judged.rows("traffic")[0]) == set(RESULTS["traffic"].names)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["findings"], summary["exit_code"], summary["home"]) == (5, 3, judged.home)
    assert summary["store_files"] == ["store/relay.acomm"]
    assert summary["jobs"]["reconcile"]["findings"]["reconcile.undelivered"] == 2
    counts = {name: list(EXPECTED.values()).count(name) for name in EXPECTED.values()}
    assert summary["jobs"]["reconcile"]["counts"] == counts
    assert os.stat(out).st_mode & 0o077 == 0


def test_a_store_that_was_never_written_is_empty(home: HomeBuilder) -> None:
    home.sent("1-lost")
    home.seen("1-pending")
    table = home.says("reconcile").tables["reconcile"]
    assert {row["message_id"]: row["class"] for row in table} == {
        "1-lost": "missing",
        "1-pending": "in_flight",
    }


def test_what_a_damaged_file_may_have_does_not_hide_what_is_wrong(home: HomeBuilder) -> None:
    """Its store file is passed over; its original has another text, whatever the store has."""
    home.sent("1-lost")
    home.sent("1-forged")
    archive = home.root / "archive/2026-01-31/alice"
    archive.mkdir(parents=True, exist_ok=True)
    for name, (_, data) in home.files.items():
        forged = data.replace(b"hello", b"jello") if name == "1-forged" else data
        (archive / f"{name}.msg").write_bytes(forged)
    damaged = Path(home.write_store("store/archive/2026-01-31/000001.acomm"))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    table = home.says("reconcile").tables["reconcile"]
    assert {row["message_id"]: row["class"] for row in table} == {
        "1-lost": "not_checked",
        "1-forged": "original_differs",
    }


# id: created_ns, created_at, class; the snapshot is an hour later, the grace is 30 s
LATE_S = 3570
AGES = {
    "1-old": (START_NS, START_S, "orphan"),
    "1-new": (START_NS + (LATE_S + 10) * NS_PER_S, START_S + LATE_S + 10, "recent"),
    # found long ago, and taken in by the engine just now
    "1-answer": (START_NS - 10**6 * NS_PER_S, START_S + LATE_S + 10, "recent"),
    "1-before": (START_NS + (LATE_S - 1) * NS_PER_S, START_S + LATE_S - 1, "orphan"),
    "1-at": (START_NS + LATE_S * NS_PER_S, START_S + LATE_S, "recent"),
}


def test_every_section_of_every_file_counts_and_a_message_in_two_files_is_one(
    home: HomeBuilder,
) -> None:
    """What is sealed is not called equal; what is no older than the grace is no orphan."""
    for name in ("1-aged", "1-both", "1-sealed", "1-dead", "1-archived", "1-altered"):
        home.sent(name, name.encode())
    aged, both, _, dead, archived, altered = home.stored
    home.stored = [aged, both]
    home.write_store("store/archive/2026-01-30/000001.acomm")
    home.stored = [stored_message(9, "1-altered", b"another")]
    home.write_store("store/archive/2026-01-31/000001.acomm")
    home.stored = [stored_message(3, "1-sealed", bytes(33))]
    home.write_store("store/archive/2026-01-31/000002.acomm", encrypted=True)
    home.stored = [both, altered] + [
        stored_message(number, name, created_ns=created_ns, created_at=created_at)
        for number, (name, (created_ns, created_at, _)) in enumerate(AGES.items(), 10)
    ]
    home.write_store(dead_letters=(dead,), archive=(archived,))
    table = home.says("reconcile").tables["reconcile"]
    assert {row["message_id"]: (row["class"], row["copies"]) for row in table} == {
        "1-aged": ("delivered", 1),
        "1-both": ("delivered", 2),
        "1-sealed": ("unverified", 1),
        "1-dead": ("delivered", 1),
        "1-archived": ("delivered", 1),
        "1-altered": ("checksum_differs", 2),
        **{name: (expected, 1) for name, (_, _, expected) in AGES.items()},
    }
    files = {row["message_id"]: row["store_file"] for row in table}
    assert files["1-aged"] == "store/archive/2026-01-30/000001.acomm"
