"""A run's folder as `relay audit run --out` writes it, without Spark: every table a chart reads."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relay.audit.summary import JobReport, Report

AT = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
HOSTILE = "</script><script>alert(1)</script>"
QUOTES = "\"><img src='http://example.org/x.png' onerror=alert(2)>&amp;"
AGENTS = ("lead", "builder", "reviewer", "tester", "$a$b", HOSTILE, QUOTES)


def write_table(
    folder: Path, name: str, rows: list[dict[str, Any]], schema: pa.Schema | None = None
) -> None:
    """One table, as a folder with one file."""
    (folder / name).mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / name / "part-0.parquet")


def finding(check: str, severity: str, number: int, **detail: str) -> dict[str, Any]:
    """A row of findings."""
    return {
        "check": check,
        "severity": severity,
        "message_id": f"17698518000000{number:05}-a1b2c3d4",
        "agent": AGENTS[number % len(AGENTS)],
        "route": AGENTS[(number + 1) % len(AGENTS)],
        "path": None,
        "observed_at": AT,
        "detail": list(detail.items()),
    }


FINDING = pa.schema(
    [
        ("check", pa.string()),
        ("severity", pa.string()),
        ("message_id", pa.string()),
        ("agent", pa.string()),
        ("route", pa.string()),
        ("path", pa.string()),
        ("observed_at", pa.timestamp("us", tz="UTC")),
        ("detail", pa.map_(pa.string(), pa.string())),
    ]
)


def latency_rows(hours: int) -> list[dict[str, Any]]:
    """Percentiles of four stages, with a slow hour among them."""
    rows = []
    for stage, base in (("staged", 2.0), ("written", 6.0), ("read", 4_000.0), ("acked", 60_000.0)):
        for hour in range(hours):
            wave = base * (1.2 + math.sin(hour / 3.8)) * (40 if hour == hours * 2 // 3 else 1)
            rows.append(
                {
                    "stage": stage,
                    "hour": AT.replace(minute=0) - timedelta(hours=hours - hour),
                    "messages": 10 + hour,
                    "p50_ms": wave,
                    "p90_ms": wave * 2.5,
                    "p99_ms": wave * 9,
                    "max_ms": wave * 20,
                }
            )
    return rows


def traffic_rows() -> list[dict[str, Any]]:
    """Who talks to whom."""
    rows = []
    for x, sender in enumerate(AGENTS):
        for y, recipient in enumerate(AGENTS):
            if x == y or (x * y) % 5 == 4:
                continue
            count = 3 ** ((x * 3 + y * 5) % 8)
            rows.append(
                {
                    "sender": sender,
                    "recipient": recipient,
                    "messages": count,
                    "bytes": count * 812,
                    "p50_ms": 4.25,
                    "p99_ms": 31.0,
                    "max_ms": 402.5,
                }
            )
    return rows


def full_run(folder: Path, hours: int = 72) -> Report:
    """Every table that a chart is made of, findings of two jobs, and hostile names all over."""
    write_table(folder, "latency", latency_rows(hours))
    write_table(folder, "latency_slowest", _slowest_rows())
    write_table(folder, "traffic", traffic_rows())
    write_table(folder, "traffic_hours", _traffic_hours(hours))
    _letters_and_capacity(folder)
    write_table(folder, "reconcile", _reconciled_rows())
    _findings(folder)
    return Report(
        "/home/you/<b>relay</b>",
        "2026-01-31T09:30:00.123456Z",
        30.0,
        7.0,
        ["store/relay.acomm"],
        {job.name: job for job in _job_reports(hours)},
    )


def _slowest_rows() -> list[dict[str, Any]]:
    return [
        {
            "message_id": f"1769851800{n:09}-a1b2c3d4",
            "sender": HOSTILE,
            "recipient": QUOTES,
            "stage": "written",
            "ms": 40_000.5 - n,
            "at": AT,
        }
        for n in range(20)
    ]


def _traffic_hours(hours: int) -> list[dict[str, Any]]:
    return [
        {
            "hour": AT.replace(minute=0) - timedelta(hours=hours - n),
            "messages": int(120 + 100 * math.sin(n / 3.8)),
            "bytes": int(99_000 + 80_000 * math.sin(n / 3.8)),
            "deliveries": 130,
            "dead": n % 3,
        }
        for n in range(hours)
    ]


def _reconciled_rows() -> list[dict[str, Any]]:
    return [
        {
            "message_id": f"{n}-a",
            "class": ("missing", "delivered", "orphan")[n % 3],
            "agent": HOSTILE,
            "last_error": QUOTES,
        }
        for n in range(300)
    ]


def _findings(folder: Path) -> None:
    """102 errors of one job, three warnings of another."""
    errors = [
        finding("reconcile.missing", "error", n, status="archived", last_error=QUOTES)
        for n in range(100)
    ]
    extra = [finding("reconcile.orphan", "error", n, store_file=HOSTILE) for n in range(2)]
    slow_hours = [
        {
            **finding("latency.slow_hour", "warning", n, p99_ms="54000.0", stage="read"),
            "message_id": None,
        }
        for n in range(3)
    ]
    write_table(folder / "findings", "job=reconcile", [*errors, *extra], FINDING)
    write_table(folder / "findings", "job=latency", slow_hours, FINDING)


def _job_reports(hours: int) -> list[JobReport]:
    """Each as the tables say, and one that could not run."""
    return [
        JobReport(
            "reconcile",
            4.2,
            counts={"delivered": 100, "orphan": 100, "missing": 100},
            findings={"reconcile.orphan": 2, "reconcile.missing": 100},
            errors=102,
            tables=["reconcile"],
        ),
        JobReport(
            "latency",
            2.1,
            counts={"stages": 4, "hours": hours},
            findings={"latency.slow_hour": 3},
            warnings=3,
            tables=["latency", "latency_slowest"],
        ),
        JobReport(
            "traffic",
            1.4,
            counts={"pairs": 38, "messages": 9_000},
            tables=["traffic", "traffic_hours"],
        ),
        JobReport(
            "dead_letters",
            0.4,
            counts={"letters": 60},
            tables=["dead_letters", "dead_letters_reasons"],
        ),
        JobReport("capacity", 0.3, counts={"days": 30}, tables=["capacity", "capacity_forecast"]),
        JobReport(
            "acks",
            0.1,
            error=f"{HOSTILE} at 12: expected 136 bytes",
            hint="put a backup in its place",
        ),
    ]


def _letters_and_capacity(folder: Path) -> None:
    reasons = ("expired", "ack timeout after # s", QUOTES, None)
    letters = [
        {"message_id": f"{n}", "recipient": "bob", "class": "waiting", "reason": reasons[n % 4]}
        for n in range(60)
    ]
    write_table(folder, "dead_letters", letters)
    tally = [
        {
            "day": None if n == 59 else (AT - timedelta(days=n % 9)).date().isoformat(),
            "reason_kind": reasons[n % 4 if n % 3 else 0],
            "recipient": f"agent{n % 5}",
            "letters": 1 + n % 4,
            "waiting": 0,
        }
        for n in range(60)
    ]
    write_table(folder, "dead_letters_reasons", tally)
    days = [
        {
            "day": date(2026, 1, 1) + timedelta(days=n),
            "messages": 1_000 + n,
            "message_bytes": 812_000,
            "ledger_bytes": 400_000 + 9_000 * n,
            "journal_bytes": 1_200_000 + 40_000 * n,
            "archive_bytes": 3_000_000 + 210_000 * (n % 7),
            "inbox_bytes": 0,
            "total_bytes": 4_600_000 + 90_000 * n,
        }
        for n in range(30)
    ]
    write_table(folder, "capacity", days)
    forecast = {
        "free_bytes": 65 << 30,
        "bytes_per_day": 6_200_000.0,
        "full_in_days": 3_100,
        "full_in_days_kept": None,
    }
    write_table(folder, "capacity_forecast", [forecast])
