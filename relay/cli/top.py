"""``relay top``: agents, queue, rates and pending answers, refreshed in place.

Queue and rates come from the running relay (its socket), agents from the ledger, which can also be
read while no relay is running.
"""

from __future__ import annotations

import contextlib
import os
import select
import sqlite3
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.home import LEDGER, Home
from relay.base.status_client import ask, silence
from relay.cli.agents import AgentAlert, find_alerts
from relay.cli.common import Amount, ago, home_option, not_running_text, open_home, sanitize, unread

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_S = 1.0
COLUMNS = ("AGENT", "STATUS", "OUTBOX", "UNREAD", "OWES", "SEEN", "NOTE")
MAX_NOTE = 40


class AgentLine(NamedTuple):
    """One agent's row."""

    name: str
    status: str
    outbox: int | None  # waiting files; None: cannot be listed
    unread: int | None  # messages in the inbox; likewise
    owes: int | None  # pending acks; None: unknown
    seen_ns: int | None
    note: str | None


class Snapshot(NamedTuple):
    """Everything shown at one time."""

    at_s: float  # monotonic
    now_ns: int
    status: dict[str, Any] | None  # None: no answer
    rows: list[AgentLine]
    silence: str  # why there is no answer


@click.command(epilog="\b\nExamples:\n  relay top\n  relay top --every 5\n  relay top | cat")
@home_option
@click.option("--every", "every_s", type=Amount(0.1), default=REFRESH_S, show_default=True)
@click.pass_context
def top(ctx: click.Context, home: str | None, every_s: float) -> None:
    """Show agents, queue, rates and pending answers, refreshed in place.

    q or ^C ends it. If the output is not a terminal, prints once as plain text.
    """
    from rich.console import Console

    from relay.ledger import open_readonly

    with open_home(ctx, home) as opened:
        db = open_readonly(opened.path(LEDGER))
        try:
            if not (sys.stdout.isatty() and sys.stdin.isatty()):
                console = Console(width=None if sys.stdout.isatty() else 120, no_color=True)
                console.print(render(snapshot(opened, db), None))
                return
            _refresh(opened, db, every_s, Console())
        finally:
            db.close()


def _refresh(home: Home, db: sqlite3.Connection, every_s: float, console: Console) -> None:
    from rich.live import Live

    previous, current = None, snapshot(home, db)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(render(current, None), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(render(current, previous), refresh=True)
            if pressed(every_s) in ("q", "Q", "\x03"):
                return
            previous, current = current, snapshot(home, db)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys without echo; the terminal's settings are restored at the end."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    previous = termios.tcgetattr(fd)

    def pressed(timeout_s: float) -> str:
        if not select.select([fd], [], [], timeout_s)[0]:
            return ""
        return os.read(fd, 1).decode(errors="replace") or "q"  # the terminal has been closed

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, previous)


def snapshot(home: Home, db: sqlite3.Connection) -> Snapshot:
    """Collect what is shown now."""
    answer = ask(home)
    status = answer.status
    owed = (status or {}).get("owed") or {}
    is_known = status is not None and len(owed) >= bool(status.get("owed_acks"))
    in_inboxes = unread(home)
    now = time.time_ns()
    alerts = find_alerts(home, db, now)
    rows = [
        AgentLine(
            one["name"],
            one["status"],
            _waiting(home, one["name"]),
            in_inboxes.get(one["name"]),
            owed.get(one["name"], 0) if is_known else None,
            one["last_seen_at"],
            alerts.get(one["name"], AgentAlert()).text(now, one["note"]),
        )
        for one in db.execute("SELECT name, status, last_seen_at, note FROM agents ORDER BY name")
    ]
    rows.sort(key=lambda row: (-(row.outbox or 0), -(row.unread or 0), row.name))
    why = "" if status is not None else _silence(home, is_silent=answer.is_silent)
    return Snapshot(time.monotonic(), now, status, rows, why)


def _silence(home: Home, *, is_silent: bool) -> str:
    """Explain why no relay answers, and what to do."""
    from relay.base.lock_file import lock_holder

    pid = lock_holder(home)
    if pid is None:
        return not_running_text(home)
    if is_silent:
        return f"the relay, pid {pid}, {'; '.join(silence(pid))}"
    return f"the relay is running, pid {pid}; no health endpoint (see logs/relay.log)"


def _waiting(home: Home, agent: str) -> int | None:
    try:
        with os.scandir(home.path("agents", agent, "outbox")) as entries:
            return sum(entry.name.endswith(".msg") for entry in entries)
    except OSError:
        return None


def render(current: Snapshot, previous: Snapshot | None) -> RenderableType:
    """Render a snapshot; rates need a previous one."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("OUTBOX", "UNREAD", "OWES") else "left")
    for row in current.rows:
        cells = (
            row.name,
            row.status,
            _cell(row.outbox),
            _cell(row.unread),
            _cell(row.owes),
            ago(row.seen_ns, current.now_ns),
            sanitize(row.note, MAX_NOTE) or "",
        )
        table.add_row(*(Text(cell) for cell in cells))
    head = [Text(line) for line in head_lines(current, previous)]
    return Group(*head, Text(""), table)


def head_lines(current: Snapshot, previous: Snapshot | None) -> list[str]:
    """Return the lines above the table."""
    status = current.status
    if status is None:
        return [current.silence, "from the ledger:"]
    word = "ready" if status["ready"] else "NOT READY"
    memory = (status.get("rss_bytes") or 0) // 1_000_000
    age = status.get("snapshot_age_s")
    lines = [
        f"relay {word}, pid {status['pid']}, {memory} MB, seen {age if age is not None else '-'} s "
        f"ago, {len(current.rows)} agents",
        *(sanitize(reason) or "" for reason in status["reasons"]),
    ]
    disk = status.get("disk")
    if disk:
        free = disk["free_bytes"] >> 20
        lines.append(f"disk {disk['state']}: {disk['used_percent']} % used, {free} MiB free")
    if "totals" in status:
        lines += _flow(current, previous)
    return lines


def _flow(current: Snapshot, previous: Snapshot | None) -> list[str]:
    status = current.status or {}
    totals = status["totals"]
    then = ((previous and previous.status) or {}).get("totals")
    seconds = current.at_s - previous.at_s if previous else 0.0

    def rate(name: str) -> str:
        if not then or seconds <= 0:
            return f"{totals[name]}"
        return f"{totals[name]} ({max(0, totals[name] - then[name]) / seconds:.0f}/s)"

    p50, p99 = (_ms(status.get(name)) for name in ("delivery_p50_s", "delivery_p99_s"))
    return [
        f"accepted {rate('accepted')}  delivered {rate('written')}  read {rate('read')}  "
        f"refused {rate('refused')}  dead {rate('dead')}",
        f"queue {status['queue_files']}  oldest {_cell(status['oldest_s'])} s  "
        f"owed {status['owed_acks']}  active {status['active']}  p50 < {p50}  p99 < {p99}",
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:g} ms"


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
