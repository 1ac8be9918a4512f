"""One run of audits: gather the files, start Spark, do each job, write what they found.

    OUT/{table}/*.parquet               a table of a job
    OUT/findings/job={job}/*.parquet    what is wrong, of all jobs: one table
    OUT/summary.json                    counts, findings a check, seconds

A job that cannot run does not keep the others from running. What stood in OUT of an earlier
run is replaced job by job; other files there are left alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relay import fsio
from relay.audit import faults, jobs
from relay.audit.evidence import DEFAULT_GRACE_S, Evidence, Gathered, gather
from relay.audit.jobs import Job
from relay.audit.session import DEFAULT_MASTER, private_folder, spark_session
from relay.clock import NS_PER_S, Clock, iso_time
from relay.errors import EXIT_FAILED, EXIT_FINDINGS, EXIT_OK, RelayError

FINDINGS = "findings"
SUMMARY = "summary.json"
SHOWN_FINDINGS = 20


class Request(msgspec.Struct, frozen=True):
    """What somebody asks for."""

    home: str
    jobs: tuple[str, ...] = ()  # none: all
    out: str | None = None  # None: nothing is kept
    master: str = DEFAULT_MASTER
    grace_s: float = DEFAULT_GRACE_S
    compare: str | None = None  # --out of an earlier run, for the hashes of its days


class JobReport(msgspec.Struct):
    """What became of one job."""

    name: str
    seconds: float = 0.0
    error: str | None = None  # why it could not run, one line
    hint: str = ""
    counts: dict[str, int] = {}
    findings: dict[str, int] = {}  # check -> how many
    errors: int = 0  # findings by severity
    warnings: int = 0

    @property
    def verdict(self) -> str:
        """Whether anything is wrong, in one line."""
        if self.error is not None:
            return f"{self.name}: could not run: {self.error}"
        found = self.errors + self.warnings
        if not found:
            counted = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
            return f"{self.name}: OK ({counted or 'nothing there'})"
        kinds = [(self.errors, "error"), (self.warnings, "warning")]
        by_severity = ", ".join(_numbered(count, kind) for count, kind in kinds if count)
        return f"{self.name}: {_numbered(found, 'finding')} ({by_severity})"


class Examples(msgspec.Struct):
    """Rows to print beside a job's verdict; the whole tables are in OUT."""

    rows: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []


class Report(msgspec.Struct):
    """What a run found: summary.json."""

    home: str
    snapshot_at: str  # ISO 8601, UTC: when the ledger's snapshot was taken
    grace_s: float
    store_files: list[str]
    jobs: dict[str, JobReport]
    findings: int
    exit_code: int


def run_audit(request: Request, clock: Clock) -> tuple[Report, dict[str, Examples]]:
    """Run the jobs asked for, all of them when none are named; the report and rows to print.

    A session that is active is used, and left running. Errors: RelayError for a job that there
    is none of, for a home without ledger or store, when Spark does not start, and when OUT
    cannot be written. A damaged file is the error of the jobs that read it.
    """
    wanted = jobs.select(request.jobs)
    folder = private_folder("run")
    gathered = gather(os.path.abspath(request.home), folder, clock, request.grace_s)
    out = _out_folder(request.out, folder)
    reports: dict[str, JobReport] = {}
    examples: dict[str, Examples] = {}
    with _session(request.master) as spark:
        evidence = Evidence(spark, gathered, shared=len(wanted) > 1, earlier=request.compare)
        for job in wanted:
            examples[job.name] = Examples()
            reports[job.name] = _run_job(spark, job, evidence, out, examples[job.name])
    report = _report(gathered, request, reports)
    if request.out is not None:
        fsio.write_atomic(os.path.join(out, SUMMARY), msgspec.json.format(to_json(report)))
    return report, examples


def to_json(report: Report) -> bytes:
    """The report as one line of JSON."""
    return msgspec.json.encode(report)


def _out_folder(out: str | None, folder: str) -> str:
    """Where tables go; made before Spark starts, so that it fails at once when it cannot be."""
    path = os.path.abspath(out) if out is not None else os.path.join(folder, "out")
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)  # it says who wrote to whom
    except OSError as exc:
        raise RelayError(f"{path} cannot be made: {exc.strerror}", hint="see --out") from exc
    return path


@contextlib.contextmanager
def _session(master: str) -> Iterator[SparkSession]:
    """A session for the run; one that was there before is left running."""
    was_there = SparkSession.getActiveSession() is not None
    spark = spark_session(master)
    try:
        yield spark
    finally:
        if not was_there:
            spark.stop()


def _run_job(
    spark: SparkSession, job: Job, evidence: Evidence, out: str, examples: Examples
) -> JobReport:
    report = JobReport(job.name)
    began = time.monotonic()
    try:
        with faults.explained():
            _do(spark, job, evidence, out, report, examples)
    except RelayError as exc:
        report.error = evidence.gathered.named(str(exc))
        report.hint = exc.hint
    report.seconds = round(time.monotonic() - began, 3)
    return report


def _do(
    spark: SparkSession,
    job: Job,
    evidence: Evidence,
    out: str,
    report: JobReport,
    examples: Examples,
) -> None:
    tables = {
        name: _written(spark, frame, os.path.join(out, name))
        for name, frame in job.make(evidence).items()
    }
    report.counts = {row["name"]: row["count"] for row in job.counts(tables).collect()}
    if job.shown is not None:
        examples.rows = [row.asDict() for row in job.shown(tables).collect()]
    if job.findings is None:
        return
    observed_at = datetime.fromtimestamp(evidence.snapshot_ns / NS_PER_S, UTC)
    path = os.path.join(out, FINDINGS, f"job={job.name}")
    found = _written(spark, job.findings(tables, observed_at), path)
    by_check = found.groupBy("check", "severity").agg(F.count("*").alias("count"))
    for row in by_check.orderBy("check").collect():
        report.findings[row["check"]] = row["count"]
        report.errors += row["count"] * (row["severity"] == "error")
        report.warnings += row["count"] * (row["severity"] == "warning")
    if report.findings:
        worst = found.orderBy("severity", "check", "message_id").limit(SHOWN_FINDINGS)
        examples.findings = [row.asDict() for row in worst.collect()]


def _numbered(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _written(spark: SparkSession, frame: DataFrame, path: str) -> DataFrame:
    """The frame as it was written: computed once, whatever is asked of it."""
    frame.write.mode("overwrite").parquet(path)
    return spark.read.schema(frame.schema).parquet(path)


def _report(gathered: Gathered, request: Request, reports: dict[str, JobReport]) -> Report:
    findings = sum(job.errors + job.warnings for job in reports.values())
    exit_code = EXIT_FINDINGS if findings else EXIT_OK
    if any(job.error is not None for job in reports.values()):
        exit_code = EXIT_FAILED
    return Report(
        home=gathered.home,
        snapshot_at=iso_time(gathered.ledger.taken_ns),
        grace_s=request.grace_s,
        store_files=[
            os.path.relpath(gathered.named(path), gathered.home) for path in gathered.store_files
        ],
        jobs=reports,
        findings=findings,
        exit_code=exit_code,
    )
