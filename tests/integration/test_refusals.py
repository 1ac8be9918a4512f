"""Bad input: one clear line in the sender's inbox, the file kept, nothing else disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.box import Box

GONE = f"sha256:{'0' * 64}"


@pytest.mark.shows("ready 1.5")
@pytest.mark.parametrize(
    ("text", "reason", "code"),
    [
        ("TO: nobody\n\nhi", "there is no agent nobody", "no_recipient"),
        (b"TO: bob\n\n\xff\xfe", "not UTF-8", "malformed"),
        (f"TO: bob\nATTACHMENT: {GONE}\n\nsee", f"{GONE} is not in the attachment", "attachment"),
    ],
)
def test_the_sender_is_told_why_and_the_file_is_kept(
    box: Box, text: str | bytes, reason: str, code: str
) -> None:
    sent = box.send("alice", text)

    (nack,) = box.inbox("alice").values()
    assert nack.kind == "nack"
    assert nack.headers["RE"] == sent
    assert reason in nack.body.decode()
    assert nack.body.count(b"\n") == 1
    row = box.row(sent)
    assert row["status"] == "failed"
    assert reason in row["last_error"]
    assert row["last_error_code"] == code

    box.flush()
    kept = box.path(box.row(sent)["file_path"])
    assert kept.parent.name == "rejected"
    assert kept.read_bytes() == (text if isinstance(text, bytes) else text.encode())
    assert box.outbox("alice") == []


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_what_is_no_regular_file_is_refused_and_noted(box: Box, kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TO: bob\n\nthe secret")
    name = box.name()
    path = box.path("agents", "alice", "outbox", name)
    match kind:
        case "symlink":
            path.symlink_to(secret)
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    os.rename(path, path.with_suffix(".tmp"))
    os.rename(path.with_suffix(".tmp"), path)  # renamed into place, as the watcher sees it
    box.tick()

    assert box.inbox("bob") == {}
    assert "regular file" in box.nacks("alice")[0]
    assert box.sql("SELECT kind, agent FROM security_events") == [("not_a_regular_file", "alice")]
    box.flush()
    assert not os.path.lexists(path)
    assert secret.read_text() == "TO: bob\n\nthe secret"


@pytest.mark.shows("ready 1.3")
def test_the_same_file_again_is_put_away_not_delivered_again(box: Box) -> None:
    name = box.name()
    sent = box.send("alice", "TO: bob\n\nonce", name)
    box.flush()
    box.take("bob", sent)
    box.send("alice", "TO: bob\n\nonce", name)
    box.flush()

    assert box.inbox("bob") == {}
    assert box.outbox("alice") == []
    assert box.row(sent)["status"] == "archived"
    assert len(list(box.path("archive").glob("*/alice/duplicates/*"))) == 1


def test_an_id_that_is_taken_is_refused(box: Box) -> None:
    name = box.name()
    sent = box.send("alice", "TO: bob\n\nfirst", name)
    box.flush()
    box.send("alice", "TO: bob\n\nsecond", name)
    box.send("carol", "TO: bob\n\nthird", name)
    other = box.name()
    box.drop("alice", "TO: bob\n\nfourth", other)  # and two of one batch
    box.drop("carol", "TO: bob\n\nfifth", other)
    box.tick()
    box.flush()

    assert box.bodies("bob") == ["first", "fourth"]
    assert ["its id is taken" in one for one in box.nacks("alice")] == [True]
    assert ["its id is taken" in one for one in box.nacks("carol")] == [True, True]
    assert box.row(sent)["status"] == "archived"
    kept = [path.read_text()[-5:] for path in box.path("archive").glob("*/alice/rejected/*.msg")]
    assert kept == ["econd"] and len(list(box.path("archive").glob("*/carol/rejected/*"))) == 2
