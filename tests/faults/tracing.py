"""System calls of a real relay that fail, or end it: strace injects the error or the signal.

    with Tracing(tmp_path, ["outbox"], "openat:error=EIO") as tracing:
        relay.start(*tracing.command)       every opening of that name fails from the start
    with Tracing(...).attached(pid): ...    the same, of a relay that runs

A path is matched as the call names it ("outbox"), or by what a descriptor stands for (absolute).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.procs import PATIENCE_S, until

ENDED = ("+++ exited with", "+++ killed by")


def need_strace() -> None:
    """Skip where there is no strace, or it may trace nobody; in CI that is a failure."""
    why = ""
    if shutil.which("strace") is None:
        why = "no strace on PATH: .ci/run installs it"
    elif subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode:
        why = "strace may trace nobody here: ptrace is not permitted"
    if why and os.environ.get("CI"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


class Tracing:
    """One strace: what it injects where, and what it saw."""

    def __init__(self, folder: Path, paths: Sequence[str | Path], *injections: str) -> None:
        self._file = folder / f"trace-{len(list(folder.glob('trace-*')))}"
        self._file.touch()
        options = ["-f", "-q", "-o", str(self._file)]
        for path in paths:
            options += ["-P", str(path)]
            if not os.path.isabs(path):  # by one call from the home, or from its parent
                options += ["-P", f"agents/{path}"]
                for agent in ("alice", "bob"):
                    options += ["-P", f"agents/{agent}/{path}"]
        for one in injections:  # the relay opens directories by openat2, where the kernel has it
            options += ["-e", f"inject={one.replace('openat:', 'openat,openat2:')}"]
        self._options = options

    @property
    def command(self) -> list[str]:
        """What a process is started under; it keeps its own pid, and is nobody else's child."""
        return ["strace", "-D", *self._options, "--"]

    @contextlib.contextmanager
    def attached(self, pid: int) -> Iterator[None]:
        """Trace a process that runs, and all its threads, as long as the block lasts."""
        options = [one for one in self._options if one != "-q"]
        command = ["strace", *options, "-p", str(pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert tracer.stderr is not None
        try:
            assert b"attached" in tracer.stderr.readline()
            yield
        finally:
            tracer.terminate()
            tracer.wait(PATIENCE_S)
            tracer.stderr.close()

    def text(self) -> str:
        """What was seen so far."""
        return self._file.read_text(errors="replace")

    def lines(self) -> list[str]:
        """The calls that were seen, once the process has ended."""
        until(self._is_whole, "the end of the trace")
        return self.text().splitlines()

    def _is_whole(self) -> bool:
        """Every thread of which something was seen has ended."""
        lines = self.text().splitlines()
        ended = {line.split()[0] for line in lines if any(word in line for word in ENDED)}
        return bool(ended) and {line.split()[0] for line in lines} <= ended

    def injected(self) -> list[str]:
        """Those that failed as was asked."""
        return [line for line in self.lines() if "(INJECTED)" in line]
