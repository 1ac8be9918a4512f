"""Turns of the three agent CLIs, as they run the hooks that ``relay hooks install`` wrote."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relay.reach.hook import waiting
from relay.reach.session import live_session
from tests.reach.hooks import put

TURNS = int(os.environ.get("RELAY_TURNS", "6"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 3 * TURNS)
@pytest.mark.parametrize("vendor", ["claude", "codex", "gemini"])
def test_a_message_at_any_moment_of_a_turn_is_in_the_context_once(
    root: Path, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = pytest.importorskip("tests.fakes.harness")
    project = root.parent / "project"
    project.mkdir()
    relay = Path(sys.executable).with_name("relay")
    words = [relay, "hooks", "install", vendor, "--project", "--home", root, "--as", "bob"]
    subprocess.run(words, cwd=project, check=True, capture_output=True)
    chance = random.Random(vendor)
    ids = [f"{1700000000000000000 + number}-aa" for number in range(TURNS)]
    with harness.Harness(vendor, project) as cli:
        cli.start()
        for one in ids:
            sender = threading.Thread(target=_send, args=(root, one, chance.uniform(0, 0.5)))
            sender.start()
            cli.prompt("go", {"run": "true"}, {"batch": [{"run": "true"}, {"run": "true"}]})
            sender.join()
        cli.prompt("what has come", {"run": "true"})
        assert cli.errors() == []
        seen = [(one, len(cli.saw(f"Message {one} from alice (message):"))) for one in ids]
        assert seen == [(one, 1) for one in ids]
        session = live_session(str(root), "bob")
        assert session is not None and session.state == "idle"
        assert not waiting(str(root), session) and not session.offered
    assert len(os.listdir(root / "agents/bob/inbox/.read")) == TURNS


def _send(root: Path, message_id: str, delay: float) -> None:
    time.sleep(delay)
    put(root, "bob", "FROM: alice\nTO: bob\n\nhello", message_id)
