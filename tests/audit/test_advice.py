"""Whatever a job can find, the report says what to do about it, with commands that there are."""

from __future__ import annotations

import re

import click
import pytest

from relay.audit.jobs import JOBS
from relay.audit.report.advice import ADVICE, SENTENCES
from relay.audit.summary import JobReport, format_count
from relay.cli import cli

CHECKS = {f"{job.name}.{check}" for job in JOBS.values() for check in job.checks}
COMMANDS = sorted(set(re.findall(r"`relay ([^`]+)`", " ".join(ADVICE.values()))))


def test_every_check_of_every_job_has_its_advice_and_no_other_has_one() -> None:
    assert [job.name for job in JOBS.values() if bool(job.checks) != bool(job.findings)] == []
    assert set(ADVICE) == set(SENTENCES) == CHECKS


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
