"""A CommStore that writes itself: locked, killed, closed; and where nothing can be locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.base.clock import Clock
from relay.base.errors import StoreClosed, StoreLocked
from relay.commstore import ChannelType, CommStore, FlushPolicy, MessageType
from tests.procs import PATIENCE_S, environment, until

pytestmark = pytest.mark.shows("engine 6.1", "engine 6.5", "engine 8.11")


@pytest.mark.shows("engine 6.9")
def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "s.acomm")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom relay.commstore import CommStore\n"
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


def test_a_fork_writes_nothing_into_the_file_that_it_has_locked_too(tmp_path: Path) -> None:
    """What either of them wrote was lost by the flush of the other."""
    path = tmp_path / "s.acomm"
    with CommStore.open(path) as store:
        channel = store.create_channel("both", ChannelType.GROUP, "parent")
        if (pid := os.fork()) == 0:
            with contextlib.suppress(StoreClosed):
                store.join_channel(channel.id, "child")
            store.close()
            os._exit(len(store.get_channel(channel.id).participants))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert store_file.read(str(path)).channels == ()
        store.join_channel(channel.id, "afterwards")
    with CommStore.open(path) as store:
        assert store.is_participant(channel.id, "afterwards")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path: Path) -> None:
    is_in, may_go = threading.Event(), threading.Event()

    class Slow(Clock):
        def now_ns(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                is_in.set()
                may_go.wait()
            return super().now_ns()

    with CommStore.open(tmp_path / "s.acomm", clock=Slow()) as store:
        channel = store.create_channel("both", ChannelType.GROUP, "parent")
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(store.join_channel, channel.id, "thread")
            assert is_in.wait(10)
            if (pid := os.fork()) == 0:
                signal.alarm(PATIENCE_S)  # should it wait
                os._exit(len(store.get_channel(channel.id).participants))
            _, status = os.waitpid(pid, 0)
            may_go.set()
            assert len(joining.result().participants) == 2
    assert os.waitstatus_to_exitcode(status) == 1


def test_threads_that_share_a_store_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Each decides on what the others have done: numbers are given once, and all is in the file."""
    path, switch_s = str(tmp_path / "s.acomm"), sys.getswitchinterval()
    names = [f"agent-{number}" for number in range(4)]
    with CommStore.open(path, FlushPolicy(50, 1)) as store:
        channel = store.create_channel("all", ChannelType.GROUP, "reader")

        def work(name: str) -> list[int]:
            store.join_channel(channel.id, name)
            texts = [f"{name} {number}" for number in range(100)]
            return [
                store.send_message(
                    channel.id, name, MessageType.TEXT, text, recipients=["reader"]
                ).id
                for text in texts
            ]

        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(len(names)) as threads:
                agents = [threads.submit(work, name) for name in names]
                received: list[bytes] = []
                while not all(agent.done() for agent in agents):
                    received += [
                        one.content for one in store.receive_messages(channel.id, "reader")
                    ]
        finally:
            sys.setswitchinterval(switch_s)
        numbers = [number for agent in agents for number in agent.result()]
        received += [one.content for one in store.receive_messages(channel.id, "reader")]
    sent = sorted(f"{name} {number}".encode() for name in names for number in range(100))
    assert sorted(numbers) == list(range(1, 401))
    assert sorted(received) == sent
    with CommStore.open(path) as store:
        assert sorted(one.content for one in store.search("agent", 1000)) == sent
        assert {one.id for one in store.get_channel(channel.id).participants} == {
            "reader",
            *names,
        }


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


@pytest.mark.shows("engine 6.10")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_flock_a_store_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreLocked, match="its file system does not support flock") as refused:
        CommStore.open(str(tmp_path / "s.acomm"))
    assert "local disk" in refused.value.hint


def test_any_other_failure_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="input/output error"):
        CommStore.open(str(tmp_path / "s.acomm"))


def test_the_text_of_a_lock_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    with CommStore.open(str(path)):
        (tmp_path / "s.acomm.lock").write_bytes(b"\xff" * 10_000)
        with pytest.raises(StoreLocked) as refused:
            CommStore.open(str(path))
    assert len(str(refused.value)) < 4096 + 200
