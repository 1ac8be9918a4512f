"""Output of `relay audit run`: a progress bar on a terminal's stderr, verdicts on stdout."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from relay.audit.run import ProgressListener
from relay.audit.summary import Examples, JobReport, is_byte_count
from relay.base.text import format_size
from relay.cli.common import SIGNALS, sanitize

UNLIMITED = 1 << 16  # columns: more than any row takes
FEW_JOBS = 2  # so many are shown with their rows; of more only what is wrong is shown
STATES = {"ok": "green", "warning": "yellow", "error": "red", "failed": "red"}


class Screen(ProgressListener):
    """Prints each verdict as it comes, and shows the running jobs."""

    def __init__(self, *, quiet: bool, brief: bool) -> None:
        self._quiet = quiet  # stdout is for programs
        self._brief = brief
        self._running: list[str] = []
        self._over = self._total = 0
        console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        with _uninterrupted():
            self._bar.start()

    def step_started(self, what: str) -> None:
        """Show the step beside the bar."""
        self._bar.update(self._task, description=what)

    def job_started(self, name: str, of: int) -> None:
        """Show the running jobs beside the bar."""
        self._running.append(name)
        self._total = of
        self._show()

    def _show(self) -> None:
        at = self._over + len(self._running)
        text = f"{', '.join(self._running)} ({at} of {self._total})"
        self._bar.update(self._task, description=text, completed=self._over, total=self._total)

    def job_finished(self, report: JobReport, examples: Examples) -> None:
        """Print the verdict, below its rows."""
        self._over += 1
        if report.name in self._running:  # else it was not started
            self._running.remove(report.name)
        if self._running:
            self._show()
        # The bar is drawn on the same terminal: it is removed while printing.
        with _uninterrupted():
            self._bar.stop()
        if report.error is not None:
            hint = f"; {report.hint}" if report.hint else ""
            click.echo(sanitize(f"{report.verdict}{hint}"), err=True)
        elif not self._quiet:
            print_job(report, examples, brief=self._brief)
        sys.stdout.flush()
        with _uninterrupted():
            self._bar.start()

    def run_finished(self) -> None:
        """Remove the bar."""
        with _uninterrupted():
            self._bar.stop()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a signal wait for the end of the block: half of a stop leaves the bar on its line, and
    the terminal without a cursor."""
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    held = {number: usual for number, usual in handlers.items() if callable(usual)}
    try:
        for number in held:
            signal.signal(number, note)
        yield
    finally:
        for number, usual in held.items():
            signal.signal(number, usual)
        if came:
            signal.raise_signal(came[0])


def print_job(job: JobReport, examples: Examples, *, brief: bool) -> None:
    """A job's rows and verdict; when ``brief``, the findings alone and the verdict."""
    if not brief and examples.rows:
        print_rows(examples.rows)
    elif not brief:
        print_rows([{job.name: name, "count": count} for name, count in job.counts.items()])
    if examples.findings:
        print_rows([_finding(found) for found in examples.findings])
        left_out = job.errors + job.warnings - len(examples.findings)
        if left_out:
            click.echo(f"  and {left_out:,} more; --out keeps them all")
    state = "error" if job.errors else "warning" if job.warnings or job.is_partial else "ok"
    name, _, outcome = str(sanitize(job.verdict)).partition(": ")
    click.echo(f"{click.style(name, bold=True)}: {click.style(outcome, fg=STATES[state])}")
    if not brief or examples.findings:
        click.echo()


def _finding(found: dict[str, Any]) -> dict[str, Any]:
    """The columns of a finding that fit a terminal."""
    return {
        "severity": found["severity"],
        "check": found["check"].partition(".")[2],
        "message_id": found["message_id"],
        "from > to": _route(found["agent"], found["route"]) or found["path"],
    }


def _route(agent: str | None, route: str | None) -> str | None:
    """Format sender > recipient; of an agent, that alone."""
    if agent is None or route is None:
        return agent or route
    return f"{agent} > {route}"


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Plain columns, numbers at the right; into a pipe or a file as wide as their cells."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, value in rows[0].items():
        number = isinstance(value, int | float)
        whole = name == "message_id"  # it is copied into `relay trace`
        justify: Literal["right", "left"] = "right" if number else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*[_cell(name, value) for name, value in row.items()])
    is_fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if is_fitted else UNLIMITED
    Console(highlight=False, markup=False, width=width).print(table)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and is_byte_count(name):
        return format_size(value)
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(sanitize(str(value)))
