"""A standalone Spark cluster on loopback: a master and workers, from the pip package.

Each is a process of its own with a port that the system chose; all of them and whatever they
started are ended when the block ends, by their pids. What they say goes to files in ``folder``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pyspark

from relay.audit.session import find_java

HOST = "127.0.0.1"
PATIENCE_S = 60
END_S = 10
PR_SET_PDEATHSIG = 1
# Daemons and executors: they live for seconds, several of them on a few cores.
JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
EXECUTOR = "CoarseGrainedExecutorBackend"
_URL = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED = "Successfully registered with master"


class Daemon:
    """A master or a worker in its own process."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._files: list[IO[bytes]] = [self._log.open("wb")]
        environ = {
            **os.environ,
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOG_DIR": str(folder),
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "256m",
            "JAVA_TOOL_OPTIONS": f"{JAVA_OPTIONS} {os.environ.get('JAVA_TOOL_OPTIONS', '')}",
            "PYSPARK_PYTHON": sys.executable,
        }
        java = find_java(str(folder))
        if java.home is not None:
            environ["JAVA_HOME"] = java.home
        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        self.process = subprocess.Popen(
            [str(spark_class), *arguments],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )

    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> str:
        """Wait for its ready message; returns the first group, or the whole match.

        Errors: RuntimeError with its last line when it ends, or does not say so in time.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.said())
            if found:
                return found[found.re.groups]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        last = (self.said().strip().splitlines() or ["nothing"])[-1]
        raise RuntimeError(f"{self.name} did not start: {last}")

    def executors(self) -> list[psutil.Process]:
        """Processes that it started for applications."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [one for one in children if any(EXECUTOR in word for word in _command(one))]

    def end(self) -> None:
        """End it and all that it started; idempotent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid)
            family = [mine, *mine.children(recursive=True)]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.terminate()
            for one in psutil.wait_procs(family, END_S)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait()
        for file in self._files:
            file.close()


class Standalone:
    """A master and its workers. ``url`` is what ``--master`` takes."""

    def __init__(self, url: str, workers: list[Daemon]) -> None:
        self.url = url
        self.workers = workers

    def executors_at_work(self) -> list[psutil.Process]:
        """Executors that run our Python code now."""
        found = [one for worker in self.workers for one in worker.executors()]
        return [one for one in found if _has_python(one)]


@contextlib.contextmanager
def standalone(
    folder: Path, workers: int = 2, cores: int = 1, memory: str = "1g"
) -> Iterator[Standalone]:
    """Run a cluster during the block. Errors: RuntimeError if a part does not start."""
    with contextlib.ExitStack() as stack:
        master = Daemon(
            folder, "master", MASTER, "--host", HOST, "--port", "0", "--webui-port", "0"
        )
        stack.callback(master.end)
        url = master.wait_for(_URL.pattern)
        started = []
        for number in range(1, workers + 1):
            size = ["--cores", str(cores), "--memory", memory]
            place = ["--work-dir", str(folder / f"work-{number}")]
            ports = ["--host", HOST, "--port", "0", "--webui-port", "0"]
            worker = Daemon(folder, f"worker-{number}", WORKER, *ports, *size, *place, url)
            stack.callback(worker.end)
            started.append(worker)
        for worker in started:
            worker.wait_for(_REGISTERED)
        yield Standalone(url, started)


def _end_with_parent() -> None:
    """Ask Linux to end a daemon when its parent process has ended in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _has_python(process: psutil.Process) -> bool:
    try:
        return any("pyspark" in word for c in process.children() for word in _command(c))
    except psutil.Error:
        return False
