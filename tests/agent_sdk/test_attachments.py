"""Attachments: content by its hash, whole or not there, written once."""

from __future__ import annotations

import errno
import hashlib
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_sdk import Agent, MessageError, RelayError
from agent_sdk.attachments import Attachments
from relay.base import fsio
from relay.base.errors import IntegrityError, NotFound
from relay.base.home import Home
from relay.base.message import MessageFile, parse
from relay.base.names import Attachment
from tests.agent_sdk.support import HandRelay, fail_at, pauses, says_the_disk_is_full

DATA = bytes(range(256)) * 9000  # 2.2 MiB: more than one piece
DIGEST = hashlib.sha256(DATA).hexdigest()


def stored(relay: HandRelay) -> list[str]:
    """Every file in the store, hidden ones too."""
    store = relay.root / "attachments"
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())


def test_bytes_and_files_get_the_same_name(relay: HandRelay, alice: Agent, tmp_path: Path) -> None:
    source = tmp_path / "a file.bin"
    source.write_bytes(DATA)
    assert alice.attach(DATA) == f"sha256:{DIGEST}"
    path = relay.root / "attachments" / DIGEST[:2] / DIGEST
    os.utime(path, (1, 1))
    first = path.stat()
    assert alice.attach(source) == alice.attach(str(source)) == f"sha256:{DIGEST}"
    assert stored(relay) == [f"{DIGEST[:2]}/{DIGEST}"]
    again = path.stat()
    assert again.st_ino == first.st_ino
    assert again.st_mtime_ns > first.st_mtime_ns  # wanted again: not to be collected
    assert first.st_mode & 0o777 == 0o600
    assert alice.open_attachment(f"sha256:{DIGEST}") == DATA


def test_nothing_is_an_attachment_too(alice: Agent) -> None:
    assert alice.open_attachment(alice.attach(b"")) == b""


def test_a_file_of_the_kernel_is_attached(relay: HandRelay, alice: Agent) -> None:
    """It has no end to seek, or one that is not its size."""
    for path in ("/proc/version", "/sys/kernel/mm/transparent_hugepage/enabled"):
        if os.path.exists(path):
            reference = alice.attach(path)
            assert alice.open_attachment(reference) == Path(path).read_bytes()


def test_a_damaged_attachment_is_an_error(relay: HandRelay, alice: Agent) -> None:
    reference = alice.attach(DATA)
    path = relay.root / "attachments" / DIGEST[:2] / DIGEST
    path.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(IntegrityError, match=f"expected SHA-256 {DIGEST}") as damaged:
        alice.open_attachment(reference)
    assert "ask the sender" in damaged.value.hint  # no relay can make it again
    path.write_bytes(DATA[:-1])
    assert alice.attach(DATA) == reference  # another size shows that it must be written again
    assert alice.open_attachment(reference) == DATA


@pytest.mark.parametrize("reference", ["", "sha256:12", DIGEST, "sha256:../" + "0" * 61])
def test_a_reference_that_is_none(alice: Agent, reference: str) -> None:
    with pytest.raises(MessageError, match="64 hex digits"):
        alice.open_attachment(reference)


def test_an_attachment_that_is_not_there(alice: Agent) -> None:
    with pytest.raises(NotFound):
        alice.open_attachment(f"sha256:{DIGEST}")
    alice.attach(DATA)
    with pytest.raises(NotFound):
        alice.open_attachment(f"sha256:{DIGEST[:-4]}0000")


@pytest.mark.parametrize("fails", ["create", "write", "rename"])
def test_a_full_disk_is_waited_for_and_leaves_nothing(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    slept = pauses(monkeypatch)
    fail_at(monkeypatch, fails, 1, errno.ENOSPC, errno.ENOSPC, errno.EIO)
    with pytest.raises(OSError, match="Input/output"), says_the_disk_is_full():
        alice.attach(DATA)
    assert slept == [0.1, 0.2]
    assert stored(relay) == []
    alice.attach(DATA)
    assert stored(relay) == [f"{DIGEST[:2]}/{DIGEST}"]


def test_a_file_that_changes_meanwhile_is_not_stored_under_a_wrong_name(
    relay: HandRelay, alice: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "growing.log"
    source.write_bytes(b"one")

    def fault(operation: str, name: str) -> None:
        if operation == "create":
            source.write_bytes(b"two")

    monkeypatch.setattr(fsio, "fault", fault)
    with pytest.raises(RelayError, match="changed while it was being attached"):
        alice.attach(source)
    assert stored(relay) == []


def test_of_a_file_that_grows_what_was_there_is_sent(
    relay: HandRelay, alice: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that its program is still writing: each look finds more of it."""
    source = tmp_path / "growing.log"
    source.write_bytes(b"one, ")

    def fault(operation: str, name: str) -> None:
        with source.open("ab") as log:
            log.write(b"two, ")

    monkeypatch.setattr(fsio, "fault", fault)
    assert alice.open_attachment(alice.attach(source)) == b"one, "
    assert source.stat().st_size > 5


def test_one_that_is_too_large_is_refused_before_it_is_read(
    relay: HandRelay, alice: Agent, tmp_path: Path
) -> None:
    """A copy would fill the disk of the home, for a message that the relay refuses."""
    (relay.root / "config.json").write_text('{"limits": {"max_attachment_mib": 2}}')
    large = tmp_path / "core.img"
    with large.open("wb") as file:
        file.truncate(4 << 40)  # sparse; to read it takes an hour
    said = r"is 4194304 MiB, at most 2 \(limits.max_attachment_mib\): send its path"
    with pytest.raises(RelayError, match=said):
        alice.attach(large)
    with pytest.raises(RelayError, match=r"is 3 MiB, at most 2 \("):
        alice.attach(bytes((2 << 20) + 1))
    assert stored(relay) == []
    assert alice.attach(bytes(2 << 20))


def test_what_a_disk_has_no_room_for_does_not_fill_it(
    relay: HandRelay, alice: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay writes to the same disk, and would wait meanwhile."""
    slept, made = pauses(monkeypatch), []
    free = [len(DATA) - 1, len(DATA) - 1, len(DATA)]

    def room(_: int) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=9, f_frsize=1, f_bavail=free.pop(0))

    monkeypatch.setattr(os, "fstatvfs", room)
    monkeypatch.setattr(fsio, "fault", lambda operation, name: made.append(operation))
    with says_the_disk_is_full():
        alice.attach(DATA)
    assert slept == [0.1, 0.2]
    assert made.count("create") == 1


def test_a_full_disk_is_named(
    relay: HandRelay, alice: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.txt").write_text("a plan")
    pauses(monkeypatch)
    fail_at(monkeypatch, "write", 1, *[errno.ENOSPC] * 20)
    with pytest.raises(OSError, match="No space") as full, says_the_disk_is_full():
        alice.attach(tmp_path / "plan.txt")
    assert full.value.filename == str(relay.root / "attachments")


def test_what_is_not_a_regular_file_is_refused_before_it_is_read(
    relay: HandRelay, alice: Agent, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for source in ("/dev/zero", "/dev/null", tmp_path / "pipe"):
        with pytest.raises(RelayError, match="is not a regular file"):
            alice.attach(source)
    with pytest.raises(IsADirectoryError):
        alice.attach(tmp_path / "folder")
    with pytest.raises(FileNotFoundError, match="directory: ''"):
        alice.attach("")
    assert stored(relay) == []


def sent_file(relay: HandRelay, sent: str) -> MessageFile:
    return parse((relay.box("alice", "outbox") / f"{sent}.msg").read_bytes())


def test_a_file_keeps_its_name_and_bytes_have_none(
    relay: HandRelay, alice: Agent, tmp_path: Path
) -> None:
    (tmp_path / "plan.txt").write_bytes(DATA)
    plan, data = alice.attach(tmp_path / "plan.txt"), alice.attach(DATA)
    assert plan == data == f"sha256:{DIGEST}"
    assert (plan.name, data.name) == ("plan.txt", "")
    sent = alice.send("bob", "see there", attachments=[plan, data], wait=0)
    assert sent_file(relay, sent).headers["ATTACHMENT-NAMES"] == "plan.txt/"
    sent = alice.send("bob", "see there", attachments=[data, str(plan)], wait=0)
    assert "ATTACHMENT-NAMES" not in sent_file(relay, sent).headers
    with pytest.raises(MessageError, match="its own argument"):
        alice.send("bob", "x", attachments=[plan], headers={"Attachment-Names": "other"})


def test_more_attachments_than_a_header_holds(alice: Agent) -> None:
    names = [Attachment(alice.attach(b"x"), f"{number}.txt") for number in range(80)]
    for number in (80, 46):
        said = f"{number} attachments are more than its header holds: send several messages"
        with pytest.raises(MessageError, match=said):
            alice.send("bob", "see there", attachments=names[:number], wait=0)
    assert alice.send("bob", "see there", attachments=names[:40], wait=0)


def test_saving_is_all_or_nothing(alice: Agent, relay: HandRelay, tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("a plan")
    plan, data = alice.attach(tmp_path / "plan.txt"), alice.attach(DATA)
    folder = tmp_path / "got"
    with pytest.raises(RelayError, match="is not a directory: create it first"):
        alice.save_attachments([plan, data], folder)
    folder.mkdir()
    (folder / DIGEST[:8]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RelayError, match=f"{DIGEST[:8]} exists already: nothing was written"):
        alice.save_attachments([plan, data], folder)
    assert os.listdir(folder) == [DIGEST[:8]] and not (tmp_path / "elsewhere").exists()
    (folder / DIGEST[:8]).unlink()
    (relay.root / data.path).write_bytes(b"spoiled")
    with pytest.raises(IntegrityError):
        alice.save_attachments([plan, data], folder)
    assert os.listdir(folder) == []
    assert alice.save_attachments([plan], folder) == [str(folder / "plan.txt")]
    assert (folder / "plan.txt").read_text() == "a plan"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_is_given_to_what_is_complete(
    alice: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """A kill leaves a part of a file under no name that somebody looks for."""
    (tmp_path / "plan.txt").write_text("a plan")
    given = [alice.attach(tmp_path / "plan.txt"), alice.attach(DATA)]
    folder = tmp_path / "got"
    folder.mkdir()
    found, link = [], os.link

    def note(source: str, target: str) -> None:
        found.append(sorted((file.suffix, file.stat().st_size) for file in folder.iterdir()))
        if not has_links:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        link(source, target)

    monkeypatch.setattr(os, "link", note)
    alice.save_attachments(given, folder)
    assert found[0] == [(".tmp", 6), (".tmp", len(DATA))]
    assert sorted(os.listdir(folder)) == [DIGEST[:8], "plan.txt"]
    assert (folder / DIGEST[:8]).read_bytes() == DATA
    with pytest.raises(RelayError, match="exists already: nothing was written"):
        alice.save_attachments(given[::-1], folder)
    assert len(os.listdir(folder)) == 2


def test_a_large_one_needs_no_memory_of_its_size(alice: Agent, tmp_path: Path) -> None:
    large = tmp_path / "core.img"
    with large.open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        reference = alice.attach(large)
        alice.save_attachments([reference], Path(alice.home))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_one_that_is_cut_short_while_it_is_read(
    relay: HandRelay, alice: Agent, tmp_path: Path
) -> None:
    reference = alice.attach(DATA)
    with Home(str(relay.root)) as home:
        pieces = Attachments(home, 0).pieces(reference)
        found = len(next(pieces))
        os.truncate(relay.root / reference.path, found + 1)
        with pytest.raises(IntegrityError):
            found += len(b"".join(pieces))
