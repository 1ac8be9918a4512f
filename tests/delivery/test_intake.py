"""Which files are complete: renamed at once, written in place when they are still."""

from __future__ import annotations

import os

import pytest

from relay.base.clock import NS_PER_S
from relay.base.names import sha256_hex
from relay.delivery import intake
from relay.delivery.values import OutboxFile
from tests.delivery.support import GOOD, NAME, START_NS, Desk, bodies, reason

# -- renamed -------------------------------------------------------------------------------


def test_a_renamed_file_is_complete_when_seen(desk: Desk) -> None:
    path = desk.renamed(GOOD)
    assert desk.due_in_s() == 0
    (look,) = desk.take()
    assert look.message is not None
    status = path.stat()
    assert look.file == OutboxFile(
        "alice",
        NAME,
        "1769851800000000000-a1b2c3d4",
        len(GOOD),
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
        ("outbox",),
    )
    assert look.file.path == f"agents/alice/outbox/{NAME}"
    assert look.file.key == ("alice", NAME)
    assert (look.message.to, look.message.body) == ("bob", b"hi")
    assert look.checksum == sha256_hex(b"hi")
    assert (desk.take(), desk.due_in_s(), desk.intake.backlog) == ([], None, 0)


def test_a_renamed_file_that_does_not_parse_is_malformed_at_once(desk: Desk) -> None:
    desk.rename(b"nonsense")
    for _ in range(3):  # told of often, it is one file
        desk.hint(renamed=True)
    assert "not a header line" in reason(desk.take())


def test_a_renamed_file_that_grows_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = desk.renamed(GOOD)
    read = os.read

    def grow(fd: int, size: int) -> bytes:
        data = read(fd, size)
        with open(path, "ab") as writer:
            writer.write(b" and more")
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", grow)
        assert desk.take() == []
    assert desk.due_in_s() == 0.1
    desk.clock.advance(0.1)
    (body,) = bodies(desk.take())
    assert body.startswith(b"hi and more")


def test_a_checksum_that_was_declared_is_kept_and_of_an_empty_body_its_contents(desk: Desk) -> None:
    for text, body, kept in (("TO: bob", b"hi", b"hi"), ("TO: bob\nKIND: leave", b"", b"leave")):
        declared = sha256_hex(body)
        desk.renamed(f"{text}\nCHECKSUM: sha256:{declared}\n\n".encode() + body)
        (look,) = desk.take()
        assert not look.refusal and look.checksum == sha256_hex(kept)


# -- written in place ----------------------------------------------------------------------


def test_a_file_written_in_place_settles_for_100_ms(desk: Desk) -> None:
    desk.written(GOOD)
    assert desk.take() == []
    assert (desk.intake.backlog, desk.due_in_s()) == (1, 0.1)
    desk.clock.advance(0.099)
    assert desk.take() == []
    desk.clock.advance(0.001)
    assert bodies(desk.take()) == [b"hi"]
    assert desk.intake.backlog == 0


def test_where_times_are_whole_seconds_a_file_settles_from_when_it_was_seen(desk: Desk) -> None:
    desk.written(GOOD)
    desk.clock.advance(0.9)  # its age, as far as the file system tells
    desk.scan()
    assert desk.take() == []
    desk.clock.advance(0.1)
    assert bodies(desk.take()) == [b"hi"]


def test_every_change_begins_the_wait_again(desk: Desk) -> None:
    path = desk.written(b"TO: bob\n\nh")
    for piece in (b"i", b" there", b"!"):
        assert desk.take() == []
        desk.clock.advance(0.09)
        with open(path, "ab") as writer:
            writer.write(piece)
        desk.touch(path)
        desk.hint(renamed=False)
    assert desk.take() == []
    desk.clock.advance(0.1)
    assert bodies(desk.take()) == [b"hi there!"]


def test_what_was_still_for_long_is_taken_at_once(desk: Desk) -> None:
    desk.written(GOOD, mtime_s=-0.1)
    assert bodies(desk.take()) == [b"hi"]


def test_a_rename_outranks_what_was_seen_before(desk: Desk) -> None:
    desk.written(b"TO: b")
    assert desk.take() == []
    desk.renamed(GOOD)
    desk.hint(renamed=False)  # its close, told later
    assert desk.due_in_s() == 0
    assert bodies(desk.take()) == [b"hi"]
    assert desk.intake.backlog == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"TO: bob", "body is empty"),
        (b"nonsense", "not a header line"),
        (b"", "the file is empty"),
        (b"\xff", "not UTF-8"),
        pytest.param(bytes(2_000_000), "too large", id="too large"),
    ],
)
@pytest.mark.parametrize("becomes_whole", [True, False])
def test_what_does_not_parse_has_5_s_to_become_whole(
    desk: Desk, data: bytes, says: str, becomes_whole: bool
) -> None:
    path = desk.written(data)
    for _ in range(49):
        assert desk.take() == []
        assert desk.due_in_s() == pytest.approx(0.1)
        desk.clock.advance(0.1)
    if becomes_whole:
        path.write_bytes(GOOD)
        desk.touch(path)
        desk.hint(renamed=False)
    assert desk.take() == []
    desk.clock.advance(0.1)
    looks = desk.take()
    if becomes_whole:
        assert bodies(looks) == [b"hi"]
    else:
        assert says in reason(looks) and reason(looks).startswith(NAME)


def test_while_a_file_of_that_name_is_in_pending_it_is_not_taken(desk: Desk) -> None:
    marker = desk.outbox / ".pending" / NAME
    marker.write_bytes(b"")
    desk.written(GOOD, mtime_s=-3600)
    for _ in range(100):
        assert desk.take() == []
        desk.clock.advance(0.1)
    marker.unlink()
    assert bodies(desk.take()) == [b"hi"]


def test_a_marker_does_not_hold_what_was_renamed(desk: Desk) -> None:
    desk.rename(GOOD)
    (desk.outbox / ".pending" / NAME).write_bytes(b"")
    desk.hint(renamed=True)
    assert bodies(desk.take()) == [b"hi"]


# -- clocks that jump ----------------------------------------------------------------------


def test_a_clock_that_jumps_back_holds_nothing_up(desk: Desk) -> None:
    desk.write(GOOD)
    desk.clock.jump(-3600)
    desk.hint(renamed=False)
    assert desk.take() == []
    desk.clock.advance(0.1)
    assert bodies(desk.take()) == [b"hi"]


def test_nor_is_a_bad_file_kept_for_an_hour(desk: Desk) -> None:
    desk.written(b"nonsense", mtime_s=3600)
    assert desk.take() == []
    desk.clock.jump(-7200)
    desk.clock.advance(4.9)
    assert desk.take() == []
    desk.clock.advance(0.1)
    assert "not a header line" in reason(desk.take())


def test_a_file_that_changes_with_a_clock_gone_back_waits_from_then(desk: Desk) -> None:
    path = desk.written(b"TO: bob\n\nh", mtime_s=60)
    desk.take()
    desk.clock.advance(0.09)
    path.write_bytes(GOOD)
    desk.touch(path, 60)
    desk.hint(renamed=False)
    assert desk.take() == []
    desk.clock.advance(0.09)
    desk.hint(renamed=False)
    assert desk.take() == []
    desk.clock.advance(0.01)
    desk.hint(renamed=False)
    assert bodies(desk.take()) == [b"hi"]


# -- order, batches, retries ---------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"{START_NS - number}-{number:08x}.msg" for number in range(count)]


def test_of_one_sender_order_is_order_of_names_whatever_the_hints_say(desk: Desk) -> None:
    for number, name in enumerate(names(5)):
        desk.renamed(b"TO: bob\n\n%d" % number, name)
    assert bodies(desk.take(3)) == [b"4", b"3", b"2"]
    assert (desk.intake.backlog, desk.due_in_s()) == (2, 0)
    assert bodies(desk.take(3)) == [b"1", b"0"]


def test_a_file_that_is_still_but_does_not_parse_does_not_hold_up_the_next(desk: Desk) -> None:
    desk.written(b"TO: bo", mtime_s=-0.2)
    other = f"{START_NS + 1}-.msg"
    desk.renamed(b"TO: bob\n\nother", other)
    assert bodies(desk.take()) == [b"other"]
    assert desk.intake.backlog == 1


def test_the_bytes_of_a_batch_are_shared_by_the_agents(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "BATCH_BYTES", 200)  # a hundred for each of two
    desk.home.make_agent("carol")
    for name in names(3):
        desk.renamed(b"TO: bob\n\n" + name[-5:-4].encode() * 60, name)
    path = desk.outbox.parent.parent / "carol" / "outbox" / NAME
    path.write_bytes(b"TO: bob\n\nfrom carol")
    desk.intake.add("carol", NAME, renamed=True)
    assert bodies(desk.take()) == [b"2" * 60, b"1" * 60, b"from carol"]
    assert (desk.intake.backlog, desk.due_in_s()) == (1, 0)
    assert bodies(desk.take()) == [b"0" * 60]


def test_a_file_that_is_gone_is_forgotten(desk: Desk) -> None:
    desk.hint(renamed=True)
    desk.intake.add("nobody", NAME, renamed=True)
    assert desk.take() == []
    assert (desk.intake.backlog, desk.due_in_s()) == (0, None)


def test_a_passing_error_is_tried_again_when_it_is_due(desk: Desk) -> None:
    path = desk.rename(GOOD)
    desk.intake.retry("alice", NAME, desk.clock.monotonic_ns() + 4 * NS_PER_S)
    assert (desk.take(), desk.due_in_s(), desk.intake.backlog) == ([], 4, 1)
    desk.clock.advance(3.999)
    assert desk.take() == []
    desk.clock.advance(0.001)
    desk.touch(path)  # it was renamed into place: it does not settle again
    assert bodies(desk.take()) == [b"hi"]


def test_the_next_thing_due_is_the_earliest(desk: Desk) -> None:
    now = desk.clock.monotonic_ns()
    for number, name in enumerate(names(3)):
        desk.intake.retry("alice", name, now + (3 - number) * NS_PER_S)
    assert desk.due_in_s() == 1
