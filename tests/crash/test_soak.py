"""The soak in short: agents spawned, killed and released at random, the relay killed, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soaking.__main__ import soak


@pytest.mark.shows("ready 1.2", "ready 6.2", "ready 6.3")
def test_twenty_seconds_of_harm_lose_and_double_nothing(tmp_path: Path) -> None:
    result = soak(tmp_path, seconds=20, agents=8, kill_every_s=3, seed=20)
    assert result["faults"] == []
    happened = {name: result.get(name, 0) for name in ("killed_relays", "killed_agents")}
    assert all(int(str(times)) >= 2 for times in happened.values()), result
    assert int(str(result["messages"])) > 50
    assert int(str(result.get("heard_ack_started_pid", 0))) > 0, result
