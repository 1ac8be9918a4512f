"""`relay audit`: Spark jobs over ledger and store. The relay may be running or not.

Spark is imported inside the command: `relay --help` must not wait for it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from relay.cli.common import home_option, json_option, printable, root_of
from relay.clock import Clock
from relay.errors import RelayError

if TYPE_CHECKING:
    from relay.audit.run import Examples, JobReport

EXIT_INTERRUPTED = 130  # as a shell has it
# What the extra brings, by the name it is imported by.
NEEDED = ("pyspark", "pyarrow", "adbc_driver_sqlite")

RUN_EXAMPLES = """\b
Examples:
  relay audit run
  relay audit run reconcile --out audits/today
  relay audit run --json | jq '.jobs.reconcile.counts'"""

WATCH_EXAMPLES = """\b
Examples:
  relay audit watch
  relay audit watch --once --checkpoint state --out events
  relay audit watch --json | jq .totals.accepted"""


@click.group(epilog="\b\nExamples:\n  relay audit list\n  relay audit run")
def audit() -> None:
    """Account for every message, on Spark.

    Jobs over a snapshot of ledger and store; see docs/audit.md.
    """


@audit.command("list", epilog="\b\nExample:\n  relay audit list")
def list_jobs() -> None:
    """Print each job and what it tells."""
    _need_the_extra()
    from relay.audit.jobs import JOBS

    for job in JOBS.values():
        click.echo(f"{job.name:<12}{job.explains}")


@audit.command(epilog=RUN_EXAMPLES)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@home_option
@click.option("--out", metavar="DIR", help="Keep tables as Parquet, and summary.json, here.")
@click.option("--master", metavar="URL", help="Spark's master; local[*] by default.")
@click.option(
    "--grace",
    "grace_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help="A message is `extra` only when it is older than the snapshot by this; 30 by default.",
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for programs.")
@click.pass_context
def run(
    context: click.Context,
    jobs: tuple[str, ...],
    home: str | None,
    out: str | None,
    master: str | None,
    grace_s: float | None,
    as_json: bool,
) -> None:
    """Run each JOB, or all of them, over a snapshot of ledger and store.

    Nothing in the home is changed and the relay is not held up. Exits 0 when nothing is wrong,
    3 with findings, 1 when a job could not run.
    """
    _need_the_extra()
    from relay.audit.run import Request, run_audit, to_json
    from relay.audit.session import give_way

    given = {"out": out, "master": master, "grace_s": grace_s}
    request = Request(
        home=root_of(context, home),
        jobs=jobs,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    give_way()
    report, examples = run_audit(request, Clock())
    if as_json:
        click.echo(to_json(report))
    else:
        for name, job in report.jobs.items():
            _print_job(job, examples[name])
        if out is not None:
            click.echo(f"Tables and summary.json: {out}")
    for job in report.jobs.values():
        if job.error is not None:
            click.echo(f"{job.verdict}{'; ' + job.hint if job.hint else ''}", err=True)
    context.exit(report.exit_code)


@audit.command(epilog=WATCH_EXAMPLES)
@home_option
@click.option("--checkpoint", metavar="DIR", help="Where it notes how far it is.")
@click.option("--out", metavar="DIR", help="Keep the events as Parquet, here.")
@click.option("--once", is_flag=True, help="End when everything that is there was read.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    default=5.0,
    help="Look so often; 5 by default.",
)
@json_option
@click.pass_context
def watch(
    context: click.Context,
    home: str | None,
    checkpoint: str | None,
    out: str | None,
    once: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Follow the journal: a line for what happened, and one for each finding.

    Goes on where it was, however it ended: each event is counted once. The checkpoint is below
    $XDG_STATE_HOME unless --checkpoint names another folder. Ctrl-C ends it.
    """
    _need_the_extra()
    from relay.audit.session import give_way
    from relay.audit.watch import Tick, WatchRequest, line_of
    from relay.audit.watch import watch as follow

    def tell(tick: Tick) -> None:
        if as_json:
            click.echo(msgspec.json.encode(tick))
            return
        click.echo(line_of(tick))
        for line in tick.findings:
            click.echo(f"  {printable(line)}")
        if tick.more_findings:
            click.echo(f"  and {tick.more_findings:,} more; --out keeps all events")

    request = WatchRequest(root_of(context, home), checkpoint, out, once, interval_s)
    give_way()
    try:
        totals = follow(request, tell)
    except KeyboardInterrupt:  # before there was anything to end
        click.echo("Interrupted", err=True)
        context.exit(EXIT_INTERRUPTED)
    counted = ", ".join(f"{name} {count:,}" for name, count in totals.items())
    click.echo(f"In all: {counted or 'nothing yet'}", err=True)


def _need_the_extra() -> None:
    """Errors: RelayError when a package of the extra is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RelayError(
            f"audits need {', '.join(missing)}: pip install 'agent-relay[audit]'",
            hint="the relay itself runs without it",
        )


def _print_job(job: JobReport, examples: Examples) -> None:
    if job.error is not None:
        return  # said on stderr
    if examples.rows:
        _print_rows(examples.rows)
    else:
        _print_rows([{job.name: name, "count": count} for name, count in job.counts.items()])
    if examples.findings:
        _print_rows([_finding(found) for found in examples.findings])
        left_out = job.errors + job.warnings - len(examples.findings)
        if left_out:
            click.echo(f"  and {left_out:,} more; --out keeps them all")
    click.echo(job.verdict)
    click.echo()


def _finding(found: dict[str, Any]) -> dict[str, Any]:
    """The columns of a finding that fit a terminal."""
    return {
        "severity": found["severity"],
        "check": found["check"].partition(".")[2],
        "message_id": found["message_id"],
        "from > to": f"{found['agent']} > {found['route']}",
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, value in rows[0].items():
        number = isinstance(value, int | float)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*[_cell(value) for value in row.values()])
    Console(highlight=False, markup=False).print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
