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


# -- many names of one file cost their number, and equal refusals are counted --------------


def link(box: Box, original: Path, count: int) -> list[str]:
    """So many names of one file, put into the outbox of alice."""
    names = [box.name() for _ in range(count)]
    for name in names:
        os.link(original, box.path("agents", "alice", "outbox", name))
    return names


def events(box: Box) -> list[tuple[str, str, str, str]]:
    return box.sql("SELECT kind, agent, path, detail FROM security_events ORDER BY id")


def settle(box: Box) -> None:
    for _ in range(60):
        box.after(1, turns=1)


def test_equal_refusals_of_an_agent_are_one_row_and_a_count(box: Box, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("TO: bob\n\nhi")
    names = link(box, original, 120)
    settle(box)
    assert box.outbox("alice") == []
    assert box.dispatcher.metrics.refused == 120 and len(box.nacks("alice")) == 120
    assert box.sql("SELECT count(*) FROM messages WHERE status = 'failed'") == [(120,)]
    kept = sorted(path.name for path in box.path("archive").glob("*/alice/rejected/*"))
    assert kept == names and original.stat().st_nlink == 121
    (one,) = [one for one in events(box) if one[2].endswith(".msg")]
    assert one[:3] == ("hard_link", "alice", f"agents/alice/outbox/{names[0]}")
    box.after(61, turns=1)
    assert [one[:3] for one in events(box)][1:] == [("hard_link", "alice", "agents/alice/outbox")]
    assert events(box)[1][3].startswith("119 more of the same within 60 s")
    link(box, original, 3)
    box.after(31)
    assert len(events(box)) == 3
    box.dispatcher.drain()  # a clean end writes the count down
    assert events(box)[-1][3].startswith("2 more of the same")


def test_other_agents_and_kinds_are_told_apart(box: Box, tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("TO: bob\n\nhi")
    link(box, original, 2)
    box.path("agents", "bob", "outbox", box.name()).hardlink_to(original)
    box.path("agents", "alice", "outbox", box.name()).symlink_to(original)
    box.after(31)
    assert sorted((kind, agent) for kind, agent, _, _ in events(box)) == [
        ("hard_link", "alice"),
        ("hard_link", "bob"),
        ("not_a_regular_file", "alice"),
    ]


def test_a_link_made_to_a_file_in_hand_does_not_have_it_read_again(
    box: Box, tmp_path: Path
) -> None:
    """Accepted, and linked before it is archived: it is the same file."""
    writer = box.dispatcher._ledger_writer
    finish = writer.record

    def linked(*arguments: object) -> object:
        for path in box.path("agents", "alice", "outbox").glob("*.msg"):
            if not (tmp_path / path.name).exists():
                os.link(path, tmp_path / path.name)
        return finish(*arguments)  # type: ignore[arg-type]

    writer.record = linked  # type: ignore[assignment, method-assign]
    sent = box.send("alice", "TO: bob\n\nhi")
    box.tick(2)
    assert list(box.inbox("bob")) == [sent] and box.nacks("alice") == []
    assert box.row(sent)["status"] == "archived"
