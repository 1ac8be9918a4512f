"""What a run found, as summary.json keeps it: the verdict of each job, and of them all."""

from __future__ import annotations

from typing import Any

import msgspec

from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, EXIT_OK, RelayError

SUMMARY = "summary.json"


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
    tables: list[str] = []  # the folders that it wrote

    @property
    def verdict(self) -> str:
        """Whether anything is wrong, in one line."""
        return f"{self.name}: {self.outcome}"

    @property
    def outcome(self) -> str:
        """The same without the name."""
        if self.error is not None:
            return f"could not run: {self.error}"
        if not self.errors + self.warnings:
            told = ", ".join(counted(name, count) for name, count in self.counts.items())
            return f"OK ({told or 'nothing there'})"
        return describe_findings(self.errors, self.warnings)


class Report(msgspec.Struct):
    """What a run found: summary.json."""

    home: str
    snapshot_at: str  # ISO 8601, UTC: when the ledger's snapshot was taken
    grace_s: float
    recent_days: float  # what happened earlier is in the tables, and no finding
    store_files: list[str]
    jobs: dict[str, JobReport]
    permissive: bool = False  # damaged files were passed over: integrity names them
    findings: int = 0
    exit_code: int = EXIT_OK

    def __post_init__(self) -> None:
        """Total and exit code follow from the jobs."""
        self.findings = sum(job.errors + job.warnings for job in self.jobs.values())
        self.exit_code = EXIT_FINDINGS if self.findings else EXIT_OK
        if any(job.error is not None for job in self.jobs.values()):
            self.exit_code = EXIT_FAILED


class Examples(msgspec.Struct):
    """Rows to print beside a job's verdict; the whole tables are in OUT."""

    rows: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []


def to_json(report: Report) -> bytes:
    """The report as one line of JSON."""
    return msgspec.json.encode(report)


def from_json(data: bytes, path: str) -> Report:
    """The report that was written there. Errors: RelayError when it is none."""
    try:
        return msgspec.json.decode(data, type=Report)
    except msgspec.MsgspecError as exc:
        raise RelayError(
            f"{path} is no summary of an audit: {exc}", hint="`relay audit run --out` writes one"
        ) from exc


def describe_findings(errors: int, warnings: int) -> str:
    """``5 findings (3 errors, 2 warnings)``."""
    kinds = [(errors, "error"), (warnings, "warning")]
    by_severity = ", ".join(numbered(count, kind) for count, kind in kinds if count)
    return f"{numbered(errors + warnings, 'finding')} ({by_severity})"


def numbered(count: int, word: str) -> str:
    """``1 finding``, ``1,200 findings``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


_STEPS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """``1.5 MiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_STEPS) - 1:
        count, power = count / 1024, power + 1
    return f"{f'{count:,.1f}'.removesuffix('.0')} {_STEPS[power]}"


def is_byte_count(name: str) -> bool:
    """True for the name of a count or column of bytes: ``bytes_per_day``, ``free_bytes``."""
    return "bytes" in name.split("_")


def counted(name: str, count: int) -> str:
    """A count beside what it is of: ``delivered 1,200``, ``free 22.2 GiB``, ``1.5 MiB per day``."""
    if not is_byte_count(name):
        return f"{name} {count:,}"
    before, _, behind = name.partition("bytes")
    words = (before.strip("_").replace("_", " "), size(count), behind.strip("_").replace("_", " "))
    return " ".join(word for word in words if word)
