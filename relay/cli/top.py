"""``relay top``: agents, queue, rates and pending answers, refreshed in place.

Queue and rates come from the running relay (its socket), agents from the ledger, which can also be
read while no relay is running.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.home import LEDGER, Home
from relay.base.process_info import pid_text
from relay.base.status_client import ask, silence
from relay.base.text import format_size
from relay.cli.common import (
    ago,
    command,
    duration,
    not_running_text,
    open_home,
    plural,
    sanitize,
)
from relay.cli.tables import colour, cut, cut_middle, table_lines
from relay.views.agents import AgentAlert, find_alerts, unread
from relay.views.sessions import agent_states

if TYPE_CHECKING:
    import sqlite3

    from relay.ledger.file import Connection

REFRESH_S = 1.0
COLUMNS = ("AGENT", "STATUS", "OUTBOX", "UNREAD", "OWES", "SEEN", "NOTE")
NUMBERS = ("OUTBOX", "UNREAD", "OWES")
LEAST_NAME = 16  # columns for a name that is cut
MAX_NAME = 64
QUIT = ("q", "Q", "\x03")
ONE_KEY = re.compile(r"\x1b[\[O]\d*[A-Za-z~]|.", re.DOTALL)
KEYS = (
    dict.fromkeys(("j", "\x1b[B", "\x1bOB"), "down")
    | dict.fromkeys(("k", "\x1b[A", "\x1bOA"), "up")
    | dict.fromkeys((" ", "\x06", "\x1b[6~"), "page down")
    | dict.fromkeys(("b", "\x02", "\x1b[5~"), "page up")
    | dict.fromkeys(("g", "\x1b[H", "\x1b[1~"), "home")
    | dict.fromkeys(("G", "\x1b[F", "\x1b[4~"), "end")
)
HELP = """\
q           quit
j, k        scroll down and up; also the arrow keys
space, b    a page down and up; also Page Down and Page Up
g, G        the first and the last agent
?           this help

OUTBOX      files not yet taken in by the relay
UNREAD      messages in the inbox
OWES        open answers
SEEN        when the agent last wrote or read a message

accepted and the other totals count since the relay started, with the rate per second.
p50, p99    half and 99 % of the messages are delivered in less time

any key closes this help"""


class AgentLine(NamedTuple):
    """One agent's row."""

    name: str
    status: str
    outbox: int | None  # waiting files; None: cannot be listed
    unread: int | None  # messages in the inbox; likewise
    owes: int | None  # open answers; None: unknown
    seen_ns: int | None
    note: str | None


class Snapshot(NamedTuple):
    """Everything shown at one time."""

    at_s: float  # monotonic
    now_ns: int
    status: dict[str, Any] | None  # None: no answer
    rows: list[AgentLine]
    silence: str  # why there is no answer


@command(json=False, epilog="\b\nExamples:\n  relay top\n  relay top --every 5\n  relay top | cat")
@click.option(
    "--every", "every_s", type=duration(0.1), default=f"{REFRESH_S:g}s", show_default=True
)
def top(ctx: click.Context, home: str | None, every_s: float) -> None:
    """Show agents, queue, rates and pending answers, refreshed in place.

    q or ^C ends it, ? shows all keys. If the output is not a terminal, prints once as plain text.
    """
    from relay.ledger.file import open_current

    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_home(ctx, home))
        db = stack.enter_context(contextlib.closing(open_current(opened.path(LEDGER))))
        is_screen = os.environ.get("TERM", "dumb") != "dumb"
        if is_screen and sys.stdout.isatty() and sys.stdin.isatty():
            stack.enter_context(_screen())
            _refresh(opened, db, every_s)
        else:
            for line in _page(snapshot(opened, db), None):
                click.echo(line)


def _refresh(home: Home, db: Connection, every_s: float) -> None:
    """Draw the screen again after each key, and with new facts when they are due."""
    previous, current, first, is_help = None, snapshot(home, db), 0, False
    due = time.monotonic() + every_s
    while True:
        size = shutil.get_terminal_size()
        lines, last = draw(current, previous, size, first, is_help=is_help)
        below = "\n\x1b[J" if len(lines) < size.lines else ""
        sys.stdout.write("\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + below)
        sys.stdout.flush()
        for key in _pressed(min(REFRESH_S, max(0.0, due - time.monotonic()))):
            if key in QUIT:
                return
            is_help = key == "?" and not is_help
            first = _scrolled(first, last, len(current.rows) - last, KEYS.get(key))
        if time.monotonic() >= due:
            previous, current = current, snapshot(home, db)
            due = time.monotonic() + every_s


def _scrolled(first: int, last: int, page: int, move: str | None) -> int:
    """Return the number of the first agent to show after a key; ``last`` is the greatest."""
    first = min(first, last)
    to = {
        "down": first + 1,
        "up": first - 1,
        "page down": first + page,
        "page up": first - page,
        "home": 0,
        "end": last,
    }
    return max(0, min(last, to.get(move or "", first)))


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Use the terminal's second screen, without cursor and echo; restore all at the end."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    previous = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, previous)


def _pressed(timeout_s: float) -> list[str]:
    """Wait for keys; none if there are none in time."""
    fd = sys.stdin.fileno()
    if not select.select([fd], [], [], timeout_s)[0]:
        return []
    text = os.read(fd, 64).decode(errors="replace") or "q"  # the terminal has been closed
    return ONE_KEY.findall(text)


def snapshot(home: Home, db: Connection) -> Snapshot:
    """Collect what is shown now. Errors: LedgerError, also when it was replaced."""
    db.check_file()
    answer = ask(home)
    status = answer.status
    owed = (status or {}).get("owed") or {}
    in_inboxes = unread(home)
    now = time.time_ns()
    alerts, states = find_alerts(home, db, now), agent_states(home, now)

    def note(row: sqlite3.Row) -> str | None:
        name = row["name"]
        state = states[name].text(0, now) if name in states else None  # OWES says what it owes
        text = alerts.get(name, AgentAlert()).text(now, row["note"])
        return "; ".join(filter(None, (state, text))) or None

    rows = [
        AgentLine(
            agent["name"],
            agent["status"],
            _waiting(home, agent["name"]),
            in_inboxes.get(agent["name"]),
            None if status is None else owed.get(agent["name"], 0),
            agent["last_seen_at"],
            note(agent),
        )
        for agent in db.execute("SELECT name, status, last_seen_at, note FROM agents ORDER BY name")
    ]
    rows.sort(key=lambda row: (-(row.outbox or 0), -(row.unread or 0), row.name))
    why = "" if status is not None else _silence(home, is_silent=answer.is_silent)
    return Snapshot(time.monotonic(), now, status, rows, why)


def _silence(home: Home, *, is_silent: bool) -> str:
    """Explain why no relay answers, and what to do."""
    from relay.base.home import lock_holder

    pid = lock_holder(home)
    if pid is None:
        return not_running_text(home)
    if is_silent:
        return f"the relay, {pid_text(pid)}, {'; '.join(silence(pid))}"
    return f"the relay is running, {pid_text(pid)}; no health endpoint (see logs/relay.log)"


def _waiting(home: Home, agent: str) -> int | None:
    try:
        with os.scandir(home.path("agents", agent, "outbox")) as entries:
            return sum(entry.name.endswith(".msg") for entry in entries)
    except OSError:
        return None


def draw(
    current: Snapshot,
    previous: Snapshot | None,
    size: os.terminal_size,
    first: int,
    *,
    is_help: bool = False,
) -> tuple[list[str], int]:
    """Return the lines of a screen that begins with agent ``first``, and the greatest such number.

    The last line names the keys, and how many agents are above and below.
    """
    if is_help:
        return [cut(line, size.columns) for line in HELP.splitlines()[: size.lines]], 0
    lines = _page(current, previous, size.columns)
    above = len(lines) - len(current.rows)
    room = max(1, size.lines - above - 1)
    last = max(0, len(current.rows) - room)
    first = min(first, last)
    keys = "q quit  ? help"
    if last:
        below = last - first
        keys += f"  j/k scroll: {first} more above, {below} more below"
    shown = lines[above + first : above + first + room]
    return [*lines[:above], *shown, colour(cut(keys, size.columns), bold=True)][: size.lines], last


def _page(current: Snapshot, previous: Snapshot | None, columns: int | None = None) -> list[str]:
    """Return the lines above the table, and the table with all agents."""
    name_width = max(LEAST_NAME, columns // 3) if columns else MAX_NAME
    rows = [
        (
            cut_middle(row.name, name_width),
            row.status,
            row.outbox,
            row.unread,
            row.owes,
            ago(row.seen_ns, current.now_ns),
            row.note or "",
        )
        for row in current.rows
    ]
    head = head_lines(current, previous)
    if columns is not None:
        head = [cut(line, columns) for line in head]
    return [*head, "", *table_lines(COLUMNS, rows, columns, numbers=NUMBERS)]


def head_lines(current: Snapshot, previous: Snapshot | None) -> list[str]:
    """Return the lines above the table."""
    status = current.status
    if status is None:
        return [current.silence, "from the ledger:"]
    word = "ready" if status["ready"] else "NOT READY"
    age = status.get("snapshot_age_s")
    active = sum(row.status == "active" for row in current.rows)
    parts = [
        f"relay {word}",
        f"pid {status['pid']}",
        format_size(status.get("rss_bytes") or 0),
        "not seen yet" if age is None else f"seen {age:.0f} s ago",
        f"{active} active of {plural(len(current.rows), 'agent')}",
    ]
    lines = [", ".join(parts), *(sanitize(reason) or "" for reason in status["reasons"])]
    disk = status.get("disk")
    if disk:
        free = format_size(disk["free_bytes"])
        lines.append(f"disk {disk['state']}: {disk['used_percent']} % used, {free} free")
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
    oldest = "" if status["oldest_s"] is None else f", oldest {status['oldest_s']:.0f} s"
    return [
        f"accepted {rate('accepted')}  delivered {rate('written')}  read {rate('read')}  "
        f"refused {rate('refused')}  dead {rate('dead')}",
        f"queue {plural(status['queue_files'], 'file')}{oldest}  owed {status['open_answers']}  "
        f"live messages {status['active']}  p50 < {p50}  p99 < {p99}",
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:g} ms"
