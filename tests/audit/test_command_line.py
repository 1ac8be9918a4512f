"""What `relay audit run` is asked in vain is one line, at once: before Java starts."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.base.errors import EXIT_FAILED, EXIT_USAGE
from relay.cli import run
from tests.audit.home_builder import HomeBuilder


def said(capsys: pytest.CaptureFixture[str], home: HomeBuilder, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr; nothing is printed to stdout."""
    code = run(["audit", "run", "--home", home.path, *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


@pytest.mark.parametrize(
    "given",
    [
        ("--grace", "nan"),
        ("--grace", "1e30"),
        ("--recent", "inf"),
        ("--recent", "1e9"),
        ("--recent", "-1"),
    ],
)
def test_a_number_that_is_none(
    given: tuple[str, str], home: HomeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stderr = said(capsys, home, "traffic", *given)
    assert code == EXIT_USAGE
    assert f"Invalid value for '{given[0]}'" in stderr


def test_what_a_newer_relay_wrote_is_no_finding(
    home: HomeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    home.ledger.close()
    with contextlib.closing(sqlite3.connect(home.root / "ledger.db")) as db, db:
        db.execute("PRAGMA user_version = 99")
    code, stderr = said(capsys, home, "traffic")
    assert code == EXIT_FAILED
    assert "use a newer agent-relay" in stderr


def test_a_comparison_with_nothing(
    home: HomeBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = str(tmp_path / "nothing")
    code, stderr = said(capsys, home, "integrity", "--compare", nothing)
    assert code == EXIT_FAILED
    assert stderr.startswith(f"relay: there is no {nothing}/integrity_days to compare with; ")
    code, stderr = said(capsys, home, "traffic", "--compare", nothing)
    assert code == EXIT_FAILED
    assert stderr.startswith("relay: --compare needs the job integrity; ")


def test_a_disk_that_has_no_room_for_the_snapshot(
    home: HomeBuilder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relay.audit.sources import ledger_rows

    class Full:
        """A connection whose disk is full when it copies."""

        def __init__(self, real: sqlite3.Connection) -> None:
            self._real = real

        def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
            if sql.startswith("VACUUM"):
                self._real.execute("PRAGMA temp.max_page_count = 3")
                sql = "CREATE TEMP TABLE t AS SELECT randomblob(1000000) AS b"
                values = ()
            return self._real.execute(sql, *values)

        def close(self) -> None:
            self._real.close()

    opened = ledger_rows.open_current
    monkeypatch.setattr(ledger_rows, "open_current", lambda path: Full(opened(path)))
    code, stderr = said(capsys, home, "traffic")
    assert code == EXIT_FAILED
    assert stderr.startswith(f"relay: cannot make a snapshot of {home.path}/ledger.db in ")
    assert "full; free space there, or set TMPDIR" in stderr


@pytest.mark.parametrize("refused", ["", "ledger.db"])
def test_the_home_of_another_user(
    refused: str,
    home: HomeBuilder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = os.path.join(home.path, refused).rstrip("/")
    real = {name: getattr(os, name) for name in ("scandir", "open")}

    def as_another(name: str) -> Callable[..., object]:
        def call(given: object, *rest: object, **named: object) -> object:
            if given == path:
                raise PermissionError(errno.EACCES, "Permission denied", given)
            return real[name](given, *rest, **named)

        return call

    for name in real:
        monkeypatch.setattr(os, name, as_another(name))
    code, stderr = said(capsys, home, "traffic")
    assert code == EXIT_FAILED
    assert stderr.startswith(
        f"relay: {path} cannot be read: Permission denied; run this as the user"
    )
