"""An audit gives way, also where the kernel divides processors by session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.procs import Relay, environment, home_of

GROUPS = Path("/proc/self/autogroup")
# Gives way, starts a child with a session of its own and one without; prints what they have.
GIVES_WAY = """
import os, subprocess, sys, time
from pathlib import Path
from relay.audit.priority import give_way, lowered_children
give_way(sys.argv[2])
with lowered_children():
    own, same = (subprocess.Popen(["sleep", "60"], start_new_session=one) for one in (True, False))
    group = Path(f"/proc/{own.pid}/autogroup")
    deadline = time.monotonic() + float(sys.argv[1])
    while group.read_text().split()[-1] == "0" and time.monotonic() < deadline:
        time.sleep(0.01)
print(group.read_text().split()[-1], Path(f"/proc/{same.pid}/autogroup").read_text().split()[-1],
      os.getpriority(os.PRIO_PROCESS, own.pid), os.getpriority(os.PRIO_PROCESS, same.pid))
for child in (own, same):
    child.kill()
    child.wait()
"""


@pytest.mark.skipif(not GROUPS.exists(), reason="the kernel does not divide by session")
@pytest.mark.parametrize(
    ("wanted", "patience_s", "nice"), [("", 10, 19), ("7", 10, 7), ("0", 0.2, 0)]
)
def test_the_session_of_a_child_gives_way_and_no_other(
    wanted: str, patience_s: float, nice: int, tmp_path: Path
) -> None:
    """The terminal's session is everybody's: its processes keep what they have."""
    done = subprocess.run(
        [sys.executable, "-c", GIVES_WAY, str(patience_s), str(tmp_path)],
        env=environment(AGENT_RELAY_AUDIT_NICE=wanted),
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    priority = max(nice, os.getpriority(os.PRIO_PROCESS, 0))
    assert done.stdout.split() == [str(nice), "0", str(priority), str(priority)]


AFFINITY = """
import os, sys
from relay.audit.priority import give_way
before = len(os.sched_getaffinity(0))
give_way(sys.argv[1])
print(before - len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no such thing")
def test_a_relay_that_runs_keeps_a_processor_for_itself(tmp_path: Path) -> None:
    def left(nice: str = "") -> int:
        done = subprocess.run(
            [sys.executable, "-c", AFFINITY, str(home)],
            env=environment(AGENT_RELAY_AUDIT_NICE=nice),
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    home = home_of(tmp_path / "home", "alice")
    spare = int(len(os.sched_getaffinity(0)) > 1)  # one alone is shared
    assert left() == 0
    served = Relay(home)
    served.start()
    try:
        assert (left(), left(nice="0")) == (spare, 0)
    finally:
        served.stop()
