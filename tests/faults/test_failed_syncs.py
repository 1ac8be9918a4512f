"""A disk that dies: a sync of the journal fails, and so does the word about it beside the segment.

The kernel holds pages for clean then that the disk has not. Whoever starts next writes what no
checkpoint covers once more before it syncs it, trusts it, and delivers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.test_failed_looks import NAMES, drop, inbox, statuses
from tests.faults.tracing import Tracing
from tests.procs import Relay, until

WRITTEN = re.compile(r"pwrite64\(.*, (\d+), (\d+)\) += (\d+)$")


def region(line: str) -> tuple[int, int]:
    """From where to where a call wrote; nothing for another call."""
    found = WRITTEN.search(line)
    return (int(found[2]), int(found[2]) + int(found[3])) if found else (0, 0)


@pytest.mark.shows("journal 1.16")
def test_what_a_failed_sync_left_is_written_again_before_it_is_trusted(
    relay: Relay, tmp_path: Path
) -> None:
    relay.start()
    assert relay.process is not None
    (segment,) = relay.home.glob("journal/*/segments/*.seg")
    marker = f"{segment}.unsynced.tmp"
    dying = Tracing(tmp_path, [segment, marker], "fdatasync:error=EIO", "fsync:error=EIO")
    with dying.attached(relay.pid):
        drop(relay.home, "bob", NAMES[0])
        until(lambda: dying.text().count("(INJECTED)") >= 2, "both syncs")
        relay.kill()
    assert not list(segment.parent.glob("*.unsynced")) and inbox(relay.home, "alice") == []
    before, _, _ = dying.text().partition("(INJECTED)")
    unsynced = next(region(line) for line in reversed(before.splitlines()) if region(line)[1])

    looking = Tracing(tmp_path, [segment])
    relay.start(*looking.command)
    until(lambda: inbox(relay.home, "alice") == NAMES[:1], "the message")
    relay.stop()
    first_sync = next(n for n, line in enumerate(looking.lines()) if "fdatasync(" in line)
    written = [region(line) for line in looking.lines()[:first_sync] if region(line)[1]]
    assert any(begin <= unsynced[0] and unsynced[1] <= end for begin, end in written)
    assert statuses(relay.home) == ["archived"]


def test_what_a_checkpoint_covers_is_not_written_again(relay: Relay, tmp_path: Path) -> None:
    relay.start()
    drop(relay.home, "bob", *NAMES, text="x" * 20_000)
    until(lambda: inbox(relay.home, "alice") == NAMES, "the messages")
    relay.stop()
    (segment,) = relay.home.glob("journal/*/segments/*.seg")

    looking = Tracing(tmp_path, [segment])
    relay.start(*looking.command)
    relay.stop()
    first_sync = next(n for n, line in enumerate(looking.lines()) if "fdatasync(" in line)
    written = [region(line) for line in looking.lines()[:first_sync]]
    assert sum(end - begin for begin, end in written) < 1_000  # the note of the checkpoint itself
