"""``audit_runs``: a run of all jobs, compared with reading its input once.

For each size a history is made (50 agents, ``scripts/make-history``), and one process with one
session of two threads does, in this order:

    narrow  every section of live store and archives and every table of the ledger's snapshot,
            without contents, metadata and signatures, which no job keeps: to nowhere
    read    the same with every column
    rest    what else a run reads: every record of the journal, every original, and the checksum
            of every file: to nowhere
    run     the snapshot, all jobs, their tables and findings as Parquet

``times_reading`` is run / read, ``times_narrow`` run / narrow, ``times_everything``
run / (read + rest). Memory is the most that one Python
process below Spark had resident, seen ten times a second. ``bends``: the first size at which
messages a second fall below 0.8 of the smallest's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from scripts.benchmarks.common import fresh_root, note, report, timed
from scripts.history.make import Given, History

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from relay.audit.snapshot import HomeSnapshot

SIZES = (100_000, 300_000, 1_000_000)
FIVE_MILLION = 5_000_000  # with --large: an hour or so
AGENTS = 50
MESSAGES_A_DAY = 33_000  # a month of a million
MASTER = "local[2]"
GOAL = 3.0  # times reading
LINEAR = 0.8  # of the smallest's messages a second
LOOK_S = 0.1
AGE_NS = 300 * 10**9
SECTIONS = ("messages,dead_letters,archive", "channels", "subscriptions", "deliveries")


def run(base: str | None, *, large: bool = False) -> None:
    """Run every size and print one line each, and a summary."""
    root = fresh_root(base)
    sizes = (*SIZES, FIVE_MILLION) if large else SIZES
    rates: dict[int, float] = {}
    for messages in sizes:
        home, out = root / f"home-{messages}", root / f"out-{messages}"
        note(f"audit: a history of {messages} messages in {home}")
        days = max(2.0, messages / MESSAGES_A_DAY)
        given = Given(messages, AGENTS, days, time.time_ns() - AGE_NS)
        made_s = timed(History(str(home), given).make)
        facts = _measure(home, out)
        rates[messages] = messages / facts["run_s"]
        report(
            case="audit_runs",
            messages=messages,
            made_s=round(made_s, 1),
            **facts,
            messages_per_s=round(rates[messages]),
            times_reading=round(facts["run_s"] / facts["read_s"], 2),
            times_narrow=round(facts["run_s"] / facts["narrow_s"], 2),
            times_everything=round(facts["run_s"] / (facts["read_s"] + facts["rest_s"]), 2),
            goal=GOAL,
        )
    first = rates[sizes[0]]
    bends = next((size for size in sizes if rates[size] < LINEAR * first), None)
    of_first = {str(size): round(rate / first, 2) for size, rate in rates.items()}
    report(case="audit linear", of_first=of_first, bends=bends)


def _measure(home: Path, out: Path) -> dict[str, float]:
    """Measure in a separate process: seconds, and megabytes of the largest worker."""
    command = [sys.executable, "-m", "scripts.benchmarks.audit_runs", str(home), str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


def measure(home: str, out: str) -> dict[str, float]:
    """Read, then run, in this process."""
    from relay.audit.inputs import NOT_CACHED
    from relay.audit.run import RunRequest, run_audit
    from relay.audit.session import settings_for, spark_session
    from relay.audit.snapshot import snapshot_home
    from relay.audit.temp_folders import private_folder
    from relay.base.clock import Clock

    gathered = snapshot_home(home, private_folder("bench"), Clock())
    spark = spark_session(MASTER, "benchmark", settings_for(gathered.size))
    _read(spark, gathered, NOT_CACHED)  # what is compiled and started once is not timed
    _read_rest(spark, gathered)
    with _Watch() as reading:
        narrow_s = timed(lambda: _read(spark, gathered, NOT_CACHED))
        read_s = timed(lambda: _read(spark, gathered, frozenset()))
        rest_s = timed(lambda: _read_rest(spark, gathered))
    with _Watch() as running:
        began = time.perf_counter()
        summary, _ = run_audit(RunRequest(home, out=out, master=MASTER), Clock())
        run_s = time.perf_counter() - began
    failed = {name: job.error for name, job in summary.jobs.items() if job.error}
    if failed:
        raise SystemExit(f"audit: {failed}")
    spark.stop()
    return {
        "narrow_s": round(narrow_s, 2),
        "read_s": round(read_s, 2),
        "rest_s": round(rest_s, 2),
        "run_s": round(run_s, 2),
        "jobs": len(summary.jobs),
        "findings": summary.findings,
        "worker_mb_reading": reading.most >> 20,
        "worker_mb_running": running.most >> 20,
    }


def _read(spark: SparkSession, gathered: HomeSnapshot, without: frozenset[str]) -> None:
    """Read all rows of each section and table once, and discard them."""
    from relay.audit.inputs import store_columns
    from relay.audit.schemas.formats import LEDGER
    from relay.audit.sources import acomm_source, ledger_source

    for section in SECTIONS:
        names = [name for name in store_columns(section) if name not in without]
        _discard(acomm_source.load(spark, gathered.store_files, section, names))
    for table, schema in LEDGER.items():
        _discard(ledger_source.load(spark, gathered.ledger.path, table, schema.names))


def _read_rest(spark: SparkSession, gathered: HomeSnapshot) -> None:
    """Read journal and originals and verify every file; discard the result."""
    from relay.audit.schemas.formats import JOURNAL, KEPT_FILE, ORIGINAL
    from relay.audit.sources import files_source, journal_source, originals_source

    home, journal = gathered.home, gathered.journal
    until = json.dumps(journal.until)
    _discard(journal_source.load(spark, list(journal.until), JOURNAL.names, until=until))
    _discard(originals_source.load(spark, home, originals_source.plan(home), ORIGINAL.names))
    units = files_source.plan(home, gathered.store_files, gathered.folder, journal.objects)
    _discard(files_source.load(spark, home, units, KEPT_FILE.names))


def _discard(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


class _Watch:
    """Peak memory of one Python worker of this process during the block."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        me = psutil.Process(os.getpid())
        while not self._over.wait(LOOK_S):
            for child in me.children(recursive=True):
                try:
                    if "python" in child.name():
                        self.most = max(self.most, child.memory_info().rss)
                except psutil.Error:
                    continue


def main() -> None:
    """Measure one home; print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("home")
    parser.add_argument("out")
    given = parser.parse_args()
    print(json.dumps(measure(given.home, given.out)))


if __name__ == "__main__":
    main()
