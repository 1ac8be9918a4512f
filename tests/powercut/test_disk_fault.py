"""A fault makes ext4 read-only under a relay; mounted again without a reboot, nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.procs import PATIENCE_S, environment

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems"),
    pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed"),
]

DRILL = r"""
relay() { "$PYTHON" -m relay --home disk/home "$@"; }
truncate -s 100M image && mkfs.ext4 -q image && mkdir disk
mount -o loop,commit=60 image disk
relay init && pid=$(relay up | sed 's/.*pid \([0-9]*\),.*/\1/')
relay register alice && relay register bob && sync
relay send bob 'a moment before' --as alice --wait delivered
mount -o remount,abort disk
for words in "send bob late --as alice" doctor attention; do relay $words || echo "exit $?"; done
kill -9 $pid
for _ in 1 2 3 4 5 6 7 8 9; do umount disk 2>/dev/null && break; sleep 0.2; done
mount -o loop image disk
relay up && relay inbox --as bob --take && relay doctor && relay down
umount disk
"""


def test_a_fault_is_said_and_what_was_not_synced_is_there_again(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-mp", "--mount-proc", "--kill-child", "sh", "-e", "-c", DRILL],
        cwd=tmp_path,
        env=environment() | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fault = f"{tmp_path}/disk/home is on a read-only file system: no messages are accepted"
    assert done.stdout.count(fault) == 2  # doctor, attention
    assert done.stdout.count("\nexit 1\n") == 1 and done.stdout.count("\nexit 3\n") == 2
    assert "Read-only file system; remount it" in done.stderr  # the sender
    assert "| a moment before\nOK\n" in done.stdout
