"""The file before: kept by every flush, taken when the file itself is damaged or gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from relay.acomm import store_file
from relay.base.errors import FormatError, RelayError, VersionError
from relay.commstore import ChannelType, CommStore, FlushPolicy, Limits, MessageType
from tests.disk import flip, killed_before

MANUAL = FlushPolicy(None, None)
BROKEN = b"ACOMM001" + b"\0" * 300


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"s.acomm.lock"}


def contents(path: Path) -> list[bytes]:
    return [m.content for m in store_file.read(str(path)).messages]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with "one" in the file before, and "two" in the file, too."""
    path = tmp_path / "s.acomm"
    with CommStore.open(str(path), MANUAL) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        store.send_message(channel.id, "a", MessageType.TEXT, "one")
        store.flush()
        store.send_message(channel.id, "a", MessageType.TEXT, "two")
    return path


def previous(path: Path) -> Path:
    return path.with_name("s.acomm.prev")


def test_each_flush_keeps_the_file_before(path: Path) -> None:
    assert (contents(previous(path)), contents(path)) == ([b"one"], [b"one", b"two"])
    with CommStore.open(str(path), FlushPolicy(1)) as store:
        store.send_message(1, "a", MessageType.TEXT, "three")
        assert contents(path)[-1] == b"three"
    assert contents(previous(path))[-1] == b"three"  # close has written its delivery
    assert names(path.parent) == {"s.acomm", "s.acomm.prev"}


@pytest.mark.shows("engine 6.4")
def test_a_damaged_file_is_set_aside_and_the_one_before_taken_loudly(path: Path) -> None:
    flip(path, path.stat().st_size // 2)
    data = path.read_bytes()
    said: list[str] = []
    with CommStore.open(str(path), MANUAL, warn=said.append) as store:
        assert [m.content for m in store.receive_messages(None, "b")] == [b"one"]
    assert len(said) == 1 and "SHA-256" in said[0]
    assert "s.acomm.prev" in said[0] and str(path.with_name("s.bad")) in said[0]
    assert path.with_name("s.bad").read_bytes() == data
    with CommStore.open(str(path), MANUAL, warn=said.append) as store:
        assert [m.content for m in store.query_messages().messages] == [b"one"]
    assert len(said) == 1


def test_what_was_set_aside_is_never_written_over(path: Path) -> None:
    for number in range(3):
        path.write_bytes(BROKEN + bytes([number]))
        CommStore.open(str(path), MANUAL, warn=lambda _: None).close()
    aside = [path.with_name(name) for name in ("s.bad", "s.bad.1", "s.bad.2")]
    assert [one.read_bytes()[-1] for one in aside] == [0, 1, 2]
    assert contents(path) == [b"one"]


def test_a_store_that_breaks_an_invariant_counts_as_damaged(path: Path) -> None:
    file = store_file.read(str(path))
    store_file.write(str(path), type(file)(0, 0, file.channels * 2))
    said: list[str] = []
    CommStore.open(str(path), MANUAL, warn=said.append).close()
    assert contents(path) == [b"one"] and "channel 1 once" in said[0]


@pytest.mark.shows("engine 6.4")
def test_when_both_are_damaged_nothing_is_touched(path: Path) -> None:
    path.write_bytes(BROKEN)
    previous(path).write_bytes(BROKEN[:-1])
    for _ in range(2):
        with pytest.raises(FormatError, match=r"s\.acomm at") as caught:
            CommStore.open(str(path), MANUAL)
        assert "s.acomm.prev is also damaged" in caught.value.hint
    assert (path.read_bytes(), previous(path).read_bytes()) == (BROKEN, BROKEN[:-1])
    assert names(path.parent) == {"s.acomm", "s.acomm.prev"}


def test_a_file_of_another_format_is_refused_and_left(path: Path) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures" / "acomm" / "bad"
    data = (fixtures / "agentic-comm-v3.acomm").read_bytes()
    path.write_bytes(data)
    with pytest.raises(FormatError, match="another format"):
        CommStore.open(str(path), MANUAL)
    assert path.read_bytes() == data
    assert names(path.parent) == {"s.acomm", "s.acomm.prev"}


def test_a_file_that_is_gone_is_the_one_before(path: Path) -> None:
    path.unlink()
    said: list[str] = []
    with CommStore.open(str(path), MANUAL, warn=said.append) as store:
        assert [m.content for m in store.query_messages().messages] == [b"one"]
    assert "is missing" in said[0]
    assert contents(path) == [b"one"]
    path.unlink()
    with pytest.raises(RelayError, match="exists already"):
        CommStore.create(str(path))


@pytest.mark.shows("engine 6.5")
@pytest.mark.parametrize("operation", ["create", "write", "keep", "rename"])
def test_a_crash_at_any_step_leaves_a_whole_file(path: Path, operation: str) -> None:
    store = CommStore.open(str(path), MANUAL)
    store.send_message(1, "a", MessageType.TEXT, "three")
    with killed_before(1, operation) as calls:
        store.flush()
    assert calls
    assert contents(path)[:2] == [b"one", b"two"]
    store._writer._flusher = None
    store.close()
    with CommStore.open(str(path), MANUAL) as again:
        assert len(again) == 2
    assert "s.acomm.tmp" not in names(path.parent)


@pytest.mark.shows("engine 6.5")
@pytest.mark.parametrize("call", ["link", "rename"])
def test_at_each_instant_one_of_the_two_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """With hard links, and where the file system has none."""
    seen: list[list[bytes]] = []
    rename = os.rename

    def looking(source: str, target: str, **fds: int) -> None:
        rename(source, target, **fds)
        seen.append(contents(path) if path.exists() else contents(previous(path)))

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "rename", looking)
    if call == "rename":
        monkeypatch.setattr(os, "link", no_links)
    with CommStore.open(str(path), MANUAL) as store:
        store.send_message(1, "a", MessageType.TEXT, "three")
    assert seen == [[b"one", b"two"], [b"one", b"two", b"three"]]
    assert contents(previous(path)) == [b"one", b"two"]


@pytest.mark.shows("engine 8.8")
def test_a_left_over_of_keeping_does_not_stop_the_next_flush(path: Path) -> None:
    for name in ("s.acomm.tmp", "s.acomm.prev.tmp"):
        path.with_name(name).write_bytes(b"half")
    with CommStore.open(str(path), MANUAL) as store:
        assert names(path.parent) == {"s.acomm", "s.acomm.prev"}
        path.with_name("s.acomm.prev.tmp").write_bytes(b"half")
        store.send_message(1, "a", MessageType.TEXT, "three")
    assert names(path.parent) == {"s.acomm", "s.acomm.prev"}
    assert contents(previous(path)) == [b"one", b"two"]


@pytest.mark.shows("engine 5.4")
def test_compact_says_by_how_much_the_file_shrank(path: Path) -> None:
    with CommStore.open(str(path), FlushPolicy(None, None, compress=False)) as store:
        store.send_message(1, "a", MessageType.TEXT, "x" * 50_000)
        store.receive_messages(None, "b")
        store.evict()
        store.flush()
        before = path.stat().st_size
        freed = store.compact()
        assert (freed.archived, freed.content_bytes) == (3, 50_006)
        assert freed.file_bytes == before - path.stat().st_size > 50_000
        stats = store.stats()
        assert (stats.file_bytes, stats.file_sequence) == (path.stat().st_size, stats.sequence)


@pytest.mark.shows("engine 5.1")
def test_what_is_evicted_is_in_the_file_first(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    limits = Limits()._replace(active_messages=2)
    with CommStore.open(str(path), MANUAL, limits=limits) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        for number in range(3):
            store.send_message(channel.id, "a", MessageType.TEXT, f"{number}")
            store.receive_messages(None, "b")
        assert contents(path) == [b"0", b"1"]
        assert (len(store), store.stats().archived) == (1, 2)


CHANNEL_FLUSH: list[tuple[FlushPolicy, str | None, int]] = [
    (MANUAL, None, 0),
    (MANUAL, "immediate", 3),
    (MANUAL, "batch", 0),
    (FlushPolicy(2, None), None, 2),
    (FlushPolicy(2, None), "manual", 0),
    (FlushPolicy(2, None), "immediate", 3),
]


@pytest.mark.shows("engine 6.3")
@pytest.mark.parametrize(("policy", "flush", "written"), CHANNEL_FLUSH)
def test_a_channel_may_be_flushed_sooner_or_later_than_the_store(
    tmp_path: Path, policy: FlushPolicy, flush: str | None, written: int
) -> None:
    path = tmp_path / "s.acomm"
    store = CommStore.open(str(path), policy)
    channel = store.create_channel("c", ChannelType.GROUP, "a")
    store.join_channel(channel.id, "b")
    store.configure_channel(channel.id, flush=flush)
    for number in range(3):
        store.send_message(channel.id, "a", MessageType.TEXT, f"{number}")
    assert len(contents(path)) == written
    store.close()
    again = CommStore.open(str(path), policy)
    assert again.get_settings(channel.id).flush == flush
    again.close()


@pytest.mark.shows("engine 6.3")
def test_in_an_immediate_channel_all_of_it_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    with CommStore.open(str(path), MANUAL) as store:
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        store.configure_channel(channel.id, flush="immediate")

        def is_whole() -> bool:
            return (
                CommStore.load(store.engine.clock, store_file.read(str(path))).snapshot()
                == store.snapshot()
            )

        command = store.send_message(channel.id, "a", MessageType.COMMAND, "do it")
        assert is_whole()
        store.acknowledge_message(command.id, "b", "completed")
        assert is_whole()
        query = store.send_query(channel.id, "a", "how many?")
        store.send_response(channel.id, "b", str(query.correlation_id), "seven")
        assert is_whole()


def test_a_later_version_is_not_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(_: str) -> None:
        raise VersionError(str(path), 8, "version 1", 9)

    monkeypatch.setattr(store_file, "read", later)
    with pytest.raises(VersionError):
        CommStore.open(str(path), MANUAL)
    assert names(path.parent) == {"s.acomm", "s.acomm.prev"}
