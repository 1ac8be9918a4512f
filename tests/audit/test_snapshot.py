"""Up to when a home was watched: the snapshot while a relay holds it, else its last sign."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from relay.audit.snapshot import observed_until
from relay.audit.sources.ledger_rows import take_snapshot
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.ledger_rows import DAY, HOUR, agent, insert
from tests.fakes import FakeClock

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_home_is_judged_by_its_last_sign_unless_a_relay_runs(
    home: HomeBuilder, tmp_path: Path
) -> None:
    clock = FakeClock(START_NS + 30 * DAY)
    ledger = str(home.root / "ledger.db")
    empty = take_snapshot(ledger, str(tmp_path / "empty.db"), clock)
    assert observed_until(home.path, empty) == empty.taken_ns
    insert(home, "agents", [agent("alice", START_NS), agent("bob", START_NS + HOUR)])
    insert(home, "security_events", [{"at": START_NS + 2 * HOUR, "kind": "unsigned"}])
    taken = take_snapshot(ledger, str(tmp_path / "taken.db"), clock)
    assert observed_until(home.path, taken) == START_NS + 2 * HOUR
    insert(home, "security_events", [{"at": START_NS + 90 * DAY, "kind": "unsigned"}])
    ahead = take_snapshot(ledger, str(tmp_path / "ahead.db"), clock)
    assert observed_until(home.path, ahead) == ahead.taken_ns  # a clock that was ahead

    lock = home.root / ".lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], **pipes) as relay:  # type: ignore[call-overload]
        assert relay.stdout.readline() == b"held\n"
        assert observed_until(home.path, taken) == taken.taken_ns
        relay.stdin.close()
    assert observed_until(home.path, taken) == START_NS + 2 * HOUR
