"""Run all audits on a cluster and locally, and compare the results."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, EXIT_OK
from scripts.cluster.compare import compare
from scripts.cluster.standalone import Standalone, standalone
from scripts.history.__main__ import make_faulty
from scripts.history.faults import chosen
from scripts.history.make import Given

MESSAGES, AGENTS, DAYS = 20_000, 20, 4
AGE_NS = 300 * 10**9


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="scripts/cluster-demo", description=__doc__)
    parser.add_argument("--home", type=Path, help="a relay's home [a history with faults]")
    parser.add_argument("--messages", type=int, default=MESSAGES, help="messages of that history")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill", action="store_true", help="kill an executor while it reads")
    parser.add_argument("--dir", help="parent of the temporary directory [the system's]")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    root = Path(tempfile.mkdtemp(prefix="agent-relay-cluster-", dir=given.dir))
    try:
        home = given.home.absolute() if given.home else _history(root / "home", given.messages)
        code = demo(root, home, workers=given.workers, kill=given.kill)
    except KeyboardInterrupt:
        print("interrupted: the cluster is stopped", file=sys.stderr)
        code = 128 + signal.SIGINT
    except RuntimeError as exc:
        print(f"cluster-demo: {exc}", file=sys.stderr)
        code = EXIT_FAILED
    if code == EXIT_OK:
        shutil.rmtree(root)
    else:
        print(f"what was written is kept: {root}", file=sys.stderr)
    return code


def _history(home: Path, messages: int) -> Path:
    _say(f"a history of {messages} messages, with faults")
    given = Given(messages, AGENTS, DAYS, time.time_ns() - AGE_NS)
    make_faulty(home, given, chosen("rows,files"))
    return home


def demo(root: Path, home: Path, *, workers: int = 2, kill: bool = False) -> int:
    """Run all jobs on a cluster, then locally; 0 when every table is the same, 3 when not.

    ``kill``: an executor is killed while it reads. Errors: RuntimeError when a run fails.
    """
    now_ns = time.time_ns()
    _say(f"a master and {workers} workers on loopback")
    with standalone(_folder(root / "cluster"), workers) as cluster:
        print(f"   {cluster.url}, {', '.join(f'pid {w.process.pid}' for w in cluster.workers)}")
        _say("all jobs on the cluster")
        with killing(cluster) if kill else contextlib.nullcontext():
            run(home, root / "on-cluster", cluster.url, now_ns)
    _say("all jobs on this machine alone")
    run(home, root / "alone", "local[2]", now_ns)
    _say("the tables, row by row")
    differs = False
    for one in compare(root / "on-cluster", root / "alone"):
        print(
            f"   {one.table:<32} {one.rows:>9,} rows  {'DIFFERENT' if one.differences else 'same'}"
        )
        for line in one.differences:
            print(f"      {line}")
        differs = differs or bool(one.differences)
    return EXIT_FINDINGS if differs else EXIT_OK


def run(home: Path, out: Path, master: str, now_ns: int, *jobs: str) -> None:
    """Run all jobs, or those named, in a separate process. Errors: RuntimeError if one could
    not run."""
    began = time.monotonic()
    command = [sys.executable, "-m", "scripts.cluster.one_run"]
    done = subprocess.run(
        [*command, str(home), str(out), master, str(now_ns), *jobs],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode not in (EXIT_OK, EXIT_FINDINGS):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the run with --master {master} failed: {last}")
    print(f"   {time.monotonic() - began:.1f} s")


@contextlib.contextmanager
def killing(cluster: Standalone) -> Iterator[None]:
    """During the block, kill one executor as soon as it runs our Python code.

    Errors: RuntimeError when none ever had.
    """
    killed: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for one in cluster.executors_at_work():
                with contextlib.suppress(psutil.Error):
                    one.kill()
                    killed.append(one.pid)
                    print(f"   executor pid {one.pid} killed", flush=True)
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if not killed:
        raise RuntimeError("no executor was seen at work")


def _folder(path: Path) -> Path:
    os.makedirs(path)
    return path


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
