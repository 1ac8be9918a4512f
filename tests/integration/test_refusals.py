"""Bad input: one clear line in the sender's inbox, the file kept, nothing else disturbed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from relay.base.config import Config, LimitSettings
from tests.box import Box


@pytest.mark.shows("ready 1.5")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("TO: nobody\n\nhi", "there is no agent nobody"),
        ("no header at all", "line 1"),
        ("TO: bob\nKIND: shout\n\nhi", "header KIND"),
        (b"TO: bob\n\n\xff\xfe", "not UTF-8"),
        ("", "the file is empty"),
    ],
)
def test_the_sender_is_told_why_and_the_file_is_kept(
    box: Box, text: str | bytes, reason: str
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

    box.flush()
    kept = box.path(box.row(sent)["file_path"])
    assert kept.parent.name == "rejected"
    assert kept.read_bytes() == (text if isinstance(text, bytes) else text.encode())
    assert box.outbox("alice") == []


@pytest.mark.shows("ready 2.3", "ready 4.6")
@pytest.mark.box("alice", "bob", config=Config(limits=LimitSettings(max_body_bytes=1000)))
def test_a_file_too_large_is_refused_unread(box: Box) -> None:
    sent = box.send("alice", "TO: bob\n\n" + "x" * 10_000)

    assert "too large: the body may be 1000" in box.nacks("alice")[0]
    box.flush()
    assert box.path(box.row(sent)["file_path"]).stat().st_size == 10_009
    assert box.states(box.send("alice", "TO: bob\n\n" + "x" * 1000)) == {"bob": "written"}


def test_a_message_whose_attachment_is_not_there_is_refused(box: Box) -> None:
    digest = hashlib.sha256(b"a large file").hexdigest()
    sent = box.send("alice", f"TO: bob\nATTACHMENT: sha256:{digest}\n\nsee there")
    assert f"ATTACHMENT sha256:{digest} is not in the attachment store" in box.nacks("alice")[0]
    assert box.row(sent)["status"] == "failed"

    folder = box.path("attachments", digest[:2])
    folder.mkdir()
    (folder / digest).write_bytes(b"a large file")
    sent = box.send("alice", f"TO: bob\nATTACHMENT: sha256:{digest}\n\nsee there")
    assert box.inbox("bob")[sent].attachments == (f"sha256:{digest}",)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "dangling"])
def test_what_is_no_regular_file_is_refused_and_noted(box: Box, kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("TO: bob\n\nthe secret")
    name = box.name()
    path = box.path("agents", "alice", "outbox", name)
    match kind:
        case "symlink":
            path.symlink_to(secret)
        case "dangling":
            path.symlink_to("/nowhere")
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
    box.flush()

    assert box.bodies("bob") == ["first"]
    assert "its id is taken" in box.nacks("alice")[0]
    assert "its id is taken" in box.nacks("carol")[0]
    assert box.row(sent)["status"] == "archived"
    assert len(list(box.path("archive").glob("*/*/rejected/*.msg"))) == 2


def test_two_files_of_one_id_in_one_batch(box: Box) -> None:
    name = box.name()
    box.drop("alice", "TO: bob\n\nfirst", name)
    box.drop("carol", "TO: bob\n\nsecond", name)
    box.tick()

    assert box.bodies("bob") == ["first"]
    assert "its id is taken" in box.nacks("carol")[0]


def test_a_file_put_in_the_place_of_one_in_hand_is_not_lost(box: Box) -> None:
    name = box.name()
    box.send("alice", "TO: bob\n\nfirst", name)  # delivered, still in the outbox
    box.send("alice", "TO: bob\n\nsecond", name)
    box.flush()
    box.flush()

    assert box.bodies("bob") == ["first"]
    assert "its id is taken" in box.nacks("alice")[0]
    (kept,) = box.path("archive").glob("*/alice/rejected/*.msg")
    assert kept.read_text() == "TO: bob\n\nsecond"
