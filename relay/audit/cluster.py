"""Runs on a cluster: what the workers need beside a Spark of their own.

- Our package goes with the job, as a zip, so they have the version that plans it. What it imports
  (``pip install '.[audit]'`` in the source) must be installed there, under PYSPARK_PYTHON.
- Files are read in place: the home, the run's private folder (below TMPDIR) and ``--out``
  must be on a file system that driver and workers share. ``require_shared`` says which is not.

With a master ``local[…]`` none of this happens: its workers are this machine's.
"""

from __future__ import annotations

import os
import socket
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from pyspark import SparkContext

from relay.base.errors import RelayError

PACKAGE = "agent_relay.zip"
SHARED_HINT = (
    "home, TMPDIR and --out must be where the driver and every worker reach them under one "
    "path, as a user that may read them; see docs/cluster.md"
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # equal trees, equal zips


def is_local(master: str) -> bool:
    """Return True for a master whose workers are threads and children of this very process."""
    return master == "local" or master.startswith("local[")


def is_on_loopback(master: str) -> bool:
    """Return True when all of Spark is on this machine: nothing outside reaches the driver."""
    host = master.removeprefix("spark://").rpartition(":")[0]
    return is_local(master) or (master.startswith("spark://") and host in _LOOPBACK)


def pack_relay(path: str) -> str:
    """Write our package as a zip that Python imports from; return its path."""
    import relay

    package = Path(os.path.abspath(relay.__file__)).parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(package.rglob("*")):
            if file.suffix in (".py", ".sql"):
                name = file.relative_to(package.parent).as_posix()
                packed.writestr(zipfile.ZipInfo(name, _FIXED_TIME), file.read_bytes())
    return path


def require_shared(context: SparkContext, read: Sequence[str], written: Sequence[str]) -> None:
    """Check that the workers reach these folders before a job fails in one of them.

    ``written`` are read as well. Errors: RelayError that names a worker and a folder.
    """
    if is_local(context.master):
        return
    tasks = 2 * context.defaultParallelism
    wanted = [(path, os.R_OK | os.X_OK) for path in read]
    wanted += [(path, os.W_OK | os.X_OK) for path in written]

    def test(_: Iterable[int]) -> list[tuple[str, str]]:
        host = socket.gethostname()
        return [(host, path) for path, mode in wanted if not os.access(path, mode)]

    found = context.parallelize(range(tasks), tasks).mapPartitions(test).collect()
    if missing := sorted(set(found)):
        host, path = missing[0]
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RelayError(f"worker {host} does not reach {path}{others}", hint=SHARED_HINT)
