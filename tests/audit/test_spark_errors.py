"""What Spark says when it fails, and what a person reads of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import psutil
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from relay.audit import run, spark_errors
from relay.audit.session import explained
from relay.base.names import new_message_id
from tests.audit.home_builder import START_NS, HomeBuilder
from tests.audit.printed import relay_audit as relay_audit_here
from tests.audit.test_session import PATIENCE_S, relay_audit
from tests.procs import environment, until

pytestmark = pytest.mark.shows("audit 3.6")

MEMORY = "Spark cannot start with SPARK_DRIVER_MEMORY=2g"
LISTEN = "Spark cannot listen on its address or port"
# As Java and Spark 4.3 say it, cut.
CAUSES = {
    "memory": (
        "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 "
        "failed 1 times, most recent failure: Lost task 0.0 in stage 0.0 (TID 0) (localhost "
        "executor driver): java.lang.OutOfMemoryError: Java heap space",
        "Spark ran out of memory: SPARK_DRIVER_MEMORY is 2g",
        "SPARK_DRIVER_MEMORY=8g",
    ),
    "more than there is": (
        "Error occurred during initialization of VM\nCould not reserve enough space for heap",
        MEMORY,
        "512m",
    ),
    "no size": (
        "Invalid maximum heap size: -Xmxlots\nError: Could not create the Java Virtual Machine.\n"
        "Error: A fatal exception has occurred. Program will exit.",
        MEMORY,
        "512m",
    ),
    "less than Spark wants": (
        "26/11/25 23:37:46 ERROR SparkContext: Error initializing SparkContext.\n"
        "org.apache.spark.SparkIllegalArgumentException: [INVALID_DRIVER_MEMORY.SYSTEM_MEMORY] "
        "Insufficient driver memory: System memory 59768832 must be at least 471859200.\nPlease "
        'increase heap size using the --driver-memory option or "spark.driver.memory" in Spark '
        "configuration. SQLSTATE: F0000",
        MEMORY,
        "512m",
    ),
    "port": (
        "26/11/25 23:37:57 ERROR SparkContext: Error initializing SparkContext.\n"
        "java.net.BindException: bind(..) failed with error(-98): Address already in use: Service "
        "'sparkDriver' failed after 0 retries (starting from 45671)!",
        LISTEN,
        "spark.driver.port",
    ),
    "address": (
        "26/11/25 23:37:52 WARN Utils: Service 'sparkDriver' could not bind on a random free port. "
        "You may check whether configuring an appropriate binding address.\n"
        "java.net.BindException: bind(..) failed with error(-99): Cannot assign requested address: "
        "Service 'sparkDriver' failed after 16 retries (on a random free port)!",
        LISTEN,
        "unset SPARK_LOCAL_IP",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_recognised_cause_is_one_line_with_what_to_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_DRIVER_MEMORY", "2g")
    said, message, hint = CAUSES[name]
    cause = spark_errors.known_cause(said)
    assert cause is not None and str(cause) == message
    assert hint in cause.hint
    assert str(spark_errors.explain(RuntimeError(said))) == message


def test_any_other_error_keeps_the_words_of_spark() -> None:
    said = "[TABLE_OR_VIEW_NOT_FOUND] The table or view `x` cannot be found. SQLSTATE: 42P01"
    assert spark_errors.known_cause(said) is None
    error = spark_errors.explain(RuntimeError(said))
    assert str(error) == "Spark: The table or view `x` cannot be found."
    ended = spark_errors.explain(Py4JNetworkError("Answer from Java side is empty"))
    assert isinstance(ended, spark_errors.SparkEnded)
    assert str(ended) == "Spark's Java process has ended"


class OfAJvmThatIsGone(PySparkException):
    """PySpark asks the JVM for what its errors say."""

    def __str__(self) -> str:
        raise ConnectionRefusedError(111, "Connection refused")


def test_an_error_whose_jvm_went_meanwhile_says_that_it_went() -> None:
    with pytest.raises(spark_errors.SparkEnded), explained():
        raise OfAJvmThatIsGone("unread")


def test_what_spark_calls_its_own_bug_is_looked_up_in_what_its_jvm_said() -> None:
    told = spark_errors.explain(
        RuntimeError("[INTERNAL_ERROR] Executed command failed. You hit a bug")
    )
    assert isinstance(told, spark_errors.SparkInternalError)
    assert str(told) == "Spark: Executed command failed. You hit a bug"


def test_an_answer_that_makes_no_sense_is_looked_up_there_too() -> None:
    """Seen of a JVM that was out of memory: it forgot a package of its own."""
    told = spark_errors.explain(Py4JError("py4j.reflection does not exist in the JVM"))
    assert isinstance(told, spark_errors.SparkInternalError)


def failing(home: HomeBuilder, cwd: Path, *arguments: str, **environ: str) -> str:
    """The one line of a run that cannot start; it prints no result, and leaves no OUT."""
    out = cwd / "out"
    home.sent("1-a")  # no home without messages starts Spark
    done = relay_audit(
        *("run", "acks", "--home", home.path, "--out", str(out), *arguments), cwd=cwd, **environ
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert not out.exists()
    (line,) = done.stderr.splitlines()
    return line


def test_a_start_that_fails_for_a_recognised_cause_is_one_line(
    home: HomeBuilder, tmp_path: Path
) -> None:
    line = failing(home, tmp_path, SPARK_DRIVER_MEMORY="lots")
    assert line.startswith("relay: Spark cannot start with SPARK_DRIVER_MEMORY=lots; ")


def test_a_start_that_fails_for_another_reason_names_the_log(
    home: HomeBuilder, tmp_path: Path
) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    line = failing(home, tmp_path, "--master", "locl[2]", TMPDIR=str(temp))
    assert line.startswith("relay: Spark does not start: Java gateway process exited")
    (log,) = temp.iterdir()
    assert line.endswith(f"; the log of Spark is {log}")
    assert log.stat().st_mode & 0o777 == 0o600
    assert "locl[2]" in log.read_text() or "Master must" in log.read_text()


def test_a_job_whose_spark_was_ended_by_another_says_so(
    spark: SparkSession, home: HomeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.sent("1-a")
    home.write_store()
    monkeypatch.setattr(run, "has_ended", lambda: True)
    done = relay_audit_here("run", "traffic", home=home.path)
    assert done.exit_code == 1
    assert done.stderr == "traffic: could not run: Spark has ended in another job\n"


FULL = """
import resource, sys
from relay.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (160_000, 160_000))
main(["audit", "run", "reconcile", *sys.argv[1:]])
"""


def test_a_table_that_finds_no_room_is_named_and_nothing_is_left(
    home: HomeBuilder, tmp_path: Path
) -> None:
    """No file may be longer: the ledger's 94 KB fit, 256 KB of checksums do not."""
    home.sent("1-a")
    home.write_store()
    for number in range(4_000):
        name = new_message_id(START_NS + number)
        (home.root / "archive/2026-01-31/alice" / f"{name}.msg").write_text(f"TO: bob\n\n{number}")
    temp, out = tmp_path / "temp", tmp_path / "out"
    temp.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FULL, "--home", home.path, "--out", str(out)],
        env=environment(TMPDIR=str(temp)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"reconcile: could not run: {temp}/relay-audit-run-\w+/lake/originals/home=\w+/\S+ "
        "cannot be written: File too large; "
        "free space there, or name a folder on a larger disk: --lake, or TMPDIR without it\n",
        done.stderr,
    )
    assert os.listdir(temp) == []
    assert sorted(os.listdir(out)) == [".lock", "report.html", "summary.json"]


@pytest.mark.shows("audit 3.7")
@pytest.mark.parametrize(
    ("after", "sent", "code"),
    [("starting Spark", signal.SIGINT, 130), (r"\(1 of 1\)", signal.SIGHUP, 129)],
)
def test_a_run_that_is_interrupted_says_one_line_and_leaves_nothing(
    home: HomeBuilder, tmp_path: Path, after: str, sent: signal.Signals, code: int
) -> None:
    home.sent("1-a")
    home.write_store()
    temp = tmp_path / "temp"
    temp.mkdir()
    out = tmp_path / "out"
    command = ["-m", "relay", "audit", "run", "traffic"]
    command += ["--home", home.path, "--out", str(out), "--master", "local[1]"]
    with pexpect.spawn(
        sys.executable,
        command,
        env=environment(TMPDIR=str(temp)),
        encoding="utf-8",
        codec_errors="replace",
        timeout=PATIENCE_S,
        dimensions=(30, 160),
    ) as run:
        run.expect(after)
        here = psutil.Process(run.pid)
        until(lambda: bool(here.children()))  # the JVM
        started = here.children(recursive=True)
        if sent == signal.SIGINT:
            run.sendintr()  # the terminal tells the whole group, the JVM as well
        else:
            run.kill(sent)
        run.expect(pexpect.EOF)
        shown = run.before
    assert run.exitstatus == code
    assert "Traceback" not in shown
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).strip().rpartition("\r")[2].strip()
    assert last == f"relay: the audit was interrupted; {out} is unchanged"
    until(lambda: not any(process.is_running() for process in started))
    assert not out.exists()
    assert os.listdir(temp) == []
