"""Requests to the relay or an agent: send a message, wait for the answer, print it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from relay.base import fsio, outcomes
from relay.base.clock import local_time
from relay.base.errors import (
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_STATE,
    EXIT_TIMEOUT,
    Interrupted,
    NotRunning,
    RelayError,
)
from relay.base.home import LEDGER, READ, Home, lock_holder
from relay.base.names import LEAD, MSG_SUFFIX, ORCHESTRATOR, check_agent_name, is_agent_name
from relay.base.outcomes import Progress, Wait, parse_wait
from relay.base.text import plural
from relay.cli.common import (
    WAIT,
    Read,
    as_option,
    echo_body,
    echo_received,
    home_option,
    json_option,
    name_home,
    not_running_text,
    printing_taken,
    root_of,
    sanitize,
    say,
)
from relay.views.names import agent_not_found

WORD = Wait("", 2.0)  # of the relay about a message; it needs some milliseconds
ATTACH_S = 2.0  # longer copies are announced

if TYPE_CHECKING:
    import sqlite3

    from agent_sdk import Agent, Received
    from relay.base.home import Home


WAIT_FOR = Read("word[=time]", parse_wait)


wait_option = click.option(
    "--wait",
    default=WORD,
    type=WAIT_FOR,
    help="none, taken, delivered, read, done or answer, at most so long, as in read=10s; a time "
    "alone is for the answer.",
)


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
    with contextlib.suppress(RelayError), Home(root) as opened:
        until = WORD._replace(word="taken")  # the next command shows what this one did
        watch(opened, answer.re or "", until)
    print_answer(answer, as_json)


def print_answer(answer: Received, as_json: bool) -> None:
    """Print what the relay answered."""
    text = answer.body.removeprefix("completed ").strip()
    say(name_home(text), {"id": answer.re, "answer": text}, as_json)


def request(me: Agent, to: str, body: str | bytes, timeout_s: float, **options: Any) -> Received:
    """Call ``Agent.request``. Errors: as ``_answering``."""
    sent: list[str] = []
    with _answering(me, sent, timeout_s):
        return me.request(to, body, timeout_s, on_sent=sent.append, **options)


def answer_to(me: Agent, message_id: str, timeout_s: float, **options: Any) -> Received:
    """Take the answer to a message of this agent. Errors: as ``_answering``."""
    with _answering(me, [message_id], timeout_s):
        found = me.wait(message_id, f"answer={timeout_s * 1000:.0f}ms", **options)
        assert found is not None
        return found


@contextlib.contextmanager
def _answering(me: Agent, sent: Sequence[str], timeout_s: float) -> Iterator[None]:
    """Wait for an answer; a Timeout tells the present state of the message.

    Errors: Interrupted with the id of the message, which stays sent, after ^C.
    """
    from agent_sdk import Refused, Timeout

    try:
        yield
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
    if not relay_runs(root):
        raise NotRunning(f"no relay is running for {root}")


def relay_runs(root: str) -> bool:
    """True while a relay runs for this home."""
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
    if not _has_mailbox(root, agent):
        with Home(root) as home:
            raise agent_not_found(home, agent)


def _has_mailbox(root: str, agent: str) -> bool:
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
    name = message_id + MSG_SUFFIX
    with Home(root) as home, home.dirs() as dirs, contextlib.suppress(FileNotFoundError):
        inbox = dirs.get("agents", agent, "inbox")
        fsio.rename(name, inbox, name, dirs.ensure("agents", agent, "inbox", READ))


def check_has_session(root: str, to: str) -> None:
    """Check that an agent has a session that tells when it is idle. Errors: RelayError."""
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
    with Home(root) as home, contextlib.closing(_ledger(home)) as db:
        found = outcomes.read_deliveries(db, "message_id = ?", message_id)
    texts = [text for item in found if (text := _arrival(item))]
    if texts:
        more = len(texts) - outcomes.MOST_NAMED
        named = texts[: outcomes.MOST_NAMED] + [f"{more} more have it"] * (more > 0)
        raise RelayError("; ".join(named), hint="with --again it is sent all the same")


def _arrival(delivery: Mapping[str, Any]) -> str:
    """When a recipient read a message, or got it; empty if it never did, failed, or gave it up."""
    name, outcome = delivery["recipient"], outcomes.outcome_of(delivery)
    is_over = delivery["obligation"] == "given_up"
    if is_over or outcome in (outcomes.Outcome.FAILED, outcomes.Outcome.REMOVED):
        return ""
    if outcomes.has_reached(delivery, "read"):
        return f"{name} read it at {local_time(delivery['read_at'] or delivery['acked_at'])}"
    if outcomes.has_reached(delivery, "delivered"):
        return f"{name} has it since {local_time(delivery['written_at'])}, unread"
    return ""


def watch(home: Home, message_id: str, wait: Wait) -> Progress:
    """Watch the ledger for the progress of a message. Errors: LedgerError."""
    return outcomes.watch(home, lambda: _ledger(home), message_id, wait)


def recorded_answer(home: Home, message_id: str) -> str:
    """The id of the answer that the ledger has; empty if it has none."""
    with contextlib.closing(_ledger(home)) as db:
        for delivery in outcomes.read_deliveries(db, "message_id = ?", message_id):
            if outcomes.has_reached(delivery, "answer") and delivery["answer_id"]:
                return str(delivery["answer_id"])
    return ""


def echo_earlier(before: str) -> None:
    """Say which answer an agent has given before; ``before`` is empty for the first."""
    if before:
        click.echo(sanitize(f"relay: {before}"), err=True)


def _ledger(home: Home) -> sqlite3.Connection:
    from relay.ledger.file import open_current

    return open_current(home.path(LEDGER))


def _describe_progress(root: str, message_id: str) -> str:
    """Describe the present state of a message."""
    now = Wait("taken", 0)
    with Home(root) as home:
        stopped = "" if lock_holder(home) is not None else ", and the relay has stopped"
        return f"{watch(home, message_id, now).text}{stopped}"


def wait_for_step(home: Home, message_id: str, wait: Wait) -> int:
    progress = watch(home, message_id, wait)
    if progress.is_there or progress.is_over:
        echo_progress(progress)
        return EXIT_OK if progress.is_there else EXIT_REFUSED
    if lock_holder(home) is None:
        echo_progress(Progress(f"{progress.text}; {not_running_text(home)}"))
        return EXIT_STATE
    echo_progress(progress)
    return EXIT_TIMEOUT


def echo_progress(progress: Progress) -> None:
    click.echo(sanitize(name_home(f"relay: {progress.text}")), err=True)


def show_answer(message: Received, as_json: bool) -> None:
    with printing_taken(message):
        echo_received(message) if as_json else echo_body(message.body)


def show_progress(message: Received) -> None:
    text = sanitize(" ".join(message.body.split())) or "received"
    click.echo(f"relay: {message.sender}: {text}", err=True)
