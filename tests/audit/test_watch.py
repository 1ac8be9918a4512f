"""`relay audit watch`: each event counted once, whatever became of the process."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from relay.acomm.model import DeliveryState, Origin
from relay.audit.watch import WatchedBatch, WatchRequest, default_checkpoint, format_batch, watch
from relay.base import fsio
from relay.base.errors import HomeMissing, RelayError
from relay.engine import events
from relay.engine.events import EventCodec
from relay.journal.plan import JobKind
from tests.audit import busy_relay
from tests.audit.home_builder import START_NS, START_S
from tests.audit.journal_builder import JournalBuilder, delivered, sent
from tests.procs import environment, until

PATIENCE_S = 200  # a JVM on a machine that has other things to do
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


@pytest.fixture
def watched(spark: SparkSession, tmp_path: Path) -> Watched:
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


def test_a_batch_that_is_done_again_counts_once(spark: SparkSession, watched: Watched) -> None:
    watched.journal.say(sent(1), sent(2))
    watched.look()
    watched.journal.say(sent(3), delivered(1))
    before = watched.look()
    commits = Path(watched.checkpoint, "query", "commits")
    for name in ("1", ".1.crc"):  # killed before Spark noted that the batch is done
        (commits / name).unlink()
    watched.journal.say(sent(4))
    after = watched.look()
    assert before["accepted"] == 3 and after["accepted"] == 4
    rows = spark.read.parquet(f"{watched.out}/events").select("offset", "event").collect()
    assert len(rows) == len(set(rows)) == 5


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


def test_what_fails_while_the_folders_are_ours_is_not_taken_for_them(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere")

    monkeypatch.setattr("relay.audit.watch.session", full)
    with pytest.raises(OSError, match="No space left on device: '/elsewhere'"):
        watched.look()


def test_a_checkpoint_that_the_journal_does_not_go_back_to(watched: Watched) -> None:
    watched.journal.say(sent(1))
    watched.look()
    for number in (2, 3):
        watched.journal.segment(sent(number))
    watched.journal.tiers.set_safe_offset(watched.journal.journal.end)
    for number in (0, 1):
        watched.journal.move(number, JobKind.PRUNE)
    with pytest.raises(RelayError, match="were pruned before they were read; begin with a new"):
        watched.look()
    assert watched.look(checkpoint=watched.checkpoint + "2", out=watched.out + "2") == {}


def test_a_checkpoint_that_is_damaged(watched: Watched) -> None:
    watched.journal.say(sent(1))
    watched.look()
    offsets = Path(watched.checkpoint, "query", "offsets")
    (offsets / ".0.crc").unlink()
    (offsets / "0").write_text("garbage")
    with pytest.raises(RelayError, match=r"^Spark: .*query/offsets/0"):
        watched.look()


def test_where_the_checkpoint_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = default_checkpoint("/home/a")
    assert os.path.dirname(path) == str(tmp_path / "agent-relay" / "watch")
    assert path != default_checkpoint("/home/b")


class Process:
    """`relay audit watch` in a process of its own."""

    def __init__(self, home: Path, folder: Path, **environ: str) -> None:
        command = [sys.executable, "-m", "relay", "--home", str(home), "audit", "watch"]
        options = ["--checkpoint", str(folder / "cp"), "--out", str(folder / "out"), "--json"]
        self.totals = folder / "cp" / "totals"
        self.process = subprocess.Popen(
            [*command, *options, "--interval", "0.2"],
            env=environment(AGENT_RELAY_AUDIT_NICE="0", **environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def batch(self) -> int:
        """Of the newest totals; -1 before the first."""
        return max((int(path.stem) for path in self.totals.glob("*.json")), default=-1)

    def counted(self) -> int:
        """Events so far."""
        path = self.totals / f"{self.batch():020d}.json"
        return int(json.loads(path.read_text())["counts"]["events"]) if path.exists() else 0

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@pytest.mark.shows("audit 1.15")
@pytest.mark.timeout(3 * PATIENCE_S)
def test_killed_and_begun_again_each_event_is_counted_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    chance, pause = random.Random(), threading.Event()
    with busy_relay.busy_relay(tmp_path / "home") as home:
        following = Process(home, tmp_path)
        before = following.batch()
        until(lambda f=following, b=before: f.batch() > b, patience_s=PATIENCE_S)
        pause.wait(chance.random())  # anywhere in a batch, or between two
        assert following.end(signal.SIGKILL)[0] == -signal.SIGKILL
    records = busy_relay.records(home)
    frames = [EventCodec().decode(record.payload, record.offset) for record in records]
    wanted = [type(frame.event).__name__ for frame in frames if frame.event is not None]
    following = Process(home, tmp_path)
    until(lambda: following.counted() == len(wanted), patience_s=PATIENCE_S)
    code, out, err = following.end(signal.SIGINT)
    assert code == 0, err
    totals = json.loads(out.splitlines()[-1])["totals"]
    assert totals["accepted"] == wanted.count("MessageSent") > 20
    assert totals["events"] == len(wanted)
    assert err.startswith("In all: events ") and err.count("\n") == 1
    rows = spark.read.parquet(str(tmp_path / "out" / "events")).select("offset").collect()
    assert sorted(row["offset"] for row in rows) == [record.offset for record in records]


@pytest.mark.shows("audit 3.7")
def test_ended_while_spark_starts_it_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    JournalBuilder(tmp_path / "home").say(sent(1))
    temp = tmp_path / "temp"
    temp.mkdir()
    following = Process(tmp_path / "home", tmp_path, TMPDIR=str(temp))
    here = psutil.Process(following.process.pid)
    until(lambda: bool(here.children()), patience_s=PATIENCE_S)  # the JVM
    started = here.children(recursive=True)
    code, out, err = following.end(signal.SIGTERM)
    assert (code, out) == (143, "")
    assert err == "relay: the watch was interrupted before it began\n"
    until(lambda: not any(process.is_running() for process in started))
    assert os.listdir(temp) == []
