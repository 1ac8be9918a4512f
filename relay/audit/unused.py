"""The tables of a home that has seen nothing, without Spark: a JVM costs more than all the rest.

Only what is fine is judged here. Of a home that has a message, or where anything is wrong or
cannot be read, none are made: the jobs judge it and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from relay.audit.jobs.job import FINDINGS
from relay.audit.jobs.sql_jobs import SQL_JOBS
from relay.audit.lake import Lake, LakeManifest, read_rows
from relay.audit.lake_columns import FINDING, arrow_table

GONE = ("terminated", "retired")  # as agents.sql has them
AWAY = ("inactive", *GONE)
# What a home has before any message: tables of its lake, kinds of files, records of the journal.
_TABLES = {"home", "usage", "limits", "files", "journal_records"}
_REGISTERS = {"ledger_agents", "ledger_orchestrator_state"}
_KINDS = {"store", "journal", "segment"}
_EVENTS = {"Start"}
_SECOND = timedelta(seconds=1)
_NONE = timedelta()
Row = tuple[object, ...]


def tables_of(lake: Lake, made: LakeManifest) -> dict[str, pa.Table] | None:
    """Make the tables of all jobs in SQL, and no finding; None when the home must be judged.

    Errors: RelayError, OSError when the lake cannot be read.
    """
    if {file.table for file in made.files() if file.rows} - _TABLES - _REGISTERS:
        return None
    names = ("home", "files", "journal_records", "ledger_agents")
    found = {name: read_rows(lake, made, name).to_pylist() for name in names}
    (home,), files = found["home"], found["files"]
    if (
        any(part.problems or part.lost for part in made.parts)
        or any(file["problems"] or file["warnings"] or file["day"] for file in files)
        or {file["kind"] for file in files} - _KINDS
        or {record["event"] for record in found["journal_records"]} - _EVENTS
        or (home["follows"] or 0) > (home["journal_end"] or 0)
    ):
        return None
    rows: dict[str, list[Row]] = {
        "integrity": [_verified(file) for file in files],
        "reconcile_journal": [("followed", home["follows"], home["journal_end"], 0, None)],
        "agents": [_life(home["observed_until"], agent) for agent in found["ledger_agents"]],
    }
    schemas = {name: schema for job in SQL_JOBS for name, schema in job.tables.items()}
    schemas[FINDINGS] = FINDING
    return {name: arrow_table(rows.get(name, ()), schema) for name, schema in schemas.items()}


def _verified(file: Mapping[str, Any]) -> Row:
    names = ("day", "item", "size", "sha256", "problems", "warnings")
    return (file["path"], file["kind"], "sound", *(file[name] for name in names))


def _life(until: datetime, agent: Mapping[str, Any]) -> Row:
    """A row of agents that neither wrote nor was written to, and has no process."""
    status, registered_at = agent["status"], agent["registered_at"]
    lived_to = agent["changed_at"] if status in GONE else None
    seen_at = max(registered_at, agent["last_seen_at"] or registered_at)
    return (
        agent["name"],
        "away" if status in AWAY else "present",
        *(agent[name] for name in ("status", "reason", "registered_at")),
        *(agent["last_seen_at"], agent["changed_at"]),
        _seconds(registered_at, lived_to or until),
        *(0, 0, 0, None, 0),
        _seconds(seen_at, until),
        *(None, None, None, None),
        *(0, 0),
        *(None, None, None, None, None),
    )


def _seconds(begin: datetime, end: datetime) -> int:
    """Whole seconds between."""
    return max(end - begin, _NONE) // _SECOND
