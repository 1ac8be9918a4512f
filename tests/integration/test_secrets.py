"""What is in bodies, keys and ENV stands in no log."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from relay.base.crypto import public_key
from relay.delivery.values import Inbound, Plan
from tests.box import Box
from tests.procs import Relay, home_of, until

pytestmark = pytest.mark.shows("ready 3.1")

SECRET = "correct-horse-battery-staple"
PRIVATE = b"k" * 32


def feed(folder: Path) -> int:
    """Everything an agent may say with the secret in its body, good and bad; how many."""
    texts = [
        f"TO: bob\n\n{SECRET}",
        f"TO: nobody\n\n{SECRET}",
        f"TO: bob\nKIND: nonsense\n\n{SECRET}",
        f"TO: bob\nCHECKSUM: sha256:{'0' * 64}\n\n{SECRET}",
        f"TO: bob\nATTACHMENT: sha256:{'0' * 64}\n\n{SECRET}",
        f"TO: bob\nSIGNATURE: ed25519:{base64.b64encode(b's' * 64).decode()}\n\n{SECRET}",
        f"KIND: spawn\nNAME: worker\nCLI: nothing\nENV: TOKEN={SECRET}\n\n{SECRET}",
        f"KIND: spawn\n\nNAME: worker\nCLI: nothing\nENV: TOKEN={SECRET}\nPROMPT: {SECRET}",
        f"TO: __orchestrator__\nKIND: command\n\nACTION: channel.create\nCHANNEL: {SECRET} x",
        f"TO: __orchestrator__\nKIND: status\n\n{SECRET}",
        f"TO: #no-channel\n\n{SECRET}",
        f"TO: bob\nKIND: query\nAWAIT: 1\n\n{SECRET}",
    ]
    for number, text in enumerate(texts):
        name = f"{1_700_000_000_000_000_000 + number}-{number:08x}.msg"
        (folder / ".pending" / name).write_text(text)
        (folder / ".pending" / name).rename(folder / name)
    return len(texts)


def test_no_line_of_the_log_has_content_or_keys(tmp_path: Path) -> None:
    store = {"encrypt": True, "checkpoint_ms": 50}
    home = home_of(tmp_path / "home", "alice", "bob", log_level="debug", store=store)
    (home / "agents" / "alice" / "key").write_bytes(PRIVATE)
    (home / "agents" / "alice" / "key").chmod(0o600)
    (home / "agents" / "alice" / "meta.json").write_text(
        json.dumps({"public_key": public_key(PRIVATE).hex()})
    )
    with Relay(home):
        outbox = home / "agents" / "alice" / "outbox"
        feed(outbox)
        until(lambda: not list(outbox.glob("*.msg")))
    log = (home / "logs" / "relay.log").read_text(errors="replace")
    assert "deliver_batch" in log
    store_key = (home / "store.key").read_bytes()
    for secret in (SECRET, PRIVATE.hex(), PRIVATE.decode(), store_key.hex(), repr(store_key)):
        assert secret not in log


def test_no_fact_that_is_logged_has_content(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from relay.delivery.plan import plan_file

    def faulty(inbound: Inbound, *rest: Any) -> Plan:
        if inbound.message and inbound.message.body.startswith(b"poison"):
            raise ValueError(inbound.message.body)  # a fault of ours may quote what it choked on
        return plan_file(inbound, *rest)

    monkeypatch.setattr("relay.delivery.loop.plan_file", faulty)
    box.send("alice", f"TO: bob\n\npoison {SECRET}")
    feed(box.path("agents", "alice", "outbox"))
    box.tick(3)
    (fault,) = [line for line in box.log if line["action"] == "fault"]
    assert fault["event"].endswith("internal error: ValueError")
    assert fault["where"][-1].endswith(" faulty")
    assert "exc_info" not in fault  # a traceback ends with the error's own text
    assert SECRET not in repr(box.log)
