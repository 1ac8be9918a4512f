"""Run the drill: record work, cut the power, judge what relays make of it."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from relay.base.clock import BOOT_ID
from scripts.powercutting import images, kernel
from scripts.powercutting.judging import (
    KINDS,
    Fault,
    Steps,
    Unmountable,
    Verdict,
    judge,
    taken_twice,
)
from scripts.powercutting.notes import Note, read_notes
from scripts.powercutting.workload import FILE_SYSTEMS, VARIANTS, Round, record, state_mounted

PROCESSES = 2
AT_ONCE = 4  # states of one process
LOOK_EVERY_S = 0.05
ROUND_STATES = 100  # of one recording
CHUNK = 50  # states that a process judges in a row
MOST_KEPT = 8  # of one file system
SHOWN = 3  # faults of a state


class Kept(msgspec.Struct):
    """All that is needed to judge a state again."""

    system: str
    at_ns: int
    notes: list[Note]


class Chunk(NamedTuple):
    """States of one recording, in order of time."""

    recorded: Round
    name: str  # of the file system
    label: str  # of the recording
    cuts: list[images.Cut]
    keep: Path | None


class Result(NamedTuple):
    """Of one state."""

    label: str
    verdict: Verdict | None  # None: the file system cannot be mounted
    kept: str


class Table:
    """Counts of one file system."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.kept: list[str] = []
        self._began = time.monotonic()

    def add(self, result: Result) -> None:
        self.counts["states"] += 1
        if result.verdict is None:
            self.counts["not mountable"] += 1
            return
        self.counts["checks"] += result.verdict.checks
        self.add_faults(result.label, result.verdict.faults)
        if result.kept:
            self.kept.append(result.kept)
            print(f"  kept: {result.kept}", flush=True)

    def add_faults(self, label: str, faults: Sequence[Fault]) -> None:
        self.counts["bad states"] += bool(faults)
        self.counts.update(one.kind for one in faults)
        for one in faults[:SHOWN]:
            print(f"  {label}: {one.kind}: {one.text}", flush=True)
        if len(faults) > SHOWN:
            print(f"  {label}: and {len(faults) - SHOWN} more", flush=True)

    @property
    def faults(self) -> int:
        return sum(self.counts[kind] for kind in KINDS)

    def progress(self) -> None:
        done = self.counts["states"]
        rate = done / (time.monotonic() - self._began)
        print(f"{self.name}: {done:,} states, {rate:.1f}/s, {self.faults} faults", flush=True)


COLUMNS = ("states", "flushes", "acknowledged", "checks", *KINDS, "bad states", "not mountable")


def show(tables: Sequence[Table]) -> None:
    """A line for each file system."""
    print("| file system | " + " | ".join(COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for one in tables:
        cells = [one.name, *(f"{one.counts[column]:,}" for column in COLUMNS)]
        print("| " + " | ".join(cells) + " |", flush=True)


# -- judging ---------------------------------------------------------------------------------


def next_boot(folder: str) -> None:
    """In this process the machine has started again: the relay sees another boot id."""
    kernel.own_mounts()
    file = Path(folder, f"boot.{os.getpid()}")
    file.write_text(f"{uuid.uuid4()}\n")
    kernel.mount(str(file), Path(BOOT_ID), flags=kernel.MS_BIND)


def _begin_judging(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    next_boot(folder)


def judge_chunk(chunk: Chunk) -> list[Result]:
    """Build and judge states, a few at a time: most of the time a relay is waited for."""
    recorded = chunk.recorded
    work = Path(tempfile.mkdtemp(prefix="judge-", dir=recorded.folder))
    builder = images.Builder(recorded.base, recorded.log, work / "rolled.img")
    notes = read_notes(recorded.books)
    left = list(enumerate(chunk.cuts))[::-1]
    going: list[Steps[Result]] = []
    results = []
    try:
        while left or going:
            if left and len(going) < AT_ONCE:
                number, cut = left.pop()
                going.append(_judge_cut(chunk, builder, notes, cut, work / f"{number}"))
            for one in list(going):
                try:
                    next(one)
                except StopIteration as ended:
                    results.append(ended.value)
                    going.remove(one)
            time.sleep(LOOK_EVERY_S)
    finally:
        for one in going:
            one.close()
        builder.close()
        shutil.rmtree(work, ignore_errors=True)
    return results


def _judge_cut(
    chunk: Chunk, builder: images.Builder, notes: list[Note], cut: images.Cut, work: Path
) -> Steps[Result]:
    work.mkdir()
    image, spare = work / "disk.img", work / "spare.img"
    builder.build(cut, image)
    images.copy(image, spare)  # a relay changes the other
    at_ns = images.cut_at_ns(builder.events, cut)
    label = f"{chunk.label}, cut before event {cut.end}, {cut.keep}"
    verdict, kept = None, ""
    try:
        target = chunk.recorded.mounts / f"{work.parent.name}-{work.name}"
        verdict = yield from judge(image, target, chunk.recorded.system, notes, at_ns)
    except Unmountable as exc:
        print(f"  {label}: {exc}", flush=True)
    image.unlink()
    if verdict and verdict.faults and chunk.keep and _kept(chunk) < MOST_KEPT:
        chunk.keep.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{chunk.name}-", dir=chunk.keep))
        images.copy(spare, folder / "disk.img")
        state = Kept(chunk.name, at_ns, notes)
        (folder / "state.json").write_bytes(msgspec.json.encode(state))
        lines = [f"{one.kind}: {one.text}\n" for one in verdict.faults]
        (folder / "faults").write_text(f"{label}\n{''.join(lines)}")
        kept = str(folder)
    spare.unlink()
    return Result(label, verdict, kept)


def _kept(chunk: Chunk) -> int:
    assert chunk.keep is not None
    return len(list(chunk.keep.glob(f"{chunk.name}-*")))


def judge_again(folder: Path, disks: Path, mounts: Path) -> int:
    """Judge a state that was kept; its home before and after is put beside it."""
    state = msgspec.json.decode((folder / "state.json").read_bytes(), type=Kept)
    system = FILE_SYSTEMS[state.system]
    next_boot(str(disks))
    image, target = disks / "again.img", mounts / "again"
    for name in ("before", "after"):
        shutil.rmtree(folder / name, ignore_errors=True)
    images.copy(folder / "disk.img", image)
    with state_mounted(image, target, system) as home:
        subprocess.run(["cp", "-a", str(home), str(folder / "before")], check=True)
    steps = judge(image, target, system, state.notes, state.at_ns)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            verdict: Verdict = ended.value
            break
        time.sleep(LOOK_EVERY_S)
    with state_mounted(image, target, system) as home:
        subprocess.run(["cp", "-a", str(home), str(folder / "after")], check=True)
    for one in verdict.faults:
        print(f"{one.kind}: {one.text}")
    print(
        f"{verdict.checks} checks, {len(verdict.faults)} faults; see before and after in {folder}"
    )
    return bool(verdict.faults)


# -- the drill -------------------------------------------------------------------------------


def drill(
    name: str, root: Path, keep: Path | None, *, states: int, seconds: float, seed: int, syncs: bool
) -> Table:
    """So many states of one file system, from recordings of some seconds each."""
    table = Table(name)
    variants = list(VARIANTS)
    for number in range(-(-states // ROUND_STATES)):
        wanted = min(ROUND_STATES, states - number * ROUND_STATES)
        variant = variants[(seed + number) % len(variants)]
        folder = root / "disks" / f"{name}-{number}"
        print(f"{name}: recording {number + 1}, {variant} configuration", flush=True)
        dice = random.Random(f"{seed} {number}")
        work_seed, mounts = dice.getrandbits(16), root / "mounts"
        recorded = record(
            folder, mounts, name, variant, seconds=seconds, seed=work_seed, syncs=syncs
        )
        label = f"{name} {variant} {seed}.{number}"
        for result in _judged(recorded, name, label, wanted, dice, keep, table):
            table.add(result)
        shutil.rmtree(folder)
    return table


def _judged(
    recorded: Round,
    name: str,
    label: str,
    states: int,
    dice: random.Random,
    keep: Path | None,
    table: Table,
) -> Iterator[Result]:
    notes = read_notes(recorded.books)
    events = images.read_log(recorded.log.read_bytes())
    table.counts["acknowledged"] += sum(one.what == "sent" for one in notes)
    table.counts["flushes"] += sum(one.is_flush for one in events)
    table.add_faults(label, taken_twice(notes))
    cuts = images.choose(events, recorded.since_ns, states, dice)
    size = min(CHUNK, -(-len(cuts) // PROCESSES) or 1)
    chunks = [
        Chunk(recorded, name, label, cuts[at : at + size], keep) for at in range(0, len(cuts), size)
    ]
    context = multiprocessing.get_context("fork")
    with context.Pool(PROCESSES, _begin_judging, [str(recorded.folder)]) as pool:
        for results in pool.imap_unordered(judge_chunk, chunks):
            yield from results
            table.progress()


def _ended(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="scripts/powercut", description=__doc__)
    every = ",".join(FILE_SYSTEMS)
    parser.add_argument("--states", type=int, default=100, help="of each file system [100]")
    parser.add_argument("--fs", default=every, help=f"[{every}]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=8, help="of a recording [8]")
    parser.add_argument("--control", action="store_true", help="nothing is synced")
    parser.add_argument("--judge", metavar="DIR", type=Path, help="judge a kept state again")
    given = parser.parse_args()
    names = given.fs.split(",")
    for name in names:
        if name not in FILE_SYSTEMS:
            parser.error(f"--fs: {name} is none of {every}")
        make = FILE_SYSTEMS[name].make.split()[0]
        if shutil.which(make) is None:
            parser.error(f"--fs: {name} needs {make}: install xfsprogs, btrfs-progs or e2fsprogs")
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(device):
            parser.error(f"{device} is missing: this kernel cannot do it")
    for number in (signal.SIGINT, signal.SIGTERM):  # a namespace's first process ignores them
        signal.signal(number, _ended)
    root = Path(tempfile.mkdtemp(prefix="agent-relay-powercut-"))
    keep = None if given.control else root / "kept"
    disks, mounts = root / "disks", root / "mounts"
    disks.mkdir()
    # In memory, and gone with the last process. Nothing is mounted in it: a file system within the
    # one that has its image would hold it, and itself, for ever.
    kernel.mount("powercut", disks, "tmpfs")
    try:
        if given.judge is not None:
            return judge_again(given.judge, disks, mounts)
        wanted = {"states": given.states, "seconds": given.seconds, "seed": given.seed}
        tables = [drill(name, root, keep, **wanted, syncs=not given.control) for name in names]
    finally:
        kernel.unmount(disks)
        for one in (disks, mounts):
            shutil.rmtree(one, ignore_errors=True)
        with contextlib.suppress(OSError):  # states are kept in it
            root.rmdir()
    show(tables)
    if given.control:
        blind = [one.name for one in tables if not one.counts["lost"]]
        if blind:
            print(f"powercut: nothing is synced, and nothing lost on {', '.join(blind)}: the drill "
                  "sees nothing", file=sys.stderr)  # fmt: skip
        return bool(blind)
    if any(one.faults for one in tables):
        print(f"states are kept in {keep}: scripts/powercut --judge DIR", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
