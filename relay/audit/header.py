"""Headers of audits: the comments at the beginning of a job's, or an own check's, SQL file.

    -- The same message recorded, archived, delivered or sent twice
    --
    -- archived_twice: error | [message] in two archives of the store
    --   Two archives of the store have the message: one of them was copied or restored. Run
    --   `relay check` on both and remove the copy.

The first line says what the job is for. A job's keys are the classes that are findings: each with
its severity, the sentence that says it (the noun in brackets is counted) and, indented, what to do.
An own check has one class, and the keys ``severity`` and ``advice``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

ERROR, WARNING = "error", "warning"
SEVERITY, ADVICE = "severity", "advice"  # keys of an own check
_KEY = re.compile(r"--(\s*)([a-z_]+)\s*:\s*(.*)")
_JOB = re.compile(r"[a-z_]+")
_MORE_INDENT = 2  # characters before what belongs to the key above
_MORE = re.compile(rf"--\s{{{_MORE_INDENT},}}(\S.*)")


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
    """The header of a job of the audits."""
    return read_header(resources.files("relay.audit.jobs").joinpath(f"{name}.sql").read_text())


def check_of(check: str) -> FindingClass | None:
    """The class of a finding, ``job.class``; None for an own check, or one of a newer relay."""
    job, _, name = check.partition(".")
    if not _JOB.fullmatch(job):  # a table may say anything
        return None
    try:
        return job_header(job).checks.get(name)
    except FileNotFoundError:
        return None
