"""What is in bodies, keys and ENV stands in no log, and no value of ENV but in ``run/``."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from relay.base.config import Config, LimitSettings
from relay.base.crypto import public_key
from relay.base.message import parse
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


# -- the values of ENV, however a spawn is written -----------------------------------------


VALUE = b"hunter2"
HEAD = b"KIND: spawn\nNAME: w\nCLI: sh\nENV: KEY=hunter2\n"
SUM = hashlib.sha256(b"go").hexdigest().encode()


def leaks(box: Box) -> list[str]:
    return [
        str(path.relative_to(box.root))
        for path in box.root.rglob("*")
        if path.is_file() and VALUE in path.read_bytes()
    ]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (HEAD + b"CHECKSUM: sha256:" + SUM + b"\n\ngo", None),
        (HEAD + b"\ngo", "hello.msg"),
        (HEAD + b"\n" + b"x" * 70_000, None),
        (HEAD + b"\n\xff\xfe", None),
        (HEAD + b"ENV A=hunter2\n\ngo", None),
        (HEAD + b"TO: bob\nAWAIT: 5s\n\ngo", None),
        (b"KIND: spawn\r\n\r\nNAME: w\r\nENV: A=hunter2\r\nhunter2\r\nCLI: sh\r\n", None),
    ],
)
@pytest.mark.box("alice", "bob", config=Config(limits=LimitSettings(max_body_bytes=65_536)))
def test_no_trace_of_it(box: Box, data: bytes, name: str | None) -> None:
    name = name or box.name()
    box.drop("alice", data, name)
    box.tick(3)
    for _ in range(9):  # what awaits an answer is delivered again, and given up
        box.after(12)
    box.flush()
    assert leaks(box) == []
    assert VALUE.decode() not in str(box.log)
    assert len([*box.path("archive").rglob(name)]) == 1  # what it said is kept, but for that
    assert (box.outbox("alice"), box.inbox("alice") != {}) == ([], True)


@pytest.mark.box("alice")
def test_what_is_kept_says_what_was_sent(box: Box, tmp_path: Path) -> None:
    text = f"KIND: spawn\nNAME: w\nCLI: sh\nENV: A=hunter2,B=x\nX-MINE: 1\nCWD: {tmp_path}\n\ngo on"
    sent = box.send("operator", text)
    box.tick(2)
    box.flush()
    (path,) = box.path("archive").rglob(f"{sent}.msg")
    assert path.read_text() == text.replace("hunter2", "***").replace("B=x", "B=*")
    ((checksum,),) = box.sql("SELECT checksum FROM messages WHERE message_id = ?", sent)
    assert checksum == hashlib.sha256(parse(path.read_bytes()).content).hexdigest()
    assert path.stat().st_mode & 0o777 == 0o600
    (process,) = box.spawner.processes  # type: ignore[attr-defined]
    assert process.spec.env == {"A": "hunter2", "B": "x"}
    specs = [*box.path("run").glob("*.json")]
    assert [p.stat().st_mode & 0o777 for p in specs] == [0o600]

    box.drop("operator", text, f"{sent}.msg")  # the same file again
    box.tick(2)
    (path,) = box.path("archive").rglob(f"duplicates/{sent}.msg")
    assert VALUE not in path.read_bytes()
    assert len(box.inbox("operator")) == 1  # started once
