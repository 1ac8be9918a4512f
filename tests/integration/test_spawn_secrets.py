"""However a spawn is written, no value of its ENV stays anywhere but in ``run/``."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from relay.base.config import Config, LimitSettings
from relay.base.message import parse
from tests.box import Box

pytestmark = pytest.mark.shows("ready 3.1")

SECRET = b"hunter2"
HEAD = b"KIND: spawn\nNAME: w\nCLI: sh\nENV: KEY=hunter2\n"
SUM = hashlib.sha256(b"go").hexdigest().encode()


def leaks(box: Box) -> list[str]:
    return [
        str(path.relative_to(box.root))
        for path in box.root.rglob("*")
        if path.is_file() and SECRET in path.read_bytes()
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
    assert SECRET.decode() not in str(box.log)
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
    assert SECRET not in path.read_bytes()
    assert len(box.inbox("operator")) == 1  # started once
