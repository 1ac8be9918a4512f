"""A send against a turn's end: never unseen, never twice as new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RACES = int(os.environ.get("RELAY_RACES", "200"))


@pytest.mark.slow
@pytest.mark.timeout(900 + 2 * RACES)
def test_a_message_that_races_with_the_end_of_a_turn_is_seen_once(root: Path) -> None:
    argv = [sys.executable, "-m", "tests.reach.races", str(root), str(RACES), "7"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)
    met = ways.pop("at the stop"), ways.pop("by the bell")
    assert ways == {"unseen": 0, "twice as new": 0, "shown again": 0, "not read": 0}
    assert sum(met) == RACES and min(met) > RACES // 20
