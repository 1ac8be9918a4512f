"""What a person sees of a job, on a narrow terminal too."""

from __future__ import annotations

import pytest

from relay.audit.summary import Examples, JobReport
from relay.cli.audit_screen import print_job

pytestmark = pytest.mark.shows("audit 3.5")

MESSAGE_ID = "1795297996497933135-a1b2c3d4e5f60718"


def seen(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    examples: Examples,
    report: JobReport,
) -> list[str]:
    """The lines of a terminal so wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_job(report, examples, brief=not examples.rows)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def finding(check: str, **columns: str | None) -> dict[str, object]:
    """A row of findings."""
    nothing = {"message_id": None, "agent": None, "route": None, "path": None}
    return {"severity": "error", "check": check, **nothing, **columns}


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_an_id_is_whole_for_it_is_copied(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "reconcile.delivery_conflict"
    row = finding(check, message_id=MESSAGE_ID, agent="alice", route="a-rather-long-channel")
    lines = seen(
        capsys, monkeypatch, columns, Examples([], [row]), JobReport("reconcile", errors=1)
    )
    assert any(MESSAGE_ID in line for line in lines)
    assert max(map(len, lines)) <= columns
    assert "reconcile: 1 finding (1 error)" in lines


def test_into_a_file_no_word_is_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = finding("a.duplicates_of_one", message_id=MESSAGE_ID, agent="a" * 40, route="b" * 40)
    print_job(JobReport("a", errors=1), Examples([], [row]), brief=True)
    header, line, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["severity", "check", "message_id", "from", ">", "to"]
    assert line.split() == ["error", "duplicates_of_one", MESSAGE_ID, "a" * 40, ">", "b" * 40]


def test_a_file_is_from_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        finding("integrity.damaged", path="store/relay.acomm"),
        finding("agents.stuck", agent="bob"),
    ]
    lines = seen(capsys, monkeypatch, 80, Examples([], rows), JobReport("integrity", errors=2))
    assert lines[1].split() == ["error", "damaged", "-", "store/relay.acomm"]
    assert lines[2].split() == ["error", "stuck", "-", "bob"]


def test_bytes_are_as_people_read_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"part": "ledger", "bytes": 1_234_567, "limit_bytes": None, "bytes_per_day": 1.5e6}]
    lines = seen(capsys, monkeypatch, 80, Examples(rows, []), JobReport("capacity"))
    assert lines[1].split() == ["ledger", "1.2", "MiB", "-", "1.4", "MiB"]
