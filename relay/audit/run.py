"""One run of audits: freeze the files, start Spark, do each job, write what they found.

A job that cannot run does not keep the others from running, unless Spark itself has ended. What
is written, and when, says output.py.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relay.audit import cluster, jobs
from relay.audit.inputs import Inputs
from relay.audit.jobs import AuditJob, integrity
from relay.audit.output import FINDINGS, OutFolder, out_folder
from relay.audit.session import DEFAULT_MASTER, explained, has_ended, session, settings_for
from relay.audit.snapshot import DEFAULT_GRACE_S, DEFAULT_RECENT_DAYS, HomeSnapshot, snapshot_home
from relay.audit.summary import Examples, JobReport, Report, to_json
from relay.audit.temp_folders import private_folder
from relay.base.clock import NS_PER_S, Clock, iso_time
from relay.base.errors import FormatError, RelayError

__all__ = ["Examples", "JobReport", "Report", "RunRequest", "run_audit", "to_json"]

SNAPSHOT = "taking a snapshot of ledger and store"
STARTING = "starting Spark"
WRITING = "writing the report"

SHOWN_FINDINGS = 20
AT_ONCE = 3  # jobs
DAMAGE_HINT = "put a copy from a backup in its place, or read the rest with --permissive"


class ProgressListener:
    """Is told of each step as it begins, and of each job as it ends. This one says nothing."""

    def step(self, what: str) -> None:
        """A step of the run begins: one of the sentences above."""

    def begins(self, name: str, of: int) -> None:
        """The job of this name begins, of so many; another one may be underway.

        Called in a thread of the job's own.
        """

    def ended(self, report: JobReport, examples: Examples) -> None:
        """A job has its verdict."""

    def finished(self) -> None:
        """The run is over, whatever became of it."""


class RunRequest(msgspec.Struct, frozen=True):
    """What somebody asks for."""

    home: str
    jobs: tuple[str, ...] = ()  # none: all
    out: str | None = None  # None: nothing is kept
    master: str = DEFAULT_MASTER
    grace_s: float = DEFAULT_GRACE_S
    recent_days: float = DEFAULT_RECENT_DAYS
    compare: str | None = None  # --out of an earlier run, for the hashes of its days
    permissive: bool = False  # damaged files are passed over, and found by integrity


def run_audit(
    request: RunRequest, clock: Clock, watcher: ProgressListener | None = None
) -> tuple[Report, dict[str, Examples]]:
    """Run the jobs asked for, all of them when none are named; the report and rows to print.

    A session that is active is used, and left running. Errors: RelayError for a job that there
    is none of, for a home without ledger or store, when Spark does not start, and when OUT
    cannot be written. A damaged file is the error of the jobs that read it.
    """
    watcher = watcher or ProgressListener()
    wanted = _wanted(request)
    _require_comparable(request.compare, wanted)
    folder = private_folder("run")
    out = request.out if request.out is not None else os.path.join(folder, "out")
    home = os.path.abspath(request.home)
    try:
        with out_folder(os.path.abspath(out)) as written:
            watcher.step(SNAPSHOT)
            gathered = snapshot_home(home, folder, clock, request.grace_s, request.recent_days)
            watcher.step(STARTING)
            with session(request.master, conf=settings_for(gathered.size)) as spark:
                with explained():
                    read = [home, *_external_folders(gathered)]
                    cluster.require_shared(spark.sparkContext, read, [folder, written.path])
                inputs = Inputs(
                    spark,
                    gathered,
                    shared=len(wanted) > 1,
                    earlier=request.compare,
                    permissive=request.permissive,
                )
                reports, examples = _run_jobs(spark, wanted, inputs, written, watcher)
            report = _report(gathered, request, reports)
            if request.out is not None:
                watcher.step(WRITING)
                written.publish(report)
    finally:
        watcher.finished()
    return report, examples


def _wanted(request: RunRequest) -> list[AuditJob]:
    """The jobs asked for; what is passed over must be found by one. Errors: RelayError."""
    wanted = jobs.select(request.jobs)
    if request.permissive and integrity.JOB not in wanted:
        wanted.append(integrity.JOB)
    return wanted


def _require_comparable(folder: str | None, wanted: list[AuditJob]) -> None:
    """Said before Spark starts. Errors: RelayError when there is nothing to compare with."""
    if folder is None:
        return
    if integrity.JOB not in wanted:
        raise RelayError(
            f"none of the jobs {', '.join(job.name for job in wanted)} compares anything",
            hint=f"--compare belongs to the job {integrity.NAME}",
        )
    path = os.path.join(folder, integrity.DAYS)
    if not os.path.isdir(path):
        raise RelayError(
            f"there is no {path} to compare with",
            hint=f"--compare takes what --out was of a run with the job {integrity.NAME}",
        )


def _external_folders(gathered: HomeSnapshot) -> list[str]:
    """Folders that workers read beside the home: the journal's object store, the key's."""
    journal = gathered.journal
    folders = [journal.objects, os.path.dirname(journal.key_file)]
    return [folder for folder in folders if os.path.isdir(folder)]


def _run_jobs(
    spark: SparkSession,
    wanted: list[AuditJob],
    inputs: Inputs,
    out: OutFolder,
    watcher: ProgressListener,
) -> tuple[dict[str, JobReport], dict[str, Examples]]:
    """Do each job, some at once: while one is planned, which one core does, another is computed.

    Verdicts are told as they come, and returned in the order of ``wanted``.
    """
    examples = {job.name: Examples() for job in wanted}
    reports: dict[str, JobReport] = {}

    def run(job: AuditJob) -> JobReport:
        if has_ended():
            return JobReport(job.name, error="Spark has ended in another job")
        watcher.begins(job.name, len(wanted))
        return _run_job(spark, job, inputs, out.tables, examples[job.name])

    cores = spark.sparkContext.defaultParallelism
    pool = ThreadPoolExecutor(min(AT_ONCE, 2 * cores - 1))  # one core has nothing to spare
    try:
        for done in as_completed([pool.submit(run, job) for job in wanted]):
            report = done.result()
            reports[report.name] = report
            watcher.ended(report, examples[report.name])
    finally:  # of an interrupt: the caller ends Spark, and with it what is still computed
        pool.shutdown(wait=False, cancel_futures=True)
    return {name: reports[name] for name in examples}, examples


def _run_job(
    spark: SparkSession, job: AuditJob, inputs: Inputs, out: str, examples: Examples
) -> JobReport:
    report = JobReport(job.name)
    began = time.monotonic()
    try:
        with explained():
            _do(spark, job, inputs, out, report, examples)
    except RelayError as exc:
        hint = DAMAGE_HINT if exc.hint == FormatError.hint else exc.hint
        report = JobReport(job.name, error=inputs.snapshot.original_paths(str(exc)), hint=hint)
    except OSError as exc:  # a disk that is full, a folder that is none
        error = f"{exc.filename or 'system'}: {exc.strerror or exc}"
        report = JobReport(job.name, error=inputs.snapshot.original_paths(error))
    if report.error:
        for name in (*job.tables, _findings_of(job)):  # half of a job is none
            shutil.rmtree(os.path.join(out, name), ignore_errors=True)
    report.seconds = round(time.monotonic() - began, 3)
    return report


def _do(
    spark: SparkSession,
    job: AuditJob,
    inputs: Inputs,
    out: str,
    report: JobReport,
    examples: Examples,
) -> None:
    tables = {
        name: _written(spark, frame, os.path.join(out, name))
        for name, frame in job.make(inputs).items()
    }
    report.tables = list(tables)
    report.counts = {row["name"]: row["count"] for row in job.counts(tables).collect()}
    if job.shown is not None:
        examples.rows = [row.asDict() for row in job.shown(tables).collect()]
    if job.findings is None:
        return
    observed_at = datetime.fromtimestamp(inputs.snapshot_ns / NS_PER_S, UTC)
    path = os.path.join(out, _findings_of(job))
    found = _written(spark, job.findings(tables, observed_at), path)
    by_check = found.groupBy("check", "severity").agg(F.count("*").alias("count"))
    for row in by_check.orderBy("check").collect():
        report.findings[row["check"]] = report.findings.get(row["check"], 0) + row["count"]
        report.errors += row["count"] * (row["severity"] == "error")
        report.warnings += row["count"] * (row["severity"] == "warning")
    if report.findings:
        worst = found.orderBy("severity", "check", "message_id").limit(SHOWN_FINDINGS)
        examples.findings = [row.asDict() for row in worst.collect()]


def _findings_of(job: AuditJob) -> str:
    return os.path.join(FINDINGS, f"job={job.name}")


def _written(spark: SparkSession, frame: DataFrame, path: str) -> DataFrame:
    """The frame as it was written: computed once, whatever is asked of it."""
    frame.write.mode("overwrite").parquet(path)
    return spark.read.schema(frame.schema).parquet(path)


def _report(gathered: HomeSnapshot, request: RunRequest, reports: dict[str, JobReport]) -> Report:
    return Report(
        home=gathered.home,
        snapshot_at=iso_time(gathered.ledger.taken_ns),
        grace_s=request.grace_s,
        recent_days=request.recent_days,
        permissive=request.permissive,
        store_files=[
            os.path.relpath(gathered.original_paths(path), gathered.home)
            for path in gathered.store_files
        ],
        jobs=reports,
    )
