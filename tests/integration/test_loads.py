"""A command loads what it needs and no more: that is most of its time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent_sdk.test_imports import HEAVY
from tests.procs import Relay, environment, send, until

PROGRAM = """
import sys
from relay.cli import run
run()
print(*sorted(sys.modules), file=sys.stderr)
"""
DAEMON = {"relay.daemon.process", "relay.daemon.session", "structlog"}
CLICKS = {"click", "inspect", "pathlib", "threading"}  # its own imports
LEFT_OUT = {
    "--help": {"pyspark", "pyarrow", "sqlite3", "structlog", "msgspec", "relay.daemon"},
    "send bob hi --as alice": HEAVY - CLICKS | {"relay.ledger", "relay.engine"},
    **dict.fromkeys(("status", "inbox --as alice", "trace x", "agents"), DAEMON),
}


def loaded_by(home: Path, words: str, **env: str) -> tuple[set[str], list[str]]:
    """The modules that a command has loaded when it ends, and what it said on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        env=environment(AGENT_RELAY_DIR=str(home), **env),
        capture_output=True,
        text=True,
        check=True,
    )
    *said, modules = done.stderr.splitlines()
    return set(modules.split()), said


@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_needs_no_relay(home: Path, words: str) -> None:
    loaded, _ = loaded_by(home, words)
    assert "relay.cli" in loaded and not loaded & LEFT_OUT[words]
    assert len(loaded) < 250 or words != "--help"


def test_completion(home: Path) -> None:
    asked = {"COMP_WORDS": "relay channel show ", "COMP_CWORD": "3"}
    loaded, _ = loaded_by(home, "", _RELAY_COMPLETE="bash_complete", **asked)
    assert not loaded & {"relay.daemon", "relay.engine", "relay.ledger", "sqlite3"}


def test_who_waits_for_the_relay_reads_a_ledger_and_writes_none(
    running: Relay, home: Path, waits: None
) -> None:
    loaded, said = loaded_by(home, "send --as alice bob hi")
    assert "delivered to bob" in said[0]
    assert {name for name in loaded if name.startswith("relay.ledger.")} == {"relay.ledger.file"}
    assert not loaded & {"importlib.resources", "msgspec", "relay.engine"}


def test_a_list_from_an_index_that_lacks_nothing_reads_no_journal(
    running: Relay, home: Path
) -> None:
    send(home, "bob", "hi")
    slow = {"awscrt.checksums", "relay.daemon.opening", "relay.engine", "relay.journal.journal"}
    until(lambda: not loaded_by(home, "list")[0] & slow)
    assert loaded_by(home, "list topic:build.#")[0] & slow == {"relay.engine"}
