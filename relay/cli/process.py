"""``relay up``, ``relay down`` and ``relay status``: the daemon seen from outside."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from typing import Any

import click

from relay.base import fsio, process_info
from relay.base.errors import EXIT_STATE, NotRunning, RelayError
from relay.base.home import LEDGER, LOCK, Home
from relay.base.status_client import SOCKET, StatusReply, ask, silence, socket_path
from relay.cli import outboxes
from relay.cli.common import (
    Amount,
    columns,
    echo_json,
    home_option,
    json_option,
    no_relay,
    open_home,
    printable,
    root_of,
    unread,
    when,
)
from relay.cli.signs import signs_of

START_TIMEOUT_S = 60
POLL_S = 0.02
MOST_NAMED = 5
MOST_CRASH_LOG_BYTES = 1 << 20  # some hundred tracebacks
SAID = (
    *("healthy", "ready", "reasons", "paused", "config_error", "snapshot_age_s", "disk"),
    *("wal_bytes", "wal_state", "tiers_waiting", "admin_trouble", "ledger_damage"),
)


class StartFailed(RelayError):
    """The relay did not come up."""

    hint = "logs/relay.log in the home says more"


@click.command(
    epilog="\b\nExamples:\n  relay up\n  relay up --foreground    # logs to stderr, ends with ^C",
)
@home_option
@click.option("--foreground", is_flag=True, help="Stay, and log to stderr.")
@json_option
@click.pass_context
def up(ctx: click.Context, home: str | None, foreground: bool, as_json: bool) -> None:
    """Start the relay; returns when it is ready.

    A second relay for the same home is refused with the pid of the first.
    """
    root = root_of(ctx, home)
    Home(root).close()  # a missing home is said here, not in a log
    if foreground:
        from relay.daemon.process import run_daemon

        run_daemon(root, log_path=None, ready=lambda: click.echo(f"ready: {root}", err=True))
        return
    pid = _start(root)
    if as_json:
        echo_json({"home": root, "pid": pid})
    else:
        click.echo(f"the relay is up, pid {pid}, home {root}")


def _start(root: str) -> int:
    """Start the daemon in a session of its own and wait until it says that it is ready."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "relay.daemon", "--home", root, "--ready-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=_crash_log(root),
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb") as answer:
        if not select.select([answer], [], [], START_TIMEOUT_S)[0]:
            raise StartFailed(f"pid {process.pid} has not said that it is ready")
        said = answer.read().decode()
    if said.strip() == "ready":
        return process.pid
    code, _, rest = said.partition("\n")
    message, _, hint = rest.partition("\n")
    error = StartFailed(message or "the relay ended before it was ready", hint=hint.strip())
    error.exit_code = int(code) if code.isdigit() else error.exit_code
    raise error


def _crash_log(root: str) -> int:
    """Where a traceback goes that nobody expected; one file before it is kept."""
    fsio.ensure_dir(os.path.join(root, "logs"))
    path = os.path.join(root, "logs", "relay.err")
    if os.path.exists(path) and os.stat(path).st_size > MOST_CRASH_LOG_BYTES:
        fsio.rotate(path, 1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


@click.command(epilog="\b\nExample:\n  relay down && relay up")
@home_option
@click.option(
    "--timeout",
    "timeout_s",
    type=Amount(0, 10**6),
    default=30.0,
    show_default=True,
    help="Seconds to wait.",
)
@json_option
@click.pass_context
def down(ctx: click.Context, home: str | None, timeout_s: float, as_json: bool) -> None:
    """Stop the relay; the batch in hand is finished first."""
    from relay.base.lock_file import lock_holder

    with open_home(ctx, home) as opened:
        pid = lock_holder(opened)
        if pid is None:
            raise NotRunning(f"no relay runs for {opened.root}")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while lock_holder(opened) == pid:
            if time.monotonic() > deadline:
                raise _still_there(pid, timeout_s)
            time.sleep(POLL_S)
    if as_json:
        echo_json({"home": opened.root, "pid": pid})
    else:
        click.echo(f"the relay, pid {pid}, is down")


def _still_there(pid: int, timeout_s: float) -> RelayError:
    text = f"the relay, pid {pid}, has not stopped within {timeout_s:g} s"
    if process_info.is_stopped(pid):
        hint = f"`kill -CONT {pid}` lets it go on, and end"
        return RelayError(f"{text}: it is stopped by a signal", hint=hint)
    hint = f"it may still be writing its store; `kill -9 {pid}` loses nothing"
    return RelayError(text, hint=hint)


@click.command(epilog="\b\nExamples:\n  relay status\n  relay status --json")
@home_option
@json_option
@click.pass_context
def status(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Show whether the relay runs and what it has in hand.

    Exit code 5 when it does not run, or does not answer.
    """
    with open_home(ctx, home) as opened:
        facts = _facts(opened)
        none = no_relay(opened)
    if as_json:
        echo_json(facts)
    else:
        _show(facts, none)
    is_there = facts["running"] and facts["answers"] is not False
    return 0 if is_there else EXIT_STATE


def _facts(home: Home) -> dict[str, Any]:
    """What status says, of the ledger, the process, and the relay itself."""
    from relay.base.lock_file import left, lock_holder, trouble
    from relay.ledger import open_readonly

    pid = lock_holder(home) if os.path.exists(home.path(LOCK)) else None
    gone = left(home)
    with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        counts, last_errors = _counts(db), _last_errors(db)
        state = dict(db.execute("SELECT key, value FROM orchestrator_state").fetchall())
        signs = signs_of(home, db, time.time_ns())
    return {
        "home": home.root,
        "running": pid is not None,
        "pid": pid,
        "trouble": trouble(home) if pid is not None else "",
        "rss_bytes": _memory(pid),
        "started_at": when(int(state["started_at"])) if "started_at" in state else None,
        "starts": int(state.get("epoch", 0)),
        **counts,
        "unread": sum(unread(home).values()),
        "in_outboxes": outboxes.waiting(home) if pid is None else None,  # else `pending` counts
        **_said(home, pid),
        "socket": socket_path(home.root),
        "left": gone and {"pid": gone.pid, "last_sign_at": when(gone.last_sign_ns)},
        "ended": {name: sign.ended_pid for name, sign in signs.items() if sign.ended_pid},
        "last_errors": last_errors,
    }


# Two conditions look redundant: they are those of the partial indexes, without which every row
# ever would be read.
OPEN = "status IN ('pending', 'processing', 'completed')"
WAITING = "state IN ('held', 'staged')"


def _counts(db: sqlite3.Connection) -> dict[str, int]:
    """What the relay has in hand, and how much there is of everything."""

    def count(what: str) -> int:
        return int(db.execute(f"SELECT count(*) FROM {what}").fetchone()[0])

    by_status = f"SELECT status, count(*) FROM messages WHERE {OPEN} GROUP BY 1"
    in_hand = dict(db.execute(by_status).fetchall())
    return {
        "pending": in_hand.get("pending", 0),
        "processing": in_hand.get("processing", 0) + in_hand.get("completed", 0),
        "failed": count("messages WHERE status = 'failed'"),
        "held": count(f"deliveries WHERE {WAITING} AND state = 'held'"),
        "messages": db.execute("SELECT coalesce(max(id), 0) FROM messages").fetchone()[0],
        "agents": count("agents WHERE status = 'active'"),
    }


def _last_errors(db: sqlite3.Connection) -> list[dict[str, str]]:
    """Why messages wait that are to be tried again, the newest first."""
    rows = db.execute(
        "SELECT message_id, status, last_error AS error FROM messages "
        f"WHERE {OPEN} AND status = 'pending' AND last_error IS NOT NULL ORDER BY id DESC LIMIT 5"
    )
    return [dict(row) for row in rows]


def _said(home: Home, pid: int | None) -> dict[str, Any]:
    """What the relay says of itself; nulls where nothing answers. ``answers``: false where it is
    there and says nothing, null where nobody can be asked."""
    answer = ask(home) if pid is not None else StatusReply(None)
    said = answer.status or {}
    answers = True if answer.status is not None else False if answer.is_silent else None
    return {name: said.get(name) for name in SAID} | {"answers": answers}


def _memory(pid: int | None) -> int | None:
    """Resident memory of the daemon in bytes; None where it cannot be asked."""
    if pid is None:
        return None
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def _show(facts: dict[str, Any], none: str) -> None:
    if facts["answers"] is False:
        what, remedy = silence(facts["pid"])
        click.echo(f"the relay, pid {facts['pid']}, {what}; {remedy}")
    elif facts["running"]:
        rss = facts["rss_bytes"]
        memory = f", {rss // 1_000_000} MB" if rss else ""
        click.echo(
            f"the relay runs, pid {facts['pid']}{memory}, since {facts['started_at'] or '-'}"
        )
        if facts["trouble"]:
            text = f"it serves nobody now, and begins again and again: {facts['trouble']}"
            click.echo(printable(text))
        _show_health(facts)
    else:
        click.echo(none)
    click.echo(f"home {facts['home']}")
    header = ("messages", "pending", "processing", "failed", "held", "unread", "agents")
    columns(header, [[facts[name] for name in header]])
    if facts["in_outboxes"]:
        click.echo(f"waiting in outboxes for a relay: {facts['in_outboxes']}")
    if facts["ended"]:
        click.echo(f"process ended: {_named(facts['ended'])}; `relay agents` shows what waits")
    for error in facts["last_errors"]:
        click.echo(printable(f"waits: {error['message_id']}: {error['error']}"))


def _named(ended: dict[str, int]) -> str:
    """The first of them with their pids, and how many more."""
    shown = [f"{name} (pid {pid})" for name, pid in list(ended.items())[:MOST_NAMED]]
    more = f" and {len(ended) - MOST_NAMED} more" if len(ended) > MOST_NAMED else ""
    return ", ".join(shown) + more


def _show_health(facts: dict[str, Any]) -> None:
    """What is not as it should be, and the disk."""
    if facts["healthy"] is None:
        text = f"there is no {SOCKET} that answers: logs/relay.log says why"
        click.echo(f"{text}; mail is not held up by that")
    for reason in facts["reasons"] or ():
        if not facts["trouble"] or facts["trouble"] not in reason:
            click.echo(printable(reason))
    if facts["config_error"]:
        text = f"config.json is not followed, the one before is: {facts['config_error']}"
        click.echo(printable(text))
    for line in facts["tiers_waiting"] or ():
        click.echo(printable(f"the journal's tiers: {line}"))
    if facts["admin_trouble"]:
        click.echo(printable(facts["admin_trouble"]))
    if facts["ledger_damage"]:
        click.echo(printable(facts["ledger_damage"]))
    if facts["wal_state"] == "alert":  # a full one is among the reasons
        text = f"ledger.db-wal has {facts['wal_bytes'] >> 20} MiB, for somebody reads the ledger"
        click.echo(f"{text} and does not end: `relay doctor` says who")
    if os.path.dirname(facts["socket"]) != facts["home"]:
        click.echo(f"health and metrics: {facts['socket']}")
    disk, age_s = facts["disk"], facts["snapshot_age_s"]
    if disk:
        free, used = disk["free_bytes"] >> 20, disk["used_percent"]
        health = "ready" if facts["ready"] else "not ready"
        seen = f", seen {age_s:.0f} s ago" if age_s is not None else ""
        click.echo(f"{health}{seen}; disk {disk['state']}, {used} % used, {free} MiB free")
