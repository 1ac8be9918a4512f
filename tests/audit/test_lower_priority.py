"""Commands of the audits run at the lowest priority."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.procs import environment

# Lowers its priority and starts a child; prints what both have.
LOWER = """
import os, subprocess, sys
from relay.audit import lower_priority
lower_priority()
child = subprocess.Popen(["sleep", "60"])
print(os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, child.pid))
child.kill()
child.wait()
"""


@pytest.mark.parametrize(("wanted", "nice"), [("", 19), ("7", 7), ("0", 0)])
def test_a_command_and_its_children_have_the_lowest_priority(wanted: str, nice: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOWER],
        env=environment(AGENT_RELAY_AUDIT_NICE=wanted),
        capture_output=True,
        text=True,
        check=True,
    )
    priority = max(nice, os.getpriority(os.PRIO_PROCESS, 0))
    assert done.stdout.split() == [str(priority), str(priority)]
