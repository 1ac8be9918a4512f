"""A CommStore that writes itself: opened, flushed by its policy, locked, killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relay.base.errors import StoreClosed, StoreLocked
from relay.engine import ChannelType, CommStore, MessageType
from tests.procs import environment, until

pytestmark = pytest.mark.shows("engine 6.1", "engine 6.5", "engine 8.11")


@pytest.mark.shows("engine 6.9")
def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "s.acomm")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom relay.engine import CommStore\n"
            "store = CommStore.open(sys.argv[1])\nprint('held', flush=True)\nsys.stdin.read()",
            path,
        ],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StoreLocked, match=f"PID: {holder.pid}, STARTED: .*HOSTNAME: "):
        CommStore.open(path)
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    until(lambda: CommStore.open(path).close() is None)


@pytest.mark.shows("engine 8.8")
def test_a_temp_file_left_over_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    left = tmp_path / "s.acomm.tmp"
    left.write_bytes(b"half a store")
    CommStore.open(str(tmp_path / "s.acomm")).close()
    assert not left.exists()


def test_a_store_that_was_closed_takes_nothing_that_would_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    with CommStore.open(str(path)) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        store.send_message(channel.id, "a", MessageType.TEXT, "hello")
    before = path.read_bytes()
    for change in (
        lambda: store.send_message(channel.id, "a", MessageType.TEXT, "lost"),
        lambda: store.receive_messages(None, "b"),
        lambda: store.join_channel(channel.id, "c"),
    ):
        with pytest.raises(StoreClosed, match="the store is closed"):
            change()
    store.close()  # again, and nothing happens
    assert len(store.query_messages().messages) == 1
    assert path.read_bytes() == before
