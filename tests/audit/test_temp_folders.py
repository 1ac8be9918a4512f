"""Folders below TMPDIR: ours while we live, removed afterwards, by the next audit if need be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relay.audit.temp_folders import temporary_folder
from relay.base import fsio
from tests.procs import environment

pytestmark = pytest.mark.shows("audit 2.5")

MAKE = """
import sys
from relay.audit.temp_folders import private_folder
print(private_folder(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def begin(temp: Path, purpose: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, purpose],
        env=environment(TMPDIR=str(temp)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().rstrip("\n"))


def end(process: subprocess.Popen[str]) -> None:
    """Let it end by itself."""
    process.communicate("")
    assert process.returncode == 0


def test_what_a_killed_process_left_goes_and_what_is_another_ones_stays(tmp_path: Path) -> None:
    (tmp_path / "relay-audit-notes").write_text("a file of somebody's")
    killed, orphan = begin(tmp_path, "run")
    (orphan / "ledger.db").write_bytes(b"a copy")
    living, kept = begin(tmp_path, "spark")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "relay-audit-notes", orphan, kept])
    assert (orphan.stat().st_mode & 0o777, orphan.name[:16]) == (0o700, "relay-audit-run-")

    killed.kill()
    killed.communicate()
    assert (orphan / "ledger.db").exists()
    third, another = begin(tmp_path, "run")
    assert sorted(os.listdir(tmp_path)) == sorted(["relay-audit-notes", kept.name, another.name])

    for process in (living, third):
        end(process)
    assert os.listdir(tmp_path) == ["relay-audit-notes"]


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fsio, "locked", full)
    with pytest.raises(OSError, match="No space left"), temporary_folder("run"):
        pass
    assert os.listdir(tmp_path) == []
