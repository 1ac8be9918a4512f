"""Power cuts on the kernel's own file systems; minutes each, so they run with ``-m nightly``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/powercut"

NEEDED = ("/dev/fuse", "/dev/loop-control")
missing = [name for name in NEEDED if not os.path.exists(name)]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems"),
    pytest.mark.skipif(bool(missing), reason=f"this machine has no {' and no '.join(missing)}"),
]


def loop_files() -> set[str]:
    """The images of the machine's loop devices."""
    return {one.read_text() for one in Path("/sys/block").glob("loop*/loop/backing_file")}


def powercut(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("system", ["ext4", "ext4-writeback", "xfs", "btrfs"])
def test_forty_power_cuts_lose_nothing_and_call_nothing_read(system: str) -> None:
    if shutil.which(f"mkfs.{system.partition('-')[0]}") is None:
        pytest.skip(f"mkfs for {system} is not installed")
    done = powercut("--fs", system, "--states", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {system} | 40 | " in done.stdout


def test_where_nobody_syncs_messages_are_lost_or_the_drill_sees_nothing() -> None:
    if shutil.which("cc") is None or shutil.which("mkfs.xfs") is None:
        pytest.skip("a C compiler and mkfs.xfs are needed")
    done = powercut("--control", "--fs", "xfs", "--states", "20")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_drill_that_is_ended_leaves_no_loop_device(number: int) -> None:
    before = loop_files()
    command = [str(SCRIPT), "--fs", "ext4", "--states", "400", "--seconds", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as drill:
        deadline = time.monotonic() + 120
        while not any("/judge-" in one for one in loop_files() - before):
            assert drill.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(drill.pid, number)
    while left := loop_files() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
