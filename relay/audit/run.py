"""One run of audits: freeze the files, start Spark, do each job, write what they found.

A job that cannot run does not keep the others from running, unless Spark itself has ended. Own
checks come last, one at a time, and the next one gets a new Spark where one has ended it. See
output.py for what is written, and when.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from functools import partial

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JError
from pyarrow import parquet
from pyarrow.dataset import dataset
from pyspark.sql import SparkSession

from relay.audit import cluster, jobs, own_checks, unused
from relay.audit.extract import extracted
from relay.audit.jobs import JOBS, AuditJob
from relay.audit.jobs.job import ASCENDING, FINDINGS, Plain, count_by, first_rows
from relay.audit.jobs.sql_files import ERROR, WARNING
from relay.audit.lake import Lake, LakeManifest
from relay.audit.lake_columns import FINDING
from relay.audit.lake_tables import Inputs
from relay.audit.output import OutFolder, out_folder
from relay.audit.session import (
    DEFAULT_MASTER,
    end_jvm,
    explained,
    has_ended,
    new_or_active,
    session,
    settings_for,
    stop,
)
from relay.audit.snapshot import DEFAULT_GRACE_S, DEFAULT_RECENT_DAYS, HomeSnapshot, snapshot_home
from relay.audit.spark_errors import OUT_OF_MEMORY
from relay.audit.summary import Examples, JobReport, Report
from relay.audit.temp_folders import private_folder
from relay.base.clock import Clock, iso_time
from relay.base.errors import FormatError, RelayError

SNAPSHOT = "taking a snapshot of ledger and store"
STARTING = "starting Spark"
WRITING = "writing the report"

INTEGRITY, DAYS = "integrity", "integrity_days"  # the job that knows damaged files, its days
SHOWN_FINDINGS = 20
SHOWN_FIELDS = ("severity", "check", "message_id", "agent", "route", "path")
AT_ONCE = 3  # jobs
OWN_LIMIT_S = 600  # for an own check
CANCEL_S = 10  # for a query to end; then its Spark is ended
DAMAGE_HINT = "put a copy from a backup in its place; without --strict the rest is read"


Writer = Callable[[str], None]  # into the folder of a run
Extraction = tuple[Lake, LakeManifest]


class ProgressListener:
    """Receives the steps of a run as they begin, and jobs as they end. This one ignores them."""

    def step_started(self, what: str) -> None:
        """Note that a step of the run begins: one of the texts above."""

    def job_started(self, name: str, of: int) -> None:
        """Note that a job begins, of so many; others may be running.

        Called in a thread of the job's own.
        """

    def job_finished(self, report: JobReport, examples: Examples) -> None:
        """Note that a job has its verdict."""

    def run_finished(self) -> None:
        """Note that the run has ended, whatever its outcome."""


class RunRequest(msgspec.Struct, frozen=True):
    """The parameters of a run."""

    home: str
    jobs: tuple[str, ...] = ()  # none: all
    out: str | None = None  # None: nothing is kept
    master: str = DEFAULT_MASTER
    grace_s: float = DEFAULT_GRACE_S
    recent_days: float = DEFAULT_RECENT_DAYS
    compare: str | None = None  # --out of an earlier run, for the hashes of its days
    full: bool = False  # read and judge again what a lake has
    strict: bool = False  # a job that reads a damaged file fails; else the rest is read
    lake: str | None = None  # None: in the folder of the run, and removed with it
    checks: str | None = None  # folder of own checks beside those of the home


def run_audit(
    request: RunRequest, clock: Clock, listener: ProgressListener | None = None
) -> tuple[Report, dict[str, Examples]]:
    """Run the requested jobs, or all; return the report and rows to print.

    A session that is active is used, and left running. Errors: RelayError for an unknown job,
    for a home without ledger or store, when Spark does not start, and when OUT cannot be
    written. Of a damaged file what can be read is, and the report names what is lost; when
    ``strict``, it is the error of the jobs that read it.
    """
    listener = listener or ProgressListener()
    wanted = _wanted(request)
    _require_comparable(request.compare, wanted)
    folder = private_folder("run")
    out = request.out if request.out is not None else os.path.join(folder, "out")
    home = os.path.abspath(request.home)
    try:
        with out_folder(os.path.abspath(out)) as written:
            listener.step_started(SNAPSHOT)
            snapshot = snapshot_home(home, folder, clock, request.grace_s, request.recent_days)
            run = _Run(request, snapshot, written, listener, wanted)
            plain, made = _plain(wanted, request, snapshot)
            run.do_plain(plain)
            rest = [job for job in wanted if job.name not in plain]
            if made is not None and rest:
                run.do_on_spark(rest, made)
            reports = {job.name: run.reports[job.name] for job in wanted}
            report = _report(snapshot, request, reports, made and made[1])
            if request.out is not None:
                listener.step_started(WRITING)
                written.publish(report)
    finally:
        listener.run_finished()
    return report, run.examples


def _plain(
    wanted: list[AuditJob], request: RunRequest, snapshot: HomeSnapshot
) -> tuple[dict[str, Writer], Extraction | None]:
    """The writers of tables that need no Spark; of an unused home these are all.

    With them the lake that has the rows of the snapshot, None where no job reads one, or it cannot
    be made: then the reason is the error of each job.
    """
    found: dict[str, Writer] = {
        job.name: partial(_write_plain, job, partial(job.plain, snapshot))
        for job in wanted
        if job.plain is not None
    }
    rest = [job for job in wanted if job.plain is None]
    if not rest:
        return found, None
    try:
        made = extracted(snapshot, request.lake, full=request.full)
        if request.compare is None and not any(job.source for job in rest):
            if tables := unused.tables_of(*made):
                found |= {job.name: partial(_write_plain, job, lambda: tables) for job in rest}
    except (RelayError, OSError) as exc:
        return found | dict.fromkeys([job.name for job in rest], partial(_fail, exc)), None
    return found, made


def _fail(error: Exception, out: str) -> None:
    raise error


class _Run:
    """A run of jobs, and what is known of each so far."""

    def __init__(
        self,
        request: RunRequest,
        snapshot: HomeSnapshot,
        out: OutFolder,
        listener: ProgressListener,
        wanted: list[AuditJob],
    ) -> None:
        self._request = request
        self._snapshot = snapshot
        self._out = out
        self._listener = listener
        self._wanted = wanted
        self.reports: dict[str, JobReport] = {}
        self.examples = {job.name: Examples() for job in wanted}

    def do_plain(self, writers: Mapping[str, Writer]) -> None:
        """Write the tables of these jobs, without Spark."""
        for job in (job for job in self._wanted if job.name in writers):
            self._finish(self._do(job, partial(writers[job.name], self._out.tables)))

    def do_on_spark(self, wanted: list[AuditJob], made: Extraction) -> None:
        """Run the jobs in a session."""
        self._listener.step_started(STARTING)
        snapshot, request = self._snapshot, self._request
        settings = settings_for(snapshot)
        with session(request.master, conf=settings) as spark:
            with explained():
                read = [snapshot.home, *_external_folders(snapshot)]
                cluster.require_shared(spark.sparkContext, read, [snapshot.folder, self._out.path])

            def inputs_of(spark: SparkSession) -> Inputs:
                return Inputs(
                    spark,
                    snapshot,
                    *made,
                    earlier=request.compare,
                    strict=request.strict,
                    results=self._out.tables,
                )

            def renewed(old: Inputs) -> Inputs:
                stop(old.spark)  # a query has broken it
                return inputs_of(new_or_active(request.master, settings))

            self._do_all(wanted, inputs_of(spark), renewed)

    def _do_all(
        self, wanted: list[AuditJob], inputs: Inputs, renewed: Callable[[Inputs], Inputs]
    ) -> None:
        """Run the jobs, some at once: while one is planned, on one core, another is computed.

        Own checks are last, since they may read what the others wrote, and one at a time: what
        ends Spark is then known. Verdicts are reported as they come.
        """
        cores = inputs.spark.sparkContext.defaultParallelism
        pool = ThreadPoolExecutor(min(AT_ONCE, 2 * cores - 1))  # one core runs one job
        try:
            built_in = [job for job in wanted if not job.source]
            for done in as_completed([pool.submit(self._judge, job, inputs) for job in built_in]):
                self._finish(done.result())
            is_lost = has_ended()
            with contextlib.suppress(Py4JError, OSError):  # of a Spark that has ended
                inputs.drop_views()
            for job in (job for job in wanted if job.source):
                try:
                    inputs = renewed(inputs) if is_lost else inputs
                except RelayError as exc:
                    self._finish(JobReport(job.name, error=str(exc), hint=exc.hint))
                    continue
                report = _within_limit(pool.submit(self._judge, job, inputs), job, inputs)
                is_lost = has_ended() or OUT_OF_MEMORY in (report.error or "")
                self._finish(report)
        finally:  # after an interrupt the caller ends Spark, and the jobs with it
            pool.shutdown(wait=False, cancel_futures=True)

    def _judge(self, job: AuditJob, inputs: Inputs) -> JobReport:
        if has_ended():
            return JobReport(job.name, error="Spark has ended in another job")
        report = self._do(job, partial(_compute, job, inputs, self._out.tables))
        report.is_partial = bool(job.reads_kept and inputs.lost and report.error is None)
        return report

    def _finish(self, report: JobReport) -> None:
        self.reports[report.name] = report
        self._listener.job_finished(report, self.examples[report.name])

    def _do(self, job: AuditJob, compute: Callable[[], None]) -> JobReport:
        """Compute the tables of a job; its report, in which an error is one line."""
        out = self._out.tables
        self._listener.job_started(job.name, len(self._wanted))
        report = _empty_report(job)
        began = time.monotonic()
        try:
            with explained():
                compute()
                _count(job, out, self.examples[job.name], report)
        except RelayError as exc:
            hint = DAMAGE_HINT if exc.hint == FormatError.hint else exc.hint
            report = _empty_report(job)
            report.error, report.hint = self._snapshot.original_paths(str(exc)), hint
        except OSError as exc:  # a full disk, or a file in place of a folder
            error = f"{exc.filename or 'system'}: {exc.strerror or exc}"
            report = _empty_report(job)
            report.error = self._snapshot.original_paths(error)
        if report.error:
            if job.source:
                report.error = f"{job.source}: {report.error}"
            for name in (*job.tables, _findings_of(job)):  # no half results
                shutil.rmtree(os.path.join(out, name), ignore_errors=True)
        report.seconds = round(time.monotonic() - began, 3)
        return report


def _wanted(request: RunRequest) -> list[AuditJob]:
    """Choose the jobs. Errors: RelayError for an unknown one."""
    names = tuple(name for name in request.jobs if not own_checks.is_own(name))
    wanted = jobs.select(names) if names or not request.jobs else []
    wanted += own_checks.select(os.path.abspath(request.home), request.checks, request.jobs)
    return wanted


def _require_comparable(folder: str | None, wanted: list[AuditJob]) -> None:
    """Check ``--compare`` before Spark starts. Errors: RelayError."""
    if folder is None:
        return
    if JOBS[INTEGRITY] not in wanted:
        raise RelayError(
            f"--compare needs the job {INTEGRITY}",
            hint=f"add {INTEGRITY} to {' '.join(job.name for job in wanted)}",
        )
    path = os.path.join(folder, DAYS)
    if not os.path.isdir(path):
        raise RelayError(
            f"there is no {path} to compare with",
            hint=f"--compare expects the --out folder of a run with the job {INTEGRITY}",
        )


def _external_folders(snapshot: HomeSnapshot) -> list[str]:
    """List folders that workers read beside the home: of the object store and of the key."""
    settings = snapshot.journal.settings
    folders = [settings.objects, os.path.dirname(settings.key_file)]
    return [folder for folder in folders if os.path.isdir(folder)]


def _within_limit(running: Future[JobReport], job: AuditJob, inputs: Inputs) -> JobReport:
    """Wait for an own check; cancel it after the limit, if need be by ending its Spark."""
    if not wait([running], OWN_LIMIT_S).not_done:
        return running.result()
    with contextlib.suppress(Py4JError, OSError):
        inputs.spark.sparkContext.cancelAllJobs()
    if wait([running], CANCEL_S).not_done:
        end_jvm()
    report = running.result()
    if report.error is not None:  # else it was done just then
        report.error = f"{job.source}: it was cancelled after {OWN_LIMIT_S} s"
        report.hint = "make it read less: name columns, and times in its WHERE"
    return report


def _empty_report(job: AuditJob) -> JobReport:
    """Make a report; that of an own check has what else only its file says."""
    if not job.source:
        return JobReport(job.name)
    header = job.header
    return JobReport(job.name, description=header.title, advice=header.value("advice"))


def _compute(job: AuditJob, inputs: Inputs, out: str) -> None:
    assert job.make is not None
    for name, frame in job.make(inputs).items():
        frame.write.mode("overwrite").parquet(os.path.join(out, name))
    if job.findings is None:
        return
    found, path = job.findings(inputs), os.path.join(out, _findings_of(job))
    if found is None:
        _write(path, FINDING.empty_table())
    else:
        found.write.mode("overwrite").parquet(path)


def _write_plain(job: AuditJob, make: Callable[[], Plain], out: str) -> None:
    """Write tables that were made without Spark."""
    made = make()
    tables = {os.path.join(out, name): made[name] for name in job.tables}
    if job.header.checks:
        tables[os.path.join(out, _findings_of(job))] = made[FINDINGS]
    for path, table in tables.items():
        _write(path, table)


def _write(path: str, table: pa.Table) -> None:
    """Write a table without Spark; times as Spark writes them, so that all readers see the same."""
    os.makedirs(path, mode=0o700)
    file = os.path.join(path, "part-0.parquet")
    parquet.write_table(table, file, use_deprecated_int96_timestamps=True)


def _count(job: AuditJob, out: str, examples: Examples, report: JobReport) -> None:
    tables = list(job.tables)
    report.tables = tables
    written = {name: dataset(os.path.join(out, name), format="parquet") for name in tables}
    report.counts = job.counts(written)
    if job.shown is not None:
        examples.rows = job.shown(written)
    path = os.path.join(out, _findings_of(job))
    if os.path.isdir(path):
        found = dataset(path, format="parquet")
        report.findings = count_by(found, "check")
        severities = count_by(found, "severity")
        report.errors, report.warnings = severities.get(ERROR, 0), severities.get(WARNING, 0)
        order = {"severity": ASCENDING, "check": ASCENDING, "message_id": ASCENDING}
        examples.findings = first_rows(found, order, SHOWN_FIELDS, SHOWN_FINDINGS)


def _findings_of(job: AuditJob) -> str:
    return os.path.join(FINDINGS, f"job={job.name}")


def _report(
    snapshot: HomeSnapshot,
    request: RunRequest,
    reports: dict[str, JobReport],
    made: LakeManifest | None,
) -> Report:
    # When strict it is the error of a job.
    lost = [] if made is None or request.strict else made.lost(snapshot.home)
    unread = [] if made is None else made.unread
    return Report(
        home=snapshot.home,
        snapshot_at=iso_time(snapshot.ledger.taken_ns),
        grace_s=request.grace_s,
        recent_days=request.recent_days,
        store_files=[
            os.path.relpath(snapshot.original_paths(path), snapshot.home)
            for path in snapshot.store_files
        ],
        jobs=reports,
        lost=[snapshot.original_paths(line) for line in lost],
        unread_bytes=sum(part.bytes for part in unread),
        unread_since=iso_time(min(part.at_ns for part in unread)) if unread else "",
    )
