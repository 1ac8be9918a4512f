"""`relay audit`: Spark jobs over ledger and store. The relay may be running or not.

Spark is imported inside the command: `relay --help` must not wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import click

from relay.base.clock import Clock
from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, RelayError
from relay.base.text import json_visible
from relay.cli.audit_ending import exit_on_signal
from relay.cli.common import Amount, home_option, json_option, printable, root_of

# What the extra brings, by the name it is imported by.
NEEDED = ("pyspark", "pyarrow", "adbc_driver_sqlite", "jinja2", "matplotlib")

MOST_GRACE_S = 366 * 86_400  # whoever judges nothing that is younger than a year
MOST_DAYS = 36_525  # a century: nanoseconds still fit into 64 bits


RUN_EXAMPLES = """\b
Examples:
  relay audit run
  relay audit run reconcile --out audits/today
  relay audit run security --recent 366
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
    _require_extra()
    from relay.audit.jobs import JOBS

    for job in JOBS.values():
        click.echo(f"{job.name:<14}{job.explains}")


@audit.command(epilog=RUN_EXAMPLES)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@home_option
@click.option("--out", metavar="DIR", help="Keep tables, summary.json and report.html here.")
@click.option("--master", metavar="URL", help="Spark's master; local[*] by default.")
@click.option(
    "--grace",
    "grace_s",
    metavar="SECONDS",
    type=Amount(min=0, max=MOST_GRACE_S),
    help="A message is an `orphan` only when it is older than the snapshot by this; 30 by default.",
)
@click.option(
    "--recent",
    "recent_days",
    metavar="DAYS",
    type=Amount(min=0, max=MOST_DAYS),
    help="Incidents older than this are counted and no findings any more; 7 by default.",
)
@click.option(
    "--compare",
    metavar="DIR",
    help="--out of an earlier run: a day that is not what it was then is a finding.",
)
@click.option(
    "--permissive",
    is_flag=True,
    help="Pass over damaged files and read the rest; the job integrity runs, and names them.",
)
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for programs.")
@click.pass_context
def run(
    context: click.Context,
    /,
    jobs: tuple[str, ...],
    home: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run each JOB, or all of them, over a snapshot of ledger and store.

    Nothing in the home is changed and the relay is not held up. Exits 0 when nothing is wrong,
    3 with findings, 1 when a job could not run.
    """
    _require_extra()
    from relay.audit.run import RunRequest, run_audit, to_json
    from relay.audit.session import lower_priority
    from relay.cli.audit_screen import FEW_JOBS, Screen

    given = {name: value for name, value in options.items() if value is not None}
    request = RunRequest(home=root_of(context, home), jobs=jobs, **given)
    lower_priority()
    out = request.out
    kept = f"; {out} is as it was" if out is not None else ""
    with exit_on_signal(f"the audit was interrupted{kept}"), _never_exit_3():
        brief = not 0 < len(jobs) <= FEW_JOBS
        report, _ = run_audit(request, Clock(), Screen(quiet=as_json, brief=brief))
    if as_json:
        click.echo(json_visible(to_json(report).decode()))
    elif out is not None:
        click.echo(f"{os.path.join(out, 'report.html')}, and the tables beside it")
    context.exit(report.exit_code)


@audit.command("report", epilog="\b\nExample:\n  relay audit report audits/today")
@click.argument("folder", metavar="DIR")
def make_report(folder: str) -> None:
    """Make report.html again from what `run --out DIR` has written.

    Needs no Spark: only the tables of DIR are read.
    """
    _require_extra()
    from relay.audit.output import write_page

    with _never_exit_3():
        click.echo(write_page(folder))


@contextlib.contextmanager
def _never_exit_3() -> Iterator[None]:
    """What cannot be read ends with 1: 3 says that jobs ran, and found something."""
    try:
        yield
    except RelayError as exc:
        if exc.exit_code == EXIT_FINDINGS:
            exc.exit_code = EXIT_FAILED
        raise


@audit.command(epilog=WATCH_EXAMPLES)
@home_option
@click.option("--checkpoint", metavar="DIR", help="Where it notes how far it is.")
@click.option("--out", metavar="DIR", help="Keep the events as Parquet, here.")
@click.option("--once", is_flag=True, help="End when everything that is there was read.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=Amount(min=0.1, max=86_400),
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
    _require_extra()
    import msgspec

    from relay.audit.session import lower_priority
    from relay.audit.watch import Tick, WatchRequest, line_of
    from relay.audit.watch import watch as follow

    def tell(tick: Tick) -> None:
        if as_json:
            click.echo(json_visible(msgspec.json.encode(tick).decode()))
            return
        click.echo(printable(line_of(tick)))
        for line in tick.findings:
            click.echo(f"  {printable(line)}")
        if tick.more_findings:
            click.echo(f"  and {tick.more_findings:,} more; --out keeps all events")

    request = WatchRequest(root_of(context, home), checkpoint, out, once, interval_s)
    lower_priority()
    with exit_on_signal("the watch was interrupted before it began"), _never_exit_3():
        totals = follow(request, tell)
    counted = ", ".join(f"{name} {count:,}" for name, count in totals.items())
    click.echo(f"In all: {counted or 'nothing yet'}", err=True)


def _require_extra() -> None:
    """Errors: RelayError when a package of the extra is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RelayError(
            f"audits need {', '.join(missing)}: pip install 'agent-relay[audit]'",
            hint="the relay itself runs without it",
        )
