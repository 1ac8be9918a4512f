"""Requests to the relay or an agent: send a message, wait for the answer, print it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base.clock import local_time
from relay.cli.common import (
    WAIT,
    agent_not_found,
    as_option,
    echo_json,
    home_option,
    json_option,
    name_home,
    root_of,
    sanitize,
)

ATTACH_S = 2.0  # longer copies are announced

if TYPE_CHECKING:
    import sqlite3

    from agent_sdk import Agent, Received
    from relay.base.home import Home


def control_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that waits for the relay's answer."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=WAIT,
        default="10s",
        show_default=True,
        help="Longest wait for the relay's answer.",
    )
    return home_option(as_option(timeout(json_option(click.pass_context(command)))))


def send_command(
    ctx: click.Context,
    action: str,
    fields: Mapping[str, object],
    *,
    home: str | None,
    agent: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Have the relay execute ``action`` and print its answer; fields that are None are omitted.

    Errors: NotRunning before anything is sent; Refused with the text of a nack; Timeout;
    MessageError for a value that is not one line.
    """
    from agent_sdk import MessageError
    from relay.base.names import ORCHESTRATOR

    root = root_of(ctx, home)
    require_relay(root)
    given = {"ACTION": action} | {n: str(v) for n, v in fields.items() if v is not None}
    for name, value in given.items():
        if not value:
            raise MessageError("it is empty: expected one line", header=name)
        if len(value.splitlines()) != 1:
            raise MessageError(f"{value!r} is not one line", header=name)
    body = "\n".join(f"{name}: {value}" for name, value in given.items())
    with open_agent(agent, root) as me:
        answer = request(me, ORCHESTRATOR, body, timeout_s)
    print_answer(answer, as_json)


def print_answer(answer: Received, as_json: bool) -> None:
    """Print what the relay answered."""
    said = answer.body.removeprefix("completed ").strip()
    if as_json:
        echo_json({"id": answer.re, "answer": said})
    else:
        click.echo(sanitize(name_home(said), lines=True))


def request(me: Agent, to: str, body: str | bytes, timeout_s: float, **options: Any) -> Received:
    """Call ``Agent.request``; a Timeout tells the present state of the message.

    Errors: Interrupted with the id of the message, which stays sent, after ^C.
    """
    from agent_sdk import Refused, Timeout
    from relay.base.errors import Interrupted

    sent: list[str] = []
    try:
        return me.request(to, body, timeout_s, on_sent=sent.append, **options)
    except KeyboardInterrupt as exc:
        if not sent:
            raise
        raise Interrupted(
            f"stopped waiting for the answer to {sent[0]}", hint=f"`relay trace {sent[0]}` shows it"
        ) from exc
    except Refused as exc:
        raise Refused(sanitize(str(exc)) or "") from exc  # its text is another agent's
    except Timeout as exc:
        raise Timeout(
            f"no answer to {exc.message_id} within {timeout_s:g} s: "
            f"{_describe_progress(me.home, exc.message_id)}",
            hint=f"`relay trace {exc.message_id}` shows every hop",
        ) from exc


def require_relay(root: str) -> None:
    """Require a running relay. Errors: NotRunning."""
    from relay.base.errors import NotRunning

    if not relay_runs(root):
        raise NotRunning(f"no relay is running for {root}")


def relay_runs(root: str) -> bool:
    """True while a relay runs for this home."""
    from relay.base.home import Home, lock_holder

    with Home(root) as home:
        return lock_holder(home) is not None


def open_agent(agent: str, root: str) -> Agent:
    """Open the agent for one command; a line on stderr says if that created it.

    Errors: those of ``Agent``.
    """
    from agent_sdk import Agent

    is_new = not _has_mailbox(root, agent)
    me = Agent(agent, root, registers=False)
    if is_new:
        click.echo(f"relay: created agent {agent} in {root}", err=True)
    return me


def require_mailbox(root: str, agent: str) -> None:
    """Require an inbox, so that a typo does not create an agent. Errors: InvalidName; NotFound."""
    from relay.base.home import Home

    if not _has_mailbox(root, agent):
        with Home(root) as home:
            raise agent_not_found(home, agent)


def _has_mailbox(root: str, agent: str) -> bool:
    from relay.base.home import Home
    from relay.base.names import check_agent_name

    check_agent_name(agent)
    with Home(root) as home, home.dirs() as dirs:
        try:
            dirs.get("agents", agent, "inbox")
        except FileNotFoundError:
            return False
    return True


@contextlib.contextmanager
def attaching(files: Sequence[str]) -> Iterator[None]:
    """Say after 2 s what takes its time. SIGTERM leaves no unfinished copy, as ^C does."""
    import signal
    import sys
    import threading

    from relay.base.text import plural

    text = f"relay: copying {plural(len(files), 'attachment')} into the home"
    timer = threading.Timer(ATTACH_S, lambda: click.echo(text, err=True))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if files:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def mark_read(root: str, agent: str, message_id: str) -> None:
    """Move an answered message to ``.read``, if it is still in the inbox."""
    from relay.base import fsio
    from relay.base.home import READ, Home
    from relay.base.names import MSG_SUFFIX

    name = message_id + MSG_SUFFIX
    with Home(root) as home, home.dirs() as dirs, contextlib.suppress(FileNotFoundError):
        inbox = dirs.get("agents", agent, "inbox")
        fsio.rename(name, inbox, name, dirs.ensure("agents", agent, "inbox", READ))


def check_has_session(root: str, to: str) -> None:
    """Check that an agent has a session that tells when it is idle. Errors: RelayError."""
    from relay.base.errors import RelayError
    from relay.base.home import Home
    from relay.base.names import LEAD, is_agent_name
    from relay.cli.common import agent_not_found
    from relay.reach.session import NO_SESSION, live_session

    if not is_agent_name(to) or to.lower() == LEAD:
        raise click.UsageError(f"--notify-idle needs the name of one agent, got {to!a}")
    with Home(root) as home:
        if to not in home.agent_names():
            raise agent_not_found(home, to)
    if live_session(root, to) is None:
        raise RelayError(NO_SESSION.format(to))


def check_has_not_arrived(root: str, message_id: str) -> None:
    """Check that no recipient has a message or has read it. Errors: RelayError."""
    from relay.base.errors import RelayError
    from relay.base.home import LEDGER, Home
    from relay.cli import outcomes
    from relay.ledger.file import open_readonly

    with Home(root) as home, contextlib.closing(open_readonly(home.path(LEDGER))) as db:
        found = outcomes.read_deliveries(db, "message_id = ?", message_id)
    texts = [text for one in found if (text := _arrival(one))]
    if texts:
        more = len(texts) - outcomes.MOST_NAMED
        named = texts[: outcomes.MOST_NAMED] + [f"{more} more have it"] * (more > 0)
        raise RelayError("; ".join(named), hint="with --again it is sent all the same")


def _arrival(delivery: Mapping[str, Any]) -> str:
    """When a recipient read a message, or got it; empty if it never did, failed, or gave it up."""
    from relay.cli import outcomes

    name, outcome = delivery["recipient"], outcomes.outcome_of(delivery)
    is_over = delivery["obligation"] == "given_up"
    if is_over or outcome in (outcomes.Outcome.FAILED, outcomes.Outcome.REMOVED):
        return ""
    if outcomes.has_reached(delivery, "read"):
        return f"{name} read it at {local_time(delivery['read_at'] or delivery['acked_at'])}"
    if outcomes.has_reached(delivery, "delivered"):
        return f"{name} has it since {local_time(delivery['written_at'])}, unread"
    return ""


class Progress(NamedTuple):
    """The progress of a message."""

    text: str
    is_there: bool = False  # at the step waited for
    is_over: bool = False  # and will not come there


def watch(home: Home, message_id: str, step: str | None, timeout_s: float) -> Progress:
    """Look at the ledger until a message has come to a step, cannot, or the time is over.

    Without a step: until the relay has recorded what became of it.
    """
    ends_at, pause_s = time.monotonic() + timeout_s, 0.001
    while True:
        progress = _look(home, message_id, step)
        left_s = ends_at - time.monotonic()
        if progress.is_there or progress.is_over or left_s <= 0:
            return progress
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.05)


def _look(home: Home, message_id: str, step: str | None) -> Progress:
    from relay.base.errors import LedgerMissing
    from relay.base.home import LEDGER, lock_holder
    from relay.ledger.file import open_readonly

    try:
        with contextlib.closing(open_readonly(home.path(LEDGER))) as db:
            return _progress_of(db, message_id, step)
    except LedgerMissing:
        if lock_holder(home) is None:
            raise
        return Progress("it is sent; the ledger is gone, and the relay rebuilds it")


def _progress_of(db: sqlite3.Connection, message_id: str, step: str | None) -> Progress:
    from relay.cli import outcomes

    which = "message_id = ?"
    row = db.execute(f"SELECT * FROM messages WHERE {which}", (message_id,)).fetchone()
    if row is None:
        return Progress("the relay has not picked it up yet, it waits in the outbox")
    deliveries = outcomes.read_deliveries(db, which, message_id)
    text = outcomes.progress(row, deliveries, time.time_ns())
    if row["status"] in ("pending", "processing"):
        return Progress(text if deliveries else "the relay has not recorded it yet")
    if step is None:
        return Progress(text, is_there=True)
    reached = [outcomes.has_reached(one, step) for one in deliveries]
    return Progress(text, bool(reached) and all(reached), not reached or False in reached)


def _describe_progress(root: str, message_id: str) -> str:
    """Describe the present state of a message."""
    from relay.base.home import Home, lock_holder

    with Home(root) as home:
        stopped = "" if lock_holder(home) else ", and the relay has stopped"
        return f"{watch(home, message_id, None, 0).text}{stopped}"
