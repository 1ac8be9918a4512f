"""The report of a run, as summary.json has it, and numbers as text."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, EXIT_OK, RelayError
from relay.base.text import format_size

SUMMARY = "summary.json"
REPORT = "report.html"  # beside it


class JobReport(msgspec.Struct):
    """The outcome of one job."""

    name: str
    seconds: float = 0.0
    error: str | None = None  # the reason why it could not run, one line
    hint: str = ""
    counts: dict[str, int] = {}
    findings: dict[str, int] = {}  # check -> how many
    errors: int = 0  # findings by severity
    warnings: int = 0
    tables: list[str] = []  # the folders that it wrote
    is_partial: bool = False  # what it reads was not read whole
    description: str = ""  # of an own check, and so is the advice
    advice: str = ""

    @property
    def verdict(self) -> str:
        """Name and outcome in one line."""
        return f"{self.name}: {self.outcome}"

    @property
    def outcome(self) -> str:
        """The outcome in one line."""
        if self.error is not None:
            return f"could not run: {self.error}"
        if not self.errors + self.warnings:
            counts = ", ".join(format_count(name, count) for name, count in self.counts.items())
            return f"{'not all read' if self.is_partial else 'OK'} ({counts or 'no data'})"
        return describe_findings(self.errors, self.warnings)


class Report(msgspec.Struct):
    """The outcome of a run: summary.json."""

    home: str
    snapshot_at: str  # ISO 8601, UTC: when the ledger's snapshot was taken
    grace_s: float
    recent_days: float  # earlier events are in the tables, not findings
    store_files: list[str]
    jobs: dict[str, JobReport]
    lost: list[str] = []  # what of store and journal could not be read, a line each
    unread_bytes: int = 0  # of files that the lake has, and this run did not read again
    unread_since: str = ""  # when the first of them was read; empty: all was read
    findings: int = 0
    exit_code: int = EXIT_OK

    def __post_init__(self) -> None:
        """Derive total and exit code from the jobs."""
        self.findings = sum(job.errors + job.warnings for job in self.jobs.values())
        self.exit_code = EXIT_FINDINGS if self.findings else EXIT_OK
        if self.lost or any(job.error is not None for job in self.jobs.values()):
            self.exit_code = EXIT_FAILED


class Examples(msgspec.Struct):
    """Rows to print beside a job's verdict; the whole tables are in OUT."""

    rows: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []


def to_json(report: Report) -> bytes:
    """Encode the report as one line of JSON."""
    return msgspec.json.encode(report)


def read_summary(path: str) -> Report:
    """Read the summary of the run in a folder. Errors: RelayError without a valid one."""
    name = os.path.join(path, SUMMARY)
    try:
        with open(name, "rb") as file:
            return msgspec.json.decode(file.read(), type=Report)
    except msgspec.MsgspecError as exc:
        raise RelayError(
            f"{name} is not a valid summary of an audit: {exc}",
            hint="`relay audit run --out` writes one",
        ) from exc
    except OSError as exc:
        raise RelayError(
            f"{name} cannot be read: {exc.strerror}",
            hint="`relay audit run --out` writes it when all jobs are done",
        ) from exc


def unread_text(report: Report) -> str:
    """Say how much was not read again; empty when all was read."""
    if not report.unread_since:
        return ""
    since = report.unread_since.partition(".")[0].replace("T", " ")
    return f"{format_size(report.unread_bytes)} not read again, some since {since}"


def describe_findings(errors: int, warnings: int) -> str:
    """Format a total: ``5 findings (3 errors, 2 warnings)``."""
    kinds = [(errors, "error"), (warnings, "warning")]
    by_severity = ", ".join(with_noun(count, kind) for count, kind in kinds if count)
    return f"{with_noun(errors + warnings, 'finding')} ({by_severity})"


def with_noun(count: int, word: str) -> str:
    """Format a number with its noun: ``1 finding``, ``1,200 findings``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def is_byte_count(name: str) -> bool:
    """Return True for the name of a count of bytes: ``bytes_per_day``, ``free_bytes``."""
    return "bytes" in name.split("_")


def format_count(name: str, count: int) -> str:
    """Format a count with its name: ``delivered 1,200``, ``free 22.2 GiB``, ``1.5 MiB per day``."""
    if not is_byte_count(name):
        return f"{name} {count:,}"
    before, _, behind = name.partition("bytes")
    words = (
        before.strip("_").replace("_", " "),
        format_size(count),
        behind.strip("_").replace("_", " "),
    )
    return " ".join(word for word in words if word)
