"""Asking and waiting: what the commands do that need an answer, and what they say without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from relay.cli.common import (
    Amount,
    as_option,
    echo_json,
    home_option,
    json_option,
    printable,
    root_of,
)

if TYPE_CHECKING:
    from agent_sdk import Agent, Received
    from relay.base.home import Home

# A flush is due after 5 s; one that a large store or a slow disk holds up is not waited for.
FLUSH_TIMEOUT_S = 15.0
POLL_S = 0.05
MOST_NAMED = 3  # recipients named one by one; more are counted


def control_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command that asks the relay and waits for its answer."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=Amount(0, 10**6, min_open=True),
        default=10.0,
        show_default=True,
        help="Seconds to wait for the relay's answer.",
    )
    return home_option(as_option(timeout(json_option(click.pass_context(command)))))


def order(
    ctx: click.Context,
    action: str,
    fields: Mapping[str, object],
    *,
    home: str | None,
    agent: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Have the relay do ``action``, and print its answer; fields that are None are left out.

    Errors: NotRunning, at once and with nothing sent; Refused with the answer of a nack;
    Timeout; MessageError for a value that is not one line.
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
    with acting_as(agent, root) as me:
        answer = request(me, ORCHESTRATOR, body, timeout_s)
    show_answer(answer, as_json)


def show_answer(answer: Received, as_json: bool) -> None:
    """What the relay has done, in its own words."""
    said = answer.body.removeprefix("completed ").strip()
    if as_json:
        echo_json({"id": answer.re, "answer": said})
    else:
        click.echo(printable(said))


def request(me: Agent, to: str, body: str | bytes, timeout_s: float, **options: Any) -> Received:
    """``Agent.request``; its Timeout says what became of the message meanwhile.

    Who gives up waiting is told what was sent: it stays sent.
    """
    from agent_sdk import Refused, Timeout
    from relay.base.errors import EXIT_INTERRUPTED

    sent: list[str] = []
    try:
        return me.request(to, body, timeout_s, on_sent=sent.append, **options)
    except KeyboardInterrupt as exc:
        if not sent:
            raise
        one = sent[0]
        line = f"relay: {one} was sent, its answer not waited for; `relay trace {one}` shows it"
        click.echo(f"\n{line}", err=True)  # behind the terminal's ^C
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from exc
    except Refused as exc:
        raise Refused(printable(str(exc)) or "") from exc  # its text is another agent's
    except Timeout as exc:
        raise Timeout(
            f"no answer to {exc.message_id} within {timeout_s:g} s: "
            f"{_standing(me.home, exc.message_id)}",
            hint=f"`relay trace {exc.message_id}` shows every hop",
        ) from exc


def require_relay(root: str) -> None:
    """Errors: NotRunning, so that nobody waits for an answer that cannot come."""
    from relay.base.errors import NotRunning
    from relay.base.home import Home
    from relay.base.lock_file import lock_holder

    with Home(root) as home:
        if lock_holder(home) is None:
            raise NotRunning(f"no relay runs for {root}")


def acting_as(agent: str, root: str) -> Agent:
    """The agent for one command; where that makes it, stderr says so: it may have been a slip.

    Errors: those of ``Agent``.
    """
    from agent_sdk import Agent

    is_new = not _has_mailbox(root, agent)
    me = Agent(agent, root, registers=False)
    if is_new:
        click.echo(f"relay: {agent} is a new agent of {root}", err=True)
    return me


def require_mailbox(root: str, agent: str) -> None:
    """Errors: InvalidName; NotFound for an agent without an inbox: a slip must not make one."""
    from relay.base.errors import NotFound

    if not _has_mailbox(root, agent):
        raise NotFound(
            f"there is no agent {agent} in {root}",
            hint=f"`relay agents` lists those there are, `relay register {agent}` makes one",
        )


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


def check_agent(ctx: click.Context, home: str | None, name: str | None) -> None:
    """Errors: NotFound for a name, where one is given, that no agent has."""
    from relay.base.errors import NotFound
    from relay.base.home import Home

    if name is not None:
        with Home(root_of(ctx, home)) as opened:
            if name not in opened.agent_inodes():
                raise NotFound(
                    f"there is no agent {name!a}",
                    hint=f"`relay agents` lists those there are, `relay register {name}` makes one",
                )


def wait_for_flush(home: Home) -> None:
    """Wait until the store's file holds what the relay was told to do before now.

    So who changes a channel and looks at it sees the change. Says so on stderr when the relay
    has not written it within 15 s.
    """
    from relay.base.home import LEDGER
    from relay.base.lock_file import lock_holder
    from relay.base.names import ORCHESTRATOR
    from relay.ledger import open_readonly

    db = open_readonly(home.path(LEDGER))
    newest = db.execute("SELECT max(id) FROM messages").fetchone()[0]
    waits = (
        "SELECT 1 FROM messages WHERE status IN ('pending', 'processing', 'completed') "
        "AND status = 'processing' AND target = ? AND id <= ? LIMIT 1"
    )
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while lock_holder(home) is not None and db.execute(waits, (ORCHESTRATOR, newest)).fetchone():
        if time.monotonic() > deadline:
            click.echo("relay: the store's file lacks the newest changes", err=True)
            break
        time.sleep(POLL_S)
    db.close()


def duration_s(text: str, option: str) -> float:
    """Seconds of ``30s``, ``1m``, ``2h`` or ``60000`` (ms). Errors: BadParameter."""
    from relay.base.message import parse_duration_ms

    try:
        return parse_duration_ms(text) / 1000
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint=option) from exc


def _standing(root: str, message_id: str) -> str:
    """What the ledger knows of a message, in a few words."""
    from relay.base.home import LEDGER, Home
    from relay.base.lock_file import lock_holder
    from relay.ledger import open_readonly, wording

    with Home(root) as home:
        stopped = "" if lock_holder(home) else ", and no relay runs any more"
        db = open_readonly(home.path(LEDGER))
    try:
        query = "SELECT * FROM {} WHERE message_id = ?"
        row = db.execute(query.format("messages"), (message_id,)).fetchone()
        found = db.execute(query.format("deliveries"), (message_id,)).fetchall()
    finally:
        db.close()
    deliveries = [wording.fields(one) for one in found]
    if row is None:
        return f"the relay has not taken it{stopped}"
    if len(deliveries) > MOST_NAMED:
        return f"{wording.short(row, deliveries)}{stopped}"
    kind, now = row["message_type"], time.time_ns()
    known = [wording.phrase(one, kind, now) for one in deliveries]
    return f"{', '.join(known) or 'nobody was to get it'}{stopped}"
