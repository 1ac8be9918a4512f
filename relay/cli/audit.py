"""`relay audit`: Spark jobs over ledger and store. The relay may be running or not.

Spark is imported inside the command: `relay --help` must not wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

from relay.base.clock import Clock
from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, RelayError
from relay.base.text import json_visible
from relay.cli.audit_digest import digest
from relay.cli.common import command, duration, root_of, sanitize

# Packages of the extra, by import name.
NEEDED = ("pyspark", "pyarrow", "adbc_driver_sqlite", "jinja2")

MAX_GRACE_S = 366 * 86_400  # a year
RESEND_S = 0.05  # after a finalizer that swallowed a signal
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
EXIT_SIGNALLED = 128  # plus the signal's number, as in shells
DAY_S = 86_400
MAX_DAYS = 36_525  # a century: nanoseconds still fit into 64 bits


RUN_EXAMPLES = """\b
Examples:
  relay audit run
  relay audit run reconcile --out audits/today
  relay audit run security --recent 366
  relay audit run own --checks checks
  relay audit run --json | jq '.jobs.reconcile.counts'"""

WATCH_EXAMPLES = """\b
Examples:
  relay audit watch
  relay audit watch --once --checkpoint state --out events
  relay audit watch --json | jq .totals.accepted"""


@click.group(epilog="\b\nExamples:\n  relay audit list\n  relay audit run")
def audit() -> None:
    """Account for every message, on Spark.

    The jobs read a snapshot of ledger and store; see docs/audit.md.
    """


audit.add_command(digest)


@command(
    "list",
    of=audit,
    json=False,
    epilog="""\b
Examples:
  relay audit list
  relay audit list --home DIR""",
)
def list_jobs(context: click.Context, home: str | None) -> None:
    """List the jobs, with what each reports, and the home's own checks."""
    _require_extra()
    from relay.audit import own_checks
    from relay.audit.jobs import JOBS

    for job in (*JOBS.values(), *own_checks.find(root_of(context, home)).values()):
        click.echo(sanitize(f"{job.name:<13} {job.description}"))


@command(of=audit, json=False, epilog=RUN_EXAMPLES)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option("--out", metavar="DIR", help="Write tables, summary.json and report.html here.")
@click.option("--master", metavar="URL", help="Spark master; local[*] by default.")
@click.option(
    "--grace",
    "grace_s",
    type=duration(0, MAX_GRACE_S),
    help="A message is an orphan only if it is this much older than the snapshot; 30s by default.",
)
@click.option(
    "--recent",
    "recent_days",
    metavar="DAYS",
    type=duration(0, MAX_DAYS * DAY_S, bare="d"),
    callback=lambda _ctx, _param, seconds: seconds and seconds / DAY_S,
    help="Older incidents are counted, but are not findings; 7 by default.",
)
@click.option(
    "--compare",
    metavar="DIR",
    help="--out of an earlier run: a day that has changed since is a finding.",
)
@click.option(
    "--permissive",
    is_flag=True,
    help="Skip damaged files and read the rest; the job integrity runs, and names them.",
)
@click.option(
    "--checks",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Run your own checks in DIR/*.sql as well, see docs/audit.md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, for programs.")
def run(
    context: click.Context,
    /,
    jobs: tuple[str, ...],
    home: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run each JOB, or all of them, over a snapshot of ledger and store.

    Checks of your own, audit.d/NAME.sql in the home, are jobs named own.NAME; `own` is all of them.
    The home is not changed, and a running relay is not blocked. Exits 0 without findings, 3 with
    findings, 1 when a job could not run.
    """
    _require_extra()
    from relay.audit.run import RunRequest, run_audit, to_json
    from relay.audit.session import lower_priority
    from relay.cli.audit_screen import FEW_JOBS, Screen

    given = {name: value for name, value in options.items() if value is not None}
    request = RunRequest(home=root_of(context, home), jobs=jobs, **given)
    lower_priority()
    out = request.out
    unchanged = f"; {out} is unchanged" if out is not None else ""
    with exit_on_signal(f"the audit was interrupted{unchanged}"), _never_exit_3():
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
    """Make report.html again from the tables of `run --out DIR`.

    This does not start Spark.
    """
    _require_extra()
    from relay.audit.output import write_page

    with _never_exit_3():
        click.echo(write_page(folder))


@contextlib.contextmanager
def _never_exit_3() -> Iterator[None]:
    """Exit 1 for unreadable files: 3 means that jobs ran, with findings."""
    try:
        yield
    except RelayError as exc:
        if exc.exit_code == EXIT_FINDINGS:
            exc.exit_code = EXIT_FAILED
        raise


@command(of=audit, epilog=WATCH_EXAMPLES)
@click.option("--checkpoint", metavar="DIR", help="Folder for the position in the journal.")
@click.option("--out", metavar="DIR", help="Write the events as Parquet here.")
@click.option("--once", is_flag=True, help="Exit when all present events were read.")
@click.option(
    "--interval",
    "interval_s",
    type=duration(0.1, 86_400),
    default="5s",
    help="Polling interval; 5s by default.",
)
def watch(
    context: click.Context,
    home: str | None,
    checkpoint: str | None,
    out: str | None,
    once: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Follow the journal: print a line for each batch of events, and one for each finding.

    A new watch continues where the last one ended, so each event is counted once. The checkpoint
    is below $XDG_STATE_HOME unless --checkpoint names another folder. Ctrl-C ends it.
    """
    _require_extra()
    import msgspec

    from relay.audit.session import lower_priority
    from relay.audit.watch import WatchedBatch, WatchRequest, format_batch
    from relay.audit.watch import watch as follow

    def show(batch: WatchedBatch) -> None:
        if as_json:
            click.echo(json_visible(msgspec.json.encode(batch).decode()))
            return
        click.echo(sanitize(format_batch(batch)))
        for line in batch.findings:
            click.echo(f"  {sanitize(line)}")
        if batch.more_findings:
            click.echo(f"  and {batch.more_findings:,} more; --out keeps all events")

    request = WatchRequest(root_of(context, home), checkpoint, out, once, interval_s)
    lower_priority()
    with exit_on_signal("the watch was interrupted before it began"), _never_exit_3():
        totals = follow(request, show)
    counted = ", ".join(f"{name} {count:,}" for name, count in totals.items())
    click.echo(f"In all: {counted or 'nothing yet'}", err=True)


def _require_extra() -> None:
    """Errors: RelayError when a package of the extra is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RelayError(
            f"audits need {', '.join(missing)}",
            hint="`pip install '.[audit]'` in the source of agent-relay; the relay runs without",
        )


class _Signalled(BaseException):
    """A signal arrived; the argument is its number."""


@contextlib.contextmanager
def exit_on_signal(line: str) -> Iterator[None]:
    """End the block on Ctrl-C, SIGTERM or a closed terminal like on any other failure.

    So Spark is stopped and copies are removed; ``line`` goes to stderr and the process exits with
    130, 143 or 129. A process that ignores SIGHUP (nohup) continues.
    """
    # py4j logs a traceback where it was interrupted.
    muted = logging.NullHandler()
    logging.getLogger().addHandler(muted)
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _raise_signalled) for number in handled}
    ended_by = None
    try:
        with _resend_swallowed_signals():
            yield
    except KeyboardInterrupt:
        ended_by = signal.SIGINT
    except _Signalled as exc:
        (ended_by,) = exc.args
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.getLogger().removeHandler(muted)
    if ended_by is not None:
        with contextlib.suppress(OSError):  # the terminal is closed
            click.echo(f"relay: {line}", err=True)
        sys.exit(EXIT_SIGNALLED + ended_by)


@contextlib.contextmanager
def _resend_swallowed_signals() -> Iterator[None]:
    """Send a signal again that arrived in a finalizer, where Python ignores exceptions.

    py4j's finalizers call the JVM and wait for it: an audit spends some time there.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        number = signal.SIGINT
        if isinstance(unraisable.exc_value, _Signalled):
            (number,) = unraisable.exc_value.args
        elif not isinstance(unraisable.exc_value, KeyboardInterrupt):
            usual(unraisable)
            return
        threading.Timer(RESEND_S, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _raise_signalled(number: int, _: FrameType | None) -> None:
    raise _Signalled(number)
