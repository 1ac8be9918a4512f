"""Jobs in SQL, as files: a header of comments, and behind it the statements. Needs no Spark.

    -- The same message recorded, archived, delivered or sent twice
    --
    -- archived_twice: error | [message] in two archives of the store
    --   Two archives of the store have the message: one of them was copied or restored. Run
    --   `relay check` on both and remove the copy.

The first line says what the job is for. A job's keys are the classes that are findings: each with
its severity, the sentence that says it (the noun in brackets is counted) and, indented, what to do.
An own check has one class, and the keys ``severity`` and ``advice``.

    -- view: stages       what statements below it read: computed once, where that is more than once
    -- table: latency     a table of the job
    -- findings: slow     rows that are findings; other columns are its detail
    -- findings: class    the same of several classes: the column `class` has them

A statement reads the views above it, those of `shared.sql`, and the tables of a lake by their
names, as `ledger_messages`; TABLE_before has the rows of its table in an earlier run. No two files
give a view the same name. One of findings reads the job's tables as written. Names with a colon, as
`:recent_since_us`, are times of the run, `:lost` is how many parts of store and journal could not
be read, and `CASE class :severities END` has the severity of a class. The same files run in another
engine: tests compare the two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

import pyarrow as pa

from relay.audit.lake_columns import RESULTS, TABLES
from relay.audit.snapshot import HomeSnapshot
from relay.base.clock import NS_PER_US

ERROR, WARNING = "error", "warning"
SEVERITY, ADVICE = "severity", "advice"  # keys of an own check
VIEW, TABLE, FINDINGS = "view", "table", "findings"
SHARED = "shared"  # the file of views that several jobs read
BEFORE, LOST, SEVERITIES = "_before", "lost", "severities"
_KEY = re.compile(r"--(\s*)([a-z_]+)\s*:\s*(.*)")
_JOB = re.compile(r"[a-z_]+")
_MORE_INDENT = 2  # characters before what belongs to the key above
_MORE = re.compile(rf"--\s{{{_MORE_INDENT},}}(\S.*)")
_FROM = re.compile(r"\b(?:FROM|JOIN)\s+(\w+)")
_COMMENT = re.compile(r"--.*")
_PART = re.compile(r"^-- (view|table|findings): (\w+)$", re.MULTILINE)
_COLON = re.compile(r":([a-z_]+)")


class HeaderKey(NamedTuple):
    """A key's value, and the indented lines after it, joined."""

    value: str
    text: str = ""


class FindingClass(NamedTuple):
    """A class of finding."""

    severity: str
    sentence: str  # "[message] in two archives of the store"
    advice: str  # commands in backquotes


class Header(NamedTuple):
    """The header of a file; ``entries`` by key."""

    title: str
    entries: Mapping[str, HeaderKey]

    def value(self, key: str) -> str:
        """The value of a key with the lines after it; empty without one."""
        return " ".join(filter(None, self.entries.get(key, ("", ""))))

    @property
    def checks(self) -> dict[str, FindingClass]:
        """The classes of a job that are findings."""
        split = {name: (entry.value.partition("|"), entry) for name, entry in self.entries.items()}
        return {
            name: FindingClass(severity.strip(), said.strip(), entry.text)
            for name, ((severity, _, said), entry) in split.items()
        }


def read_header(sql: str) -> Header:
    """Parse the comments before the statement; the title is empty if there is none."""
    title, key = "", ""
    entries: dict[str, HeaderKey] = {}
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        match = _KEY.fullmatch(line.rstrip())
        # A title may have a colon, and so may the lines after a key.
        if match and (match[2] in (SEVERITY, ADVICE) or (title and len(match[1]) < _MORE_INDENT)):
            key = match[2]
            entries.setdefault(key, HeaderKey(match[3]))
        elif (match := _MORE.fullmatch(line.rstrip())) and key:
            entry = entries[key]
            entries[key] = entry._replace(text=f"{entry.text} {match[1]}".lstrip())
        else:
            title, key = title or line.lstrip("-").strip(), ""
    return Header(title, entries)


@cache
def job_header(name: str) -> Header:
    """The header of a job of the audits. Errors: FileNotFoundError."""
    return read_header(_text(name))


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(f"{name}.sql").read_text("utf-8")


def check_of(check: str) -> FindingClass | None:
    """The class of a finding, ``job.class``; None for an own check, or one of a newer relay."""
    job, _, name = check.partition(".")
    if not _JOB.fullmatch(job):  # a table may say anything
        return None
    try:
        return job_header(job).checks.get(name)
    except FileNotFoundError:
        return None


def severities(job: str) -> dict[str, str]:
    """The severity of each class of a job that is a finding."""
    return {name: check.severity for name, check in job_header(job).checks.items()}


class Statement(NamedTuple):
    """A SELECT of a job's file."""

    kind: str  # VIEW, TABLE, FINDINGS
    name: str
    sql: str

    @property
    def reads(self) -> Counter[str]:
        """The views and tables that it reads, and how often."""
        return Counter(_FROM.findall(_COMMENT.sub("", self.sql)))


@cache
def statements(job: str) -> tuple[Statement, ...]:
    """The statements of a job's file, in order."""
    _, *parts = _PART.split(_text(job))
    each = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(Statement(kind, name, sql.strip()) for kind, name, sql in each)


def tables_of(job: str) -> dict[str, pa.Schema]:
    """The tables of a job and their columns, in order."""
    made = [statement.name for statement in statements(job) if statement.kind == TABLE]
    return {name: RESULTS[name] for name in made}


def reads_kept(job: str) -> bool:
    """True when a job reads store or journal, where rows may be missing; shared.sql does not."""
    read = {table for statement in statements(job) for table in statement.reads}
    return any(table.startswith(("store_", "journal_")) for table in read & TABLES.keys())


def times(snapshot: HomeSnapshot) -> dict[str, int]:
    """The times of a run that statements name: Unix microseconds, and one duration."""
    return {
        "grace_us": snapshot.grace_ns // NS_PER_US,
        "observed_until_us": snapshot.observed_until_ns // NS_PER_US,
        "recent_since_us": (snapshot.observed_until_ns - snapshot.recent_ns) // NS_PER_US,
        "snapshot_us": snapshot.ledger.taken_ns // NS_PER_US,
    }


def with_values(job: str, sql: str, values: Mapping[str, object]) -> str:
    """Put values in the place of names with a colon."""
    whens = [f"WHEN '{name}' THEN '{said}'" for name, said in severities(job).items()]
    known = {name: f"({value})" for name, value in values.items()}
    known[SEVERITIES] = " ".join(whens)
    return _COLON.sub(lambda match: known[match[1]], sql)
