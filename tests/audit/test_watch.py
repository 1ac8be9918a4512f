"""`relay audit watch`: each event counted once, whatever became of the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relay.acomm.model import DeliveryState, Origin
from relay.audit import watch as watching
from relay.audit.watch import WatchedBatch, WatchRequest, default_checkpoint, format_batch, watch
from relay.base import crypto, fsio
from relay.base.errors import HomeMissing, RelayError, SealedStore
from relay.engine import events
from relay.engine.events import EventCodec
from relay.journal.tier_plan import JobKind
from tests.audit import busy_relay
from tests.audit.home_builder import START_NS, START_S
from tests.audit.journal_builder import JournalBuilder, delivered, sent
from tests.kills import Axe, Effect, Killed
from tests.procs import environment, until

REFUSED = events.FileRefused(
    "1-9",
    Origin("eve", "agents/eve/outbox/1-9.msg", 9, 1, 7, "cd", "text", "bob", START_NS),
    "its id is taken",
    "1-nack",
    False,
    False,
    START_S,
)


class Watched:
    """A journal, and what a watch of it says."""

    def __init__(self, tmp_path: Path) -> None:
        self.journal = JournalBuilder(tmp_path / "home")
        self.home = str(tmp_path / "home")
        self.checkpoint = str(tmp_path / "checkpoint")
        self.out = str(tmp_path / "out")
        self.ticks: list[WatchedBatch] = []

    def look(self, **other: str) -> dict[str, int]:
        """Once; the totals."""
        given = {"home": self.home, "checkpoint": self.checkpoint, "out": self.out, **other}
        return watch(WatchRequest(once=True, **given), self.ticks.append)  # type: ignore[arg-type]

    def kept(self) -> list[int]:
        """Offsets of the events in OUT, batch by batch."""
        folders = sorted(Path(self.out, "events").iterdir(), key=lambda one: int(one.name[6:]))
        return [
            offset
            for folder in folders
            for offset in pq.read_table(folder / "events.parquet")["offset"].to_pylist()
        ]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_what_happened_and_what_is_wrong(watched: Watched) -> None:
    journal = watched.journal
    journal.start()
    moved = events.DeliveriesMoved(2, ("bob", "eve"), DeliveryState.EXPIRED, START_S)
    journal.segment(sent(1), sent(2), delivered(1), REFUSED)
    given_up = [events.DeadLettered(number, ("bob",), "no answer", START_S) for number in (1, 7)]
    journal.say(given_up[0], moved, given_up[1])  # of 7 nobody knows the name any more
    totals = watched.look()
    (tick,) = watched.ticks
    counts = {"events": 7, "accepted": 2, "delivered": 1, "expired": 2, "dead": 2, "refused": 1}
    assert totals == tick.totals == tick.counts == {**counts, "starts": 1}
    assert tick.findings == [
        "refused 1-9 of eve: its id is taken",
        "dead 1-1 > bob: no answer",
        "expired 1-2 > bob, eve",
        "dead message 7 > bob: no answer",
    ]
    assert format_batch(tick).startswith("2026-01-31T09:30:00Z  events 7, accepted 2, delivered 1")
    assert watched.look() == totals and len(watched.ticks) == 1  # nothing is new


def test_killed_at_any_write_each_event_is_counted_and_kept_once(
    watched: Watched, tmp_path: Path
) -> None:
    def killed_at(number: int) -> list[Effect]:
        """A look at three more events that dies at an effect; the effects until then."""
        for folder in (watched.checkpoint, watched.out, watched.home):
            shutil.rmtree(folder, ignore_errors=True)
        watched.journal = JournalBuilder(tmp_path / "home")
        watched.journal.say(sent(1), sent(2))
        watched.look()
        watched.journal.say(sent(3), delivered(1), sent(4))
        with pytest.MonkeyPatch.context() as patch:
            axe = Axe(patch, tmp_path)
            axe.falls_at = number
            with contextlib.suppress(Killed):
                watched.look()
        return axe.effects

    effects = killed_at(0)
    assert len(effects) > 10
    for number in range(1, len(effects) + 1):
        killed_at(number)
        watched.journal.say(sent(5))
        assert watched.look() == {"events": 6, "accepted": 5, "delivered": 1}
        kept = watched.kept()
        assert len(kept) == len(set(kept)) == 6 and kept == sorted(kept)


@pytest.mark.shows("audit 1.14")
def test_over_rolls_and_tiers(watched: Watched) -> None:
    journal, wrote = watched.journal, []
    for number in range(4, 9):
        wrote += journal.say(sent(number), delivered(number))
        if number % 2:
            journal.journal.seal()
            journal.tiers.set_safe_offset(journal.journal.end)
            sealed = max(journal.journal.manifest.catalog.entries) - 1
            journal.move(sealed, JobKind.COMPRESS, JobKind.EVICT_TIER0)
        watched.look()
    assert watched.kept() == wrote


def test_a_long_journal_comes_in_pieces(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_RECORDS", 3)
    for number in range(1, 9, 2):
        watched.journal.segment(sent(number), sent(number + 1))
    assert watched.look()["events"] == 8
    assert [tick.counts["events"] for tick in watched.ticks] == [4, 4]


def test_a_write_that_is_seen_half_done_is_read_when_it_is_whole(watched: Watched) -> None:
    journal = watched.journal
    journal.say(sent(3))
    watched.look()
    journal.say(sent(4), sent(5))
    active = journal.dir / "segments" / f"{0:020d}.seg"
    whole = active.read_bytes()
    for cut in (200, 100, 40):
        data = bytearray(whole)
        last = 52 + journal.journal.end
        data[last - cut : last] = bytes(cut)
        active.write_bytes(data)
        assert watched.look()["events"] < 3
    active.write_bytes(whole)
    assert watched.look() == {"events": 3, "accepted": 3}


def test_damage_where_the_relay_writes_is_a_gap_and_nothing_behind_it_is_missed(
    watched: Watched,
) -> None:
    first, *_ = watched.journal.say(sent(4), sent(5))
    watched.journal.say(sent(6))
    active = watched.journal.dir / "segments" / f"{0:020d}.seg"
    data = bytearray(active.read_bytes())
    data[52 + first + 40] ^= 1
    active.write_bytes(data)
    assert watched.look() == {"events": 2, "accepted": 2, "lost": 1}
    wrote = watched.journal.say(sent(7))
    assert watched.look()["lost"] == 1 and watched.kept()[-1:] == wrote


@pytest.mark.shows("audit 1.14")
def test_what_is_away_ends_the_look_and_is_counted_later(watched: Watched, tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    objects.mkdir()
    journal = watched.journal = JournalBuilder(tmp_path / "cold", objects=str(objects))
    home = str(tmp_path / "cold")
    journal.segment(sent(1), sent(2))
    journal.say(sent(3))
    journal.tiers.set_safe_offset(journal.journal.end)
    evicted = (JobKind.COMPRESS, JobKind.UPLOAD, JobKind.EVICT_TIER0, JobKind.EVICT_TIER1)
    journal.move(0, *evicted)
    with pytest.raises(RelayError, match="is in Tier 2, and no object store is named"):
        watched.look(home=home)
    config = {"journal": {"objects": str(objects)}}
    (tmp_path / "cold" / "config.json").write_text(json.dumps(config))
    objects.rename(tmp_path / "elsewhere")
    with pytest.raises(RelayError):
        watched.look(home=home)
    (tmp_path / "elsewhere").rename(objects)
    assert watched.look(home=home) == {"events": 3, "accepted": 3}


def test_what_is_sealed_ends_the_look_until_there_is_the_key(tmp_path: Path) -> None:
    key = crypto.create_key(str(tmp_path / "store.key"))
    JournalBuilder(tmp_path / "home", key=key).say(sent(1), sent(2))
    request = WatchRequest(str(tmp_path / "home"), str(tmp_path / "checkpoint"), once=True)
    with pytest.raises(SealedStore, match="is encrypted, and no key was given"):
        watch(request, print)
    store = {"encrypt": True, "key_file": str(tmp_path / "store.key")}
    (tmp_path / "home" / "config.json").write_text(json.dumps({"store": store}))
    assert watch(request, print) == {"events": 2, "accepted": 2}


def test_a_segment_whose_header_is_damaged_is_told_once(watched: Watched) -> None:
    watched.journal.segment(sent(1))
    watched.journal.say(sent(2))
    watched.look()
    active = watched.journal.dir / "segments" / f"{1:020d}.seg"
    data = bytearray(active.read_bytes())
    data[4] ^= 1
    active.write_bytes(data)
    assert watched.look() == watched.look() == {"events": 2, "accepted": 2, "lost": 1}
    (line,) = watched.ticks[-1].findings
    assert line.startswith("lost offsets ") and str(active) in line
    assert watched.ticks[-1].until > "2026-01-31"  # when it was found


def test_a_line_that_could_not_be_shown_is_shown_again(watched: Watched) -> None:
    watched.journal.say(sent(1), sent(2))
    request = WatchRequest(watched.home, watched.checkpoint, once=True)

    def closed(batch: WatchedBatch) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        watch(request, closed)
    watched.journal.say(sent(3))
    assert watch(request, watched.ticks.append) == {"events": 3, "accepted": 3}
    assert [tick.counts["events"] for tick in watched.ticks] == [2, 1]


def test_records_without_an_event_make_no_line(watched: Watched) -> None:
    watched.journal.say(sent(1))
    watched.look()
    watched.journal.checkpoint()
    assert watched.look() == {"events": 1, "accepted": 1} and len(watched.ticks) == 1


def test_what_is_counted_is_durable(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(fsio, "fault", lambda *call: calls.append(call))
    watched.journal.say(sent(4))
    calls.clear()
    watched.look()
    synced = ("sync", str(watched.journal.dir / "segments" / f"{0:020d}.seg"))
    position = os.path.join(watched.checkpoint, "position.json")
    assert calls.index(synced) < calls.index(("rename", position))


def test_a_relay_that_was_never_started(tmp_path: Path) -> None:
    (tmp_path / "home" / "journal").mkdir(parents=True)
    request = WatchRequest(str(tmp_path / "home"), str(tmp_path / "checkpoint"), once=True)
    assert watch(request, print) == {}
    JournalBuilder(tmp_path / "home").say(sent(1))
    assert watch(request, print) == {"events": 1, "accepted": 1}


def test_damage_is_a_finding_and_the_rest_is_read(watched: Watched) -> None:
    first, *_ = watched.journal.segment(sent(1), sent(2))
    path = watched.journal.dir / "segments" / f"{0:020d}.seg"
    data = bytearray(path.read_bytes())
    data[52 + first + 40] ^= 1
    path.write_bytes(data)
    assert watched.look() == {"events": 1, "accepted": 1, "lost": 1}
    (line,) = watched.ticks[0].findings
    assert line.startswith("lost offsets 0 to ") and f"{path} at 52" in line


def test_folders_of_another_watch(watched: Watched, tmp_path: Path) -> None:
    watched.journal.say(sent(1))
    watched.look()
    (tmp_path / "other" / "journal").mkdir(parents=True)
    with pytest.raises(RelayError, match=f"checkpoint belongs to the watch of {watched.home}"):
        watched.look(home=str(tmp_path / "other"))
    with pytest.raises(RelayError, match="out belongs to the watch of"):
        watched.look(checkpoint=str(tmp_path / "checkpoint2"))
    with pytest.raises(HomeMissing, match="there is no relay home"):
        watched.look(home=str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RelayError, match="file is not a folder"):
        watched.look(checkpoint=str(tmp_path / "file"))


def test_folders_that_another_watch_has_now(watched: Watched) -> None:
    watched.journal.say(sent(1))
    for folder in (watched.checkpoint, watched.out):
        os.makedirs(folder, exist_ok=True)
        with (
            fsio.locked(os.path.join(folder, "lock")),
            pytest.raises(RelayError, match=f"another watch has {folder}"),
        ):
            watched.look()
    assert watched.look(out=watched.checkpoint)["accepted"] == 1


def test_a_full_disk_is_one_line_and_nothing_is_counted_twice(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.journal.say(sent(1))

    def full(call: str, path: str) -> None:
        if call == "write" and path.endswith("events.parquet"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "fault", full)
        with pytest.raises(RelayError, match=r"events\.parquet cannot be written: No space left"):
            watched.look()
    watched.journal.say(sent(2))
    assert watched.look() == {"events": 2, "accepted": 2}


def test_a_checkpoint_that_the_journal_does_not_go_back_to(watched: Watched) -> None:
    watched.journal.say(sent(1))
    watched.look()
    for number in (2, 3):
        watched.journal.segment(sent(number))
    watched.journal.tiers.set_safe_offset(watched.journal.journal.end)
    for number in (0, 1):
        watched.journal.move(number, JobKind.PRUNE)
    line = r"from offset \d+ to \d+ were pruned before they were read; begin with a new"
    with pytest.raises(RelayError, match=line):
        watched.look()
    assert watched.look(checkpoint=watched.checkpoint + "2", out=watched.out + "2") == {}


def test_a_checkpoint_of_another_journal(watched: Watched) -> None:
    watched.journal.say(sent(1), sent(2))
    watched.look()
    shutil.rmtree(watched.home)
    JournalBuilder(Path(watched.home)).say(sent(1))
    with pytest.raises(RelayError, match=r"is at offset \d+, but the journal ends at \d+: it is"):
        watched.look()


def test_a_journal_that_is_replaced_while_it_is_followed(watched: Watched) -> None:
    watched.journal.say(sent(1), sent(2))
    seen: list[int] = []

    def replace(batch: WatchedBatch) -> None:
        seen.append(batch.counts["events"])
        shutil.rmtree(watched.home)
        JournalBuilder(Path(watched.home)).say(sent(1))

    with pytest.raises(RelayError, match="it is another one, or was restored"):
        watch(WatchRequest(watched.home, watched.checkpoint, interval_s=0.01), replace)
    assert seen == [2]


def test_events_of_a_checkpoint_that_was_removed_are_not_mixed_with_others(
    watched: Watched,
) -> None:
    watched.journal.say(sent(1))
    watched.look()
    shutil.rmtree(watched.checkpoint)
    with pytest.raises(RelayError, match="out belongs to an earlier checkpoint at"):
        watched.look()


def test_a_position_that_was_lost_or_put_back_keeps_no_event_twice(watched: Watched) -> None:
    position = Path(watched.checkpoint, "position.json")
    watched.journal.say(sent(1))
    watched.look()
    before = position.read_bytes()
    for number in (2, 3):
        watched.journal.say(sent(number))
        watched.look()
    kept = watched.kept()
    position.write_bytes(before)
    for _ in range(2):
        with pytest.raises(RelayError, match=r"has batches that .* does not") as caught:
            watched.look()
        assert caught.value.hint.endswith("and with a new OUT")
        position.unlink(missing_ok=True)
    assert watched.kept() == kept
    assert watched.look(checkpoint=watched.checkpoint + "2", out=watched.out + "2")["events"] == 3


def test_a_home_is_no_checkpoint(watched: Watched) -> None:
    Path(watched.home, "config.json").write_text("{}")
    for name in ("checkpoint", "out"):
        with pytest.raises(RelayError, match="is a relay home"):
            watched.look(**{name: watched.home})
    assert not Path(watched.home, "watch.json").exists()


def test_a_batch_that_was_begun_and_is_pruned_ends_with_one_line(watched: Watched) -> None:
    for number in (1, 2):
        watched.journal.segment(sent(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "count", lambda events: 1 / 0)  # ended while it is made
        with pytest.raises(ZeroDivisionError):
            watched.look()
    watched.journal.tiers.set_safe_offset(watched.journal.journal.end)
    watched.journal.move(0, JobKind.PRUNE)
    with pytest.raises(RelayError, match="were pruned before they were read"):
        watched.look()


@pytest.mark.parametrize("name", ["position.json", "watch.json"])
def test_a_checkpoint_that_is_damaged(watched: Watched, name: str) -> None:
    watched.journal.say(sent(1))
    watched.look()
    Path(watched.checkpoint, name).write_text("garbage")
    with pytest.raises(RelayError, match=f"{name} is damaged: JSON is malformed"):
        watched.look()


def test_a_checkpoint_of_an_earlier_version(watched: Watched) -> None:
    os.makedirs(os.path.join(watched.checkpoint, "query"))
    with pytest.raises(RelayError, match="is of an earlier version of agent-relay; begin with a"):
        watched.look()


def test_where_the_checkpoint_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = default_checkpoint("/home/a")
    assert os.path.dirname(path) == str(tmp_path / "agent-relay" / "watch")
    assert path != default_checkpoint("/home/b")


class Process:
    """`relay audit watch` in a process of its own."""

    def __init__(self, home: Path, folder: Path) -> None:
        command = [sys.executable, "-m", "relay", "--home", str(home), "audit", "watch"]
        options = ["--checkpoint", str(folder / "cp"), "--out", str(folder / "out"), "--json"]
        self._position = folder / "cp" / "position.json"
        self.process = subprocess.Popen(
            [*command, *options, "--interval", "0.2"],
            env=environment(AGENT_RELAY_AUDIT_NICE="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def counted(self) -> int:
        """Events so far."""
        if not self._position.exists():
            return 0
        return int(json.loads(self._position.read_text())["counts"].get("events", 0))

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate()
        return self.process.returncode, out, err


@pytest.mark.shows("audit 1.15")
def test_killed_and_begun_again_each_event_is_counted_once(tmp_path: Path) -> None:
    chance, pause = random.Random(), threading.Event()
    with busy_relay.busy_relay(tmp_path / "home") as home:
        for _ in range(3):
            following = Process(home, tmp_path)
            before = following.counted()
            until(lambda f=following, b=before: f.counted() > b)
            pause.wait(chance.random())  # anywhere in a batch, or between two
            assert following.end(signal.SIGKILL)[0] == -signal.SIGKILL
    records = busy_relay.records(home)
    frames = [EventCodec().decode(record.payload, record.offset) for record in records]
    wanted = [type(frame.event).__name__ for frame in frames if frame.event is not None]
    following = Process(home, tmp_path)
    # All may be counted before it begins: a signal is its own from when it has the lock.
    until(lambda: fsio.lock_owner(str(tmp_path / "cp" / "lock")) is not None)
    until(lambda: following.counted() == len(wanted))
    code, out, err = following.end(signal.SIGINT)
    assert code == 0, err
    totals = json.loads(out.splitlines()[-1])["totals"]
    assert totals["accepted"] == wanted.count("MessageSent") > 20
    assert totals["events"] == len(wanted)
    assert err.startswith("In all: events ") and err.count("\n") == 1
    kept = pq.read_table(tmp_path / "out" / "events")["offset"].to_pylist()
    assert sorted(kept) == [record.offset for record in records]
