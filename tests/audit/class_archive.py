"""``python -m tests.audit.class_archive``: keep Spark's classes as a JVM has them in memory.

A JVM that maps this file does not read and link 20,000 classes of Spark's jars again: a third of
its start. ``scripts/test`` makes it once for a virtual environment, since it takes as long as
several starts; without it, or with another Java, a JVM starts as usual.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pyspark

from relay.audit import session
from relay.audit.run import RunRequest, run_audit
from relay.base.clock import NS_PER_S, Clock
from scripts.history.make import Given, History

NOT_VERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
PATIENCE_S = 300  # for a JVM to write it when it exits
MESSAGES = 20  # a home without any is judged without Spark


def archive_path() -> Path:
    """Return its path, which names the Java, the Spark and the place of its jars."""
    java = shutil.which("java", path=os.path.join(os.environ.get("JAVA_HOME", ""), "bin"))
    java = java or shutil.which("java") or "none"
    changed_ns = os.stat(java).st_mtime_ns if java != "none" else 0
    given = f"{os.path.realpath(java)} {changed_ns} {pyspark.__file__} {pyspark.__version__}"
    return Path(sys.prefix) / f"spark-{hashlib.sha256(given.encode()).hexdigest()[:16]}.jsa"


def java_options() -> str:
    """Return the options of a JVM that a test starts: map the file, if there is one.

    None verifies the classes of Spark's own jars, a fifth of a start without the file.
    """
    path = archive_path()
    if not path.exists() or not path.stat().st_size:
        return NOT_VERIFIED
    return f'{NOT_VERIFIED} "-XX:SharedArchiveFile={path}" -Xshare:auto -Xlog:cds=off'


def make() -> None:
    """Write the file with the classes of one audit; empty, where this Java cannot."""
    with tempfile.TemporaryDirectory() as folder:
        made, home = Path(folder) / "classes.jsa", Path(folder) / "home"
        os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={made}"
        session.END_TIMEOUT_S = PATIENCE_S
        now_ns = Clock().now_ns()
        History(str(home), Given(MESSAGES, 3, 1.0, now_ns - 60 * NS_PER_S)).make()
        run_audit(RunRequest(str(home), ("reconcile",), master="local[1]"), Clock())
        made.touch()
        part = archive_path().with_suffix(".part")
        shutil.move(made, part)
        part.rename(archive_path())


if __name__ == "__main__" and not archive_path().exists():
    make()
