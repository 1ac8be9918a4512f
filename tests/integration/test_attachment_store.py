"""Attachments: read before their message is taken, set aside when they are not what they say,
counted, and collected when nobody needs them."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sdk import Agent
from relay.base import fsio
from relay.base.clock import NS_PER_S
from relay.daemon import prune
from relay.delivery import validate
from relay.ledger import attachments
from tests.box import Box
from tests.kills import killed_in
from tests.procs import until

DAY_NS = 86_400 * NS_PER_S


def send(box: Box, *digests: str, agent: str = "alice") -> str:
    lines = "".join(f"ATTACHMENT: sha256:{digest}\n" for digest in digests)
    return box.send(agent, f"TO: bob\n{lines}\nsee there")


def refused(box: Box) -> str:
    """The reason in alice's one nack, the name of the file left out."""
    (nack,) = box.nacks("alice")
    return nack.partition(".msg: ")[2].rstrip("\n")


def test_what_is_as_its_name_says_is_taken_and_referenced(box: Box) -> None:
    path = box.attach(b"a file")
    sent = send(box, path.name)
    assert box.inbox("bob")[sent].attachments == (f"sha256:{path.name}",)
    assert box.sql("SELECT sha256, message_id FROM attachment_refs") == [(path.name, sent)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_content_is_refused_and_set_aside(box: Box) -> None:
    wanted = hashlib.sha256(b"a file").hexdigest()
    path = box.attach(b"another file", wanted)
    found = hashlib.sha256(b"another file").hexdigest()
    send(box, wanted)
    assert refused(box) == (
        f"ATTACHMENT sha256:{wanted}: the stored file has the SHA-256 {found}; "
        "it was set aside, store the right one and send again"
    )
    assert box.bodies("bob") == []
    assert not path.exists()
    assert path.with_name(f"{wanted}.bad").read_bytes() == b"another file"
    assert box.sql("SELECT kind, agent, path FROM security_events") == [
        ("attachment_mismatch", "alice", f"attachments/{wanted[:2]}/{wanted}")
    ]
    assert box.sql("SELECT * FROM attachment_refs") == []

    box.attach(b"still another", wanted)
    send(box, wanted, agent="carol")
    assert sorted(p.name for p in path.parent.iterdir()) == [f"{wanted}.bad", f"{wanted}.bad.1"]

    box.attach(b"a file")
    send(box, wanted)
    assert box.bodies("bob") == ["see there"]


UNSAFE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a link": (lambda p, other: p.symlink_to(other), "is not a regular file but a link"),
    "a FIFO": (lambda p, other: os.mkfifo(p), "is not a regular file"),
    "a hard link": (
        lambda p, other: p.hardlink_to(other),
        "has 2 hard links: it is a file elsewhere, too",
    ),
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_what_is_no_file_of_its_own_is_refused_and_set_aside(
    box: Box, kind: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a file")
    secret.chmod(0o644)
    path = box.attach(b"a file")
    path.unlink()
    make, said = UNSAFE[kind]
    make(path, secret)
    send(box, path.name)
    assert refused(box).startswith(f"ATTACHMENT sha256:{path.name}: {path.name} {said}")
    assert not os.path.lexists(path) and os.path.lexists(f"{path}.bad")
    assert box.sql("SELECT kind FROM security_events") == [("attachment_unsafe",)]
    assert secret.read_bytes() == b"a file" and secret.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("is_right", [True, False])
def test_a_large_one_is_read_beside_the_loop_and_its_message_waits(
    box: Box, is_right: bool
) -> None:
    content = os.urandom(1 << 20) * 8
    digest = hashlib.sha256(content).hexdigest()
    box.attach(content if is_right else content[1:], digest)
    send(box, digest)
    assert box.bodies("bob") == [] and box.nacks("alice") == []
    assert box.outbox("alice")
    sent = box.send("carol", "TO: bob\n\nmeanwhile")
    assert list(box.inbox("bob")) == [sent]

    def is_done() -> bool:
        box.after(0.05, turns=1)
        return bool(box.nacks("alice")) or len(box.inbox("bob")) == 2

    until(is_done)
    assert len(box.inbox("bob")) == (2 if is_right else 1)
    assert len(box.nacks("alice")) == (0 if is_right else 1)
    box.send("carol", f"TO: alice\nATTACHMENT: sha256:{digest}\n\nit is known")
    assert ("it is known" in box.bodies("alice")) == is_right


def test_many_small_ones_hold_nobody_up_either(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "BATCH_BYTES", 1000)  # of a batch, as 16 MiB
    digests = [box.attach(bytes([number]) * 400).name for number in range(5)]
    first = send(box, *digests[:2])
    assert list(box.inbox("bob")) == [first]
    second = box.drop(
        "alice", "TO: bob\n" + "".join(f"ATTACHMENT: sha256:{one}\n" for one in digests) + "\nhi"
    )
    last = box.drop("alice", "TO: bob\n\nthe last")
    third = box.send("carol", "TO: bob\n\nmeanwhile")
    assert [*box.inbox("bob")] == [first, third]  # the fifth of them is for the next batch
    box.tick()
    assert [*box.inbox("bob")] == [first, second, last, third]
    times = dict(box.sql("SELECT message_id, written_at FROM deliveries"))
    assert times[second] <= times[last]


def test_one_that_cannot_be_read_now_is_waited_for_and_nobody_else_is(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = box.attach(b"a file")
    open_regular = fsio.open_regular

    def broken(name: str, dir_fd: int | None, **options: bool) -> object:
        if name == path.name:
            raise OSError(errno.EIO, "the disk is broken", name)
        return open_regular(name, dir_fd, **options)

    with monkeypatch.context() as patched:
        patched.setattr(fsio, "open_regular", broken)
        sent = send(box, path.name)
        other = box.send("carol", "TO: bob\n\nmeanwhile")
        assert list(box.inbox("bob")) == [other]
        for _ in range(50):
            box.after(0.05)
        said = [line["event"] for line in box.log if line["action"] == "postpone"]
        assert len(said) == 2 and "cannot read an attachment" in said[0]  # after 1 s, then 2 s
    box.after(2)
    assert sorted(box.inbox("bob")) == sorted([sent, other])
    assert box.nacks("alice") == []


def test_one_that_changed_since_is_read_again(box: Box) -> None:
    path = box.attach(b"a file")
    send(box, path.name)
    path.write_bytes(b"changed")
    os.utime(path, ns=(1, 1))
    send(box, path.name)
    assert len(box.bodies("bob")) == 1
    assert "the stored file has the SHA-256" in refused(box)


def test_killed_before_it_is_set_aside_it_is_found_again(box: Box) -> None:
    wanted = hashlib.sha256(b"a file").hexdigest()
    path = box.attach(b"another file", wanted)
    with killed_in(validate, "set_aside"):
        send(box, wanted)
    assert path.exists()
    box.restart()
    box.tick()
    assert len(box.nacks("alice")) == 1
    send(box, wanted, agent="carol")
    assert not path.exists()


def test_references_are_made_again_with_a_ledger_that_is_gone(box: Box) -> None:
    path = box.attach(b"a file")
    sent = send(box, path.name)
    box.kill()
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        box.path(name).unlink(missing_ok=True)
    box.open()
    assert box.sql("SELECT sha256, message_id FROM attachment_refs") == [(path.name, sent)]


# -- collecting ------------------------------------------------------------------------------


def age(path: Path, days: int) -> None:
    at = time.time_ns() - days * DAY_NS
    os.utime(path, ns=(at, at))


def collect(box: Box, days: int, *, dry_run: bool = False) -> list[str]:
    """The paths of what is removed, or would be."""
    older_than_ns = time.time_ns() - days * DAY_NS
    found = [*prune.unneeded_attachments(box.home, box.ledger.agents, older_than_ns)]
    for _ in prune.remove_files(box.home, "attachments", iter(found), dry_run=dry_run):
        pass
    return ["/".join((*file.folder, file.name)) for file in found if file is not None]


def forget(box: Box) -> list[tuple[str]]:
    """Remove the references to what is gone; those left."""
    for _ in attachments.remove_references(box.home, box.ledger, time.time_ns() - DAY_NS):
        pass
    return box.sql("SELECT sha256 FROM attachment_refs")


def test_what_nobody_named_for_a_while_is_collected(box: Box) -> None:
    named, old, fresh = (box.attach(content) for content in (b"named", b"old", b"fresh"))
    send(box, named.name)
    for path in (named, old):
        age(path, 40)
    left = old.with_name(f"{'0' * 64}.bad")
    left.write_bytes(b"set aside")
    age(left, 40)
    gone = sorted(f"attachments/{path.parent.name}/{path.name}" for path in (old, left))

    assert collect(box, 30, dry_run=True) == gone
    assert old.exists()
    assert collect(box, 30) == gone
    assert not old.exists() and not left.exists() and named.exists() and fresh.exists()
    assert collect(box, 30) == []


def test_a_reference_keeps_it_until_it_is_old_too(box: Box) -> None:
    path = box.attach(b"a file")
    box.take("bob", send(box, path.name))
    box.tick()
    age(path, 40)
    assert collect(box, 30) == []
    with box.ledger.transaction():
        box.ledger._db.execute("UPDATE attachment_refs SET at = 0")
    assert forget(box) == [(path.name,)]
    assert collect(box, 30) == [f"attachments/{path.name[:2]}/{path.name}"]
    assert forget(box) == []


def test_who_attaches_it_again_keeps_it(box: Box) -> None:
    path = box.attach(b"a file")
    age(path, 40)
    with Agent("alice", box.root) as alice:
        reference = alice.attach(b"a file")
        assert collect(box, 30) == []
        alice.send("bob", "there", attachments=[reference])
    box.tick()
    assert box.bodies("bob") == ["there"]


def test_collecting_follows_no_link(box: Box, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ("a" * 64)).write_bytes(b"mine")
    age(elsewhere / ("a" * 64), 40)
    box.path("attachments", "aa").symlink_to(elsewhere)
    assert collect(box, 30) == []
    assert (elsewhere / ("a" * 64)).exists()
