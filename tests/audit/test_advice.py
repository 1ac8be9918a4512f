"""Whatever a job can find, the report says what to do about it, with commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from relay.audit.jobs import JOBS
from relay.audit.jobs.sql_files import ERROR, WARNING, FindingClass, Header, read_header
from relay.audit.summary import JobReport, format_count
from relay.cli import cli

DOCS = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
CHECKS = {
    f"{job.name}.{name}": check
    for job in JOBS.values()
    for name, check in job.header.checks.items()
}
ADVICE = " ".join(check.advice for check in CHECKS.values())
COMMANDS = sorted(set(re.findall(r"`relay ([^`]+)`", ADVICE)))


def test_every_class_that_is_a_finding_has_severity_sentence_and_advice() -> None:
    for job in JOBS.values():
        assert job.header.title, job.name
        assert bool(job.header.checks) == bool(job.findings or job.plain), job.name
    for name, check in CHECKS.items():
        assert check.severity in (ERROR, WARNING) and check.sentence and check.advice, name


def test_the_page_of_the_audits_says_what_each_means_and_how_severe_it_is() -> None:
    for name, check in CHECKS.items():
        job, _, of = name.partition(".")
        section = DOCS.split(f"\n## {job}\n")[1].split("\n## ")[0]
        lines = [one for one in section.splitlines() if one.startswith(("|", f"`{name}`"))]
        of_it = [one for one in lines if re.search(rf"\b{of}\b", one)]
        assert any(check.severity in one for one in of_it), (name, of_it)


def test_a_header_is_read_like_that_of_an_own_check() -> None:
    job = """-- What this is: for whom
--
-- lost: error | [message] in no file
--   It was accepted. `relay trace`
--   shows how far it got.
--
-- full: warning | the disk is full
--   Free space.
SELECT 1 -- no: header
"""
    assert read_header(job).title == "What this is: for whom"
    assert read_header(job).checks == {
        "lost": FindingClass(
            ERROR, "[message] in no file", "It was accepted. `relay trace` shows how far it got."
        ),
        "full": FindingClass(WARNING, "the disk is full", "Free space."),
    }
    own = read_header(
        "--   severity: warning\n-- advice: ask\n--   bob\n-- Late commands\nSELECT 1"
    )
    assert (own.title, own.value("severity"), own.value("advice")) == (
        "Late commands",
        "warning",
        "ask bob",
    )
    assert read_header("SELECT 1") == Header("", {})


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_that_it_names_are_there(line: str) -> None:
    command: click.Command = cli
    context = click.Context(cli)
    words = line.split()
    while words and isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None, f"there is no relay {line}"
        command = found
    options = {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert [word for word in words if word.startswith("-") and word not in options] == []


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("delivered", 1_200, "delivered 1,200"),
        ("bytes", 100, "100 bytes"),
        ("free_bytes", 23_823_339_520, "free 22.2 GiB"),
        ("bytes_per_day", 1_572_864, "1.5 MiB per day"),
        ("full_in_days", 1_115, "full_in_days 1,115"),
    ],
)
def test_a_verdict_has_bytes_as_people_read_them(name: str, count: int, words: str) -> None:
    assert format_count(name, count) == words
    assert JobReport("capacity", counts={name: count}).verdict == f"capacity: OK ({words})"


def test_where_not_all_was_read_nothing_is_called_fine() -> None:
    job = JobReport("reconcile", counts={"delivered": 2, "not_checked": 1}, is_partial=True)
    assert job.verdict == "reconcile: not all read (delivered 2, not_checked 1)"
