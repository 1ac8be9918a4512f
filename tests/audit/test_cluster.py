"""Jobs on a real standalone cluster, and what a run sends there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from relay.audit import cluster
from relay.audit.extract import extract
from relay.audit.snapshot import snapshot_home
from relay.base.clock import Clock
from relay.base.errors import RelayError
from scripts.cluster.__main__ import killing
from scripts.cluster.compare import compare, tables
from scripts.cluster.one_run import StandingClock
from scripts.cluster.standalone import standalone
from scripts.history.__main__ import make_faulty
from scripts.history.faults import chosen
from scripts.history.make import Given
from tests.audit.class_archive import java_options
from tests.audit.second_engine import in_utc, says

COUNTS = "SELECT home, agent_name, count(*) FROM {} GROUP BY ALL ORDER BY ALL"
DRIVER = f"""
import sys
from relay.audit import tables
from relay.audit.session import SMALL, spark_session
from scripts.cluster import one_run
lake = sys.argv.pop(1)
spark = spark_session(sys.argv[3], SMALL)
one_run.main()
tables(spark, lake)
for row in spark.sql({COUNTS.format("ledger_messages")!r}).collect():
    print(*row)
"""


@pytest.mark.shows("audit 4.1")
def test_a_cluster_that_loses_an_executor_says_what_another_engine_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", java_options())
    now_ns = time.time_ns()
    home, out = tmp_path / "home", tmp_path / "out"
    make_faulty(home, Given(400, 5, 2, now_ns - 300 * 10**9), chosen("twice,doubled"))
    (tmp_path / "cluster").mkdir()
    lake = tmp_path / "shared"
    for name in ("web1", "web2", "web3"):  # as many homes, of which each has the same messages
        extract(str(home), str(lake), Clock(), name=name)
    with standalone(tmp_path / "cluster", workers=1) as made:
        pids = [worker.process.pid for worker in made.workers]
        asked = [str(lake), str(home), str(out), made.url, str(now_ns), "duplicates"]
        command = [sys.executable, "-c", DRIVER, *asked]
        with killing(made):
            done = subprocess.run(command, capture_output=True, text=True)
        _, *counted = done.stdout.splitlines()  # the summary is the first
    assert not any(psutil.pid_exists(pid) for pid in pids)
    said = says("duplicates", snapshot_home(str(home), str(tmp_path), StandingClock(now_ns)))
    rows = pq.read_table(out / "duplicates").to_pylist()
    assert sorted(map(repr, in_utc(rows))) == sorted(map(repr, said.tables["duplicates"]))
    found = pq.read_table(out / "findings").to_pylist()
    assert sorted((row["check"], row["message_id"]) for row in found) == sorted(
        (row["check"], row["message_id"]) for row in said.findings
    )
    assert len(found) >= 2
    files = f"read_parquet('{lake}/ledger_messages/*/*.parquet', hive_partitioning => true)"
    every = duckdb.sql(COUNTS.format(files)).fetchall()
    assert counted == [f"{name} {agent} {count}" for name, agent, count in every]
    assert len({name for name, *_ in every}) == 3


def write(folder: Path, **columns: list[int]) -> None:
    """A table of a run."""
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "part.parquet")


def test_tables_that_differ_are_told(tmp_path: Path) -> None:
    write(tmp_path / "one" / "reconcile", copies=[1])
    write(tmp_path / "two" / "reconcile", copies=[1, 1])
    write(tmp_path / "two" / "traffic", messages=[2])
    found = {one.table: one.differences for one in compare(tmp_path / "one", tmp_path / "two")}
    assert found == {"reconcile": ["1 rows and 2"], "traffic": ["0 rows and 1"]}
    assert tables(tmp_path / "one") != tables(tmp_path / "two")


def test_how_full_the_disk_was_is_no_difference(tmp_path: Path) -> None:
    for name, free, floor in (("one", 5, 1), ("two", 6, 1), ("three", 5, 2)):
        write(tmp_path / name / "capacity_forecast", free_bytes=[free], floor_bytes=[floor])
    (same,) = compare(tmp_path / "one", tmp_path / "two")
    (other,) = compare(tmp_path / "one", tmp_path / "three")
    assert same == ("capacity_forecast", 1, []) and other.differences == ["(1,) and (2,)"]


def test_the_package_that_is_sent_can_be_imported(tmp_path: Path) -> None:
    path = cluster.pack_relay(str(tmp_path / "p.zip"))
    code = (
        "import relay, relay.audit.formats, relay.ledger.schema as l;"
        "print(relay.__file__, len(l.schema_sql()) > 1000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [f"{path}/relay/__init__.py", "True"], done.stderr
    again = cluster.pack_relay(str(tmp_path / "q.zip"))
    assert Path(path).read_bytes() == Path(again).read_bytes()


@pytest.mark.shows("audit 4.2")
def test_a_folder_that_workers_do_not_reach_is_told(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone")
    cluster.require_shared(spark.sparkContext, [gone], [])  # local: they are this process's
    monkeypatch.setattr(cluster, "is_local", lambda master: False)
    cluster.require_shared(spark.sparkContext, [str(tmp_path)], [str(tmp_path)])
    with pytest.raises(RelayError, match=f"does not reach {gone}") as caught:
        cluster.require_shared(spark.sparkContext, [str(tmp_path), gone], [])
    assert "TMPDIR" in caught.value.hint


@pytest.mark.parametrize(
    ("master", "local", "loopback"),
    [
        ("local", True, True),
        ("local[2]", True, True),
        ("spark://127.0.0.1:7077", False, True),
        ("spark://head:7077", False, False),
        ("yarn", False, False),
        ("k8s://https://127.0.0.1:6443", False, False),
        ("local-cluster[2,1,1024]", False, False),
    ],
)
def test_masters(master: str, local: bool, loopback: bool) -> None:
    assert cluster.is_local(master) is local
    assert cluster.is_on_loopback(master) is loopback
