"""`relay audit`: Spark jobs over ledger and store, and a digest of the ledger without Spark.

The relay may be running or not. Spark is imported by the commands that start it.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import click
import msgspec

from relay.audit import lower_priority
from relay.base import fsio
from relay.base.clock import Clock, elapsed, local_time
from relay.base.errors import EXIT_FAILED, EXIT_FINDINGS, RelayError
from relay.base.home import LEDGER
from relay.base.text import json_visible, visible
from relay.cli.common import (
    SIGNALS,
    TIME,
    check_no_home_file,
    command,
    duration,
    echo_json,
    not_empty,
    open_home,
    root_of,
    sanitize,
    with_iso_times,
)
from relay.cli.digest_lines import Line, digest_lines
from relay.cli.tables import colour, cut, screen_columns, wide_option
from relay.views.digest import make_digest

# Packages of the extra, by import name.
EXTRACT_NEEDS = ("pyarrow", "adbc_driver_sqlite")
NEEDED = ("pyspark", "pyarrow", "adbc_driver_sqlite", "jinja2")

MAX_GRACE_S = 366 * 86_400  # a year
RESEND_S = 0.05  # after a finalizer that swallowed a signal
EXIT_SIGNALLED = 128  # plus the signal's number, as in shells
DAY_S = 86_400
SHOWN_LOST = 20  # lines
MAX_DAYS = 36_525  # a century: nanoseconds still fit into 64 bits
LABEL = 10  # columns

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>:root{{color-scheme:light dark}}body{{font:1em/1.5 system-ui,sans-serif;margin:2em}}
th{{text-align:left;vertical-align:top;padding-right:1em}}td{{overflow-wrap:anywhere}}</style>
<h1>{title}</h1>
<table>
{rows}
</table>
</html>
"""


RUN_EXAMPLES = """\b
Examples:
  relay audit run
  relay audit run reconcile --out audits/today
  relay audit run security --recent 366
  relay audit run own --checks checks
  relay audit run --json | jq '.jobs.reconcile.counts'"""

EXTRACT_EXAMPLES = """\b
Examples:
  relay audit extract --lake lake
  relay audit extract --lake s3://bucket/lake --json
  relay audit extract --homes '/srv/*/relay' --lake lake"""

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
        text = sanitize(f"{job.name:<13} {job.header.title}") or ""
        columns = screen_columns()
        click.echo(click.wrap_text(text, columns, "", " " * 14) if columns else text)


@command(of=audit, json=False, epilog=RUN_EXAMPLES)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@click.option(
    "--out",
    metavar="DIR",
    callback=not_empty,
    help="Write tables, summary.json and report.html here.",
)
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
    "--strict",
    is_flag=True,
    help="A job that needs a damaged file does not run; else the rest is read, and it is named.",
)
@click.option(
    "--checks",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Run your own checks in DIR/*.sql as well, see docs/audit.md.",
)
@click.option(
    "--lake",
    metavar="DIR|s3://…",
    callback=not_empty,
    help="Keep what is read in this lake: the next run reads what is new, and some of the old.",
)
@click.option(
    "--full",
    is_flag=True,
    help="Read everything again, also what the lake has; else an eighth of old files.",
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
    findings, 1 when a job could not run, or something could not be read.
    """
    _require_extra()
    from relay.audit.run import RunRequest, run_audit
    from relay.audit.summary import to_json, unread_text
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
    if not as_json and (unread := unread_text(report)):
        click.echo(f"old files: {unread}; --full reads all")
    for line in report.lost[:SHOWN_LOST]:
        click.echo(sanitize(f"not read: {line}"), err=True)
    if report.lost:
        more = len(report.lost) - SHOWN_LOST
        others = f"and {more:,} more, which --json names; " if more > 0 else ""
        click.echo(f"{others}the rest was read; put copies from a backup in their place", err=True)
    context.exit(report.exit_code)


@command(of=audit, epilog=EXTRACT_EXAMPLES)
@click.option(
    "--lake",
    "url",
    metavar="DIR|s3://…",
    required=True,
    callback=not_empty,
    help="The lake's folder.",
)
@click.option("--homes", metavar="FILE|GLOB", help="Several homes: a file with one a line, a glob.")
@click.option("--name", metavar="NAME", help="Name of the home in the lake; its machine and path.")
@click.option("--strict", is_flag=True, help="Stop at a damaged file; the lake stays as it was.")
@click.option("--full", is_flag=True, help="Read again what the lake has; else an eighth of it.")
def extract(
    context: click.Context,
    home: str | None,
    url: str,
    homes: str | None,
    name: str | None,
    strict: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Bring the Parquet files of a home in a lake up to date.

    What the lake has is not read again. Queries of the lake need no relay: docs/audit.md has its
    tables. A damaged file is named, and the rest is read; then it exits with 1.
    """
    _require_extra(EXTRACT_NEEDS)
    from relay.audit.extract import extract as bring
    from relay.audit.extract import homes_in

    if homes is not None and (home is not None or name is not None):
        raise click.UsageError("--homes goes without --home and --name")
    roots = homes_in(homes) if homes is not None else [root_of(context, home)]
    lower_priority()
    damaged = False
    with exit_on_signal("the extract was interrupted; the lake is as it was"), _never_exit_3():
        for root in roots:
            try:
                done = bring(root, url, Clock(), name=name or "", strict=strict, full=full)
            except RelayError as exc:
                if homes is None:
                    raise
                damaged = True  # and the next home is read
                line = f"{root}: {exc}" + (f"; {exc.hint}" if exc.hint else "")
                click.echo(f"relay: {sanitize(line)}", err=True)
                continue
            if as_json:
                click.echo(json_visible(msgspec.json.encode(done).decode()))
            else:
                click.echo(sanitize(str(done)))
            for line in done.problems:
                damaged = True
                click.echo(f"relay: {sanitize(line)}", err=True)
    if damaged:
        context.exit(EXIT_FAILED)


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
@click.option(
    "--checkpoint",
    metavar="DIR",
    callback=not_empty,
    help="Folder for the position in the journal.",
)
@click.option("--out", metavar="DIR", callback=not_empty, help="Write the events as Parquet here.")
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
    _require_extra(EXTRACT_NEEDS)
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


def _require_extra(needed: Sequence[str] | None = None) -> None:
    """Errors: RelayError when a package of the extra is not installed."""
    missing = [name for name in needed or NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RelayError(
            f"audits need {', '.join(missing)}",
            hint="`pip install '.[audit]'` in the source of agent-relay; the relay runs without",
        )


@contextlib.contextmanager
def exit_on_signal(line: str) -> Iterator[None]:
    """End the block on Ctrl-C, SIGTERM or a closed terminal like on any other failure.

    So Spark is stopped and copies are removed; ``line`` goes to stderr and the process exits with
    130, 143 or 129. A process that ignores SIGHUP (nohup) continues.
    """
    came: list[int] = []  # empty after ^C, for which PySpark has a handler of its own

    def interrupt(number: int, _: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    # py4j logs a traceback where it was interrupted.
    muted = logging.NullHandler()
    logging.getLogger().addHandler(muted)
    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        with _resend_swallowed(came):
            yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal is closed
            click.echo(f"relay: {line}", err=True)
        sys.exit(EXIT_SIGNALLED + _first(came))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.getLogger().removeHandler(muted)


def _first(came: Sequence[int]) -> int:
    return came[0] if came else signal.SIGINT


@contextlib.contextmanager
def _resend_swallowed(came: Sequence[int]) -> Iterator[None]:
    """Send a signal again that arrived in a finalizer, where Python ignores exceptions.

    py4j's finalizers call the JVM and wait for it: an audit spends some time there.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            usual(unraisable)
            return
        while True:
            try:
                threading.Timer(RESEND_S, os.kill, (os.getpid(), _first(came))).start()
                return
            except KeyboardInterrupt:
                pass  # on a busy machine it comes before this returns, where it is ignored as well

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


@command(
    of=audit,
    epilog="""\b
Examples:
  relay audit digest
  relay audit digest --since 8h
  relay audit digest --since 2026-11-20 --out digest.html
  relay audit digest --json | jq .counts""",
)
@click.option(
    "--since",
    "since_ns",
    type=TIME,
    default="yesterday",
    show_default=True,
    help="10m ago, 14:05, '2026-11-20 18:30', or yesterday: from its beginning.",
)
@click.option(
    "--out",
    metavar="FILE",
    callback=not_empty,
    help="Write a page for a browser here, e.g. digest.html.",
)
@wide_option
def digest(
    ctx: click.Context, home: str | None, since_ns: int, out: str | None, wide: bool, as_json: bool
) -> None:
    """Show in ten lines what agents did, and what is open.

    Who worked, what was asked and answered, the answers that are owed, the slowest deliveries,
    what was given up and what was refused; and the same numbers of as much time before. It reads
    the ledger only, and starts no Spark.
    """
    now_ns = time.time_ns()
    if since_ns > now_ns:
        raise click.BadParameter("it is in the future", param_hint="--since")
    with open_home(ctx, home) as opened:
        made = make_digest(opened.path(LEDGER), since_ns, now_ns)
    lines = digest_lines(made)
    title = f"since {local_time(since_ns, now_ns)} ({elapsed(now_ns - since_ns)}), {opened.root}"
    if out is not None:
        fsio.write_atomic(check_no_home_file(out), _page(title, lines))
    if as_json:
        echo_json({"home": opened.root, **with_iso_times(msgspec.to_builtins(made))})
        return
    columns = screen_columns(wide=wide)
    for label, text in [("digest", title), *lines]:
        shown = visible(text) if columns is None else cut(visible(text), columns - LABEL)
        click.echo(f"{colour(label.ljust(LABEL), bold=True)}{shown}")


def _page(title: str, lines: list[Line]) -> bytes:
    """Make the page: it needs nothing but itself, and whatever agents wrote is text."""
    rows = [
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(visible(text))}</td></tr>"
        for label, text in lines
    ]
    page = PAGE.format(title=html.escape(visible(title)), rows="\n".join(rows))
    return page.encode("utf-8", "replace")
